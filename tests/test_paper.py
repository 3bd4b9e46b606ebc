"""figures/paper.py: its statistics by hand, and its experiments as settings of the program."""
import itertools
import json
import sys

import numpy as np
import pytest

import envs
import ragen_mini as rm
from conftest import ROOT

sys.path.insert(0, str(ROOT / "figures"))
import paper

RUNS = [(name, *spec) for runs in paper.EXPERIMENTS.values() for name, spec in runs.items()]


def test_intervals():
    assert paper.exact_interval(0, 10) == pytest.approx((0, 1 - 0.025 ** (1 / 10)), abs=1e-6)
    assert paper.exact_interval(10, 10) == pytest.approx((0.025 ** (1 / 10), 1), abs=1e-6)
    assert paper.exact_interval(14, 18) == pytest.approx((0.5236, 0.9359), abs=1e-4)
    mean, low, high = paper.mean_with_interval([1, 2, 3, 4, 5])
    assert (mean, high - mean) == pytest.approx((3, 2.776 * np.sqrt(2.5 / 5)), abs=1e-3)
    assert mean - low == pytest.approx(high - mean)


def test_flipped_signs_are_counted_one_by_one():
    differences = [0.3, -0.1, 0.2, 0.05, 0.4]
    flipped = [np.dot(signs, differences) for signs in itertools.product((1, -1), repeat=5)]
    share = np.mean([value >= sum(differences) - 1e-9 for value in flipped])
    assert paper.sign_flip_test(differences) == pytest.approx(share)
    assert paper.sign_flip_test([1] * 5) == 1 / 32 and paper.sign_flip_test([-1, -1]) == 1


def test_fishers_tea():
    """Three of four cups right, on either side: the sum of 1 + 16 + 16 + 1 of 70 draws."""
    assert paper.fisher_test(3, 4, 1, 4) == pytest.approx(34 / 70)
    assert paper.fisher_test(4, 4, 0, 4) == pytest.approx(2 / 70)


@pytest.mark.parametrize("name, options, seeds", RUNS)
def test_an_experiment_is_what_the_program_understands(name, options, seeds):
    words = options.split()
    if "--eval-envs" in words:
        at = words.index("--eval-envs")
        for env in words[at + 1].split(","):
            envs.make(env)
        del words[at:at + 2]
    cfg = rm.parse_config([*words, "--device", "cpu"])
    assert len(seeds) in paper.T95 and cfg.model == "tiny" and cfg.eval_prompts == 256
    if cfg.online_k > 1:
        assert cfg.online_k * cfg.iterations == 100


def test_a_finished_run_is_packed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(paper, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(paper, "EXPERIMENTS", {"results": {"bandit-ppo": ("--env bandit", [0, 1])}})
    for seed in (0, 1):
        folder = tmp_path / f"runs/bandit-ppo-seed{seed}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"env": "bandit", "out": str(folder)}))
        row = {"iteration": 0, "success": 1 / 3, "value_loss": 2.0, "eval": {"bandit": 0.5}}
        (folder / "log.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "runs/bandit-ppo-seed0/finished").write_text("abc1234")
    for _ in range(2):
        paper.pack()
        assert paper.packed_runs("bandit-ppo") == [{
            "seed": 0, "commit": "abc1234", "config": {"env": "bandit"},
            "rows": [{"iteration": 0, "success": 0.3333, "eval": {"bandit": 0.5}}]}]
    assert not paper.is_complete("results")
