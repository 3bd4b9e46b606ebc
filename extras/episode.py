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
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    need(samples, f"{file} is empty: it was never evaluated")
    before, after = first_and_last(samples)
    height = max(len(before["turns"]), len(after["turns"])) + 1
    fig = matplotlib.figure.Figure(figsize=(10, 1.45 * height + 0.4), layout="constrained")
    grid = fig.add_gridspec(height, 4, width_ratios=[1, 1.7, 1, 1.7])  # board, words; board, words
    draw(fig, grid[:, :2].subgridspec(height, 2, width_ratios=[1, 1.7]), before, "before")
    draw(fig, grid[:, 2:].subgridspec(height, 2, width_ratios=[1, 1.7]), after, f"after iteration {after['iteration']}")
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


def draw(fig, grid, sample, title):  # turn by turn, downwards
    colours = COLOURS.get(sample["env"], {})
    for row, turn in enumerate(sample["turns"]):
        ax = fig.add_subplot(grid[row, 0])
        draw_board(ax, turn["state"], colours)
        if row == 0:
            ax.set_title(f"{title}: return {sample['R']:g}", fontsize=11, fontweight="bold", loc="left")
        write(fig.add_subplot(grid[row, 1]), turn)
    draw_board(fig.add_subplot(grid[row + 1, 0]), last_state(sample), colours)


def last_state(sample):  # what the text ends with, before its return
    return sample["text"].rsplit("\nreturn ", 1)[0].rsplit("\n\n", 1)[1]


def draw_board(ax, state, colours):
    ax.set_axis_off()
    rows = [line.split() for line in state.splitlines()]
    if not is_board(rows):
        ax.text(0, 1, textwrap.fill(state, 22), va="top", fontsize=10, transform=ax.transAxes)
        return
    cells = np.array(rows)
    others = sorted(set(cells.flat) - colours.keys())  # of a world of your own
    for number, symbol in enumerate(others):
        colours = colours | {symbol: f"C{number}"}
    rgb = np.zeros((*cells.shape, 3))
    for place, symbol in np.ndenumerate(cells):
        rgb[place] = matplotlib.colors.to_rgb(colours[symbol])
        if symbol not in "_.#":
            y, x = place
            ink = "k" if rgb[place].mean() > 0.5 else "w"
            ax.text(x, y, symbol, ha="center", va="center", fontsize=10, fontweight="bold", color=ink)
    ax.imshow(rgb)
    height, width = cells.shape
    ax.hlines(np.arange(0.5, height - 1), -0.5, width - 0.5, color="w", lw=1.5)
    ax.vlines(np.arange(0.5, width - 1), -0.5, height - 0.5, color="w", lw=1.5)


def is_board(rows):  # lines of single symbols, all of one length?
    one_symbol = all(len(symbol) == 1 for row in rows for symbol in row)
    return len(rows) > 1 and one_symbol and len({len(row) for row in rows}) == 1


def write(ax, turn):  # what the model said, and what it earned
    ax.set_axis_off()
    thought = textwrap.shorten(plots.thought_of(turn), 4 * WORDS, placeholder=" ...")
    ax.text(0, 1, textwrap.fill(thought, WORDS), va="top", fontsize=10, style="italic", transform=ax.transAxes)
    result = "(no valid answer)"
    if turn["valid"]:
        said = turn["answer"].partition("<answer>")[2].partition("</answer>")[0]
        result = textwrap.shorten(said, WORDS, placeholder=" ...")
    ax.text(0, 0.02, f"{result}\nreward {turn['reward']:g}", va="bottom", fontsize=10, fontweight="bold",
            transform=ax.transAxes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    for run in parser.parse_args().runs:
        print(episode(run))
