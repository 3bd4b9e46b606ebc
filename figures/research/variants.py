"""The method with one thing changed or measured, to ask what causes what (`python figures/paper.py fig-adam`).

    python figures/variants.py large-eps --env bandit        any options of ragen_mini.py, and --eval-envs

Each variant trains by `ragen_mini.train`, mostly with a `learn` or a `watch` of its own; ragen_mini.py itself knows
nothing of them.
"""
import copy
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "extras")]

import elsewhere
import envs
import plots
import ragen_mini as rm
import recipes
import thoughts

MEASURED_EVERY = 5  # iterations
LENGTHS = (0, 0.003, 0.03, 0.3, math.inf)  # of gradients, bounds of the rows of `rare_tokens`
RARE = 0.3  # probability
WON = 5  # a return on Sokoban above this holds the 10 for a solved room


# -------------------------------------------------------------------------------------------- one thing changed
def large_eps(cfg):
    """Adam divides a step by the root of its second moment, plus this: what is tiny is no longer made large."""
    models = rm.load_models(cfg)
    set_adam(models, cfg, eps=1e-5)
    return rm.train(cfg, models)


def short_memory(cfg):
    """Adam's second moment forgets as fast as its first: after quiet gradients it knows soon that they are loud."""
    models = rm.load_models(cfg)
    set_adam(models, cfg, betas=(0.9, 0.9))
    return rm.train(cfg, models)


def set_adam(models, cfg, **options):
    models.optimizer = rm.make_optimizer(models, cfg)
    for group in models.optimizer.param_groups:  # one a network
        group.update(options)


def free_critic(cfg):
    """The critic's forecast may move as far as it likes."""
    rm.VALUE_CLIP = math.inf
    return rm.train(cfg)


def only_won_groups(cfg):
    """GRPO on Sokoban: a group in which nobody won teaches nothing."""
    def learn(trajs, models, cfg, seed):
        chosen, R = recipes.chosen_by(trajs, cfg)
        if not chosen or rm.nothing_to_compare(R, cfg):
            return {}, []
        won = R.max(dim=1, keepdim=True).values > WON
        batch = rm.compute_advantages(chosen, R * won, models, cfg)  # equal returns: no advantage
        return batch, rm.updates(batch, models, cfg, seed)
    return rm.train(cfg, learn=learn)


def keep_going(cfg):
    """Equal returns are trained on, too (with whitened noise of the critic, entropy bonus and KL penalty), so that no
    run is ended for want of updates: does a collapsed model come back?"""
    def learn(trajs, models, cfg, seed):
        chosen, R = recipes.chosen_by(trajs, cfg)
        batch = rm.compute_advantages(chosen, R, models, cfg)
        return batch, rm.updates(batch, models, cfg, seed)
    return rm.train(cfg, learn=learn)


# -------------------------------------------------------------------------------- training as it is, more is measured
def mutual_information(cfg):
    """More columns of the log: what thoughts tell of their prompts, whether they are true (extras/thoughts.py), success
    in other worlds (extras/elsewhere.py)."""
    played = []  # the policy of the last rollout

    def learn(trajs, models, cfg, seed):
        played[:] = [copy.deepcopy(models.policy)]
        return rm.learn(trajs, models, cfg, seed)

    def watch(row, trajs, learned, models, cfg):
        thoughts.watch(row, trajs, learned, models, cfg)
        elsewhere.watch(row, trajs, learned, models, cfg)
        if trajs and row["iteration"] % MEASURED_EVERY == 0:
            row["mutual_information"] = information(trajs, replace(models, policy=played[0]), cfg)
    for name, world in envs.ENVS.items():
        envs.ENVS[name] = thoughts.with_claims(world)
    return rm.train(cfg, learn=learn, watch=watch)


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
            pair = rm.Trajectory(None, 0, 0)
            pair.append(list(other), sampled=False)
            pair.append(z, sampled=True)
            pairs.append(pair)
    batch = rm.collate(pairs, cfg.device)
    logps = rm.on_grid(lambda part: rm.token_logps(models.policy, part, cfg)[0], batch)
    logp = logps.sum(1).view(len(own), len(prompts))
    own_logp = logp[range(len(own)), [prompts.index(x) for x in own]]
    return (own_logp - logp.logsumexp(1)).mean().item() + math.log(len(prompts))


def thought_ids(traj, start, tok):  # -> tokens of the first turn's thought
    turn = traj.turns[0]
    ids = traj.ids[start:start + turn["tokens"]]  # all of the answer
    while not plots.thought_of(turn).startswith(tok.decode(ids, clean_up_tokenization_spaces=False)):
        ids.pop()  # what comes after the thought
    return ids


def rare_tokens(cfg):
    """At its end a table is printed: which gradients are long? (A token of probability p has the gradient (1 - p) at
    its own logit, hardly any if p is near 1.)"""
    seen = []  # a gradient step each: length of the gradient, lowest probability of a token that is trained in it

    def learn(trajs, models, cfg, seed):
        batch, steps = rm.learn(trajs, models, cfg, seed)
        for step, rows in zip(steps, rows_of_steps(batch, cfg, seed)):
            sampled = batch["old_logp"][rows][batch["mask"][rows]]
            seen.append((step["grad_norm"], sampled.min().exp().item()))
        return batch, steps
    result = rm.train(cfg, learn=learn)
    print(by_length(np.array(seen[len(seen) // 2:])))
    return result


def rows_of_steps(batch, cfg, seed):  # yields the rows of each step: rm.updates shuffles like this
    shuffler = torch.Generator().manual_seed(seed)
    for _ in range(cfg.epochs):
        yield from torch.randperm(len(batch["mask"]), generator=shuffler).split(cfg.update_size)


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
            "by-trajectory": recipes.mean_of_episodes, "free-critic": free_critic, "keep-going": keep_going,
            "mutual-information": mutual_information, "rare-tokens": rare_tokens}

if __name__ == "__main__":
    rm.need(len(sys.argv) > 1 and sys.argv[1] in VARIANTS, f"choose one of {', '.join(VARIANTS)}")
    variant = VARIANTS[sys.argv.pop(1)]
    elsewhere.own_options()
    variant(rm.parse_config())
    if rm.STOP:
        sys.exit(130)
