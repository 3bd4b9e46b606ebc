"""Real processes, which take seconds to start: .ci/run runs these behind the quick tests."""
import re
import signal
import sys
import time

import pytest

from slow_interrupted import DAYS, survive, train
from survive import assert_same, rows_of, saved_rows

LONG = f"{DAYS} --rollouts 32"


@pytest.fixture
def process(tmp_path_factory, monkeypatch):
    """The real command line, in a process that would go on for days, by iterations of a second or more."""
    monkeypatch.setattr(sys, "argv", ["ragen_mini.py"])  # these tests, too, go on with it
    out = tmp_path_factory.mktemp("process") / "run"
    process = survive.start(f"{LONG} --out {out}")
    yield process, out
    process.kill()


def test_ctrl_c_ends_a_real_process(process, tmp_path):
    """The iteration is finished and saved, no traceback; what follows is as if nothing had happened."""
    process, out = process
    survive.wait_until(lambda: len(rows_of(out)) > 1, process)
    process.send_signal(signal.SIGINT)
    code, _, lines = survive.finish(process)
    lines = [line for line in lines if not re.match(r"\d+/1000000 \|", line)]  # the bar's last state
    assert code == 130 and len(lines) == 1 and lines[0].startswith("finishing"), (code, lines)
    assert len(saved_rows(out)) == len(rows_of(out))
    one_more = f"--iterations {len(rows_of(out))}"
    train(f"--resume {out} {one_more}")
    train(f"{LONG} {one_more} --out {tmp_path}/whole")
    assert_same(out, tmp_path / "whole")


@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_ctrl_c_before_training_begins(tmp_path, seconds):
    """While torch is imported, say: no traceback, and nothing is left. A shell makes 130 of the signal."""
    process = survive.start(f"{LONG} --out {tmp_path}/run")
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    code, said, lines = survive.finish(process)
    assert (code, said, lines) == (-signal.SIGINT, "", [])


def test_a_second_ctrl_c_does_not_wait(process):
    """It ends in the midst of things. What was saved before is whole."""
    process, out = process
    survive.wait_until(lambda: len(rows_of(out)) > 1, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)  # two signals at once would be one
    process.send_signal(signal.SIGINT)
    code, _, lines = survive.finish(process)
    assert code == 130 and not any("Traceback" in line for line in lines), (code, lines)
    assert len(train(f"--resume {out} --iterations 1")) == 2


def test_a_sigterm_loses_what_was_not_saved_and_no_more(process, tmp_path):
    process, out = process
    survive.wait_until(lambda: len(rows_of(out)) > 1, process)
    process.terminate()
    process.wait()
    assert len(saved_rows(out)) == 1
    train(f"--resume {out} --iterations 1")
    train(f"{LONG} --iterations 1 --out {tmp_path}/whole")
    assert_same(out, tmp_path / "whole")


def test_a_mistake_is_one_line_and_exit_code_1(tmp_path):
    code, said, lines = survive.run(f"--algo dqn --out {tmp_path}/run")
    assert (code, said, len(lines)) == (1, "", 1) and "algo" in lines[0]
    assert not (tmp_path / "run").exists()


def test_an_unknown_option_is_argparses_and_exit_code_2(tmp_path):
    code, said, lines = survive.run(f"--kep 1 --out {tmp_path}/run")
    assert (code, said) == (2, "") and "--kep" in lines[-1]
    assert not (tmp_path / "run").exists()
