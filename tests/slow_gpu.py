"""gpu.py, up to the GPU: a tiny shape on the CPU."""
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "extras"))

import bench
import gpu
import ragen_mini as rm


def test_all_but_the_gpu(capsys):
    with pytest.raises(SystemExit) as stop:
        gpu.main("--shape tiny --device cpu --prompts 2 --rollouts 2 --tokens 8".split())
    said = capsys.readouterr().out
    assert stop.value.code == 0
    assert "check of the ratio passed" in said
    assert "8 of 8 episodes alike" in said
    for name in ("ppo", "grpo", "generate"):
        assert re.search(rf"^\| {name} \|.*\| 160 \|", said, re.M), "2 x 2 trajectories of 5 turns of 8 tokens"
    assert "a decode step of 4 rows" in said
    assert rm.encode is bench.ENCODE
