"""The paper's figures, tables and claims: from data to runs, from logs to pictures, numbers and verdicts; the X-ray."""
import argparse
import contextlib
import copy
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import plots
import ragen_mini as rm
from conftest import ROOT


def args_of(**options):
    args = argparse.Namespace(**dict(seeds=2, iterations=0, jobs=1, model="tiny") | options)
    args.folder = plots.PICTURES / Path(args.model).name
    return args


PAIRS = list(dict.fromkeys((world, method) for figure in plots.PAPER["figures"].values()
                           for world, _, methods in figure["panels"] for method in plots.PAPER["sets"][methods]))


def test_every_run_has_valid_settings_and_a_folder_of_its_own():
    folders = {}
    for pair in PAIRS:
        for folder, settings in plots.jobs(*pair, args_of()).items():
            cfg = rm.Config(**settings, device="cpu", out=str(folder))
            assert cfg.iterations % cfg.online_k == 0, "k slices are k updates"
            folders.setdefault(folder, set()).add(repr(sorted(settings.items())))
    assert len(folders) == 2 * len(PAIRS) and all(len(settings) == 1 for settings in folders.values())
    assert len(set().union(*folders.values())) == len(folders), "two folders, the same run"


def test_figures_and_claims_name_what_exists():
    names = [*plots.PAPER["figures"]]
    assert {"fig5", "fig6", "fig7", "fig8", "fig9", "fig10", "fig11", "table2", "table3", "table4"} <= {*names}
    for figure in plots.PAPER["figures"].values():
        for world, metric, methods in figure["panels"]:
            assert metric.split()[0] in plots.PAPER["metrics"] and methods in plots.PAPER["sets"] and world in plots.PAPER["worlds"]
    for name, says, metric, measure, margin, *pairs in plots.PAPER["claims"]:
        assert {*map(tuple, pairs)} <= {*PAIRS} and measure in plots.MEASURES and len(pairs) in (1, 2)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Every figure with small runs, in a folder of its own."""
    paper = copy.deepcopy(plots.PAPER)
    for world in paper["worlds"].values():
        world |= dict(prompts=2, rollouts=4, batch=4, eval_prompts=2, eval_envs="", max_new_tokens=16, lr=1e-3, device="cpu", env="bandit")
    monkeypatch.setattr(plots, "PAPER", paper)
    monkeypatch.setattr(plots, "PICTURES", tmp_path)
    return tmp_path


def test_online_k_makes_equal_updates_and_uses_each_sample_once(small, folder, monkeypatch):
    """Fig. 10 by its own command: k = 1, 2, 5, 10; how often is each trajectory used, in how many steps of which size?"""
    real_update, real_score, scored, sizes = rm.update, rm.score, [], []

    def score(trajs, *rest):
        scored.extend(trajs)
        return real_score(trajs, *rest)

    def update(batch, *rest):
        steps = real_update(batch, *rest)
        sizes.extend([len(batch["ids"]) / len(steps)] * len(steps))
        return steps
    monkeypatch.setattr(rm, "score", score)
    monkeypatch.setattr(rm, "update", update)
    monkeypatch.setattr(plots, "figure", lambda name, args: name)
    for world, method in [pair for pair in PAIRS if pair[0] == "sokoban, calm" and pair[1] in ("PPO", "k = 2", "k = 5", "k = 10")]:
        plots.PAPER["sets"]["online"] = [method]
        scored.clear(), sizes.clear()
        plots.main(["fig10", "--run", "--seeds", "1", "--iterations", "10", "--model", folder])
        config, rows = plots.load(max(small.rglob("log.jsonl"), key=lambda file: file.stat().st_mtime_ns).parent)
        skipped = 10 - sum(row["updates"] for row in rows[1:]) / 2
        assert config["online_k"] * (len(rows) - 1) == 10 and set(sizes) == {4.0}, "equal batches"
        assert len(sizes) == 2 * (10 - skipped) and skipped < 5, "two steps on each 8 trajectories, but where all returns are equal"
        assert len(scored) == len({id(traj) for traj in scored}) == 4 * len(sizes), "each sample once"


def test_an_interrupted_run_goes_on(small, folder, monkeypatch):
    plots.PAPER["figures"] = {"fig5": {"title": "", "panels": [["bandit", "eval", "baselines"]]}}
    args = args_of(seeds=1, iterations=4, model=folder)
    for world in plots.PAPER["worlds"].values():
        world |= dict(eval_every=2, save_every=1)
    real, calls = rm.iterate, []

    def iterate(i, *rest):
        calls.append(i)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return real(i, *rest)
    monkeypatch.setattr(rm, "iterate", iterate)
    with pytest.raises(KeyboardInterrupt):
        plots.run_missing(["fig5"], args)
    plots.run_missing(["fig5"], args)
    assert calls == [1, 2, 3, 4, 1, 2, 3, 3, 4], "the finished run is left alone, the other goes on"
    before = {path: path.stat().st_mtime_ns for path in small.rglob("*.jsonl")}
    plots.run_missing(["fig5"], args)
    assert before == {path: path.stat().st_mtime_ns for path in small.rglob("*.jsonl")} and len(calls) == 9
    plots.PAPER["worlds"]["bandit"]["lr"] = 2e-3
    with pytest.raises(SystemExit):  # other settings: those runs are not there
        plots.figure("fig5", args)


def alive(group):  # processes of a group that have not ended
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            state, _, number, *_ = file.read_text().rpartition(")")[2].split()
            found += [file.parent.name] * (int(number) == group and state != "Z")
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_runs_in_processes_of_their_own(small, folder, tmp_path):
    """Two at once: Ctrl-C saves both and begins no third; where the command is killed they end, too; then it finishes all four.
    One after another, with one thread, the rows are the same."""
    plots.PAPER["figures"] = {"fig5": {"title": "", "panels": [["bandit", "eval", "baselines"]]}}
    for world in plots.PAPER["worlds"].values():
        world |= dict(save_every=100, eval_every=100)
    args = dict(seeds=2, iterations=20, model=folder, jobs=2)
    code = """import argparse, json, plots
if __name__ == "__main__":
    plots.PAPER = json.load(open("paper.json"))
    plots.run_missing(["fig5"], argparse.Namespace(folder=plots.Path("processes"), **json.load(open("args.json"))))"""
    for name, text in (("paper.json", json.dumps(plots.PAPER)), ("args.json", json.dumps(args)), ("job.py", code)):
        (tmp_path / name).write_text(text)

    def logged():
        return {file.parent: file.read_text().count("\n") for file in tmp_path.glob("processes/*/log.jsonl")}

    def start(more=0):  # and wait until two runs have so many more rows
        process = subprocess.Popen([sys.executable, "job.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
                                   stderr=subprocess.PIPE, text=True)
        before = logged()
        while more and process.poll() is None and sum(rows > before.get(run, 0) + more for run, rows in logged().items()) < 2:
            time.sleep(0.01)
        return process

    process = start(more=3)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate()[1]
    stopped = logged()
    assert process.returncode and "KeyboardInterrupt" in said and len(stopped) == 2 and max(stopped.values()) < 21, (said, stopped)
    for run, rows in stopped.items():
        assert torch.load(run / "checkpoint/trainer.pt", weights_only=True)["log.jsonl"].count("\n") == rows
    process = start(more=1)
    process.kill()
    process.wait()
    for _ in range(300):
        if alive(process.pid):
            time.sleep(0.01)
    assert not alive(process.pid) and max(logged().values()) < 21
    process = start()
    said = process.communicate()[1]
    assert process.returncode == 0 and [*logged().values()] == [21] * 4 and "4/4" in said and "StarPO" not in said, said
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plots.run_missing(["fig5"], argparse.Namespace(folder=tmp_path / "serial", **args | {"jobs": 1, "seeds": 1}))
    torch.set_num_threads(threads)
    for run in [run for run in logged() if run.name.endswith("seed0")]:
        rows, truth = ([{key: x for key, x in row.items() if "seconds" not in key} for row in plots.load(path)[1]]
                       for path in (run, tmp_path / "serial" / run.name))
        assert rows == truth


@pytest.fixture
def invented(monkeypatch, tmp_path):
    """Every run as an invented log: success rises to the number of the run / 1000, from 1 on."""
    monkeypatch.setattr(plots, "PICTURES", tmp_path)
    monkeypatch.setattr(plots, "yardsticks", lambda name, config: (0.125, len(name) / 20))
    ends = {}
    for number, (folder, settings) in enumerate(job for pair in PAIRS for job in plots.jobs(*pair, args_of()).items()):
        cfg, ends[folder] = rm.Config(**settings | {"iterations": 4}, device="cpu"), (number + 1) / 1000
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({name: vars(cfg)[name] for name in rm.Config.__dataclass_fields__}))
        rows = [{"iteration": i, "eval": {name: i / 4 * ends[folder] for name in cfg.eval_names}} | (dict(
            reward=0.1, reward_std=1.0 / i, grad_norm=1.0, entropy=0.5, response_length=50.0 - i, think_length=9.0 - i, mutual_information=1.0,
            seconds_rollout=1.0, seconds_update=2.0) if i else {}) for i in range(5)]
        (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return ends


def test_figures_and_tables_from_logs(invented, tmp_path, capsys, pictures):
    plots.main(["all", "--seeds", "2"])
    said = capsys.readouterr().out
    for name in plots.PAPER["figures"]:
        assert not name.startswith("fig") or (tmp_path / "tiny" / f"{name}.png").stat().st_size > 5000
    runs = plots.jobs("sokoban, calm", "4 responses", args_of())
    line = next(line for line in said.splitlines() if line.startswith("| 4 responses"))
    ends = [invented[run] for run in runs]
    assert line.split(" | ")[1] == f"{np.mean(ends):.2f} [{min(ends):.2f}, {max(ends):.2f}] / 0.12 / 0.35"
    assert plots.series(*plots.load([*runs][0]), "seconds")[1].tolist() == [3, 6, 9, 12]


@pytest.mark.parametrize("ours, theirs, verdict", [
    ([0.5, 0.6, 0.7], [0.1, 0.2, 0.3], "holds"), ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7], "does not hold"),
    ([0.1, 0.9, 0.5], [0.2, 0.4, 0.6], "not resolvable"), ([0.5, 0.6, 0.7], [0.3, 0.3, 0.6], "not resolvable")])
def test_verdicts_are_computed(monkeypatch, ours, theirs, verdict):
    args, scipys_t = args_of(seeds=3), 4.302652729749464
    ends = dict(zip([*plots.jobs("sokoban", "StarPO-S", args), *plots.jobs("sokoban", "PPO", args)], ours + theirs))
    monkeypatch.setitem(plots.PAPER, "claims", [["fig9", "it says", "eval", "end", 0.05, ["sokoban", "StarPO-S"], ["sokoban", "PPO"]]])
    monkeypatch.setattr(plots, "load", lambda folder: ({"online_k": 1, "env": "sokoban", "iterations": 0}, [
        {"iteration": 0, "eval": {"sokoban": ends[folder]}}]))
    cells = plots.claims(args).splitlines()[-1].strip("| ").split(" | ")
    d = np.array(ours) - theirs
    half = scipys_t * d.std(ddof=1) / math.sqrt(3)
    assert cells[-1] == verdict and cells[-2] == f"{d.mean():.2f} [{d.mean() - half:.2f}, {d.mean() + half:.2f}]"


def test_measures_on_hand_made_curves():
    y = np.array([0.2, 0.5, 0.4, 0.1, 0.1, 0.1, 0.1, 2.0])
    found = {name: measure(y) for name, measure in plots.MEASURES.items()}
    assert found == pytest.approx({"mean": 3.5 / 8, "end": 2, "early gain": 0.3, "drop": 0, "held": 1 / 8, "fall": 0.35 - 1.05,
                                   "spike": math.log10(2 / 0.15)})
    assert plots.MEASURES["drop"](y[:4]) == pytest.approx(0.8) and plots.MEASURES["held"](y[:4]) == 0.5


def test_lines_are_drawn_where_every_seed_has_a_value(tmp_path):
    """A skipped iteration has no gradient norm: other seeds' values must stay at their iterations."""
    import matplotlib.pyplot as plt
    runs = [({"online_k": 1, "env": "bandit"}, [{"iteration": i} | ({"grad_norm": float(i)} if i not in missing else {}) for i in range(1, 9)])
            for missing in ([2], [5, 6])]
    ax = plt.figure().add_subplot()
    plots.draw_panel(ax, "grad_norm", "", {"PPO": runs, "GRPO": [({"online_k": 1, "env": "bandit"}, [])]})
    line, = ax.get_lines()
    assert line.get_xdata().tolist() == [1, 3, 4, 7, 8]
    mean, truth = 0.0, []
    for n, value in enumerate([1, 3, 4, 7, 8], 1):  # the textbook's recursion, corrected for its start
        mean = 0.8 * mean + 0.2 * value
        truth.append(mean / (1 - 0.8 ** n))
    assert line.get_ydata() == pytest.approx(truth)


def brute_force_information(trajs, policy, tok):
    """By its definition, one sequence at a time, thoughts found in the ids of `tiny`'s closing tag."""
    end, found = tok.convert_tokens_to_ids("</think>"), []
    for traj in trajs:
        if traj.turns[0]["valid"]:
            start = traj.mask.index(True)
            found.append((traj.ids[:start], traj.ids[start:traj.ids.index(end, start)]))
    xs = [list(x) for x in {tuple(x) for x, _ in found}]

    def logp(x, z):
        logits = policy(input_ids=torch.tensor([x + z])).logits[0].log_softmax(-1)
        return sum(logits[len(x) + i - 1, token].item() for i, token in enumerate(z))
    return np.mean([logp(x, z) - math.log(np.mean([math.exp(logp(other, z)) for other in xs])) for x, z in found]), len(xs)


@torch.no_grad()
def test_mutual_information(play, llama, tok, cfg):
    texts = ["The goal is 2 down .</think><answer>Down</answer>", "</think><answer>Left</answer>"]
    trajs = play(texts[:1], "frozenlake", [1, 2, 3], cfg, n=2) + play(texts[1:], "frozenlake", [4], cfg)
    trajs += play(["no tags"], "frozenlake", [5], cfg)
    truth, prompts = brute_force_information(trajs, llama, tok)
    found = rm.mutual_information(trajs, llama, tok, cfg)
    assert found == pytest.approx(truth, abs=1e-4) and found <= math.log(prompts) and prompts == 4
    assert rm.mutual_information(trajs[:2], llama, tok, cfg) == pytest.approx(0, abs=1e-5), "one prompt tells nothing"
    assert rm.mutual_information(trajs[-1:], llama, tok, cfg) is None, "no thought at all"


def test_xray_shows_the_next_iteration_and_changes_nothing(folder, tmp_path, monkeypatch):
    cfg = rm.Config(env="frozenlake", model=folder, device="cpu", prompts=4, rollouts=4, keep=0.5, iterations=1, eval_every=0, save_every=1,
                    max_new_tokens=20, lr=1e-2, mi_every=1, out=str(tmp_path / "r"))
    rows = rm.train(cfg)
    assert rows[1]["mutual_information"] is None or -1e-4 <= rows[1]["mutual_information"] <= math.log(4)
    before = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    plots.main(["xray", str(tmp_path / "r")])
    assert before == {path: path.read_bytes() for path in before}
    page = (tmp_path / "r" / "xray.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    rm.train(rm.parse_config(["--resume", str(tmp_path / "r"), "--iterations", "2", "--device", "cpu"]))
    following = plots.load(tmp_path / "r")[1][2]
    assert len(data["columns"]["adv"]) == 4 and len(data["episodes"]) == 5 and following["kept"] == 8
    groups = [episode["group"] for episode in data["episodes"]]
    assert groups[-1] not in groups[:-1], "the last one was filtered out"
    for episode, *columns in zip(data["episodes"], *(data["columns"][key] for key in ("adv", "ratio", "old_logp", "reward"))):
        adv, ratio, logp, reward = (np.array([0.0, *column[:len(episode["ids"]) - 1]]) for column in columns)
        mask = np.array(episode["mask"])
        assert len(episode["tokens"]) == len(mask) and (adv[~mask] == 0).all() and (adv[mask] != 0).any()
        assert logp == pytest.approx(episode["old_logp"], abs=1e-6) and sum(reward) == pytest.approx(episode["R"], abs=1e-5)
        assert abs(ratio[mask] - 1).max() > 1e-3, "after the update"
        assert sum(not a and b for a, b in zip([False, *episode["mask"]], episode["mask"])) == len(episode["turns"])


def test_shipped_pages_are_what_the_program_prints_from_the_shipped_logs():
    """Every number of the ledger and of the tables; and the figures' folder stays small."""
    page, args = (ROOT / "figures" / "CLAIMS.md").read_text(), args_of(seeds=3)
    for text in (plots.claims(args), *(plots.figure(name, args) for name in plots.PAPER["figures"] if name.startswith("table"))):
        assert text in page
    for name in plots.PAPER["figures"]:
        assert name.startswith("table") or f"({args.folder.name}/{name}.png)" in page and (args.folder / f"{name}.png").exists()
    shipped = [path for path in (ROOT / "figures").rglob("*") if path.is_file() and path.suffix in (".png", ".txt", ".md", ".json", ".jsonl")]
    assert sum(path.stat().st_size for path in shipped if "checkpoint" not in path.parts) < 3e6
    readme = (ROOT / "README.md").read_text().split("What came out, by ")[1].split("![")[0]
    verdicts = [len(re.findall(rf"\| {verdict} \|$", page, re.M)) for verdict in ("holds", "does not hold", "not resolvable")]
    assert readme.startswith("{} computed tests: {} hold, {} do not, {} are not".format(sum(verdicts), *verdicts))
    for number in re.findall(r"-?\d\.\d\d", readme):
        assert number in page or number in ("0.36", "1.00"), number
