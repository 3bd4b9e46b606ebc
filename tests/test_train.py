"""Whole runs in this process: what `train` promises to scripts, and what a user could lose."""
import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import envs
import ragen_mini as rm
from conftest import equal, random_llama, refused, rows_of, untimed
from support import errors, loading
from support import folder as folders

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


def saved(out):
    return torch.load(Path(out, "checkpoint/trainer.pt"))


@pytest.fixture(scope="module")
def bandit(tmp_path_factory):
    """The folder and the rows of a finished run."""
    out = tmp_path_factory.mktemp("bandit") / "run"
    return out, run(out, *"--env bandit --algo grpo --eval-prompts 32".split())


@pytest.fixture
def copied(bandit, tmp_path):
    return shutil.copytree(bandit[0], tmp_path / "copied")


# ------------------------------------------------------------------------------------------- runs
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
    assert all(0 <= row["logp_gap"] < 1e-4 for row in rows[1:]), "the same numbers in every one"


def test_same_seed_same_log_and_given_models_are_trained_in_place(tmp_path, folder):
    """`train` gives back rows and models, and leaves the settings. A checkpoint is a plain model.
    """
    flags = "--iterations 1 --max-turns 2 --eval-every 0 --algo grpo".split()
    cfg = settings(tmp_path / "run", *flags, "--seed", 5, model=folder)
    before, given = asdict(cfg), rm.load_models(cfg)
    start = state_of(given.policy)
    rows, models = rm.train(cfg, given)
    assert models is given and not equal(start, state_of(given.policy)) and asdict(cfg) == before
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoint")
    assert equal(state_of(found), state_of(models.policy)) and rows == rows_of(tmp_path / "run")
    again, _ = rm.train(cfg)
    assert untimed(again) == untimed(rows) == untimed(rows_of(tmp_path / "run-2"))
    assert untimed(run(tmp_path / "other", *flags, "--seed", 6)) != untimed(rows)


def test_a_run_in_which_nothing_can_be_compared_ends(tmp_path, folder):
    """Ten iterations without an update: the rows stay, and it is evaluated and saved."""
    rows = run(tmp_path / "run", *"--env bandit --iterations 30 --eval-every 20".split(),
               "--max-new-tokens", 1, model=folder)
    assert [row["updates"] for row in rows[1:]] == [0] * 10 and rows_of(tmp_path / "run") == rows
    assert "eval" in rows[-1] and not any("grad_norm" in row for row in rows)
    assert len(saved(tmp_path / "run")["log"].splitlines()) == 11
    start = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert equal(dict(saved(tmp_path / "run")["policy"]), state_of(start)), "nothing moved"


@pytest.mark.parametrize("answer, last", [
    (lambda row: row, 2),
    (lambda row: 0.5, 2),
    (lambda row: row["iteration"] == 1, 1),
    (lambda row: row["iteration"] == 0, 0)])
def test_a_callback_adds_columns_to_the_log_and_only_true_ends_a_run(
        answer, last, tmp_path, folder, monkeypatch):
    monkeypatch.setattr(rm, "learn", learn_nothing)
    out, seen = tmp_path / "run", []

    def callback(row, trajs, models, cfg):
        assert cfg.out == str(out) and len(rows_of(out)) == row["iteration"], "not logged yet"
        seen.append(len(trajs))
        row["answers"], row["of numpy"] = sum(len(traj.turns) for traj in trajs), np.float32(0.5)
        return answer(row)
    rows = run(out, *"--env bandit --rollouts 2 --eval-every 0".split(), model=folder,
               callback=callback)
    assert rows[-1]["iteration"] == last and rows_of(out) == rows and seen == [0, 4, 4][:last + 1]
    assert all(row["of numpy"] == 0.5 and row["answers"] == 4 * row.get("turns", 0) for row in rows)
    assert len(saved(out)["log"].splitlines()) == last + 1, "it is saved, with these columns"
    assert saved(out)["log"] == (out / "log.jsonl").read_text()


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
        torch.backends.cuda.enable_cudnn_sdp(True)
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
    assert thread or handlers is errors.ask_to_stop


def test_a_policy_with_dropout_is_refused_before_a_row_is_logged(tmp_path, tok, folder):
    policy = random_llama(len(tok), attention_dropout=0.1).train()
    cfg = settings(tmp_path / "run", *"--algo grpo --kl-coef 0 --eval-every 0".split())
    assert "eval()" in refused(rm.train, cfg, rm.Models(policy, None, None, None, tok))
    assert [row["iteration"] for row in rows_of(cfg.out)] == [0]


def test_the_success_rate_reaches_play_and_yardsticks(folder):
    cfg = settings("none", *"--success-rate 0.5 --algo grpo --kl-coef 0 --max-turns 5".split(),
                   model=folder)
    columns, trajs = rm.evaluate(rm.load_models(cfg), cfg)
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
    with pytest.raises(SystemExit) as end, errors.one_line_errors():
        pass  # `main` ends here
    assert end.value.code == 130, "as shells expect"
    bars = re.findall(r"(\d+)/5 \|", capsys.readouterr().err)
    assert bars[-1] == "1", "the bar counts iterations, without iteration 0"
    assert saved(out)["log"] == (out / "log.jsonl").read_text()
    monkeypatch.setattr(rm, "rollout", rollout)
    assert len(resumed(out, "--iterations", 2)[0]) == 3, "an old signal does not stop it"


# --------------------------------------------------------------------------------- what it leaves
def test_a_checkpoint_evaluates_to_what_the_run_said(bandit, capsys, monkeypatch, tmp_path):
    out, rows = bandit
    start = transformers.AutoModelForCausalLM.from_pretrained(loading.TINY)
    end = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    assert not equal(state_of(start), state_of(end)) and rows[-1]["eval"] != rows[0]["eval"]
    success = rows[-1]["eval"]["bandit"]
    flags = [*SMALL, *"--env bandit --eval-prompts 32 --eval-only".split(), "--model", str(out)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ragen_mini.py", *flags])
    rm.main()
    said = capsys.readouterr().out
    assert f"bandit {success:.2f} [" in said and "random 0.50" in said and "optimal 1.00" in said
    assert "return " in said and not list(tmp_path.iterdir()), "an evaluation makes no files"
    monkeypatch.setattr(rm, "logp_gap", lambda trajs, models, cfg: cfg.temperature)
    with pytest.raises(SystemExit, match="differ by 0.5"):
        rm.main()


def test_play_0_plays_the_level_of_seed_0(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ragen_mini.py", *SMALL, "--env", "bandit", "--play", "0"])
    assert not rm.parse_config().trains
    rm.main()
    said = capsys.readouterr().out
    env = envs.make("bandit")
    for word in re.findall(r"\w+", env.reset(0)[0]):
        assert word in said
    assert said.count("return ") == 1 and not list(tmp_path.iterdir())


def test_whatever_belongs_to_a_run_is_in_its_folder(bandit):
    out, rows = bandit
    assert {path.name for path in out.iterdir()} == {
        "config.json", "log.jsonl", "samples.jsonl", "checkpoint", "curves.png", "lock"}
    assert rows_of(out) == rows and [row["iteration"] for row in rows] == [0, 1, 2]
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [sample["iteration"] for sample in samples] == [0] * 8 + [2] * 8
    for sample in samples:
        R = sum(turn["reward"] for turn in sample["turns"])
        assert sample["text"].endswith(f"\nreturn {R:g}\n")


def test_nothing_is_overwritten(copied, capsys):
    before = files_of(copied)
    run(f"{copied}/", *"--env bandit --iterations 1 --eval-every 0".split())
    assert files_of(copied) == before and len(rows_of(f"{copied}-2")) == 2
    assert f"{copied}-2" in capsys.readouterr().out


@pytest.mark.parametrize("program, name", [
    ("ragen_mini.py", ""), ("-c", ""), ("/lib/ipykernel_launcher.py", ""),
    ("extras/recipes.py rloo", "-by-recipes-rloo"), ("mine.py", "-by-mine")])
def test_a_run_is_named_after_its_settings_and_its_script(program, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program])
    if "ipykernel" in program:
        monkeypatch.setitem(sys.modules, "ipykernel", None)
    cfg = rm.Config(env="bandit", algo="grpo", starpo_s=True, seed=3, device="cpu")
    assert folders.claim(cfg).out == f"runs/bandit-grpo-s-seed3{name}"
    Path(f"runs/bandit-grpo-s-seed3{name}").mkdir(parents=True)
    assert folders.claim(cfg).out == f"runs/bandit-grpo-s-seed3{name}-2"


@pytest.mark.parametrize("done, wanted, said", [(1, 2, 2), (2, 2, 32), (30, 30, 60)])
def test_the_last_lines_are_commands_that_go_on(done, wanted, said, bandit, capsys):
    """With as many iterations as were asked for (after Ctrl-C), or thirty more."""
    cfg = rm.Config(env="bandit", max_turns=3, device="cpu", iterations=wanted, out=str(bandit[0]))
    rows = [{"iteration": i, "valid": 1.0} for i in range(done + 1)]
    folders.print_next_steps(rows, cfg, dead=False)
    *_, watch, go_on = [line.partition(":")[2] for line in capsys.readouterr().out.splitlines()]
    python, script, *flags = shlex.split(go_on)
    assert (python, script) == ("python", "ragen_mini.py")
    goes_on = rm.parse_config(flags)
    assert (goes_on.resume, goes_on.iterations) == (str(bandit[0]), said)
    watched = rm.parse_config(shlex.split(watch)[2:])
    assert (watched.play, watched.env, watched.max_turns) == (8, "bandit", 3)
    folders.print_next_steps(rows, cfg, dead=True)
    assert "--resume" not in capsys.readouterr().out
    folders.print_next_steps(rows, rm.replace(cfg, env=envs.Bandit), dead=False)
    assert "python" not in capsys.readouterr().out, "only who has the class can go on"


def test_commands_are_quoted(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my folder/recipes.py rloo"])
    cfg = rm.Config(device="cpu", iterations=1, out="it's $HOME")
    folders.print_next_steps([{"iteration": 1}], cfg, dead=False)
    said = capsys.readouterr().out
    assert "python 'my folder/recipes.py' rloo --resume 'it'\"'\"'s $HOME'" in said


# --------------------------------------------------------------------------------------- going on
@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_run_that_goes_on_is_as_if_it_had_not_stopped(algo, tmp_path):
    """Rows and weights, the optimizer's memory and the reference included. What was logged after
    the checkpoint is made again.
    """
    flags = f"--env bandit --algo {algo} --epochs 2 --max-turns 1 --kl-coef 0.1".split()
    flags += ["--eval-every", 0]
    whole, models = rm.train(settings(tmp_path / "whole", *flags, "--iterations", 3))
    run(tmp_path / "run", *flags, "--iterations", 1)
    for name in ("log.jsonl", "samples.jsonl"):
        with open(tmp_path / "run" / name, "a") as file:
            file.write('{"iteration": 2, "success": 0.5}\n')
    rows, again = resumed(tmp_path / "run", "--iterations", 3)
    assert untimed(rows) == untimed(whole) and rows_of(tmp_path / "run") == rows
    assert (tmp_path / "run/samples.jsonl").read_text() == ""
    for name in ("policy", "ref", *["critic"] * (algo == "ppo")):
        assert equal(state_of(getattr(models, name)), state_of(getattr(again, name))), name
    assert equal(models.optimizer.state_dict()["state"], again.optimizer.state_dict()["state"])


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
    assert folders.restore(models, cfg) == Path(cfg.resume, "log.jsonl").read_text()
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


def test_steps_after_resume_are_as_long_as_the_new_rate_says(copied):
    """With --lr 0 nothing moves any more."""
    before = saved(copied)["policy"]
    rows, models = resumed(copied, *"--lr 0 --iterations 4 --eval-every 0".split())
    assert any(row["updates"] for row in rows[3:])
    assert equal(state_of(models.policy), dict(before))
    assert json.loads((copied / "config.json").read_text())["lr"] == 0, "and it stays so"


def test_the_reference_is_restored_whatever_the_run_began_with(tmp_path, ppo):
    """If the first model is gone, config.json may name RUN/checkpoint. The KL is still measured
    from the first model.
    """
    out = shutil.copytree(ppo[0], tmp_path / "run")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"model": f"{out}/checkpoint"}))
    cfg = rm.parse_config(["--resume", str(out)])
    first = state_of(ppo[1].ref)
    assert not equal(state_of(rm.load_models(cfg).ref), first), "it is that of the checkpoint"
    assert equal(state_of(restored(cfg).ref), first)
    assert not equal(state_of(restored(cfg).policy), first)


def test_another_script_that_goes_on_is_told_in_one_line(copied, capsys, monkeypatch):
    monkeypatch.setattr(rm, "learn", learn_nothing)
    resumed(copied, *"--iterations 3 --eval-every 0".split())
    assert "note" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["extras/recipes.py rloo"])
    assert len(resumed(copied, "--iterations", 4)[0]) == 5
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert len(notes) == 1 and "recipes-rloo" in notes[0]


@pytest.mark.parametrize("other", ["--env sokoban", "--model tiny", "--starpo-s", "--algo ppo",
                                   "--seed 7", "--eval-prompts 9", "--out x", "--play 0",
                                   "--eval-only"])
def test_a_run_that_goes_on_keeps_what_it_is(other, bandit):
    """Or a model that has learnt one environment would be trained in another, and saved over
    itself; or intervals of one curve would be of different numbers.
    """
    flags = ["--resume", str(bandit[0]), *other.split()]
    assert other.split()[0] in refused(rm.parse_config, flags)


def test_a_finished_run_is_not_trained_and_nothing_changes(bandit):
    before = files_of(bandit[0])
    assert "--iterations" in refused(resumed, bandit[0])
    assert files_of(bandit[0]) == before


def test_new_settings_of_a_resume_that_fails_are_not_kept(copied, monkeypatch):
    before = files_of(copied)

    def fail(*_):
        raise errors.UserError("a gradient is not finite")
    monkeypatch.setattr(rm, "learn", fail)
    refused(resumed, copied, *"--lr 1e14 --iterations 3 --eval-every 0".split())
    assert files_of(copied) == before


def test_the_checkpoint_of_another_run_is_refused(copied, ppo):
    shutil.copy(ppo[0] / "checkpoint/trainer.pt", copied / "checkpoint")
    refused(resumed, copied, "--iterations", 3)


@pytest.mark.parametrize("name", ["policy", "optimizer"])
def test_a_checkpoint_without_a_part_is_not_mended_by_a_fresh_one(name, copied):
    state = saved(copied)
    del state[name]
    torch.save(state, copied / "checkpoint/trainer.pt")
    assert name in refused(resumed, copied, "--iterations", 3)


def test_a_file_is_found_wherever_the_run_is_resumed(tmp_path, monkeypatch):
    """Another folder may have another environment in a file of the same name."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.py").write_text(
            f"import envs\nclass Mine(envs.FrozenLake):\n    place = '{name}'\n")
    monkeypatch.chdir(tmp_path / "one")
    run("../run", *"--env w.py:Mine --iterations 1 --eval-every 0".split())
    monkeypatch.chdir(tmp_path / "two")
    cfg = rm.parse_config(["--resume", "../run", "--iterations", "2"])
    assert envs.make(cfg.env).place == "one"
    assert len(rm.train(cfg)[0]) == 3
