"""research/fork.py: what the arms do to Adam. fork_report.py: what follows from invented forks."""
import contextlib
import io
import sys

import numpy as np
import pytest
import torch

import plots
import ragen_mini as rm
import runs
from conftest import ROOT
from test_ledger import CLAIMS, says

sys.path.insert(0, str(ROOT / "figures"))

import paper
from research import fork, fork_report


@pytest.fixture
def adam(tmp_path, monkeypatch):
    """One weight vector after ten steps with gradients of 1, whose state is that of iteration 30.
    """
    monkeypatch.setattr(fork, "state_of", lambda seed, iteration: tmp_path / "early.pt")
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for _ in range(10):
        step(optimizer, 1.0)
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "early.pt")
    return optimizer


def step(optimizer, gradient):  # -> how far it moved, in learning rates
    weight, = fork.weights(optimizer)
    before = weight.detach().clone()
    weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
    return (weight - before).abs().max().item() / optimizer.param_groups[0]["lr"]


def models_of(optimizer):
    return rm.Models(None, None, None, optimizer, None)


def test_an_artificial_calm_makes_a_long_step_and_the_cap_shortens_it(adam):
    state = next(iter(adam.state.values()))
    first, second = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    fork.change(models_of(adam), "calm, cap", 1)
    assert torch.allclose(state["exp_avg"], first * 1e-2)
    assert torch.allclose(state["exp_avg_sq"], second * 1e-4)
    steps = []
    fork.measure_steps(models_of(adam), steps)
    moved = step(adam, 1.0)
    assert moved == pytest.approx(0.3, abs=1e-4)
    assert steps == [pytest.approx(moved, abs=1e-4)], "what is measured is what was done"


def test_without_the_cap_the_step_after_a_calm_is_longer(adam):
    """By Adam's formula: the moments after ten gradients of 1 are cut, then comes the eleventh."""
    fork.change(models_of(adam), "calm", 1)
    first = 0.9 * 1e-2 * (1 - 0.9 ** 10) + 0.1
    second = 0.999 * 1e-4 * (1 - 0.999 ** 10) + 0.001
    expected = first / (1 - 0.9 ** 11) / (second / (1 - 0.999 ** 11)) ** 0.5
    assert step(adam, 1.0) == pytest.approx(expected, rel=1e-3) and expected > 0.5


def test_after_a_real_calm_the_floor_keeps_steps_short(adam):
    for _ in range(3000):
        step(adam, 1e-4)
    memory = {name: x.clone() for name, x in next(iter(adam.state.values())).items()}
    fork.change(models_of(adam), "floor", 1)
    floored = step(adam, 1.0)
    plain = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    plain.state[fork.weights(plain)[0]] = memory
    # As usual it is a tenth of its size, which is not that of the calm.
    assert step(plain, 1.0) > 1 and floored < 0.15


def test_a_third_is_a_third(adam):
    fork.change(models_of(adam), "third", 1)
    assert adam.param_groups[0]["lr"] == pytest.approx(0.1 / 3)


def test_an_origin_and_a_fork_are_trained(tmp_path, monkeypatch):
    """Very small ones: their states are kept, and a fork begins with them."""
    monkeypatch.setattr(fork, "RUNS", tmp_path)
    monkeypatch.setattr(fork, "EARLY", 1)
    monkeypatch.setattr(fork, "KEPT_EVERY", 1)
    monkeypatch.setattr(fork, "LENGTH", 1)
    small = fork.SETTINGS | dict(iterations=2, prompts=2, rollouts=4, max_new_tokens=16)
    monkeypatch.setattr(fork, "SETTINGS", small)
    with contextlib.redirect_stdout(io.StringIO()):
        origin = fork.train_origin(41)
    assert origin["origin"] == 41 and len(origin["success"]) == 2
    assert fork.state_of(41, 1).exists() and fork.state_of(41, 2).exists()
    forks = {arm: fork.train_fork(41, 1, arm, dice=1) for arm in ("as it is", "calm, cap")}
    for arm, found in forks.items():
        assert (found["fork"], found["at"], found["arm"]) == (41, 1, arm)
        assert len(found["success"]) == 1
    # The same dice begin with the same model, so they play the same.
    assert forks["as it is"]["success"] == forks["calm, cap"]["success"]
    assert forks["calm, cap"]["longest_step"] <= 0.3 + 1e-3


def test_mcnemar():
    one, other = [1] * 9 + [0] + [1] * 5, [0] * 9 + [1] + [1] * 5
    p, first, second = fork_report.mcnemar(one, other)
    # 2 (1 + 10) / 2^10; equal pairs say nothing.
    assert (first, second) == (9, 1) and p == pytest.approx(22 / 1024)
    assert fork_report.mcnemar([1, 0], [1, 0])[0] == fork_report.mcnemar([], [])[0] == 1


@pytest.fixture
def invented(monkeypatch):
    """Seeds 41 to 49 were lost at 107, every other one of them after a calm. 50 was not lost."""
    origins = {}
    for seed in range(41, 51):
        origins[seed] = dict(origin=seed, peak=1.0, lost_at=None if seed == 50 else 107,
                             grad_norm_max=[0.01 if seed % 2 else 1.0] * 400, success=[1.0] * 400)
    forks = {}
    for seed, at, arm, dice in fork.all_forks(origins):
        is_lost = arm == "calm" or (arm == "as it is" and at == 100 and seed % 2 == 1)
        success = [1.0] * 15 + [0.4 if is_lost else 0.6] * 5
        forks[seed, at, arm, dice] = dict(arm=arm, success=success,
                                          longest_step=1.0 if is_lost else 0.1)
    monkeypatch.setattr(fork, "load", lambda: (origins, forks))
    return origins, forks


def test_origins_are_chosen_as_planned(invented):
    origins, _ = invented
    # The last multiple of five, five iterations before the loss. 50 takes that of the first.
    assert fork.fork_points(origins) == dict.fromkeys(range(41, 51), 100)
    assert fork.chosen(origins) == origins and fork.missing_origins(origins) == []
    unlucky = origins | {45: origins[45] | {"peak": 0.5}}
    assert fork.chosen(unlucky) is None and fork.missing_origins(unlucky) == [51]


def test_from_forks_to_the_tables(invented, tmp_path):
    _, forks = invented
    found = fork_report.collect()
    assert len(found) == 70
    assert found[0].kinds == ("all", "lost", "calm") and found[-1].kinds == ("all", "not lost")
    rows = fork_report.by_arm(found).splitlines()
    for row in ("| calm | as it is | 40 of 40 | 1.00 |", "| not calm | as it is | 0 of 32 | 0.10 |",
                "| all | calm, early | 80 of 80 | 1.00 |"):
        assert row in rows
    first = fork_report.by_origin(found).splitlines()[4]
    assert first.startswith("| 41 | calm | 8 | 0 | 0 | 0 | 0 | 8 | 0 |")
    compared = fork_report.by_question(found).splitlines()[2:]
    assert compared[0].startswith("| floor / as it is | calm | 40 | 0 / 40 | 0.000")
    assert compared[1].startswith("| floor / as it is | not calm | 32 | 0 / 0 | 1.000")
    fork_report.draw(found, "Forks", tmp_path / "fork.png")
    paper.shrink(tmp_path / "fork.png")
    assert (tmp_path / "fork.png").stat().st_size > 5000
    del forks[50, 100, "cap", 8]
    with pytest.raises(runs.UserError, match="forks are missing"):
        fork_report.collect()


def test_what_the_page_says_of_the_forks():
    found = fork_report.collect()

    def lost(kind, early, arm):
        some = fork_report.chosen(found, kind, early, arm)
        all_of_them = np.concatenate([forks.lost for forks in some])
        return all_of_them.sum(), len(all_of_them)
    early = [lost("all", True, arm) for arm in ("calm", "as it is", "calm, cap")]
    before = [lost("lost", False, arm) for arm in ("as it is", "floor", "cap", "third")]
    assert early == [(49, 80), (2, 80), (3, 80)]
    assert before == [(10, 72), (2, 72), (1, 72), (6, 72)]
    says(CLAIMS, "49 of 80 are lost")
    says(CLAIMS, "Without the cut 2 are lost", "3 with the cut", "0.3 learning rates")
    says(CLAIMS, "10 of 72 unchanged forks", "five are from one run", "2 with the second moment",
         "1 with capped steps", "6 at a third of the rate")
    unchanged = fork_report.chosen(found, "lost", False, "as it is")
    assert max(sum(some.lost) for some in unchanged) == 5
    rows = fork_report.by_question(found).splitlines()[2:]
    ps = [float(row.split("|")[-2]) for row in rows]
    # After Holm none differs before the break. The two of the cut do.
    assert min(ps[:5]) > 0.05 and max(ps[5:]) < 0.001


def test_shipped_origins_are_lost_where_the_plan_says():
    origins, forks = fork.load()
    # Ten that won and were not lost early. 47 and 51 were.
    assert sorted(fork.chosen(origins)) == [41, 42, 43, 44, 45, 46, 48, 49, 50, 52]
    assert [origins[seed]["lost_at"] for seed in (47, 51)] == [35, 26]
    for seed, found in origins.items():
        rows = [{"iteration": i, "success": x} for i, x in enumerate(found["success"], 1)]
        _, lost_at = plots.peak_and_collapse(plots.Run({}, rows))
        is_dead = lost_at is None and found["valid"][-1] == 0
        assert lost_at == found["lost_at"] or is_dead, seed
    planned = set(fork.all_forks(fork.chosen(origins)))
    assert forks.keys() <= planned
    for found in forks.values():
        assert len(found["success"]) in range(10, 21) and np.isfinite(found["longest_step"])
