"""figures/research/smollm2.py: what was stopped goes on, and columns about thoughts are true."""
import json
import shutil
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import transformers

import ragen_mini as rm
import runs
from conftest import ROOT
from extras import warm_start

sys.path.insert(0, str(ROOT / "figures"))
from research import smollm2

EVALUATE, TAKE_TURN = rm.evaluate, rm.take_turn


@pytest.fixture
def study(tmp_path, monkeypatch):
    """RL has taken seven seconds, and each lesson takes one. tiny is the warm-started model."""
    monkeypatch.setattr(smollm2, "DATA", tmp_path / "data")
    monkeypatch.setattr(smollm2, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(smollm2, "LESSONS_BETWEEN", 2)
    monkeypatch.setattr(warm_start, "TURNS_OF_A_LESSON", 4)
    for player in ("planner", "guess"):
        monkeypatch.setattr(warm_start.cold_start, player, getattr(warm_start.cold_start, player))
    monkeypatch.setattr(rm, "evaluate", rm.evaluate)
    monkeypatch.setattr(rm, "take_turn", rm.take_turn)
    seconds = iter(range(10 ** 6))
    clock = SimpleNamespace(perf_counter=lambda: next(seconds), strftime=lambda _: "today")
    monkeypatch.setattr(smollm2, "time", clock)
    shutil.copytree(runs.TINY, tmp_path / "runs" / "warm-read_lake-seed1")
    settings = asdict(rm.Config(env="frozenlake", algo="grpo", kl_coef=0.0, eval_prompts=4, seed=1,
                                max_turns=2, device="cpu"))
    for private in ("model", "out", "resume", "filled"):
        del settings[private]
    report = {"warm start": [], "settings": settings,
              "rows": [{"iteration": 0}, {"iteration": 1, "seconds_rollout": 3,
                                          "seconds_update": 4}]}
    smollm2.write(report, smollm2.DATA / "read_lake-seed1.json")
    return smollm2.DATA / "lessons_read_lake-seed1.json"


def lessons():
    rm.evaluate, rm.take_turn = EVALUATE, TAKE_TURN  # as in a new process
    smollm2.more_lessons("read_lake", 1, "")


def test_the_control_goes_on_where_it_was_stopped(study, monkeypatch):
    """It takes as long as RL. If it is stopped after the fifth lesson, it goes on behind the
    fourth, where it was saved, and ends as if nothing had happened.
    """
    rates = []
    learn = warm_start.learn

    def learn_and_note(policy, trajs, optimizer, cfg):
        rates.append(optimizer.param_groups[0]["lr"])
        assert all(turn["valid"] and "The goal is" in rm.thought_of(turn)
                   for traj in trajs for turn in traj.turns)
        if len(rates) == stop_at:
            raise KeyboardInterrupt
        return learn(policy, trajs, optimizer, cfg)
    monkeypatch.setattr(warm_start, "learn", learn_and_note)
    stop_at = None
    lessons()
    whole = json.loads(study.read_text())
    assert [row["iteration"] for row in whole["rows"]] == list(range(8))
    assert [row["iteration"] for row in whole["rows"] if "eval" in row] == [0, 2, 4, 6, 7]
    assert sum(row.get("seconds_update", 0) for row in whole["rows"]) == pytest.approx(7)
    # It rises for 20 steps, and falls to 0.
    assert rates == pytest.approx(
        [smollm2.LESSON_LR * step / 20 * (8 - step) / 7 for step in range(1, 8)])

    study.unlink()
    shutil.rmtree(smollm2.RUNS / "lessons_read_lake-seed1")
    rates.clear()
    stop_at = 6
    with pytest.raises(KeyboardInterrupt):
        lessons()
    assert [row["iteration"] for row in json.loads(study.read_text())["rows"]] == list(range(5))
    stop_at = None
    lessons()
    assert json.loads(study.read_text())["rows"] == whole["rows"]


def test_a_run_goes_on_where_it_was_stopped(study, monkeypatch):
    """Its report is written after each iteration. The rows are those of a run that was not stopped.
    """
    small = dict(env="frozenlake", prompts=2, rollouts=2, max_new_tokens=20, max_turns=2,
                 eval_every=10, eval_prompts=4, save_every=1, keep=0.5)
    monkeypatch.setitem(smollm2.TASKS, "paid_lake", smollm2.Task(small, begins_as="read_lake"))
    monkeypatch.setattr(rm, "micro_batches", rm.micro_batches)
    (smollm2.RUNS / "warm-read_lake-seed1.txt").write_text("lesson 40\nsaved in there\n")
    file = smollm2.DATA / "paid_lake-seed1.json"
    train = rm.train

    def train_to_the_first(cfg, models, callback):
        return train(cfg, models, lambda *args: callback(*args) or args[0]["iteration"] == 1)

    def run():
        rm.evaluate, rm.take_turn = EVALUATE, TAKE_TURN
        smollm2.run("paid_lake", 1, "nowhere", iterations=3)
        return json.loads(file.read_text())
    whole = run()
    assert [row["iteration"] for row in whole["rows"]] == [0, 1, 2, 3]
    assert ["eval" in row for row in whole["rows"]] == [True, False, False, True]
    assert whole["warm start"] == ["lesson 40"]
    assert whole["settings"]["keep"] == 0.5

    shutil.rmtree(smollm2.RUNS / "paid_lake-seed1")
    file.unlink()
    monkeypatch.setattr(rm, "train", train_to_the_first)
    monkeypatch.setattr(smollm2.mutants, "commit", lambda: "a1")
    stopped = run()
    assert [row["iteration"] for row in stopped["rows"]] == [0, 1]
    monkeypatch.setattr(rm, "train", train)
    monkeypatch.setattr(smollm2.mutants, "commit", lambda: "b2")
    gone_on = run()
    assert (stopped["commit"], gone_on["commit"]) == ("a1", "a1, then b2")
    for report in (whole, gone_on):
        for row in report["rows"]:
            row.pop("seconds_rollout", None)
            row.pop("seconds_update", None)
    for same in ("rows", "episodes", "plain generate", "settings"):
        assert gone_on[same] == whole[same]


def test_a_whole_reading_has_no_error(study, tok, cfg):
    """The planner's answer is one. With one cell changed, or the claim, or more said, it is none,
    and costs. The next message does not say so.
    """
    smollm2.watch_claims(smollm2.cost_of_misreading)
    cfg = rm.replace(cfg, env="frozenlake", success_rate=1.0, max_new_tokens=100)
    for change, is_read in ((("x", "x"), True), ((" P ", " O "), False), (("goal", "hole"), False),
                            ((". The", ". Oh. The"), False)):
        traj = rm.begin(300, 0, 0, tok, cfg)
        truth = warm_start.reading(traj.env).replace(*change)
        says = Says(tok, f"{truth}</think><answer>Up</answer>")
        traj.append([0], sampled=True)
        last = len(traj.ids) - 1
        rm.take_turn(traj, says, cfg, rm.end_tokens(SimpleNamespace(policy=None, tok=tok), cfg))
        assert smollm2.share_of_whole_readings([traj]) == is_read
        assert traj.reward[last] == traj.R == (0.0 if is_read else -0.3)
        message = tok.decode(traj.ids[last + 1:])
        assert not traj.done and "0.3" not in message and "0.0" in message.replace(" ", "")


@pytest.mark.parametrize("turns, pays", [
    ([(True, True)], [0.3]), ([(False, True)], [0]), ([(True, False)], [0]),
    ([(True, True), (False, True), (True, True)], [0.3, -0.15, 0.05]),
    ([(True, False), (True, True), (True, True), (True, True)], [0, 0.15, 0.05, 0.025])])
def test_the_reward_for_reading_is_a_share(turns, pays):
    """The turns, (is the map read well, is the answer valid), together earn 0.3 times the share of
    those where both hold: 0.2 for two of three.
    """
    traj = SimpleNamespace(turns=[])
    for (read, valid), pay in zip(turns, pays):
        traj.turns.append({"read": read, "valid": valid})
        assert smollm2.reward_for_reading(traj, 0.3) == pytest.approx(pay)
        assert smollm2.reward_for_reading(traj, 3) == pytest.approx(10 * pay)
    share = sum(read and valid for read, valid in turns) / len(turns)
    assert sum(pays) == pytest.approx(0.3 * share)


def test_a_look_at_the_models_before_and_after(study, monkeypatch):
    """It takes the weights that were saved last, and only those that it has not looked at before.
    What it saw before a run went on is kept.
    """
    small = dict(env="frozenlake", prompts=2, rollouts=2, max_new_tokens=20, max_turns=1,
                 eval_prompts=4, save_every=1, iterations=2, lr=0.01)
    monkeypatch.setitem(smollm2.TASKS, "read_lake", smollm2.Task(small))
    monkeypatch.setattr(smollm2.envs, "EVAL_SEEDS", smollm2.envs.EVAL_SEEDS[:6])
    monkeypatch.setattr(rm, "micro_batches", rm.micro_batches)
    (smollm2.RUNS / "warm-read_lake-seed1.txt").write_text("lesson 40\n")
    (smollm2.DATA / "read_lake-seed1.json").unlink()
    smollm2.run("read_lake", 1, "nowhere")
    rm.evaluate, rm.take_turn = EVALUATE, TAKE_TURN
    lessons()
    weights = []

    def evaluate_and_note(models, cfg, when):
        weights.append(next(models.policy.parameters()).detach().clone())
        return EVALUATE(models, cfg, when)

    def look():
        rm.evaluate, rm.take_turn = evaluate_and_note, TAKE_TURN
        smollm2.look(1, "")
        return json.loads((smollm2.DATA / "look-seed1.json").read_text())
    looks = look()
    last = len(json.loads(study.read_text())["rows"]) - 1
    assert [*looks] == ["warm-read_lake, 0 iterations", "read_lake, 2 iterations",
                        f"lessons_read_lake, {last} lessons"]
    checkpoint = smollm2.RUNS / "read_lake-seed1" / "checkpoint"
    saved, _ = smollm2.torch.load(smollm2.RUNS / "lessons_read_lake-seed1" / "state.pt")
    for looked_at, folder in zip(weights, (runs.TINY, checkpoint)):
        policy, _ = runs.load_policy(rm.Config(model=str(folder), device="cpu", eval_prompts=4))
        assert looked_at.equal(next(policy.parameters()))
    assert any(weights[2].equal(weight) for weight in saved.values())
    assert not weights[1].equal(weights[0]) and not weights[2].equal(weights[0])
    assert look() == looks and len(weights) == 3
    assert smollm2.table_of_looks(smollm2.load_looks()).count("\n") == 4

    rm.evaluate, rm.take_turn = EVALUATE, TAKE_TURN
    smollm2.run("read_lake", 1, "nowhere", iterations=3)
    later = look()
    assert [*later][1:3] == ["read_lake, 2 iterations", "read_lake, 3 iterations"]
    assert later.pop("read_lake, 3 iterations") and later == looks


@pytest.mark.parametrize("move, fits", [
    ("Down", True), ("right", True), ("Up", False), ("Left || Down", False), ("", False)])
def test_a_first_move_fits_the_map_whatever_is_claimed(study, tok, cfg, move, fits):
    smollm2.watch_claims()
    traj = rm.begin(300, 0, 0, tok, rm.replace(cfg, env="frozenlake"))
    traj.env.state, traj.env.level["goal"] = (0, 0), (2, 1)
    says = Says(tok, f" The goal is 1 up.</think><answer>{move}</answer>")
    traj.append([0], sampled=True)
    rm.take_turn(traj, says, cfg, rm.end_tokens(SimpleNamespace(policy=None, tok=tok), cfg))
    assert traj.turns[-1]["fits_the_map"] == fits
    assert not traj.turns[-1]["read"]


@pytest.mark.parametrize("start, goal, holes, move, into_a_hole", [
    ((0, 0), (2, 1), {(1, 0)}, "Down", True), ((0, 0), (2, 1), {(1, 0)}, "right || Down", False),
    ((0, 0), (2, 1), {(1, 0)}, "Up", None), ((0, 0), (2, 1), {(1, 0)}, "", None),
    ((0, 0), (2, 1), set(), "Down", None), ((0, 0), (2, 1), {(1, 0), (0, 1)}, "Down", None),
    ((0, 0), (2, 0), {(1, 0)}, "Down", None), ((3, 3), (1, 2), {(3, 2)}, "Left", True),
    ((3, 3), (1, 2), {(3, 2)}, "Up", False)])
def test_a_first_move_at_a_fork(study, tok, cfg, start, goal, holes, move, into_a_hole):
    """A fork has a hole on one of the two ways to the goal. Other moves there do not count."""
    smollm2.watch_claims()
    traj = rm.begin(300, 0, 0, tok, rm.replace(cfg, env="frozenlake", success_rate=1.0))
    traj.env.state = start
    traj.env.level = {"goal": goal, "holes": tuple(holes)}
    says = Says(tok, f".</think><answer>{move}</answer>")
    traj.append([0], sampled=True)
    rm.take_turn(traj, says, cfg, rm.end_tokens(SimpleNamespace(policy=None, tok=tok), cfg))
    assert traj.turns[-1]["into_a_hole"] == into_a_hole


def test_success_by_first_turn():
    """Counted by hand. Later turns do not count."""
    episodes = [(True, [True, False]), (False, [True]), (True, [True]), (False, [False, True])]
    trajs = [SimpleNamespace(success=won, turns=[{"fits_the_map": yes, "read": not yes}
                                                 for yes in turns]) for won, turns in episodes]
    assert smollm2.success_by_first_turn(trajs) == {
        "episodes_fits_the_map": 3, "success_fits_the_map": pytest.approx(2 / 3),
        "episodes_not_fits_the_map": 1, "success_not_fits_the_map": 0,
        "episodes_read": 1, "success_read": 0,
        "episodes_not_read": 3, "success_not_read": pytest.approx(2 / 3)}
    assert smollm2.success_by_first_turn(trajs[:3])["success_not_fits_the_map"] is None


class Says:
    """A tokenizer that decodes whatever the model writes as the text that a test wants."""
    def __init__(self, tok, text):
        self.tok = tok
        self.text = text

    def decode(self, *_, **named):
        return self.text

    def __getattr__(self, name):
        return getattr(self.tok, name)

    def __call__(self, *args, **named):
        return self.tok(*args, **named)


def test_steps_of_reading_are_made_once(study, monkeypatch):
    """A task that begins with the same steps takes the model that came out of them."""
    def teach_reading(models, cfg, lr, steps):
        print(f"map {steps}: read")
        taught.append(steps)
        with torch.no_grad():
            models.policy.get_output_embeddings().weight.mul_(2)

    def teach_planning(models, cfg, lr, steps, random_moves=0.0):
        seen.append(models.policy.get_output_embeddings().weight.clone())
    monkeypatch.setattr(warm_start, "teach_planning", teach_planning)
    taught, seen = [], []
    settings = smollm2.settings_for("read_sokoban", 3)
    for task, steps in (("one", 7), ("two", 7), ("three", 5), ("none", 0)):
        monkeypatch.setattr(warm_start, "teach_reading", teach_reading)  # as in a new process
        lessons = ["--lessons", "1"] + (["--reading", str(steps)] if steps else [])
        told = smollm2.start_warm(str(runs.TINY), smollm2.RUNS / task, settings, lessons)
        assert told[0] == f"map {steps}: read"
    assert taught == [7, 5, 0]
    assert not [*smollm2.RUNS.glob("*.new")]
    assert all(torch.equal(weight, seen[0]) for weight in seen)
    plain = transformers.AutoModelForCausalLM.from_pretrained(runs.TINY)
    assert torch.equal(seen[0], 2 * plain.get_output_embeddings().weight)


def test_small_steps_at_first(monkeypatch):
    """Also where a run that was stopped goes on with an optimizer that has the whole rate."""
    rates = []
    adam = SimpleNamespace(param_groups=[{"lr": 2e-5}])
    monkeypatch.setattr(rm, "iterate", lambda *_: rates.append(adam.param_groups[0]["lr"]))
    smollm2.begin_with_small_steps()
    for i in (1, 2, 5, 10, 11, 100):
        rm.iterate(i, SimpleNamespace(optimizer=adam), SimpleNamespace(lr=2e-5))
        adam.param_groups[0]["lr"] = 2e-5
    assert rates == pytest.approx([2e-6, 4e-6, 1e-5, 2e-5, 2e-5, 2e-5])
