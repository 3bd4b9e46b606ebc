"""extras/xray.py: the page of two episodes, against the iteration that a resumed run plays."""
import json
import math
import re
import runpy
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT

import envs
import ragen_mini as rm
from extras import recipes, xray

SMALL = ("--device cpu --prompts 4 --rollouts 4 --update-size 8 --iterations 1 --max-new-tokens 20 --max-turns 2 "
         "--lr 1e-3 --eval-prompts 4 --env frozenlake --success-rate 0.8").split()


def train(out, *flags, **seams):
    return rm.train(rm.parse_config([*SMALL, "--out", str(out), *map(str, flags)]), **seams)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("xray") / "run"
    train(out, "--model", folder, "--keep", 0.5)
    return out


def data_of(page):
    return json.loads(re.search('id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.S)[1])


def plain_logps(policy, traj, cfg):  # (T-1,): one pass of the whole episode
    with torch.no_grad():
        logits = policy(torch.tensor([traj.ids])).logits[0, :-1] / cfg.temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(traj.ids[1:])[:, None])[:, 0]


# ------------------------------------------------------------------------------------- which episodes, which numbers
@pytest.mark.parametrize("flags", ["", "--keep 0.5", "--algo grpo --starpo-s", "--online-k 2 --keep 0.25"])
def test_the_best_and_the_worst_episode(flags, folder):
    cfg = rm.parse_config([*SMALL, "--model", folder, *flags.split()])
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    _, trajs, learned = rm.iterate(1, models, cfg)
    batch, steps = learned[0]
    episodes = xray.two_episodes(trajs, learned, models, cfg)
    groups = [[traj for traj in trajs if traj.group == g] for g in range(4)]
    widest = max(groups, key=lambda group: np.std([traj.R for traj in group]))
    returns = [traj.R for traj in widest]
    assert steps and [episode["R"] for episode in episodes] == [max(returns), min(returns)]
    for episode in episodes:
        assert episode["group"] == widest[0].group
        traj, = (traj for traj in widest if traj.turns == episode["turns"] and traj.mask == episode["mask"])
        assert episode["tokens"] == [models.tok.decode([token]) for token in traj.ids]
        mask = np.array(traj.mask[1:])
        columns = {name: np.array(column) for name, column in episode["columns"].items()}
        assert {"adv", "old_logp", "reward", "ratio"} | ({"value", "ret"} if models.critic else set()) <= columns.keys()
        assert all(len(column) == len(mask) for column in columns.values())
        assert (columns["adv"][~mask] == 0).all() and (columns["adv"][mask] != 0).any()
        assert columns["old_logp"].tolist() == pytest.approx(traj.old_logp[1:])
        assert columns["reward"].sum() == pytest.approx(traj.R, abs=1e-6)
        logp = plain_logps(models.policy, traj, cfg).numpy()
        assert columns["ratio"][mask] == pytest.approx(np.exp(logp - columns["old_logp"])[mask], abs=1e-4)
        assert np.abs(columns["ratio"][mask] - 1).max() > 1e-3, "after the update"
        row, = [k for k, targets in enumerate(batch["targets"].tolist()) if targets[:len(mask)] == traj.ids[1:]
                and batch["reward"][k].sum().item() == pytest.approx(traj.R, abs=1e-6)][:1]
        for name in columns.keys() - {"ratio"}:
            assert columns[name].tolist() == batch[name][row, :len(mask)].tolist()


def test_without_updates_episodes_are_shown_without_their_columns(folder):
    cfg = rm.parse_config([*SMALL, "--model", folder])
    models = rm.load_models(cfg)
    _, trajs, learned = rm.iterate(1, models, cfg, learn=lambda *_: ({}, []))
    best, worst = xray.two_episodes(trajs, learned, models, cfg)
    assert best["R"] > worst["R"] and best["columns"].keys() == {"old_logp", "reward"}


def test_a_group_of_one_is_shown_once(folder):
    cfg = rm.parse_config([*SMALL, "--model", folder, "--rollouts", "1"])
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    _, trajs, learned = rm.iterate(1, models, cfg)
    assert len(xray.two_episodes(trajs, learned, models, cfg)) == 1


# ------------------------------------------------------------------------------------- the page
def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_page_shows_the_next_iteration_and_changes_nothing_else(run, monkeypatch, capsys):
    before = contents(run)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["xray.py", str(run)])  # the run is by another program
        runpy.run_path(str(ROOT / "extras/xray.py"), run_name="__main__")
    page = run / "xray.html"
    assert capsys.readouterr().out == f"open in a browser: {page}\n"
    assert contents(run) == before | {page: page.read_bytes()}
    data = data_of(page)
    assert data["title"].startswith(f"{run}, iteration 2 (played and learnt by ragen_mini.py alone, not as in frozenlake-ppo-seed0 by ")
    seen = []
    cfg = rm.parse_config(["--resume", str(run), "--iterations", "2"])
    rm.train(cfg, watch=lambda *what: seen.append(what))
    (_, trajs, learned, models, cfg), = seen
    assert data["episodes"] == json.loads(json.dumps(xray.two_episodes(trajs, learned, models, cfg)))


def test_a_run_that_never_learnt_can_be_seen(random_folder, tmp_path):
    """All answers are malformed and all returns alike."""
    rows, _ = train(tmp_path / "run", "--model", random_folder, "--env", "bandit", "--algo", "grpo")
    assert rows[1]["updates"] == 0
    page = xray.xray(str(tmp_path / "run"))
    best, *_ = data_of(page)["episodes"]
    assert len(best["tokens"]) == len(best["mask"]) > 0 and best["columns"].keys() == {"old_logp", "reward"}


def test_a_run_with_an_optimizer_of_its_own_is_refused(tmp_path):
    recipes.sgd(rm.parse_config([*SMALL, "--out", str(tmp_path / "run")]))
    with pytest.raises(envs.UserError, match="no X-ray of .* networks or an optimizer of its own"):
        xray.xray(str(tmp_path / "run"))


def test_settings_of_another_run_than_the_checkpoint_are_named(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    about = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(about | {"seed": 7}))
    with pytest.raises(envs.UserError, match="config.json is of frozenlake-ppo-seed7, its checkpoint of frozenlake-ppo-seed0 by"):
        xray.xray(str(other))


def test_what_a_model_wrote_cannot_end_the_page():
    said = "</script><script>alert('<!--')</script>"
    template = (ROOT / "extras/xray.html").read_text(encoding="utf-8")
    page = xray.make_page(said, [{"tokens": [said]}])
    before, after = template.split("EPISODES")
    assert page.startswith(before) and page.endswith(after)
    data = page[len(before):len(page) - len(after)]
    assert "<" not in data and json.loads(data) == {"title": said, "episodes": [{"tokens": [said]}]}


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(envs.UserError, match="is not the folder of a run with a checkpoint"):
        xray.xray(str(tmp_path))


def test_numbers_of_a_page_are_finite(run):  # JSON.parse knows no NaN
    def refuse(word):
        raise AssertionError(word)
    text = json.dumps(data_of(xray.xray(str(run))))
    for episode in json.loads(text, parse_constant=refuse)["episodes"]:
        assert all(math.isfinite(x) for column in episode["columns"].values() for x in column)
