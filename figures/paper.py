"""The experiments of figures/README.md: trains them, packs their logs, draws and counts.

    python figures/paper.py run results              trains the runs of an experiment, but not those
                                                     that are packed
    python figures/paper.py run results --half 0     one half of them (1: the other), so that two
                                                     processes can share the work
    python figures/paper.py pack                     packs all finished runs into figures/logs
    python figures/paper.py draw                     draws all pictures from what is packed
    python figures/paper.py numbers                  prints the numbers of the page
    python figures/paper.py unpack lake-ppo 3        writes a packed run as a folder, for plots.py

A run is trained in runs/paper/NAME-seedN by extras/measure.py. An interrupted one goes on. A packed
run is a line of figures/logs/NAME.jsonl.bz2: its commit, its settings, and the rows of its log.
"""
import argparse
import bz2
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parent
RUNS = ROOT / "runs" / "paper"
LOGS = FIGURES / "logs"
sys.path.insert(0, str(ROOT))

import plots
from support.errors import need, one_line_errors

TEN, FIVE, TWENTY = range(10), range(5), range(20)
ONLINE_K = {k: f"--starpo-s --online-k {k} --iterations {100 // k} --eval-every {max(1, 10 // k)}"
            for k in (1, 2, 5, 10)}
ELSEWHERE = {"sokoban": "--eval-envs sokoban_large,sokoban_newvocab,frozenlake",
             "frozenlake": "--eval-envs sokoban", "bandit": "--eval-envs bandit_test,bandit_rev"}
# {experiment: {name of its runs: (options, seeds)}}
EXPERIMENTS = {
    "results": {
        f"{env}-{algo}": (f"--env {env} --algo {algo} --iterations {iterations}", TEN)
        for env, iterations in (("frozenlake", 200), ("sokoban", 200), ("bandit", 60))
        for algo in ("ppo", "grpo")},
    "online-k": {
        f"{env}-k{k}": (f"--env {env} {options} {ELSEWHERE[env]}", FIVE)
        for env in ("sokoban", "frozenlake") for k, options in ONLINE_K.items()},
    "long": {
        f"{env}-{name}": (f"--env {env} {options}", TEN)
        for env in ("frozenlake", "sokoban")
        for name, options in (("long-ppo", "--iterations 400"),
                              ("long-starpo-s", "--starpo-s --iterations 1600 --eval-every 40"))},
    "filter": {
        f"frozenlake-keep{keep}": (f"--env frozenlake --keep {keep} --iterations 200", FIVE)
        for keep in (0.25, 0.5, 0.75, 1.0)},
    "responses": {
        f"sokoban-n{n}": (f"--env sokoban --rollouts {n} --prompts {128 // n} --iterations 100 "
                          f"{ELSEWHERE['sokoban']}", FIVE)
        for n in (2, 4, 8, 16, 32)},
    "actions": {
        f"sokoban-actions{n}": (f"--env sokoban --max-actions-per-turn {n} --max-turns 10 "
                                f"--iterations 100", FIVE)
        for n in (1, 5)},
    "thinking": {
        f"{env}-{name}": (f"--env {env} {options} --iterations 100 {ELSEWHERE[env]}", FIVE)
        for env in ("sokoban", "bandit")
        for name, options in (("think", ""), ("no-think", "--no-think"))},
}
DROPPED = {"policy_loss", "value_loss", "tokens", "logp_gap"}


# -------------------------------------------------------------------------------- training, packing
def run(experiment, half):
    jobs = []
    for name, (options, seeds) in EXPERIMENTS[experiment].items():
        jobs += [(seed, name, options) for seed in seeds]
    jobs.sort()  # seed by seed, so that all arms grow together
    if half is not None:
        jobs = jobs[half::2]
    for seed, name, options in jobs:
        if seed not in {packed["seed"] for packed in packed_runs(name)}:
            train(name, options, seed)


def train(name, options, seed):
    out = RUNS / f"{name}-seed{seed}"
    if Path(out, "finished").exists():
        return
    elsewhere = re.findall(r"--eval-envs \S+", options)
    if Path(out, "checkpoint/trainer.pt").exists():
        options = " ".join([*elsewhere, f"--resume {out}"])
    else:
        need(not out.exists(), f"{out} has no checkpoint to go on from. Remove it.")
        out.parent.mkdir(parents=True, exist_ok=True)
        options = f"{options} --seed {seed} --device cpu --out {out}"
    program = [sys.executable, str(ROOT / "extras/measure.py"), *options.split()]
    print(" ".join(program[1:]), flush=True)
    done = subprocess.run(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    need(done.returncode == 0, f"{out}: {done.stderr[-500:]}")
    Path(out, "finished").write_text(commit())


def commit():  # -> text
    told = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True,
                          capture_output=True)
    return told.stdout.strip()


def packed_runs(name):  # -> [{"seed", "commit", "config", "rows"}, ...]
    file = LOGS / f"{name}.jsonl.bz2"
    if not file.exists():
        return []
    return [json.loads(line) for line in bz2.decompress(file.read_bytes()).splitlines()]


def pack():
    for experiment in EXPERIMENTS.values():
        for name in experiment:
            found = {packed["seed"]: packed for packed in packed_runs(name)}
            for folder in sorted(RUNS.glob(f"{name}-seed*")):
                seed = int(folder.name.rpartition("seed")[2])
                if Path(folder, "finished").exists() and seed not in found:
                    found[seed] = packed_run(folder, seed)
            if found:
                lines = [json.dumps(found[seed]) + "\n" for seed in sorted(found)]
                LOGS.mkdir(exist_ok=True)
                (LOGS / f"{name}.jsonl.bz2").write_bytes(bz2.compress("".join(lines).encode()))


def packed_run(folder, seed):
    config = json.loads(Path(folder, "config.json").read_text())
    config.pop("out")  # a path of one machine
    rows = []
    for line in Path(folder, "log.jsonl").read_text().splitlines():
        row = {name: x for name, x in json.loads(line).items() if name not in DROPPED}
        for name, x in row.items():
            if isinstance(x, float):
                row[name] = float(f"{x:.4g}")
        rows.append(row)
    return {"seed": seed, "commit": Path(folder, "finished").read_text(), "config": config,
            "rows": rows}


def unpack(name, seed):
    for packed in packed_runs(name):
        if packed["seed"] == seed:
            folder = RUNS / f"{name}-seed{seed}-unpacked"
            folder.mkdir(parents=True)
            Path(folder, "config.json").write_text(json.dumps(packed["config"], indent=1))
            lines = [json.dumps(row) + "\n" for row in packed["rows"]]
            Path(folder, "log.jsonl").write_text("".join(lines))
            print(folder)


# --------------------------------------------------------------------------------------- statistics
T95 = {5: 2.776, 10: 2.262, 20: 2.093}  # Student's quantile for the mean of so many runs


def mean_with_interval(values):  # -> mean, low, high (95%)
    values = np.array(values, float)
    half = T95[len(values)] * values.std(ddof=1) / np.sqrt(len(values))
    return values.mean(), values.mean() - half, values.mean() + half


def exact_interval(k, n):  # Clopper and Pearson's 95% interval of a share of which k of n were seen
    def at_most(k, p):
        return sum(math.comb(n, i) * p ** i * (1 - p) ** (n - i) for i in range(k + 1))

    def where(chance_of, limit):  # chance_of(p) falls with p
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if chance_of(middle) > limit else (low, middle)
        return low
    low = 0.0 if k == 0 else where(lambda p: at_most(k - 1, p), 0.975)
    high = 1.0 if k == n else where(lambda p: at_most(k, p), 0.025)
    return low, high


def sign_flip_test(differences):  # -> p, one-sided: is their sum so large by chance?
    d = np.array(differences, float)
    signs = np.array(np.meshgrid(*[[-1, 1]] * len(d))).reshape(len(d), -1)
    return float(np.mean(d @ signs >= d.sum() - 1e-9))


def fisher_test(a, n, b, m):  # -> p, two-sided: a of n against b of m
    def chance(i):
        return math.comb(n, i) * math.comb(m, a + b - i) / math.comb(n + m, a + b)
    possible = range(max(0, a + b - m), min(n, a + b) + 1)
    return sum(chance(i) for i in possible if chance(i) <= chance(a) * (1 + 1e-9))


# ----------------------------------------------------------------------------------------- pictures
def series(packed, column):  # -> iterations, values; of the rows that have it
    """column: one of the log, or "eval GAME"."""
    x, y = [], []
    for row in packed["rows"]:
        value = row.get(column)
        if column.startswith("eval "):
            value = row.get("eval", {}).get(column.removeprefix("eval "))
        if value is not None:
            x.append(row["iteration"])
            y.append(value)
    return np.array(x), np.array(y, float)


def draw_seeds(ax, runs, column, color, label):  # thin lines of seeds, and their mean
    curves = [series(packed, column) for packed in runs]
    for x, y in curves:
        ax.plot(x, y, color=color, lw=0.5, alpha=0.5)
    shortest = min((x for x, _ in curves), key=len)
    mean = np.mean([y[:len(shortest)] for _, y in curves], axis=0)
    ax.plot(shortest, mean, color=color, lw=2, label=label)


def draw_first_command():
    """figures/first-command is the folder of a run of extras/measure.py, without its checkpoint."""
    run = {"python ragen_mini.py --env frozenlake": plots.load(FIGURES / "first-command")}
    plots.curves(run, FIGURES / "fig-curves.png", plots.QUESTIONS)
    say = {"What do its thoughts say?": [f"thoughts_{kind}" for kind in KINDS],
           "Are their claims true?": ["true_direction", "true_goal"]}
    plots.SHARES.update(*say.values())
    plots.curves(run, FIGURES / "fig-first-thoughts.png", say)


def draw_results():
    with plots.picture(FIGURES / "fig-results.png", 10, 3.6) as fig:
        for ax, env in zip(fig.subplots(1, 3), ("frozenlake", "sokoban", "bandit")):
            for number, algo in enumerate(("ppo", "grpo")):
                draw_seeds(ax, packed_runs(f"{env}-{algo}"), f"eval {env}", f"C{number}", algo)
            random, optimal = packed_runs(f"{env}-ppo")[0]["rows"][0]["yardsticks"][env]
            for success in (random, optimal):
                ax.axhline(success, color="0.4", ls=":")
            plots.finish_panel(ax, f"{env}: success on held-out levels")
        plots.add_legend(fig, ax)


KINDS = ("nothing", "goal", "around", "both")
TRUTHS = {"frozenlake": ("direction", "goal"), "sokoban": ("direction", "box", "target")}


def draw_thoughts():
    """Which kinds of thoughts does it have, and are their claims true? PPO, means of ten seeds."""
    with plots.picture(FIGURES / "fig-thoughts.png", 8, 6.4) as fig:
        axes = fig.subplots(2, 2)
        for (above, below), (env, claims) in zip(axes.T, TRUTHS.items()):
            runs = packed_runs(f"{env}-ppo")
            for number, kind in enumerate(KINDS):
                draw_seeds(above, runs, f"thoughts_{kind}", f"C{number}", kind)
            plots.finish_panel(above, f"{env}: share of thoughts that say so")
            for number, claim in enumerate(claims):
                draw_seeds(below, runs, f"true_{claim}", f"C{number + 4}", claim)
            plots.finish_panel(below, f"{env}: share of claims that are true")
            for ax in (above, below):
                ax.legend(loc="upper right", ncols=2)


# Of the experiments: what draws its pictures, what prints its numbers.
PICTURES = {"results": (draw_results, draw_thoughts)}


# ------------------------------------------------------------------------------------------ numbers
def last_success(packed, env):
    return series(packed, f"eval {env}")[1][-1]


def numbers_of_results():
    for env in ("frozenlake", "sokoban", "bandit"):
        for algo in ("ppo", "grpo"):
            runs = packed_runs(f"{env}-{algo}")
            first = [series(packed, f"eval {env}")[1][0] for packed in runs]
            last = [last_success(packed, env) for packed in runs]
            gain = np.subtract(last, first)
            print(f"{env} {algo}: before {np.mean(first):.2f}, after {as_text(last)}, lowest "
                  f"{min(last):.2f}, highest {max(last):.2f}; gain {as_text(gain)}, "
                  f"p = {sign_flip_test(gain):.3f}")


def as_text(values):  # -> "0.61 [0.58, 0.64]"
    mean, low, high = mean_with_interval(values)
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


NUMBERS = {"results": (numbers_of_results,)}


def is_complete(experiment):
    return all({packed["seed"] for packed in packed_runs(name)} == set(seeds)
               for name, (_, seeds) in EXPERIMENTS[experiment].items())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "pack", "draw", "numbers", "unpack"))
    parser.add_argument("name", nargs="?", help="of an experiment, or of runs")
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--half", type=int, choices=(0, 1))
    args = parser.parse_args()
    with one_line_errors():
        if args.what == "run":
            need(args.name in EXPERIMENTS, f"Name one of {', '.join(EXPERIMENTS)}.")
            run(args.name, args.half)
        elif args.what == "pack":
            pack()
        elif args.what == "unpack":
            unpack(args.name, args.seed)
        else:
            if args.what == "draw":
                draw_first_command()
            for experiment, functions in (PICTURES if args.what == "draw" else NUMBERS).items():
                for function in functions if is_complete(experiment) else ():
                    function()


if __name__ == "__main__":
    main()
