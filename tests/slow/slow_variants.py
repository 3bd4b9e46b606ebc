"""research/variants.py: what each variant changes or measures."""
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import plots
import ragen_mini as rm
from conftest import ROOT, rows_of, untimed

sys.path.insert(0, str(ROOT / "figures"))

from extras import elsewhere, recipes, thoughts
from research import variants


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    """Variants replace functions of ragen_mini. Afterwards it has its own again."""
    for module in (rm, plots, elsewhere, thoughts, recipes):
        for name, value in list(vars(module).items()):
            if name.startswith("__"):
                continue
            if isinstance(value, (dict, list)):
                value = value.copy()
            monkeypatch.setattr(module, name, value)


@pytest.fixture
def quick(folder, tmp_path, monkeypatch):
    """quick(options) -> Config of a run of two iterations."""
    monkeypatch.chdir(tmp_path)

    def cfg(options=""):
        return rm.parse_config(
            f"--model {folder} --device cpu --env frozenlake --prompts 2 --rollouts 4 "
            f"--iterations 2 --eval-every 0 --max-new-tokens 16 --max-turns 2 {options}".split())
    return cfg


def without(rows, *columns):
    return [{name: x for name, x in row.items() if name not in columns} for row in untimed(rows)]


NEW = ("mutual_information", "true_claims", "claims", "fitting", "pay")


def test_measuring_changes_nothing(quick):
    """The run is the same without the new columns."""
    plain, _ = rm.train(quick("--iterations 5"))
    variants.VARIANTS["mutual-information"]()
    measured, _ = rm.train(quick("--iterations 5"))
    has = ["mutual_information" in row for row in measured]
    assert has == [False, False, False, False, False, True], "every fifth iteration"
    assert all(0 <= row["true_claims"] <= 1 for row in measured[1:])
    assert without(measured, *NEW) == without(plain)


def test_it_is_evaluated_elsewhere_too(quick, monkeypatch):
    monkeypatch.setattr(elsewhere, "NAMES", ["sokoban"])
    variants.VARIANTS["mutual-information"]()
    rows, _ = rm.train(quick("--eval-every 2 --eval-prompts 4"))
    assert [list(row["eval"]) for row in rows if "eval" in row] == [["frozenlake", "sokoban"]] * 2


def test_a_table_of_rare_tokens():
    steps = np.array([[0.001, 0.99], [0.002, 0.97], [0.5, 0.1], [0.4, 0.2], [7.0, 0.4]])
    rows = variants.by_norm(steps).splitlines()[2:]
    assert rows == ["| 0 to 0.003 | 2 | 0.980 | 0.00 |", "| 0.3 to inf | 3 | 0.200 | 0.67 |"]


def test_rare_tokens_of_a_run(quick, monkeypatch, capsys):
    """The run has two iterations. The second half of its steps are those of the last one. The rows
    of each step are those that add_gradients was given.
    """
    seen, rarest = [], []
    by_norm, add_gradients = variants.by_norm, rm.add_gradients
    monkeypatch.setattr(variants, "by_norm", lambda steps: seen.extend(steps) or by_norm(steps))

    def spy(batch, rows, *rest):
        logp = [batch["old_logp"][row][batch["mask"][row]].min() for row in rows]
        rarest.append(min(logp).exp().item())
        return add_gradients(batch, rows, *rest)
    monkeypatch.setattr(rm, "add_gradients", spy)
    variants.VARIANTS["rare-tokens"]()
    rows, _ = rm.train(quick("--minibatch-size 4 --epochs 2"))
    assert rows[2]["updates"] == len(seen) == 4 and len(rarest) == 8
    norms = [norm for norm, _ in seen]
    assert np.mean(norms) == pytest.approx(rows[2]["grad_norm"], abs=1e-5)
    assert [p for _, p in seen] == pytest.approx(rarest[4:]) and len(set(rarest[4:])) > 1
    assert "| gradient | updates |" in capsys.readouterr().out


@pytest.mark.parametrize("name, eps, betas", [
    ("large-eps", 1e-5, (0.9, 0.999)), ("short-memory", 1e-8, (0.9, 0.9))])
def test_adam_is_another(name, eps, betas, quick):
    """That of both networks is, and again after --resume."""
    plain = rm.make_optimizer(rm.load_models(quick()), quick())
    variants.VARIANTS[name]()
    _, models = rm.train(quick("--out run"))
    _, resumed = rm.train(rm.replace(quick(), resume="run", iterations=3))
    for optimizer in (models.optimizer, resumed.optimizer):
        for group in optimizer.param_groups:
            assert (group["eps"], group["betas"]) == (eps, betas)
        assert [group["lr"] for group in optimizer.param_groups] == [4e-4, 1e-3]
    for group in plain.param_groups:
        assert (group["eps"], group["betas"]) == (1e-8, (0.9, 0.999))


@pytest.fixture
def last_batch(monkeypatch):
    """What `updates` was given last."""
    given = {}
    updates = rm.updates

    def spy(batch, *rest):
        given.clear()
        given.update(batch)
        return updates(batch, *rest)
    monkeypatch.setattr(rm, "updates", spy)
    return given


@pytest.fixture
def episodes(cfg, play):
    """Two levels of the lake with two episodes each, of different lengths. R is what they earn."""
    def of(R, **options):
        settings = dict(prompts=2, rollouts=2, kl_coef=0.0, env="frozenlake") | options
        for option, value in settings.items():
            setattr(cfg, option, value)
        trajs = play(["</think><answer>Up</answer>"], "frozenlake", [1, 2], cfg, n=2)
        short = play(["</think>"], "frozenlake", [1, 2], cfg, n=2)
        trajs[1], trajs[3] = short[1], short[3]
        for traj, value in zip(trajs, R):
            last = max(t for t, own in enumerate(traj.mask) if own)
            traj.reward = [0.0] * len(traj.ids)
            traj.reward[last] = value
        models = rm.load_models(cfg)
        models.optimizer = rm.make_optimizer(models, cfg)
        return trajs, models
    return of


def test_only_won_groups_teach(cfg, episodes, last_batch):
    """Sokoban pays 10 for a solved level. The first group has one. The second only differs."""
    variants.VARIANTS["only-won-groups"]()
    trajs, models = episodes([10.9, -1.0, 0.9, -1.0], algo="grpo", adv_norm="mean")
    rm.learn(trajs, models, cfg, 0)
    adv = [row[mask].unique().tolist() for row, mask in zip(last_batch["adv"], last_batch["mask"])]
    assert adv == [[pytest.approx(5.95)], [pytest.approx(-5.95)], [0.0], [0.0]]
    trajs, models = episodes([1.0, 1.0, 1.0, 1.0], algo="grpo")
    assert rm.learn(trajs, models, cfg, 0) == ({}, [])


def test_means_over_trajectories(cfg, episodes, last_batch):
    """eq. 6: every trajectory has the same weight, A times 1, however long it is. The mean over all
    tokens of what is in the batch is the mean over trajectories of their means.
    """
    variants.VARIANTS["by-trajectory"]()
    trajs, models = episodes([3.0, 1.0, 2.0, 1.0], algo="grpo", adv_norm="mean")
    rm.learn(trajs, models, cfg, 0)
    adv, mask = last_batch["adv"], last_batch["mask"]
    assert len(mask.sum(1).unique()) > 1
    by_row = (adv * mask).sum(1) / mask.sum() * len(adv)
    assert by_row.tolist() == pytest.approx([1.0, -1.0, 0.5, -0.5], abs=1e-5)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_equal_returns_are_trained_on(algo, cfg, episodes):
    trajs, models = episodes([1.0, 1.0, 1.0, 1.0], algo=algo)
    assert rm.learn(trajs, models, cfg, 0) == ({}, [])
    variants.VARIANTS["keep-going"]()
    batch, steps = rm.learn(trajs, models, cfg, 0)
    assert len(steps) == 1 and len(batch["adv"]) == 4


def test_a_free_critic():
    variants.VARIANTS["free-critic"]()
    value, old_value, target = torch.tensor([[1.0], [0.0], [2.0]])
    # Unclipped: (1 - 2)^2 / 2.
    assert rm.value_loss(value, old_value, target).item() == 0.5
    assert rm.VALUE_CLIP == math.inf


def test_the_command_line(tmp_path):
    options = "--env bandit --iterations 1 --device cpu --eval-prompts 2 --eval-envs bandit_test"
    command = [sys.executable, "figures/research/variants.py", "mutual-information"]

    def run(*words):
        return subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True)
    done = run(*options.split(), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert list(rows_of(tmp_path / "run")[1]["eval"]) == ["bandit", "bandit_test"]
    done = run("--resume", tmp_path / "run", "--iterations", "2", "--eval-envs", "bandit_test")
    assert done.returncode == 0, done.stderr
    assert list(rows_of(tmp_path / "run")[2]["eval"]) == ["bandit", "bandit_test"]
    wrong = subprocess.run([*command[:2], "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 1 and "large-eps" in wrong.stderr
    assert "Traceback" not in wrong.stderr
