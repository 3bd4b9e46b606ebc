"""torchrun for real: two processes, Ctrl-C (or a signal that only one of them gets), --resume."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import ragen_mini as rm

ROOT = Path(rm.__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SMALL = ("--env bandit --prompts 4 --rollouts 4 --minibatch-size 8 --max-new-tokens 12 "
         "--keep 0.5 --eval-every 2 --eval-prompts 16").split()
FOREVER = ["--iterations", "100000"]


def start(*words):
    command = [*TORCHRUN, "extras/torchrun.py", *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def finish(process):  # -> exit code, stdout, stderr
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def rows_of(out):  # but for the seconds
    log = Path(out, "log.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [{name: x for name, x in row.items() if "seconds" not in name} for row in rows]


def wait_for_rows(out, count, process):
    for _ in range(600):
        if len(rows_of(out)) >= count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError("no rows")


def weights_of(out):
    state = torch.load(Path(out, "checkpoint", "trainer.pt"), weights_only=True)
    assert len(state["log"].splitlines()) == len(rows_of(out)), "all rows are saved"
    return state["policy"]


def the_children_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(child) for child in children.split()]


def assert_goes_on_as_if_not_stopped(out, tmp_path):
    more = ["--iterations", len(rows_of(out)) + 1]  # two more
    code, _, err = finish(start("--resume", out, *more))
    assert code == 0, err
    code, _, err = finish(start(*SMALL, *more, "--out", tmp_path / "whole"))
    assert code == 0, err
    assert rows_of(out) == rows_of(tmp_path / "whole")
    truth = weights_of(tmp_path / "whole")
    for name, weight in weights_of(out).items():
        assert torch.equal(weight, truth[name]), name


def test_a_run_of_two_processes(tmp_path):
    """Rank 0 writes and speaks, once."""
    code, said, err = finish(start(*SMALL, "--iterations", "2", "--out", tmp_path / "run"))
    assert code == 0, err
    assert said.count("iteration 2: bandit") == 1
    assert said.count("tiny learns") == 1
    rows = rows_of(tmp_path / "run")
    assert [row.get("updates") for row in rows] == [None, 1, 1]
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["out"] == str(tmp_path / "run")
    assert weights_of(tmp_path / "run")
    command = [sys.executable, "ragen_mini.py", "--resume", tmp_path / "run", "--iterations", "3"]
    alone = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    assert len(rows_of(tmp_path / "run")) == 4, "one process goes on with it"


def test_ctrl_c_and_resume(tmp_path):
    """The iteration is finished and saved; what follows is as if nothing had happened."""
    out = tmp_path / "run"
    process = start(*SMALL, *FOREVER, "--out", out)
    wait_for_rows(out, 2, process)
    process.send_signal(signal.SIGINT)  # torchrun passes it on
    code, _, err = finish(process)
    assert code != 0
    assert err.count("finishing this iteration") == 1, "rank 1 is silent"
    weights_of(out)
    assert_goes_on_as_if_not_stopped(out, tmp_path)


@pytest.mark.parametrize("which", [0, 1])
def test_a_signal_to_one_process_stops_both(tmp_path, which):
    out = tmp_path / "run"
    process = start(*SMALL, *FOREVER, "--out", out)
    wait_for_rows(out, 2, process)
    os.kill(the_children_of(process)[which], signal.SIGINT)
    finish(process)
    assert weights_of(out)


def test_a_mistake_is_told(tmp_path):
    code, said, err = finish(start("--prompts", "1", "--out", tmp_path / "run"))
    assert code != 0
    assert "There are 2 processes, but --prompts is 1." in err  # two may write at once
    assert not said
    assert not (tmp_path / "run").exists()


def test_eval_only_is_divided(tmp_path):
    code, said, err = finish(start("--env", "bandit", "--eval-only", "--eval-prompts", "16"))
    assert code == 0, err
    assert said.count("bandit 0.") == 1 and said.count("\nreturn ") == 1
    assert "iteration" not in said


def test_no_thread_of_the_group_is_left(tmp_path):
    """One that lives while Python ends may abort the process, now and then."""
    script = tmp_path / "script.py"
    script.write_text(f"""if True:
        import os, sys
        from pathlib import Path
        sys.path.insert(0, {str(ROOT / "extras")!r})
        import torchrun
        torchrun.main()
        names = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
        print([name for name in names if "gloo" in name])
        """)
    command = [*TORCHRUN, script, "--env", "bandit", "--play", "300"]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    code, said, err = finish(process)
    assert code == 0, err
    assert said.count("[]") == 2, said
    assert said.count("\nreturn ") == 1
