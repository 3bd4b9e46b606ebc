"""Pictures of training runs, from the files in their folders: config.json, log.jsonl, xray.json. Nothing is trained.

    python plots.py curves RUN              a dashboard: RUN/curves.png (or --out FILE.png)
    python plots.py curves RUN RUN ...      several runs overlaid: curves.png here, or curves2.png, ...
    python plots.py collapse RUN [RUN ...]  the anatomy of one run, which signal moved first: RUN/collapse.png
    python plots.py xray RUN                every token of two episodes and what it earned: RUN/xray.html

How the data look, from small to large:

    metric      a name in METRICS, mostly a column of the log; or "eval sokoban": success on the held-out levels of
                Sokoban (a run may be evaluated in several worlds)
    run         (config, rows): config.json, and the lines of log.jsonl as dicts, {"iteration": 3, "reward": 1.2, ...}.
                Row 0 is of before training: it has an evaluation at most
    lines       the curves of a panel: {"first run": run, "second run": run}
    yardsticks  (success of random play, of optimal play) where all runs of a panel have the same; else None
    panel       (metric, prefix of its title, lines, yardsticks)

The model plays *episodes* of several *turns*: it reads the state, writes a *thought* and an answer, and is rewarded. The
*return* is the sum of an episode's rewards. An iteration plays *groups* of episodes, those of a group from one initial
state, and trains on them. A *claim* is what a thought says of the board. The *echo*: the same phrases in every thought.

    lost        ten iterations in a row have less than half of the best success, the highest mean of five iterations.
                README calls it collapsed
    dead        ten iterations in a row had nothing to compare, such as equal returns: training has ended by itself
"""
import argparse
import io
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.figure
import matplotlib.style
import numpy as np

import envs
from envs import UserError, need


# --------------------------------------------------------------------------------------------- what a run logs
@dataclass
class Metric:
    title: str  # what it is, in a few words
    meaning: str = ""  # more words, or what to look for
    smooth: bool = True  # drawn as a moving average, else as measured
    log_axis: bool = False


DASHBOARD = {
    "eval": Metric("success", "on held-out levels; read it beside random and optimal play", smooth=False),
    "reward": Metric("return (training)", "where no answer is valid: -0.1, the price of that, times the turns"),
    "valid": Metric("share of valid turns", "a lasting fall is the plainest sign of a collapse; near 1 proves nothing"),
    "reward_std": Metric("in-group return std", "0: all episodes of a group end alike, nothing to compare",
                         smooth=False, log_axis=True),
    "entropy": Metric("entropy per token", "of the model's choices: falls while it makes up its mind"),
    "grad_norm": Metric("gradient norm", "small when all is learnt; most later spikes do no harm, one may be the end",
                        log_axis=True),
    "kl": Metric("log pi_old - log pi_ref", "mean per token: how far pi, the model, is from the one before training"),
    "response_length": Metric("tokens per episode", "thoughts and actions; shrinks when one answer is enough"),
    "think_length": Metric("words per thought", "thoughts that shrink to nothing carry nothing"),
    "distinct": Metric("different thoughts / thoughts", "near 0, the echo: the same few phrases in every episode"),
    "mutual_information": Metric("I(prompt; thought)", "see figures/variants.py; 0: thoughts ignore what was read",
                                 smooth=False),
    "true_claims": Metric("share of true claims", "what thoughts say of the board, checked"),
    "seconds": Metric("seconds so far", "no column, but the sum of seconds_rollout and seconds_update",
                      smooth=False),
}
METRICS = DASHBOARD | {
    "success": Metric("success (training)", "share of won episodes in the rollout"),
    "grad_norm_max": Metric("largest gradient norm", "of the iteration's updates; grad_norm is their mean",
                            log_axis=True),
    "policy_loss": Metric("policy loss", "only its gradient means something"),
    "value_loss": Metric("value loss", "of the critic's forecasts"),
    "clip_fraction": Metric("clipped tokens / tokens", "0 in an iteration of one update, whose ratios are 1"),
    "seconds_rollout": Metric("seconds of playing"),
    "seconds_update": Metric("seconds of the updates"),
    "updates": Metric("gradient steps", "0: nothing to compare"),
    "kept": Metric("trajectories that were trained on"),
    "tokens": Metric("tokens that the model wrote"),
    "turns": Metric("turns per episode"),
    "claims": Metric("share of turns whose thought claims something"),
    "fitting": Metric("share of those turns whose first action is one that the claim names"),
    "warning": Metric("fewer than half as many valid turns as at its best", "a sign of collapse; written once"),
    "dead": Metric("ten iterations had nothing to compare", "written once, at the end"),
}


def split(metric):  # "eval sokoban" -> "eval", "sokoban"; "reward" -> "reward", ""
    name, _, world = metric.partition(" ")
    return name, world


def is_eval(metric):
    return split(metric)[0] == "eval"


def about(metric):  # -> Metric
    return METRICS[split(metric)[0]]


def load(folder):  # -> a run: config, rows
    config_file, log_file = Path(folder, "config.json"), Path(folder, "log.jsonl")
    need(config_file.is_file() and log_file.is_file(), f"{folder} is not the folder of a run")
    config = dict(json.loads(config_file.read_text()))
    rows = []
    text = log_file.read_text(errors="replace").splitlines()
    for line in text:
        try:
            rows.append(dict(json.loads(line)))
        except ValueError:  # a run that was killed in mid-write: its last line
            need(len(rows) == len(text) - 1, f"{log_file}: line {len(rows) + 1} is damaged")
    return config, rows


def value_in(row, metric, own_world):  # -> number, or None: this row has none
    name, world = split(metric)
    if name == "eval":  # a dict: {"sokoban": 0.4, ...}
        return row.get("eval", {}).get(world or own_world)
    if name == "seconds" and "seconds_rollout" in row:
        return row["seconds_rollout"] + row["seconds_update"]
    return row.get(name)


def series(config, rows, metric):  # -> iterations, values
    x, y = [], []
    for row in rows:
        value = value_in(row, metric, config["env"])
        if value is not None:
            x.append(row["iteration"])
            y.append(value)
    if metric == "seconds":
        y = np.cumsum(y)
    return np.array(x), np.array(y, dtype=float)


# ------------------------------------------------------------------------------------------------- the pictures
def curves(folders, out=None):  # -> Path of the picture
    if out is None and len(folders) == 1:
        out = Path(folders[0], "curves.png")
    elif out is None:
        out = Path("curves.png")
        number = 1
        while out.exists():  # it may be a picture of other runs
            number += 1
            out = Path(f"curves{number}.png")
    need(Path(out).suffix in (".png", ".pdf", ".svg"), f"--out {out}: end its name in .png, .pdf or .svg")
    labels = [Path(folder).resolve().name for folder in folders]
    if len(set(labels)) < len(labels):  # runs of the same name, in different folders
        labels = [str(folder) for folder in folders]
    runs = [load(folder) for folder in folders]
    return dashboard(dict(zip(labels, runs)), Path(out), columns=4)


def dashboard(runs, out, columns, others=DASHBOARD):  # runs: {label: run} -> out
    """The signs of learning, and of the Echo Trap (README), of one run or several: success in each of their worlds, then
    those of the other metrics that they have."""
    wanted = []
    for _, rows in runs.values():
        for row in rows:
            wanted += [f"eval {world}" for world in row.get("eval", {}) if f"eval {world}" not in wanted]
    wanted += [metric for metric in others if metric != "eval"]
    panels = []
    for metric in wanted:
        _, world = split(metric)
        prefix = f"{envs.title(world)} " if world else ""
        lines = {label: run for label, run in runs.items() if len(series(*run, metric)[0]) > 0}
        if lines:
            panels.append((metric, prefix, lines, common_yardsticks(lines.values(), metric)))
    need(panels, f"{' '.join(runs)}: no iteration is finished, nothing to draw")
    subjects = {f"{envs.title(config['env'])}, {config['model']}" for config, _ in runs.values()}
    return draw(" / ".join(sorted(subjects)), panels, out, columns, list(runs))


def live(cfg, rows):
    """For a notebook: `ragen_mini.train(cfg, watch=plots.live)` shows the curves while it trains."""
    from IPython.display import Image, clear_output, display  # every notebook has it, and nothing else needs it
    if len(rows) == 1 and "eval" not in rows[0]:  # nothing to draw yet
        return
    finished = len(rows) > cfg.iterations or "dead" in rows[-1]  # row 0 is the evaluation before training
    if len(rows) % 5 != 1 and not finished:  # a picture takes as long as an iteration of a small model
        return
    picture = io.BytesIO()
    dashboard({"this run": (vars(cfg), rows)}, picture, 3, ("reward", "entropy"))
    clear_output(wait=True)
    display(Image(picture.getvalue()))


TEMPLATE = Path(__file__).parent / "figures" / "xray.html"


def xray(folder):  # -> Path of the page
    """A page that shows two episodes, every token tinted by its advantage; pointing at one shows what the update knew."""
    file = Path(folder, "xray.json")
    need(file.is_file(), f"{folder} has no xray.json: it is written at the first checkpoint")
    episodes = json.loads(file.read_text())
    data = json.dumps({"title": str(folder), "episodes": episodes})
    data = data.replace("<", "\\u003c")  # or a </script> that a model wrote would end the page's own
    page = Path(folder, "xray.html")
    page.write_text(TEMPLATE.read_text(encoding="utf-8").replace("EPISODES", data), encoding="utf-8")
    return page


# ------------------------------------------------------------------------------------------ how a panel is drawn
STYLE = ["petroff10", {  # colours that all readers tell apart
    "axes.grid": True, "grid.alpha": 0.25, "legend.fontsize": 8, "axes.titlesize": 9.5,
    "font.size": 9.5, "lines.markersize": 3, "axes.formatter.min_exponent": 3}]
DASHES = ("-", "--", "-.", ":")


def draw_run(ax, metric, run, label, number):
    """One curve. The number gives colour and dashes."""
    config, rows = run
    x, y = series(config, rows, metric)
    color = f"C{number}"
    style = DASHES[number % len(DASHES)]
    x_label = "iteration"
    if about(metric).smooth:
        y = moving_average(y)
        x_label = "iteration (smoothed)"
    if is_eval(metric):
        style += "o"
        x_label = "iteration (95% interval)"
        low, high = np.array([envs.interval(p, config["eval_prompts"]) for p in y]).T
        ax.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
    ax.plot(x, y, style, color=color, lw=2, label=label)
    ax.set_xlabel(x_label)


@matplotlib.style.context(STYLE)
def draw(title, panels, out, columns, labels, draw_line=draw_run):  # panels: see the top -> out
    """`labels` are those of all panels: a line keeps its colour in every panel, also where others are missing. (The lines
    of figures/paper.py are means over several seeds: it has a draw_line of its own.)"""
    height = math.ceil(len(panels) / columns)  # in panels
    fig = matplotlib.figure.Figure(figsize=(12, 2.7 * height + 0.5), layout="constrained")  # needs no display
    shown = []
    for place, panel in enumerate(panels, 1):
        ax = fig.add_subplot(height, columns, place)
        draw_panel(ax, *panel, labels, draw_line)
        _, names = ax.get_legend_handles_labels()
        if names != shown:  # the same lines as in the panel before need no second legend
            ax.legend()
        shown = names
    fig.suptitle(title, fontsize=11)
    fig.savefig(out, dpi=90)
    return out


def draw_panel(ax, metric, prefix, lines, yardsticks, labels, draw_line):
    for label, line in lines.items():
        draw_line(ax, metric, line, label, labels.index(label))
    if is_eval(metric):
        ax.set_ylim(0, 1.02)
    if yardsticks is not None:
        draw_yardsticks(ax, *yardsticks)
    if about(metric).log_axis:
        use_log_axis(ax)
    ax.set_title(prefix + about(metric).title)


def use_log_axis(ax):
    if ax.dataLim.y1 > 0:  # the largest value that was drawn
        ax.set_yscale("log", nonpositive="clip")  # 0 lies below the axis: the line runs out of the picture
        low, high = ax.get_ylim()
        floor = min(1e-4, high / 10)  # what is below is as good as 0 (unless all of the curve is that small)
        ax.set_ylim(max(low, floor), high)


def draw_yardsticks(ax, random, optimal):
    across = ax.get_yaxis_transform()  # x from 0 to 1 whatever the iterations are
    white = dict(facecolor="white", alpha=0.8, lw=0, pad=1)  # no curve strikes the words through
    for level in random, optimal:
        ax.axhline(level, color="0.4", lw=1, ls=":")
    style = dict(color="0.3", transform=across, zorder=3, bbox=white)
    ax.text(0.98, random, f"random {random:.2f}", ha="right", va="bottom", **style)
    ax.text(0.02, optimal, f"optimal {optimal:.2f}", ha="left", va="top", **style)


def common_yardsticks(runs, metric):  # -> random, optimal: where they are the same for all of these runs; else None
    if not is_eval(metric):
        return None
    _, world = split(metric)
    found = {yardsticks_of(config, world or config["env"]) for config, _ in runs}
    return found.pop() if len(found) == 1 else None


def yardsticks_of(config, world):  # -> random, optimal; or None
    """config.json has those of the run's evaluations. In a notebook there is none yet: they are calculated."""
    if world in config.get("yardsticks", {}):
        return tuple(config["yardsticks"][world])
    if world in envs.BUILT_IN:
        return tuple(envs.yardsticks_of_run(world, config))
    return None


def moving_average(y, decay=0.8):
    """Exponential; divided by the sum of the weights so far, so that the first averages are not pulled towards 0."""
    total = weight = 0.0
    averages = []
    for value in y:
        total = decay * total + value
        weight = decay * weight + 1
        averages.append(total / weight)
    return np.array(averages)


# -------------------------------------------------------------------- when was a run lost, and what moved before?
ANATOMY = ("success", "valid", "reward", "reward_std", "entropy", "grad_norm_max", "kl", "distinct", "true_claims")
WINDOW = 5  # the best success is the highest mean of so many iterations: one lucky rollout is not the best
LOST_FOR = 10  # so many iterations in a row below half of the best: lost, not a dip
HISTORY = 20  # values before a point that tell what is usual there
MIN_HISTORY = 5  # fewer tell nothing
OUTSIDE_FOR = 3  # values in a row outside its healthy range: the signal has left it
SPIKE = 5  # or one value above so many times the median of its history


def collapse(folder):  # -> Path of the picture
    config, rows = load(folder)
    enough = len(series(config, rows, "success")[0]) >= HISTORY
    need(enough, f"{folder}: its log is shorter than {HISTORY} iterations, or has no column success")
    return draw_anatomy(config, rows, Path(folder, "collapse.png"))


@matplotlib.style.context(STYLE)
def draw_anatomy(config, rows, out, signals=ANATOMY):  # -> out
    """One run, its signals stacked on one axis. Green: a signal's healthy range. Red: what left_range says."""
    best, lost_at, events = anatomy(config, rows, signals)
    end = rows[-1]["iteration"]
    fig = matplotlib.figure.Figure(figsize=(8, 1.4 * len(events) + 1), layout="constrained")
    axes = fig.subplots(len(events), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, event) in zip(axes, events.items()):
        x, y = series(config, rows, name)
        draw_signal(ax, name, x, y, healthy_range(x, y, best), event)
        evaluated_at, evaluations = series(config, rows, "eval")
        if name == "success" and len(evaluations) > 0:
            ax.plot(evaluated_at, evaluations, "o", color="C1", label="evaluation")
            ax.legend()
        if lost_at is not None:
            ax.axvspan(lost_at, end, color="0.5", alpha=0.15, lw=0)
    axes[-1].set_xlabel("iteration")
    lost = "not lost" if lost_at is None else f"lost at {lost_at} (grey)"
    world = envs.title(config["env"])
    meaning = "Green: range until then; red: left, or a spike"
    fig.suptitle(f"{world}: success is best at {best}, {lost}. {meaning}", fontsize=9.5)
    fig.savefig(out, dpi=90)
    return out


def draw_signal(ax, name, x, y, healthy, event):
    ax.set_title(about(name).title, loc="left")
    ax.plot(x, y, color="C0", lw=1)
    if about(name).log_axis:
        use_log_axis(ax)
    if healthy is not None:
        limits = ax.get_ylim()
        ax.axhspan(*healthy, color="tab:green", alpha=0.12, lw=0)
        ax.set_ylim(limits)  # the range may be wider than the curve
    if event is not None:
        iteration, how = event
        ax.axvline(iteration, color="tab:red", lw=1.5)
        ax.annotate(f" {iteration} ({how})", (iteration, 0.85), xycoords=("data", "axes fraction"), color="tab:red")


def anatomy(config, rows, signals=ANATOMY):
    """-> iteration of the best success; of its loss, or None; {signal: what left_range says}. There None also stands for
    what moved only with the loss, or after it. For example 28, 311, {"entropy": (175, "spike"), "valid": None}."""
    best, lost_at = best_and_loss(config, rows)
    events = {}
    for name in signals:
        x, y = series(config, rows, name)
        if len(x) < HISTORY:
            continue
        event = left_range(x, y, best)
        if event is not None and lost_at is not None and event[0] >= lost_at:
            event = None
        events[name] = event
    return best, lost_at, events


def best_and_loss(config, rows):  # -> iteration of the best success, of its loss (or None)
    """With WINDOW = 2 and LOST_FOR = 3, to be short:

        iteration      1    2    3    4    5    6    7    8
        success        0.2  0.9  1.0  1.0  0.6  0.1  0.0  0.0
        mean of two    .55  .95  1.0  0.8  .35  .05  0.0

    It is best at iteration 3, and lost at 6: there begin three iterations in a row below half of the best.
    """
    iterations, success = series(config, rows, "success")
    means = forward_means(success, WINDOW)
    best = means.argmax()  # where the best stretch begins: before it success still rose
    below_half = extend_if_dead(success, rows) < means[best] / 2
    for i in range(best, len(success)):
        if below_half[i:i + LOST_FOR].sum() == LOST_FOR:
            return iterations[best], iterations[i]
    return iterations[best], None


def forward_means(y, n):  # of each value and the n - 1 after it; of all, if there are not so many
    n = min(n, len(y))
    return np.convolve(y, np.ones(n) / n, "valid")


def extend_if_dead(y, rows):
    """A dead run ended since its model was no longer changed. It is taken to go on at its last value."""
    if "dead" in rows[-1]:
        return np.append(y, np.full(LOST_FOR, y[-1]))
    return y


def healthy_range(x, y, best):  # iterations, values, iteration of the best success -> low, high; or None
    """The range of the last HISTORY values up to the best, widened by half its width on each side."""
    healthy = y[x <= best][-HISTORY:]
    if len(healthy) < MIN_HISTORY:  # the best came too early
        return None
    margin = (healthy.max() - healthy.min()) / 2
    return healthy.min() - margin, healthy.max() + margin


def left_range(x, y, best):  # -> (the first iteration after the best that is not healthy, "outside" or "spike"), or None
    """A signal has left its range where OUTSIDE_FOR values in a row lie outside, above or below, or where one is above
    SPIKE times the median of the HISTORY values that precede it, even inside the range.

    The rule is a rough one. A signal that was falling already before the best has a wide range, and may go on falling
    inside it, unseen. Different thoughts, the echo itself, are often such a signal: look at the curve. And in healthy
    runs, too, a signal may leave the range that it had while the task was learnt: compare with runs that were not
    lost."""
    healthy = healthy_range(x, y, best)
    if healthy is None:
        return None
    low, high = healthy
    outside = (y < low) | (y > high)
    for i in range(np.searchsorted(x, best, side="right"), len(y)):
        if outside[i:i + OUTSIDE_FOR].sum() == OUTSIDE_FOR:
            return x[i], "outside"
        usual = np.median(y[max(0, i - HISTORY):i])
        if usual > 0 and y[i] > SPIKE * usual:
            return x[i], "spike"
    return None


# --------------------------------------------------------------------------------------------- the command line
def command_line(argv):
    columns = []
    for name in METRICS:
        said = about(name).title
        if about(name).meaning:
            said += f"; {about(name).meaning}"
        columns.append(f"  {name:20}{said}")
    description = __doc__ + "\nThe columns of log.jsonl, first those of the dashboard:\n" + "\n".join(columns)
    parser = argparse.ArgumentParser("plots.py", description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda text: need(False, f"{text} (--help shows how)")
    parser.add_argument("what", choices=["curves", "collapse", "xray"])
    parser.add_argument("folders", nargs="+", help="of runs")
    parser.add_argument("--out", help="curves: the picture's name, such as both.png")
    args = parser.parse_args(argv)
    need(args.what == "curves" or not args.out, "--out is for curves")
    return args


def main(argv=None):
    try:
        args = command_line(argv)
        if args.what == "curves":
            print(curves(args.folders, args.out))
        elif args.what == "collapse":
            for folder in args.folders:
                print(collapse(folder))
        else:
            for folder in args.folders:
                print(xray(folder))
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        said = " ".join(str(error).split())
        print(f"{' '.join(args.folders)}: a file of the run is damaged, or plots.py is wrong ({type(error).__name__}: "
              f"{said})", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
