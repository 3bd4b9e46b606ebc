"""PPO's critic: how much of what an episode still brings does it foresee?

    python figures/critic.py > figures/critic.txt       three worlds, three seeds each: a quarter of an hour on one core

*explained*: 1 - Var(rewards to come - forecast) / Var(rewards to come), over all tokens that the model wrote in an
iteration (lambda is 1: what comes is what came). 1: all is foreseen. 0: no better than one number for all. Below 0: worse.
*by the others*: 1 - mean of (R - mean R of the group's other episodes)^2 / Var(R), over episodes: what RLOO's baseline, which
needs no critic, knows before the first token. Negative where levels hardly differ.
"""
import contextlib
import sys
import tempfile
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ragen_mini as rm
from extras import mutants

SEEDS = (200, 201, 202)  # no other figure's
ITERATIONS = 60
PERIODS = {"1": (1, 1), "2-10": (2, 10), "11-30": (11, 30), "31-60": (31, 60)}  # of iterations


def watch(row, trajs, learned, models, cfg):  # adds both columns
    for batch, steps in learned:
        if steps:
            mask = batch["mask"]
            to_come = batch["ret"][mask]
            left = to_come - batch["value"][mask]
            row["explained"] = share(left.var(correction=0), to_come)
            R = rm.returns(trajs, cfg)  # (P,N)
            others = R.sum(1, keepdim=True) - R
            left = R - others / (cfg.rollouts - 1)
            row["by_others"] = share(left.square().mean(), R)


def share(left, whole):  # left: the variance that is not explained
    return 1 - (left / whole.var(correction=0)).item()


def means(rows, column):  # -> one for each period
    found = []
    for first, last in PERIODS.values():
        values = [row[column] for row in rows[first:last + 1] if column in row]
        found.append(fmean(values))
    return found


def show(world, seeds):
    runs = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            cfg = rm.Config(env=world, seed=seed, iterations=ITERATIONS, eval_every=0, device="cpu", out=f"{folder}/run")
            rows, _ = rm.train(cfg, watch=watch)
        runs.append(rows)
    for column in ("explained", "by_others"):
        by_run = [means(rows, column) for rows in runs]
        line = f"{world:12}{column:11}"
        for values in zip(*by_run):  # of a period
            mean, low, high = fmean(values), min(values), max(values)
            cell = f"{mean:5.2f} [{low:.2f}, {high:.2f}]"
            line += f" {cell:22}"
        print(line, flush=True)


def main():
    print(f"python figures/critic.py, commit {mutants.commit()}: mean [lowest, highest] of the seeds {SEEDS}\n")
    print(f"{'iterations':23}", *[f"{period:22}" for period in PERIODS], flush=True)
    for world in ("frozenlake", "sokoban", "bandit"):
        show(world, SEEDS)


if __name__ == "__main__":
    main()
