"""The exercises of tutorial.ipynb: the shipped function that solves each, how its inputs are drawn
(at random, around one corner case after the other), and what counts of what an answer returns.

answers.txt has usual mistakes.
"""
import copy
import functools
import itertools
import math
from types import SimpleNamespace

import numpy as np
import torch
import transformers

import ragen_mini
from support import loading
from checks import Exercise, envs, given, results, rm, text_of

# Of the training run, where an answer says nothing else.
SETTINGS = dict(env="frozenlake", iterations=40)
MOST_ITERATIONS = 60


def settings_of(**changes):
    """Stands for a Config, with what the small functions ask for."""
    values = dict(clip_low=0.2, clip_high=0.2, entropy_coef=0.0, temperature=1.0, rollouts=2,
                  gamma=1.0, lam=1.0, device="cpu", micro_tokens=16)
    return SimpleNamespace(**values | changes)


def normal(g, *shape, scale=1.0):  # numbers that can be read: one digit behind the point
    numbers = np.round(scale * g.normal(size=shape), 1)
    return torch.tensor(numbers + 0.0).float()  # + 0.0: no -0.0


def whole(g, low, high, n=None):  # from low up to high
    return g.integers(low, high + 1, n).tolist()


def pick(g, *values):
    return values[g.integers(len(values))]


def in_turn(i, *values):
    return values[i % len(values)]


def nothing(g, i):  # the inputs of an answer that has none
    return {}


# ------------------------------------------------------------------------------------ environments
def solve(env):
    """Breadth first: a shortest list of actions from env.state to success, as if nothing slipped.
    """
    paths = {env.state: []}
    queue = [env.state]
    for state in queue:  # the list grows while we walk along it
        for action in env.actions:
            _, new, _, over = env.outcomes(state, action)[0]
            if new in paths:
                continue
            paths[new] = paths[state] + [action]
            if env.won(new):
                return paths[new]
            if not over:
                queue.append(new)


def level_7():
    room = envs.make("sokoban")
    room.reset(7)
    return room


def solve_level_7():
    return solve(level_7())


def play_moves(answer):
    moves = list(given(answer()))
    room = level_7()
    info = {"success": False}
    for move in moves[:10]:
        if not room.over:
            _, _, _, _, info = room.step(move)
    return {"at most 10 actions": len(moves) <= 10, "solved": info["success"]}


def beside_something(g, i):  # a lake, a cell beside its goal or a hole, an action
    chance = in_turn(i, 0.8, 0.5, 1 / 3, 1.0, 0.6)
    env = envs.FrozenLake(size=3 + i % 4, success_rate=chance)
    env.reset(whole(g, 0, 99))
    ends = [env.level["goal"], *env.level["holes"]]
    cells = itertools.product(range(env.size), repeat=2)
    ice = [cell for cell in cells if cell not in ends]
    end = in_turn(i % 3, *ends)
    near = [cell for cell in ice if math.dist(cell, end) == 1]
    state = pick(g, *near or ice)
    action = pick(g, *env.actions)
    if i % 4 == 3 and (0, 0) in ice:  # where two of three ways end at the edge
        state, action = (0, 0), pick(g, "Left", "Up")
    return dict(env=env, state=state, action=action)


def one_step(answer, env, state, action):
    total = {}
    listed = given(answer(env, state, action))
    for chance, cell, reward, over in listed:
        if chance == 0:
            continue  # it cannot happen: one may list it or not
        place = str(type(cell)(map(int, cell)))  # a cell is a tuple: [0, 1] is never the goal
        before, *_ = total.get(place, [0.0])
        total[place] = [before + float(chance), float(reward), bool(over)]
    _, intended, _, _ = listed[0]
    return {"intended": list(intended), "cell: chance, reward, over?": total}


class WindyLake(envs.FrozenLake):
    """Nothing slips, but with probability 0.3 the wind blows you down, whatever you do.

    In the three shipped games all that a random player may meet averages out, so that the
    probabilities hardly matter to it. Here they do.
    """
    def outcomes(self, state, action):
        _, *intended = super().outcomes(state, action)[0]
        _, *blown = super().outcomes(state, "Down")[0]
        return [(0.7, *intended), (0.3, *blown)]


class Shore(envs.FrozenLake):
    """Whoever walks against the edge leaves the lake: the episode is over, in the same state."""
    def outcomes(self, state, action):
        listed = super().outcomes(state, action)
        return [(chance, new, reward, over or new == state) for chance, new, reward, over in listed]


def some_environment(g, i):
    name = in_turn(i, "frozenlake", "sokoban", Shore, WindyLake, "bandit", "bandit_rev")
    env = envs.make(name, success_rate=pick(g, 1 / 3, 0.8, 0.9))
    env.reset(whole(g, 0, 99))
    horizon = in_turn(i, 10, 4, 3, 5, 2)  # ten actions: who keeps no results needs hours
    return dict(env=env, horizon=horizon)


def both_players(answer, env, horizon):
    players = zip(("random", "optimal"), given(answer(env, horizon)), strict=True)
    return {name: list(map(float, chances)) for name, chances in players}


# -------------------------------------------------------------------------------------------- words
TEXT = dict(before="", thought="<think>x</think>", gap="", tag="<answer>", answer="Down",
            end="</answer>", behind="")
INSTEAD = {  # part of the text: what stands there in a corner case
    "answer": [
        "down || Left", " Up ||Left", " UP ", "\tUp\t||\nLeft", "Up||Up||Up||Up||Up||Left",
        "Up||Up||Up||Up||jump", "U p", "U-p", "Down || jump", "", "Down||", "Up||Up||Up||Up||Up||",
        "Up Down", "Up | Left", "Up, Left", "go ON", "1 < 2", "\nDown\n", "Down.", "D", "Up|||Left",
        "Up||Up||Up||Up||Up||U p", "Up||Up||Up||Up||Up||go 2 steps!",
        "Up||Up||Up||Up||Up</answer><answer>Down"],
    # The tags are left to rm.ANSWER. Whoever does without it meets these.
    "thought": ["<think>a < b > c</think>", "<think>two\nlines</think>", "", "<think>x",
                "<think>x</think></think>", "<think>an <answer> in it</think>"],
    "before": [" ", "So: "],
    "gap": ["\n\n", "so"],
    "behind": [" \t\n", " and more", "<answer>Up</answer>"],
    "tag": ["<Answer>"],
    "end": [""]}
CORNERS = [(part, text) for part, texts in INSTEAD.items() for text in texts]


def some_text(g, i):
    """One corner case in the notebook, then up to two at once."""
    hidden = i >= len(CORNERS)
    corners = [in_turn(i, *CORNERS)]
    if hidden and g.random() < 0.5:
        corners += [pick(g, *CORNERS)]
    text = "".join((TEXT | dict(corners)).values())
    actions = in_turn(i, ("Up", "down", "LEFT", "Go on"), ("Up", "Down", "Left", "Right"))
    return dict(text=text, actions=actions, limit=3 + i % 2 + hidden)


# ------------------------------------------------------------------------------------------- tokens
PER_TOKEN = ("ids", "mask", "old_logp", "reward")


def some_pieces(g, i):  # [(ids, who, log-probability), ...]: message, tokens of the answer, ...
    pieces = []
    for _ in range(1 + i % 3):
        message = whole(g, 0, 8, n=whole(g, 1, 4))
        pieces.append((pick(g, list, tuple)(message), False, 0.0))
        for token in whole(g, 0, 3, n=whole(g, 1, 4)):
            logp = 0.0 - 0.1 * whole(g, 0, 9)
            pieces.append(([token], True, logp))
    if i % 2:
        pieces.append(([0, 5], False, 0.0))
    return dict(pieces=pieces)


def written(traj, pieces):
    for ids, sampled, logp in pieces:
        if sampled:
            traj.append(ids, True, logp)
        else:
            traj.append(ids, sampled=False)
    return traj


def record(answer, pieces):
    if "append" not in vars(answer):
        raise ValueError("the class has no `append` of its own")
    traj = written(answer(None, 0, 10), pieces)
    found = {name: getattr(traj, name) for name in vars(rm.Trajectory(None, 0, 10))}
    return found | {f"{name} is a list": isinstance(found[name], list) for name in PER_TOKEN}


def episodes(g, P, N):  # 0 ends a turn, and is the padding
    trajs = []
    for number in range(P * N):
        traj = rm.Trajectory(None, number // N, 10)
        for _ in range(whole(g, 1, 3)):
            written(traj, some_pieces(g, 0)["pieces"])
            traj.reward[-1] = 0.5 * whole(g, -1, 4)
            traj.turns.append({"reward": traj.reward[-1]})
        trajs.append(traj)
    return trajs


def float32(**tensors):  # what the networks' numbers can be written into
    return {f"{name} is float32": torch.as_tensor(x).dtype == torch.float32
            for name, x in tensors.items()}


def to_collate(g, i):
    return dict(trajs=episodes(g, 1, 1 + i % 3), device="cpu")


def make_batch(answer, trajs, device):
    batch = given(answer(trajs, device))
    found = {key: batch[key] for key in ("inputs", "targets", "mask", "old_logp", "reward")}
    found |= float32(old_logp=batch["old_logp"], reward=batch["reward"])
    kind = getattr(batch["inputs"], "dtype", None)
    found["inputs may be looked up"] = kind in (torch.int64, torch.int32)
    # Behind an episode's end any tokens will do, but no -100.
    last = torch.tensor([len(traj.ids) - 1 for traj in trajs])
    behind = torch.arange(last.max()) >= last[:, None]
    for key in ("inputs", "targets"):
        x = found[key]
        if isinstance(x, torch.Tensor) and x.shape == behind.shape:
            found[key] = x.masked_fill(behind.to(x.device) & (x >= 0), 0)
    return found


@functools.cache
def random_networks(seed):  # with a vocabulary of nine -> policy, critic
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_labels=1, max_position_embeddings=64, bos_token_id=None,
        eos_token_id=2, pad_token_id=None)
    policy = transformers.LlamaForCausalLM(config)
    policy.lm_head.weight.data *= 60  # new ones find all tokens about equally likely
    critic = transformers.LlamaForTokenClassification(config)
    return policy.eval(), critic.eval()


def networks(g):  # -> policy, critic: new ones, whatever an answer did to others
    return copy.deepcopy(random_networks(whole(g, 0, 3)))


def random_batch(g, B, T=7):  # rows of different lengths; the first token is the environment's
    mask = torch.tensor(g.random((B, T)) < 0.7)
    lengths = torch.tensor(whole(g, 3, T, n=B))
    mask &= torch.arange(T) < lengths[:, None]
    mask[:, 0] = False
    mask[:, 1] = True
    inputs, targets = torch.tensor(whole(g, 0, 8, n=(2, B, T)))
    return {"inputs": inputs, "targets": targets, "mask": mask}


def choices(g, i):
    policy, _ = networks(g)
    cfg = settings_of(temperature=in_turn(i, 1.0, 0.5, 0.02, 2.0, 0.7))
    part = random_batch(g, 1 + i % 3)
    if i % 6 == 3:  # a single token
        part["mask"].fill_(False)[0, 1] = True
    return dict(policy=policy, part=part, cfg=cfg)


def logps_and_entropies(answer, *inputs):
    found = results("logp", "entropy")(answer, *inputs)
    return found | float32(**found)


# --------------------------------------------------------------------------------- how good was it?
def estimated_slope(risky, reward, x, weight):
    """By the policy gradient, of a bandit that is pulled several times in an episode."""
    R = reward.sum(1, keepdim=True)
    weights = {"return": R, "constant": R - 1, "group": R - R.mean(),
               "to come": reward.flip(1).cumsum(1).flip(1)}
    score = torch.where(risky, 1 / x, -1 / (1 - x))
    return (weights[weight] * score).sum(1).mean()


def pulls(g, i):
    N, T = in_turn(i, (2, 2), (3, 5), (4, 3), (16, 5), (2, 1))
    x = in_turn(i, 0.5, 0.25, 0.8)
    risky = torch.tensor(g.random((N, T)) < x)
    reward = torch.where(risky, normal(g, N, T), 0.15)
    return dict(risky=risky, reward=reward, x=x,
                weight=in_turn(i, "return", "to come", "group", "constant"))


def a_number(answer, *inputs):
    return {"returned": float(given(answer(*inputs)))}


def group_returns(g, P, N, power=1):  # rows of different means and spreads
    spread = torch.tensor(whole(g, 1, 9, n=P))
    mean = torch.tensor(whole(g, -9, 9, n=P))
    return normal(g, P, N) ** power * spread[:, None] + mean[:, None]


def groups(g, i):
    P = in_turn(i, 2, 3, 4, 3, 1)
    R = group_returns(g, P, N=whole(g, 3, 6))
    if P > 1:
        R[0] = pick(g, 10.9, -0.1, 5.3)  # equal returns
    if P == 3:
        R[0, -1] += 1e-6  # but for rounding
        R[1] = 0
        R[1, 0] = -0.1  # but for one invalid answer
    if P == 1:  # one among as many as in training
        R = torch.zeros(1, 16)
        R[0, whole(g, 0, 15)] = in_turn(i // 5, -0.1, 0.01, 1.0)
    norm = in_turn(i, {"norm": "std"}, {}, {"norm": "mean"})  # {}: the default counts
    return dict(R=R) | norm


def groups_to_filter(g, i):
    P = in_turn(i, 4, 3, 8, 7, 5, 100, 6)
    keep = in_turn(i, 0.5, 0.25, 0.3, 0.5, 0.67, 0.29, 1.0)
    if i > 1000 and i % 2:  # of the hidden ones: any size, any share
        P = whole(g, 3, 40)
        keep = whole(g, 1, 100) / 100
    R = group_returns(g, P, 6, power=3)
    if i % 7 == 3:
        R[1:] = R[0].roll(1)  # alike but for their order
    if i % 7 == 6:
        R[::2] = 0.15  # all equal
    return dict(R=R, keep=keep)


def kept_groups(answer, R, keep):
    kept = given(answer(R, keep))
    if not isinstance(kept, torch.Tensor) or kept.is_floating_point():
        raise TypeError("should return a tensor with the numbers of the kept groups")
    U = dict(enumerate(R.std(1).tolist()))
    chosen = set(kept.tolist())  # where some differ equally, any of them will do
    return {"how many are kept": len(kept), "numbers of no group": sorted(chosen - U.keys()),
            "U of the kept": sorted(U[k] for k in chosen & U.keys())}


def steps(g, i):  # the environment's tokens have values that must not matter
    B = 2 + i % 2
    T = in_turn(i, 6, 6, 6, 6, 6, 300)
    mask = torch.tensor(g.random((B, T)) < 0.6)
    mask[0, T // 2] = False
    if i % 3 == 0:
        mask[1] = False  # the model wrote nothing there
    value = normal(g, B, T).where(mask, torch.tensor(pick(g, 50.0, -77.0)))
    reward = normal(g, B, T) * mask + 0.0
    reward[0] *= 10  # as large as a win in Sokoban
    gamma = in_turn(i, 0.9, 1.0, 0.5)
    lam = in_turn(i, 0.8, 1.0, 0.95, 0.0)
    if i % 6 == 3:  # a value that never changes, and is right: some advantages are exactly 0
        value[mask] = 10.0
        reward.fill_(0.0)
        gamma = 1.0
    return dict(reward=reward, value=value, mask=mask, gamma=gamma, lam=lam)


# --------------------------------------------------------------------------------------- the update
def ratios(g, i, n=8):
    cfg = settings_of(clip_low=pick(g, 0.1, 0.2), clip_high=pick(g, 0.28, 0.35))
    cfg.entropy_coef = in_turn(i, 0.03, 0.0, 0.2)
    low, high = 1 - cfg.clip_low, 1 + cfg.clip_high
    edges = [low, low, 1.0, 1 + cfg.clip_low, high, high]
    ratio = g.choice(edges, n) * g.choice([0.96, 1.04], n)
    ratio[:4] = in_turn(i, (0.5, 0.5, 1.5, 1.5), (0.1, 0.1, 5.0, 5.0))
    old_logp = normal(g, n) - 3
    adv = normal(g, n)
    adv[:5] = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
    # Two tokens that hardly ever are sampled. In some cases the second has become likely since.
    old_logp[5:7] -= 27
    adv[5:7] = torch.tensor([1.0, -1.0])
    if i % 6 == 5:
        ratio[6] = math.exp(12)
    logp = old_logp + torch.tensor(ratio).float().log()
    entropy = normal(g, n).abs()
    logp.requires_grad_()
    entropy.requires_grad_()
    return dict(logp=logp, entropy=entropy, old_logp=old_logp, adv=adv, cfg=cfg)


def moved_values(g, i, n=8):
    old_value = normal(g, n)
    moved = torch.tensor(g.choice([-2.0, -1.2, -0.7, 0.7, 1.2, 2.0], n)).float()  # 1.0: the limit
    value = old_value + rm.VALUE_CLIP * moved
    target = old_value + normal(g, n, scale=2.0) + 0.037
    return dict(value=value.requires_grad_(), old_value=old_value, target=target)


def batch_to_learn(g, i):
    """In several parts, with and without a critic. Ratios and values are beyond what is clipped."""
    policy, critic = networks(g)
    if i % 3 == 0:
        critic = None
    cfg = settings_of(entropy_coef=0.1, temperature=0.7)
    batch = random_batch(g, 5)
    batch["reward"] = torch.zeros(5, 7)
    logp = rm.per_token(lambda part: rm.token_logps(policy, part, cfg)[0], batch, cfg)
    batch["old_logp"] = logp + normal(g, 5, 7, scale=0.4)
    batch["adv"] = normal(g, 5, 7)
    if critic is not None:
        batch |= {"value": normal(g, 5, 7), "value_target": normal(g, 5, 7)}
    rows = g.permutation(5)[:4].tolist()  # one is not in this step
    models = rm.Models(policy, critic, None, torch.optim.SGD(policy.parameters()), None)
    return {"batch": batch, "rows": rows, "models": models, "cfg": cfg}


def passes(answer, batch, rows, models, cfg):
    """Are the parts read one at a time, and is each one's gradient there before the policy reads
    the next?
    """
    most = max(len(some) for some, _ in rm.micro_batches(batch, rows, cfg.micro_tokens))
    read, done = [], []

    def look(network, _, output):
        read.append(len(output.last_hidden_state))
        if network is models.policy.base_model:
            done.append(models.policy.lm_head.weight.grad is not None)
    models.policy.base_model.register_forward_hook(look)
    if models.critic is not None:
        models.critic.base_model.register_forward_hook(look)
    log = given(answer(batch, rows, models, cfg))
    numbers = isinstance(log, dict) and all(torch.as_tensor(x).ndim == 0 for x in log.values())
    return {"returns a dict of numbers": numbers,
            "reads a part at a time": max(read, default=0) <= most,
            "backward before the next part": all(done[1:])}


def gradients(g, i):
    """Of different lengths in policy and critic (none in every third case); the optimizer moves by
    them.
    """
    policy = with_gradient(g, in_turn(i, 3.0, 0.9, 50.0, 1.7, 0.3))
    groups = [dict(params=policy.parameters(), lr=0.5)]
    critic = None
    if i % 3:
        critic = with_gradient(g, in_turn(i, 0.9, 3.0, 1.7, 0.3, 50.0))
        groups.append(dict(params=critic.parameters(), lr=0.25))
    optimizer = torch.optim.SGD(groups, weight_decay=0.1)
    return dict(models=rm.Models(policy, critic, None, optimizer, None))


def with_gradient(g, length):
    network = torch.nn.Linear(3, 1)
    gradient = torch.tensor(g.normal(size=4)).float()
    gradient *= length / gradient.norm()
    network.weight.data, network.weight.grad = normal(g, 1, 3), gradient[None, :3]
    network.bias.data, network.bias.grad = normal(g, 1), gradient[3:]
    return network


def usual_settings():
    return dict(SETTINGS)


def accepted(answer):
    own = given(answer())
    settings = SETTINGS | own
    cfg = ragen_mini.Config(**settings | dict(model="tiny", device="cpu"))
    return {"something of your own": len(own) > 0,
            "it trains, from the beginning": cfg.trains and not cfg.resume,
            f"at most {MOST_ITERATIONS} iterations": cfg.iterations <= MOST_ITERATIONS,
            "evaluated before and after, on all levels":
                cfg.eval_every > 0 and cfg.eval_prompts == 256,
            "an environment of the project": cfg.env in envs.ENVS}


# ------------------------------------------------------------------------------------- bugs to hunt
BUGS = {  # function: the piece of the shipped code, what stands there instead
    "returns": (".view(-1, cfg.rollouts)", ".view(cfg.rollouts, -1).T.contiguous()"),
    "compute_advantages": ("adv[mask].mean(), adv[mask].std(correction=0)",
                           "adv.mean(), adv.std(correction=0)"),
    "sample": ("torch.multinomial(next_logps.exp(), 1, generator=generator)",
               "next_logps.argmax(1, keepdim=True)"),
    "take_turn": ("traj.reward[-1] =", "traj.reward[traj.answer_start] =")}


def played(g, i):
    N = 2 + i % 3
    trajs = episodes(g, in_turn(i, 4, 4, 5), N)
    return dict(trajs=trajs, cfg=settings_of(rollouts=N))


def to_judge(g, i):
    policy, critic = networks(g)
    trajs = episodes(g, 2, 3)
    algo = in_turn(i, "ppo", "ppo", "grpo")
    cfg = settings_of(algo=algo, uses_critic=algo == "ppo",
                      adv_norm=in_turn(i // 3, "mean", "std"), kl_coef=0.3, gamma=0.9, lam=0.8,
                      device="cpu", rollouts=3)
    ref = None
    if i % 2:
        ref, _ = networks(g)
    if i % 6 == 4:  # the critic is right, and the advantages of a trajectory are exactly 0
        critic.score.weight.data.zero_()
        critic.score.bias.data.zero_()
        trajs[0].reward = [0.0] * len(trajs[0].ids)
    models = rm.Models(policy, critic, ref, None, None)
    return dict(trajs=trajs, R=rm.returns(trajs, cfg), models=models, cfg=cfg)


def judged(answer, *inputs):
    batch = given(answer(*inputs))
    names = ("adv", "value", "value_target", "kl", "mask", "reward")
    return {name: batch[name] for name in names if name in batch}


def next_tokens(g, i, V=5):  # of two distributions in turn
    logp = normal(g, 2, V, scale=1.5).log_softmax(-1)
    return dict(logp=logp.repeat(1000, 1), seed=whole(g, 0, 9999))


def chi_square(tokens, p):  # between how often the tokens were drawn and their probabilities
    count = torch.bincount(tokens, minlength=len(p))
    expected = len(tokens) * p
    return ((count - expected) ** 2 / expected).sum().item()


def drawn(answer, logp, seed):
    """Many draws: as often as their probabilities say, and by the generator alone?"""
    trajs = []
    for _ in logp:
        traj = rm.Trajectory(None, 0, 10)
        traj.append([7], sampled=False)
        trajs.append(traj)
    first = torch.Generator().manual_seed(seed)
    twin = torch.Generator().manual_seed(seed)
    for generator in (first, first, twin):
        torch.manual_seed(len(trajs[0].ids))  # the global dice must not matter
        answer(trajs, logp, generator)
    tokens = torch.tensor([traj.ids[1:] for traj in trajs])
    noted = torch.tensor([traj.old_logp[1:] for traj in trajs])
    distance = sum(chi_square(tokens[i::2, 0], logp[i].exp()) for i in (0, 1))
    return {"always the likeliest token": tokens[:, 0].equal(logp.argmax(1)),
            # Right ones are beyond 40 once in 300,000.
            "as often as their probabilities (chi-square)": distance < 40,
            "the same generator, the same tokens": tokens[:, 0].equal(tokens[:, 2]),
            "the generator goes on": not tokens[:, 0].equal(tokens[:, 1]),
            "each one its own log-probability": noted.allclose(logp.gather(1, tokens)),
            "entropy": torch.tensor([traj.entropy for traj in trajs[:2]]),
            "mask": [traj.mask for traj in trajs[-2:]]}


@functools.cache
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(loading.TINY)


TURNS = (  # what `tiny` says after <think>; `solve` becomes what wins
    dict(says="solve || Left"),
    dict(says="Down"),
    dict(text="I go . <|im_end|>"),
    dict(says="Left", tokens=5),
    dict(says="Up || Left", env="sokoban"),
    dict(says="solve", env="sokoban"),
    dict(says="Left", max_turns=1),
    dict(says="Left || Left", max_actions=1),
    dict(says="Left || Left", max_actions=2),
    dict(says="Up || Down || Right"),
    dict(says="Left", before="jump"))


ANSWER = "I go . </think> <answer> {} </answer> <|im_end|>"


def speak(traj, tok, text, most=40):
    for token in tok(text).input_ids[:most]:
        traj.append([token], True, -1.0)


def a_turn(g, i):
    usual = dict(env="frozenlake", says="", text="", tokens=40, max_turns=5, max_actions=10)
    turn = usual | in_turn(i, *TURNS)
    cfg = rm.Config(model="none", device="cpu", max_new_tokens=turn["tokens"],
                    max_turns=turn["max_turns"], max_actions=turn["max_actions"], success_rate=1.0,
                    iterations=1, lr=1e-3, critic_lr=1e-3)
    tok = tokenizer()
    traj, way = short_way(g, turn["env"], tok, cfg)
    ends = [tok.convert_tokens_to_ids("<|im_end|>")]
    if "before" in turn:
        speak(traj, tok, ANSWER.format(turn["before"]))
        rm.take_turn(traj, tok, cfg, ends)
    moves = turn["says"].replace("solve", " || ".join(way))
    speak(traj, tok, turn["text"] or ANSWER.format(moves), turn["tokens"])
    return dict(traj=traj, tok=tok, cfg=cfg, ends=ends)


def short_way(g, env, tok, cfg):  # -> an episode that begins, two or three actions from its goal
    for seed in whole(g, 0, 99, n=50):
        traj = rm.begin(seed, 0, 0, tok, rm.replace(cfg, env=env))
        way = solve(traj.env)
        if 1 < len(way) < 4:
            break
    return traj, way


def act(answer, *inputs):
    answer(*inputs)
    return {}  # what it does is seen in the inputs


# ---------------------------------------------------------------------------------------- on paper
def expected_advantages(N=4):
    """Of the only risky pull in a group of N. (It pays 1 in a quarter of the cases, the sure arm
    0.15.)
    """
    means = []
    for norm in ("mean", "std"):
        R = torch.full((2, N), 0.15)
        R[:, 0] = torch.tensor([1.0, 0.0])  # paid, not paid
        paid, unpaid = rm.grpo_advantages(R, norm)[:, 0].tolist()
        means.append(0.25 * paid + 0.75 * unpaid)
    return tuple(means)


def on_paper(answer):
    found = results("mean only", "divided by the std")(answer)
    return {name: round(float(number), 3) for name, number in found.items()}


# name, title, points, the shipped function, how inputs are drawn, what counts of an answer
EXERCISES = {exercise.name: exercise for exercise in [
    Exercise("moves", "0 play", 0.5,
             solve_level_7, nothing, play_moves, shown=1, show_spec=False),
    Exercise("outcomes", "1 the rules of the ice", 1,
             envs.FrozenLake.outcomes, beside_something, one_step, shown=12),
    Exercise("yardsticks", "2 random and optimal play", 1.5,
             envs.yardsticks, some_environment, both_players),
    Exercise("parse_answer", "3 words become actions", 0.5,
             rm.parse_answer, some_text, results("actions"), shown=len(CORNERS)),
    Exercise("Trajectory", "4 who wrote which token", 0.5,
             rm.Trajectory, some_pieces, record),
    Exercise("collate", "5 the shift", 1,
             rm.collate, to_collate, make_batch, everywhere=True),
    Exercise("token_logps", "6 log-probabilities and entropy", 1,
             rm.token_logps, choices, logps_and_entropies, everywhere=True),
    Exercise("slope", "7 the slope of a bandit", 1,
             estimated_slope, pulls, a_number, shown=12),
    Exercise("grpo_advantages", "8 advantages from the group", 1.5,
             rm.grpo_advantages, groups, results("advantages")),
    Exercise("uncertainty_filter", "8 the filter of StarPO-S", 0.5,
             rm.uncertainty_filter, groups_to_filter, kept_groups, shown=7),
    Exercise("gae", "9 advantages from a critic", 3,
             rm.gae, steps, results("advantage", "target"), everywhere=True),
    Exercise("policy_loss", "10 the clipped objective", 1.5,
             rm.policy_loss, ratios, results("loss", "clipped"), everywhere=True),
    Exercise("value_loss", "11 the critic's loss", 0.5,
             rm.value_loss, moved_values, results("loss"), everywhere=True),
    Exercise("add_gradients", "12 gradients by micro-batches", 1.5,
             rm.add_gradients, batch_to_learn, passes),
    Exercise("take_step", "12 the step", 0.5,
             rm.take_step, gradients, a_number),
    Exercise("settings", "13 training (the agent must learn)", 1,
             usual_settings, nothing, accepted, shown=1),
    Exercise("returns", "14a bug: returns", 0.5,
             rm.returns, played, results("R")),
    Exercise("compute_advantages", "14b bug: compute_advantages", 0.5,
             rm.compute_advantages, to_judge, judged),
    Exercise("sample", "14c bug: sample", 0.5,
             rm.sample, next_tokens, drawn, shown=5),
    Exercise("take_turn", "14d bug: take_turn", 0.5,
             rm.take_turn, a_turn, act, shown=len(TURNS)),
    Exercise("paradox", "15 the bandit paradox, on paper", 1,
             expected_advantages, nothing, on_paper, shown=1, show_spec=False),
]}

# The code is read now, as long as the files are those that were imported.
for exercise in EXERCISES.values():
    text_of(exercise.solution)
