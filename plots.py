"""What a run says, logs and saves; and figures, from config.json and log.jsonl alone (xray: checkpoint).

    python plots.py curves RUN [RUN ...]   one dashboard, runs overlaid: RUN/curves.png
    python plots.py xray RUN               every token of a few episodes, what it earned: RUN/xray.html
    python plots.py fig10|table2|claims|all  the paper's, from our runs; --run: train first what is missing
"""
import argparse, contextlib, copy, itertools, json, math, os, re, shutil, signal, sys, threading, zlib
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context, parent_process
from pathlib import Path

import matplotlib.figure, matplotlib.style
import numpy as np
import torch
from tqdm import tqdm

import envs
LOGS, PICTURES = ("log.jsonl", "samples.jsonl"), Path(__file__).parent / "figures"
MAY_CHANGE = {"resume", "device", "iterations", "save_every", "lr", "critic_lr"}  # options beside --resume
PAPER = json.loads((PICTURES / "paper.json").read_text())  # its figures and claims, as data
MEASURES = {"mean": np.mean, "end": lambda y: y[-1],  # of a curve: the number that a claim is about
    "early gain": lambda y: max(y[:len(y) // 2 + 1]) - y[0], "drop": lambda y: 1 - y[-1] / max(y),
    "held": lambda y: np.mean(2 * y > max(y)), "spike": lambda y: math.log10(max(y) / np.median(y)),
    "fall": lambda y: np.mean(y[:len(y) // 4 or 1]) - np.mean(y[-(len(y) // 4 or 1):])}  # first, last quarter
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # 95%

def need(condition, message):  # what the user can put right is one line on the terminal and exit code 2
    if not condition:
        tqdm.write(message, file=sys.stderr)
        raise SystemExit(2)

def say(text):  # above the progress bar; does not fail where Ctrl-C has ended `| tee`, too
    with contextlib.suppress(OSError):
        tqdm.write(text)

def yardsticks(name, config):  # -> exact success of random, optimal play; a table to 35 (Table 3) serves all
    most = min(config["max_actions"], config["max_turns"] * config["max_actions_per_turn"])
    return envs.mean_yardsticks(name, max(most, 35), config["eval_prompts"], config["success_rate"])[:, most]

def eval_line(name, p, config):  # -> "frozenlake 0.41 [0.35, 0.47]  random 0.21  optimal 0.49"
    numbers = p, *envs.interval(p, config["eval_prompts"]), *yardsticks(name, config)
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

def warn_of_collapse(rows):  # once a run, by the early signs of Sec. 4.1; it never stops the run
    std, norm, valid = ([row[k] for row in rows if k in row] for k in ("reward_std", "grad_norm", "valid"))
    if len(std) < 10 or any("collapse" in row for row in rows):
        return
    std_then, std_now, valid_then, valid_now = (np.mean(x) for y in (std, valid) for x in (y[:5], y[-5:]))
    signs = {"the in-group reward std is below 10% of its start": std_now < 0.1 * std_then,
             "gradient norm 10 times its median": rows[-1].get("grad_norm", 0) > 10 * np.median(norm or 0),
             "fewer than half of the turns are valid": valid_now < 0.5 <= valid_then}
    if any(signs.values()):
        rows[-1]["collapse"] = next(sign for sign, seen in signs.items() if seen)
        say(f"iteration {rows[-1]['iteration']}, a sign of collapse: {rows[-1]['collapse']}")

def open_run(cfg, parts):  # -> cfg with its folder, log.jsonl, samples.jsonl, rows of the log so far
    """A new folder, for nothing is ever overwritten; or that of --resume: parts and logs as when it saved."""
    out, saved, cfg = Path(cfg.resume), restore(parts, cfg) if cfg.resume else {}, copy.copy(cfg)
    if not cfg.resume:
        name = cfg.out.rstrip("/") or f"runs/{cfg.env}-{cfg.algo}{'-s' * cfg.starpo_s}-seed{cfg.seed}"
        out = next(path for i in itertools.count(1) if not (path := Path(name + f"-{i}" * (i > 1))).exists())
        out.mkdir(parents=True)
    rows = [json.loads(line) for line in saved.get(LOGS[0], "").splitlines()]
    need(len(rows) <= cfg.iterations + 1, f"{out} has {len(rows) - 1} iterations already")
    cfg.out, cfg.resume = str(out), ""
    (out / "config.new").write_text(json.dumps(asdict(cfg), indent=1))
    (out / "config.new").replace(out / "config.json")
    for name in LOGS:  # rows after the checkpoint go: they are made again
        (out / name).write_text(saved.get(name, ""))
    return cfg, *(open(out / name, "a") for name in LOGS), rows

def save(tok, parts, cfg):  # parts: policy, critic, ref, optimizer
    """RUN/checkpoint: a Hugging Face folder, and in trainer.pt all that --resume needs, the logs included.
    Written beside the old files, then put in their place: whole ones are there whenever the process dies."""
    out, new, old = (Path(cfg.out, name) for name in ("", "checkpoint.new", "checkpoint"))
    saved = {name: part.state_dict() for name, part in parts.items() if part} | {"config": asdict(cfg)}
    try:
        for part in (parts["policy"], tok):
            part.save_pretrained(new)
        torch.save(saved | {name: (out / name).read_text() for name in LOGS}, out / "trainer.new")
    except Exception as error:  # most likely a full disk: each library has an exception of its own for it
        need(False, f"cannot save: {' '.join(str(error).split())}. Mend that, then go on: --resume {out}")
    shutil.copytree(new, old, copy_function=os.replace, dirs_exist_ok=True)
    os.replace(out / "trainer.new", old / "trainer.pt")  # last: it decides
    shutil.rmtree(new)

def restore(parts, cfg):  # -> what `save` saved
    file = Path(cfg.resume, "checkpoint/trainer.pt")
    if not file.exists() and len(load(cfg.resume)[1]) < 2:
        return {}  # killed before it was trained at all: from the start
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        changed = [x for x in asdict(cfg).keys() - MAY_CHANGE - {"out"} if saved["config"][x] != vars(cfg)[x]]
        need(not changed, f"{cfg.resume}/config.json is not that of its checkpoint: {sorted(changed)}")
        for name in [name for name, part in parts.items() if part]:
            parts[name].load_state_dict(saved[name])
    except Exception as error:
        need(False, f"{file} cannot be used: put it back or start anew ({repr(error)[:60]})")
    for group, lr in zip(parts["optimizer"].param_groups, (cfg.lr, cfg.critic_lr)):
        group["lr"] = lr  # --resume may lower it
    return saved

def load(run):  # -> config, rows of the log; a last line that was cut off in mid-write is left out
    files, found = [Path(run, name) for name in ("config.json", LOGS[0])], []
    need(all(file.is_file() for file in files), f"{run} is not the folder of a run (for a figure: add --run)")
    with contextlib.suppress(ValueError, TypeError):
        for text in (files[0].read_text(), *files[1].read_text(errors="replace").splitlines()):
            found.append(dict(json.loads(text)))
    need(found and "env" in found[0], f"{files[0]} is damaged")
    return found[0], found[1:]

def series(config, rows, metric):  # a column, "eval", "eval WORLD", or "seconds" so far -> iterations, values
    kind, _, world = metric.partition(" ")
    if kind == "eval":
        rows = [row | {"eval": row["eval"][world or config["env"]]} for row in rows if "eval" in row]
    keys = ["seconds_rollout", "seconds_update"] if kind == "seconds" else [kind]
    found = [(row["iteration"], sum(map(row.get, keys))) for row in rows if row.get(keys[0]) is not None]
    x, y = np.array(found, dtype=float).reshape(-1, 2).T
    return x * config["online_k"], np.cumsum(y) if kind == "seconds" else y  # x: in iterations of P prompts

def draw_panel(ax, metric, title, groups):  # groups: {label: [(config, rows) of each seed]}
    """Line: mean over seeds; band: lowest to highest, of one seed its 95% interval. Noisy: moving average."""
    kind, _, world = metric.partition(" ")
    for style, (label, runs) in zip(itertools.cycle(["-", "--", "-.", ":"]), groups.items()):
        lines = [dict(zip(*series(*run, metric))) for run in runs]
        x = np.array(sorted(set.intersection(*map(set, lines))))  # some iterations lack some columns
        if not len(x):
            continue
        w = 0.8 ** np.arange(len(x) if kind not in ("eval", "seconds", "mutual_information") else 1)
        y = np.array([np.convolve([line[i] for i in x], w)[:len(x)] for line in lines]) / np.cumsum(w)
        band = [y.min(0), y.max(0)]
        if kind == "eval" and len(runs) == 1:
            band = np.transpose([envs.interval(p, runs[0][0]["eval_prompts"]) for p in y[0]])
        i = [*(PAPER["methods"] if label in PAPER["methods"] else groups)].index(label)  # its colour
        ax.fill_between(x, *band, color=f"C{i}", alpha=0.15, lw=0)
        ax.plot(x, y.mean(0), style + "o" * (kind == "eval"), color=f"C{i}", label=label)
    configs = [config for runs in groups.values() for config, _ in runs] if kind == "eval" else []
    both = {tuple(yardsticks(world or config["env"], config)) for config in configs}
    for what, value in zip(("random", "optimal"), *both) if len(both) == 1 else ():
        ax.axhline(value, color="0.4", lw=1, ls=":")
        ax.text(0, value, f"{what} {value:.2f}", va="bottom", fontsize=7, color="0.3")
    ax.set(title=title + PAPER["metrics"][kind], yscale=PAPER["scales"].get(kind, "linear"))

@matplotlib.style.context(["petroff10", PAPER["style"]])  # colours that all readers tell apart
def draw(title, panels, out, columns):  # panels: (metric, title, groups) of each -> out
    rows, seeds = math.ceil(len(panels) / columns), max(len(runs) for runs in panels[0][2].values())
    fig = matplotlib.figure.Figure(figsize=(12, 2.7 * rows + 0.5), layout="constrained")
    band = f"mean, range of {seeds} seeds" if seeds > 1 else "95% interval" * panels[0][0].startswith("eval")
    for i, panel in enumerate(panels, 1):
        draw_panel(fig.add_subplot(rows, columns, i), *panel)
        if i == 1 or panel[2].keys() != panels[i - 2][2].keys():
            fig.axes[-1].legend(title=band)
    fig.suptitle(f"{title}, by iteration", fontsize=10)
    fig.savefig(out, dpi=90)
    return out

def curves(runs, out=None):  # -> Path of a dashboard: the signs of learning, and of the Echo Trap (Fig. 6)
    groups = {os.path.relpath(run): [load(run)] for run in runs}
    seen = {key for (_, rows), in groups.values() for row in rows for key in row}
    need(seen & PAPER["metrics"].keys(), f"{' '.join(runs)}: no iteration is finished, nothing to draw")
    panels = [(key, "", groups) for key in PAPER["metrics"] if key in seen]
    return draw("{env}, {model}".format(**load(runs[0])[0]), panels, Path(out or f"{runs[0]}/curves.png"), 4)

def xray(run):  # -> Path of a page: the run's next iteration, in memory, token by token
    import ragen_mini as rm  # which imports this file: only where it is needed
    cfg = rm.parse_config(["--resume", run, "--device", "auto"])
    parts, tok = rm.load_models(cfg)
    rows, cfg.online_k = restore(parts, cfg).get(LOGS[0], "").splitlines(), 1
    _, trajs, batches = rm.iterate(max(1, len(rows)), *parts.values(), tok, cfg)
    need(batches, f"{run}: no group has any spread, nothing would be trained")
    kept = rm.uncertainty_filter(torch.tensor([traj.R for traj in trajs]).view(-1, cfg.rollouts), cfg.keep)
    trajs.sort(key=lambda traj: traj.group not in kept)  # as in the batch; the others behind
    batch, n = batches[0], len(batches[0]["ids"])
    shown = slice(0, n, math.ceil(n / 5))
    batch["ratio"] = (rm.logps(parts["policy"], batch, cfg) - batch["old_logp"]).exp()
    columns = {key: batch[key][shown].tolist() for key in batch.keys() - {"ids", "mask", "length"}}
    episodes = [vars(traj) | {"env": "", "tokens": [tok.decode([i]) for i in traj.ids]}
                for traj in trajs[shown] + trajs[n:n + 1]]
    data = json.dumps({"title": f"{run}, iteration {len(rows)}", "episodes": episodes, "columns": columns})
    page = Path(run, "xray.html")
    page.write_text((PICTURES / "xray.html").read_text().replace("EPISODES", data.replace("<", "\\u003c")))
    return page

def jobs(world, method, args):  # -> {folder: settings} of every seed. Equal runs share one, in all figures
    settings = PAPER["worlds"][world] | PAPER.get(args.model, {}).get(world, {}) | PAPER["methods"][method]
    settings |= {"model": args.model} | ({"iterations": args.iterations} if args.iterations else {})
    need(args.iterations % settings.get("online_k", 1) == 0, "--iterations: a multiple of 10, for Online-k")
    mark = f"{zlib.crc32(json.dumps(settings, sort_keys=True).encode()):08x}"  # other settings, other folder
    name = "-".join(re.findall(r"\w+", f"{world} {method} {mark} seed"))
    return {args.folder / f"{name}{seed}": settings | {"seed": seed} for seed in range(args.seeds)}

def runs_of(world, method, args):  # -> (config, rows) of each seed
    runs = [load(folder) for folder in jobs(world, method, args)]
    need(all(len(rows) > config["iterations"] for config, rows in runs), f"{world}, {method}: add --run")
    return runs

def train_one(folder, settings):  # anew, or from its checkpoint. One iteration of Online-k counts for k
    import ragen_mini as rm
    if (folder / LOGS[0]).exists():
        return rm.STOP or rm.train(rm.parse_config(["--resume", str(folder)]))
    shutil.rmtree(folder, ignore_errors=True)  # killed while it was being made
    cfg = rm.Config(out=str(folder), **settings)
    cfg.iterations, cfg.eval_every = (max(1, n // cfg.online_k) for n in (cfg.iterations, cfg.eval_every))
    rm.STOP or rm.train(cfg)  # Ctrl-C in the run before: this one is not begun

def be_one_of_many(ask_to_stop):  # processes: quiet, one thread, and gone as soon as the parent is
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")
    signal.signal(signal.SIGINT, ask_to_stop)  # Ctrl-C reaches them all
    threading.Thread(target=lambda: os._exit(parent_process().join() or 1), daemon=True).start()

def run_missing(names, args):  # trains what is not there yet: one after another, or many at once
    import ragen_mini as rm
    todo = {folder: settings for name in names for world, _, methods in PAPER["figures"][name]["panels"]
            for method in PAPER["sets"][methods] for folder, settings in jobs(world, method, args).items()
            if not (folder / LOGS[0]).exists() or len(load(folder)[1]) <= load(folder)[0]["iterations"]}
    many = args.jobs or (torch.get_num_threads() if args.model == "tiny" and not rm.CUDA else 1)
    if many == 1 or not todo:
        return [train_one(*job) for job in tqdm(todo.items(), "runs")]
    rm.load_models(rm.Config(**[*todo.values()][0] | {"device": "cpu"}))  # makes `tiny` once, for all
    os.environ["TQDM_DISABLE"] = "1"  # their bars; ours is here already
    with ProcessPoolExecutor(many, get_context("spawn"), be_one_of_many, [rm.ask_to_stop]) as pool:
        list(tqdm(pool.map(train_one, *zip(*todo.items())), "runs (Ctrl-C: they save)", len(todo)))

def markdown(head, rows):  # -> a table
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])

def figure(name, args):  # -> Markdown: a picture, or a table: mean [lowest, highest] seed / random / optimal
    panels = [(metric, f"{world}{' -> ' * (' ' in metric)}{metric.partition(' ')[2]}: ", {
        method: runs_of(world, method, args) for method in PAPER["sets"][methods]})
        for world, metric, methods in PAPER["figures"][name]["panels"]]
    title, table = PAPER["figures"][name]["title"], {}
    if name.startswith("fig"):
        out = args.folder / f"{name}{f'-{args.iterations}' * bool(args.iterations)}.png"
        return f"![{title}]({draw(title, panels, out, min(5 if len(panels) > 6 else 3, len(panels)))})"
    for metric, _, groups in panels:
        for method, runs in groups.items():
            p, both = [series(*run, metric)[1][-1] for run in runs], yardsticks(metric.split()[1], runs[0][0])
            cell = "{:.2f} [{:.2f}, {:.2f}] / {:.2f} / {:.2f}".format(np.mean(p), min(p), max(p), *both)
            table.setdefault(method, [method]).append(cell)
    return f"{title}\n\n" + markdown(["", *(head[:-2] for _, head, _ in panels)], table.values())

def claims(args):  # -> Markdown: what the paper says; our runs' measure of it, with Student's 95% interval
    table = []
    for name, says, metric, key, least, *pairs in PAPER["claims"]:
        d, *less = ([MEASURES[key](series(*run, metric)[1]) for run in runs_of(*p, args)] for p in pairs)
        d = np.subtract(d, *less or [0])
        half = STUDENT.get(len(d), 2.26) * d.std(ddof=1) / math.sqrt(len(d)) if len(d) > 1 else math.inf
        low, high, what = d.mean() - half, d.mean() + half, " - ".join(f"{m} ({world})" for world, m in pairs)
        table.append([name, says, f"{key} of {metric}: {what} > {least:g}",
                      " ".join(f"{x:.2f}" for x in d), f"{d.mean():.2f} [{low:.2f}, {high:.2f}]",
                      "holds" if low > least else "does not hold" if high < least else "not resolvable"])
    return markdown(["", "claim", "measure", "by seed", "mean, 95% interval", "verdict"], table)

def main(argv=None):
    parser = argparse.ArgumentParser("plots.py", epilog="everything: all --run", allow_abbrev=False)
    parser.add_argument("what", choices=["curves", "xray", *PAPER["figures"], "claims", "all"])
    parser.add_argument("runs", nargs="*", help="of curves and xray: run folders")
    parser.add_argument("--run", action="store_true", help="train what is missing first")
    for name, default in (("seeds", 3), ("iterations", 0), ("jobs", 0), ("model", "tiny"), ("out", "")):
        parser.add_argument("--" + name, type=type(default), default=default)
    args = parser.parse_args(argv)
    names = [*PAPER["figures"], "claims"] if args.what == "all" else [args.what]
    other = {"curves": lambda: curves(args.runs, args.out), "xray": lambda: xray(args.runs[0]),
             "claims": lambda: claims(args)}
    need(bool(args.runs) == (args.what in ("curves", "xray")), "curves and xray (only) take run folders")
    need(not args.out or args.what == "curves" and args.out.endswith(".png"), "--out: a .png, for curves")
    need(args.seeds > 0 <= min(args.iterations, args.jobs), "--seeds: above 0; --iterations, --jobs: 0 up")
    args.folder = PICTURES / args.model.strip("/").replace("/", "-")
    if args.run:
        run_missing([name for name in PAPER["figures"] if {name, "claims"} & {*names}], args)
    for name in names:
        print(other[name]() if name in other else figure(name, args), end="\n\n")

if __name__ == "__main__":
    try:
        main()
    except (OSError, KeyboardInterrupt, BrokenExecutor) as error:
        need(False, str(error) or "stopped: the same command goes on")
