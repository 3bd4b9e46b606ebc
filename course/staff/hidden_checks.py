"""More inputs for the exercises, which the notebook does not show: other shapes and seeds, and the edges.

They run if HIDDEN_CHECKS=1 is in the environment of `nbgrader autograde`. Hidden from the notebook, not secret: what
they expect is what the shipped functions give.
"""
import time
from dataclasses import replace
from types import SimpleNamespace

import torch

import exercises
from exercises import MOVES, numbers, random_steps, said, settings_of

SEEDS = range(10, 15)


class Hostile(str):
    """100 KB that a careless pattern needs minutes for; not printed."""

    def __repr__(self):
        return f"{self[:40]!r} ... ({len(self)} characters)"


def ragged(seed, B=4):  # -> episodes of different lengths; some answers are cut off; 0 ends a turn and is the padding
    g = torch.Generator().manual_seed(seed)

    def draw(most):
        return int(torch.randint(1, most, (1,), generator=g))
    made = []
    for _ in range(B):
        pieces = []
        for _ in range(draw(4)):
            pieces.append(("world", [draw(9) for _ in range(draw(5))]))
            answer = [(draw(9), -0.1 * (draw(9) - 1)) for _ in range(draw(4))]
            if draw(3) == 1:
                answer.append((0, -0.3))
            pieces.append(("model", answer))
        made.append((pieces, 0.5 * draw(5)))
    return made


def group_returns(seed, P, N):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(P, N, generator=g) * torch.arange(1, P + 1)[:, None] + 10 * torch.arange(P)[:, None]


def ratios(seed, n=12):
    g = torch.Generator().manual_seed(seed)
    cfg = settings_of(clip_low=0.1, clip_high=0.35, entropy_coef=0.03)
    return dict(ratio=torch.rand(n, generator=g) * 1.2 + 0.4, adv=torch.randn(n, generator=g),
                entropy=torch.rand(n, generator=g), cfg=cfg)


def forecasts(seed, n=9):
    g = torch.Generator().manual_seed(seed)
    return dict(value=2 * torch.randn(n, generator=g), old_value=torch.randn(n, generator=g),
                ret=torch.randn(n, generator=g))


def steps_at_the_edges():
    """The world's tokens at both ends; an episode of one token; one in which the model wrote nothing."""
    mask = numbers([False, True, True, False, True, False], [True, False, False, False, False, False], [False] * 6)
    value = torch.where(mask, numbers([0.0, 0.5, -1, 0, 2, 0], [0.7, 0, 0, 0, 0, 0], [0.0] * 6), -77.0)
    reward = numbers([0.0, 0, 1, 0, -0.1, 0], [2.0, 0, 0, 0, 0, 0], [0.0] * 6)
    return dict(reward=reward, value=value, mask=mask)


def texts():
    answers = [
        "LEFT", "Up||", "Up Down", "U p", "Up | Left", "Up, Left", "Up||Up||Left||Left||Up||Up",
        "up|| DOWN ||left ||Right", "<answer>Up"]
    thoughts = ["", "two\nlines", "1 < 2 > 0", "x<think>", "x</think>", "a</think><answer>b"]
    others = [
        "", "<think>x", "<answer>Up</answer>", "<answer>Up</answer><think>x</think>",
        "\n<think>x</think><answer>Up</answer>",
        "Well. <think>x</think><answer>Up</answer> Bye.", "<think>x</think><answer>Left</answer>.",
        "<think>x</think>\n\n<answer>Up</answer>\n", "<Think>x</Think><Answer>Up</Answer>"]
    long = 100_000
    hostile = [
        "<think>" * (long // 7), "<think></think>" * (long // 15), "<think>" + " " * long,
        "<think></think>" + " " * long, "<think></think><answer>" + "||" * (long // 2)]
    plain = [f"<think>x</think><answer>{answer}</answer>" for answer in answers]
    plain += [f"<think>{thought}</think><answer>Up</answer>" for thought in thoughts]
    return plain + others + [Hostile(text) for text in hostile]


def timed(answer, text, actions, limit):
    begin = time.perf_counter()
    actions = answer(text, actions, limit)
    return {"actions": actions, "in 2 seconds": time.perf_counter() - begin < 2}


LAKES = [dict(seed=seed, rate=rate, state=state, action=action) for seed, rate, state, action in (
    (0, 1.0, (1, 1), "Up"), (3, 0.5, (0, 3), "Right"), (4, 0.8, (2, 3), "Down"), (5, 1 / 3, (3, 0), "Left"),
    (6, 0.6, (2, 0), "Down"))]
LAKES += [dict(seed=seed, rate=0.7, state=None, action=action)
          for seed in SEEDS for action in ("Left", "Down", "Right", "Up")]
LAKES += [dict(seed=7, rate=0.7, state=(3, 3), action=action, size=6) for action in ("Right", "Down")]

CASES = {
    "moves": [],
    "outcomes": LAKES,
    "yardsticks": [dict(world="frozenlake", seed=seed, horizon=5, rate=rate) for seed in SEEDS for rate in (1 / 3, 0.9)]
    + [dict(world="sokoban", seed=seed, horizon=6) for seed in SEEDS] + [dict(world="bandit_rev", seed=1, horizon=1),
     dict(world="frozenlake", seed=4, horizon=3, at_goal=True)],
    "parse_answer": [dict(text=text, actions=MOVES, limit=4) for text in texts()] + [
        dict(text="<think>.</think><answer>trader</answer>", actions=("Librarian", "Trader"), limit=1),
        dict(text="<think>.</think><answer>GO up || stay</answer>", actions=("go up", "Stay"), limit=3),
        dict(text="<think>.</think><answer>Up || Up || fly</answer>", actions=MOVES, limit=2)],
    "Trajectory": [dict(pieces=[("world", [0, 0]), ("model", [(0, -0.9), (2, -0.1)])]),
                   dict(pieces=[("world", [3, 1, 4, 1, 5]), ("model", [(4, -0.2), (4, 0.0)]), ("world", [0, 5]),
                                ("model", [(1, -2.0)]),
                    ("world", [9])])],
    "collate": [dict(episodes=ragged(seed)) for seed in SEEDS]
    + [dict(episodes=[([("world", [3]), ("model", [(0, -1.0)])], 1.0)])],
    "token_logps": [dict(seed=seed, temperature=t, lengths=lengths) for seed, t, lengths in (
        (5, 0.7, [6, 3]), (6, 1.0, [2]), (7, 2.0, [4, 9, 5]), (8, 0.02, [2, 4]))],
    "grpo_advantages": [dict(R=group_returns(seed, P, N), norm=norm) for norm in ("std", "mean")
                        for seed, P, N in ((1, 3, 2), (2, 1, 16), (3, 5, 3), (4, 4, 4))]
    + [dict(R=torch.full((2, n), x)) for n, x in ((2, 0.0), (16, 10.9), (3, -0.1), (6, 5.3))]
    + [dict(R=numbers([5.3, 5.300001, 5.3]))],
    "uncertainty_filter": [dict(R=group_returns(seed, P, N).flip(0), keep=keep) for seed, P, N, keep in (
        (1, 8, 16, 0.25), (2, 7, 2, 0.5), (3, 1, 4, 0.1), (4, 6, 3, 1.0), (5, 3, 2, 0.34))]
    + [dict(R=1000 * torch.arange(1.0, 8)[:, None] * numbers([0.0, 1]), keep=0.3),
     dict(R=-group_returns(6, 8, 4), keep=0.75), dict(R=exercises.SPREADS, keep=0.34),
     dict(R=-exercises.SPREADS, keep=0.67),
     dict(R=group_returns(7, 100, 2), keep=0.29)],
    "gae": [random_steps(seed, B, T) | dict(gamma=gamma, lam=lam) for seed, B, T, gamma, lam in (
        (11, 3, 17, 0.9, 0.95), (12, 1, 5, 1.0, 1.0), (13, 4, 30, 0.5, 0.0), (14, 2, 9, 0.99, 0.5))]
    + [steps_at_the_edges() | dict(gamma=0.9, lam=0.8)],
    "policy_loss": [ratios(seed) for seed in SEEDS] + [
        dict(ratio=numbers(1.0), adv=numbers(-1.0), entropy=numbers(0.5), cfg=settings_of(entropy_coef=0.2))],
    "value_loss": [forecasts(seed) for seed in SEEDS],
    "add_gradients": [dict(seed=seed, lengths=lengths, critic=critic) for seed, lengths, critic in (
        (11, [6, 2, 9, 3], False), (12, [5, 5, 8, 2, 6, 7], True), (13, [4, 8, 2], True))],
    "take_step": [dict(seed=seed, lengths=lengths) for seed, lengths in (
        (11, [0.3]), (12, [0.9, 4.0]), (13, [50.0, 60.0]), (14, [1.0, 1.5]))],
    "settings": [],
    "returns": [dict(trajs=[SimpleNamespace(R=0.5 * i * i) for i in range(12)], cfg=settings_of(rollouts=4))],
    "sample": [dict(seed=seed) for seed in SEEDS],
    "compute_advantages": [dict(seed=seed, algo=algo, ref=ref) for seed in (11, 12) for algo in ("ppo", "grpo")
                           for ref in (True, False)],
    "take_turn": [
        dict(text=said("Up || Left")),
        dict(text="I go . </think> <answer> Down", tokens=5),
        dict(text=said("Left")),
        dict(text=said("solve"), seed=3),
        dict(text=said("solve"), world="sokoban", seed=2),
        dict(text=said("Left || Left"), actions=1),
        dict(text=said("Left || Left"), actions=2),
        dict(text=said("Left"), turns=1, bonus=0.5)],
    "paradox": [],
    "collapse": [],
}


def exercise_of(name):
    """The exercise as it is checked here: `parse_answer` must be quick, too."""
    exercise = exercises.EXERCISES[name]
    if name == "parse_answer":
        return replace(exercise, run=timed)
    return exercise


def all_cases(name):
    return exercises.EXERCISES[name].cases + CASES[name]
