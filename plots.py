"""Pictures of runs, from the files in their folders alone: config.json, log.jsonl, xray.json. Nothing is trained.

    python plots.py curves RUN              a dashboard: RUN/curves.png (or --out FILE.png)
    python plots.py curves RUN RUN ...      several runs overlaid: curves.png here, or curves2.png, ...
    python plots.py collapse RUN [RUN ...]  the anatomy of one run, which signal moved first: RUN/collapse.png
    python plots.py xray RUN                every token of two episodes and what it earned: RUN/xray.html

In this order: what a run logs, the pictures, how a panel is drawn, when a run counts as lost. figures/paper.py draws with
these functions, too. How the data look, from small to large:

    run     (config, rows): config.json, and the lines of log.jsonl as dicts: {"iteration": 3, "reward": 1.2, ...}
    runs    what one line of a picture is made of: runs that differ only in their seed (here one, for the paper several)
    lines   what one panel shows: {"PPO": runs, "GRPO": runs}
    panel   (metric, prefix of its title, lines)
    metric  a name in METRICS, mostly a column of the log; "eval sokoban" is success in Sokoban of a run in any world

A run is *lost* when for ten iterations less than half of its best success is left (the best mean of five iterations). It
is *dead* when it was ended because ten iterations in a row had nothing to compare: nothing could change any more.
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
    title: str
    meaning: str  # and what to look for
    dashboard: bool = True  # is it there?
    exact: bool = False  # drawn as measured; else as a moving average
    log: bool = False  # on a logarithmic axis; the line of several seeds is their median, else their mean
    of_updates: bool = False  # of gradient steps, of which a dead run makes no more


def other(title, meaning="", **how):  # not on the dashboard
    return Metric(title, meaning, dashboard=False, **how)


METRICS = {
    "eval": Metric("success", "on held-out levels; read it beside random and optimal play", exact=True),
    "reward": Metric("return (training)", "a lost run sits at -0.1 times its turns: all of them invalid"),
    "valid": Metric("share of valid turns", "a lasting fall is the plainest sign of a collapse; near 1 proves nothing"),
    "reward_std": Metric("in-group return std", "0: all episodes of a group end alike: nothing to compare", log=True),
    "entropy": Metric("entropy per token", "falls while the policy makes up its mind; 0: one fixed phrase"),
    "grad_norm": Metric("gradient norm", "small when all is learnt; of the spikes after that most do no harm", log=True,
                        of_updates=True),
    "kl": Metric("log pi_old - log pi_ref", "mean per token: how far from the first model (with a KL term only)",
                 of_updates=True),
    "response_length": Metric("tokens per episode", "thoughts and actions; shrinks when one answer is enough"),
    "think_length": Metric("words per thought", "thoughts that shrink to nothing carry nothing"),
    "distinct": Metric("different thoughts / thoughts", "near 0: the same phrases in every episode, the echo itself"),
    "mutual_information": Metric("I(prompt; thought)", "0: the same thoughts whatever was read", exact=True),
    "true_claims": Metric("share of true claims", "what thoughts say of the board, checked (none: left out)"),
    "seconds": Metric("seconds so far", "seconds_rollout + seconds_update", exact=True),

    "success": other("success (training)", "share of won episodes in the rollout"),
    "grad_norm_max": other("longest gradient of the iteration", "grad_norm is the mean over its updates", log=True,
                           of_updates=True),
    "policy_loss": other("policy loss", "only its gradient means something", of_updates=True),
    "value_loss": other("value loss", "of the critic's forecasts", of_updates=True),
    "clip_fraction": other("clipped tokens / tokens", "0 where an iteration has one update", of_updates=True),
    "updates": other("gradient steps", "0: nothing to compare"),
    "kept": other("trajectories that were trained on"),
    "tokens": other("tokens that the model wrote"),
    "turns": other("turns per episode"),
    "claims": other("share of turns whose thought claims something"),
    "fitting": other("share of those whose first action fits the claim", "a claimed move; on the bandit 0"),
    "collapse": other("fewer than half as many valid turns as at its best", "written once"),
    "dead": other("ten iterations had nothing to compare", "written once"),
    "survival": other("share of seeds that have not lost their success", "not in the log: 1, then 0", exact=True),
}
DASHBOARD = [name for name, metric in METRICS.items() if metric.dashboard]


def about(metric):  # -> Metric
    name, _, _ = metric.partition(" ")
    return METRICS[name]


def load(folder):  # -> a run: config, rows
    config_file, log_file = Path(folder, "config.json"), Path(folder, "log.jsonl")
    need(config_file.is_file() and log_file.is_file(), f"{folder} is not the folder of a run")
    config = dict(json.loads(config_file.read_text()))
    rows = []
    for line in log_file.read_text(errors="replace").splitlines():
        try:
            rows.append(dict(json.loads(line)))
        except ValueError:
            break  # a run that was killed in mid-write
    return config, rows


def series(config, rows, metric):  # -> iterations (in rollouts of P prompts), values
    """One iteration of --online-k plays k*P prompts, so it counts for k."""
    if metric == "survival":
        return survival(config, rows)
    x, y = [], []
    for row in rows:
        value = value_in(row, metric, config["env"])
        if value is not None:
            x.append(row["iteration"] * config["online_k"])
            y.append(value)
    if metric == "seconds":
        y = np.cumsum(y)
    return np.array(x), np.array(y, dtype=float)


def value_in(row, metric, own_world):  # -> number, or None: this row has none
    kind, _, world = metric.partition(" ")
    if kind == "eval":  # a dict: {"sokoban": 0.4, ...}
        return row.get("eval", {}).get(world or own_world)
    if kind == "seconds" and "seconds_rollout" in row:
        return row["seconds_rollout"] + row["seconds_update"]
    return row.get(kind)


# ------------------------------------------------------------------------------------------------- the pictures
def curves(folders, out=None):  # -> Path of the picture
    if out is None and len(folders) == 1:
        out = Path(folders[0], "curves.png")
    elif out is None:
        out = Path("curves.png")
        number = 1
        while out.exists():  # nothing of the user's is overwritten
            number += 1
            out = Path(f"curves{number}.png")
    need(Path(out).suffix in (".png", ".pdf", ".svg"), f"--out {out}: end its name in .png, .pdf or .svg")
    labels = [Path(folder).resolve().name for folder in folders]
    if len(set(labels)) < len(labels):  # runs of the same name, in different folders
        labels = [str(folder) for folder in folders]
    runs = [load(folder) for folder in folders]
    return dashboard(dict(zip(labels, runs)), Path(out), columns=4)


def dashboard(loaded, out, columns, metrics=DASHBOARD):  # loaded: {label: run} -> out
    """The signs of learning, and of the Echo Trap (Fig. 6), of one run or several. Each world has a panel of its own."""
    worlds = []
    for _, rows in loaded.values():
        for row in rows:
            worlds += [world for world in row.get("eval", {}) if world not in worlds]
    wanted = [f"eval {world}" for world in worlds]
    wanted += [metric for metric in metrics if metric != "eval"]
    panels = []
    for metric in wanted:
        _, _, world = metric.partition(" ")
        prefix = f"{envs.title(world)} " if world else ""
        lines = {label: [run] for label, run in loaded.items() if len(series(*run, metric)[0]) > 0}
        if lines:
            panels.append((metric, prefix, lines))
    need(panels, f"{' '.join(loaded)}: no iteration is finished, nothing to draw")
    trained = {f"{envs.title(config['env'])}, {config['model']}" for config, _ in loaded.values()}
    return draw(" / ".join(sorted(trained)), panels, out, columns, list(loaded))


def live(cfg, rows):
    """For a notebook: `ragen_mini.train(cfg, watch=plots.live)` shows the curves while it trains."""
    from IPython.display import Image, clear_output, display  # every notebook has it, and nothing else needs it
    nothing_yet = len(rows) == 1 and "eval" not in rows[0]
    if nothing_yet or len(rows) % 5 != 1:  # at 0, 5, 10, ...: a picture takes as long as an iteration of `tiny`
        return
    picture = io.BytesIO()
    dashboard({"this run": (vars(cfg), rows)}, picture, 3, ("reward", "entropy"))
    clear_output(wait=True)
    display(Image(picture.getvalue()))


PAGE = Path(__file__).parent / "figures" / "xray.html"


def xray(folder):  # -> Path of the page
    """A page that shows two episodes, every token tinted by its advantage; pointing at one shows what the update knew."""
    file = Path(folder, "xray.json")
    need(file.is_file(), f"{folder} has no xray.json: it is written with the first checkpoint after training began")
    episodes = json.loads(file.read_text())
    data = json.dumps({"title": str(folder), "episodes": episodes})
    data = data.replace("<", "\\u003c")  # or a </script> that a model wrote would end the page's own
    page = Path(folder, "xray.html")
    template = PAGE.read_text(encoding="utf-8")
    page.write_text(template.replace("EPISODES", data), encoding="utf-8")  # a placeholder in figures/xray.html
    return page


def collapse(folder):  # -> Path of the picture
    config, rows = load(folder)
    enough = len(series(config, rows, "success")[0]) >= BEFORE
    need(enough, f"{folder}: its log is shorter than {BEFORE} iterations, or has no success")
    return draw_anatomy(config, rows, Path(folder, "collapse.png"))


# ------------------------------------------------------------------------------------------ how a panel is drawn
STYLE = ["petroff10", {  # colours that all readers tell apart
    "axes.grid": True, "grid.alpha": 0.25, "legend.fontsize": 8, "legend.title_fontsize": 8, "axes.titlesize": 9.5,
    "font.size": 9.5, "lines.markersize": 3, "axes.formatter.min_exponent": 3}]
DASHES = ("-", "--", "-.", ":")


@matplotlib.style.context(STYLE)
def draw(title, panels, out, columns, labels):  # panels: (metric, prefix, lines) of each -> out
    """`labels` are those of all panels: a line keeps its colour in every panel, also where others are missing."""
    height = math.ceil(len(panels) / columns)
    fig = matplotlib.figure.Figure(figsize=(12, 2.7 * height + 0.5), layout="constrained")
    shown = None
    for place, (metric, prefix, lines) in enumerate(panels, 1):
        ax = fig.add_subplot(height, columns, place)
        draw_panel(ax, metric, prefix, lines, labels)
        seeds = {label: len(runs) for label, runs in lines.items()}
        if seeds != shown:  # the same lines as in the panel before need no second legend
            ax.legend(title=legend_title(metric, lines))
        shown = seeds
    fig.suptitle(title, fontsize=11)
    fig.savefig(out, dpi=90)
    return out


def legend_title(metric, lines):  # -> what is drawn, in words
    if metric == "survival":
        return ""
    if max(len(runs) for runs in lines.values()) > 1:
        return "median and each seed" if about(metric).log else "mean and each seed"
    return "95% interval" if metric.startswith("eval") else ""


def draw_panel(ax, metric, prefix, lines, labels):
    name, _, world = metric.partition(" ")
    for label, runs in lines.items():
        x, y = of_all_seeds(runs, metric)
        if not x:
            continue
        number = labels.index(label)
        if name == "eval" and len(runs) == 1:
            draw_interval(ax, x, y[0], runs[0][0]["eval_prompts"], f"C{number}")
        draw_line(ax, metric, x, y, label, number)
    if name == "eval":
        ax.set_ylim(0, 1.02)
        draw_yardsticks(ax, world, lines)
    ax.set_title(prefix + about(metric).title)
    ax.set_xlabel("iteration" if about(metric).exact else "iteration (moving average)")
    if about(metric).log and ax.dataLim.y1 > 0:
        ax.set_yscale("log", nonpositive="clip")  # 0 lies below the axis: the line runs out of the picture
        ax.set_ylim(bottom=max(ax.get_ylim()[0], 1e-4))


def draw_line(ax, metric, x, y, label, number):  # y (seeds, iterations)
    """A thick line over all seeds, and thin ones: events that come at different times vanish in a mean."""
    color = f"C{number}"
    if not about(metric).exact:
        y = moving_average(y)
    if len(y) > 1:
        label += f", {len(y)} seeds"
        if metric != "survival":
            ax.plot(x, y.T, color=color, lw=0.6, alpha=0.5)
    middle = np.nanmedian if about(metric).log else np.nanmean
    style = DASHES[number % len(DASHES)]
    if metric.startswith("eval"):
        style += "o"
    ax.plot(x, middle(y, axis=0), style, color=color, lw=2, label=label)


def draw_interval(ax, x, y, levels, color):  # 95%, of success rates y
    low, high = np.array([envs.interval(p, levels) for p in y]).T
    ax.fill_between(x, low, high, color=color, alpha=0.15, lw=0)


def draw_yardsticks(ax, world, lines):
    """Random and optimal play, where they are the same for all runs of the panel."""
    found = set()
    for runs in lines.values():
        for config, _ in runs:
            found.add(yardsticks_of(config, world or config["env"]))
    if len(found) > 1 or None in found:
        return
    random, optimal = found.pop()
    across = ax.get_yaxis_transform()  # x from 0 to 1 whatever the iterations are
    white = dict(facecolor="white", alpha=0.8, lw=0, pad=1)  # no curve strikes the words through
    for name, level, x, side in (("random", random, 0.98, "right"), ("optimal", optimal, 0.02, "left")):
        ax.axhline(level, color="0.4", lw=1, ls=":")
        ax.text(x, level - 0.02, f"{name} {level:.2f}", ha=side, va="top", color="0.3", transform=across, zorder=3,
                bbox=white)


def yardsticks_of(config, world):  # -> random, optimal; or None
    """config.json has those of the run's own evaluations; others can be calculated if the world is built in."""
    if world in config.get("yardsticks", {}):
        return tuple(config["yardsticks"][world])
    if world in envs.BUILT_IN:
        return tuple(envs.yardsticks_of_run(world, config))
    return None


def of_all_seeds(runs, metric):  # -> iterations that all of these runs have, values (seeds, iterations)
    """Dead runs go on as they were, so that they count in the mean to the end. Three runs, say:

        iteration         0    1    2    3    4
        finished          .1   .3   .5   .6   .7
        dead after 2      .1   .2   .0   .0   .0      (gradients are nan there: it makes no more updates)
        still training    .2   .3   .4   .6              so that iterations 0 to 3 are common
    """
    by_seed = []  # {iteration: value} of each
    for config, rows in runs:
        x, y = series(config, rows, metric)
        by_seed.append(dict(zip(x, y)))
    everywhere = sorted(set().union(*by_seed))  # iterations that some run has
    for values, (_, rows) in zip(by_seed, runs):
        if values and "dead" in rows[-1]:
            go_on(values, everywhere, metric)
    common = [i for i in everywhere if all(i in values for values in by_seed)]
    return common, np.array([[values[i] for i in common] for values in by_seed])


def go_on(values, iterations, metric):  # of a dead run: {iteration: value}
    end = max(values)
    for i in iterations:
        if i > end:
            values[i] = math.nan if about(metric).of_updates else values[end]


def moving_average(y, decay=0.8):  # (seeds, iterations) -> the same
    """Divided by the sum of the weights so far, so that the first averages are not pulled towards 0."""
    total = weight = 0.0
    averages = []
    for value in y.T:
        total = decay * total + value
        weight = decay * weight + 1
        averages.append(total / weight)
    return np.array(averages).T


# -------------------------------------------------------------------- when was a run lost, and what moved before?
ANATOMY = ("success", "valid", "reward", "reward_std", "entropy", "grad_norm_max", "kl", "distinct", "true_claims")
WINDOW = 5  # iterations of which success is the mean, or one lucky rollout would be the best
LOST = 10  # iterations below half of the best success: a loss, not a dip
BEFORE = 20  # values that say what is usual: up to the best iteration its healthy range, up to any other its median
HEALTHY = 5  # fewer of them are no range
LASTING = 3  # values outside the range in a row: it was left, not touched
SPIKE = 5  # times the usual value: a spike, not noise


def means(y, n):  # of each value and the n - 1 after it; of all, if there are not so many
    n = min(n, len(y))
    return np.convolve(y, np.ones(n) / n, "valid")


def as_it_stays(y, rows):
    """A dead run ended because nothing could change any more: its last value would have come again and again."""
    if "dead" in rows[-1]:
        return np.append(y, np.full(LOST, y[-1]))
    return y


def best_and_loss(config, rows):  # -> iteration of the best success, of its loss (or None)
    """With WINDOW = 2 and LOST = 3, say:

        iteration      1    2    3    4    5    6    7    8
        success        0.2  0.9  1.0  1.0  0.6  0.1  0.0  0.0
        mean of two    .55  .95  1.0  0.8  .35  .05  0.0

    It is best at iteration 3, and lost at 6: there begin three iterations in a row below half of the best.
    """
    iterations, success = series(config, rows, "success")
    smooth = means(success, WINDOW)
    best = smooth.argmax()
    low = as_it_stays(success, rows) < smooth[best] / 2
    for i in range(best, len(success)):
        if low[i:i + LOST].sum() == LOST:
            return iterations[best], iterations[i]
    return iterations[best], None


def leaves_its_range(x, y, best):  # -> (the first iteration at which a signal is outside its healthy range, how), or None
    """x: its iterations, y: its values, `best`: iteration of the best success. Healthy is the range of the last BEFORE
    values up to there, widened by half its width on each side. A signal has left it where LASTING values in a row lie
    outside, or where one is above SPIKE times the median of the BEFORE values that precede it.

    The rule is a rough one. What falls while the task is learnt widens that range, and is not seen to leave it. The echo
    itself is often such a fall (different thoughts): look at the curve. And in healthy runs, too, a signal may leave the
    range that it had while the task was learnt: compare with runs that were not lost."""
    end = np.searchsorted(x, best, side="right")
    healthy = y[max(0, end - BEFORE):end]
    if len(healthy) < HEALTHY:  # the best came too early: there is no range to leave
        return None
    margin = (healthy.max() - healthy.min()) / 2
    outside = (y < healthy.min() - margin) | (y > healthy.max() + margin)
    for i in range(end, len(y)):
        if outside[i:i + LASTING].sum() == LASTING:
            return x[i], "outside"
        usual = np.median(y[max(0, i - BEFORE):i])
        if usual > 0 and y[i] > SPIKE * usual:
            return x[i], "spike"
    return None


def anatomy(config, rows, signals=ANATOMY):
    """-> as best_and_loss, and of each signal that the log has what leaves_its_range says, for example
    {"entropy": (175, "spike"), "valid": None}. None also stands for what moved only with the loss, or after it."""
    best, lost_at = best_and_loss(config, rows)
    left = {}
    for name in signals:
        x, y = series(config, rows, name)
        if len(x) < BEFORE:
            continue
        event = leaves_its_range(x, y, best)
        if event is not None and lost_at is not None and event[0] >= lost_at:
            event = None
        left[name] = event
    return best, lost_at, left


def survival(config, rows):  # -> iterations, 1 until success is lost and 0 from then on
    iterations, _ = series(config, rows, "success")
    _, lost_at = best_and_loss(config, rows)
    if lost_at is None:
        lost_at = math.inf
    return iterations, (iterations < lost_at).astype(float)


@matplotlib.style.context(STYLE)
def draw_anatomy(config, rows, out, signals=ANATOMY):  # -> out
    """One run, its signals stacked on one axis: when was it lost, and what moved before?"""
    best, lost_at, left = anatomy(config, rows, signals)
    fig = matplotlib.figure.Figure(figsize=(8, 1.4 * len(left) + 1), layout="constrained")
    axes = fig.subplots(len(left), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, event) in zip(axes, left.items()):
        x, y = series(config, rows, name)
        ax.set_title(METRICS[name].title, loc="left")
        ax.plot(x, y, color="C0", lw=1)
        if lost_at is not None:
            ax.axvspan(lost_at, rows[-1]["iteration"] * config["online_k"], color="0.5", alpha=0.15, lw=0)
        if METRICS[name].log and max(y) > 0:
            ax.set_yscale("log", nonpositive="clip")
        if event is not None:
            iteration, how = event
            ax.axvline(iteration, color="tab:red", lw=1.5)
            ax.annotate(f" {iteration} ({how})", (iteration, 0.85), xycoords=("data", "axes fraction"), color="tab:red")
    axes[0].plot(*series(config, rows, "eval"), "o", color="C1", label="evaluation")
    axes[0].legend()
    axes[-1].set_xlabel("iteration")
    lost = "not lost" if lost_at is None else f"lost at {lost_at} (grey)"
    title = f"{envs.title(config['env'])}: success is best at iteration {best}, {lost}. Red: out of its earlier range"
    fig.suptitle(title, fontsize=9.5)
    fig.savefig(out, dpi=90)
    return out


# --------------------------------------------------------------------------------------------- the command line
def command_line(argv):
    lines = [f"  {name:20}{metric.title}; {metric.meaning}".rstrip("; ") for name, metric in METRICS.items()]
    description = __doc__ + "\nThe columns of log.jsonl, first those of the dashboard:\n" + "\n".join(lines)
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
        for folder in args.folders:
            if args.what == "collapse":
                print(collapse(folder))
            if args.what == "xray":
                print(xray(folder))
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        said = " ".join(str(error).split())
        print(f"{' '.join(args.folders)}: a file of the run is damaged, or plots.py is wrong ({type(error).__name__}: "
              f"{said})", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
