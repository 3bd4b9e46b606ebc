"""What does a model think, is it true, and does what it learns carry over?

    python extras/measure.py --env frozenlake                               trains as usual
    python extras/measure.py --env sokoban --eval-envs sokoban_large,sokoban_newvocab
    python extras/measure.py --env frozenlake --model RUN --eval-only       a run that has ended

All options of ragen_mini.py can be given, and the rows of the log are those of ragen_mini.py, with
more columns at each evaluation:
    eval                          success in the environments of --eval-envs, too
    thoughts_nothing, _goal,      shares of the turns whose thought says nothing about the state,
    _around, _both                where the goal (or the box) is, what lies around, or both
    valid_answers                 share of the turns whose answer is valid
    true_direction, _goal, _box,  shares of the claims that are true, by what they are about
    _target, _sound
    first_move_safe, _hole,       at the forks of a lake, the number of first moves of an answer: a
    _elsewhere                    fork is a cell with two ways to the goal, one of them into a hole
    second_move_safe, ...         the same for second moves, in the cell where the first one leads
                                  as intended

Claims are read in the words that the included model was taught (see AROUND and PLACE).
"""
import argparse
import copy
import re
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import envs
import plots
import ragen_mini as rm
from support import errors, folder

# "Up ice hole" says what lies one and two cells up, "2 Down and 1 Right" where something is.
AROUND = re.compile(r"\b(Up|Down|Left|Right)((?: (?:edge|hole|ice|goal|free|wall|box|target))+)")
PLACE = r"(\d (?:Up|Down|Left|Right)(?: and \d (?:Left|Right))?)"
KINDS = ("nothing", "goal", "around", "both")

# The columns, as they are drawn: a row of panels for each question.
THOUGHTS = ("thoughts_nothing", "thoughts_goal", "thoughts_around", "thoughts_both",
            "valid_answers")
CLAIMS = ("true_direction", "true_goal", "true_box", "true_target", "true_sound")
MOVES = ("first_move_safe", "first_move_hole", "first_move_elsewhere",
         "second_move_safe", "second_move_hole", "second_move_elsewhere")
plots.QUESTIONS |= {"What do its thoughts say?": THOUGHTS, "Are their claims true?": CLAIMS,
                    "Which way at a fork?": MOVES}
plots.SHARES.update(THOUGHTS, CLAIMS)


# ------------------------------------------------------------------------------ thoughts and claims
def kind_of(thought):
    around, place = AROUND.search(thought), re.search(rf"{PLACE}|\bsounds\b", thought)
    if around:
        return "both" if place else "around"
    return "goal" if place else "nothing"


def claims_of(thought, env):  # -> [(what it is about, is it true?), ...]
    """env is in the state that the thought is about."""
    if isinstance(env, envs.Bandit):
        sounds = {env.sure: "safe", env.risky: "risky"}
        return [("sound", sounds.get(arm) == sound)
                for arm, sound in re.findall(r"(\w+) sounds (\w+)", thought)]
    if not isinstance(env, (envs.FrozenLake, envs.Sokoban)):
        return []
    claims = []
    player = player_of(env)
    for move, said in AROUND.findall(thought):
        words = said.split()
        cells = [envs.shift(player, move, 1 + number) for number in range(len(words))]
        claims.append(("direction", words == [what_lies_at(env, cell) for cell in cells]))
    if isinstance(env, envs.FrozenLake):
        goal = offset(player, env.level["goal"])
        claims += [("goal", said == goal)
                   for said in re.findall(rf"\bgoal (?:is )?{PLACE}", thought)]
    elif len(env.state[1]) == 1:  # which one of two boxes would be meant?
        box = env.state[1][0]
        to_box, to_target = offset(player, box), offset(box, env.level["targets"][0])
        claims += [("box", said == to_box)
                   for said in re.findall(rf"\bbox (?:is )?{PLACE}", thought)]
        claims += [("target", said == to_target)
                   for said in re.findall(rf"\btarget (?:is )?{PLACE} of it", thought)]
    return claims


def player_of(env):  # -> cell
    return env.state if isinstance(env, envs.FrozenLake) else env.state[0]


def what_lies_at(env, cell):
    if isinstance(env, envs.FrozenLake):
        if not set(cell) <= set(range(env.size)):
            return "edge"
        if cell == env.level["goal"]:
            return "goal"
        return "hole" if cell in env.level["holes"] else "ice"
    if cell in env.state[1]:
        return "box"
    if cell in env.level["targets"]:
        return "target"
    return "free" if cell in env.level["floor"] else "wall"


def offset(a, b):  # offset((0, 0), (2, 1)) -> "2 Down and 1 Right"
    down, right = b[0] - a[0], b[1] - a[1]
    parts = []
    for steps, word in ((-down, "Up"), (down, "Down"), (-right, "Left"), (right, "Right")):
        if steps > 0:
            parts.append(f"{steps} {word}")
    return " and ".join(parts)


# ----------------------------------------------------------------------------------- moves at forks
def choices_of(turn, lake):  # -> columns of MOVES, one for each move that begins at a fork
    """lake is in the state of the turn."""
    actions = rm.parse_answer(turn["answer"], lake.actions, 2) or []
    cell = lake.state
    choices = []
    for which, action in zip(("first", "second"), actions):
        ways = ways_of_fork(lake, cell)
        if ways:
            choices.append(f"{which}_move_{ways.get(action, 'elsewhere')}")
        _, cell, _, over = lake.outcomes(cell, action)[0]  # as intended
        if over:
            break
    return choices


def ways_of_fork(lake, cell):  # -> {move: "safe", move: "hole"}, or {} if it is no fork
    goal = lake.level["goal"]
    ways = {}
    for move in envs.MOVES:
        new = envs.shift(cell, move)
        if distance(new, goal) < distance(cell, goal):
            ways[move] = "hole" if new in lake.level["holes"] else "safe"
    return ways if sorted(ways.values()) == ["hole", "safe"] else {}


def distance(a, b):
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


# ------------------------------------------------------------------------------- columns of the log
take_turn_alone, evaluate_alone = rm.take_turn, rm.evaluate


def take_turn(traj, tok, cfg, ends):  # takes the place of rm.take_turn
    """Notes in which state the answer was given, because its actions change it."""
    traj.states = [*getattr(traj, "states", []), traj.env.state]
    take_turn_alone(traj, tok, cfg, ends)


def columns_of(trajs):  # -> {column: number}
    kinds, truths, choices = Counter(), defaultdict(list), Counter()
    valid = []
    for traj in trajs:
        env = copy.copy(traj.env)
        for turn, env.state in zip(traj.turns, traj.states):
            thought = rm.thought_of(turn)
            kinds[kind_of(thought)] += 1
            valid.append(turn["valid"])
            for about, is_true in claims_of(thought, env):
                truths[f"true_{about}"].append(is_true)
            if isinstance(env, envs.FrozenLake):
                choices.update(choices_of(turn, env))
    columns = {f"thoughts_{kind}": kinds[kind] / len(valid) for kind in KINDS}
    columns["valid_answers"] = fmean(valid)
    columns |= {column: fmean(truths[column]) for column in CLAIMS if column in truths}
    if choices:
        columns |= {column: choices[column] for column in MOVES}
    return {column: round(x, 6) for column, x in columns.items()}


def evaluate_in(names):  # -> a function that takes the place of rm.evaluate
    def evaluate(models, cfg, when=""):
        row, trajs = evaluate_alone(models, cfg, when)
        for name in names:
            there, _ = evaluate_alone(models, replace(cfg, env=name), when)
            for column in there:  # "eval" and "yardsticks", each {environment: ...}
                row[column] |= there[column]
        columns = columns_of(trajs)
        folder.say("  ".join(f"{name} {x:.4g}" for name, x in columns.items()))
        return row | columns, trajs
    return evaluate


def main():
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--eval-envs NAME,...] [options of ragen_mini.py]", description=__doc__,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eval-envs", default="", metavar="NAME,...",
                        help="other environments to evaluate in (to be given again with --resume)")
    own, sys.argv[1:] = parser.parse_known_args()
    names = own.eval_envs.replace(",", " ").split()
    with errors.one_line_errors():
        for name in names:
            envs.make(name)  # if there is no such environment, that is said now
        rm.take_turn, rm.evaluate = take_turn, evaluate_in(names)
        rm.main()


if __name__ == "__main__":
    main()
