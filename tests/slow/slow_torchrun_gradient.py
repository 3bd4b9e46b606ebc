"""Several processes do what one does: the same gradient, the same trajectories everywhere."""
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "extras"))

import ragen_mini as rm
import runs
import torchrun

SEEDS = list(range(300, 308))


def of_all_processes(work, n, tmp_path):  # -> [what work(rank) returned in process 0, 1, ...]
    def child(rank):
        torchrun.RANK, torchrun.PROCESSES = rank, n
        rm.rollout, rm.add_gradients = torchrun.rollout, torchrun.add_gradients
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=n)
        torch.save(work(rank), tmp_path / f"{rank}.pt")
        torch.distributed.barrier()
    context = multiprocessing.get_context("fork")  # starts at once: nothing is imported anew
    children = [context.Process(target=child, args=(rank,)) for rank in range(n)]
    for process in children:
        process.start()
    for process in children:
        process.join(60)
        assert process.exitcode == 0
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(n)]


def gradients(cfg, models, trajs):  # -> [{name: gradient} of each step], its statistics
    """The weights stay, so that every step has the same truth."""
    models.optimizer = rm.make_optimizer(models, cfg)
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    found = []

    def step():
        found.append({})
        for part in ("policy", "critic"):
            for name, weight in getattr(models, part).named_parameters():
                found[-1][part, name] = weight.grad.clone()
    models.optimizer.step = step
    steps = rm.updates(batch, models, cfg, 0)
    return found, [dict(stats) for stats in steps]


@pytest.mark.parametrize("micro_tokens", [300, 10 ** 6])
def test_the_gradient_is_that_of_one_process(cfg, tmp_path, monkeypatch, micro_tokens):
    """With many micro-batches of different numbers of tokens, and with one. The last minibatch has
    one row for two processes.
    """
    cfg.rollouts, cfg.max_turns, cfg.minibatch_size = 3, 2, 4
    models = rm.load_models(cfg)
    trajs = rm.rollout(models, SEEDS[:3], 3, cfg, 0)
    monkeypatch.setattr(rm, "MAX_GRAD_NORM", 1e9)
    monkeypatch.setattr(rm, "MICRO_TOKENS", micro_tokens)
    truth, stats = gradients(cfg, models, trajs)
    assert [len(step) > 0 for step in truth] == [True] * 3, "9 = 4 + 4 + 1"
    together = of_all_processes(lambda rank: gradients(cfg, models, trajs), 2, tmp_path)
    for found, found_stats in together:
        assert len(found) == len(truth)
        for step, true_step in zip(found, truth):
            assert step.keys() == true_step.keys()
            largest = max(gradient.abs().max() for gradient in true_step.values())
            for name, gradient in true_step.items():
                assert (step[name] - gradient).abs().max() < 1e-6 * max(1, largest), name
        for step, true_step in zip(found_stats, stats):
            assert step == pytest.approx(true_step, rel=1e-4, abs=1e-6)


def test_one_filter_for_all(cfg, tmp_path):
    """`learn` keeps the same groups, and makes the same batch and as many steps as alone."""
    cfg.rollouts, cfg.prompts, cfg.max_turns, cfg.minibatch_size, cfg.keep = 4, 4, 2, 4, 0.5
    cfg.lr = cfg.critic_lr = 0.0
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    trajs = rm.rollout(models, SEEDS[:4], 4, cfg, 0)
    batch, steps = rm.learn(trajs, models, cfg, 3)
    assert len(steps) == 2
    together = of_all_processes(lambda rank: rm.learn(trajs, models, cfg, 3), 2, tmp_path)
    for found, found_steps in together:
        assert found.keys() == batch.keys()
        for name, x in batch.items():
            assert torch.allclose(found[name], x), name
        for step, true_step in zip(found_steps, steps, strict=True):
            assert step == pytest.approx(true_step, rel=1e-4, abs=1e-6)


def test_all_processes_get_all_trajectories(cfg, tmp_path):
    models = rm.load_models(cfg)

    def play(rank):
        trajs = rm.rollout(models, SEEDS[:5], 3, cfg, 0)
        return [(traj.group, traj.turns[0]["state"], traj.ids) for traj in trajs]
    one, other = of_all_processes(play, 2, tmp_path)
    assert one == other
    alone = rm.rollout(models, SEEDS[:5], 3, cfg, 0)
    groups = sorted([*range(5)] * 3)
    assert [traj.group for traj in alone] == groups
    assert [group for group, _, _ in one] == groups
    assert [traj.turns[0]["state"] for traj in alone] == [state for _, state, _ in one]


def test_each_group_is_played_with_a_random_stream_of_its_process(cfg, tmp_path):
    models = rm.load_models(cfg)
    found, _ = of_all_processes(
        lambda rank: rm.rollout(models, SEEDS[:2], 2, cfg, 7), 2, tmp_path)
    for rank in range(2):
        truth = rm.rollout(models, [SEEDS[rank]], 2, cfg, 7 + rank)
        mine = [traj for traj in found if traj.group == rank]
        assert [traj.ids for traj in mine] == [traj.ids for traj in truth]
        assert [traj.env.render() for traj in mine] == [traj.env.render() for traj in truth]


def test_fewer_levels_than_processes(cfg, tmp_path):
    """--eval-prompts 1: one plays, all know how it ended."""
    models = rm.load_models(cfg)
    bandit = rm.replace(cfg, env="bandit")
    one, other = of_all_processes(
        lambda rank: rm.play([5], models, bandit), 2, tmp_path)
    assert [traj.ids for traj in one] == [traj.ids for traj in other]
    assert len(one) == 1


@pytest.mark.parametrize("asked", [(False, True), (True, False), (False, False)])
def test_a_signal_to_one_stops_all(tmp_path, asked):
    def ask(rank):
        runs.STOP.clear()
        if asked[rank]:
            runs.STOP.set()
        return torchrun.one_was_asked_to_stop({}, [], None, None)
    assert of_all_processes(ask, 2, tmp_path) == [any(asked)] * 2


def test_too_many_processes(cfg, monkeypatch):
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setattr(torchrun, "PROCESSES", 9)
    with pytest.raises(runs.UserError, match="9 processes, but --prompts is 8"):
        torchrun.join_others(cfg)


def test_without_torchrun(cfg, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(runs.UserError, match="started by torchrun"):
        torchrun.join_others(cfg)
