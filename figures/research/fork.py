"""What breaks a model that has won? We fork its training shortly before, with one thing changed.

    python figures/research/fork.py --jobs 2    trains what is missing; stopped, it goes on
    python figures/paper.py fig-fork            the picture; `forks`: the tables (fork_report.py)

All of this was decided before any of the runs was made:

Origins. An origin is a run of PPO in the trap of paper.json: bandit, rate 2e-3, 8 trajectories per
update, at most 400 iterations. The seeds are 41, 42, ..., until ten runs have won (a mean success
of five iterations of 0.9 or more) and were not lost before iteration 40. Every five iterations the
networks and Adam's state are kept, in runs/fork. *Lost* is what plots.peak_and_collapse says.

Fork points. (a) is before the break: the last kept state that is five iterations or more before the
loss. An origin that is not lost takes the fork point of a lost one: the first such origin takes
that of the first lost one, by seed, and so on. (b) is iteration 30. A lost origin was *calm* if the
median of the largest gradient norms of the 20 iterations up to (a) is below 0.03.

Forks. Each is trained for 20 iterations with new random numbers, for levels, sampling and the order
of minibatches. These are called its dice. Each arm has eight forks, with the same eight dice in
every arm:
    at (a)    as it is
              floor        Adam's second moment of a weight never falls below its value at
                           iteration 30
              cap          a weight moves by at most 0.3 learning rates in an update
              third        a third of both rates
    at (b)    as it is
              calm         Adam's second moment times 1e-4, its first times 1e-2: as gradients of a
                           hundredth would leave them
              calm, cap    the same, and a weight moves by at most 0.3 learning rates

Measures. A fork is lost if success is below half of its origin's peak in each of its last five
iterations. (A run that ends for want of updates goes on at its last value.) Its longest step is the
largest root mean square, over the policy's weights, of an update's movement in learning rates.

Tests. McNemar's exact test over pairs of forks of the same origin, point and dice, two-sided, with
Holm's correction over these seven: floor, and cap, against "as it is", in calm and in other lost
origins; third in all lost origins; calm against "as it is", and against "calm, cap", in all. What
would follow: if the calm is the cause, "floor" prevents breaks of calm origins, and "calm" makes
some. If any long step is the cause, "cap" and "third" protect the other origins, too. Pairs tell of
these ten models. The counts by origin show how far that carries to other seeds.

Added later, because another processor rounds differently: an origin and all its forks are made on
one machine. If the states of an unfinished origin are not there, it is made again with its forks.
(Seeds 43 to 50 were, after 41 of their forks had been made. 41 and 42 were complete.) The cut
turned out to be deeper than a calm: with beta2 = 0.999 a factor of 1e-4 takes 9,206 updates without
a gradient, and a whole run makes 6,400. The arms change both policy and critic.
"""
import argparse
import bz2
import contextlib
import io
import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

FIGURES = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(FIGURES.parent))

import plots
import ragen_mini as rm

RUNS = FIGURES.parent / "runs" / "fork"
DATA = FIGURES / "tiny" / "forks.jsonl"
PACKED = DATA.with_suffix(".jsonl.bz2")  # when all are there
SETTINGS = dict(env="bandit", model="tiny", device="cpu", lr=2e-3, minibatch_size=8,
                iterations=400, eval_every=0)
FIRST_SEED, ORIGINS = 41, 10
WON, NOT_BEFORE = 0.9, 40
KEPT_EVERY = 5
EARLY = 30  # fork point (b)
DICE = range(1, 9)
LENGTH = 20  # iterations of a fork
BEFORE_BREAK = ("as it is", "floor", "cap", "third")
AT_EARLY = ("as it is", "calm", "calm, cap")


# ----------------------------------------------------------------------------------------- origins
def train_origin(seed):  # -> dict for DATA
    folder = RUNS / f"seed{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was stopped
    cfg = rm.Config(**SETTINGS, seed=seed, out=str(folder))
    rows, _ = rm.train(cfg, callback=keep_state)
    run = plots.Run({}, rows)
    names = ("success", "valid", "distinct", "entropy", "grad_norm_max")
    columns = {name: run.series(name)[1].tolist() for name in names}
    peak_at, lost_at = plots.peak_and_collapse(run)
    success = np.array(columns["success"])
    peak = success[peak_at - 1:peak_at - 1 + plots.WINDOW].mean()  # iteration 1 is the first
    lost_at = None if lost_at is None else int(lost_at)
    return dict(origin=seed, peak=round(peak, 4), lost_at=lost_at, **columns)


def keep_state(row, trajs, models, cfg):
    if row["iteration"] % KEPT_EVERY == 0 and row["iteration"] >= EARLY:
        names = ("policy", "critic", "optimizer")
        parts = {name: getattr(models, name).state_dict() for name in names}
        torch.save(parts, state_of(cfg.seed, row["iteration"]))


def state_of(seed, iteration):  # -> Path
    return RUNS / f"seed{seed}" / f"at{iteration}.pt"


def qualifies(origin):
    return origin["peak"] >= WON and (origin["lost_at"] is None or origin["lost_at"] >= NOT_BEFORE)


def fork_points(origins):  # {seed: dict} -> {seed: iteration of (a)}
    points = {}
    for seed, origin in sorted(origins.items()):
        if origin["lost_at"] is not None:
            points[seed] = (origin["lost_at"] - KEPT_EVERY) // KEPT_EVERY * KEPT_EVERY
    of_lost = list(points.values())
    survivors = [seed for seed in sorted(origins) if seed not in points]
    return points | dict(zip(survivors, of_lost))


# ------------------------------------------------------------------------------------------- forks
def train_fork(origin, at, arm, dice):  # -> dict for DATA
    with contextlib.redirect_stdout(io.StringIO()):
        cfg = rm.Config(**SETTINGS, seed=1000 * origin + dice)
        models = rm.load_models(cfg)
        models.optimizer = rm.make_optimizer(models, cfg)
    for name, state in torch.load(state_of(origin, at)).items():
        getattr(models, name).load_state_dict(state)
    change(models, arm, origin)
    steps = []
    measure_steps(models, steps)
    rows = []
    for i in range(at + 1, at + 1 + LENGTH):
        row, _ = rm.iterate(i, models, cfg)
        rows.append(row)
        if rm.is_dead(rows):
            break
    names = ("success", "valid", "grad_norm_max")
    columns = {name: [row.get(name) for row in rows] for name in names}
    longest = round(max(steps, default=0.0), 4)
    return dict(fork=origin, at=at, arm=arm, dice=dice, longest_step=longest, **columns)


def change(models, arm, origin):
    adam = models.optimizer
    if arm == "third":
        for group in adam.param_groups:
            group["lr"] /= 3
    if arm.startswith("calm"):
        for state in adam.state.values():
            state["exp_avg"] *= 1e-2
            state["exp_avg_sq"] *= 1e-4
    if arm == "floor":
        keep_above(adam, origin)
    if arm.endswith("cap"):
        cap_steps(adam, 0.3)


def keep_above(adam, origin):
    """Adam divides its second moment by 1 - beta2 ** step, which is far from 1 at iteration 30. So
    the floor is divided by it, too.
    """
    beta2 = adam.param_groups[0]["betas"][1]
    early = torch.load(state_of(origin, EARLY))["optimizer"]["state"]
    floors = {}
    for weight, state in zip(weights(adam), early.values()):
        floors[weight] = state["exp_avg_sq"] / (1 - beta2 ** state["step"])

    def lift(*_):
        for weight, floor in floors.items():
            state = adam.state[weight]
            state["exp_avg_sq"].clamp_(min=floor * (1 - beta2 ** state["step"]))
    adam.register_step_pre_hook(lift)


def weights(adam):
    return [weight for group in adam.param_groups for weight in group["params"]]


def cap_steps(adam, most):  # in learning rates
    before = {}

    def remember(*_):
        for weight in weights(adam):
            before[weight] = weight.detach().clone()

    @torch.no_grad()
    def shorten(*_):
        for group in adam.param_groups:
            limit = most * group["lr"]
            for weight in group["params"]:
                step = (weight - before[weight]).clamp(-limit, limit)
                weight.copy_(before[weight] + step)
    adam.register_step_pre_hook(remember)
    adam.register_step_post_hook(shorten)


def measure_steps(models, steps):
    """Appends a number to `steps` for every update."""
    policy = models.optimizer.param_groups[0]
    before = {}

    def remember(*_):
        vector = torch.nn.utils.parameters_to_vector(policy["params"])
        before["policy"] = vector.detach().clone()

    def measure(*_):
        now = torch.nn.utils.parameters_to_vector(policy["params"]).detach()
        moved = (now - before["policy"]) / policy["lr"]
        steps.append(moved.square().mean().sqrt().item())
    models.optimizer.register_step_pre_hook(remember)
    models.optimizer.register_step_post_hook(measure)


# ------------------------------------------------------------------------------------- all of them
def load():  # -> {seed: origin}, {(seed, at, arm, dice): fork}
    origins, forks = {}, {}
    text = ""
    if PACKED.exists():
        text = bz2.decompress(PACKED.read_bytes()).decode()
    elif DATA.exists():
        text = DATA.read_text()
    for line in text.splitlines():
        found = json.loads(line)
        if "origin" in found:
            origins[found["origin"]] = found
        else:
            forks[found["fork"], found["at"], found["arm"], found["dice"]] = found
    return origins, forks


def chosen(origins):  # -> {seed: origin} of the first ten that qualify; None if more are needed
    found = {}
    for seed in range(FIRST_SEED, FIRST_SEED + len(origins)):
        if seed not in origins:
            return None
        if qualifies(origins[seed]):
            found[seed] = origins[seed]
        if len(found) == ORIGINS:
            return found
    return None


def missing_origins(origins):
    failed = sum(not qualifies(origin) for origin in origins.values())
    wanted = range(FIRST_SEED, FIRST_SEED + ORIGINS + failed)
    return [seed for seed in wanted if seed not in origins]


def all_forks(origins):  # of the chosen origins -> list of (seed, at, arm, dice)
    found = []
    for seed, at in fork_points(origins).items():
        for dice in DICE:
            found += [(seed, at, arm, dice) for arm in BEFORE_BREAK]
            found += [(seed, EARLY, arm, dice) for arm in AT_EARLY]
    return found


def work(task):
    os.environ["TQDM_DISABLE"] = "1"
    torch.set_num_threads(1)
    if isinstance(task, int):
        return train_origin(task)
    return train_fork(*task)


def forget_without_states():
    """Keeps nothing in DATA of origins that lack forks and whose states are not on this machine."""
    origins, forks = load()
    if chosen(origins) is None:
        seeds = set(origins)
    else:
        seeds = {task[0] for task in all_forks(chosen(origins)) if task not in forks}
    lost = {seed for seed in seeds if not state_of(seed, EARLY).exists()}
    found = [origin for seed, origin in origins.items() if seed not in lost]
    found += [fork for task, fork in forks.items() if task[0] not in lost]
    DATA.write_text("".join(json.dumps(line) + "\n" for line in found))


def run(jobs):
    if PACKED.exists():
        return print("all are there: python figures/paper.py forks")
    forget_without_states()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool, open(DATA, "a") as file:
        while tasks := to_do():
            print(f"{len(tasks)} to train", flush=True)
            for found in pool.imap_unordered(work, tasks):
                file.write(json.dumps(found) + "\n")
                file.flush()
    PACKED.write_bytes(bz2.compress(DATA.read_bytes()))
    DATA.unlink()


def to_do():
    origins, forks = load()
    if chosen(origins) is None:
        return missing_origins(origins)
    return [task for task in all_forks(chosen(origins)) if task not in forks]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    run(parser.parse_args().jobs)
