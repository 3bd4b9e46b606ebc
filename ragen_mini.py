"""RAGEN / StarPO (arXiv 2504.20073) in one file: a language model learns to act by playing.

    repeat:                                                                                        in the paper
        trajs   = rollout(...)              from each of P initial states the model plays N episodes
        R       = returns(trajs)            the sum of each episode's rewards                      eq. 2
        kept    = uncertainty_filter(R)     the initial states whose N returns differ most         eq. 7
        batch   = compute_advantages(...)   how much better than expected was every token?         eq. 5 (GRPO)
        updates(batch)                      one or more gradient steps: better tokens grow likelier  eq. 4, 6

Words
    prompt      an initial state of the world, as text; P of them in an iteration (--prompts)
    group       the N episodes that start from one prompt (--rollouts, the paper's word for episodes)
    rollout     playing all of these P*N = B episodes with the present model
    trajectory  one episode as a sequence of tokens: message, answer, message, answer, ...
    turn        one message of the environment and one answer of the model
    action      a word inside an answer that moves the world; an answer may hold several
    token       a piece of text, as an id of the vocabulary. A *time step* of the algorithm is a token that the model
                wrote, not a turn
    return      R(tau): the sum of the rewards of all turns of a trajectory (return to come: of those after a token)
    advantage   how much better than expected things went after a token (GRPO: in its whole episode)
    ratio       a token's probability now, divided by its probability when it was sampled
    update      one gradient step, on E = 32 trajectories
    iteration   one rollout and all updates that are made with it
    policy      pi, the language model as a player; pi_old: pi at the last rollout, of which only old_logp is kept
    critic      a second network that forecasts, before each token, the rewards still to come (PPO only)
    entropy     of a token's choice, -sum p log p over the vocabulary: 0 if there is no doubt, large if all is open

Part 1 is the method, in the order in which one would lecture: why it works; `learn`, which is the loop above but for its
first line; an episode as tokens, playing, advantages, losses; `iterate`, which plays and learns, and `train`, which
repeats it. Part 2 is the engine room (memory, speed, files): skip it on first reading. Part 3 is the command line.
Shapes: B trajectories, T tokens of the longest (T-1 are predicted: nothing precedes the first one), n tokens that the
model wrote, b rows of a pass, V words of the vocabulary, D the model's width. B is P*N after the rollout, less after
the filter.
"""
import argparse
import contextlib
import copy
import functools
import itertools
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import typing
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import envs
import plots
from envs import UserError, need

FORMAT_PENALTY = -0.1  # App. B.1: reward of a turn that is malformed or (as in the released code) names an unknown action
EVAL_TEMPERATURE = 0.5  # Sec. 3.2 (training samples at 1)
MAX_GRAD_NORM = 1.0  # longer gradients are shortened to this (released code)
VALUE_CLIP = 0.5  # farthest that a forecast of the critic is pulled in one iteration (released code)
STARPO = dict(keep=1.0, kl_coef=0.001, clip_high=0.2)
STARPO_S = dict(keep=0.25, kl_coef=0.0, clip_high=0.28)  # Sec. 4.2: StarPO-S is these three values

CUDA = torch.cuda.is_available()
RANK = int(os.environ.get("RANK", 0))  # of this process, if torchrun has started several
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
# As a decorator: on a GPU the function calculates in bf16, the weights stay fp32.
autocast = torch.autocast("cuda", torch.bfloat16, enabled=CUDA)


# ===========================================================================================================
# PART 1: THE METHOD
# ===========================================================================================================
# --------------------------------------------------------------------------- why it works: the policy gradient
# Neither the sampling of a token nor the world has a gradient. So the model plays, and then makes likelier what it wrote
# in good episodes. The simplest loss for that, known as REINFORCE, is
#
#     loss = -(R * logp)[mask].mean()        R: the return of the token's episode; mask: the tokens that the model wrote
#
# It is cross-entropy on the model's own text, where good episodes weigh more. Most of what follows puts something better,
# A, in the place of R, or makes several steps out of one rollout. (Such a loss need not go down in training, since each
# rollout is another text. What should go up is the return.)
#
# Why does a step down this loss raise the mean return <R>, the mean over all episodes tau that pi, the policy at the
# temperature of the rollout, may play? We want the gradient of <R> with respect to the weights:
#  1. <R> is the sum over all episodes of p(tau) R(tau). p(tau) is a product of the model's choices and of the world's
#     dice, and the dice have no weights: grad log p(tau) = sum_t grad log pi(token_t), over the model's tokens. Since
#     grad log p = grad p / p,
#         grad <R>  =  sum over tau of R grad p  =  sum of p R grad log p  =  <R * sum_t grad log pi(token_t)>
#     a mean over episodes, which playing estimates. In words: play, then make the tokens of an episode likelier in
#     proportion to its return. (The code also divides by the number of tokens: see gradient_step.)
#     In numbers: with chance x an arm is chosen that pays 0.25 on average, else one that pays 0.15. <R> is
#     0.25 x + 0.15 (1 - x), its slope in x is 0.10. By playing: the first arm comes with chance x and contributes
#     0.25 / x, its return times the derivative of log x; the other one comes with chance 1 - x and contributes
#     -0.15 / (1 - x). The mean is 0.25 - 0.15 = 0.10.
#  2. From R one may subtract, at each token, a *baseline*: whatever was known before the token was written, or does not
#     depend on it, such as other episodes. Given the text so far that is a constant c. It takes away c times the mean of
#     grad log pi, which is 0: summed over the words of the vocabulary, sum pi grad log pi = sum grad pi = grad (sum pi)
#     = grad 1 = 0.
#  3. The gradient's mean stays the same, and its noise shrinks if what is subtracted was a good forecast. What is left
#     is the *advantage* A of the token. PPO subtracts the rewards that had already come, and the critic's forecast of
#     those still to come. GRPO subtracts the group's mean return. The other episodes do not depend on this token; its
#     own share in the mean makes all differences smaller, by the factor (N-1)/N, and changes nothing else.
#  4. Weighted by ratio = pi / pi_old, tokens that pi_old sampled count on average as if pi had sampled them (importance
#     sampling): sum over words of pi_old * ratio * A  =  sum of pi * A. And grad ratio = ratio * grad log pi, so that at
#     ratio 1 the gradient of ratio * A is A * grad log pi.
#  5. So a step down -ratio * A is a step up <R>. At the first update, where all ratios are 1, this is exact on average.
#     Later it is not quite: the ratio corrects for this token, but the tokens before it were chosen by pi_old, too, and
#     no factor corrects for those. That matters little as long as pi is near pi_old, which is what clipping is for.
# What goes beyond this proof has a reason, which stands beside it, and often a price, which stands in the footnotes at
# the end of part 1: [1], [2], ...


# --------------------------------------------------------------------------- what is done with a rollout, in ten lines
def learn(trajs, models, cfg, seed):  # P*N trajectories -> those that were trained on, their batch, statistics by step
    R = returns(trajs, cfg)  # (P,N)
    kept = uncertainty_filter(R, cfg.keep).tolist()  # all groups, unless --keep is below 1
    if nothing_to_compare(R[kept], cfg):
        return [], {}, []
    chosen = []
    for group in kept:
        chosen += trajs[group * cfg.rollouts:(group + 1) * cfg.rollouts]
    batch = compute_advantages(chosen, R[kept], models, cfg)
    return chosen, batch, updates(batch, models, cfg, seed)


# What follows is the playing that comes before `learn`, and then its pieces, one by one. `cfg` holds the settings, named
# as on the command line (--help explains all): in an iteration P = 8 prompts and N = 16 rollouts, in an update E = 32
# trajectories (update_size); 1 epoch; gamma = lam = 1; kl_coef 0.001.
# Functions of part 2, which you can skip, are explained where they are called.


@dataclass
class Models:
    policy: torch.nn.Module
    critic: torch.nn.Module  # PPO; else None
    ref: torch.nn.Module  # the policy before training, for the KL penalty; else None
    optimizer: torch.optim.Optimizer
    tok: object  # the tokenizer


# ------------------------------------------------------------------------------------------ a turn in words
PLAIN = r"((?:(?!</?think>|</?answer>).)*)"  # any text without our tags: no thought inside a thought
SHAPE = re.compile(rf"<think>{PLAIN}</think>\s*<answer>{PLAIN}</answer>\s*", re.S)


def message(env, cfg, actions_left, reward=None):  # -> text
    """What the agent reads: in the first turn the task, later the reward of its last answer; then the state.

        You are solving a FrozenLake puzzle. Go to the goal, ...        Reward: 0.0
        You may give up to 5 actions at once, separated by ...          State:
                                                                        _ P
        State:                                                          _ G
        P _                                                             You have 9 actions left.
        _ G
        You have 10 actions left.
    """
    if reward is None:
        shape = "<answer> action || action </answer>"
        if not cfg.no_think:
            shape = "<think> your thoughts </think>" + shape
        head = (f"{env.instruction}\nYou may give up to {cfg.max_actions_per_turn} actions at once, separated by "
                f"||. Write exactly {shape} and nothing else.\n\n")
    else:
        head = f"Reward: {round(reward, 3)}\n"  # 1.0, -0.1
    return f"{head}State:\n{env.render()}\nYou have {actions_left} actions left."


def parse_answer(text, actions, limit):  # -> list of at most `limit` actions, or None: invalid
    """<think>Hm.</think><answer>down || Left</answer> -> ["Down", "Left"]; without <think></think> -> None"""
    found = SHAPE.fullmatch(text)
    if not found:
        return None
    known = {action.lower(): action for action in actions}
    chosen = []
    for word in found[2].split("||")[:limit]:  # whatever follows is dropped, unread
        word = word.strip().lower()
        if word not in known:
            return None
        chosen.append(known[word])
    return chosen


class Trajectory:
    """One episode as tokens: message, answer, message, ... Four lists grow together, one entry a token.

        ids       <|im_start|> user ... <think>    The goal is ... </answer> <|im_end|>    <|im_start|> user ...
        mask      0            0        0          1   1    1      1         1             0            0
        old_logp  0            0        0         -1.2 0.0 -0.1   -0.3      -0.1           0            0
        reward    0            0        0          0   0    0      0         1.0           0            0

    The tag <think> is given, so that its mask is 0. Who wrote a token is recorded when it is appended. It is never reconstructed from the text or from special
    tokens: that goes wrong wherever the end of a turn and the padding are the same token."""

    def __init__(self, env, group, actions_left):
        self.env = env  # a world that has just been reset
        self.group = group  # from which of the P prompts it started
        self.ids = []  # every token, of messages and of answers
        self.mask = []  # did the model write it? Only those tokens are trained
        self.old_logp = []  # log-probability with which the model sampled it; 0 for the environment's tokens
        self.reward = []  # reward of a turn, on the last token of its answer; 0 elsewhere
        self.turns = []  # for the log: dicts of state, answer, valid, reward, tokens
        self.entropy = 0.0  # of the policy's choices, summed over the tokens that it wrote
        self.actions_left = actions_left
        self.done = self.success = False
        self.answer_start = 0  # where in `ids` the present answer begins

    @property
    def R(self):  # eq. 2
        return sum(turn["reward"] for turn in self.turns)

    def add_message(self, ids):
        self.ids += ids
        self.mask += [False] * len(ids)
        self.old_logp += [0.0] * len(ids)
        self.reward += [0.0] * len(ids)
        self.answer_start = len(self.ids)

    def add_sampled(self, token, logp):
        self.ids.append(token)
        self.mask.append(True)
        self.old_logp.append(logp)
        self.reward.append(0.0)


def begin(name, seed, episode, group, tok, cfg):  # -> Trajectory that waits for its first answer
    env = envs.make(name, success_rate=cfg.success_rate)
    env.reset(seed, options={"episode": episode})
    traj = Trajectory(env, group, cfg.max_actions)
    # `encode`: the message in the model's chat template, and behind it <think>, which is given and not trained; as ids
    traj.add_message(encode(tok, cfg.no_think, message(env, cfg, cfg.max_actions), after_answer=False))
    return traj


def read_answer(traj, tok, cfg, ends):  # -> its text, with the first tag; its actions, or None: invalid
    written = traj.ids[traj.answer_start:]
    if written[-1] in ends:  # else it was cut off at max_new_tokens
        written = written[:-1]
    text = first_tag(cfg.no_think) + tok.decode(written, clean_up_tokenization_spaces=False)
    empty_thought = "<think></think>" if cfg.no_think else ""  # so that parse_answer needs one pattern only
    return text, parse_answer(empty_thought + text, traj.env.actions, cfg.max_actions_per_turn)


def take_turn(traj, tok, cfg, ends):
    """Run the actions of the answer that was just written; its last token bears the reward of the turn. `ends`: tokens
    that end an answer, first the one of the chat template."""
    env = traj.env
    text, actions = read_answer(traj, tok, cfg, ends)
    tokens = len(traj.ids) - traj.answer_start
    turn = dict(state=env.render(), answer=text, valid=actions is not None, tokens=tokens)
    bonus = judge_thought(turn, env, cfg)  # before the world moves; 0, unless --truth-reward is given
    reward = 0.0
    if not turn["valid"]:
        reward = FORMAT_PENALTY  # and nothing moves (released code: known actions beside an unknown one do)
    for action in actions or []:
        if traj.actions_left == 0 or env.over:
            break
        _, gained, _, _, info = env.step(action)
        reward += gained
        traj.actions_left -= 1
        traj.success = info["success"]
    turn["reward"] = reward + bonus  # the message tells it without the bonus
    traj.turns.append(turn)
    traj.reward[-1] = turn["reward"]
    traj.done = env.over or traj.actions_left == 0 or len(traj.turns) == cfg.max_turns
    if not traj.done:
        following = encode(tok, cfg.no_think, message(env, cfg, traj.actions_left, reward), after_answer=True)
        # `following` begins with the end of turn. If the model wrote that itself, it stands in ids already, trained and
        # with the reward; else the environment closes the answer.
        if traj.ids[-1] == ends[0]:
            following = following[1:]
        traj.add_message(following)


# -------------------------------------------------------------------------------------------------- rollout
# Without a cache the log-probs of an episode's next token would be two lines:
#     logits = policy(torch.tensor([traj.ids])).logits[0, -1]
#     logp = (logits / temperature).log_softmax(-1)
# `next_token_logp` has the same numbers for many episodes at once, and reads no token twice.
@autocast
@torch.no_grad()
def rollout(policy, tok, name, seeds, N, cfg, sampling_seed, temperature):  # -> len(seeds) * N trajectories, by group
    """From the state of every seed play N episodes, all at once. Temperature 0: the likeliest token, always."""
    trajs = []
    for group, seed in enumerate(seeds):
        for episode in range(N):  # a group shares its initial state, but every episode has its own dice
            trajs.append(begin(name, seed, episode, group, tok, cfg))
    ends = ends_of_answers(policy, tok, cfg)
    generator = torch.Generator(cfg.device).manual_seed(sampling_seed)
    cache = KVCache(len(seeds), cfg.device, copies=N)  # what each has read; a group shares its first message
    live = trajs
    while live:
        writing = live
        while writing:  # everyone writes an answer, token by token
            logp = next_token_logp(policy, cache, writing, temperature)  # (b,V); each reads what is new to it
            need(not logp.isnan().any(), message_not_finite("a log-probability", cfg))
            sample(writing, logp, generator, greedy=temperature == 0)
            writing = [traj for traj in writing if not answer_is_complete(traj, ends, cfg)]  # others wait
        for traj in live:  # everyone acts
            take_turn(traj, tok, cfg, ends)
        live = [traj for traj in live if not traj.done]  # the finished leave
        cache.select(live)  # and the cache forgets them
    return trajs


def sample(trajs, logp, generator, greedy):  # logp (b,V): of the next token of each
    tokens = logp.argmax(1, keepdim=True) if greedy else torch.multinomial(logp.exp(), 1, generator=generator)
    token_logps = logp.gather(1, tokens).flatten().tolist()
    entropies = entropy_of(logp)
    for traj, token, token_logp, entropy in zip(trajs, tokens.flatten().tolist(), token_logps, entropies.tolist()):
        traj.add_sampled(token, token_logp)
        traj.entropy += entropy


def answer_is_complete(traj, ends, cfg):
    return traj.ids[-1] in ends or len(traj.ids) - traj.answer_start == cfg.max_new_tokens


# --------------------------------------------------------------------- which trajectories, and how good were they
def returns(trajs, cfg):  # -> (P,N)
    R = torch.tensor([traj.R for traj in trajs])  # in the order of their groups
    need(R.isfinite().all(), message_not_finite("a return", cfg))
    return R.view(-1, cfg.rollouts)


def uncertainty_filter(R, keep):  # (P,N) -> (k,) numbers of the kept prompts
    """eq. 7: U(s0) = Std_i R(tau_i). The share `keep` of the prompts with the largest U, at least one. Where the N
    returns are all alike there is little to learn from (GRPO: A is 0). The paper takes returns that differ as a sign
    that the policy does not know its way yet; they may also be luck. [1]
    The filter is the paper's remedy against the Echo Trap, in which a policy comes to think the same in every episode,
    and then loses what it had learnt (README).
    """
    U = R.std(dim=1, correction=0)  # population std; the sample std would give the same order
    k = max(1, int(keep * len(R) + 1e-9))  # 1e-9: 0.29 * 100 is 28.999...
    kept = U.argsort(descending=True, stable=True)[:k]
    return kept.sort().values  # in the order of the trajectories


def nothing_to_compare(R, cfg):  # (k,N)
    """GRPO compares within groups: are all returns of each group alike? PPO's critic also compares prompts: are all
    returns alike? Then differences of A are noise of the critic, which add_ppo_advantages would blow up. So nothing is
    updated; the KL penalty and the entropy bonus rest, too. [2]"""
    if cfg.algo == "ppo":
        return R.std(correction=0) < 1e-4
    return R.std(1, correction=0).max() < 1e-4


def collate(trajs, device):  # -> inputs, targets, mask, old_logp, reward: each (B,T-1)
    """Lists become tensors, padded on the right. From here on, column t is about *predicting* token t + 1: the model has
    read inputs[:t+1], the token to come is targets[t]. For example, with m for the tokens of messages and a for those of
    answers, the lists of a trajectory and its row in the tensors:

        ids         m1  m2  a1  a2  m3  a3
        mask        0   0   1   1   0   1
        reward      0   0   0   0   0   1

        column      0   1   2   3   4
        inputs      m1  m2  a1  a2  m3
        targets     m2  a1  a2  m3  a3
        mask        0   1   1   0   1
        reward      0   0   0   0   1

    Behind a shorter row all columns are 0. So its pads are not trained, whatever token 0 is.
    """
    assert not any(traj.mask[0] for traj in trajs), "nothing precedes the first token: it cannot be trained"
    return {
        "inputs": pad([traj.ids[:-1] for traj in trajs], device),
        "targets": pad([traj.ids[1:] for traj in trajs], device),
        "mask": pad([traj.mask[1:] for traj in trajs], device),
        "old_logp": pad([traj.old_logp[1:] for traj in trajs], device),
        "reward": pad([traj.reward[1:] for traj in trajs], device),
    }


def grpo_advantages(R, norm="std"):  # (P,N) -> (P,N)
    """eq. 5: A_i = (R_i - mean) / std of the group (the paper says "batch", its code takes the group): was this episode
    better than others from the same state?

    NOTE: dividing can teach the wrong thing while the better choice is rare.
    Bandit: of a group of 16, 15 episodes pull the sure arm, which pays 0.15, and one pulls the risky arm.

        it pays    chance    R_i - mean    sample std    A
        1           1/4        +0.80         0.21       +3.75
        0           3/4        -0.14         0.04       -3.75
        on average             +0.09                    -1.9        (the other 15 get the opposite, a fifteenth each)

    So the better arm, which should rise, is pushed down. (--adv-norm mean only subtracts.)

    Where one return differs by d from all others the std is d / sqrt(16): it grows with the surprise itself, and A is
    +-3.75 whatever d was. The large win counts no more than the small loss, which is three times as frequent.
    Subtracting the mean needs no such warning (steps 2 and 3 of the proof)."""
    centered = R - R.mean(dim=1, keepdim=True)
    if norm == "mean":
        return centered
    std = R.std(dim=1, keepdim=True)  # sample std, as in the released code: for N = 16 3% more than the population's
    return torch.where(std > 1e-4, centered / (std + 1e-6), 0.0)  # equal returns: 0 instead of rounding noise


def gae(reward, value, mask, gamma, lam):  # (B,T-1) x3 -> advantage, return to come: (B,T-1)
    """Generalised advantage estimation (PPO). t is a column (see collate): what is chosen there is targets[t], token
    t + 1 of the episode. Only columns whose token the model wrote are time steps; `next` is the step after t. v is the
    critic's forecast of the rewards still to come, made before the token is written.

        delta_t = r_t + gamma v_next - v_t          how much better did this one step turn out than was forecast?
        A_t     = delta_t + gamma lambda A_next     ... and the steps after it

    gamma < 1 would count later rewards less. lambda < 1 would trust the critic's next forecast more than what really
    came: less noise, but the critic's errors. At gamma = lambda = 1, the default, the v in between cancel, and
    A_t = rewards to come - v_t.
    The environment's tokens are jumped over: nobody chose them, they are no steps and must not discount anything. In
    collate's example, with gamma = lambda = 1:

        column           1 (a1)                 2 (a2)                 3 (m3)    4 (a3)
        v                0.2                    0.3                      -       0.6
        r                0                      0                        -       1
        delta            0 + 0.3 - 0.2 = 0.1    0 + 0.6 - 0.3 = 0.3      -       1 + 0 - 0.6 = 0.4
        A                0.1 + 0.7     = 0.8    0.3 + 0.4     = 0.7      -       0.4
        to come, less v  1 - 0.2       = 0.8    1 - 0.3       = 0.7      -       1 - 0.6     = 0.4    as it should
    """
    advantage = torch.zeros_like(value)
    # After the last turn nothing comes, even if it was the limit of turns or actions that ended the episode.
    next_advantage = next_value = torch.zeros_like(value[:, 0])
    for t in reversed(range(value.shape[1])):
        ours = mask[:, t]
        delta = reward[:, t] + gamma * next_value - value[:, t]  # not used where the token is not ours
        next_advantage = torch.where(ours, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(ours, value[:, t], next_value)
        advantage[:, t] = next_advantage * ours
    return advantage, (advantage + value) * mask  # forecast + how much better it went = what the critic should have said


def compute_advantages(trajs, R, models, cfg):  # R (P,N) -> batch
    """What collate returns, and more tensors (B,T-1): adv; kl, if there is a KL penalty; PPO: value, ret. Computed once,
    before the first update on these trajectories, and then frozen.

    The KL penalty: reward alone does not protect the model's language. So every token pays for leaving `ref`, the model
    before training: r_t -= kl_coef * kl_t, where kl_t = log pi_old - log pi_ref of the token that was sampled. One kl_t
    may be negative; their mean over what pi_old samples is KL(pi_old || pi_ref), the Kullback-Leibler divergence, which
    says how far two distributions are apart. It stands in the reward, since A sums what follows: a token also pays for
    later tokens that it led away from ref. In the loss, log pi - log pi_ref would have no gradient on average. [3]"""
    batch = collate(trajs, cfg.device)
    penalty = torch.zeros_like(batch["reward"])
    if models.ref is not None:
        ref_logp = grid_logps(models.ref, batch, cfg)  # (B,T-1): log pi_ref of every token that the model wrote
        batch["kl"] = (batch["old_logp"] - ref_logp) * batch["mask"]
        penalty = -cfg.kl_coef * batch["kl"]  # a reward, mostly below 0
    if cfg.algo == "ppo":
        add_ppo_advantages(batch, penalty, models.critic, cfg)
    else:
        add_grpo_advantages(batch, penalty, R.to(cfg.device), cfg)
    return batch


def add_ppo_advantages(batch, penalty, critic, cfg):
    """Token by token: what came after it, minus what the critic forecast there."""
    mask = batch["mask"]
    batch["value"] = grid_values(critic, batch)  # (B,T-1): its forecast before every token that the model wrote
    adv, batch["ret"] = gae(batch["reward"] + penalty, batch["value"], mask, cfg.gamma, cfg.lam)
    # Whitening (released code, not in the paper): over all tokens of the batch A gets mean 0 and std 1, so that the
    # entropy bonus and MAX_GRAD_NORM mean the same in every world. All tokens of a batch are divided by the same number:
    # none is preferred to another. Its price: if a single return differs, its A are blown up, too, as in grpo_advantages,
    # but over the whole batch. (The mean that is subtracted is nearly a constant, see step 2.) [4]
    white = (adv - adv[mask].mean()) / (adv[mask].std(correction=0) + 1e-8)
    batch["adv"] = white * mask


def add_grpo_advantages(batch, penalty, R, cfg):  # R (P,N)
    """adv = A of the episode, from its group, + the KL penalties from this token on, as with any reward. They are added
    after eq. 5 has divided by the group's std, or the same drift would cost more in one group than in another. [5]"""
    A = grpo_advantages(R, cfg.adv_norm).view(-1, 1)  # (B,1)
    penalty_to_come = penalty.flip(1).cumsum(1).flip(1)  # cumsum runs left to right; we need the sum to the right
    batch["adv"] = (A + penalty_to_come) * batch["mask"]


# ------------------------------------------------------------------------------------------- losses, updates
def token_logps(policy, part, cfg):  # -> log pi (n,), entropy (n,) of the tokens that the model wrote
    """Logits, the largest tensor of all, are made only where a token is trained, a chunk at a time. No attention mask:
    pads are on the right, and a causal model never looks to the right."""
    mask = part["mask"]
    hidden = policy.base_model(input_ids=part["inputs"], use_cache=False).last_hidden_state[mask]  # (n,D)
    # `logps_from_hidden` for some tokens at a time: less memory, the same numbers
    return logps_in_chunks(policy.get_output_embeddings(), hidden, part["targets"][mask], cfg.temperature)


def logps_from_hidden(head, hidden, targets, temperature):  # (n,D), (n,) -> log pi (n,), entropy (n,)
    logp = (head(hidden).float() / temperature).log_softmax(-1)  # (n,V); head: the model's output layer
    return logp.gather(1, targets[:, None])[:, 0], entropy_of(logp)


def entropy_of(logp):  # (n,V) -> (n,)
    return -(logp.exp() * logp.clamp(min=-1e4)).sum(1)  # a forbidden token has -inf, and 0 * -inf would be nan


def token_values(critic, part):  # -> value (n,): the critic's forecast before each token that the model wrote
    """NOTE squeeze: without it `value - ret` is (n,1) - (n,), which is (n,n), and nothing complains."""
    output = critic(input_ids=part["inputs"], use_cache=False).logits  # (b,T-1,1)
    return output[part["mask"]].float().squeeze(-1)


def policy_loss(logp, entropy, old_logp, adv, cfg):  # (n,) x4 -> loss (n,), did min take the clipped one? (n,)
    """eq. 4 (PPO) and 6 (GRPO), which have the same form, negated to be a loss. Do not watch its value: at ratio 1 it is
    minus the mean of A, about 0 whether the policy plays well or badly. Only its gradient counts.

    Why clip? The samples are pi_old's and say little about a policy far from it, but one rollout serves several updates,
    and only at the first one is every ratio 1. Why min? The clip alone would stop the gradient on the wrong side, too: a
    bad token may have become *likelier*, since all tokens share the same weights. With the clip to 0.8..1.2:

         A    ratio    ratio A    clip(ratio) A    min takes        the step moves the token's probability
         1     1.1       1.1          1.1          both, equal      up: the usual case, ratios are near 1
         1     1.5       1.5          1.2          clip(ratio) A    not: it moved up far enough
         1     0.5       0.5          0.8          ratio A          up again: it moved the wrong way
        -1     0.9      -0.9         -0.9          both, equal      down: the usual case
        -1     0.5      -0.5         -0.8          clip(ratio) A    not: it moved down far enough
        -1     1.5      -1.5         -1.2          ratio A          down again: it moved the wrong way

    (For A < 0 nothing bounds ratio A: the farther a token went the wrong way, the harder it is pulled back.)
    At the defaults of StarPO-S the clip is idle: 2 of 8 groups are kept, 32 trajectories, one update at ratio 1.

    The entropy bonus pays a little for undecided choices, so that the policy keeps trying several things: the best
    policy for this loss is a little less decided than the best one for the return."""
    ratio = (logp - old_logp).exp()
    unclipped = ratio * adv
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * adv
    loss = -torch.min(unclipped, clipped) - cfg.entropy_coef * entropy
    return loss, clipped < unclipped


def value_loss(value, old_value, ret):  # (n,) x3 -> (n,)
    """Squared error of the critic's forecast. One rollout is a small sample, so the forecast is not pulled farther than
    VALUE_CLIP from where it was. Say it was 0 and the return to come is 2:

        value    clipped    their squared errors    max takes        the step moves the forecast
          0.3      0.3         2.89     2.89        both, equal      up
          1.0      0.5         1.00     2.25        that of clipped  not: it moved far enough
         -1.0     -0.5         9.00     6.25        that of value    up: it moved the wrong way
    [6]"""
    clipped = old_value + (value - old_value).clamp(-VALUE_CLIP, VALUE_CLIP)
    return 0.5 * torch.max((value - ret) ** 2, (clipped - ret) ** 2)


def updates(batch, models, cfg, seed):  # -> statistics of every gradient step
    """Every trajectory is used once per epoch, E = cfg.update_size of them in a step."""
    steps = []
    shuffler = torch.Generator().manual_seed(seed)
    for _ in range(cfg.epochs):
        order = torch.randperm(len(batch["mask"]), generator=shuffler)
        for rows in order.split(cfg.update_size):
            steps.append(gradient_step(batch, rows.tolist(), models, cfg))
    return steps


# NOTE autocast: anew for each step, and never one inside another. Until the outermost ends it keeps its bf16 copies of
# the weights, also when an update has changed them.
@autocast
def gradient_step(batch, rows, models, cfg):  # -> statistics
    """The proof divides a sum over all tokens of all episodes by the number of episodes; we divide it by the number of
    trained tokens of these rows. [7] They are passed through in parts that fit into memory, whose gradients add up. NOTE:
    divide by the tokens of *all* parts: parts differ in size, and pads are no tokens.
    Gradients longer than MAX_GRAD_NORM are shortened, those of the policy and of the critic each on its own, so that one
    bad batch does not fill Adam's averages."""
    stats = Counter()  # a dict whose numbers begin at 0
    total = int(batch["mask"][rows].sum())  # tokens of all parts
    for _, part in micro_batches(batch, rows):  # numbers of some rows, the batch cut to them
        mask = part["mask"]
        logp, entropy = token_logps(models.policy, part, cfg)
        losses, was_clipped = policy_loss(logp, entropy, part["old_logp"][mask], part["adv"][mask], cfg)
        loss = losses.sum() / total
        loss.backward()
        stats["policy_loss"] += loss.item()
        stats["clip_fraction"] += was_clipped.sum().item() / total
        if models.critic is not None:
            value = token_values(models.critic, part)  # now; part["value"]: before the first update
            critic_loss = value_loss(value, part["value"][mask], part["ret"][mask]).sum() / total
            critic_loss.backward()
            stats["value_loss"] += critic_loss.item()
    stats = add_up(stats)  # over processes, if torchrun has started several
    norms = []
    for network in (models.policy, models.critic):
        if network is not None:
            add_up_gradients(network.parameters())
            norms.append(torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM).item())
    stats["grad_norm"] = norms[0]  # the policy's
    need(np.isfinite([*stats.values(), *norms]).all(), message_not_finite("loss or gradient", cfg))
    models.optimizer.step()  # Adam: its steps may be very long after a calm [8]
    models.optimizer.zero_grad()
    return stats


# ------------------------------------------------------------------------------------------------- the loop
def self_check(trajs, policy, cfg):
    """The invariants that silent bugs break. The first one is why the log-probs of the rollout can be the old ones:
    a fresh forward pass of the same weights gives the same, so before the first update every ratio is 1. (If it reads
    the same ids, at the same temperature, and nothing is random in it, such as dropout.)"""
    batch = collate(trajs[:16], cfg.device)
    gap = (grid_logps(policy, batch, cfg) - batch["old_logp"])[batch["mask"]].abs()
    if cfg.device == "cpu":
        small = gap.max() * cfg.temperature < 1e-4  # a low temperature magnifies rounding
    else:
        small = gap.mean() < 0.05  # bf16: 1 only roughly
    assert small, f"ratio not 1: log-probs of rollout and update differ by up to {gap.max():.1e}"
    starts = {(traj.group, traj.turns[0]["state"]) for traj in trajs}
    assert len(starts) == trajs[-1].group + 1, "one initial state per group"
    for traj, R in zip(trajs, returns(trajs, cfg).flatten()):
        on_own_tokens = sum(reward for reward, mine in zip(traj.reward, traj.mask) if mine)
        assert abs(on_own_tokens - R) < 1e-4, "the rewards on the model's tokens must add up to the return"
        assert sum(traj.mask) == sum(turn["tokens"] for turn in traj.turns), "trained = sampled tokens"


def iterate(i, models, cfg):  # -> row i of the log; all trajectories; what `learn` returned
    """One iteration of StarPO: play, then learn. (Iteration 0 is the model before training: nothing is played or learnt.)
    All randomness comes from (cfg.seed, i), so that a run that was cut short goes on as if it had not been."""
    if i == 0:
        return {"iteration": 0}, [], []
    rng = np.random.default_rng([cfg.seed, i])
    lowest = len(envs.EVAL_SEEDS)  # seeds below are for evaluation
    *seeds, sampling_seed = rng.integers(lowest, 2 ** 31, cfg.prompts * cfg.online_k + 1).tolist()
    clock = time.perf_counter()
    # `rollout`, divided among the processes, if there are several
    trajs = rollout_by_all(models.policy, models.tok, cfg.env, seeds, cfg.rollouts, cfg, sampling_seed, cfg.temperature)
    row = {"iteration": i, "seconds_rollout": time.perf_counter() - clock}
    if i == 1:  # once is enough: it tests the program and the model, not the run
        self_check(trajs, models.policy, cfg)

    learned = []
    clock = time.perf_counter()
    for first in range(0, len(seeds), cfg.prompts):  # once; with --online-k, k slices of P prompts (Fig. 10)
        of_slice = trajs[first * cfg.rollouts:(first + cfg.prompts) * cfg.rollouts]
        learned.append(learn(of_slice, models, cfg, sampling_seed + first))
    row["seconds_update"] = time.perf_counter() - clock
    return row | statistics(trajs, learned, cfg), trajs, learned


def train(cfg, watch=None):  # -> the rows of log.jsonl: row 0 is an evaluation before training, row i of iteration i
    """Ctrl-C, or a notebook's Interrupt: the present iteration is finished, everything is saved, the rows are returned.
    `watch(cfg, rows)` is called after every iteration; plots.live is one, for notebooks."""
    need(not cfg.eval_only and cfg.play is None, "eval_only and play do not train: run(cfg) heeds them")
    models = load_models(cfg)  # critic: the policy with a new scalar head; ref: a frozen copy
    cfg, rows = open_run(models, cfg)  # no rows yet; with --resume those so far
    end = is_over(rows, cfg)
    with finishing_first(), progress_bar(rows, cfg) as bar:
        while not end:
            row, trajs, learned = iterate(len(rows), models, cfg)
            rows.append(row)
            end = look_and_save(rows, trajs, learned, models, cfg)  # an evaluation now and then, log, checkpoint
            show_progress(bar, row)
            if watch:
                watch(cfg, rows)
    sum_up(rows, cfg)
    return rows


# -------------------------------------------------------------------------------------------------- footnotes
# Prices of what goes beyond the proof, and where the paper and its code do otherwise:
#
# [1] uncertainty_filter. The mean return of *all* prompts is no longer what is improved. U cannot tell luck from not
#     knowing: it keeps a bandit prompt, whose risky arm pays now and then, even if nothing is left to learn there. And it
#     chooses by the very returns that are then trained on: of two bandit groups that pull the risky arm equally often, it
#     keeps the one in which it paid.
# [2] nothing_to_compare is ours. After ten such iterations a run ends: if it has collapsed, it is not given the time to
#     come back.
# [3] The KL penalty. It would not do to put log pi - log pi_ref into the loss: at the first update its gradient is 0 on
#     average, since pi_ref has none, and grad log pi has mean 0 (step 2 of the proof). There one takes another estimate,
#     such as q - 1 - log q with q = pi_ref / pi (whose gradient is that of KL(pi_ref || pi)).
# [4] Whitening. An episode's own tokens are in the mean and the std, an error of about 1/B.
# [5] add_grpo_advantages. A penalty in the reward is ours: the released GRPO has log pi - log pi_ref in the loss, of
#     which [3] speaks. PPO whitens penalties and rewards together, so that the same kl_coef weighs differently there. No
#     forecast is subtracted from the penalties to come: right on average, but noisy.
# [6] value_loss. The clip may slow forecasts of large returns, near 11 on Sokoban. (Success there was the same without
#     it, in five seeds: figures/CLAIMS.md, the critic's rate and clip. In the first update of an iteration it is idle.)
# [7] gradient_step. The paper prints a mean over trajectories of a mean over tokens, in which a token of a short episode
#     counts more. In ours a token of a batch with long answers weighs less, a small bias.
# [8] Adam divides a step by the usual size of gradients. After a long calm it moves the weights by up to
#     (1 - beta1) / sqrt(1 - beta2) learning rates at a single gradient that is much longer than usual, shortened or not:
#     3 at beta1 = 0.9 and beta2 = 0.999, its defaults, and 32 in all until its momentum is spent; 0.3 and 6 at
#     beta2 = 0.9. Our suspect in the Echo Trap (README).


# ===========================================================================================================
# PART 2: THE ENGINE ROOM. Skip it on first reading: it makes part 1 fast, small and durable
# ===========================================================================================================
# The first four sections are worth reading some day: the chat template, the rollout's memory, passes over a batch, what
# is measured. The rest is housekeeping: several processes, loading and checking a model, telling, saving and resuming.
MICRO_TOKENS = 2048 if CUDA else 1024  # of a forward-backward pass: bounds the memory
EVALUATED_AT_ONCE = 64 if CUDA else 256  # episodes: a cache of 256 at 0.5B would take 7.5 GB
CHUNK_LOGITS = 2 ** 26  # logits that exist at once in an update: 256 MB, and a few copies
TINY = Path(__file__).parent / "tiny"
LOGS = ("log.jsonl", "samples.jsonl")
STOP = []  # signals that came, see finishing_first


# --------------------------------------------------------------------------------------- the chat template
def first_tag(no_think):
    """The answer's first tag is given to the model: it belongs to the message and is not trained."""
    return "<answer>" if no_think else "<think>"


@functools.lru_cache(2048)  # the episodes of a group often read the same
def encode(tok, no_think, text, after_answer):  # -> ids, to be read only: all callers share the list
    """`text` as a user's message in the model's chat template, then the first tag of the answer.

    A later message follows an answer that exists only as ids, and ids are never decoded and encoded again. So we
    render a little conversation with a dummy answer, (seam), and keep what comes behind it:
        <|im_start|>user . <|im_end|> <|im_start|>assistant (seam)          <- cut off
        <|im_end|> <|im_start|>user {text} <|im_end|> <|im_start|>assistant <- kept
    What is kept begins with the token that ends an answer. If the model has written that token itself, `take_turn` drops
    it from the message. If the answer was cut off, or ended with another token, it stays there.
    """
    chat = [{"role": "user", "content": text}]
    if after_answer:
        chat = [{"role": "user", "content": "."}, {"role": "assistant", "content": "(seam)"}] + chat
    rendered = tok.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    rendered = rendered.split("(seam)")[-1]  # in the first turn there is no seam: all is kept
    rendered = rendered.lstrip(" ")  # some templates put a blank behind the answer
    rendered = re.sub(r"<think>\s*(</think>\s*)?$", "", rendered)  # some open the thought, or leave an empty one
    return tok(rendered + first_tag(no_think), add_special_tokens=False).input_ids


def ends_of_answers(policy, tok, cfg):  # -> the tokens that end an answer: first the template's end of turn
    end_of_turn = encode(tok, cfg.no_think, ".", after_answer=True)[0]  # what stands behind an answer, see `encode`
    others = policy.generation_config.eos_token_id  # a number, a list of them, or None, which no token equals
    if not isinstance(others, list):
        others = [others]
    return [end_of_turn, *others]


# ------------------------------------------------------------------------------------------ the rollout's memory
class KVCache:
    """Keys and values of all layers. Given as past_key_values, transformers asks nothing of it but `update`, which every
    layer calls once in a forward pass.

    A row's tokens lie in columns 0, 1, 2, ... without gaps, however far the other rows are. A row whose answer ended
    early simply takes no part in the passes that follow, so that nothing is appended to it (its last token is not even
    in the cache yet: it is read together with the next message).

    Where rows read different numbers of tokens, a pass still wants a rectangle. Say the upper row has 7 tokens in the
    cache and reads a b c; the lower one has 5 and reads x. Pads, -, stand before x and get the columns *behind* it:

                 input       columns
        upper    a b c       7 8 9         x attends to columns 0..5, never to those behind it;
        lower    - - x       6 7 5         the row's next tokens go to 6, 7, ... and replace the pads
    """

    def __init__(self, rows, device, copies=1):
        self.device = device
        self.size = rows  # rows in the cache
        self.copies = copies  # of each row, to be made when the first messages are read
        self.layers = {}  # layer -> (size, 2, heads, columns, width): keys and values
        self.row_of = {}  # trajectory -> its row
        self.seen = Counter()  # trajectory -> how many of its ids the row holds; 0 at first
        # `read` sets these before each pass:
        self.rows = self.columns = None  # which rows read (b,), and where their q new tokens go (b,q)
        self.used = 0  # how many columns anyone attends to

    def update(self, keys, values, layer, *_):  # new ones (b, heads, q, width) -> all of these rows
        new = torch.stack((keys.to(values.dtype), values), 1)  # autocast leaves the keys fp32
        if layer not in self.layers:
            self.layers[layer] = new.new_zeros(self.size, 2, new.shape[2], 0, new.shape[4])
        stored = self.layers[layer]
        missing = self.used - stored.shape[3]
        if missing > 0:  # grow in steps: a copy of everything for every token would be slow
            stored = torch.nn.functional.pad(stored, (0, 0, 0, missing + 64))  # width as it is, more columns
            self.layers[layer] = stored
        # Two indices, (b,1) and (b,q), with slices between them: torch puts (b,q) in front. (b, q, 2, heads, width)
        stored[self.rows[:, None], :, :, self.columns] = new.permute(0, 3, 1, 2, 4)
        visible = stored[:, :, :, :self.used]
        if len(self.rows) < self.size:  # else all rows read, in their order
            visible = visible.index_select(0, self.rows)
        return visible.unbind(1)

    def copy_rows(self, rows):  # the new cache has these rows; one may be named more than once
        self.size = len(rows)
        for layer, stored in self.layers.items():
            self.layers[layer] = stored[rows]

    def select(self, trajs):  # the new cache has one row for each of these
        self.copy_rows([self.row_of[traj] for traj in trajs])
        self.row_of = {traj: row for row, traj in enumerate(trajs)}


def read(policy, cache, trajs, temperature):  # -> log-probs (b,V) of the token that comes next
    """Each trajectory reads those of its ids that are not in the cache yet; the drawing is at KVCache."""
    new = [traj.ids[cache.seen[traj]:] for traj in trajs]
    q = max(len(ids) for ids in new)
    pads = [q - len(ids) for ids in new]
    padded = [[0] * count + ids for count, ids in zip(pads, new)]

    def tensor(numbers):
        return torch.tensor(numbers, device=cache.device)

    seen = tensor([cache.seen[traj] for traj in trajs])
    place = torch.arange(q, device=cache.device) - tensor(pads)[:, None]  # upper: 0 1 2; lower: -2 -1 0
    cache.columns = seen[:, None] + (place % q)  # (b,q). % sends the pads behind: 7 8 9; lower: 5 + (1 2 0) = 6 7 5
    cache.rows = tensor([cache.row_of[traj] for traj in trajs])
    cache.used = int(cache.columns.max()) + 1
    later = torch.arange(cache.used, device=cache.device) > cache.columns[:, None, :, None]  # (b,1,q,used)
    unseen = later * torch.finfo(torch.float32).min  # added to the scores: some models would add a boolean, too
    output = policy(input_ids=tensor(padded), attention_mask=unseen, position_ids=cache.columns,
                    past_key_values=cache, logits_to_keep=1)
    for traj in trajs:
        cache.seen[traj] = len(traj.ids)
    return (output.logits[:, -1].float() / (temperature or 1)).log_softmax(-1)


def next_token_logp(policy, cache, trajs, temperature):  # -> (b,V)
    if cache.layers:  # something has been read before
        return read(policy, cache, trajs, temperature)
    for traj in trajs:  # the first message is the same in a whole group: it is read once, then copied
        cache.row_of[traj] = traj.group
    logp = read(policy, cache, trajs[::cache.copies], temperature)
    cache.select(trajs)
    for traj in trajs:
        cache.seen[traj] = len(traj.ids)
    return logp.repeat_interleave(cache.copies, 0)


# ---------------------------------------------------------------------------------------- passes over a batch
def pad(rows, device):  # -> (B, longest)
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True).to(device)


def micro_batches(batch, rows):  # yields some of the rows, and the batch cut to them and to their length
    """Rows of similar length go together, as many as MICRO_TOKENS allows: little padding, bounded memory."""
    places = torch.arange(1, batch["mask"].shape[1] + 1, device=batch["mask"].device)
    length = (batch["mask"] * places).amax(1).clamp(min=1).tolist()  # up to the last trained token: the rest is unused
    parts = [[]]
    for row in sorted(rows, key=length.__getitem__):  # the last of a part is its longest
        tokens = (len(parts[-1]) + 1) * (length[row] + 1)  # if this row came, too; + 1: T tokens have T-1 columns
        if parts[-1] and tokens > MICRO_TOKENS:
            parts.append([])
        parts[-1].append(row)
    for some in parts[RANK::PROCESSES]:  # other processes take the others
        columns = length[some[-1]]
        yield some, {key: x[some, :columns] for key, x in batch.items()}


def logps_in_chunks(head, hidden, targets, temperature):  # as logps_from_hidden, for some tokens at a time
    size = max(1, CHUNK_LOGITS // len(head.weight))  # head.weight is (V,D)
    logps, entropies = [], []
    for some_hidden, some_targets in zip(hidden.split(size), targets.split(size)):
        logp, entropy = checkpoint(  # torch's: activations are not kept but computed again in backward
            logps_from_hidden, head, some_hidden, some_targets, temperature, use_reentrant=False)
        logps.append(logp)
        entropies.append(entropy)
    return torch.cat(logps), torch.cat(entropies)


@autocast
@torch.no_grad()
def on_grid(function, batch):  # function(part) -> (n,), one number a token; here each in its place: (B,T-1), elsewhere 0
    grid = torch.zeros(batch["mask"].shape, device=batch["mask"].device)
    for rows, part in micro_batches(batch, range(len(grid))):
        mask = part["mask"]
        values = torch.zeros(mask.shape, device=mask.device)
        values[mask] = function(part)
        grid[rows, :mask.shape[1]] = values
    if PROCESSES > 1:
        torch.distributed.all_reduce(grid)  # every place was filled by one process, elsewhere it is 0
    return grid


def grid_logps(policy, batch, cfg):  # -> (B,T-1): log pi of the tokens that the model wrote, elsewhere 0
    return on_grid(lambda part: token_logps(policy, part, cfg)[0], batch)


def grid_values(critic, batch):  # -> (B,T-1): the critic's forecasts there, elsewhere 0
    return on_grid(lambda part: token_values(critic, part), batch)


# ------------------------------------------------------------------------------------------------- what is measured
def evaluate(when, models, cfg):  # -> {world: success on its evaluation levels}
    result = {}
    for name in cfg.eval_names:
        seeds = envs.EVAL_SEEDS[:cfg.eval_prompts]
        trajs = []
        for first in range(0, len(seeds), EVALUATED_AT_ONCE):
            some = seeds[first:first + EVALUATED_AT_ONCE]
            trajs += rollout_by_all(models.policy, models.tok, name, some, 1, cfg, 0, EVAL_TEMPERATURE)
        success = sum(traj.success for traj in trajs) / len(trajs)
        low, high = envs.interval(success, len(trajs))
        random, optimal = envs.yardsticks_of_run(name, asdict(cfg))
        say(f"{when:9} {name} {success:.2f} [{low:.2f}, {high:.2f}]  random {random:.2f}  optimal {optimal:.2f}")
        result[name] = success
        for traj in trajs[:2]:  # whole episodes, to be read
            text = models.tok.decode(traj.ids)
            append(cfg, "samples.jsonl", dict(when=when, env=name, success=traj.success, R=traj.R,
                                              turns=traj.turns, text=text))
    return result


def statistics(trajs, learned, cfg):  # -> columns of log.jsonl; LOOKS in plots.py says what to look for
    R = returns(trajs, cfg)
    turns = [turn for traj in trajs for turn in traj.turns]
    thoughts = [thought_of(turn) for turn in turns]
    tokens = sum(sum(traj.mask) for traj in trajs)
    row = {
        "reward": R.mean(),  # the mean return
        "reward_std": R.std(1, correction=0).mean(),
        "success": np.mean([traj.success for traj in trajs]),
        "entropy": sum(traj.entropy for traj in trajs) / tokens,
        "response_length": tokens / len(trajs),
        "think_length": np.mean([len(thought.split()) for thought in thoughts]),
        "distinct": len(set(thoughts)) / len(thoughts),
        "valid": np.mean([turn["valid"] for turn in turns]),
        "turns": len(turns) / len(trajs),
    }
    kl = [batch["kl"][batch["mask"]].mean().item() for _, batch, _ in learned if "kl" in batch]
    if kl:
        row["kl"] = np.mean(kl)
    claims = [is_true for turn in turns for _, is_true in turn["claims"]]
    if claims:
        row["claims"] = np.mean([len(turn["claims"]) > 0 for turn in turns])
        row["true_claims"] = np.mean(claims)
        row["fitting"] = np.mean([fits(turn) for turn in turns if turn["claims"]])
    steps = sum((steps for _, _, steps in learned), [])
    if steps:
        for name in steps[0]:
            row[name] = np.mean([step[name] for step in steps])
        row["grad_norm_max"] = max(step["grad_norm"] for step in steps)  # a spike of one step in many
    row = {name: round(float(x), 6) for name, x in row.items()}
    kept = sum(len(chosen) for chosen, _, _ in learned)
    return row | {"updates": len(steps), "kept": kept, "tokens": tokens}


def thought_of(turn):  # -> text; one that does not end goes on to the end of the answer
    if not turn["answer"].startswith("<think>"):  # --no-think
        return ""
    return turn["answer"].removeprefix("<think>").partition("</think>")[0]


def judge_thought(turn, env, cfg):  # -> what it is paid
    """--truth-reward: so much for every true claim of the thought, and as much taken for every false one. No message
    tells the model of it; otherwise the model could read there which of its claims were true."""
    turn["claims"] = envs.claims(env, thought_of(turn))
    true = sum(is_true for _, is_true in turn["claims"])
    false = len(turn["claims"]) - true
    return cfg.truth_reward * (true - false)


def fits(turn):
    """Is the first action of an answer one of those that its thought speaks of? ("1 down and 1 right": Down or Right)"""
    first = turn["answer"].partition("<answer>")[2].split("||")[0].split("<")[0].strip().lower()
    return first != "" and any(first in said for said, _ in turn["claims"])


def write_xray(trajs, learned, models, cfg):
    """RUN/xray.json, for `plots.py xray RUN`: the best and the worst episode of the group whose returns differ most,
    token by token, with all that the update knew about each token (if nothing was trained: without)."""
    if not trajs:  # before the first iteration
        return
    chosen, batch, steps = learned[0]
    if not steps:
        chosen, batch = trajs, collate(trajs, cfg.device)
    first = cfg.rollouts * int(returns(chosen, cfg).std(1, correction=0).argmax())
    rows = sorted(range(first, first + cfg.rollouts), key=lambda row: chosen[row].R)
    rows = list(dict.fromkeys([rows[-1], rows[0]]))  # one, if there is only one
    part = {key: x[rows] for key, x in batch.items()}
    if steps:
        part["ratio"] = (grid_logps(models.policy, part, cfg) - part["old_logp"]).exp()  # after the update
    episodes = []
    for k, row in enumerate(rows):
        traj = chosen[row]
        length = len(traj.ids) - 1  # the rest is padding
        columns = {key: x[k, :length].tolist() for key, x in part.items() if x.is_floating_point()}
        tokens = [models.tok.decode([i]) for i in traj.ids]
        episodes.append(dict(group=traj.group, R=traj.R, success=traj.success, turns=traj.turns, mask=traj.mask,
                             tokens=tokens, columns=columns))
    if RANK == 0:
        Path(cfg.out, "xray.json").write_text(json.dumps(episodes))


# ------------------------------------------------------------------------------------- several processes: torchrun
# torchrun starts this program several times and tells each its RANK. Every process holds the whole model and, after each
# rollout, all trajectories: filter, statistics and steps are the same everywhere. The groups to be played and the
# micro-batches are divided among them. Rank 0 alone writes and speaks (but for errors).
def join_others(cfg):
    if PROCESSES > 1:
        need(PROCESSES <= cfg.prompts, f"{PROCESSES} processes for --prompts {cfg.prompts}: each must play one at least")
        if CUDA:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group()


def from_all(x):  # -> [x of rank 0, x of rank 1, ...]
    if PROCESSES == 1:
        return [x]
    everyones = [None] * PROCESSES
    torch.distributed.all_gather_object(everyones, x)
    return everyones


def rollout_by_all(policy, tok, name, seeds, N, cfg, sampling_seed, temperature):  # -> as rollout
    mine = seeds[RANK::PROCESSES]
    trajs = rollout(policy, tok, name, mine, N, cfg, sampling_seed + RANK, temperature)
    if PROCESSES == 1:
        return trajs
    for traj in trajs:
        traj.group = traj.group * PROCESSES + RANK
        traj.env = None  # a world of the user's may not travel
    return sorted(itertools.chain(*from_all(trajs)), key=lambda traj: traj.group)


def add_up(stats):
    total = Counter()
    for part in from_all(stats):
        total.update(part)
    return total


def add_up_gradients(weights):
    if PROCESSES > 1:
        for weight in weights:
            if weight.grad is None:  # fewer micro-batches than processes
                weight.grad = torch.zeros_like(weight)
            torch.distributed.all_reduce(weight.grad)


# ----------------------------------------------------------------------------------------------------- models
def load_models(cfg):
    """Weights are fp32: a step of 1e-6 vanishes in bf16. The critic begins as the policy with a new scalar head."""
    transformers.logging.set_verbosity_error()  # it would report that the critic's head is new
    transformers.utils.logging.disable_progress_bar()
    source = TINY if cfg.model == "tiny" else cfg.model
    home = Path(source).parent
    local = home != Path(".") and home.exists()  # a hub id may look like this, too, but not where that folder exists
    need(Path(source).exists() or not local, f"--model {source}: there is no such folder in {home}")
    training = cfg.play is None and not cfg.eval_only
    torch.manual_seed(cfg.seed)  # for the critic's head

    def load(kind, **options):  # eval: with dropout the ratio would not be 1
        return kind.from_pretrained(source, dtype=torch.float32, **options).to(cfg.device).eval()

    with otherwise(f"--model {source} cannot be loaded: give a folder (such as RUN/checkpoint), tiny, or with network "
                   "a hub id"):
        tok = transformers.AutoTokenizer.from_pretrained(source)
        policy = load(transformers.AutoModelForCausalLM)
    need(tok.chat_template, f"--model {source} has no chat template: take an instruction-tuned model")
    check_worlds(tok, cfg)
    first, longest = check_chat(tok, policy, cfg)
    check_short_cuts(policy, first, longest, cfg)
    critic = ref = None
    if training and cfg.algo == "ppo":
        with otherwise(f"--model {source} cannot be a critic: --algo grpo needs none"):
            critic = load(transformers.AutoModelForTokenClassification, num_labels=1)
    if training and cfg.kl_coef:
        ref = copy.deepcopy(policy).requires_grad_(False)
    groups = [{"params": policy.parameters(), "lr": cfg.lr}]
    if critic is not None:
        groups.append({"params": critic.parameters(), "lr": cfg.critic_lr})
    return Models(policy, critic, ref, torch.optim.Adam(groups), tok)


def check_chat(tok, policy, cfg):  # -> the longest first message; tokens of the longest episode that may come
    """Does the template show the state, and is there room for the longest episode?"""
    firsts = []
    for name in cfg.eval_names:
        with otherwise(f"--model {cfg.model}: its chat template fails"):
            traj = begin(name, 0, 0, 0, tok, cfg)
        shown = tok.decode(traj.ids)
        need("State" in shown, f"--model {cfg.model}: its chat template does not show the user's message")
        firsts.append(traj.ids)
    first = max(firsts, key=len)
    longest = cfg.max_turns * (len(first) + 16 + cfg.max_new_tokens)  # 16: the line that tells the reward
    room = getattr(policy.config, "max_position_embeddings", None) or longest  # some models know no limit
    need(longest <= room,
         f"episodes take up to {longest} tokens, the model {room}: lower --max-new-tokens or --max-turns")
    return first, longest


@torch.no_grad()
def check_short_cuts(policy, first, longest, cfg):
    """The rollout reads through KVCache, the update makes logits only where they are needed. Both suit a model whose
    memory is keys and values. Here they are compared with plain forward passes, in fp32, at the end of a longest
    episode. Any tokens will do; these are drawn from the longest first message."""
    refused = f"--model {cfg.model} ({type(policy).__name__}) cannot be used here: "
    dice = np.random.default_rng(0)
    trajs = [Trajectory(None, 0, 0), Trajectory(None, 1, 0)]
    cache = KVCache(2, cfg.device)
    cache.row_of = {trajs[0]: 0, trajs[1]: 1}
    with otherwise(refused + "it does not work with the cache of the rollout"):
        for _ in range(cfg.max_turns):
            for traj, share in zip(trajs, (1, 0.6)):  # one reads more than the other
                traj.add_message(dice.choice(first, int(share * longest / cfg.max_turns)).tolist())
            cached = read(policy, cache, trajs, cfg.temperature)
    need(cache.layers, refused + "it does not ask the cache for keys and values (a recurrent model?)")
    for traj, from_cache in zip(trajs, cached):
        ids = torch.tensor([traj.ids], device=cfg.device)
        logits = policy(input_ids=ids, use_cache=False).logits[0, -256:].float()  # all T would take much memory
        plain = (logits / cfg.temperature).log_softmax(-1)  # (256,V)
        part = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "mask": torch.ones_like(ids[:, 1:], dtype=torch.bool)}
        targets = ids[0, 1:][-len(plain) + 1:]
        in_update = token_logps(policy, part, cfg)[0][-len(targets):]
        gap = largest_gap(in_update, plain[:-1].gather(1, targets[:, None])[:, 0])
        need(gap < 2e-3, refused + f"it changes its logits behind the output layer (by up to {gap:.1g})")
        gap = largest_gap(from_cache, plain[-1])
        need(gap < 2e-3, refused + why_not(policy, len(traj.ids), gap))


def largest_gap(ours, plain):  # of two lists of log-probs; of what is hardly possible the rounding does not matter
    return (ours - plain)[plain > -20].abs().max().item()


def why_not(policy, tokens, gap):
    window = getattr(policy.config.get_text_config(), "sliding_window", None)
    if window and window < tokens:
        return (f"it looks back {window} tokens only (sliding window), and episodes take up to {tokens}: lower "
                "--max-new-tokens or --max-turns")
    return f"through the cache log-probs are off by up to {gap:.1g}, it is not clear why. Llama, Qwen2 and Qwen3 work"


def check_worlds(tok, cfg):
    for name in cfg.eval_names:
        if name not in envs.BUILT_IN and RANK == 0:
            envs.check(name, tok, cfg.max_actions)


# -------------------------------------------------------------------------------------------------- telling
@contextlib.contextmanager
def otherwise(advice):
    """Any exception becomes a UserError: the advice, and in brackets the reason. (Where a file is missing, damaged or
    cannot be written, every library raises an exception of its own.)"""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # `main` has advice for it
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{advice} ({reason[:150]})") from error


def message_not_finite(what, cfg):
    return (f"{what} is not finite: stopped before the step. Go on from the last checkpoint at a lower --lr: "
            f"--resume {cfg.out or 'RUN'}")


def explain(cfg):  # -> what the settings mean for the objective, in words
    kept = len(uncertainty_filter(torch.zeros(cfg.prompts, 1), cfg.keep))  # of so many prompts, whatever their returns
    in_a_slice = -(-kept * cfg.rollouts // cfg.update_size)  # rounded up
    steps = in_a_slice * cfg.epochs * cfg.online_k
    clip = "1, never clipped"
    if steps > 1:
        clip = f"clipped to {1 - cfg.clip_low:g}..{1 + cfg.clip_high:g}"
    return (f"{cfg.algo}: filter keeps {kept} of {cfg.prompts} prompts; KL {cfg.kl_coef or 'off'}; entropy "
            f"bonus {cfg.entropy_coef or 'off'}; {steps} update(s) a rollout, ratio {clip}")


def size_of(models):  # -> what a large model takes, in words
    networks = [part for part in (models.policy, models.critic, models.ref) if part is not None]
    kept = 4 * sum(weight.numel() for network in networks for weight in network.parameters())  # bytes, in fp32
    trained = 4 * sum(weight.numel() for group in models.optimizer.param_groups for weight in group["params"])
    if trained < 1e9:
        return ""
    size = (kept + 3 * trained) / 1e9
    return (f"\nmemory: {size:.0f} GB for weights, gradients and Adam, besides cache and activations; disk: {size:.0f} "
            "GB for a checkpoint, twice that while one replaces another")


def is_dead(rows):
    """Ten iterations in a row had nothing to compare. So it will stay, unless rewards are very rare."""
    return len(rows) > 10 and all(row.get("updates") == 0 for row in rows[-10:])


def is_over(rows, cfg):
    return is_dead(rows) or len(rows) > cfg.iterations


def progress_bar(rows, cfg):
    title = "StarPO-S" if cfg.starpo_s else "StarPO"
    quiet = {"disable": True} if RANK > 0 else {}
    return tqdm(total=cfg.iterations, initial=max(0, len(rows) - 1), desc=title, **quiet)


def show_progress(bar, row):
    bar.update(row["iteration"] > 0)
    bar.set_postfix({key: f"{row[key]:.2f}" for key in ("reward", "success", "entropy") if key in row})


def look_and_save(rows, trajs, learned, models, cfg):  # -> was this the last iteration?
    row = rows[-1]
    i = row["iteration"]
    over = is_over(rows, cfg)
    asked_to_stop = any(from_all(len(STOP) > 0))  # asked once: a signal may come at any time
    if cfg.eval_every and (i % cfg.eval_every == 0 or over):
        when = f"iter {i}"
        if over:
            when = "after"
        if i == 0:
            when = "before"
        row["eval"] = evaluate(when, models, cfg)
    warn_of_trouble(rows, trajs)
    append(cfg, "log.jsonl", row)
    if i % cfg.save_every == 0 or over or asked_to_stop:  # at 0, too: is the disk writable?
        write_xray(trajs, learned, models, cfg)
        if RANK == 0:
            save(models, cfg)
    return over or asked_to_stop


def sum_up(rows, cfg):
    if RANK > 0:
        return
    if len(rows) > 1:
        skipped = sum(row.get("updates") == 0 for row in rows)
        say(f"{plots.curves([cfg.out])}; log.jsonl, samples.jsonl, checkpoint/; "
            f"iterations with nothing to compare: {skipped}")
    if not is_over(rows, cfg):
        say(f"Go on: python ragen_mini.py --resume {cfg.out}")


def warn_of_trouble(rows, trajs):
    """A lasting fall of valid turns is the sign of a collapse, told once a run: in-group std and entropy also fall in
    healthy runs, when a task is solved."""
    valid = [row["valid"] for row in rows if "valid" in row]
    if valid == [0]:  # in the first rollout, and none
        answer = trajs[0].turns[0]["answer"]
        say(f"no turn of the first rollout was valid: can the model write such actions? An answer: {answer[:200]!r}")
    if is_dead(rows):
        rows[-1]["dead"] = True
        say("ten iterations in a row had nothing to compare: this run is dead, it ends here (or rewards are so rare that "
            "it needs more --prompts)")
    told = any("warning" in row for row in rows)
    if len(valid) < 10 or told:
        return
    by_five = np.convolve(valid, np.ones(5) / 5, mode="valid")  # the mean of every five in a row
    if by_five[-1] < by_five.max() / 2:
        rows[-1]["warning"] = "fewer than half as many valid turns as at its best"
        say(f"iteration {rows[-1]['iteration']}, a sign of collapse: {rows[-1]['warning']}")


def show_episode(models, cfg):
    """--play: one episode, as the model reads and writes it."""
    traj, = rollout(models.policy, models.tok, cfg.env, [cfg.play], 1, cfg, cfg.seed, EVAL_TEMPERATURE)
    print(traj.env.instruction)
    for turn in traj.turns:
        print(f"\n{turn['state']}\n\n{turn['answer']}")
        if not turn["valid"]:
            print("(not a valid answer: nothing moves)")
        print(f"reward {turn['reward']:g}")
    print(f"\n{traj.env.render()}\n{'success' if traj.success else 'no success'}, return {traj.R:g}")


def say(text):  # above the progress bar. (Ctrl-C ends both programs of `python ragen_mini.py | tee log`)
    try:
        if RANK == 0:
            tqdm.write(text)
    except OSError:
        pass


# -------------------------------------------------------------------------------------- the folder of a run
def append(cfg, name, row):  # to a log of the run
    if cfg.out and RANK == 0:
        with open(Path(cfg.out, name), "a") as file:
            file.write(json.dumps(row) + "\n")


def open_run(models, cfg):  # -> cfg with its folder, the rows of the log so far
    """A new folder, since nothing is ever overwritten; or the folder of --resume, with everything as it was saved."""
    cfg = copy.copy(cfg)  # the caller's stays as it is
    logs = dict.fromkeys(LOGS, "")
    if cfg.resume:
        cfg.out = cfg.resume
        logs = restore(models, cfg)
        cfg.resume = ""
    else:
        cfg.out, *_ = from_all(new_folder(cfg) if RANK == 0 else None)
    rows = [json.loads(line) for line in logs["log.jsonl"].splitlines()]
    need(len(rows) <= cfg.iterations + 1,
         f"{cfg.out} has {len(rows) - 1} iterations already; --iterations is their number in all")
    if RANK > 0:
        return cfg, rows
    for name, text in logs.items():  # rows after the checkpoint go: they are made again
        Path(cfg.out, name).write_text(text)
    about = asdict(cfg)  # for readers and for plots.py: trainer.pt has it, too
    if cfg.eval_every:
        about["yardsticks"] = {name: list(envs.yardsticks_of_run(name, about)) for name in cfg.eval_names}
    Path(cfg.out, "config.json").write_text(json.dumps(about, indent=1))
    print(f"{cfg.model} on {cfg.device}, in {cfg.out}\n{explain(cfg)}{size_of(models)}")
    return cfg, rows


def new_folder(cfg):
    need(not cfg.out or Path(cfg.out).name, f"--out {cfg.out}: the folder needs a name of its own, such as runs/first")
    name = cfg.out.rstrip("/")
    if not name:
        method = f"{cfg.algo}-s" if cfg.starpo_s else cfg.algo
        name = f"runs/{envs.title(cfg.env)}-{method}-seed{cfg.seed}"
    for number in itertools.count(1):
        out = Path(name if number == 1 else f"{name}-{number}")
        try:
            out.mkdir(parents=True)
            return str(out)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"--out {out} cannot be made ({error})") from error


def with_state(models):  # -> their names, and what has weights or moments: all but the tokenizer and what is None
    return [(name, part) for name, part in vars(models).items() if hasattr(part, "state_dict")]


def save(models, cfg):
    """RUN/checkpoint: a Hugging Face folder, and in trainer.pt all that --resume needs, settings and logs included.
    Written beside the old files, then put in their place: whole ones are there whenever the process dies."""
    new, old = Path(cfg.out, "checkpoint.new"), Path(cfg.out, "checkpoint")
    logs = {name: Path(cfg.out, name).read_text() for name in LOGS}
    state = {"config": asdict(cfg), "logs": logs}
    for name, part in with_state(models):
        state[name] = part.state_dict()
    with otherwise(f"cannot save; mend that, then go on: --resume {cfg.out}"):
        models.policy.save_pretrained(new)
        models.tok.save_pretrained(new)
        Path(new, "README.md").write_text(model_card(models.tok, cfg), encoding="utf-8")
        torch.save(state, Path(cfg.out, "trainer.new"))
    shutil.copytree(new, old, copy_function=os.replace, dirs_exist_ok=True)  # moves file by file
    os.replace(Path(cfg.out, "trainer.new"), old / "trainer.pt")  # last: it decides
    shutil.rmtree(new)


CARD = """# {model}, trained in {world} by ragen-mini

See it play level 7 of its world: python ragen_mini.py --model FOLDER --play 7

In a program of your own, give it a prompt that ends with the first tag of the answer, as here:

````
{prompt}
````
"""


def model_card(tok, cfg):
    prompt = tok.decode(begin(cfg.env, 0, 0, 0, tok, cfg).ids)
    return CARD.format(model=cfg.model, world=cfg.env, prompt=prompt)


def saved_state(checkpoint):  # -> dict of what `save` put into trainer.pt
    file = Path(checkpoint, "trainer.pt")
    need(file.exists(), f"{file} does not exist: nothing to go on with")
    with otherwise(f"{file} cannot be used: put it back or start anew"):
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # executes nothing
        need(state["config"].keys() == Config.__dataclass_fields__.keys(), "made by another version of this program")
        return state


def restore(models, cfg):  # -> the logs when it was saved
    state = saved_state(Path(cfg.resume, "checkpoint"))
    for name, x in state["config"].items():
        same = name in MAY_CHANGE | {"out"} or getattr(cfg, name) == x
        need(same, f"{cfg.resume} has {name} {x}: in a script, parse_config(['--resume', {cfg.resume!r}]) keeps that")
    with otherwise(f"{cfg.resume}/checkpoint/trainer.pt does not fit the model: put it back or start anew"):
        for name, part in with_state(models):
            part.load_state_dict(state[name])
    for group, lr in zip(models.optimizer.param_groups, (cfg.lr, cfg.critic_lr)):
        group["lr"] = lr  # --resume may lower it
    return state["logs"]


@contextlib.contextmanager
def finishing_first():
    """Here Ctrl-C, a notebook's Interrupt and SIGTERM do not break off: they ask to stop after the present iteration. A
    second one does not wait."""
    STOP.clear()
    before = {}

    def ask_to_stop(number, _):
        STOP.append(number)
        signal.signal(number, before[number])
        say("stopping at the next save, after this iteration; once more: at once")
    if threading.current_thread() is threading.main_thread():  # others may not
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask_to_stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ===========================================================================================================
# PART 3: THE COMMAND LINE
# ===========================================================================================================
QWEN = "Qwen/Qwen2.5-0.5B-Instruct"
FOR_TINY = dict(iterations=60, lr=4e-4, critic_lr=1e-3, max_new_tokens=40, eval_prompts=256)
FOR_OTHERS = dict(iterations=200, lr=1e-6, critic_lr=1e-5, max_new_tokens=400, eval_prompts=256 if CUDA else 8)
MAY_CHANGE = {"resume", "device", "iterations", "save_every", "lr", "critic_lr"}  # may be given together with --resume
MAY_BE_ZERO = {"seed", "play", "eval_every", "success_rate", "gamma", "lam", "clip_low", "clip_high",
               "entropy_coef", "kl_coef", "truth_reward"}
AT_MOST_ONE = {"keep", "success_rate", "gamma", "lam", "clip_low"}


def option(default, text):
    return field(default=default, metadata={"help": text})


@dataclass
class Config:
    """All settings of a run. Where the default is None it depends on --starpo-s, or on --model: see __post_init__."""
    # the method
    prompts: int = option(8, "P: initial states per iteration")
    rollouts: int = option(16, "N: episodes from each initial state")
    max_turns: int = option(5, "turns of an episode")
    max_actions_per_turn: int = option(5, "further actions of an answer are dropped")
    max_actions: int = option(10, "actions of an episode")
    max_new_tokens: int | None = option(None, "tokens that the model may write in a turn (tiny: 40, others: 400)")
    no_think: bool = option(False, "answer at once, without <think>...</think>")
    temperature: float = option(1.0, "of the rollout; evaluation is at 0.5")
    starpo_s: bool = option(False, "StarPO-S: changes the next three settings")
    keep: float | None = option(None, "share of the prompts that is kept, most uncertain first (1; with --starpo-s 0.25)")
    kl_coef: float | None = option(None, "weight of the KL penalty in the reward (0.001; with --starpo-s 0)")
    clip_high: float | None = option(None, "the ratio is clipped above 1 + clip_high (0.2; with --starpo-s 0.28)")
    clip_low: float = option(0.2, "the ratio is clipped below 1 - clip_low")
    entropy_coef: float = option(0.001, "weight of the entropy bonus")
    algo: str = option("ppo", "ppo (advantages from a critic) or grpo (from the group)")
    gamma: float = option(1.0, "ppo: discount, per token that the model wrote")
    lam: float = option(1.0, "ppo: lambda of GAE")
    adv_norm: str = option("std", "grpo: std (divide by the group's, eq. 5) or mean (only subtract it)")
    update_size: int = option(32, "E: trajectories per update")
    epochs: int = option(1, "passes over the trajectories of an iteration")
    online_k: int = option(1, "collect k*P prompts at once, then update on k slices of P (Fig. 10)")
    lr: float | None = option(None, "Adam, policy (tiny: 4e-4, other models: 1e-6)")
    critic_lr: float | None = option(None, "Adam, critic (tiny: 1e-3, other models: 1e-5)")
    # worlds, models, files
    env: str = option("frozenlake", "world to train in; python envs.py lists them")
    model: str = option("auto", "tiny (embedded), a folder or a hub id; auto: tiny, or Qwen2.5-0.5B-Instruct on a GPU")
    device: str = option("auto", "cuda, mps or cpu; auto: cuda if there is one, else cpu")
    seed: int = option(0, "of everything random")
    iterations: int | None = option(None, "rounds of rollout and update in all (tiny: 60, other models: 200)")
    eval_envs: str = option("", "evaluate in these worlds, too: names with commas between them")
    eval_every: int = option(20, "iterations between evaluations; 0: never")
    eval_prompts: int | None = option(None, "evaluation levels, at most 256 (256; large models without a GPU: 8)")
    eval_only: bool = option(False, "evaluate --model and stop")
    play: int | None = option(None, "show one episode of --model in this level, and stop")
    save_every: int = option(50, "iterations between checkpoints; the last iteration is always saved")
    out: str = option("", "folder of the run (runs/<env>-<algo>[-s]-seed<n>)")
    resume: str = option("", "folder of a run: it goes on exactly (on as many processes); --iterations, --lr may be new")
    truth_reward: float = option(0.0, "added for a true claim of a thought, taken for a false one")
    success_rate: float = option(1 / 3, "FrozenLake: probability of the intended move (later code: 0.8)")

    def __post_init__(self):
        if self.device == "auto":
            self.device = "cuda" if CUDA else "cpu"
        if self.model == "auto":
            self.model = QWEN if "cuda" in self.device else "tiny"
        defaults = FOR_TINY if is_small(self.model) else FOR_OTHERS
        defaults = defaults | (STARPO_S if self.starpo_s else STARPO)
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self.check()
        self.eval_prompts = min(self.eval_prompts, len(envs.EVAL_SEEDS))

    @property
    def eval_names(self):
        others = [name.strip() for name in self.eval_envs.split(",") if name.strip()]
        return list(dict.fromkeys([self.env, *others]))

    def check(self):  # of types, too: scripts and notebooks have no argument parser
        for name, kind in typing.get_type_hints(Config).items():
            x = getattr(self, name)
            flag = f"--{name.replace('_', '-')} {x!r}"
            kinds = typing.get_args(kind) or (kind,)
            whole_for_real = type(x) is int and float in kinds
            need(type(x) in kinds or whole_for_real, f"{flag}: {kinds[0].__name__} is wanted")
            if type(x) in (int, float):
                least = "at least" if name in MAY_BE_ZERO else "above"
                most = 1 if name in AT_MOST_ONE else 1e9
                good = 0 < x <= most or (x == 0 and name in MAY_BE_ZERO)
                need(good, f"{flag}: {least} 0 and at most {most:g}")
        need(self.algo in ("ppo", "grpo"), f"--algo {self.algo}: choose ppo or grpo")
        need(self.adv_norm in ("std", "mean"), f"--adv-norm {self.adv_norm}: choose std or mean")
        with otherwise(f"--device {self.device} is not there: choose cpu"):
            torch.empty(1, device=self.device)
        for name in self.eval_names:
            with otherwise("--env" if name == self.env else "--eval-envs"):
                envs.find_world(name)
        alone = self.rollouts == 1 and (self.keep < 1 or self.algo == "grpo")
        need(not alone, "the filter and GRPO compare the episodes of a group: --rollouts 2 at least")


def is_small(model):  # tiny, or another one of its size
    weights = Path(model, "model.safetensors")
    return model == "tiny" or (weights.is_file() and weights.stat().st_size < 1e7)


def parse_config(argv=None):  # -> Config
    parser = transformers.HfArgumentParser(Config, prog="ragen_mini.py", allow_abbrev=False)
    parser.error = lambda text: need(False, f"{text} (--help lists all options)")
    blank = argparse.Namespace(**dict.fromkeys(Config.__dataclass_fields__))  # all None: argparse keeps what is there
    given = {name: x for name, x in vars(parser.parse_args(argv, blank)).items() if x is not None}
    settings = {}
    if "resume" in given:
        if Path(given["resume"]).name == "checkpoint":  # both RUN and RUN/checkpoint will do, here and below
            given["resume"] = str(Path(given["resume"]).parent)
        settings = saved_state(Path(given["resume"], "checkpoint"))["config"]
        changed = " ".join(sorted(given.keys() - MAY_CHANGE))
        need(not changed, f"--resume goes on with the settings of {given['resume']}, it cannot change {changed}")
        return Config(**settings | given)
    model = given.get("model", "auto")
    if Path(model, "checkpoint").is_dir():
        model = given["model"] = str(Path(model, "checkpoint"))
    if Path(model, "trainer.pt").exists():  # a checkpoint brings the settings of its run
        settings = saved_state(model)["config"]
        forgotten = {"device", "out"}
        if "starpo_s" in given:
            forgotten |= STARPO.keys()
        settings = {name: x for name, x in settings.items() if name not in forgotten}
    return Config(**settings | given)


def run(cfg):
    """What the command line asks for: --play, --eval-only or training."""
    join_others(cfg)
    if cfg.play is not None:
        return show_episode(load_models(cfg), cfg)
    if cfg.eval_only:
        return evaluate("eval", load_models(cfg), replace(cfg, out=""))  # without samples.jsonl
    return train(cfg)


def main():
    try:
        run(parse_config())
        if STOP:
            sys.exit(128 + STOP[0])  # the exit code that shells expect after a signal
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except torch.OutOfMemoryError:
        print("out of GPU memory. Try --algo grpo (no critic), --kl-coef 0 (no reference model), or a lower "
              "--max-new-tokens, --prompts or --rollouts; tests/README.md says what fits", file=sys.stderr)
        sys.exit(2)
    except (OSError, SafetensorError) as error:  # a full disk, for example; bugs keep their traceback
        print(f"{error}. If a run had begun, --resume RUN goes on from its last checkpoint", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    with contextlib.suppress(AttributeError):  # a notebook's output has no such method
        sys.stdout.reconfigure(errors="replace")  # not every terminal has a √
    main()
