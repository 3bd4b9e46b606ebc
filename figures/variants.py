"""The method with one thing changed, to ask what causes what (`python figures/paper.py fig-causes`).

    python figures/variants.py large-eps --env bandit        any options of ragen_mini.py

Each function below puts its change into the program before it runs; ragen_mini.py itself knows nothing of them.
"""
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ragen_mini

WON = 5  # a return on Sokoban above this holds the 10 for a solved room


def large_eps():
    """Adam divides a step by the root of its second moment, plus this: what is tiny is no longer made large."""
    torch.optim.Adam = functools.partial(torch.optim.Adam, eps=1e-5)


def short_memory():
    """Adam's second moment forgets as fast as its first: after quiet gradients it knows soon that they are loud."""
    torch.optim.Adam = functools.partial(torch.optim.Adam, betas=(0.9, 0.9))


def only_won_groups():
    """GRPO on Sokoban: a group in which nobody won teaches nothing."""
    original = ragen_mini.grpo_advantages

    def advantages(R, norm="std"):
        won = R.max(dim=1, keepdim=True).values > WON
        return original(R, norm) * won
    ragen_mini.grpo_advantages = advantages


def by_trajectory():
    """eq. 6 as printed: the mean over trajectories of their means over tokens. The loss is proportional to the advantages
    (but for the entropy bonus), so a token's weight may as well be put there."""
    original = ragen_mini.compute_advantages

    def advantages(*given):
        batch = original(*given)
        tokens = batch["mask"].sum(1, keepdim=True)
        batch["adv"] *= tokens.float().mean() / tokens
        return batch
    ragen_mini.compute_advantages = advantages


def free_critic():
    """The critic's forecast may move as far as it likes."""
    ragen_mini.VALUE_CLIP = float("inf")


VARIANTS = {"large-eps": large_eps, "short-memory": short_memory, "only-won-groups": only_won_groups,
            "by-trajectory": by_trajectory, "free-critic": free_critic}

if __name__ == "__main__":
    name = sys.argv.pop(1)
    ragen_mini.need(name in VARIANTS, f"choose one of {', '.join(VARIANTS)}")
    VARIANTS[name]()
    ragen_mini.main()
