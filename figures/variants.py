"""The method with one thing changed or measured, to ask what causes what (`python figures/paper.py fig-adam`).

    python figures/variants.py large-eps --env bandit        any options of ragen_mini.py

Each function below puts its change into the program before it runs; ragen_mini.py itself knows nothing of them.
"""
import functools
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ragen_mini

MEASURED_EVERY = 5  # iterations
LENGTHS = (0, 0.003, 0.03, 0.3, float("inf"))  # of gradients, bounds of the rows of `rare_tokens`
RARE = 0.3  # probability
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


def keep_going():
    """Equal returns are trained on, too (with whitened noise of the critic, entropy bonus and KL penalty), and no run is
    ended: does a collapsed model come back?"""
    ragen_mini.nothing_to_compare = lambda R, cfg: False


def mutual_information():
    """Training stays as it is; the log gets a column more, measured before the update."""
    iterate, learn = ragen_mini.iterate, ragen_mini.learn

    def measuring(i, models, cfg):
        found = {}

        def measure_first(trajs, *rest):
            if i % MEASURED_EVERY == 0:
                found["mutual_information"] = information(trajs, models, cfg)
            return learn(trajs, *rest)
        ragen_mini.learn = measure_first
        row, *others = iterate(i, models, cfg)
        return row | found, *others
    ragen_mini.iterate = measuring


def information(trajs, models, cfg):  # -> nats, at most the log of the number of prompts; or None
    """RAGEN-2 (arXiv 2604.06268): I(X;Z) of first prompts x and thoughts z. Do thoughts depend on what was read?
    The mean of log p(z|own x), minus the log of the mean of p(z|x) over all distinct x. Well-formed turns only."""
    first = [traj for traj in trajs if traj.turns[0]["valid"]]
    if cfg.no_think or not first:
        return None
    own = [tuple(traj.ids[:traj.mask.index(True)]) for traj in first]
    prompts = list(dict.fromkeys(own))
    pairs = []
    for traj, x in zip(first, own):
        z = thought_ids(traj, len(x), models.tok)
        for other in prompts:
            pair = ragen_mini.Trajectory(None, 0, 0)
            pair.add_message(other)
            for token in z:
                pair.add_sampled(token, 0.0)
            pairs.append(pair)
    batch = ragen_mini.collate(pairs, cfg.device)
    logp = ragen_mini.grid_logps(models.policy, batch, cfg).sum(1).view(len(own), len(prompts))
    own_logp = logp[range(len(own)), [prompts.index(x) for x in own]]
    return (own_logp - logp.logsumexp(1)).mean().item() + np.log(len(prompts))


def thought_ids(traj, start, tok):  # -> tokens of the first turn's thought
    turn = traj.turns[0]
    ids = traj.ids[start:start + turn["tokens"]]  # all of the answer
    while not ragen_mini.thought_of(turn).startswith(tok.decode(ids, clean_up_tokenization_spaces=False)):
        ids.pop()  # what comes after the thought
    return ids


def rare_tokens():
    """Training stays as it is. At its end a table is printed: which gradients are long? (A token of probability p has the
    gradient (1 - p) at its own logit, hardly any if p is near 1.)"""
    gradient_step, sum_up = ragen_mini.gradient_step, ragen_mini.sum_up
    steps = []  # of the run: length of the gradient, lowest probability of a token that is trained in it

    def measuring(batch, rows, models, cfg):
        sampled = batch["old_logp"][rows][batch["mask"][rows]]
        stats = gradient_step(batch, rows, models, cfg)
        steps.append((stats["grad_norm"], sampled.min().exp().item()))
        return stats

    def telling(rows, cfg):
        sum_up(rows, cfg)
        print(by_length(np.array(steps[len(steps) // 2:])))
    ragen_mini.gradient_step, ragen_mini.sum_up = measuring, telling


def by_length(steps):  # (n,2) -> Markdown
    lines = [f"| gradient | updates | rarest token, median probability | updates with a token below {RARE} |",
             "| --- | --- | --- | --- |"]
    for low, high in zip(LENGTHS, LENGTHS[1:]):
        rarest = steps[(low <= steps[:, 0]) & (steps[:, 0] < high), 1]
        if len(rarest) > 0:
            share = np.mean(rarest < RARE)
            lines.append(f"| {low:g} to {high:g} | {len(rarest)} | {np.median(rarest):.3f} | {share:.2f} |")
    return "\n".join(lines)


VARIANTS = {"large-eps": large_eps, "short-memory": short_memory, "only-won-groups": only_won_groups,
            "by-trajectory": by_trajectory, "free-critic": free_critic, "keep-going": keep_going,
            "mutual-information": mutual_information, "rare-tokens": rare_tokens}

if __name__ == "__main__":
    name = sys.argv.pop(1)
    ragen_mini.need(name in VARIANTS, f"choose one of {', '.join(VARIANTS)}")
    VARIANTS[name]()
    ragen_mini.main()
