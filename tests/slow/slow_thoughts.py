"""extras/thoughts.py: what is claimed, whether it is true, and what it is paid."""
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
def _free_of_charge(monkeypatch):  # whatever a test sets is undone
    monkeypatch.setattr(thoughts.Claims, "pay", 0.0)


def world(name, seed=300):
    env = thoughts.with_claims(envs.ENVS[name])()
    env.reset(seed)
    return env


# ------------------------------------------------------------------------------------- facts and claims
@pytest.mark.parametrize("name, level, thought, expected", [
    ("sokoban", {"floor": (), "targets": ((2, 2),)}, "The box is 1 left. The target is 2 up of it.", [True, False]),
    ("sokoban", {"floor": (), "targets": ((2, 2),)}, "I see the box , it is 2 down . Let me try .", [False]),
    ("sokoban", {"floor": (), "targets": ((2, 2),)}, "The target is 1 up and 1 left of the box.", [True]),
    ("frozenlake", {"goal": (0, 3), "holes": ()}, "Careful , the goal is 3 up and 1 left .", [True]),
    ("frozenlake", {"goal": (0, 3), "holes": ()}, "The goal is 3 up and 2 left. Is it 3 up? The goal!", [False]),
    ("frozenlake", {"goal": (0, 3), "holes": ()}, "The ice is 1 up.", []),
    ("bandit", {}, "Teacher sounds safe . Engineer sounds safe . I choose the risky one .", [True, False]),
    ("sokoban_large", {"floor": (), "targets": ((2, 2), (2, 3))}, "The box is 1 left.", [])])
def test_claims_of_thoughts(name, level, thought, expected):
    """Written by hand. The player stands at (3, 4), the box one to the left of it."""
    env = world(name)
    env.level = level
    env.state = {"sokoban": ((3, 4), ((3, 3),)), "frozenlake": (3, 4), "bandit": None,
                 "sokoban_large": ((3, 4), ((3, 3), (4, 4)))}[name]
    assert [is_true for _, is_true in env.claims_of(thought)] == expected


def walk(cell, offset):  # "2 down and 1 right", step by step
    for steps, move in re.findall(r"(\d) (\w+)", offset):
        cell = envs.shift(cell, move.capitalize(), int(steps))
    return cell


@pytest.mark.parametrize("name", ["frozenlake", "sokoban", "sokoban_newvocab"])
def test_facts_lead_there(name):
    for seed in range(300, 340):
        env = world(name, seed)
        facts = env.facts()
        if name == "frozenlake":
            assert walk(env.state, facts["goal"]) == env.level["goal"]
        else:
            player, (box,) = env.state
            assert walk(player, facts["box"]) == box
            assert walk(box, facts["target"]) == env.level["targets"][0]
        assert all(re.fullmatch(thoughts.WHERE, fact) for fact in facts.values()), "what is true can be said"


@pytest.mark.parametrize("name", envs.ENVS)
def test_the_worlds_are_those_of_the_core(name):
    plain = envs.make(name)
    for seed in (3, 300, 301):
        env = world(name, seed)
        assert env.reset(seed) == plain.reset(seed)
        assert (env.level, env.instruction) == (plain.level, plain.instruction)
        for action in env.actions:
            assert env.outcomes(env.state, action) == plain.outcomes(plain.state, action)


# ------------------------------------------------------------------------------------- pay
@pytest.mark.parametrize("pay", [0.0, 0.5])
def test_true_claims_may_be_rewarded(cfg, play, tok, pay):
    """One true and two false claims about a goal: `pay` less. An answer that is not valid pays its penalty, too."""
    thoughts.Claims.pay = pay
    cfg.max_turns, cfg.max_new_tokens = 1, 60
    env = world("frozenlake")
    truth = env.facts()["goal"]
    thought = f"The goal is {truth} . The goal is 9 up . The goal is 9 down . </think>"
    for ending, penalty in (("<answer>Up</answer>", 0.0), ("", -0.1)):
        traj, = play([thought + ending], thoughts.FrozenLake, [300], cfg)
        won = float(traj.success)
        assert traj.R == pytest.approx(won + penalty - pay)
        assert sum(traj.reward) == pytest.approx(traj.R), "it is trained on"
        assert [is_true for _, is_true in traj.turns[0]["claims"]] == [True, False, False]
    cfg.max_turns = 2
    traj, = play([thought, thought], thoughts.FrozenLake, [300], cfg)
    told = rm.encode(tok, cfg.first_tag, rm.message(env, cfg, cfg.max_actions, -0.1), after_answer=True)[1:]
    assert traj.turns[0]["reward"] == pytest.approx(-0.1 - pay)
    assert told in [traj.ids[i:i + len(told)] for i in range(len(traj.ids))], "no message says what truth has paid"


def test_claims_are_judged_by_what_was_seen(cfg, play):
    """Before the actions of their answer run, and in every turn anew."""
    cfg.max_new_tokens, cfg.max_turns, cfg.success_rate = 60, 2, 1.0
    env = thoughts.FrozenLake(success_rate=1.0)
    env.reset(300)
    before = env.facts()["goal"]
    action = next(action for action in env.actions if envs.shift(env.state, action) not in
                  (*env.level["holes"], env.level["goal"]) and env.outcomes(env.state, action)[0][1] != env.state)
    env.step(action)
    after = env.facts()["goal"]
    said = f"The goal is {before} . </think><answer>{action}</answer>"
    then = f"The goal is {after} . The goal is {before} . </think><answer>{action}</answer>"
    traj, = play([said, then], thoughts.FrozenLake, [300], cfg)
    assert [turn["claims"] for turn in traj.turns] == [[(before, True)], [(after, True), (before, False)]]


def test_pay_changes_returns_and_nothing_that_the_model_reads(folder):
    """The same episodes, token by token, whatever is paid: each return differs by pay times (true - false)."""
    cfg = rm.Config(model=folder, device="cpu", env=thoughts.FrozenLake, max_turns=2, max_new_tokens=30)
    models = rm.load_models(cfg)
    unpaid = rm.rollout(models, [300, 301], 8, cfg, 5)
    thoughts.Claims.pay = 0.25
    paid = rm.rollout(models, [300, 301], 8, cfg, 5)
    balances = set()
    for one, other in zip(unpaid, paid):
        judged = [is_true for turn in one.turns for _, is_true in turn["claims"]]
        balance = 2 * sum(judged) - len(judged)
        balances.add(balance)
        assert one.ids == other.ids
        assert other.R - one.R == pytest.approx(0.25 * balance)
        assert sum(other.reward) == pytest.approx(other.R)
    assert len(balances) > 2


# ------------------------------------------------------------------------------------- the columns of the log
def turn(answer, *claims):
    return dict(answer=answer, claims=list(claims))


@pytest.mark.parametrize("answer, fits", [
    ("<think>.</think><answer>Down || Up</answer>", True), ("<think>.</think><answer> right </answer>", True),
    ("<think>.</think><answer>Up || Down</answer>", False), ("<think>.</think><answer></answer>", False),
    ("<think>.</think><answer>|| Down</answer>", False), ("<think>down", False),
    ("<think>.</think><answer>Down", True)])
def test_first_actions_fit_or_do_not(answer, fits):
    assert thoughts.fits(turn(answer, ("2 down and 1 right", False))) == fits


def test_columns():
    """Counted by hand: 3 of 5 turns claim something; 2 of 4 claims are true; 2 of those 3 turns fit."""
    down = "<think>.</think><answer>Down</answer>"
    trajs = [SimpleNamespace(turns=[turn(down, ("1 down", True)), turn(down, ("1 up", False), ("2 down", True))]),
             SimpleNamespace(turns=[turn(down), turn(down, ("1 left", False)), dict(answer=down)])]
    row = {}
    assert not thoughts.watch(row, trajs, [], None, None), "it does not end the run"
    assert row == {"pay": 0.0, "claims": 0.6, "true_claims": 0.5, "fitting": 0.666667}


@pytest.mark.parametrize("trajs", [[], [SimpleNamespace(turns=[turn("")])], [SimpleNamespace(turns=[dict(answer="")])]])
def test_where_nothing_is_claimed_there_are_no_columns(trajs):
    row = {}
    thoughts.watch(row, trajs, [], None, None)
    assert row == {"pay": 0.0}


# ------------------------------------------------------------------------------------- the command line
SMALL = ("--device cpu --prompts 2 --rollouts 4 --update-size 4 --iterations 1 --max-new-tokens 30 --max-turns 1 "
         "--max-actions 3 --eval-prompts 2 --success-rate 0.8")


def test_the_command_line(folder, tmp_path, monkeypatch, capsys):
    """In this process. The worlds keep their names; a world of one's own may import thoughts; a resumed run pays on."""
    worlds = dict(envs.ENVS)

    def command(line):
        monkeypatch.setattr(envs, "ENVS", dict(worlds))
        monkeypatch.setitem(sys.modules, "thoughts", None)
        monkeypatch.setattr(sys, "argv", ["thoughts.py", *line.split()])
        runpy.run_path(str(ROOT / "extras/thoughts.py"), run_name="__main__")
    mine = tmp_path / "mine.py"
    mine.write_text("import envs, thoughts\n\n\nclass Mine(thoughts.FrozenLake):\n    pass\n")
    run = tmp_path / "run"
    command(f"--model {folder} --env {mine}:Mine --pay 0.5 {SMALL} --out {run}")
    first, second = rows_of(run)
    assert first["eval"].keys() == {"Mine"}
    assert first["pay"] == second["pay"] == 0.5
    told = capsys.readouterr().out
    for when in ("first", "last"):
        assert f"{when} iteration: {second['claims']:.2f} of the thoughts claim something, {second['true_claims']:.2f} of the claims are true" in told
    with pytest.raises(envs.UserError, match="--pay is for thoughts, and --no-think leaves none"):
        command(f"--model {folder} --pay 0.5 --no-think {SMALL} --out {run}-2")
    assert 0 < second["claims"] <= 1 and 0 <= second["true_claims"] <= 1 and 0 <= second["fitting"] <= 1
    command(f"--resume {run} --iterations 2")
    assert rows_of(run)[-1]["pay"] == 0.5
    with pytest.raises(SystemExit):
        command("--help")
    assert "--pay PAY" in capsys.readouterr().out, "its own option, not only those of the core"
    with pytest.raises(envs.UserError, match="--pay nan: must be a number"):
        command(f"--resume {run} --iterations 3 --pay nan")
    command(f"--resume {run} --iterations 3 --pay 0")
    assert [row["pay"] for row in rows_of(run)] == [0.5, 0.5, 0.5, 0]
    command(f"--resume {run} --iterations 4 --pay 0.5")
    with open(run / "log.jsonl", "a") as log:
        log.write('{"iteration": 5, "success": 0.5}\n')  # by ragen_mini.py alone
    command(f"--resume {run} --iterations 5")
    assert rows_of(run)[-1]["pay"] == 0.5
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text((run / "config.json").read_text())
    (tmp_path / "plain/log.jsonl").write_text('{"iteration": 0}\n')
    (tmp_path / "plain/checkpoint").mkdir()
    with pytest.raises(envs.UserError, match="plain was not trained by this program"):
        command(f"--resume {tmp_path}/plain --iterations 2")
    for line in ("--pays 1", "--pay", "--pay much"):
        with pytest.raises(SystemExit) as stopped:
            command(line)
        assert stopped.value.code == 2


def test_a_resumed_run_pays_as_the_log_says(folder, tmp_path):
    """With plain numbers: those of numpy would make all rewards doubles, which other tensors are not."""
    cfg = rm.Config(env=thoughts.FrozenLake, model=folder, prompts=2, rollouts=4, iterations=1, max_new_tokens=12, max_turns=1,
                    eval_every=0, out=str(tmp_path / "run"))
    thoughts.train(cfg, 0.3)
    thoughts.train(rm.replace(cfg, resume=cfg.out, iterations=2), None)
    assert [row["pay"] for row in rows_of(tmp_path / "run")] == [0.3, 0.3, 0.3] and type(thoughts.Claims.pay) is float


def test_pay_is_no_setting_of_the_core(monkeypatch):
    monkeypatch.setattr(sys, "argv", "thoughts.py --env frozenlake --success-rate 0.8 --pay 0.3".split())
    assert thoughts.own_option() == 0.3
    assert rm.parse_config() == rm.parse_config("--env frozenlake --success-rate 0.8".split())
    assert thoughts.own_option() is None
