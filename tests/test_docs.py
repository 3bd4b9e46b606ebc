"""What is written about the code is true of it: README, the arrows between files, the figures of the speed tables."""
import ast
import importlib
import json
import re
import runpy
import subprocess
import sys
import textwrap
from dataclasses import asdict
from statistics import fmean

import numpy as np
import pytest
import torch

import envs
import plots
import ragen_mini as rm
from conftest import ROOT, rows_of
from extras import episode, warm_start

sys.path.insert(0, str(ROOT / "figures"))
import ledger
import paper
import smollm2

README = (ROOT / "README.md").read_text()
CORE = ("envs", "plots", "ragen_mini")


PROGRAMS = {path.stem: path for folder in ("", "extras", "figures", "course", "tiny") for path in (ROOT / folder).glob("*.py")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_names_only_what_its_neighbours_have(name, monkeypatch):
    """`elsewhere.settings()`, say, after that function got another name. Not all of their mains run in a test."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *(str(ROOT / f) for f in ("extras", "figures", "course", "tiny")), *sys.path])
    tree = ast.parse(PROGRAMS[name].read_text())
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) or isinstance(node, ast.ImportFrom) and node.module in ("extras", "figures"):
            modules |= {alias.asname or alias.name: importlib.import_module(alias.name) for alias in node.names
                        if alias.name in PROGRAMS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert hasattr(modules[node.value.id], node.attr), f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("name", CORE)
def test_arrows_go_down(name):
    """Each of the three files may import those before it, and knows nothing of what stands around them."""
    text = (ROOT / f"{name}.py").read_text()
    below = CORE[:CORE.index(name)]
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert node in tree.body, f"line {node.lineno}: an import inside a function"
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            for module in imported:
                assert module not in CORE or module in below, node.lineno
                assert name == "ragen_mini" or module.split(".")[0] not in ("torch", "transformers")
                assert not (ROOT / "extras" / f"{module}.py").exists() and not (ROOT / "course" / f"{module}.py").exists()
    assert not re.search(r"\b(extras|course|figures)/", text)


def test_plots_draw_without_torch(tmp_path):
    """In an interpreter in which torch cannot be imported: a dashboard and a collapse."""
    config = asdict(rm.Config(model="tiny", device="cpu", env="bandit"))
    rows = [{"iteration": i, "eval": {"bandit": 0.5}, "yardsticks": {"bandit": [0.5, 1.0]}, "reward": 0.1 * i, "success": 0.5, "entropy": 1.0,
             "seconds_rollout": 1.0, "seconds_update": 1.0} for i in range(4)]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = (f"import sys; sys.modules['torch'] = None; import plots; "
            f"plots.curves({str(tmp_path)!r}); folder = plots.Path({str(tmp_path)!r}); plots.collapse(plots.load(folder), folder / 'collapse.png')")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("curves.png", "collapse.png"))


@pytest.mark.parametrize("metric, title", [
    ("entropy", "entropy per token\nfalls as the model decides"), ("my_column", "my_column")])
def test_a_panel_is_titled_by_what_it_shows(metric, title):
    """A column of a `watch` is no evaluation."""
    ax = plots.matplotlib.figure.Figure().add_subplot()
    plots.finish_panel(ax, metric)
    assert ax.get_title() == title


@pytest.mark.parametrize("metric, scale", [("grad_norm", "log"), ("grad_norm_max", "log"), ("reward", "linear")])
def test_vanishing_gradients_can_be_seen(metric, scale):
    """From 1 to 0.001 and back, in one picture. A healthy run's fill theirs: 0 is not in it."""
    ax = plots.matplotlib.figure.Figure().add_subplot()
    ax.plot([1, 2, 3], [0.5, 0.6, 0.7])
    plots.finish_panel(ax, metric)
    low, high = ax.get_ylim()
    assert ax.get_yscale() == scale and (0.4 < low and high < 0.8 if scale == "log" else low < 0 and 1 < high), "0 and 1 are seen"


def test_pictures_of_broken_folders_are_one_line(tmp_path):
    for make in (lambda: None, lambda: (tmp_path / "log.jsonl").write_text("{}\nx\n{}"), lambda: (tmp_path / "config.json").write_text("{}")):
        make()
        with pytest.raises(envs.UserError) as stop:
            plots.curves(str(tmp_path))
        assert "\n" not in str(stop.value)


# ----------------------------------------------------------------------------------------------------- README
def commands(script):
    """Of the lines that begin with one, in code blocks of both kinds."""
    for line in re.findall(rf"^ *python {script}(.*)", README, re.M):
        yield line.split("#")[0].split()


def test_readme_is_short():
    assert len(README.split()) <= 1000


def test_readme_says_how_long_the_file_is():
    lines = (ROOT / "ragen_mini.py").read_text().splitlines()
    assert round(len(lines), -1) == 800
    assert "one file, [ragen_mini.py](ragen_mini.py), 800 lines" in README


def test_readme_commands_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    run = tmp_path / "runs/frozenlake-ppo-seed0"
    (run / "checkpoint").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"env": "frozenlake", "model": "tiny"}))
    asked = [argv for argv in commands("ragen_mini.py") if argv != ["--help"]]
    assert len(asked) == 3 and all(rm.parse_config(argv + ["--device", "cpu"]) for argv in asked)
    assert all((ROOT / argv[0].split(":")[0]).exists() for argv in commands("extras/check_world.py"))
    for name in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / name).exists(), name


def test_readme_change_of_the_method_trains(tmp_path, monkeypatch):
    """The indented block that begins with the import, as it stands, by its command, but for two iterations."""
    block = re.search(r"^    import ragen_mini as rm\n(?:    .*\n|\n)+", README, re.M)[0]
    script = tmp_path / "my_rloo.py"
    script.write_text(textwrap.dedent(block))
    command, = re.findall(r"^    python (my_rloo.py .*)$", README, re.M)
    both = f"python plots.py curves runs/frozenlake-ppo-seed0 runs/{rm.Config(algo='ppo').name.replace('ppo', 'rloo')} --out both.png"
    assert both in README
    small = f"--device cpu --iterations 2 --eval-every 0 --prompts 2 --out {tmp_path}/run"
    monkeypatch.setattr(sys, "argv", f"{command} {small}".split())
    monkeypatch.setattr(rm, "BY_GROUP", dict(rm.BY_GROUP))  # put back at the end
    found = runpy.run_path(str(script), run_name="__main__")
    rows = rows_of(tmp_path / "run")
    assert found["rloo"](torch.tensor([[1.0, 0.0, 0.0]]), "std").tolist() == [[1.0, -0.5, -0.5]]
    R = torch.randn(3, 16)
    assert torch.allclose(found["rloo"](R, "std"), 16 / 15 * rm.grpo_advantages(R, "mean"), atol=1e-6)
    assert [row["iteration"] for row in rows] == [0, 1, 2] and rows[1]["updates"] == 1


def test_readme_example_of_grpo_is_what_the_program_calculates():
    returns = torch.tensor([[1.0, 0, 0, 0]])
    first, normalized = (rm.grpo_advantages(returns, norm)[0, 0].item() for norm in ("mean", "std"))
    assert f"of 1, 0, 0, 0 it is {returns.mean():.2f}." in README
    assert f"the advantage {first:.2f} (divided by the sample standard deviation, {returns.std():.1f}: {normalized:.1f})." in README


def test_readme_results_are_those_of_the_shipped_runs():
    args = paper.parse(["results"])
    args.folder = ROOT / "figures/tiny"
    table = paper.results("results", args)
    assert table in (ROOT / "tiny/README.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    cells = {world: " | ".join(numbers) for world, *numbers in rows}
    games = {"frozenlake": "gentle lake", "sokoban": "sokoban", "bandit": "bandit"}
    for game, world in games.items():
        row, = re.findall(rf"^    {game} +(.*)", README, re.M)
        as_range = re.sub(r"\[(\S+), (\S+)\]", r"(\1–\2)", cells[world])  # [a, b] is an interval in README
        assert re.sub(r" {2,}", " | ", row) == as_range
    passed = {world: float(trained.split()[0]) - float(lessons) for world, _, lessons, _, trained, *_ in rows}
    assert {world for world, gain in passed.items() if gain > 0.1} == {"bandit"}
    assert "Only on the bandit" in README
    assert passed["sokoban"] < 0 < passed["gentle lake"] < 0.06
    assert "RL stays below *taught* on sokoban and about equals it on the lake" in README


def test_tiny_is_as_large_as_readme_says():
    policy = rm.AutoModelForCausalLM.from_pretrained(rm.TINY)
    assert f"({policy.num_parameters() / 1e6:.2f} million parameters)" in README


def test_readme_first_command_printed_what_its_log_says():
    run = json.loads((ROOT / "figures/tiny/first-command.jsonl").read_text())
    random, optimal = envs.mean_yardsticks("frozenlake", 10)[:, -1]
    assert rm.EVAL_TEMPERATURE == 0.5 and "on 256 held-out levels (temperature 0.5)" in README
    for row in (run["rows"][0], run["rows"][-1]):
        success = row["eval"]["frozenlake"]
        low, high = envs.interval(success, 256)
        assert (f"iteration {row['iteration']}: frozenlake {success:.2f} [{low:.2f}, {high:.2f}]  random {random:.2f}  optimal "
                f"{optimal:.2f}") in README


def test_what_a_real_model_learnt_is_what_its_logs_say():
    reports = smollm2.load()
    page = (ROOT / "figures/smollm2/README.md").read_text()
    seeds = {"bandit": range(1, 6), "lake": (1, 2), "told": (1, 2), "alone": (3, 4, 6)}
    assert list(reports) == [f"{world}-seed{seed}" for world in seeds for seed in seeds[world]]
    assert smollm2.table(reports) in page
    steps, minutes, warmed = [], [], []
    for name, report in reports.items():
        if name.startswith("told"):
            *_, lessons, valid, _ = report["warm start"]
            assert lessons.startswith("lesson 40:") and float(valid.split()[-1]) > 0.9
            minutes.append(round(int(lessons.split()[-2]) / 60))
        else:
            assert report["warm start"][0] == "valid turns 0.00"
            steps.append(int(report["warm start"][-2].split()[1].rstrip(":")))
            warmed += [int(report["warm start"][-2].split()[-2])] * name.startswith("bandit")
        if name in ("bandit-seed1", "bandit-seed2", "lake-seed1", "told-seed1", "told-seed2", "alone-seed4"):
            for said in report["plain generate"]:
                answer = said.split("assistant\n")[1].removesuffix("<|im_end|>")
                assert f"`{answer}`" in page
    of_bandit, of_lake, of_alone = steps[:5], steps[5:7], steps[7:]
    assert (min(of_bandit), max(of_bandit)) == (15, 25) and "valid in 15 to 25 steps" in page
    assert of_lake == [20, 15] and "form in 20 and 15 steps" in page
    assert set(of_alone) == {15, 20} and "(15 or 20 steps; a fifth of the turns are the planner's)" in page
    assert warm_start.PLAYERS["planner"] == 0.2
    assert 60 < min(warmed) and max(warmed) < 300 and "(one to five minutes on one CPU thread)" in page
    assert minutes[-2:] == [17, 11] and "17 and 11 minutes" in page
    success = {name: [list(row["eval"].values())[0] for row in report["rows"] if "eval" in row]
               for name, report in reports.items()}
    first, second = success["told-seed1"], success["told-seed2"]
    told = [f"{success[0]:.2f} to {success[-1]:.2f}" for success in (first, second)]
    alone = {name: values for name, values in success.items() if name.startswith("alone")}
    starts, ends = ([f"{values[i]:.2f}" for values in alone.values()] for i in (0, -1))
    assert all(0.2 <= float(start) < 0.25 for start in starts) and all(0.5 < float(end) < 0.6 for end in ends)
    assert min(first[0], second[0]) > float(max(starts)) and max(first[-1] - first[0], second[-1] - second[0]) < 0.2
    assert "with 4 x 8 episodes one of three seeds had learnt" in page
    *pairs, last = [f"{start} to {end}" for start, end in zip(starts, ends)]
    assert f"GRPO takes it from {', '.join(pairs)} and {last}" in page
    for values in alone.values():
        assert envs.interval(values[-1], 128)[0] > 0.29 > values[0], "better than any moves that ignore the state"
    assert "from {} and {} in 40 iterations".format(*told) in page
    assert f"({second[1]:.2f} after ten iterations, {second[3]:.2f} after thirty)" in page
    assert sum(min(success[f"bandit-seed{seed}"][1:]) > 0.97 for seed in range(1, 6)) == 4
    assert "Four of five seeds choose the better arm" in page
    assert max(success[f"bandit-seed{seed}"][0] for seed in range(1, 6)) == pytest.approx(0.95, abs=0.005)
    assert all(row["eval"]["frozenlake"] < 0.2 for name in ("lake-seed1", "lake-seed2") for row in reports[name]["rows"] if "eval" in row)
    assert "nothing is learnt: success does not rise above that of random play, 0.20." in page
    second = [row["success"] for row in reports["bandit-seed2"]["rows"][1:]]
    assert np.mean([success in (0, 0.25, 0.5, 0.75, 1) for success in second]) > 0.6, "all of a level choose alike"


def test_the_picture_of_readme_is_what_its_words_say():
    """first-command-samples.jsonl: the samples.jsonl of README's first command, as commit 0fafd4f wrote it."""
    samples = episode.whole_lines(ROOT / "figures/tiny/first-command-samples.jsonl")
    pairs = episode.first_and_last(samples)
    _, after = max(pairs, key=lambda pair: episode.shows_most(pair, sign=1))
    first, second = after["turns"]
    rows = episode.rows_of(first["state"])
    (y, x), (goal_y, goal_x) = (np.argwhere(np.array(rows) == symbol)[0] for symbol in "PG")
    assert (goal_y - y, goal_x - x) == (1, 1) and "it is 1 down and 2 right" in first["answer"]
    assert after["iteration"] == 30 and first["reward"] == 0 and second["reward"] == 1
    assert "its first thought is wrong." in README
    assert first["answer"].count("Right") == 2 and x + 1 == len(rows[0]) - 1, "the second one runs into the edge"


def test_what_is_told_of_a_gpu_is_in_its_log():
    page, log = (ROOT / "extras/README.md").read_text(), (ROOT / "figures/gpu.txt").read_text()
    assert set(re.findall(r": commit (\w+),", log)) == set(re.findall(r"gpu.txt\), commit (\w+);", page))
    for algo, name in (("ppo", "PPO, KL penalty"), ("grpo", "GRPO, no KL penalty")):
        rollout, rest, speed, tokens, memory = re.search(
            rf"^\| {algo} \| \S+ s \| (\S+) s \| (\S+) s \| (\d+) \| (\d+) \| (\S+) GiB \|$", log, re.M).groups()
        assert int(tokens) == 128 * 5 * 256
        assert f"| {name} | {rollout} s | {rest} s | {int(speed):,} | {memory} GiB |" in page
    rollout, speed = re.search(r"^\| generate \| \| (\S+) s \| \| (\d+) \|", log, re.M).groups()
    assert f"by `generate`, a turn at a time | {rollout} s | | {int(speed):,} | |" in page
    step, with_cudnn, kernels, busy = re.search(
        r"^a decode step .*: (\S+) ms \(.*: (\S+) ms\); (\d+) kernels, which take (\S+) ms", log, re.M).groups()
    assert f"{int(kernels):,} small kernels. They take {float(busy):.0f} of its {float(step):.0f} ms" in page
    assert f"{float(with_cudnn):.0f} ms a step instead of {float(step):.0f}" in page
    seconds = [float(a) + float(b) for a, b in re.findall(r"^iteration \d+: rollout (\S+) s, update (\S+) s", log, re.M)]
    assert len(seconds) == 30 + 4
    whole = float(re.search(r"(\S+) s in all, evaluations included", log)[1])
    assert (f"takes {whole:.0f} s there, {fmean(seconds[:30]):.1f} s an iteration (on that machine's CPU "
            f"{fmean(seconds[30:]):.1f} s)") in page
    success = float(re.search(r"^iteration 30: success (\S+),", log, re.M)[1])
    assert f"ends at {envs.with_interval(success, 256)}, as on CPUs" in page
    before, after = map(float, re.search(r"^3 .*'policy_loss': \((\S+), (\S+)\)", log, re.M).groups())
    assert f"losses of the third iteration differed by {1 - after / before:.1%}" in page
    ours, its = re.findall(r", answers of unequal lengths \| \| \S+ s \| \| (\d+) \|", log)
    assert f"ours is faster: {int(ours):,} tokens a second, `generate` {int(its):,}" in page
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "importing the program switches it off"


def test_speed_tables_are_those_of_the_output():
    """The rows of extras/README.md, rebuilt from what bench.py printed, and TRL."""
    page, log = (ROOT / "extras/README.md").read_text(), (ROOT / "figures/bench-epyc.txt").read_text()
    found = re.findall(r"^(?:ours|generate|bf16) +(.*?) s an iteration = rollout (.*?) \+ update (.*?); .* in the rollout, (.*?) ms per .*"
                       r"peak (.*) MiB$", log, re.M)
    assert len(found) == 8, "tiny in one thread, SmolLM2, tiny in two threads; at last bf16 and ours"
    for name, (total, rollout, update, ms, peak) in zip(("this code", "`generate`"), found[:2]):
        assert f"| {name} | {total} s | {rollout} s | {update} s | {ms} ms | {peak} MiB |" in page
    total, rollout, update, tokens, peak = re.search(
        r"^median .*: (.*) s = rollout (.*) \+ update (.*); (.*) tokens, .* peak RSS (.*) MiB$", log, re.M).groups()
    trl = (total, rollout, update, 1e6 * float(total) / int(tokens), peak)
    rows = zip(("this code", "`generate`", "TRL", "this code, `recipes.py bf16`"), (*found[2:4], trl, found[6]))
    for name, row in rows:
        total, rollout, update, ms, peak = map(float, row)
        assert f"| {name} | {total:.1f} s | {rollout:.1f} s | {update:.1f} s | {ms / 1000:.1f} s | {peak / 1024:.1f} GiB |" in page
    ratios = re.findall(r"^ours / generate, [a-z ]+ ([\d.]+)  \(of 8 rounds: (.*) to (.*)\)$", log, re.M)
    assert len(ratios) == 4 and " | ".join("{} ({} - {})".format(*ratio) for ratio in ratios) in page
    (two_threads,) = re.findall(r"^ours / generate, iteration (.*)  \(of 10 rounds: (.*)\)$", log, re.M)
    assert "With two threads the ratio is {} ({})".format(*two_threads) in page


def test_readme_findings_are_those_of_the_ledger():
    """Every interval, every "k of n" runs that were lost, and every number of the run that is shown."""
    args = paper.parse(["claims"])
    args.folder = ROOT / "figures/tiny"
    page = "".join((ROOT / "figures" / name).read_text() for name in ("CLAIMS.md", "TABLES.md"))  # tested in slow_paper.py
    section = README.split("## The Echo Trap\n")[1].split("\n## Change")[0]
    section = re.sub(r"(?<!\n)\n(?=[\w(])", " ", section)  # paragraphs in one line each
    table, held, winners = [], [], []
    words = ("PPO (16 an iteration)", None, "StarPO-S (4)", "random groups (4)")  # four times the levels: CLAIMS.md
    for name, (world, method) in zip(words, paper.pairs_of("equal"), strict=True):
        runs = paper.runs_of(world, method, args)
        won = list(filter(ledger.has_won, runs))
        updates = [row.get("updates", 0) for run in won for row in run.rows]
        first = [plots.Run(run.config, run.rows[:401]) for run in won]
        lost = [plots.peak_and_collapse(run)[1] is not None for run in first]  # as if they had ended there
        assert ledger.lost_in_iterations(won).startswith(f"{sum(lost)} of {len(won)} ")
        held.append(ledger.updates_held(won))
        if name:
            _, early, late = ledger.lost_by_updates(won)
            table.append((name, early, late))
            winners.append(f"{len(won)} of {len(runs)}")
            assert all(plots.peak_and_collapse(run)[1] is not None for run in runs if run not in won), "(The others collapsed, too.)"
            if name.startswith("random"):
                assert ledger.lost_in_iterations(runs).startswith("7 of 20 ") and "(3 of 16; 7 of all 20)" in page
            assert int(re.search(r"\d+", name)[0]) == max(updates), name
            assert max(updates) * won[0].config["iterations"] == 6400 and won[0].config["iterations"] in (400, 1600)
            assert ledger.lost_by_updates(won, times=16 // max(updates))[-1] == late, "the rule in updates counts as many"
            assert ledger.lost_in_iterations(won) == {16: late, 4: early}[max(updates)], "after 400 iterations each"
    (ppo, _, ppo_late), (s, s_early, s_late), (_, r_early, r_late) = table
    assert int(re.search(r"\d+", ppo)[0]) == 4 * int(re.search(r"\d+", s)[0]) == 16, "updates an iteration"
    for said in "(16 updates an iteration)", ": 4 an iteration.", "it plays 2 groups instead of 8.", "(The others collapsed, too.)":
        assert said in section
    assert re.sub(" +", " ", section).count("\n winners after 400 iterations after 6,400 updates\n") == 1
    for row, counts in zip(re.findall(r"^    (?:PPO|StarPO-S|control) {2,}(.*)", section, re.M), ((ppo_late, "the same"), (s_early, s_late), (r_early, r_late)), strict=True):
        assert tuple(re.split(" {2,}", row)) == (winners.pop(0), *counts)
    assert "with two other cold starts 2 of 5 winning PPO runs are lost." in page
    assert "with two retrained versions of *tiny*, 2 of 5." in section
    for ours in (held[2], held[1]):
        low, high = ledger.interval([ours, held[0]])
        assert low < 0 < high and max(-low, high) > 1600
        assert "**no benefit is shown**. Nor is one excluded" in section
    several = [line for line in page.splitlines() if "several turns: StarPO-S" in line and "| open |" in line and line.startswith("| Fig. 9")]
    assert len(several) == 2 and "[Two other games](figures/CLAIMS.md) show none." in section

    rows = paper.runs_of("trap", "PPO", args)[12].rows  # the one of the picture
    assert rows[311]["reward"] == pytest.approx(-0.5) and rows[310]["valid"] > 0.99 and rows[311]["valid"] == 0
    assert "After 310 all answers are malformed (grey) and all returns equal" in section
    assert [row["updates"] for row in rows[310:]] == [16] + 10 * [0]
    assert "equal returns everywhere | - | trained on | no update; ten such iterations end a run" in (ROOT / "figures/DIFFERENCES.md").read_text()
    assert all(float(cell.split()[0]) < 0.25 for line in (ROOT / "figures/critic.txt").read_text().splitlines()
               if " explained " in line for cell in re.findall(r"-?0\.\d+ (?=\[)", line)) and "Ours [foresees little](figures/DIFFERENCES.md)" in README
    assert min(row["success"] for row in rows[10:310]) > 0.97 and "By iteration 10 nearly all choose Engineer;" in section
    assert "falls from 1.7 to 0.003 (medians of iterations 1-20, 200-309)" in page
    longest = [row.get("grad_norm_max") for row in rows]
    assert [np.median(part) for part in (longest[1:21], longest[200:310])] == [pytest.approx(1.7, abs=0.05), pytest.approx(0.003, abs=0.0005)]
    assert 500 < np.median(longest[1:21]) / np.median(longest[200:310]) < 700
    assert np.median([row["entropy"] for row in rows[150:310]]) < 0.01
    assert "its gradients shrink, with mostly harmless jumps." in section
    counted = re.findall(r"^\| (0|0\.3) to \S+ \| .* ([\d.]+) \|$", (ROOT / "figures/rare_tokens.txt").read_text(), re.M)
    few, many = ([float(share) for start, share in counted if start == bound] for bound in ("0", "0.3"))
    assert len(few) == len(many) == 4
    assert f"at most {max(few):.0%} have a token rarer than 0.3, of those above 0.3 {min(many):.0%} to {max(many):.0%}." in page
    assert max(longest[300:311]) > 50 * np.median(longest[200:300])
    assert longest[310] > 100 * longest[309] and longest[307] > longest[310]
    assert "PPO loses one of ten runs with Adam's beta2 at 0.9" in page
    assert "[Adam](figures/CLAIMS.md) is a suspect" in section
    assert sum(jump > longest[310] for jump in longest[150:310]) == 4 and min(row["success"] for row in rows[150:311]) > 0.99
    assert all(row["valid"] > 0.98 for row in rows[307:311]), "without harm"
    swinging = np.array(longest[150:311])
    assert [np.mean(swinging < 0.01), np.mean(swinging > 0.1)] == pytest.approx([0.6, 1 / 3], abs=0.02)
    assert max(row["distinct"] for row in rows[50:311]) < 0.15
    assert "by 50 few different thoughts remain" in section
    assert 150 < rows[-1]["seconds"] < 210 and "(three minutes; chosen for its picture;" in section
    assert "PPO's seeds 10 to 12 were made for a picture" in page
    assert [rows[i]["distinct"] for i in (1, 150)] == [pytest.approx(0.78, abs=0.005), pytest.approx(0.01, abs=0.005)]
