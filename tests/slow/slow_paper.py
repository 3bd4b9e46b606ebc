"""The paper's figures, tables and claims: from data to runs, from runs to pictures and verdicts."""
import argparse
import json
import re
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

import test_ledger
from conftest import ROOT

FIGURES = ROOT / "figures"
sys.path.insert(0, str(FIGURES))

import ledger
import paper
import plots
import ragen_mini as rm
from research import fork_report, variants

PAIRS = sorted({pair for name in paper.PAPER["figures"] for pair in paper.pairs_of(name)})


def args_of(folder=FIGURES, **options):
    options = dict(seeds=2, iterations=0, jobs=2, model="tiny") | options
    return argparse.Namespace(folder=folder / options["model"], runs=folder / "runs", **options)


@pytest.fixture(autouse=True)
def handlers():
    """`main` changes the handlers of two signals, and pytest wants its own back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def quick_pictures(request, monkeypatch):
    """Drawing figures of several seeds takes time, too. See conftest.py."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(paper, "draw", lambda title, panels, out, columns: out.touch())


# -------------------------------------------------------------------------------------- paper.json
def test_every_run_has_valid_settings_and_a_name_of_its_own():
    names = set()
    for setup, method in PAIRS:
        jobs = paper.jobs(setup, method, args_of())
        assert len(jobs) == 2
        assert not names & jobs.keys(), "two runs of one name"
        names |= jobs.keys()
        name, settings = list(jobs.items())[0]
        command = paper.command_of(Path("runs", name), settings, args_of())
        options = options_of(command, settings)
        cfg = rm.parse_config(options + ["--device", "cpu"])
        assert cfg.model == "tiny"
        assert cfg.out == f"runs/{name}"
        assert cfg.iterations * cfg.online_k == settings["iterations"], "k slices are k updates"
        assert cfg.eval_every * cfg.online_k == settings["eval_every"]
        assert cfg.success_rate == settings.get("success_rate", 1 / 3), "the paper's lake"
        for key in settings.keys() - {"iterations", "eval_every"}:
            assert getattr(cfg, key) == settings[key], key


def options_of(command, settings):  # -> words for ragen_mini.py
    """Takes what is for another program out of both, and checks it."""
    program = "ragen_mini.py"
    if "variant" in settings:
        program = "figures/research/variants.py"
        assert command.pop(2) == settings.pop("variant") in variants.VARIANTS
    elif "eval_envs" in settings:
        program = "extras/elsewhere.py"
    if "eval_envs" in settings:
        assert [command.pop(2), command.pop(2)] == ["--eval-envs", settings.pop("eval_envs")]
    if "truth_reward" in settings:
        program = "extras/thoughts.py"
        pay = str(settings.pop("truth_reward"))
        assert [command.pop(2), command.pop(2)] == ["--pay", pay]
    assert command[:2] == [sys.executable, str(ROOT / program)]
    assert (ROOT / program).exists()
    return command[2:]


def test_figures_and_claims_name_what_exists():
    numbered = {"fig5", "fig6", "fig7", "fig8", "fig9", "fig10", "fig11",
                "table2", "table3", "table4"}
    sets, setups = paper.PAPER["sets"], paper.PAPER["setups"]
    assert numbered <= paper.PAPER["figures"].keys()
    for figure in paper.PAPER["figures"].values():
        for setup, metric, methods in figure["panels"]:
            kind, _, tested = metric.partition(" ")
            assert kind in paper.TITLES
            assert methods in sets
            others = setups[setup].get("eval_envs", "")
            if tested:
                assert tested in f"{setups[setup]['env']},{others}".split(",")
    for claim in paper.PAPER["claims"]:
        for setup in claim["setups"]:
            for method in claim["methods"]:
                assert (setup, method) in PAIRS, "no figure has these runs"
        assert len(claim["methods"]) in (1, 2)
        assert claim["measure"] in ledger.MEASURES
        assert claim["kind"] in ("more", "same", "often")


def test_other_settings_are_another_run_and_another_model_is_not():
    def name(**options):
        return list(paper.jobs("sokoban", "PPO", args_of(**options)))[0]
    assert name() == name(seeds=5) == name(model="other"), "the model is in the folder's name"
    assert name() != name(iterations=20)


@pytest.mark.parametrize("words, says", [
    ("fig10 --model nothing/here",
     "nothing/here lacks finished runs of sokoban, elsewhere, StarPO-S: add --run"),
    ("fig10 --run --iterations 15", "a multiple of 10"),
    ("fig5 --iterations -1", "--iterations"),
    ("fig5 --seeds 0", "--seeds"),
    ("fig5 --jobs 0", "--jobs")])
def test_mistakes_are_one_line(words, says):
    with pytest.raises(SystemExit) as stop:
        paper.main(words.split())
    assert says in str(stop.value)
    assert "\n" not in str(stop.value)


@pytest.mark.parametrize("words, says", [("fig5 --sead 0", "--sead"), ("fig12", "choose from")])
def test_wrong_words_are_named(words, says, capsys):
    with pytest.raises(SystemExit) as stop:
        paper.main(words.split())
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- training
CHILD = """
# Stands in for ragen_mini.py. It writes config.json and log.jsonl, saves at a first SIGINT, dies of
# a second one, and learns nothing. Until there is a file `gate` beside it, it waits in its
# iteration 2; after a stop in 4, then in 6.
import json, pathlib, signal, sys, time
stop = []
def ask_to_stop(number, frame):
    if stop:
        sys.exit(128 + number)
    stop.append(number)
signal.signal(signal.SIGINT, ask_to_stop)
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
gate = pathlib.Path(__file__).with_name("gate")
folder = pathlib.Path(flags.get("--resume") or flags["--out"])
rows, stops = [], 0
limit = time.monotonic() + 60  # a mistake in paper.py is a failure, not a test that hangs
if "--resume" in flags:
    rows, stops = json.loads((folder / "checkpoint" / "trainer.pt").read_text())
    config = json.loads((folder / "config.json").read_text())
else:
    folder.mkdir()  # fails if it is there
    config = dict(max_turns=5, max_actions_per_turn=5, max_actions=10, success_rate=1 / 3)
    config |= dict(eval_prompts=256, env=flags["--env"], model=flags["--model"], online_k=1)
    config |= dict(iterations=int(flags["--iterations"]), out=str(folder), resume="", filled={})
    (folder / "config.json").write_text(json.dumps(config))
while not stop and len(rows) <= config["iterations"]:
    row = {"iteration": len(rows), "eval": {"bandit": 1 / 3}, "reward": float(stops), "private": 1}
    rows.append(row)
    (folder / "log.new").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    (folder / "log.new").replace(folder / "log.jsonl")  # who looks sees a whole one
    waiting = len(rows) == 2 * stops + 3
    while waiting and not stop and not gate.exists() and time.monotonic() < limit:
        time.sleep(0.01)
if stop:
    time.sleep(0.3)  # the iteration goes on
(folder / "checkpoint").mkdir(exist_ok=True)
(folder / "checkpoint" / "trainer.pt").write_text(json.dumps((rows, stops + 1)))
if stop:
    sys.exit(128 + stop[0])
"""
PARENT = """
# figures/paper.py with the child above, and one small figure: 4 runs
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import paper
paper.ROOT = paper.FIGURES = pathlib.Path.cwd()
paper.RUNS = paper.ROOT / "runs"
paper.PAPER["sets"]["two"] = ["clip-higher", "no KL"]
paper.PAPER["figures"] = {"fig5": {"title": "", "panels": [["bandit", "eval", "two"]]}}
paper.main(sys.argv[2:])
"""
WORDS = ["fig5", "--run", "--seeds", "2", "--jobs", "2", "--iterations", "8"]


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Does in this process what PARENT does, and returns the children that were started."""
    (tmp_path / "ragen_mini.py").write_text(CHILD)
    (tmp_path / "parent.py").write_text(PARENT)
    monkeypatch.setattr(paper, "ROOT", tmp_path)
    monkeypatch.setattr(paper, "FIGURES", tmp_path)
    monkeypatch.setattr(paper, "RUNS", tmp_path / "runs")
    monkeypatch.setitem(paper.PAPER["sets"], "two", ["clip-higher", "no KL"])
    figures = {"fig5": {"title": "", "panels": [["bandit", "eval", "two"]]}}
    monkeypatch.setitem(paper.PAPER, "figures", figures)
    children, real_start = [], paper.start

    def start(*job):
        children.append(real_start(*job))
        return children[-1]
    monkeypatch.setattr(paper, "start", start)
    return children


def wait_for(condition):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "waited for a minute"
        time.sleep(0.01)


def logged(tmp_path):  # -> {name of the run: number of its rows}
    numbers = {}
    for file in tmp_path.glob("runs/tiny/*/log.jsonl"):
        numbers[file.parent.name] = len(plots.load(file.parent).rows)
    return numbers


def saved(tmp_path):  # -> {name of the run: number of its rows, how often it was stopped}
    states = {}
    for file in tmp_path.glob("runs/tiny/*/checkpoint/trainer.pt"):
        rows, stops = json.loads(file.read_text())
        states[file.parent.parent.name] = (len(rows), stops)
    return states


def test_a_packed_run_keeps_its_yardsticks(tmp_path):
    row = {"iteration": 0, "eval": {"bandit": 0.5}, "yardsticks": {"bandit": [0.5, 1.0]}}
    new = {"run": paper.Run({"env": "bandit"}, [row])}
    for runs in (new, {}):  # the second time what was packed is packed again
        paper.pack(tmp_path / "a.jsonl.bz2", runs)
        packed = paper.unpack(tmp_path / "a.jsonl.bz2")["run"]
        assert packed.yardsticks == {"bandit": [0.5, 1.0]}
        assert "yardsticks" not in packed.rows[0]


def test_runs_are_trained_and_packed_once(tmp_path, stage, capsys):
    (tmp_path / "gate").touch()
    file = tmp_path / "tiny" / "bandit.jsonl.bz2"
    another = paper.Run({"env": "bandit"}, [{"iteration": 0}])
    paper.pack(file, {"another": another})
    paper.main(WORDS)
    assert capsys.readouterr().out == "![](tiny/fig5-8.png)\n\n"
    runs = logged(tmp_path).keys()
    packed = paper.unpack(file)
    assert len(stage) == len(runs) == 4
    assert packed.pop("another") == paper.Run({"env": "bandit"}, [{"iteration": 0}])
    assert packed.keys() == runs
    for run in packed.values():
        assert len(run.rows) == 9
        last = {"iteration": 8, "eval": {"bandit": 0.3333}, "reward": 0.0}  # four digits
        assert run.rows[8].items() >= last.items()
        assert "private" not in run.rows[8]
        assert run.config["model"] == "tiny"
        assert not {"out", "resume", "filled"} & run.config.keys()

    before = file.read_bytes()
    paper.main(WORDS)
    assert file.read_bytes() == before
    file.unlink()
    paper.unpack.cache_clear()
    paper.main(WORDS)
    assert paper.unpack(file).keys() == runs, "finished runs are packed as they are"
    assert len(stage) == 4, "and never trained again"


def test_a_run_that_fails_is_named_and_the_others_save(tmp_path, stage, monkeypatch):
    recording_start = paper.start

    def start(*job):
        child = recording_start(*job)
        if len(stage) == 2:  # both run: kill the first, as a full memory would
            wait_for(lambda: len(logged(tmp_path)) == 2)
            stage[0].kill()
        return child
    monkeypatch.setattr(paper, "start", start)
    with pytest.raises(SystemExit) as stop:
        paper.main(WORDS)
    failed = Path(str(stop.value).removeprefix("the run failed, see the end of "))
    assert failed.suffix == ".txt"
    assert failed.exists()
    assert len(stage) == 2, "no other run was begun"
    assert saved(tmp_path).keys() == logged(tmp_path).keys() - {failed.stem}


# ----------------------------------------------------------------------------- pictures and tables
LOOKS = dict(success=0.5, distinct=0.5, reward=0.1, reward_std=2.0, grad_norm=1.0, entropy=0.5,
             think_length=9.0, response_length=50.0, mutual_information=1.0, seconds_rollout=1.0,
             seconds_update=2.0)


@pytest.fixture
def invented(monkeypatch, tmp_path):
    """Every run has an invented log: success rises to the number of the run / 1000. This is also
    what the fixture returns, by name.
    """
    monkeypatch.setattr(paper, "FIGURES", tmp_path)
    (tmp_path / "cold_start.txt").write_text((FIGURES / "cold_start.txt").read_text())
    monkeypatch.setattr(ledger, "yardsticks_of",
                        lambda run, metric: (0.125, len(metric.split()[-1]) / 20))
    ends, packs = {}, {}
    for setup, method in PAIRS:
        runs = packs.setdefault(paper.pack_of(setup, args_of(tmp_path)), {})
        for name, settings in paper.jobs(setup, method, args_of()).items():
            ends[name] = (len(ends) + 1) / 1000
            runs[name] = invented_run(settings, ends[name])
    for file, runs in packs.items():
        paper.pack(file, runs)
    return ends


def invented_run(settings, end):
    settings = settings | {"iterations": 24}
    others = settings.pop("eval_envs", "").split(",")
    for option in ("variant", "truth_reward"):  # of other programs
        settings.pop(option, None)
    cfg = rm.Config(**settings, model="tiny", device="cpu")
    rows = []
    for i in range(25):
        success = dict.fromkeys([cfg.env, *filter(None, others)], i / 24 * end)
        rows.append({"iteration": i, "eval": success})
        if i > 0:
            rows[i] |= LOOKS
    return plots.Run(asdict(cfg), rows)


def test_tables_from_logs(invented, capsys):
    # Others want a collapse.
    drawn = [name for name, figure in paper.PAPER["figures"].items() if "seed" not in figure]
    for name in drawn:
        paper.main([name, "--seeds", "2"])
    lines = capsys.readouterr().out.splitlines()
    rows = {}
    for line in lines:
        head, *cells = line.strip("| ").split(" | ")
        rows.setdefault(head, cells)

    def mean_and_range(setup, method):
        ends = [invented[run] for run in paper.jobs(setup, method, args_of())]
        return np.mean(ends), f"{np.mean(ends):.2f} [{min(ends):.2f}, {max(ends):.2f}]"
    mean, last = mean_and_range("sokoban, elsewhere", "4 responses")
    # Success rises evenly, so half of the end is the mean.
    assert rows["4 responses"][0] == f"{last}, {mean / 2:.2f}; 0.12 / 0.35"
    _, last = mean_and_range("sokoban", "PPO")
    assert rows["tiny"][:3] == ["0 of 2 lost", "0 of 2 lost", f"0.00 -> {last}"]
    _, last = mean_and_range("gentle lake", "PPO")
    # 0.64 is in cold_start.txt.
    assert rows["gentle lake"] == ["0.12", "0.64", "0.00", last, "2", "0.50"]
    for name in drawn:
        if name.startswith("fig"):
            assert f"![{paper.PAPER['figures'][name]['title']}](tiny/{name}.png)" in lines


@pytest.mark.parametrize("name", ["fig9", "fig-results", "fig-updates"])
def test_figures_from_logs(name, invented, tmp_path, pictures):
    paper.main([name, "--seeds", "2"])
    assert (tmp_path / "tiny" / f"{name}.png").stat().st_size > 5000


def test_lines_are_drawn_where_every_seed_has_a_value():
    """A skipped iteration has no KL. Values of other seeds must stay at their iterations."""
    config = {"online_k": 1, "env": "bandit"}
    runs = []
    for missing in ([2], [5, 6]):
        rows = [{"iteration": i} for i in range(1, 9)]
        for row in rows:
            if row["iteration"] not in missing:
                row["kl"] = row["reward_std"] = float(row["iteration"])
        runs.append(plots.Run(config, rows))
    ax = Figure().add_subplot()
    paper.draw_seeds(ax, "kl", runs, "PPO", 1)
    paper.draw_seeds(ax, "kl", [plots.Run(config, []), plots.Run(config, [])], "GRPO", 0)
    *seeds, line = ax.get_lines()
    assert len(seeds) == 2 and seeds[0].get_linewidth() < line.get_linewidth()
    assert line.get_xdata().tolist() == [1, 3, 4, 7, 8]
    assert line.get_color() == "C1"
    # Of five values, each with one neighbour on either side.
    assert line.get_ydata() == pytest.approx([2, 8 / 3, 14 / 3, 19 / 3, 7.5])

    ax = Figure().add_subplot()
    paper.draw_seeds(ax, "reward_std", runs, "PPO", 0)
    # As measured, because an average would hide zeros.
    assert ax.get_lines()[-1].get_ydata().tolist() == [1, 3, 4, 7, 8]


def test_a_dead_run_stays_in_the_mean_of_its_seeds():
    """One of two seeds is dead after iteration 10, at 0.5. An evaluation that it never had is its
    last one, too.
    """
    config = {"online_k": 1, "env": "bandit"}
    long = [{"iteration": i, "reward": float(i), "eval": {"bandit": 1.0}} for i in range(13)]
    short = [{"iteration": i, "reward": 0.5, "eval": {"bandit": 0.2}} for i in range(11)]

    def aligned(metric):
        return paper.align_seeds([plots.Run(config, long), plots.Run(config, short)], metric)
    x, y = aligned("reward")
    assert x == list(range(11)), "a run that is not finished is not known"
    for row in short[1:]:
        row["updates"] = 0
    x, y = aligned("reward")
    assert x == list(range(13)) and y.tolist() == [list(range(13)), [0.5] * 13]
    x, y = aligned("eval bandit")
    assert y[1].tolist() == [0.2] * 13
    for row in long + short:
        row["kl"] = 1.0
    x, y = aligned("kl")
    # A dead run has no gradient and no KL any more.
    assert np.isnan(y[1]).tolist() == [False] * 11 + [True] * 2


# ---------------------------------------------------------------------------------- what is shipped
@pytest.mark.parametrize("name", ["CLAIMS.md", "TABLES.md"])
def test_a_shipped_page_is_what_the_program_prints(name, monkeypatch, capsys):
    """Every number of the ledger and of the tables is printed again. Every picture is there."""
    for function in ("draw", "draw_losses", "shrink"):
        monkeypatch.setattr(paper, function, lambda *rest: None)  # no shipped picture is touched
    monkeypatch.setattr(plots, "collapse", lambda *rest: None)
    monkeypatch.setattr(fork_report, "draw", lambda *rest: None)
    paper.main([name])
    page = (FIGURES / name).read_text()
    assert page.split("\n---\n")[1].strip() == capsys.readouterr().out.strip()
    for picture in re.findall(r"\]\((.*?\.png)\)", page):
        assert (FIGURES / picture).stat().st_size > 5000


def test_the_shipped_folder_stays_small():
    files = [path for path in FIGURES.rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files if "__pycache__" not in path.parts]
    assert sum(sizes) <= 4e6


@pytest.mark.parametrize("number", range(len(paper.PAPER["claims"])))
def test_every_row_can_hold_fail_and_stay_open(number, monkeypatch):
    claim = paper.PAPER["claims"][number]
    monkeypatch.setitem(paper.PAPER, "claims", [claim])
    level = 0.0 if len(claim["methods"]) == 1 else 0.45
    for verdict, d in differences_for(claim).items():
        def runs_of(setup, method, args, d=d):
            values = np.full(8, level)
            if method == claim["methods"][0]:
                values = values + d
            metric = paper.in_full(setup, claim.get("metric"))
            return [test_ledger.invented(claim["measure"], metric, value) for value in values]
        monkeypatch.setattr(paper, "runs_of", runs_of)
        line = paper.claims("claims", None).splitlines()[-1]
        assert line.strip("| ").split(" | ")[-1].startswith(verdict), (verdict, line)


def differences_for(claim):  # -> {verdict: values of eight seeds that lead to it}
    bound = claim["bound"]
    scale = 0.3
    wobble = np.array([0.1, -0.1, 0.05, -0.05, 0.1, -0.1, 0.05, -0.05])
    if claim["kind"] == "same":
        return {"no difference": bound / 10 * wobble, "a difference": bound + scale * (1 + wobble),
                "open": scale * wobble * 5}
    if claim["kind"] == "often":
        return {"holds": np.ones(8), "opposite here": np.zeros(8), "open": np.arange(8) % 2}
    wanted = {"holds": bound + scale * (1 + wobble), "opposite here": bound - scale * (1 + wobble),
              "open": bound + 5 * scale * wobble}
    if "margin" in claim:
        wanted["no difference"] = claim["margin"] / 5 * wobble
    return wanted
