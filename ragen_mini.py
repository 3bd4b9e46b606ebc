"""RAGEN / StarPO (arXiv 2504.20073) in one file: a language model learns to act by playing.

    repeat:                                                                                 in the paper
        trajs = rollout(...)              of each of P levels the model plays N episodes, a group
        R     = returns(trajs)            the sum of each episode's rewards                 eq. 2
        kept  = uncertainty_filter(R)     groups whose returns differ most (default: all)   eq. 7
        batch = compute_advantages(...)   how much better than expected was every token?    eq. 5; GAE (PPO)
        updates(batch)                    gradient steps: better tokens grow likelier       eq. 4, 6

    python ragen_mini.py --env frozenlake                 train; all files go to runs/frozenlake-ppo-seed0
    python ragen_mini.py --resume RUN --iterations 100    go on; on a CPU, as if it had never stopped

Words (new to RL? first the text of the tutorial's parts 3 and 4)
    policy      pi, the model that plays. pi_old: as it was at the last rollout. pi_ref: before training
    critic      a second model (PPO only), which forecasts the rewards to come
    turn        a message from the world (its state as text) and the model's answer (a thought, then actions)
    trajectory  an episode as tokens: message, answer, message, ... Its return R is the sum of its rewards
    group       the N (cfg.rollouts) trajectories of one level: all begin with one message, its "prompt"
    iteration   a rollout of P = cfg.prompts groups, then updates: steps on E = cfg.update_size episodes each
    advantage   A, how much better than expected things went after a token

Read up to the cache. After it you need only Models (models) and Config (cfg, the settings): keep these open.
Shapes: B trajectories of up to T tokens, n written by the model, k kept groups, b rows of a pass, V vocabulary, D width
"""
import argparse
import contextlib
import copy
import functools
import inspect
import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import SIG_DFL, SIGINT, signal
from time import perf_counter
from typing import Annotated, get_args, get_type_hints

if __name__ == "__main__":
    signal(SIGINT, SIG_DFL)  # until training begins, Ctrl-C ends the program at once

import numpy as np
import torch
import filelock  # comes with torch
from torch import nn
from torch.utils.checkpoint import checkpoint  # frees activations, and computes them again in backward
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, logging

import envs
import plots
from envs import need, or_say, tell

FORMAT_PENALTY = -0.1  # reward of an invalid answer: malformed, or with an unknown action (App. B.1)
EVAL_TEMPERATURE = 0.5  # evaluation samples at this temperature, training at 1 (Sec. 3.2)
MAX_GRAD_NORM = 1.0  # a gradient with a larger norm is scaled down to this norm
VALUE_CLIP = 0.5  # a forecast that moved so far towards its target has no gradient (see value_loss)
CUDA = torch.cuda.is_available()
MICRO_TOKENS = 2048 if CUDA else 1024  # tokens of one forward-backward pass, to bound its memory
CHUNK_LOGITS = 2 ** 26  # logits that an update holds at once: 256 MB and a few copies
EVALUATED_AT_ONCE = 64 if CUDA else 256  # episodes; on a GPU a 0.5B model's cache for 256: 7.5 GB
STOP = []  # filled by Ctrl-C (see ask_to_stop)
NOT_FINITE = "log-probs or gradients not finite. Try --resume RUN, lower --lr (bad rewards or advantages? RUN damaged?)"
autocast = torch.autocast("cuda", torch.bfloat16, enabled=CUDA)  # bf16, but fp32 weights
torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for each length, and ours grow all the time


# ----------------------------------------------------------------------------- an episode as tokens
class Trajectory:
    """Four lists, one entry per token. NOTE: `append` records who wrote a token. Do not guess it later
    from text or special tokens: the end of a turn and the padding may be the same token. An example, Sokoban:
        ids       <|im_start|> user ... <think>    The box is ... </answer> <|im_end|>   <|im_start|> user ...
        mask      0            0        0          1   1   1      1         1            0            0
        old_logp  0            0        0         -1.2 -0.4 -0.1 -0.3      -0.1          0            0
        reward    0            0        0          0   0   0      0        -0.2          0            0"""
    def __init__(self, env, group, actions_left):
        self.env = env  # a world that has just been reset
        self.group = group  # the number of its group in the rollout
        self.ids = []
        self.mask = []  # did the model write the token? Only such tokens are trained
        self.old_logp = []  # the log-probability with which pi_old sampled it
        self.reward = []  # a turn's reward is on its last token: its whole answer led there
        self.turns = []  # for the log: dicts of state, answer, valid, reward, tokens
        self.entropy = 0.0  # summed over the tokens that the model wrote: -sum p log p over the vocabulary
        self.actions_left = actions_left
        self.done = self.success = False
        self.cache_row = group  # its row in the cache. At first a group shares one (see `rollout`)
        self.cached = 0  # that row holds ids[:cached]. The other ids are yet to be read

    @property
    def R(self):  # eq. 2
        return sum(self.reward)

    def append(self, ids, sampled, logp=0.0):  # ids: a list
        self.ids += ids
        self.mask += [sampled] * len(ids)
        self.old_logp += [logp] * len(ids)
        self.reward += [0.0] * len(ids)
        if not sampled:
            self.answer_start = len(self.ids)  # where the next answer begins


def begin(seed, episode, group, tok, cfg):  # -> Trajectory that waits for its first answer
    env = envs.make(cfg.env, cfg.success_rate)
    env.reset(seed, options={"episode": episode})
    traj = Trajectory(env, group, cfg.max_actions)
    traj.append(encode(tok, cfg.first_tag, message(env, cfg, cfg.max_actions)), sampled=False)
    return traj


def message(env, cfg, actions_left, reward=None):  # -> text
    """The first message states the task (tiny's template drops it), later ones the reward. Then the state:
        You are solving a FrozenLake puzzle. ...     Reward: 0.0
        State:                                       State:
        P _                                          _ P
        _ G                                          _ G
        You have 10 actions left.                    You have 9 actions left."""
    if reward is None:
        thought = "" if cfg.no_think else "<think> your thoughts </think>"
        top = (f"{env.instruction}\nYou may give up to {cfg.max_actions_per_turn} actions at once, separated "
               f"by ||. Write exactly {thought}<answer> action || action </answer> and nothing else.\n\n")
    else:
        top = f"Reward: {round(reward, 3)}\n"  # 1.0, -0.1
    return f"{top}State:\n{env.render()}\nYou have {actions_left} actions left."


@functools.lru_cache  # the episodes of a group often read the same message
def encode(tok, first_tag, text, after_answer=False):  # -> ids. Do not change this list: all callers share it
    """`text` in the chat template, then the answer's first tag, <think>. NOTE: earlier answers are not
    encoded anew: their text might give other ids than were sampled. A dummy, "(seam)", stands for them:
        cut off:     <|im_start|>user . <|im_end|> <|im_start|>assistant (seam)
        returned:    <|im_end|> <|im_start|>user {text} <|im_end|> <|im_start|>assistant <think>"""
    chat = [{"role": "user", "content": text}]
    if after_answer:
        chat = [{"role": "user", "content": "."}, {"role": "assistant", "content": "(seam)"}] + chat
    rendered = tok.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    rendered = rendered.split("(seam)")[-1].lstrip(" ")  # some templates put a blank after an answer
    rendered = re.sub(r"<think>\s*(</think>\s*)?$", "", rendered)  # some templates open <think>, too
    return tok(rendered + first_tag, add_special_tokens=False).input_ids


PLAIN = r"((?:(?!</?think>|</?answer>).)*)"  # any characters, none of which begins one of our tags
SHAPE = re.compile(rf"(<think>{PLAIN}</think>\s*)?<answer>(?P<actions>{PLAIN})</answer>\s*", re.S)


def parse_answer(text, actions, limit):  # -> list of at most `limit` actions; None if the text is invalid
    """<think>Hm.</think><answer>down || Left</answer> -> ["Down", "Left"]"""
    found = SHAPE.fullmatch(text)
    if not found:
        return None
    known = {action.lower(): action for action in actions}
    words = found["actions"].split("||")[:limit]  # what follows is dropped, unread
    chosen = [known.get(word.strip().lower()) for word in words]
    return None if None in chosen else chosen


def take_turn(traj, tok, cfg, ends):  # ends: tokens that end an answer, <|im_end|> first
    """Run the actions of the answer just written, reward its last token, append the world's next message."""
    env = traj.env
    written = traj.ids[traj.answer_start:]
    without_end = [token for token in written if token not in ends]  # an answer that was cut off has no end
    text = cfg.first_tag + tok.decode(without_end, clean_up_tokenization_spaces=False)
    actions = parse_answer(text, env.actions, cfg.max_actions_per_turn)
    turn = {"state": env.render(), "answer": text, "valid": actions is not None, "tokens": len(written)}
    bonus = env.bonus(turn)  # for what the model said: 0 in our worlds
    reward = FORMAT_PENALTY if actions is None else 0.0
    for action in actions or []:  # an invalid answer runs none
        if traj.actions_left == 0 or env.over:
            break
        _, gained, _, _, info = env.step(action)
        reward += gained
        traj.actions_left -= 1
        traj.success = info["success"]
    traj.reward[-1] = turn["reward"] = reward + bonus  # the next message shows the reward without the bonus
    traj.turns.append(turn)
    traj.done = env.over or traj.actions_left == 0 or len(traj.turns) == cfg.max_turns
    if not traj.done:
        reply = encode(tok, cfg.first_tag, message(env, cfg, traj.actions_left, reward), after_answer=True)
        if traj.ids[-1] == ends[0]:  # the model wrote the end itself: do not repeat it
            reply = reply[1:]
        traj.append(reply, sampled=False)


# ------------------------------------------------------------------------------------------ playing
@autocast
@torch.no_grad()
def rollout(models, seeds, N, cfg, sampling_seed):  # -> len(seeds) * N trajectories, by group
    """All episodes are played side by side. Each pass of the model adds one token to every unfinished answer. An
    episode with a finished answer waits, its last token unread. Once all wait, the worlds act and send messages.
    A group's N episodes begin with the same message: one of them reads it, the others copy its row of the cache."""
    trajs = [begin(seed, episode, group, models.tok, cfg)
             for group, seed in enumerate(seeds) for episode in range(N)]
    ends = encode(models.tok, cfg.first_tag, ".", after_answer=True)[0], models.tok.eos_token_id  # <|im_end|> is first
    generator = torch.Generator(cfg.device).manual_seed(sampling_seed)
    cache = KVCache()  # what the model has read so far (it and `read` are explained further down)
    next_logps = read(models.policy, cache, trajs[::N], cfg).repeat_interleave(N, 0)  # the first of each group
    cache.select(trajs)  # from now on each episode has a row of its own
    live = writing = trajs  # live: the episode goes on. writing: those of live whose answer is unfinished
    while live:
        sample(writing, next_logps, generator)  # (b,V): a row for each of `writing`
        writing = [traj for traj in writing if traj.ids[-1] not in ends
                   and len(traj.ids) < traj.answer_start + cfg.max_new_tokens]
        if not writing:
            for traj in live:
                take_turn(traj, models.tok, cfg, ends)
            live = writing = [traj for traj in live if not traj.done]
            cache.select(live)  # drops the rows of finished episodes
        if live:  # the next token of unfinished answers, or new messages to all
            next_logps = read(models.policy, cache, writing, cfg)
    return trajs


def sample(trajs, next_logps, generator):  # next_logps (b,V): a log-prob for each token that may come next
    tokens = torch.multinomial(next_logps.exp(), 1, generator=generator)  # (b,1)
    chosen = next_logps.gather(1, tokens).flatten().tolist()
    for traj, ids, logp, entropy in zip(trajs, tokens.tolist(), chosen, entropy_of(next_logps).tolist()):
        traj.cached = len(traj.ids)  # next_logps come from reading all these; the new token is unread
        traj.append(ids, sampled=True, logp=logp)  # ids: of one token
        traj.entropy += entropy


def entropy_of(logp):  # (n,V) -> (n,)
    return -(logp.exp() * logp.clamp(-1e4)).sum(1)  # some models give -inf, and 0 * -inf would be nan


# ------------------------------------------------------ which episodes, and how good was each token
def learn(trajs, models, cfg, seed, gradients=None):  # gradients: see updates. -> batch, statistics of its updates
    R = returns(trajs, cfg)  # (P,N)
    kept = sorted(uncertainty_filter(R, cfg.keep).tolist())  # groups, in the order of `trajs`
    if not kept or nothing_to_compare(R[kept], cfg):  # a filter of your own may keep none
        return {}, []  # no update
    chosen = [traj for i, traj in enumerate(trajs) if i // cfg.rollouts in kept]  # i // N is its row of R
    batch = compute_advantages(chosen, R[kept], models, cfg)
    return batch, updates(batch, models, cfg, seed, gradients)


def returns(trajs, cfg):  # -> (P,N), in the order of their groups
    return torch.tensor([traj.R for traj in trajs]).view(-1, cfg.rollouts)


def uncertainty_filter(R, keep):  # (P,N) -> (k,) numbers of the kept groups
    """eq. 7: U(s0) = Std_i R(tau_i). Keeps the share `keep` of the groups, at least one: those of largest U.
    NOTE: a large U need not mean an unsure policy. Pay-outs that are luck make returns differ, too."""
    U = R.std(1, correction=0)  # population std; the sample std would give the same order
    k = max(1, int(keep * len(R) + 1e-9))  # 1e-9, since 0.29 * 100 is 28.999...
    return U.argsort(descending=True, stable=True)[:k]


def nothing_to_compare(R, cfg):  # (k,N) -> are all returns equal (GRPO: within each group)?
    """If they are, PPO would learn little but the critic's errors, made large by whitening (in compute_advantages)."""
    return R.std(None if cfg.algo in BY_CRITIC else 1, correction=0).max() < 1e-4  # None: over all groups together


def collate(trajs, device):  # -> inputs, targets, mask (bool), old_logp, reward: each (B,T-1)
    """Lists become tensors, padded on the right. From here on, column t is about *predicting* token t + 1:
    the model has read inputs[:t+1], and targets[t] comes next. Example (m: message token, a: answer token):
        ids         m1  m2  a1  a2  m3  a3              column      0   1   2   3   4
        mask        0   0   1   1   0   1               inputs      m1  m2  a1  a2  m3
        reward      0   0   0   0   0   1               targets     m2  a1  a2  m3  a3
                                                        mask        0   1   1   0   1
                                                        reward      0   0   0   0   1
    NOTE: the mask loses its *first* entry. Were it the last, 0 0 1 1 0, then a2 and m3 would be trained."""
    batch = {"inputs": [traj.ids[:-1] for traj in trajs], "targets": [traj.ids[1:] for traj in trajs]}
    for name in "mask", "old_logp", "reward":
        batch[name] = [getattr(traj, name)[1:] for traj in trajs]
    return {name: nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), batch_first=True).to(device)
            for name, rows in batch.items()}


def gae(reward, value, mask, gamma, lam):  # (B,T-1) x3 -> advantage, return to come: (B,T-1)
    """Generalised advantage estimation (PPO). v_t is the critic's forecast, at column t, of the rewards to come.
    "next" is the next column *that the model wrote*. Here gamma = lambda = 1: A is the reward to come, minus v.
                                     collate's column      1 (a1)     2 (a2)    3 (m3)    4 (a3)
                                               v           0.2        0.3       -         0.6
                                               r           0          0         -         1
        delta_t = r_t + gamma v_next - v_t     delta       0.1        0.3       -         0.4
        A_t     = delta_t + gamma lambda A_next    A       0.8        0.7       -         0.4
        the critic's target: v + A                ret      1          1         -         1
    NOTE: the world's tokens are no steps. At m3 nothing is discounted: next_value and next_advantage stay."""
    advantage = torch.zeros_like(value)
    next_advantage = next_value = torch.zeros_like(value[:, 0])  # after the last token nothing comes
    for t in reversed(range(value.shape[1])):
        wrote = mask[:, t]
        delta = reward[:, t] + gamma * next_value - value[:, t]  # ignored where the model did not write
        next_advantage = torch.where(wrote, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(wrote, value[:, t], next_value)
        advantage[:, t] = next_advantage * wrote  # by now it is A_t
    return advantage, (advantage + value) * mask


def grpo_advantages(R, norm="std"):  # (P,N) -> (P,N)
    """eq. 5: A_i = (R_i - mean) / std. NOTE: std hides how far returns differ. Say 15 of 16 episodes pull the arm that
    always pays 0.15, and one pulls the other, which pays 1 in one case of four, so 0.25 on average. Its advantage:
        paid 1 (chance 1/4)    A =  0.797 / 0.2125 =  3.75
        paid 0 (chance 3/4)    A = -0.141 / 0.0375 = -3.75
    So on average it is -1.9: the better arm is discouraged. Without the division by std it would be 0.09."""
    centered = R - R.mean(1, keepdim=True)  # the mean includes R_i: that scales this by 1 - 1/N
    if norm == "mean":
        return centered
    std = R.std(1, keepdim=True)  # the sample std, as in the paper's code
    return torch.where(std < 1e-4, 0.0, centered / (std + 1e-6))  # equal returns: 0 instead of rounding noise


BY_CRITIC = {"ppo": gae}  # --algo: its advantages, from rewards and a critic's forecasts
BY_GROUP = {"grpo": grpo_advantages}  # --algo: from a group's returns. Add your own under a new name, as README does


def compute_advantages(trajs, R, models, cfg):  # R (k,N), for BY_GROUP. -> batch
    """Adds "adv", A: each token's rewards to come (GRPO: the return) minus a baseline, scaled. (Why: tutorial, 3.)"""
    batch = collate(trajs, cfg.device)
    mask = batch["mask"]
    penalty = torch.zeros_like(batch["reward"])
    if models.ref:  # straying from the first model costs reward, so that it keeps its language (App. B.2)
        ref_logp = on_grid(lambda part: token_logps(models.ref, part, cfg)[0], batch)  # (B,T-1), in parts
        batch["kl"] = batch["old_logp"] - ref_logp  # its mean estimates KL(pi_old || pi_ref); 0 at message tokens
        penalty = -cfg.kl_coef * batch["kl"]  # it is added to the rewards, so earlier tokens pay, too
    if cfg.algo in BY_CRITIC:  # baseline: the critic's forecast
        batch["value"] = on_grid(lambda part: token_values(models.critic, part), batch)
        adv, batch["ret"] = BY_CRITIC[cfg.algo](batch["reward"] + penalty, batch["value"], mask, cfg.gamma, cfg.lam)
        adv = (adv - adv[mask].mean()) / (adv[mask].std(correction=0) + 1e-8)  # whitening: mean 0, spread 1
    else:  # baseline: the group's mean. KL penalties (small) are added as they are: not centred, not divided
        A = BY_GROUP[cfg.algo](R, cfg.adv_norm)
        assert A.shape == R.shape, "a function in BY_GROUP must return an advantage for each episode, shaped like R"
        adv = A.to(cfg.device).reshape(-1, 1) + penalty.flip(1).cumsum(1).flip(1)  # plus all penalties to come
    batch["adv"] = adv * mask
    return batch


# ---------------------------------------------------------------------------------- losses, updates
def policy_loss(logp, entropy, old_logp, adv, cfg):  # (n,) x4 -> loss (n,), was it clipped? (n,)
    """eq. 4 (PPO) and 6 (GRPO): -min(ratio * A, clip(ratio) * A), minus an entropy bonus. Where the clipped product
    is smaller, the minimum is constant, and that token is not pushed. After a rollout all ratios are 1 at first.
         A    ratio    ratio * A    clip(ratio) * A    min is     does this push the token's probability?
         1     1.5        1.5            1.2           clipped    no: it moved up far enough
         1     0.5        0.5            0.8           not        up again: it moved the wrong way
        -1     0.5       -0.5           -0.8           clipped    no: it moved down far enough
        -1     1.5       -1.5           -1.2           not        down again: it moved the wrong way"""
    ratio = (logp - old_logp).exp()  # of a token's probability now, and when it was sampled
    unclipped = ratio * adv
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * adv
    loss = -torch.min(unclipped, clipped) - cfg.entropy_coef * entropy
    return loss, clipped < unclipped


def value_loss(value, old_value, ret):  # (n,) x3 -> (n,)
    """Half a forecast's squared error, clipped like policy_loss: the larger error counts. Say ret is 2:
        old_value    value    its error    clipped    its error    the larger
            0         0.8        1.2         0.5         1.5       clipped: no gradient, it moved far enough
            0        -0.8        2.8        -0.5         2.5       value's own: it is pulled back"""
    clipped = old_value + (value - old_value).clamp(-VALUE_CLIP, VALUE_CLIP)
    return 0.5 * torch.max((value - ret) ** 2, (clipped - ret) ** 2)


def updates(batch, models, cfg, seed, gradients=None):  # -> statistics of each step. gradients: your own add_gradients
    steps = []
    shuffler = torch.Generator().manual_seed(seed)
    for _ in range(cfg.epochs):
        order = torch.randperm(len(batch["mask"]), generator=shuffler)
        for rows in order.split(cfg.update_size):
            stats = (gradients or add_gradients)(batch, rows.tolist(), models, cfg)
            stats["grad_norm"] = take_step(models)
            steps.append(stats)
    return steps


@autocast  # NOTE: no optimizer step inside: autocast keeps bf16 copies of the weights, stale after a step
def add_gradients(batch, rows, models, cfg):  # -> statistics
    """Works in parts that fit into memory. Each part's sum is divided by the tokens of *all* parts, so they
    make the update's mean. NOTE: tokens weigh alike: long episodes, mostly lost, count more than in eq. 4 and 6."""
    stats = Counter()
    total = int(batch["mask"][rows].sum())
    for _, part in micro_batches(batch, rows):
        mask = part["mask"]
        logp, entropy = token_logps(models.policy, part, cfg)
        loss, was_clipped = (models.loss or policy_loss)(logp, entropy, part["old_logp"][mask], part["adv"][mask], cfg)
        assert loss.shape == logp.shape, "models.loss must return a number for each token, not their mean"
        stats["clip_fraction"] += was_clipped.sum().item() / total
        part_loss = loss.sum() / total
        part_loss.backward()  # here, so that only one network's activations are in memory
        stats["policy_loss"] += part_loss.item()
        if "ret" in part:  # PPO
            value = token_values(models.critic, part)  # part["value"] is older: from before the updates
            part_loss = value_loss(value, part["value"][mask], part["ret"][mask]).sum() / total
            part_loss.backward()
            stats["value_loss"] += part_loss.item()
    return stats


def make_optimizer(models, cfg):
    networks = [(models.policy, cfg.lr), (models.critic, cfg.critic_lr)]
    return torch.optim.Adam([{"params": net.parameters(), "lr": lr} for net, lr in networks if net])


def take_step(models):  # -> length of the policy's gradient, before it is clipped
    networks = filter(None, (models.policy, models.critic))  # their gradients are clipped separately
    norms = [nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM).item() for network in networks]
    need(np.isfinite(norms).all(), NOT_FINITE)
    models.optimizer.step()
    models.optimizer.zero_grad()
    return norms[0]


def micro_batches(batch, rows):  # yields some rows, and the batch cut to these rows and to their length
    """Puts rows of similar length together, as many as MICRO_TOKENS allows. So little padding is needed."""
    length = (batch["mask"].cumsum(1).argmax(1) + 1).tolist()  # up to the last 1, where cumsum first has its maximum
    packs = []
    for row in sorted(rows, key=length.__getitem__):
        if not packs or (len(packs[-1]) + 1) * (length[row] + 1) > MICRO_TOKENS:  # it has length + 1 ids
            packs.append([])
        packs[-1].append(row)
    for pack in packs:  # its last row is the longest
        yield pack, {name: x[pack, :length[pack[-1]]] for name, x in batch.items()}


def token_logps(policy, part, cfg):  # -> log pi (n,), entropy (n,) of the tokens that the model wrote
    """Like log_softmax(policy(inputs).logits / temperature). But logits, the largest tensor of all, are made
    only for trained tokens, chunk by chunk. No attention mask: pads are on the right, where none looks."""
    mask = part["mask"]
    hidden = policy.get_decoder()(input_ids=part["inputs"], use_cache=False).last_hidden_state[mask]  # (n,D)
    head = policy.get_output_embeddings()  # its weight is (V,D)
    def of_chunk(hidden, targets):
        logp = (head(hidden).float() / cfg.temperature).log_softmax(-1)
        return logp.gather(1, targets[:, None]).flatten(), entropy_of(logp)
    size = CHUNK_LOGITS // len(head.weight)
    chunks = zip(hidden.split(size), part["targets"][mask].split(size))
    logps, entropies = zip(*[checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks])
    return torch.cat(logps), torch.cat(entropies)


def token_values(critic, part):  # -> value (n,): the critic's forecast before each token that the model wrote
    """NOTE: without squeeze, `value - ret` would be (n,1) - (n,), which silently broadcasts to (n,n)."""
    return critic(input_ids=part["inputs"], use_cache=False).logits[part["mask"]].float().squeeze(-1)


@autocast
@torch.no_grad()
def on_grid(function, batch):  # -> (B,T-1): function(part) (n,), each number put where its token stands
    grid = torch.zeros_like(batch["reward"])
    for rows, part in micro_batches(batch, range(len(grid))):
        values = torch.zeros_like(part["reward"])
        values[part["mask"]] = function(part)
        grid[rows, :values.shape[1]] = values
    return grid


# ----------------------------------------------------------------------------- the loop, evaluation
def train(cfg, models=None, learn=learn, watch=lambda *_: False, rollout=rollout):  # -> log rows, models
    """Hand over what is your own: learn, rollout (it evaluates, too), models. Setting `rm.learn = mine` has no effect.
    `watch` sees each row before it is logged, may add columns, and returns True to stop. (Row 0 has no trajs.)"""
    cfg = replace(cfg)  # a copy, for which __post_init__ has run again: settings changed by hand count
    models = models or load_models(cfg)
    models.optimizer = models.optimizer or make_optimizer(models, cfg)
    with open_run(models, cfg) as (cfg, rows, bar):  # rows of the log: none, or those of --resume
        for i in range(len(rows), cfg.iterations + 1):
            row, trajs, learned = iterate(i, models, cfg, learn, rollout)
            rows.append(row)
            dead = plots.is_dead(rows)  # ten iterations without an update
            finished = dead or i == cfg.iterations
            if cfg.eval_every and (finished or i % cfg.eval_every == 0):
                columns, samples = evaluate(i, models, cfg, rollout)
                row |= columns  # in place: so it is in `rows`, too
                plots.add_lines(cfg.out, "samples.jsonl", samples)  # twice, if --resume evaluates again
            stop = finished or bool(STOP)  # Ctrl-C. Read before `watch`, which may tell other processes
            stop |= watch(row, trajs, learned, models, cfg) == True  # it may return other things
            plots.add_lines(cfg.out, "log.jsonl", [row])
            if stop or i % cfg.save_every == 0:  # at 0, too: is the disk writable?
                save(models, cfg)
            if i:
                bar.update()
                bar.set_postfix_str(f"won {row['success']:.2f}, valid answers {row['valid']:.2f} (training)")
            if stop:
                break
    end = f"go on:   python {sys.argv[0]} --resume {cfg.out!r} --iterations {cfg.iterations + 30 * finished}"
    if dead:
        end = f"ended at {i}: no update in ten iterations (equal returns?). See: python plots.py collapse {cfg.out!r}"
    print(f"curves:  {plots.curves(cfg.out)}\nwatch:   python {sys.argv[0]} --model {cfg.out!r} --play 8\n{end}")
    return rows, models


def iterate(i, models, cfg, learn=learn, rollout=rollout):  # -> log row, trajectories, results of `learn`
    """Play, then learn. Randomness comes from (cfg.seed, i): on a CPU a resumed run has the same rows."""
    if i == 0:  # the model before training, which is only evaluated
        return {"iteration": 0}, [], []
    *seeds, sampling_seed = np.random.default_rng([cfg.seed, i]).integers(  # levels; a seed to sample and shuffle
        envs.EVAL_SEEDS.stop, 2 ** 31, cfg.prompts * cfg.online_k + 1).tolist()  # none is in EVAL_SEEDS
    start = perf_counter()
    trajs = rollout(models, seeds, cfg.rollouts, cfg, sampling_seed)
    played = perf_counter()
    check_ratios(trajs, models, cfg)
    learned = []
    for first in range(0, len(seeds), cfg.prompts):  # one slice of P groups; several with --online-k (Fig. 10)
        of_slice = [traj for traj in trajs if first <= traj.group < first + cfg.prompts]
        learned.append(learn(of_slice, models, cfg, sampling_seed + first))
    row = {"iteration": i, "seconds_rollout": played - start, "seconds_update": perf_counter() - played}
    return row | plots.log_columns(trajs, returns(trajs, cfg), learned), trajs, learned


def evaluate(i, models, cfg, rollout=rollout):  # -> columns of the log; a few whole episodes
    cfg = replace(cfg, temperature=EVAL_TEMPERATURE)
    seeds = envs.EVAL_SEEDS[:cfg.eval_prompts] if cfg.play is None else (cfg.play,)
    trajs = []
    for first in range(0, len(seeds), EVALUATED_AT_ONCE):
        trajs += rollout(models, seeds[first:first + EVALUATED_AT_ONCE], 1, cfg, seeds[first])
    check_ratios(trajs, models, cfg)
    world = envs.title(cfg.env)
    success = np.mean([traj.success for traj in trajs])
    horizon = min(cfg.max_actions, cfg.max_turns * cfg.max_actions_per_turn)
    random, best = envs.mean_yardsticks(cfg.env, horizon, seeds, cfg.success_rate)[:, -1]
    tell(f"{f'iteration {i}: ' if cfg.trains else ''}{world} {envs.with_interval(success, len(trajs))}  "
         f"random {random:.2f}  optimal {best:.2f}")
    samples = [{"iteration": i, "env": world, "turns": traj.turns, "text":
                f"{models.tok.decode(traj.ids)}\n\n{traj.env.render()}\nreturn {traj.R:g}\n"} for traj in trajs[:8]]
    return {"eval": {world: success}, "yardsticks": {world: [random, best]}}, samples


def check_ratios(trajs, models, cfg):
    """Ratios must begin at 1: a new pass over the longest episode must give the rollout's log-probs. This
    fails with dropout, a sliding window (KVCache keeps all), or logits changed after the head (Gemma 2)."""
    batch = collate([max(trajs, key=lambda traj: len(traj.ids))], cfg.device)
    logp = on_grid(lambda part: token_logps(models.policy, part, cfg)[0], batch)
    gap = (logp - batch["old_logp"])[batch["mask"]].abs().mean() * cfg.temperature  # times temperature: the logits' gap
    limit = 0.05 if autocast.device in cfg.device else 1e-4  # on a GPU ("cuda:0") bf16 rounds more
    need(gap < limit, f"model {cfg.model} refused: rollout and update differ by {gap:.1g} in logits (dropout? window?)")


# -------------------------------------------------------------- the cache, which makes playing fast
def read(policy, cache, trajs, cfg):  # -> log-probs (b,V) of the token that comes next
    """Like log_softmax(policy(torch.tensor([traj.ids])).logits[0, -1] / temperature) for each, but reads only ids
    that are not cached. Logits (large) are made for the last input alone. So shorter inputs begin with pads (-).
        h h h are cached, a b c are new    input a b c    to columns 3 4 5    then cached: h h h a b c
        beside it: h is cached, x is new   input - - x    to columns 2 3 1    then cached: h x - -
    Keys and values of pads are garbage. It lies behind the end of the row, is masked, and later ids replace it."""
    new = [traj.ids[traj.cached:] for traj in trajs]
    q = max(map(len, new))
    with torch.device(cfg.device):  # where tensors are made
        inputs = torch.tensor([[0] * (q - len(ids)) + ids for ids in new])  # (b,q)
        cache.aim(trajs, q)
        future = torch.arange(cache.used) > cache.columns[:, None, :, None]  # (b,1,q,used): must not be seen
    with or_say(f"--model {cfg.model} failed in `read` (does it not suit KVCache? was that changed?)"):
        logits = policy(input_ids=inputs, position_ids=cache.columns, past_key_values=cache,
                        attention_mask=-1e30 * future, logits_to_keep=1).logits[:, -1]
    logp = (logits.float() / cfg.temperature).log_softmax(-1)
    need(not logp.isnan().any(), NOT_FINITE)
    return logp


class KVCache:
    """A row for each episode, a column for each position. All that a layer needs is `update`, since it gets a mask."""
    def __init__(self):
        self.layers = {}  # layer -> table (rows, columns, heads, 2 * width)

    def aim(self, trajs, q):  # where will `update` store the q inputs of each?
        self.columns = torch.tensor([
            [*range(len(traj.ids), traj.cached + q),  # first its pads, if any: behind the end of the row
             *range(traj.cached, len(traj.ids))]  # then its new ids
            for traj in trajs])  # (b,q)
        self.rows = torch.tensor([traj.cache_row for traj in trajs])  # (b,)
        self.used = int(self.columns.max()) + 1

    def update(self, keys, values, layer, *_):  # new tokens' (b, heads, q, width) -> (b, heads, used, width)
        new = torch.cat((keys.to(values.dtype), values), -1).transpose(1, 2)  # autocast makes keys fp32
        stored = self.layers.get(layer, new[:, :0])  # at first it has no columns
        while stored.shape[1] < self.used:  # growing copies everything: so seldom, by 64 columns
            stored = nn.functional.pad(stored, [0] * 5 + [64])  # the last two axes stay as they are
        self.layers[layer] = stored
        stored[self.rows[:, None], self.columns] = new
        return stored[:, :self.used].index_select(0, self.rows).transpose(1, 2).chunk(2, -1)

    def select(self, trajs):  # trajs[i] gets row i, a copy of the row that it used before
        for layer, stored in self.layers.items():
            self.layers[layer] = stored[[traj.cache_row for traj in trajs]]
        for row, traj in enumerate(trajs):
            traj.cache_row = row


# ------------------------------------------------ models and files (nothing about learning follows)
@dataclass
class Models:
    policy: nn.Module  # a transformers model. One of your own: see what read, token_logps and save use of it
    critic: nn.Module  # PPO; else None
    ref: nn.Module  # the policy before training, for the KL penalty. None: no penalty
    optimizer: torch.optim.Optimizer  # yours (its state_dict has param_groups); None: `train` makes it
    tok: object  # the tokenizer
    loss: object = None  # a policy_loss of your own; None: ours


def load_models(cfg):
    """Weights are fp32: a step of 1e-6 vanishes in bf16. from_pretrained leaves dropout off, in eval mode."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it would report that the critic's head is new
    if cfg.small:
        torch.set_num_threads(1)  # more threads gain nothing
    torch.manual_seed(cfg.seed)  # for the critic's head
    folder = Path(f"{cfg.source}")  # owner/name may be a hub id, unless there is a folder "owner"
    need(any(folder.glob("*.safetensors*")) or not folder.parent.is_dir(),
         f"--model {folder}: there is no such folder with a model's *.safetensors (the hub has owner/name)")
    critic = None
    with or_say(f"cannot load --model {cfg.model} on --device {cfg.device}: no such model? damaged? not cpu, cuda?"):
        tok = AutoTokenizer.from_pretrained(cfg.source)
        policy, report = AutoModelForCausalLM.from_pretrained(cfg.source, dtype=torch.float32, output_loading_info=True)
        policy.to(cfg.device)
    if cfg.trains and cfg.algo in BY_CRITIC:  # the critic begins as the policy (causal, too) with a new scalar head
        with or_say(f"--model {cfg.model} cannot be a critic: take --algo grpo, which needs none"):
            critic = AutoModelForTokenClassification.from_pretrained(cfg.source, dtype=torch.float32, num_labels=1)
            critic.to(cfg.device)
    need(not report["missing_keys"], f"--model {cfg.model} cannot be used: its files lack weights")
    ref = copy.deepcopy(policy) if cfg.trains and cfg.kl_coef else None
    need(tok.chat_template, f"--model {cfg.model} has no chat template: is it for chat, its folder whole?")
    longest = cfg.max_turns * (len(begin(0, 0, 0, tok, cfg).ids) + 16 + cfg.max_new_tokens)  # 16: the reward
    room = getattr(policy.config, "max_position_embeddings", longest)  # some models know no limit
    need(longest <= room, f"episodes may take {longest} tokens, {room} fit: lower --max-new-tokens or --max-turns")
    return Models(policy, critic, ref, None, tok)


@contextlib.contextmanager
def open_run(models, cfg):  # in `with`: -> cfg with its folder, rows of the log so far, the progress bar
    """Makes a new folder, or takes that of --resume. In the `with` it is locked, Ctrl-C only asks to stop."""
    log = restore(models, cfg) if cfg.resume else ""
    rows = list(map(json.loads, log.splitlines()))  # one for each iteration, from 0
    need(len(rows) <= cfg.iterations, f"{cfg.resume} is finished ({len(rows) - 1} iterations): raise --iterations")
    out = wanted = Path(cfg.resume or cfg.out or f"runs/{cfg.name}").expanduser()
    number = 1
    while out.exists() and not cfg.resume:
        number += 1
        out = Path(f"{wanted}-{number}")
    with or_say(f"cannot train in {out}: another process trains there, or you may not write there"):
        Path(f"{out}/checkpoint").mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(f"{out}/lock")
        lock.acquire(timeout=0)
    STOP.clear()
    old_handler = signal(SIGINT, ask_to_stop)
    try:
        cfg = replace(cfg, out=str(out), resume="")  # the caller's stays as it is
        Path(f"{out}/log.jsonl").write_text(log)  # rows after the checkpoint are made again
        Path(f"{out}/config.json").write_text(json.dumps(asdict(cfg), indent=1, default=envs.title))
        print(f"{cfg.model} learns {envs.title(cfg.env)} ({cfg.algo}) on {cfg.device}, in {out}"
              f"{' (the name was taken)' if number > 1 else ''}, from iteration {len(rows)} on")
        with tqdm(total=cfg.iterations, initial=len(rows[1:]),
                  bar_format="{n}/{total} |{bar:12}| {elapsed}<{remaining}{postfix}") as bar:
            yield cfg, rows, bar
    finally:
        signal(SIGINT, old_handler)
        lock.release()


def ask_to_stop(*_):  # Ctrl-C, or a notebook's Interrupt
    if STOP:
        raise KeyboardInterrupt
    STOP.append("SIGINT")
    print("\nfinishing this iteration, then saving (Ctrl-C again: stop at once, as last saved)", file=sys.stderr)


def save(models, cfg):
    """RUN/checkpoint: a Hugging Face folder (for --model) and trainer.pt (for --resume, with config.json).
    All new files are written before one is replaced. The process may die any time: trainer.pt is whole."""
    new = Path(f"{cfg.out}/checkpoint.new")
    state = {name: owner.state_dict() for name, owner in vars(models).items() if hasattr(owner, "state_dict")}
    state |= {"log": Path(f"{cfg.out}/log.jsonl").read_text(), "origin": cfg.origin}
    with or_say(f"cannot save in {cfg.out}: full disk, no permission, or its checkpoint folders were changed"):
        models.policy.save_pretrained(new)
        models.tok.save_pretrained(new, save_jinja_files=False)  # else several templates become a folder
        torch.save(state, f"{new}/trainer.pt")
        for file in sorted(new.iterdir()):
            file.replace(f"{cfg.out}/checkpoint/{file.name}")
        new.rmdir()


def restore(models, cfg):  # -> the log as it was when saved
    with or_say(f"{cfg.resume}/checkpoint/trainer.pt is unusable (never saved: begin anew; else try --model RUN)"):
        state = torch.load(f"{cfg.resume}/checkpoint/trainer.pt", map_location="cpu", mmap=True)
        need(state["origin"] == cfg.origin, f"--resume keeps program, algo, seed: {state['origin']}, not {cfg.origin}")
        state["optimizer"]["param_groups"] = models.optimizer.state_dict()["param_groups"]  # --lr may be new
        for name, owner in vars(models).items():
            if owner and name in state:  # with --kl-coef 0 there is no ref
                owner.load_state_dict(state[name])
        return state["log"]


# -------------------------------------------------------------------- settings and the command line
TINY = Path(__file__).parent / "tiny"
STARPO = {"keep": 1.0, "kl_coef": 0.001, "clip_high": 0.2}
STARPO_S = {"keep": 0.25, "kl_coef": 0.0, "clip_high": 0.28}  # Sec. 4.2. 2 of 8 groups: one update, no ratio is clipped
FOR_TINY = {"iterations": 30, "lr": 4e-4, "critic_lr": 1e-3, "max_new_tokens": 40, "eval_every": 10}
FOR_OTHERS = {"iterations": 200, "lr": 1e-6, "critic_lr": 1e-5, "max_new_tokens": 400, "eval_every": 20}
Count = Annotated[int, 1, 1e6]  # type, least, most. A mere int or float: 0 to 1e15
Share = Annotated[float, 0, 1]


@dataclass
class Config:  # Count: 1 or more. Share: 0 to 1. None: set once, by model and starpo_s (not play, success_rate)
    env: str = "frozenlake"  # world: bandit, sokoban, frozenlake (more: python envs.py), or your my_world.py:Class
    success_rate: Share = None  # lakes: chance of the intended move (None: the world's own, 0.8; paper: 1/3)
    model: str = "tiny"  # tiny (included), a run (with its settings), a folder, or a hub id
    iterations: int = None  # rounds of rollout and update in all (tiny: 30, others: 200)
    seed: int = 0  # of everything random in training. Evaluations and --play always sample alike
    prompts: Count = 8  # P: groups per iteration, each plays one level
    rollouts: Count = 16  # N: episodes of a group
    max_turns: Count = 5  # turns of an episode
    max_actions_per_turn: Count = 5  # further actions of an answer are dropped
    max_actions: Count = 10  # actions of an episode
    max_new_tokens: Count = None  # tokens that the model may write in a turn (tiny: 40, others: 400)
    no_think: bool = False  # answer at once, without <think>...</think>
    temperature: Annotated[float, 1e-6, 1e15] = 1.0  # of the rollout; evaluation is at 0.5
    starpo_s: bool = False  # StarPO-S: sets the next three where they are None (`replace` keeps what was set)
    keep: Share = None  # share of groups to train on, widest spread of returns first (1; --starpo-s: 0.25)
    kl_coef: float = None  # KL penalty: reward lost by drifting from the first model (0.001; --starpo-s: 0)
    clip_high: Share = None  # the ratio is clipped above 1 + clip_high (0.2; --starpo-s: 0.28)
    clip_low: Share = 0.2  # the ratio is clipped below 1 - clip_low
    entropy_coef: float = 0.001  # weight of the entropy bonus, which keeps the model trying
    algo: str = "ppo"  # ppo (advantages from a critic), grpo (from the group), or one that a script adds
    gamma: Share = 1.0  # ppo: discount, per token that the model wrote
    lam: Share = 1.0  # ppo: lambda. 1 trusts the rewards that came (noisy), 0 the next forecast (biased)
    adv_norm: str = "std"  # grpo: mean subtracts the group's mean; std also divides by its std (eq. 5)
    update_size: Count = 32  # E: trajectories per update (the last gets the rest)
    epochs: Count = 1  # passes over the trajectories of an iteration
    online_k: Count = 1  # play k*P groups at once, then learn from k slices of P. The last are old by then (Fig. 10)
    lr: float = None  # Adam, policy (tiny: 4e-4, others: 1e-6)
    critic_lr: float = None  # Adam, critic. Larger, as its head begins at random (tiny: 1e-3, others: 1e-5)
    eval_every: int = None  # iterations between evaluations (tiny: 10, others: 20); 0: never
    eval_prompts: Annotated[int, 1, 256] = 256  # evaluation levels
    eval_only: bool = False  # evaluate --model, show its first episode, and stop
    play: int = None  # show one episode of --model in this level, and stop
    save_every: Count = 10  # iterations between checkpoints; the last iteration is always saved
    out: str = ""  # folder of the run (runs/<env>-<algo>[-s]-seed<n>)
    resume: str = ""  # folder of a run to continue with its settings; Python: parse_config(["--resume", RUN])
    device: str = "cuda" if CUDA else "cpu"  # cuda, mps or cpu

    def __post_init__(self):
        if Path(f"{self.model}/checkpoint").is_dir():  # the folder of a run
            self.model = f"{self.model}/checkpoint"
        self.source = TINY if self.model == "tiny" else self.model
        weights = Path(f"{self.source}/model.safetensors")
        self.small = weights.is_file() and weights.stat().st_size < 1e7
        presets = (FOR_TINY if self.small else FOR_OTHERS) | (STARPO_S if self.starpo_s else STARPO)
        for name, value in presets.items():
            if getattr(self, name) is None:  # NOTE: RUN/config.json holds a value, so --model RUN keeps RUN's
                setattr(self, name, value)
        self.name = f"{envs.title(self.env)}-{self.algo}{'-s' if self.starpo_s else ''}-seed{self.seed}"
        self.origin = f"{self.name} by {Path(sys.argv[0]).name}"  # --resume: same program, world, algo, seed
        self.trains = self.play is None and not self.eval_only
        self.first_tag = "<answer>" if self.no_think else "<think>"  # written by the program: not trained
        for name, hint in get_type_hints(type(self), include_extras=True).items():  # from here on only checks
            kind, least, most = get_args(hint) or (hint, 0, 1e15)  # Annotated[int, 1, 256] -> int, 1, 256
            value = getattr(self, name)
            if kind is str or value is None and name in ("play", "success_rate"):  # these may be left open
                continue
            need(isinstance(value, (kind, int)) and least <= value <= most, f"--{name.replace('_', '-')} {value!r}: "
                 f"must be {'a number' if kind is float else 'a whole number'}, {least:g} to {most:g}")
        need(self.keep < 1 or not self.starpo_s, "keep 1 is no StarPO-S: give --keep 0.25 --kl-coef 0 --clip-high 0.28")
        need(not self.out.endswith("."), f"{self.out}: its name may not end in a dot (--out NAME, --resume ../RUN)")
        need(self.algo in BY_CRITIC | BY_GROUP or not self.trains,
             f"no algo {self.algo}: {', '.join([*BY_CRITIC, *BY_GROUP])}, or run its script")
        need(self.adv_norm in ("std", "mean"), f"--adv-norm {self.adv_norm}: take std or mean")
        need(self.rollouts > 1 or self.algo not in BY_GROUP and self.keep == 1, "filter/GRPO need --rollouts 2 or more")


def parse_config(argv=None, config=Config):  # -> config: what is typed, else what RUN had, else the default
    about = (f"{__doc__}\nOptions (with - or _):\n\n{inspect.getsource(Config).split('    def ')[0]}"
             f"    The script's own: {', '.join(config.__annotations__.keys() - Config.__annotations__) or 'none'}")
    parser = argparse.ArgumentParser(usage="%(prog)s [options] (--help lists them)", description=about,
        argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in get_type_hints(config).items():
        how = {"action": "store_true"} if kind is bool else {"type": kind}
        parser.add_argument(*{f"--{name.replace('_', '-')}", f"--{name}"}, help=argparse.SUPPRESS, **how)
    given = vars(parser.parse_args(argv))  # only options that were typed: the others are SUPPRESSed
    model = Path(given.get("model", "tiny"))
    run = given.get("resume", model.parent if model.name == "checkpoint" else model)  # RUN/checkpoint: RUN
    with or_say(f"settings of {run}: config.json missing, damaged, another script's? (Is your Config a @dataclass?)"):
        settings = json.loads(Path(f"{run}/config.json").read_text()) if Path(f"{run}/checkpoint").is_dir() else {}
        if "resume" in given:
            need(settings, f"--resume {run}: no such run, with checkpoint and settings (give RUN, not RUN/checkpoint)")
            need(given.keys().isdisjoint("env model out play eval_only eval_prompts starpo_s".split()),
                 f"--resume keeps env, model, out, starpo-s, eval-prompts. To play, or to begin anew: --model {run}")
        cfg = config(**settings | {"device": Config.device, "out": ""} | given)  # the run's; typed ones win
    of_no_use = {"success_rate"}.difference(dir(envs.make(cfg.env)))  # in worlds that do not slip
    of_no_use |= {"adv_norm"} if cfg.algo in BY_CRITIC else {"gamma", "lam", "critic_lr"}
    for name in of_no_use.intersection(given):
        print(f"note: --{name.replace('_', '-')} has no effect on {envs.title(cfg.env)}, {cfg.algo}")
    return cfg


def main(train=train, config=Config):  # a script may pass its own train(cfg), or a subclass of Config
    cfg = parse_config(config=config)
    try:
        if cfg.trains:
            train(cfg)
        else:
            _, samples = evaluate(0, load_models(cfg), cfg)
            print(f"(random, optimal: chances here. Blanks separate tokens: 1 0 is 10)\n\n{samples[0]['text']}")
        if STOP:  # `train` saved and returned early
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        sys.exit(130)  # as shells expect after Ctrl-C
    except (OSError, UnicodeEncodeError, torch.OutOfMemoryError) as error:  # such as a full disk
        sys.exit(f"{type(error).__name__} {error}. If a run had begun, --resume RUN goes on")


if __name__ == "__main__":
    main()
