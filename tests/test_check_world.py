"""extras/check_world.py finds the mistakes that people make in an environment of their own.

It names each in one line.
"""
import re
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
from runs import UserError

MINE = f"{ROOT}/extras/my_world.py:Guess"


@pytest.fixture
def command_line(monkeypatch):
    """command_line("my_world.py:Guess") does what the script does."""
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["check_world.py", *words])
        check_world.main()
    return run


# ------------------------------------------------------------------------------------- the mistakes
class Wrong(Guess):
    """Each of its children has one mistake. `says` is a part of the message that must come."""


class ArrayAsState(Wrong):
    says = "must be hashable"

    @staticmethod
    def draw(rng):
        return {"prize": "Up"}, np.zeros(2)


class ListAsState(Wrong):
    says = "must be hashable"

    @staticmethod
    def draw(rng):
        return {"prize": "Up"}, ["closed"]


class WordsInASet(Wrong):
    says = "another order in every process"

    @staticmethod
    def draw(rng):
        return {"prize": "Up", "doors": frozenset(("red", "blue"))}, "closed"


class ListAsNextState(Wrong):
    says = "['Left'] must be hashable"

    def outcomes(self, state, action):
        return [(1.0, [action], 0.0, True)]


class OneLevel(Wrong):
    says = "split = False"
    split = True

    @staticmethod
    def draw(rng):
        return {"prize": "Up"}, "closed"


class NeverALevel(Wrong):
    says = "its draw returns None"

    @staticmethod
    def draw(rng):
        return None


class LevelWithoutState(Wrong):
    says = "initial state, but it returned {'prize': 'Up'}"

    @staticmethod
    def draw(rng):
        return {"prize": "Up"}


class DiceOfItsOwn(Wrong):
    says = "all random numbers from `rng`"

    @staticmethod
    def draw(rng):
        return {"prize": ("Left", "Up", "Right")[np.random.randint(3)]}, "closed"


class DrawIsNotStatic(Wrong):
    says = "@staticmethod"

    def draw(self, rng):
        return {"prize": "Up"}, "closed"


class ArgumentOfInit(Wrong):
    says = "__init__() missing 1 required positional argument: 'size'"

    def __init__(self, size):
        self.size = size


class OwnReset(Wrong):
    says = "without a `reset`"

    def reset(self, seed):
        return "The sign says Up.", {}


class UnknownAction(Wrong):
    says = "cannot write the action 'Jump'"
    actions = ("Left", "Up", "Right", "Jump")


class ActionIsATag(Wrong):
    says = "the action '<think>' is"
    actions = ("Left", "Up", "<think>")


class ActionOfTwoWords(Wrong):
    says = "cannot write the action 'Go Left'"
    actions = ("Left", "Up", "Right", "Go Left")


class ActionsAsText(Wrong):
    says = "`actions` is 'LR'"
    actions = "LR"


class NoActions(Wrong):
    says = "`actions` is ()"
    actions = ()


class OneActionTwice(Wrong):
    says = "the action 'Left' is"
    actions = ("Left", "left", "Up", "Right")


class NoInstruction(Wrong):
    says = "`instruction`"
    instruction = ""


class OverIsAWord(Wrong):
    says = "over? must be True or False"

    def outcomes(self, state, action):
        return [(1.0, action, 0.0, "no")]


class HugeReward(Wrong):
    says = "the reward 1e+30"

    def outcomes(self, state, action):
        return [(1.0, action, 1e30, True)]


class HalfAProbability(Wrong):
    says = "sum to 0.5"

    def outcomes(self, state, action):
        return [(0.5, action, 0.0, True)]


class NegativeProbability(Wrong):
    says = "1.5 is no probability"

    def outcomes(self, state, action):
        return [(1.5, "open", 0.0, True), (-0.5, "closed", 0.0, True)]


class NoReward(Wrong):
    says = "None is no reward"

    def outcomes(self, state, action):
        return [(1.0, action, None, True)]


class RewardIsNotFinite(Wrong):
    says = "inf is no reward"

    def outcomes(self, state, action):
        return [(1.0, action, float("inf"), True)]


class OutcomesAreNoList(Wrong):
    says = "must be a list of (probability, next state, reward, over?)"

    def outcomes(self, state, action):
        return 1.0, action, 0.0, True


class OutcomesAreNumbers(Wrong):
    says = "must be a list of (probability, next state, reward, over?)"

    def outcomes(self, state, action):
        return [1.0, action, 0.0, True]


class OutcomesForgotTheirReturn(Wrong):
    says = "must be a list of (probability, next state, reward, over?), but it is None"

    def outcomes(self, state, action):
        [(1.0, action, 0.0, True)]


class OutcomeWithoutProbability(Wrong):
    says = "must be a list of (probability, next state, reward, over?)"

    def outcomes(self, state, action):
        return [(action, 0.0, True)]


class OutcomesMoveTheEnvironment(Wrong):
    says = "must not change self.state"

    def outcomes(self, state, action):
        self.state = action
        return [(1.0, action, 0.0, True)]


class WithoutEnd(Wrong):
    says = "more than 20000 states"

    def outcomes(self, state, action):
        return [(1.0, state + action, 0.0, False)]


class NoWon(envs.Env):
    says = "has no attribute 'won'"
    instruction, actions, split = "Open the door.", ("Left", "Up", "Right"), False
    draw, outcomes, render = staticmethod(Guess.draw), Guess.outcomes, Guess.render


class WonReturnsNothing(Wrong):
    says = "`won` must return True or False"

    def won(self, state):
        state == self.level["prize"]


class NeverWon(Wrong):
    says = "no level can be won in 10 actions"

    def won(self, state):
        return False


class RenderReturnsNothing(Wrong):
    says = "`render` must return text, but it returned None"

    def render(self):
        return None


class RenderReturnsANumber(Wrong):
    says = "`render` must return text, but it returned 5"

    def render(self):
        return 5


class RenderReturnsTwoParagraphs(Wrong):
    says = "without an empty line"

    def render(self):
        return "The sign says Up.\n\nThe door is closed."


class RenderReturnsHalfACharacter(Wrong):
    says = r"'The sign says \ud83d.'. It has a lone surrogate"

    def render(self):
        return "The sign says \ud83d."


class RenderRaises(Wrong):
    says = "KeyError in render, line"

    def render(self):
        return self.level["price"]


class FactsRaise(Wrong):
    says = "KeyError in facts, line"

    def facts(self):
        return {"sign": self.level["price"]}


class ClaimIsNoPattern(Wrong):
    says = "unterminated subpattern"
    claim = "(Left|Up"

    def facts(self):
        return {"sign": "Up"}


class Line(Guess):
    """Three steps to the right. Each of its children has one mistake."""
    @staticmethod
    def draw(rng):
        return {"prize": "Right"}, 0

    def outcomes(self, state, action):
        return [(1.0, state + 1, float(state == 2), state == 2)]

    def won(self, state):
        return state == 3


class OutcomesOfSelfState(Line):
    says = "asked again, with another self.state"

    def outcomes(self, state, action):
        return [(1.0, self.state + 1, 0.0, self.state == 2)]


class WonOfSelfState(Line):
    says = "`won` must look at its argument"

    def won(self, state):
        return self.state == 3


class OutcomesMoveToTheirArgument(Line):
    says = "must not change self.state"

    def outcomes(self, state, action):
        self.state = state
        return super().outcomes(state, action)


class OutcomesChangeTheLevel(Line):
    says = "must not change self.level"

    def outcomes(self, state, action):
        self.level = "another"
        return super().outcomes(state, action)


@pytest.mark.parametrize("wrong", [*Wrong.__subclasses__(), *Line.__subclasses__(), NoWon])
def test_a_mistake_is_named_in_one_line(wrong, monkeypatch, tok):
    name = f"{__file__}:{wrong.__name__}"  # as if it came from this file
    monkeypatch.setitem(envs.ENVS, name, wrong)
    with pytest.raises(UserError) as error:
        check(name, tok)
    said = str(error.value)
    assert wrong.says in said and "\n" not in said
    assert said.startswith(f"{name}: ")


def test_the_line_of_a_mistake_is_one_of_the_user():
    line = RenderRaises.render.__code__.co_firstlineno + 1
    with pytest.raises(UserError, match=f"KeyError in render, line {line}: 'price'"):
        check(RenderRaises)

    class InALibrary(Guess):
        def won(self, state):
            return np.stack([])
    line = InALibrary.won.__code__.co_firstlineno + 1
    with pytest.raises(UserError, match=f"ValueError in won, line {line}: need at least one"):
        check(InALibrary)


@pytest.mark.parametrize("text, says", [
    ("import envs\nclass Mine(envs.Env)\n    pass", "SyntaxError: expected ':' (mine.py, line 2)"),
    ("import envs\nimport nothing_of_that_name", "ModuleNotFoundError in <module>, line 2"),
    ("import sys\n\nsys.exit()", "SystemExit in <module>, line 3"),
    ("Mine = 5", "it is no class, but 5"),
    ("class Mine:\n    actions = ()", "envs.Env"),
    ("Other = 5", "mine.py does not define a class Mine"),
    (None, "mine.py:Mine is no environment")])
def test_a_mistake_in_a_file_is_named_in_one_line(text, says, command_line, tmp_path, monkeypatch):
    envs.run_file.cache_clear()  # another mine.py than before
    monkeypatch.chdir(tmp_path)
    if text:
        Path("mine.py").write_text(text)
    with pytest.raises(SystemExit) as stop:
        command_line("mine.py:Mine")
    assert says in stop.value.code and "\n" not in stop.value.code


@pytest.mark.parametrize("option, value, says", [
    ("--max-actions", "1000", "1 to 200"),
    ("--model", "no/such-model", "its tokenizer cannot be loaded")])
def test_a_mistake_in_an_option_is_named_in_one_line(option, value, says, command_line):
    with pytest.raises(SystemExit, match=says) as stop:
        command_line(MINE, option, value)
    assert "\n" not in stop.value.code


# ------------------------------------------------------------------------ environments without one
def test_what_it_says_of_an_environment_without_mistakes(command_line, capsys, tok):
    check(MINE)
    expected = f"{MINE}: success in 10 actions, random 0.33, optimal 1.00\n"
    assert capsys.readouterr().out == expected
    check(Guess, tok)
    first, unknown = capsys.readouterr().out.splitlines()
    assert first + "\n" == expected.replace(MINE, "Guess")
    vocabulary = tok.get_vocab()
    lacking = {"The", "sign", "says", "Left", "Up", "Right"} - vocabulary.keys()
    assert unknown.endswith(": " + " ".join(sorted(lacking)))
    command_line(MINE)  # asks tiny, since no other model is named
    assert capsys.readouterr().out == f"{expected}{unknown}\n"


@pytest.mark.parametrize("name", ["bandit", "frozenlake"])
def test_what_it_says_of_ours(name, tok, capsys):
    check(name, tok, 4)
    random, optimal = envs.mean_yardsticks(name, 4)[:, -1]
    said, *more = capsys.readouterr().out.splitlines()
    assert said == f"{name}: success in 4 actions, random {random:.2f}, optimal {optimal:.2f}"
    # tiny has all words of our environments.
    assert not any("does not know" in line for line in more)


def test_it_tells_of_few_levels(capsys):
    """There are eight levels. A few of them are held out, the others are for training."""
    class Eight(Guess):
        split = True

        @staticmethod
        def draw(rng):
            return {"prize": ("Left", "Up")[rng.integers(2)]}, int(rng.integers(4))
    check(Eight)
    said = re.search(r"only (\d) levels are held out, (\d) are for", capsys.readouterr().out)
    held_out, trained = said.groups()
    assert int(held_out) + int(trained) == 8


def test_it_counts_the_levels_that_cannot_be_won(capsys):
    class LockedDoors(Guess):
        @staticmethod
        def draw(rng):
            return {"prize": ("Up", "Down")[rng.integers(2)]}, "closed"
    check(LockedDoors)
    downs = 0
    for seed in envs.EVAL_SEEDS:
        level, _ = envs.find_level(LockedDoors, (), seed)
        downs += level["prize"] == "Down"
    assert f"{downs} of 256 levels cannot be won" in capsys.readouterr().out


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
