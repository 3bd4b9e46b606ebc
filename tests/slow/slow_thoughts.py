"""extras/thoughts.py: what is claimed, whether it is true, and what it is paid."""
import json
import re
import runpy
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, rows_of

import envs
import ragen_mini as rm
from extras import thoughts


@pytest.fixture(autouse=True)
def originals(monkeypatch):
    """Turns are listened to. Whatever a test sets is undone."""
    monkeypatch.setattr(thoughts, "PAY", 0.0)
    monkeypatch.setattr(thoughts, "take_turn_without_pay", rm.take_turn)
    monkeypatch.setattr(rm, "take_turn", thoughts.take_turn)
    monkeypatch.setattr(rm, "train", rm.train)


def at_level(name, seed=300):
    env = envs.make(name)
    env.reset(seed)
    return env


# -------------------------------------------------------------------------------- facts and claims
WALLS = {"floor": (), "targets": ((2, 2),)}
LAKE = {"goal": (0, 3), "holes": ()}


@pytest.mark.parametrize("name, level, thought, expected", [
    ("sokoban", WALLS, "The box is 1 left. The target is 2 up of it.", [True, False]),
    ("sokoban", WALLS, "I see the box , it is 2 down . Let me try .", [False]),
    ("sokoban", WALLS, "The target is 1 up and 1 left of the box.", [True]),
    ("frozenlake", LAKE, "Careful , the goal is 3 up and 1 left .", [True]),
    ("frozenlake", LAKE, "The goal is 3 up and 2 left. Is it 3 up? The goal!", [False]),
    ("frozenlake", LAKE, "The ice is 1 up.", []),
    ("bandit", {}, "Teacher sounds safe . Engineer sounds safe . I choose the risky one .",
     [True, False]),
    ("sokoban_large", {"floor": (), "targets": ((2, 2), (2, 3))}, "The box is 1 left.", [])])
def test_claims_of_thoughts(name, level, thought, expected):
    """Written by hand. The player stands at (3, 4), the box one to the left of it."""
    env = at_level(name)
    env.level = level
    env.state = {"sokoban": ((3, 4), ((3, 3),)), "frozenlake": (3, 4), "bandit": None,
                 "sokoban_large": ((3, 4), ((3, 3), (4, 4)))}[name]
    found = thoughts.claims_of(thought, *thoughts.facts_of(env))
    assert [is_true for _, is_true in found] == expected


def walk(cell, offset):  # "2 down and 1 right", step by step
    for steps, move in re.findall(r"(\d) (\w+)", offset):
        cell = envs.shift(cell, move.capitalize(), int(steps))
    return cell


@pytest.mark.parametrize("name", ["frozenlake", "sokoban", "sokoban_newvocab"])
def test_facts_lead_there(name):
    for seed in range(300, 340):
        env = at_level(name, seed)
        facts, claim = thoughts.facts_of(env)
        if name == "frozenlake":
            assert walk(env.state, facts["goal"]) == env.level["goal"]
        else:
            player, (box,) = env.state
            assert walk(player, facts["box"]) == box
            assert walk(box, facts["target"]) == env.level["targets"][0]
        assert all(re.fullmatch(claim, fact) for fact in facts.values()), "truth can be said"


@pytest.mark.parametrize("name", ["bandit", "bandit_test", "bandit_rev"])
def test_the_safe_arm_always_pays_the_same(name):
    env = at_level(name)
    facts, claim = thoughts.facts_of(env)
    assert facts.keys() == set(env.actions)
    for arm, fact in facts.items():
        assert (len(env.outcomes(None, arm)) == 1) == (fact == "safe")
        assert re.fullmatch(claim, fact)


class Lift(envs.Env):
    """An environment of one's own, with one thing in it."""
    split = False
    actions = ("Up", "Down")
    claim = "up|down"

    @staticmethod
    def draw(rng):
        return "a box in a lift", "down"

    def outcomes(self, state, action):
        return [(1.0, action.lower(), 0.0, False)]

    def won(self, state):
        return False

    def render(self):
        return f"The box is {self.state}."

    def facts(self):
        return {"box": self.state}


def test_claims_in_an_environment_of_ones_own(cfg, play):
    cfg.max_new_tokens, cfg.max_turns = 60, 2
    said = "The box is down . </think><answer>Up</answer>"
    traj, = play([said, said], Lift, [300], cfg)
    assert [turn["claims"] for turn in traj.turns] == [[("down", True)], [("down", False)]]


# -------------------------------------------------------------------------------------------- pay
@pytest.mark.parametrize("pay", [0.0, 0.5])
def test_true_claims_may_be_rewarded(cfg, play, tok, monkeypatch, pay):
    """One true and two false claims about a goal earn -pay. An invalid answer has its penalty, too.
    """
    monkeypatch.setattr(thoughts, "PAY", pay)
    cfg.max_turns, cfg.max_new_tokens = 1, 60
    env = at_level("frozenlake")
    truth = thoughts.facts_of(env)[0]["goal"]
    thought = f"The goal is {truth} . The goal is 9 up . The goal is 9 down . </think>"
    for ending, penalty in (("<answer>Up</answer>", 0.0), ("", -0.1)):
        traj, = play([thought + ending], "frozenlake", [300], cfg)
        won = float(traj.success)
        assert traj.R == pytest.approx(won + penalty - pay)
        assert traj.reward[-1] == pytest.approx(traj.R), "it is on the last token of the answer"
        assert [is_true for _, is_true in traj.turns[0]["claims"]] == [True, False, False]
    cfg.max_turns = 2
    traj, = play([thought, thought], "frozenlake", [300], cfg)
    text = rm.message(env, cfg, cfg.max_actions, -0.1)
    told = rm.encode(tok, cfg.first_tag, text, after_answer=True)[1:]
    assert [turn["reward"] for turn in traj.turns] == pytest.approx([-0.1 - pay] * 2)
    second = [t for t in range(1, len(traj.ids)) if traj.mask[t] and not traj.mask[t - 1]][1]
    assert tuple(traj.ids[second - len(told):second]) == told, "it does not say what truth has paid"
    ends = [t for t in range(len(traj.ids)) if traj.reward[t]]
    assert len(ends) == 2 and ends[1] == len(traj.ids) - 1
    assert traj.mask[ends[0]] and not traj.mask[ends[0] + 1]


def test_claims_are_judged_by_what_was_seen(cfg, play):
    """Before the actions of their answer run, and in every turn anew."""
    cfg.max_new_tokens, cfg.max_turns, cfg.success_rate = 60, 2, 1.0
    env = envs.make("frozenlake", success_rate=1.0)
    env.reset(300)
    before = thoughts.facts_of(env)[0]["goal"]
    ends = (*env.level["holes"], env.level["goal"])
    action = next(action for action in env.actions if envs.shift(env.state, action) not in ends
                  and env.outcomes(env.state, action)[0][1] != env.state)
    env.step(action)
    after = thoughts.facts_of(env)[0]["goal"]
    said = f"The goal is {before} . </think><answer>{action}</answer>"
    then = f"The goal is {after} . The goal is {before} . </think><answer>{action}</answer>"
    traj, = play([said, then], "frozenlake", [300], cfg)
    assert [turn["claims"] for turn in traj.turns] == [
        [(before, True)], [(after, True), (before, False)]]


@pytest.mark.parametrize("claims, balance", [
    ([True], 1), ([False], -1), ([True, False], 0), ([False, False], -2), ([], 0)])
def test_pay_changes_returns_and_nothing_that_the_model_reads(claims, balance, cfg, play,
                                                              monkeypatch):
    """The same episode, token by token. Its return differs by pay times (true - false)."""
    cfg.max_new_tokens, cfg.max_turns = 80, 2
    box = thoughts.facts_of(at_level("sokoban"))[0]["box"]
    said = " . ".join(f"The box is {box if is_true else '3 up and 3 left'}" for is_true in claims)
    answers = [f"{said} . </think><answer>Up</answer>", "</think><answer>Down</answer>"]
    unpaid, = play(answers, "sokoban", [300], cfg)
    monkeypatch.setattr(thoughts, "PAY", 0.25)
    paid, = play(answers, "sokoban", [300], cfg)
    assert [is_true for turn in paid.turns for _, is_true in turn["claims"]] == claims
    assert paid.ids == unpaid.ids
    assert paid.R - unpaid.R == pytest.approx(0.25 * balance)
    assert sum(turn["reward"] for turn in paid.turns) == pytest.approx(paid.R)


# --------------------------------------------------------------------------- the columns of the log
def turn(answer, *claims):
    return dict(answer=answer, claims=list(claims))


@pytest.mark.parametrize("answer, fits", [
    ("<think>.</think><answer>Down || Up</answer>", True),
    ("<think>.</think><answer> right </answer>", True),
    ("<think>.</think><answer>Up || Down</answer>", False),
    ("<think>.</think><answer></answer>", False),
    ("<think>.</think><answer>|| Down</answer>", False),
    ("<think>down", False),
    ("<think>.</think><answer>Down", True)])
def test_first_actions_fit_or_do_not(answer, fits):
    assert thoughts.fits(turn(answer, ("2 down and 1 right", False))) == fits


def test_columns():
    """Counted by hand: 3 of 5 turns claim something; 2 of 4 claims are true; 2 of those 3 turns
    fit.
    """
    down = "<think>.</think><answer>Down</answer>"
    trajs = [SimpleNamespace(turns=[turn(down, ("1 down", True)),
                                    turn(down, ("1 up", False), ("2 down", True))]),
             SimpleNamespace(turns=[turn(down), turn(down, ("1 left", False)), dict(answer=down)])]
    row = {}
    assert not thoughts.watch(row, trajs, None, None), "it does not end the run"
    assert row == {"pay": 0.0, "claims": 0.6, "true_claims": 0.5, "fitting": 0.666667}


@pytest.mark.parametrize("turns", [None, [turn("")], [dict(answer="")]])
def test_where_nothing_is_claimed_there_are_no_columns(turns):
    row = {}
    thoughts.watch(row, [SimpleNamespace(turns=turns)] if turns else [], None, None)
    assert row == {"pay": 0.0}


# --------------------------------------------------------------------------------- the command line
SMALL = ("--device cpu --prompts 2 --rollouts 4 --minibatch-size 4 --iterations 1 "
         "--max-new-tokens 30 --max-turns 1 --max-actions 3 --eval-prompts 2 --success-rate 0.8")


@pytest.fixture
def command(monkeypatch):
    """command(line): thoughts.py, in this process"""
    take_turn, train = thoughts.take_turn_without_pay, rm.train

    def call(line):
        monkeypatch.setattr(rm, "take_turn", take_turn)
        monkeypatch.setattr(rm, "train", train)
        monkeypatch.setattr(sys, "argv", ["thoughts.py", *line.split()])
        runpy.run_path(str(ROOT / "extras/thoughts.py"), run_name="__main__")
    return call


def test_the_command_line(folder, tmp_path, command, capsys):
    run = tmp_path / "run"
    command(f"--model {folder} --env frozenlake --pay 0.5 {SMALL} --out {run}")
    first, second = rows_of(run)
    assert first["eval"].keys() == {"frozenlake"}
    assert first["pay"] == second["pay"] == 0.5
    told = capsys.readouterr().out
    for when in ("first", "last"):
        assert (f"{when} iteration: {second['claims']:.2f} of the turns claim something, "
                f"{second['true_claims']:.2f} of the claims are true") in told
    assert 0 < second["claims"] <= 1
    assert 0 <= second["true_claims"] <= 1 and 0 <= second["fitting"] <= 1
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert all("claims" in turn for sample in samples for turn in sample["turns"])
    command(f"--model {run} --play 300")
    assert "return " in capsys.readouterr().out


def test_a_resumed_run_pays_as_the_log_says(folder, tmp_path, command):
    """Or as --pay says. It must be a plain number: one of NumPy would make all rewards doubles."""
    run = tmp_path / "run"
    command(f"--model {folder} --env frozenlake --pay 0.5 {SMALL} --out {run}")
    command(f"--resume {run} --iterations 2")
    command(f"--resume {run} --iterations 3 --pay 0")
    command(f"--resume {run} --iterations 4")
    assert [row["pay"] for row in rows_of(run)] == [0.5, 0.5, 0.5, 0, 0]
    thoughts.set_pay(rm.replace(rm.Config(model=folder), resume=str(run)), None)
    assert type(thoughts.PAY) is float


def test_a_log_that_cannot_be_read_is_one_line(folder, tmp_path, command):
    run = tmp_path / "run"
    command(f"--model {folder} --env frozenlake --pay 0.5 {SMALL} --out {run}")
    (run / "log.jsonl").write_text("garbage\n")
    with pytest.raises(SystemExit, match="log.jsonl"):
        command(f"--resume {run} --iterations 2")


def test_runs_of_other_scripts_are_not_resumed(folder, tmp_path, command, monkeypatch):
    monkeypatch.setattr(rm, "take_turn", thoughts.take_turn_without_pay)
    monkeypatch.setattr(sys, "argv", ["ragen_mini.py"])
    run = tmp_path / "run"
    words = f"--model {folder} --env frozenlake {SMALL} --out {run}".split()
    rm.train(rm.parse_config(words))
    for pay in ("", "--pay 0.5"):
        with pytest.raises(SystemExit, match="was not trained by thoughts|trained by ragen_mini"):
            command(f"--resume {run} --iterations 2 {pay}")


@pytest.mark.parametrize("flags, said", [
    ("--pay 0.5 --no-think", "--no-think leaves none"), ("--pay nan", "--pay is nan"),
    ("--pay 1e9", "--pay is 1"), ("--env {mine}:Mute", "Mute has no `facts`")])
def test_mistakes(folder, tmp_path, command, flags, said):
    mine = tmp_path / "mine.py"
    mine.write_text("import envs\n\n\nclass Mute(envs.Env):\n    split = False\n"
                    "    actions = ('Push',)\n\n    @staticmethod\n    def draw(rng):\n"
                    "        return 0, 0\n\n    def render(self):\n        return 'x'\n\n"
                    "    def outcomes(self, state, action):\n"
                    "        return [(1.0, 0, 0.0, True)]\n")
    with pytest.raises(SystemExit, match=said):
        command(f"--model {folder} {SMALL} --out {tmp_path}/run {flags.format(mine=mine)}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("line", ["--pays 1", "--pay", "--pay much"])
def test_options_that_argparse_refuses(line, command):
    with pytest.raises(SystemExit) as stopped:
        command(line)
    assert stopped.value.code == 2


def test_pay_is_no_setting_of_the_core(monkeypatch):
    words = "--env frozenlake --success-rate 0.8".split()
    monkeypatch.setattr(sys, "argv", ["thoughts.py", *words, "--pay", "0.3"])
    assert thoughts.own_option() == 0.3
    assert rm.parse_config() == rm.parse_config(words)
    assert thoughts.own_option() is None
