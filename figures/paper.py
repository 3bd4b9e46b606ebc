"""The figures and tables of the paper (arXiv 2504.20073), and tests of its claims, from our runs.

    python figures/paper.py fig10          draws figures/tiny/fig10.png and prints Markdown
    python figures/paper.py table2         also table3, table4, fig5 ... fig11, fig-trap, fig-truth
    python figures/paper.py claims         what the paper says, what our runs say, and a verdict
    python figures/paper.py results        success before and after training
    python figures/paper.py CLAIMS.md      all of that page that is generated; also TABLES.md
    python figures/paper.py all --run      everything; --run first trains the runs that are missing

paper.json lists the figures, with their setups, methods and columns. A setup is an environment with
the settings of its runs, such as "trap, sokoban". Runs are in two places:

    runs/figures/MODEL/RUN/        while they are trained, as folders of ragen_mini.py
    figures/MODEL/SETUP.jsonl.bz2  when a figure is complete: packed, one line for each run

Figures read only packed runs. (unpack.py makes ordinary folders of them.) The name of a run says
its settings: figures share the runs that they have in common, and other settings are another run.

Ctrl-C lets the running ones save themselves, and the same command goes on.
"""
import argparse
import bz2
import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL.Image  # comes with matplotlib
from tqdm import tqdm

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parent
RUNS = ROOT / "runs" / "figures"
sys.path[:0] = [str(ROOT), str(FIGURES)]

import ledger
import plots
import ragen_mini as rm
from ledger import Run, markdown
from research import fork_report, warnings_of_loss
from runs import UserError, need, one_line_errors

PAPER = json.loads((FIGURES / "paper.json").read_text())
plots.TITLES |= {  # of variants.py and extras/thoughts.py
    "mutual_information": "I(prompt; thought)",
    "true_claims": "share of true claims"}
# These columns are packed. Run makes the others anew.
COLUMNS = {*plots.TITLES, "iteration", "eval", "updates", "clip_fraction", "value_loss",
           "seconds_rollout", "seconds_update"}
# Iterations without updates have none of these.
OF_UPDATES = {"grad_norm", "grad_norm_max", "kl", "value_loss", "clip_fraction"}
TITLES = {metric: look.partition("\n")[0] for metric, look in plots.TITLES.items()} | {
    "eval": "success",
    "seconds": "seconds so far",
    "value_loss": "value loss",
    "survival": "share of seeds that have not lost their success"}  # see with_survival
# Does a count of lost runs depend on the definition of ledger.lost_at?
OTHER_RULES = ((5, 20), (20, 10), (20, 20))
DASHES = ("-", "--", "-.", ":")
# Exit code of a run that was asked to stop, and has saved itself.
STOPPED = 128 + signal.SIGINT


# ----------------------------------------------------------------- which runs does a figure need?
def jobs(setup, method, args):  # -> {name of the run: its settings}, one for each seed
    settings = PAPER["every run"] | PAPER["setups"][setup]
    # Models of other cold starts, such as runs/tiny-seed1, are trained as tiny.
    family = Path(args.model).name.split("-")[0]
    settings |= PAPER["models"].get(family, {}).get(setup, {})
    settings |= PAPER["methods"][method]
    if args.iterations:
        settings["iterations"] = args.iterations
    rest = settings["iterations"] % settings.get("online_k", 1)
    need(rest == 0, "--iterations: give a multiple of 10, for Online-k")
    seeds = args.seeds or seeds_of(setup, method)
    first = settings.pop("first_seed", 0)
    words = re.findall(r"\w+", f"{setup} {method} {mark_of(settings)}")
    return {"-".join([*words, f"seed{seed}"]): settings | {"seed": seed}
            for seed in range(first, first + seeds)}


def mark_of(settings):
    """A checksum of the settings, by the names that these had when the first runs were made."""
    old = ledger.with_old_names(settings)
    return f"{zlib.crc32(json.dumps(old, sort_keys=True).encode()):08x}"


def seeds_of(setup, method):
    """How many seeds are shipped. paper.json says it of a setup, or of one method there."""
    known = PAPER["seeds"]
    for name in (f"{setup}, {method}", setup, "others"):
        if name in known:
            return known[name]


def pairs_of(name):  # -> the (setup, method) of a figure or table, or of all claims
    pairs = []
    if name in ("claims", "summary"):
        for claim in PAPER["claims"]:
            for setup in claim["setups"]:
                pairs += [(setup, method) for method in claim["methods"]]
    else:
        for setup, _, methods in PAPER["figures"][name]["panels"]:
            pairs += [(setup, method) for method in PAPER["sets"][methods]]
    return pairs


def runs_of(setup, method, args):  # -> list of Run, one for each seed
    packed = unpack(pack_of(setup, args))
    runs = []
    for name in jobs(setup, method, args):
        need(name in packed, f"{args.model} lacks finished runs of {setup}, {method}: add --run")
        runs.append(count_k_times(packed[name]))
    return runs


def count_k_times(run):
    """An iteration of Online-k plays k times as many prompts, so it counts for k iterations."""
    k = run.config.get("online_k", 1)
    if k == 1:
        return run
    return Run(run.config, [row | {"iteration": k * row["iteration"]} for row in run.rows])


# ------------------------------------------------------------------------------------- packed runs
def pack_of(setup, args):  # -> Path
    return args.folder / ("-".join(re.findall(r"\w+", setup)) + ".jsonl.bz2")


@functools.lru_cache  # `pack` clears it
def unpack(file):  # -> {name of the run: Run}
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in bz2.decompress(file.read_bytes()).splitlines()]
    return {line["run"]: Run(line["config"], to_rows(line["columns"])) for line in lines}


def pack(file, runs):
    """Adds {name: Run} to the file. Its other runs stay."""
    lines = []
    # Of long runs, which only one figure shows, fewer columns are kept.
    columns = PAPER["columns"].get(file.name.partition(".")[0], COLUMNS)
    for name, run in sorted((unpack(file) | runs).items()):
        rows = [{key: shorten(row[key]) for key in row if key in columns} for row in run.rows]
        line = {"run": name, "config": run.config, "columns": to_columns(rows)}
        lines.append(json.dumps(line, separators=(",", ":")) + "\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    # Whoever stops us, the file is a whole one.
    new = file.with_suffix(".tmp")
    new.write_bytes(bz2.compress("".join(lines).encode()))
    new.replace(file)
    unpack.cache_clear()


def to_columns(rows):  # -> {column: its values, None where a row has none}
    names = dict.fromkeys(key for row in rows for key in row)
    return {name: [row.get(name) for row in rows] for name in names}


def to_rows(columns):
    rows = []
    for values in zip(*columns.values()):
        row = dict(zip(columns, values))
        rows.append({name: value for name, value in row.items() if value is not None})
    return rows


def shorten(x):  # to four significant digits; in a dict, every entry
    if isinstance(x, dict):
        return {key: shorten(value) for key, value in x.items()}
    if isinstance(x, float):
        return float(f"{x:.4g}")
    return x


# ---------------------------------------------------------------------------------------- training
def run_missing(name, args):
    """Trains and packs the runs that a figure, a table or the claims lack."""
    missing = {}
    for setup, method in pairs_of(name):
        file = pack_of(setup, args)
        for run, settings in jobs(setup, method, args).items():
            if run not in unpack(file):
                missing[args.runs / run] = (file, settings)
    todo = {}
    for folder, (_, settings) in missing.items():
        if not is_finished(folder):
            todo[folder] = settings
    if todo and args.model != "tiny":
        iterations = sum(settings["iterations"] for settings in todo.values())
        print(f"{name}: {len(todo)} runs of {args.model}, {iterations:,} iterations in all, and a "
              f"checkpoint for each. Ctrl-C stops, and the same command goes on.", file=sys.stderr)
    train(todo, name, args)
    for folder, (file, _) in missing.items():
        run = plots.load(folder)
        for private in ("out", "resume", "filled"):
            run.config.pop(private, None)
        pack(file, {folder.name: Run(run.config, run.rows)})


def is_finished(folder):
    try:
        run = plots.load(folder)
    except (OSError, ValueError):  # it was not begun, or was killed before its first save
        return False
    is_complete = len(run.rows) > run.config["iterations"] or rm.is_dead(run.rows)
    return run.rows != [] and is_complete


def train(todo, name, args):
    """Starts {folder: settings}, args.jobs processes at once, and waits for them.

    If Ctrl-C, SIGTERM or a run that failed cuts this short, the others are asked to save themselves
    and to end, and we wait for that.
    """
    waiting = list(todo.items())
    running = {}
    try:
        with tqdm(total=len(todo), desc=f"{name}: runs", disable=not todo) as bar:
            while waiting or running:
                while waiting and len(running) < args.jobs:
                    folder, settings = waiting.pop(0)
                    running[folder] = start(folder, settings, args)
                time.sleep(0.1)
                ended = [folder for folder, child in running.items() if child.poll() is not None]
                for folder in ended:
                    check(running.pop(folder).returncode, folder)
                    bar.update()
    finally:
        # Once, because a run that is told twice does not save itself.
        for child in running.values():
            child.send_signal(signal.SIGINT)
        for child in running.values():
            child.wait()


def check(code, folder):
    need(code in (0, STOPPED), f"the run failed, see the end of {output_of(folder)}")
    if not is_finished(folder):  # someone asked it to stop
        raise KeyboardInterrupt


def output_of(folder):  # -> Path of what a run says
    return folder.parent / f"{folder.name}.txt"


def start(folder, settings, args):  # -> Popen of a run: a new one, or one that goes on
    checkpoint = folder / "checkpoint" / "trainer.pt"
    if not checkpoint.exists():
        shutil.rmtree(folder, ignore_errors=True)
    command = command_of(folder, settings, args, resume=checkpoint.exists())
    environment = os.environ | {"TQDM_DISABLE": "1"}  # a progress bar is no use in a file
    if args.model == "tiny":
        # Many run at once. And sums are rounded alike, however many there are.
        environment["OMP_NUM_THREADS"] = "1"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(output_of(folder), "a") as output:
        # In a new session, because Ctrl-C is only for us.
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                stderr=subprocess.STDOUT, start_new_session=True)


def command_of(folder, settings, args, resume=False):  # -> list of words
    settings = {"success_rate": 1 / 3} | settings  # the paper's lake; our default slips less often
    program = ["ragen_mini.py"]
    if "eval_envs" in settings:
        program = ["extras/elsewhere.py"]
    if "variant" in settings:
        program = ["figures/research/variants.py", settings.pop("variant")]
    if "eval_envs" in settings:
        program += ["--eval-envs", settings.pop("eval_envs")]
    if "truth_reward" in settings:
        program = ["extras/thoughts.py", "--pay", str(settings.pop("truth_reward"))]
    command = [sys.executable, str(ROOT / program[0]), *program[1:]]
    if resume:
        return [*command, "--resume", str(folder)]
    settings = settings | {"model": args.model, "out": str(folder)}
    for name in ("iterations", "eval_every"):  # an iteration of Online-k counts for k
        settings[name] = max(1, settings[name] // settings.get("online_k", 1))
    for name, value in settings.items():
        command.append("--" + name.replace("_", "-"))
        if value is not True:
            command.append(str(value))
    return command


# ------------------------------------------------------------------- pictures of curves over seeds
@dataclass
class Panel:
    metric: str
    title: str
    lines: dict  # {label: list of Run, one for each seed}
    cold_start: bool = False  # a line for the model after its cold start, too?


def in_full(setup, metric):  # "eval" -> "eval sokoban", success in the environment of training
    if metric == "eval":
        return f"eval {PAPER['setups'][setup]['env']}"
    return metric


def place_of(setup, metric):  # "sokoban, calm", "eval frozenlake" -> "sokoban, calm -> frozenlake"
    _, _, tested = metric.partition(" ")
    if tested:
        return f"{setup} -> {tested}"
    return setup


def figure(name, args):  # -> Markdown of a picture; the link is relative to figures/
    asked = PAPER["figures"][name]["panels"]
    columns = 4 if len(asked) % 4 == 0 else min(3, len(asked))
    cold_start = PAPER["figures"][name].get("cold start", False)
    panels = []
    for setup, metric, methods in asked:
        lines = {method: runs_of(setup, method, args) for method in PAPER["sets"][methods]}
        if metric == "survival":
            for method, runs in lines.items():
                lines[method] = [with_survival(run) for run in runs]
        heading = place_of(setup, metric).removeprefix("trap, ")
        if not cold_start:  # else the picture's title says what is drawn
            between = ":\n" if columns == 4 else ": "
            heading += between + TITLES[metric.split()[0]]
        panels.append(Panel(in_full(setup, metric), heading, lines, cold_start))
    file = f"{name}.png"
    if args.iterations:
        file = f"{name}-{args.iterations}.png"
    args.folder.mkdir(parents=True, exist_ok=True)
    title = PAPER["figures"][name]["title"]
    draw(title, panels, args.folder / file, columns)
    return f"![{title}]({args.folder.name}/{file})" + caption(name)


def draw(title, panels, out, columns):
    """A line keeps its colour in every panel, also where others are missing."""
    height = math.ceil(len(panels) / columns)
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    names_before = []
    with plots.picture(out, 12, 3 * height + 0.5) as fig:
        for place, panel in enumerate(panels, 1):
            ax = fig.add_subplot(height, columns, place)
            scale = "log" if panel.metric.startswith("grad_norm") else "linear"
            plots.finish_panel(ax, panel.title, scale=scale)
            # finish_panel has set limits for what was drawn before. The lines come now.
            ax.autoscale(axis="y")
            if panel.metric.startswith("eval "):
                ax.set_ylim(0, 1.15)
            for label, runs in panel.lines.items():
                draw_seeds(ax, panel.metric, runs, label, labels.index(label))
            draw_yardsticks(ax, panel)
            _, names = ax.get_legend_handles_labels()
            # The same lines as in the panel before need no second legend.
            if names and names != names_before:
                legend_below(ax, -0.22)
            names_before = names
        fig.suptitle(title, fontsize=11)
    shrink(out)


def legend_below(ax, y):  # there it covers no curve
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, y), ncols=2, frameon=False)


def shrink(out):
    """With 256 colours a picture needs a third of the space."""
    PIL.Image.open(out).convert("RGB").quantize(256).save(out, optimize=True)


def draw_seeds(ax, metric, runs, label, number):
    """Thin: each seed, because falls at different times vanish in a mean. Thick: the mean. On a
    logarithmic axis it is the median, because one outlier would dominate the mean.
    """
    x, y = align_seeds(runs, metric)
    if not x:
        return
    how = "thick: mean"
    middle = np.nanmean
    if metric.startswith("grad_norm"):
        how = "thick: median"
        middle = np.nanmedian
    style = DASHES[number % len(DASHES)]
    if metric.startswith("eval "):
        style += "o"  # a dot for each evaluation
    elif metric not in ("reward_std", "seconds", "mutual_information", "survival"):
        y = np.array([smoothed(of_seed) for of_seed in y])
        how = f"smoothed, {how}"
    ax.plot(x, y.T, color=f"C{number}", lw=0.6, alpha=0.5)
    label = f"{label}, {len(y)} seeds"
    ax.plot(x, middle(y, axis=0), style, color=f"C{number}", lw=2, label=label)
    ax.set_xlabel(f"iteration ({how})")


def smoothed(y):
    """Means, because medians would make the mean of the seeds jagged. At the ends they are of the
    values that exist, and few of these are noisy.
    """
    reach = min(len(y) // 4, max(2, len(y) // 40))
    return [y[max(0, i - reach):i + reach + 1].mean() for i in range(len(y))]


def draw_yardsticks(ax, panel):
    found = set()
    for runs in panel.lines.values():
        found |= {tuple(ledger.yardsticks_of(run, panel.metric)) for run in runs}
    if len(found) > 1:  # these runs do not share them
        return
    # Words have a white background, so that no curve strikes them through. Their x is from 0 to 1.
    white = dict(facecolor="white", alpha=0.8, lw=0, pad=1)
    style = dict(color="0.3", transform=ax.get_yaxis_transform(), zorder=3, bbox=white)
    for random, optimal in filter(None, found):
        ax.axhline(random, color="0.4", lw=1, ls=":")
        ax.axhline(optimal, color="0.4", lw=1, ls=":")
        ax.text(0.98, random, f"random {random:.2f}", ha="right", va="top", **style)
        side = "bottom" if panel.cold_start else "top"
        ax.text(0.02, optimal, f"optimal {optimal:.2f}", ha="left", va=side, **style)
    if panel.cold_start:
        draw_cold_start(ax, panel, style)


def draw_cold_start(ax, panel, style):
    """How good the model was after its cold start, and after it had been degraded."""
    ax.set_ylim(0, 1.15)
    (runs,) = panel.lines.values()
    success = float(success_after_cold_start(runs[0].config))
    ax.axhline(success, color="C1", lw=1.5, ls="--")
    style = style | {"color": "#a05a00"}
    ax.text(0.02, success, f"cold start {success:.2f}", ha="left", va="top", **style)
    # Before training, all seeds have the same success.
    (before,) = {values[0] for values in align_seeds(runs, panel.metric)[1]}
    ax.annotate(f"degraded {before:.2f}", (0, before), xytext=(6, -12),
                textcoords="offset points", color="C0")


def align_seeds(runs, metric):  # -> iterations, values (seeds, iterations)
    """Iterations that all of these runs have.

    Dead runs go on as they were, so that they count in the mean to the end. Of three runs, say:

        iteration         0    1    2    3    4
        finished          .1   .3   .5   .6   .7
        dead after 2      .1   .2   .0   .0   .0
        still training    .2   .3   .4   .6              so that iterations 0 to 3 are common

    A dead run makes no more updates, so its gradients are nan there.
    """
    by_seed = []  # {iteration: value} of each
    for run in runs:
        x, y = run.series(metric)
        by_seed.append(dict(zip(x, y)))
    everywhere = sorted(set().union(*by_seed))  # iterations that some run has
    for values, run in zip(by_seed, runs):
        if values and rm.is_dead(run.rows):
            fill_after_death(values, everywhere, metric)
    common = [i for i in everywhere if all(i in values for values in by_seed)]
    return common, np.array([[values[i] for i in common] for values in by_seed])


def fill_after_death(values, iterations, metric):  # values: {iteration: value}, changed in place
    end = max(values)
    for i in iterations:
        if i > end:
            values[i] = math.nan if metric in OF_UPDATES else values[end]


def with_survival(run):  # -> Run with that column
    _, lost_at = plots.peak_and_collapse(run)
    new = []
    for row in run.rows:
        is_lost = lost_at is not None and row["iteration"] >= lost_at
        new.append(row | {"survival": float(not is_lost)})
    return Run(run.config, new)


# ---------------------------------------------------------------------------------- other pictures
def collapse(name, args):  # -> Markdown of the picture of one run: some signals, one above another
    (setup, _, methods), = PAPER["figures"][name]["panels"]
    method, = PAPER["sets"][methods]
    runs = runs_of(setup, method, args)
    trapped = [seed for seed, run in enumerate(runs) if ledger.trapped(run, None)]
    need(trapped, f"no run of {setup}, {method} shows the whole course")
    seed = PAPER["figures"][name]["seed"]
    if seed not in trapped:  # with another model
        seed = trapped[0]
    args.folder.mkdir(parents=True, exist_ok=True)
    plots.collapse({f"seed {seed}": runs[seed]}, args.folder / f"{name}.png")
    title = PAPER["figures"][name]["title"]
    return f"![{title} (seed {seed})]({args.folder.name}/{name}.png)" + caption(name)


def losses(name, args):  # -> Markdown of a picture: the share of the runs that is not lost yet
    panels = {"first seeds": {}, "fresh seeds": {}}
    for setup, _, methods in PAPER["figures"][name]["panels"]:
        panel = panels["fresh seeds" if "fresh seeds" in setup else "first seeds"]
        for method in PAPER["sets"][methods]:
            panel[method.removesuffix(", plain")] = runs_of(setup, method, args)
    args.folder.mkdir(parents=True, exist_ok=True)
    title = PAPER["figures"][name]["title"]
    draw_losses(title, panels, args.folder / f"{name}.png")
    return f"![{title}]({args.folder.name}/{name}.png)" + caption(name)


def draw_losses(title, panels, out):  # panels: {title: {method: list of Run}}
    methods = list(dict.fromkeys(method for runs in panels.values() for method in runs))
    with plots.picture(out, 12, 4.2) as fig:
        for place, (seeds, runs) in enumerate(panels.items(), 1):
            ax = fig.add_subplot(1, len(panels), place)
            ax.set_title(seeds)
            for method, of_method in runs.items():
                # A method keeps its colour.
                draw_share_left(ax, method, of_method, methods.index(method))
            ax.set_xlabel(f"updates so far (of {ledger.UPDATES:,})")
            ax.set_ylabel("share of the runs that is not lost")
            ax.set_ylim(0, 1.03)
            legend_below(ax, -0.16)
        fig.suptitle(title)
    shrink(out)


def draw_share_left(ax, method, runs, number):
    lost_after = np.sort([ledger.updates_until_lost(run) for run in runs])
    lost_after = lost_after[lost_after < ledger.UPDATES]
    steps = [0, *lost_after, ledger.UPDATES]
    # It is 1 at first. Then there is a step down for each loss.
    left = 1 - np.arange(len(lost_after) + 1) / len(runs)
    ax.step(steps, [*left, left[-1]], DASHES[number % len(DASHES)], where="post",
            color=f"C{number}", lw=2, label=f"{method}, {len(runs)} runs")


def forks(name, args):  # -> Markdown of a picture, or of tables: what came out of fork.py
    found = fork_report.collect()
    title = PAPER["figures"][name]["title"]
    if name.startswith("fig"):
        args.folder.mkdir(parents=True, exist_ok=True)
        fork_report.draw(found, title, args.folder / f"{name}.png")
        shrink(args.folder / f"{name}.png")
        return f"![{title}]({args.folder.name}/{name}.png)" + caption(name)
    return "\n\n".join([title, *fork_report.tables(found)]) + caption(name)


# ------------------------------------------------------------------------------------------ tables
def warnings(name, args):  # -> Markdown; a row for each signal
    page = [PAPER["figures"][name]["title"]]
    head = ["alarms in 100 iterations", "lost soon after one", "after none",
            "difference, 95% (by run)"]
    together = {}  # panels of the same methods are counted as one
    for setup, _, methods in PAPER["figures"][name]["panels"]:
        for method in PAPER["sets"][methods]:
            together.setdefault(methods, []).extend(runs_of(setup, method, args))
    for methods, runs in together.items():
        signals = [metric for metric in warnings_of_loss.SIGNALS if metric in runs[0].rows[1]]
        rows = [warnings_of_loss.row_of(runs, metric) for metric in signals]
        page.append(markdown([f"{methods}: {how_many_lost(runs)} lost", *head], rows))
    return "\n\n".join(page) + caption(name)


def how_many_lost(runs):  # -> "3 of 10"
    k = sum(ledger.lost(run, None) for run in runs)
    return f"{k:.0f} of {len(runs)}"


def ends_of(runs, metric):
    return [ledger.end(run, metric) for run in runs]


def mean_and_range(values):  # -> "0.86 [0.85, 0.87]"
    return f"{np.mean(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def caption(name):
    said = PAPER["figures"][name].get("caption", "")
    return said and f"\n\n*{said}*"


def table(name, args):  # -> Markdown; `legend` says what a cell is
    head, lines = [""], {}
    for setup, metric, methods in PAPER["figures"][name]["panels"]:
        head.append(place_of(setup, metric))
        for method in PAPER["sets"][methods]:
            runs = runs_of(setup, method, args)
            mean = np.mean([ledger.mean(run, metric) for run in runs])
            random, optimal = ledger.yardsticks_of(runs[0], metric)
            cell = (f"{mean_and_range(ends_of(runs, metric))}, {mean:.2f}; "
                    f"{random:.2f} / {optimal:.2f}")
            lines.setdefault(method, [method]).append(cell)
    legend = "a cell: the last point [lowest, highest seed], mean over training; random / optimal"
    title = f"{PAPER['figures'][name]['title']} ({legend})"
    return title + "\n\n" + markdown(head, lines.values()) + caption(name)


def updates(name, args):  # -> Markdown; a row for each method: runs lost in so many updates
    lines = {}
    # The longest runs of a method come last.
    for setup, _, methods in PAPER["figures"][name]["panels"]:
        for method in PAPER["sets"][methods]:
            runs = runs_of(setup, method, args)
            lost = ledger.lost_by_updates(runs, times=ledger.times_of(runs))[1:]
            in_updates = ", ".join(cell.partition(" of ")[0] for cell in lost)
            lines[method] = [method, *ledger.lost_by_updates(runs), in_updates]
    head = ["", "updates an iteration", "lost in the first 1,600 updates", "in the first 6,400",
            "rule in updates"]
    title = PAPER["figures"][name]["title"]
    return title + "\n\n" + markdown(head, lines.values()) + caption(name)


def turns(name, args):
    """A row for each method. A cell of success or thoughts has the mean over the runs, of the first
    20 iterations and of the last 100.
    """
    head, lines = [""], {}
    for setup, _, methods in PAPER["figures"][name]["panels"]:
        head += [f"{setup.removeprefix('trap, ')}: lost", "by other rules", "ended", "success",
                 "different thoughts"]
        for method in PAPER["sets"][methods]:
            runs = runs_of(setup, method, args)
            others = []
            for rule in OTHER_RULES:
                k = sum(ledger.lost_at(run, *rule) < math.inf for run in runs)
                others.append(str(k))
            ended = sum(rm.is_dead(run.rows) for run in runs)
            cells = [how_many_lost(runs), ", ".join(others), str(ended)]
            for metric in ("success", "distinct"):
                values = np.array([ledger.to_the_end(run.series(metric)[1], run) for run in runs])
                first, last = values[:, :20].mean(), values[:, -100:].mean()
                cells.append(f"{first:.2f} -> {last:.2f}")
            lines.setdefault(method, [method]).extend(cells)
    title = PAPER["figures"][name]["title"]
    return title + "\n\n" + markdown(head, lines.values()) + caption(name)


def equal(name, args):  # -> Markdown: losses at equal numbers of updates
    """Runs that never won are told apart. (See ledger.log_rank.)"""
    won, rows = {}, []
    for setup, _, methods in PAPER["figures"][name]["panels"]:
        for method in PAPER["sets"][methods]:
            runs = runs_of(setup, method, args)
            won[method] = [run for run in runs if ledger.has_won(run)]
            each = ledger.updates_an_iteration(runs)
            cells = of_winners(won[method], in_full(setup, "eval"))
            rows.append([method, f"{each:g}", how_many_lost(runs), *cells])
    head = ["", "updates an iteration", "lost, of all",
            "of those that won: lost in 400 iterations", "in 6,400 updates",
            "mean updates before (at most 6,400)", "last evaluation above 0.5"]
    compared = [(ours, theirs) for ours, theirs in PAPER["figures"][name]["compared"]]
    page = [PAPER["figures"][name]["title"], markdown(head, rows), by_log_rank(compared, won)]
    return "\n\n".join(page) + caption(name)


def of_winners(runs, metric):  # -> cells of a table
    if not runs:
        return ["-"] * 4
    ends = ends_of(runs, metric)
    wins = int(np.sum(np.array(ends) > 0.5))
    return [ledger.lost_in_iterations(runs), ledger.lost_by_updates(runs)[-1], in_updates([runs]),
            f"{wins} of {len(ends)}"]


def by_log_rank(compared, won):  # -> Markdown; a row for each pair of methods
    pairs = [(won[ours], won[theirs]) for ours, theirs in compared]
    ps = [ledger.log_rank(*pair) for pair in pairs]
    rows = []
    for methods, pair, p, corrected in zip(compared, pairs, ps, ledger.holm(ps, 1)):
        otherwise = ledger.log_rank(*pair, in_updates=True)
        rows.append([" - ".join(methods), in_updates(pair), f"{p:.3f}", f"{corrected:.3f}",
                     f"{otherwise:.3f}"])
    return markdown(["", "updates longer", "log-rank p", "p (Holm)", "p, rule in updates"], rows)


def in_updates(samples):
    """Of one list of runs: the mean of the updates until they were lost [95% interval]. Of two: the
    difference of their means.
    """
    if not all(samples):
        return "-"
    samples = [ledger.updates_held(runs) for runs in samples]
    low, high = ledger.interval(samples)
    return f"{ledger.mean_of(samples):.0f} [{low:.0f}, {high:.0f}]"


def starts(name, args):  # -> Markdown; a row for each included model that has runs here
    rows = []
    for folder in sorted(FIGURES.glob("tiny*")):
        this = argparse.Namespace(**vars(args))
        this.folder, this.model = folder, folder.name
        if folder.name != "tiny":
            this.seeds = this.seeds or PAPER["seeds"]["other starts"]
        head, cells = ["included model"], []
        for setup, metric, methods in PAPER["figures"][name]["panels"]:
            for method in PAPER["sets"][methods]:
                runs = runs_of(setup, method, this)
                head.append(f"{setup}, {method}")
                if metric == "survival":
                    cells.append(f"{how_many_lost(runs)} lost")
                else:
                    metric = in_full(setup, metric)
                    first = ledger.curve(runs[0], metric)[0]
                    cells.append(f"{first:.2f} -> {mean_and_range(ends_of(runs, metric))}")
        rows.append([folder.name, *cells])
    return PAPER["figures"][name]["title"] + "\n\n" + markdown(head, rows)


def results(name, args):  # -> Markdown; a row for each environment, success after training
    rows = []
    for setup, metric, methods in PAPER["figures"][name]["panels"]:
        for method in PAPER["sets"][methods]:
            metric = in_full(setup, metric)
            runs = runs_of(setup, method, args)
            first = ledger.curve(runs[0], metric)[0]
            random, optimal = ledger.yardsticks_of(runs[0], metric)
            cold_start = success_after_cold_start(runs[0].config)
            rows.append([setup.split(",")[0], f"{random:.2f}", cold_start, f"{first:.2f}",
                         mean_and_range(ends_of(runs, metric)), f"{len(runs)}", f"{optimal:.2f}"])
    head = ["", "random", "cold start", "degraded", "RL: mean [lowest, highest]", "seeds",
            "optimal"]
    return markdown(head, rows)


def success_after_cold_start(config):
    """Success of the model that had imitated the planner, before it was degraded. (On the bandit
    the planner tossed a coin.)
    """
    printed = (FIGURES / "cold_start.txt").read_text().split("seed 1")[0]
    found = dict(re.findall(rf"^planner: {config['env']} (\S+) .* 0\.5: (\S+)", printed, re.M))
    # Only on the lake the success rate of moves means something. Others have one row, of 0.33.
    return found.get(f"{config['success_rate'] or 0.8:.2f}") or found["0.33"]


# ------------------------------------------------------------------------------------------ claims
def measured(claim, args):  # -> for each of the claim's methods its values by seed, (seeds,)
    """The mean over the setups. If some have more seeds, it is of the first seeds that all have."""
    measure = ledger.MEASURES[claim["measure"]]
    samples = []
    for method in claim["methods"]:
        of_setups = []
        for setup in claim["setups"]:
            metric = in_full(setup, claim.get("metric"))
            of_setups.append([measure(run, metric) for run in runs_of(setup, method, args)])
        seeds = min(map(len, of_setups))
        values = np.mean([of_seeds[:seeds] for of_seeds in of_setups], axis=0)
        # Some runs have no value. For example, one that was not lost had nothing to warn of.
        samples.append(values[~np.isnan(values)])
    return samples


def judged_claims(args):  # -> list of (claim, samples, p after Holm, verdict)
    """Of claims whose runs have been made."""
    asked, values = [], []
    for claim in PAPER["claims"]:
        try:
            values.append(measured(claim, args))
            asked.append(claim)
        except UserError:
            print(f"without runs yet: {claim['says']}", file=sys.stderr)
    need(asked, "no claim has its runs: add --run")
    judged = [ledger.judge(claim, samples) for claim, samples in zip(asked, values)]
    looks = [claim.get("looks", PAPER["looks"]) for claim in asked]
    corrected = ledger.holm([p for _, p in judged], looks)
    found = []
    for claim, samples, (answer, _), p in zip(asked, values, judged, corrected):
        found.append((claim, samples, p, ledger.verdict(claim, answer, p, samples)))
    return found


def in_numbers(claim, samples):  # -> seeds; mean or difference of means [95% interval]
    low, high = ledger.interval_of(claim["kind"], samples)
    seeds = ", ".join(str(len(values)) for values in samples)
    return seeds, f"{ledger.mean_of(samples):.2f} [{low:.2f}, {high:.2f}]"


def claims(name, args):  # -> Markdown: what the paper says, how we measure it, and what follows
    bounds = {"more": "> {:g}", "same": "within {:g}", "often": "in more than {:.0%}"}
    lines = []
    for claim, samples, p, verdict in judged_claims(args):
        compared = f"{' - '.join(claim['methods'])} ({', '.join(claim['setups'])})"
        bound = bounds[claim["kind"]].format(claim["bound"])
        measure = f"{claim['measure']} {claim.get('metric', '')}".strip()
        lines.append([claim["source"], claim["says"], f"{measure}: {compared} {bound}",
                      *in_numbers(claim, samples), f"{p:.3f}", verdict])
    head = ["", "claim", "measure", "seeds", "mean, 95% interval", "p (Holm)", "verdict"]
    return markdown(head, lines)


def summary(name, args):  # -> Markdown: the same, but short; claims that are open come last
    lines = []
    judged = sorted(judged_claims(args), key=lambda one: one[3].startswith("open"))
    for claim, samples, _, verdict in judged:
        seeds, value = in_numbers(claim, samples)
        drawn = re.sub(r"[. ]", "", claim["source"].lower())  # "Fig. 7" -> "fig7"
        lines.append([claim["source"], claim["says"], verdict.split(":")[0], f"{value}; {seeds}",
                      claim.get("figure", drawn)])
    return markdown(["paper", "claim", "here", "mean [95%]; seeds", "paper.py"], lines)


# ------------------------------------------------------------------------------------ command line
KINDS = {"fig-collapse": collapse, "fig-updates": losses, "fig-fork": forks, "forks": forks,
         "fig": figure, "table": table, "results": results, "starts": starts, "updates": updates,
         "turns": turns, "equal": equal, "warnings": warnings, "claims": claims,
         "summary": summary}


def show(name, args):  # -> Markdown
    kind = next(kind for kind in KINDS if name.startswith(kind))
    return KINDS[kind](name, args)


def parse(argv=None):
    parser = argparse.ArgumentParser("paper.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", choices=[*PAPER["figures"], "claims", "summary", *PAPER["pages"], "all"])
    parser.add_argument("--run", action="store_true", help="train first what is missing")
    parser.add_argument("--seeds", type=int,
                        help="seeds of every run, from 0 on (else those of paper.json)")
    parser.add_argument("--iterations", type=int, default=0, help="instead of those of paper.json")
    parser.add_argument("--jobs", type=int,
                        help="runs at once (default: tiny one for each core, other models 1)")
    parser.add_argument("--model", default="tiny", help="tiny, a folder or a hub id")
    args = parser.parse_args(argv)
    if args.jobs is None:
        args.jobs = os.cpu_count() if args.model == "tiny" else 1
    return args


def run(args):
    need(args.seeds is None or args.seeds > 0, "--seeds: give 1 or more")
    need(args.jobs > 0, "--jobs: give 1 or more")
    need(args.iterations >= 0, "--iterations: give 1 or more, or 0 for those of paper.json")
    name = Path(args.model).name
    args.folder = FIGURES / name
    args.runs = RUNS / name
    names = PAPER["pages"].get(args.what, [args.what])
    if args.what == "all":
        names = sum(PAPER["pages"].values(), [])
    for name in names:
        if args.run:
            run_missing(name, args)
        try:
            page = show(name, args)
        except UserError:
            if args.what != "all":
                raise
            page = f"*{name}: not all of its runs have been made yet.*"
        print(page, end="\n\n", flush=True)


def main(argv=None):
    # SIGINT, too, because a shell switches it off for programs in its background.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with one_line_errors():
        try:
            run(parse(argv))
        except KeyboardInterrupt:
            print("stopped: the same command goes on", file=sys.stderr)
            raise


if __name__ == "__main__":
    main()
