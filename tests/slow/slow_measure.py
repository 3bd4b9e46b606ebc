"""extras/measure.py and other_thoughts.py: what is claimed, is it true, and what is logged."""
import re
import runpy
import sys

import numpy as np
import pytest

import envs
import ragen_mini as rm
from conftest import ROOT, rows_of, untimed
from extras import measure, other_thoughts  # it puts tiny/ on the path
import lessons

SMALL = ("--device cpu --prompts 2 --rollouts 4 --iterations 1 --max-new-tokens 40 --max-turns 2 "
         "--eval-prompts 8")


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    for name in ("take_turn", "evaluate", "rollout", "sample"):
        monkeypatch.setattr(rm, name, getattr(rm, name))


def at_level(name, seed=300):
    env = envs.make(name)
    env.reset(seed)
    return env


def lake(state=(1, 1), goal=(3, 3), holes=()):
    env = at_level("frozenlake")
    env.state, env.level = state, {"goal": goal, "holes": holes}
    return env


@pytest.mark.parametrize("thought, kind", [
    ("Let me just try.", "nothing"), ("The goal is 2 Down and 2 Right.", "goal"),
    ("Up ice ice Down hole.", "around"), ("Left edge. The goal is 1 Up.", "both"),
    ("Teacher sounds safe.", "goal")])
def test_kinds_of_thoughts(thought, kind):
    assert measure.kind_of(thought) == kind


@pytest.mark.parametrize("thought, expected", [
    ("The goal is 2 Down and 2 Right.", [("goal", True)]),
    ("The goal is 2 Down and 1 Right. It is 2 Down. The goal!", [("goal", False)]),
    ("Up ice edge Down hole ice Left ice.", [
        ("direction", True), ("direction", False), ("direction", True)])])
def test_claims_about_a_lake(thought, expected):
    """The player stands at (1, 1) of four rows and columns."""
    assert measure.claims_of(thought, lake(holes=((1, 3),))) == expected


def test_claims_about_sokoban_and_the_bandit():
    env = at_level("sokoban")
    env.level = {"floor": ((3, 3), (3, 4), (2, 4)), "targets": ((2, 2),)}
    env.state = ((3, 4), ((3, 3),))
    assert measure.claims_of("The box is 1 Left, the target is 1 Up and 1 Left of it.", env) == [
        ("box", True), ("target", True)]
    assert measure.claims_of("I see the box 2 Left, the target 2 Up of it.", env) == [
        ("box", False), ("target", False)]
    assert measure.claims_of("Left box Up free wall Down wall.", env) == [("direction", True)] * 3
    bandit = at_level("bandit")
    said = f"{bandit.sure} sounds safe. {bandit.risky} sounds safe."
    assert measure.claims_of(said, bandit) == [("sound", True), ("sound", False)]


@pytest.mark.parametrize("answer, choices", [
    ("Right || Down", ["first_move_hole"]),  # the second move would be made in the hole
    ("Down || Right", ["first_move_safe"]),  # (2, 1) is no fork: neither way is a hole
    ("Left", ["first_move_elsewhere"]),
    ("jump", [])])
def test_moves_at_forks(answer, choices):
    """At (1, 1) both Down and Right lead to the goal at (3, 3), and (1, 2) is a hole."""
    turn = {"answer": f"<think></think><answer>{answer}</answer>"}
    assert measure.ways_of_fork(lake(), (1, 1)) == {}, "without a hole it is no fork"
    assert measure.choices_of(turn, lake(holes=((1, 2),))) == choices


@pytest.mark.parametrize("name", ["frozenlake", "sokoban", "bandit"])
def test_what_the_included_model_was_taught_is_read_as_true(name):
    rng = np.random.default_rng(0)
    for seed in range(300, 320):
        env = at_level(name, seed)
        for kind in measure.KINDS:
            thought = lessons.thought(env, rng, {kind: 1.0})
            claims = measure.claims_of(thought, env)
            assert all(is_true for _, is_true in claims) and bool(claims) == (kind != "nothing")
            assert measure.kind_of(thought) == kind or name == "bandit"


def command(line, script="measure.py"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"extras/{script}", *line.split()])
        patch.setattr(rm, "take_turn", rm.take_turn)
        patch.setattr(rm, "evaluate", rm.evaluate)
        runpy.run_path(str(ROOT / "extras" / script), run_name="__main__")


def test_the_rows_are_those_of_ragen_mini_with_more_columns(tmp_path, folder):
    """What is logged of another environment is what rm.evaluate finds there. It may be resumed."""
    flags = f"--model {folder} --env sokoban {SMALL}"
    command(f"{flags} --out {tmp_path}/run --eval-envs sokoban_newvocab,frozenlake")
    rows = rows_of(tmp_path / "run")
    plain, _ = rm.train(rm.parse_config(f"{flags} --out {tmp_path}/plain".split()))
    for row, other in zip(untimed(rows), untimed(plain), strict=True):
        assert list(row["eval"]) == ["sokoban", "sokoban_newvocab", "frozenlake"]
        for name, (random, optimal) in row["yardsticks"].items():
            truth = envs.mean_yardsticks(name, 10, range(8))[:, 10]
            assert (random, optimal) == pytest.approx(tuple(truth))
        assert other["eval"].items() <= row["eval"].items()
        assert {name: row[name] for name in other.keys() - {"eval", "yardsticks"}} == {
            name: other[name] for name in other.keys() - {"eval", "yardsticks"}}
        kinds = [row[f"thoughts_{kind}"] for kind in measure.KINDS]
        assert sum(kinds) == pytest.approx(1, abs=1e-5) and 0 <= row["valid_answers"] <= 1
    there = rm.parse_config(f"--model {tmp_path}/run --env frozenlake {SMALL}".split())
    columns, _ = rm.evaluate(rm.load_models(there), there)
    assert rows[-1]["eval"]["frozenlake"] == columns["eval"]["frozenlake"]
    command(f"--resume {tmp_path}/run --iterations 2 --eval-envs frozenlake")
    assert list(rows_of(tmp_path / "run")[2]["eval"]) == ["sokoban", "frozenlake"]


def test_other_thoughts_are_read_instead_of_its_own(capsys, cfg, monkeypatch):
    """All eight conditions are played. Where a thought is given, it is the answer's beginning."""
    seen = []
    evaluate = rm.evaluate

    def spy(models, cfg, when=""):
        columns, trajs = evaluate(models, cfg, when)
        seen.append({turn["answer"].partition("</think>")[0] for traj in trajs
                     for turn in traj.turns})
        return columns, trajs
    monkeypatch.setattr(measure, "evaluate_alone", spy)
    cfg = rm.replace(cfg, env="frozenlake", eval_only=True, eval_prompts=16, max_new_tokens=60)
    other_thoughts.compare(rm.load_models(cfg), cfg)
    conditions = re.findall(r"^([\w' ]+): frozenlake", capsys.readouterr().out, re.MULTILINE)
    assert conditions == ["its own", "another level's", "empty", *measure.KINDS]
    own, others, empty, nothing, *_ = seen
    assert others < own and empty == {"<think>"}
    assert {said.removeprefix("<think>").replace(" ", "") for said in nothing} <= {
        text.replace(" ", "") for text in lessons.NOTHING}
