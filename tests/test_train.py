"""Runs as users see them: folders, checkpoints, settings, mistakes; and what `train` promises to
scripts."""
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import threading
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
import transformers

import envs
import ragen_mini as rm
import runs
from conftest import ROOT, equal, random_llama, rows_of, save, untimed

SMALL = ("--device cpu --prompts 2 --rollouts 4 --minibatch-size 4 --iterations 2 "
         "--max-new-tokens 20 --max-turns 3 --lr 1e-3 --eval-prompts 4").split()


def settings(out, *flags, model="tiny"):
    return rm.parse_config(["--model", str(model), *SMALL, "--out", str(out), *map(str, flags)])


def run(out, *flags, model="tiny", callback=None):
    """One run, in this process, with settings of the command line -> the rows of its log."""
    rows, _ = rm.train(settings(out, *flags, model=model), callback=callback)
    return rows


def resumed(out, *flags):  # -> rows, models
    return rm.train(rm.parse_config(["--resume", str(out), *map(str, flags)]))


def state_of(network):  # a copy of its weights
    return {name: weight.clone() for name, weight in network.state_dict().items()}


def learn_nothing(trajs, models, cfg, seed):
    return {}, []


def files_of(out):
    return {file: file.read_bytes() for file in Path(out).rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def bandit(tmp_path_factory):
    """The folder and the rows of a finished run."""
    out = tmp_path_factory.mktemp("bandit") / "run"
    return out, run(out, *"--env bandit --algo grpo --eval-prompts 32".split())


# ------------------------------------------------------------------------------------------- runs
def test_same_seed_same_log(tmp_path):
    small = "--iterations 1 --max-turns 2 --eval-every 0 --algo grpo".split()
    logs = []
    for number, seed in enumerate((5, 5, 6)):
        rows = run(tmp_path / str(number), "--seed", seed, *small)
        logs.append(untimed(rows))
    assert logs[0] == logs[1] != logs[2]


def test_an_evaluation_makes_no_files(tmp_path, monkeypatch):
    cfg = settings("", "--env", "bandit", "--eval-only")
    monkeypatch.chdir(tmp_path)
    columns, _ = rm.evaluate(rm.load_models(cfg), cfg)
    assert list(columns["eval"]) == ["bandit"] and not list(tmp_path.iterdir())


def toy(out, model, algo):
    return rm.Config(env="bandit", model=model, device="cpu", algo=algo, out=str(out), prompts=4,
                     rollouts=16, iterations=24, max_turns=1, max_new_tokens=6, lr=1e-2,
                     critic_lr=5e-3, eval_every=0, entropy_coef=0.02)


@pytest.fixture
def up_pays(monkeypatch):
    """Each "Up" in an answer pays, whatever else it says."""
    take_turn = rm.take_turn

    def paid(traj, *rest):
        last = len(traj.ids) - 1
        take_turn(traj, *rest)
        traj.reward[last] += traj.turns[-1]["answer"].count("Up") / 6
    monkeypatch.setattr(rm, "take_turn", paid)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_learning_on_a_toy(tmp_path, random_folder, algo, up_pays):
    """An executable claim: where the word "Up" pays, a random model learns to write it.

    This is not by a lucky seed. When it was written, the gain was 0.95 or more with each of six
    seeds and both methods.
    """
    rows, _ = rm.train(toy(tmp_path / "run", random_folder, algo))
    assert rows[-1]["reward"] > rows[1]["reward"] + 0.5


def test_a_run_in_which_nothing_can_be_compared_ends(tmp_path, folder):
    """Ten iterations without an update: the rows stay, and it is saved."""
    rows = run(tmp_path / "run", *"--env bandit --iterations 30 --eval-every 0".split(),
               "--max-new-tokens", 1, model=folder)
    assert [row["updates"] for row in rows[1:]] == [0] * 10 and rows_of(tmp_path / "run") == rows
    assert not any("grad_norm" in row for row in rows)
    assert (tmp_path / "run/checkpoint/trainer.pt").exists()


# ------------------------------------------------------------ what `train` promises to scripts
def test_train_gives_back_rows_and_models_and_leaves_the_settings(tmp_path, folder):
    cfg = settings(tmp_path / "run", *"--env bandit --algo grpo --iterations 1".split(),
                   model=folder)
    before = asdict(cfg)
    rows, models = rm.train(cfg)
    assert asdict(cfg) == before and rows == rows_of(tmp_path / "run")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoint")
    assert equal(state_of(saved), state_of(models.policy))


@pytest.mark.parametrize("thread", [False, True])
def test_a_run_leaves_the_process_as_it_was(thread, tmp_path, folder, monkeypatch):
    """Also one in a thread, where Python forbids to handle signals."""
    def now():
        return (signal.getsignal(signal.SIGINT), torch.get_num_threads(),
                torch.backends.cuda.cudnn_sdp_enabled(), transformers.logging.get_verbosity(),
                transformers.logging.is_progress_bar_enabled())

    def train():
        run(tmp_path / "run", *"--env bandit --iterations 1".split(), model=folder,
            callback=lambda *_: during.append(now()))
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    threads = torch.get_num_threads()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    during = []
    try:
        torch.set_num_threads(2)
        transformers.logging.enable_progress_bar()
        before = now()
        if thread:
            other = threading.Thread(target=train)
            other.start()
            other.join()
        else:
            train()
        assert now() == before and not raised and len(during) == 2
    finally:
        torch.set_num_threads(threads)
        signal.signal(signal.SIGINT, handler)
    handlers, threads, cudnn, *_ = during[0]
    assert (threads, cudnn) == (1, False), "but while it lasts"
    assert thread or handlers is runs.ask_to_stop


def test_a_large_model_keeps_all_threads():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with runs.torch_settings(torch.nn.Linear(1600, 1600)):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_an_import_handles_no_signal():
    before = signal.getsignal(signal.SIGINT)
    for file in ("runs.py", "ragen_mini.py"):
        runpy.run_path(str(ROOT / file), run_name="imported")
    assert signal.getsignal(signal.SIGINT) is before


def test_given_models_are_trained_in_place_and_give_the_same_run(tmp_path, folder):
    cfg = settings(tmp_path / "run", *"--env bandit --algo grpo --iterations 1".split(),
                   "--eval-every", 0, model=folder)
    given = rm.load_models(cfg)
    start = state_of(given.policy)
    rows, models = rm.train(cfg, given)
    assert models is given and not equal(start, state_of(given.policy))
    again, _ = rm.train(cfg)
    assert untimed(again) == untimed(rows) and (tmp_path / "run-2").is_dir()


@pytest.mark.parametrize("answer, last", [
    (lambda row: row, 2),
    (lambda row: 0.5, 2),
    (lambda row: row["iteration"] == 1, 1),
    (lambda row: row["iteration"] == 0, 0)])
def test_only_true_ends_a_run(answer, last, tmp_path, folder, monkeypatch):
    monkeypatch.setattr(rm, "learn", learn_nothing)
    rows = run(tmp_path / "run", *"--env bandit --rollouts 2 --eval-every 0".split(), model=folder,
               callback=lambda row, *_: answer(row))
    assert rows[-1]["iteration"] == last and rows_of(tmp_path / "run") == rows
    saved = torch.load(tmp_path / "run/checkpoint/trainer.pt", weights_only=True)
    assert len(saved["log"].splitlines()) == last + 1


def test_settings_that_were_changed_by_hand_count(tmp_path, bandit, monkeypatch):
    """The name, the weights and the environment are those of the settings when the run begins."""
    cfg = settings("", *"--env frozenlake --iterations 1 --rollouts 2 --eval-every 0".split())
    cfg.env = "bandit"
    cfg.model = str(bandit[0])
    monkeypatch.setattr(rm, "learn", learn_nothing)
    monkeypatch.setattr(sys, "argv", ["ragen_mini.py"])
    monkeypatch.chdir(tmp_path)
    _, models = rm.train(cfg)
    assert (tmp_path / "runs/bandit-ppo-seed0").is_dir()
    found = transformers.AutoModelForCausalLM.from_pretrained(bandit[0] / "checkpoint")
    assert equal(state_of(models.policy), state_of(found))


def test_another_rollout_plays_training_and_evaluation(tmp_path, folder, monkeypatch):
    """One that writes by script: every answer is valid, and no model is asked."""
    def scripted(models, seeds, N, cfg, sampling_seed):
        trajs = []
        for group, seed in enumerate(seeds):
            for episode in range(N):
                traj = rm.begin(seed, episode, group, models.tok, cfg)
                arm = traj.env.actions[episode % 2]
                ids = models.tok(f"</think><answer>{arm}</answer><|im_end|>").input_ids
                traj.append(ids, sampled=True, logp=-1.0)
                rm.take_turn(traj, models.tok, cfg, rm.end_tokens(models, cfg))
                trajs.append(traj)
        return trajs
    monkeypatch.setattr(rm, "check_ratios", lambda *rest: None)
    monkeypatch.setattr(rm, "rollout", scripted)
    monkeypatch.setattr(rm, "learn", learn_nothing)
    rows = run(tmp_path / "run", *"--env bandit --algo grpo --iterations 1".split(), model=folder)
    assert rows[0]["eval"] == rows[1]["eval"] == {"bandit": 0.0}, "episode 0 pulls the sure arm"
    assert rows[1]["valid"] == 1 and rows[1]["success"] == 0.5 and rows[1]["updates"] == 0


@pytest.mark.parametrize("evaluated", [True, False])
def test_no_row_is_logged_of_a_rollout_that_updates_would_not_understand(
        evaluated, tmp_path, tok, folder):
    """A policy with dropout, which was not loaded by the program."""
    policy = random_llama(len(tok), attention_dropout=0.1).train()
    cfg = settings(tmp_path / "run", *"--algo grpo --kl-coef 0".split(),
                   *([] if evaluated else ["--eval-every", 0]), model=folder)
    with pytest.raises(runs.UserError, match=r"eval\(\)") as error:
        rm.train(cfg, rm.Models(policy, None, None, None, tok))
    assert "\n" not in str(error.value)
    assert [row["iteration"] for row in rows_of(cfg.out)] == ([] if evaluated else [0])


def test_the_success_rate_reaches_play_and_yardsticks(folder):
    cfg = settings("", *"--success-rate 0.5 --algo grpo --kl-coef 0 --max-turns 5".split(),
                   model=folder)
    models = rm.load_models(cfg)
    columns, trajs = rm.evaluate(models, cfg)
    assert {traj.env.success_rate for traj in trajs} == {0.5}
    truth = envs.mean_yardsticks("frozenlake", 10, range(4), 0.5)[:, -1].tolist()
    assert columns["yardsticks"]["frozenlake"] == pytest.approx(truth)


def test_who_asks_to_stop_gets_the_present_iteration_and_a_checkpoint(
        tmp_path, folder, capsys, monkeypatch):
    rollout = rm.rollout

    def interrupted(models, seeds, N, *rest):
        if N > 1:  # not in the evaluation
            os.kill(os.getpid(), signal.SIGINT)
        return rollout(models, seeds, N, *rest)
    monkeypatch.setattr(rm, "rollout", interrupted)
    out = tmp_path / "run"
    rows = run(out, "--env", "bandit", "--iterations", 5, model=folder)
    assert len(rows) == len(rows_of(out)) == 2
    bars = re.findall(r"(\d+)/5 \|", capsys.readouterr().err)
    assert bars[-1] == "1", "the bar counts iterations, without iteration 0"
    saved = torch.load(out / "checkpoint/trainer.pt", weights_only=True)
    assert saved["log"] == (out / "log.jsonl").read_text()
    monkeypatch.setattr(rm, "rollout", rollout)
    assert len(resumed(out, "--iterations", 2)[0]) == 3, "an old signal does not stop it"


# ------------------------------------------------------------------------------- loading of models
def test_a_checkpoint_is_plain_transformers_and_evaluates_to_what_the_run_said(bandit, capsys):
    """With the settings of its run: --eval-only names nothing but the folder."""
    out, rows = bandit
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    tok = transformers.AutoTokenizer.from_pretrained(out / "checkpoint")
    start = transformers.AutoModelForCausalLM.from_pretrained(runs.TINY)
    assert tok.chat_template and not equal(state_of(model), state_of(start))
    cfg = rm.parse_config(["--eval-only", "--model", str(out)])
    capsys.readouterr()
    columns, _ = rm.evaluate(rm.load_models(cfg), cfg)
    assert columns["eval"] == rows[-1]["eval"] != rows[0]["eval"]
    said = capsys.readouterr().out
    assert f"bandit {columns['eval']['bandit']:.2f} [" in said
    assert "random 0.50" in said and "optimal 1.00" in said


# ------------------------------------------------------------------------------------- going on
@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_run_that_goes_on_is_as_if_it_had_not_stopped(algo, tmp_path):
    """Rows and weights, the optimizer's memory and the reference included."""
    flags = f"--env bandit --algo {algo} --epochs 2 --max-turns 1 --kl-coef 0.1".split()
    flags += ["--eval-every", 0]
    whole, models = rm.train(settings(tmp_path / "whole", *flags, "--iterations", 3))
    run(tmp_path / "run", *flags, "--iterations", 1)
    with open(tmp_path / "run/log.jsonl", "a") as log:
        # After the checkpoint: it is made again.
        log.write('{"iteration": 2, "success": 0.5}\n')
    rows, again = resumed(tmp_path / "run", "--iterations", 3)
    assert untimed(rows) == untimed(whole) and rows_of(tmp_path / "run") == rows
    for name in ("policy", "ref", *["critic"] * (algo == "ppo")):
        assert equal(state_of(getattr(models, name)), state_of(getattr(again, name))), name
    assert equal(models.optimizer.state_dict()["state"], again.optimizer.state_dict()["state"])


def test_episodes_that_will_be_played_again_are_not_shown_twice(tmp_path, bandit):
    out = shutil.copytree(bandit[0], tmp_path / "run")
    samples = (out / "samples.jsonl").read_text()
    assert {json.loads(line)["iteration"] for line in samples.splitlines()} == {0, 2}
    with open(out / "samples.jsonl", "a") as file:
        file.write(json.dumps({"iteration": 3}) + "\n")
    resumed(out, "--iterations", 3, "--eval-every", 0)
    assert (out / "samples.jsonl").read_text() == samples


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    """The folder and the models of a run with a critic and a reference."""
    out = tmp_path_factory.mktemp("ppo") / "run"
    flags = "--env bandit --algo ppo --critic-lr 2e-3 --eval-every 0 --seed 1".split()
    _, models = rm.train(settings(out, *flags))
    return out, models


def restored(cfg):  # -> models as --resume makes them
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    assert runs.restore(models, cfg) == Path(cfg.resume, "log.jsonl").read_text()
    return models


@pytest.mark.parametrize("given, rates", [
    ("", [1e-3, 2e-3]), ("--lr 0.5", [0.5, 2e-3]), ("--lr 0.5 --critic-lr 0.25", [0.5, 0.25])])
def test_resume_may_change_the_learning_rates_and_keeps_all_else(given, rates, ppo):
    out, models = ppo
    again = restored(rm.parse_config(["--resume", str(out), *given.split()]))
    assert [group["lr"] for group in again.optimizer.param_groups] == rates
    memory = again.optimizer.state_dict()["state"]  # Adam's averages
    assert memory and equal(memory, models.optimizer.state_dict()["state"])
    for name in ("policy", "critic", "ref"):
        assert equal(state_of(getattr(models, name)), state_of(getattr(again, name)))


def test_steps_after_resume_are_as_long_as_the_new_rate_says(tmp_path, bandit):
    """With --lr 0 nothing moves any more."""
    out = shutil.copytree(bandit[0], tmp_path / "run")
    before = torch.load(out / "checkpoint/trainer.pt")["policy"]
    rows, models = resumed(out, *"--lr 0 --iterations 4 --eval-every 0".split())
    assert any(row["updates"] for row in rows[3:])
    assert equal(state_of(models.policy), dict(before))
    assert json.loads((out / "config.json").read_text())["lr"] == 0, "and it stays so"


def test_the_reference_is_restored_whatever_the_run_began_with(tmp_path, ppo):
    """If the first model is gone, config.json may name RUN/checkpoint. The KL is still measured
    from the first model.
    """
    out = shutil.copytree(ppo[0], tmp_path / "run")
    config = json.loads((out / "config.json").read_text())
    config["model"] = f"{out}/checkpoint"
    (out / "config.json").write_text(json.dumps(config))
    cfg = rm.parse_config(["--resume", str(out)])
    first = state_of(ppo[1].ref)
    assert not equal(state_of(rm.load_models(cfg).ref), first), "it is that of the checkpoint"
    assert equal(state_of(restored(cfg).ref), first)
    assert not equal(state_of(restored(cfg).policy), first)


def test_a_run_of_another_script_has_its_name_and_is_resumed_by_it_only(
        tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rm, "learn", learn_nothing)
    monkeypatch.setattr(sys, "argv", ["extras/recipes.py rloo"])
    run("", *"--env bandit --algo grpo --iterations 1 --eval-every 0".split(), model=folder)
    out = Path("runs/bandit-grpo-seed0-by-recipes-rloo")
    before = files_of(out)
    for other in ("ragen_mini.py", "extras/recipes.py mine"):
        monkeypatch.setattr(sys, "argv", [other])
        with pytest.raises(runs.UserError, match="recipes-rloo") as error:
            resumed(out, "--iterations", 2)
        assert "\n" not in str(error.value) and files_of(out) == before
    monkeypatch.setattr(sys, "argv", ["/elsewhere/recipes.py rloo"])
    assert len(resumed(out, "--iterations", 2)[0]) == 3


def test_nothing_is_overwritten(tmp_path, bandit, capsys):
    out = shutil.copytree(bandit[0], tmp_path / "run")
    before = files_of(out)
    run(f"{out}/", "--iterations", 1, "--eval-every", 0)
    assert files_of(out) == before
    assert len(rows_of(tmp_path / "run-2")) == 2
    assert str(tmp_path / "run-2") in capsys.readouterr().out


@pytest.mark.parametrize("done, wanted, said", [(1, 2, 2), (2, 2, 32), (29, 30, 30), (30, 30, 60)])
def test_the_last_line_is_a_command_that_goes_on(done, wanted, said, bandit, monkeypatch, capsys):
    """With as many iterations as were asked for (after Ctrl-C), or thirty more."""
    cfg = rm.Config(device="cpu", iterations=wanted, out=str(bandit[0]))
    monkeypatch.setattr(sys, "argv", ["ragen_mini.py"])
    monkeypatch.setattr(runs, "by_command_line", True)
    runs.print_next_steps(cfg, done, dead=False)
    *_, watch, go_on = [line.partition(":")[2] for line in capsys.readouterr().out.splitlines()]
    python, script, *flags = shlex.split(go_on)
    assert (python, script) == ("python", "ragen_mini.py")
    goes_on = rm.parse_config(flags)
    assert (goes_on.resume, goes_on.iterations) == (str(bandit[0]), said)
    assert rm.parse_config(shlex.split(watch)[2:]).play == 8


@pytest.mark.parametrize("program", ["/lib/ipykernel_launcher.py", "ragen_mini.py"])
def test_a_notebook_is_shown_a_cell_that_goes_on(program, bandit, monkeypatch, capsys):
    """So is whoever calls `train` from a script with settings of its own."""
    cfg = rm.Config(device="cpu", iterations=2, out=str(bandit[0]))
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(runs, "by_command_line", False)
    runs.print_next_steps(cfg, 2, dead=False)
    cell = capsys.readouterr().out.splitlines()[-1].partition(":")[2].strip()
    went_on = []
    monkeypatch.setattr(rm, "train", went_on.append)
    exec(cell)
    assert [(cfg.resume, cfg.iterations) for cfg in went_on] == [(str(bandit[0]), 32)]


def test_a_dead_run_is_not_said_to_go_on(capsys, monkeypatch):
    monkeypatch.setattr(runs, "by_command_line", True)
    runs.print_next_steps(rm.Config(device="cpu", out="dead"), 10, dead=True)
    said = capsys.readouterr().out
    assert "collapse 'dead'" in said and "--resume" not in said


@pytest.mark.parametrize("other", ["--env sokoban", "--model tiny", "--starpo-s", "--algo ppo",
                                   "--seed 7", "--eval-prompts 9", "--out x", "--play 7",
                                   "--eval-only"])
def test_a_run_that_goes_on_keeps_what_it_is(other, bandit):
    """Or a model that has learnt one environment would be trained in another, and saved over
    itself; or intervals of one curve would be of different numbers.
    """
    with pytest.raises(runs.UserError, match=other.split()[0]) as error:
        rm.parse_config(["--resume", str(bandit[0]), *other.split()])
    assert "\n" not in str(error.value)


def test_a_finished_run_is_not_trained_and_nothing_changes(bandit):
    before = files_of(bandit[0])
    with pytest.raises(runs.UserError, match="--iterations") as error:
        resumed(bandit[0])
    assert str(bandit[0]) in str(error.value) and "\n" not in str(error.value)
    assert files_of(bandit[0]) == before


# --------------------------------------------------------------------------------------- settings
def test_defaults():
    """As the paper and its code have them (PPO), and as README tells them."""
    cfg = rm.Config(device="cpu")
    assert (cfg.prompts, cfg.rollouts, cfg.minibatch_size, cfg.epochs) == (8, 16, 32, 1)
    assert (cfg.max_turns, cfg.max_actions_per_turn, cfg.max_actions) == (5, 5, 10)
    assert (cfg.temperature, cfg.entropy_coef, cfg.clip_low, cfg.online_k) == (1.0, 0.001, 0.2, 1)
    assert (cfg.gamma, cfg.lam, cfg.algo, cfg.adv_norm) == (1.0, 1.0, "ppo", "std")


def changed(one, other):  # -> names of the settings that differ
    one, other = asdict(one), asdict(other)
    return {name for name in one if one[name] != other[name]} - {"filled"}


def test_starpo_s_is_three_values_and_each_can_be_set_alone():
    base, s = rm.Config(device="cpu"), rm.Config(device="cpu", starpo_s=True)
    assert changed(base, s) == {"starpo_s", "keep", "kl_coef", "clip_high"}
    assert (s.keep, s.kl_coef, s.clip_high) == (0.25, 0.0, 0.28)
    assert (base.keep, base.kl_coef, base.clip_high) == (1.0, 0.001, 0.2)
    for flag, value in (("--keep", 0.5), ("--kl-coef", 0.01), ("--clip-high", 0.2)):
        one = rm.parse_config(["--starpo-s", "--device", "cpu", flag, str(value)])
        assert changed(s, one) == {flag[2:].replace("-", "_")}


def test_presets_are_chosen_anew_in_a_copy():
    """Also if the settings have been copied before. Values that were given survive."""
    base, s = rm.Config(device="cpu"), rm.Config(device="cpu", starpo_s=True)
    assert replace(s, starpo_s=False) == base and replace(base, starpo_s=True) == s
    assert replace(replace(replace(s), starpo_s=False), starpo_s=True) == s
    other = rm.Config(device="cpu", model="owner/other")
    assert replace(base, model="owner/other") == other and replace(other, model="tiny") == base
    assert changed(base, other) == {"model", *rm.FOR_TINY}
    own = rm.Config(device="cpu", starpo_s=True, kl_coef=0.5, lr=3e-5)
    for copied in (replace(own, starpo_s=False), replace(own, model="owner/other"),
                   replace(own, starpo_s=False, model="owner/other")):
        assert (copied.kl_coef, copied.lr) == (0.5, 3e-5)
    assert changed(replace(own, starpo_s=False), base) == {"kl_coef", "lr"}


def test_starpo_s_without_its_filter_is_refused():
    with pytest.raises(runs.UserError, match="--keep"):
        rm.Config(starpo_s=True, keep=1)


def test_tiny_is_known_by_its_config_and_not_by_its_size(tmp_path, folder, bandit, random_folder):
    """A copy, a run and its checkpoint have the presets of tiny, another model as small has not."""
    copied = shutil.copytree(bandit[0] / "checkpoint", tmp_path / "copied")
    (copied / "trainer.pt").unlink()
    tiny = rm.Config(device="cpu")
    for model in (folder, bandit[0], bandit[0] / "checkpoint", f"{bandit[0]}/", copied):
        assert changed(rm.Config(model=str(model), device="cpu"), tiny) == {"model"}
    size = [Path(model, "model.safetensors").stat().st_size for model in (random_folder, copied)]
    assert size[0] < size[1]
    for model in (random_folder, "owner/tiny", "no/such/folder"):
        cfg = rm.Config(model=model, device="cpu")
        assert (cfg.lr, cfg.max_new_tokens, cfg.iterations) == (1e-6, 400, 200)


def test_a_run_brings_its_settings(bandit):
    """What is given beside it counts more."""
    cfg = rm.parse_config(["--model", f"{bandit[0]}/", "--iterations", "7"])
    assert (cfg.env, cfg.algo, cfg.max_new_tokens) == ("bandit", "grpo", 20)
    assert (cfg.lr, cfg.critic_lr, cfg.iterations) == (1e-3, 1e-3, 7)
    assert cfg.out == "" and runs.weights_of(cfg.model) == bandit[0] / "checkpoint"


def test_a_run_as_model_may_go_on_with_starpo_s_and_back(bandit, tmp_path):
    """The values that presets had filled in are chosen anew; those that were given stay."""
    cfg = rm.parse_config(["--model", str(bandit[0]), "--starpo-s"])
    assert (cfg.keep, cfg.kl_coef, cfg.clip_high, cfg.lr) == (0.25, 0.0, 0.28, 1e-3)
    out = shutil.copytree(bandit[0], tmp_path / "run")
    given = replace(rm.parse_config(["--model", str(out)]), kl_coef=0.5)
    (out / "config.json").write_text(json.dumps(runs.as_json(given)))
    cfg = rm.parse_config(["--model", str(out), "--starpo-s"])
    assert (cfg.keep, cfg.kl_coef, cfg.clip_high) == (0.25, 0.5, 0.28)
    (out / "config.json").write_text(json.dumps(runs.as_json(cfg)))
    cfg = rm.parse_config(["--model", str(out), "--starpo-s", "false"])
    assert (cfg.keep, cfg.kl_coef, cfg.clip_high) == (1.0, 0.5, 0.2)


def test_what_is_typed_counts_even_if_it_is_what_the_presets_of_the_run_had(bandit):
    cfg = rm.parse_config(["--model", str(bandit[0]), *"--starpo-s --kl-coef 0.001".split()])
    assert cfg.kl_coef == 0.001


def test_settings_of_older_runs_are_read(bandit, tmp_path):
    """They called it update_size, and did not know which values were filled in."""
    out = shutil.copytree(bandit[0], tmp_path / "run")
    config = json.loads((out / "config.json").read_text())
    for name in ("minibatch_size", "filled", "online_k"):
        del config[name]
    (out / "config.json").write_text(json.dumps(config | {"update_size": 3}))
    for cfg in (rm.parse_config(["--model", str(out)]), rm.parse_config(["--resume", str(out)])):
        assert (cfg.minibatch_size, cfg.online_k, cfg.env) == (3, 1, "bandit")
    cfg = rm.parse_config(["--model", str(out), "--starpo-s"])
    assert (cfg.keep, cfg.kl_coef, cfg.clip_high) == (0.25, 0.0, 0.28)
    assert len(resumed(out, "--iterations", 3)[0]) == 4
    assert json.loads((out / "config.json").read_text())["minibatch_size"] == 3


@pytest.mark.parametrize("setting, value", [
    ("prompts", None), ("rollouts", 4.0), ("max_turns", 2.5), ("lr", "0.001"),
    ("no_think", "false"), ("gamma", [1]), ("critic_lrr", 0.5)])
def test_a_setting_that_makes_no_sense_in_config_json_is_named(setting, value, bandit, tmp_path):
    """As somebody writes it there by hand."""
    out = shutil.copytree(bandit[0], tmp_path / "edited")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {setting: value}))
    with pytest.raises(runs.UserError, match=setting.replace("_", "[-_]")) as error:
        rm.parse_config(["--model", str(out)])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("at, name", [
    ("", "run"), ("", "run/checkpoint"), ("", "run/checkpoint//"), ("", "run/checkpoint/."),
    ("run", "."), ("run", "checkpoint"), ("run", "./checkpoint"), ("run/checkpoint", ".."),
    ("run/checkpoint", "../checkpoint"), ("run/checkpoint", ".")])
def test_a_run_as_model_brings_its_settings_however_it_is_named(tmp_path, monkeypatch, at, name):
    (tmp_path / "run/checkpoint").mkdir(parents=True)
    (tmp_path / "run/config.json").write_text(json.dumps({"env": "bandit", "max_turns": 3}))
    monkeypatch.chdir(tmp_path / at)
    cfg = rm.parse_config(["--model", name, "--device", "cpu", "--play", "0"])
    assert (cfg.env, cfg.max_turns) == ("bandit", 3)
    assert runs.weights_of(cfg.model).resolve() == tmp_path / "run/checkpoint"


def test_a_folder_whose_name_only_ends_like_a_checkpoint_is_no_run(tmp_path, monkeypatch):
    """runcheckpoint, beside a run of the name run."""
    (tmp_path / "run/checkpoint").mkdir(parents=True)
    (tmp_path / "run/config.json").write_text(json.dumps({"env": "bandit"}))
    monkeypatch.chdir(tmp_path)
    assert rm.parse_config("--model runcheckpoint --device cpu".split()).env == "frozenlake"


def test_in_the_folder_of_a_run_its_checkpoint_is_not_taken_unasked(bandit, monkeypatch):
    for folder in (bandit[0], bandit[0] / "checkpoint"):
        monkeypatch.chdir(folder)
        for flags in ([], ["--model", "tiny"]):
            cfg = rm.parse_config(["--device", "cpu", *flags])
            assert (cfg.env, cfg.algo) == ("frozenlake", "ppo")
            assert runs.weights_of(cfg.model) == runs.TINY


def test_a_float_may_be_given_as_a_whole_number():
    assert rm.Config(temperature=3, kl_coef=0, device="cpu").temperature == 3


@pytest.mark.parametrize("setting", ["starpo_s", "no_think", "eval_only"])
def test_every_flag_is_a_switch(setting):
    assert setting in {field.name for field in fields(rm.Config) if field.type is bool}
    flag = runs.option(setting)
    for given, value in (([flag], True), ([], False), ([flag, "false"], False)):
        assert getattr(rm.parse_config([*given, "--device", "cpu"]), setting) is value


@pytest.mark.parametrize("flags, of_no_use", [
    ("--algo grpo --gamma 0.9", ["gamma"]),
    ("--adv-norm mean", ["adv-norm"]),
    ("--algo grpo --adv-norm mean", []),
    ("--success-rate 0.5 --lam 0.9", []),
    ("--env sokoban --success-rate 0.5", ["success-rate"]),
    ("--env bandit --algo grpo --lam 1 --critic-lr 1", ["critic-lr", "lam"])])
def test_a_setting_without_effect_is_told(flags, of_no_use, capsys):
    rm.parse_config(["--device", "cpu", *flags.split()])
    assert re.findall(r"^note: --(\S+) ", capsys.readouterr().out, re.MULTILINE) == of_no_use


def test_a_success_rate_of_the_class_is_an_option_too(tmp_path, capsys):
    file = tmp_path / "lakes.py"
    file.write_text("import envs\n"
                    "class Lake(envs.FrozenLake):\n"
                    "    success_rate = 0.5\n"
                    "    def __init__(self):\n"
                    "        self.size, self.draw_args = 4, (4, 0.8)\n")
    flags = ["--device", "cpu", "--env", f"{file}:Lake", "--success-rate", "0.9"]
    cfg = rm.parse_config(flags)
    assert capsys.readouterr().out == ""
    assert envs.make(cfg.env, cfg.success_rate).success_rate == 0.9


def test_help_shows_every_setting(capsys):
    with pytest.raises(SystemExit) as end:
        rm.parse_config(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    for field in fields(rm.Config):
        shown = re.search(rf"^  {runs.option(field.name)}( \[?\w+\]?)?\s+\w", text, re.MULTILINE)
        assert bool(shown) == (field.name != "filled"), field.name


@pytest.mark.parametrize("reward, said", [
    (1.0, "1.0"), (-0.1, "-0.1"), (0.1 + 0.2, "0.3"), (10.9, "10.9"), (0.15, "0.15"), (0.0, "0.0")])
def test_a_reward_is_told_as_it_is(reward, said, cfg):
    env = envs.make("bandit")
    env.reset(0)
    assert rm.message(env, cfg, 3, reward).startswith(f"Reward: {said}\n")


# --------------------------------------------------------------------------------------- mistakes
MISTAKES = [  # what is given; the option or file that the user is told of
    ("--env chess", "--env"),
    ("--env chess", "frozenlake"),
    ("--success-rate 1.5", "--success-rate"),
    ("--success-rate -0.5", "--success-rate"),
    ("--gamma 2", "--gamma"),
    ("--keep 7", "--keep"),
    ("--keep -0.5", "--keep"),
    ("--keep 0", "--keep"),
    ("--temperature 0", "--temperature"),
    ("--max-new-tokens 0", "--max-new-tokens"),
    ("--eval-prompts 300", "--eval-prompts"),
    ("--clip-high 1.28", "--clip-high"),
    ("--starpo-s --rollouts 1", "--rollouts"),
    ("--algo grpo --rollouts 1", "--rollouts"),
    ("--rollouts 0", "--rollouts"),
    ("--lr nan", "--lr"),
    ("--lr inf", "--lr"),
    ("--lr -1", "--lr"),
    ("--seed -1", "--seed"),
    ("--iterations -1", "--iterations"),
    ("--max-turns 0", "--max-turns"),
    ("--algo dpo", "--algo"),
    ("--adv-norm max", "--adv-norm"),
    ("--device moon", "moon"),
    ("--device cuda:77", "cuda:77"),
    ("--model no/such-model", "no/such-model"),
    ("--model {tmp}/no", "empty/no"),
    ("--model {tmp}", "safetensors"),
    ("--model gpt2", "gpt2"),
    ("--model {base}", "chat template"),
    ("--model tiny --max-new-tokens 5000", "--max-new-tokens"),
    ("--out {file}/run", "file/run"),
    ("--max-actions 300 --max-actions-per-turn 60 --max-new-tokens 1", "--max-actions"),
    ("--resume {tmp}", "--resume"),
    ("--resume {tmp} --env bandit", "--resume"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory, tok):
    """What MISTAKES name: an empty folder, a file, a model that is not for chat."""
    tmp = tmp_path_factory.mktemp("places")
    (tmp / "empty").mkdir()
    (tmp / "file").touch()
    base = save(tmp / "base", random_llama(len(tok)), tok)
    Path(base, "chat_template.jinja").unlink()
    return dict(tmp=tmp / "empty", file=tmp / "file", base=base)


@pytest.mark.parametrize("flags, names", MISTAKES)
def test_a_mistake_is_one_line_that_names_it(flags, names, places, tmp_path):
    flags = flags.format(**places).split()
    with pytest.raises((runs.UserError, OSError)) as error:
        rm.train(rm.parse_config(["--device", "cpu", "--out", str(tmp_path / "run"), *flags]))
    assert names in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags, says", [
    ("--foo 1", "--foo"), ("--clip 0.1", "--clip-low"), ("--prompts two", "--prompts"),
    ("--update-size 8", "--update-size"), ("--filled 1", "--filled")])
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


@pytest.mark.parametrize("flags, says", [
    ("--env chess", "frozenlake"), ("--out {file}/run --iterations 1", "NotADirectoryError")])
def test_the_command_line_ends_with_one_line(flags, says, places):
    """A text as exit code: Python prints it, and exits with 1."""
    with pytest.raises(SystemExit) as end:
        command_line(*flags.format(**places).split())
    assert says in end.value.code and "\n" not in end.value.code
