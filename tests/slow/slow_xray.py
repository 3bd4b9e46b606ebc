"""extras/xray.py: its page, compared with the iteration that a resumed run plays."""
import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch

import ragen_mini as rm
from conftest import ROOT
from extras import xray
from runs import UserError

SMALL = ("--device cpu --prompts 4 --rollouts 4 --minibatch-size 8 --iterations 1 --max-turns 2 "
         "--max-new-tokens 20 --lr 1e-3 --eval-prompts 4 --env frozenlake --success-rate 0.8"
         ).split()


def train(out, *flags):
    return rm.train(rm.parse_config([*SMALL, "--out", str(out), *flags]))


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("xray") / "run"
    train(out, "--model", folder, "--keep", "0.5")
    return out


def models_of(cfg):
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    return models


def data_of(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search('id="data">(.*?)</script>', text, re.DOTALL)[1])


def plain_logps(policy, traj, cfg):  # (T-1,): one pass over the whole episode
    with torch.no_grad():
        logits = policy(torch.tensor([traj.ids])).logits[0, :-1] / cfg.temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(traj.ids[1:])[:, None])[:, 0]


# ------------------------------------------------------------------- which episodes, which numbers
@pytest.mark.parametrize("flags", ["", "--keep 0.5", "--algo grpo --starpo-s",
                                   "--online-k 2 --keep 0.25"])
def test_the_best_and_the_worst_episode(flags, folder):
    cfg = rm.parse_config([*SMALL, "--model", folder, *flags.split()])
    models = models_of(cfg)
    trajs, learned = xray.iterate(1, models, cfg)
    assert len(learned) == cfg.online_k
    batch, steps = learned[0]
    episodes = xray.two_episodes(trajs, learned, models, cfg)
    groups = [[traj for traj in trajs if traj.group == group] for group in range(4)]
    widest = max(groups, key=lambda group: np.std([traj.R for traj in group]))
    returns = [traj.R for traj in widest]
    assert steps and [episode["R"] for episode in episodes] == [max(returns), min(returns)]
    for episode in episodes:
        assert episode["group"] == widest[0].group
        traj = next(traj for traj in widest
                    if (traj.turns, traj.mask) == (episode["turns"], episode["mask"]))
        assert episode["tokens"] == [models.tok.decode([token]) for token in traj.ids]
        check_columns(episode["columns"], traj, batch, models, cfg)


def check_columns(columns, traj, batch, models, cfg):
    columns = {name: np.array(column) for name, column in columns.items()}
    mask = np.array(traj.mask[1:])
    expected = {"adv", "old_logp", "reward", "ratio"}
    if models.critic:
        expected |= {"value", "value_target"}
    if models.ref:
        expected |= {"kl"}
    assert columns.keys() == expected
    assert all(len(column) == len(mask) for column in columns.values())
    assert (columns["adv"][~mask] == 0).all() and (columns["adv"][mask] != 0).any()
    assert columns["old_logp"].tolist() == pytest.approx(traj.old_logp[1:])
    assert columns["reward"].sum() == pytest.approx(traj.R, abs=1e-6)

    logp = plain_logps(models.policy, traj, cfg).numpy()
    ratio = np.exp(logp - columns["old_logp"])[mask]
    assert columns["ratio"][mask] == pytest.approx(ratio, abs=1e-4)
    assert np.abs(ratio - 1).max() > 1e-3, "after the update"

    row = row_of(traj, batch)
    for name in columns.keys() - {"ratio"}:
        assert columns[name].tolist() == batch[name][row, :len(mask)].tolist()


def row_of(traj, batch):  # the first row with its tokens and its return
    for row, targets in enumerate(batch["targets"].tolist()):
        same_return = batch["reward"][row].sum().item() == pytest.approx(traj.R, abs=1e-6)
        if targets[:len(traj.ids) - 1] == traj.ids[1:] and same_return:
            return row
    raise AssertionError("the trajectory is not in the batch")


def test_without_updates_episodes_lack_the_columns_of_an_update(folder, monkeypatch):
    cfg = rm.parse_config([*SMALL, "--model", folder])
    models = rm.load_models(cfg)
    nothing = lambda trajs, models, cfg, seed: ({}, [])  # noqa: E731
    monkeypatch.setattr(rm, "learn", nothing)
    trajs, learned = xray.iterate(1, models, cfg)
    assert rm.learn is nothing, "it is put back"
    best, worst = xray.two_episodes(trajs, learned, models, cfg)
    assert best["R"] > worst["R"] and best["columns"].keys() == {"old_logp", "reward"}


def test_a_group_of_one_is_shown_once(folder):
    cfg = rm.parse_config([*SMALL, "--model", folder, "--rollouts", "1"])
    models = models_of(cfg)
    trajs, learned = xray.iterate(1, models, cfg)
    assert len(xray.two_episodes(trajs, learned, models, cfg)) == 1


# ------------------------------------------------------------------------------- the whole program
def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_page_shows_the_next_iteration_and_changes_nothing_else(run, monkeypatch, capsys):
    before = contents(run)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["xray.py", str(run)])  # another program than the run's
        xray.main()
    page = run / "xray.html"
    assert capsys.readouterr().out == f"open in a browser: {page}\n"
    assert contents(run) == before | {page: page.read_bytes()}
    data = data_of(page)
    assert data["title"].startswith(f"{run}, iteration 2 (of a run by ")

    batches = []
    learn = rm.learn

    def learn_and_keep(*args):
        batches.append(learn(*args))
        return batches[-1]
    expected = []

    def describe(row, trajs, models, cfg):
        if trajs:
            expected.extend(xray.two_episodes(trajs, batches, models, cfg))
    monkeypatch.setattr(rm, "learn", learn_and_keep)
    rm.train(rm.parse_config(["--resume", str(run), "--iterations", "2"]), callback=describe)
    assert len(expected) == 2
    assert data["episodes"] == json.loads(json.dumps(expected))


def test_a_run_that_never_learned_can_be_seen(random_folder, tmp_path):
    """All its answers are invalid, and all returns are equal."""
    out = tmp_path / "run"
    rows, _ = train(out, "--model", random_folder, "--env", "bandit", "--algo", "grpo")
    assert rows[1]["updates"] == 0
    best, *_ = data_of(xray.xray(str(out)))["episodes"]
    assert len(best["tokens"]) == len(best["mask"]) > 0
    assert best["columns"].keys() == {"old_logp", "reward"}


def test_a_run_with_an_optimizer_of_its_own_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rm, "make_optimizer", lambda models, cfg: torch.optim.SGD(
        [{"params": models.policy.parameters()}, {"params": models.critic.parameters()}], 0.01))
    train(tmp_path / "run")
    monkeypatch.undo()
    with pytest.raises(UserError, match="an optimizer of its own"):
        xray.xray(str(tmp_path / "run"))


def test_a_checkpoint_of_another_run_is_refused(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other", ignore=shutil.ignore_patterns("*.html"))
    config = json.loads((run / "config.json").read_text())
    for name, value in (("env", "bandit"), ("seed", 5)):
        (other / "config.json").write_text(json.dumps(config | {name: value}))
        with pytest.raises(UserError, match=f"--{name} {config[name]}, but .* {value}"):
            xray.xray(str(other))
    assert not (other / "xray.html").exists()


def test_a_checkpoint_with_an_empty_log_is_refused(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    file = other / "checkpoint/trainer.pt"
    torch.save(torch.load(file) | {"log": ""}, file)
    with pytest.raises(UserError, match="trainer.pt is damaged"):
        xray.xray(str(other))


def test_a_folder_at_home_is_found(run, monkeypatch):
    monkeypatch.setenv("HOME", str(run.parent))
    assert xray.xray(f"~/{run.name}") == run / "xray.html"


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not the folder of a run with a checkpoint"):
        xray.xray(str(tmp_path))


def test_what_a_model_wrote_cannot_end_the_page():
    said = "</script><script>alert('<!--')</script>"
    template = (ROOT / "extras/xray.html").read_text(encoding="utf-8")
    page = xray.make_page(said, [{"tokens": [said]}])
    before, after = template.split("EPISODES")
    assert page.startswith(before) and page.endswith(after)
    data = page[len(before):len(page) - len(after)]
    assert "<" not in data
    assert json.loads(data) == {"title": said, "episodes": [{"tokens": [said]}]}


def test_numbers_of_a_page_are_finite(run):
    """JavaScript's JSON.parse knows no NaN, which Python would write."""
    text = xray.xray(str(run)).read_text(encoding="utf-8")
    data = re.search('id="data">(.*?)</script>', text, re.DOTALL)[1]

    def refuse(word):
        raise AssertionError(word)
    assert json.loads(data, parse_constant=refuse)["episodes"]
