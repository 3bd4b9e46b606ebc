"""What tutorial.ipynb imports: the checks as a student meets them, pictures, and the runs whose
curves it shows.

    gae = use("gae", gae)       prints Yours / Spec. It returns yours if it passes, else the shipped
                                function
    earned("gae")               the graded cells end with this: an error where it did not pass
    python course/course.py     trains the runs that course/tutorial.jsonl lacks (ten minutes for
                                all)
"""
import contextlib
import inspect
import io
import json
import os
import re
import tempfile
import zlib
from html import escape
from pathlib import Path
from unittest import mock

import numpy as np

# First, because the project is found by it.
from checks import COURSE, check, envs, mutant
from exercises import BUGS, EXERCISES

import plots
import ragen_mini

LOGS = COURSE / "tutorial.jsonl"

# ---------------------------------------------------------------------------- used by the notebook
RESULTS = {}  # name: did it pass?
SHIPPED = {}  # as the program began
for name, exercise in EXERCISES.items():
    shipped = getattr(ragen_mini, name, None)
    SHIPPED[name] = shipped if callable(shipped) else exercise.solution  # `settings` is a module
SHIPPED["outcomes"] = ragen_mini.envs.FrozenLake.outcomes
SHIPPED["yardsticks"] = ragen_mini.envs.yardsticks


def use(name, answer):
    exercise = EXERCISES[name]
    # A lecturer sets it for `nbgrader autograde`. Where there is none, its number is 0, and no
    # hidden cases are checked.
    secret = os.environ.get("HIDDEN_CHECKS", "")
    cases = exercise.cases(zlib.crc32(secret.encode()))
    problem = check(exercise, answer, cases)
    if answer is SHIPPED[name]:
        problem = ("this is the shipped one. Run the cell with an answer of your own, then this "
                   "one")
    if problem and has_the_bug(name, answer):
        problem = "the bug is still there"  # no numbers: they would say where
    RESULTS[name] = not problem
    if problem:
        print(f"{name}: {problem}\n  (Further down the shipped one is used.)")
        return SHIPPED[name]
    print(f"{name}: right in every case ({len(cases)}). Yours is used from here on.")
    return answer


def has_the_bug(name, answer):
    if name not in BUGS or not inspect.isfunction(answer):
        return False
    _, wrong = BUGS[name]
    with contextlib.suppress(OSError):  # it was not written in a cell
        code = inspect.getsource(answer)
        return wrong in re.sub("#.*", "", code)
    return False


def passed(name):
    return RESULTS.get(name, False)


class NoPoints(AssertionError):
    def _render_traceback_(self):  # what Jupyter prints: one line, no traceback
        return [f"NoPoints: {self}"]


def earned(name, good=True):
    """The graded cells end with this: an error means no points."""
    RESULTS[name] = passed(name) and good
    if not passed(name):
        raise NoPoints(f"none of the {EXERCISES[name].points:g} yet, see above")
    print(f"{EXERCISES[name].points:g} of {EXERCISES[name].points:g} points")


def learned(rows):
    """Is success after the run above that before it, by more than chance? Then the 95% intervals do
    not touch.
    """
    if not passed("settings"):
        print("These were the shipped settings: repair yours.")
        return False
    evals = [success for row in rows for success in row.get("eval", {}).values()]
    if len(evals) < 2:
        print("success was not measured before and after")
        return False
    before, after = evals[0], evals[-1]
    print("success before", plots.with_interval(before, 256), "with its 95% interval")
    print("success after ", plots.with_interval(after, 256))
    if gained(before, after):
        print("The intervals do not touch: it has grown.")
        return True
    print("It has not grown by more than chance may do.")
    return False


def gained(before, after, levels=256):
    _, most_before = plots.interval(before, levels)
    least_after, _ = plots.interval(after, levels)
    return least_after > most_before


def score():
    """A table of all points of the visible checks."""
    total, possible = 0, 0
    for name, exercise in EXERCISES.items():
        points = exercise.points * passed(name)
        print(f"{points:4g} of {exercise.points:<4g} {exercise.title}")
        total += points
        possible += exercise.points
    print(f"{total:4g} of {possible:g}")


# ---------------------------------------------------------------------------- pictures, as tables
SQUARES = {"#": "#555", "_": "#f4f4f4", "O": "#ffd9a0", "X": "#c07a2c",
           "√": "#8fd18f", "G": "#8fd18f", "P": "#9fc5ff", "S": "#9fc5ff"}
CELL = "<td style='background:{};padding:2px 5px;text-align:center;white-space:nowrap'>{}</td>"
# Black on white, also in a dark theme.
TABLE = ("<table style='font-size:{}px;margin:0 0 8px 0;background:#fff;color:#111'>{}</table>")


def html(text):  # -> shown by the notebook
    from IPython.display import HTML
    return HTML(text)


def table(rows, size):  # rows of (colour, text)
    lines = []
    for row in rows:
        cells = [CELL.format(*cell) for cell in row]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return TABLE.format(size, "".join(lines))


def board(env):
    """The picture of an environment in colours, beside the text that the program sends."""
    picture = env.render()
    rows = []
    for line in picture.splitlines():
        rows.append([(SQUARES.get(symbol, "#fff"), symbol) for symbol in line.split()])
    task = env.instruction.replace(". ", ".\n")
    text = f"<pre style='margin-left:40px'>{task}\n\n{picture}</pre>"
    return html(f"<div style='display:flex'>{table(rows, 20)}{text}</div>")


def tint(x, most):  # -> red below 0, green above, paler near 0, which has no colour
    if x == 0:
        return ""
    strength = 0.15 + 0.7 * abs(x) / most
    hue = "40,160,60" if x > 0 else "210,50,50"
    return f"rgba({hue},{strength:.2f})"


def show_episode(traj, tok, width=16, **rows):
    """An episode token by token, blue where the model wrote. Below it are its numbers, a row for
    each list in `rows`.
    """
    lines = []
    for first in range(0, len(traj.ids), width):
        part = range(first, min(first + width, len(traj.ids)))
        tokens = [("", "token")]
        for t in part:
            word = escape(tok.decode([traj.ids[t]])).replace("\n", "\\n")
            tokens.append(("#bcd8ff" if traj.mask[t] else "#eee", word))
        block = [tokens]
        if any(traj.mask[t] for t in part):
            for name, values in rows.items():
                block.append([("", name), *number_cells(values, part, traj.mask)])
        lines.append(table(block, 11))
    return html("".join(lines))


def number_cells(values, part, mask):
    most = max(map(abs, values))
    cells = []
    for t in part:
        cells.append((tint(values[t], most), f"{values[t]:.2f}") if mask[t] else ("", ""))
    return cells


def page(file):
    """A page of its own, such as the X-ray, inside the notebook."""
    text = escape(Path(file).read_text())
    style = "width='100%' height='480' style='border:0'"
    return html(f"<div><iframe srcdoc='{text}' {style}></iframe></div>")


# --------------------------------------------------------------------------------- pictures of runs
def image(draw, *args):  # draw: a function of plots.py, which takes runs and a file
    from IPython.display import Image
    runs, *others = args
    picture = io.BytesIO()
    draw(runs, picture, *others)
    return Image(picture.getvalue())


def watch(row, trajs, models, cfg):
    """For rm.train(cfg, callback=watch): the curves so far, every five iterations.

    A picture takes as long as an iteration of a small model.
    """
    from IPython.display import clear_output, display
    i = row["iteration"]
    if i == 0 or i % 5 and i < cfg.iterations:
        return
    logged = plots.load(cfg.out)  # all rows but this one
    run = plots.Run(logged.config, logged.rows + [row])
    picture = image(plots.curves, {"this run": run}, {"": ("eval", "reward", "valid")})
    clear_output(wait=True)
    display(picture)


def show_online_k():
    """The paper's Figure 10 with `tiny`: StarPO-S on Sokoban, three or four seeds for each k."""
    return image(plots.online_k, online_k_runs())


def online_k_runs():  # -> {name: Run}, of which only the evaluations are there
    runs = {}
    for line in Path(COURSE, "online_k.jsonl").read_text().splitlines():
        packed = json.loads(line)
        runs[packed["run"]] = plots.Run(packed["config"], packed["rows"])
    return runs


def series(config, rows, column):  # "eval": success in the environment of the training
    """-> iterations, values"""
    return plots.Run(config, rows).series(f"eval {config['env']}" if column == "eval" else column)


def draw_runs(runs, columns):  # runs: {label: (config, rows)}
    import matplotlib.pyplot as plt
    size = (3 * len(columns), 2.5)
    fig = plt.figure(figsize=size, layout="constrained")
    for place, column in enumerate(columns, 1):
        ax = fig.add_subplot(1, len(columns), place)
        for style, label in zip(("-o", "--s"), runs):
            x, y = series(*runs[label], column)
            ax.plot(x, y, style if len(x) < 60 else style.rstrip("os"), ms=2.5, lw=1, label=label)
        finish_panel(ax, column)
        if place == 1 and len(runs) > 1:
            ax.legend(fontsize=8)
    plt.show()


def finish_panel(ax, column):
    values = np.concatenate([line.get_ydata() for line in ax.lines])
    if column == "grad_norm" and 0 < 10 * values.min() < values.max():
        ax.set_yscale("log")  # which has no place for 0
        ax.yaxis.set_major_formatter("{x:g}")
    if column in ("eval", "success", "valid"):
        ax.set_ylim(-0.02, 1.02)
    title = "success (evaluation)" if column == "eval" else column
    ax.set_title(title + " (log)" * (ax.get_yscale() == "log"), fontsize=9)
    ax.set_xlabel("iteration", fontsize=8)


def show_collapse(band=(130, 145)):
    """The shipped collapse: medians of five iterations, and half to twice that of the band."""
    import matplotlib.pyplot as plt
    rows = json.loads(Path(COURSE, "collapse.jsonl").read_text())["rows"]
    columns = ("entropy", "grad_norm", "reward_std", "valid")
    fig, axes = plt.subplots(1, len(columns), figsize=(12, 2.6), layout="constrained")
    for ax, column in zip(axes, columns):
        y = np.array([row.get(column, 0) for row in rows])  # without an update no gradient
        usual = np.median(y[band[0]:band[1] + 1])
        windows = np.lib.stride_tricks.sliding_window_view(y[1:], 5)
        ax.axhspan(usual / 2, 2 * usual, color="tab:green", alpha=0.15)
        ax.axvspan(*band, color="0.85")
        ax.plot(range(5, len(rows)), np.median(windows, axis=1), lw=1)
        finish_panel(ax, column)
        ax.set_xlim(100, len(rows))
    plt.show()


# ---------------------------------------------------------------------- runs of one's own, shipped
def train_briefly(functions, **settings):  # functions: {name in ragen_mini: what takes its place}
    """-> config, rows"""
    usual = dict(model="tiny", device="cpu", eval_every=0)
    quiet = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, quiet:
        with mock.patch.dict(vars(ragen_mini), functions):
            cfg = ragen_mini.Config(**usual | settings, out=f"{folder}/run")
            rows, _ = ragen_mini.train(cfg)
    return cfg, rows


def bandit_runs(seeds=(0, 1, 2), **changes):  # -> (seeds, iterations), success in training
    """changes: settings, and functions of ragen_mini under their names."""
    functions = {name: x for name, x in changes.items() if callable(x)}
    settings = {name: x for name, x in changes.items() if name not in functions}
    unknown = functions.keys() - vars(ragen_mini).keys()
    assert not unknown, f"nothing would change: ragen_mini has no {', '.join(unknown)}"
    found = []
    for seed in seeds:
        cfg, rows = train_briefly(functions, **dict(env="bandit", seed=seed) | settings)
        success = [row["success"] for row in rows[1:]]
        # Where nothing is learned any more, a run ends early. It would have stayed as it is.
        found.append(success + success[-1:] * (cfg.iterations - len(success)))
    return np.array(found)


RUNS = {  # name: the bug, settings
    "right, ppo": (None, dict(algo="ppo")),
    "right, grpo": (None, dict(algo="grpo")),
    "returns": ("returns", dict(algo="grpo")),
    "compute_advantages": ("compute_advantages", dict(algo="ppo")),
    "sample": ("sample", dict(algo="grpo")),
    "take_turn": ("take_turn", dict(algo="ppo"))}
for seed in range(8):
    for norm in ("mean", "std"):  # of Exercise 15
        settings = dict(env="bandit", algo="grpo", adv_norm=norm, seed=seed)
        RUNS[f"bandit, {norm}, {seed}"] = (None, settings)
PACKED = ("iteration", "eval", "success", "reward_std", "entropy", "grad_norm", "value_loss",
          "valid")


def shipped_runs():  # -> {name: (config, rows)}
    runs = {}
    if LOGS.exists():
        for line in LOGS.read_text().splitlines():
            packed = json.loads(line)
            runs[packed["run"]] = packed["config"], packed["rows"]
    return runs


def train_run(run, **changes):  # -> config, rows
    bug, settings = RUNS[run]
    wrong = {}
    if bug:
        # It is made among copies of the names, and looks up the others there as they are now.
        names = dict(vars(ragen_mini))
        wrong[bug] = mutant(EXERCISES[bug].solution, *BUGS[bug], names=names)
    usual = dict(env="sokoban", iterations=20, eval_every=5)
    cfg, rows = train_briefly(wrong, **usual | settings | changes)
    rows = [{name: row[name] for name in PACKED if name in row} for row in rows]
    return {"env": cfg.env}, rows


def train_missing():
    for run in RUNS:
        if run not in shipped_runs():
            config, rows = train_run(run)
            with open(LOGS, "a") as file:
                file.write(json.dumps({"run": run, "config": config, "rows": rows}) + "\n")


if __name__ == "__main__":
    train_missing()
    print(f"all runs are in {LOGS}. The course itself: tutorial.ipynb")
