"""RAGEN / StarPO (arXiv 2504.20073): a language model learns to act by playing games.

This file is the whole method. One iteration, which is `iterate` and `learn` below, looks like this,
with the equations of the paper:

    trajs = rollout(...)              the model plays N episodes in each of P levels
    R     = returns(...)              the return of an episode is the sum of its rewards    eq. 2
    kept  = uncertainty_filter(...)   keep the groups whose returns differ most             eq. 7
    batch = compute_advantages(...)   how much better than expected was each token?
                                      GRPO: eq. 5. PPO: generalised advantage estimation
    updates(...)                      gradient steps that make better tokens more likely    eq. 4, 6

    python ragen_mini.py --env frozenlake                 train; all files go to a folder in runs/
    python ragen_mini.py --resume RUN --iterations 100    train that run up to iteration 100

Read it from top to bottom: settings, one iteration, then what it calls, in the order in which it is
called. envs.py has the games, plots.py draws what a run has logged. support/ has what a run needs
besides the method: the cache of keys and values, chat templates, loading, saving, command line.

To change the method, edit this file. Or replace any of its functions from a script of your own.
That works because every function is looked up by its name at the moment when it is called:

    import ragen_mini as rm
    rm.policy_loss = my_policy_loss
    rm.main()

Words (if reinforcement learning is new to you, read parts 3 and 4 of tutorial.ipynb first)
    policy        pi, the model that plays. pi_old is the policy during the last rollout, pi_ref is
                  the policy before training
    level         what a seed draws: a map with a start, for example
    turn          a message from the environment (its state as text), and the model's answer: all
                  that it writes up to its end token. The actions stand in <answer>...</answer>
    episode       one play of a level. As tokens it is a trajectory: message, answer, message, ...
    return        R, the sum of the rewards of an episode
    group         the N episodes of one level. All of them begin with the same message, the prompt
                  (that is why --prompts is the number of groups)
    rollout       the part of an iteration in which all P * N episodes are played
    StarPO        State-Thinking-Actions-Reward Policy Optimisation: all of this, by PPO or GRPO.
                  StarPO-S is the paper's variant against collapse, in which success falls for good
    update        one gradient step, on a minibatch of trajectories
    value         the expected sum of the rewards to come. PPO trains a second network, the critic,
                  to estimate it
    advantage     A, how much better than expected things went after a token

Shapes: P groups of N episodes each. B trajectories of up to T tokens. n tokens that the model wrote
(in the rows at hand). b rows that a network reads at once, V tokens in the vocabulary, D hidden
width.
"""
import copy
import re
from collections import Counter
from dataclasses import dataclass, replace
from statistics import fmean
from time import perf_counter

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import envs
import plots
from support import chat, device, errors, folder, loading, settings
from support.cache import KVCache, read  # read: log-probs of the next token, at cfg.temperature
from support.chat import encode, end_tokens  # encode: a message in the model's chat template
from support.errors import need  # need(condition, message): else one line says what is wrong
from support.settings import option  # option(default, help): a setting

# The reward of an answer that is malformed or names an unknown action (App. B.1).
FORMAT_PENALTY = -0.1
# The sampling temperature of evaluations (Sec. 3.2).
EVAL_TEMPERATURE = 0.5
# Gradients with a larger norm than this are scaled down to it.
MAX_GRAD_NORM = 1.0
# A value that has moved further than this from its old value is clipped (see value_loss). This is
# the number of the paper's code, whatever the size of the rewards.
VALUE_CLIP = 0.5
# Training ends after this many iterations in a row without an update (see is_dead).
DEAD_AFTER = 10
# Logits that an update holds at once: 256 MB in fp32, with all that is computed of them about 2 GB.
CHUNK_LOGITS = 2 ** 26


# ---------------------------------------------------------------------------- settings and networks
# Settings that are not given get their values from one preset of each pair: --starpo-s chooses from
# the first pair, --model from the second, --device from the third.
STARPO = {"keep": 1.0, "kl_coef": 0.001, "clip_high": 0.2}
STARPO_S = {"keep": 0.25, "kl_coef": 0.0, "clip_high": 0.28}  # against collapse (Sec. 4.2)
FOR_TINY = {"iterations": 60, "minibatch_size": 8, "lr": 4e-4, "critic_lr": 1e-3,
            "max_new_tokens": 40, "eval_every": 10}
FOR_OTHERS = {"iterations": 200, "minibatch_size": 32, "lr": 1e-6, "critic_lr": 1e-5,
              "max_new_tokens": 400, "eval_every": 20}
ON_CPU = {"micro_tokens": 1024}
ON_GPU = {"micro_tokens": 2048}


@dataclass
class Config:
    """All settings. Each is an option of the command line. (Whether a model is tiny, or was trained
    from it, is read from its config.json.)
    """
    # the environment
    env: str = option("frozenlake", "bandit, sokoban, frozenlake, ..., or FILE.py:CLASS")
    success_rate: float | None = option(None, "lakes: chance of the intended move (paper: 1/3)")
    max_turns: int = option(5, "turns of an episode")
    max_actions_per_turn: int = option(5, "actions of an answer; further ones are dropped")
    max_actions: int = option(10, "actions of an episode")

    # the model
    model: str = option("tiny", "tiny (included), the folder of a run or of a model, or a hub id")
    max_new_tokens: int | None = option(None, "tokens of an answer (default: tiny 40, others 400)")
    no_think: bool = option(False, "let the model answer at once, without <think>...</think>")
    temperature: float = option(1.0, "of sampling in training; evaluations always use 0.5")

    # one iteration
    iterations: int | None = option(None, "how many to train (default: tiny 60, others 200)")
    prompts: int = option(8, "P: groups of an iteration, each of which plays one level")
    rollouts: int = option(16, "N: episodes of a group")
    minibatch_size: int | None = option(None, "trajectories of a gradient step (tiny 8, others 32)")
    epochs: int = option(1, "passes over the trajectories of an iteration")
    online_k: int = option(1, "play k * P groups at once, learn from them in k slices (Fig. 10)")
    lr: float | None = option(None, "learning rate of the policy (default: tiny 4e-4, others 1e-6)")
    critic_lr: float | None = option(None, "that of the critic (default: tiny 1e-3, others 1e-5)")

    # the objective
    algo: str = option("ppo", "ppo (advantages from a critic) or grpo (from the group's returns)")
    starpo_s: bool = option(False, "StarPO-S: other defaults for keep, kl-coef and clip-high")
    keep: float | None = option(None, "share of the groups to train on (default 1, StarPO-S 0.25)")
    kl_coef: float | None = option(None, "KL penalty per token (default 0.001, StarPO-S 0)")
    clip_high: float | None = option(None, "clip ratios above 1 + this (0.2, StarPO-S 0.28)")
    clip_low: float = option(0.2, "clip ratios below 1 - this")
    entropy_coef: float = option(0.001, "weight of the entropy bonus, for exploration")
    gamma: float = option(1.0, "ppo: discount per token that the model wrote")
    lam: float = option(1.0, "ppo: lambda of GAE; 1 trusts the rewards that came, 0 the next value")
    adv_norm: str = option("std", "grpo: divide by the std of the group (std), or not (mean)")

    # the run
    seed: int = option(0, "random seed of training; evaluations and --play have fixed seeds")
    eval_every: int | None = option(None, "evaluate every so often (tiny 10, others 20, 0: never)")
    eval_prompts: int = option(256, "held-out levels of an evaluation, at most 256")
    eval_only: bool = option(False, "evaluate --model, show its first episode, and stop")
    play: int | None = option(None, "show an episode of --model in the level of a seed, and stop")
    save_every: int = option(10, "iterations between saves, each of which replaces the last one")
    out: str = option("", "folder of the run (default: runs/<env>-<algo>[-s]-seed<n>)")
    resume: str = option("", "folder of a run to continue")
    device: str = option("cuda" if torch.cuda.is_available() else "cpu", "cuda, mps or cpu")
    micro_tokens: int | None = option(None, "tokens of a pass of an update (CPU 1024, GPU 2048)")

    def __post_init__(self):
        settings.fill_in(self, STARPO_S if self.starpo_s else STARPO,
                         FOR_TINY if loading.is_tiny(self.model) else FOR_OTHERS,
                         ON_CPU if self.device == "cpu" else ON_GPU)
        settings.check(self)

    @property
    def trains(self):
        return self.play is None and not self.eval_only

    @property
    def uses_critic(self):
        return self.algo == "ppo"

    @property
    def horizon(self):
        """An episode has at most this many actions."""
        return min(self.max_actions, self.max_turns * self.max_actions_per_turn)

    @property
    def first_tag(self):
        """The tag with which every answer begins. The program writes it at the end of its message,
        so it is not trained.
        """
        return "<answer>" if self.no_think else "<think>"


@dataclass
class Models:
    """policy: a causal language model from transformers. critic: estimates values for PPO. ref: the
    policy before training, for the KL penalty. tok: the tokenizer.

    critic and ref are None where nothing needs them. If optimizer is None, `train` makes one.
    """
    policy: nn.Module
    critic: nn.Module | None
    ref: nn.Module | None
    optimizer: torch.optim.Optimizer | None
    tok: object

    def trained(self):  # -> the networks that are trained
        return [self.policy] if self.critic is None else [self.policy, self.critic]


def load_models(cfg):  # -> Models
    """Training begins with three copies of one network. Only the critic's head is new: random."""
    torch.manual_seed(cfg.seed)
    policy, tok = loading.load_policy(cfg)
    critic = ref = None
    if cfg.trains and cfg.uses_critic:
        critic = loading.load_critic(cfg)
    if cfg.trains and cfg.kl_coef:
        ref = copy.deepcopy(policy)
    check_policy(policy, tok, cfg)
    return Models(policy, critic, ref, None, tok)


def check_policy(policy, tok, cfg):
    """Before anything is played: the model must see the state, and `read` must read it rightly."""
    if cfg.trains:  # fails if all levels are held out
        begin(seed=envs.EVAL_SEEDS.stop, episode=0, group=0, tok=tok, cfg=cfg)
    traj = begin(seed=0, episode=0, group=0, tok=tok, cfg=cfg)
    text = message(traj.env, cfg, tok, cfg.max_actions)
    chat.check_template(tok, text, traj, cfg)
    chat.check_reading(policy, traj, cfg)


def make_optimizer(models, cfg):  # -> Adam for the policy, and for the critic if there is one
    groups = [{"params": models.policy.parameters(), "lr": cfg.lr}]
    if models.critic is not None:
        groups.append({"params": models.critic.parameters(), "lr": cfg.critic_lr})
    return torch.optim.Adam(groups)


# ------------------------------------------------------------------------------------ one iteration
def iterate(i, models, cfg):  # -> a row of the log, trajectories
    """Plays, then learns. Iteration 0 is the model before training, which is only evaluated.

    All randomness follows from (cfg.seed, i). So on a CPU a resumed run gets the same rows.
    """
    if i == 0:
        return {"iteration": 0}, []
    # Seeds below EVAL_SEEDS.stop belong to the held-out levels.
    rng = np.random.default_rng([cfg.seed, i])
    drawn = rng.integers(envs.EVAL_SEEDS.stop, 2 ** 31, cfg.prompts * cfg.online_k + 1).tolist()
    level_seeds, sampling_seed = drawn[:-1], drawn[-1]

    start = perf_counter()
    trajs = rollout(models, level_seeds, cfg.rollouts, cfg, sampling_seed)
    seconds_rollout = perf_counter() - start
    gap = logp_gap(trajs, models, cfg)
    if i == 1:
        chat.check_gap(gap, models, cfg)

    # Online-k: the groups are learned from in slices of P. While the policy learns from the first
    # slices, the others grow stale: before the last one there were the updates of k - 1 slices.
    start = perf_counter()
    learned = []
    for first in range(0, len(level_seeds), cfg.prompts):
        slice_ = trajs[first * cfg.rollouts:(first + cfg.prompts) * cfg.rollouts]
        learned.append(learn(slice_, models, cfg, sampling_seed + first))
    seconds_update = perf_counter() - start

    row = {"iteration": i, "seconds_rollout": seconds_rollout, "seconds_update": seconds_update,
           "logp_gap": gap}
    return row | log_columns(trajs, returns(trajs, cfg), learned), trajs


def learn(trajs, models, cfg, seed):  # -> batch, statistics of its gradient steps
    """Chooses groups, computes advantages, and updates. (seed: for the order of minibatches)

    Returns {}, [] if there is nothing to learn from. That is also so if a filter of your own keeps
    no group.
    """
    N = cfg.rollouts
    R = returns(trajs, cfg)  # (P,N)
    kept = sorted(uncertainty_filter(R, cfg.keep).tolist())
    if not kept or nothing_to_compare(R[kept], cfg):
        return {}, []
    chosen = [traj for group in kept for traj in trajs[group * N:(group + 1) * N]]
    batch = compute_advantages(chosen, R[kept], models, cfg)
    return batch, updates(batch, models, cfg, seed)


# ----------------------------------------------------------------------------- an episode as tokens
class Trajectory:
    """Four lists with one entry per token. For example, in Sokoban:
        ids       <|im_start|> user ... <think>  The box is ... </answer> <|im_end|>  <|im_start|>
        mask      0            0        0        1   1   1      1         1           0
        old_logp  0            0        0       -1.2 -0.4 -0.1 -0.3      -0.1         0
        reward    0            0        0        0   0   0      0        -0.2         0
    (The answer had two moves, each of which costs 0.1.)

    NOTE: `append` records who wrote a token. That cannot be guessed later from the text or from
    special tokens, because the end of a turn and the padding may be the same token.
    """
    def __init__(self, env, group, actions_left):
        self.env = env
        self.group = group  # the number of its group in the rollout
        self.actions_left = actions_left
        self.done = False
        self.success = False

        # One entry per token. The mask says whether the model wrote it: only such tokens are
        # trained. old_logp is the log-probability with which pi_old sampled it. The reward of a
        # turn is on the last token of the answer, because the whole answer led to it.
        self.ids = []
        self.mask = []
        self.old_logp = []
        self.reward = []
        self.answer_start = 0  # where in ids the present answer begins

        # For the log: a dict of state, answer, valid, reward and tokens for each turn, and the sum
        # of the entropies with which the tokens were sampled.
        self.turns = []
        self.entropy = 0.0

    @property
    def R(self):  # eq. 2
        return sum(self.reward)

    def append(self, ids, sampled, logp=0.0):
        """Adds tokens of a message (sampled=False), or one that the model has sampled."""
        self.ids += ids
        self.mask += [sampled] * len(ids)
        self.old_logp += [logp] * len(ids)
        self.reward += [0.0] * len(ids)
        if not sampled:
            self.answer_start = len(self.ids)


# ------------------------------------------------------------------------------------------ rollout
@torch.no_grad()
def rollout(models, seeds, N, cfg, sampling_seed):  # -> len(seeds) * N trajectories, by group
    """Plays N episodes in the level of each seed, all of them side by side.

    Each pass of the model adds one token to every unfinished answer. An episode whose answer is
    finished waits. When all wait, the environments act and send their next messages.
    """
    trajs = []
    for group, seed in enumerate(seeds):
        trajs += [begin(seed, episode, group, models.tok, cfg) for episode in range(N)]
    ends = end_tokens(models, cfg)
    generator = torch.Generator(cfg.device).manual_seed(sampling_seed)

    with device.autocast(cfg.device):
        # The episodes of a group begin with the same message. The first of them reads it, then all
        # get copies of its row of the cache.
        firsts = trajs[::N]
        cache = KVCache()
        next_logps = read(models.policy, cache, firsts, cfg).repeat_interleave(N, 0)
        cache.select(trajs, sources=[firsts[traj.group] for traj in trajs])

        playing = trajs
        writing = trajs  # those of them whose answer is unfinished
        while playing:
            sample(writing, next_logps, generator)
            writing = [traj for traj in writing if traj.ids[-1] not in ends
                       and len(traj.ids) < traj.answer_start + cfg.max_new_tokens]
            if not writing:  # all answers are finished
                for traj in playing:
                    take_turn(traj, models.tok, cfg, ends)
                playing = writing = [traj for traj in playing if not traj.done]
                cache.select(playing)
                chat.check_length(models.policy, playing, cfg)
            if playing:
                next_logps = read(models.policy, cache, writing, cfg)
    return trajs


def begin(seed, episode, group, tok, cfg):  # -> a Trajectory that waits for its first answer
    env = envs.make(cfg.env, cfg.success_rate)
    env.reset(seed, options={"episode": episode})
    traj = Trajectory(env, group, cfg.max_actions)
    traj.append(encode(tok, cfg.first_tag, message(env, cfg, tok, cfg.max_actions)), sampled=False)
    return traj


def message(env, cfg, tok, actions_left, reward=None):  # -> text
    """The first message states the task, later ones the reward of the answer. Then comes the state:
        You are solving a FrozenLake puzzle. ...     Reward: 0.0
        State:                                       State:
        P _                                          _ P
        _ G                                          _ G
        You have 10 actions left.                    You have 9 actions left.

    NOTE: the chat template of `tiny` drops what stands before an empty line, here the task.
    """
    # Words of the environment cannot end the message.
    instruction, state = chat.quote(tok, env.instruction), chat.quote(tok, env.render())
    if reward is None:
        thought = "" if cfg.no_think else "<think> your thoughts </think>"
        top = (f"{instruction}\nYou may give up to {cfg.max_actions_per_turn} actions at once, "
               f"separated by ||. Write exactly {thought}<answer> action || action </answer> "
               f"and nothing else.\n\n")
    else:
        top = f"Reward: {round(reward, 3)}\n"
    return f"{top}State:\n{state}\nYou have {actions_left} actions left."


def sample(trajs, next_logps, generator):  # next_logps (b,V): log-probs of the next token
    tokens = torch.multinomial(next_logps.exp(), 1, generator=generator)  # (b,1)
    logps = next_logps.gather(1, tokens).flatten().tolist()
    entropies = entropy_of(next_logps).tolist()
    for traj, token, logp, entropy in zip(trajs, tokens.flatten().tolist(), logps, entropies):
        traj.append([token], sampled=True, logp=logp)
        traj.entropy += entropy


def entropy_of(logp):  # (n,V) -> (n,): -sum p log p
    # Where p is 0, log p is -inf, and 0 * -inf would be nan.
    return -(logp.exp() * logp.clamp(-1e4)).sum(1)


def take_turn(traj, tok, cfg, ends):
    """Runs the actions of the answer, rewards its last token, and appends the next message.

    The reward is that of the environment, summed over the actions. An invalid answer runs no action
    and gets FORMAT_PENALTY.
    """
    env = traj.env
    written = traj.ids[traj.answer_start:]
    without_end = [token for token in written if token not in ends]
    answer = cfg.first_tag + tok.decode(without_end, clean_up_tokenization_spaces=False)
    actions = parse_answer(answer, env.actions, cfg.max_actions_per_turn)
    valid = actions is not None
    turn = {"state": env.render(), "answer": answer, "valid": valid, "tokens": len(written)}

    reward = 0.0 if valid else FORMAT_PENALTY
    for action in actions or []:
        if traj.actions_left == 0 or env.over:
            break
        _, reward_of_action, _, _, info = env.step(action)
        reward += reward_of_action
        traj.actions_left -= 1
        traj.success = info["success"]
    turn["reward"] = reward
    traj.turns.append(turn)
    traj.reward[-1] = reward

    traj.done = env.over or traj.actions_left == 0 or len(traj.turns) == cfg.max_turns
    if not traj.done:
        text = message(env, cfg, tok, traj.actions_left, reward)
        ids = encode(tok, cfg.first_tag, text, after_answer=True)
        # The message begins with the template's end of an answer, ends[0]. Mostly the model has
        # written it itself. (Not if the answer was cut off, or ended with another end token.)
        if traj.ids[-1] == ends[0]:
            ids = ids[ids.index(ends[0]) + 1:]
        traj.append(ids, sampled=False)


# An answer is <think>...</think><answer>...</answer>, where ... is any text without these tags.
# (With --no-think there is no thought.) <think>a</think><answer>Up</answer> is valid, but
# <think>a<think>b</think><answer>Up</answer> and <answer>Up</answer> Good luck! are not.
NO_TAGS = r"((?:(?!</?think>|</?answer>).)*)"
ANSWER = re.compile(
    rf"(<think>{NO_TAGS}</think>\s*)?<answer>(?P<actions>{NO_TAGS})</answer>\s*", re.DOTALL)


def parse_answer(text, actions, limit):  # -> at most `limit` actions; None if the text is invalid
    """<think>Hm.</think><answer>down || Left</answer> -> ["Down", "Left"]

    What follows after `limit` actions is dropped, whatever it says.
    """
    found = ANSWER.fullmatch(text)
    if not found:
        return None
    known = {action.lower(): action for action in actions}
    words = found["actions"].split("||")[:limit]
    chosen = [known.get(word.strip().lower()) for word in words]
    return None if None in chosen else chosen


# ------------------------------------------------------------------------ which groups to train on
def returns(trajs, cfg):  # -> (P,N)
    return torch.tensor([traj.R for traj in trajs]).view(-1, cfg.rollouts)


def uncertainty_filter(R, keep):  # (P,N) -> the numbers of the kept groups
    """eq. 7: U(s0) = Std_i R(tau_i). Keeps a share of the groups, those with the largest U, and at
    least one.

    NOTE: a large U need not mean that the policy is uncertain. Luck makes returns differ, too.
    """
    # U only ranks the groups. The sample std would rank them in the same order.
    U = R.std(1, correction=0)
    count = max(1, int(keep * len(R) + 1e-9))  # 1e-9, because 0.29 * 100 is 28.999...
    return U.argsort(descending=True, stable=True)[:count]


def nothing_to_compare(R, cfg):  # R (P,N) of the kept groups -> bool
    """True if all returns that the advantages compare are equal: under GRPO the returns within each
    group, under PPO those of all episodes. Then `learn` makes no update.

    NOTE: without this rule PPO would be trained on the errors of its critic alone, and whitening
    (see compute_advantages) would scale them up to the usual size. With it, a policy whose answers
    are all invalid never changes again, not even by the KL penalty or the entropy bonus. So it is
    one reason why a collapse is final here.
    """
    spread = R.std(correction=0) if cfg.uses_critic else R.std(1, correction=0).max()
    return spread < 1e-4


# ----------------------------------------------------------------------- how good was each token?
def compute_advantages(trajs, R, models, cfg):  # R (P,N) -> batch, as of collate, with "adv"
    """PPO: the rewards that came after a token, minus the critic's value before it. Then all
    advantages are whitened: shifted and scaled to mean 0 and std 1.

    GRPO: the return of the episode, compared with its group, is the advantage of all its tokens. To
    it the KL penalties of the token and of all later ones are added.
    """
    batch = collate(trajs, cfg.device)
    mask = batch["mask"]
    # The KL penalty of a token is kl_coef * (log pi_old - log pi_ref), see App. B.2.
    penalty = torch.zeros_like(batch["reward"])
    if models.ref is not None:
        ref_logp = per_token(lambda part: token_logps(models.ref, part, cfg)[0], batch, cfg)
        batch["kl"] = batch["old_logp"] - ref_logp
        penalty = -cfg.kl_coef * batch["kl"]

    if cfg.uses_critic:
        reward = batch["reward"] + penalty
        batch["value"] = per_token(lambda part: token_values(models.critic, part), batch, cfg)
        adv, batch["value_target"] = gae(reward, batch["value"], mask, cfg.gamma, cfg.lam)
        mean, std = adv[mask].mean(), adv[mask].std(correction=0)
        adv = (adv - mean) / (std + 1e-8)  # whitening
    else:
        adv = grpo_advantages(R, cfg.adv_norm)
        assert adv.shape == R.shape, "grpo_advantages must return one advantage for each episode"
        # NOTE: the returns were divided by the std of their group. The penalties are added as they
        # are. With long answers their sums are large: lower --kl-coef. They run from behind: of
        # 1 2 3 they are 6 5 3.
        penalty_to_come = penalty.flip(1).cumsum(1).flip(1)
        adv = adv.to(cfg.device).reshape(-1, 1) + penalty_to_come
    batch["adv"] = adv * mask
    return batch


def collate(trajs, device):  # -> a dict: inputs, targets, mask, old_logp, reward, each (B,T-1)
    """Lists become tensors, padded on the right. From here on, column t is about *predicting* token
    t + 1: the model has read inputs[:t+1], and targets[t] comes next. (m: message, a: answer)
        ids         m1  m2  a1  a2  m3  a3              column      0   1   2   3   4
        mask        0   0   1   1   0   1               inputs      m1  m2  a1  a2  m3
        reward      0   0   0   0   0   1               targets     m2  a1  a2  m3  a3
                                                        mask        0   1   1   0   1
                                                        reward      0   0   0   0   1
    NOTE: it is mask[1:], because the mask belongs to the targets. mask[:-1], which is 0 0 1 1 0,
    would train a2 and m3.
    """
    batch = {"inputs": [traj.ids[:-1] for traj in trajs],
             "targets": [traj.ids[1:] for traj in trajs],
             "mask": [traj.mask[1:] for traj in trajs],
             "old_logp": [traj.old_logp[1:] for traj in trajs],
             "reward": [traj.reward[1:] for traj in trajs]}
    for name, rows in batch.items():
        rows = [torch.tensor(row) for row in rows]
        batch[name] = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    return batch


def gae(reward, value, mask, gamma, lam):  # (B,T-1) x3 -> advantage, target of the critic: (B,T-1)
    """Generalised advantage estimation, where v is the value before the token that is predicted:

        delta_t  = r_t + gamma v_next - v_t
        A_t      = delta_t + gamma lambda A_next
        target_t = v_t + A_t

    "next" is the next column *that the model wrote*. The example of `collate` goes on, with gamma =
    lambda = 1. Then A is the sum of the rewards to come, minus v:
        column      0 (m2)    1 (a1)    2 (a2)    3 (m3)    4 (a3)
        mask        0         1         1         0         1
        reward      0         0         0         0         1
        v           -         0.2       0.3       -         0.6
        delta       -         0.1       0.3       -         0.4
        A           0         0.8       0.7       0         0.4
        target      0         1         1         0         1
    NOTE: tokens of the environment are no steps of the policy. At m3, which the model did not
    write, v_next and A_next are carried over unchanged, and nothing is discounted.
    """
    advantage = torch.zeros_like(value)
    # Nothing comes after the last token, even if the episode was cut off there by max_turns.
    next_advantage = torch.zeros_like(value[:, 0])
    next_value = torch.zeros_like(value[:, 0])
    for t in reversed(range(value.shape[1])):
        wrote = mask[:, t]
        # In columns that the model did not write delta means nothing, and `where` ignores it.
        delta = reward[:, t] + gamma * next_value - value[:, t]
        next_advantage = torch.where(wrote, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(wrote, value[:, t], next_value)
        advantage[:, t] = next_advantage * wrote
    return advantage, (advantage + value) * mask


def grpo_advantages(R, norm="std"):  # (P,N) -> (P,N)
    """eq. 5: A_i = (R_i - mean) / std, with the mean and the std of the group.

    NOTE: dividing by std hides by how much returns differ. Suppose that 15 of 16 episodes pull an
    arm that always pays 0.15, and one pulls an arm that pays 1 in one case of four, which is 0.25
    on average. The advantage of that one episode is
        if it paid 1 (chance 1/4)    A =  0.797 / 0.2125 =  3.75
        if it paid 0 (chance 3/4)    A = -0.141 / 0.0375 = -3.75
    So on average it is -1.9, and the better arm is discouraged. Without the division it would be
    0.09.
    """
    centered = R - R.mean(1, keepdim=True)
    if norm == "mean":
        return centered
    std = R.std(1, keepdim=True)  # the sample std, as in the paper's code
    return torch.where(std < 1e-4, 0.0, centered / (std + 1e-6))  # exactly 0 for equal returns


# ------------------------------------------------- log-probs and values of tokens, pass by pass
def token_logps(policy, part, cfg):  # -> log pi (n,) and entropy (n,) of what the model wrote
    """The same as (policy(inputs).logits / temperature).log_softmax(-1), at those tokens.

    Logits are the largest tensor of all. So they are made for these tokens only, chunk by chunk,
    and made again in the backward pass (that is what `checkpoint` does).
    """
    mask = part["mask"]
    decoder, head = policy.get_decoder(), policy.get_output_embeddings()  # head.weight is (V,D)
    hidden = decoder(input_ids=part["inputs"], use_cache=False).last_hidden_state[mask]  # (n,D)
    targets = part["targets"][mask]  # (n,)
    logps = []
    entropies = []
    size = CHUNK_LOGITS // len(head.weight)
    for h, t in zip(hidden.split(size), targets.split(size)):
        logp, entropy = checkpoint(chunk_logps, h, t, head, cfg.temperature, use_reentrant=False)
        logps.append(logp)
        entropies.append(entropy)
    return torch.cat(logps), torch.cat(entropies)


def chunk_logps(hidden, targets, head, temperature):  # (n,D), (n,) -> log pi (n,), entropy (n,)
    logp = (head(hidden).float() / temperature).log_softmax(-1)  # (n,V)
    return logp.gather(1, targets[:, None]).flatten(), entropy_of(logp)


def token_values(critic, part):  # -> (n,): the value before each token that the model wrote
    """NOTE: without squeeze, value - target would be (n,1) - (n,), which silently becomes (n,n)."""
    logits = critic(input_ids=part["inputs"], use_cache=False).logits
    return logits[part["mask"]].float().squeeze(-1)


def micro_batches(batch, rows, limit):  # yields some of the rows, and the batch cut to them
    """Rows of similar length go together, up to `limit` tokens. That keeps the padding small.

    No attention mask is needed, because pads are on the right, where no earlier token looks.
    """
    mask = batch["mask"]
    # The length of a row is the number of columns up to the last token that the model wrote.
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    length = (mask * columns).amax(1).tolist()
    packs = []
    for row in sorted(rows, key=lambda row: length[row]):
        tokens = length[row] + 1  # with the target of the last column
        if not packs or (len(packs[-1]) + 1) * tokens > limit:
            packs.append([])
        packs[-1].append(row)
    for pack in packs:
        longest = length[pack[-1]]
        yield pack, {name: x[pack, :longest] for name, x in batch.items()}


@torch.no_grad()
def per_token(function, batch, cfg):  # -> (B,T-1), with 0 where the model wrote nothing
    """Applies function(part) -> (n,) to all micro-batches, and puts the results in their places."""
    result = torch.zeros_like(batch["reward"])
    with device.autocast(cfg.device):
        for rows, part in micro_batches(batch, range(len(result)), cfg.micro_tokens):
            values = torch.zeros_like(part["reward"])
            values[part["mask"]] = function(part)
            result[rows, :values.shape[1]] = values
    return result


# ---------------------------------------------------------------------------------- updates, losses
def updates(batch, models, cfg, seed):  # -> statistics of each gradient step
    steps = []
    shuffler = torch.Generator().manual_seed(seed)
    for _ in range(cfg.epochs):
        order = torch.randperm(len(batch["mask"]), generator=shuffler)
        for rows in order.split(cfg.minibatch_size):
            stats = add_gradients(batch, rows.tolist(), models, cfg)
            stats["grad_norm"] = take_step(models)
            steps.append(stats)
    return steps


def add_gradients(batch, rows, models, cfg):  # -> statistics
    """Adds the gradient of a minibatch to the weights' .grad, one micro-batch after another.

    The loss is the mean over all tokens of the minibatch. NOTE: so a long episode counts more than
    a short one, unlike in eq. 4 and 6, where each trajectory has a mean of its own. Most long
    episodes are those that do not reach their goal.
    """
    stats = Counter()
    total = int(batch["mask"][rows].sum())
    with device.autocast(cfg.device):
        for _, part in micro_batches(batch, rows, cfg.micro_tokens):
            mask = part["mask"]
            logp, entropy = token_logps(models.policy, part, cfg)
            loss, was_clipped = policy_loss(
                logp, entropy, part["old_logp"][mask], part["adv"][mask], cfg)
            assert loss.shape == logp.shape, "policy_loss must return a number for each token"
            stats["clip_fraction"] += was_clipped.sum().item() / total
            # Backward at once, so that the activations of only one network are in memory.
            part_loss = loss.sum() / total
            part_loss.backward()
            stats["policy_loss"] += part_loss.item()
            if models.critic is not None:
                value = token_values(models.critic, part)
                error = value_loss(value, part["value"][mask], part["value_target"][mask])
                part_loss = error.sum() / total
                part_loss.backward()
                stats["value_loss"] += part_loss.item()
    return stats


def policy_loss(logp, entropy, old_logp, adv, cfg):  # (n,) x4 -> loss (n,), was it clipped? (n,)
    """eq. 4 (PPO) and 6 (GRPO): -min(ratio * A, clip(ratio) * A), minus an entropy bonus.

    The ratio is a token's probability now, divided by its probability when it was sampled. Where
    the clipped product is the minimum, it is constant, and the token has no gradient:
         A    ratio    ratio * A    clip(ratio) * A    minimum    gradient
         1     1.5        1.5            1.2           clipped    none: it moved up far enough
         1     0.5        0.5            0.8           not        up again: it moved the wrong way
        -1     0.5       -0.5           -0.8           clipped    none: it moved down far enough
        -1     1.5       -1.5           -1.2           not        down again: it moved the wrong way
    NOTE: in the first update after a rollout all ratios are 1 (in bf16: nearly), so nothing is
    clipped. With the paper's settings StarPO-S makes only that one update (it keeps 32
    trajectories, which are one minibatch). So its wider clip has no effect there.
    """
    ratio = (logp - old_logp).exp()
    unclipped = ratio * adv
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * adv
    loss = -torch.min(unclipped, clipped) - cfg.entropy_coef * entropy
    return loss, clipped < unclipped


def value_loss(value, old_value, target):  # (n,) x3 -> (n,)
    """Half the squared error of the value, or of the clipped value, whichever is larger.

    The clipped value is at most VALUE_CLIP away from the old one. Where its error is larger, the
    value has moved far enough towards the target, and has no gradient. If the target is 2:
        old_value    value    its error    clipped    its error    the larger
            0         0.8        1.2         0.5         1.5       clipped: it moved far enough
            0        -0.8        2.8        -0.5         2.5       value's own: it is pulled back
    """
    clipped = old_value + (value - old_value).clamp(-VALUE_CLIP, VALUE_CLIP)
    return 0.5 * torch.max((value - target) ** 2, (clipped - target) ** 2)


def take_step(models):  # -> the norm of the policy's gradient, before it is clipped
    """NOTE: it must not run inside of `autocast`. There the next forward pass would still use the
    bf16 copies of the old weights.
    """
    norms = []
    for network in models.trained():
        norm = nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
        norms.append(norm.item())
    need(np.isfinite(norms).all(),
         "A gradient is not finite. If rewards and advantages are finite, lower --lr.")
    models.optimizer.step()
    models.optimizer.zero_grad()
    return norms[0]


# ------------------------------------------------------------------------------------------ the log
def log_columns(trajs, R, learned):  # R (P,N); learned: the results of `learn`, one per slice
    """What the paper measures. Its figures call the mean return "reward". response_length is the
    number of tokens of all answers of an episode.
    """
    turns = [turn for traj in trajs for turn in traj.turns]
    thoughts = [thought_of(turn) for turn in turns]
    tokens = sum(turn["tokens"] for turn in turns)
    row = {
        "reward": R.mean(),
        "reward_std": R.std(1, correction=0).mean(),  # the mean U of all groups
        "success": fmean(traj.success for traj in trajs),
        "entropy": sum(traj.entropy for traj in trajs) / tokens,
        "response_length": tokens / len(trajs),
        "think_length": fmean(len(thought.split()) for thought in thoughts),
        "distinct": len(set(thoughts)) / len(thoughts),
        "valid": fmean(turn["valid"] for turn in turns),
        "turns": len(turns) / len(trajs),
    }
    steps = [step for _, steps_of_slice in learned for step in steps_of_slice]
    if steps:
        for name in steps[0]:  # policy_loss, clip_fraction, grad_norm, ...
            row[name] = fmean(step[name] for step in steps)
        row["grad_norm_max"] = max(step["grad_norm"] for step in steps)  # shows a single spike
    kl = [batch["kl"][batch["mask"]].mean().item() for batch, _ in learned if "kl" in batch]
    if kl:
        row["kl"] = fmean(kl)  # of the kept groups
    row = {name: round(float(x), 6) for name, x in row.items()}
    return row | {"updates": len(steps), "tokens": tokens}


def thought_of(turn):  # -> text
    """What stands between <think> and </think>. Without </think> it is the rest of the answer."""
    answer = turn["answer"]
    if not answer.startswith("<think>"):
        return ""
    return answer.removeprefix("<think>").partition("</think>")[0]


def logp_gap(trajs, models, cfg):  # -> mean absolute difference of log-probs, times temperature
    """An update must find the log-probs that the rollout found, so that all ratios are 1 at first.

    They differ by rounding (in bf16 more than in fp32), or if the model does not suit. The first
    iteration refuses that. The longest episode is looked at, since a sliding window, for example,
    shows only there.
    """
    longest = max(trajs, key=lambda traj: len(traj.ids))
    batch = collate([longest], cfg.device)
    new_logp = per_token(lambda part: token_logps(models.policy, part, cfg)[0], batch, cfg)
    # Times the temperature, because log-probs are those of logits / temperature.
    gap = (new_logp - batch["old_logp"])[batch["mask"]].abs().mean() * cfg.temperature
    return gap.item()


# ----------------------------------------------------------------------------------------- training
def train(cfg, models=None, callback=None):  # -> rows of the log, models
    """Plays, learns, evaluates and logs, cfg.iterations times.

    callback(row, trajs, models, cfg) sees each row before it is logged, and may add columns to it.
    If it returns True, the run ends. Row 0 is about the model before training and has no trajs.
    """
    cfg = folder.claim(cfg)  # cfg.out: a new folder, or that of --resume
    if models is None:
        models = load_models(cfg)
    check_trainable(models, cfg)
    if models.optimizer is None:
        models.optimizer = make_optimizer(models, cfg)

    with folder.lock(cfg.out), errors.ctrl_c_asks_to_stop(), device.torch_settings(models.policy):
        rows = folder.open_log(models, cfg)  # with --resume, models get the weights of that run
        with folder.progress_bar(rows, cfg) as bar:
            for i in range(len(rows), cfg.iterations + 1):
                row, trajs = iterate(i, models, cfg)
                stop = i == cfg.iterations or is_dead([*rows, row])
                if cfg.eval_every and (stop or i % cfg.eval_every == 0):
                    columns, evaluated = evaluate(models, cfg, f"iteration {i}: ")
                    row |= columns
                    folder.log_samples(cfg, i, evaluated[:8], models.tok)
                if callback is not None and callback(row, trajs, models, cfg) is True:
                    stop = True
                stop = stop or errors.asked_to_stop()
                rows.append(row)
                folder.log_row(row, bar, cfg)
                if stop or i % cfg.save_every == 0:
                    folder.save(models, cfg)
                if stop:
                    break
    if i > 0 or cfg.eval_every:  # otherwise there is no curve
        plots.curves({cfg.out: plots.load(cfg.out)}, f"{cfg.out}/curves.png")
    folder.print_next_steps(rows, cfg, is_dead(rows))
    return rows, models


def check_trainable(models, cfg):
    need((models.critic is not None) == cfg.uses_critic,
         "PPO needs a critic among the models, GRPO none. Load them with the settings of this run.")
    for network in models.trained():
        need(any(weights.requires_grad for weights in network.parameters()),
             "All weights of a network are frozen, so it cannot be trained. (A PeftModel is to be "
             "loaded with is_trainable=True.)")


def is_dead(rows):
    """True if the last DEAD_AFTER iterations made no update, because `learn` had nothing to learn
    from. Further iterations would hardly change that.
    """
    last = rows[-DEAD_AFTER:]
    return len(last) == DEAD_AFTER and all(row.get("updates") == 0 for row in last)


# --------------------------------------------------------------------------------------- evaluation
def evaluate(models, cfg, when=""):  # -> columns of the log, trajectories
    """Plays one episode in each held-out level, and compares with random and optimal play.

    when: what the printed line begins with, such as "iteration 10: ".
    """
    seeds = envs.EVAL_SEEDS[:cfg.eval_prompts]
    at_once = device.episodes_at_once(models.policy, cfg)
    trajs = []
    for first in range(0, len(seeds), at_once):
        trajs += play(seeds[first:first + at_once], models, cfg)
    success = np.mean([traj.success for traj in trajs])
    yardsticks = envs.mean_yardsticks(cfg.env, cfg.horizon, seeds, cfg.success_rate)
    random, optimal = yardsticks[:, cfg.horizon]
    env = envs.title(cfg.env)
    folder.say(f"{when}{env} {plots.with_interval(success, len(trajs))}  "
               f"random {random:.2f}  optimal {optimal:.2f}")
    return {"eval": {env: success}, "yardsticks": {env: [random, optimal]}}, trajs


def play(seeds, models, cfg):  # -> a trajectory for each seed
    """Plays one episode in the level of each seed, at the temperature of evaluations."""
    return rollout(models, seeds, 1, as_evaluated(cfg), seeds[0])


def as_evaluated(cfg):  # -> settings
    return replace(cfg, temperature=EVAL_TEMPERATURE)


# ------------------------------------------------------------------------------------- the program
def parse_config(argv=None):  # -> Config
    return settings.parse(argv, Config)


def main():
    with errors.one_line_errors():
        cfg = parse_config()
        if cfg.trains:
            train(cfg)
            return
        models = load_models(cfg)
        with device.torch_settings(models.policy):
            if cfg.eval_only:
                _, trajs = evaluate(models, cfg)
                chat.check_gap(logp_gap(trajs, models, as_evaluated(cfg)), models, cfg)
                valid = fmean(turn["valid"] for traj in trajs for turn in traj.turns)
                print(f"valid answers {valid:.2f}. The first episode:\n")
            else:
                trajs = play([cfg.play], models, cfg)
        print(folder.transcript(trajs[0], models.tok))


if __name__ == "__main__":
    main()
