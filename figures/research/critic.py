"""PPO's critic: how well does it predict the rewards to come?

    python figures/research/critic.py > figures/research/critic.txt

Three environments with three seeds each take a quarter of an hour on one core. The columns:

    explained    1 - Var(rewards to come - value) / Var(rewards to come), over all tokens that the
                 model wrote in an iteration. (Lambda is 1: what is to come is what came.) It is 1
                 if the values are right, and 0 if they are no better than one number for all.
    by_others    1 - mean of (R - mean R of the other episodes of its group)^2 / Var(R), over
                 episodes. That is how good the baseline of RLOO is, which needs no critic, before
                 the first token. It is negative if levels hardly differ.
"""
import contextlib
import sys
import tempfile
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ragen_mini as rm
from extras.dev import mutants

SEEDS = (200, 201, 202)  # no other figure has them
ITERATIONS = 60
PERIODS = {"1": (1, 1), "2-10": (2, 10), "11-30": (11, 30), "31-60": (31, 60)}  # of iterations
BATCHES = []  # what `learn` has learned from in this iteration
original_learn = rm.learn


def learn(trajs, models, cfg, seed):
    batch, steps = original_learn(trajs, models, cfg, seed)
    if steps:
        BATCHES.append(batch)
    return batch, steps


def add_columns(row, trajs, models, cfg):
    for batch in BATCHES:
        mask = batch["mask"]
        # With lambda = 1 the target is the sum of the rewards to come.
        to_come = batch["value_target"][mask]
        left = to_come - batch["value"][mask]
        row["explained"] = share_explained(left.var(correction=0), to_come)
        R = rm.returns(trajs, cfg)  # (P,N)
        others = (R.sum(1, keepdim=True) - R) / (cfg.rollouts - 1)
        row["by_others"] = share_explained((R - others).square().mean(), R)
    BATCHES.clear()


def share_explained(left, whole):  # left: the variance that is not explained
    return 1 - (left / whole.var(correction=0)).item()


def means(rows, column):  # -> one for each period
    found = []
    for first, last in PERIODS.values():
        values = [row[column] for row in rows[first:last + 1] if column in row]
        found.append(fmean(values))
    return found


def show(env, seeds):
    runs = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            cfg = rm.Config(env=env, seed=seed, iterations=ITERATIONS, eval_every=0, device="cpu",
                            out=f"{folder}/run")
            rows, _ = rm.train(cfg, callback=add_columns)
        runs.append(rows)
    for column in ("explained", "by_others"):
        by_run = [means(rows, column) for rows in runs]
        line = f"{env:12}{column:11}"
        for values in zip(*by_run):  # of a period
            mean, low, high = fmean(values), min(values), max(values)
            cell = f"{mean:5.2f} [{low:.2f}, {high:.2f}]"
            line += f" {cell:22}"
        print(line, flush=True)


def main():
    rm.learn = learn
    print(f"python figures/research/critic.py, commit {mutants.commit()}: "
          f"mean [lowest, highest] of the seeds {SEEDS}\n")
    print(f"{'iterations':23}", *[f"{period:22}" for period in PERIODS], flush=True)
    for env in ("frozenlake", "sokoban", "bandit"):
        show(env, SEEDS)


if __name__ == "__main__":
    main()
