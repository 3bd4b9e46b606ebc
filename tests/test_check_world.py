"""extras/check_world.py finds the mistakes that people make in an environment of their own.

It names each in one line.
"""
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import envs
from conftest import ROOT
from extras import check_world
from extras.check_world import check
from extras.my_world import Guess
from support.errors import UserError

MINE = f"{ROOT}/extras/my_world.py:Guess"


@pytest.fixture
def command_line(monkeypatch):
    """command_line("my_world.py:Guess") does what the script does."""
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["check_world.py", *words])
        check_world.main()
    return run


class Line(Guess):
    """Three steps to the right."""
    @staticmethod
    def draw(rng):
        return {"prize": "Right"}, 0

    def outcomes(self, state, action):
        return [(1.0, state + 1, float(state == 2), state == 2)]

    def won(self, state):
        return state == 3


# ------------------------------------------------------------------------------------- the mistakes
def level(*drawn):  # a `draw` that always returns this
    return {"draw": staticmethod(lambda rng: drawn)}


def gives(answer):  # `outcomes` that always returns this
    return {"outcomes": lambda self, state, action: answer}


def shows(text):
    return {"render": lambda self: text}


def moves(self, state, action):
    self.state = action
    return [(1.0, action, 0.0, True)]


def moves_to_its_argument(self, state, action):
    self.state = state
    return Line.outcomes(self, state, action)


def changes_the_level(self, state, action):
    self.level = "another"
    return Line.outcomes(self, state, action)


UP = {"prize": "Up"}
OUTCOMES = "must be a list of (probability, next state, reward, over?)"
MISTAKES = [  # a part of the message, and what Guess or Line has in place of its own
    ("must be hashable", Guess, level(UP, np.zeros(2))),
    ("must be hashable", Guess, level(UP, ["closed"])),
    ("split = False", Guess, level(UP, "closed") | {"split": True}),
    ("its draw returns None", Guess, {"draw": staticmethod(lambda rng: None)}),
    ("initial state, but it returned {'prize': 'Up'}", Guess,
     {"draw": staticmethod(lambda rng: UP)}),
    ("all random numbers from `rng`", Guess,
     {"draw": staticmethod(lambda rng: (np.random.randint(100), "closed"))}),
    ("@staticmethod", Guess, {"draw": lambda self, rng: (UP, "closed")}),
    ("missing 1 required positional argument: 'size'", Guess,
     {"__init__": lambda self, size: None}),
    ("without a `reset`", Guess, {"reset": lambda self, seed: ("The sign says Up.", {})}),
    ("made from envs.Env", object, {"actions": (), "outcomes": moves}),
    ("`instruction`", Guess, {"instruction": ""}),
    ("cannot write the action 'Jump'", Guess, {"actions": ("Left", "Up", "Right", "Jump")}),
    ("cannot write the action 'Go Left'", Guess, {"actions": ("Left", "Up", "Right", "Go Left")}),
    ("the action '<think>' is", Guess, {"actions": ("Left", "Up", "<think>")}),
    ("the action 'Left' is", Guess, {"actions": ("Left", "left", "Up", "Right")}),
    ("`actions` is 'LR'", Guess, {"actions": "LR"}),
    ("`actions` is ()", Guess, {"actions": ()}),
    ("['Left'] must be hashable", Guess, gives([(1.0, ["Left"], 0.0, True)])),
    ("over? must be True or False", Guess, gives([(1.0, "Up", 0.0, "no")])),
    ("the reward 1e+30", Guess, gives([(1.0, "Up", 1e30, True)])),
    ("None is no reward", Guess, gives([(1.0, "Up", None, True)])),
    ("inf is no reward", Guess, gives([(1.0, "Up", float("inf"), True)])),
    ("sum to 0.5", Guess, gives([(0.5, "Up", 0.0, True)])),
    ("1.5 is no probability", Guess, gives([(1.5, "Up", 0.0, True), (-0.5, "no", 0.0, True)])),
    (OUTCOMES, Guess, gives((1.0, "Up", 0.0, True))),
    (OUTCOMES, Guess, gives([1.0, "Up", 0.0, True])),
    (OUTCOMES, Guess, gives([("Up", 0.0, True)])),
    (OUTCOMES + ", but it is None", Guess, gives(None)),
    ("must not change self.state", Guess, {"outcomes": moves}),
    ("must not change self.state", Line, {"outcomes": moves_to_its_argument}),
    ("must not change self.level", Line, {"outcomes": changes_the_level}),
    ("asked again, with another self.state", Line,
     {"outcomes": lambda self, state, action: [(1.0, self.state + 1, 0.0, self.state == 2)]}),
    ("more than 20000 states", Guess,
     {"outcomes": lambda self, state, action: [(1.0, state + action, 0.0, False)]}),
    ("has no attribute 'won'", envs.Env, {name: vars(Guess)[name] for name in (
        "instruction", "actions", "split", "draw", "outcomes", "render")}),
    ("`won` must return True or False", Guess, {"won": lambda self, state: None}),
    ("`won` must look at its argument", Line, {"won": lambda self, state: self.state == 3}),
    ("no level can be won in 10 actions", Guess, {"won": lambda self, state: False}),
    ("`render` must return text, but it returned None", Guess, shows(None)),
    ("`render` must return text, but it returned 5", Guess, shows(5)),
    ("without an empty line", Guess, shows("The sign says Up.\n\nThe door is closed.")),
    (r"'Up \ud83d.'. It has a lone surrogate", Guess, shows("Up \ud83d.")),
    ("KeyError in <lambda>, line", Guess, {"render": lambda self: self.level["price"]})]


@pytest.mark.parametrize("says, base, members", MISTAKES)
def test_a_mistake_is_named_in_one_line(says, base, members, monkeypatch, tok):
    name = "mine.py:Mine"  # as if it came from a file
    monkeypatch.setitem(envs.ENVS, name, type("Mine", (base,), members))
    with pytest.raises(UserError) as error:
        check(name, tok)
    said = str(error.value)
    assert said.startswith(f"{name}: ") and says in said and "\n" not in said


def test_the_line_of_a_mistake_is_one_of_the_user():
    class Raises(Guess):
        def render(self):
            return self.level["price"]

    class InALibrary(Guess):
        def won(self, state):
            return np.stack([])
    for world, function, kind, says in (
            (Raises, Raises.render, "KeyError", "'price'"),
            (InALibrary, InALibrary.won, "ValueError", "need at least one")):
        place = f"in {function.__name__}, line {function.__code__.co_firstlineno + 1}"
        with pytest.raises(UserError, match=f"{kind} {place}: {says}"):
            check(world)


@pytest.mark.parametrize("text, says", [
    ("import envs\nclass Mine(envs.Env)\n    pass", "SyntaxError: expected ':' (mine.py, line 2)"),
    ("import envs\nimport nothing_of_that_name", "ModuleNotFoundError in <module>, line 2"),
    ("import sys\n\nsys.exit()", "SystemExit in <module>, line 3"),
    ("Mine = 5", "mine.py does not define a class Mine"), (None, "There is no file mine.py")])
def test_a_mistake_in_a_file_is_named_in_one_line(text, says, command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text:
        Path("mine.py").write_text(text)
    with pytest.raises(SystemExit) as stop:
        command_line("mine.py:Mine")
    assert says in stop.value.code and "\n" not in stop.value.code


OF_A_PROCESS = """
import enum
from dataclasses import dataclass
from extras.my_world import Guess

Color = enum.Enum("Color", ["RED", "BLUE", "GREEN"])

@dataclass(frozen=True)
class Door:
    colors: frozenset

class Mine(Guess):
    @staticmethod
    def draw(rng):
        return {"prize": "Up", LEVEL}, "closed"
"""


@pytest.mark.parametrize("level, says", [
    ('"door": Door(frozenset(Color))', "in another process"),  # of names, whatever repr shows
    ('"sign": list({"red", "blue", "green"})[rng.integers(3)]', "in another process"),
    ('"numbers": frozenset((3, 1))', None)])
def test_levels_that_differ_between_processes_are_a_mistake(level, says, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    (tmp_path / "mine.py").write_text(OF_A_PROCESS.replace("LEVEL", level))
    if says is None:
        check(f"{tmp_path}/mine.py:Mine")
    else:
        with pytest.raises(UserError, match=says):
            check(f"{tmp_path}/mine.py:Mine")


@pytest.mark.parametrize("option, value, says", [
    ("--max-actions", "1000", "1 to 200"),
    ("--model", "no/such-model", "its tokenizer cannot be loaded")])
def test_a_mistake_in_an_option_is_named_in_one_line(option, value, says, command_line):
    with pytest.raises(SystemExit, match=says) as stop:
        command_line(MINE, option, value)
    assert "\n" not in stop.value.code


# ------------------------------------------------------------------------ environments without one
def test_what_it_says_of_an_environment_without_mistakes(command_line, capsys, tok):
    command_line(MINE)  # asks tiny, since no other model is named
    first, unknown = capsys.readouterr().out.splitlines()
    assert first == f"{MINE}: success in 10 actions, random 0.33, optimal 1.00"
    lacking = {"The", "sign", "says", "Left", "Up", "Right"} - tok.get_vocab().keys()
    assert unknown.endswith(": " + " ".join(sorted(lacking)))
    check(Guess)  # no model
    assert capsys.readouterr().out == first.replace(MINE, "Guess") + "\n"


@pytest.mark.parametrize("ours", [envs.Bandit, envs.FrozenLake])
def test_what_it_says_of_ours(ours, tok, capsys):
    check(ours, tok, 4)
    random, optimal = envs.mean_yardsticks(ours, 4)[:, -1]
    first, *more = capsys.readouterr().out.splitlines()
    said = f"{ours.__name__}: success in 4 actions, random {random:.2f}, optimal {optimal:.2f}"
    assert first == said
    assert not any("does not know" in line or "held out" in line for line in more)


def test_it_tells_of_few_levels(capsys):
    class Eight(Guess):
        split = True

        @staticmethod
        def draw(rng):
            return {"prize": ("Left", "Up")[rng.integers(2)]}, int(rng.integers(4))
    check(Eight)
    held_out = set()
    for seed in envs.EVAL_SEEDS:
        level, state = envs.find_level(Eight, (), seed)
        held_out.add((level["prize"], state))
    assert 0 < len(held_out) < 8
    assert f"only {len(held_out)} different levels are held out" in capsys.readouterr().out


def test_it_counts_the_levels_that_cannot_be_won(capsys):
    class LockedDoors(Guess):
        @staticmethod
        def draw(rng):
            return {"prize": ("Up", "Down")[rng.integers(2)]}, "closed"
    check(LockedDoors)
    prizes = [envs.find_level(LockedDoors, (), seed)[0]["prize"] for seed in envs.EVAL_SEEDS]
    assert f"{prizes.count('Down')} of 256 levels cannot be won" in capsys.readouterr().out


def test_numbers_of_other_types_are_no_mistakes(capsys):
    class Numpy(Guess):
        @staticmethod
        def draw(rng):
            return {"prize": rng.choice(("Left", "Up", "Right"))}, rng.integers(3)

        def outcomes(self, state, action):
            right = np.bool_(action == self.level["prize"])
            half, over = np.float64(0.5), np.bool_(True)
            return [(half, action, np.float32(right), over),
                    (half, action, Fraction(int(right)), 1)]

        def won(self, state):
            return np.bool_(state == self.level["prize"])
    check(Numpy)
    assert "random 0.33, optimal 1.00" in capsys.readouterr().out


def test_an_environment_is_as_it_was_after_the_check():
    """While yardsticks are calculated, `outcomes` is another function, which counts."""
    env = envs.make("frozenlake")
    before = vars(env).copy()
    check_world.success_by_level(env, 3)
    assert "outcomes" not in vars(env) and before.items() <= vars(env).items()
