"""extras/torchrun.py: several processes do what one does, and stop and go on together."""
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import ragen_mini as rm
from conftest import ROOT, refused, rows_of, untimed
from support import errors

sys.path.insert(0, str(ROOT / "extras"))
import torchrun

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SMALL = ("--env bandit --prompts 4 --rollouts 4 --minibatch-size 8 --max-new-tokens 12 "
         "--keep 0.5 --eval-every 2 --eval-prompts 16 --device cpu").split()
SEEDS = list(range(300, 308))


# -------------------------------------------------------------------------- the same calculations
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
        process.join(120)
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
    cfg.rollouts, cfg.max_turns, cfg.minibatch_size, cfg.micro_tokens = 3, 2, 4, micro_tokens
    models = rm.load_models(cfg)
    trajs = rm.rollout(models, SEEDS[:3], 3, cfg, 0)
    monkeypatch.setattr(rm, "MAX_GRAD_NORM", 1e9)
    truth, stats = gradients(cfg, models, trajs)
    assert len(truth) == 3, "9 = 4 + 4 + 1"
    for found, found_stats in of_all_processes(lambda _: gradients(cfg, models, trajs), 2,
                                               tmp_path):
        for step, true_step in zip(found, truth, strict=True):
            assert step.keys() == true_step.keys()
            largest = max(gradient.abs().max() for gradient in true_step.values())
            for name, gradient in true_step.items():
                assert (step[name] - gradient).abs().max() < 1e-6 * max(1, largest), name
        for step, true_step in zip(found_stats, stats):
            assert step == pytest.approx(true_step, rel=1e-4, abs=1e-6)


def test_all_processes_get_all_trajectories_in_their_order(cfg, tmp_path):
    """Each group is played with a random stream of its process."""
    models = rm.load_models(cfg)

    def play(rank):
        trajs = rm.rollout(models, SEEDS[:5], 3, cfg, 7)
        return [(traj.group, traj.turns[0]["state"], traj.env.render(), traj.ids)
                for traj in trajs]
    one, other = of_all_processes(play, 2, tmp_path)
    assert one == other and [group for group, *_ in one] == sorted([*range(5)] * 3)
    for rank in range(2):
        truth = rm.rollout(models, SEEDS[:5][rank::2], 3, cfg, 7 + rank)
        mine = [traj for traj in one if traj[0] % 2 == rank]
        assert [traj[1:] for traj in mine] == [
            (traj.turns[0]["state"], traj.env.render(), traj.ids) for traj in truth]


@pytest.mark.parametrize("asked", [(False, True), (True, False), (False, False)])
def test_a_signal_to_one_stops_all(tmp_path, asked):
    def ask(rank):
        errors.STOP.clear()
        if asked[rank]:
            errors.STOP.set()
        return torchrun.one_was_asked_to_stop()
    assert of_all_processes(ask, 2, tmp_path) == [any(asked)] * 2


def test_mistakes(cfg, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert "torchrun" in refused(torchrun.join_others, cfg)
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setattr(torchrun, "PROCESSES", 9)
    assert "--prompts is 8" in refused(torchrun.join_others, cfg)
    assert "--eval-only" in refused(torchrun.join_others, rm.replace(cfg, eval_only=True))


# --------------------------------------------------------------------------------- real processes
def start(*words):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*TORCHRUN, "extras/torchrun.py", *map(str, words)], cwd=ROOT, env=env,
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):  # -> exit code, stdout, stderr
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def is_whole(out):  # does the checkpoint have all rows?
    state = torch.load(Path(out, "checkpoint", "trainer.pt"))
    assert len(state["log"].splitlines()) == len(rows_of(out))
    return state["policy"]


def test_a_run_of_two_processes(tmp_path):
    """Rank 0 writes and speaks, once. One process may go on with it."""
    out = tmp_path / "run"
    code, said, err = finish(start(*SMALL, "--iterations", "2", "--out", out))
    assert code == 0, err
    assert said.count("iteration 2: bandit") == said.count("tiny learns") == 1
    assert [row.get("updates") for row in rows_of(out)] == [None, 1, 1] and is_whole(out)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    rm.train(rm.parse_config(["--resume", str(out), "--iterations", "3"]))
    assert len(rows_of(out)) == 4


@pytest.mark.parametrize("who", ["torchrun", 0, 1])
def test_whoever_is_interrupted_all_stop_and_go_on_as_if_nothing_had_happened(who, tmp_path):
    """torchrun passes Ctrl-C on. The iteration is finished and saved."""
    out = tmp_path / "run"
    process = start(*SMALL, "--iterations", "100000", "--out", out)
    while not (out / "log.jsonl").exists() or len(rows_of(out)) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    number = process.pid
    if who != "torchrun":
        children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        number = int(children[who])
    os.kill(number, signal.SIGINT)
    _, _, err = finish(process)
    assert err.count("finishing this iteration") <= 1, "rank 1 is silent"
    is_whole(out)
    if who == "torchrun":
        done = ["--iterations", len(rows_of(out))]  # one more
        code, _, err = finish(start("--resume", out, *done))
        assert code == 0, err
        code, _, err = finish(start(*SMALL, *done, "--out", tmp_path / "whole"))
        assert code == 0, err
        assert untimed(rows_of(out)) == untimed(rows_of(tmp_path / "whole"))
        truth = is_whole(tmp_path / "whole")
        assert all(torch.equal(weight, truth[name]) for name, weight in is_whole(out).items())
