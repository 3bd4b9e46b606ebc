"""What tutorial.ipynb imports: the checks as a student meets them, pictures, and the spoilt runs of the bug hunt.

    gae = use("gae", gae)       prints Yours / Spec; returns yours if it passes, else the shipped function
    earned("gae")               the graded cells end with this: an error where it did not pass
    python course/course.py     trains the spoilt runs that course/tutorial.jsonl lacks (ten minutes for all)

checks.py compares, exercises.py has the exercises, staff/hidden_checks.py more inputs.
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
from checks import COURSE, ROOT, check, envs, mutant
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
    cases = exercise.cases
    if os.environ.get("HIDDEN_CHECKS"):  # a lecturer sets it for `nbgrader autograde`
        from staff import hidden_checks
        cases = cases + hidden_checks.CASES[name]
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
    evals = [row["eval"] for row in rows if "eval" in row]
    if len(evals) < 2:
        print("success was not measured before and after")
        return False
    before, after = (list(success.values())[0] for success in (evals[0], evals[-1]))
    for when, success in (("before", before), ("after", after)):
        low, high = envs.interval(success, 256)
        print(f"success {when:6} {success:.2f}, 95% interval {low:.2f} to {high:.2f}")
    grown = gained(before, after)
    print("The intervals do not touch: it has grown." if grown else "It has not grown by more than chance may do.")
    return grown


def gained(before, after, levels=256):
    return envs.interval(after, levels)[0] > envs.interval(before, levels)[1]


def score():
    """A table of all points of the visible checks."""
    total = 0
    for name, exercise in EXERCISES.items():
        points = exercise.points * passed(name)
        total += points
        print(f"{points:4g} of {exercise.points:<4g} {exercise.title}")
    print(f"{total:4g} of {sum(exercise.points for exercise in EXERCISES.values()):g}")


# ------------------------------------------------------------------------------------ pictures for the notebook
SQUARES = {"#": "#555", "_": "#f4f4f4", "O": "#ffd9a0", "X": "#c07a2c",
           "√": "#8fd18f", "G": "#8fd18f", "P": "#9fc5ff", "S": "#9fc5ff"}


def html(text):  # -> shown by the notebook
    from IPython.display import HTML
    return HTML(text)


def cell(text, colour="transparent", tag="td"):
    return f"<{tag} style='background:{colour};padding:2px 5px;text-align:center;white-space:nowrap'>{text}</{tag}>"


def board(env):
    """The picture of a world in colours, beside the text that the program sends."""
    lines = []
    for line in env.render().splitlines():
        lines.append("<tr>" + "".join(cell(symbol, SQUARES.get(symbol, "#fff")) for symbol in line.split()) + "</tr>")
    grid = f"<table style='font-size:20px;line-height:1.3'>{''.join(lines)}</table>"
    text = f"<pre style='margin-left:40px'>{env.instruction}\n\n{env.render()}</pre>"
    return html(f"<div style='display:flex'>{grid}{text}</div>".replace(". ", ".\n"))


def tint(x, most):  # -> red below 0, green above, paler near 0
    if most == 0 or x == 0:
        return "transparent"
    hue = "40,160,60" if x > 0 else "210,50,50"
    return f"rgba({hue},{0.15 + 0.7 * min(1.0, abs(x) / most):.2f})"


def show_episode(traj, tok, width=16, **rows):
    """An episode token by token, blue where the model wrote; below it its numbers, a row for each list in `rows`."""
    words = [escape(tok.decode([i])).replace("\n", "\\n") for i in traj.ids]
    blocks = []
    for first in range(0, len(words), width):
        part = range(first, min(first + width, len(words)))
        lines = [cell("token", tag="th") + "".join(cell(words[t], "#bcd8ff" if traj.mask[t] else "#eee") for t in part)]
        for name, values in rows.items() if any(traj.mask[t] for t in part) else ():
            most = max(abs(x) for x in values)
            numbers = [cell(f"{values[t]:.2f}" if traj.mask[t] else "", tint(values[t], most)) for t in part]
            lines.append(cell(name, tag="th") + "".join(numbers))
        blocks.append("".join(f"<tr>{line}</tr>" for line in lines))
    return html("".join(f"<table style='font-size:11px;margin:0 0 8px 0'>{block}</table>" for block in blocks))


def page(file):
    """A page of its own, such as the X-ray, inside the notebook."""
    text = escape(Path(file).read_text())
    return html(f"<div><iframe srcdoc='{text}' width='100%' height='480' style='border:0'></iframe></div>")


def watch(row, trajs, batches, models, cfg):
    """For rm.train(cfg, watch=watch): the curves so far, every five iterations."""
    from IPython.display import Image, clear_output, display
    i = row["iteration"]
    due = i % 5 == 0 or i == cfg.iterations  # a picture takes as long as an iteration of a small model
    if not due or i == 0:  # 0: before training, nothing to draw
        return
    logged = plots.load(cfg.out)  # all rows but this one
    run = plots.Run(logged.config, logged.rows + [row])
    picture = io.BytesIO()
    plots.dashboard({"this run": run}, picture, metrics=["reward", "entropy"], per_row=3)
    clear_output(wait=True)
    display(Image(picture.getvalue()))


def series(config, rows, column):  # -> iterations, values; "eval": success in the world of the training
    name = f"eval {config['env']}" if column == "eval" else column
    return plots.Run(config, rows).series(name)


def draw_runs(runs, columns, band=None):  # runs: {label: (config, rows)}
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, len(columns), figsize=(3 * len(columns), 2.5), layout="constrained")
    for ax, column in zip(axes, columns):
        curves = {label: series(*run, column) for label, run in runs.items()}
        for style, (label, (x, y)) in zip(("-o", "--s"), curves.items()):
            ax.plot(x, y, style, ms=2.5, label=label)
        if band:
            ax.axvspan(*band, color="0.9")
        if column == "grad_norm" and all(value > 0 for _, y in curves.values() for value in y):
            ax.set_yscale("log")  # which has no place for 0
        if column in ("eval", "success", "valid"):
            ax.set_ylim(-0.02, 1.02)
        ax.set_title({"eval": "success on held-out levels"}.get(column, column), fontsize=9)
        ax.set_xlabel("iteration", fontsize=8)
    if len(runs) > 1:
        axes[0].legend(fontsize=8)
    plt.show()


# --------------------------------------------------------------------------- the spoilt runs of the bug hunt
RUNS = {  # name: the bug, the algorithm
    "right, ppo": (None, "ppo"), "right, grpo": (None, "grpo"), "returns": ("returns", "grpo"),
    "compute_advantages": ("compute_advantages", "ppo"),
    "sample": ("sample", "ppo"), "take_turn": ("take_turn", "ppo")}
PACKED = ("iteration", "eval", "success", "reward_std", "entropy", "grad_norm", "value_loss", "valid")


def spoilt_runs():  # -> {name: (config, rows)}
    if not SPOILT.exists():
        return {}
    packed = [json.loads(line) for line in SPOILT.read_text().splitlines()]
    return {line["run"]: (line["config"], line["rows"]) for line in packed}


def train_missing(folder):
    for run, (bug, algo) in RUNS.items():
        if run in spoilt_runs():
            continue
        right = {name: getattr(ragen_mini, name) for name in BUGS}
        if bug:
            mutant(right[bug], *BUGS[bug], module=ragen_mini)  # it takes the right one's place
        cfg = ragen_mini.Config(model="tiny", device="cpu", env="sokoban", algo=algo, iterations=20, eval_every=5,
                                out=f"{folder}/run")
        rows, _ = ragen_mini.train(cfg)
        vars(ragen_mini).update(right)
        rows = [{key: shorten(row[key]) for key in PACKED if key in row} for row in rows]
        line = {"run": run, "config": {"env": cfg.env, "online_k": 1}, "rows": rows}
        with open(SPOILT, "a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def shorten(x):  # to four significant digits
    return {key: shorten(value) for key, value in x.items()} if isinstance(x, dict) else float(f"{x:.4g}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train_missing(folder)
