"""RUN/episode.png: an episode before training and one after it, in the same level, turn by turn.

    python extras/episode.py RUN

They are from RUN/samples.jsonl, which has the first two levels of every evaluation: that one of the two is shown whose
return has changed more. Nothing is played.
"""
import argparse
import json
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib.colors
import matplotlib.figure
import numpy as np

import plots
from envs import need

LAKE = {"_": "#dcecf7", "O": "#274b6d", "G": "#f2c14e", "P": "#dcecf7", "X": "#b3372f", "√": "#5c9f4b"}
SOKOBAN = {"#": "#6b6660", "_": "#f3eee6", "O": "#f1b7a4", "X": "#b57b3a", "√": "#5c9f4b", "P": "#f3eee6", "S": "#f1b7a4"}
RENAMED = dict(zip("W.GBCA@", SOKOBAN.values()))  # sokoban_newvocab
COLOURS = {"frozenlake": LAKE, "sokoban": SOKOBAN, "sokoban_large": SOKOBAN, "sokoban_newvocab": RENAMED}
WORDS = 34  # letters in a line


def episode(run):  # -> path of the picture
    file = Path(run, "samples.jsonl")
    need(file.is_file(), f"{run} has no samples.jsonl: it was never evaluated")
    before, after = first_and_last([json.loads(line) for line in file.read_text().splitlines()])
    shown = {f"before: return {before['R']:g}": before, f"after iteration {after['iteration']}: return {after['R']:g}": after}
    height = max(len(sample["turns"]) for sample in shown.values()) + 1
    fig = matplotlib.figure.Figure(figsize=(10, 1.45 * height + 0.4), layout="constrained")
    grid = fig.add_gridspec(height, 4, width_ratios=[1, 1.7, 1, 1.7])
    for column, (title, sample) in zip((0, 2), shown.items()):
        boards = [turn["state"] for turn in sample["turns"]] + [last_state(sample)]
        for row, board in enumerate(boards):
            ax = fig.add_subplot(grid[row, column])
            draw_board(ax, board, COLOURS.get(sample["env"], {}))
            if row == 0:
                ax.set_title(title, fontsize=11, fontweight="bold", loc="left")
        for row, turn in enumerate(sample["turns"]):
            write(fig.add_subplot(grid[row, column + 1]), turn)
    out = Path(run, "episode.png")
    fig.savefig(out, dpi=100)
    return out


def first_and_last(samples):  # -> the samples of one level, in the first and in the last evaluation
    world = samples[0]["env"]  # extras/elsewhere.py has others, too
    by_iteration = {}
    for sample in samples:
        if sample["env"] == world:
            by_iteration.setdefault(sample["iteration"], []).append(sample)
    first, last = by_iteration[min(by_iteration)], by_iteration[max(by_iteration)]
    return max(zip(first, last), key=lambda pair: abs(pair[1]["R"] - pair[0]["R"]))


def last_state(sample):  # what the text ends with, before its return
    return sample["text"].rsplit("\nreturn ", 1)[0].rsplit("\n\n", 1)[1]


def draw_board(ax, state, colours):
    ax.set_axis_off()
    rows = [line.split() for line in state.splitlines()]
    is_board = len(rows) > 1 and all(len(row) == len(rows[0]) and max(map(len, row)) == 1 for row in rows)
    if not is_board:
        ax.text(0, 1, textwrap.fill(state, 22), va="top", fontsize=10, transform=ax.transAxes)
        return
    others = sorted({symbol for row in rows for symbol in row} - colours.keys())  # of a world of your own
    colours = colours | {symbol: f"C{number}" for number, symbol in enumerate(others)}
    ax.imshow([[matplotlib.colors.to_rgb(colours[symbol]) for symbol in row] for row in rows])
    ax.hlines(np.arange(0.5, len(rows) - 1), -0.5, len(rows[0]) - 0.5, color="w", lw=1.5)
    ax.vlines(np.arange(0.5, len(rows[0]) - 1), -0.5, len(rows) - 0.5, color="w", lw=1.5)
    for (y, x), symbol in np.ndenumerate(np.array(rows)):
        light = np.mean(matplotlib.colors.to_rgb(colours[symbol])) > 0.5
        if symbol not in "_.#":
            ax.text(x, y, symbol, ha="center", va="center", fontsize=10, fontweight="bold", color="k" if light else "w")


def write(ax, turn):  # what the model said, and what it earned
    ax.set_axis_off()
    thought = textwrap.fill(textwrap.shorten(plots.thought_of(turn), 4 * WORDS, placeholder=" ..."), WORDS)
    ax.text(0, 1, thought, va="top", fontsize=10, style="italic", transform=ax.transAxes)
    said = turn["answer"].partition("<answer>")[2].partition("</answer>")[0].strip()
    result = textwrap.shorten(said, WORDS, placeholder=" ...") if turn["valid"] else "(no valid answer)"
    ax.text(0, 0.02, f"{result}\nreward {turn['reward']:g}", va="bottom", fontsize=10, fontweight="bold",
            transform=ax.transAxes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    for run in parser.parse_args().runs:
        print(episode(run))
