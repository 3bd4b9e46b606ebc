"""extras/warm_start.py: a model learns the form of an answer, and is saved as a plain model."""
import re
import sys

import numpy as np
import pytest
import torch
import transformers
from test_rollout import bpe  # noqa: F401, a fixture

import envs
import ragen_mini as rm
from conftest import ROOT, refused, save
from extras import measure, warm_start
from support import loading

SMALL = "--device cpu --max-new-tokens 60 --max-turns 2 --eval-prompts 8".split()


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["warm_start.py", *map(str, words)])
    warm_start.warm_start(*warm_start.parse())


@pytest.mark.parametrize("env", ["frozenlake", f"{ROOT}/extras/my_world.py:Guess"])
def test_what_is_taught_is_what_the_scripts_say(env, bpe, cfg):  # noqa: F811
    """All tokens of the answers are taught, no token of the messages. Every answer is valid, and
    its moves are random.
    """
    rng = np.random.default_rng(0)
    cfg = rm.replace(cfg, env=env)
    trajs = [warm_start.demonstration(bpe, rng, cfg, False) for _ in range(40)]
    moves = []
    for traj in trajs:
        taught = bpe.decode([token for token, mask in zip(traj.ids, traj.mask) if mask])
        answers = [turn["answer"] for turn in traj.turns]
        assert taught == "".join(f"{answer.removeprefix('<think>')}<|im_end|>"
                                 for answer in answers)
        assert all(turn["valid"] for turn in traj.turns)
        moves += [move for answer in answers for move in rm.parse_answer(answer, traj.env.actions,
                                                                        5)]
    for move in trajs[0].env.actions:
        fair = 1 / len(trajs[0].env.actions)
        assert moves.count(move) / len(moves) == pytest.approx(fair, abs=0.15)


@pytest.mark.parametrize("name", ["frozenlake", "sokoban"])
def test_what_is_read_is_true(name, bpe, cfg):  # noqa: F811
    """Of the state before its own moves."""
    cfg = rm.replace(cfg, env=name, max_turns=1)
    rng = np.random.default_rng(2)
    seeds = np.random.default_rng(2)  # it draws the same level
    for _ in range(20):
        env = envs.make(name)
        env.reset(int(seeds.integers(envs.EVAL_SEEDS.stop, 2 ** 31, 2)[0]))
        traj = warm_start.demonstration(bpe, rng, cfg, True)
        turn, = traj.turns
        assert turn["state"] == env.render()
        claims = measure.claims_of(rm.thought_of(turn), env)
        assert claims and all(is_true for _, is_true in claims)
        seeds.bit_generator.state = rng.bit_generator.state


@pytest.fixture
def noisy_folder(tmp_path, tok):
    """`tiny` with so much noise in its weights that one answer of five is valid."""
    policy = transformers.AutoModelForCausalLM.from_pretrained(loading.TINY)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.ndim == 2:
                weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=noise)
    return save(tmp_path / "noisy", policy, tok)


@pytest.mark.parametrize("option", [[], ["--lora"]])
def test_a_model_loses_its_invalid_answers(option, noisy_folder, tmp_path, capsys, monkeypatch):
    if option:
        pytest.importorskip("peft")
    out = tmp_path / "warm"
    flags = ["--env", "frozenlake", *SMALL]
    run(monkeypatch, noisy_folder, out, "--warm-lr", "3e-3", *flags, *option)
    said = capsys.readouterr().out
    shares = [float(share) for share in re.findall(r"valid turns ([\d.]+)", said)]
    assert shares[0] < warm_start.ENOUGH <= shares[-1]
    assert "  random 0." in said, "it was evaluated"
    command = said.split("python ragen_mini.py ")[1].split()
    cfg = rm.parse_config([*command, "--device", "cpu"])
    assert (cfg.model, cfg.env, cfg.max_turns) == (str(out), "frozenlake", 2)
    assert warm_start.valid_turns(rm.load_models(cfg), cfg, 99) > shares[0]
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert not any("lora" in name for name, _ in again.named_parameters())


def test_too_few_steps_save_nothing(random_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(warm_start, "STEPS", 1)
    told = refused(run, monkeypatch, random_folder, tmp_path / "out", "--env", "bandit", *SMALL)
    assert "--warm-lr" in told and not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("words, says", [
    ("tiny {full} --env bandit", "not empty"),
    ("tiny {tmp}/out --lr 1e-3", "--lr"),
    ("nowhere/a/b {tmp}/out --env bandit", "nowhere"),
    ("tiny {tmp}/out --reading 3 --env bandit", "--reading"),
    ("tiny {tmp}/out --reading 3 --env sokoban --no-think", "--reading")])
def test_mistakes_are_named(words, says, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    words = words.format(tmp=tmp_path, full=tmp_path / "full").split()
    assert says in refused(run, monkeypatch, *words)
    assert not (tmp_path / "out").exists()
