"""extras/warm_start.py: a model that writes nothing valid learns the form of an answer, and the folder is a plain model."""
import numpy as np
import pytest
import transformers
from conftest import ROOT
from test_rollout import bpe  # noqa: a fixture

import plots
import ragen_mini as rm
from envs import UserError
from extras import warm_start

pytestmark = pytest.mark.usefixtures("passes_as_before")
SMALL = "--device cpu --max-new-tokens 40 --max-turns 2 --eval-prompts 8".split()


def test_what_is_taught_is_what_the_scripts_say(tok, cfg):
    """Every token of an answer, and nothing of the world's messages; every answer is valid."""
    trajs = warm_start.demonstrations(tok, np.random.default_rng(0), rm.replace(cfg, env="frozenlake"))
    assert len(trajs) == warm_start.EPISODES and all(turn["valid"] for traj in trajs for turn in traj.turns)
    for traj in trajs:
        said = [token for token, sampled in zip(traj.ids, traj.mask) if sampled]
        assert len(said) == sum(turn["tokens"] for turn in traj.turns)


@pytest.mark.parametrize("lora", [[], ["--lora"], ["--bf16"]])
def test_tiny_loses_its_invalid_answers(tmp_path, capsys, lora):
    if "--lora" in lora:
        pytest.importorskip("peft")
    out = tmp_path / "warm"
    warm_start.main(["tiny", str(out), "--env", "frozenlake", "--warm-lr", "3e-3", *SMALL, *lora])
    said = capsys.readouterr().out
    before = float(said.split("valid turns ")[1].split()[0])
    assert before < warm_start.ENOUGH and "  random 0." in said and f"--model {out} --env frozenlake" in said
    cfg = rm.parse_config(["--model", str(out), "--env", "frozenlake", *SMALL])
    assert cfg.small and warm_start.valid_turns(rm.load_models(cfg), cfg, 99) > before
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert not any("lora" in name for name, _ in again.named_parameters())


def test_lessons_are_the_planners_first_turns(cfg, capsys, monkeypatch):
    """All say where the goal is, in one turn; the rate rises in 20 steps, and falls nearly to 0."""
    taught, rates = [], []

    def learn(policy, trajs, optimizer, cfg):
        taught.extend(trajs)
        rates.append(optimizer.param_groups[0]["lr"])
        return 0.0
    monkeypatch.setattr(warm_start, "learn", learn)
    warm_start.teach_planning(rm.load_models(cfg), rm.replace(cfg, env="frozenlake"), 1e-3, 40)
    assert len(taught) == 40 * warm_start.TURNS_A_LESSON and all(len(traj.turns) == 1 for traj in taught)
    assert all("goal" in plots.thought_of(traj.turns[0]) for traj in taught)
    assert rates[0] < rates[19] > rates[-1] > 0 and rates[-1] < 1e-4
    assert "lesson 10: loss 0.00" in capsys.readouterr().out


def test_a_world_without_a_planner_and_byte_pairs(bpe, cfg):
    cfg = rm.replace(cfg, env=f"{ROOT}/tests/my_world.py:Guess")
    trajs = warm_start.demonstrations(bpe, np.random.default_rng(1), cfg)
    assert all(turn["valid"] for traj in trajs for turn in traj.turns)


def test_mistakes_are_one_line(tmp_path, random_folder, monkeypatch):
    monkeypatch.setattr(warm_start, "STEPS", 1)
    with pytest.raises(UserError, match="exists: give another folder"):
        warm_start.main(["tiny", str(tmp_path), "--env", "bandit"])
    with pytest.raises(UserError, match="1 steps were too few: 0.00 of the turns are valid, not 0.9. Nothing was saved"):
        warm_start.main([random_folder, str(tmp_path / "out"), "--env", "bandit", *SMALL])
    assert not (tmp_path / "out").exists()


def test_what_another_process_saved_meanwhile_stays(tmp_path):
    out = str(tmp_path / "out")
    assert warm_start.free_name(out) == out
    for taken in ("out", "out-2"):
        (tmp_path / taken).mkdir()
    assert warm_start.free_name(out) == f"{out}-3"
