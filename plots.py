"""Pictures of runs, from the files in their folders alone: config.json, log.jsonl, xray.json. Nothing is trained.
figures/paper.py draws with these functions, too, several seeds to a line. What is drawn together is a dict
{label of a line: [(config, rows) of seed 0, of seed 1, ...]}, called groups.

    python plots.py curves RUN [RUN ...]    a dashboard, several runs overlaid: RUN/curves.png (or --out FILE.png)
    python plots.py xray RUN                every token of two episodes and what it earned: RUN/xray.html
"""
import argparse
import dataclasses
import io
import itertools
import json
import math
import sys
from pathlib import Path

import matplotlib.figure
import matplotlib.style
import numpy as np

import envs

METRICS = {  # column of log.jsonl: title of its panel, what to look for
    "eval": ("success", "read it beside random and optimal play"),
    "reward": ("return (training)", "a run that is lost sits at -0.5: five invalid turns"),
    "valid": ("share of valid turns", "healthy: near 1; that it falls is the plainest sign of a collapse"),
    "reward_std": ("in-group return std", "0: all episodes of a group end alike, nothing is left to compare"),
    "entropy": ("entropy per token", "falls while the policy makes up its mind; 0: one fixed phrase"),
    "grad_norm": ("gradient norm", "small when all is learnt; a spike after that announces trouble"),
    "kl": ("log pi_old - log pi_ref", "distance from the first model, per token; 0 without a KL term"),
    "response_length": ("tokens per episode", "thoughts and actions together; shrinks when one answer is enough"),
    "think_length": ("words per thought", "thoughts that shrink to nothing carry nothing"),
    "mutual_information": ("I(prompt; thought)", "0: the same thoughts whatever was read, however fluent"),
    "seconds": ("seconds so far", "of rollouts and updates"),
}
LOGARITHMIC = ("reward_std", "grad_norm")
EXACT = ("eval", "seconds", "mutual_information")  # drawn as they are; the others as moving averages
STYLE = ["petroff10", {  # colours that all readers tell apart
    "axes.grid": True, "grid.alpha": 0.25, "legend.fontsize": 7, "legend.title_fontsize": 7, "axes.titlesize": 8.5,
    "font.size": 9, "lines.markersize": 3, "axes.formatter.min_exponent": 3}]
PAGE = Path(__file__).parent / "figures" / "xray.html"


class CannotDraw(Exception):
    """Printed as one line on the command line, with exit code 2."""


# ------------------------------------------------------------------------------------------------ reading a run
def load(run):  # -> config, rows of the log
    config_file, log_file = Path(run, "config.json"), Path(run, "log.jsonl")
    if not (config_file.is_file() and log_file.is_file()):
        raise CannotDraw(f"{run} is not the folder of a run")
    rows = []
    try:
        config = dict(json.loads(config_file.read_text()))
    except (ValueError, TypeError):
        config = {}
    if "env" not in config or "eval_prompts" not in config:
        raise CannotDraw(f"{config_file} is damaged")
    for line in log_file.read_text(errors="replace").splitlines():
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            break  # a run that was killed in mid-write
    return config, rows


def series(config, rows, metric):  # -> iterations (in rollouts of P prompts), values
    """metric: a column of the log, or "eval" (success in the run's own world), "eval sokoban" (in another one), "seconds"
    (summed up). One iteration of --online-k plays k*P prompts, so it counts for k."""
    kind, _, world = metric.partition(" ")
    x, y = [], []
    for row in rows:
        if kind == "eval":
            value = row.get("eval", {}).get(world or config["env"])
        elif kind == "seconds" and "seconds_rollout" in row:
            value = row["seconds_rollout"] + row["seconds_update"] + (y[-1] if y else 0)
        else:
            value = row.get(kind)
        if value is not None:
            x.append(row["iteration"] * config["online_k"])
            y.append(value)
    return np.array(x), np.array(y, dtype=float)


def moving_average(y, decay=0.8):  # (seeds, iterations) -> the same
    """Divided by the sum of the weights so far, so that the first averages are not pulled towards 0."""
    total = weight = 0.0
    averages = []
    for value in y.T:
        total = decay * total + value
        weight = decay * weight + 1
        averages.append(total / weight)
    return np.array(averages).T


# -------------------------------------------------------------------------------------------------- drawing
def draw_panel(ax, metric, title, groups, labels):
    """labels: all that a figure has, in the order of their colours. Line: the mean over seeds. Band: from the lowest to
    the highest seed; of a success rate with one seed its 95% interval."""
    kind, _, world = metric.partition(" ")
    for style, (label, runs) in zip(itertools.cycle(["-", "--", "-.", ":"]), groups.items()):
        lines = [dict(zip(*series(config, rows, metric))) for config, rows in runs]
        x = sorted(set.intersection(*[set(line) for line in lines]))  # an iteration may lack a column in some seed
        if not x:
            continue
        y = np.array([[line[i] for i in x] for line in lines])
        if kind not in EXACT:
            y = moving_average(y)
        low, high = y.min(0), y.max(0)
        if kind == "eval" and len(runs) == 1:
            levels = runs[0][0]["eval_prompts"]
            low, high = np.array([envs.interval(p, levels) for p in y[0]]).T
        marker = "o" if kind == "eval" else ""
        colour = f"C{labels.index(label)}"
        ax.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        ax.plot(x, y.mean(0), style + marker, color=colour, label=label)
    if kind == "eval":
        ax.set_ylim(0, 1.02)
        draw_yardsticks(ax, world, groups)
    ax.set_title(title + METRICS[kind][0])
    if kind in LOGARITHMIC:
        ax.set_yscale("log", nonpositive="clip")  # 0 lies below the axis: the line runs out of the picture


def draw_yardsticks(ax, world, groups):
    """Random and optimal play, where they are the same for all runs of the panel."""
    found = set()
    for runs in groups.values():
        for config, _ in runs:
            found.add(tuple(envs.yardsticks_of_run(world or config["env"], config)))
    if len(found) == 1:
        random, optimal = found.pop()
        across = ax.get_yaxis_transform()  # x from 0 to 1 whatever the iterations are
        ax.axhline(random, color="0.4", lw=1, ls=":")
        ax.text(0.98, random - 0.01, f"random {random:.2f}", va="top", ha="right", color="0.3", transform=across)
        ax.axhline(optimal, color="0.4", lw=1, ls=":")
        ax.text(0.02, optimal - 0.01, f"optimal {optimal:.2f}", va="top", color="0.3", transform=across)


@matplotlib.style.context(STYLE)
def draw(title, panels, out, columns, labels=None):  # panels: (metric, title, groups) of each -> out
    fig = matplotlib.figure.Figure(figsize=(12, 2.7 * math.ceil(len(panels) / columns) + 0.5), layout="constrained")
    shown = None
    for place, (metric, panel_title, groups) in enumerate(panels, 1):
        ax = fig.add_subplot(math.ceil(len(panels) / columns), columns, place)
        draw_panel(ax, metric, panel_title, groups, labels or list(groups))
        if list(groups) != shown:  # the same lines as in the panel before need no second legend
            ax.legend(title=band_of(metric, groups))
        shown = list(groups)
    fig.suptitle(f"{title}, by iteration (of P prompts)", fontsize=10)
    fig.savefig(out, dpi=90)
    return out


def band_of(metric, groups):  # -> what the bands of a panel are, in words
    seeds = max(len(runs) for runs in groups.values())
    if seeds > 1:
        return f"mean, range of {seeds} seeds"
    return "95% interval" if metric.startswith("eval") else ""


def curves(runs, out=None):  # -> Path of the picture
    """The signs of learning, and of the Echo Trap (Fig. 6)."""
    loaded = {str(run): load(run) for run in runs}
    groups = {label: [run] for label, run in loaded.items()}
    panels = []
    for metric in METRICS:
        lengths = [len(series(config, rows, metric)[0]) for config, rows in loaded.values()]
        if max(lengths) > 0:
            panels.append((metric, "", groups))
    if not panels:
        raise CannotDraw(f"{' '.join(groups)}: no iteration is finished, nothing to draw")
    trained = {f"{config['env']}, {config['model']}" for config, _ in loaded.values()}
    return draw(" / ".join(sorted(trained)), panels, Path(out or f"{runs[0]}/curves.png"), columns=4)


def live(cfg, rows):
    """Given to ragen_mini.train as `watch`: redraws the dashboard in a notebook after every iteration."""
    from IPython.display import Image, clear_output, display
    run = (dataclasses.asdict(cfg), rows)
    panels = [(metric, "", {cfg.env: [run]}) for metric in METRICS if len(series(*run, metric)[0])]
    if len(rows) > 1:
        picture = io.BytesIO()
        draw(cfg.env, panels, picture, columns=4)
        clear_output(wait=True)
        display(Image(picture.getvalue()))


def xray(run):  # -> Path of the page
    """A page that shows two episodes, every token tinted by its advantage; pointing at one shows what the update knew."""
    file = Path(run, "xray.json")
    if not file.is_file():
        raise CannotDraw(f"{run} has no xray.json: it is written with the first checkpoint after training began")
    data = json.dumps({"title": str(run), "episodes": json.loads(file.read_text())})
    data = data.replace("<", "\\u003c")  # or a </script> that a model wrote would end the page's own
    page = Path(run, "xray.html")
    page.write_text(PAGE.read_text().replace("EPISODES", data))  # the template's placeholder
    return page


def main(argv=None):
    advice = [f"  {name:20}{text}" for name, (_, text) in METRICS.items()]
    about = __doc__ + "\nWhat to look for in the curves:\n" + "\n".join(advice)
    parser = argparse.ArgumentParser("plots.py", description=about, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["curves", "xray"])
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--out", help="curves: a .png instead of RUN/curves.png")
    args = parser.parse_args(argv)
    if args.what == "xray" and args.out:
        parser.error("--out is for curves")
    try:
        if args.what == "curves":
            print(curves(args.runs, args.out))
        else:
            for run in args.runs:
                print(xray(run))
    except (CannotDraw, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
