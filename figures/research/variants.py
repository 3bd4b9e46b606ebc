"""The method with one thing changed or measured, to ask what causes what.

    python figures/research/variants.py large-eps --env bandit     with options of ragen_mini.py
    python figures/paper.py fig-adam                               what came of it

Each variant replaces functions of ragen_mini, which itself knows nothing of it. With --eval-envs,
mutual-information also evaluates in other environments (see extras/elsewhere.py).
"""
import math
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import ragen_mini as rm
from extras import elsewhere, recipes, thoughts
from runs import need, one_line_errors

# Rows of the table of `rare_tokens` are gradient norms between these bounds.
NORMS = (0, 0.003, 0.03, 0.3, math.inf)
RARE = 0.3  # probability
WON = 5  # a return on Sokoban above this includes the 10 for a solved level


# ------------------------------------------------------------------------------- one thing changed
def large_eps():
    """Adam divides a step by the root of its second moment, plus eps. With a large eps, tiny
    gradients no longer make steps of the usual size.
    """
    set_adam(eps=1e-5)


def short_memory():
    """Adam's second moment forgets as fast as its first. So after a time of small gradients it soon
    knows that they are large again.
    """
    set_adam(betas=(0.9, 0.9))


def set_adam(**options):
    make_optimizer = rm.make_optimizer

    def make(models, cfg):
        optimizer = make_optimizer(models, cfg)
        for group in optimizer.param_groups:  # one for each network
            group.update(options)
        return optimizer
    rm.make_optimizer = make


def free_critic():
    """The critic's value may move as far as it likes."""
    rm.VALUE_CLIP = math.inf


def only_won_groups():
    """GRPO on Sokoban: a group in which nobody won teaches nothing."""
    compute_advantages = rm.compute_advantages

    def of_won_groups(trajs, R, models, cfg):
        won = R.max(dim=1, keepdim=True).values > WON
        # In the other groups all returns become equal, so there is no advantage.
        return compute_advantages(trajs, R * won, models, cfg)
    rm.compute_advantages = of_won_groups


def keep_going():
    """Does a collapsed model come back? Equal returns are trained on, too, so that no run is ended
    for want of updates. What remains are errors of the critic, entropy bonus and KL penalty.
    """
    rm.nothing_to_compare = lambda R, cfg: False


# ---------------------------------------------------------- training as it is, but more is measured
def mutual_information():
    """More columns: what thoughts tell of their prompts (recipes.py), whether they are true
    (thoughts.py), and success in other environments (elsewhere.py).
    """
    recipes.mutual_information()
    rm.take_turn = thoughts.take_turn
    train = rm.train
    rm.train = lambda cfg: train(cfg, callback=watch)


def watch(row, trajs, models, cfg):
    thoughts.watch(row, trajs, models, cfg)
    elsewhere.watch(row, trajs, models, cfg)


def rare_tokens():
    """Which gradients are large? At the end a table is printed.

    A token of probability p has the gradient 1 - p at its own logit, which is small if p is near 1.
    """
    seen = []  # of each update: gradient norm, lowest probability of a token that it trains
    learn, train = rm.learn, rm.train

    def learn_and_note(trajs, models, cfg, seed):
        batch, steps = learn(trajs, models, cfg, seed)
        for step, rows in zip(steps, rows_of_steps(batch, cfg, seed)):
            logp = batch["old_logp"][rows][batch["mask"][rows]]
            seen.append((step["grad_norm"], logp.min().exp().item()))
        return batch, steps

    def train_and_tell(cfg):
        result = train(cfg)
        print(by_norm(np.array(seen[len(seen) // 2:])))
        return result
    rm.learn, rm.train = learn_and_note, train_and_tell


def rows_of_steps(batch, cfg, seed):  # yields the rows of each step, shuffled as in rm.updates
    shuffler = torch.Generator().manual_seed(seed)
    for _ in range(cfg.epochs if batch else 0):
        yield from torch.randperm(len(batch["mask"]), generator=shuffler).split(cfg.minibatch_size)


def by_norm(steps):  # (n,2) -> Markdown
    lines = [f"| gradient | updates | rarest token, median probability | "
             f"updates with a token below {RARE} |",
             "| --- | --- | --- | --- |"]
    for low, high in zip(NORMS, NORMS[1:]):
        rarest = steps[(low <= steps[:, 0]) & (steps[:, 0] < high), 1]
        if len(rarest) > 0:
            share = np.mean(rarest < RARE)
            lines.append(f"| {low:g} to {high:g} | {len(rarest)} | {np.median(rarest):.3f} | "
                         f"{share:.2f} |")
    return "\n".join(lines)


VARIANTS = {"large-eps": large_eps, "short-memory": short_memory,
            "only-won-groups": only_won_groups, "by-trajectory": recipes.mean_of_episodes,
            "free-critic": free_critic, "keep-going": keep_going,
            "mutual-information": mutual_information, "rare-tokens": rare_tokens}


def main():
    with one_line_errors():
        need(len(sys.argv) > 1 and sys.argv[1] in VARIANTS, f"Choose one of {', '.join(VARIANTS)}")
    name = sys.argv[1]
    sys.argv[:2] = [f"{sys.argv[0]} {name}"]  # so a run has the variant's name, see runs.script
    elsewhere.own_options()
    VARIANTS[name]()
    rm.main()


if __name__ == "__main__":
    main()
