"""Can a model be trained in an environment of your own?

    python extras/check_world.py extras/my_world.py:Guess
        extras/my_world.py:Guess: success in 10 actions, random 0.33, optimal 1.00

    python extras/check_world.py extras/my_world.py:Guess --model Qwen/Qwen2.5-0.5B-Instruct

If there are mistakes, one line names the first of them. If not, one line says what to expect, and
others may follow with what is worth knowing, such as words that the model does not know.

In a notebook: check(Guess), with your class. Only of a file it is checked that other processes draw
the same levels.
"""
import argparse
import contextlib
import inspect
import math
import os
import re
import subprocess
import sys
import traceback
from numbers import Real
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import transformers

import envs
from support import errors, loading
from support.errors import UserError, need, one_line

# A level may have so many states. With more, exact yardsticks would take hours.
MOST_STATES = 20_000
# In so many states of a level everything is tried.
MOST_VISITED = 100
# The critic learns slowly what is far from 0. And 1e20, squared, is infinite in fp32.
MOST_REWARD = 1e6
# So many characters of a list of words are shown.
MOST_TEXT = 200
# As many levels of training are looked at as are held out.
TRAINING_SEEDS = range(1000, 1000 + len(envs.EVAL_SEEDS))
# What tiny was taught to write:
WRITABLE = "Up, Down, Left, Right (and, of a bandit's arms, Teacher, Engineer, Librarian, Trader)"
# Files in which a mistake is not looked for: ours, Python's and those of libraries.
NOT_YOURS = (envs.__file__, __file__, str(Path(os.__file__).parent),
             str(Path(np.__file__).parent.parent), "<frozen")


class Mistake(Exception):
    """What is wrong with the environment, in words. `blame` adds which environment it is."""


def want(condition, message):
    if not condition:
        raise Mistake(message)


@contextlib.contextmanager
def blame(name):
    """Inside, whatever goes wrong in the user's code becomes one line that says where."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        line = your_line(error)
        # Where no line of the user is to blame, the message of envs.py says it all.
        in_words = isinstance(error, Mistake) or (isinstance(error, ValueError) and not line)
        kind = "" if in_words else f"{type(error).__name__}{line}: "
        raise UserError(f"{label(name)}: {kind}{one_line(error)}") from error


def label(name):
    return name.__name__ if isinstance(name, type) else name


def your_line(error):  # -> text: the deepest place that is neither in our files nor in a library
    places = traceback.extract_tb(error.__traceback__)
    yours = [place for place in places if not place.filename.startswith(NOT_YOURS)]
    return f" in {yours[-1].name}, line {yours[-1].lineno}" if yours else ""


# ---------------------------------------------------------------------------------------- the check
def check(name, tok=None, horizon=10):
    """Prints what to expect of an environment, or raises UserError, which names a mistake.

    name: as --env takes it, or a class. tok: the tokenizer of a model that shall know its words.
    horizon: actions of an episode.
    """
    need(1 <= horizon <= 200, f"An episode may have {horizon} actions. Yardsticks are calculated "
                              f"for 1 to 200.")
    with blame(name):
        env = envs.make(name)
        check_class(env)
        check_draw(env)
        texts = check_levels(env)
        success = success_by_level(env, horizon)
        random, optimal = success.mean(axis=0)
        want(optimal > 0, f"no level can be won in {horizon} actions. Is `won` True of any state "
                          f"within reach?")
        unknown = []
        if tok is not None:
            check_actions(env, tok)
            unknown = unknown_words(texts, tok)
        if isinstance(name, str):
            check_other_processes(name)
    print(f"{label(name)}: success in {horizon} actions, "
          f"random {random:.2f}, optimal {optimal:.2f}")
    hopeless = np.sum(success[:, 1] == 0)
    if hopeless:
        print(f"  {hopeless} of {len(success)} levels cannot be won in so many")
    held_out = {repr(envs.find_level(type(env), env.draw_args, seed)) for seed in envs.EVAL_SEEDS}
    if env.split and len(held_out) < len(envs.EVAL_SEEDS) / 2:
        print(f"  only {len(held_out)} different levels are held out. The {len(envs.EVAL_SEEDS)} "
              f"episodes of an evaluation repeat them, so its interval is not about other levels")
    if unknown:
        print(f"  the model does not know these words of `render`, and reads them all alike: "
              f"{' '.join(unknown)[:MOST_TEXT]}")


def check_levels(env):  # -> list of texts: what `render` shows of the first states
    texts = []
    for seed in [*TRAINING_SEEDS, *envs.EVAL_SEEDS]:
        env.reset(seed)
        texts.append(env.render())
        if seed % 8 == 0:  # all states of every level would take too long
            check_states(env)
    return texts


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
    asked = 0

    def counting(state, action):
        nonlocal asked
        asked += 1
        want(asked <= MOST_STATES * len(env.actions),
             f"{horizon} actions lead to more than {MOST_STATES} states, too many for exact "
             f"yardsticks. Make it smaller, or lower --max-actions")
        return outcomes(state, action)

    return counting


# --------------------------------------------------------------------------------- the class itself
def check_class(env):
    ours = (isinstance(env, envs.Env) and type(env).reset is envs.Env.reset
            and type(env).step is envs.Env.step)
    want(ours, "it must be a class made from envs.Env, with a `draw` of its own, but without a "
               "`reset` or `step` of its own")
    said = isinstance(env.instruction, str) and env.instruction.strip()
    want(said, f"`instruction` must tell the model its task, but it is {env.instruction!r}")
    check_letters("`instruction`", env.instruction)
    words = (isinstance(env.actions, (tuple, list))
             and all(isinstance(word, str) for word in env.actions))
    want(words and env.actions, f"`actions` is {env.actions!r}. It must be a tuple of words")
    lower = [action.lower() for action in env.actions]
    for action in env.actions:
        check_letters("an action", action)
        plain = (action and action == action.strip()
                 and not re.search(r"\|\||</?(think|answer)>", action))
        want(plain and lower.count(action.lower()) == 1,
             f"the action {action!r} is empty, has || or a tag such as <think> in it, begins or "
             f"ends with a blank, or is there twice (capitals do not count)")


def check_letters(what, text):
    """Tokenizers say only TypeError where a text has half of a UTF-16 pair."""
    want(not re.search("[\ud800-\udfff]", text),
         f"{what} is {text!r}. It has a lone surrogate, which no tokenizer can read")


def check_draw(env):
    want(not takes_self(type(env)), "`draw` has a `self`. It must be a @staticmethod whose first "
                                    "argument is `rng`")
    for seed in range(20):
        one = draw(env, seed)
        pair = one is None or (isinstance(one, tuple) and len(one) == 2)
        want(pair, f"`draw` must return what stays fixed and the initial state, but it returned "
                   f"{one!r}")
        other = draw(env, seed)
        want(repr(one) == repr(other),
             f"`draw` gave {one!r}, then for the same seed {other!r}. It must take all random "
             f"numbers from `rng`, and return plain values")


def takes_self(env_class):  # is its `draw` a plain method?
    plain = inspect.isfunction(inspect.getattr_static(env_class, "draw"))
    return plain and "self" in inspect.signature(env_class.draw).parameters


def draw(env, seed):
    return type(env).draw(np.random.default_rng(seed), *env.draw_args)


def check_other_processes(name):
    """In each process Python hashes words, and so orders a set of them, in another way. Five
    processes are asked, since two may agree by chance.
    """
    code = ("import sys, envs; env = envs.make(sys.argv[1]); "
            "print([envs.find_level(type(env), env.draw_args, seed) for seed in range(40)])")
    levels = set()
    for seed in range(5):
        process = {"PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code, name]
        levels.add(subprocess.check_output(command, env=os.environ | process))
    want(len(levels) == 1, "`draw` gives other levels in another process, which may train on those "
                           "that are held out here. Take sorted tuples in place of sets")


# ---------------------------------------------------------------------------- the states of a level
def check_states(env):
    """Tries everything in the states that can be reached from env.state, the nearest first."""
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
        for action in env.actions:
            env.state = state
            for _, new, _, ends in check_outcomes(env, action, start):
                if new not in visited and len(visited) < MOST_VISITED:
                    visited.add(new)
                    queue.append((new, ends))


def check_render(env):
    text = env.render()
    want(isinstance(text, str) and text.strip(),
         f"`render` must return text, but it returned {text!r}")
    want("\n\n" not in text,
         f"`render` must return one paragraph, without an empty line, but it returned {text!r}")
    check_letters("what `render` returned", text)


def check_won(env, start):
    state = env.state
    won = env.won(state)
    want(isinstance(won, (bool, np.bool_)),
         f"`won` must return True or False, but it returned {won!r}")
    env.state = start
    want(env.won(state) == won, "`won` must look at its argument, not at self.state")
    env.state = state


def check_outcomes(env, action, start):  # -> env.outcomes(env.state, action)
    state = env.state
    place = f"outcomes({state!r}, {action!r})"
    unmoved = f"{place} must not change self.state. It is `step` that draws an outcome and moves"
    level = repr(env.level)
    outcomes = env.outcomes(state, action)
    want(repr(env.level) == level,
         f"{place} must not change self.level, which all episodes of the level share")
    check_list(place, outcomes)
    want(env.state == state, unmoved)
    env.state = start
    same = env.outcomes(state, action) == outcomes
    want(env.state == start, unmoved)
    want(same, f"{place} gave something else when it was asked again, with another self.state. It "
               f"must follow from its arguments and the level alone")
    return outcomes


def check_list(place, outcomes):
    want(isinstance(outcomes, list) and all(map(is_outcome, outcomes)),
         f"{place} must be a list of (probability, next state, reward, over?), but it is "
         f"{outcomes!r}")
    total = 0.0
    for chance, new, reward, over in outcomes:
        want(is_number(chance) and 0 <= chance <= 1, f"{place}: {chance!r} is no probability")
        want(is_number(reward), f"{place}: {reward!r} is no reward")
        want(abs(reward) <= MOST_REWARD, f"{place}: the reward {reward!r} is huge. Take at most "
                                         f"{MOST_REWARD:g}, better 1 or 10")
        want(over in (True, False), f"{place}: over? must be True or False, but it is {over!r}")
        check_hashable(new)
        total += chance
    want(abs(total - 1) < 1e-6, f"{place}: the probabilities sum to {total:.3g}, not to 1")


def is_outcome(x):
    return isinstance(x, (tuple, list)) and len(x) == 4


def is_number(x):
    return isinstance(x, (Real, np.bool_)) and math.isfinite(x)


def check_hashable(state):
    try:
        hash(state)
    except TypeError:
        raise Mistake(f"the state {state!r} must be hashable, such as a word or a tuple of numbers"
                      ) from None


# ----------------------------------------------------------------------------- the words of a model
def check_actions(env, tok):
    for action in env.actions:
        back = tok.decode(tok(action, add_special_tokens=False).input_ids).strip()
        want(back.lower() == action.lower(),
             f"the model cannot write the action {action!r}, because its tokenizer makes {back!r} "
             f"of it. Choose other actions. tiny writes {WRITABLE}")


def unknown_words(texts, tok):  # -> words of the texts that the tokenizer lacks
    words = set()
    for text in texts:
        words.update(text.split())
    unknown = []
    for word in sorted(words):
        ids = tok(word, add_special_tokens=False).input_ids
        if set(ids) == {tok.unk_token_id}:
            unknown.append(word)
    return unknown


def load_tokenizer(model):
    try:
        return transformers.AutoTokenizer.from_pretrained(loading.weights_of(model))
    except Exception as error:  # transformers raises many kinds
        raise UserError(f"--model {model}: its tokenizer cannot be loaded: {one_line(error)}"
                        ) from error


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", help="my_world.py:Class, or a name that python envs.py lists")
    parser.add_argument("--model", default="tiny", help="the model whose tokenizer is asked")
    parser.add_argument("--max-actions", type=int, default=10, help="actions of an episode")
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")  # not every terminal has a √
    with errors.one_line_errors():
        check(args.env, load_tokenizer(args.model), args.max_actions)


if __name__ == "__main__":
    main()
