"""What people do with the program: worlds of their own, slips of the hand, folders that suffered.

A mistake ends in one line that says what to do, with exit code 2. Rows that are elsewhere: of the command line in
test_train.MISTAKES, of figures/paper.py in test_figures, of trainer.pt in survive.ERRORS and survive.HARMLESS.
"""
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import pytest

import envs
import plots
import ragen_mini as rm
import survive
from conftest import ROOT
from my_world import Guess
from survive import rows_of

sys.path.insert(0, str(ROOT / "figures"))
import paper

PROGRAMS = {"ragen_mini.py": rm.main, "envs.py": envs.main, "plots.py": plots.main, "paper.py": paper.main}
MINE = f"{ROOT}/tests/my_world.py:Guess"
SMALL = ("--prompts 2 --rollouts 4 --update-size 4 --iterations 1 --max-new-tokens 16 --max-turns 2 --eval-prompts 4 "
         "--algo grpo --lr 1e-3")


@pytest.fixture
def user(monkeypatch, capsys, tmp_path):
    """user("envs.py check my_world.py:Guess") -> exit code, what it printed, its errors. In a folder of its own."""
    def run(command):
        command = command.replace("ragen_mini.py", "ragen_mini.py --device cpu")
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        capsys.readouterr()
        code = 0
        try:
            PROGRAMS[sys.argv[0]]()
        except SystemExit as end:
            code = end.code
        except KeyboardInterrupt:
            code = "a traceback, and the end of all tests"
        return code, *capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keeps the handlers of this process
    return run


@pytest.fixture
def mistake(user):
    """mistake(command) -> the one line that the user is told"""
    def run(command):
        code, _, said = user(command)
        assert code == 2, (code, said)
        assert said.count("\n") == 1 and said.endswith("\n"), said
        return said
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two finished runs, one of them in a world of one's own."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw", lambda title, panels, out, *rest, **named: Path(out).touch() or out)
        for name, world in (("bandit", "bandit"), ("mine", MINE)):
            rm.train(rm.parse_config(["--env", world, "--out", f"{folder}/{name}", "--device", "cpu", *SMALL.split()]))
    return folder


# ---------------------------------------------------------------------------------- mistakes in a world of one's own
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


class ListAsNextState(Wrong):
    says = "the state ['Left'] must be hashable"

    def outcomes(self, state, action):
        return [(1.0, [action], 0.0, True)]


class OneLevel(Wrong):
    says = "Then write split = False"
    split = True

    @staticmethod
    def draw(rng):
        return {"prize": "Up"}, "closed"


class NeverALevel(Wrong):
    says = "return None too often"

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
    says = "draw() missing 1 required positional argument: 'rng'"

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


class SixHundredSymbols(Guess):
    """More than `tiny` can read: no mistake in itself."""

    def render(self):
        return "O " * 600


WRONG = [*Wrong.__subclasses__(), *Line.__subclasses__(), NoWon]
WRONG.remove(Line)


@pytest.mark.parametrize("world", WRONG)
def test_a_mistake_in_a_world_is_one_line_before_training(world, monkeypatch, tok):
    name = f"{__file__}:{world.__name__}"  # as if it came from this file
    monkeypatch.setitem(envs.ENVS, name, world)
    with pytest.raises(envs.UserError) as error:
        envs.check(name, tok)
    said = str(error.value)
    assert world.says in said and "\n" not in said
    assert said.startswith((f"{name}: ", f"{world.__name__}: ")), "it names the world"


@pytest.mark.parametrize("world", [ArrayAsState, NeverALevel, UnknownAction, HalfAProbability, RenderRaises])
def test_the_same_at_the_command_line(world, mistake):
    said = mistake(f"ragen_mini.py --env {__file__}:{world.__name__} --out run")
    assert world.says in said and world.__name__ in said
    assert not Path("run").exists(), "it comes before anything is written"
    if world is not UnknownAction:  # without a model no word is unknown
        assert mistake(f"envs.py check {__file__}:{world.__name__}") == said


@pytest.mark.parametrize("text, says", [
    ("import envs\nclass Mine(envs.Env)\n    pass", "SyntaxError: expected ':' (mine.py, line 2)"),
    ("import envs\nimport nothing_of_that_name", "ModuleNotFoundError in <module>, line 2"),
    ("Mine = 5", "'int' object is not callable"),
    ("class Mine:\n    actions = ()", "it must be a class of its own (envs.Env)"),
    ("Other = 5", "mine.py does not define Mine")])
def test_a_file_with_a_mistake_is_one_line(text, says, mistake):
    envs.run_file.cache_clear()  # another mine.py than in the row before
    Path("mine.py").write_text(text)
    assert says in mistake("envs.py check mine.py:Mine")


def test_what_check_says_of_a_good_world(user, tok, capsys):
    code, said, _ = user(f"envs.py check {MINE}")
    assert code == 0 and said == f"{MINE}: success in 10 actions, random 0.33, optimal 1.00\n"
    envs.check(MINE, tok)
    assert "2 words of `render` look alike to the model: says sign\n" in capsys.readouterr().out


def test_check_tells_of_few_levels(monkeypatch, capsys):
    """Eight levels, of which a few are held out: the others are never seen there."""
    class Eight(Guess):
        split = True

        @staticmethod
        def draw(rng):
            return {"prize": ("Left", "Up")[rng.integers(2)]}, int(rng.integers(4))
    monkeypatch.setitem(envs.ENVS, "eight", Eight)
    envs.check("eight")
    held_out, trained = re.search(r"only (\d) levels are held out, (\d) are trained in", capsys.readouterr().out).groups()
    assert int(held_out) + int(trained) == 8


def test_check_counts_the_levels_that_cannot_be_won(monkeypatch, capsys):
    class LockedDoors(Guess):
        @staticmethod
        def draw(rng):
            return {"prize": ("Up", "Down")[rng.integers(2)]}, "closed"
    monkeypatch.setitem(envs.ENVS, "locked", LockedDoors)
    envs.check("locked")
    downs = sum(envs.find_level(LockedDoors, (), seed)[0]["prize"] == "Down" for seed in envs.EVAL_SEEDS)
    assert f"{downs} of 256 levels cannot be won" in capsys.readouterr().out


# -------------------------------------------------------------------------------- worlds of one's own in all places
class Numpy(Guess):
    """The natural first version: NumPy's numbers wherever they may be."""

    @staticmethod
    def draw(rng):
        return {"prize": rng.choice(("Left", "Up", "Right"))}, rng.integers(3)

    def outcomes(self, state, action):
        right = np.bool_(action == self.level["prize"])
        half, over = np.float64(0.5), np.bool_(True)
        return [(half, action, np.float32(right), over), (half, action, right, over)]

    def won(self, state):
        return np.bool_(state == self.level["prize"])


class FourLevels(Guess):
    @staticmethod
    def draw(rng):
        return {"prize": ("Left", "Up")[rng.integers(2)], "wind": int(rng.integers(2))}, "closed"


@pytest.mark.parametrize("world", ["Numpy", "FourLevels"])
def test_numpys_numbers_and_few_levels_are_trained_on(world, user):
    code, _, said = user(f"ragen_mini.py --env {__file__}:{world} --out run {SMALL}")
    assert code == 0, said
    before, after = rows_of("run")
    assert list(before["eval"]) == [f"{__file__}:{world}"] and after["valid"] > 0


def test_a_world_in_a_file_works_in_every_command(runs, user, monkeypatch):
    shutil.copytree(runs / "mine", "run")
    config = json.loads(Path("run/config.json").read_text())
    random, optimal = config["yardsticks"][MINE]
    assert config["env"] == MINE and 0 < random < optimal == 1
    assert user("ragen_mini.py --resume run --iterations 2")[0] == 0
    assert [row["iteration"] for row in rows_of("run")] == [0, 1, 2]
    code, said, _ = user("ragen_mini.py --model run --eval-only")
    assert code == 0 and f"{MINE} {rows_of('run')[-1]['eval'][MINE]:.2f}" in said
    code, said, _ = user(f"ragen_mini.py --eval-envs 'bandit, {MINE}' --eval-only --eval-prompts 4")
    assert code == 0 and f"{MINE} " in said and "bandit " in said
    assert user("plots.py curves run")[:2] == (0, "run/curves.png\n")
    assert user("plots.py xray run")[:2] == (0, "run/xray.html\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("jump\nu\n"))
    code, said, _ = user(f"envs.py play {MINE} 3")
    assert code == 0 and "Left / Up / Right" in said and "reward" in said


def test_a_world_defined_again_in_a_notebook_is_the_new_one(monkeypatch):
    class Generous(Guess):
        def won(self, state):
            return state != "closed"
    found = []
    for world in (Guess, Generous):
        monkeypatch.setitem(envs.ENVS, "guess", world)
        found.append(envs.mean_yardsticks("guess", 1)[0, 1])
    assert found == [pytest.approx(1 / 3), 1]


def test_without_a_seed_levels_are_new_and_not_held_out():
    held_out = {repr(envs.find_level(envs.Sokoban, (6, 1), seed)) for seed in envs.EVAL_SEEDS}
    env = envs.make("sokoban")
    levels = set()
    for _ in range(50):
        env.reset()
        levels.add(repr((env.level, env.state)))
    assert len(levels) > 10 and not levels & held_out
    assert env.reset(seed=None)[0] == env.render()


@pytest.mark.parametrize("name", [*envs.BUILT_IN, MINE, f"{__file__}:Numpy"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # that it has no frame rate
def test_gymnasium_accepts_every_world(name):
    checker = pytest.importorskip("gymnasium.utils.env_checker")
    env = envs.to_gymnasium(name)
    checker.check_env(env)
    assert env.reset(seed=3)[0] == env.render() == env.reset(seed=3)[0]
    assert env.step(0)[0] == env.render()


def test_a_world_for_gymnasium_shows_no_level_that_is_held_out():
    pytest.importorskip("gymnasium")
    held_out = {repr(envs.find_level(envs.Sokoban, (6, 1), seed)) for seed in envs.EVAL_SEEDS}
    env = envs.to_gymnasium("sokoban")
    for seed in range(50):
        env.reset(seed=seed)
        assert repr((env.world.level, env.world.state)) not in held_out


# ------------------------------------------------------------------------------------------------ slips of the hand
SLIPS = [  # what is typed, what the user is told
    ("envs.py play Sokoban", "Sokoban: choose bandit"),
    ("envs.py play sokoban seven", "'seven'"),
    ("envs.py play sokoban 1 2", "unrecognized arguments: 2"),
    ("envs.py play sokoban -1", "level -1: at least 0"),
    ("envs.py play {here}:RenderRaises", ":RenderRaises: KeyError in render, line"),
    ("envs.py plya sokoban", "invalid choice: 'plya'"),
    ("envs.py sokoban", "invalid choice: 'sokoban'"),
    ("envs.py check nowhere.py:Mine", "there is no file nowhere.py"),
    ("envs.py check nowhere.py", "my_world.py:Class"),
    ("plots.py", "required: what, folders"),
    ("plots.py curves", "required: folders"),
    ("plots.py curve {runs}/bandit", "invalid choice: 'curve'"),
    ("plots.py curves nowhere", "nowhere is not the folder of a run"),
    ("plots.py curves {runs}/bandit nowhere", "nowhere is not the folder of a run"),
    ("plots.py curves {runs}/bandit/checkpoint", "checkpoint is not the folder of a run"),
    ("plots.py curves {runs}/bandit --out nowhere/x.png", "No such file or directory: 'nowhere/x.png'"),
    ("plots.py curves {runs}/bandit --out x.jpog", "--out x.jpog: end its name in .png"),
    ("plots.py collapse {runs}/bandit", "its log is shorter than 20 iterations"),
    ("plots.py xray nowhere", "nowhere has no xray.json"),
    ("plots.py xray {runs}/bandit --out x.png", "--out is for curves"),
    ("paper.py claims extra", "extra"),
    ("paper.py fig10 --iterations 7", "add --run"),
    ("paper.py fig10 --seeds 5", "add --run"),
    ("ragen_mini.py --env mario", "--env (mario: choose bandit"),
    ("ragen_mini.py --env ''", "--env (: choose bandit"),
    ("ragen_mini.py --env {here}:SixHundredSymbols", "lower --max-new-tokens or --max-turns"),
    ("ragen_mini.py --env nowhere.py", "--env (nowhere.py: choose bandit"),
    ("ragen_mini.py --eval-envs 'bandit, chess'", "--eval-envs (chess: choose"),
    ("ragen_mini.py --enviroment bandit", "unrecognized arguments: --enviroment"),
    ("ragen_mini.py bandit", "unrecognized arguments: bandit"),
    ("ragen_mini.py --iterations three", "--iterations: invalid int value: 'three'"),
    ("ragen_mini.py --iterations 0", "--iterations 0: above 0"),
    ("ragen_mini.py --iterations -5", "--iterations -5: above 0"),
    ("ragen_mini.py --lr 1e-4x", "--lr: invalid float value: '1e-4x'"),
    ("ragen_mini.py --success-rate 1.5", "--success-rate 1.5: at least 0 and at most 1"),
    ("ragen_mini.py --temperature 0", "--temperature 0.0: above 0"),
    ("ragen_mini.py --out .", "--out .: the folder needs a name"),
    ("ragen_mini.py --play seven", "--play: invalid int value: 'seven'"),
    ("ragen_mini.py --play -1", "--play -1: at least 0"),
    ("ragen_mini.py --model /etc", "--model /etc cannot be loaded: give a folder"),
    ("ragen_mini.py --model runs/nowhere/checkpoint", "--model runs/nowhere/checkpoint cannot be loaded: give a folder"),
    ("ragen_mini.py --model gpt2", "--model gpt2 cannot be loaded: give a folder"),
    ("ragen_mini.py --resume nowhere", "nowhere/checkpoint/trainer.pt does not exist: nothing to go on with"),
    ("ragen_mini.py --resume ''", "checkpoint/trainer.pt does not exist: nothing to go on with"),
    ("ragen_mini.py --resume .", "checkpoint/trainer.pt does not exist: nothing to go on with")]


@pytest.mark.parametrize("command, says", SLIPS)
def test_a_slip_is_one_line(command, says, runs, mistake):
    assert says in mistake(command.format(runs=runs, here=__file__))
    assert not list(Path().iterdir()), "nothing is written"


def test_ctrl_c_ends_a_game_without_a_traceback(user, monkeypatch):
    def interrupted(prompt):
        raise KeyboardInterrupt
    monkeypatch.setattr("builtins.input", interrupted)
    assert user("envs.py play sokoban")[::2] == (130, "")


def test_a_terminal_without_a_root_sign_shows_a_question_mark():
    """Nor has this one an input."""
    command = [sys.executable, "envs.py", "play", "sokoban"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "? box on target" in done.stdout


@pytest.mark.parametrize("setting, says", [
    (dict(prompts="8"), "--prompts '8': int is wanted"), (dict(lr="1e-3"), "--lr '1e-3': float is wanted"),
    (dict(iterations=2.5), "--iterations 2.5: int is wanted"), (dict(seed=True), "--seed True: int is wanted"),
    (dict(eval_envs=["bandit"]), "--eval-envs ['bandit']: str is wanted"), (dict(env=Guess), "str is wanted")])
def test_a_slip_in_a_script_is_an_exception_with_the_same_line(setting, says):
    with pytest.raises(rm.UserError) as error:
        rm.Config(device="cpu", **setting)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("command, prints", [
    ("envs.py --help", "python envs.py play sokoban 7"),
    ("envs.py play --help", "python envs.py play sokoban 7"),
    ("envs.py play sokoban", "Up / Down / Left / Right"),  # and the input ends
    ("envs.py check sokoban", "random 0.22, optimal 1.00"),
    ("plots.py xray {runs}/bandit {runs}/mine", "{runs}/bandit/xray.html\n{runs}/mine/xray.html\n"),
    ("plots.py curves {runs}/bandit --out x.pdf", "x.pdf\n"),
    ("ragen_mini.py --model {runs}/bandit --eval-only", "eval      bandit "),
    ("ragen_mini.py --model {runs}/bandit/checkpoint --eval-only", "eval      bandit "),
    ("ragen_mini.py --resume {runs}/bandit/checkpoint", "{runs}/bandit/curves.png")])
def test_what_is_right_stays_right(command, prints, runs, user, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, said, errors = user(command.format(runs=runs))
    assert code == 0 and prints.format(runs=runs) in said, (said, errors)


# ------------------------------------------------------------------------------------------------- damaged folders
def text(name, content):
    """A file, or a folder, is replaced by this text."""
    def spoil(run):
        if Path(run, name).is_dir():
            shutil.rmtree(run / name)
        Path(run, name).write_text(content)
    return spoil


def last_row(**changes):
    """The last row of the log is another one; a column that becomes ... is left out."""
    def spoil(run):
        *rows, last = rows_of(run)
        last = {name: x for name, x in (last | changes).items() if x is not ...}
        (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*rows, last)))
    return spoil


def folder(name):
    def spoil(run):
        Path(run, name).unlink()
        Path(run, name).mkdir()
    return spoil


TEMPLATE = "checkpoint/chat_template.jinja"
DAMAGE = [  # how, the command, what the user is told
    (last_row(reward="high"), "plots.py curves run", "run/log.jsonl, line 2, is damaged"),
    (last_row(iteration=...), "plots.py curves run", "run/log.jsonl, line 2, is damaged"),
    (last_row(eval=0.5), "plots.py curves run", "run/log.jsonl, line 2, is damaged"),
    (last_row(eval={"bandit": "x"}), "plots.py curves run", "run/log.jsonl, line 2, is damaged"),
    (last_row(seconds_update="x"), "plots.py curves run", "run/log.jsonl, line 2, is damaged"),
    (text("log.jsonl", ""), "plots.py curves run", "run: no iteration is finished"),
    (text("log.jsonl", "no log"), "plots.py curves run", "run: no iteration is finished"),
    (text("log.jsonl", '{"iteration": 0}\n{"iter\n{"iteration": 2}'), "plots.py curves run", "run/log.jsonl, line 2, is damaged"),
    (folder("log.jsonl"), "plots.py curves run", "run is not the folder of a run"),
    (text("config.json", ""), "plots.py curves run", "run/config.json is damaged"),
    (text("config.json", "[]"), "plots.py curves run", "run/config.json is damaged: it lacks settings"),
    (text("config.json", '{"env": "bandit"}'), "plots.py curves run", "run/config.json is damaged: it lacks settings"),
    (survive.put("config.json", rm.TINY / "model.safetensors"), "plots.py curves run", "run/config.json is damaged"),
    (survive.cut("xray.json", 0.9), "plots.py xray run", "run/xray.json is damaged"),
    (survive.delete("xray.json"), "plots.py xray run", "run has no xray.json"),
    (text("checkpoint", ""), "ragen_mini.py --resume run", "trainer.pt does not exist: nothing to go on with"),
    (text("checkpoint", ""), "ragen_mini.py --model run", "--model run cannot be loaded: give a folder"),
    (survive.cut("checkpoint/model.safetensors", 0.9), "ragen_mini.py --model run", "cannot be loaded: give a folder"),
    (survive.delete("checkpoint/tokenizer.json"), "ragen_mini.py --model run", "cannot be loaded: give a folder"),
    (survive.delete("checkpoint/config.json"), "ragen_mini.py --model run", "cannot be loaded: give a folder"),
    (survive.cut("checkpoint/trainer.pt", 0.9), "ragen_mini.py --model run", "trainer.pt cannot be used: put it back"),
    (survive.delete(TEMPLATE), "ragen_mini.py --model run", "has no chat template: take an instruction-tuned model"),
    (text(TEMPLATE, "{{ raise_exception('no\nway') }}"), "ragen_mini.py --model run", "its chat template fails (no way)"),
    (text(TEMPLATE, "hello"), "ragen_mini.py --model run", "its chat template does not show the user's message")]


@pytest.mark.parametrize("spoil, command, says", DAMAGE)
def test_a_damaged_folder_is_one_line(spoil, command, says, runs, mistake):
    run = shutil.copytree(runs / "bandit", "run")
    spoil(Path(run))
    assert says in mistake(command)


def test_a_world_whose_file_is_gone_is_one_line_and_its_curves_can_be_drawn(user, mistake):
    shutil.copy(ROOT / "tests/my_world.py", "gone.py")
    assert user(f"ragen_mini.py --env gone.py:Guess --out run {SMALL}")[0] == 0
    Path("gone.py").unlink()
    for command in ("ragen_mini.py --resume run --iterations 2", "ragen_mini.py --model run --play 7"):
        assert "gone.py:Guess: there is no file gone.py here" in mistake(command)
    assert user("plots.py curves run")[0] == 0


def test_a_model_that_answers_nonsense_is_shown_once(user, random_folder):
    code, said, _ = user(f"ragen_mini.py --model {random_folder} --env bandit --out run {SMALL} --iterations 2")
    assert code == 0 and said.count("can the model write such actions? An answer: '<think>") == 1


# ------------------------------------------------------------------------------------------------------- pictures
def test_no_picture_is_overwritten_that_was_not_asked_for(runs, user):
    for name in ("bandit", "mine"):
        shutil.copytree(runs / name, name)
        Path(name, "curves.png").write_text("its own")
    assert user("plots.py curves bandit mine")[1] == "curves.png\n"
    Path("curves.png").write_text("the first")
    assert user("plots.py curves bandit mine")[1] == "curves2.png\n"
    assert user("plots.py curves mine bandit --out both.png")[1] == "both.png\n"
    assert Path("curves.png").read_text() == "the first" and Path("both.png").exists()
    assert Path("bandit/curves.png").read_text() == Path("mine/curves.png").read_text() == "its own"


def test_runs_of_several_worlds_have_a_panel_each_with_its_yardsticks(runs, user, pictures, monkeypatch):
    drawn = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda fig, *_, **__: drawn.append(fig))
    code, _, said = user(f"plots.py curves {runs}/bandit {runs}/mine")
    assert code == 0, said
    assert drawn[0].get_suptitle().startswith("Guess, tiny / bandit, tiny")
    shown = {ax.get_title(): [text.get_text() for text in ax.texts] for ax in drawn[0].axes}
    assert shown["bandit success"] == ["random 0.50", "optimal 1.00"]
    assert shown["Guess success"] == ["random 0.33", "optimal 1.00"]
    assert [line.get_label() for line in drawn[0].axes[0].lines][0] == "bandit"


@pytest.mark.filterwarnings("error")  # 0 has no logarithm
def test_a_run_that_never_learnt_can_be_seen(user, random_folder, pictures, monkeypatch):
    """All answers are malformed and all returns alike: nothing was trained."""
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda *_, **__: None)
    user(f"ragen_mini.py --model {random_folder} --env bandit --out run {SMALL}")
    assert rows_of("run")[1]["updates"] == 0
    assert user("plots.py curves run")[0] == 0
    assert user("plots.py xray run")[:2] == (0, "run/xray.html\n")
    best, *_ = json.loads(Path("run/xray.json").read_text())
    assert len(best["tokens"]) == len(best["mask"]) > 0 and "reward" in best["columns"]
    page = Path("run/xray.html").read_text(encoding="utf-8")
    assert "EPISODES" not in page and json.dumps(best["tokens"][0]).replace("<", "\\u003c") in page


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("columns", [{}, {"grad_norm": 0.0, "reward_std": 0.0}, {"mutual_information": None}])
def test_a_log_with_little_in_it_has_an_anatomy(columns, runs, user, monkeypatch):
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda *_, **__: None)
    shutil.copytree(runs / "bandit", "run")
    rows = [dict(iteration=i, success=0.5, **columns) for i in range(30)]
    Path("run/log.jsonl").write_text("\n".join(json.dumps(row) for row in rows))  # without a last end of line
    assert len(plots.load("run").rows) == 30
    assert user("plots.py collapse run")[:2] == (0, "run/collapse.png\n")


# ------------------------------------------------------------------------------------------------- meet the agent
def test_an_agent_plays_one_episode(runs, user):
    code, said, _ = user(f"ragen_mini.py --model {runs}/bandit/checkpoint --play 7")
    env = envs.make("bandit")
    shown, _ = env.reset(7)
    assert code == 0 and said.startswith(f"{env.instruction}\n\n{shown}\n\n<think>")
    assert said.count("reward ") >= 1 and said.count("success, return ") == 1
    assert user(f"ragen_mini.py --model {runs}/bandit/checkpoint --play 7")[1] == said, "the same one again"


@pytest.mark.parametrize("name", ["bandit", "mine"])
def test_the_card_of_a_checkpoint_has_a_prompt_that_the_model_reads_as_in_training(name, runs, tok):
    card = (runs / name / "checkpoint/README.md").read_text(encoding="utf-8")
    cfg = rm.Config(**rm.saved_state(runs / name / "checkpoint")["config"])
    assert cfg.env in card and "--play 7" in card
    prompt = card.split("````")[1].strip()
    assert prompt.endswith("<think>")
    assert tok(prompt, add_special_tokens=False).input_ids == rm.begin(cfg.env, 0, 0, 0, tok, cfg).ids


def test_a_copied_checkpoint_as_small_as_tiny_has_its_settings(runs, tmp_path):
    elsewhere = shutil.copytree(runs / "bandit/checkpoint", tmp_path / "elsewhere")
    (elsewhere / "trainer.pt").unlink()
    tiny = rm.Config(model="tiny", device="cpu")
    assert rm.parse_config(["--model", str(elsewhere), "--device", "cpu"]) == rm.replace(tiny, model=str(elsewhere))
    large = rm.Config(model="some/model", device="cpu")
    assert (large.lr, large.max_new_tokens) != (tiny.lr, tiny.max_new_tokens)


def test_the_live_picture_waits_until_there_is_something_to_draw(monkeypatch, cfg):
    """--eval-every 0: iteration 0 has neither an evaluation nor a rollout."""
    shown = []
    display = SimpleNamespace(Image=bytes, clear_output=lambda wait: None, display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(plots, "dashboard", lambda loaded, out, **rest: out.write(b"picture"))
    plots.live(cfg, [{"iteration": 0}])
    assert not shown
    plots.live(cfg, [{"iteration": i} for i in range(6)])
    assert shown == [b"picture"]
    cfg.iterations = 8
    plots.live(cfg, [{"iteration": i} for i in range(8)])
    assert len(shown) == 1, "a picture takes its time"
    plots.live(cfg, [{"iteration": i} for i in range(9)])
    assert len(shown) == 2, "but the last one is drawn"
