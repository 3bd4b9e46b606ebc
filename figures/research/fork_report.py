"""What came out of fork.py: which forks were lost? Measures and tests were decided before.

    python figures/paper.py fig-fork      the picture: figures/tiny/fig-fork.png
    python figures/paper.py forks         three tables
"""
import itertools
from dataclasses import dataclass

import numpy as np

import ledger
import plots
from research import fork
from runs import need

# An origin was calm if the median of its largest gradient norms is below this.
CALM = 0.03
# In so many iterations a lost fork is below half of its origin's peak.
LAST = 5
# Pairs: is it forked at iteration 30? And the arm.
ARMS = [*itertools.product([False], fork.BEFORE_BREAK), *itertools.product([True], fork.AT_EARLY)]
SHOWN = {
    "calm": "second moment cut", "calm, cap": "cut, capped", "cap": "capped",
    "third": "a third of the rate",
    "calm origin": "lost after a calm", "not calm origin": "lost without a calm",
    "not lost origin": "not lost"}
QUESTIONS = (  # an arm, what it is compared with, in which origins
    ("floor", "as it is", "calm"),
    ("floor", "as it is", "not calm"),
    ("cap", "as it is", "calm"),
    ("cap", "as it is", "not calm"),
    ("third", "as it is", "lost"),
    ("calm", "as it is", "all"),
    ("calm", "calm, cap", "all"))


@dataclass
class Forks:
    """Eight forks of one origin and one arm, by dice."""
    seed: int
    kinds: tuple  # of the origin: "all" and "not lost", or "all", "lost" and "calm" or "not calm"
    early: bool  # from iteration 30?
    arm: str
    lost: list  # True or False
    steps: list  # the longest of each, in learning rates


def collect():  # -> list of Forks
    origins, forks = fork.load()
    origins = fork.chosen(origins)
    need(origins, "origins are missing: python figures/research/fork.py")
    found = []
    for seed, at in sorted(fork.fork_points(origins).items()):
        for early, arm in ARMS:
            some = Forks(seed, kinds_of(origins[seed], at), early, arm, lost=[], steps=[])
            begin = fork.EARLY if early else at
            for dice in fork.DICE:
                key = seed, begin, arm, dice
                need(key in forks, "forks are missing: python figures/research/fork.py")
                some.lost.append(is_lost(forks[key], origins[seed]))
                some.steps.append(longest_step(forks[key]))
            found.append(some)
    return found


def longest_step(one):
    """In full learning rates. fork.py measured it in the fork's own."""
    if one["arm"] == "third":
        return one["longest_step"] / 3
    return one["longest_step"]


def is_lost(one, origin):
    success = np.array(one["success"])  # of a run that ended: up to its end
    return bool((success[-LAST:] < origin["peak"] / 2).all())


def kinds_of(origin, at):
    if origin["lost_at"] is None:
        return "all", "not lost"
    longest = origin["grad_norm_max"][at - 20:at]  # of iterations at - 19 to at
    if np.median(longest) < CALM:
        return "all", "lost", "calm"
    return "all", "lost", "not calm"


def chosen(found, kind, early, arm):  # -> those Forks, by seed
    return [some for some in found if (some.early, some.arm) == (early, arm) and kind in some.kinds]


def mcnemar(one, other):  # True and False, in pairs -> p, how often only one, how often only other
    one, other = np.array(one, dtype=bool), np.array(other, dtype=bool)
    first = int((one & ~other).sum())
    second = int((other & ~one).sum())
    p = min(1.0, 2 * ledger.at_least(max(first, second), first + second, 0.5))
    return p, first, second


# --------------------------------------------------------------------------------- tables, picture
def tables(found):  # -> list of Markdown
    return [by_origin(found), by_arm(found), by_question(found)]


def by_origin(found):  # -> Markdown
    rows = {}
    for some in found:
        row = rows.setdefault(some.seed, [str(some.seed), some.kinds[-1]])
        row.append(str(sum(some.lost)))
    head = ["seed", "origin", *itertools.starmap(in_words, ARMS)]
    return f"Lost forks, of {len(fork.DICE)}\n\n" + ledger.markdown(head, rows.values())


def in_words(early, arm):
    return f"{arm}, early" if early else arm


def by_arm(found):  # -> Markdown
    rows = []
    for kind in ("calm", "not calm", "all"):
        for early, arm in ARMS:
            some = chosen(found, kind, early, arm)
            # Early forks are compared in all origins together.
            if not some or early != (kind == "all"):
                continue
            lost = np.concatenate([forks.lost for forks in some])
            steps = np.concatenate([forks.steps for forks in some])
            rows.append([kind, in_words(early, arm), f"{lost.sum()} of {len(lost)}",
                         f"{np.median(steps):.2f}"])
    head = ["origins", "arm", "lost", "longest step, median [learning rates]"]
    return ledger.markdown(head, rows)


def by_question(found):  # -> Markdown
    rows, ps = [], []
    for arm, other, kind in QUESTIONS:
        early = arm == "calm"
        ours, theirs = [], []  # of the same origins and dice, in pairs
        for forks in chosen(found, kind, early, arm):
            ours += forks.lost
        for forks in chosen(found, kind, early, other):
            theirs += forks.lost
        p, first, second = mcnemar(ours, theirs)
        ps.append(p)
        rows.append([f"{arm} / {other}", kind, str(len(ours)), f"{first} / {second}"])
    for row, p in zip(rows, ledger.holm(ps, [1] * len(ps))):
        row.append(f"{p:.3f}")
    head = ["arms", "origins", "pairs", "only the first, only the second is lost", "p (Holm)"]
    return ledger.markdown(head, rows)


def draw(found, title, out):
    """A line for each origin, in the colour of its kind: the share of its forks that was lost."""
    panels = {False: fork.BEFORE_BREAK, True: fork.AT_EARLY}
    with plots.picture(out, 10, 3.6) as fig:
        axes = fig.subplots(1, 2, sharey=True)
        for ax, (early, arms) in zip(axes, panels.items()):
            for number, kind in enumerate(("calm", "not calm", "not lost")):
                draw_origins(ax, found, kind, early, arms, number)
            ax.set_xticks(range(len(arms)), [SHOWN.get(arm, arm) for arm in arms])
            ax.set_title("forked at iteration 30" if early else "forked before the break")
        axes[0].set_ylim(-0.05, 1.05)
        axes[0].set_ylabel("share of the forks that is lost")
        fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                   title="a line: one run, with eight forks of each arm")
        fig.suptitle(title)


def draw_origins(ax, found, kind, early, arms, number):
    columns = [chosen(found, kind, early, arm) for arm in arms]
    label = SHOWN.get(kind + " origin", kind)
    for k, forks in enumerate(zip(*columns)):
        shares = [np.mean(some.lost) for some in forks]
        # A little to the side, so that lines do not cover each other.
        x = np.arange(len(arms)) + 0.06 * (number - 1) + 0.015 * k
        ax.plot(x, shares, "o-", color=f"C{number}", lw=0.8, alpha=0.8, label=label)
        label = None  # one entry for each kind
