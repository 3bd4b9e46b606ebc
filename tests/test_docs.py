"""What is written about the program is true of it: numbers of README and of the speed tables, links, commands,
and the arrows between files."""
import ast
import importlib
import json
import re
import runpy
import subprocess
import sys
import textwrap
from dataclasses import asdict

import numpy as np
import pytest
import torch
import transformers

import envs
import plots
import ragen_mini as rm
import runs
from conftest import ROOT, rows_of
from extras import episode

sys.path.insert(0, str(ROOT / "figures"))
import ledger
import paper

README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"\*\*|\*(?=\w)|(?<=\w)\*", "", README)  # without emphasis
CORE = ("envs", "plots", "runs", "ragen_mini")
FOLDERS = ("", "extras", "extras/dev", "figures", "figures/research", "course", "tiny")
PROGRAMS = {path.stem: path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))}


def says(*parts):
    """Has README a sentence, or a row of a table, with all these parts? It may have other words, too."""
    sentences = re.split(r"(?<=[.?!])[)*]*\s|\n", PROSE)
    assert any(all(part in sentence for part in parts) for sentence in sentences), f"no sentence has {parts}"


# ------------------------------------------------------------------------------------------------------- code
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_names_only_what_its_neighbours_have(name, monkeypatch):
    """`elsewhere.settings()`, say, after that function got another name. Not all of their mains run in a test."""
    monkeypatch.setattr(sys, "path", [*(str(ROOT / folder) for folder in FOLDERS), *sys.path])
    tree = ast.parse(PROGRAMS[name].read_text())
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias for alias in node.names if alias.name in PROGRAMS]
            modules |= {alias.asname or alias.name: importlib.import_module(alias.name) for alias in found}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert hasattr(modules[node.value.id], node.attr), f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("name, below", [
    ("envs", ()), ("runs", ("envs",)), ("plots", ("envs",)), ("ragen_mini", ("envs", "plots", "runs"))])
def test_arrows_go_down(name, below):
    """Each of the four files imports only those below it, and knows nothing of what stands around them."""
    text = (ROOT / f"{name}.py").read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            for module in imported:
                assert module not in PROGRAMS or module in below, node.lineno
                assert name in ("ragen_mini", "runs") or module.split(".")[0] not in ("torch", "transformers")
    assert not re.search(r"\b(extras|course|figures)/", text)


@pytest.mark.parametrize("name", CORE)
def test_no_function_is_bound_where_replacing_it_would_have_no_effect(name):
    """No default argument and no table at the top holds a function: `rm.policy_loss = mine` must count everywhere."""
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                assert not (isinstance(default, ast.Name) and default.id in functions), node.lineno
    for node in tree.body:
        if isinstance(node, ast.Assign):
            assert not {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)} & functions, node.lineno


def test_plots_draw_without_torch(tmp_path):
    """In an interpreter in which torch cannot be imported: all three pictures."""
    config = asdict(rm.Config(model="tiny", device="cpu", env="bandit"))
    rows = [{"iteration": i, "eval": {"bandit": 0.5}, "yardsticks": {"bandit": [0.5, 1.0]}, "reward": 0.1 * i,
             "success": 0.5, "entropy": 1.0, "updates": 4} for i in range(4)]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = (f"import sys; sys.modules['torch'] = None; import plots\n"
            f"for what in ('curves', 'collapse', 'online-k'):\n"
            f"    sys.argv = ['plots.py', what, {str(tmp_path)!r}]; plots.main()")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    for what in ("curves", "collapse", "online-k"):
        assert (tmp_path / f"{what}.png").stat().st_size > 10_000


# ----------------------------------------------------------------------------------------------------- README
def commands(script):
    """The arguments of the lines of README that begin with `python SCRIPT`, and of commands inside of lines."""
    for line in re.findall(rf"(?:^ *|`)python {re.escape(script)} ?([^`\n]*)", README, re.M):
        yield line.split("#")[0].replace("...", "").split()


@pytest.mark.parametrize("page", [page for folder in ("", "extras", "tests", "course", "course/staff", "tiny")
                                  for page in sorted((ROOT / folder).glob("*.md"))],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), link


def test_readme_commands_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/frozenlake-ppo-seed0"
    (run / "checkpoint").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(asdict(rm.Config(device="cpu"))))
    asked = list(commands("ragen_mini.py"))
    assert len(asked) >= 10
    for argv in asked:
        rm.parse_config(argv + ["--device", "cpu"])
    for file in re.findall(r"python ((?:extras|figures)/[\w/]+\.py)", README):
        assert (ROOT / file).exists(), file
    for what, *_ in commands("plots.py"):
        assert what in ("curves", "collapse", "online-k")
    for what in re.findall(r"`figures/paper.py (\w+)`", README):
        assert paper.parse([what])


def test_runs_of_readme_get_the_folders_that_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ragen_mini.py"])
    made = {str(runs.free_folder(rm.parse_config(argv))) for argv in commands("ragen_mini.py")
            if not {"--resume", "--model", "--play"}.intersection(argv)}
    named = {folder for argv in commands("plots.py") for folder in argv if folder.startswith("runs/")}
    assert named - {"runs/rloo"} <= made


def test_readme_change_of_the_method_trains(tmp_path, monkeypatch):
    """The indented block that begins with the import, as it stands, by its command, but for two iterations."""
    block = re.search(r"^    import ragen_mini as rm\n(?:    .*\n|\n)+", README, re.M)[0]
    script = tmp_path / "my_rloo.py"
    script.write_text(textwrap.dedent(block))
    command, = re.findall(r"^    python (my_rloo.py .*)$", README, re.M)
    small = f"--device cpu --iterations 2 --eval-every 0 --prompts 2 --out {tmp_path}/run"
    monkeypatch.setattr(sys, "argv", f"{command} {small}".split())
    monkeypatch.setattr(rm, "grpo_advantages", rm.grpo_advantages)  # put back at the end
    original = rm.grpo_advantages
    found = runpy.run_path(str(script), run_name="__main__")
    rows = rows_of(tmp_path / "run")
    assert rm.grpo_advantages is found["rloo"]
    assert found["rloo"](torch.tensor([[1.0, 0.0, 0.0]]), "std").tolist() == [[1.0, -0.5, -0.5]]
    R = torch.randn(3, 16)
    assert torch.allclose(found["rloo"](R, "std"), 16 / 15 * original(R, "mean"), atol=1e-6)
    assert [row["iteration"] for row in rows] == [0, 1, 2] and rows[1]["updates"] == 1


def test_readme_example_of_grpo_is_what_the_program_calculates():
    returns = torch.tensor([[1.0, 0, 0, 0]])
    first, normalized = (rm.grpo_advantages(returns, norm)[0, 0].item() for norm in ("mean", "std"))
    says("return 1, 0, 0 and 0", f"mean is {returns.mean():.2f}")
    says(f"the advantage {first:.2f}, or {normalized:.1f} ", f"standard deviation, {returns.std():.1f}")


def test_readme_tells_when_the_wider_clip_acts():
    """A quarter of 8 groups of 16 is one minibatch; all groups are four."""
    cfg = rm.Config(starpo_s=True, device="cpu")
    assert cfg.keep * cfg.prompts * cfg.rollouts == cfg.minibatch_size and cfg.epochs == 1
    assert cfg.prompts * cfg.rollouts == 4 * cfg.minibatch_size
    says("the wider clip never acts")
    says("1.28 instead of 1.2")
    assert (cfg.clip_high, rm.Config(device="cpu").clip_high) == (0.28, 0.2)


def test_readme_results_are_those_of_the_shipped_runs():
    args = paper.parse(["results"])
    args.folder = ROOT / "figures/tiny"
    table = paper.results("results", args)
    assert table in (ROOT / "tiny/README.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    cells = {setup: numbers for setup, *numbers in rows}
    for game, setup in {"frozenlake": "gentle lake", "sokoban": "sokoban", "bandit": "bandit"}.items():
        row, = re.findall(rf"^\| {game} \| (.*) \|$", README, re.M)
        as_range = [re.sub(r"\[(\S+), (\S+)\]", r"(\1–\2)", cell) for cell in cells[setup]]  # [a, b] is an interval there
        assert row.split(" | ") == as_range
    gained = {setup: float(trained.split()[0]) - float(cold) for setup, _, cold, _, trained, *_ in rows}
    assert {setup for setup, gain in gained.items() if gain > 0.1} == {"bandit"}
    says("Only on the bandit", "beyond its teacher")
    assert gained["sokoban"] < 0 < gained["gentle lake"] < 0.06


def test_tiny_is_as_large_as_readme_says():
    policy = transformers.AutoModelForCausalLM.from_pretrained(runs.TINY)
    says("tiny", f"{policy.num_parameters() / 1e6:.2f} million parameters")


def test_readme_first_command_printed_what_its_log_says():
    run = json.loads((ROOT / "figures/tiny/first-command.jsonl").read_text())
    random, optimal = envs.mean_yardsticks("frozenlake", 10)[:, -1]
    for row in (run["rows"][0], run["rows"][-1]):
        success = row["eval"]["frozenlake"]
        low, high = plots.interval(success, 256)
        assert (f"iteration {row['iteration']}: frozenlake {success:.2f} [{low:.2f}, {high:.2f}]  "
                f"random {random:.2f}  optimal {optimal:.2f}") in README
    seconds, = re.findall(r"one thread.* (\d+) s in all", run["run"])
    says("one CPU thread", f"{seconds} seconds")
    says(f"{len(envs.EVAL_SEEDS)} held-out levels")


def test_the_picture_of_readme_is_what_its_words_say():
    samples = episode.whole_lines(ROOT / "figures/tiny/first-command-samples.jsonl")
    (_, after), _ = episode.choose(episode.first_and_last(samples), long=True)
    state = np.array(episode.rows_of(after["turns"][0]["state"]))
    (y, x), (goal_y, goal_x) = (np.argwhere(state == symbol)[0] for symbol in "PG")
    assert (goal_y - y, x - goal_x) == (3, 3) and "it is 2 down and 3 left" in after["turns"][0]["answer"]
    assert after["turns"][-1]["reward"] == 1
    says("its first thought is wrong", "three steps down, not two")


def test_what_readme_tells_of_a_gpu_is_in_its_log():
    log = (ROOT / "figures/gpu.txt").read_text()
    for algo, name in (("ppo", "PPO and KL penalty"), ("grpo", "GRPO and no penalty")):
        iteration, memory = re.search(rf"^\| {algo} \| (\S+) s \|.* (\S+) GiB \|$", log, re.M).groups()
        says(f"{float(iteration):.1f} seconds and {memory} GiB with {name}")
    iteration = float(re.search(r"^\| ppo \| (\S+) s", log, re.M)[1])
    assert 4 < 200 * iteration / 3600 < 4.5
    says("200 iterations of PPO take a little over four hours")


# --------------------------------------------------------------------------------- README: what was found
def shipped(setup, method):
    args = paper.parse(["claims"])
    args.folder = ROOT / "figures/tiny"
    return paper.runs_of(setup, method, args)


def test_readme_counts_of_collapsed_runs_are_those_of_the_logs():
    names = ("StarPO (PPO)", "StarPO-S of 32 groups", "StarPO-S", "2 groups, no filter")
    for name, (setup, method) in zip(names, paper.pairs_of("equal"), strict=True):
        found = shipped(setup, method)
        won = [run for run in found if ledger.has_won(run)]
        first = [plots.Run(run.config, run.rows[:401]) for run in won]
        early = sum(plots.peak_and_collapse(run)[1] is not None for run in first)
        late = sum(plots.peak_and_collapse(run)[1] is not None for run in won)
        row, = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", README, re.M)
        winners, in_400, in_6400 = row.split(" | ")
        assert winners == f"{len(won)} of {len(found)}"
        low, high = ledger.exact_interval(early, len(won))
        assert in_400 == f"{early} of {len(won)} [{low:.2f}, {high:.2f}]"
        low, high = ledger.exact_interval(late, len(won))
        assert in_6400 == f"{late} of {len(won)} [{low:.2f}, {high:.2f}]"
        updates = max(row.get("updates", 0) for run in won for row in run.rows)
        assert updates == (16 if name in ("StarPO (PPO)", "StarPO-S of 32 groups") else 4)
        assert updates * won[0].config["iterations"] == 6400
        never_won = [run for run in found if run not in won]
        assert all(plots.peak_and_collapse(run)[1] is not None for run in never_won)


def test_readme_tells_its_collapse_as_it_was():
    runs_ = [next(run for run in shipped(setup, method) if run.config["seed"] == 60)
             for setup, method in (paper.pairs_of("equal")[0], paper.pairs_of("equal")[2])]
    after = []
    for run in runs_:
        assert run.rows[20]["success"] == pytest.approx(0.98, abs=0.005)
        assert run.rows[200]["distinct"] < 0.03
        norms = [row.get("grad_norm_max") or 0 for row in run.rows]
        _, at = plots.peak_and_collapse(run)
        assert np.median(norms[at - 100:at - 3]) < np.median(norms[1:21]) / 10
        assert run.rows[at - 2]["valid"] > 0.99 and run.rows[at]["valid"] < 0.03, "within two iterations"
        assert min(row["reward_std"] for row in run.rows[at - 20:at - 1]) > 0.3, "no warning"
        after.append(sum(row.get("updates", 0) for row in run.rows[:at]))
    says(f"StarPO collapsed after {after[0]:,} updates, StarPO-S after {after[1]:,}.")
    says("98% of their episodes by iteration 20")
    rows = runs_[0].rows
    says(f"At 213 StarPO falls to a success of {rows[213]['success']:.2f}",
         f"back at {rows[214]['success']:.2f} one iteration later")
    answer, = re.findall(r"of them valid. Most often:\n +128 x  (.*)",
                         (ROOT / "figures/research/table1.txt").read_text().split("seed60")[1].split("\n\n")[0])
    says("At 270 it falls again", f"`{answer}`")


def test_readme_tells_what_the_claims_say():
    """The numbers of CLAIMS.md are held to the logs by test_ledger.py and slow_paper.py."""
    claims = (ROOT / "figures/CLAIMS.md").read_text()
    row = dict(re.findall(r"^\| Fig\. \d+ \| ([^|]+) \| \w[^|]* \| ([^|]+);", claims, re.M))
    says("rises by", row["PPO: success rises early"].split()[0], row["GRPO: success rises early"].split()[0])
    says("ahead of k = 10 by " + row["fresh rollouts learn faster than k = 10"])
    none, = re.findall(r"None of the (\w+) is lost", claims)
    says(f"none of {none} runs collapses in 6,400 updates")


# ------------------------------------------------------------------------------------------ speed and memory
EXTRAS = (ROOT / "extras/README.md").read_text()


def test_what_extras_tell_of_a_gpu_is_in_its_log():
    log = (ROOT / "figures/gpu.txt").read_text()
    for algo, name in (("ppo", "PPO, KL penalty"), ("grpo", "GRPO, no KL penalty")):
        rollout, rest, speed, tokens, memory = re.search(
            rf"^\| {algo} \| \S+ s \| (\S+) s \| (\S+) s \| (\d+) \| (\d+) \| (\S+) GiB \|$", log, re.M).groups()
        assert int(tokens) == 128 * 5 * 256
        assert f"| {name} | {rollout} s | {rest} s | {int(speed):,} | {memory} GiB |" in EXTRAS
    rollout, speed = re.search(r"^\| generate \| \| (\S+) s \| \| (\d+) \|", log, re.M).groups()
    assert f"by `generate`, a turn at a time | {rollout} s | | {int(speed):,} | |" in EXTRAS
    step, with_cudnn, kernels, busy = re.search(
        r"^a decode step .*: (\S+) ms \(.*: (\S+) ms\); (\d+) kernels, which take (\S+) ms", log, re.M).groups()
    for number in (f"{int(kernels):,}", f"{float(busy):.0f} of its {float(step):.0f} ms", f"{float(with_cudnn):.0f} ms"):
        assert number in EXTRAS
    ours, its = re.findall(r", answers of unequal lengths \| \| \S+ s \| \| (\d+) \|", log)
    assert f"{int(ours):,} tokens a second" in EXTRAS and f"{int(its):,}" in EXTRAS


def test_speed_tables_are_those_of_the_output():
    """The rows of extras/README.md, rebuilt from what bench.py printed, and TRL."""
    log = (ROOT / "figures/bench-epyc.txt").read_text()
    found = re.findall(r"^(?:ours|generate|bf16) +(.*?) s an iteration = rollout (.*?) \+ update (.*?); .* in the rollout, "
                       r"(.*?) ms per .*peak (.*) MiB$", log, re.M)
    assert len(found) == 8, "tiny in one thread, SmolLM2, tiny in two threads; at last bf16 and ours"
    for name, (total, rollout, update, ms, peak) in zip(("this code", "`generate`"), found[:2]):
        assert f"| {name} | {total} s | {rollout} s | {update} s | {ms} ms | {peak} MiB |" in EXTRAS
    total, rollout, update, tokens, peak = re.search(
        r"^median .*: (.*) s = rollout (.*) \+ update (.*); (.*) tokens, .* peak RSS (.*) MiB$", log, re.M).groups()
    trl = (total, rollout, update, 1e6 * float(total) / int(tokens), peak)
    rows = zip(("this code", "`generate`", "TRL", "this code, `recipes.py bf16`"), (*found[2:4], trl, found[6]))
    for name, row in rows:
        total, rollout, update, ms, peak = map(float, row)
        assert (f"| {name} | {total:.1f} s | {rollout:.1f} s | {update:.1f} s | {ms / 1000:.1f} s | "
                f"{peak / 1024:.1f} GiB |") in EXTRAS
    ratios = re.findall(r"^ours / generate, [a-z ]+ ([\d.]+)  \(of 8 rounds: (.*) to (.*)\)$", log, re.M)
    assert len(ratios) == 4 and " | ".join("{} ({} - {})".format(*ratio) for ratio in ratios) in EXTRAS
