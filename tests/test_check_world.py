"""extras/check_world.py names every mistake that people make in a world of their own, in one line."""
import re
import runpy
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import envs
from conftest import ROOT
from my_world import Guess

sys.path.insert(0, str(ROOT / "extras"))
import check_world
from check_world import check

MINE = f"{ROOT}/tests/my_world.py:Guess"


@pytest.fixture
def command_line(monkeypatch):
    """command_line("my_world.py:Guess") does what the script does."""
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["check_world.py", *words])
        runpy.run_path(str(ROOT / "extras/check_world.py"), run_name="__main__")
    return run


# ------------------------------------------------------------------------------------------------------ the mistakes
class Wrong(Guess):
    """Each of its children has one mistake, and `says` what of the message must be there."""


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
    says = "a set of words has another order in every process"

    @staticmethod
    def draw(rng):
        return {"prize": "Up", "doors": frozenset(("red", "blue"))}, "closed"


class ListAsNextState(Wrong):
    says = "the state ['Left'] must be hashable"

    def outcomes(self, state, action):
        return [(1.0, [action], 0.0, True)]


class OneLevel(Wrong):
    says = "If there are few: split = False."
    split = True

    @staticmethod
    def draw(rng):
        return {"prize": "Up"}, "closed"


class NeverALevel(Wrong):
    says = "Else draw returns too many None"

    @staticmethod
    def draw(rng):
        return None


class LevelWithoutState(Wrong):
    says = "the initial state, it returned {'prize': 'Up'}"

    @staticmethod
    def draw(rng):
        return {"prize": "Up"}


class DiceOfItsOwn(Wrong):
    says = "no dice but `rng`"

    @staticmethod
    def draw(rng):
        return {"prize": ("Left", "Up", "Right")[np.random.randint(3)]}, "closed"


class DrawIsNotStatic(Wrong):
    says = "`draw` has a `self`: it must be a @staticmethod whose first argument is `rng`"

    def draw(self, rng):
        return {"prize": "Up"}, "closed"


class ArgumentOfInit(Wrong):
    says = "__init__() missing 1 required positional argument: 'size'"

    def __init__(self, size):
        self.size = size


class OwnReset(Wrong):
    says = "no other `reset` or `step`"

    def reset(self, seed):
        return "The sign says Up.", {}


class UnknownAction(Wrong):
    says = "cannot write the action 'Jump'"
    actions = ("Left", "Up", "Right", "Jump")


class ActionIsATag(Wrong):
    says = "the action '<think>' is empty, has ||, a tag such as <think>"
    actions = ("Left", "Up", "<think>")


class OverIsAWord(Wrong):
    says = "over? must be True or False, it is 'no'"

    def outcomes(self, state, action):
        return [(1.0, action, 0.0, "no")]


class HugeReward(Wrong):
    says = "the reward 1e+30 is huge"

    def outcomes(self, state, action):
        return [(1.0, action, 1e30, True)]


class ActionOfTwoWords(Wrong):
    says = "cannot write the action 'Go Left'"
    actions = ("Left", "Up", "Right", "Go Left")


class ActionsAsText(Wrong):
    says = "`actions` is 'LR', not a tuple of words"
    actions = "LR"


class NoActions(Wrong):
    says = "`actions` is (), not a tuple of words"
    actions = ()


class OneActionTwice(Wrong):
    says = "the action 'Left' is empty"
    actions = ("Left", "left", "Up", "Right")


class NoInstruction(Wrong):
    says = "`instruction` must tell the model its task"
    instruction = ""


class HalfAProbability(Wrong):
    says = "the probabilities sum to 0.5"

    def outcomes(self, state, action):
        return [(0.5, action, 0.0, True)]


class NegativeProbability(Wrong):
    says = "1.5 is no probability"

    def outcomes(self, state, action):
        return [(1.5, "open", 0.0, True), (-0.5, "closed", 0.0, True)]


class NoReward(Wrong):
    says = "None no reward"

    def outcomes(self, state, action):
        return [(1.0, action, None, True)]


class OutcomesAreNoList(Wrong):
    says = "must be a list of (probability, next state, reward, over?)"

    def outcomes(self, state, action):
        return 1.0, action, 0.0, True


class OutcomesForgotTheirReturn(Wrong):
    says = "must be a list of (probability, next state, reward, over?), it is None"

    def outcomes(self, state, action):
        [(1.0, action, 0.0, True)]


class OutcomeWithoutProbability(Wrong):
    says = "must be a list of (probability, next state, reward, over?)"

    def outcomes(self, state, action):
        return [(action, 0.0, True)]


class Line(Wrong):
    """Three steps to the right. What is wrong comes with the two classes below."""
    says = ""

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


class OutcomesMoveTheWorld(Wrong):
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
    says = "`won` must return True or False, it returned None"

    def won(self, state):
        state == self.level["prize"]


class NeverWon(Wrong):
    says = "no level can be won in 10 actions"

    def won(self, state):
        return False


class RenderReturnsNothing(Wrong):
    says = "`render` must return text, it returned None"

    def render(self):
        return None


class RenderReturnsANumber(Wrong):
    says = "`render` must return text, it returned 5"

    def render(self):
        return 5


class RenderReturnsTwoParagraphs(Wrong):
    says = "without an empty line"

    def render(self):
        return "The sign says Up.\n\nThe door is closed."


class FactsRaise(Wrong):
    says = "KeyError in facts, line"

    def facts(self):
        return {"sign": self.level["price"]}


class ClaimIsNoPattern(Wrong):
    says = "unterminated subpattern"
    claim = "(Left|Up"

    def facts(self):
        return {"sign": "Up"}


class RenderRaises(Wrong):
    says = "KeyError in render, line"

    def render(self):
        return self.level["price"]


class OutcomesAreNumbers(Wrong):
    says = "must be a list of (probability, next state, reward, over?)"

    def outcomes(self, state, action):
        return [1.0, action, 0.0, True]


class HugeBonus(Wrong):
    says = "it returned 1e+30"

    def bonus(self, turn):
        return 1e30


class BonusReturnsNothing(Wrong):
    says = "`bonus` must return a number, of the answer '<think>"

    def bonus(self, turn):
        "sign" in turn["answer"]


class BonusIsNotFinite(Wrong):
    says = "it returned inf"

    def bonus(self, turn):
        return np.inf


class BonusOfValidAnswersOnly(Wrong):
    says = "'NoneType' object is not subscriptable"

    def bonus(self, turn):
        return float(re.search("<answer>(.*)</answer>", turn["answer"])[1] == "Up")


class BonusMovesTheWorld(Wrong):
    says = "`bonus` must not change self.state"

    def bonus(self, turn):
        self.state = "open"
        return 0.0


WRONG = [*Wrong.__subclasses__(), *Line.__subclasses__(), NoWon]
WRONG.remove(Line)


@pytest.mark.parametrize("world", WRONG)
def test_a_mistake_in_a_world_is_one_line(world, monkeypatch, tok):
    name = f"{__file__}:{world.__name__}"  # as if it came from this file
    monkeypatch.setitem(envs.ENVS, name, world)
    with pytest.raises(envs.UserError) as error:
        check(name, tok)
    said = str(error.value)
    assert world.says in said and "\n" not in said
    assert said.startswith((f"{name}: ", f"{world.__name__}: ")), "it names the world"


def test_the_line_of_the_mistake_is_one_of_the_user():
    line = RenderRaises.render.__code__.co_firstlineno + 1
    with pytest.raises(envs.UserError, match=f"KeyError in render, line {line}: 'price'"):
        check(RenderRaises)

    class InALibrary(Guess):
        def won(self, state):
            return np.stack([])
    line = InALibrary.won.__code__.co_firstlineno + 1
    with pytest.raises(envs.UserError, match=f"ValueError in won, line {line}: need at least one array"):
        check(InALibrary)


@pytest.mark.parametrize("text, says", [
    ("import envs\nclass Mine(envs.Env)\n    pass", "SyntaxError: expected ':' (mine.py, line 2)"),
    ("import envs\nimport nothing_of_that_name", "ModuleNotFoundError in <module>, line 2"),
    ("Mine = 5", "does not define Mine (a class)"),
    ("class Mine:\n    actions = ()", "it must be a class of its own (envs.Env)"),
    ("Other = 5", "mine.py does not define Mine"),
    (None, "no world mine.py:Mine")])
def test_a_file_with_a_mistake_is_one_line(text, says, command_line, tmp_path, monkeypatch):
    envs.run_file.cache_clear()  # another mine.py than in the row before
    monkeypatch.chdir(tmp_path)
    if text:
        Path("mine.py").write_text(text)
    with pytest.raises(envs.UserError) as error:
        command_line("mine.py:Mine")
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_number_of_actions_that_is_too_high_and_a_model_that_is_not_there(command_line):
    with pytest.raises(envs.UserError, match="1 to 200"):
        command_line(MINE, "--max-actions", "1000")
    with pytest.raises(envs.UserError, match="its tokenizer cannot be loaded"):
        command_line(MINE, "--model", "no/such-model")


# ------------------------------------------------------------------------------------------------- worlds without one
def test_what_it_says_of_a_good_world(command_line, capsys, tok):
    check(MINE)
    expected = f"{MINE}: success in 10 actions, random 0.33, optimal 1.00\n"
    assert capsys.readouterr().out == expected
    check(Guess, tok)
    unknown = "  the model does not know these words of `render`, and reads them all alike: says sign\n"
    assert capsys.readouterr().out == expected.replace(MINE, "Guess") + unknown
    command_line(MINE)
    assert capsys.readouterr().out == expected + unknown, "tiny is asked where no model is named"


@pytest.mark.parametrize("name", ["bandit", "frozenlake"])
def test_what_it_says_of_ours(name, tok, capsys):
    check(name, tok, 4)
    random, optimal = envs.mean_yardsticks(name, 4)[:, -1]
    said = capsys.readouterr().out
    assert said.startswith(f"{name}: success in 4 actions, random {random:.2f}, optimal {optimal:.2f}\n")
    assert "look alike" not in said, "tiny has all words of our worlds"


def test_it_tells_of_few_levels(capsys):
    """Eight levels, of which a few are held out: the others are never seen there."""
    class Eight(Guess):
        split = True

        @staticmethod
        def draw(rng):
            return {"prize": ("Left", "Up")[rng.integers(2)]}, int(rng.integers(4))
    check(Eight)
    said = re.search(r"only (\d) levels are held out, (\d) are trained in", capsys.readouterr().out)
    held_out, trained = said.groups()
    assert int(held_out) + int(trained) == 8


def test_it_counts_the_levels_that_cannot_be_won(capsys):
    class LockedDoors(Guess):
        @staticmethod
        def draw(rng):
            return {"prize": ("Up", "Down")[rng.integers(2)]}, "closed"
    check(LockedDoors)
    downs = sum(envs.find_level(LockedDoors, (), seed)[0]["prize"] == "Down" for seed in envs.EVAL_SEEDS)
    assert f"{downs} of 256 levels cannot be won" in capsys.readouterr().out


def test_numpys_numbers_and_a_bonus_are_no_mistakes(capsys):
    class Numpy(Guess):
        @staticmethod
        def draw(rng):
            return {"prize": rng.choice(("Left", "Up", "Right"))}, rng.integers(3)

        def outcomes(self, state, action):
            right = np.bool_(action == self.level["prize"])
            half, over = np.float64(0.5), np.bool_(True)
            return [(half, action, np.float32(right), over), (half, action, Fraction(int(right)), 1)]

        def won(self, state):
            return np.bool_(state == self.level["prize"])

        def bonus(self, turn):
            return np.float32(0.1) * turn["valid"]
    check(Numpy)
    assert "random 0.33, optimal 1.00" in capsys.readouterr().out


def test_a_world_is_as_it_was_after_the_check():
    """`outcomes` is counted while yardsticks are calculated."""
    env = envs.make("frozenlake")
    before = vars(env).copy()
    check_world.success_by_level(env, 3)
    assert "outcomes" not in vars(env) and before.items() <= vars(env).items()


def test_a_file_that_ends_the_program_is_blamed(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("import sys\n\nsys.exit()\n")
    with pytest.raises(envs.UserError, match="SystemExit in <module>, line 3"):
        check(f"{mine}:Mine")
