"""gpu.py, up to the GPU: a tiny shape on the CPU."""
import re
import sys
from pathlib import Path
from types import SimpleNamespace

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
    assert "8 of 8 episodes alike, token for token" in said and "8 up to a token" in said
    for name in ("ppo", "grpo", "generate"):
        assert re.search(rf"^\| {name} \|.*\| 160 \|", said, re.M), "2 x 2 trajectories of 5 turns of 8 tokens"
    for name in ("ours", "generate"):
        assert re.search(rf"^\| {name}, answers of unequal lengths \|", said, re.M)
    assert "a decode step of 4 rows" in said
    assert rm.encode is bench.ENCODE


def test_the_programs(monkeypatch, capsys):
    """Two of them: all take three minutes. What ends with another exit code says why."""
    monkeypatch.setattr(gpu, "SHORT", "--iterations 1 --prompts 2 --rollouts 4 --eval-every 0")
    monkeypatch.setattr(gpu, "PROGRAMS", [("plots.py curves OUT/first", "plots.py curves nowhere")])
    monkeypatch.setattr(gpu, "RECIPES", ("rloo",))
    gpu.programs("CPU", (1, 1, 2, 1), " --prompts 2 --rollouts 4 --eval-prompts 8")
    said = capsys.readouterr().out
    assert len(re.findall(r"^iteration \d: success 0\.", said, re.M)) == 2
    assert re.search(r"columns that differ .*\n0 \{\}\n1 \{\}\n2 \{\}\n", said), "on a CPU a resumed run is the same"
    assert re.findall(r"exit code (\d): python (.*?) ", said) == [
        ("0", "plots.py"), ("1", "plots.py"), ("0", "extras/recipes.py")] and "nowhere" in said.splitlines()[-3]


def test_a_difference_counts_unless_another_token_was_as_likely():
    ours = SimpleNamespace(ids=[1, 2, 3], old_logp=[0, -1e-6, -0.7])
    for other, alike in (([1, 2, 3], True), ([1, 2, 4], True), ([1, 2], False), ([1, 5, 3], False)):
        assert gpu.alike_up_to_a_tie(ours, SimpleNamespace(ids=other)) is alike, other
