"""Whole runs, as their user starts them: too long for the quick tests (test_train.py)."""
import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch

import envs
import plots
import ragen_mini as rm
from conftest import equal, rows_of, untimed
from extras import elsewhere
from test_train import SMALL, bandit, command_line, run, settings, toy  # bandit: a fixture


@pytest.mark.parametrize("flags", ["--env bandit --algo grpo --starpo-s", "--env sokoban --algo ppo --starpo-s",
                                   "--env sokoban --algo grpo", "--env frozenlake --algo ppo"])
def test_algorithms_run_on_worlds(tmp_path, folder, flags):
    rows = run(tmp_path / "run", *flags.split(), model=folder)
    assert rows_of(tmp_path / "run") == rows and [row["iteration"] for row in rows] == [0, 1, 2]
    columns = ("reward reward_std success entropy response_length think_length distinct valid turns grad_norm "
               "clip_fraction policy_loss grad_norm_max seconds_rollout seconds_update tokens").split()
    columns += ["value_loss"] * ("ppo" in flags) + ["kl"] * ("--starpo-s" not in flags)
    trained = [row for row in rows[1:] if row["updates"]]
    assert trained
    for row in trained:
        assert torch.tensor([float(row[name]) for name in columns]).isfinite().all()
        assert row["updates"] == (1 if "--starpo-s" in flags else 2), "keep 0.25: one prompt"
    assert list(rows[0]["eval"]) == list(rows[2]["eval"]) == [flags.split()[1]] and "eval" not in rows[1]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "log.jsonl", "samples.jsonl", "checkpoint", "curves.png", "lock"}
    for line in (tmp_path / "run/samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        R = sum(turn["reward"] for turn in sample["turns"])
        assert sample["text"].endswith(f"\nreturn {R:g}\n")


def test_online_k_uses_each_trajectory_once_in_k_slices(tmp_path):
    """Every slice has P prompts of its own, whole groups, and is updated on once, by what the slice before left."""
    slices, weights, seeds = [], [], []

    def spy(trajs, models, cfg, seed):
        slices.append(trajs)
        weights.append(next(models.policy.parameters()).sum().item())
        seeds.append(seed)
        return rm.learn(trajs, models, cfg, seed)
    rows = run(tmp_path / "run", "--online-k", 3, "--iterations", 1, "--update-size", 8, "--eval-every", 0, "--seed", 1,
               learn=spy)
    assert [len(trajs) for trajs in slices] == [8, 8, 8]
    assert len({id(traj) for trajs in slices for traj in trajs}) == 24
    assert [sorted({traj.group for traj in trajs}) for trajs in slices] == [[0, 1], [2, 3], [4, 5]]
    assert rows[1]["updates"] == 3 and len(set(weights)) == len(set(seeds)) == 3


def test_evaluation_on_other_worlds(tmp_path, folder, capsys, monkeypatch):
    """extras/elsewhere.py"""
    others = ["sokoban_newvocab", "frozenlake"]
    monkeypatch.setattr(sys, "argv", ["elsewhere.py", "--eval-envs", "sokoban_newvocab, frozenlake, frozenlake, sokoban", "--env", "bandit"])
    elsewhere.own_options()
    assert sys.argv == ["elsewhere.py", "--env", "bandit"]
    rows = run(tmp_path / "run", "--env", "sokoban", "--iterations", 1, model=folder, watch=elsewhere.watch)
    for row in rows:
        assert list(row["eval"]) == list(row["yardsticks"]) == ["sokoban", *others]
    assert len((tmp_path / "run/samples.jsonl").read_text().splitlines()) == 2 * 3 * 4
    assert capsys.readouterr().out.count(": sokoban_newvocab 0.") == 2
    assert plots.load(tmp_path / "run").yardsticks["frozenlake"] == rows[0]["yardsticks"]["frozenlake"]


def test_the_picture_of_a_run(bandit, pictures):
    assert plots.curves(bandit[0]).stat().st_size > 10_000


def test_watch_sees_all_of_an_iteration_adds_columns_and_may_stop(tmp_path, folder, tok):
    """Two slices an iteration; what it adds is logged, and a run that it ends is saved."""
    seen = []

    def watch(row, trajs, learned, models, cfg):
        seen.append((row["iteration"], len(trajs), [len(batch["adv"]) for batch, _ in learned if batch]))
        assert cfg.out == str(tmp_path / "run") and len(rows_of(cfg.out)) == row["iteration"], "it is not logged yet"
        assert len(models.tok) == len(tok)
        for batch, steps in learned:
            assert not steps or batch["adv"].shape == batch["mask"].shape
        row["answers"] = sum(len(traj.turns) for traj in trajs)
        row["of numpy"], row["of torch"] = np.float32(0.5), torch.tensor(0.5)
        return row["iteration"] == 2
    flags = "--env sokoban --online-k 2 --iterations 5 --eval-every 0".split()
    rows = run(tmp_path / "run", *flags, model=folder, watch=watch)
    assert [row["iteration"] for row in rows] == [0, 1, 2] == [i for i, _, _ in seen]
    assert [n for _, n, _ in seen] == [0, 16, 16] and all(kept in ([8, 8], [8], []) for _, _, kept in seen)
    assert rows_of(tmp_path / "run") == rows
    assert [row["answers"] for row in rows] == pytest.approx([row.get("turns", 0) * 16 for row in rows])
    saved = torch.load(tmp_path / "run/checkpoint/trainer.pt", weights_only=True)
    assert saved["log"] == (tmp_path / "run/log.jsonl").read_text()


def test_nobody_else_may_train_in_the_folder_of_a_run(tmp_path, folder, bandit):
    """The second one changes nothing; when the first one has ended, also by an error, its lock is free."""
    out = shutil.copytree(bandit[0], tmp_path / "run")
    go_on = ["--resume", str(out), "--iterations"]
    seen = []

    def watch(row, *rest):
        files = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        with pytest.raises(envs.UserError, match="cannot train in .*: another process trains there, or you") as error:
            rm.train(rm.parse_config([*go_on, "9"]))
        assert "\n" not in str(error.value)
        assert files == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        seen.append(row["iteration"])
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError) as kept:  # its traceback lives on, as in a notebook
        rm.train(rm.parse_config([*go_on, "3"]), watch=watch)
    rows, _ = rm.train(rm.parse_config([*go_on, "3"]))
    assert seen == [3] and [row["iteration"] for row in rows] == [0, 1, 2, 3] and kept.tb


def test_an_old_run_goes_on_without_settings_that_it_did_not_know(tmp_path, folder):
    """A setting that is missing in its config.json takes its default; one that is unknown, such as a misspelt one, is
    named. The rows are the same as if it had not stopped."""
    flags = "--env bandit --algo ppo --seed 3 --max-turns 1".split()
    whole = run(tmp_path / "whole", *flags, "--iterations", 2, model=folder)
    out = tmp_path / "run"
    run(out, *flags, "--iterations", 1, model=folder)
    about = json.loads((out / "config.json").read_text())
    for name in ("epochs", "lam", "no_think", "online_k"):
        del about[name]
    (out / "config.json").write_text(json.dumps(about | {"critic_lrr": 0.5}))
    with pytest.raises(envs.UserError, match="config.json missing, damaged, another script's.*'critic_lrr'"):
        rm.parse_config(["--model", str(out)])
    (out / "config.json").write_text(json.dumps(about))
    again, _ = rm.train(rm.parse_config(["--resume", str(out), "--iterations", "2"]))
    assert again == rows_of(out) and [row["iteration"] for row in again] == [0, 1, 2]

    def trained(rows):  # at its last iteration a run evaluates, whatever --eval-every says
        return [{key: x for key, x in row.items() if key not in ("eval", "yardsticks")} for row in untimed(rows)]
    assert trained(again) == trained(whole) and again[2]["eval"] == whole[2]["eval"]


def test_resume_may_change_the_learning_rates_and_keeps_everything_else(tmp_path, folder):
    out = tmp_path / "run"
    flags = "--env bandit --algo ppo --critic-lr 2e-3 --eval-every 0".split()
    _, models = rm.train(settings(out, *flags, model=folder))
    for given, rates in (("", [1e-3, 2e-3]), ("--lr 0.5", [0.5, 2e-3]), ("--lr 0.5 --critic-lr 0.25", [0.5, 0.25])):
        cfg = rm.parse_config(["--resume", str(out), *given.split()])
        again = rm.load_models(cfg)
        again.optimizer = rm.make_optimizer(again, cfg)
        assert rm.restore(again, cfg) == (out / "log.jsonl").read_text()
        assert [group["lr"] for group in again.optimizer.param_groups] == rates
        memory = again.optimizer.state_dict()["state"]  # Adam's averages
        assert memory and equal(memory, models.optimizer.state_dict()["state"])
        for name in ("policy", "critic", "ref"):
            assert equal(*(dict(getattr(some, name).state_dict()) for some in (models, again)))
        assert not equal(dict(again.policy.state_dict()), dict(again.ref.state_dict())), "ref stays what it was"


def test_the_reference_is_restored_whatever_the_run_began_with(tmp_path, folder):
    """If the first model is gone, config.json may name RUN/checkpoint: the KL is still measured from that first model."""
    out = tmp_path / "run"
    _, models = rm.train(settings(out, *"--env bandit --algo grpo --eval-every 0".split(), model=folder))
    first = {name: weight.clone() for name, weight in models.ref.state_dict().items()}
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"model": f"{out}/checkpoint"}))
    cfg = rm.parse_config(["--resume", str(out)])
    again = rm.load_models(cfg)
    again.optimizer = rm.make_optimizer(again, cfg)
    assert not equal(dict(again.ref.state_dict()), first), "it was loaded from the checkpoint"
    rm.restore(again, cfg)
    assert equal(dict(again.ref.state_dict()), first)


def test_a_part_that_the_script_has_since_begins_as_it_is(tmp_path, folder):
    """Such as a loss with weights of its own, or ref after --kl-coef 0. Parts that the checkpoint has are loaded."""
    out = tmp_path / "run"
    rm.train(settings(out, *"--env bandit --algo grpo --eval-every 0".split(), model=folder))
    cfg = rm.parse_config(["--resume", str(out)])
    again = rm.load_models(cfg)
    again.optimizer = rm.make_optimizer(again, cfg)
    again.loss = rm.policy_loss  # a function: nothing to restore
    rm.restore(again, cfg)
    again.loss = torch.nn.Linear(1, 1)
    weight = again.loss.weight.clone()
    trained = {name: x.clone() for name, x in again.policy.state_dict().items()}
    with torch.no_grad():
        next(again.policy.parameters()).zero_()
    rm.restore(again, cfg)
    assert torch.equal(again.loss.weight, weight) and equal(again.policy.state_dict(), trained)


def test_the_command_line_trains_evaluates_and_plays(tmp_path, capsys):
    command_line(*SMALL, *"--env bandit --algo grpo --seed 3 --eval-prompts 8".split(), "--out", tmp_path / "run")
    assert len(rows_of(tmp_path / "run")) == 3
    evaluated = [float(text) for text in re.findall(r"bandit (\d\.\d\d)", capsys.readouterr().out)]
    command_line("--model", tmp_path / "run", "--eval-only")
    assert float(re.search(r"bandit (\d\.\d\d)", capsys.readouterr().out)[1]) == evaluated[-1]
    command_line("--model", tmp_path / "run", "--play", 7)
    shown = capsys.readouterr().out
    arms = re.search("Teacher and Engineer|Engineer and Teacher", envs.make("bandit").reset(7)[0])[0]
    assert "(random, optimal: chances here." in shown and arms in shown and re.search(r"return -?\d", shown)
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "neither of them makes a folder"


def rloo(trajs, models, cfg, seed):
    """REINFORCE leave one out: an episode against the mean of the others of its group."""
    R = rm.returns(trajs, cfg)
    others = (R.sum(1, keepdim=True) - R) / (cfg.rollouts - 1)
    batch = rm.collate(trajs, cfg.device)
    batch["adv"] = (R - others).view(-1, 1) * batch["mask"]
    return batch, rm.updates(batch, models, cfg, seed)


def test_learning_on_a_toy_with_a_method_of_ones_own(tmp_path, random_folder):
    """As test_train.py's: the gain was 0.95 or more with each of six seeds."""
    rows, _ = rm.train(toy(tmp_path / "run", random_folder, "grpo"), learn=rloo)
    assert rows[-1]["reward"] > rows[1]["reward"] + 0.5
