"""figures/variants.py: what it measures, against the definition; and what each variant changes."""
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import ROOT, rows_of

sys.path.insert(0, str(ROOT / "figures"))

import envs
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


# ------------------------------------------------------------------------------------------- runs of variants
@pytest.fixture(autouse=True)
def worlds(monkeypatch):
    """`mutual_information` puts worlds that listen to thoughts in their places."""
    monkeypatch.setattr(envs, "ENVS", dict(envs.ENVS))


@pytest.fixture
def quick(folder, tmp_path, monkeypatch):
    """quick(options) -> Config of a run of two iterations"""
    monkeypatch.chdir(tmp_path)

    def cfg(options=""):
        return rm.parse_config(f"--model {folder} --device cpu --env frozenlake --prompts 2 --rollouts 4 --iterations 2 "
                               f"--eval-every 0 --max-new-tokens 16 --max-turns 2 {options}".split())
    return cfg


def is_same(rows, others):  # but for the time they took, and for columns that only one of them has
    for row, other in zip(rows, others, strict=True):
        for name in row.keys() & other.keys():
            if not name.startswith("seconds") and row[name] != other[name]:
                return False
    return True


def test_measuring_changes_nothing(quick, monkeypatch):
    """Every second iteration, here, has the column, and the run is the same without it. What is measured are the thoughts
    of a rollout under the policy that played it, not under the one that has learnt from it."""
    monkeypatch.setattr(variants, "MEASURED_EVERY", 2)
    plain, _ = rm.train(quick())
    seen = []

    def learn(trajs, models, cfg, seed):
        seen.append(variants.information(trajs, models, cfg))
        return original(trajs, models, cfg, seed)
    original = rm.learn
    monkeypatch.setattr(rm, "learn", learn)
    measured, _ = variants.mutual_information(quick())
    assert ["mutual_information" in row for row in measured] == [False, False, True]
    assert measured[2]["mutual_information"] == seen[1]
    assert is_same(measured, plain)
    assert all(0 <= row["true_claims"] <= 1 for row in measured[1:])


def test_a_table_of_rare_tokens(quick, monkeypatch, capsys):
    """By hand; and from a run of two iterations, whose second half are the steps of the last one: the rows of each step are
    those that add_gradients was given."""
    table = variants.by_length(np.array([[0.001, 0.99], [0.002, 0.97], [0.5, 0.1], [0.4, 0.2], [7.0, 0.4]]))
    assert table.splitlines()[2:] == ["| 0 to 0.003 | 2 | 0.980 | 0.00 |", "| 0.3 to inf | 3 | 0.200 | 0.67 |"]
    seen, rarest = [], []
    by_length, add_gradients = variants.by_length, rm.add_gradients
    monkeypatch.setattr(variants, "by_length", lambda steps: seen.extend(steps) or by_length(steps))

    def spy(batch, rows, *rest):
        rarest.append(min(batch["old_logp"][row][batch["mask"][row]].min().exp().item() for row in rows))
        return add_gradients(batch, rows, *rest)
    monkeypatch.setattr(rm, "add_gradients", spy)
    rows, _ = variants.rare_tokens(quick("--update-size 4 --epochs 2"))
    assert rows[2]["updates"] == len(seen) == 4 and len(rarest) == 8
    assert np.mean([norm for norm, _ in seen]) == pytest.approx(rows[2]["grad_norm"], abs=1e-5)
    assert [p for _, p in seen] == pytest.approx(rarest[4:]) and len(set(rarest[4:])) > 1
    assert "| gradient | updates |" in capsys.readouterr().out


@pytest.mark.parametrize("name, eps, betas", [
    ("large-eps", 1e-5, (0.9, 0.999)), ("short-memory", 1e-8, (0.9, 0.9))])
def test_adam_is_another(name, eps, betas, quick):
    """Of both networks, and again after --resume."""
    _, models = variants.VARIANTS[name](quick("--out run"))
    _, resumed = variants.VARIANTS[name](replace(quick(), resume="run", iterations=3))
    plain = rm.make_optimizer(rm.load_models(quick()), quick())
    for group in models.optimizer.param_groups + resumed.optimizer.param_groups:
        assert (group["eps"], group["betas"]) == (eps, betas)
    assert [group["eps"] for group in plain.param_groups] == [1e-8, 1e-8]
    assert [group["lr"] for group in models.optimizer.param_groups] == [4e-4, 1e-3]


@pytest.fixture
def last_batch(monkeypatch):
    """-> what `updates` was given last"""
    given = {}
    original = rm.updates

    def spy(batch, *rest):
        given.clear()
        given.update(batch)
        return original(batch, *rest)
    monkeypatch.setattr(rm, "updates", spy)
    return given


def learned_by(name, trajs, models, cfg, monkeypatch):  # -> what the variant's `learn` returns
    found = []
    monkeypatch.setattr(rm, "train", lambda cfg, models=None, learn=None, watch=None: found.append(learn))
    variants.VARIANTS[name](cfg)
    return found[0](trajs, models, cfg, 0)


@pytest.fixture
def episodes(cfg, play):
    """Two levels of the lake, two episodes each, of different lengths; R says what they are to have earned."""
    def of(R, **options):
        for option, value in (dict(prompts=2, rollouts=2, kl_coef=0.0, env="frozenlake") | options).items():
            setattr(cfg, option, value)
        trajs = play(["</think><answer>Up</answer>"], "frozenlake", [1, 2], cfg, n=2)
        short = play(["</think>"], "frozenlake", [1, 2], cfg, n=2)
        trajs[1], trajs[3] = short[1], short[3]
        for traj, value in zip(trajs, R):
            answer = [t for t, ours in enumerate(traj.mask) if ours]
            traj.reward = [value if t == answer[-1] else 0.0 for t in range(len(traj.ids))]
        models = rm.load_models(cfg)
        models.optimizer = rm.make_optimizer(models, cfg)
        return trajs, models
    return of


def test_only_won_groups_teach(cfg, episodes, last_batch, monkeypatch):
    """Sokoban pays 10 for a solved room: the first group has one, the second only differs."""
    trajs, models = episodes([10.9, -1.0, 0.9, -1.0], algo="grpo", adv_norm="mean")
    learned_by("only-won-groups", trajs, models, cfg, monkeypatch)
    first = [adv[mask].unique().tolist() for adv, mask in zip(last_batch["adv"], last_batch["mask"])]
    assert first == [[pytest.approx(5.95)], [pytest.approx(-5.95)], [0.0], [0.0]]
    trajs, models = episodes([1.0, 1.0, 1.0, 1.0], algo="grpo")
    assert learned_by("only-won-groups", trajs, models, cfg, monkeypatch) == ({}, [])


def test_means_over_trajectories(cfg, episodes, last_batch, monkeypatch):
    """eq. 6: every trajectory has the same weight, A times 1, however long it is: the mean over all tokens of what is in
    the batch is the mean over trajectories of their means."""
    trajs, models = episodes([3.0, 1.0, 2.0, 1.0], algo="grpo", adv_norm="mean")
    learned_by("by-trajectory", trajs, models, cfg, monkeypatch)
    adv, mask = last_batch["adv"], last_batch["mask"]
    lengths = mask.sum(1)
    assert len(lengths.unique()) > 1
    by_row = (adv * mask).sum(1) / mask.sum() * len(adv)
    assert by_row.tolist() == pytest.approx([1.0, -1.0, 0.5, -0.5], abs=1e-5)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_equal_returns_are_trained_on(algo, cfg, episodes, monkeypatch):
    trajs, models = episodes([1.0, 1.0, 1.0, 1.0], algo=algo)
    assert rm.learn(trajs, models, cfg, 0) == ({}, [])
    batch, steps = learned_by("keep-going", trajs, models, cfg, monkeypatch)
    assert len(steps) == 1 and len(batch["adv"]) == 4


def test_what_is_not_changed_is_as_in_learn(quick):
    """`chosen_by` is the first half of rm.learn, with the filter, too: without their changes the variants are rm.learn."""
    plain, _ = rm.train(quick("--starpo-s --prompts 4"))
    going_on, _ = variants.keep_going(quick("--starpo-s --prompts 4"))
    assert plain[2]["updates"] > 0 and is_same(plain, going_on)


def test_a_free_critic(quick, monkeypatch):
    monkeypatch.setattr(rm, "VALUE_CLIP", rm.VALUE_CLIP)  # put back afterwards
    variants.free_critic(quick())
    x, old, ret = torch.tensor([[1.0], [0.0], [2.0]])
    assert rm.value_loss(x, old, ret).item() == 0.5, "unclipped: (1 - 2)^2 / 2"


def test_the_command_line(tmp_path):
    command = "figures/variants.py mutual-information --env bandit --eval-envs bandit_test --iterations 1 --device cpu"
    result = subprocess.run([sys.executable, *command.split(), "--eval-prompts", "2", "--out", tmp_path / "run"], cwd=ROOT,
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert list(rows_of(tmp_path / "run")[1]["eval"]) == ["bandit", "bandit_test"]
