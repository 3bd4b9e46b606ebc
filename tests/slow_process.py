"""Real processes, which take seconds to start: .ci/run runs these behind the quick tests."""
import json
import os
import signal

import pytest
import torch

import ragen_mini as rm
import survive
from survive import assert_same, rows_of, saved_rows
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
