"""Right answers in another style than that of the shipped functions, as the cells of a notebook.

more_answers.txt has variants of them.
"""
import re

import numpy as np
import torch

import envs
import ragen_mini as rm


def outcomes(env, state, action):
    def land(move, chance):
        row, col = envs.shift(state, move)
        if not (0 <= row < env.size and 0 <= col < env.size):
            row, col = state
        goal = (row, col) == env.level["goal"]
        hole = (row, col) in env.level["holes"]
        return (chance, (row, col), 1.0 if goal else 0.0, goal or hole)
    k = env.actions.index(action)
    p = env.success_rate
    sides = [env.actions[(k + 1) % 4], env.actions[(k + 3) % 4]]
    return [land(action, p)] + [land(side, (1 - p) / 2) for side in sides]


def yardsticks(env, horizon):
    def V(state, over, h, best):
        if h == 0 or over:
            return float(env.won(state))
        if (state, h, best) not in known:
            Q = []
            for action in env.actions:
                Q.append(sum(p * V(new, end, h - 1, best)
                             for p, new, _, end in env.outcomes(state, action)))
            known[state, h, best] = max(Q) if best else sum(Q) / len(Q)
        return known[state, h, best]
    known = {}
    return [[V(env.state, False, h, best) for h in range(horizon + 1)] for best in (False, True)]


def parse_answer(text, actions, limit):
    match = re.fullmatch(r"(?:<think>(.*?)</think>\s*)?<answer>(.*?)</answer>\s*", text, re.DOTALL)
    if match is None:
        return None
    if any(tag in (part or "") for part in match.groups()
           for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return None
    names = {a.lower(): a for a in actions}
    words = [w.strip().lower() for w in match.group(2).split("||")][:limit]
    if any(w not in names for w in words):
        return None
    return [names[w] for w in words]


class Trajectory(rm.Trajectory):
    def append(self, ids, sampled, logp=0.0):
        for token in ids:
            self.ids.append(token)
            self.mask.append(sampled)
            self.old_logp.append(logp)
            self.reward.append(0.0)
        if not sampled:
            self.answer_start = len(self.ids)


def collate(trajs, device):
    T = max(len(t.ids) for t in trajs)
    batch = {"inputs": torch.zeros(len(trajs), T - 1, dtype=torch.long)}
    for name, dtype in (("targets", int), ("mask", bool), ("old_logp", None), ("reward", None)):
        batch[name] = torch.zeros(len(trajs), T - 1, dtype=dtype)
    for row, traj in enumerate(trajs):
        n = len(traj.ids) - 1
        batch["inputs"][row, :n] = torch.tensor(traj.ids[:-1])
        batch["targets"][row, :n] = torch.tensor(traj.ids[1:])
        batch["mask"][row, :n] = torch.tensor(traj.mask[1:])
        batch["old_logp"][row, :n] = torch.tensor(traj.old_logp[1:])
        batch["reward"][row, :n] = torch.tensor(traj.reward[1:])
    return {name: x.to(device) for name, x in batch.items()}


def token_logps(policy, part, cfg):
    logits = policy(input_ids=part["inputs"]).logits[part["mask"]]
    targets = part["targets"][part["mask"]]
    logp = torch.log_softmax(logits / cfg.temperature, dim=-1)
    entropy = -(logp.exp() * logp).sum(dim=-1)
    return logp[torch.arange(len(targets)), targets], entropy


def grpo_advantages(R, norm="std"):
    mean = R.mean(1).unsqueeze(1)
    std = R.std(1).unsqueeze(1)
    A = R - mean
    if norm == "std":
        A = A / (std + 1e-6)
        A[(std < 1e-4).expand_as(A)] = 0
    return A


def uncertainty_filter(R, keep):
    k = max(1, int(len(R) * keep + 1e-9))
    return torch.topk(R.std(dim=1), k).indices


def gae(reward, value, mask, gamma, lam):
    advantage = torch.zeros_like(value)
    target = torch.zeros_like(value)
    for b in range(len(value)):
        A, v = 0.0, 0.0
        for t in range(value.shape[1] - 1, -1, -1):
            if mask[b, t]:
                delta = reward[b, t] + gamma * v - value[b, t]
                A = delta + gamma * lam * A
                v = value[b, t]
                advantage[b, t] = A
                target[b, t] = A + v
    return advantage, target


def policy_loss(logp, entropy, old_logp, adv, cfg):
    ratio = torch.exp(logp - old_logp)
    a = ratio * adv
    b = torch.clamp(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high) * adv
    return -torch.minimum(a, b) - cfg.entropy_coef * entropy, b < a


def value_loss(value, old_value, target):
    clipped = torch.clamp(value, old_value - rm.VALUE_CLIP, old_value + rm.VALUE_CLIP)
    return 0.5 * torch.maximum((value - target).square(), (clipped - target).square())


def add_gradients(batch, rows, models, cfg):
    count = batch["mask"][rows].sum()
    for some, part in rm.micro_batches(batch, rows, cfg.micro_tokens):
        mask = part["mask"]
        logp, entropy = rm.token_logps(models.policy, part, cfg)
        loss = rm.policy_loss(logp, entropy, part["old_logp"][mask], part["adv"][mask],
                              cfg)[0].sum()
        if models.critic is not None:
            value = rm.token_values(models.critic, part)
            loss = loss + rm.value_loss(value, part["value"][mask],
                                        part["value_target"][mask]).sum()
        (loss / count).backward()
    return {"loss": float(loss)}
