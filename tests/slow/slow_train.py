"""Whole runs: too long for the quick tests (test_train.py)."""
import numpy as np
import pytest
import torch

import ragen_mini as rm
from conftest import equal, refused, rows_of
from test_train import bandit, copied  # noqa: F401 (fixtures)
from test_train import files_of, resumed, run, settings, state_of


@pytest.mark.parametrize("flags", [
    "--env bandit --algo grpo --starpo-s", "--env sokoban --algo ppo --starpo-s",
    "--env sokoban --algo grpo", "--env frozenlake --algo ppo"])
def test_methods_run_in_environments(tmp_path, folder, flags):
    out = tmp_path / "run"
    rows = run(out, *flags.split(), model=folder)
    assert rows_of(out) == rows and [row["iteration"] for row in rows] == [0, 1, 2]
    columns = ("reward reward_std success entropy response_length think_length distinct valid "
               "turns grad_norm clip_fraction policy_loss grad_norm_max seconds_rollout "
               "seconds_update tokens logp_gap").split()
    columns += ["value_loss"] * ("ppo" in flags) + ["kl"] * ("--starpo-s" not in flags)
    trained = [row for row in rows[1:] if row["updates"]]
    assert trained
    for row in trained:
        assert np.isfinite([row[name] for name in columns]).all()
        # keep 0.25 leaves one group.
        assert row["updates"] == (1 if "--starpo-s" in flags else 2)
    name = flags.split()[1]
    assert list(rows[0]["eval"]) == list(rows[2]["eval"]) == [name] and "eval" not in rows[1]


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


def test_nobody_else_may_train_in_the_folder_of_a_run(copied):  # noqa: F811
    """The second one changes nothing. When the first one has ended, also by an error, it is free.
    """
    cfg = rm.parse_config(["--resume", str(copied), "--iterations", "3"])
    seen = []

    def callback(row, *rest):
        before = files_of(copied)
        assert str(copied) in refused(resumed, copied, "--iterations", 9)
        assert files_of(copied) == before
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
