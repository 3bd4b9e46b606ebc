"""Pictures of training runs, from the files in their folders: config.json, log.jsonl, xray.json. Nothing is trained.

    python plots.py curves RUN              a dashboard: RUN/curves.png (or --out FILE.png)
    python plots.py curves RUN RUN ...      several runs overlaid: curves.png here, or curves2.png, ...
    python plots.py collapse RUN ...        the anatomy of a run: which signal moved first? RUN/collapse.png
    python plots.py xray RUN ...            every token of two episodes and what it earned: RUN/xray.html

A *metric* is a name of LOOKS, mostly a column of the log. A run may be evaluated in several worlds: "eval sokoban" is its
success in Sokoban, and "eval" alone that in the world in which it was trained. The top of ragen_mini.py says what
turns, thoughts, returns and groups are.
"""
import argparse
import contextlib
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


# --------------------------------------------------------------------------------------- what a run logs, and its looks
@dataclass
class Look:
    title: str
    meaning: str  # or what to look for; --help tells it
    smooth: bool = True  # drawn as a moving average, else as measured
    log_axis: bool = False


LOOKS = {
    "eval": Look("success", "on held-out levels, by world; read it beside random and optimal play", smooth=False),
    "reward": Look("mean return (training)", "of a rollout; -0.1 a turn if no answer is valid"),
    "success": Look("success (training)", "share of won episodes in a rollout"),
    "valid": Look("share of valid turns", "a lasting fall is the plainest sign of a collapse"),
    "reward_std": Look("in-group return std", "0: all episodes of a group end alike, nothing to compare",
                       smooth=False, log_axis=True),
    "entropy": Look("entropy per token", "of the model's choices; falls while it makes up its mind"),
    "grad_norm": Look("gradient norm", "mean of the updates; small when all is learnt", log_axis=True),
    "grad_norm_max": Look("largest gradient norm", "of the updates; most spikes do no harm, one may be the end",
                          log_axis=True),
    "kl": Look("log pi_old - log pi_ref", "mean per token: how far the model is from the one before training"),
    "response_length": Look("tokens per episode", "that the model wrote; fewer when one answer is enough"),
    "think_length": Look("words per thought", "thoughts that shrink to nothing carry nothing"),
    "distinct": Look("different thoughts / thoughts", "near 0, the *echo*: the same phrases in every episode"),
    "mutual_information": Look("I(prompt; thought)", "figures/variants.py; 0: thoughts ignore what was read",
                               smooth=False),
    "claims": Look("share of turns whose thought claims something", "of the board"),
    "true_claims": Look("share of true claims", "of all claims"),
    "fitting": Look("share of fitting actions", "of turns with a claim: is the first action one that it names?"),
    "turns": Look("turns per episode", "5 at most, by default"),
    "policy_loss": Look("policy loss", "only its gradient means something"),
    "value_loss": Look("value loss", "of the critic's forecasts"),
    "clip_fraction": Look("clipped tokens / tokens", "0 in an iteration of one update, whose ratios are 1"),
    "updates": Look("gradient steps", "0: nothing to compare"),
    "kept": Look("trajectories that were trained on", "fewer if the filter is on"),
    "tokens": Look("tokens of the rollout", "that the model wrote"),
    "seconds_rollout": Look("seconds of playing", "of this iteration"),
    "seconds_update": Look("seconds of the updates", "of this iteration"),
    "seconds": Look("seconds so far", "no column, but the sum of these two, up to an iteration", smooth=False),
    "warning": Look("a sign of collapse", "fewer than half as many valid turns as at the best; text, written once"),
    "dead": Look("the run has ended by itself", "ten iterations in a row had nothing to compare"),
}
DASHBOARD = ("reward", "valid", "reward_std", "entropy", "grad_norm", "kl", "response_length", "think_length", "distinct",
             "mutual_information", "true_claims", "seconds")  # behind success in every world


def unique(items):  # each once, in their order
    return list(dict.fromkeys(items))


def name_and_world(metric):  # "eval sokoban" -> "eval", "sokoban"; "reward" -> "reward", ""
    name, _, world = metric.partition(" ")
    return name, world


def look_of(metric):
    name, _ = name_and_world(metric)
    return LOOKS[name]


def is_eval(metric):
    name, _ = name_and_world(metric)
    return name == "eval"


# ------------------------------------------------------------------------------------------- a run and its curves
@dataclass
class Run:
    config: dict  # config.json
    rows: list  # the lines of log.jsonl as dicts, {"iteration": 3, "reward": 1.2, ...}; the first is before training

    def series(self, metric):  # -> iterations, values: of the rows that have it
        x, y = [], []
        for row in self.rows:
            value = self.value(row, metric)
            if value is not None:
                x.append(row["iteration"])
                y.append(value)
        y = np.array(y, dtype=float)
        if metric == "seconds":  # a row has its own seconds; drawn is the time so far
            y = np.cumsum(y)
        return np.array(x), y

    def value(self, row, metric):  # -> number; None: this row does not have it
        name, world = name_and_world(metric)
        if name == "eval":  # row["eval"] is {"sokoban": 0.4, ...}
            return row.get("eval", {}).get(world or self.config["env"])
        if name == "seconds" and "seconds_update" in row:
            return row["seconds_rollout"] + row["seconds_update"]
        return row.get(name)

    def has(self, metric):
        return any(self.value(row, metric) is not None for row in self.rows)

    def worlds(self):  # in which it was evaluated
        return unique(world for row in self.rows for world in row.get("eval", {}))

    def is_dead(self):  # it ended by itself: ten iterations in a row had nothing to compare
        return bool(self.rows) and "dead" in self.rows[-1]


def load(folder):  # -> Run
    config_file, log_file = Path(folder, "config.json"), Path(folder, "log.jsonl")
    need(config_file.is_file() and log_file.is_file(), f"{folder} is not the folder of a run")
    config = parse_json(read(config_file), config_file)
    known = isinstance(config, dict) and config.keys() >= {"env", "model", "eval_prompts"}
    need(known, f"{config_file} is damaged: it lacks settings")
    *lines, last = read(log_file).split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(parse_row(line))
        except Exception as error:  # whatever is wrong with it
            raise UserError(f"{log_file}, line {number}, is damaged ({error!r})") from error
    with contextlib.suppress(Exception):  # mostly nothing, or half a row that is still being written
        rows.append(parse_row(last))
    return Run(config, rows)


def parse_row(line):  # -> dict; raises some exception if something else stands where a number is expected
    row = json.loads(line)
    numbers = row | row.get("eval", {})
    for name in numbers.keys() - {"eval", "warning"}:
        if numbers[name] is not None:  # as mutual_information, where no answer was valid
            float(numbers[name])
    int(row["iteration"])
    return row


def read(file):
    return file.read_text(encoding="utf-8", errors="replace")  # the last row may end inside a character


def parse_json(text, file):
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error})") from error


# ------------------------------------------------------------------------------------------------- the pictures
# From the outside in: curves, dashboard, draw, draw_run. (figures/paper.py uses Panel, `grid`, `finish_panel`,
# `add_legends` and `save`, too.)
@dataclass
class Panel:
    metric: str
    title: str
    lines: dict  # {label: Run}: one curve each (in figures/paper.py: {label: list of Run})
    yardsticks: tuple | None  # success of random and of optimal play, where these are the same for all of its runs


def curves(folders, out=None):  # -> Path of the picture
    if out is None and len(folders) == 1:
        out = Path(folders[0], "curves.png")
    elif out is None:
        out = free_name()
    need(Path(out).suffix in (".png", ".pdf", ".svg"), f"--out {out}: end its name in .png, .pdf or .svg")
    labels = [Path(folder).resolve().name for folder in folders]
    if len(set(labels)) < len(labels):  # runs of the same name, in different folders
        labels = [str(folder) for folder in folders]
    runs = {label: load(folder) for label, folder in zip(labels, folders)}
    return dashboard(runs, Path(out), per_row=4, metrics=DASHBOARD)


def free_name():  # curves.png, curves2.png, ...: a picture that is there may be of other runs
    number = 1
    out = Path("curves.png")
    while out.exists():
        number += 1
        out = Path(f"curves{number}.png")
    return out


def dashboard(runs, out, per_row, metrics):  # runs: {label: Run} -> out
    """Success in every world in which some run was evaluated, then these metrics, if some run has them."""
    worlds = unique(world for run in runs.values() for world in run.worlds())
    panels = []
    for metric in [*(f"eval {world}" for world in worlds), *metrics]:
        lines = {label: run for label, run in runs.items() if run.has(metric)}
        if lines:
            panels.append(Panel(metric, title_of(metric), lines, common_yardsticks(lines.values(), metric)))
    need(panels, f"{' '.join(runs)}: no iteration is finished, nothing to draw")
    subjects = {f"{envs.title(run.config['env'])}, {run.config['model']}" for run in runs.values()}
    return draw(" / ".join(sorted(subjects)), panels, out, per_row, list(runs))


def title_of(metric):
    _, world = name_and_world(metric)
    return f"{envs.title(world)} {look_of(metric).title}" if world else look_of(metric).title


def common_yardsticks(runs, metric):  # -> random, optimal; or None, if these runs do not share them
    if not is_eval(metric):
        return None
    _, world = name_and_world(metric)
    found = {yardsticks_of(run.config, world or run.config["env"]) for run in runs}
    return found.pop() if len(found) == 1 else None


def yardsticks_of(config, world):  # -> random, optimal; or None
    """config.json has them, for each world in which the run is evaluated. In a notebook, where a run is drawn while it is
    trained, they are calculated."""
    if world in config.get("yardsticks", {}):
        return tuple(config["yardsticks"][world])
    if world in envs.BUILT_IN:
        return tuple(envs.yardsticks_of_run(world, config))
    return None


STYLE = ["petroff10", {  # colours that all readers tell apart
    "axes.grid": True, "grid.alpha": 0.25, "legend.fontsize": 8, "axes.titlesize": 9.5,
    "font.size": 9.5, "lines.markersize": 3, "axes.formatter.min_exponent": 3}]
DASHES = ("-", "--", "-.", ":")


@matplotlib.style.context(STYLE)  # as a decorator: everything inside is drawn in this style
def draw(title, panels, out, per_row, labels):  # list of Panel -> out (a file, or a buffer)
    """`labels` are those of all panels: a line keeps its colour in every panel, also where others are missing."""
    fig, axes = grid(len(panels), per_row)
    for ax, panel in zip(axes, panels):
        for label, run in panel.lines.items():
            draw_run(ax, panel.metric, run, label, labels.index(label))
        finish_panel(ax, panel)
    add_legends(axes)
    return save(fig, title, out)


def grid(count, per_row):  # -> figure, list of axes
    rows = math.ceil(count / per_row)
    fig = matplotlib.figure.Figure(figsize=(12, 2.7 * rows + 0.5), layout="constrained")  # needs no display
    return fig, [fig.add_subplot(rows, per_row, place + 1) for place in range(count)]


def draw_run(ax, metric, run, label, number):
    """One curve. The number gives colour and dashes."""
    x, y = run.series(metric)
    color = f"C{number}"
    line = DASHES[number % len(DASHES)]
    x_label = "iteration"
    if look_of(metric).smooth:
        y = moving_average(y)
        x_label = "iteration (smoothed)"
    if is_eval(metric):
        line += "o"  # a dot for each evaluation
        x_label = "iteration (95% interval)"
        low, high = np.array([envs.interval(p, run.config["eval_prompts"]) for p in y]).T
        ax.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
    ax.plot(x, y, line, color=color, lw=2, label=label)
    ax.set_xlabel(x_label)


def finish_panel(ax, panel):
    if is_eval(panel.metric):
        ax.set_ylim(0, 1.02)
    if panel.yardsticks is not None:
        draw_yardsticks(ax, *panel.yardsticks)
    if look_of(panel.metric).log_axis:
        use_log_axis(ax)
    ax.set_title(panel.title)


def add_legends(axes):
    names_before = []
    for ax in axes:
        _, names = ax.get_legend_handles_labels()
        if names and names != names_before:  # the same lines as in the panel before need no second legend
            ax.legend()
        names_before = names


def save(fig, title, out):  # -> out
    fig.suptitle(title, fontsize=11)
    fig.savefig(out, dpi=90)
    return out


def use_log_axis(ax):
    if ax.dataLim.y1 > 0:  # the largest value that was drawn
        ax.set_yscale("log")  # 0 lies below the axis: the line runs out of the picture
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


def moving_average(y, decay=0.8):
    """Exponential; divided by the sum of the weights so far, so that the first averages are not pulled towards 0."""
    total = weight = 0.0
    averages = []
    for value in y:
        total = decay * total + value
        weight = decay * weight + 1
        averages.append(total / weight)
    return np.array(averages)


# ------------------------------------------------------------------ when did a run collapse, and what moved before?
# Find the peak, the iteration at which success was best, and the collapse, if there was one. The values of a signal up
# to the peak give its healthy range. Which signals leave that range before the collapse?
#
# The rule is a rough one, and the same for all signals: it says what is unusual, not what is bad. A signal that was
# falling already before the peak has a wide range, and may go on falling inside it, unseen (different thoughts, the echo
# itself, often do: look at the curve). One that did not move at all has a range without width, and leaves it at a trifle.
# And in healthy runs, too, signals leave the range that they had while the task was learnt: compare with such runs.
ANATOMY = ("eval", "success", "valid", "reward", "reward_std", "entropy", "grad_norm_max", "kl", "distinct",
           "true_claims")


@dataclass
class Signal:
    metric: str
    x: np.ndarray  # iterations
    y: np.ndarray  # values
    healthy: tuple | None = None  # low, high, see healthy_range; None: the peak came too early to tell
    left_at: int | None = None  # iteration at which it left that range, before the collapse; None: it did not
    how: str = ""  # "outside" or "spike"


WINDOW = 5  # The peak is the highest mean of this many iterations: one lucky rollout is no peak.
COLLAPSED_FOR = 10  # This many iterations in a row below half of the peak are a collapse, fewer are a dip.


def peak_and_collapse(run):  # -> their iterations; None: no collapse
    """With WINDOW = 2 and COLLAPSED_FOR = 3, to be short:

        iteration      1    2    3    4    5    6    7    8
        success        0.2  0.9  1.0  1.0  0.6  0.1  0.0  0.0
        mean of two    .55  .95  1.0  0.8  .35  .05  0.0

    The peak is at iteration 3, where the highest mean, 1.0, begins: before it success still rose. The collapse is at 6,
    where three values of success in a row, not of its mean, begin to be below half of that.
    """
    iterations, success = run.series("success")
    means = forward_means(success, WINDOW)
    peak = means.argmax()
    below_half = extend_if_dead(success, run) < means[peak] / 2
    for i in range(peak, len(success)):  # of those that were measured
        if in_a_row(below_half, i, COLLAPSED_FOR):
            return iterations[peak], iterations[i]
    return iterations[peak], None


def forward_means(y, n):  # of n neighbours, the first, the second, ...; of all, if there are not so many
    n = min(n, len(y))
    return np.convolve(y, np.ones(n) / n, "valid")


def extend_if_dead(y, run):
    """A dead run was ended because nothing changed its model any more. So it is taken to go on at its last value."""
    if run.is_dead():
        return np.append(y, np.full(COLLAPSED_FOR, y[-1]))
    return y


def in_a_row(flags, i, n):  # are n of them true, from the i-th on?
    return flags[i:i + n].sum() == n


HISTORY = 20  # This many values before some point tell what is usual there,
MIN_HISTORY = 5  # or fewer, at the beginning of a run, but not fewer than this.


def healthy_range(x, y, peak_at):  # -> lowest, highest; or None
    """The range of the last HISTORY values up to the peak, widened by half its width on each side."""
    healthy = y[x <= peak_at][-HISTORY:]
    if len(healthy) < MIN_HISTORY:
        return None
    margin = (healthy.max() - healthy.min()) / 2
    return healthy.min() - margin, healthy.max() + margin


OUTSIDE_FOR = 3  # A signal leaves its range with this many values in a row outside,
SPIKE = 5  # or with one value above this many times the median of the HISTORY values before it.


def left_range(x, y, healthy, peak_at, collapsed_at):  # -> iteration, how; or None, ""
    """The first iteration after the peak, and before any collapse, at which

        "outside"   OUTSIDE_FOR values in a row, from this one on, lie outside the healthy range, above or below
        "spike"     this value is above SPIKE times the median of the HISTORY values before it, even inside the range
    """
    low, high = healthy
    outside = (y < low) | (y > high)
    end = math.inf if collapsed_at is None else collapsed_at  # what moves later is no warning
    for i in np.flatnonzero((x > peak_at) & (x < end)):
        if in_a_row(outside, i, OUTSIDE_FOR):
            return x[i], "outside"
        usual = np.median(y[max(0, i - HISTORY):i])
        if usual > 0 and y[i] > SPIKE * usual:
            return x[i], "spike"
    return None, ""


MIN_RUN = 20  # A shorter run, or a signal with fewer values (but for evaluations, which are few), has no anatomy.


def anatomy(run, metrics=ANATOMY):  # -> iterations of peak and collapse (or None), list of Signal
    peak_at, collapsed_at = peak_and_collapse(run)
    signals = []
    for metric in metrics:
        x, y = run.series(metric)
        needed = 1 if is_eval(metric) else MIN_RUN
        if len(x) < needed:
            continue
        healthy = healthy_range(x, y, peak_at)
        left_at, how = None, ""
        if healthy is not None:
            left_at, how = left_range(x, y, healthy, peak_at, collapsed_at)
        signals.append(Signal(metric, x, y, healthy, left_at, how))
    return peak_at, collapsed_at, signals


def collapse(folder):  # -> Path of the picture
    run = load(folder)
    enough = len(run.series("success")[0]) >= MIN_RUN
    need(enough, f"{folder}: its log is shorter than {MIN_RUN} iterations, or has no column success")
    return draw_anatomy(run, Path(folder, "collapse.png"))


def draw_anatomy(run, out):  # -> out
    peak_at, collapsed_at, signals = anatomy(run)
    title = f"{envs.title(run.config['env'])}: {in_words(peak_at, collapsed_at, signals)}"
    return draw_signals(title, signals, collapsed_at, out)


def in_words(peak_at, collapsed_at, signals):
    said = f"peak at {peak_at}"
    if collapsed_at is not None:
        said += f", collapse at {collapsed_at} (grey)"
    left = [signal for signal in signals if signal.left_at is not None]
    if left:
        first = min(left, key=lambda signal: signal.left_at)
        said += f"; first to leave its range: {look_of(first.metric).title}"
    if any(signal.healthy is not None for signal in signals):
        return f"{said}\ngreen: healthy range; red: left it, or jumped"
    return f"{said}\nthe peak came too early to know the healthy ranges"


@matplotlib.style.context(STYLE)
def draw_signals(title, signals, collapsed_at, out):  # -> out: one below the other, above the same iterations
    fig = matplotlib.figure.Figure(figsize=(8, 1.4 * len(signals) + 1), layout="constrained")
    axes = fig.subplots(len(signals), 1, sharex=True, squeeze=False)[:, 0]
    end = max(signal.x[-1] for signal in signals)
    for ax, signal in zip(axes, signals):
        draw_signal(ax, signal)
        if collapsed_at is not None:
            ax.axvspan(collapsed_at, end, color="0.5", alpha=0.15, lw=0)
    axes[-1].set_xlabel("iteration")
    return save(fig, title, out)


def draw_signal(ax, signal):
    ax.plot(signal.x, signal.y, color="C0", lw=1)
    ax.set_title(look_of(signal.metric).title, loc="left")
    if look_of(signal.metric).log_axis:
        use_log_axis(ax)
    if signal.healthy is not None:
        limits = ax.get_ylim()
        ax.axhspan(*signal.healthy, color="tab:green", alpha=0.12, lw=0)
        ax.set_ylim(limits)  # the range may be wider than the curve
    if signal.left_at is not None:
        ax.axvline(signal.left_at, color="tab:red", lw=1.5)
        ax.annotate(f" {signal.left_at} ({signal.how})", (signal.left_at, 0.85), xycoords=("data", "axes fraction"),
                    color="tab:red")


# -------------------------------------------------------------------------------------- the X-ray; the live picture
TEMPLATE = Path(__file__).parent / "figures" / "xray.html"


def xray(folder):  # -> Path of the page
    """A page that shows two episodes, every token tinted by its advantage; pointing at one shows what the update knew."""
    file = Path(folder, "xray.json")
    need(file.is_file(), f"{folder} has no xray.json: it is written at the first checkpoint")
    episodes = parse_json(read(file), file)
    data = json.dumps({"title": str(folder), "episodes": episodes})
    data = data.replace("<", "\\u003c")  # or a </script> that a model wrote would end the page's own
    page = Path(folder, "xray.html")
    page.write_text(read(TEMPLATE).replace("EPISODES", data), encoding="utf-8")
    return page


def live(cfg, rows):
    """For a notebook: `ragen_mini.train(cfg, watch=plots.live)` shows the curves while it trains."""
    from IPython.display import Image, clear_output, display  # every notebook has it, and nothing else needs it
    run = Run(vars(cfg), rows)
    if len(rows) == 1 and not run.worlds():  # not even an evaluation: nothing to draw yet
        return
    finished = len(rows) > cfg.iterations or run.is_dead()  # row 0 is the evaluation before training
    due = rows[-1]["iteration"] % 5 == 0  # a picture takes as long as an iteration of a small model
    if not (due or finished):
        return
    picture = io.BytesIO()
    dashboard({"this run": run}, picture, per_row=3, metrics=["reward", "entropy"])
    clear_output(wait=True)
    display(Image(picture.getvalue()))


# --------------------------------------------------------------------------------------------- the command line
def command_line(argv):
    listed = "\n".join(f"  {name:20}{look.title}; {look.meaning}" for name, look in LOOKS.items())
    description = f"{__doc__}\nThe columns of log.jsonl:\n{listed}"
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


if __name__ == "__main__":
    main()
