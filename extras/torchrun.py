"""Several processes train together. torchrun starts this script in each of them.

    torchrun --nproc-per-node 2 extras/torchrun.py --model FOLDER --env sokoban
    torchrun --nproc-per-node 2 extras/torchrun.py --resume RUN

Every process holds the whole model. A group is played by one process. Then all processes exchange
their trajectories, so filter, advantages and statistics are the same everywhere. The rows of a
minibatch are divided, the gradients are summed, and all take the same step. That is what one
process would do, but for the random numbers of the rollout. On GPUs each process takes its own.

Rank 0 alone writes and speaks, but all of them tell errors. After Ctrl-C torchrun waits 30 seconds
for its processes. Where an iteration takes longer, --resume goes on from the last checkpoint.
"""
import contextlib
import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
# If this were loaded later, its default arguments would keep the threads of the process group until
# Python ends, which may then abort.
import torch.distributed.nn

import ragen_mini as rm
from support import errors, folder
from support.errors import need

# torchrun tells each process its number.
RANK = int(os.environ.get("RANK", 0))
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))


def main():
    sys.argv[0] = "ragen_mini.py"  # the same method, so a run of either goes on with the other
    with errors.one_line_errors(), contextlib.ExitStack() as others:
        if RANK > 0:
            write_and_say_nothing(others)
        cfg = rm.parse_config()
        join_others(cfg)
        rm.rollout, rm.add_gradients = rollout, add_gradients
        errors.asked_to_stop = one_was_asked_to_stop
        rm.train(cfg)
        errors.asked_to_stop = this_one_was_asked_to_stop
        # When one process leaves with an exit code, torchrun ends all. So rank 0 must have saved.
        from_all(None)
        dist.destroy_process_group()


def write_and_say_nothing(until):  # until: the stack at whose end this ends
    nowhere = until.enter_context(open(os.devnull, "w"))
    until.enter_context(contextlib.redirect_stdout(nowhere))
    until.enter_context(contextlib.redirect_stderr(nowhere))
    temporary = until.enter_context(tempfile.TemporaryDirectory())
    folder.claim = lambda cfg: replace(cfg, out=temporary)
    folder.save = lambda models, cfg: folder.write_settings(cfg)  # rank 0 has the same weights


def join_others(cfg):
    need("RANK" in os.environ, "This script is started by torchrun: "
                               "torchrun --nproc-per-node 2 extras/torchrun.py")
    need(cfg.trains, "This script trains. For --eval-only and --play take ragen_mini.py.")
    need(PROCESSES <= cfg.prompts, f"There are {PROCESSES} processes, but --prompts is "
                                   f"{cfg.prompts}. Each process must play a group.")
    if cfg.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()


# ---------------------------------------------------------------------------- what is done together
rollout_alone, add_gradients_alone = rm.rollout, rm.add_gradients
this_one_was_asked_to_stop = errors.asked_to_stop


def from_all(x):  # -> [x of rank 0, x of rank 1, ...]
    everyones = [None] * PROCESSES
    dist.all_gather_object(everyones, x)
    return everyones


def rollout(models, seeds, N, cfg, sampling_seed):  # as rm.rollout -> trajectories of all processes
    mine = seeds[RANK::PROCESSES]
    trajs = []
    if mine:  # an evaluation may have fewer levels than there are processes
        trajs = rollout_alone(models, mine, N, cfg, sampling_seed + RANK)
    for traj in trajs:
        traj.group = traj.group * PROCESSES + RANK
        traj.env = LastView(traj.env)
    everyones = sum(from_all(trajs), [])
    return sorted(everyones, key=lambda traj: traj.group)


class LastView:
    """Takes the place of an environment, because not every environment can be sent. The others only
    want to see how it ended.
    """
    def __init__(self, env):
        self.text = env.render()

    def render(self):
        return self.text


def add_gradients(batch, rows, models, cfg):  # as rm.add_gradients
    """The mean over the tokens of all processes is the sum of their means, each weighted by the
    process's share of the tokens.
    """
    mine = rows[RANK::PROCESSES]
    share = (batch["mask"][mine].sum() / batch["mask"][rows].sum()).item()
    stats = {}
    if mine:  # the last minibatch may have fewer rows than there are processes
        stats = add_gradients_alone(batch, mine, models, cfg)
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


def one_was_asked_to_stop():
    """A signal may reach one process before its iteration ends, and another one after that. So all
    ask all, at the same place of `train`.
    """
    return any(from_all(this_one_was_asked_to_stop()))


if __name__ == "__main__":
    main()
