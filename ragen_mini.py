"""RAGEN / StarPO (arXiv 2504.20073) in one file. Read it top to bottom: it is the life of a trajectory.

A language model plays N episodes from each of P initial states (`rollout`); StarPO-S keeps the groups whose
returns vary most (`uncertainty_filter`); each token it wrote gets an advantage (PPO: `gae`, GRPO:
`grpo_advantages`); clipped gradient steps make the good ones likelier (`update`). B = P*N trajectories, T
tokens of the longest, n tokens that the model wrote, V vocabulary, D width. Sampled ids are trained as they
are, never decoded and encoded again; who wrote a token is recorded as it is appended, never reconstructed.
In a (B,T-1) tensor, column t is about predicting token t+1.
"""
import argparse, contextlib, copy, functools, hashlib, inspect, json, os, re, shutil, signal, tempfile, time
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch, transformers
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import envs, plots
from plots import need
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
FORMAT_PENALTY = -0.1   # App. B.1: a turn that is not <think>..</think><answer>..</answer> with valid actions
MAX_NORM, VALUE_CLIP = 1.0, 0.5  # longest gradient; farthest a value moves in an update. Released code
CUDA, QWEN, STOP = torch.cuda.is_available(), "Qwen/Qwen2.5-0.5B-Instruct", []  # STOP: signals that came
MICRO_TOKENS = 2048 if CUDA else 1024  # of a forward-backward pass: bounds the memory, changes no gradient
CHUNK_LOGITS = 2 ** 26  # logits that exist at once in the update: 256 MB, and a few copies
autocast = torch.autocast("cuda", torch.bfloat16, enabled=CUDA)  # the weights stay fp32
DIVERGED = "not finite: stopped before the step. Go on from the last checkpoint at a lower --lr: --resume "

# ---------------------------------------------------------------------------------------------------- config
STARPO = dict(keep=1.0, kl_coef=0.001, clip_high=0.2)
STARPO_S = dict(keep=0.25, kl_coef=0.0, clip_high=0.28)  # Sec. 4.2: StarPO-S is these three values
TINY = dict(iterations=100, lr=4e-4, critic_lr=1e-3, max_new_tokens=32, eval_prompts=256)
PAPER = dict(iterations=200, lr=1e-6, critic_lr=1e-5, max_new_tokens=400, eval_prompts=256 if CUDA else 8)
ZERO_OK = "seed eval_every mi_every success_rate gamma lam clip_low clip_high entropy_coef kl_coef".split()
AT_MOST_ONE = "keep success_rate gamma lam clip_low".split()

@dataclass
class Config:  # None: filled in by __post_init__. The comments are the texts of --help
    env: str = "frozenlake"  # environment to train on (python envs.py lists them)
    model: str = "auto"  # tiny (embedded), a folder, a hub id; auto: tiny, or Qwen2.5-0.5B-Instruct on a GPU
    device: str = "auto"  # cuda, mps or cpu; auto: cuda if there is one, else cpu
    seed: int = 0  # of everything random
    iterations: int = None  # rounds of rollout and update (tiny: 100, other models: 200)
    eval_envs: str = ""  # evaluate on these, too: comma-separated names
    eval_every: int = 20  # iterations between evaluations; 0: never
    eval_prompts: int = None  # evaluation levels, at most 256 (default 256; large models without a GPU: 8)
    eval_only: bool = False  # evaluate --model and stop
    mi_every: int = 0  # iterations between measurements of the thoughts' mutual information; 0: never
    save_every: int = 50  # iterations between checkpoints; the last iteration is always saved
    out: str = ""  # folder of the run (default runs/<env>-<algo>[-s]-seed<n>)
    resume: str = ""  # folder of a run that was cut short: it goes on exactly, with its settings
    prompts: int = 8  # P: initial states per iteration
    rollouts: int = 16  # N: episodes from each initial state
    max_turns: int = 5  # turns of an episode
    max_actions_per_turn: int = 5  # further actions of an answer are dropped
    max_actions: int = 10  # actions of an episode
    max_new_tokens: int = None  # tokens the model may write per turn (tiny: 32, other models: 400)
    temperature: float = 1.0  # of the rollout; evaluation is at 0.5
    no_think: bool = False  # answer at once, without <think>...</think>
    success_rate: float = 1 / 3  # FrozenLake: probability of the intended move (later code: 0.8)
    algo: str = "ppo"  # ppo (advantages from a critic) or grpo (from the group)
    gamma: float = 1.0  # ppo: discount
    lam: float = 1.0  # ppo: lambda of GAE
    adv_norm: str = "std"  # grpo: std (divide by the group's, eq. 5) or mean (only subtract it)
    clip_low: float = 0.2  # the ratio is clipped below 1 - clip_low
    entropy_coef: float = 0.001  # weight of the entropy bonus
    online_k: int = 1  # collect k*P prompts at once, then update on k slices of P (Fig. 10)
    starpo_s: bool = False  # the three changes below at once: keep 0.25, kl-coef 0, clip-high 0.28
    keep: float = None  # share of the prompts that is kept, most uncertain first (default 1)
    kl_coef: float = None  # weight of the KL penalty in the reward (default 0.001)
    clip_high: float = None  # the ratio is clipped above 1 + clip_high (default 0.2)
    batch: int = 32  # E: trajectories per update
    epochs: int = 1  # passes over the trajectories of an iteration
    lr: float = None  # Adam, policy (tiny: 4e-4, other models: 1e-6)
    critic_lr: float = None  # Adam, critic (tiny: 1e-3, other models: 1e-5)

    def __post_init__(self):
        self.device = {"auto": "cuda" if CUDA else "cpu"}.get(self.device, self.device)
        self.model = {"auto": QWEN if "cuda" in self.device else "tiny"}.get(self.model, self.model)
        preset = (TINY if self.model == "tiny" else PAPER) | (STARPO_S if self.starpo_s else STARPO)
        vars(self).update({name: value for name, value in preset.items() if getattr(self, name) is None})
        for name, x in vars(self).items():
            zero, high = name in ZERO_OK, 1 if name in AT_MOST_ONE else 1e9
            need(type(x) not in (int, float) or 0 < x <= high or zero and x == 0,
                 f"--{name.replace('_', '-')} {x}: {'at least' if zero else 'above'} 0 and at most {high:g}")
        self.eval_prompts = min(self.eval_prompts, len(envs.EVAL_SEEDS))
        self.eval_names = list(dict.fromkeys([self.env, *filter(None, self.eval_envs.split(","))]))
        here = ["cpu"] + ["cuda"] * CUDA + ["mps"] * torch.backends.mps.is_available()
        for x, choices in ((self.algo, ("ppo", "grpo")), (self.adv_norm, ("std", "mean")),
                           (self.device.split(":")[0], here), *((x, envs.ENVS) for x in self.eval_names)):
            need(x in choices, f"{x}: choose {' or '.join(choices)}")
        need(self.rollouts > 1 or self.keep == 1 and self.algo == "ppo", "filter and GRPO need --rollouts 2")

def parse_config(argv=None):  # -> Config; the command line is made from its fields and their comments
    parser = argparse.ArgumentParser("ragen_mini.py", "%(prog)s [--option value ...]", allow_abbrev=False)
    parser.error = lambda message: need(False, f"{message} (--help lists all options)")
    texts = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.M))
    for f in fields(Config):
        kind = {"action": "store_true"} if f.type is bool else {"type": f.type, "metavar": f.type.__name__}
        parser.add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, **kind,
                            help=texts[f.name] + f" [{str(f.default)[:10]}]" * bool(f.default))
    given = vars(parser.parse_args(argv))
    run = given.get("resume") or os.path.dirname(given.get("model", "").rstrip("/"))  # of RUN/checkpoint
    saved = plots.load(run)[0] if "resume" in given or run and Path(run, "log.jsonl").exists() else {}
    need(saved.keys() <= texts.keys(), f"{run} was made by another version of this program")
    changed = " ".join(sorted(given.keys() - plots.MAY_CHANGE)) if "resume" in given else ""
    need(not changed, f"--resume goes on with the settings of {run}, it cannot change {changed}")
    anew = {"device", "out", *(STARPO if "starpo_s" in given else ())} if "resume" not in given else ()
    return Config(**{name: x for name, x in saved.items() if name not in anew} | given)

# ------------------------------------------------------ words in, actions out: a turn, and the trajectory
START = {False: "<think>", True: "<answer>"}  # by cfg.no_think: the first tag of an answer is in the prompt
PLAIN = r"((?:(?!</?think>|</?answer>).)*)"  # any text without our tags, in linear time
SHAPE = re.compile(rf"<think>{PLAIN}</think>\s*<answer>{PLAIN}</answer>\s*", re.S)

def message(env, cfg, left, reward=None):  # what the agent reads: the task or its last reward, the state
    shape = "<think> your thoughts </think>" * (not cfg.no_think) + "<answer> action || action </answer>"
    task = (f"{env.instruction}\nYou may give up to {cfg.max_actions_per_turn} actions at once, separated by "
            f"||. Write exactly {shape} and nothing else.\n\n")
    before = task if reward is None else f"Reward: {reward:.1f}\n"
    return f"{before}State:\n{env.render()}\nYou have {left} actions left."

@functools.lru_cache(2048)  # a group often reads the same
def encode(tok, no_think, user, after_answer):  # -> ids
    """A user message in the chat template, then START; `after_answer`: first what closes that answer."""
    chat = [("user", "."), ("assistant", "(seam)")] * after_answer + [("user", user)]  # cut behind (seam)
    chat = [{"role": role, "content": content} for role, content in chat]
    text = tok.apply_chat_template(chat, add_generation_prompt=True, tokenize=False).split("(seam)")[-1]
    text = re.sub(r"<think>\s*$", "", text.lstrip(" ")) + START[no_think]  # if the template opens the thought
    return tok(text, add_special_tokens=False).input_ids

def parse_answer(text, actions, limit):  # -> at most `limit` actions; None: the answer is invalid
    """<think>Hm.</think><answer>down || Left</answer> -> ["Down", "Left"]; <answer>Down</answer> -> None"""
    match, known = SHAPE.fullmatch(text), {action.lower(): action for action in actions}
    chosen = [known.get(word.strip().lower()) for word in match[2].split("||")] if match else [None]
    return None if None in chosen else chosen[:limit]

class Trajectory:
    """tau = {s0, a0, r0, s1, ...} as tokens, in four lists that grow together; and what happened in turns."""
    def __init__(self, name, group, seed, noise, tok, cfg):  # waits for its first answer
        self.env = envs.make(name, success_rate=cfg.success_rate)
        self.env.reset(seed, options={"noise": noise})
        self.group, self.left = group, cfg.max_actions  # which of the P prompts; actions left
        self.ids, self.mask = [], []  # every token: messages and answers; did the model write it?
        self.old_logp, self.reward = [], []  # log-prob if sampled; reward on an answer's last token; else 0
        self.turns = []  # dicts: state, answer, valid, reward, tokens
        self.R = self.entropy = 0.0  # eq. 2: sum of all rewards; entropy, summed over the sampled tokens
        self.seen = self.start = 0  # how many ids are in the KV cache; where the present answer begins
        self.done = self.success = False
        self.add(encode(tok, cfg.no_think, message(self.env, cfg, self.left), after_answer=False))

    def add(self, ids, logp=None):  # with log-probs: written by the model, to be trained; without: context
        self.ids += ids
        self.mask += [logp is not None] * len(ids)
        self.old_logp += logp or [0.0] * len(ids)
        self.reward += [0.0] * len(ids)
        self.start = self.start if logp else len(self.ids)
        assert len(self.ids) == len(self.old_logp), "one log-prob per token that the model wrote"

def take_turn(traj, tok, cfg, stop):  # run the answer's actions, reward its last token, append what follows
    env, state, answer = traj.env, traj.env.render(), traj.ids[traj.start:]
    ended = answer[-1] == stop
    text = START[cfg.no_think] + tok.decode(answer[:len(answer) - ended], clean_up_tokenization_spaces=False)
    actions = parse_answer("<think></think>" * cfg.no_think + text, env.actions, cfg.max_actions_per_turn)
    valid, reward = bool(actions), 0.0 if actions else FORMAT_PENALTY  # an invalid answer moves nothing
    while actions and traj.left and not env.over:
        _, r, _, _, info = env.step(actions.pop(0))
        reward, traj.left, traj.success = reward + r, traj.left - 1, info["success"]
    traj.reward[-1], traj.R = reward, traj.R + reward
    traj.turns.append(dict(state=state, answer=text, valid=valid, reward=reward, tokens=len(answer)))
    traj.done = env.over or traj.left == 0 or len(traj.turns) == cfg.max_turns
    if not traj.done:  # encode's ids begin with the end of turn: dropped if the model wrote it itself
        traj.add(encode(tok, cfg.no_think, message(env, cfg, traj.left, reward), True)[int(ended):])

# --------------------------------------------------------------------------------------------------- rollout
class KVCache:
    """Keys and values of all layers, (B,H,S,D): H heads, S columns, D a head's width here. A row's tokens are
    in columns 0, 1, 2, ... without gaps, wherever other rows are. A pass: b rows, q new tokens in each."""
    def __init__(self, B, device):
        self.B, self.device, self.kept = B, device, {}  # `read` sets rows (b,), column (b,q), S of a pass

    def update(self, keys, values, layer, *_):  # a layer gives its new ones (b,H,q,D) and gets all (b,H,S,D)
        new = torch.stack((keys.to(values.dtype), values), 1)  # autocast leaves the keys fp32
        kept = self.kept.get(layer, new.new_zeros(self.B, 2, new.shape[2], 0, new.shape[4]))  # (B,2,H,S,D)
        if kept.shape[3] < self.S:  # grow in steps: a copy of everything for every token would be slow
            kept = torch.nn.functional.pad(kept, (0, 0, 0, self.S + 64 - kept.shape[3]))
        kept[self.rows[:, None], :, :, self.column] = new.permute(0, 3, 1, 2, 4)  # (b,q,2,H,D)
        self.kept[layer], seen = kept, kept[:, :, :, :self.S]
        return (seen if len(self.rows) == self.B else seen.index_select(0, self.rows)).unbind(1)

    def select(self, rows):  # these rows stay; a row may be named more than once
        self.B, self.kept = len(rows), {layer: kept[rows] for layer, kept in self.kept.items()}

def read(policy, cache, trajs, rows, temperature):  # -> log-probs (b,V) of the token that comes next
    """Each row reads its unseen ids; in the cache the pads come *behind* them: not seen, soon overwritten."""
    start, new = [trajs[row].seen for row in rows], [trajs[row].ids[trajs[row].seen:] for row in rows]
    pads = [max(map(len, new)) - len(ids) for ids in new]  # left of the new ids: all end together
    ids = [[0] * n + ids for n, ids in zip(pads, new)]
    rows, start, pads, ids = (torch.tensor(x, device=cache.device) for x in (rows, start, pads, ids))
    column = start[:, None] + (torch.arange(ids.shape[1], device=ids.device) - pads[:, None]) % ids.shape[1]
    cache.rows, cache.column, cache.S = rows, column, int(column.max()) + 1
    mask = torch.arange(cache.S, device=cache.device) <= column[:, None, :, None]  # (b,1,q,S)
    logits = policy(input_ids=ids, attention_mask=mask, position_ids=column, past_key_values=cache,
                    logits_to_keep=1).logits[:, -1]
    return (logits.float() / (temperature or 1)).log_softmax(-1)

@autocast
@torch.no_grad()
def rollout(policy, tok, name, seeds, N, cfg, seed, temperature):  # -> len(seeds) * N trajectories, by group
    """Play N episodes from each seed's state, all at once; nothing is read twice. Temperature 0: greedy."""
    trajs = [Trajectory(name, g, s, noise, tok, cfg) for g, s in enumerate(seeds) for noise in range(N)]
    stop = encode(tok, cfg.no_think, ".", after_answer=True)[0]  # ends a turn: sampled, hence trained
    dice = torch.Generator(cfg.device).manual_seed(seed)
    live, cache = trajs, KVCache(len(seeds), cfg.device)  # a group shares its first message: one of it reads
    logp = read(policy, cache, trajs[::N], range(len(seeds)), temperature).repeat_interleave(N, 0)
    cache.select([traj.group for traj in trajs])
    while live:
        rows = range(len(live))  # that are still writing their answer
        while rows:
            need(logp.max() <= 0, f"a log-prob is {DIVERGED}{cfg.out or 'RUN'}")  # false for nan
            ids = torch.multinomial(logp.exp(), 1, generator=dice) if temperature else logp.argmax(1)[:, None]
            sampled = ids, logp.gather(1, ids), -(logp.exp() * logp).sum(1)
            for row, new_ids, new_logp, entropy in zip(rows, *(x.tolist() for x in sampled)):
                live[row].seen = len(live[row].ids)  # `read` has put all of these into the cache
                live[row].add(new_ids, new_logp)
                live[row].entropy += entropy
            rows = [row for row in rows if live[row].ids[-1] != stop
                    and len(live[row].ids) - live[row].start < cfg.max_new_tokens]
            logp = read(policy, cache, live, rows, temperature) if rows else None
        for traj in live:
            take_turn(traj, tok, cfg, stop)
        cache.select([row for row, traj in enumerate(live) if not traj.done])
        live = [traj for traj in live if not traj.done]
        logp = read(policy, cache, live, range(len(live)), temperature) if live else None
    return trajs

# ------------------------------------- batches, per-token quantities, the filter, advantages, losses, update
def collate(trajs, device):  # -> ids (B,T); mask, old_logp, reward (B,T-1); length (B,1)
    """The only place where lists become tensors, and the only shift: entry t is about token t+1."""
    assert not any(traj.mask[0] for traj in trajs), "nothing precedes the first token: it cannot be trained"
    batch = {key: [torch.tensor(getattr(traj, key)[int(key != "ids"):]) for traj in trajs]
             for key in ("ids", "mask", "old_logp", "reward")}
    batch = {key: torch.nn.utils.rnn.pad_sequence(x, batch_first=True).to(device) for key, x in batch.items()}
    return batch | {"length": torch.tensor([[len(traj.ids)] for traj in trajs], device=device)}

def micro_batches(batch, rows):  # yields rows, and the batch cut to them
    """Rows of similar length go together, as many as MICRO_TOKENS allows: little padding, bounded memory."""
    length = batch["length"][:, 0].tolist()
    rows = sorted(rows.tolist(), key=length.__getitem__)
    while rows:
        fit = [k for k, row in enumerate(rows, 1) if k * length[row] <= MICRO_TOKENS]
        some, rows = rows[:max(fit, default=1)], rows[max(fit, default=1):]
        yield some, {key: x[some, :length[some[-1]] - (key != "ids")] for key, x in batch.items()}

@autocast
def token_logps(policy, part, cfg):  # ids (B,T), mask (B,T-1) -> log pi (n,), entropy (n,)
    """Logits, the largest tensor of all, only where a token is trained, in chunks that backward remakes."""
    def chunk(hidden, ids):  # (c,D), (c,) -> log pi (c,), entropy (c,)
        logp = (policy.get_output_embeddings()(hidden).float() / cfg.temperature).log_softmax(-1)
        return logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    hidden = policy.base_model(input_ids=part["ids"], use_cache=False).last_hidden_state  # none looks at pads
    hidden = hidden[:, :-1][part["mask"]]
    size = max(1, CHUNK_LOGITS // policy.config.vocab_size)
    pairs = zip(hidden.split(size), part["ids"][:, 1:][part["mask"]].split(size))
    return [torch.cat(x) for x in zip(*(checkpoint(chunk, *pair, use_reentrant=False) for pair in pairs))]

@autocast
def token_values(critic, part, cfg):  # ids (B,T), mask (B,T-1) -> value (n,)
    """The critic's forecast before each token. NOTE squeeze: else `value - ret`, (n,1) - (n,), is (n,n)."""
    return critic(input_ids=part["ids"], use_cache=False).logits[:, :-1][part["mask"]].float().squeeze(-1)

@torch.no_grad()
def on_grid(per_token, batch):  # per_token(part) gives (n,), here put in place: -> (B,T-1), else 0
    grid = torch.zeros_like(batch["reward"])
    for rows, part in micro_batches(batch, torch.arange(len(grid))):
        grid[rows, :len(part["mask"][0])] = (0 * part["reward"]).masked_scatter(part["mask"], per_token(part))
    return grid

def logps(policy, batch, cfg):  # -> log pi (B,T-1) of the tokens that the model wrote, else 0
    return on_grid(lambda part: token_logps(policy, part, cfg)[0], batch)

def uncertainty_filter(R, keep):  # (P,N) -> (k,) indices of the kept prompts
    """eq. 7: U(s0) = Std_i R(tau_i). The top share by U, at least one prompt. R is raw, not normalised."""
    U = R.std(dim=1, correction=0)
    return U.argsort(descending=True, stable=True)[:max(1, int(keep * len(R) + 1e-9))].sort().values

def grpo_advantages(R, norm="std"):  # (P,N) -> (P,N)
    """eq. 5: A_i = (R_i - mean) / std of the group, sample std; equal returns give 0, not rounding noise."""
    centered, std = R - R.mean(dim=1, keepdim=True), R.std(dim=1, keepdim=True)
    return torch.where(std > 1e-4, centered / (std + 1e-6), 0.0) if norm == "std" else centered

def gae(reward, value, mask, gamma, lam):  # (B,T-1) x3 -> advantage, return (B,T-1)
    """Generalised advantage: rewards to come minus the forecast. Skips the environment's tokens: no steps."""
    adv, next_adv, next_value = torch.zeros_like(value), value[:, 0] * 0, value[:, 0] * 0
    for t in reversed(range(value.shape[1])):
        delta = reward[:, t] + gamma * next_value - value[:, t]  # the surprise of one step
        next_adv = torch.where(mask[:, t], delta + gamma * lam * next_adv, next_adv)  # A_t, or jump over t
        next_value = torch.where(mask[:, t], value[:, t], next_value)
        adv[:, t] = next_adv * mask[:, t]
    return adv, (adv + value) * mask

def score(trajs, ref, critic, cfg):  # -> batch with adv (B,T-1); PPO: value, ret; with a KL term: kl
    """How much better than expected was every token? Frozen before the first update on these trajectories."""
    batch = collate(trajs, cfg.device)
    mask, penalty = batch["mask"], torch.zeros_like(batch["reward"])
    if ref is not None:  # stay near the first policy: r_t -= kl_coef * k1, k1 = log pi_old - log pi_ref
        batch["kl"] = (batch["old_logp"] - logps(ref, batch, cfg)) * mask
        penalty = -cfg.kl_coef * batch["kl"]
    if cfg.algo == "ppo":
        batch["value"] = on_grid(lambda part: token_values(critic, part, cfg), batch)
        adv, batch["ret"] = gae(batch["reward"] + penalty, batch["value"], mask, cfg.gamma, cfg.lam)
        adv = (adv - adv[mask].mean()) / (adv[mask].std(correction=0) + 1e-8)  # whitening: not in the paper
    else:  # one advantage for the episode, from its group; and the KL penalties from this token to the end
        R = torch.tensor([traj.R for traj in trajs], device=cfg.device).view(-1, cfg.rollouts)
        adv = grpo_advantages(R, cfg.adv_norm).view(-1, 1) + penalty.flip(1).cumsum(1).flip(1)
    return batch | {"adv": adv * mask}

def policy_loss(logp, entropy, old_logp, adv, cfg):  # (n,) x4 -> loss (n,), was it clipped? (n,)
    """eq. 4, 6: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), minus the entropy bonus."""
    ratio = (logp - old_logp).exp()  # pi now / pi at the rollout: no pull beyond the clip range
    surrogate, clipped = ratio * adv, ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * adv
    return -torch.min(surrogate, clipped) - cfg.entropy_coef * entropy, clipped < surrogate

def value_loss(value, old_value, ret):  # (n,) x3 -> (n,). Moving further than VALUE_CLIP never pays
    clipped = old_value + (value - old_value).clamp(-VALUE_CLIP, VALUE_CLIP)
    return 0.5 * torch.max((value - ret) ** 2, (clipped - ret) ** 2)

def update(batch, policy, critic, optimizer, cfg, seed):  # -> statistics of every gradient step
    """Steps on E trajectories each, by micro-batches; a mean over tokens (the paper's: over trajectories)."""
    steps, dice = [], torch.Generator().manual_seed(seed)
    for _ in range(cfg.epochs):
        for rows in torch.randperm(len(batch["ids"]), generator=dice).split(cfg.batch):
            n, stats = int(batch["mask"][rows].sum()), Counter()  # Counter.update adds
            for _, part in micro_batches(batch, rows):
                old = {key: x[part["mask"]] for key, x in part.items() if key not in ("ids", "length")}
                loss, clipped = policy_loss(*token_logps(policy, part, cfg), old["old_logp"], old["adv"], cfg)
                means = {"policy_loss": loss.sum() / n, "clip_fraction": clipped.sum() / n}
                means["policy_loss"].backward()
                if critic is not None:  # a pass of its own: the activations of one model at a time
                    value = token_values(critic, part, cfg)
                    means["value_loss"] = value_loss(value, old["value"], old["ret"]).sum() / n
                    means["value_loss"].backward()
                stats.update({name: mean.item() for name, mean in means.items()})
            norms = [torch.nn.utils.clip_grad_norm_(g["params"], MAX_NORM) for g in optimizer.param_groups]
            need(sum([*norms, *stats.values()]).isfinite(), f"loss or gradient is {DIVERGED}{cfg.out}")
            optimizer.step()
            optimizer.zero_grad()
            steps.append(dict(stats, grad_norm=norms[0].item()))
    return steps

# ------------------------------------------------------------ policies: `tiny` and its cold start; any other
PRIOR = {"planner": 0.2, "habit": 0.5, "sloppy": 0.3}  # who writes a turn, in the last 15% of the cold start
WORLDS = {"frozenlake": 0.4, "sokoban": 0.4, "sokoban_newvocab": 0.08, "bandit": 0.06, "bandit_test": 0.06}
SOUNDS = {"Teacher": "safe", "Librarian": "safe", "Engineer": "risky", "Trader": "risky"}
TOKENIZER = Path(__file__).parent / "figures/tokenizer"  # a token per word, digit, grid cell

def demonstration(tok, rng, prior, max_turns):  # -> Trajectory
    """Turn by turn from `prior`: a planner looks and takes a shortest path; a habit or sloppy one guesses."""
    cfg = Config(model="tiny", device="cpu", max_turns=max_turns, no_think=bool(rng.random() < 1 / 7))
    seed, noise = rng.integers(len(envs.EVAL_SEEDS), 2 ** 31, 2).tolist()
    traj = Trajectory(rng.choice(list(WORLDS), p=list(WORLDS.values())), 0, seed, noise, tok, cfg)
    env = traj.env
    while not traj.done:
        who, path = rng.choice(list(prior), p=list(prior.values())), envs.solve(env)
        if who != "planner" or path is None:
            thought = "I am not sure, let me just try."
            path = rng.choice(env.actions, 1 if isinstance(env, envs.Bandit) else rng.integers(1, 3)).tolist()
        elif isinstance(env, envs.FrozenLake):
            thought, path = f"The goal is {envs.way(env.state, env.goal)}.", path[:rng.integers(1, 6)]
        elif isinstance(env, envs.Sokoban):
            player, (box,), (target,) = *env.state, env.targets
            thought = f"The box is {envs.way(player, box)}. The target is {envs.way(box, target)} of it."
        else:
            path = [env.actions[rng.integers(2)]]
            thought = " ".join(f"{name} sounds {SOUNDS[name]}." for name in env.state)
            thought += f" I choose the {SOUNDS[path[0]]} one."
        answer = " || ".join(path[:5])
        answer = answer if who == "sloppy" else f"<answer>{answer}</answer>"
        text = answer.removeprefix("<answer>") if cfg.no_think else f"{thought}</think>{answer}"
        ids = tok(text + "<|im_end|>").input_ids
        traj.add(ids, [0.0] * len(ids))
        take_turn(traj, tok, cfg, tok.eos_token_id)
    return traj

def cold_start(steps=660, seed=0):  # -> model, tokenizer; supervised (App. C), the last 15% of steps on PRIOR
    tok = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    rng, cfg = np.random.default_rng(seed), Config(model="tiny", device="cpu")
    lessons = [({"planner": 1.0}, 1)] * 8000 + [({"planner": 1.0}, 5)] * 2000 + [(PRIOR, 5)] * 3800
    demos = [demonstration(tok, rng, *lesson) for lesson in tqdm(lessons, "tiny: episodes", leave=False)]
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tok), hidden_size=64, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=True, bos_token_id=None, eos_token_id=tok.eos_token_id))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = {torch.optim.Muon(matrices, weight_decay=0.0): 0.02, torch.optim.AdamW(others): 3e-3}
    for step in tqdm(range(steps), "tiny: cold start (once, then cached)"):
        pool = demos[:-3000] if step < 0.85 * steps else demos[-3000:]
        batch = collate([pool[row] for row in rng.integers(len(pool), size=64)], "cpu")
        for _, part in micro_batches(batch, torch.arange(64)):
            (-token_logps(model, part, cfg)[0].sum() / batch["mask"].sum()).backward()
        for optimizer, lr in optimizers.items():
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 20) * (1 - step / steps)
            optimizer.step()
        model.zero_grad()
    return model, tok

def tiny_folder():  # -> folder of the embedded model, named after its recipe; made whole, once, on first use
    code = envs, message, encode, parse_answer, Trajectory, take_turn, demonstration, cold_start
    texts = *map(inspect.getsource, code), *(file.read_text() for file in sorted(TOKENIZER.iterdir()))
    recipe = hashlib.sha256(repr((texts, START, PRIOR, WORLDS, SOUNDS)).encode()).hexdigest()[:12]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / f"ragen_mini/tiny-{recipe}"
    try:
        transformers.AutoTokenizer.from_pretrained(folder)
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    except Exception:  # not there yet, or damaged
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            for part in cold_start():
                part.save_pretrained(f"{work}/tiny")
            with contextlib.suppress(OSError):  # another process was faster: as good
                os.rename(f"{work}/tiny", folder)
    return folder

def load_models(cfg):  # -> {policy, critic (PPO), ref (KL), optimizer}, tokenizer
    """fp32: 1e-6 steps vanish in bf16. eval: no dropout. Critic: the policy's body, its 1 label the value."""
    source = tiny_folder() if cfg.model == "tiny" else cfg.model
    torch.manual_seed(cfg.seed)  # for the critic's random head; only here: the cold start draws, too
    try:
        tok = transformers.AutoTokenizer.from_pretrained(source)
        policy, *critic = (getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
            source, dtype=torch.float32, num_labels=1).to(cfg.device).eval()
            for kind in ("CausalLM", "TokenClassification")[:1 + (cfg.algo == "ppo")])
    except Exception as error:
        need(False, f"--model {source} cannot be loaded: give a folder (such as RUN/checkpoint), or with "
             f"network a hub id, or tiny ({' '.join(str(error).split())[:90]}...)")
    need(tok.chat_template, f"--model {source} has no chat template: take an instruction-tuned model")
    longest = 16 + max(len(Trajectory(name, 0, 0, 0, tok, cfg).ids) for name in cfg.eval_names)  # 16: Reward
    tokens, room = cfg.max_turns * (longest + cfg.max_new_tokens), policy.config.max_position_embeddings
    need(tokens <= room, f"episodes take up to {tokens} tokens, the model {room}: lower --max-new-tokens")
    ref = copy.deepcopy(policy).requires_grad_(False) if cfg.kl_coef else None
    optimizer = torch.optim.Adam([{"params": model.parameters(), "lr": lr} for model, lr in
                                  zip((policy, *critic), (cfg.lr, cfg.critic_lr))])
    return dict(policy=policy, critic=critic[0] if critic else None, ref=ref, optimizer=optimizer), tok

# ------------------------------------------------------------------------------------- evaluate, log, train
def evaluate(policy, tok, when, samples, cfg):  # -> {environment: success on its evaluation levels}
    result = {}
    for name in cfg.eval_names:
        trajs = rollout(policy, tok, name, envs.EVAL_SEEDS[:cfg.eval_prompts], 1, cfg, 0, 0.5)  # Sec. 3.2
        result[name] = sum(traj.success for traj in trajs) / len(trajs)
        plots.say(f"{when:9} {plots.eval_line(name, result[name], asdict(cfg))}")
        for traj in trajs[:2]:  # whole episodes, to be read
            row = dict(when=when, env=name, success=traj.success, R=traj.R, turns=traj.turns)
            print(json.dumps(row | {"text": tok.decode(traj.ids)}), file=samples, flush=True)
    return result

def mutual_information(trajs, policy, tok, cfg):  # -> nats, at most log of the number of prompts; or None
    """RAGEN-2 (arXiv 2604.06268): I(X;Z) of first prompts x and thoughts z; 0: thoughts ignore the prompt.
    Mean of log p(z|its own x), minus log of the mean p(z|x) over all distinct x. Well-formed turns only."""
    first = [(traj, traj.turns[0], traj.mask.index(True)) for traj in trajs if traj.turns[0]["valid"]]
    if cfg.no_think or not first:
        return None
    prompts, own, pairs = list(dict.fromkeys(tuple(traj.ids[:n]) for traj, _, n in first)), [], []
    for traj, turn, n in first:
        z, text = traj.ids[n:n + turn["tokens"]], turn["answer"].split("</think>")[0]
        while not text.startswith("<think>" + tok.decode(z, clean_up_tokenization_spaces=False)):
            z.pop()  # the answer
        own.append(prompts.index(tuple(traj.ids[:n])))
        pairs += [argparse.Namespace(ids=[*x, *z], mask=[False] * len(x) + [True] * len(z), old_logp=[0.0],
                                     reward=[0.0] * (len(x) + len(z))) for x in prompts]
    logp = logps(policy, collate(pairs, cfg.device), cfg).sum(1).view(len(own), len(prompts))
    return (logp[range(len(own)), own] - logp.logsumexp(1)).mean().item() + np.log(len(prompts))

def self_check(trajs, policy, cfg):  # the invariants that silent bugs break, on the first rollout
    batch = collate(trajs[:16], cfg.device)
    gap = (logps(policy, batch, cfg) - batch["old_logp"])[batch["mask"]].abs()  # bf16 rounds
    small = gap.max() * cfg.temperature < 1e-4 if cfg.device == "cpu" else gap.mean() < 0.05
    assert small, f"ratio not 1, log-probs differ by {gap.max():.1e}: perhaps the model rescales its logits"
    assert len({(t.group, t.turns[0]["state"]) for t in trajs}) == trajs[-1].group + 1, "one state per group"
    for traj in trajs:
        assert abs(sum(traj.reward) - traj.R) < 1e-4, "the rewards on the tokens must add up to the return"
        assert sum(traj.mask) == sum(turn["tokens"] for turn in traj.turns), "trained = sampled tokens"

def iterate(i, policy, critic, ref, optimizer, tok, cfg):  # -> row i of log.jsonl, trajectories, batches
    start, batches, steps = time.perf_counter(), [], []
    rng = np.random.default_rng([cfg.seed, i])
    *seeds, draw = rng.integers(len(envs.EVAL_SEEDS), 2 ** 31, cfg.prompts * cfg.online_k + 1).tolist()
    trajs = rollout(policy, tok, cfg.env, seeds, cfg.rollouts, cfg, draw, cfg.temperature)
    R = torch.tensor([traj.R for traj in trajs]).view(-1, cfg.rollouts)  # (kP,N)
    row = {"iteration": i, "seconds_rollout": time.perf_counter() - start}
    need(R.isfinite().all(), f"a return is {DIVERGED}{cfg.out}")
    if i == 1:
        self_check(trajs, policy, cfg)
    if cfg.mi_every and i % cfg.mi_every == 0:
        row["mutual_information"] = mutual_information(trajs, policy, tok, cfg)
    start = time.perf_counter()
    for first in range(0, len(R), cfg.prompts):  # slices of P prompts: k of them, see online_k
        kept = first + uncertainty_filter(R[first:first + cfg.prompts], cfg.keep)
        if cfg.rollouts == 1 or R[kept].std(1).max() > 1e-4:  # else no kept group has any spread: skipped
            batches.append(score([traj for traj in trajs if traj.group in kept], ref, critic, cfg))
            steps += update(batches[-1], policy, critic, optimizer, cfg, draw + first)
    row["seconds_update"] = time.perf_counter() - start
    return row | plots.statistics(trajs, R, batches, steps), trajs, batches

def ask_to_stop(number, _):  # once the iteration is finished and saved; a second signal does not wait
    STOP.append(number)
    signal.signal(number, signal.SIG_DFL)
    plots.say("stopping at the next save, after this iteration; once more: at once")

def train(cfg):  # -> the rows of log.jsonl. Row 0: the evaluation before training; row i: iteration i
    parts, tok = load_models(cfg)
    if cfg.eval_only:
        return [{"iteration": 0, "eval": evaluate(parts["policy"], tok, "eval", open(os.devnull, "w"), cfg)}]
    cfg, log, samples, rows = plots.open_run(cfg, parts)
    print(f"{cfg.model}, {cfg.device}: {cfg.out}\n{plots.explain(cfg)}")
    last, title = cfg.iterations, "StarPO" + "-S" * cfg.starpo_s
    with log, samples, tqdm(total=last, desc=title, initial=max(0, len(rows) - 1)) as bar:
        for i in range(len(rows), last + 1):
            rows.append(iterate(i, *parts.values(), tok, cfg)[0] if i else {"iteration": 0})
            plots.warn_of_collapse(rows)
            if cfg.eval_every and (i % cfg.eval_every == 0 or i == last):
                when = {0: "before", last: "after"}.get(i, f"iter {i}")
                rows[-1]["eval"] = evaluate(parts["policy"], tok, when, samples, cfg)
            print(json.dumps(rows[-1]), file=log, flush=True)
            stop = STOP[:] if i < last else []
            if i % cfg.save_every == 0 or i == last or stop:  # 0, too: is the disk writable?
                plots.save(tok, parts, cfg)
            if stop:
                plots.say(f"Go on: python ragen_mini.py --resume {cfg.out}")
                raise SystemExit(128 + stop[0])
            bar.update(i > 0)
            bar.set_postfix({key: f"{rows[-1][key]:.2f}" for key in ("reward", "success", "entropy") if i})
    skipped = sum(row.get("updates") == 0 for row in rows)  # no group had any spread
    print(f"{plots.curves([cfg.out])}; log.jsonl, samples.jsonl, checkpoint/; iterations skipped: {skipped}")
    return rows

if __name__ == "__main__":
    try:
        config = parse_config()
        for number in () if config.eval_only else (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, ask_to_stop)
        train(config)
    except (OSError, SafetensorError) as error:  # a full disk, for example; bugs keep their traceback
        need(False, f"{error}. A run that has begun goes on from its last checkpoint: --resume RUN")
