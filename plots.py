"""What a run says, logs and saves; and figures, drawn from RUN/config.json and RUN/log.jsonl alone.

    python plots.py curves RUN [RUN ...] [--out FILE]   one dashboard, runs overlaid (default: RUN/curves.png)
"""
import argparse, contextlib, copy, itertools, json, math, shutil, sys
from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from tqdm import tqdm

import envs

# Okabe and Ito's colours, which colour-blind readers tell apart; line styles repeat the code in grey print
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLES = ["-", "--", "-.", ":"]
LOGS = "log.jsonl", "samples.jsonl"
MAY_CHANGE = {"resume", "device", "iterations", "save_every", "lr", "critic_lr"}  # options beside --resume
PANELS = [  # column of log.jsonl, title, logarithmic?
    ("success", "success rate", False),
    ("reward", "return of an episode (training)", False),
    ("reward_std", "std of the return inside a group", True),
    ("entropy", "entropy per token [nats]", False),
    ("grad_norm", "gradient norm before clipping", True),
    ("response_length", "tokens written per episode", False),
]

def need(condition, message):  # what the user can put right is one line on the terminal and exit code 2
    if not condition:
        tqdm.write(message, file=sys.stderr)
        raise SystemExit(2)

def say(text):  # above the progress bar; into `| tee`, which Ctrl-C ended, too, without failing
    with contextlib.suppress(OSError):
        tqdm.write(text)

def interval(p, n, z=1.96):  # -> low, high
    """Wilson's 95% interval of a success rate p that was measured on n episodes."""
    center, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return min(p, (center - half) / (1 + z * z / n)), max(p, (center + half) / (1 + z * z / n))

def yardsticks(name, config):  # -> random, optimal
    """The exact success of random and of optimal play on the evaluation levels, within as many actions."""
    budget = min(config["max_actions"], config["max_turns"] * config["max_actions_per_turn"])
    return envs.mean_yardsticks(name, budget, config["eval_prompts"], config["success_rate"])[:, -1]

def eval_line(name, p, config):  # -> "frozenlake 0.41 [0.35, 0.47]  random 0.21  optimal 0.49"
    numbers = p, *interval(p, config["eval_prompts"]), *yardsticks(name, config)
    return name + " {:.2f} [{:.2f}, {:.2f}]  random {:.2f}  optimal {:.2f}".format(*numbers)

def explain(cfg):  # -> what the flags mean for the objective, in words
    kept = max(1, int(cfg.keep * cfg.prompts + 1e-9))
    updates = -(-kept * cfg.rollouts // cfg.batch) * cfg.epochs * cfg.online_k  # rounded up
    clip = f"clipped to {1 - cfg.clip_low:g}..{1 + cfg.clip_high:g}" if updates > 1 else "1, never clipped"
    return (f"{cfg.algo}: filter keeps {kept} of {cfg.prompts} prompts; KL {cfg.kl_coef or 'off'}; entropy "
            f"bonus {cfg.entropy_coef or 'off'}; {updates} update(s) a rollout, ratio {clip}")

def statistics(trajs, R, batches, steps):  # -> columns of log.jsonl; README.md says what each means
    turns, tokens = [turn for traj in trajs for turn in traj.turns], sum(sum(traj.mask) for traj in trajs)
    kl = [batch["kl"][batch["mask"]].mean().item() for batch in batches if "kl" in batch]
    thoughts = [turn["answer"].rpartition("</think>")[0].removeprefix("<think>") for turn in turns]
    row = dict(reward=R.mean(), reward_std=R.std(1, correction=0).mean(), kl=np.mean(kl or 0),
               success=np.mean([traj.success for traj in trajs]),
               think_length=np.mean([len(thought.split()) for thought in thoughts]),
               entropy=sum(traj.entropy for traj in trajs) / tokens, response_length=tokens / len(trajs),
               valid=np.mean([turn["valid"] for turn in turns]), turns=len(turns) / len(trajs),
               **{key: np.mean([step[key] for step in steps]) for key in (steps or [{}])[0]})
    return {key: round(float(x), 6) for key, x in row.items()} | {
        "updates": len(steps), "kept": sum(len(batch["ids"]) for batch in batches), "tokens": tokens}

def warn_of_collapse(rows):
    """Once a run, by the early signs of Sec. 4.1: marks the row and says so. It never stops the run."""
    std, norm, valid = (column(rows, key)[1] for key in ("reward_std", "grad_norm", "valid"))
    if len(std) < 10 or any("collapse" in row for row in rows):
        return
    spike = "grad_norm" in rows[-1] and norm[-1] > 10 * np.median(norm)
    signs = {"the in-group reward std is below 10% of its start": std[-5:].mean() < 0.1 * std[:5].mean(),
             "the gradient norm is over 10 times its median": spike,
             "fewer than half of the turns are valid": valid[-5:].mean() < 0.5 <= valid[:5].mean()}
    if any(signs.values()):
        rows[-1]["collapse"] = next(sign for sign, seen in signs.items() if seen)
        say(f"iteration {rows[-1]['iteration']}, a sign of collapse: {rows[-1]['collapse']}")

def open_run(cfg, parts):  # -> cfg with its folder, log.jsonl, samples.jsonl, rows of the log so far
    """A new folder, for nothing is ever overwritten; or that of --resume: parts and logs as when it saved."""
    out, saved, cfg = Path(cfg.resume), {}, copy.copy(cfg)
    if cfg.resume:
        saved = restore(parts, cfg)
    else:
        name = cfg.out.rstrip("/") or f"runs/{cfg.env}-{cfg.algo}{'-s' * cfg.starpo_s}-seed{cfg.seed}"
        out = next(path for i in itertools.count(1) if not (path := Path(name + f"-{i}" * (i > 1))).exists())
        out.mkdir(parents=True)
    cfg.out, cfg.resume, texts = str(out), "", [saved.get(name, "") for name in LOGS]
    rows = [json.loads(line) for line in texts[0].splitlines()]
    need(len(rows) <= cfg.iterations + 1, f"{out} has {len(rows) - 1} iterations already")
    (out / "config.new").write_text(json.dumps(asdict(cfg), indent=1))
    (out / "config.new").replace(out / "config.json")
    files = [open(out / name, "w") for name in LOGS]  # rows after the checkpoint go: they are made again
    for file, text in zip(files, texts):
        print(text, end="", file=file, flush=True)
    return cfg, *files, rows

def save(tok, parts, cfg):  # parts: policy, critic, ref, optimizer
    """RUN/checkpoint: a Hugging Face folder, and in trainer.pt all that --resume needs, the logs included.
    Written beside the old files, then put in their place: whole ones are there whenever the process dies."""
    out, new, old = (Path(cfg.out, name) for name in ("", "checkpoint.new", "checkpoint"))
    saved = {name: part.state_dict() for name, part in parts.items() if part} | {"config": asdict(cfg)}
    try:
        for part in (parts["policy"], tok):
            part.save_pretrained(new)
        torch.save(saved | {name: (out / name).read_text() for name in LOGS}, new / "trainer.pt")
    except Exception as error:  # most likely a full disk: each library has an exception of its own for it
        need(False, f"cannot save: {' '.join(str(error).split())}. Mend that, then go on: --resume {out}")
    old.mkdir(exist_ok=True)
    for file in sorted(new.iterdir(), key=lambda file: file.name == "trainer.pt"):  # last: it decides
        if file.is_dir():  # a tokenizer with several chat templates
            shutil.rmtree(old / file.name, ignore_errors=True)
        file.replace(old / file.name)
    new.rmdir()

def restore(parts, cfg):  # -> what `save` saved
    file = Path(cfg.resume, "checkpoint/trainer.pt")
    if not file.exists() and len(load(cfg.resume)[1]) < 2:
        return {}  # killed before it was trained at all: from the start
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        changed = {name for name, x in asdict(cfg).items() if saved["config"][name] != x}
        changed = ", ".join(sorted(changed - MAY_CHANGE - {"out"}))
        need(not changed, f"{cfg.resume}/config.json is not that of its checkpoint: {changed}")
        for name, part in parts.items():
            if part:
                part.load_state_dict(saved[name])
    except Exception as error:
        need(False, f"{file} cannot be used: put it back or start anew ({repr(error)[:60]})")
    for group, lr in zip(parts["optimizer"].param_groups, (cfg.lr, cfg.critic_lr)):
        group["lr"] = lr  # --resume may lower it
    return saved

def load(run):  # -> config, rows
    """A run folder; a last line that was cut off in mid-write is left out."""
    def parse(text):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    files = [Path(run, name) for name in ("config.json", LOGS[0])]
    need(all(file.is_file() for file in files), f"{run} is not the folder of a run")
    texts = [file.read_text(errors="replace") for file in files]
    config, *rows = map(parse, (texts[0], *texts[1].splitlines()))
    need(isinstance(config, dict), f"{files[0]} is damaged")
    return config, list(itertools.takewhile(bool, rows))

def column(rows, key):  # -> iterations, values; None becomes nan
    found = [(row["iteration"], row[key]) for row in rows if key in row]
    return np.array(found, dtype=float).reshape(-1, 2).T

def ema(y, beta=0.8):
    """Exponential moving average without the bias towards its start."""
    out, mean, weight = [], 0.0, 0.0
    for value in y:
        mean, weight = beta * mean + (1 - beta) * value, beta * weight + (1 - beta)
        out.append(mean / weight)
    return np.array(out)

def draw_success(ax, rows, config, color, style, labels):
    """Evaluation with its 95% intervals; faint: success of the training rollouts."""
    evaluated = [row for row in rows if config["env"] in row.get("eval", {})]
    points = [(row["iteration"], row["eval"][config["env"]]) for row in evaluated]
    if points:
        x, p = np.array(points).T
        low, high = np.array([interval(rate, config["eval_prompts"]) for rate in p]).T
        ax.errorbar(x, p, yerr=[p - low, high - p], color=color, ls=style, marker="o", ms=4, capsize=2,
                    label="evaluation, 95% interval" if labels else None)
    x, y = column(rows, "success")
    ax.plot(x, ema(y), color=color, alpha=0.35, lw=1, label="training rollouts, smoothed" if labels else None)

def draw_yardsticks(ax, config):
    for value, name, style in zip(yardsticks(config["env"], config), ("random", "optimal"), (":", "--")):
        ax.axhline(value, color="0.4", lw=1, ls=style)
        ax.annotate(f"{name} {value:.2f}", (0.99, value), xycoords=("axes fraction", "data"), ha="right",
                    va="bottom", fontsize=7, color="0.3")

def curves(runs, out=None):  # -> Path of the picture
    """One dashboard for one or several runs: the signs of learning, and those of the Echo Trap (Fig. 6)."""
    out = Path(out or Path(runs[0]) / "curves.png")
    loaded = [load(run) for run in runs]
    fig, axes = plt.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for ax, (key, title, log) in zip(axes.flat, PANELS):
        for i, (config, rows) in enumerate(loaded):
            color, style = COLORS[i % len(COLORS)], STYLES[i % len(STYLES)]
            if key == "success":
                draw_success(ax, rows, config, color, style, labels=i == 0)
                continue
            x, y = column(rows, key)
            ax.plot(x, y, color=color, alpha=0.25, lw=0.8)
            ax.plot(x, ema(y), color=color, ls=style, lw=1.6, label=Path(runs[i]).name)
        ax.set(title=title, xlabel="iteration")
        if log and any((column(rows, key)[1] > 0).any() for _, rows in loaded):
            ax.set_yscale("log")
        ax.grid(alpha=0.25)
    config = loaded[0][0]
    if all((c["env"], c["success_rate"]) == (config["env"], config["success_rate"]) for c, _ in loaded):
        draw_yardsticks(axes[0, 0], config)
    axes[0, 0].set_ylim(0, 1.1)
    axes[0, 0].legend(fontsize=7, loc="best")
    axes[0, 1].legend(fontsize=7)
    title = f"{config['env']}, {config['model']}" + f", {config['algo']}" * (len(runs) == 1)
    fig.suptitle(f"{title}: faint, as measured; strong, moving average", fontsize=10)
    fig.savefig(out, dpi=110)
    plt.close(fig)
    return out

def report(run):
    """The end of a run on the terminal: before and after, and where everything lies."""
    config, rows = load(run)
    for when, row in (("before", rows[0]), ("after", rows[-1])):
        for name, p in row.get("eval", {}).items():
            print(f"{when:9} {eval_line(name, p, config)}")
    skipped = sum(row.get("updates") == 0 for row in rows)
    print(f"{skipped} iterations without an update: no kept group had any spread\n" * bool(skipped), end="")
    print(f"{curves([run])}; samples.jsonl, log.jsonl and checkpoint/ are beside it")

def main(argv=None):
    parser = argparse.ArgumentParser("plots.py", "%(prog)s curves RUN [RUN ...] [--out FILE]")
    parser.add_argument("figure", choices=["curves"], help="the dashboard")
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--out", help="file of the picture (default: RUN/curves.png of the first run)")
    args = parser.parse_args(argv)
    print(curves(args.runs, args.out))

if __name__ == "__main__":
    main()
