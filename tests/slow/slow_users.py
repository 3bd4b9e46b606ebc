"""What people do with the program: environments of their own, and slips of the hand.

A mistake that the user can mend ends in one line that names it, with exit code 1; a mistyped
command in that of argparse, with exit code 2. A mistake in one's own environment keeps Python's
traceback, which ends in one's own file. More mistakes are in test_settings.MISTAKES.
"""
import io
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest

import envs
import plots
import ragen_mini as rm
from conftest import ROOT, rows_of
from extras.my_world import Guess
from support import device, errors, folder

MINE = f"{ROOT}/extras/my_world.py:Guess"
SMALL = ("--prompts 2 --rollouts 4 --minibatch-size 4 --iterations 1 --max-new-tokens 16 "
         "--max-turns 2 --eval-prompts 4 --algo grpo --lr 1e-3")


@pytest.fixture
def user(monkeypatch, capsys, tmp_path):
    """user("extras/play.py my_world.py:Guess") -> exit code, what it printed, its errors.

    In a folder of its own. Functions that a script has replaced are put back.
    """
    def run(command):
        modules = (rm, plots, device, errors, folder)
        kept = [(module, dict(vars(module))) for module in modules]
        monkeypatch.setitem(sys.modules, "envs", envs)  # envs.py as a program takes this place
        command = command.replace("ragen_mini.py", "ragen_mini.py --device cpu")
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        capsys.readouterr()
        code, text = 0, ""
        try:
            runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        finally:
            for module, functions in kept:
                vars(module).update(functions)
        if isinstance(code, str):  # Python prints it, and exits with 1
            code, text = 1, code + "\n"
        said, errors_of_it = capsys.readouterr()
        return code, said, errors_of_it + text
    monkeypatch.chdir(tmp_path)
    return run


@pytest.fixture
def mistake(user):
    """mistake(command) -> the one line that the user is told"""
    def run(command):
        code, _, told = user(command)
        assert code in (1, 2), told
        *usage, said = told.splitlines()
        assert not usage or code == 2, told
        return said
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with two finished runs, one of them in an environment of one's own."""
    out = tmp_path_factory.mktemp("runs")
    for name, env in (("bandit", "bandit"), ("mine", MINE)):
        rm.train(rm.parse_config(f"--env {env} --out {out}/{name} --device cpu {SMALL}".split()))
    return out


# ---------------------------------------------------------------------- environments of one's own
class RenderRaises(Guess):
    def render(self):
        return self.level["price"]


class StepRaises(Guess):
    def outcomes(self, state, action):
        return [(1.0, action, self.prices[action], True)]


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


@pytest.mark.parametrize("command", [
    "ragen_mini.py --env {here} --out run", "extras/play.py {here}"])
@pytest.mark.parametrize("env, where", [(RenderRaises, "render"), (StepRaises, "outcomes")])
def test_a_mistake_in_an_environment_is_a_traceback_into_its_file(
        command, env, where, user, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("u\n"))
    here = f"{__file__}:{env.__name__}"
    with pytest.raises((KeyError, AttributeError)) as error:
        user(f"{command.format(here=here)} {SMALL if '--env' in command else ''}")
    last = traceback.extract_tb(error.value.__traceback__)[-1]
    assert (last.filename, last.name) == (__file__, where)


def test_numpys_numbers_are_trained_on(user):
    code, _, said = user(f"ragen_mini.py --env {__file__}:Numpy --out run {SMALL}")
    assert code == 0, said
    before, after = rows_of("run")
    assert list(before["eval"]) == ["Numpy"] and after["valid"] > 0


def test_an_environment_in_a_file_works_in_every_command(finished, user, monkeypatch):
    shutil.copytree(finished / "mine", "run")
    config = json.loads(Path("run/config.json").read_text())
    random, optimal = rows_of("run")[0]["yardsticks"]["Guess"]
    assert config["env"] == MINE and 0 < random < optimal == 1
    assert user("ragen_mini.py --resume run --iterations 2")[0] == 0
    rows = rows_of("run")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    given = f"--model run --env {MINE} --max-new-tokens 16 --max-turns 2 --eval-prompts 4"
    code, said, _ = user(f"ragen_mini.py {given} --eval-only")
    assert code == 0 and f"Guess {rows[-1]['eval']['Guess']:.2f}" in said
    code, said, _ = user(f"ragen_mini.py {given} --play 3")
    assert code == 0 and "return " in said
    assert user(f"ragen_mini.py {given} --play 3")[1] == said, "the same one again"
    assert user("plots.py curves run")[:2] == (0, "run/curves.png\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("jump\nu\n"))
    code, said, _ = user(f"extras/play.py {MINE} 3")
    assert code == 0 and "Left / Up / Right" in said and "reward" in said


def test_a_class_is_an_environment_too(tmp_path, cfg):
    """In a notebook: no file, and the folder of the run still says which environment it was."""
    cfg = rm.replace(cfg, env=Guess, out=str(tmp_path / "run"), prompts=2, rollouts=4,
                     minibatch_size=4, max_turns=2, iterations=1, eval_prompts=4, algo="grpo")
    rows, models = rm.train(cfg)
    assert list(rows[0]["eval"]) == list(rows[0]["yardsticks"]) == ["Guess"]
    assert json.loads((tmp_path / "run/config.json").read_text())["env"] == "Guess"
    again, _ = rm.train(rm.replace(cfg, resume=cfg.out, iterations=2))
    assert [row["iteration"] for row in again] == [0, 1, 2] and again[:1] == rows[:1]
    traj, = rm.play([3], models, cfg)
    assert isinstance(traj.env, Guess) and traj.turns


# ------------------------------------------------------------------------------ slips of the hand
SLIPS = [  # what is typed, what is named
    ("extras/play.py Sokoban", "Sokoban"),
    ("extras/play.py sokoban seven", "seven"),
    ("extras/play.py mine.py:Mine", "mine.py"),
    ("plots.py", "RUN"),
    ("plots.py curve {runs}/bandit", "'curve'"),
    ("plots.py curves nowhere", "nowhere"),
    ("plots.py curves {runs}/bandit --out picture.xyz", "xyz"),
    ("plots.py curves {runs}/bandit/checkpoint", "bandit/checkpoint"),
    ("ragen_mini.py --model /etc", "/etc"),
    ("ragen_mini.py --model runs/nowhere/checkpoint", "runs/nowhere/checkpoint"),
    ("ragen_mini.py --resume {runs}/mine", "runs0/mine"),
    ("ragen_mini.py --resume .", "--resume"),
    ("ragen_mini.py --resume {runs}/bandit/checkpoint", "bandit/checkpoint"),
    ("extras/check_model.py", "MODEL"),
    ("extras/measure.py --env bandit --eval-envs chess", "chess"),
    ("extras/recipes.py rloo --algo grpo --env bandit --out {here}/run", "slow_users.py"),
    ("extras/episode.py nowhere", "nowhere"),
    ("extras/xray.py nowhere", "nowhere")]


@pytest.mark.parametrize("command, names", SLIPS)
def test_a_slip_is_one_line(command, names, finished, mistake):
    assert names in mistake(command.format(runs=finished, here=__file__))
    assert not list(Path().iterdir()), "nothing is written"


def test_a_terminal_without_a_root_sign_shows_a_question_mark(tmp_path):
    """Here every state ends with three of them."""
    file = tmp_path / "rooted.py"
    file.write_text("import envs\nclass Rooted(envs.FrozenLake):\n"
                    "    def render(self):\n"
                    "        return super().render() + ' \\u221a\\u221a\\u221a'\n")
    command = f"ragen_mini.py --env {file}:Rooted --device cpu --play 0"
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, env=env, text=True,
                          capture_output=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "???" in done.stdout


def test_the_checkpoint_of_another_run_is_refused_whatever_config_json_says(finished, mistake):
    shutil.copytree(finished / "bandit", "run")
    shutil.copy(finished / "mine/checkpoint/trainer.pt", "run/checkpoint/trainer.pt")
    assert "--env" in mistake("ragen_mini.py --resume run --iterations 9")
