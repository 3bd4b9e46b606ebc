"""extras/elsewhere.py: training as it is, with evaluations in other environments."""
import json
import runpy
import shutil
import sys

import numpy as np
import pytest
from conftest import ROOT, rows_of, untimed

import envs
import ragen_mini as rm

SMALL = ("--env sokoban --device cpu --prompts 2 --rollouts 4 --iterations 1 --max-new-tokens 16 "
         "--max-turns 2 --eval-prompts 4")


@pytest.fixture
def command(monkeypatch, tmp_path, folder):
    """command(line): elsewhere.py, in this process -> the folder"""
    originals = rm.train, rm.parse_config

    def call(line, script="extras/elsewhere.py"):
        rm.train, rm.parse_config = originals
        monkeypatch.setattr(sys, "argv", [script, *line.format(model=folder).split()])
        runpy.run_path(str(ROOT / script), run_name="__main__")
    monkeypatch.chdir(tmp_path)
    yield call
    rm.train, rm.parse_config = originals


def test_evaluations_elsewhere(command, tmp_path, folder):
    """Those of another environment are what rm.evaluate finds there, and nothing else changes."""
    names = "sokoban_newvocab,frozenlake,,frozenlake,sokoban"
    command(f"--model {{model}} {SMALL} --out run --eval-envs {names}")
    rows = rows_of("run")
    for row in rows:
        assert list(row["eval"]) == ["sokoban", "sokoban_newvocab", "frozenlake"]
        for name, values in row["yardsticks"].items():
            truth = envs.mean_yardsticks(name, 10, range(4))[:, 10]
            assert values == pytest.approx(truth.tolist())
    trained = rm.Config(model="run", device="cpu", env="frozenlake", max_turns=2, max_new_tokens=16,
                        eval_prompts=4)
    columns, trajs = rm.evaluate(rm.load_models(trained), trained)
    assert rows[-1]["eval"]["frozenlake"] == columns["eval"]["frozenlake"]
    lines = (tmp_path / "run/samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    there = [sample for sample in samples if sample["env"] == "frozenlake"]
    assert len(samples) == 2 * 3 * 4 and len(there) == 2 * 4
    assert there[-1]["iteration"] == 1 and there[-1]["turns"] == trajs[-1].turns

    plain, _ = rm.train(rm.parse_config(f"--model {folder} {SMALL} --out plain".split()))
    for row, other in zip(untimed(rows), untimed(plain), strict=True):
        for name in ("eval", "yardsticks"):
            home = {"sokoban": row.pop(name)["sokoban"]}
            assert np.allclose(home["sokoban"], other.pop(name)["sokoban"])
        assert row == other


def test_a_resumed_run_goes_on_in_the_environments_of_its_log(command):
    command(f"--model {{model}} {SMALL} --out run --eval-envs sokoban_newvocab")
    command("--resume run --iterations 2")
    assert [list(row["eval"]) for row in rows_of("run") if "eval" in row] == [
        ["sokoban", "sokoban_newvocab"]] * 3


def test_environments_of_files_are_named_again_for_resume(command, capsys):
    """The log knows their classes only."""
    shutil.copy(ROOT / "extras/my_world.py", "mine.py")
    command(f"--model {{model}} {SMALL} --out run --eval-envs mine.py:Guess")
    with pytest.raises(SystemExit, match="Guess is. Give --eval-envs again"):
        command("--resume run --iterations 2")
    command("--resume run --iterations 2 --eval-envs ./mine.py:Guess,sokoban")
    assert [list(row["eval"]) for row in rows_of("run") if "eval" in row] == [
        ["sokoban", "Guess"]] * 3


@pytest.mark.parametrize("damage", ["garbage\n", None])
def test_a_log_that_cannot_be_read_is_one_line(damage, command, tmp_path):
    command(f"--model {{model}} {SMALL} --out run --eval-envs bandit")
    file = tmp_path / "run/log.jsonl"
    if damage:
        file.write_text(damage)
    else:
        file.unlink()
    with pytest.raises(SystemExit, match="log.jsonl"):
        command("--resume run --iterations 2")


def test_two_classes_of_one_name_are_refused(command, tmp_path):
    """In the log, one would take the place of the other."""
    for name in ("one.py", "two.py"):
        shutil.copy(ROOT / "extras/my_world.py", name)
    for flags in ("--env one.py:Guess --eval-envs two.py:Guess",
                  "--eval-envs bandit,one.py:Guess,two.py:Guess"):
        with pytest.raises(SystemExit, match="one.py:Guess and two.py:Guess"):
            command(f"--model {{model}} {SMALL} --out run {flags}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags, said", [
    ("", "--eval-envs is missing"), ("--eval-envs sokoban", "only sokoban"),
    ("--eval-envs bandit --eval-every 0", "--eval-every is 0"),
    ("--eval-envs bandit,chess", "--eval-envs: chess is no environment"),
    ("--eval-envs bandit --eval-only", "Leave out --eval-envs"),
    ("--eval-envs bandit --play 3", "Leave out --eval-envs")])
def test_mistakes(command, flags, said, tmp_path):
    with pytest.raises(SystemExit, match=said):
        command(f"--model {{model}} {SMALL} --out run {flags}")
    assert not (tmp_path / "run").exists()


def test_help_is_its_own(command, capsys):
    with pytest.raises(SystemExit) as stop:
        command("--help")
    assert stop.value.code == 0 and "--eval-envs NAME" in capsys.readouterr().out
