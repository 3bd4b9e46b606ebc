"""Pictures of runs. This file reads what runs have logged, and draws it.

    python plots.py curves RUN ...      a dashboard of everything that was logged
    python plots.py collapse RUN ...    six signals, with the peak and the collapse of each run
    python plots.py online-k RUN ...    success against the number of updates, a curve for each k

Each of them draws one or several runs. The picture of one run goes to its folder, that of several
to the current folder, and either goes to --out FILE if that is given.
"""
import argparse
import contextlib
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import envs

# The title of a column's panel, and below it what to expect.
TITLES = {
    "success": "success (training)\nshould rise and stay",
    "reward": "mean return (training)\nshould rise",
    "valid": "share of valid turns\nshould be near 1",
    "reward_std": "std of returns within a group\nat 0 nothing can be learned",
    "kl": "KL: log pi_old - log pi_ref\nrises as it leaves the first model",
    "grad_norm": "mean gradient norm\nsmall: the model is sure, or stuck",
    "grad_norm_max": "largest gradient norm\nwatch for jumps (they are cut to 1)",
    "entropy": "entropy per token\nfalls as the model decides",
    "distinct": "different thoughts / thoughts\nnear 0 all thoughts are the same",
    "think_length": "words per thought\nnear 0 thoughts are empty",
    "response_length": "tokens per episode\nshorter answers, or fewer turns",
    "logp_gap": "log-prob gap of rollout and update\nshould be near 0, up to rounding",
    "clip_fraction": "share of clipped tokens\nnear 0 until the policy has moved",
    "value_loss": "value loss\nerrors of the critic",
    "turns": "turns per episode\nfewer: it ends sooner",
}
# The dashboard has a row for each question, with a panel for each of its columns that was logged.
# "eval" stands for success on held-out levels: "eval sokoban", ...
QUESTIONS = {
    "Look here first: does it win?": ("eval", "success", "reward", "valid"),
    "How does it learn?": ("reward_std", "kl", "grad_norm", "grad_norm_max"),
    "What does it write?": ("entropy", "distinct", "think_length", "response_length"),
    "What do the updates do?": ("logp_gap", "clip_fraction", "value_loss", "turns")}
# Columns of your own, which a callback has added, get a row at the end. These get no panel.
# (policy_loss says little about success.)
NOT_DRAWN = {"iteration", "updates", "tokens", "seconds_rollout", "seconds_update", "policy_loss"}
# Shares are drawn from 0 to 1, so that a flat curve looks flat.
SHARES = {"success", "valid", "distinct", "clip_fraction"}
# These vanish, and jump, by factors of a thousand.
LOGARITHMIC = {"grad_norm", "grad_norm_max", "logp_gap"}
SIGNALS = ("success", "valid", "distinct", "reward_std", "entropy", "grad_norm_max")
# Matplotlib's defaults come first, so that your own matplotlibrc changes nothing. petroff10 has ten
# colours that all readers can tell apart.
STYLE = ["default", "petroff10", {
    "axes.grid": True, "grid.alpha": 0.25, "axes.titlesize": 9.5, "axes.formatter.min_exponent": 4,
    "font.size": 9.5, "legend.fontsize": 8, "lines.markersize": 3, "savefig.dpi": 90,
    "figure.constrained_layout.use": True}]


# ----------------------------------------------------------------------------------- reading a log
@dataclass
class Run:
    config: dict  # config.json
    rows: list  # of log.jsonl: dicts {"iteration": 3, "reward": 1.2, ...}. Row 0: before training

    def __post_init__(self):
        """The row {"eval": {"sokoban": 0.4}} gets a column "eval sokoban", too."""
        self.yardsticks = {}  # {environment: [success of random play, of optimal play]}
        for row in self.rows:
            for env, success in row.get("eval", {}).items():
                row[f"eval {env}"] = success
            self.yardsticks |= row.get("yardsticks", {})

    def series(self, column):  # -> iterations, values; of the rows that have it
        rows = [row for row in self.rows if isinstance(row.get(column), (int, float))]
        values = np.array([row[column] for row in rows], float)
        return np.array([row["iteration"] for row in rows]), values


def load(folder):  # -> Run
    folder = Path(folder).expanduser()
    try:
        config = json.loads(Path(folder, "config.json").read_text())
        lines = Path(folder, "log.jsonl").read_text().split("\n")[:-1]  # the last may be unfinished
        # They are read as one list, so that an error names the line.
        rows = json.loads("[" + ",\n".join(lines) + "]")
        complete = {"env", "model", "eval_prompts", "online_k"} <= config.keys()
        if not complete or not all("iteration" in row for row in rows):
            raise ValueError("a setting is missing, or a row has no iteration")
        return Run(config, rows)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is not the folder of a run, or its config.json or log.jsonl is "
                         f"damaged ({type(error).__name__}: {error}).") from error


def interval(p, n, z=1.96):  # -> low, high
    """Wilson's 95% interval of a share p (or of an array of shares) that was seen in n episodes."""
    shrink = 1 + z * z / n
    center = (p + z * z / (2 * n)) / shrink
    half = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    # Rounding must not leave p outside.
    return np.minimum(p, center - half), np.maximum(p, center + half)


def with_interval(p, n):  # 0.7, 256 -> "0.70 [0.64, 0.75]"
    low, high = interval(p, n)
    return f"{p:.2f} [{low:.2f}, {high:.2f}]"


# The peak of a run is the highest mean of this many iterations, since one lucky rollout is no peak.
WINDOW = 5
# It has collapsed where this many iterations in a row are below half of the peak. Fewer are a dip.
COLLAPSED_FOR = 10


def peak_and_collapse(run):  # -> iteration of the peak, iteration of the collapse or None
    """An example with WINDOW = 2 and COLLAPSED_FOR = 3:
        iteration      1    2    3    4    5    6    7    8
        success        0.2  0.9  1.0  1.0  0.6  0.1  0.0  0.0
        mean of two    .55  .95  1.0  0.8  .35  .05  0.0
    The peak is at 3, where the window with the highest mean, 1.0, begins. The collapse is at 6:
    there and in the next two iterations success itself (not its mean) is below half of 1.0.
    If several windows share the highest mean, the first one is the peak. After a collapse success
    may recover.
    """
    iterations, success = run.series("success")
    width = min(WINDOW, len(success))
    means = np.convolve(success, np.ones(width) / width, "valid")  # [i]: of success[i:i + width]
    means = means.round(9)  # so that equal means are equal
    peak = means.argmax()
    below_half = success < means[peak] / 2
    for i in range(peak, len(success) - COLLAPSED_FOR + 1):
        if below_half[i:i + COLLAPSED_FOR].all():
            return iterations[peak], iterations[i]
    return iterations[peak], None


# ------------------------------------------------------------------------ what all pictures share
@contextlib.contextmanager
def picture(out, width, height, legend=0):  # legend: its lines -> a figure, saved after `with`
    """matplotlib is imported here, so that training need not wait for it."""
    import matplotlib.style
    from matplotlib.figure import Figure  # it needs no display, unlike pyplot
    with matplotlib.style.context(STYLE):
        fig = Figure(figsize=(width, height + 0.19 * legend))  # inches
        yield fig
        fig.savefig(out)


def line_style(number):  # of a run -> keywords for `plot`: ten colours, then dashed, and so on
    return {"color": f"C{number % 10}", "ls": ("-", "--", ":", "-.")[number // 10 % 4]}


def draw_training(ax, runs, column):  # lines bridge iterations without the column
    for number, (label, run) in enumerate(runs.items()):
        iterations, values = run.series(column)
        style = line_style(number)
        ax.plot(iterations, values, lw=0.7, marker=".", **style)
        ax.plot(iterations, running_median(values), lw=2, label=label, **style)
    scale = "log" if column in LOGARITHMIC else "share" if column in SHARES else "linear"
    finish_panel(ax, TITLES.get(column, column), scale=scale)


def running_median(y):  # (n,) -> (n,)
    """The median of each value and its neighbours. It drops single spikes, but a fall stays steep.

    It takes two neighbours on each side, or n / 40 in long runs, and fewer at the ends.
    """
    medians = []
    for i in range(len(y)):
        wanted = max(2, len(y) // 40)
        reach = min(wanted, i, len(y) - 1 - i)
        medians.append(np.median(y[i - reach:i + reach + 1]))
    return medians


def draw_evaluations(ax, runs, column):
    env = column.removeprefix("eval ")
    for number, (label, run) in enumerate(runs.items()):
        iterations, success = run.series(column)
        style = line_style(number)
        ax.plot(iterations, success, marker="o", label=label, **style)
        low, high = interval(success, run.config["eval_prompts"])
        ax.fill_between(iterations, low, high, color=style["color"], alpha=0.15, lw=0)
    draw_yardsticks(ax, runs, env)
    finish_panel(ax, f"success, {env}\non held-out levels, 95% interval")


def draw_yardsticks(ax, runs, env):
    """Dotted lines at the success of random and of optimal play. Runs may share them."""
    lines = set()
    for run in runs.values():
        if env in run.yardsticks:
            random, optimal = run.yardsticks[env]
            lines.update({("random", random), ("optimal", optimal)})
    for name, success in sorted(lines):
        ax.axhline(success, color="0.4", ls=":")
        ax.text(0.98, success, f"{name} {success:.2f}", ha="right", va="bottom",
                transform=ax.get_yaxis_transform())


def finish_panel(ax, title, xlabel="iteration", scale="share"):  # after its lines are drawn
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(title=title, xlabel=xlabel)
    if scale == "log":
        ax.set_yscale("log")
        return
    low, high = ax.get_ylim()
    if scale == "share":
        ax.set_ylim(-0.04, 1.15)
    elif low > 0:
        ax.set_ylim(bottom=0)


def add_legend(fig, ax):  # below the panels, of which all have the labels of ax
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center")


def subjects(runs):  # -> "sokoban, tiny / frozenlake, tiny"
    found = set()
    for run in runs.values():
        model = Path(run.config["model"]).name  # the last part of a path, or of owner/name
        found.add(f"{envs.title(run.config['env'])}, {model}")
    return plain(" / ".join(sorted(found)))


def plain(text):  # matplotlib takes what is between two $ for a formula
    return text.replace("$", r"\$")


# ----------------------------------- the three pictures. runs: {label: Run}, out: the file; -> out
def curves(runs, out, questions=None):  # questions: None for QUESTIONS
    """Everything that was logged, in a row of panels for each question."""
    panels = panels_of(runs, questions)
    if not panels:
        raise ValueError("There is no curve yet, because nothing was trained or evaluated.")
    width = max(4, max(len(columns) for columns in panels.values()))
    with picture(out, 3 * width, 3 * len(panels) + 0.4, legend=len(runs)) as fig:
        rows = fig.subfigures(len(panels), squeeze=False).flat
        for row, (question, columns) in zip(rows, panels.items()):
            row.suptitle(question, x=0.01, ha="left", weight="bold")
            axes = row.subplots(1, len(columns), squeeze=False).flat
            for ax, column in zip(axes, columns):
                if column.startswith("eval "):
                    draw_evaluations(ax, runs, column)
                else:
                    draw_training(ax, runs, column)
        fig.suptitle(f"{subjects(runs)} (thin: each iteration; thick: running median)")
        add_legend(fig, fig.axes[0])
    return out


def panels_of(runs, questions):  # -> {question: those of its columns that were logged}
    logged = set()
    for run in runs.values():
        for row in run.rows:
            logged.update(name for name, x in row.items() if isinstance(x, (int, float)))
    evaluations = sorted(column for column in logged if column.startswith("eval "))
    if questions is None:
        others = logged.difference(NOT_DRAWN, evaluations, *QUESTIONS.values())
        questions = QUESTIONS | {"What else was logged?": sorted(others)}
    panels = {}
    for question, columns in questions.items():
        found = []
        for column in columns:
            if column == "eval":
                found += evaluations
            elif column in logged:
                found.append(column)
        if found:
            panels[question] = found
    return panels


def collapse(runs, out):
    """SIGNALS of one or several runs, with the peak (dotted) and the collapse of each.

    Of one run, everything after the collapse is grey. Of several, each collapse is a dashed line.
    """
    alone = len(runs) == 1
    marks = "grey: after the collapse" if alone else "dashed: collapse"
    runs = {f"{label}: {verdict(run)}": run for label, run in runs.items()}
    with picture(out, 10, 7.2, legend=len(runs)) as fig:
        fig.suptitle(f"{subjects(runs)}\n"
                     f"thin: each iteration; thick: running median; dotted: peak; {marks}")
        axes = fig.subplots(3, 2).flat
        for ax, column in zip(axes, SIGNALS):
            draw_training(ax, runs, column)
            for number, run in enumerate(runs.values()):
                mark_collapse(ax, run, "0.4" if alone else f"C{number % 10}", grey=alone)
        add_legend(fig, axes[0])
    return out


def verdict(run):  # -> text
    iterations, success = run.series("success")
    if not len(iterations):
        raise ValueError("There is no peak yet, because no iteration is finished.")
    peak_at, collapsed_at = peak_and_collapse(run)
    if not success.any():
        return "nothing was won"
    if collapsed_at is None:
        return f"its best {WINDOW} iterations begin at {peak_at}, no collapse"
    return f"its best {WINDOW} iterations begin at {peak_at}, collapse in {collapsed_at}"


def mark_collapse(ax, run, color, grey):
    peak_at, collapsed_at = peak_and_collapse(run)
    ax.axvline(peak_at, color=color, ls=":")
    if collapsed_at is None:
        return
    if grey:
        ax.axvspan(collapsed_at, run.rows[-1]["iteration"], color="0.5", alpha=0.3)
    else:
        ax.axvline(collapsed_at, color=color, ls="--", lw=2)


# Beside k and seed: iterations and evaluations follow from k, and the others change no learning.
# (mi_every is of runs that are shipped.)
MAY_DIFFER = {"online_k", "seed", "iterations", "eval_every", "save_every", "out", "resume",
              "device", "micro_tokens", "mi_every"}


def online_k(runs, out):
    """Fig. 10: success on held-out levels against the number of updates, one curve for each k.

    With --online-k k, a rollout is learned from in k slices, and before the last one there were the
    updates of k - 1 others. So the larger k is, the staler is what the policy learns from.
    If there are several runs of one k, which differ in their seeds, their mean is drawn, with a
    thin line for each. Between two evaluations it is the mean of these lines.
    """
    first = next(iter(runs.values())).config
    env = envs.title(first["env"])
    by_k = defaultdict(list)
    for label, run in runs.items():
        differ = [name for name, x in run.config.items()
                  if x != first.get(name) and name not in MAY_DIFFER]
        if differ:
            raise ValueError(f"online-k compares runs that differ in k and seed alone, but {label} "
                             f"differs in {', '.join(differ)}.")
        updates, success = evaluations(run, env)
        if not updates:
            raise ValueError(f"{label} has no evaluation. It was trained with --eval-every 0.")
        by_k[run.config["online_k"]].append((updates, success))

    with picture(out, 7, 5) as fig:
        ax = fig.subplots()
        for number, (k, seeds) in enumerate(sorted(by_k.items())):  # a seed: its updates, success
            color = f"C{number}"
            label = f"k = {k}"
            if len(seeds) > 1:
                label = f"k = {k}: mean of {len(seeds)} seeds"
                for updates, success in seeds:
                    ax.plot(updates, success, color=color, lw=0.7)
            end = min(updates[-1] for updates, _ in seeds)  # a mean needs all seeds
            at = sorted({n for updates, _ in seeds for n in updates if n <= end})
            mean = np.mean([np.interp(at, *seed) for seed in seeds], axis=0)
            ax.plot(at, mean, "-o", color=color, lw=2, label=label)
        draw_yardsticks(ax, runs, env)
        finish_panel(ax, f"success on held-out levels, {env}", xlabel="updates")
        ax.legend(loc="lower right")
    return out


def evaluations(run, env):  # -> updates so far, success; of each evaluation
    updates = 0
    at = []
    success = []
    for row in run.rows:
        updates += row.get("updates", 0)  # row 0 has none
        if env in row.get("eval", {}):
            at.append(updates)
            success.append(row["eval"][env])
    return at, success


# ------------------------------------------------------------------------------------- command line
def labels_of(folders):  # -> {label: folder}; the last part of the path is enough if it is unique
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(folders):
        names = folders
    # Labels that begin with _ would not be in the legend.
    return {plain(name).lstrip("_"): folder for name, folder in zip(names, folders)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["curves", "collapse", "online-k"],
                        metavar="curves | collapse | online-k")
    parser.add_argument("folders", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--out", metavar="FILE", help="the picture, such as both.png")
    args = parser.parse_args()
    folder = args.folders[0] if len(args.folders) == 1 else "."
    out = Path(args.out or Path(folder, f"{args.what}.png")).expanduser()
    if out.suffix not in (".png", ".pdf", ".svg"):
        parser.error(f"--out {args.out}: it must end in .png, .pdf or .svg")
    try:
        runs = {label: load(folder) for label, folder in labels_of(args.folders).items()}
        if args.what == "curves":
            print(curves(runs, out))
        elif args.what == "online-k":
            print(online_k(runs, out))
        else:
            print(collapse(runs, out))
            for label, run in runs.items():
                print(f"{label}: {verdict(run)}")
    except (ValueError, OSError) as error:  # OSError: --out cannot be written
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
