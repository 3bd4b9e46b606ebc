"""figures/paper.py as a process of its own, and what DIFFERENCES.md counts: pytest -q tests/slow_figures.py"""
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import envs
from conftest import ROOT
from slow_paper import FIGURES, WORDS, logged, paper, saved, stage, wait_for
import warnings_of_loss


def test_ctrl_c_stops_a_figure_and_the_same_command_goes_on(tmp_path, stage):
    """Ctrl-C in a terminal reaches a whole process group, SIGTERM only the parent: either way the runs are told once. Then a
    run loses its checkpoint."""
    command = [sys.executable, "parent.py", str(FIGURES), *WORDS]

    def begin():
        return subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def check_that_both_saved(process, rows, stops):
        said = process.communicate(timeout=60)[1].splitlines()
        assert process.returncode == 130
        assert said[-1] == "stopped: the same command goes on"
        assert "Traceback" not in " ".join(said)
        assert list(saved(tmp_path).values()) == [(rows, stops)] * 2, "before the parent ended"

    process = begin()
    wait_for(lambda: list(logged(tmp_path).values()) == [3, 3])
    os.killpg(process.pid, signal.SIGINT)
    check_that_both_saved(process, rows=3, stops=1)
    process = begin()
    wait_for(lambda: list(logged(tmp_path).values()) == [5, 5])
    process.terminate()
    check_that_both_saved(process, rows=5, stops=2)

    first, second = sorted(saved(tmp_path))
    (tmp_path / "runs" / "tiny" / first / "checkpoint" / "trainer.pt").unlink()
    (tmp_path / "gate").touch()
    process = begin()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == "![](tiny/fig5-8.png)\n\n"
    stops = {}
    for name, run in paper.unpack(tmp_path / "tiny" / "bandit.jsonl.bz2").items():
        stops[name] = [row["reward"] for row in run.rows]
    assert len(stops) == 4
    assert stops[first] == [0] * 9, "without a checkpoint: from the start"
    assert stops[second] == [0] * 3 + [1] * 2 + [2] * 4, "with one: it went on, twice"


@pytest.mark.parametrize("name, shared", [("sokoban", "37% (Sokoban)"), ("frozenlake", "32% (lake)")])
def test_what_is_said_of_held_out_levels(name, shared):
    """figures/DIFFERENCES.md: level and start are never trained on, the level with another start is."""
    page = (ROOT / "figures/DIFFERENCES.md").read_text()
    env = envs.make(name)

    def level_of(seed):
        env.reset(seed)
        return repr(env.level), repr((env.level, env.state))
    whole = {level_of(seed)[1] for seed in envs.EVAL_SEEDS}
    training = [level_of(seed) for seed in range(1000, 4000)]
    assert not any(level in whole for _, level in training)
    trained = {room for room, _ in training}
    found = np.mean([level_of(seed)[0] in trained for seed in envs.EVAL_SEEDS])
    assert shared.startswith(f"{found:.0%} ") and shared in page


def test_what_the_page_says_of_warnings():
    args = paper.parse(["claims"])
    args.folder = ROOT / "figures/tiny"
    runs = paper.runs_of("trap", "PPO", args)
    page = (ROOT / "figures/CLAIMS.md").read_text()
    _, _, after, otherwise, _ = warnings_of_loss.row_of(runs, "entropy")
    fresh = paper.runs_of("trap, fresh seeds", "PPO, plain", args)
    _, _, after_fresh, otherwise_fresh, difference = warnings_of_loss.row_of(fresh, "entropy")
    assert (f"with probability {after}, otherwise {otherwise}; fresh ones with {after_fresh} and {otherwise_fresh} (the interval "
            "holds 0: not replicated)") in page
    assert "[-" in difference, "its interval holds 0"
    of_32 = warnings_of_loss.row_of(paper.runs_of("trap, fresh seeds", "StarPO-S of 32", args), "entropy")
    assert f"*StarPO-S of 32* with {of_32[2]} and {of_32[3]}." in page and "[-" not in of_32[-1]
    for world, method in [*paper.pairs_of("equal")]:
        assert "[-" in warnings_of_loss.row_of(paper.runs_of(world, method, args), "reward_std")[-1]
    assert "[-" in warnings_of_loss.row_of(runs, "reward_std")[-1] and "[-" in warnings_of_loss.row_of(fresh, "reward_std")[-1]
    assert ("Long gradients warn as well, the in-group std never clearly; with several turns none of the four signals logged "
            "does.") in page
    groups = [runs] + [paper.runs_of(world, method, args) for world, method in paper.pairs_of("equal")]
    warned = {metric: ["[-" not in warnings_of_loss.row_of(some, metric)[-1] for some in groups] for metric in ("entropy", "grad_norm_max")}
    assert sum(warned["grad_norm_max"]) >= sum(warned["entropy"]) > len(groups) / 2
    several = [run for world in ("trap, sokoban", "trap, gentle lake") for method in paper.PAPER["sets"]["several turns"]
               for run in paper.runs_of(world, method, args)]
    assert len(several) == 64
    for metric in ("entropy", "reward_std", "valid", "distinct"):  # which were logged
        assert "[-" in warnings_of_loss.row_of(several, metric)[-1]
