"""Real processes, which take seconds to start: signals, kill -9, two of them in one folder."""
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT, rows_of
from slow_interrupted import (ONE, OTHER, SMALL, TRAINER, assert_same, fails, saved_rows, settings,
                              train)

# It would go on for days, by iterations of a second or more.
LONG = f"{SMALL} --rollouts 32 --iterations 1000000 --save-every 1000000"
STUCK = 300  # nothing here takes so many seconds
BAR = re.compile(r"\d+/\d+ \|.*")


@pytest.fixture
def start(tmp_path):
    """start(flags) -> a process. It writes to files, because a full pipe would stop it."""
    processes = []

    def run(flags, **how):
        number = len(processes)
        files = [open(tmp_path / f"{name}-{number}", "w") for name in ("stdout", "stderr")]
        how = dict(stdout=files[0], stderr=files[1]) | how
        command = [sys.executable, "ragen_mini.py", *flags.split()]
        process = subprocess.Popen(command, cwd=ROOT, **how)
        for file in files:
            file.close()
        process.files = [Path(file.name) for file in files]
        processes.append(process)
        return process
    yield run
    for process in processes:
        process.kill()
        process.wait()


def finish(process):  # -> exit code, stdout, the lines of stderr without progress bars
    process.wait(STUCK)
    said, errors = [file.read_text() for file in process.files]
    lines = [line for line in errors.splitlines() if line.strip() and not BAR.fullmatch(line)]
    return process.returncode, said, lines


def wait_until(condition, process):
    began = time.time()
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.time() - began < STUCK
        time.sleep(0.001)


def has_rows(out, number):  # of the log, of a run that may not have begun, or is writing a row
    file = Path(out, "log.jsonl")
    return file.exists() and file.read_text().count("\n") >= number


@pytest.fixture
def process(start, tmp_path):  # -> a process after its first iteration, its folder
    out = tmp_path / "run"
    process = start(f"{LONG} --out {out}")
    wait_until(lambda: has_rows(out, 2), process)
    return process, out


# ---------------------------------------------------------------------------------------- signals
@pytest.mark.parametrize("tee", [False, True])
def test_ctrl_c_ends_a_real_process(tee, start, tmp_path):
    """The iteration is finished and saved, no traceback. What follows is as if nothing had
    happened. In `python ragen_mini.py | tee log` Ctrl-C ends tee, too: nobody reads any more.
    """
    out = tmp_path / "run"
    process = start(f"{LONG} --out {out}", **(dict(stdout=subprocess.PIPE) if tee else {}))
    wait_until(lambda: has_rows(out, 2), process)
    if tee:
        process.stdout.close()
    process.send_signal(signal.SIGINT)
    code, _, lines = finish(process)
    if not tee:
        assert code == 130 and len(lines) == 1, (code, lines)
    assert not any("Traceback" in line for line in lines), lines
    done = len(rows_of(out))
    assert len(saved_rows(out)) == done
    train(f"--resume {out} --iterations {done}")
    train(f"{LONG} --iterations {done} --out {tmp_path}/whole")
    assert_same(out, tmp_path / "whole")


def test_a_second_ctrl_c_does_not_wait(process):
    """It ends in the midst of things. What was saved before is whole."""
    process, out = process
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)  # two signals at once would be one
    process.send_signal(signal.SIGINT)
    code, _, lines = finish(process)
    assert code == 130 and not any("Traceback" in line for line in lines), (code, lines)
    assert len(train(f"--resume {out} --iterations 1")) == 2


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_loses_what_was_not_saved_and_no_more(kind, process, tmp_path):
    process, out = process
    process.send_signal(kind)
    process.wait()
    assert len(saved_rows(out)) == 1
    train(f"--resume {out} --iterations 1")
    train(f"{LONG} --iterations 1 --out {tmp_path}/whole")
    assert_same(out, tmp_path / "whole")


# ----------------------------------------------------------------------------- killed at any time
def is_writing(out):  # a checkpoint: it grows beside the old one
    new = Path(out, "checkpoint.new")
    try:
        return any(new.iterdir())
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("flags", ["--algo ppo", OTHER])
def test_killed_whenever_it_saves_a_run_resumes_to_the_same_run(flags, start, tmp_path):
    """kill -9 as soon as a checkpoint is being written, or up to 20 ms later. Then it is resumed,
    or, if there is no checkpoint yet, begun anew.
    """
    dice = random.Random(0)
    flags = f"{SMALL} --save-every 1 {flags}"
    train(f"{flags} --out {tmp_path}/whole")
    out = tmp_path / "killed"
    begin = f"{flags} --out {out}"
    for rows in (1, 3, 4):
        has_begun = Path(out, TRAINER).exists()
        process = start(f"--resume {out}" if has_begun else begin)
        wait_until(lambda: has_rows(out, rows) and is_writing(out), process)
        time.sleep(dice.random() * 0.02)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        if not Path(out, TRAINER).exists():
            shutil.rmtree(out)
    train(f"--resume {out}")
    assert_same(out, tmp_path / "whole")


# ------------------------------------------------------------------------------- two
def test_two_processes_never_train_in_one_folder(process, start):
    """Who resumes a run that is still going on is told so. Who begins one gets another folder."""
    process, out = process
    assert str(out) in fails(f"--resume {out}")
    both = [start(f"{SMALL} {ONE} --out {out}") for _ in range(2)]
    codes = []
    for other in both:
        code, _, lines = finish(other)
        # Both may have seen the same free name. One of them gets it.
        assert code == 0 or (code == 1 and len(lines) == 1), (code, lines)
        codes.append(code)
    assert 0 in codes and process.poll() is None
    assert len(rows_of(f"{out}-2")) == 2
    assert settings(f"--resume {out}").iterations == 1_000_000
