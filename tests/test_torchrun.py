"""Several processes are to do what one does: the same gradient, the same trajectories everywhere, one set of files."""
import multiprocessing

import pytest
import torch

import ragen_mini as rm

SEEDS = list(range(300, 308))


def gradients(cfg):  # of one step on 16 trajectories -> {name: gradient, unscaled}, statistics
    models = rm.load_models(cfg)
    cfg.rollouts, cfg.max_turns = 4, 2
    trajs = rm.rollout(models.policy, models.tok, "frozenlake", SEEDS[:4], 4, cfg, 0, 1.0)
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    found = {}

    def step():
        for part in ("policy", "critic"):
            for name, weight in getattr(models, part).named_parameters():
                found[part, name] = weight.grad.clone()
    models.optimizer.step = step
    rm.MAX_GRAD_NORM, before = 1e9, rm.MAX_GRAD_NORM
    stats = rm.gradient_step(batch, list(range(16)), models, cfg)
    rm.MAX_GRAD_NORM = before
    return found, dict(stats)


def of_all_processes(work, n, tmp_path):  # -> [what work(rank) returned in process 0, 1, ...]
    def child(rank):
        rm.RANK, rm.PROCESSES = rank, n
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=n)
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


def test_the_gradient_is_that_of_one_process(cfg, tmp_path, monkeypatch):
    """With several micro-batches of different numbers of tokens; with one, so that a process has nothing to do."""
    def work(rank):
        found = []
        for tokens in (300, 10 ** 6):
            monkeypatch.setattr(rm, "MICRO_TOKENS", tokens)
            found.append(gradients(cfg))
        return found
    alone = work(0)
    for together in of_all_processes(work, 2, tmp_path):
        for (truth, stats), (found, found_stats) in zip(alone, together):
            assert found.keys() == truth.keys()
            largest = max(gradient.abs().max() for gradient in truth.values())
            for name in truth:
                assert (found[name] - truth[name]).abs().max() < 1e-6 * max(1, largest), name
            assert found_stats == pytest.approx(stats, rel=1e-4, abs=1e-6)


def test_all_processes_get_all_trajectories(cfg, tmp_path):
    models = rm.load_models(cfg)

    def play(rank):
        trajs = rm.rollout_by_all(models.policy, models.tok, "frozenlake", SEEDS[:5], 3, cfg, 0, 1.0)
        return [(traj.group, traj.turns[0]["state"], traj.ids) for traj in trajs]
    one, other = of_all_processes(play, 2, tmp_path)
    assert one == other
    alone = rm.rollout(models.policy, models.tok, "frozenlake", SEEDS[:5], 3, cfg, 0, 1.0)
    assert [traj.group for traj in alone] == [group for group, _, _ in one] == sorted([*range(5)] * 3)
    assert [traj.turns[0]["state"] for traj in alone] == [state for _, state, _ in one]


def test_too_many_processes(cfg, monkeypatch):
    monkeypatch.setattr(rm, "PROCESSES", 9)
    with pytest.raises(rm.UserError, match="9 processes for --prompts 8"):
        rm.join_others(cfg)
