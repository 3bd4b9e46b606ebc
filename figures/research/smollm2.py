"""A real pretrained model learns: SmolLM2-135M-Instruct, on a CPU. First the form (extras/warm_start.py), then GRPO.

    python figures/smollm2.py bandit --seed 1 --model FOLDER    FOLDER: SmolLM2-135M-Instruct, or its hub id
    python figures/smollm2.py lake --bf16 ...                   in bf16 (recipes.bf16): half the time, if the CPU knows it
    python figures/smollm2.py draw                              figures/smollm2/fig-smollm2.png, and a table

Everything that a run tells is written, at every evaluation, to figures/smollm2/WORLD-seedN.json: the warm start, the
settings, the rows of the log, episodes, peak memory, and the answer to one prompt by plain `generate`, before and
after. The warm-started model and the run lie in runs/smollm2. The settings were tried on the bandit with seed 100. The
lake has the bandit's, and is not learnt. `told` is the same lake in words (extras/told_lake.py), after forty lessons of
the planner: tried with seeds 100 to 102, and without lessons with 1 and 2. `alone` is without lessons, with twice the
episodes: tried with seed 101.
"""
import argparse
import contextlib
import json
import re
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parent
sys.path.insert(0, str(ROOT))

import matplotlib.figure
import matplotlib.style
import torch
import transformers

import envs
import ledger
import paper
import plots
import ragen_mini as rm
from envs import need
from extras import mutants, recipes, warm_start

RUNS, DATA = ROOT / "runs" / "smollm2", FIGURES / "smollm2"
SHARED = dict(algo="grpo", adv_norm="mean", kl_coef=0.0, prompts=4, rollouts=8, lr=2e-5, max_new_tokens=60,
              eval_prompts=128, save_every=5, device="cpu")
WORLDS = {
    "bandit": dict(env="bandit", max_turns=1, iterations=20, eval_every=10),
    "lake": dict(env="frozenlake", iterations=40, eval_every=10),
    "told": dict(env="extras/told_lake.py:ToldLake", iterations=40, eval_every=10),
    "alone": dict(env="extras/told_lake.py:ToldLake", iterations=30, eval_every=10, prompts=8, update_size=64)}
TITLES = {"bandit": "bandit", "lake": "gentle lake, as a map", "told": "in words, after lessons", "alone": "in words, no lessons"}
LESSONS = {"told": ["--lessons", "40", "--lesson-lr", "1e-4"]}  # of a planner, before the form


def run(world, seed, model, options=""):
    torch.set_num_threads(1)
    RUNS.mkdir(parents=True, exist_ok=True)
    name = f"{world}-seed{seed}"
    folder = RUNS / name
    warm = RUNS / f"warm-{name}"
    settings = SHARED | WORLDS[world] | {"seed": seed}
    report = {
        "command": f"python figures/smollm2.py {world} --seed {seed}{options}",
        "commit": mutants.commit(),
        "machine": f"one thread of {cpu()}, torch {torch.__version__}",
        "day": time.strftime("%Y-%m-%d"),
        "warm start": start_warm(model, warm, settings, LESSONS.get(world, []))}
    cfg = rm.Config(**settings, model=str(warm), out=str(folder))
    if Path(folder, "checkpoint", "trainer.pt").exists():  # stopped: go on
        cfg = rm.parse_config(["--resume", str(folder)])
        report["plain generate"] = load()[name]["plain generate"]
    report["settings"] = asdict(cfg)
    for private in ("model", "out", "resume"):
        del report["settings"][private]

    def watch(row, trajs, learned, models, cfg):  # the report is whole after every evaluation
        if "eval" in row:
            report["rows"] = lines_of(cfg.out, "log.jsonl") + [row]
            samples = lines_of(cfg.out, "samples.jsonl")
            last = [sample for sample in samples if sample["iteration"] == row["iteration"]]
            report["episodes"] = samples[:2] + last[:2]  # of the first and of the last evaluation
            answers = report.setdefault("plain generate", [])
            answers[1:] = [plain_answer(models, cfg)]  # the first one stays
            report["peak memory, MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            write(report, DATA / f"{name}.json")
    models = rm.load_models(cfg)
    if cfg.max_turns == 1:  # the same gradients, in half the time; with more turns it gains nothing
        recipes.read_messages_once(models)
    rm.train(cfg, models, watch=watch)


def cpu():
    found = re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1]


def start_warm(model, folder, settings, lessons):  # -> what the program printed
    words = [model, str(folder), *lessons]
    for key in ("env", "max_turns", "max_new_tokens", "seed"):
        if key in settings:
            words += ["--" + key.replace("_", "-"), str(settings[key])]
    told = folder.with_suffix(".txt")
    if not folder.exists():
        with open(told, "w") as file, contextlib.redirect_stdout(file):
            warm_start.main([*words, "--eval-prompts", "64", "--device", "cpu"])
    return [line for line in told.read_text().splitlines() if not line.startswith("saved")]


def lines_of(folder, name):
    return [json.loads(line) for line in Path(folder, name).read_text().splitlines()]


def plain_answer(models, cfg):  # greedy, without a line of ours but the prompt
    ids = rm.begin(0, 0, 0, models.tok, cfg).ids
    written = models.policy.generate(torch.tensor([ids]), max_new_tokens=cfg.max_new_tokens, do_sample=False)
    return models.tok.decode(written[0])


def write(report, file):
    file.parent.mkdir(exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(report, indent=0))
    new.replace(file)


# ------------------------------------------------------------------------------------------------ picture, table
def load():  # -> {"bandit-seed1": report}
    files = [file for world in WORLDS for file in sorted(DATA.glob(f"{world}-seed*.json"))]
    return {file.stem: json.loads(file.read_text()) for file in files}


def table(reports):  # -> Markdown
    head = ["", "success before", "after", "iterations", "hours", "tokens a second", "peak memory"]
    rows = []
    for name, report in reports.items():
        run = ledger.Run(report["settings"], report["rows"])
        _, success = run.series(metric_of(report))
        before, after = (envs.with_interval(x, report["settings"]["eval_prompts"]) for x in success[[0, -1]])
        seconds = run.rows[-1]["seconds"]
        speed = run.series("tokens")[1].sum() / seconds
        memory = report["peak memory, MiB"] / 1024
        rows.append([name, before, after, str(len(run.rows) - 1), f"{seconds / 3600:.1f}", f"{speed:.0f}",
                     f"{memory:.1f} GiB"])
    return ledger.markdown(head, rows)


def metric_of(report):
    return f"eval {envs.title(report['settings']['env'])}"


@matplotlib.style.context(plots.STYLE)
def draw(reports, out):
    worlds = list(dict.fromkeys(name.partition("-")[0] for name in reports))
    fig = matplotlib.figure.Figure(figsize=(9, 3.4), layout="constrained")
    for place, world in enumerate(worlds, 1):
        ax = fig.add_subplot(1, len(worlds), place)
        runs = {}  # of every seed, so that it has its colour; empty where this world has none
        for seed in range(1, 1 + max(report["settings"]["seed"] for report in reports.values())):
            report = reports.get(f"{world}-seed{seed}", {"settings": SHARED | WORLDS[world], "rows": []})
            runs[f"seed {seed}"] = run = ledger.Run(report["settings"], report["rows"])
        plots.draw_evaluations(ax, runs, f"eval {envs.title(run.config['env'])}")
        ax.set_title(TITLES[world])
    shown = {}  # by seed, once
    for ax in fig.axes:
        handles, labels = ax.get_legend_handles_labels()
        shown |= dict(zip(labels, handles))
    fig.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown))
    fig.suptitle("Success of SmolLM2-135M-Instruct after a warm start, on 128 evaluation levels")
    paper.save(fig, out)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*WORLDS, "draw"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    if args.what == "draw":
        reports = load()
        need(reports, "no run yet: python figures/smollm2.py bandit")
        print(table(reports))
        print(draw(reports, DATA / "fig-smollm2.png"))
    else:
        if args.bf16:
            recipes.calculate_in_bf16()
        run(args.what, args.seed, args.model, " --bf16" * args.bf16)
