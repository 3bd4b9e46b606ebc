"""What one sees of a run: its log, a verdict (is it dead? did it collapse?), pictures.

    python plots.py curves RUN                         a dashboard of one run: RUN/curves.png
    python plots.py curves RUN RUN ... --out both.png  several runs in one
    python plots.py collapse RUN                       six signals, peak and collapse marked: RUN/collapse.png
"""
import argparse
import fnmatch
import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure

import envs
from envs import need, or_say

TITLES = {  # a column of log.jsonl (a metric): the title of its panel; below it, what is good, bad or usual
    "success": "success (training)\nshould rise; collapse: below half for long",
    "reward": "mean return (training)\nshould rise; an invalid turn costs 0.1",
    "valid": "share of valid turns\ngood: 1; invalid turns run no action",
    "reward_std": "in-group return std\nbad: 0 (equal returns in each group)",
    "kl": "KL: log pi_old - log pi_ref\nrises as it leaves the first model",
    "grad_norm": "mean gradient norm of the updates\nnear 0: it is sure, or stuck",
    "grad_norm_max": "largest gradient norm\nbeware of jumps (updates cut it to 1)",
    "entropy": "entropy per token\nfalls as the model decides",
    "distinct": "different thoughts / thoughts\nfalls as it learns; near 0: all alike",
    "think_length": "words per thought\nnear 0: thoughts are empty",
    "response_length": "tokens per episode\nfewer: shorter answers or fewer turns",
}
QUESTIONS = {  # each is a row of the dashboard: a panel for each of its metrics that was logged
    "Look here first: does it win?": ("eval *", "success", "reward", "valid"),  # eval *: success in evaluations
    "How does it learn?": ("reward_std", "kl", "grad_norm", "grad_norm_max"),
    "What does it write?": ("entropy", "distinct", "think_length", "response_length")}
SIGNALS = ("success", "valid", "distinct", "reward_std", "entropy", "grad_norm_max")  # in `collapse`
STYLE = ["petroff10", {  # petroff10: colours that all readers tell apart
    "axes.grid": True, "grid.alpha": 0.25, "legend.fontsize": 8, "axes.titlesize": 9.5, "font.size": 9.5,
    "lines.markersize": 3, "axes.formatter.min_exponent": 4, "savefig.dpi": 90, "figure.constrained_layout.use": True}]


# -------------------------------------------------------------- what a run logs, and how it is read
def log_columns(trajs, R, learned):  # R: returns (P,N). learned: what `learn` returned for each slice
    turns = [turn for traj in trajs for turn in traj.turns]
    thoughts = list(map(thought_of, turns))
    tokens = sum(turn["tokens"] for turn in turns)
    row = {
        "reward": R.mean(),  # mean return, in the paper's figures "reward"
        "reward_std": R.std(1, correction=0).mean(),  # the mean of all groups' U (eq. 7)
        "success": fmean(traj.success for traj in trajs),
        "entropy": sum(traj.entropy for traj in trajs) / tokens,
        "response_length": tokens / len(trajs),
        "think_length": fmean(len(thought.split()) for thought in thoughts),
        "distinct": len(set(thoughts)) / len(thoughts),
        "valid": fmean(turn["valid"] for turn in turns),
        "turns": len(turns) / len(trajs),
    }
    steps, kl = [], []
    for batch, of_updates in learned:  # ({}, []) if there was no update
        steps += of_updates
        if "kl" in batch:  # of the kept groups; not with --kl-coef 0
            kl.append(batch["kl"][batch["mask"]].mean().item())
    if steps:
        for name in steps[0]:  # policy_loss, clip_fraction, grad_norm, ...
            row[name] = fmean(step[name] for step in steps)
        row["grad_norm_max"] = max(step["grad_norm"] for step in steps)  # a spike of one step in many
    if kl:
        row["kl"] = fmean(kl)
    row = {name: round(float(x), 6) for name, x in row.items()}
    return row | {"updates": len(steps), "tokens": tokens}  # these stay integers


def thought_of(turn):  # -> text; without </think>, all the rest of the answer; --no-think: ""
    return re.match("(<think>(.*?)(</think>|$))?", turn["answer"], re.S)[2] or ""


def add_lines(folder, name, dicts):  # to a file of the run, a line each
    with open(Path(folder, name), "a") as file:
        for x in dicts:
            file.write(json.dumps(x, default=float) + "\n")  # tensors and NumPy's numbers become floats


@dataclass
class Run:
    config: dict  # config.json
    rows: list  # of log.jsonl: dicts {"iteration": 3, "reward": 1.2, ...}. Row 0: before training

    def __post_init__(self):  # in a row, "eval": {"sokoban": 0.4} becomes a column "eval sokoban"
        self.yardsticks = {}  # {world: [random, optimal]}
        for row in self.rows:
            for world, success in row.get("eval", {}).items():
                row[f"eval {world}"] = success
            self.yardsticks |= row.get("yardsticks", {})

    def series(self, metric):  # -> iterations, values: of the rows that have it
        rows = [row for row in self.rows if row.get(metric) is not None]
        values = np.array([row[metric] for row in rows], float)
        return np.array([row["iteration"] for row in rows]), values


def load(folder):  # -> Run
    with or_say(f"{folder} is not the folder of a run, or its config.json or log.jsonl is damaged"):
        lines = Path(folder, "log.jsonl").read_text().split("\n")[:-1]  # after the last \n it may be unfinished
        return Run(json.loads(Path(folder, "config.json").read_text()), list(map(json.loads, lines)))


# -------------------------------------------------------------------------- is it dead? did it collapse?
WINDOW = 5  # The peak is the highest mean of this many iterations: one lucky rollout is no peak.
COLLAPSED_FOR = 10  # So many iterations in a row below half of the peak are no mere dip. (is_dead: without update)


def is_dead(rows):  # asked by `train` after each iteration: ten without an update end the run
    return all(row.get("updates") == 0 for row in rows[-COLLAPSED_FOR:])  # row 0 has no "updates": ten are needed


def peak_and_collapse(run):  # -> their iterations: the first peak, even if it is low; the collapse, or None
    """An example with WINDOW = 2 and COLLAPSED_FOR = 3:
        iteration      1    2    3    4    5    6    7    8
        success        0.2  0.9  1.0  1.0  0.6  0.1  0.0  0.0
        mean of two    .55  .95  1.0  0.8  .35  .05  0.0
    The peak is at 3, where the window with the highest mean, 1.0, begins. The collapse is at 6: there and in
    the next two iterations success itself (not its mean) is below half of 1.0. Later it may recover."""
    iterations, success = run.series("success")
    width = min(WINDOW, len(success))
    means = np.convolve(success, np.ones(width) / width, "valid")  # [i]: of success[i:i + width]
    peak = means.argmax()
    below_half = success < means[peak] / 2
    for i in range(peak, len(success) - COLLAPSED_FOR + 1):
        if below_half[i:i + COLLAPSED_FOR].all():
            return iterations[peak], iterations[i]
    return iterations[peak], None


# ----------------------------------------------------------------------------------------- pictures
def curves(*folders, out=None):  # -> path of the picture
    need(out or len(folders) == 1, "several runs in one picture: name it, such as --out both.png")
    out = out or Path(folders[0], "curves.png")
    need(Path(out).suffix, f"--out {out} does not say which kind of picture: such as --out {out}.png")
    return dashboard({str(folder): load(folder) for folder in folders}, out)


@matplotlib.style.context(STYLE)  # as a decorator: everything inside is drawn in this style
def dashboard(runs, out, questions=QUESTIONS):  # runs: {label: Run} -> out (a file, or a buffer)
    logged = {}  # all their columns
    for run in runs.values():
        for row in run.rows:
            logged |= row
    panels = {}  # of each question: its metrics that were logged
    for question, metrics in questions.items():
        found = [column for metric in metrics for column in fnmatch.filter(logged, metric)]
        if found:
            panels[question] = found
    need(panels, "there is no curve yet: nothing was trained or evaluated")
    fig = Figure(figsize=(3 * max(4, max(map(len, panels.values()))), 3 * len(panels) + 0.6))  # needs no display
    for part, question in zip(fig.subfigures(len(panels), squeeze=False).flat, panels):
        part.suptitle(question, x=0.01, ha="left", weight="bold")
        for metric, ax in part.subplot_mosaic([panels[question]]).items():
            draw = draw_evaluations if metric.startswith("eval ") else draw_training
            draw(ax, runs, metric)
    subjects = {f"{envs.title(run.config['env'])}, {run.config['model']}" for run in runs.values()}
    fig.suptitle(" / ".join(sorted(subjects)) + " (thin: each iteration; thick: running median)")
    fig.legend(*fig.axes[0].get_legend_handles_labels(), loc="outside lower center")  # all have the same one
    fig.savefig(out)
    return out


def draw_evaluations(ax, runs, metric):  # dotted: random and optimal play
    world = metric.removeprefix("eval ")
    yardsticks = set()  # runs may have the same: drawn once
    for label, run in runs.items():
        yardsticks |= set(zip(("random", "optimal"), run.yardsticks.get(world, [])))
        iterations, success = run.series(metric)
        ax.plot(iterations, success, "-o", label=label)  # fill_between takes the same colour
        ax.fill_between(iterations, *envs.interval(success, run.config["eval_prompts"]), alpha=0.15)
    for name, value in sorted(yardsticks):
        ax.axhline(value, color="0.4", ls=":")
        ax.text(0.98, value, f"{name} {value:.2f}", transform=ax.get_yaxis_transform(), ha="right", va="bottom")
    finish_panel(ax, metric, f"success, {world}\non evaluation levels, 95% interval")


def draw_training(ax, runs, metric):  # lines bridge iterations without the metric
    for label, run in runs.items():
        iterations, values = run.series(metric)
        smooth = list(map(np.median, neighbours(values)))  # drops single spikes, but a steep fall stays steep
        thin, = ax.plot(iterations, values, ".-", lw=0.7)
        ax.plot(iterations, smooth, color=thin.get_color(), lw=2, label=label)
    finish_panel(ax, metric)


def neighbours(y):  # (n,) -> n arrays: each value, and as many before it as after it
    for i in range(len(y)):
        reach = min(max(2, len(y) // 40), i, len(y) - 1 - i)  # 2 on each side; n / 40 in long runs; fewer at the ends
        yield y[i - reach:i + reach + 1]


def finish_panel(ax, metric, title=None):  # after its lines are drawn
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(title=title or TITLES.get(metric, metric), xlabel="iteration")  # a column of your own: its name
    if metric.startswith("grad_norm"):
        ax.set_yscale("log")  # gradients vanish, and jump, by factors of a thousand
    else:
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, -0.04), max(1.05 * high, 1.15))  # shows 0 and 1, so that a flat curve looks flat


@matplotlib.style.context(STYLE)
def collapse(run, out):  # draws SIGNALS -> the verdict, in words
    iterations, success = run.series("success")
    need(success.size, f"no {out}: no iteration is finished")
    peak_at, collapsed_at = peak_and_collapse(run)
    end = f"collapse in {collapsed_at} (grey)"
    if collapsed_at is None:
        end = f"no collapse (it takes {COLLAPSED_FOR} below half)" if success.any() else "but nothing was won"
    verdict = f"the best {WINDOW} iterations begin at {peak_at} (dotted), {end}"
    fig = Figure(figsize=(10, 7))
    fig.suptitle(f"{envs.title(run.config['env'])}: {verdict}\nthin: each iteration; thick: running median")
    for ax, metric in zip(fig.subplots(3, 2).flat, SIGNALS):
        draw_training(ax, {"": run}, metric)
        ax.axvline(peak_at, color="0.4", ls=":")
        if collapsed_at is not None:
            ax.axvspan(collapsed_at, iterations[-1], color="0.5", alpha=0.3)
    fig.savefig(out)
    return verdict


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["curves", "collapse"], metavar="curves | collapse")
    parser.add_argument("folders", nargs="+", metavar="RUN")
    parser.add_argument("--out")
    args = parser.parse_args()
    with or_say("no picture: is --out writable, with an ending such as .png? Or is config.json or log.jsonl damaged?"):
        if args.what == "curves":
            print(curves(*args.folders, out=args.out))
        else:
            need(not args.out, "collapse needs no --out: its picture goes into RUN")
            for folder in args.folders:
                out = Path(folder, "collapse.png")
                print(f"{out}: {collapse(load(folder), out)}")
