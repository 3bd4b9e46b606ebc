"""Can a world of your own be trained in? One line names the first mistake; else a line says what to expect of it.

    python extras/check_world.py my_world.py:Guess
    my_world.py:Guess: success in 10 actions, random 0.33, optimal 1.00

    python extras/check_world.py my_world.py:Guess --model Qwen/Qwen2.5-0.5B-Instruct     knows that model the words?

In a notebook: check(Guess), with your class.
"""
import argparse
import contextlib
import inspect
import math
import os
import re
import sys
import traceback
from numbers import Real
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import transformers

import envs
import ragen_mini as rm
from envs import UserError, need

LEVELS = len(envs.EVAL_SEEDS)
MOST_STATES = 20_000  # of a level: exact yardsticks of more would take hours
MOST_VISITED = 100  # states of a level in which everything is tried
MOST_REWARD = 1e6  # the critic learns slowly what is far from 0, and squared, 1e20 is no number of fp32
ALL_TEXT = 200  # characters of a list of words
NUMBER = (Real, np.bool_)
# What tiny was taught:
WRITABLE = "Up, Down, Left, Right (and, of a bandit's arms, Teacher, Engineer, Librarian, Trader)"
NOT_YOURS = (envs.__file__, __file__, str(Path(os.__file__).parent), str(Path(np.__file__).parent.parent), "<frozen")


class Mistake(Exception):
    """What is wrong with the world, in words. `blame` adds which world it is."""


def want(condition, message):
    if not condition:
        raise Mistake(message)


@contextlib.contextmanager
def blame(name):
    """Whatever goes wrong in a user's own code becomes one line that says where."""
    try:
        yield
    except Mistake as mistake:
        raise UserError(f"{label(name)}: {one_line(mistake)}") from None
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise UserError(f"{label(name)}: {kind}{your_line(error)}: {one_line(error)}") from error


def label(name):
    if isinstance(name, type):
        return name.__name__
    return name


def one_line(text):
    return " ".join(str(text).split())


def your_line(error):  # the deepest one that is not in our files or in a library
    places = traceback.extract_tb(error.__traceback__)
    yours = [place for place in places if not place.filename.startswith(NOT_YOURS)]
    if not yours:
        return ""
    return f" in {yours[-1].name}, line {yours[-1].lineno}"


# ------------------------------------------------------------------------------------------------- the check
def check(name, tok=None, horizon=10):
    """name: as --env takes it, or a class. With a tokenizer: does the model know the words? horizon: actions of an
    episode."""
    need(1 <= horizon <= 200, f"{horizon} actions: yardsticks are calculated for 1 to 200")
    with blame(name):
        env = envs.make(name)
        check_class(env)
        check_draw(env)
        texts = check_levels(env)
        success = success_by_level(env, horizon)
        random, optimal = success.mean(axis=0)
        want(optimal > 0, f"no level can be won in {horizon} actions: is `won` True of any state within reach?")
        unknown = []
        if tok is not None:
            check_actions(env, tok)
            unknown = unknown_words(texts, tok)
    print(f"{label(name)}: success in {horizon} actions, random {random:.2f}, optimal {optimal:.2f}")
    hopeless = np.sum(success[:, 1] == 0)
    if hopeless:
        print(f"  {hopeless} of {LEVELS} levels cannot be won in so many")
    tell_of_few_levels(env)
    if unknown:
        print(f"  the model does not know these words of `render`, and reads them all alike: {' '.join(unknown)[:ALL_TEXT]}")


def check_levels(env):  # -> what `render` shows of many
    texts = []
    for seed in training_seeds() + list(envs.EVAL_SEEDS):
        env.reset(seed)
        texts.append(env.render())
        if seed % 8 == 0:  # thoroughly, but not everywhere
            check_states(env)
    return texts


def training_seeds():  # as many as there are for evaluation
    return list(range(1000, 1000 + LEVELS))


def success_by_level(env, horizon):  # -> (256, 2): of random and of optimal play
    success = []
    for seed in envs.EVAL_SEEDS:
        env.reset(seed)
        env.outcomes = counted(env, horizon)  # hides the method
        success.append(envs.yardsticks(env, horizon)[:, -1])
        del env.outcomes
    return np.array(success)


def counted(env, horizon):  # -> env.outcomes, which complains when it is asked too often
    outcomes = env.outcomes
    most = MOST_STATES * len(env.actions)
    asked = 0

    def counting(state, action):
        nonlocal asked
        asked += 1
        want(asked <= most, f"{horizon} actions lead to more than {MOST_STATES} states, too many for exact yardsticks: "
             "make it smaller, or lower --max-actions")
        return outcomes(state, action)

    return counting


def tell_of_few_levels(env):
    held_out = count_levels(env, envs.EVAL_SEEDS)
    if env.split and held_out < 20:
        trained = count_levels(env, training_seeds())
        print(f"  only {held_out} levels are held out, {trained} are trained in: split = False would hold out none")


def count_levels(env, seeds):  # different ones
    found = set()
    for seed in seeds:
        found.add(repr(envs.find_level(type(env), env.draw_args, seed)))
    return len(found)


# ------------------------------------------------------------------------------------------------- its parts
def check_class(env):
    ours = isinstance(env, envs.Env) and type(env).reset is envs.Env.reset and type(env).step is envs.Env.step
    want(ours, "it must be a class of its own (envs.Env) that has `draw`, and no other `reset` or `step`")
    said = isinstance(env.instruction, str) and env.instruction.strip()
    want(said, f"`instruction` must tell the model its task, it is {env.instruction!r}")
    words = isinstance(env.actions, (tuple, list)) and all(isinstance(word, str) for word in env.actions)
    want(words and env.actions, f"`actions` is {env.actions!r}, not a tuple of words")
    lower = [action.lower() for action in env.actions]
    for action in env.actions:
        plain = action and action == action.strip() and not re.search(r"\|\||</?(think|answer)>", action)
        plain = plain and lower.count(action.lower()) == 1
        want(plain, f"the action {action!r} is empty, has ||, a tag such as <think> or outer blanks, or is there twice (capitals?)")


def check_draw(env):
    want(not takes_self(type(env)), "`draw` has a `self`: it must be a @staticmethod whose first argument is `rng`")
    for seed in range(20):
        one = draw(env, seed)
        pair = one is None or (isinstance(one, tuple) and len(one) == 2)
        want(pair, f"`draw` must return what stays fixed and the initial state, it returned {one!r}")
        other = draw(env, seed)
        want(repr(one) == repr(other), f"`draw` gave {one!r}, then for the same seed {other!r}: it may use no dice but "
             "`rng`, and plain values")
        want(not has_words_in_a_set(one), f"`draw` returned {one!r}: a set of words has another order in every process, "
             "and with it other levels are held out. Take a sorted tuple")


def takes_self(world):  # is its `draw` a plain method?
    plain = inspect.isfunction(inspect.getattr_static(world, "draw"))
    return plain and "self" in inspect.signature(world.draw).parameters


def has_words_in_a_set(x):  # anywhere in it
    if isinstance(x, (set, frozenset)):
        return "'" in repr(x)
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (tuple, list)):
        return False
    return any(map(has_words_in_a_set, x))


def draw(env, seed):
    return type(env).draw(np.random.default_rng(seed), *env.draw_args)


def check_states(env):
    """All that a world has, in the states that can be reached from env.state, nearest first."""
    start = env.state
    check_hashable(start)
    queue = [(start, False)]
    visited = {start}
    for state, over in queue:  # the list grows while we walk along it
        env.state, env.over = state, over
        check_render(env)
        check_won(env, start)
        if over:
            continue
        check_bonus(env)
        for action in env.actions:
            env.state = state
            for _, new, _, ends in check_outcomes(env, action, start):
                if new not in visited and len(visited) < MOST_VISITED:
                    visited.add(new)
                    queue.append((new, ends))


def check_render(env):
    text = env.render()
    want(isinstance(text, str) and text.strip(), f"`render` must return text, it returned {text!r}")
    want("\n\n" not in text, f"`render` must return one paragraph, without an empty line: {text!r}")
    facts = getattr(env, "facts", None)  # for extras/thoughts.py
    if facts:
        want(isinstance(facts(), dict), f"`facts` must return a dict, it returned {facts()!r}")
        re.compile(getattr(env, "claim", None) or "")


def check_won(env, start):
    state = env.state
    won = env.won(state)
    want(isinstance(won, (bool, np.bool_)), f"`won` must return True or False, it returned {won!r}")
    env.state = start
    want(env.won(state) == won, "`won` must look at its argument, not at self.state")
    env.state = state


def check_bonus(env):
    state = env.state
    answers = {f"<think>Hm.</think><answer>{env.actions[0]}</answer>": True, "<think>": False, "<answer>": False}
    for answer, valid in answers.items():
        bonus = env.bonus(dict(state=env.render(), answer=answer, valid=valid))
        good = is_number(bonus) and abs(bonus) <= MOST_REWARD  # as for rewards
        want(good, f"`bonus` must return a number, of the answer {answer!r} it returned {bonus!r}")
    want(env.state == state, "`bonus` must not change self.state")


def check_outcomes(env, action, start):  # -> env.outcomes(env.state, action)
    state = env.state
    place = f"outcomes({state!r}, {action!r})"
    level = repr(env.level)
    outcomes = env.outcomes(state, action)
    want(repr(env.level) == level, f"{place} must not change self.level: all episodes of the level share it")
    shape = isinstance(outcomes, list)
    for outcome in outcomes if shape else ():
        shape = shape and isinstance(outcome, (tuple, list)) and len(outcome) == 4
    want(shape, f"{place} must be a list of (probability, next state, reward, over?), it is {outcomes!r}")
    total = 0.0
    for chance, new, reward, over in outcomes:
        good = is_number(chance) and is_number(reward) and 0 <= chance <= 1
        want(good, f"{place}: {chance!r} is no probability, or {reward!r} no reward")
        want(abs(reward) <= MOST_REWARD, f"{place}: the reward {reward!r} is huge (at most {MOST_REWARD:g}, better 1 or 10)")
        want(over in (True, False), f"{place}: over? must be True or False, it is {over!r}")
        check_hashable(new)
        total += chance
    want(abs(total - 1) < 1e-6, f"{place}: the probabilities sum to {total:.3g}, not to 1")
    want(env.state == state, f"{place} must not change self.state: `step` rolls the dice and moves")
    env.state = start
    same = env.outcomes(state, action) == outcomes
    want(env.state == start, f"{place} must not change self.state: `step` rolls the dice and moves")
    want(same, f"{place}: asked again, with another self.state, it must say the same: what it says follows from its "
         "arguments and the level")
    return outcomes


def is_number(x):
    return isinstance(x, NUMBER) and math.isfinite(x)


def check_hashable(state):
    try:
        hash(state)
    except TypeError:
        raise Mistake(f"the state {state!r} must be hashable, such as a word, or a tuple of numbers") from None


def check_actions(env, tok):
    for action in env.actions:
        back = tok.decode(tok(action, add_special_tokens=False).input_ids).strip()
        want(back.lower() == action.lower(), f"the model cannot write the action {action!r} (its tokenizer makes "
             f"{back!r} of it): choose others. tiny writes {WRITABLE}")


def unknown_words(texts, tok):  # words of the texts that the tokenizer lacks
    words = set()
    for text in texts:
        words.update(text.split())
    unknown = []
    for word in sorted(words):
        ids = tok(word, add_special_tokens=False).input_ids
        if set(ids) == {tok.unk_token_id}:
            unknown.append(word)
    return unknown


if __name__ == "__main__":
    rm.signal(rm.SIGINT, rm.SIG_DFL)  # Ctrl-C ends it at once
    sys.stdout.reconfigure(errors="replace")  # not every terminal has a √
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", help="my_world.py:Class, or a name that python envs.py lists")
    parser.add_argument("--model", default="tiny", help="whose tokenizer is asked")
    parser.add_argument("--max-actions", "--max_actions", type=int, default=10, help="of an episode")
    args = parser.parse_args()
    source = rm.Config(model=args.model).source  # of a run: its checkpoint
    with rm.or_say(f"--model {source}: its tokenizer cannot be loaded"):
        tok = transformers.AutoTokenizer.from_pretrained(source, local_files_only=Path(source).parent.is_dir())
    check(args.world, tok, args.max_actions)
