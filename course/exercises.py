"""The exercises of tutorial.ipynb: for each the shipped function that solves it, small inputs that the notebook's check
shows, and usual mistakes, each as words and as pieces of the shipped function's text with what stands there instead.

staff/hidden_checks.py has more inputs for the same exercises.
"""
import copy
import functools
import inspect
import json
from types import SimpleNamespace

import numpy as np
import torch
import transformers

import ragen_mini
from checks import COURSE, Exercise, envs, given, results, rm

SETTINGS = dict(env="sokoban", iterations=20)  # of the training run, for those who gave none
MOST_ITERATIONS = 30


# ---------------------------------------------------------------------------------------- the inputs of checks
def numbers(*rows):
    return torch.tensor(rows)


def settings_of(**changes):
    """A Config with what the small functions ask for."""
    values = dict(clip_low=0.2, clip_high=0.2, entropy_coef=0.0, temperature=1.0, rollouts=2, gamma=1.0, lam=1.0,
                  out="")
    return SimpleNamespace(**values | changes)


def random_steps(seed, B=2,
                 T=8):  # -> reward, value, mask: (B,T) each; the world's tokens have values that must not matter
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=g) < 0.6
    mask[:, 2], mask[:, T // 2] = True, False
    value = torch.randn(B, T, generator=g)
    return dict(reward=torch.randn(B, T, generator=g) * mask, value=torch.where(mask, value, 50.0), mask=mask)


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


def play_moves(answer, world, seed):
    env = envs.make(world)
    env.reset(seed)
    moves = answer(copy.deepcopy(env)) if "env" in inspect.signature(answer).parameters else answer()
    given(moves)
    info = {"success": False}
    for move in list(moves)[:10]:
        if not env.over:
            _, _, _, _, info = env.step(move)
    return {"solved within 10 actions": info["success"]}


def one_step(answer, seed, rate, state, action, size=4):  # in FrozenLake
    env = envs.FrozenLake(size, success_rate=rate)
    env.reset(seed)
    state = env.state if state is None else tuple(state)
    total = {}
    listed = given(answer(env, state, action))
    for chance, cell, reward, over in listed:
        place = str(type(cell)(map(int, cell)))  # a cell is a tuple: [0, 1] is never the goal
        before = total.get(place, [0.0])[0]
        total[place] = [before + float(chance), float(reward), bool(over)]
    return {"intended": list(listed[0][1]), "cell: chance, reward, over?": total}


def both_players(answer, world, seed, horizon, rate=0.8, at_goal=False):
    env = envs.make(world, rate)
    env.reset(seed)
    if at_goal:  # where it is not over yet
        env.state = env.level["goal"]
    curves = given(answer(env, horizon))
    return {"random": [float(x) for x in curves[0]], "optimal": [float(x) for x in curves[1]]}


def written(trajectory, pieces):
    """pieces: ("world", ids) or ("model", [(id, log-prob), ...]), in order -> the four lists."""
    for who, tokens in pieces:
        if who == "world":
            trajectory.append(tokens, sampled=False)
        else:
            for token, logp in tokens:
                trajectory.append([token], True, logp)
    return trajectory


def record(answer, pieces):
    traj = written(answer(None, 0, 10), pieces)
    return {"ids": traj.ids, "mask": traj.mask, "old_logp": traj.old_logp, "reward": traj.reward,
            "answer_start": traj.answer_start, "first message": pieces[0][1]}


def make_batch(answer, episodes):  # each: its pieces, the reward of its last token
    trajs = []
    for pieces, reward in episodes:
        traj = written(rm.Trajectory(None, 0, 10), pieces)
        for t in range(len(traj.ids) - 1):
            if traj.mask[t] > traj.mask[t + 1]:  # an answer ends here, and others follow
                traj.reward[t] = -0.1
        traj.reward[-1] = reward
        trajs.append(traj)
    batch = dict(given(answer(trajs, "cpu")))
    columns = torch.tensor([len(traj.ids) - 1 for traj in trajs])
    behind = torch.arange(columns.max()) >= columns[:, None]  # tokens behind an episode's end: any will do
    for key in ("inputs", "targets"):
        if isinstance(batch[key], torch.Tensor) and batch[key].shape == behind.shape:
            batch[key] = batch[key].masked_fill(behind, 0)
    found = {key: batch[key] for key in ("inputs", "targets", "mask", "old_logp", "reward")}
    return found | {"on the device": on_device(answer, trajs)}


def on_device(answer, trajs, device="meta"):  # meta: tensors have shapes there, and no numbers
    try:
        batch = answer(trajs, device)
    except (NotImplementedError, RuntimeError):  # it asked for numbers: so its tensors are there
        return True
    return all(x.device.type == device for x in batch.values())


def networks_of(seed, critic, sharpen=1.0):  # -> policy, critic or None: random ones with nine words
    torch.manual_seed(seed)
    sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                 max_position_embeddings=64, bos_token_id=None, eos_token_id=2, pad_token_id=None)
    config = transformers.LlamaConfig(**sizes, num_labels=1)
    policy = transformers.LlamaForCausalLM(config).eval()
    policy.lm_head.weight.data *= sharpen  # fresh ones find all words about equally likely
    if critic:
        return policy, transformers.LlamaForTokenClassification(config).eval()
    return policy, None


def random_batch(lengths):  # -> batch of episodes of these lengths; the first token is the world's
    B, T = len(lengths), max(lengths)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    mask[:, 0] = False
    return {"inputs": torch.randint(9, (B, T)), "targets": torch.randint(9, (B, T)), "mask": mask}


def gradient_of(network):  # all in a row; 0 where there is none
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()]
    return torch.cat([part.flatten() for part in parts])


def logps_and_gradient(answer, seed, temperature, lengths):
    policy, _ = networks_of(seed, critic=False, sharpen=60.0)
    part = random_batch(lengths)
    logp, entropy = given(answer(policy, part, settings_of(temperature=temperature)))
    (logp.sum() + 2 * entropy.sum()).backward()
    return {"logp": logp, "entropy": entropy, "gradient": gradient_of(policy)[-24:]}


def kept_prompts(answer, R, keep):
    kept = given(answer(R, keep))
    if not isinstance(kept, torch.Tensor) or kept.is_floating_point():
        raise TypeError("should return a tensor with the numbers of the kept prompts")
    return {"kept": sorted(kept.tolist())}


def loss_and_gradient(answer, ratio, adv, entropy, cfg):
    old_logp = -0.5 * torch.arange(1.0, len(ratio) + 1)
    logp = (old_logp + ratio.log()).requires_grad_()
    entropy = entropy.clone().requires_grad_()
    loss, clipped = given(answer(logp, entropy, old_logp, adv, cfg))
    gradient, of_entropy = torch.autograd.grad(loss.sum(), (logp, entropy), allow_unused=True, materialize_grads=True)
    return {"loss": loss, "clipped": clipped, "gradient": gradient, "gradient at the entropy": of_entropy}


def error_and_gradient(answer, value, old_value, ret):
    value = value.clone().requires_grad_()
    loss = given(answer(value, old_value, ret))
    gradient, = torch.autograd.grad(loss.sum(), value) if loss.requires_grad else (torch.zeros_like(value),)
    return {"loss": loss, "gradient": gradient}


def gradients_by_parts(answer, seed, lengths, critic):
    """By micro-batches of two rows or so: which gradient is there in the end?"""
    policy, critic = networks_of(seed, critic)
    models = rm.Models(policy, critic, None, None, None)
    batch = random_batch(lengths)
    shape = batch["mask"].shape
    batch |= {"old_logp": -2.2 + 0.5 * torch.randn(shape), "adv": torch.randn(shape), "reward": torch.zeros(shape)}
    if critic:
        # many beyond VALUE_CLIP, as ratios are beyond the clip
        batch |= {"value": torch.randn(shape), "ret": torch.randn(shape)}
    rows = list(range(len(lengths) - 1))  # the last one is not in this step
    before = ragen_mini.MICRO_TOKENS, rm.MICRO_TOKENS
    ragen_mini.MICRO_TOKENS = rm.MICRO_TOKENS = 2 * max(lengths)
    try:
        stats = given(answer(batch, rows, models, settings_of(entropy_coef=0.1, temperature=0.7)))
    finally:
        ragen_mini.MICRO_TOKENS, rm.MICRO_TOKENS = before
    found = {"returns a dict": isinstance(stats, dict)}
    for who, network in (("policy", policy), ("critic", critic)):
        if network:
            gradient = gradient_of(network)
            found[f"{who}'s gradient: length"] = gradient.norm().item()
            found[f"{who}'s gradient"] = gradient[-60:] * 10
    return found


class Spy(torch.optim.SGD):
    """An optimizer that notes every gradient and moves nothing."""

    def step(self):
        self.steps = getattr(self, "steps", 0) + 1
        self.seen = [group["params"][0].grad.clone() for group in self.param_groups]


def step_of(answer, seed, lengths):
    """lengths: of the gradients of policy and critic; no critic if there is one only."""
    torch.manual_seed(seed)
    networks, gradients = [], []
    for length in lengths:
        network = torch.nn.Linear(3, 1, bias=False)
        gradient = torch.randn(1, 3)
        network.weight.grad = gradient * length / gradient.norm()
        gradients.append(network.weight.grad)
        networks.append(network)
    policy, critic = (networks + [None])[:2]
    optimizer = Spy([{"params": network.parameters()} for network in networks], lr=0.0)
    norm = given(answer(rm.Models(policy, critic, None, optimizer, None), settings_of()))
    left = sum(gradient_of(network).abs().sum().item() for network in networks)
    return {"steps of the optimizer": getattr(optimizer, "steps", 0),
            "gradients that it saw": getattr(optimizer, "seen", []),
            "left in the gradients": left, "returned": float(norm)}


def accepted(answer):
    settings = given(answer())
    cfg = ragen_mini.Config(**settings | dict(model="tiny", device="cpu"))
    envs.make(cfg.env)  # is there such a world?
    return {f"at most {MOST_ITERATIONS} iterations": cfg.iterations <= MOST_ITERATIONS,
            "evaluated before and after, on all levels": cfg.eval_every > 0 and cfg.eval_prompts == 256,
            "a world of the project": cfg.env in envs.ENVS}


# ---------------------------------------------------------------------- on paper, and read from a shipped log
def expected_advantages(N=4):
    """Of the only risky pull in a group of N (it pays 1 in a quarter of the cases, the sure arm 0.15)."""
    means = []
    for norm in ("mean", "std"):
        paid, unpaid = (rm.grpo_advantages(numbers([x] + [0.15] * (N - 1)), norm)[0, 0].item() for x in (1.0, 0.0))
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


# ---------------------------------------------------------------------------------------------- bugs to hunt
BUGS = {  # function: the piece of the shipped text, what stands there instead
    "returns": (".view(-1, cfg.rollouts)", ".view(cfg.rollouts, -1).T.contiguous()"),
    "compute_advantages": ("(adv - adv[mask].mean()) / (adv[mask].std(correction=0) + 1e-8)",
                           "(adv - adv.mean()) / (adv.std(correction=0) + 1e-8)"),
    "sample": ("torch.multinomial(logp.exp(), 1, generator=generator)", "logp.argmax(1, keepdim=True)"),
    "take_turn": ("traj.reward[-1] =", "traj.reward[traj.answer_start] ="),
}
STILL = "this is still the buggy one"


def played(seed, P=2, N=2):  # -> P * N trajectories, as of a rollout
    g = torch.Generator().manual_seed(seed)

    def draw(most):
        return int(torch.randint(1, most, (1,), generator=g))
    trajs = []
    for number in range(P * N):
        traj = rm.Trajectory(None, number // N, 10)
        for _ in range(draw(3)):
            traj.append([draw(9) for _ in range(draw(5))], False)
            for _ in range(1 + draw(4)):
                traj.append([draw(9)], True, -0.2 * draw(9))
            traj.reward[-1] = 0.5 * draw(5)
            traj.turns.append({"reward": traj.reward[-1]})
        trajs.append(traj)
    return trajs


def advantages_of(answer, seed, algo, ref):
    trajs = played(seed)
    policy, critic = networks_of(seed, critic=True)
    models = rm.Models(policy, critic, policy if ref else None, None, None)
    cfg = settings_of(algo=algo, kl_coef=0.3, adv_norm="mean", gamma=0.9, lam=0.8, device="cpu")
    batch = given(answer(trajs, rm.returns(trajs, cfg), models, cfg))
    return {key: batch[key] for key in ("adv", "value", "ret", "kl") if key in batch}


def chi_square(tokens, p):  # between how often the words were drawn and their probabilities
    expected = len(tokens) * p
    return ((torch.bincount(tokens, minlength=len(p)) - expected) ** 2 / expected).sum().item()


def drawn(answer, seed, b=400, V=5):
    """Many draws, from two distributions in turn: as often as their probabilities say, and by the generator alone?"""
    torch.manual_seed(seed)
    logp = torch.randn(2, V).mul(1.5).log_softmax(-1).repeat(b, 1)
    generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
    draws = []
    for number in (0, 0, 1):
        torch.manual_seed(len(draws))  # the global dice must not matter
        trajs = [written(rm.Trajectory(None, 0, 10), [("world", [7])]) for _ in logp]
        answer(trajs, logp, generators[number])
        draws.append(torch.tensor([traj.ids[-1] for traj in trajs]))
    same_noted = torch.tensor([traj.old_logp[-1] for traj in trajs]).allclose(logp.gather(1, draws[2][:, None])[:, 0])
    distance = sum(chi_square(draws[0][i::2], logp[i].exp()) for i in range(2))
    return {"always the likeliest word": draws[0].equal(logp.argmax(1)),
            "as often as their probabilities (chi-square)": distance < 30,  # right ones are beyond once in 5,000
            "the same generator, the same words": draws[0].equal(draws[2]),
            "the generator goes on": not draws[0].equal(draws[1]),
            "each one its own log-probability": same_noted, "entropy": trajs[0].entropy, "cached": trajs[0].cached,
            "mask": trajs[0].mask}


@functools.cache
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(rm.TINY)


def said(actions):  # an answer, as `tiny` would write it
    return f"I go . </think> <answer> {actions} </answer> <|im_end|>"


def play_turn(answer, text, tokens=40, seed=0, world="frozenlake", actions=10, turns=5, bonus=0.0):
    """`solve` in the text becomes what wins there."""
    tok = tokenizer()
    cfg = rm.Config(model="none", device="cpu", max_new_tokens=tokens, iterations=1, lr=1e-3, critic_lr=1e-3,
                    success_rate=1.0, max_actions=actions, max_turns=turns)
    traj = rm.begin(world, seed, 0, 0, tok, cfg)
    traj.env.bonus = lambda turn: bonus
    first = traj.answer_start
    text = text.replace("solve", " || ".join(solve(traj.env)))
    for token in tok(text).input_ids[:tokens]:
        traj.append([token], True, -1.0)
    answer(traj, tok, cfg, [tok.convert_tokens_to_ids("<|im_end|>")])
    turn = traj.turns[0]
    return {"reward on the answer's tokens": traj.reward[first:first + turn["tokens"]], "valid": turn["valid"],
            "reward of the turn": turn["reward"], "actions left": traj.actions_left, "over": traj.done,
            "success": traj.success, "the next message": tok.decode(traj.ids[first + turn["tokens"]:])}


# ------------------------------------------------------------------------------------------- all exercises
EPISODE = [("world", [5, 6]), ("model", [(7, -0.5), (8, -0.1), (0, -0.2)]), ("world", [6]),
           ("model", [(7, -0.3), (0, -0.1)])]
SHORT = [("world", [5]), ("model", [(9, -0.7), (0, -0.4)])]
WORKED = dict(reward=numbers([0.0, 0, 1]), value=numbers([0.3, 9, 0.6]), mask=numbers([True, False, True]), gamma=1.0,
              lam=1.0)
MOVES = ("Up", "Down", "Left", "Right")
EDGES = numbers(0.7, 0.75, 1.1, 1.25, 1.3, 0.7, 0.75, 1.1, 1.25, 1.3)
SIGNS = numbers(1.0, 1, 1, 1, 1, -1, -1, -1, -1, -1)
SPREADS = numbers([0.0, 0, 0, 0, 0, 6], [0.0, 0, 0, 5, 5, 5], [0.0, 0, 0, 0, 0, 7])  # std 2.2, 2.5, 2.6
SOLVABLE = dict(world="sokoban", seed=7)
SHIFTED = "getattr(traj, name)[1:]"  # in collate


def unshifted(column):
    return f"getattr(traj, name)[:-1 if name == '{column}' else None][name != '{column}':]"


EXERCISES = {
    "moves": Exercise("0 play", 0.5, solve, play_moves, [SOLVABLE], show_spec=False),
    "outcomes": Exercise("1 the rules of the ice", 0.5, envs.FrozenLake.outcomes, one_step, [
        dict(seed=0, rate=0.8, state=(1, 1), action="Left"),
        dict(seed=3, rate=0.5, state=(0, 0), action="Up"),
        dict(seed=1, rate=1 / 3, state=None, action="Down")], [
        ("you let nothing slip: with the rest of the probability one moves sideways",
         "((self.success_rate, 0), (slip, -1), (slip, 1))", "((1.0, 0),)"),
        ("each side gets the whole rest, so that the chances sum to more than 1: the two sides share it",
         "(1 - self.success_rate) / 2", "1 - self.success_rate"),
        ("one can slip backwards: only the two perpendicular moves are possible", "(slip, -1), (slip, 1)",
         "(slip, 2), (slip, 2)"),
        ("only one of the two sides occurs", "(slip, -1), (slip, 1)", "(slip, 1), (slip, 1)"),
        ("one falls off the edge: there one stays where one is", "min(max(row, 0), last), min(max(col, 0), last)",
         "row, col"),
        ("holes do not end the episode", "won or cell in self.level[\"holes\"]", "won"),
        ("a hole is over, but earns nothing: only the goal pays 1", "float(won), won or",
         "float(won or cell in self.level[\"holes\"]), won or"),
        ("the goal ends the episode, too", "won or cell in self.level[\"holes\"]", "cell in self.level[\"holes\"]"),
    ]),
    "yardsticks": Exercise("2 random and optimal play", 1, envs.yardsticks, both_players, [
        dict(world="frozenlake", seed=3, horizon=4), dict(world="sokoban", seed=2, horizon=3),
        dict(world="bandit", seed=0, horizon=2)], [
        ("the first number is that of 0 actions left", "range(horizon + 1)", "range(1, horizon + 1)"),
        ("the random player is the mean over his actions, not the best one", "(fmean, max)", "(max, max)"),
        ("the best player takes the maximum over his actions", "(fmean, max)", "(fmean, fmean)"),
        ("the probabilities of the outcomes are missing", "p * chance(", "chance("),
        ("random comes first, then optimal", "(fmean, max)", "(max, fmean)"),
        ("V is the chance to have won, not a sum of it over the steps", "return combine(by_action)",
         "return combine(by_action) + chance(state, left - 1, combine)"),
        ("where the episode is over nothing changes any more: a win stays a win",
         "chance(new, 0 if over else left - 1, combine)",
         "(0 if over else chance(new, left - 1, combine))"),
        ("you play on after the end: where an outcome says `over`, nothing more happens", "0 if over else left - 1",
         "left - 1"),
        ("the worst action is not the best player's", "(fmean, max)", "(fmean, min)"),
        ("what you keep must be kept for each number of actions left, and for each player",
         "@lru_cache(maxsize=None)\n    def chance(", "known = {}\n    def chance(",
         "if left == 0:",
         "if left and (state, combine) in known:\n            return known[state, combine]\n        if left == 0:",
         "return combine(by_action)", "return known.setdefault((state, combine), combine(by_action))"),
    ]),
    "parse_answer": Exercise("3 words become actions", 1, rm.parse_answer, results("actions"), [
        dict(text=text, actions=MOVES, limit=3) for text in (
            "<think>Hm.</think><answer>down || Left</answer>",
            "<think>Hm.</think><answer> Up ||Left</answer>",
            "<think>Hm.</think> <answer>Up</answer>",
            "<think>Hm.</think><answer>Up</answer>\n",
            "<think>a < b</think>\n<answer> UP </answer>\n",
            "<think>x</think><answer>Up||Up||Up||Up||Up</answer>",
            "<think>x</think><answer>Up||Up||Up||jump</answer>",
            "<think>two\nlines</think><answer>Down</answer>",
            "<answer>Down</answer>",
            "<think>x</think><answer>U p</answer>",
            " <think>x</think><answer>Down</answer>",
            "<think>x</think><answer>Down || jump</answer>",
            "<think>x</think><answer></answer>",
            "<think>x</think><answer>Down||</answer>",
            "<think>x</think><answer>Down</answer> and more",
            "So: <think>x</think><answer>Down</answer>",
            "<think>x</think>so<answer>Down</answer>",
            "<think>x</think><answer>Down</answer><answer>Up</answer>",
            "<think>x</think><think>y</think><answer>Down</answer>",
            "<think>an <answer> in it</think><answer>Down</answer>",
            "<think>x</think><answer>Down</answer><think>y</think><answer>Up</answer>")], [
        ("nothing may stand before the thought, white space neither", "SHAPE.fullmatch(text)",
         "SHAPE.fullmatch(text.lstrip())"),
        ("a thought may have several lines: in a pattern `.` is any letter but a line break, unless re.DOTALL is given",
         "SHAPE.fullmatch(text)", "re.fullmatch(SHAPE.pattern, text)"),
        ("no tag may stand inside the thought, such as a second pair", "SHAPE.fullmatch(text)",
         r're.fullmatch(r"(<think>(.*)</think>\s*)?<answer>(?P<actions>.*)</answer>\s*", text, re.S)'),
        ("no tag may stand inside the thought, such as a second pair", "SHAPE.fullmatch(text)",
         r're.fullmatch(r"(<think>(.*?)</think>\s*)?<answer>(?P<actions>.*?)</answer>\s*", text, re.S)'),
        ("what stands behind the first `limit` actions is dropped unread: an unknown word there does no harm",
         "[:limit]", "", "else chosen", "else chosen[:limit]"),
        ("an empty action is an unknown one", "for word in words]", "for word in words if word.strip()]"),
        ("you accept text behind the answer", "SHAPE.fullmatch", "SHAPE.match"),
        ("you accept text behind and before the answer", "SHAPE.fullmatch", "SHAPE.search"),
        ("at most `limit` actions are used", "[:limit]", ""),
        ("upper and lower case are the same word", "word.strip().lower()", "word.strip()",
         "action.lower(): action", "action: action"),
        ("an answer with an unknown action is invalid as a whole: None, not the rest of it",
         "return None if None in chosen else chosen",
         "return [action for action in chosen if action]"),
        ("return the action as the world writes it, not as the model wrote it",
         "return None if None in chosen else chosen",
         "return None if None in chosen else [action.lower() for action in chosen]"),
        ("blanks around an action do not matter", "word.strip().lower()", "word.lower()"),
        ("too many actions are no mistake: the first `limit` are used", "if not found:",
         'if not found or found["actions"].count("||") >= limit:'),
        ("invalid is None, not an empty list", "if not found:\n        return None",
         "if not found:\n        return []"),
        ("only the thought's and the answer's tags count: the text in between may hold <", "SHAPE.fullmatch(text)",
         r're.fullmatch(r"(<think>([^<]*)</think>\s*)?<answer>(?P<actions>[^<]*)</answer>\s*", text)'),
        ("an answer without a thought is valid, too", "if not found:", "if not found or not found[1]:"),
        ("white space may stand between the thought and the answer", "SHAPE.fullmatch(text)",
         r're.fullmatch(SHAPE.pattern.replace(r"</think>\s*", "</think>"), text, re.S)'),
        ("white space may stand behind the answer", "SHAPE.fullmatch(text)",
         r're.fullmatch(SHAPE.pattern.replace(r"</answer>\s*", "</answer>"), text, re.S)'),
        ("blanks inside an action matter: \"U p\" is unknown", "word.strip().lower()",
         "word.replace(\" \", \"\").lower()"),
    ]),
    "Trajectory": Exercise("4 who wrote which token", 1, rm.Trajectory, record,
                           [dict(pieces=SHORT), dict(pieces=EPISODE)], [
        ("you train the world's tokens: their mask is False", "[sampled] * len(ids)", "[True] * len(ids)"),
        ("the model's tokens are what is trained: their mask is True", "[sampled] * len(ids)", "[False] * len(ids)"),
        ("the end of turn is not trained. The model wrote it, too, or else it never learns to stop",
         "[sampled] * len(ids)", "[sampled and token != 0 for token in ids]"),
        ("later messages are appended, they do not replace what was there", "self.ids += ids", "self.ids = ids"),
        ("later messages are appended, they do not replace what was there", "self.ids += ids",
         "self.ids = self.ids * sampled + ids"),
        ("`self.ids = ids` gives the list of the caller a second name, and what is appended later changes it, too",
         "self.ids += ids", "if self.ids:\n            self.ids += ids\n        else:\n            self.ids = ids"),
        ("the lists must stay equally long: the world's tokens need an old_logp, 0", "[logp] * len(ids)",
         "[logp] * len(ids) * sampled"),
        ("the lists must stay equally long: the world's tokens need a reward, 0", "[0.0] * len(ids)",
         "[0.0] * len(ids) * sampled"),
        ("the lists must stay equally long: the model's tokens need a reward, 0 until the turn is over",
         "[0.0] * len(ids)", "[0.0] * len(ids) * (not sampled)"),
        ("the lists must stay equally long: a message of several tokens has as many entries", "[sampled] * len(ids)",
         "[sampled]", "[logp] * len(ids)", "[logp]", "[0.0] * len(ids)", "[0.0]"),
        ("answer_start is where the *next* answer begins, behind the message", "self.answer_start = len(self.ids)",
         "self.answer_start = len(self.ids) - len(ids)"),
        ("answer_start moves with every token of the answer: only a message sets it", "if not sampled:", "if True:"),
        ("answer_start moves with every token of the answer: only a message sets it", "if not sampled:",
         "if sampled:\n            self.answer_start = len(self.ids) - 1\n        else:"),
        ("answer_start is not set", "self.answer_start = len(self.ids)", "pass"),
        ("the log-probability belongs into old_logp", "[logp] * len(ids)", "[0.0] * len(ids)"),
    ]),
    "collate": Exercise("5 the shift", 1.5, rm.collate, make_batch, [
        dict(episodes=[(SHORT, 1.0)]), dict(episodes=[(EPISODE, 1.0), (SHORT, -0.1)])], [
        ("the mask is one column off: it belongs to the *targets*, so it is shifted as they are", SHIFTED,
         unshifted("mask")),
        ("the targets are the inputs' *next* tokens: shifted by one", "traj.ids[1:]", "traj.ids[:-1]"),
        ("the rewards are one column off: they belong to the targets", SHIFTED, unshifted("reward")),
        ("the old log-probabilities are one column off: they belong to the targets", SHIFTED, unshifted("old_logp")),
        ("nothing is shifted: all columns but the inputs belong to the next token", "traj.ids[1:]", "traj.ids[:-1]",
         SHIFTED, "getattr(traj, name)[:-1]"),
        ("mask, log-probabilities and rewards are one column off: they belong to the targets", SHIFTED,
         "getattr(traj, name)[:-1]"),
        ("the mask was made from the tokens. Here 0 is the end of a turn *and* the padding: ask the trajectory",
         SHIFTED, "[x and i != 0 if name == 'mask' else x for x, i in zip(getattr(traj, name)[1:], traj.ids[1:])]"),
        ("the world's tokens are trained: the mask is the trajectory's, not `is there a token?`", SHIFTED,
         "[name == 'mask' or x for x in getattr(traj, name)[1:]]"),
        ("the tensors belong on `device`", ".to(device)", ""),
        ("the inputs are one token too long: nothing follows the last one", "traj.ids[:-1]", "traj.ids"),
    ]),
    "token_logps": Exercise("6 log-probabilities and entropy", 1.5, rm.token_logps, logps_and_gradient, [
        dict(seed=0, temperature=1.0, lengths=[3, 4]), dict(seed=1, temperature=0.5, lengths=[5, 2]),
        dict(seed=2, temperature=0.02, lengths=[3])], [
        ("the temperature is missing: the tokens were sampled from softmax(logits / temperature)", " / cfg.temperature",
         ""),
        ("the division by the temperature comes first, then log_softmax: else the probabilities do not sum to 1",
         "(head(hidden).float() / cfg.temperature).log_softmax(-1)",
         "head(hidden).float().log_softmax(-1) / cfg.temperature"),
        ("logits are *divided* by the temperature", " / cfg.temperature", " * cfg.temperature"),
        ("the entropy has the wrong sign: it is -sum p log p, at least 0", "entropy_of(logp)", "-entropy_of(logp)"),
        ("the softmax runs over the vocabulary, the last dimension", "log_softmax(-1)", "log_softmax(0)"),
        ("only the tokens that the model wrote are wanted, those of the mask", "mask = part[\"mask\"]",
         "mask = torch.ones_like(part[\"mask\"])"),
        ("`inputs` are what was read; the token to come is in `targets`", "part[\"targets\"]", "part[\"inputs\"]"),
        ("logp is of the token that was written, not of the likeliest one", "targets[:, None]",
         "logp.argmax(1)[:, None]"),
        ("that is -log pi of the written token. The entropy is a mean over the whole vocabulary",
         "entropy_of(logp)", "-logp.gather(1, targets[:, None])[:, 0]"),
        ("the entropy is a sum over the vocabulary, not a mean", "entropy_of(logp)",
         "entropy_of(logp) / logp.shape[1]"),
        ("a probability, not its logarithm", "logp.gather", "logp.exp().gather"),
        ("logits are no log-probabilities: log_softmax is missing", "logp.gather", "head(hidden).gather"),
        ("one dimension too many: (n,1) instead of (n,)", ".flatten(), entropy", ", entropy"),
        ("no gradient reaches the model: was something detached?", "logp.gather(1, targets[:, None]).flatten()",
         "logp.detach().gather(1, targets[:, None])[:, 0] + 0 * logp[:, 0]"),
    ]),
    "grpo_advantages": Exercise("7 advantages from the group", 1.5, rm.grpo_advantages, results("advantages"), [
        dict(R=numbers([0.0, 0, 0, 1], [10.0, 10, 10, 12])),
        dict(R=numbers([0.0, 0, 0, 1])),
        dict(R=numbers([0.0, 0, 0, 1], [10.0, 10, 10, 12]), norm="mean"),
        dict(R=numbers([10.9] * 5 + [10.900001], [0.0, 1, 0, 1, 0, 1]))], [
        ("you normalised over the batch, not over the group", "R.mean(dim=1, keepdim=True)", "R.mean()",
         "R.std(dim=1, keepdim=True)", "R.std() + 0 * R"),
        ("the mean is that of the batch, not of the group", "R.mean(dim=1, keepdim=True)", "R.mean()"),
        ("the std is that of the batch, not of the group", "R.std(dim=1, keepdim=True)", "R.std() + 0 * R"),
        ("you compared over dimension 0, between groups. A group is a row: dim=1", "R.mean(dim=1, keepdim=True)",
         "R.mean(dim=0, keepdim=True)",
         "R.std(dim=1, keepdim=True)", "R.std(dim=0, keepdim=True)"),
        ("that is the population's std (divided by N), we take the sample's (N - 1), torch's default",
         "R.std(dim=1, keepdim=True)", "R.std(dim=1, keepdim=True, correction=0)"),
        ("equal returns tell nothing: 0, not rounding noise divided by almost 0",
         "torch.where(std < 1e-4, 0.0, centered / (std + 1e-6))", "centered / (std + 1e-6)"),
        ("equal returns tell nothing: 0, not nan", "torch.where(std < 1e-4, 0.0, centered / (std + 1e-6))",
         "centered / torch.where(std > 1e-4, std, 0.0) + 0"),
        ("norm=\"mean\" only subtracts the mean", "if norm == \"mean\":", "if False:"),
        ("you divide where norm=\"std\" is not asked for, or do not where it is", "if norm == \"mean\":",
         "if norm == \"std\":"),
        ("the mean of the group is not subtracted", "R - R.mean(dim=1, keepdim=True)", "R"),
        ("you divide by the variance, not by its root", "R.std(dim=1, keepdim=True)", "R.var(dim=1, keepdim=True)"),
        ("you never divide by the std of the group", "torch.where(std < 1e-4, 0.0, centered / (std + 1e-6))",
         "centered"),
    ]),
    "uncertainty_filter": Exercise("8 the filter of StarPO-S", 1, rm.uncertainty_filter, kept_prompts, [
        dict(R=numbers([0.0, 0, 0, 0], [0.0, 1, 0, 1], [5.0, 5, 5, 5.2], [0.0, 9, 0, 9]), keep=0.5),
        dict(R=numbers([0.0, 0, 0, 0], [0.0, 8, 0, 8], [5.0, 5, 5, 5.2], [0.0, 6, 0, 6]), keep=0.25),
        dict(R=numbers([7.0, 7], [0.0, 4], [1.0, 2]), keep=0.25),
        dict(R=SPREADS, keep=0.67),
        dict(R=numbers([7.0, 7], [0.0, 4], [1.0, 2], [3.0, 9], [0.0, 3]), keep=0.5),
        dict(R=100 * numbers([0.0, 3], [0.0, 1], [0.0, 8], [0.0, 5], [0.0, 2], [0.0, 7], [0.0, 4], [0.0, 6]),
             keep=0.25)], [
        ("you kept the *least* uncertain prompts", "descending=True", "descending=False"),
        ("you kept the prompts with the best returns: uncertain is where they *differ*", "R.std(dim=1, correction=0)",
         "R.mean(dim=1)"),
        ("you kept the prompts with the largest return: uncertain is where they *differ*", "R.std(dim=1, correction=0)",
         "R.amax(dim=1)"),
        ("the filter sees raw returns: after the normalisation all groups have the same std",
         "R.std(dim=1, correction=0)", "grpo_advantages(R).std(dim=1, correction=0)"),
        ("at least one prompt is kept", "max(1, int(keep * len(R) + 1e-9))", "int(keep * len(R) + 1e-9)"),
        ("the number of kept prompts is rounded down", "int(keep * len(R) + 1e-9)", "-int(-keep * len(R) // 1)"),
        ("the std is over the episodes of a prompt (dim=1), not over the prompts", "R.std(dim=1, correction=0)",
         "R.std(dim=0, correction=0)"),
        ("that is the std relative to the mean", "R.std(dim=1, correction=0)",
         "R.std(dim=1, correction=0) / (R.mean(dim=1).abs() + 1e-6)"),
        ("the std is not the largest return minus the smallest", "R.std(dim=1, correction=0)",
         "R.amax(dim=1) - R.amin(dim=1)"),
        ("`keep` is a share of the prompts, not of the order of their numbers",
         "U.argsort(descending=True, stable=True)",
         "torch.arange(len(R))"),
    ]),
    "gae": Exercise("9 advantages from a critic", 2.5, rm.gae, results("advantage", "ret"), [
        WORKED, random_steps(3) | dict(gamma=0.9, lam=0.95), random_steps(5) | dict(gamma=0.9, lam=0.0)], [
        ("you walk over the environment's tokens as if they were steps", "torch.where(own, value[:, t], next_value)",
         "value[:, t]",
         "torch.where(own, delta + gamma * lam * next_advantage, next_advantage)",
         "delta + gamma * lam * next_advantage"),
        ("you walk over the environment's tokens as if they were steps", "torch.where(own, value[:, t], next_value)",
         "value[:, t]",
         "torch.where(own, delta + gamma * lam * next_advantage, next_advantage)",
         "delta + gamma * lam * next_advantage",
         "next_advantage * own", "next_advantage", "(advantage + value) * mask", "advantage + value"),
        ("you bootstrap through the environment's tokens: the next value is that of the model's *next own* token",
         "torch.where(own, value[:, t], next_value)", "value[:, t]"),
        ("the environment's tokens must not discount anything",
         "delta + gamma * lam * next_advantage, next_advantage)",
             "delta + gamma * lam * next_advantage, gamma * lam * next_advantage)"),
        ("the advantage starts anew after every message: what happens in later turns is lost",
         "delta + gamma * lam * next_advantage, next_advantage)", "delta + gamma * lam * next_advantage, 0.0)"),
        ("the environment's tokens have advantage 0", "next_advantage * own", "next_advantage"),
        ("advantage and ret should be 0 at the environment's tokens", "next_advantage * own", "next_advantage",
         "(advantage + value) * mask", "advantage + value"),
        ("the environment's tokens have advantage 0", "next_advantage * own",
         "torch.where(own, next_advantage, delta + gamma * lam * next_advantage)"),
        ("advantage and ret should be 0 at the environment's tokens", "next_advantage * own",
         "torch.where(own, next_advantage, delta + gamma * lam * next_advantage)",
         "(advantage + value) * mask", "advantage + value"),
        ("lambda is missing", "gamma * lam *", "gamma *"),
        ("gamma is missing before A_t'", "gamma * lam *", "lam *"),
        ("gamma is missing before v_t'", "gamma * next_value", "next_value"),
        ("that is the sum of rewards: the forecast v_t is not subtracted", "+ gamma * next_value - value[:, t]", ""),
        ("the next value is missing in delta", "+ gamma * next_value - value[:, t]", "- value[:, t]"),
        ("ret is advantage *plus* value: forecast + how much better it went", "(advantage + value) * mask",
         "(advantage - value) * mask"),
        ("ret should be 0 at the environment's tokens", "(advantage + value) * mask", "(advantage + value)"),
        ("ret is not the advantage: the forecast has to be added", "(advantage + value) * mask", "advantage * mask"),
        ("you walk forwards: A_t needs the next one, so begin at the end", "reversed(range(value.shape[1]))",
         "range(value.shape[1])"),
    ]),
    "policy_loss": Exercise("10 the clipped objective", 1.5, rm.policy_loss, loss_and_gradient, [
        dict(ratio=EDGES, adv=SIGNS, entropy=torch.zeros(10), cfg=settings_of(clip_high=0.28)),
        dict(ratio=numbers(1.0, 1.0, 0.9), adv=numbers(2.0, -1, 0), entropy=numbers(1.0, 2, 3),
         cfg=settings_of(entropy_coef=0.1))], [
        ("the clip is symmetric: above it is 1 + clip_high", "1 + cfg.clip_high", "1 + cfg.clip_low"),
        ("below it is 1 - clip_low", "1 - cfg.clip_low", "1 - cfg.clip_high"),
        ("`max` instead of `min`: the worse of the two counts, so that there is no reward for going too far",
         "torch.min",
         "torch.max"),
        ("nothing is clipped", "ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)", "ratio"),
        ("only the clipped term is left: a bad token that became likelier (ratio 1.3, A < 0) is never pushed back",
         "torch.min(unclipped, clipped)", "clipped"),
        ("a ratio of probabilities is exp of the difference of their logarithms", "(logp - old_logp).exp()",
         "1 + logp - old_logp"),
        ("the ratio compares with what it was at the rollout: old_logp", "(logp - old_logp)", "(logp - logp.detach())"),
        ("the ratio is upside down", "(logp - old_logp)", "(old_logp - logp)"),
        ("the sign of a loss: what is to grow must be negated", "-torch.min", "torch.min"),
        ("the entropy has the wrong sign: it is a bonus, so it lowers the loss", "- cfg.entropy_coef",
         "+ cfg.entropy_coef"),
        ("the entropy bonus is missing", "- cfg.entropy_coef * entropy", ""),
        ("the entropy bonus lacks its weight", "cfg.entropy_coef * entropy", "entropy"),
        ("`clipped` should be true where the clipped term was the smaller one, not wherever the ratio is outside",
         "clipped < unclipped", "clipped != unclipped"),
    ]),
    "value_loss": Exercise("11 the critic's loss", 1, rm.value_loss, error_and_gradient, [
        dict(value=numbers(0.3, 1.0, -1.0), old_value=torch.zeros(3), ret=numbers(2.0, 2, 2)),
        dict(value=numbers(0.2, 2.4, 3.1), old_value=numbers(1.0, 2, 3), ret=numbers(-1.0, 3, 3))], [
        ("the forecast is not clipped", "(value - old_value).clamp(-VALUE_CLIP, VALUE_CLIP)", "(value - old_value)"),
        ("the worse of the two errors counts: max, not min", "torch.max", "torch.min"),
        ("only the clipped forecast's error is left", "torch.max((value - ret) ** 2, (clipped - ret) ** 2)",
         "(clipped - ret) ** 2"),
        ("the half is missing", "0.5 * ", ""),
        ("the *change* of the forecast is clipped, not the forecast",
         "old_value + (value - old_value).clamp(-VALUE_CLIP, VALUE_CLIP)", "value.clamp(-VALUE_CLIP, VALUE_CLIP)"),
        ("the old value is missing: what is clipped is the way from it", "old_value + (value", "(value"),
        ("errors are squared", "torch.max((value - ret) ** 2, (clipped - ret) ** 2)",
         "torch.max((value - ret).abs(), (clipped - ret).abs())"),
    ]),
    "add_gradients": Exercise("12 gradients by micro-batches", 1, rm.add_gradients, gradients_by_parts, [
        dict(seed=0, lengths=[8, 4, 2, 8, 5], critic=False), dict(seed=1, lengths=[8, 4, 2, 8, 5], critic=True)], [
        ("a mean of the parts' means: a token of a small part would count more than one of a large part",
         "loss.sum() / total", "loss.float().mean() / len(list(micro_batches(batch, rows)))"),
        ("divide by the tokens of *all* parts together: a mean over each part, added up, is too large",
         "loss.sum() / total", "loss.float().mean()"),
        ("you divide by rows times columns: pads and the world's tokens are no trained tokens",
         "int(batch[\"mask\"][rows].sum())", "batch[\"mask\"][rows].numel()"),
        ("you divide by the tokens of the whole batch, also of rows that are not in this step",
         "batch[\"mask\"][rows].sum()", "batch[\"mask\"].sum()"),
        ("you divide by the number of trajectories: the loss is a mean over tokens", "int(batch[\"mask\"][rows].sum())",
         "len(rows)"),
        ("nothing is divided: the loss is a mean over the tokens", "int(batch[\"mask\"][rows].sum())", "1"),
        ("the critic is not trained", "if \"ret\" in part:", "if False:"),
        ("the critic's loss is not divided as the policy's is", "loss.sum() / total",
         "loss.float().mean() if name == \"value_loss\" else loss.sum() / total"),
        ("there are no gradients: `backward` is missing", "mean.backward()", "pass"),
        ("all rows of the batch are in, not the given ones alone", "micro_batches(batch, rows)",
         "micro_batches(batch, range(len(batch[\"mask\"])))"),
    ]),
    "take_step": Exercise("12 the step", 0.5, rm.take_step, step_of, changes=True, cases=[
        dict(seed=0, lengths=[0.5, 3.0]), dict(seed=1, lengths=[7.0]), dict(seed=2, lengths=[20.0, 0.5])], mistakes=[
        ("both networks were shortened together: each network's gradient is shortened on its own",
         "[network for network in (models.policy, models.critic) if network]",
         "[nn.ModuleList(filter(None, (models.policy, models.critic)))]"),
        ("long gradients must be shortened to MAX_GRAD_NORM, each network's on its own",
         "network.parameters(), MAX_GRAD_NORM",
         "network.parameters(), 1e9"),
        ("the critic's gradient is not shortened", "(models.policy, models.critic) if network", "[models.policy]"),
        ("the gradient of this step is still there in the next: zero_grad", "    models.optimizer.zero_grad()\n", ""),
        ("the gradients were set to zero before the step",
         "    models.optimizer.step()\n    models.optimizer.zero_grad()\n",
         "    models.optimizer.zero_grad(set_to_none=False)\n    models.optimizer.step()\n"),
        ("the optimizer never steps", "models.optimizer.step()", "pass"),
        ("that is the length of the critic's gradient: the policy's is wanted", "norms[0]", "norms[-1]"),
    ]),
    "settings": Exercise("13 training (the agent must learn)", 1, lambda: dict(SETTINGS), accepted, [{}]),
    "returns": Exercise("14a bug: returns", 0.5, rm.returns, results("R"), [
        dict(trajs=[SimpleNamespace(R=float(i)) for i in range(6)], cfg=settings_of(rollouts=3))],
         [(STILL, *BUGS["returns"])]),
    "compute_advantages": Exercise("14b bug: compute_advantages", 0.5, rm.compute_advantages, advantages_of, [
        dict(seed=0, algo="ppo", ref=True), dict(seed=1, algo="ppo", ref=False)], [
        (STILL, *BUGS["compute_advantages"]),
        ("the mean is right now, but the std is still that of all tokens", "adv[mask].std(", "adv.std("),
        ("the std is right now, but the mean is still that of all tokens", "adv[mask].mean()", "adv.mean()"),
        ("the line is repaired, but the penalty is a negative reward: it is added", "] + penalty", "] - penalty"),
        ("the line was all right: the penalty is a negative reward and is added", *BUGS["compute_advantages"],
         "] + penalty", "] - penalty"),
    ]),
    "sample": Exercise("14c bug: sample", 0.5, rm.sample, drawn, changes=True, cases=[dict(seed=0)], mistakes=[
        (STILL, *BUGS["sample"]),
        ("the probabilities of the words are exp(logp), no others", "logp.exp()", "torch.ones_like(logp)"),
        ("it is right, but for the dice: the given generator must throw them", ", generator=generator", ""),
    ]),
    "take_turn": Exercise("14d bug: take_turn", 0.5, rm.take_turn, play_turn, changes=True, cases=[
        dict(text="I go . <|im_end|>"), dict(text=said("Down")),
        dict(text=said("solve"), bonus=0.5)],
         mistakes=[(STILL, *BUGS["take_turn"])]),
    "paradox": Exercise("15 the bandit paradox, on paper", 0.5, expected_advantages,
        on_paper, [{}], [
        ("that is with the population's std (divided by N), we take the sample's (N - 1)", "norm)[0, 0].item()",
         "norm)[0, 0].item() * (1 if norm == \"mean\" else (N / (N - 1)) ** 0.5)"),
        ("norm=\"mean\" comes first, then norm=\"std\"", "tuple(means)", "tuple(means[::-1])"),
    ], show_spec=False),
    "collapse": Exercise("16 what moved first?", 0.5, order_of_alarm, results("order"), [
        dict(log=collapse_rows()[1])], [
        ("a third one moves, too, at the very end", '"entropy", "reward_std", "valid"', '"entropy", "valid"'),
        ("the order is the wrong way round", "key=first.get", "key=lambda column: -first[column]"),
    ], show_spec=False),
}
