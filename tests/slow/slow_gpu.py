"""extras/dev/gpu.py on a CPU, with a tiny model: everything but the GPU."""
import re
from types import SimpleNamespace

import pytest

import ragen_mini as rm
from extras.dev import bench, gpu


def test_all_but_the_gpu(capsys):
    with pytest.raises(SystemExit) as stop:
        gpu.main("--shape tiny --device cpu --prompts 2 --rollouts 2 --tokens 8".split())
    said = capsys.readouterr().out
    assert stop.value.code == 0
    assert "check of the ratio passed" in said
    assert "8 of 8 episodes alike, token for token" in said and "8 up to a token" in said
    for name in ("ppo", "grpo", "generate"):  # 2 x 2 trajectories of 5 turns of 8 tokens
        assert re.search(rf"^\| {name} \|.*\| 160 \|", said, re.MULTILINE)
    for name in ("ours", "generate"):
        assert re.search(rf"^\| {name}, answers of unequal lengths \|", said, re.MULTILINE)
    assert "a decode step of 4 rows" in said
    assert rm.end_tokens is bench.END_TOKENS


def test_the_programs(monkeypatch, capsys):
    """Two of them, since all take three minutes. A failure is reported with its exit code."""
    monkeypatch.setattr(gpu, "SHORT", "--iterations 1 --prompts 2 --rollouts 4 --eval-every 0")
    monkeypatch.setattr(
        gpu, "PROGRAMS", [("plots.py curves OUT/first", "plots.py curves nowhere")])
    monkeypatch.setattr(gpu, "RECIPES", ("rloo --algo grpo",))
    gpu.programs("CPU", (1, 1, 2, 1), " --prompts 2 --rollouts 4 --eval-prompts 8")
    said = capsys.readouterr().out
    assert len(re.findall(r"^iteration \d: success [01]\.", said, re.MULTILINE)) == 2
    # On a CPU a resumed run is the same.
    assert re.search(r"columns that differ .*\n0 \{\}\n1 \{\}\n2 \{\}\n", said)
    assert re.findall(r"exit code (\d): python (.*?) ", said) == [
        ("0", "plots.py"), ("1", "plots.py"), ("0", "extras/recipes.py")]
    assert "No such file or directory: 'nowhere" in said


@pytest.mark.parametrize("other, alike", [
    ([1, 2, 3], True), ([1, 2, 4], True), ([1, 2], False), ([1, 5, 3], False)])
def test_a_difference_counts_unless_another_token_was_as_likely(other, alike):
    ours = SimpleNamespace(ids=[1, 2, 3], old_logp=[0, -1e-6, -0.7])
    assert gpu.alike_up_to_a_tie(ours, SimpleNamespace(ids=other)) is alike
