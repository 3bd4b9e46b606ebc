"""Several processes train together; torchrun starts this script in each of them. All options of ragen_mini.py:

    torchrun --nproc-per-node 2 extras/torchrun.py --model FOLDER --env sokoban
    torchrun --nproc-per-node 2 extras/torchrun.py --resume RUN

Every process holds the whole model. A group is played by one process; then all processes have all trajectories, so that
filter, advantages and statistics are the same everywhere. The rows of an update are divided, the gradients are summed,
and all take the same step: what one process would do, but for the random numbers of the rollout. On GPUs each process
takes one of its own. Rank 0 alone writes and speaks; errors are told by all.

After Ctrl-C torchrun waits 30 seconds for its processes. Where an iteration takes longer, --resume goes on from the
last checkpoint (--save-every).
"""
import contextlib
import functools
import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.nn  # loaded later, its default arguments keep the group's threads until Python ends: an abort

import ragen_mini as rm
from envs import need

RANK = int(os.environ.get("RANK", 0))  # torchrun tells each process its number
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))


def main():
    sys.argv[0] = "ragen_mini.py"  # the same method: a run of either goes on with the other
    cfg = rm.parse_config()
    join_others(cfg)
    if RANK == 0:
        work(cfg)
    else:
        with tempfile.TemporaryDirectory() as folder, silence():
            work(elsewhere(cfg, folder))
    from_all(None)  # torchrun ends all when one has left with an exit code: wait until rank 0 has saved
    dist.destroy_process_group()
    if rm.STOP:
        sys.exit(128 + rm.STOP[0])


def join_others(cfg):
    need("RANK" in os.environ, "torchrun starts this script: torchrun --nproc-per-node 2 extras/torchrun.py")
    need(PROCESSES <= cfg.prompts, f"{PROCESSES} processes for --prompts {cfg.prompts}: each must play one at least")
    if cfg.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    from_all(None)  # all have read the settings of --resume RUN, which rank 0 is about to write anew


def work(cfg):
    if cfg.eval_only or cfg.play is not None:
        rm.evaluate(0, rm.load_models(cfg), replace(cfg, out=""), play)
    else:
        rm.train(cfg, learn=learn, watch=watch, rollout=play)


# --------------------------------------------------------------------------------------- what is done together
def from_all(x):  # -> [x of rank 0, x of rank 1, ...]
    everyones = [None] * PROCESSES
    dist.all_gather_object(everyones, x)
    return everyones


def play(models, seeds, N, cfg, sampling_seed):  # as rm.rollout -> the trajectories of all processes, by group
    mine = seeds[RANK::PROCESSES]
    trajs = []
    if mine:  # an evaluation may have fewer levels than there are processes
        trajs = rm.rollout(models, mine, N, cfg, sampling_seed + RANK)
    for traj in trajs:
        traj.group = traj.group * PROCESSES + RANK
        traj.env = LastView(traj.env)
    everyones = sum(from_all(trajs), [])
    return sorted(everyones, key=lambda traj: traj.group)


class LastView:
    """In the place of a world, of which others only want to see how it ended: not every world can be sent."""

    def __init__(self, env):
        self.text = env.render()

    def render(self):
        return self.text


def add_gradients(batch, rows, models, cfg):  # as rm.add_gradients
    """The mean over the tokens of all processes is the sum of theirs, each weighted by its share of the tokens."""
    mine = rows[RANK::PROCESSES]
    share = (batch["mask"][mine].sum() / batch["mask"][rows].sum()).item()
    stats = {}
    if mine:  # the last update may have fewer rows than there are processes
        stats = rm.add_gradients(batch, mine, models, cfg)
    for group in models.optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad *= share
            dist.all_reduce(weight.grad)  # the sum, everywhere
    of_all = Counter()
    for part in from_all({name: share * x for name, x in stats.items()}):
        of_all.update(part)
    return of_all


learn = functools.partial(rm.learn, gradients=add_gradients)


def watch(row, trajs, learned, models, cfg):  # -> stop?
    """A signal may reach one process before its iteration ends, another one after. So all ask all, once an iteration.
    rm.train has looked at its own STOP just before: what it saw is seen here, too."""
    return any(from_all(len(rm.STOP) > 0))


# ------------------------------------------------------------------------------------ processes that do not write
@contextlib.contextmanager
def silence():  # until it ends: errors are told
    with open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield


def elsewhere(cfg, folder):  # -> cfg of a run in this folder
    rm.save = lambda *_: None  # checkpoints are large, and rank 0 has the same weights
    run = Path(folder, "run")
    run.mkdir()
    if cfg.resume:
        saved = Path(cfg.resume, "checkpoint").resolve()
        Path(run, "checkpoint").symlink_to(saved)  # to be read only
        return replace(cfg, resume=str(run))
    return replace(cfg, out=str(run))


if __name__ == "__main__":
    main()
