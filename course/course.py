"""What tutorial.ipynb imports: the checks as a student meets them, pictures, and the spoilt runs of the bug hunt.

    gae = use("gae", gae)       prints Yours / Spec; returns yours if it passes, else the shipped function
    earned("gae")               the graded cells end with this: an error where it did not pass
    python course/course.py     trains the spoilt runs that course/tutorial.jsonl lacks (ten minutes for all)
"""
import contextlib
import io
import json
import os
import tempfile
from html import escape
from pathlib import Path

import plots
import ragen_mini
from checks import COURSE, check, envs, mutant
from exercises import BUGS, EXERCISES

SPOILT = COURSE / "tutorial.jsonl"

# -------------------------------------------------------------------------------------- used by the notebook
RESULTS = {}  # name: did it pass?
# as the program began
SHIPPED = {name: getattr(ragen_mini, name, exercise.solution) for name, exercise in EXERCISES.items()}
SHIPPED["outcomes"] = ragen_mini.envs.FrozenLake.outcomes
SHIPPED["yardsticks"] = ragen_mini.envs.yardsticks


def use(name, answer):
    exercise = EXERCISES[name]
    cases = exercise.cases(int(os.environ.get("HIDDEN_CHECKS") or 0))  # a lecturer sets it for `nbgrader autograde`
    problem = check(exercise, answer, cases)
    if answer is SHIPPED[name] and RESULTS.get(name) is False:
        problem = "this is the shipped one. Run the cell with your answer again, then this one"
    RESULTS[name] = not problem
    if problem:
        print(f"{name}: {problem}\n  (Further down the shipped one is used.)")
        return SHIPPED[name]
    print(f"{name}: right in every case ({len(cases)}). Yours is used from here on.")
    return answer


def passed(name):
    return RESULTS.get(name, False)


class NoPoints(AssertionError):
    def _render_traceback_(self):  # what Jupyter prints: one line, no traceback
        return [f"NoPoints: {self}"]


def earned(name, good=True):
    """The graded cells end with this: an error means no points."""
    if not (passed(name) and good):
        raise NoPoints(f"none of the {EXERCISES[name].points:g} yet, see above")
    print(f"{EXERCISES[name].points:g} of {EXERCISES[name].points:g} points")


def quietly(function, *args):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return function(*args)


def learned(rows):
    """Is success after the run above that before it, by more than chance? The 95% intervals do not touch."""
    evals = [list(row["eval"].values())[0] for row in rows if "eval" in row]
    if len(evals) < 2:
        print("success was not measured before and after")
        return False
    for when, success in (("before", evals[0]), ("after", evals[-1])):
        print("success {:6} {:.2f}, 95% interval {:.2f} to {:.2f}".format(when, success, *envs.interval(success, 256)))
    grown = gained(evals[0], evals[-1])
    print("The intervals do not touch: it has grown." if grown else "It has not grown by more than chance may do.")
    return grown


def gained(before, after, levels=256):
    return envs.interval(after, levels)[0] > envs.interval(before, levels)[1]


def score():
    """A table of all points of the visible checks."""
    for name, exercise in EXERCISES.items():
        print(f"{exercise.points * passed(name):4g} of {exercise.points:<4g} {exercise.title}")
    total = sum(exercise.points * passed(name) for name, exercise in EXERCISES.items())
    print(f"{total:4g} of {sum(exercise.points for exercise in EXERCISES.values()):g}")


# ------------------------------------------------------------------------------------ pictures for the notebook
SQUARES = {"#": "#555", "_": "#f4f4f4", "O": "#ffd9a0", "X": "#c07a2c",
           "√": "#8fd18f", "G": "#8fd18f", "P": "#9fc5ff", "S": "#9fc5ff"}


def html(text):  # -> shown by the notebook
    from IPython.display import HTML
    return HTML(text)


def table(rows, size):  # rows of (text, colour)
    lines = []
    for row in rows:
        lines.append("<tr>" + "".join(f"<td style='background:{colour};padding:2px 5px;text-align:center;"
                                      f"white-space:nowrap'>{text}</td>" for text, colour in row))
    return f"<table style='font-size:{size}px;margin:0 0 8px 0'>{''.join(lines)}</table>"


def board(env):
    """The picture of a world in colours, beside the text that the program sends."""
    rows = [[(symbol, SQUARES.get(symbol, "#fff")) for symbol in line.split()] for line in env.render().splitlines()]
    task = env.instruction.replace(". ", ".\n")
    text = f"<pre style='margin-left:40px'>{task}\n\n{env.render()}</pre>"
    return html(f"<div style='display:flex'>{table(rows, 20)}{text}</div>")


def tint(x, most):  # -> red below 0, green above, paler near 0
    strength = 0.15 + 0.7 * abs(x) / most if x else 0
    return f"rgba({'40,160,60' if x > 0 else '210,50,50'},{strength:.2f})"


def show_episode(traj, tok, width=16, **rows):
    """An episode token by token, blue where the model wrote; below it its numbers, a row for each list in `rows`."""
    words = [escape(tok.decode([i])).replace("\n", "\\n") for i in traj.ids]
    blocks = []
    for first in range(0, len(words), width):
        part = range(first, min(first + width, len(words)))
        block = [[("token", "")] + [(words[t], "#bcd8ff" if traj.mask[t] else "#eee") for t in part]]
        for name, values in rows.items() if any(traj.mask[first:first + width]) else ():
            most = max(map(abs, values))
            shown = [(f"{values[t]:.2f}", tint(values[t], most)) if traj.mask[t] else ("", "") for t in part]
            block.append([(name, "")] + shown)
        blocks.append(table(block, 11))
    return html("".join(blocks))


def page(file):
    """A page of its own, such as the X-ray, inside the notebook."""
    text = escape(Path(file).read_text())
    return html(f"<div><iframe srcdoc='{text}' width='100%' height='480' style='border:0'></iframe></div>")


def watch(row, trajs, batches, models, cfg):
    """For rm.train(cfg, watch=watch): the curves so far, every five iterations."""
    from IPython.display import Image, clear_output, display
    i = row["iteration"]
    if i == 0 or i % 5 and i < cfg.iterations:  # a picture takes as long as an iteration of a small model
        return
    logged = plots.load(cfg.out)  # all rows but this one
    run = plots.Run(logged.config, logged.rows + [row])
    picture = io.BytesIO()
    plots.dashboard({"this run": run}, picture, metrics=["reward", "entropy"], per_row=3)
    clear_output(wait=True)
    display(Image(picture.getvalue()))


def series(config, rows, column):  # -> iterations, values; "eval": success in the world of the training
    return plots.Run(config, rows).series(f"eval {config['env']}" if column == "eval" else column)


def draw_runs(runs, columns, band=None):  # runs: {label: (config, rows)}
    import matplotlib.pyplot as plt
    _, axes = plt.subplots(1, len(columns), figsize=(3 * len(columns), 2.5), layout="constrained")
    for ax, column in zip(axes, columns):
        for style, (label, run) in zip(("-o", "--s"), runs.items()):
            ax.plot(*series(*run, column), style, ms=2.5, label=label)
        if band:
            ax.axvspan(*band, color="0.9")
        if column == "grad_norm" and all((line.get_ydata() > 0).all() for line in ax.lines):
            ax.set_yscale("log")  # which has no place for 0
        if column in ("eval", "success", "valid"):
            ax.set_ylim(-0.02, 1.02)
        ax.set_title("success on held-out levels" if column == "eval" else column, fontsize=9)
        ax.set_xlabel("iteration", fontsize=8)
    if len(runs) > 1:
        axes[0].legend(fontsize=8)
    plt.show()


# --------------------------------------------------------------------------- the spoilt runs of the bug hunt
RUNS = {  # name: the bug, the algorithm
    "right, ppo": (None, "ppo"), "right, grpo": (None, "grpo"), "returns": ("returns", "grpo"),
    "compute_advantages": ("compute_advantages", "ppo"), "sample": ("sample", "ppo"), "take_turn": ("take_turn", "ppo")}
PACKED = ("iteration", "eval", "success", "reward_std", "entropy", "grad_norm", "value_loss", "valid")


def spoilt_runs():  # -> {name: (config, rows)}
    packed = [json.loads(line) for line in SPOILT.read_text().splitlines()] if SPOILT.exists() else []
    return {line["run"]: (line["config"], line["rows"]) for line in packed}


def train_missing(folder):
    for run, (bug, algo) in RUNS.items():
        if run in spoilt_runs():
            continue
        right = {name: getattr(ragen_mini, name) for name in BUGS}
        if bug:
            mutant(right[bug], *BUGS[bug], names=vars(ragen_mini))  # it takes the right one's place
        cfg = ragen_mini.Config(model="tiny", device="cpu", env="sokoban", algo=algo, iterations=20, eval_every=5,
                                out=f"{folder}/run")
        rows, _ = ragen_mini.train(cfg)
        vars(ragen_mini).update(right)
        rows = [{name: row[name] for name in PACKED if name in row} for row in rows]
        with open(SPOILT, "a") as file:
            file.write(json.dumps({"run": run, "config": {"env": cfg.env}, "rows": rows}) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train_missing(folder)
