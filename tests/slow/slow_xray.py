"""extras/xray.py: its page, compared with the iteration that a resumed run plays."""
import json
import re
import sys

import numpy as np
import pytest
import torch

import ragen_mini as rm
from conftest import ROOT
from extras import xray

SMALL = ("--device cpu --prompts 4 --rollouts 4 --minibatch-size 8 --iterations 1 --max-turns 2 "
         "--max-new-tokens 20 --lr 1e-3 --eval-prompts 4 --env frozenlake").split()


@pytest.fixture(autouse=True)
def learn_is_put_back(monkeypatch):
    monkeypatch.setattr(rm, "learn", rm.learn)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("xray") / "run"
    rm.train(rm.parse_config([*SMALL, "--out", str(out), "--model", folder, "--keep", "0.5"]))
    return out


def data_of(page):
    def refuse(word):
        raise AssertionError(f"JavaScript knows no {word}")
    text = page.read_text(encoding="utf-8")
    data = re.search('id="data">(.*?)</script>', text, re.DOTALL)[1]
    return json.loads(data, parse_constant=refuse)


def plain_logps(policy, traj, cfg):  # (T-1,): one pass over the whole episode
    with torch.no_grad():
        logits = policy(torch.tensor([traj.ids])).logits[0, :-1] / cfg.temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(traj.ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("flags", ["", "--keep 0.5", "--algo grpo --starpo-s",
                                   "--online-k 2 --keep 0.25"])
def test_the_best_and_the_worst_episode(flags, folder):
    """Of the group whose returns differ most. Each column is that of its own episode."""
    cfg = rm.parse_config([*SMALL, "--model", folder, *flags.split()])
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    trajs, learned = xray.iterate(1, models, cfg)
    assert len(learned) == cfg.online_k
    episodes = xray.two_episodes(trajs, learned, models, cfg)
    groups = [[traj for traj in trajs if traj.group == group] for group in range(4)]
    widest = max(groups, key=lambda group: np.std([traj.R for traj in group]))
    returns = [traj.R for traj in widest]
    assert [episode["R"] for episode in episodes] == [max(returns), min(returns)]
    names = {"adv", "old_logp", "reward", "ratio"} | ({"kl"} if cfg.kl_coef else set())
    names |= {"value", "value_target"} if cfg.uses_critic else set()
    for episode in episodes:
        traj = next(traj for traj in widest
                    if (traj.turns, traj.mask) == (episode["turns"], episode["mask"]))
        assert episode["tokens"] == [models.tok.decode([token]) for token in traj.ids]
        columns = {name: np.array(column) for name, column in episode["columns"].items()}
        mask = np.array(traj.mask[1:])
        assert columns.keys() == names and all(len(x) == len(mask) for x in columns.values())
        assert (columns["adv"][~mask] == 0).all() and (columns["adv"][mask] != 0).any()
        assert columns["old_logp"].tolist() == pytest.approx(traj.old_logp[1:])
        assert columns["reward"].tolist() == pytest.approx(traj.reward[1:])
        logp = plain_logps(models.policy, traj, cfg).numpy()
        ratio = np.exp(logp - columns["old_logp"])[mask]
        assert columns["ratio"][mask] == pytest.approx(ratio, abs=1e-4)
        assert np.abs(ratio - 1).max() > 1e-3, "after the update"


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_page_shows_the_next_iteration_and_changes_nothing_else(run, monkeypatch, capsys):
    before = contents(run)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["xray.py", str(run)])  # another program than the run's
        patch.setattr(rm, "learn", rm.learn)
        xray.main()
    page = run / "xray.html"
    assert capsys.readouterr().out == f"open in a browser: {page}\n"
    assert contents(run) == before | {page: page.read_bytes()}

    batches, expected = [], []
    learn = rm.learn

    def learn_and_keep(*args):
        batches.append(learn(*args))
        return batches[-1]

    def describe(row, trajs, models, cfg):
        if trajs:
            expected.extend(xray.two_episodes(trajs, batches, models, cfg))
    monkeypatch.setattr(rm, "learn", learn_and_keep)
    rm.train(rm.parse_config(["--resume", str(run), "--iterations", "2"]), callback=describe)
    assert len(expected) == 2
    assert data_of(page)["episodes"] == json.loads(json.dumps(expected))


def test_what_a_model_wrote_cannot_end_the_page():
    said = "</script><script>alert('<!--')</script>"
    template = (ROOT / "extras/xray.html").read_text(encoding="utf-8")
    page = xray.make_page(said, [{"tokens": [said]}])
    before, after = template.split("EPISODES")
    assert page.startswith(before) and page.endswith(after)
    data = page[len(before):len(page) - len(after)]
    assert "<" not in data
    assert json.loads(data) == {"title": said, "episodes": [{"tokens": [said]}]}
