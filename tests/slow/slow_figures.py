"""figures/paper.py as a process of its own, and what DIFFERENCES.md and CLAIMS.md count."""
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import envs
from conftest import ROOT
from slow_paper import FIGURES, WORDS, logged, paper, saved, stage, wait_for
from test_ledger import CLAIMS, runs_of, says
from research import warnings_of_loss


def test_ctrl_c_stops_a_figure_and_the_same_command_goes_on(tmp_path, stage):
    """Ctrl-C in a terminal reaches a whole process group, and SIGTERM only the parent. Either way
    the runs are told once. Then a run loses its checkpoint.
    """
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


@pytest.mark.parametrize("name, shown", [("sokoban", "(Sokoban)"), ("frozenlake", "(lake)")])
def test_what_is_said_of_held_out_levels(name, shown):
    """A level with its start is never trained on. With another start many levels are."""
    env = envs.make(name)

    def level_of(seed):
        env.reset(seed)
        return repr(env.level), repr((env.level, env.state))
    whole = {level_of(seed)[1] for seed in envs.EVAL_SEEDS}
    training = [level_of(seed) for seed in range(1000, 4000)]
    assert not any(level in whole for _, level in training)
    trained = {level for level, _ in training}
    found = np.mean([level_of(seed)[0] in trained for seed in envs.EVAL_SEEDS])
    says((ROOT / "figures/DIFFERENCES.md").read_text(), f"{found:.0%} {shown}")


def test_what_the_page_says_of_warnings():
    groups = [runs_of("trap", "PPO")]
    groups += [runs_of(setup, method) for setup, method in paper.pairs_of("equal")]
    ppo, fresh, of_32, *_ = groups

    def warns(runs, metric):  # does the interval of the difference exclude 0?
        return "[-" not in warnings_of_loss.row_of(runs, metric)[-1]

    def probabilities(runs):
        _, _, after, otherwise, _ = warnings_of_loss.row_of(runs, "entropy")
        return after, otherwise
    says(CLAIMS, "PPO's runs", "probability {}, otherwise with {}".format(*probabilities(ppo)))
    says(CLAIMS, "fresh seeds", "{} and {}".format(*probabilities(fresh)))
    says(CLAIMS, "*StarPO-S of 32*", "{} and {}".format(*probabilities(of_32)))
    assert warns(ppo, "entropy") and warns(of_32, "entropy") and not warns(fresh, "entropy")
    says(CLAIMS, "the interval of the difference holds 0", "not replicated")
    assert not any(warns(runs, "reward_std") for runs in groups)
    by_gradient = sum(warns(runs, "grad_norm_max") for runs in groups)
    by_entropy = sum(warns(runs, "entropy") for runs in groups)
    assert by_gradient >= by_entropy > len(groups) / 2
    several = []
    for setup in ("trap, sokoban", "trap, gentle lake"):
        for method in paper.PAPER["sets"]["several turns"]:
            several += runs_of(setup, method)
    assert len(several) == 64
    logged_there = ("entropy", "reward_std", "valid", "distinct")
    assert not any(warns(several, metric) for metric in logged_there)
