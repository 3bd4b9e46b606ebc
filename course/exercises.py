"""The exercises of tutorial.ipynb: for each the shipped function that solves it, how its inputs are drawn (at random,
around one corner case after the other), and what counts of what an answer returns. answers.txt has usual mistakes.
"""
import copy
import functools
import itertools
import json
from types import SimpleNamespace

import numpy as np
import torch
import transformers

import ragen_mini
from checks import COURSE, Exercise, envs, given, results, rm

SETTINGS = dict(env="sokoban", iterations=20)  # of the training run, where an answer says nothing else
MOST_ITERATIONS = 30


def settings_of(**changes):
    """A Config with what the small functions ask for."""
    values = dict(clip_low=0.2, clip_high=0.2, entropy_coef=0.0, temperature=1.0, rollouts=2, gamma=1.0, lam=1.0)
    return SimpleNamespace(**values | changes)


def normal(g, *shape, scale=1.0):  # numbers that can be read: one digit behind the point
    return torch.tensor(np.round(scale * g.normal(size=shape), 1) + 0.0, dtype=torch.float32)


def whole(g, low, high, n=None):  # from low up to high
    return g.integers(low, high + 1, n).tolist()


def pick(g, *values):
    return values[g.integers(len(values))]


# ------------------------------------------------------------------------------------------------ worlds
def solve(env):  # breadth first -> a shortest list of actions from env.state to success, as if nothing slipped
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


def play_moves(answer):
    moves = given(answer())
    room = level_7()
    info = {"success": False}
    for move in list(moves)[:10]:
        if not room.over:
            _, _, _, _, info = room.step(move)
    return {"solved within 10 actions": info["success"]}


def beside_something(g, i):  # a lake, a cell beside its goal or a hole, an action
    env = envs.FrozenLake(size=3 + i % 4, success_rate=(0.8, 0.5, 1 / 3, 1.0, 0.6)[i % 5])
    env.reset(whole(g, 0, 99))
    ends = [env.level["goal"], *env.level["holes"]]
    end = ends[i % 3 % len(ends)]
    ice = [cell for cell in itertools.product(range(env.size), repeat=2) if cell not in ends]
    near = [cell for cell in ice if abs(cell[0] - end[0]) + abs(cell[1] - end[1]) == 1]
    return dict(env=env, state=pick(g, *near or ice), action=pick(g, *env.actions))


def one_step(answer, env, state, action):
    total = {}
    listed = given(answer(env, state, action))
    for chance, cell, reward, over in listed:
        place = str(type(cell)(map(int, cell)))  # a cell is a tuple: [0, 1] is never the goal
        before = total.get(place, [0.0])[0]
        total[place] = [before + float(chance), float(reward), bool(over)]
    return {"intended": list(listed[0][1]), "cell: chance, reward, over?": total}


def some_world(g, i):
    name = ("frozenlake", "sokoban", "bandit", "frozenlake", "bandit_rev")[i % 5]
    env = envs.make(name, pick(g, 1 / 3, 0.8, 0.9))
    env.reset(whole(g, 0, 99))
    if i % 5 == 3:  # at the goal, where it is not over yet
        env.state = env.level["goal"]
    return dict(env=env, horizon=2 if i % 5 == 4 else whole(g, 3, 5))


def both_players(answer, env, horizon):
    random, optimal = given(answer(env, horizon))
    return {"random": [float(x) for x in random], "optimal": [float(x) for x in optimal]}


# ------------------------------------------------------------------------------------------------- words
TEXT = dict(before="", thought="<think>x</think>", gap="", tag="<answer>", answer="Down", end="</answer>", behind="")
CORNERS = [("answer", text) for text in (  # "Down" is "down" in half of the cases
    "down || Left", " Up ||Left", " UP ", "Up||Up||Up||Up||Up||Left", "Up||Up||Up||Up||jump", "U p", "Down || jump", "",
    "Down||", "Up Down", "Up | Left", "Up, Left", "go ON", "<answer>Up", "1 < 2")]
CORNERS += [("thought", text) for text in (
    "<think>a < b > c</think>", "<think>two\nlines</think>", "", "<think></think>", "<think>x</think><think>y</think>",
    "<think>an <answer> in it</think>", "<think>x<think></think>", "<think>x</think></think>", "<Think>x</Think>",
    "<think>x</think><answer>Up</answer>")]
CORNERS += [("before", " "), ("before", "\n"), ("before", "So: "), ("gap", " "), ("gap", "\n\n"), ("gap", "so")]
CORNERS += [("behind", "\n"), ("behind", " and more"), ("behind", "."), ("behind", "<think>y</think>"),
            ("behind", "<answer>Up</answer>"), ("tag", "<Answer>"), ("end", "</ANSWER>"), ("end", "")]
HOSTILE = ["<think>" * 14_000, "<think></think>" * 7000, "<think>" + " " * 100_000, "<think></think>" + " " * 100_000,
           "<think></think><answer>" + "||" * 50_000]  # a careless pattern needs minutes


def some_text(g, i):
    """One corner case in the notebook; then up to two of them at once, and hostile ones."""
    corners = [CORNERS[i % len(CORNERS)]]
    if i >= len(CORNERS) and g.random() < 0.5:
        corners += [pick(g, *CORNERS)]
    text = "".join((TEXT | dict(corners)).values())
    if i >= len(CORNERS) and i % 100 >= 100 - len(HOSTILE):
        text = HOSTILE[i % 100 - 100]
    actions = ("Up", "Down", "Left", "Right") if i % 2 else ("Up", "down", "LEFT", "Go on")
    return dict(text=text, actions=actions, limit=3 + i % 2 + (i >= len(CORNERS)))


# ------------------------------------------------------------------------------------------------- tokens
def some_pieces(g, i):  # [(ids, who, log-probability), ...]: message, tokens of the answer, message, ...
    pieces = []
    for _ in range(1 + i % 3):
        pieces.append((whole(g, 0, 8, whole(g, 1, 4)), False, 0.0))
        for token in whole(g, 0, 3, whole(g, 1, 4)):
            pieces.append(([token], True, 0.0 - 0.1 * whole(g, 0, 9)))
    return dict(pieces=pieces + [([0, 5], False, 0.0)] * (i % 2))


def written(traj, pieces):
    for ids, sampled, logp in pieces:
        if sampled:
            traj.append(ids, True, logp)
        else:
            traj.append(ids, sampled=False)
    return traj


def record(answer, pieces):
    traj = written(answer(None, 0, 10), pieces)
    return {name: getattr(traj, name) for name in ("ids", "mask", "old_logp", "reward", "answer_start")}


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


def to_collate(g, i):
    return dict(trajs=episodes(g, 1, 1 + i % 3), device="cpu")


def make_batch(answer, trajs, device):
    batch = dict(given(answer(trajs, device)))
    last = torch.tensor([len(traj.ids) - 1 for traj in trajs])
    behind = torch.arange(last.max()) >= last[:, None]  # tokens behind an episode's end: any will do
    for key in ("inputs", "targets"):
        if isinstance(batch[key], torch.Tensor) and batch[key].shape == behind.shape:
            batch[key] = batch[key].masked_fill(behind.to(batch[key].device), 0)
    return {key: batch[key] for key in ("inputs", "targets", "mask", "old_logp", "reward")}


@functools.cache
def random_networks(seed):  # with nine words -> policy, critic, their weights
    torch.manual_seed(seed)
    sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                 max_position_embeddings=64, bos_token_id=None, eos_token_id=2, pad_token_id=None)
    config = transformers.LlamaConfig(**sizes, num_labels=1)
    policy = transformers.LlamaForCausalLM(config).eval()
    policy.lm_head.weight.data *= 60  # fresh ones find all words about equally likely
    critic = transformers.LlamaForTokenClassification(config).eval()
    return policy, critic, copy.deepcopy((policy.state_dict(), critic.state_dict()))


def networks(g):  # -> policy, critic: as new, whatever an answer did to them
    *both, weights = random_networks(whole(g, 0, 3))
    for network, saved in zip(both, weights):
        network.load_state_dict(saved)
        network.zero_grad()
    return both


def random_batch(g, B, T=7):  # rows of different lengths; the first token is the world's
    mask = torch.tensor(g.random((B, T)) < 0.7)
    mask &= torch.arange(T) < torch.tensor(whole(g, 3, T, B))[:, None]
    mask[:, 0], mask[:, 1] = False, True
    tokens = torch.tensor(whole(g, 0, 8, (2, B, T)))
    return {"inputs": tokens[0], "targets": tokens[1], "mask": mask}


def choices(g, i):
    policy, _ = networks(g)
    return dict(policy=policy, part=random_batch(g, 1 + i % 3),
                cfg=settings_of(temperature=(1.0, 0.5, 0.02, 2.0, 0.7)[i % 5]))


# ------------------------------------------------------------------------------------------- how good was it
def group_returns(g, P, N, power=1):  # rows of different means and spreads
    spread, mean = torch.tensor([whole(g, 1, 9, P), whole(g, -9, 9, P)])[:, :, None]
    return normal(g, P, N) ** power * spread + mean


def groups(g, i):
    R = group_returns(g, 2 + i % 3, whole(g, 3, 6))
    R[0] = pick(g, 10.9, -0.1, 5.3)  # equal returns
    if i % 2:
        R[0, -1] += 1e-6  # but for rounding
    return dict(R=R, norm="mean" if i % 3 == 2 else "std")


def prompts(g, i):
    P, keep = ((4, 0.5), (3, 0.25), (8, 0.3), (7, 0.5), (5, 0.67), (100, 0.29), (6, 1.0))[i % 7]
    return dict(R=group_returns(g, P, 6, power=3), keep=keep)


def kept_prompts(answer, R, keep):
    kept = given(answer(R, keep))
    if not isinstance(kept, torch.Tensor) or kept.is_floating_point():
        raise TypeError("should return a tensor with the numbers of the kept prompts")
    return {"kept": sorted(kept.tolist())}


def steps(g, i, B=2, T=6):  # the world's tokens have values that must not matter
    mask = torch.tensor(g.random((B, T)) < 0.6)
    mask[0, T // 2], mask[1] = False, mask[1] & (i % 3 > 0)  # in every third case the model wrote nothing there
    value = torch.where(mask, normal(g, B, T), pick(g, 50.0, -77.0))
    return dict(reward=torch.where(mask, normal(g, B, T), 0.0), value=value, mask=mask,
                gamma=(0.9, 1.0, 0.5)[i % 3], lam=(0.8, 1.0, 0.95, 0.0)[i % 4])


# ------------------------------------------------------------------------------------------------- the update
def ratios(g, i, n=8):
    cfg = settings_of(clip_low=pick(g, 0.1, 0.2), clip_high=pick(g, 0.28, 0.35), entropy_coef=(0.03, 0.0, 0.2)[i % 3])
    edges = [1 - cfg.clip_low, 1 - cfg.clip_low, 1.0, 1 + cfg.clip_low, 1 + cfg.clip_high, 1 + cfg.clip_high]
    ratio = torch.tensor(g.choice(edges, n) * (1 + g.choice([-0.04, 0.04], n)), dtype=torch.float32)
    old_logp = normal(g, n) - 3
    adv = normal(g, n)
    ratio[:4], adv[:4] = torch.tensor([0.5, 0.5, 1.5, 1.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    adv[4] = 0.0
    return dict(logp=(old_logp + ratio.log()).requires_grad_(), entropy=normal(g, n).abs().requires_grad_(),
                old_logp=old_logp, adv=adv, cfg=cfg)


def forecasts(g, i, n=8):
    limit = (0.5, 0.3, 0.8)[i % 3]
    old_value = normal(g, n)
    moved = limit * torch.tensor(g.choice([-2.0, -1.2, -0.7, 0.7, 1.2, 2.0], n), dtype=torch.float32)
    return dict(value=(old_value + moved).requires_grad_(), old_value=old_value,
                ret=old_value + normal(g, n, scale=2.0) + 0.037) | {"rm.VALUE_CLIP": limit}


def batch_to_learn(g, i):
    """In several parts, with and without a critic; ratios and values are beyond what is clipped."""
    policy, critic = networks(g)
    models = rm.Models(policy, critic if i % 3 else None, None, None, None)
    batch = random_batch(g, 5)
    cfg = settings_of(entropy_coef=0.1, temperature=0.7)
    logp = rm.on_grid(lambda part: rm.token_logps(policy, part, cfg)[0], batch | {"reward": batch["mask"].float()})
    batch |= {"old_logp": logp + normal(g, 5, 7, scale=0.4), "adv": normal(g, 5, 7), "reward": torch.zeros(5, 7)}
    if models.critic:
        batch |= {"value": normal(g, 5, 7), "ret": normal(g, 5, 7)}
    rows = g.permutation(5)[:4].tolist()  # one is not in this step
    constants = {"rm.MICRO_TOKENS": 16, "rm.VALUE_CLIP": 0.4}
    return dict(batch=batch, rows=rows, models=models, cfg=cfg) | constants


def gradients(g, i):
    """Of different lengths in policy and critic (none in every third case); the optimizer moves by them."""
    groups = []
    for rate in (0.5, 0.25)[:1 + (i % 3 > 0)]:
        network = torch.nn.Linear(3, 1, bias=False)
        network.weight.data = normal(g, 1, 3)
        gradient = torch.tensor(g.normal(size=(1, 3)), dtype=torch.float32)
        network.weight.grad = gradient / gradient.norm() * pick(g, 0.3, 0.9, 1.7, 3.0, 50.0)
        groups.append((network, dict(params=network.parameters(), lr=rate)))
    policy, critic = ([network for network, _ in groups] + [None])[:2]
    optimizer = torch.optim.SGD([group for _, group in groups], weight_decay=0.1)
    models = rm.Models(policy, critic, None, optimizer, None)
    return dict(models=models, cfg=settings_of()) | {"rm.MAX_GRAD_NORM": (1.0, 2.0)[i % 2]}


def accepted(answer):
    settings = given(answer())
    cfg = ragen_mini.Config(**SETTINGS | settings | dict(model="tiny", device="cpu"))
    envs.make(cfg.env)  # is there such a world?
    return {f"at most {MOST_ITERATIONS} iterations": cfg.iterations <= MOST_ITERATIONS,
            "evaluated before and after, on all levels": cfg.eval_every > 0 and cfg.eval_prompts == 256,
            "a world of the project": cfg.env in envs.ENVS}


# ---------------------------------------------------------------------------------------------- bugs to hunt
BUGS = {  # function: the piece of the shipped text, what stands there instead
    "returns": (".view(-1, cfg.rollouts)", ".view(cfg.rollouts, -1).T.contiguous()"),
    "compute_advantages": ("(adv - adv[mask].mean()) / (adv[mask].std(correction=0) + 1e-8)",
                           "(adv - adv.mean()) / (adv.std(correction=0) + 1e-8)"),
    "sample": ("torch.multinomial(logp.exp(), 1, generator=generator)", "logp.argmax(1, keepdim=True)"),
    "take_turn": ("traj.reward[-1] =", "traj.reward[traj.answer_start] ="),
}


def played(g, i):
    N = 2 + i % 3
    return dict(trajs=episodes(g, 4, N), cfg=settings_of(rollouts=N))


def to_judge(g, i):
    policy, critic = networks(g)
    trajs = episodes(g, 2, 3)
    cfg = settings_of(algo=("ppo", "ppo", "grpo")[i % 3], kl_coef=0.3, adv_norm=("mean", "std")[i // 3 % 2], gamma=0.9,
                      lam=0.8, device="cpu", rollouts=3)
    models = rm.Models(policy, critic, networks(g)[0] if i % 2 else None, None, None)
    return dict(trajs=trajs, R=rm.returns(trajs, cfg), models=models, cfg=cfg)


def judged(answer, *inputs):
    batch = given(answer(*inputs))
    return {key: batch[key] for key in ("adv", "value", "ret", "kl") if key in batch}


def next_words(g, i, V=5):  # of two distributions in turn
    return dict(logp=normal(g, 2, V, scale=1.5).log_softmax(-1).repeat(200, 1), seed=whole(g, 0, 9999))


def chi_square(tokens, p):  # between how often the words were drawn and their probabilities
    expected = len(tokens) * p
    return ((torch.bincount(tokens, minlength=len(p)) - expected) ** 2 / expected).sum().item()


def drawn(answer, logp, seed):
    """Many draws: as often as their probabilities say, and by the generator alone?"""
    trajs = [written(rm.Trajectory(None, 0, 10), [([7], False, 0.0)]) for _ in logp]
    generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
    for number in (0, 0, 1):
        torch.manual_seed(len(trajs[0].ids))  # the global dice must not matter
        answer(trajs, logp, generators[number])
    tokens = torch.tensor([traj.ids[1:] for traj in trajs])
    distance = sum(chi_square(tokens[i::2, 0], logp[i].exp()) for i in range(2))
    noted = torch.tensor([traj.old_logp[1:] for traj in trajs])
    return {"always the likeliest word": tokens[:, 0].equal(logp.argmax(1)),
            "as often as their probabilities (chi-square)": distance < 40,  # right ones are beyond once in 300,000
            "the same generator, the same words": tokens[:, 0].equal(tokens[:, 2]),
            "the generator goes on": not tokens[:, 0].equal(tokens[:, 1]),
            "each one its own log-probability": noted.allclose(logp.gather(1, tokens)),
            "entropy": torch.tensor([traj.entropy for traj in trajs[:2]]),
            "cached": trajs[0].cached, "mask": trajs[0].mask}


@functools.cache
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(rm.TINY)


TURNS = (  # what `tiny` says after <think>; `solve` becomes what wins
    dict(says="solve || Left", bonus=0.5), dict(says="Down"), dict(text="I go . <|im_end|>"),
    dict(says="Left", tokens=5), dict(says="Up || Left", world="sokoban"), dict(says="solve", world="sokoban"),
    dict(says="Left", max_turns=1, bonus=0.5), dict(says="Left || Left", max_actions=1),
    dict(says="Left || Left", max_actions=2), dict(says="Up || Down || Right"))


def a_turn(g, i):
    turn = dict(text="", says="", world="frozenlake", bonus=0.0, tokens=40) | TURNS[i % len(TURNS)]
    limits = {name: turn[name] for name in ("max_turns", "max_actions") if name in turn}
    cfg = rm.Config(model="none", device="cpu", max_new_tokens=turn["tokens"], iterations=1, lr=1e-3, critic_lr=1e-3,
                    success_rate=1.0, **limits)
    tok = tokenizer()
    for seed in whole(g, 0, 99, 50):
        traj = rm.begin(turn["world"], seed, 0, 0, tok, cfg)
        way = solve(traj.env)
        if 1 < len(way) < 4:
            break
    traj.env.bonus = lambda _: turn["bonus"]
    moves = turn["says"].replace("solve", " || ".join(way))
    text = turn["text"] or f"I go . </think> <answer> {moves} </answer> <|im_end|>"
    for token in tok(text).input_ids[:turn["tokens"]]:
        traj.append([token], True, -1.0)
    ends = [tok.convert_tokens_to_ids("<|im_end|>")]
    return dict(traj=traj, tok=tok, cfg=cfg, ends=ends) | {"rm.FORMAT_PENALTY": -0.1 - i % 2}


def act(answer, *inputs):
    answer(*inputs)
    return {}  # what it does is seen in the inputs


# ---------------------------------------------------------------------- on paper, and read from a shipped log
def expected_advantages(N=4):
    """Of the only risky pull in a group of N (it pays 1 in a quarter of the cases, the sure arm 0.15)."""
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


def collapse_rows():  # -> config, rows of the run that is read
    run = json.loads((COURSE / "collapse.jsonl").read_text())
    return run["config"], run["rows"]


def order_of_alarm(log, columns=("entropy", "reward_std", "valid"), window=5, factor=2, band=(130, 145)):
    """The columns whose median over the last five iterations was, after the band, once beyond twice or below half the
    median over the band; the first one first."""
    first = {}
    for column in columns:
        usual = np.median([row[column] for row in log if band[0] <= row["iteration"] <= band[1]])
        for i in range(band[1] + 1, len(log)):  # log[i] is iteration i
            recent = [row[column] for row in log[i + 1 - window:i + 1]]
            if not usual / factor <= np.median(recent) <= usual * factor:
                first.setdefault(column, i)
    return sorted(first, key=first.get)


def some_log(g, i):
    """The shipped one; then others, with the columns exchanged, and jumps of one iteration where nothing has moved."""
    _, rows = collapse_rows()
    if i:
        columns = ["entropy", "reward_std", "valid"]
        new = dict(zip(columns, g.permutation(columns).tolist()))
        rows = [{new.get(name, name): value for name, value in row.items()} for row in rows]
        for place in whole(g, 131, 144), whole(g, 147, 152):
            rows[place][new["reward_std"]] *= 40.0
    return dict(log=rows)


def read_order(answer, log):
    """An answer read off the picture is the same for every log: it is judged by the shipped one."""
    order = list(given(answer(log)))
    shipped = order_of_alarm(collapse_rows()[1])
    return {"order": order_of_alarm(log) if order == shipped else order}


def nothing(g, i):
    return {}


EXERCISES = [
    Exercise("moves", "0 play", 0.5, lambda: solve(level_7()), nothing, play_moves, 1, show_spec=False),
    Exercise("outcomes", "1 the rules of the ice", 0.5, envs.FrozenLake.outcomes, beside_something, one_step, 12),
    Exercise("yardsticks", "2 random and optimal play", 1, envs.yardsticks, some_world, both_players, 5),
    Exercise("parse_answer", "3 words become actions", 1, rm.parse_answer, some_text, results("actions"), len(CORNERS)),
    Exercise("Trajectory", "4 who wrote which token", 1, rm.Trajectory, some_pieces, record),
    Exercise("collate", "5 the shift", 1.5, rm.collate, to_collate, make_batch, everywhere=True),
    Exercise("token_logps", "6 log-probabilities and entropy", 1.5, rm.token_logps, choices, results("logp", "entropy"),
             everywhere=True),
    Exercise("grpo_advantages", "7 advantages from the group", 1.5, rm.grpo_advantages, groups, results("advantages")),
    Exercise("uncertainty_filter", "8 the filter of StarPO-S", 1, rm.uncertainty_filter, prompts, kept_prompts, 7),
    Exercise("gae", "9 advantages from a critic", 2.5, rm.gae, steps, results("advantage", "ret"), everywhere=True),
    Exercise("policy_loss", "10 the clipped objective", 1.5, rm.policy_loss, ratios, results("loss", "clipped"),
             everywhere=True),
    Exercise("value_loss", "11 the critic's loss", 1, rm.value_loss, forecasts, results("loss"), everywhere=True),
    Exercise("add_gradients", "12 gradients by micro-batches", 1, rm.add_gradients, batch_to_learn,
             lambda answer, *inputs: {"returns a dict": isinstance(given(answer(*inputs)), dict)}),
    Exercise("take_step", "12 the step", 0.5, rm.take_step, gradients,
             lambda answer, *inputs: {"returned": float(given(answer(*inputs)))}),
    Exercise("settings", "13 training (the agent must learn)", 1, lambda: dict(SETTINGS), nothing, accepted, 1),
    Exercise("returns", "14a bug: returns", 0.5, rm.returns, played, results("R")),
    Exercise("compute_advantages", "14b bug: compute_advantages", 0.5, rm.compute_advantages, to_judge, judged),
    Exercise("sample", "14c bug: sample", 0.5, rm.sample, next_words, drawn, 5),
    Exercise("take_turn", "14d bug: take_turn", 0.5, rm.take_turn, a_turn, act, len(TURNS)),
    Exercise("paradox", "15 the bandit paradox, on paper", 0.5, expected_advantages, nothing, on_paper, 1,
             show_spec=False),
    Exercise("collapse", "16 what moved first?", 0.5, order_of_alarm, some_log, read_order, 5, show_spec=False),
]
EXERCISES = {exercise.name: exercise for exercise in EXERCISES}
