"""RUN/episode.png: an episode before training and one after it, in the same level, turn by turn.

    python extras/episode.py RUN

They are from RUN/samples.jsonl, which has the first eight levels of every evaluation. Nothing is played. If these
gained in all, the one is shown that gained most, else the one that lost most; of several, a short one of two turns.
"""
import argparse
import contextlib
import json
import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib.colors
import matplotlib.figure
import numpy as np

import envs
import plots
from envs import need, or_say

LAKE = dict(zip("_OGPX√", ["#dcecf7", "#274b6d", "#f2c14e", "#dcecf7", "#b3372f", "#5c9f4b"]))
ROOM = ["#6b6660", "#f3eee6", "#f1b7a4", "#b57b3a", "#5c9f4b", "#f3eee6", "#f1b7a4"]
SOKOBAN = dict(zip("#_OX√PS", ROOM))  # wall, floor, target, box, box on target, you, you on target
RENAMED = dict(zip("W.GBCA@", ROOM))  # sokoban_newvocab
COLOURS = {"frozenlake": LAKE, "sokoban": SOKOBAN, "sokoban_large": SOKOBAN, "sokoban_newvocab": RENAMED}
LETTERS = 32  # in a line
LINE = 14  # its height in points
BOLD = dict(fontsize=10, fontweight="bold")


def episode(run):  # -> path of the picture
    file = Path(run, "samples.jsonl")
    need(Path(run).is_dir(), f"{run} is not the folder of a run")
    with or_say(f"{file} is damaged"):
        need(file.is_file(), f"{run} has no samples.jsonl: it is no run, or was not evaluated (--eval-every 0)")
        samples = whole_lines(file)
        need(samples, f"{file} is empty or damaged: was it ever evaluated?")
        world = trained_in(run)
        need(world in (None, samples[0]["env"]), f"{file} is of another run: {run} was trained in {world}")
        fig = drawn(first_and_last(samples))
    out = Path(run, "episode.png")
    with or_say(f"cannot write {out}"):
        fig.savefig(out, dpi=100)
    return out


def trained_in(run):  # -> name of its world; None: its settings are missing
    config = Path(run, "config.json")
    if not config.is_file():
        return None
    with or_say(f"{config} is damaged"):
        world = json.loads(config.read_text())["env"]
    need(isinstance(world, str), f"{config} is damaged: env is {world}")
    return envs.title(world)


def whole_lines(file):  # as dicts; a run that was killed while it wrote leaves one that is none
    samples = []
    for line in file.read_text().splitlines():
        with contextlib.suppress(ValueError):
            samples.append(json.loads(line))
    return samples


def drawn(pairs):  # -> figure
    means = [np.mean([worth(sample) for sample in samples]) for samples in zip(*pairs)]
    sign, word = (1, "gained") if means[1] >= means[0] else (-1, "lost")
    measure = " on average" if pairs[0][0]["env"].startswith("bandit") else ""  # see `worth`
    before, after = max(pairs, key=lambda pair: shows_most(pair, sign))
    turns = before["turns"] + after["turns"]
    boards = any(is_board(rows_of(turn["state"])) for turn in turns)
    lines = max(sum(map(len, lines_of(turn))) for turn in turns)
    a_turn = max(1.4 if boards else 0, (lines + 2.3) * LINE / 72)  # all sizes in inches; the turn's number, blank lines
    heights = [a_turn] * max(len(before["turns"]), len(after["turns"])) + [a_turn if boards else 0.5]  # of the end
    above, below = 0.3, 0.8  # title, explanation
    whole = above + sum(heights) + below
    fig = matplotlib.figure.Figure(figsize=(9, whole))
    left, right = fig.add_gridspec(1, 2, left=0.02, right=0.99, wspace=0.04, top=1 - above / whole, bottom=below / whole)
    levels = "1 level" if len(pairs) == 1 else f"{len(pairs)} levels"
    which = (f"Of {levels} the one that {word} most{measure} "
             f"(mean return of all: {means[0]:.2f} before, {means[1]:.2f} after).")
    fig.supxlabel(f"{which}\n{key_to(before['env'])}", y=0.1 / whole, va="bottom", fontsize=9)
    draw(fig, left, heights, before, f"after iteration {before['iteration']}" if before["iteration"] else "before training")
    draw(fig, right, heights, after, f"after iteration {after['iteration']}")
    return fig


def shows_most(pair, sign):  # -> what to compare pairs by
    before, after = pair
    turns = len(after["turns"])
    return sign * (worth(after) - worth(before)), turns > 1, -turns - len(before["turns"])


def key_to(world):  # -> what one must know to read the picture of a world of ours
    if world not in envs.ENVS:
        return ""
    if world.startswith("bandit"):
        bandit = envs.make(world)
        return f"{bandit.sure} always pays 0.15, {bandit.risky} 1 or 0 (0.25 on average). Episodes are compared by these means."
    if world == "frozenlake":
        return "P player, O hole, G goal, X player in a hole, √ player at the goal. A move may slip sideways"
    told = re.search(r"Symbols: ([^.]*)", envs.make(world).instruction)[1]  # as to the model
    _wall, _floor, *written = told.replace("you", "player").split(", ")  # these two are only coloured
    return ", ".join(written) + "\nA move costs 0.1. A box on its target pays 1, the last one 10 more"


def first_and_last(samples):  # -> for each level its sample in the first and in the last evaluation
    world = samples[0]["env"]  # extras/elsewhere.py has others, too
    by_iteration = {}
    for sample in samples:
        if sample["env"] == world:
            of_iteration = by_iteration.setdefault(sample["iteration"], [])
            of_iteration.append(sample)
            latest = sample["iteration"]  # not the highest: a run may go on from an older checkpoint
    earliest = min(by_iteration)
    need(latest > earliest, "samples.jsonl holds one evaluation only: nothing to compare with. Go on (--resume) up to the next")
    first, last = by_iteration[earliest], by_iteration[latest]
    last = last[-8:]  # a run that was resumed may have evaluated twice in one iteration
    pairs = []
    for after in last:
        for before in first:
            if before["turns"][0]["state"] == after["turns"][0]["state"]:
                first.remove(before)  # a bandit has only two states
                pairs.append((before, after))
                break
    need(pairs, "the first and the last evaluation have no level in common")
    return pairs


def draw(fig, place, heights, sample, title):  # turn by turn, downwards; the board, and what was said
    grid = place.subgridspec(len(heights), 2, width_ratios=[1, 1.7], height_ratios=heights, wspace=0.08, hspace=0.12)
    colours = COLOURS.get(sample["env"], {})
    for row, turn in enumerate(sample["turns"]):
        ax = fig.add_subplot(grid[row, 0])
        draw_board(ax, turn["state"], colours)
        if row == 0:
            ax.set_title(f"{title}: return {R_of(sample):g}", loc="left", **BOLD)
        write(fig.add_subplot(grid[row, 1]), row + 1, turn)
    end = fig.add_subplot(grid[row + 1, 0])
    draw_board(end, last_state(sample), colours)
    put(fig.add_subplot(grid[row + 1, 1]), 0, "end", color="0.4")


def R_of(sample):
    return sum(turn["reward"] for turn in sample["turns"])


def worth(sample):  # what it earned; of a bandit, what its arm pays on average
    arm = re.fullmatch(r"You pulled (.*)\.", last_state(sample))
    if not arm or not sample["env"].startswith("bandit"):
        return R_of(sample)
    world = envs.make(sample["env"])
    mean = 0.0
    for p, _, reward, _ in world.outcomes(None, arm[1]):
        mean += p * reward
    return mean


def last_state(sample):  # what the text ends with, before its return
    text, _, _ = sample["text"].rpartition("\nreturn ")
    return text.rpartition("\n\n")[2]


def draw_board(ax, state, colours):
    ax.set_axis_off()
    rows = rows_of(state)
    if not is_board(rows):
        ax.text(0, 1, textwrap.fill(state, 18), va="top", transform=ax.transAxes)
        return
    cells = np.array(rows)
    others = sorted(set(cells.flat) - colours.keys())  # of a world of your own
    for number, symbol in enumerate(others):
        colours = colours | {symbol: f"C{number}"}
    rgb = np.zeros((*cells.shape, 3))
    for place, symbol in np.ndenumerate(cells):
        rgb[place] = matplotlib.colors.to_rgb(colours[symbol])
        if symbol not in "_.#":
            write_symbol(ax, place, symbol, dark=rgb[place].mean() < 0.5)
    ax.imshow(rgb)
    ax.set_anchor("NW")
    height, width = cells.shape
    for y in range(1, height):  # white lines between the cells
        ax.axhline(y - 0.5, color="w", lw=1.5)
    for x in range(1, width):
        ax.axvline(x - 0.5, color="w", lw=1.5)


def write_symbol(ax, place, symbol, dark):
    y, x = place
    ink = "w" if dark else "k"
    ax.text(x, y, symbol, ha="center", va="center", color=ink, **BOLD)


def rows_of(state):
    return [line.split() for line in state.splitlines()]


def is_board(rows):  # lines of single symbols, all of one length?
    lengths = {len(row) for row in rows}
    symbols = [symbol for row in rows for symbol in row]
    return len(rows) > 1 and len(lengths) == 1 and max(map(len, symbols)) == 1


def put(ax, line, text, **style):  # below so many lines
    ax.set_axis_off()
    ax.annotate(text, (0, 1), xycoords="axes fraction", xytext=(0, -LINE * line), textcoords="offset points", va="top", **style)


def lines_of(turn):  # -> lines of its thought; of its answer and reward
    thought = re.sub(r" ([,.])", r"\1", plots.thought_of(turn))  # tiny writes a blank before each
    thought = textwrap.wrap(thought, LETTERS, max_lines=3, placeholder=" ...")
    said = turn["answer"].partition("<answer>")[2].partition("</answer>")[0].strip() or "(no answer)"
    if not turn["valid"]:
        said = f"invalid: {said}"
    return thought, [*textwrap.wrap(said, LETTERS, max_lines=2, placeholder=" ..."), f"reward {turn['reward']:g}"]


def write(ax, number, turn):  # what the model said, and what it earned
    thought, answer = lines_of(turn)
    put(ax, 0, f"turn {number}", color="0.4")
    put(ax, 1, "\n".join(thought), style="italic")
    put(ax, 1.3 + len(thought), "\n".join(answer), **BOLD)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    for run in parser.parse_args().runs:
        print(episode(run))
