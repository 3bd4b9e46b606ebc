"""One episode before training and one after it, in the same level, turn by turn.

    python extras/episode.py RUN            RUN/episode.png, a picture
    python extras/episode.py RUN --gif      RUN/episode.gif, an animation

Nothing is played. The episodes are from RUN/samples.jsonl, which has the first eight levels of
every evaluation. The level is the one whose return gained most. If the eight have lost on average,
it is the one that lost most. (On the bandit that is mostly luck.)
"""
import argparse
import json
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from matplotlib import rc_context, rcdefaults
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

import envs
import ragen_mini as rm
from support import errors
from support.errors import need

PLAYER = "#7b4fa3"
LAKE = dict(zip("_OGPX√", ["#dcecf7", "#274b6d", "#f2c14e", PLAYER, "#b3372f", "#5c9f4b"]))
# Wall, floor, target, box, box on target, you, you on target:
ROOM = ["#6b6660", "#f3eee6", "#f1b7a4", "#b57b3a", "#5c9f4b", PLAYER, PLAYER]
SOKOBAN = dict(zip("#_OX√PS", ROOM))
COLOURS = {"frozenlake": LAKE, "sokoban": SOKOBAN, "sokoban_large": SOKOBAN,
           "sokoban_newvocab": dict(zip("W.GBCA@", ROOM))}
# These symbols are told by their colour alone.
UNWRITTEN = "_.#"

DPI = 100
# Of a line of text, in points and in letters:
LINE = 14
LETTERS = 32
BOLD = {"fontsize": 10, "fontweight": "bold"}
GREY = {"color": "0.4"}
# Of an image of the animation. The last one stays for longer.
MILLISECONDS = 1800


def episode(run, gif=False):  # -> the file that it writes
    pair, why = choose(first_and_last(run), long=gif)
    turns = max(len(sample["turns"]) for sample in pair)
    out = Path(run, "episode.gif" if gif else "episode.png").expanduser()
    with rc_context():
        rcdefaults()  # whatever the user's matplotlibrc says
        if gif:
            # Turn by turn, then the end.
            first, *others = [image(draw(pair, why, [row])) for row in range(turns + 1)]
            times = [MILLISECONDS] * turns + [2 * MILLISECONDS]
            first.save(out, save_all=True, append_images=others, duration=times, loop=0)
        else:
            draw(pair, why, range(turns + 1)).savefig(out, dpi=DPI)
    return out


def image(fig):
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    rgb = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    # Few colours make a small file. Without dithering, areas of one colour stay plain.
    return rgb.quantize(64, dither=Image.Dither.NONE)


# --------------------------------------------------------------------------- which episodes to show
def first_and_last(run):  # -> for each level its sample of the first and of the last evaluation
    file = Path(run, "samples.jsonl").expanduser()
    need(file.is_file(), f"{file} is not there. It is made by a run with evaluations.")
    by_iteration = defaultdict(list)
    for line in file.read_text().splitlines():
        sample = json.loads(line)
        by_iteration[sample["iteration"]].append(sample)
    need(len(by_iteration) > 1, f"{file} has only one evaluation, so there is nothing to compare "
                                f"with. Train on with --resume, up to the next one.")
    # All evaluations play the same levels in the same order.
    return list(zip(by_iteration[min(by_iteration)], by_iteration[max(by_iteration)]))


def return_of(sample):
    return sum(turn["reward"] for turn in sample["turns"])


def choose(pairs, long):  # -> the pair to show, and a sentence that says why
    """Of several, the picture shows a short one, of two turns if there is one, and the animation a
    long one.
    """
    before, after = (fmean(map(return_of, samples)) for samples in zip(*pairs))
    sign = 1 if after >= before else -1

    def rank(pair):
        turns = sum(len(sample["turns"]) for sample in pair)
        gain = return_of(pair[1]) - return_of(pair[0])
        return round(sign * gain, 6), len(pair[1]["turns"]) > 1, turns if long else -turns

    why = (f"Of {len(pairs)} levels one of those that {'gained' if sign > 0 else 'lost'} most "
           f"(mean return of all: {before:.2f} before, {after:.2f} after).")
    return max(pairs, key=rank), why


def key_to(env):  # -> what the symbols mean, as the model is told
    instruction = envs.make(env).instruction if env in envs.ENVS else ""
    told = re.search(r"Symbols: ([^.]*\.)", instruction)
    return told[1] if told else ""


# ---------------------------------------------------------------------------------- a state, a turn
def draw_state(ax, state, env):  # a grid in colours, or words as they are
    ax.set_axis_off()
    rows = [line.split() for line in state.splitlines()]
    if not is_grid(rows):
        ax.text(0, 1, textwrap.fill(state, 18), va="top", transform=ax.transAxes, fontsize=10)
        return
    colours = colours_of(rows, env)
    rgb = np.array([[to_rgb(colours[symbol]) for symbol in row] for row in rows])
    ax.imshow(rgb)
    ax.set_anchor("NW")
    for (y, x), symbol in np.ndenumerate(rows):
        if symbol not in UNWRITTEN:
            ink = "w" if rgb[y, x].mean() < 0.5 else "k"
            ax.text(x, y, symbol, ha="center", va="center", color=ink, **BOLD)
    # White lines between the cells:
    for y in range(1, len(rows)):
        ax.axhline(y - 0.5, color="w", lw=1.5)
    for x in range(1, len(rows[0])):
        ax.axvline(x - 0.5, color="w", lw=1.5)


def is_grid(rows):  # lines of single symbols, all of one length?
    lengths = {len(row) for row in rows}
    return len(rows) > 1 and len(lengths) == 1 and all(len(x) == 1 for row in rows for x in row)


def colours_of(rows, env):  # -> {symbol: colour}; those of an environment of your own are numbered
    known = COLOURS.get(env, {})
    others = sorted({symbol for row in rows for symbol in row} - known.keys())
    return known | {symbol: f"C{number}" for number, symbol in enumerate(others)}


def words_of(turn):  # -> lines of its thought, lines of its answer
    thought = re.sub(r" ([,.:])", r"\1", rm.thought_of(turn))  # tiny puts a blank before each
    answer = turn["answer"].partition("<answer>")[2].partition("</answer>")[0].strip()
    answer = answer or "(no answer)"
    if not turn["valid"]:
        answer = f"invalid: {answer}"
    return (textwrap.wrap(thought, LETTERS, max_lines=4, placeholder=" ..."),
            textwrap.wrap(answer, LETTERS, max_lines=2, placeholder=" ..."))


def write_turn(ax, number, turn):
    thought, answer = words_of(turn)
    put(ax, 0, f"turn {number}", **GREY)
    put(ax, LINE, "\n".join(thought), style="italic")
    put(ax, LINE * (1.3 + len(thought)), "\n".join([*answer, f"reward {turn['reward']:g}"]), **BOLD)


def put(ax, height, text, **style):  # so many points below the top
    ax.set_axis_off()
    ax.annotate(text, (0, 1), xycoords="axes fraction", xytext=(0, -height),
                textcoords="offset points", va="top", **style)


# ------------------------------------------------------------------------------------- the picture
def draw(pair, why, rows):  # rows: numbers of turns, and after the last turn the end -> figure
    turns = pair[0]["turns"] + pair[1]["turns"]
    most_lines = max(len(thought) + len(answer) for thought, answer in map(words_of, turns))
    # All heights are in inches. A turn has three lines more: its number, its reward, a blank one.
    of_row = max(1.4, (most_lines + 3.3) * LINE / 72)
    title, caption = 0.3, 0.6
    whole = title + of_row * len(rows) + caption
    fig = Figure(figsize=(9, whole), dpi=DPI)
    columns = fig.add_gridspec(1, 2, left=0.02, right=0.99, wspace=0.04, top=1 - title / whole,
                               bottom=caption / whole)
    for place, sample in zip(columns, pair):
        draw_column(fig, place, sample, rows)
    fig.supxlabel(f"{why}\n{key_to(pair[0]['env'])}", y=0.1 / whole, va="bottom", fontsize=9)
    return fig


def draw_column(fig, place, sample, rows):
    grid = place.subgridspec(len(rows), 2, width_ratios=[1, 1.7], wspace=0.08, hspace=0.12)
    turns = sample["turns"]
    # With the end the text closes, before the return.
    end = sample["text"].rpartition("\nreturn ")[0].rpartition("\n\n")[2]
    for number, row in enumerate(rows):
        if row > len(turns) and len(rows) > 1:
            break  # it has ended before
        left, right = fig.add_subplot(grid[number, 0]), fig.add_subplot(grid[number, 1])
        if number == 0:
            i = sample["iteration"]
            when = f"after iteration {i}" if i else "before training"
            left.set_title(f"{when}: return {return_of(sample):g}", loc="left", **BOLD)
        if row < len(turns):
            draw_state(left, turns[row]["state"], sample["env"])
            write_turn(right, row + 1, turns[row])
        else:
            draw_state(left, end, sample["env"])
            put(right, 0, f"end after turn {len(turns)}", **GREY)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--gif", action="store_true", help="an animation")
    args = parser.parse_args()
    with errors.one_line_errors():
        for run in args.runs:
            print(episode(run, args.gif))


if __name__ == "__main__":
    main()
