"""Is a thought true? This finds claims such as "the goal is 2 down", and can pay for true ones.

    python extras/thoughts.py --env frozenlake               only looks, with all options as usual
    python extras/thoughts.py --env frozenlake --pay 0.3     a true claim earns 0.3, a false -0.3

The log has four more columns:
    claims        share of the turns whose thought claims something
    true_claims   share of the claims that are true
    fitting       share of the turns with claims whose first action is one that they name
    pay           what --pay says; --resume goes on with it

The included model was taught to make such claims. An environment of your own says what is true in
its present state, and which claims there are (a regular expression):

    class MyEnvironment(envs.Env):
        claim = "open|closed"

        def facts(self):
            return {"door": "open" if self.state.open else "closed"}
"""
import argparse
import re
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import envs
import plots
import ragen_mini as rm
import runs

WHERE = r"\b\d (up|down)( and \d (left|right))?|\b\d (left|right)"  # what `offset` says
PAY = 0.0  # the reward of a true claim. A false one costs as much


# -------------------------------------------------------------------------------- facts and claims
def facts_of(env):  # -> {thing: what is true of it now}, what can be claimed (a regular expression)
    if hasattr(env, "facts"):
        return env.facts(), getattr(env, "claim", WHERE)
    if isinstance(env, envs.FrozenLake):
        return {"goal": offset(env.state, env.level["goal"])}, WHERE
    if isinstance(env, envs.Sokoban):
        player, boxes = env.state
        if len(boxes) > 1:  # which one would be meant?
            return {}, WHERE
        box, target = boxes[0], env.level["targets"][0]
        return {"box": offset(player, box), "target": offset(box, target)}, WHERE
    if isinstance(env, envs.Bandit):
        return {env.sure: "safe", env.risky: "risky"}, "safe|risky"
    raise runs.UserError(f"{type(env).__name__} has no `facts` with which thoughts could be "
                         f"compared. See the top of extras/thoughts.py.")


def offset(a, b):  # offset((0, 0), (2, 1)) -> "2 down and 1 right"
    down, right = b[0] - a[0], b[1] - a[1]
    parts = []
    for steps, word in ((-down, "up"), (down, "down"), (-right, "left"), (right, "right")):
        if steps > 0:
            parts.append(f"{steps} {word}")
    return " and ".join(parts)


def claims_of(thought, facts, claim):  # -> [(what it says, is that true?), ...]
    """Every sentence that names one of the things, and says where or what it is.

    "I see the box, it is 1 left. The target is 2 up of the box." makes two claims. A sentence is
    about the thing that it names first.
    """
    found = []
    for sentence in re.split("[.?!]", thought):
        said = re.search(claim, sentence)
        named = [thing for thing in facts if thing in sentence]
        if said and named:
            subject = min(named, key=sentence.index)
            found.append((said[0], said[0] == facts[subject]))
    return found


# ------------------------------------------------------------------------------- turns with claims
take_turn_without_pay = rm.take_turn


def take_turn(traj, tok, cfg, ends):  # takes the place of rm.take_turn
    """Notes the claims of the turn, and pays for them.

    NOTE: the next message does not tell what was paid. Otherwise the model could read there whether
    its claims were true.
    """
    facts, claim = facts_of(traj.env)  # before the actions of the answer change them
    last = len(traj.ids) - 1
    take_turn_without_pay(traj, tok, cfg, ends)
    turn = traj.turns[-1]
    turn["claims"] = claims_of(rm.thought_of(turn), facts, claim)
    true = sum(is_true for _, is_true in turn["claims"])
    false = len(turn["claims"]) - true
    pay = PAY * (true - false)
    turn["reward"] += pay
    traj.reward[last] += pay


# --------------------------------------------------------------------------- the columns of the log
def watch(row, trajs, models, cfg):  # a callback of rm.train
    row["pay"] = PAY
    turns = [turn for traj in trajs for turn in traj.turns]
    claiming = [turn for turn in turns if turn.get("claims")]
    if not claiming:
        return
    are_true = [is_true for turn in claiming for _, is_true in turn["claims"]]
    row["claims"] = round(len(claiming) / len(turns), 6)
    row["true_claims"] = round(fmean(are_true), 6)
    row["fitting"] = round(fmean(fits(turn) for turn in claiming), 6)


def fits(turn):
    """Is the first action one that the claims name? "1 down and 1 right" names Down and Right."""
    first = first_action(turn)
    return first != "" and any(first in said for said, _ in turn["claims"])


def first_action(turn):  # in lower case
    answer = turn["answer"].partition("<answer>")[2]
    return re.split(r"\|\||<", answer)[0].strip().lower()


plots.QUESTIONS["Are its thoughts true?"] = ("claims", "true_claims")
plots.TITLES["claims"] = "share of turns that claim something"
plots.TITLES["true_claims"] = "share of claims that are true"


# --------------------------------------------------------------------------------- the command line
def own_option():  # -> --pay, or None. The other options stay on the command line
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--pay PAY] [options of ragen_mini.py]", description=__doc__,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pay", type=float,
                        help="reward of a true claim; a false one costs as much (default: 0)")
    own, sys.argv[1:] = parser.parse_known_args()
    return own.pay


def set_pay(cfg, pay):  # pay: of the command line, or None
    global PAY
    if pay is None and cfg.resume:
        try:
            _, paid = plots.load(Path(cfg.resume).expanduser()).series("pay")
        except ValueError as error:
            raise runs.UserError(f"--resume: {error}") from error
        runs.need(len(paid), f"--resume {cfg.resume}: it was not trained by thoughts.py. Use the "
                             f"script that began it.")
        pay = float(paid[-1])  # NumPy's number would make all rewards doubles
    pay = pay or 0.0
    runs.need(abs(pay) < 1e6, f"--pay is {pay}. It must be a number between -1e6 and 1e6.")
    runs.need(not (pay and cfg.no_think), "--pay is for thoughts, and --no-think leaves none. "
                                          "Leave out one of the two.")
    PAY = pay


def check_facts(cfg):
    env = envs.make(cfg.env)
    env.reset(envs.EVAL_SEEDS.stop)
    facts_of(env)


def tell(rows):
    claiming = [row for row in rows if "true_claims" in row]
    if PAY and len(rows) > 1 and not claiming:
        print("note: no thought claimed anything, so nothing was paid")
    for when, row in zip(("first", "last"), claiming[:1] + claiming[-1:]):
        print(f"{when} iteration: {row['claims']:.2f} of the turns claim something, "
              f"{row['true_claims']:.2f} of the claims are true")


def main():
    pay = own_option()
    train = rm.train

    def train_and_tell(cfg):
        check_facts(cfg)
        set_pay(cfg, pay)
        rows, models = train(cfg, callback=watch)
        tell(rows)
        return rows, models
    rm.train = train_and_tell
    rm.take_turn = take_turn
    rm.main()


if __name__ == "__main__":
    main()
