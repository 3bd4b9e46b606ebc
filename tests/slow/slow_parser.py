"""Random, hostile and model-written answers: the parser never raises, and always agrees with one
that was written by hand, without a regular expression for the grammar.
"""
import itertools
import random
import re

import pytest

import envs
import ragen_mini as rm

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
WORDS = ["Up", "down", " LEFT ", "Right"]
PIECES = [*TAGS, "||", "|", *WORDS, "Teacher", "Jump", "<|im_end|>", "<ANSWER>", "think", "&lt;",
          "<", ">", "a" * 50, "", " ", "\n", "\0", "é", "\u202e", "\ud800", "😀", "İ", "\x1c"]


def by_hand(text, actions, limit):  # -> actions, or None
    parts = re.split("(</?think>|</?answer>)", text)
    if parts[1:4:2] == ["<think>", "</think>"]:
        if parts[0] or parts[4].strip():
            return None
        parts = ["", *parts[5:]]  # the rest is as if the thought were missing
    if parts[1::2] != ["<answer>", "</answer>"] or parts[0] or parts[4].strip():
        return None
    names = {action.lower(): action for action in actions}
    words = [word.strip().lower() for word in parts[2].split("||")][:limit]
    if not all(word in names for word in words):
        return None
    return [names[word] for word in words]


def pieces(dice):
    return "".join(dice.choices(PIECES, k=dice.randrange(12)))


def almost_right(dice):  # a valid answer with a few edits
    words = dice.choices(WORDS, k=dice.randrange(1, 9))
    between = dice.choice(["", " ", "\n"])
    parts = ["<think>", dice.choice(PIECES), "</think>", between, "<answer>", "||".join(words),
             "</answer>"]
    for _ in range(dice.randrange(3)):
        where = dice.randrange(len(parts))
        parts[where:where + dice.randrange(2)] = [dice.choice(PIECES)]
    return "".join(parts)


def agrees(text, dice):  # -> was it valid?
    actions, limit = dice.choice([
        (envs.Sokoban.actions, 5), (envs.FrozenLake.actions, 1), (("Teacher", "Engineer"), 2)])
    found = rm.parse_answer(text, actions, limit)
    assert found == by_hand(text, actions, limit), text
    return found is not None


@pytest.mark.parametrize("kind", [pieces, almost_right])
def test_parser_takes_anything(kind):
    dice = random.Random(0)
    valid = sum(agrees(kind(dice), dice) for _ in range(5000))
    assert valid > 200 or kind is not almost_right


def test_parser_takes_what_models_write():
    """At high temperatures tiny writes anything."""
    cfg = rm.Config(device="cpu", max_turns=2, algo="grpo", kl_coef=0.0)
    models = rm.load_models(cfg)
    dice = random.Random(0)
    valid = 0
    games = itertools.product(("frozenlake", "sokoban", "bandit"), (0.7, 3.0), (False, True))
    for number, (cfg.env, cfg.temperature, cfg.no_think) in enumerate(games):
        for traj in rm.rollout(models, range(300, 304), 2, cfg, number):
            valid += sum(agrees(turn["answer"], dice) for turn in traj.turns)
    assert valid > 20
