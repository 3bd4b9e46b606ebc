"""figures/variants.py: what it measures, against the definition. (What it changes is seen in test_figures.py, by name.)"""
import math
import sys

import numpy as np
import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "figures"))

import ragen_mini as rm
import variants


def brute_force_information(trajs, policy, tok):
    """By its definition, one sequence at a time, thoughts found in the ids of `tiny`'s closing tag."""
    end, found = tok.convert_tokens_to_ids("</think>"), []
    for traj in trajs:
        if traj.turns[0]["valid"]:
            start = traj.mask.index(True)
            found.append((traj.ids[:start], traj.ids[start:traj.ids.index(end, start)]))
    xs = [list(x) for x in {tuple(x) for x, _ in found}]

    def logp(x, z):
        logits = policy(input_ids=torch.tensor([x + z])).logits[0].log_softmax(-1)
        return sum(logits[len(x) + i - 1, token].item() for i, token in enumerate(z))
    return np.mean([logp(x, z) - math.log(np.mean([math.exp(logp(other, z)) for other in xs])) for x, z in found]), len(xs)


@torch.no_grad()
def test_mutual_information(play, llama, tok, cfg):
    texts = ["The goal is 2 down .</think><answer>Down</answer>", "</think><answer>Left</answer>"]
    trajs = play(texts[:1], "frozenlake", [1, 2, 3], cfg, n=2) + play(texts[1:], "frozenlake", [4], cfg)
    trajs += play(["no tags"], "frozenlake", [5], cfg)
    models = rm.Models(llama, None, None, None, tok)
    truth, prompts = brute_force_information(trajs, llama, tok)
    found = variants.information(trajs, models, cfg)
    assert found == pytest.approx(truth, abs=1e-4) and found <= math.log(prompts) and prompts == 4
    assert variants.information(trajs[:2], models, cfg) == pytest.approx(0, abs=1e-5), "one prompt tells nothing"
    assert variants.information(trajs[-1:], models, cfg) is None, "no thought at all"


def test_empty_thoughts_carry_no_information(play, llama, tok, cfg):
    models = rm.Models(llama, None, None, None, tok)
    trajs = play(["</think><answer>Up</answer>"], "frozenlake", [300, 301], cfg)
    assert variants.information(trajs, models, cfg) == pytest.approx(0, abs=1e-6)


def test_measuring_changes_nothing(folder, tmp_path, monkeypatch):
    """Every second iteration, here, has the column, and the run is the same without it."""
    monkeypatch.setattr(variants, "MEASURED_EVERY", 2)
    flags = (f"--model {folder} --device cpu --env frozenlake --prompts 2 --rollouts 4 --iterations 2 --eval-every 0 "
             "--max-new-tokens 16 --max-turns 2").split()
    plain = rm.train(rm.parse_config([*flags, "--out", str(tmp_path / "plain")]))
    for name in ("iterate", "learn"):
        monkeypatch.setattr(rm, name, getattr(rm, name))  # put back afterwards
    variants.mutual_information()
    measured = rm.train(rm.parse_config([*flags, "--out", str(tmp_path / "measured")]))
    assert ["mutual_information" in row for row in measured] == [False, False, True]
    assert [row.get("reward") for row in measured] == [row.get("reward") for row in plain]
    assert [row.get("grad_norm") for row in measured] == [row.get("grad_norm") for row in plain]


def test_a_table_of_rare_tokens(folder, tmp_path, monkeypatch, capsys):
    """By hand; and from a run of two iterations, whose second half are the two steps of the last one."""
    table = variants.by_length(np.array([[0.001, 0.99], [0.002, 0.97], [0.5, 0.1], [0.4, 0.2], [7.0, 0.4]]))
    assert table.splitlines()[2:] == ["| 0 to 0.003 | 2 | 0.980 | 0.00 |", "| 0.3 to inf | 3 | 0.200 | 0.67 |"]
    for name in ("gradient_step", "sum_up"):
        monkeypatch.setattr(rm, name, getattr(rm, name))  # put back afterwards
    variants.rare_tokens()
    seen = []
    by_length = variants.by_length
    monkeypatch.setattr(variants, "by_length", lambda steps: seen.extend(steps) or by_length(steps))
    flags = (f"--model {folder} --device cpu --env frozenlake --prompts 2 --rollouts 4 --update-size 4 --iterations 2 "
             "--eval-every 0 --max-new-tokens 16 --max-turns 2").split()
    rows = rm.train(rm.parse_config([*flags, "--out", str(tmp_path / "run")]))
    assert len(seen) == 2 and np.mean([norm for norm, _ in seen]) == pytest.approx(rows[2]["grad_norm"], abs=1e-5)
    assert all(0 < p < 1 for _, p in seen) and "| gradient | updates |" in capsys.readouterr().out
