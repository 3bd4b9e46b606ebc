"""Whole runs, as their user starts them: too long for the quick tests (test_train.py)."""
import json
import re
import shutil

import numpy as np
import pytest
import torch

import envs
import plots
import ragen_mini as rm
import runs
from conftest import equal, rows_of
from test_train import SMALL, command_line, files_of, resumed, run, settings, state_of, toy
from test_train import bandit, up_pays  # noqa: F401 (fixtures)


@pytest.mark.parametrize("flags", [
    "--env bandit --algo grpo --starpo-s", "--env sokoban --algo ppo --starpo-s",
    "--env sokoban --algo grpo", "--env frozenlake --algo ppo"])
def test_methods_run_in_environments(tmp_path, folder, flags):
    out = tmp_path / "run"
    rows = run(out, *flags.split(), model=folder)
    assert rows_of(out) == rows and [row["iteration"] for row in rows] == [0, 1, 2]
    columns = ("reward reward_std success entropy response_length think_length distinct valid "
               "turns grad_norm clip_fraction policy_loss grad_norm_max seconds_rollout "
               "seconds_update tokens").split()
    columns += ["value_loss"] * ("ppo" in flags) + ["kl"] * ("--starpo-s" not in flags)
    trained = [row for row in rows[1:] if row["updates"]]
    assert trained
    for row in trained:
        assert np.isfinite([row[name] for name in columns]).all()
        # keep 0.25 leaves one group.
        assert row["updates"] == (1 if "--starpo-s" in flags else 2)
    name = flags.split()[1]
    assert list(rows[0]["eval"]) == list(rows[2]["eval"]) == [name] and "eval" not in rows[1]
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "log.jsonl", "samples.jsonl", "checkpoint", "curves.png",
                     "lock"}
    for line in (out / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        R = sum(turn["reward"] for turn in sample["turns"])
        assert sample["text"].endswith(f"\nreturn {R:g}\n")


def test_each_slice_of_online_k_is_learnt_from_once_by_what_the_one_before_left(
        tmp_path, monkeypatch):
    learn = rm.learn
    slices = []
    weights = []

    def spy(trajs, models, cfg, seed):
        slices.append(trajs)
        weights.append(next(models.policy.parameters()).sum().item())
        return learn(trajs, models, cfg, seed)
    monkeypatch.setattr(rm, "learn", spy)
    rows = run(tmp_path / "run", *"--online-k 3 --iterations 1 --minibatch-size 8".split(),
               *"--eval-every 0 --seed 1".split())
    assert [len(trajs) for trajs in slices] == [8, 8, 8]
    assert len({id(traj) for trajs in slices for traj in trajs}) == 24
    assert rows[1]["updates"] == 3 and len({*weights}) == 3


def test_the_picture_of_a_run(bandit, tmp_path, pictures):
    picture = plots.curves({"run": plots.load(bandit[0])}, tmp_path / "curves.png")
    assert picture.stat().st_size > 10_000


def test_a_callback_sees_all_of_an_iteration_adds_columns_and_may_stop(tmp_path, folder, tok):
    """What it adds is logged, and a run that it ends is saved."""
    seen = []

    def callback(row, trajs, models, cfg):
        seen.append((row["iteration"], len(trajs)))
        assert cfg.out == str(tmp_path / "run") and len(models.tok) == len(tok)
        assert len(rows_of(cfg.out)) == row["iteration"], "it is not logged yet"
        row["answers"] = sum(len(traj.turns) for traj in trajs)
        row["of numpy"], row["of torch"] = np.float32(0.5), torch.tensor(0.5)
        return row["iteration"] == 2
    rows = run(tmp_path / "run", *"--env sokoban --online-k 2 --iterations 5".split(),
               *"--eval-every 0".split(), model=folder, callback=callback)
    assert seen == [(0, 0), (1, 16), (2, 16)]
    assert rows_of(tmp_path / "run") == rows
    for row in rows:
        assert row["answers"] == pytest.approx(row.get("turns", 0) * 16)
    saved = torch.load(tmp_path / "run/checkpoint/trainer.pt", weights_only=True)
    assert saved["log"] == (tmp_path / "run/log.jsonl").read_text()


def test_nobody_else_may_train_in_the_folder_of_a_run(tmp_path, bandit):
    """The second one changes nothing. When the first one has ended, also by an error, it is free.
    """
    out = shutil.copytree(bandit[0], tmp_path / "run")
    cfg = rm.parse_config(["--resume", str(out), "--iterations", "3"])
    seen = []

    def callback(row, *rest):
        before = files_of(out)
        with pytest.raises(runs.UserError, match=str(out)) as error:
            resumed(out, "--iterations", 9)
        assert "\n" not in str(error.value) and files_of(out) == before
        seen.append(row["iteration"])
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError) as kept:  # its traceback lives on, as in a notebook
        rm.train(cfg, callback=callback)
    rows, _ = rm.train(cfg)
    assert seen == [3] and [row["iteration"] for row in rows] == [0, 1, 2, 3] and kept.tb


def test_a_network_of_ones_own_among_the_models_is_saved_and_restored(tmp_path, folder):
    """Such as one that a loss of one's own uses. One that the run did not have stays as it is."""
    def with_own():
        models = rm.load_models(cfg)
        models.own = torch.nn.Linear(1, 1)
        return models
    cfg = settings(tmp_path / "run", *"--env bandit --algo grpo --eval-every 0".split(),
                   "--iterations", 1, model=folder)
    _, models = rm.train(cfg, with_own())
    cfg = rm.parse_config(["--resume", str(tmp_path / "run"), "--iterations", "2"])
    again = with_own()
    again.other = torch.nn.Linear(1, 1)
    before = state_of(again.other)
    rm.train(cfg, again)
    assert equal(state_of(again.own), state_of(models.own))
    assert equal(state_of(again.other), before)


def test_the_command_line_trains_evaluates_and_plays(tmp_path, capsys):
    def evaluated():
        return [float(text) for text in re.findall(r"bandit (\d\.\d\d)", capsys.readouterr().out)]
    command_line(*SMALL, *"--env bandit --algo grpo --seed 3 --eval-prompts 8".split(),
                 "--out", tmp_path / "run")
    assert len(rows_of(tmp_path / "run")) == 3
    last = evaluated()[-1]
    command_line("--model", tmp_path / "run", "--eval-only")
    assert evaluated() == [last]
    command_line("--model", tmp_path / "run", "--play", 7)
    shown = capsys.readouterr().out
    first, second = envs.make("bandit").reset(7)[0].split()[3::2]
    assert f"{first} and {second[:-1]}" in shown and re.search(r"return -?\d", shown)
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "neither makes a folder"


def rloo(trajs, models, cfg, seed):
    """REINFORCE leave one out: an episode against the mean of the others of its group."""
    R = rm.returns(trajs, cfg)
    others = (R.sum(1, keepdim=True) - R) / (cfg.rollouts - 1)
    batch = rm.collate(trajs, cfg.device)
    batch["adv"] = (R - others).view(-1, 1) * batch["mask"]
    return batch, rm.updates(batch, models, cfg, seed)


def test_learning_on_a_toy_with_a_method_of_ones_own(tmp_path, random_folder, up_pays, monkeypatch):
    """As test_train.py's: the gain was 0.95 or more with each of six seeds."""
    monkeypatch.setattr(rm, "learn", rloo)
    rows, _ = rm.train(toy(tmp_path / "run", random_folder, "grpo"))
    assert rows[-1]["reward"] > rows[1]["reward"] + 0.5
