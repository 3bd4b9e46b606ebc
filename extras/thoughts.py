"""Is a thought true? It finds claims such as "the goal is 2 down and 1 right", and may pay for those that are true.

    python extras/thoughts.py --env frozenlake                all options of ragen_mini.py; the log has more columns
    python extras/thoughts.py --env frozenlake --pay 0.3      0.3 for every true claim, -0.3 for every false one

    claims        share of turns whose thought claims something
    true_claims   share of the claims that are true
    fitting       share of the turns with claims whose first action is one that they name
    pay           what --pay says; --resume goes on with it

tiny was taught to make such claims. In a world of your own, `import thoughts`, and write

    class MyWorld(thoughts.Claims, envs.Env):
        def facts(self):
            return {"door": "open"}
        claim = "open|closed"
"""
import argparse
import re
import sys
from functools import partial
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import envs
import plots
import ragen_mini as rm

WHERE = r"\b\d (up|down)( and \d (left|right))?|\b\d (left|right)"  # what `offset` says


def offset(a, b):  # offset((0, 0), (2, 1)) -> "2 down and 1 right"
    down, right = b[0] - a[0], b[1] - a[1]
    parts = []
    for steps, word in ((-down, "up"), (down, "down"), (-right, "left"), (right, "right")):
        if steps > 0:
            parts.append(f"{steps} {word}")
    return " and ".join(parts)


# ------------------------------------------------------------------------------------- worlds that listen
class Claims:
    """What a world needs besides its rules. NOTE: no message tells the model of the pay (see Env.bonus), or it could
    read there which of its claims were true."""
    pay = 0.0
    claim = WHERE  # what thoughts may say of the world's things: a regular expression

    def facts(self):  # -> {thing: what is true of it now}
        return {}

    def bonus(self, turn):
        turn["claims"] = self.claims_of(plots.thought_of(turn))
        true = sum(is_true for _, is_true in turn["claims"])
        false = len(turn["claims"]) - true
        return self.pay * (true - false)

    def claims_of(self, thought):  # -> [(what it says, is that true?), ...]
        """Every sentence that says of one of the world's things where or what it is. "I see the box, it is 1 left. The
        target is 2 up of it." makes two claims, the first one about the box."""
        facts = self.facts()
        found = []
        for sentence in re.split("[.?!]", thought):
            said = re.search(self.claim, sentence)
            named = [thing for thing in facts if thing in sentence]
            if said and named:
                subject = min(named, key=sentence.index)  # "the target is 2 up of the box": about the target
                found.append((said[0], said[0] == facts[subject]))
        return found


class FrozenLake(Claims, envs.FrozenLake):
    def facts(self):
        return {"goal": offset(self.state, self.level["goal"])}


class Sokoban(Claims, envs.Sokoban):
    def facts(self):
        player, boxes = self.state
        if len(boxes) > 1:  # which one would be meant?
            return {}
        target, = self.level["targets"]
        return {"box": offset(player, boxes[0]), "target": offset(boxes[0], target)}  # the target as seen from the box


class Bandit(Claims, envs.Bandit):
    claim = "safe|risky"

    def facts(self):
        return {self.sure: "safe", self.risky: "risky"}


OURS = {envs.FrozenLake: FrozenLake, envs.Sokoban: Sokoban, envs.Bandit: Bandit}


def with_claims(world):  # an entry of envs.ENVS -> the same, of a class above
    if isinstance(world, partial):
        return partial(OURS[world.func], **world.keywords)
    return OURS[world]


# ------------------------------------------------------------------------------------- the columns of the log
def watch(row, trajs, learned, models, cfg):
    row["pay"] = Claims.pay
    turns = [turn for traj in trajs for turn in traj.turns]
    claiming = [turn for turn in turns if turn.get("claims")]  # a world without Claims has none
    if not claiming:
        return
    are_true = [is_true for turn in claiming for _, is_true in turn["claims"]]
    row["claims"] = round(len(claiming) / len(turns), 6)
    row["true_claims"] = round(fmean(are_true), 6)
    row["fitting"] = round(fmean(fits(turn) for turn in claiming), 6)


def fits(turn):
    """Is the first action of an answer one that its claims name? ("1 down and 1 right": Down or Right)"""
    answer = turn["answer"].partition("<answer>")[2]
    first = re.split(r"\|\||<", answer)[0].strip().lower()
    return first != "" and any(first in said for said, _ in turn["claims"])


# ------------------------------------------------------------------------------------- the command line
def own_option():  # -> --pay; the others stay on the command line, for ragen_mini.py
    parser = argparse.ArgumentParser(usage="%(prog)s [--pay PAY] [options of ragen_mini.py, see there]",
                                     description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pay", type=float, default=None, help="reward of a true claim; a false one costs as much")
    own, sys.argv[1:] = parser.parse_known_args()
    return own.pay


def train(cfg, pay):
    rm.need(hasattr(envs.make(cfg.env), "facts"), f"{cfg.env} has no `facts` to compare thoughts with: see the top of this file")
    if pay is None:
        pay = 0.0
        if cfg.resume:  # as the log says last
            _, paid = plots.load(cfg.resume).series("pay")
            rm.need(len(paid), f"{cfg.resume} was not trained by this program: ragen_mini.py goes on with it")
            pay = float(paid[-1])  # a numpy number would make all rewards doubles
    rm.need(abs(pay) < 1e6, f"--pay {pay}: must be a number, -1e6 to 1e6")  # not nan or inf
    rm.need(not (pay and cfg.no_think), "--pay is for thoughts, and --no-think leaves none")
    Claims.pay = pay
    result = rm.train(cfg, watch=watch)
    rows, _ = result
    if Claims.pay and len(rows) > 1 and not any("claims" in row for row in rows):
        print("note: no thought claimed anything, so nothing was paid")
    claiming = [row for row in rows if "true_claims" in row]
    for when, row in zip(("first", "last"), (claiming[:1] + claiming[-1:])):
        print(f"{when} iteration: {row['claims']:.2f} of the thoughts claim something, {row['true_claims']:.2f} of the claims are true")
    return result


plots.QUESTIONS["Are its thoughts true?"] = ("claims", "true_claims")
plots.TITLES |= {"claims": "share of turns that claim something", "true_claims": "share of claims that are true"}

if __name__ == "__main__":
    sys.modules["thoughts"] = sys.modules["__main__"]  # `import thoughts` in your world means this, not a second copy
    for name, world in envs.ENVS.items():
        envs.ENVS[name] = with_claims(world)
    rm.main(partial(train, pay=own_option()))
