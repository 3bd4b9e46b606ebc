"""Real processes, which take seconds to start: .ci/run runs these behind the quick tests."""
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import ragen_mini as rm
import survive
from survive import assert_same, rows_of, saved_rows
from test_figures import FIGURES, WORDS, logged, paper, saved, stage, wait_for
from test_survive import DAYS, train
from test_torchrun import of_all_processes


@pytest.fixture
def process(tmp_path_factory):
    """The real command line, in a process that would go on for days. What it does before it is stopped is done again."""
    out = tmp_path_factory.mktemp("process") / "run"
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = survive.start(*DAYS, "--out", out, env=env)
    yield process, out
    process.kill()


def test_ctrl_c_ends_a_real_process_with_a_command_to_go_on(process, tmp_path):
    """The iteration is finished and saved, exit code 130, no traceback; what follows is as if nothing had happened."""
    process, out = process
    survive.wait_until(lambda: len(rows_of(out)) > 1, process)
    process.send_signal(signal.SIGINT)
    code, said, lines = survive.finish(process)
    assert code == 130 and f"--resume {out}" in said and not lines, (code, said, lines)
    assert len(saved_rows(out)) == len(rows_of(out))
    one_more = ["--iterations", len(rows_of(out))]
    train("--resume", out, *one_more)
    train(*DAYS, *one_more, "--out", tmp_path / "whole")
    assert_same(out, tmp_path / "whole")


def test_a_run_of_two_processes(cfg, tmp_path):
    """All processes end with the same weights and rows; one of them has written."""
    cfg.iterations, cfg.prompts, cfg.rollouts, cfg.update_size = 2, 4, 4, 8
    cfg.keep, cfg.out = 0.5, str(tmp_path / "run")
    cfg.eval_every, cfg.eval_prompts = 2, 16

    def work(rank):
        rows = rm.train(cfg)
        for row in rows:
            row.pop("seconds_rollout", None)
            row.pop("seconds_update", None)
        weights = rm.saved_state(f"{cfg.out}/checkpoint")["policy"] if rank == 0 else None
        return rows, weights
    (rows, weights), (other_rows, _) = of_all_processes(work, 2, tmp_path)
    assert rows == other_rows
    assert [row.get("kept") for row in rows] == [None, 8, 8], "half of all prompts, not of each process's"
    logged = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert len(logged) == 3
    assert json.loads(logged[-1])["eval"] == rows[-1]["eval"]
    assert (tmp_path / "run" / "checkpoint" / "trainer.pt").exists()
    assert not (tmp_path / "run-2").exists()
    assert weights


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    process = survive.start("--keep", "0", "--out", tmp_path / "run")
    code, said, lines = survive.finish(process)
    assert (code, said, lines) == (2, "", ["--keep 0.0: above 0 and at most 1"])
    assert not (tmp_path / "run").exists()


def test_ctrl_c_stops_a_figure_and_the_same_command_goes_on(tmp_path, stage):
    """Ctrl-C reaches parent and children; SIGTERM only the parent. Then a run loses its checkpoint."""
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
    for name, run in paper.unpack(tmp_path / "tiny" / "bandit.jsonl.gz").items():
        stops[name] = [row["reward"] for row in run.rows]
    assert len(stops) == 4
    assert stops[first] == [0] * 9, "without a checkpoint: from the start"
    assert stops[second] == [0] * 3 + [1] * 2 + [2] * 4, "with one: it went on, twice"
