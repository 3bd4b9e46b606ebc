"""The program as its user meets it: runs, folders, checkpoints, settings, mistakes; and the seams of `train`."""
import contextlib
import copy
import json
import os
import re
import runpy
import shutil
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
import transformers

import envs
import plots
import ragen_mini as rm
from conftest import ROOT, equal, random_llama, rows_of, save, untimed

SMALL = ("--device cpu --prompts 2 --rollouts 4 --update-size 4 --iterations 2 --max-new-tokens 20 --max-turns 3 "
         "--lr 1e-3 --eval-prompts 4").split()


def settings(out, *flags, model="tiny"):
    return rm.parse_config(["--model", str(model), *SMALL, "--out", str(out), *map(str, flags)])


def run(out, *flags, model="tiny", **seams):  # one run with the real command line, in this process -> rows of its log
    rows, _ = rm.train(settings(out, *flags, model=model), **seams)
    return rows


@pytest.fixture(scope="module")
def bandit(tmp_path_factory):
    """A finished run, with its picture; its rows."""
    out = tmp_path_factory.mktemp("bandit") / "run"
    return out, run(out, "--env", "bandit", "--algo", "grpo", "--eval-prompts", 32)


# --------------------------------------------------------------------------------------------------------- runs
def test_same_seed_same_log(tmp_path):
    small = "--iterations 1 --max-turns 2 --eval-every 0 --algo grpo".split()
    logs = [untimed(run(tmp_path / str(i), "--seed", seed, *small)) for i, seed in enumerate((5, 5, 6))]
    assert logs[0] == logs[1] != logs[2]


def test_no_step_remembers_the_gradient_of_the_one_before(cfg, tok, llama):
    """Two steps, against the same two steps of which the second one is made by a copy that never had a gradient."""
    def models_of(policy):
        policy = copy.deepcopy(policy)
        policy.zero_grad(set_to_none=True)
        return rm.Models(policy, None, None, torch.optim.SGD(policy.parameters(), lr=1.0), tok)

    def step(models, rows):
        rm.add_gradients(batch, rows, models, cfg)
        rm.take_step(models)
    one = models_of(llama)
    batch = rm.collate(rm.rollout(one, [300, 301, 302, 303], 1, rm.replace(cfg, env="bandit"), 0), "cpu")
    batch["adv"] = torch.tensor([[1.0], [-2.0], [3.0], [-4.0]]) * batch["mask"]
    step(one, [0, 1])
    other = models_of(one.policy)
    step(one, [2, 3])
    assert not equal(dict(one.policy.state_dict()), dict(other.policy.state_dict()))
    step(other, [2, 3])
    assert equal(dict(one.policy.state_dict()), dict(other.policy.state_dict()))


def test_an_evaluation_makes_no_files(tmp_path, monkeypatch):
    cfg = settings("", "--env", "bandit", "--eval-only")
    monkeypatch.chdir(tmp_path)
    columns, _ = rm.evaluate(0, rm.load_models(cfg), cfg)
    assert list(columns["eval"]) == ["bandit"] and not list(tmp_path.iterdir())


def test_evaluation_in_parts_draws_anew_for_each(cfg, monkeypatch):
    """The same numbers for every part would give levels of different parts the same luck."""
    monkeypatch.setattr(rm, "EVALUATED_AT_ONCE", 3)
    cfg = replace(cfg, env="bandit", algo="grpo", eval_prompts=8, temperature=0.9)
    parts = []

    def spy(models, seeds, N, cfg, sampling_seed):
        parts.append((list(seeds), N, sampling_seed, cfg.temperature))
        return rm.rollout(models, seeds, N, cfg, sampling_seed)
    rm.evaluate(0, rm.load_models(cfg), cfg, spy)
    seeds, N, sampling_seeds, temperatures = zip(*parts)
    assert sum(seeds, []) == list(range(8)) and len(set(sampling_seeds)) == len(parts) == 3
    assert set(N) == {1} and set(temperatures) == {rm.EVAL_TEMPERATURE} and cfg.temperature == 0.9


def test_training_levels_are_no_evaluation_levels(tmp_path, monkeypatch):
    """Nearly all seeds are made evaluation seeds: training draws none of them, and no seed twice."""
    monkeypatch.setattr(envs, "EVAL_SEEDS", range(2 ** 31 - 10 ** 6))
    drawn = []

    def spy(models, seeds, *rest):
        drawn.append(list(seeds))
        return rm.rollout(models, seeds, *rest)
    flags = "--env bandit --prompts 20 --rollouts 2 --max-turns 1 --max-new-tokens 1"
    run(tmp_path / "run", *flags.split(), rollout=spy)
    before, first, second, after = drawn
    assert before == after == [0, 1, 2, 3]
    assert len({*first, *second}) == 40 and min(first + second) >= 2 ** 31 - 10 ** 6


class UpPays(envs.Bandit):
    """A toy: every "Up" in an answer pays, whatever else it says."""

    def __init__(self):
        super().__init__("Teacher", "Engineer")

    def bonus(self, turn):
        return turn["answer"].count("Up") / 6


def toy(out, model, algo):
    return rm.Config(env=UpPays, model=model, device="cpu", algo=algo, out=str(out), prompts=4, rollouts=16,
                     iterations=24, max_turns=1, max_new_tokens=6, lr=1e-2, critic_lr=5e-3, eval_every=0, entropy_coef=0.02)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_learning_on_a_toy(tmp_path, random_folder, algo):
    """An executable claim: where the word 'Up' pays, a random model learns to write it.
    Not by a lucky seed: when this was written, the gain was 0.95 or more with each of six seeds and both methods."""
    rows, _ = rm.train(toy(tmp_path / "run", random_folder, algo))
    assert rows[-1]["reward"] > rows[1]["reward"] + 0.5, (algo, rows[1]["reward"], rows[-1]["reward"])
    assert json.loads((tmp_path / "run/config.json").read_text())["env"] == "UpPays"


# -------------------------------------------------------------------------------------------------------- seams
def test_train_gives_back_rows_and_models_and_changes_nothing_else(tmp_path, folder):
    cfg = settings(tmp_path / "run", *"--env bandit --algo grpo --iterations 1".split(), model=folder)
    before = asdict(cfg)
    rows, models = rm.train(cfg)
    assert asdict(cfg) == before and rows == rows_of(tmp_path / "run")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoint")
    assert equal(dict(saved.state_dict()), dict(models.policy.state_dict()))


def test_the_critic_begins_as_the_policy(tmp_path, folder):
    """But for its head, which has one output."""
    models = rm.load_models(settings(tmp_path / "run", "--env", "bandit", "--algo", "ppo", model=folder))
    assert equal(dict(models.critic.model.state_dict()), dict(models.policy.model.state_dict()))
    assert models.critic.num_labels == 1 and models.critic.model is not models.policy.model


def test_learn_gets_another_seed_in_every_iteration_and_slice(tmp_path, folder):
    seeds = []
    run(tmp_path / "run", *"--env bandit --online-k 2 --iterations 2 --eval-every 0".split(), model=folder,
        learn=lambda trajs, models, cfg, seed: seeds.append(seed) or ({}, []))
    assert len(seeds) == len(set(seeds)) == 4


def test_given_models_are_trained_in_place_and_give_the_same_run(tmp_path, folder):
    flags = "--env bandit --algo grpo --iterations 1 --eval-every 0".split()
    cfg = settings(tmp_path / "run", *flags, model=folder)
    given = rm.load_models(cfg)
    start = copy.deepcopy(given.policy.state_dict())
    rows, models = rm.train(cfg, given)
    assert models is given and not equal(dict(start), dict(given.policy.state_dict()))
    again, _ = rm.train(cfg)
    assert untimed(again) == untimed(rows) and (tmp_path / "run-2").is_dir()


def test_the_success_rate_reaches_play_and_yardsticks(folder):
    cfg = settings("", *"--success-rate 0.5 --max-actions-per-turn 3 --max-turns 5 --algo grpo --kl-coef 0".split(), model=folder)
    models = rm.load_models(cfg)
    traj = rm.begin(300, 0, 0, models.tok, cfg)
    assert traj.env.success_rate == 0.5
    told = rm.message(traj.env, cfg, 10)
    assert "up to 3 actions at once" in told and "You have 10 actions left." in told
    columns, _ = rm.evaluate(0, models, cfg)
    truth = envs.mean_yardsticks("frozenlake", 10, range(4), 0.5)[:, -1].tolist()
    assert columns["yardsticks"]["frozenlake"] == pytest.approx(truth)


def test_only_true_ends_a_run(tmp_path, folder):
    """Or what equals it, as NumPy's True and 1 do. A `watch` that returns its row does not."""
    for answer, last in ((dict, 2), (lambda row: np.bool_(row["iteration"] == 1), 1), (lambda row: np.bool_(False), 2),
                         (lambda row: 0.5, 2), (lambda row: row["iteration"] == 0, 0)):
        rows = run(tmp_path / f"run{last}", *"--env bandit --prompts 2 --rollouts 2 --iterations 2 --eval-every 0".split(), model=folder,
                   watch=lambda row, *_: answer(row))
        assert rows[-1]["iteration"] == last


def test_settings_that_were_changed_by_hand_count(tmp_path, bandit):
    """Name, weights and world are those of the settings when the run begins."""
    cfg = settings("", *"--env frozenlake --iterations 1 --prompts 2 --rollouts 2 --eval-every 0".split())
    cfg.env, cfg.model, cfg.out = "bandit", str(bandit[0]), ""
    with contextlib.chdir(tmp_path):
        _, models = rm.train(cfg, learn=lambda *_: ({}, []))
    assert (tmp_path / "runs/bandit-ppo-seed0").is_dir()
    found = transformers.AutoModelForCausalLM.from_pretrained(bandit[0] / "checkpoint").state_dict()
    assert equal(dict(models.policy.state_dict()), dict(found))


def test_another_rollout_plays_training_and_evaluation(tmp_path, folder, tok, monkeypatch):
    """One that writes by script: every answer is valid, and no model is asked."""
    monkeypatch.setattr(rm, "check_ratios", lambda *rest: None)
    def scripted(models, seeds, N, cfg, sampling_seed):
        trajs = []
        for group, seed in enumerate(seeds):
            for episode in range(N):
                traj = rm.begin(seed, episode, group, models.tok, cfg)
                arm = traj.env.actions[episode % 2]
                traj.append(models.tok(f"</think><answer>{arm}</answer><|im_end|>").input_ids, sampled=True, logp=-1.0)
                rm.take_turn(traj, models.tok, cfg, [models.tok.eos_token_id])
                trajs.append(traj)
        return trajs
    rows = run(tmp_path / "run", *"--env bandit --algo grpo --iterations 1".split(), model=folder, rollout=scripted,
               learn=lambda *_: ({}, []))
    assert rows[0]["eval"] == rows[1]["eval"] == {"bandit": 0.0}, "episode 0 pulls the sure arm"
    assert rows[1]["valid"] == 1 and rows[1]["success"] == 0.5 and rows[1]["updates"] == 0


@pytest.mark.parametrize("spoilt", ["dropout", "scaled logits"])
def test_a_model_whose_updates_read_other_numbers_is_refused_in_the_first_iteration(tmp_path, tok, folder, spoilt):
    cfg = settings(tmp_path / "run", *"--env frozenlake --algo grpo --kl-coef 0".split(), model=folder)
    policy = random_llama(len(tok), attention_dropout=0.1 * (spoilt == "dropout"))
    if spoilt == "dropout":
        policy.train()
    else:
        policy.lm_head.register_forward_hook(lambda *_: None)  # harmless: what follows is behind the output layer
        policy.register_forward_hook(lambda _, __, output: output | {"logits": output.logits / 4})
    models = rm.Models(policy, None, None, None, tok)
    uneven = iter(range(10 ** 6))

    def play(*args):  # a random model earns the same in all its episodes: then nothing would be compared
        trajs = rm.rollout(*args)
        for traj in trajs:
            traj.reward[-1] += next(uneven) % 3
        return trajs
    with pytest.raises(envs.UserError, match="differ by") as error:
        rm.train(cfg, models, rollout=play)
    assert "\n" not in str(error.value) and rows_of(tmp_path / "run") == []
    cfg = replace(cfg, eval_every=0, out=str(tmp_path / "unevaluated"))
    with pytest.raises(envs.UserError, match="differ by"):
        rm.train(cfg, models, rollout=play)
    assert len(rows_of(cfg.out)) == 1, "no row of it is logged"


def test_small_models_on_a_cpu_use_one_thread(cfg, tmp_path, tok):
    before = torch.get_num_threads()
    large = save(tmp_path, random_llama(90_000, tie_word_embeddings=True), tok)  # 11.5 MB
    try:
        torch.set_num_threads(2)
        rm.load_models(rm.Config(model=large, device="cpu", algo="grpo", kl_coef=0.0, max_new_tokens=9))
        assert torch.get_num_threads() == 2
        rm.load_models(cfg)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_who_asks_to_stop_gets_the_present_iteration_and_a_checkpoint(tmp_path, folder, capsys):
    def play(models, seeds, N, cfg, sampling_seed):
        if N > 1:  # not in the evaluation
            os.kill(os.getpid(), signal.SIGINT)
        return rm.rollout(models, seeds, N, cfg, sampling_seed)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = run(tmp_path / "run", "--env", "bandit", "--iterations", 5, model=folder, rollout=play)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler, "it is put back"
    assert len(rows) == len(rows_of(tmp_path / "run")) == 2
    told = capsys.readouterr()
    assert "finishing this iteration, then saving" in told.err
    assert re.findall(r"(\d+)/5 \|", told.err)[-1] == "1"  # the bar counts iterations, without iteration 0
    assert told.out.splitlines()[-1].endswith(f"--resume '{tmp_path / 'run'}' --iterations 5"), "as was asked for"
    saved = torch.load(tmp_path / "run/checkpoint/trainer.pt", weights_only=True)
    assert saved["log"] == (tmp_path / "run/log.jsonl").read_text()


# ------------------------------------------------------------------------------------- folders, checkpoints, settings
def test_a_checkpoint_is_plain_transformers_and_evaluates_to_what_the_run_said(bandit, capsys):
    """With the settings of its run: --eval-only names nothing but the folder."""
    out, rows = bandit
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    tok = transformers.AutoTokenizer.from_pretrained(out / "checkpoint")
    start = transformers.AutoModelForCausalLM.from_pretrained(rm.TINY)
    assert tok.chat_template and not equal(dict(model.state_dict()), dict(start.state_dict()))
    cfg = rm.parse_config(["--eval_only", "--model", str(out)])  # --eval-only, with the setting's own name
    again = rm.evaluate(0, rm.load_models(cfg), cfg)[0]["eval"]
    assert again == rows[-1]["eval"] and rows[-1]["eval"] != rows[0]["eval"]
    assert re.search(r"bandit \d\.\d\d \[\d\.\d\d, \d\.\d\d\]  random 0.50  optimal 1.00", capsys.readouterr().out)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_run_that_goes_on_is_as_if_it_had_not_stopped(algo, tmp_path):
    """Rows and weights, the optimizer's memory and the reference included. (Longer and stranger stops: slow_survive.py.)"""
    flags = f"--env bandit --algo {algo} --epochs 2 --max-turns 1 --kl-coef 0.1 --eval-every 0".split()
    whole, models = rm.train(settings(tmp_path / "whole", *flags, "--iterations", 3))
    run(tmp_path / "run", *flags, "--iterations", 1)
    with open(tmp_path / "run/log.jsonl", "a") as log:
        log.write('{"iteration": 2, "success": 0.5}\n')  # after the checkpoint: it is made again
    rows, again = rm.train(rm.parse_config(["--resume", str(tmp_path / "run"), "--iterations", "3"]))
    assert untimed(rows) == untimed(whole) and rows_of(tmp_path / "run") == rows
    for name in ("policy", "ref", *["critic"] * (algo == "ppo")):
        assert equal(dict(getattr(models, name).state_dict()), dict(getattr(again, name).state_dict())), name
    assert equal(models.optimizer.state_dict()["state"], again.optimizer.state_dict()["state"])


def test_a_critic_begins_the_same_for_a_seed():
    critics = [rm.load_models(rm.Config(device="cpu", seed=seed)).critic.state_dict() for seed in (3, 3, 4)]
    assert equal(dict(critics[0]), dict(critics[1])) and not equal(dict(critics[0]), dict(critics[2]))


def test_defaults():
    """As the paper and its code have them (PPO), and as README tells them."""
    cfg = rm.Config(device="cpu")
    assert (cfg.prompts, cfg.rollouts, cfg.update_size, cfg.epochs, cfg.online_k) == (8, 16, 32, 1, 1)
    assert (cfg.max_turns, cfg.max_actions_per_turn, cfg.max_actions, cfg.temperature) == (5, 5, 10, 1.0)
    assert (cfg.entropy_coef, cfg.clip_low, cfg.gamma, cfg.lam, cfg.algo, cfg.adv_norm) == (0.001, 0.2, 1.0, 1.0, "ppo", "std")


def test_nothing_is_overwritten(tmp_path, bandit, capsys):
    out = shutil.copytree(bandit[0], tmp_path / "run")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    run(f"{out}/", "--iterations", 1, "--eval-every", 0)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert len(rows_of(tmp_path / "run-2")) == 2
    assert f"in {tmp_path / 'run-2'} (the name was taken), from iteration 0 on" in capsys.readouterr().out
    run(tmp_path / "new", "--iterations", 1, "--eval-every", 0)
    assert f"in {tmp_path / 'new'}, from iteration 0 on" in capsys.readouterr().out


@pytest.mark.parametrize("done, wanted, said", [(1, 2, 2), (2, 2, 32), (29, 30, 30), (30, 30, 60)])
def test_the_last_line_says_what_comes_next(done, wanted, said, tmp_path, monkeypatch, capsys, bandit):
    """As many iterations as were asked for (Ctrl-C), or thirty more. By the program that began it."""
    last_line_of(done, wanted, bandit[0], tmp_path, monkeypatch, updates=1)
    assert capsys.readouterr().out.splitlines()[-1] == f"go on:   python {sys.argv[0]} --resume {str(tmp_path / 'a run')!r} --iterations {said}"


def last_line_of(done, wanted, bandit, tmp_path, monkeypatch, **columns):  # of a run stopped after iteration `done`
    rows = [{"iteration": i, "success": 1.0, "valid": 1.0, **columns} for i in range(done)]
    monkeypatch.setattr(rm, "iterate", lambda i, *_: ({"iteration": i, "success": 1.0, "valid": 1.0, **columns}, [], []))
    monkeypatch.setattr(rm, "save", lambda *_: None)
    out = tmp_path / "a run"

    def opened(models, cfg):
        out.mkdir()
        shutil.copy(bandit / "config.json", out)
        plots.add_lines(out, "log.jsonl", rows)
        return contextlib.nullcontext((replace(cfg, out=str(out)), rows, rm.tqdm(disable=True)))
    monkeypatch.setattr(rm, "open_run", opened)
    cfg = settings("", "--env", "bandit", "--iterations", wanted, "--eval-every", 0)
    rm.train(cfg, rm.load_models(cfg), watch=lambda *_: True)


def test_the_last_line_of_a_dead_run_says_why(tmp_path, monkeypatch, capsys, bandit):
    last_line_of(10, 30, bandit[0], tmp_path, monkeypatch, updates=0)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"ended at 10: no update in ten iterations (equal returns?). See: python plots.py collapse {str(tmp_path / 'a run')!r}")


def test_a_finished_run_says_what_would_go_on(bandit):
    with pytest.raises(envs.UserError, match="is finished .2 iterations.: raise --iterations"):
        rm.train(rm.parse_config(["--resume", str(bandit[0])]))


def test_a_run_that_goes_on_keeps_its_world(bandit):
    """Or a model that has learnt one would be trained in another, and saved over itself. Weights of another --model
    would not be used, only noted as the run's first ones."""
    for other in ("--env sokoban", f"--model {bandit[0]}", "--starpo-s", "--eval-prompts 9"):  # 9: intervals are of one number
        with pytest.raises(envs.UserError, match="--resume keeps env, model, out, starpo-s"):
            rm.parse_config(["--resume", str(bandit[0]), *other.split()])


def test_a_run_brings_its_settings(bandit):
    """What is given beside it counts more."""
    cfg = rm.parse_config(["--model", f"{bandit[0]}/", "--iterations", "7"])
    assert (cfg.env, cfg.algo, cfg.max_new_tokens, cfg.lr, cfg.iterations) == ("bandit", "grpo", 20, 1e-3, 7)
    assert cfg.out == "" and Path(cfg.model) == bandit[0] / "checkpoint"


@pytest.mark.parametrize("also", ["", "--clip-high 0.28"])
def test_starpo_s_beside_a_run_wants_its_three_values(also, bandit):
    """Which are the run's otherwise."""
    with pytest.raises(envs.UserError, match="--keep 0.25 --kl-coef 0 --clip-high 0.28"):
        rm.parse_config(["--model", str(bandit[0]), "--starpo-s", *also.split()])


@pytest.mark.parametrize("setting, value", [
    ("prompts", None), ("rollouts", 4.0), ("rollouts", 16.0), ("max_turns", 2.5), ("lr", "0.001"), ("no_think", "false"), ("gamma", [1])])
def test_a_setting_of_another_type_is_refused(setting, value, bandit, tmp_path):
    """As somebody writes it into config.json."""
    run = shutil.copytree(bandit[0], tmp_path / "edited")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {setting: value}))
    with pytest.raises(envs.UserError, match=re.escape(f"--{setting.replace('_', '-')} {value!r}: must be ")):
        rm.parse_config(["--model", str(run)])


@pytest.mark.parametrize("at, name", [
    ("", "run"), ("", "run/checkpoint"), ("", "run/checkpoint//"), ("", "run/checkpoint/."), ("run", "."), ("run", "checkpoint"),
    ("run", "checkpoint/"), ("run", "./checkpoint"), ("run/checkpoint", ".."), ("run/checkpoint", "../checkpoint")])
def test_a_run_as_model_brings_its_settings_however_it_is_named(tmp_path, monkeypatch, at, name):
    (tmp_path / "run/checkpoint").mkdir(parents=True)
    (tmp_path / "run/config.json").write_text(json.dumps({"env": "bandit", "max_turns": 3}))
    monkeypatch.chdir(tmp_path / at)
    cfg = rm.parse_config(["--model", name, "--device", "cpu", "--play", "0"])
    assert (cfg.env, cfg.max_turns) == ("bandit", 3) and Path(cfg.source).resolve() == tmp_path / "run/checkpoint"


def test_a_folder_whose_name_only_ends_like_a_checkpoint_is_no_run(tmp_path, monkeypatch):
    """runcheckpoint, beside a run of the name run."""
    (tmp_path / "run/checkpoint").mkdir(parents=True)
    (tmp_path / "run/config.json").write_text(json.dumps({"env": "bandit"}))
    monkeypatch.chdir(tmp_path)
    assert rm.parse_config("--model runcheckpoint --device cpu".split()).env == "frozenlake"


def test_a_config_of_ones_own_that_is_no_dataclass_is_told_so():
    class Mine(rm.Config):
        token_cost: float = 0.1
    with pytest.raises(envs.UserError, match="Is your Config a @dataclass.*token_cost"):
        rm.parse_config("--device cpu --token-cost 0.5".split(), Mine)


def test_a_float_may_be_given_as_a_whole_number():
    assert rm.Config(temperature=3, kl_coef=0, device="cpu").temperature == 3


@pytest.mark.parametrize("setting", [name for name, kind in get_type_hints(rm.Config).items() if kind is bool])
def test_every_flag_is_a_switch(setting):
    flag = "--" + setting.replace("_", "-")
    assert getattr(rm.parse_config([flag, "--device", "cpu"]), setting) is True
    assert getattr(rm.parse_config(["--device", "cpu"]), setting) is False


@pytest.mark.parametrize("flags, of_no_use", [
    ("--algo grpo --gamma 0.9", ["gamma"]), ("--adv-norm mean", ["adv_norm"]), ("--algo grpo --adv-norm mean", []),
    ("--success-rate 0.5 --lam 0.9", []), ("--env sokoban --success-rate 0.5", ["success_rate"]),
    ("--env bandit --algo grpo --lam 1 --critic-lr 1", ["critic_lr", "lam"])])
def test_a_setting_without_effect_is_told(flags, of_no_use, capsys):
    rm.parse_config(["--device", "cpu", *flags.split()])
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in sorted(told)] == [f"--{name.replace('_', '-')}" for name in of_no_use]
    assert all(re.fullmatch(r"note: --\S+ has no effect on \w+, (ppo|grpo)", line) for line in told)


def test_a_success_rate_of_the_class_is_an_option_too(tmp_path, capsys):
    world = tmp_path / "world.py"
    world.write_text("import envs\nclass Lake(envs.FrozenLake):\n    success_rate = 0.5\n"
                     "    def __init__(self):\n        self.size, self.draw_args = 4, (4, 0.8)\n")
    cfg = rm.parse_config(["--device", "cpu", "--env", f"{world}:Lake", "--success-rate", "0.9"])
    assert capsys.readouterr().out == "" and envs.make(cfg.env, cfg.success_rate).success_rate == 0.9


def test_starpo_s_with_the_values_of_plain_starpo_is_refused():
    """As dataclasses.replace would make it: the values were filled in before. One of them alone may be changed."""
    for make in (lambda: replace(rm.Config(), starpo_s=True), lambda: rm.Config(starpo_s=True, keep=1)):
        with pytest.raises(envs.UserError, match="keep 1 is no StarPO-S: give --keep 0.25 --kl-coef 0 --clip-high 0.28"):
            make()
    assert rm.Config(starpo_s=True, clip_high=0.2).keep == 0.25


def test_starpo_s_is_three_values_and_each_can_be_set_alone():
    base, s = rm.Config(device="cpu"), rm.Config(device="cpu", starpo_s=True)
    before, after = asdict(base), asdict(s)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"starpo_s", "keep", "kl_coef", "clip_high"}
    assert (s.keep, s.kl_coef, s.clip_high) == (0.25, 0.0, 0.28)
    assert (base.keep, base.kl_coef, base.clip_high) == (1.0, 0.001, 0.2)
    assert rm.parse_config("--starpo-s --keep 0.5 --device cpu".split()).keep == 0.5
    assert rm.parse_config("--starpo-s --kl-coef 0.01 --device cpu".split()).clip_high == 0.28


# ----------------------------------------------------------------------------------------------------- mistakes
MISTAKES = [  # what is given; what the user is told
    ("--env chess", "frozenlake"),
    ("--success-rate 1.5", "--success-rate 1.5: must be a number, 0 to 1"),
    ("--gamma 2", "--gamma 2.0: must be a number, 0 to 1"),
    ("--keep 7", "0 to 1"),
    ("--temperature 0", "must be a number, 1e-06 to"),
    ("--max-new-tokens 0", "must be a whole number, 1 to"),
    ("--eval-prompts 300", "1 to 256"),
    ("--clip-high 1.28", "0 to 1"),
    ("--starpo-s --rollouts 1", "--rollouts 2"),
    ("--algo grpo --rollouts 1", "--rollouts 2"),
    ("--algo dpo", "no algo dpo: ppo, "),
    ("--adv-norm max", "--adv-norm max: take std or mean"),
    ("--device moon", "cannot load --model tiny on --device moon: no such model? damaged? not cpu, cuda?"),
    ("--model no/such-model", "We couldn't connect to 'https://huggingface.co'"),
    ("--out ..", "..: its name may not end in a dot (--out NAME, --resume ../RUN)"),
    ("--model {tmp}/no", "empty/no: there is no such folder"),
    ("--model {tmp}", "empty: there is no such folder with a model's *.safetensors"),
    ("--model gpt2", "--model gpt2: there is no such folder"),
    ("--model {base}", "chat template"),
    ("--model tiny --max-new-tokens 5000", "lower --max-new-tokens"),
    ("--out {file}/run", "Not a directory"),
    ("--max-actions 300 --max-actions-per-turn 60 --max-new-tokens 1", "lower --max-actions"),
    ("--resume {tmp}", "no such run, with checkpoint"),
    ("--resume {tmp} --env bandit", "no such run, with checkpoint"),
    ("--device cuda:77", "on --device cuda:77: no such model? damaged? not cpu, cuda?"),
]


def test_mistakes_are_one_line_that_says_what_to_do(tmp_path, tok):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    base = save(tmp_path / "base", random_llama(len(tok)), tok)
    Path(base, "chat_template.jinja").unlink()
    for flags, says in MISTAKES:
        flags = flags.format(tmp=tmp_path / "empty", file=tmp_path / "file", base=base)
        with pytest.raises((envs.UserError, OSError)) as error:
            rm.train(rm.parse_config(["--device", "cpu", "--out", str(tmp_path / "run"), *flags.split()]))
        assert says in str(error.value) and "\n" not in str(error.value), (flags, str(error.value))


@pytest.mark.parametrize("flags", ["--rollouts 0", "--keep -0.5", "--lr nan", "--lr -1", "--seed -1", "--iterations -1",
                                   "--max-turns 0", "--success-rate -0.5"])
def test_numbers_that_make_no_sense(flags, tmp_path):
    with pytest.raises(envs.UserError) as error:
        rm.parse_config(flags.split())
    assert "\n" not in str(error.value) and flags.split()[0][2:].replace("-", "_") in str(error.value).replace("-", "_")


@pytest.mark.parametrize("flags, says", [("--foo 1", "--foo"), ("--clip 0.1", "could match --clip"), ("--prompts two", "int")])
def test_options_that_do_not_exist(flags, says, capsys):
    with pytest.raises(SystemExit) as end:
        rm.parse_config(flags.split())
    assert end.value.code == 2 and says in capsys.readouterr().err


def test_an_option_may_be_cut_short():
    assert rm.parse_config(["--iter", "5"]).iterations == 5


def command_line(*flags):  # as `python ragen_mini.py` would do it, but in this process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["ragen_mini.py", "--device", "cpu", *map(str, flags)])
        runpy.run_path(str(ROOT / "ragen_mini.py"), run_name="__main__")


@pytest.mark.parametrize("flags, says", [("--env chess", "frozenlake"), ("--algo dpo", "no algo dpo"),
                                         ("--out {file}/run --iterations 1", "Not a directory")])
def test_the_command_line_ends_with_one_line(tmp_path, flags, says):
    """A text as exit code: Python prints it, and exits with 1."""
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end:
        command_line(*flags.format(file=tmp_path / "file").split())
    text = str(end.value)
    assert says in text and "\n" not in text and not isinstance(end.value.code, int)


def test_help_shows_every_setting(capsys):
    with pytest.raises(SystemExit) as end:
        rm.parse_config(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    for name in rm.Config.__dataclass_fields__:
        assert re.search(rf"\b{name}: \w+(\[.*?\])? = ", text), name


# --------------------------------------------------------------------------------------------- small things
def test_in_the_folder_of_a_run_its_checkpoint_is_not_taken_unasked(bandit, monkeypatch):
    out, _ = bandit
    for folder in (out, out / "checkpoint"):
        monkeypatch.chdir(folder)
        cfg = rm.parse_config(["--device", "cpu", "--model", "tiny"])
        assert (cfg.model, cfg.env, cfg.algo) == ("tiny", "frozenlake", "ppo")
        cfg = rm.parse_config(["--device", "cpu"])
        assert (cfg.env, cfg.algo) == ("frozenlake", "ppo")


@pytest.mark.parametrize("wanted", [dict(play=7), dict(eval_only=True)])
def test_who_only_plays_needs_neither_critic_nor_reference(wanted, folder):
    models = rm.load_models(rm.Config(model=folder, device="cpu", env="bandit", **wanted))
    assert models.critic is None and models.ref is None


@pytest.mark.parametrize("reward, said", [(1.0, "1.0"), (-0.1, "-0.1"), (0.1 + 0.2, "0.3"), (10.9, "10.9"),
                                          (0.15, "0.15"), (0.0, "0.0")])
def test_a_reward_is_told_as_it_is(reward, said, cfg):
    env = envs.make("bandit")
    env.reset(0)
    assert rm.message(env, cfg, 3, reward).startswith(f"Reward: {said}\n")


def test_a_run_in_which_nothing_can_be_compared_ends(tmp_path, folder):
    """Ten iterations without an update: the rows stay, and it is saved."""
    flags = "--env bandit --iterations 30 --eval-every 0 --max-new-tokens 1".split()
    rows = run(tmp_path / "run", *flags, model=folder)
    assert [row["updates"] for row in rows[1:]] == [0] * 10 and rows_of(tmp_path / "run") == rows
    assert not any(np.isfinite(row.get("grad_norm", np.nan)) for row in rows)
