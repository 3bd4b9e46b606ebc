"""figures/paper.py as a process of its own, and what DIFFERENCES.md counts: pytest -q tests/slow_figures.py"""
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import envs
from slow_paper import FIGURES, WORDS, logged, paper, saved, stage, wait_for


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


@pytest.mark.parametrize("name, shared", [("sokoban", 0.07), ("frozenlake", 0.06)])
def test_what_is_said_of_held_out_levels(name, shared):
    """figures/DIFFERENCES.md: level and start are never trained on, the level with another start is."""
    env = envs.make(name)

    def level_of(seed):
        env.reset(seed)
        return repr(env.level), repr((env.level, env.state))
    rooms, whole = map(set, zip(*map(level_of, envs.EVAL_SEEDS)))
    training = [level_of(seed) for seed in range(1000, 4000)]
    assert not any(level in whole for _, level in training)
    assert round(np.mean([room in rooms for room, _ in training]), 2) == shared
