"""What people do with the program: own worlds, slips of the hand, folders that suffered, pictures of their runs.

A mistake that the user can put right ends in one line that says what to do, with exit code 1; a mistyped command in
that of argparse, with exit code 2. A mistake in one's own world keeps Python's traceback, which ends in one's own file
(extras/check_world.py names it in one line: test_check_world.py). Other rows: of settings in test_train.MISTAKES, of
extras/ and figures/ in their own tests.
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
from conftest import ROOT, rows_of
from my_world import Guess

MINE = f"{ROOT}/tests/my_world.py:Guess"
SMALL = ("--prompts 2 --rollouts 4 --update-size 4 --iterations 1 --max-new-tokens 16 --max-turns 2 --eval-prompts 4 "
         "--algo grpo --lr 1e-3")


@pytest.fixture
def user(monkeypatch, capsys, tmp_path):
    """user("extras/play.py my_world.py:Guess") -> exit code, what it printed, its errors. In a folder of its own."""
    def run(command):
        monkeypatch.setitem(sys.modules, "envs", envs)  # envs.py as a program takes this place
        monkeypatch.setattr(sys, "argv", shlex.split(command.replace("ragen_mini.py", "ragen_mini.py --device cpu")))
        capsys.readouterr()
        code, text = 0, ""
        try:
            runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
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
def runs(tmp_path_factory):
    """A folder with two finished runs, one of them in a world of one's own."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "dashboard", lambda runs, out, *rest, **named: Path(out).touch() or out)
        patch.setattr(sys, "argv", ["ragen_mini.py"])  # whose runs they are
        for name, world in (("bandit", "bandit"), ("mine", MINE)):
            rm.train(rm.parse_config(["--env", world, "--out", f"{folder}/{name}", "--device", "cpu", *SMALL.split()]))
    return folder


# ----------------------------------------------------------------------------------------------- a world of one's own
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

    def bonus(self, turn):
        return np.float32(turn["valid"]) / 8


class FourLevels(Guess):
    @staticmethod
    def draw(rng):
        return {"prize": ("Left", "Up")[rng.integers(2)], "wind": int(rng.integers(2))}, "closed"


class SixHundredSymbols(Guess):
    """More than `tiny` can read: no mistake in itself."""

    def render(self):
        return "O " * 600


@pytest.mark.parametrize("command", ["ragen_mini.py --env {here} --out run", "extras/play.py {here}",
                                     "extras/elsewhere.py --eval-envs {here} --env bandit --out run"])
@pytest.mark.parametrize("world, where", [(RenderRaises, "render"), (StepRaises, "outcomes")])
def test_a_mistake_in_a_world_is_a_traceback_into_its_file(command, world, where, user, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("u\n"))
    here = f"{__file__}:{world.__name__}"
    with pytest.raises((KeyError, AttributeError)) as error:
        user(f"{command.format(here=here)} {SMALL if '--env' in command else ''}")
    last = traceback.extract_tb(error.value.__traceback__)[-1]
    assert (last.filename, last.name) == (__file__, where)


def test_too_few_levels_are_one_line(user):
    code, _, errors = user(f"ragen_mini.py --env {__file__}:OneLevel --out run {SMALL}")
    assert code == 1 and "If there are few: split = False." in errors.splitlines()[-1]


@pytest.mark.parametrize("text, says", [
    ("Other = 5", "mine.py does not define Mine"), (None, "no world mine.py:Mine")])
def test_a_file_without_the_world_is_one_line(text, says, mistake):
    envs.run_file.cache_clear()  # another mine.py than in the row before
    if text:
        Path("mine.py").write_text(text)
    for command in ("extras/play.py mine.py:Mine", "ragen_mini.py --env mine.py:Mine"):
        assert says in mistake(command)


@pytest.mark.parametrize("world", ["Numpy", "FourLevels"])
def test_numpys_numbers_and_few_levels_are_trained_on(world, user):
    code, _, said = user(f"ragen_mini.py --env {__file__}:{world} --out run {SMALL}")
    assert code == 0, said
    before, after = rows_of("run")
    assert list(before["eval"]) == [world] and after["valid"] > 0


def test_a_world_in_a_file_works_in_every_command(runs, user, monkeypatch):
    shutil.copytree(runs / "mine", "run")
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
    monkeypatch.setattr(sys, "stdin", io.StringIO("Right || d ||\n"))  # nearly as the model writes them
    code, said, _ = user("extras/play.py frozenlake 8")
    assert code == 0 and said.count("reward") == 2


def test_a_class_is_a_world_too(tmp_path, cfg):
    """In a notebook: no file, and the folder of the run still says which world it was."""
    cfg = rm.replace(cfg, env=Guess, out=str(tmp_path / "run"), prompts=2, rollouts=4, update_size=4, max_turns=2,
                     iterations=1, eval_prompts=4, algo="grpo")
    rows, models = rm.train(cfg)
    assert list(rows[0]["eval"]) == ["Guess"] and rows_of(cfg.out) == rows
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["env"] == "Guess" and list(rows[0]["yardsticks"]) == ["Guess"]
    again, _ = rm.train(rm.replace(cfg, resume=cfg.out, iterations=2))
    assert [row["iteration"] for row in again] == [0, 1, 2] and again[:1] == rows[:1]
    traj, = rm.rollout(models, [3], 1, rm.replace(cfg, env=Guess), 0)
    assert isinstance(traj.env, Guess) and traj.turns
    assert rm.evaluate(0, models, rm.replace(cfg, out=""))[0]["eval"].keys() == {"Guess"}


def test_a_world_defined_again_in_a_notebook_is_the_new_one():
    generous = type("Guess", (Guess,), {"won": lambda self, state: state != "closed"})
    found = [envs.mean_yardsticks(world, 1)[0, 1] for world in (Guess, generous)]
    assert found == [pytest.approx(1 / 3), 1]


def test_a_world_whose_file_is_gone_is_one_line_and_its_curves_can_be_drawn(user, mistake):
    shutil.copy(ROOT / "tests/my_world.py", "gone.py")
    assert user(f"ragen_mini.py --env gone.py:Guess --out run {SMALL}")[0] == 0
    Path("gone.py").unlink()
    for command in ("ragen_mini.py --resume run --iterations 2", "ragen_mini.py --model run --play 7"):
        assert "no world gone.py:Guess" in mistake(command)
    assert user("plots.py curves run")[0] == 0


# ------------------------------------------------------------------------------------------------ slips of the hand
SLIPS = [  # what is typed, what the user is told
    ("extras/play.py Sokoban", "Sokoban: choose bandit"),
    ("extras/play.py sokoban seven", "'seven'"),
    ("extras/play.py sokoban 1 2", "unrecognized arguments: 2"),
    ("extras/play.py sokoban -1", "level -1: at least 0"),
    ("plots.py", "required: curves | collapse, RUN"),
    ("plots.py curves", "required: RUN"),
    ("plots.py curve {runs}/bandit", "invalid choice: 'curve'"),
    ("plots.py curves nowhere", "nowhere is not the folder of a run"),
    ("plots.py curves {runs}/bandit nowhere --out x.png", "nowhere is not the folder of a run"),
    ("plots.py curves {runs}/bandit {runs}/mine", "several runs in one picture: name it, such as --out both.png"),
    ("plots.py curves {runs}/bandit --out picture", "such as --out picture.png"),
    ("plots.py curves {runs}/bandit/checkpoint", "checkpoint is not the folder of a run"),
    ("ragen_mini.py --env mario", "mario: choose bandit"),
    ("ragen_mini.py --env ''", ": choose bandit"),
    ("ragen_mini.py --env {here}:SixHundredSymbols", "lower --max-new-tokens"),
    ("ragen_mini.py --env nowhere.py", "nowhere.py: choose bandit"),
    ("extras/elsewhere.py --eval-envs bandit,chess --env bandit", "chess: choose"),
    ("ragen_mini.py --enviroment bandit", "unrecognized arguments: --enviroment"),
    ("ragen_mini.py bandit", "unrecognized arguments: bandit"),
    ("ragen_mini.py --iterations three", "--iterations: invalid int value: 'three'"),
    ("ragen_mini.py --lr 1e-4x", "--lr: invalid float value: '1e-4x'"),
    ("ragen_mini.py --play seven", "--play: invalid int value: 'seven'"),
    ("ragen_mini.py --model /etc", "--model /etc: there is no such folder with a model's *.safetensors"),
    ("ragen_mini.py --model runs/nowhere/checkpoint", "cannot load --model runs/nowhere/checkpoint on --device cpu: no such model? damaged?"),
    ("ragen_mini.py --model gpt2", "--model gpt2: there is no such folder with a model's *.safetensors"),
    ("ragen_mini.py --resume nowhere", "--resume nowhere: "),
    ("ragen_mini.py --resume {runs}/mine", "mine is finished (1 iterations): raise --iterations"),
    ("ragen_mini.py --resume ''", "--resume "),
    ("ragen_mini.py --resume .", "--resume .: "),
    ("ragen_mini.py --resume {runs}/bandit --eval-only", "--resume keeps env, model, out"),
    ("ragen_mini.py --resume {runs}/bandit --play 7", "--resume keeps env, model, out"),
    ("ragen_mini.py --resume {runs}/bandit --out elsewhere", "--resume keeps env, model, out"),
    ("plots.py collapse {runs}/bandit --out x.png", "collapse needs no --out"),
    ("extras/elsewhere.py --eval-envs bandit_rev --env bandit --eval-only", "--eval-only evaluates in --env alone"),
    ("extras/elsewhere.py --env bandit", "in which worlds?"),
    ("extras/elsewhere.py --env bandit --eval-envs bandit_rev --eval-every 0", "nothing would be evaluated"),
    ("extras/recipes.py rloo --env bandit --out {here}/run", "NotADirectoryError"),
    ("ragen_mini.py --resume {runs}/bandit/checkpoint", "give RUN, not RUN/checkpoint"),
    ("extras/elsewhere.py --eval-envs bandit_rev --env bandit --eval_o", "--eval-only evaluates in --env alone"),
    ("extras/warm_start.py tiny out --env bandit --iter 5", "--iter is for ragen_mini.py: here nothing is learnt from rewards"),
    ("extras/warm_start.py tiny out --env bandit --eval-only", "are for ragen_mini.py: this program trains"),
    ("extras/warm_start.py tiny out --env bandit --lr=1e-4", "--lr is for ragen_mini.py: here nothing is learnt from rewards"),
    ("extras/recipes.py own_model --model runs", "own_model makes its own model: no --model"),
    ("extras/warm_start.py tiny out --env bandit --warm-lr 0", "--warm-lr and --lesson-lr must be above 0, below 1"),
    ("extras/warm_start.py tiny out --env bandit --warm-lr inf", "--warm-lr and --lesson-lr must be above 0, below 1"),
    ("extras/warm_start.py tiny out --env bandit --warm-lr nan", "--warm-lr and --lesson-lr must be above 0, below 1"),
    ("extras/warm_start.py tiny out --env bandit --lessons -3", "--lessons -3: at least 0"),
    ("extras/warm_start.py tiny {here}/out --env bandit", "/out ("),
    ("extras/warm_start.py tiny --env bandit", "first MODEL and OUT"),
    ("extras/warm_start.py tiny out --out elsewhere", "OUT is out: no --out"),
    ("extras/warm_start.py --env bandit tiny out", "first MODEL and OUT"),
    ("extras/warm_start.py tiny out --env {here}:OneLevel --lessons 3", "no planner knows"),
    ("extras/recipes.py said --env bandit", "no other --env"),
    ("extras/episode.py nowhere", "nowhere is not the folder of a run")]


@pytest.mark.parametrize("command, says", SLIPS)
def test_a_slip_is_one_line(command, says, runs, mistake):
    assert says in mistake(command.format(runs=runs, here=__file__))
    assert not list(Path().iterdir()), "nothing is written"


def test_a_terminal_that_cannot_show_an_episode_is_told_in_one_line():
    """Level 0 of the lake has a root sign."""
    command = [sys.executable, "ragen_mini.py", "--env", "frozenlake", "--device", "cpu", "--play", "0"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("UnicodeEncodeError 'ascii' codec"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_without_a_root_sign_shows_a_question_mark():
    """Nor has this one an input."""
    command = [sys.executable, "extras/play.py", "sokoban"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "? box on target" in done.stdout


@pytest.mark.parametrize("command, prints", [
    ("extras/play.py --help", "python extras/play.py sokoban 7"),
    ("extras/play.py sokoban", "Up / Down / Left / Right"),  # and the input ends
    ("plots.py curves {runs}/bandit --out x.pdf", "x.pdf\n"),
    ("ragen_mini.py --model {runs}/bandit --eval-only", "bandit 0."),
    ("ragen_mini.py --model {runs}/bandit/checkpoint --eval-only", "bandit 0."),
    ("ragen_mini.py --model {runs}/bandit/checkpoint/ --eval-only", "bandit 0."),
    ("extras/recipes.py rloo --model {runs}/bandit --play 7", "return "),
    ("extras/elsewhere.py --help", "--eval-envs EVAL_ENVS"),
    ("extras/recipes.py --help", "choose one of these, such as"),
    ("ragen_mini.py --resume {runs}/bandit --iterations 2", "{runs}/bandit/curves.png")])
def test_what_is_right_stays_right(command, prints, runs, user, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, said, errors = user(command.format(runs=runs))
    assert code == 0 and prints.format(runs=runs) in said, (said, errors)


def test_an_agent_plays_one_episode(runs, user):
    code, said, _ = user(f"ragen_mini.py --model {runs}/bandit --play 7")
    env = envs.make("bandit")
    shown, _ = env.reset(7)
    assert code == 0
    for word in re.findall(r"\w+", shown):  # tiny's tokenizer spaces them otherwise
        assert word in said
    assert said.count("return ") == 1 and "<answer>" in said
    assert user(f"ragen_mini.py --model {runs}/bandit --play 7")[1] == said, "the same one again"


def test_a_copied_checkpoint_as_small_as_tiny_has_its_settings(runs, tmp_path):
    elsewhere = shutil.copytree(runs / "bandit/checkpoint", tmp_path / "elsewhere")
    (elsewhere / "trainer.pt").unlink()
    tiny = rm.Config(model="tiny", device="cpu")
    assert rm.parse_config(["--model", str(elsewhere), "--device", "cpu"]) == rm.replace(tiny, model=str(elsewhere))
    large = rm.Config(model="some/model", device="cpu")
    assert (large.lr, large.max_new_tokens) != (tiny.lr, tiny.max_new_tokens)


# ------------------------------------------------------------------------------------------------- damaged folders
def text(name, content):
    """A file, or a folder, is replaced by this text."""
    def spoil(run):
        if Path(run, name).is_dir():
            shutil.rmtree(run / name)
        Path(run, name).write_text(content)
    return spoil


def contents(run):  # -> {file: its bytes}
    return {file: file.read_bytes() for file in Path(run).rglob("*") if file.is_file()}


def folder(name):
    def spoil(run):
        Path(run, name).unlink()
        Path(run, name).mkdir()
    return spoil


def blocked(name):  # a folder where a picture would go
    return lambda run: Path(run, name).mkdir()


def cut(name, share):
    def spoil(run):
        content = Path(run, name).read_bytes()
        Path(run, name).write_bytes(content[:int(share * len(content))])
    return spoil


def delete(name):
    return lambda run: Path(run, name).unlink()


def without_template(run):
    file = Path(run, "checkpoint/tokenizer_config.json")
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))


def without_a_model(run):
    config = json.loads(Path(run, "config.json").read_text())
    Path(run, "config.json").write_text(json.dumps(config | {"model": None}))


def without_weights(run):
    file = Path(run, "checkpoint/model.safetensors")
    tensors = safetensors.torch.load_file(file)
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, file, {"format": "pt"})


DAMAGE = [  # how, the command, what the user is told
    (text("log.jsonl", '{"iteration": 0}\n{"iter\n{}'), "plots.py curves run", "run is not the folder of a run, or its config.json or log.jsonl is damaged (JSONDecodeError"),
    (text("log.jsonl", '{"iteration": 0}\n'), "plots.py collapse run", "no run/collapse.png: no iteration is finished"),
    (folder("log.jsonl"), "plots.py curves run", "run is not the folder of a run"),
    (delete("config.json"), "plots.py curves run", "run is not the folder of a run"),
    (text("config.json", "{}"), "plots.py collapse run", "no picture: is --out writable, with an ending such as .png? Or is config.json or log.jsonl damaged? (KeyError('env')"),
    (text("log.jsonl", '{"reward": 0.5}\n'), "plots.py curves run", "no picture: is --out writable, with an ending such as .png? Or is config.json or log.jsonl damaged? (KeyError"),
    (text("log.jsonl", '{"iteration": 1, "success": "x"}\n'), "plots.py collapse run", "Or is config.json or log.jsonl damaged?"),
    (blocked("collapse.png"), "plots.py collapse run", "Or is config.json or log.jsonl damaged? (IsADirectoryError"),
    (blocked("episode.png"), "extras/episode.py run", "cannot write run/episode.png"),
    (blocked("xray.html"), "extras/xray.py run", "cannot write run/xray.html"),
    (text("samples.jsonl", "{}\n"), "extras/episode.py run", "run/samples.jsonl is damaged (KeyError"),
    (text("samples.jsonl", '{"env": "bandit", "iteration": 0, "turns": []}\n{"env": "bandit", "iteration": 9, "turns": []}\n'), "extras/episode.py run", "is damaged ("),
    (text("checkpoint", ""), "ragen_mini.py --resume run", "--resume run: "),
    (text("checkpoint", ""), "ragen_mini.py --model run", "--model run: there is no such folder with a model's *.safetensors"),
    (cut("checkpoint/model.safetensors", 0.9), "ragen_mini.py --model run", "cannot load --model run"),
    (delete("checkpoint/tokenizer.json"), "ragen_mini.py --model run", "cannot load --model run"),
    (delete("checkpoint/config.json"), "ragen_mini.py --model run", "cannot load --model run"),
    (cut("checkpoint/trainer.pt", 0.9), "ragen_mini.py --resume run", "trainer.pt is unusable"),
    (delete("checkpoint/trainer.pt"), "ragen_mini.py --resume run", "trainer.pt is unusable"),
    (without_a_model, "ragen_mini.py --resume run", "--model None: there is no such folder"),
    (without_weights, "ragen_mini.py --model run", "--model run/checkpoint cannot be used: its files lack weights"),
    (without_template, "ragen_mini.py --model run", "has no chat template: is it for chat, its folder whole?")]


@pytest.mark.parametrize("spoil, command, says", DAMAGE)
def test_a_damaged_folder_is_one_line(spoil, command, says, runs, mistake):
    run = shutil.copytree(runs / "bandit", "run")
    spoil(Path(run))
    assert says in mistake(command)


def test_a_config_with_a_layer_less_is_noted(runs, user):
    """--model takes it without a word: the first layer alone is a model, too."""
    run = shutil.copytree(runs / "bandit", "run")
    config = json.loads(Path(run, "checkpoint/config.json").read_text())
    config["num_hidden_layers"] -= 1
    Path(run, "checkpoint/config.json").write_text(json.dumps(config))
    _, said, _ = user("extras/check_model.py run")
    assert "note: of its files 9 tensors are not used: model.layers." in said
    _, said, _ = user(f"extras/check_model.py {runs}/bandit")
    assert "note" not in said and "right: at" in said


def test_elsewhere_goes_on_in_the_worlds_of_its_log(user):
    play = "--iterations 1 --prompts 2 --rollouts 2 --eval-prompts 2 --max-new-tokens 8 --out run"
    code, said, errors = user(f"extras/elsewhere.py --eval-envs bandit_test --env bandit --device cpu {play}")
    assert code == 0 and "--resume 'run' --iterations 31" in said, errors
    for command in ("--resume run --iterations 2", "--model run --play 8"):  # both are printed above
        assert user(f"extras/elsewhere.py {command} --device cpu")[0] == 0
    assert all(list(row["eval"]) == ["bandit", "bandit_test"] for row in rows_of("run") if "eval" in row)
    own = play.replace("run", "own")
    for command in (f"--env {ROOT}/tests/my_world.py:Guess --eval-envs bandit {own}", "--resume own --iterations 2"):
        assert user(f"extras/elsewhere.py {command} --device cpu")[0] == 0, "its own world's name is no option"


def test_a_checkpoint_does_not_go_on_as_another_run(runs, user, mistake):
    """A foreign trainer.pt, an edited config.json, or Config(resume=...), which knows no settings of the run."""
    shutil.copytree(runs / "bandit", "run")
    before = contents("run")
    assert "--resume keeps program, algo, seed: bandit-grpo-seed0 by ragen_mini.py, not bandit-grpo-seed7 by" in mistake("ragen_mini.py --resume run --seed 7 --iterations 9")
    with pytest.raises(envs.UserError, match=r"--resume keeps program, algo, seed: bandit-grpo-seed0 by ragen_mini.py, not frozenlake-ppo-seed0"):
        rm.train(rm.Config(resume="run", iterations=9, device="cpu"))
    says = mistake("extras/recipes.py rloo --resume run --iterations 9")
    assert "by ragen_mini.py, not bandit-rloo-seed0 by recipes.py rloo" in says
    assert contents("run") == before
    shutil.copy(runs / "mine/checkpoint/trainer.pt", "run/checkpoint/trainer.pt")
    assert "--resume keeps program, algo, seed: Guess-grpo-seed0 by ragen_mini.py, not bandit-grpo-seed0" in mistake("ragen_mini.py --resume run --iterations 9")


# ------------------------------------------------------------------------------------------------------- pictures
@pytest.fixture
def drawn(monkeypatch, pictures):  # -> figures that would be saved
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda fig, *_, **__: figures.append(fig))
    return figures


def test_a_picture_of_several_runs_leaves_their_own_as_they_are(runs, user):
    for name in ("bandit", "mine"):
        shutil.copytree(runs / name, name)
        Path(name, "curves.png").write_text("its own")
    assert user("plots.py curves mine bandit --out both.png")[:2] == (0, "both.png\n")
    assert Path("both.png").exists()
    assert Path("bandit/curves.png").read_text() == Path("mine/curves.png").read_text() == "its own"


def test_runs_of_several_worlds_have_a_panel_each_with_its_yardsticks(runs, user, drawn):
    code, _, said = user(f"plots.py curves {runs}/bandit {runs}/mine --out both.png")
    assert code == 0, said
    title = drawn[0].get_suptitle()
    assert "Guess, tiny" in title and "bandit, tiny" in title
    shown = {ax.get_title(): [text.get_text() for text in ax.texts if text.get_text()[-1:].isdigit()] for ax in drawn[0].axes}
    assert ["optimal 1.00", "random 0.50"] in [texts for title, texts in shown.items() if "bandit" in title]
    assert ["optimal 1.00", "random 0.33"] in [texts for title, texts in shown.items() if "Guess" in title]


@pytest.mark.filterwarnings("error")  # 0 has no logarithm
def test_a_run_that_never_learnt_can_be_seen(user, random_folder, drawn):
    """All answers are malformed and all returns alike: nothing was trained."""
    assert user(f"ragen_mini.py --model {random_folder} --env bandit --out run {SMALL}")[0] == 0
    assert rows_of("run")[1]["updates"] == 0
    assert user("plots.py curves run")[0] == 0 and drawn
    assert user("plots.py collapse run")[1].endswith(", but nothing was won\n")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("columns", [{}, {"grad_norm": 0.0, "reward_std": 0.0}, {"mutual_information": None}])
def test_a_log_with_little_in_it_is_drawn(columns, runs, user, drawn):
    shutil.copytree(runs / "bandit", "run")
    rows = [dict(iteration=i, success=0.5, **columns) for i in range(30)]
    Path("run/log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"iter')  # another one is being written
    assert len(plots.load("run").rows) == 30
    assert user("plots.py collapse run")[:2] == (0, "run/collapse.png: the best 5 iterations begin at 0 (dotted), no collapse (it takes 10 below half)\n")
