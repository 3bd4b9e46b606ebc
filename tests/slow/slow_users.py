"""What people do with the program: environments of their own, slips of the hand, folders that have
suffered, pictures of their runs.

A mistake that the user can mend ends in one line that names it, with exit code 1; a mistyped
command in that of argparse, with exit code 2. A mistake in one's own environment keeps Python's
traceback, which ends in one's own file (extras/check_world.py names it in one line). More mistakes
are in test_train.MISTAKES and in the tests of extras and figures.
"""
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
import safetensors.torch

import envs
import plots
import ragen_mini as rm
import runs
from conftest import ROOT, rows_of
from extras.my_world import Guess
from test_train import files_of

MINE = f"{ROOT}/extras/my_world.py:Guess"
SMALL = ("--prompts 2 --rollouts 4 --minibatch-size 4 --iterations 1 --max-new-tokens 16 "
         "--max-turns 2 --eval-prompts 4 --algo grpo --lr 1e-3")


@pytest.fixture
def user(monkeypatch, capsys, tmp_path):
    """user("extras/play.py my_world.py:Guess") -> exit code, what it printed, its errors.

    In a folder of its own. Functions that a script has replaced are put back.
    """
    def run(command):
        kept = [(module, dict(vars(module))) for module in (rm, runs, plots)]
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
        said, errors = capsys.readouterr()
        return code, said, errors + text
    monkeypatch.chdir(tmp_path)
    return run


@pytest.fixture
def mistake(user):
    """mistake(command) -> the one line that the user is told"""
    def run(command):
        code, _, errors = user(command)
        assert code in (1, 2), errors
        *usage, said = errors.splitlines()
        assert not usage or code == 2, errors
        return said
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with two finished runs, one of them in an environment of one's own."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ragen_mini.py"])  # whose runs they are
        for name, env in (("bandit", "bandit"), ("mine", MINE)):
            flags = f"--env {env} --out {folder}/{name} --device cpu {SMALL}"
            rm.train(rm.parse_config(flags.split()))
    return folder


# ---------------------------------------------------------------------- environments of one's own
class RenderRaises(Guess):
    def render(self):
        return self.level["price"]


class StepRaises(Guess):
    def outcomes(self, state, action):
        return [(1.0, action, self.prices[action], True)]


class OneLevel(Guess):
    split = True

    @staticmethod
    def draw(rng):
        return {"prize": "Up"}, "closed"


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


class SixHundredSymbols(Guess):
    """More than `tiny` can read: no mistake in itself."""

    def render(self):
        return "O " * 600


@pytest.mark.parametrize("command", [
    "ragen_mini.py --env {here} --out run", "extras/play.py {here}",
    "extras/elsewhere.py --eval-envs {here} --env bandit --out run"])
@pytest.mark.parametrize("env, where", [(RenderRaises, "render"), (StepRaises, "outcomes")])
def test_a_mistake_in_an_environment_is_a_traceback_into_its_file(
        command, env, where, user, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("u\n"))
    here = f"{__file__}:{env.__name__}"
    with pytest.raises((KeyError, AttributeError)) as error:
        user(f"{command.format(here=here)} {SMALL if '--env' in command else ''}")
    last = traceback.extract_tb(error.value.__traceback__)[-1]
    assert (last.filename, last.name) == (__file__, where)


def test_too_few_levels_are_one_line(mistake):
    assert "OneLevel" in mistake(f"ragen_mini.py --env {__file__}:OneLevel --out run {SMALL}")


@pytest.mark.parametrize("text", ["Other = 5", None])
def test_a_file_without_the_environment_is_one_line(text, mistake):
    envs.run_file.cache_clear()  # another mine.py than in the row before
    if text:
        Path("mine.py").write_text(text)
    for command in ("extras/play.py mine.py:Mine", "ragen_mini.py --env mine.py:Mine"):
        assert "mine.py" in mistake(command)


@pytest.mark.parametrize("env", ["Numpy", "FourLevels"])
def test_numpys_numbers_and_few_levels_are_trained_on(env, user):
    code, _, said = user(f"ragen_mini.py --env {__file__}:{env} --out run {SMALL}")
    assert code == 0, said
    before, after = rows_of("run")
    assert list(before["eval"]) == [env] and after["valid"] > 0


def test_an_environment_in_a_file_works_in_every_command(finished, user, monkeypatch):
    shutil.copytree(finished / "mine", "run")
    config = json.loads(Path("run/config.json").read_text())
    random, optimal = rows_of("run")[0]["yardsticks"]["Guess"]
    assert config["env"] == MINE and 0 < random < optimal == 1
    assert user("ragen_mini.py --resume run --iterations 2")[0] == 0
    rows = rows_of("run")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    code, said, _ = user("ragen_mini.py --model run --eval-only")
    assert code == 0 and f"Guess {rows[-1]['eval']['Guess']:.2f}" in said
    code, said, _ = user("ragen_mini.py --model run --play 3")
    assert code == 0 and "return " in said
    assert user("plots.py curves run")[:2] == (0, "run/curves.png\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("jump\nu\n"))
    code, said, _ = user(f"extras/play.py {MINE} 3")
    assert code == 0 and "Left / Up / Right" in said and "reward" in said
    # Nearly as the model writes them:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Right || d ||\n"))
    code, said, _ = user("extras/play.py frozenlake 8")
    assert code == 0 and said.count("reward") == 2


def test_a_class_is_an_environment_too(tmp_path, cfg):
    """In a notebook: no file, and the folder of the run still says which environment it was."""
    cfg = rm.replace(cfg, env=Guess, out=str(tmp_path / "run"), prompts=2, rollouts=4,
                     minibatch_size=4, max_turns=2, iterations=1, eval_prompts=4, algo="grpo")
    rows, models = rm.train(cfg)
    assert list(rows[0]["eval"]) == list(rows[0]["yardsticks"]) == ["Guess"]
    assert rows_of(cfg.out) == rows
    assert json.loads((tmp_path / "run/config.json").read_text())["env"] == "Guess"
    again, _ = rm.train(rm.replace(cfg, resume=cfg.out, iterations=2))
    assert [row["iteration"] for row in again] == [0, 1, 2] and again[:1] == rows[:1]
    traj, = rm.play([3], models, cfg)
    assert isinstance(traj.env, Guess) and traj.turns


def test_an_environment_defined_again_in_a_notebook_is_the_new_one():
    generous = type("Guess", (Guess,), {"won": lambda self, state: state != "closed"})
    found = [envs.mean_yardsticks(env, 1)[0, 1] for env in (Guess, generous)]
    assert found == [pytest.approx(1 / 3), 1]


def test_an_environment_whose_file_is_gone_is_one_line_and_its_curves_can_be_drawn(user, mistake):
    shutil.copy(ROOT / "extras/my_world.py", "gone.py")
    assert user(f"ragen_mini.py --env gone.py:Guess --out run {SMALL}")[0] == 0
    Path("gone.py").unlink()
    for command in ("--resume run --iterations 2", "--model run --play 7"):
        assert "gone.py:Guess" in mistake(f"ragen_mini.py {command}")
    assert user("plots.py curves run")[0] == 0


# ------------------------------------------------------------------------------ slips of the hand
SLIPS = [  # what is typed, what is named
    ("extras/play.py Sokoban", "Sokoban"),
    ("extras/play.py sokoban seven", "seven"),
    ("extras/play.py sokoban 1 2", "arguments: 2"),
    ("extras/play.py sokoban -1", "-1"),
    ("plots.py", "RUN"),
    ("plots.py curves", "RUN"),
    ("plots.py curve {runs}/bandit", "'curve'"),
    ("plots.py curves nowhere", "nowhere"),
    ("plots.py curves {runs}/bandit nowhere --out x.png", "nowhere"),
    ("plots.py curves {runs}/bandit --out picture.xyz", "xyz"),
    ("plots.py curves {runs}/bandit/checkpoint", "bandit/checkpoint"),
    ("plots.py online-k {runs}/bandit {runs}/mine", "bandit-grpo"),
    ("ragen_mini.py --env mario", "mario"),
    ("ragen_mini.py --env ''", "--env"),
    ("ragen_mini.py --env {here}:SixHundredSymbols", "--max-new-tokens"),
    ("ragen_mini.py --env nowhere.py", "nowhere.py"),
    ("ragen_mini.py --enviroment bandit", "--enviroment"),
    ("ragen_mini.py bandit", "bandit"),
    ("ragen_mini.py --iterations three", "--iterations"),
    ("ragen_mini.py --lr 1e-4x", "--lr"),
    ("ragen_mini.py --play seven", "--play"),
    ("ragen_mini.py --model /etc", "/etc"),
    ("ragen_mini.py --model runs/nowhere/checkpoint", "runs/nowhere/checkpoint"),
    ("ragen_mini.py --resume nowhere", "nowhere"),
    ("ragen_mini.py --resume {runs}/mine", "runs0/mine"),
    ("ragen_mini.py --resume ''", "--resume"),
    ("ragen_mini.py --resume .", "--resume"),
    ("ragen_mini.py --resume {runs}/bandit/checkpoint", "bandit/checkpoint"),
    ("ragen_mini.py --resume {runs}/bandit --out elsewhere", "--out"),
    ("extras/elsewhere.py --eval-envs bandit_rev --env bandit --eval_o", "--eval"),
    ("extras/recipes.py rloo --algo grpo --env bandit --out {here}/run", "slow_users.py"),
    ("extras/recipes.py own_model --model runs", "--model"),
    ("extras/recipes.py said --env bandit", "--env"),
    ("extras/warm_start.py tiny out --env bandit --iterations 5", "--iterations"),
    ("extras/warm_start.py tiny out --env bandit --eval-only", "--eval-only"),
    ("extras/warm_start.py tiny out --env bandit --lr=1e-4", "--lr"),
    ("extras/warm_start.py tiny out --env bandit --warm-lr 0", "--warm-lr"),
    ("extras/warm_start.py tiny out --env bandit --warm-lr inf", "--warm-lr"),
    ("extras/warm_start.py tiny out --env bandit --warm-lr nan", "--warm-lr"),
    ("extras/warm_start.py tiny out --env bandit --lessons -3", "--lessons"),
    ("extras/warm_start.py tiny {here}/out --env bandit", "slow_users.py/out"),
    ("extras/warm_start.py tiny --env bandit", "OUT"),
    ("extras/warm_start.py tiny out --out elsewhere", "--out"),
    ("extras/warm_start.py tiny out --env {here}:OneLevel --lessons 3", "OneLevel"),
    ("extras/episode.py nowhere", "nowhere")]


@pytest.mark.parametrize("command, names", SLIPS)
def test_a_slip_is_one_line(command, names, finished, mistake):
    assert names in mistake(command.format(runs=finished, here=__file__))
    assert not list(Path().iterdir()), "nothing is written"


def process(command, **how):  # in a terminal that has only ASCII
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    return subprocess.run([sys.executable, *command.split()], cwd=ROOT, env=env,
                          capture_output=True, text=True, **how)


def test_a_terminal_without_a_root_sign_shows_a_question_mark(tmp_path):
    """Here every state ends with three of them. And this terminal has no input."""
    file = tmp_path / "rooted.py"
    file.write_text("import envs\nclass Rooted(envs.FrozenLake):\n"
                    "    def render(self):\n"
                    "        return super().render() + ' \\u221a\\u221a\\u221a'\n")
    done = process(f"ragen_mini.py --env {file}:Rooted --device cpu --play 0")
    assert (done.returncode, done.stderr) == (0, "") and " ???" in done.stdout
    done = process("extras/play.py sokoban", stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "") and "? box on target" in done.stdout


def test_a_closed_input_ends_the_game():
    done = process("extras/play.py bandit", preexec_fn=lambda: os.close(0))
    assert (done.returncode, done.stderr) == (0, "") and "Teacher" in done.stdout


@pytest.mark.parametrize("script", ["recipes.py", "fast_rollout.py", "play.py"])
def test_a_reader_that_has_ended_is_no_error(script):
    """As in `play.py | true`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, ROOT / "extras" / script], stdin=subprocess.DEVNULL,
                          stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("command, prints", [
    ("extras/play.py --help", "python extras/play.py sokoban 7"),
    ("extras/check_model.py --help", "check_model.py MODEL"),
    ("extras/play.py sokoban", "Up / Down / Left / Right"),  # and the input ends
    ("plots.py curves {runs}/bandit --out x.pdf", "x.pdf\n"),
    ("plots.py curves {runs}/bandit {runs}/mine", "curves.png\n"),
    ("ragen_mini.py --model {runs}/bandit --eval-only", "bandit 0."),
    ("ragen_mini.py --model {runs}/bandit/checkpoint/ --eval-only", "bandit 0."),
    ("extras/recipes.py rloo --model {runs}/bandit --play 7", "return "),
    ("extras/elsewhere.py --help", "--eval-envs"),
    ("extras/recipes.py --help", "rloo")])
def test_what_is_right_stays_right(command, prints, finished, user, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, said, errors = user(command.format(runs=finished))
    assert code == 0 and prints in said, (said, errors)


def test_help_of_gymnasium_env(user):
    pytest.importorskip("gymnasium")
    code, said, errors = user("extras/gymnasium_env.py --help")
    assert code == 0 and "gymnasium_env.py sokoban" in said, errors


def test_an_agent_plays_one_episode(finished, user):
    code, said, _ = user(f"ragen_mini.py --model {finished}/bandit --play 7")
    env = envs.make("bandit")
    shown, _ = env.reset(7)
    assert code == 0
    for word in re.findall(r"\w+", shown):  # tiny's tokenizer spaces them otherwise
        assert word in said
    assert said.count("return ") == 1 and "<answer>" in said
    again = user(f"ragen_mini.py --model {finished}/bandit --play 7")[1]
    assert again == said, "the same one again"


# --------------------------------------------------------------------------------- damaged folders
def text(name, content):
    """A file, or a folder, is replaced by this text."""
    def damage(run):
        if Path(run, name).is_dir():
            shutil.rmtree(run / name)
        Path(run, name).write_text(content)
    return damage


def folder(name):
    def damage(run):
        Path(run, name).unlink(missing_ok=True)
        Path(run, name).mkdir()
    return damage


def cut(name, share):
    def damage(run):
        content = Path(run, name).read_bytes()
        Path(run, name).write_bytes(content[:int(share * len(content))])
    return damage


def delete(name):
    return lambda run: Path(run, name).unlink()


def without_template(run):
    file = Path(run, "checkpoint/tokenizer_config.json")
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))


def without_weights(run):
    file = Path(run, "checkpoint/model.safetensors")
    tensors = safetensors.torch.load_file(file)
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, file, {"format": "pt"})


DAMAGE = [  # how, the command, what is named
    (text("log.jsonl", '{"iteration": 0}\n{"iter\n{}'), "plots.py curves run", "log.jsonl"),
    (text("log.jsonl", '{"iteration": 0}\n'), "plots.py collapse run", "iteration"),
    (folder("log.jsonl"), "plots.py curves run", "run"),
    (delete("config.json"), "plots.py curves run", "config.json"),
    (text("config.json", "{}"), "plots.py collapse run", "config.json"),
    (folder("collapse.png"), "plots.py collapse run", "collapse.png"),
    (folder("episode.png"), "extras/episode.py run", "run/episode.png"),
    (folder("xray.html"), "extras/xray.py run", "run/xray.html"),
    (text("samples.jsonl", "{}\n"), "extras/episode.py run", "run/samples.jsonl"),
    (text("checkpoint", ""), "ragen_mini.py --resume run", "--resume run"),
    (text("checkpoint", ""), "ragen_mini.py --model run", "--model run"),
    (cut("checkpoint/model.safetensors", 0.9), "ragen_mini.py --model run", "--model run"),
    (delete("checkpoint/tokenizer.json"), "ragen_mini.py --model run", "--model run"),
    (delete("checkpoint/config.json"), "ragen_mini.py --model run", "--model run"),
    (cut("checkpoint/trainer.pt", 0.9), "ragen_mini.py --resume run", "trainer.pt"),
    (delete("checkpoint/trainer.pt"), "ragen_mini.py --resume run", "run"),
    (without_weights, "ragen_mini.py --model run", "--model run"),
    (without_template, "ragen_mini.py --model run", "template")]


@pytest.mark.parametrize("damage, command, names", DAMAGE)
def test_a_damaged_folder_is_one_line(damage, command, names, finished, mistake):
    run = shutil.copytree(finished / "bandit", "run")
    damage(Path(run))
    assert names in mistake(command)


def test_elsewhere_goes_on_in_an_environment_of_ones_own(user):
    """Its name in the log is no option, and is not taken for one of the others. The commands that
    the program prints work.
    """
    play = "--iterations 1 --prompts 2 --rollouts 2 --eval-prompts 2 --max-new-tokens 8 --out run"
    code, said, errors = user(
        f"extras/elsewhere.py --env {MINE} --eval-envs bandit --device cpu {play}")
    assert code == 0, errors
    go_on, = re.findall("go on: .*(--resume .*)", said)
    watch, = re.findall("watch: .*(--model .*)", said)
    for command in (go_on.replace("31", "2"), watch):
        assert user(f"extras/elsewhere.py {command} --device cpu")[0] == 0
    evaluated = [list(row["eval"]) for row in rows_of("run") if "eval" in row]
    assert evaluated == [["Guess", "bandit"]] * 3


def test_a_checkpoint_does_not_go_on_as_another_run(finished, mistake):
    """With settings that know nothing of the run, by another script, with files mixed up."""
    shutil.copytree(finished / "bandit", "run")
    before = files_of("run")
    with pytest.raises(runs.UserError, match="--env|ragen_mini"):
        rm.train(rm.Config(resume="run", iterations=9, device="cpu"))
    assert "ragen_mini" in mistake("extras/recipes.py rloo --resume run --iterations 9")
    assert {file: file.read_bytes() for file in before} == before
    shutil.copy(finished / "mine/checkpoint/trainer.pt", "run/checkpoint/trainer.pt")
    assert "--env" in mistake("ragen_mini.py --resume run --iterations 9")


# ---------------------------------------------------------------------------------------- pictures
@pytest.fixture
def drawn(monkeypatch, pictures):  # -> figures that would be saved
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig",
                        lambda fig, *_, **__: figures.append(fig))
    return figures


def test_a_picture_of_several_runs_leaves_their_own_as_they_are(finished, user):
    for name in ("bandit", "mine"):
        shutil.copytree(finished / name, name)
        Path(name, "curves.png").write_text("its own")
    assert user("plots.py curves mine bandit --out both.png")[:2] == (0, "both.png\n")
    assert Path("both.png").exists()
    for name in ("bandit", "mine"):
        assert Path(name, "curves.png").read_text() == "its own"


def test_runs_of_several_environments_have_a_panel_each_with_its_yardsticks(
        finished, user, drawn):
    code, _, said = user(f"plots.py curves {finished}/bandit {finished}/mine --out both.png")
    assert code == 0, said
    title = drawn[0].get_suptitle()
    assert "Guess, tiny" in title and "bandit, tiny" in title
    for env, random in (("bandit", "0.50"), ("Guess", "0.33")):
        panel, = [ax for ax in drawn[0].axes if ax.get_title().startswith(f"success, {env}")]
        shown = [text.get_text() for text in panel.texts]
        assert {f"random {random}", "optimal 1.00"} <= {*shown}


@pytest.mark.filterwarnings("error")  # 0 has no logarithm
def test_a_run_that_never_learned_can_be_seen(user, random_folder, drawn):
    """All answers are malformed and all returns alike: nothing was trained."""
    assert user(f"ragen_mini.py --model {random_folder} --env bandit --out run {SMALL}")[0] == 0
    assert rows_of("run")[1]["updates"] == 0
    assert user("plots.py curves run")[0] == 0 and drawn
    assert user("plots.py collapse run")[0] == 0 and len(drawn) > 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("columns", [
    {}, {"grad_norm": 0.0, "reward_std": 0.0}, {"mutual_information": None}])
def test_a_log_with_little_in_it_is_drawn(columns, finished, user, drawn):
    shutil.copytree(finished / "bandit", "run")
    rows = [dict(iteration=i, success=0.5, **columns) for i in range(30)]
    lines = [json.dumps(row) for row in rows] + ['{"iter']  # another one is being written
    Path("run/log.jsonl").write_text("\n".join(lines))
    assert len(plots.load("run").rows) == 30
    code, said, _ = user("plots.py collapse run")
    assert code == 0 and said.startswith("run/collapse.png\n") and "no collapse" in said
