"""One episode before training and one after it, in the same level, turn by turn.

    python extras/episode.py RUN            RUN/episode.png, a picture
    python extras/episode.py RUN --gif      RUN/episode.gif, an animation

Nothing is played. The episodes are from RUN/samples.jsonl, which has the first eight levels of
every evaluation. The level is the one whose return gained most. If the eight have lost on average,
it is the one that lost most. Of several, the picture shows a short episode, of two turns if there
is one, and the animation a long one.
"""
import argparse
import contextlib
import json
import re
import sys
import textwrap
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

import envs
import ragen_mini as rm
import runs
from runs import UserError, need

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

# Of the animation:
FRAME = (9, 5.1)  # inches
FRAME_LINE = 18
FRAME_LETTERS = 42
MILLISECONDS = 1800
LAST_MILLISECONDS = 3600


def episode(run, gif=False):  # -> the file that it writes
    run = Path(run).expanduser()
    pairs = first_and_last(samples_of(run))
    if gif:
        out = Path(run, "episode.gif")
        first, *others = images(pairs)
        times = [MILLISECONDS] * len(others) + [LAST_MILLISECONDS]
        first.save(out, save_all=True, append_images=others, duration=times, loop=0)  # 0: for ever
    else:
        out = Path(run, "episode.png")
        draw_picture(pairs).savefig(out, dpi=DPI)
    return out


# --------------------------------------------------------------------------- which episodes to show
def samples_of(run):
    file = Path(run, "samples.jsonl")
    need(Path(run).is_dir(), f"{run} is not the folder of a run.")
    need(file.is_file(), f"{run} has no samples.jsonl. It is no run, or it was trained with "
                         f"--eval-every 0.")
    samples = whole_lines(file)
    need(samples, f"{file} is empty or damaged.")
    env = trained_in(run)
    need(env in (None, samples[0]["env"]),
         f"{file} is from another run, because {run} was trained in {env}.")
    return samples


def whole_lines(file):  # -> samples; a killed run may leave a line that is none
    samples = []
    for line in file.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            sample = json.loads(line)
            whole = (isinstance(sample, dict) and sample.get("turns")
                     and {"iteration", "env", "text"} <= sample.keys())
            if whole:
                samples.append(sample)
    return samples


def trained_in(run):  # -> name of the environment, or None if there is no config.json
    file = Path(run, "config.json")
    if not file.is_file():
        return None
    try:
        return envs.title(json.loads(file.read_text())["env"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} is damaged: {runs.one_line(error)}") from error


def first_and_last(samples):  # -> for each level its sample of the first and the last evaluation
    env = samples[0]["env"]  # extras/elsewhere.py evaluates in others, too
    by_iteration = {}
    for sample in samples:
        if sample["env"] == env:
            by_iteration.setdefault(sample["iteration"], []).append(sample)
            # It need not be the highest, because a run may go on from an older checkpoint.
            latest = sample["iteration"]
    earliest = min(by_iteration)
    need(latest > earliest, "samples.jsonl has only one evaluation, so there is nothing to compare "
                            "with. Train on with --resume, up to the next one.")
    first = by_iteration[earliest]
    last = by_iteration[latest][-8:]  # a resumed run may have evaluated one iteration twice
    pairs = []
    for after in last:
        for before in first:
            if before["turns"][0]["state"] == after["turns"][0]["state"]:
                first.remove(before)  # levels may look alike: a bandit has only two first states
                pairs.append((before, after))
                break
    need(pairs, "The first and the last evaluation have no level in common.")
    return pairs


def return_of(sample):
    return sum(turn["reward"] for turn in sample["turns"])


def worth(sample):
    """The return, but for a bandit what the arm pays on average, since its luck is no skill."""
    arm = re.fullmatch(r"You pulled (.*)\.", last_state(sample))
    if not arm or not sample["env"].startswith("bandit"):
        return return_of(sample)
    outcomes = envs.make(sample["env"]).outcomes(None, arm[1])
    return sum(chance * reward for chance, _, reward, _ in outcomes)


def last_state(sample):  # with it the text ends, before the return
    text, _, _ = sample["text"].rpartition("\nreturn ")
    return text.rpartition("\n\n")[2]


def choose(pairs, long):  # -> the pair to show, and a sentence that says why
    means = [fmean(worth(sample) for sample in samples) for samples in zip(*pairs)]
    gained = means[1] >= means[0]

    def rank(pair):
        before, after = pair
        difference = worth(after) - worth(before)
        turns = len(before["turns"]) + len(after["turns"])
        several = len(after["turns"]) > 1
        return difference if gained else -difference, several, turns if long else -turns

    chosen = max(pairs, key=rank)
    alike = [pair for pair in pairs if rank(pair)[0] == rank(chosen)[0]]
    levels = "1 level" if len(pairs) == 1 else f"{len(pairs)} levels"
    which = "the one that" if len(alike) == 1 else "one of those that"
    # See `worth`.
    measure = " on average" if pairs[0][0]["env"].startswith("bandit") else ""
    why = (f"Of {levels} {which} {'gained' if gained else 'lost'} most{measure} "
           f"(mean return of all: {means[0]:.2f} before, {means[1]:.2f} after).")
    return chosen, why


def key_to(env):  # -> what one must know to read the picture of an environment of ours
    if env not in envs.ENVS:
        return ""
    if env.startswith("bandit"):
        bandit = envs.make(env)
        return (f"{bandit.sure} always pays 0.15, {bandit.risky} pays 1 or 0 (0.25 on average). "
                f"Episodes are compared by these means.")
    if env == "frozenlake":
        return ("P player, O hole, G goal, X player in a hole, √ player at the goal. "
                "A move may slip sideways.")
    told = re.search(r"Symbols: ([^.]*)", envs.make(env).instruction)[1]  # as the model is told
    _wall, _floor, *written = told.replace("you", "player").split(", ")
    return ", ".join(written) + ".\nA move costs 0.1. A box on its target pays 1, the last 10 more."


def when(sample):
    return f"after iteration {sample['iteration']}" if sample["iteration"] else "before training"


# ---------------------------------------------------------------------------------- a state, a turn
def draw_state(ax, state, env, fontsize=10):  # a grid in colours, or words as they are
    ax.set_axis_off()
    rows = rows_of(state)
    if not is_grid(rows):
        ax.text(0, 1, textwrap.fill(state, 18), va="top", transform=ax.transAxes, fontsize=fontsize)
        return
    colours = colours_of(rows, env)
    rgb = np.array([[to_rgb(colours[symbol]) for symbol in row] for row in rows])
    ax.imshow(rgb)
    ax.set_anchor("NW")
    for (y, x), symbol in np.ndenumerate(rows):
        if symbol not in UNWRITTEN:
            ink = "w" if rgb[y, x].mean() < 0.5 else "k"
            ax.text(x, y, symbol, ha="center", va="center", color=ink, fontsize=fontsize,
                    fontweight="bold")
    # White lines between the cells:
    for y in range(1, len(rows)):
        ax.axhline(y - 0.5, color="w", lw=1.5)
    for x in range(1, len(rows[0])):
        ax.axvline(x - 0.5, color="w", lw=1.5)


def rows_of(state):
    return [line.split() for line in state.splitlines()]


def is_grid(rows):  # lines of single symbols, all of one length?
    lengths = {len(row) for row in rows}
    return len(rows) > 1 and len(lengths) == 1 and all(len(x) == 1 for row in rows for x in row)


def colours_of(rows, env):  # -> {symbol: colour}; those of an environment of your own are numbered
    known = COLOURS.get(env, {})
    others = sorted({symbol for row in rows for symbol in row} - known.keys())
    return known | {symbol: f"C{number}" for number, symbol in enumerate(others)}


def words_of(turn, letters):  # -> lines of its thought, lines of its answer
    thought = re.sub(r" ([,.])", r"\1", rm.thought_of(turn))  # tiny puts a blank before each
    answer = turn["answer"].partition("<answer>")[2].partition("</answer>")[0].strip()
    answer = answer or "(no answer)"
    if not turn["valid"]:
        answer = f"invalid: {answer}"
    return (textwrap.wrap(thought, letters, max_lines=3, placeholder=" ..."),
            textwrap.wrap(answer, letters, max_lines=2, placeholder=" ..."))


def put(ax, height, text, **style):  # so many points below the top
    ax.set_axis_off()
    ax.annotate(text, (0, 1), xycoords="axes fraction", xytext=(0, -height),
                textcoords="offset points", va="top", **style)


def write_turn(ax, number, turn):
    thought, answer = words_of(turn, LETTERS)
    put(ax, 0, f"turn {number}", **GREY)
    put(ax, LINE, "\n".join(thought), style="italic")
    put(ax, LINE * (1.3 + len(thought)), "\n".join([*answer, f"reward {turn['reward']:g}"]), **BOLD)


# ---------------------------------------------------------------------------------------- a picture
def draw_picture(pairs):  # -> figure
    (before, after), why = choose(pairs, long=False)
    turns = before["turns"] + after["turns"]
    grids = any(is_grid(rows_of(turn["state"])) for turn in turns)
    most_lines = max(len(thought) + len(answer)
                     for thought, answer in (words_of(turn, LETTERS) for turn in turns))
    # All heights are in inches. A turn has three lines more: its number, its reward, a blank one.
    of_turn = max(1.4 if grids else 0, (most_lines + 3.3) * LINE / 72)
    heights = [of_turn] * max(len(before["turns"]), len(after["turns"]))
    heights.append(of_turn if grids else 0.5)  # the end
    title, caption = 0.3, 0.8
    whole = title + sum(heights) + caption

    fig = Figure(figsize=(9, whole))
    columns = fig.add_gridspec(1, 2, left=0.02, right=0.99, wspace=0.04, top=1 - title / whole,
                               bottom=caption / whole)
    fig.supxlabel(f"{why}\n{key_to(before['env'])}", y=0.1 / whole, va="bottom", fontsize=9)
    draw_column(fig, columns[0], heights, before)
    draw_column(fig, columns[1], heights, after)
    return fig


def draw_column(fig, place, heights, sample):  # turn by turn, downwards
    grid = place.subgridspec(len(heights), 2, width_ratios=[1, 1.7], height_ratios=heights,
                             wspace=0.08, hspace=0.12)
    for row, turn in enumerate(sample["turns"]):
        ax = fig.add_subplot(grid[row, 0])
        draw_state(ax, turn["state"], sample["env"])
        if row == 0:
            ax.set_title(f"{when(sample)}: return {return_of(sample):g}", loc="left", **BOLD)
        write_turn(fig.add_subplot(grid[row, 1]), row + 1, turn)
    draw_state(fig.add_subplot(grid[row + 1, 0]), last_state(sample), sample["env"])
    put(fig.add_subplot(grid[row + 1, 1]), 0, "end", **GREY)


# ------------------------------------------------------------------------------------- an animation
def images(pairs):  # -> list of images: the turns, then the ends
    pair, why = choose(pairs, long=True)
    found = []
    for number in range(max(len(sample["turns"]) for sample in pair) + 1):
        canvas = FigureCanvasAgg(draw_frame(pair, number, why))
        canvas.draw()
        image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        # Few colours make a small file. Without dithering, areas of one colour stay plain.
        found.append(image.quantize(64, dither=Image.Dither.NONE))
    return found


def draw_frame(pair, number, why):  # -> figure: both episodes side by side, in the turn `number`
    width, height = FRAME
    fig = Figure(figsize=FRAME, dpi=DPI)
    title, text, caption = 0.45, 1.6, 0.65
    grid = fig.add_gridspec(2, 2, left=0.03, right=0.99, wspace=0.06, hspace=0.06,
                            top=1 - title / height, bottom=caption / height,
                            height_ratios=[height - title - text - caption, text])
    fig.supxlabel(f"{why}\n{key_to(pair[0]['env'])}", y=0.06 / height, va="bottom", fontsize=9)
    for column, sample in enumerate(pair):
        above, below = (fig.add_subplot(grid[row, column]) for row in range(2))
        above.set_title(when(sample), loc="left", fontsize=13, fontweight="bold")
        turns = sample["turns"]
        if number < len(turns):
            draw_state(above, turns[number]["state"], sample["env"], fontsize=15)
            write_frame(below, f"turn {number + 1}", *words_of(turns[number], FRAME_LETTERS))
        else:
            draw_state(above, last_state(sample), sample["env"], fontsize=15)
            write_frame(below, f"end after turn {len(turns)}", [],
                        [f"return {return_of(sample):g}"])
    return fig


def write_frame(ax, title, thought, answer):
    put(ax, 0, title, fontsize=12, **GREY)
    put(ax, FRAME_LINE, "\n".join(thought), fontsize=12, style="italic")
    put(ax, FRAME_LINE * (1.3 + len(thought)), "\n".join(answer), fontsize=12, fontweight="bold")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--gif", action="store_true", help="an animation")
    args = parser.parse_args()
    with runs.one_line_errors():
        for run in args.runs:
            print(episode(run, args.gif))


if __name__ == "__main__":
    main()
