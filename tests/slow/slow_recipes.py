"""extras/recipes.py: every recipe trains, and changes what it says."""
import copy
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, equal, rows_of, untimed

import ragen_mini as rm
from envs import UserError
from extras import recipes, xray

pytestmark = pytest.mark.usefixtures("passes_as_before")
SMALL = ("--model tiny --device cpu --prompts 2 --rollouts 8 --update-size 8 --iterations 2 --max-new-tokens 24 "
         "--max-turns 3 --lr 1e-3 --eval-every 0 --env frozenlake").split()


@pytest.fixture
def cfg(tmp_path):
    """cfg("--algo", "grpo") -> Config of a small run"""
    return lambda *flags: rm.parse_config([*SMALL, "--out", str(tmp_path / "run"), *map(str, flags)])


def trained(rows):
    assert [row["iteration"] for row in rows] == [0, 1, 2] and all(row["updates"] > 0 for row in rows[1:])
    return untimed(rows)


@pytest.mark.parametrize("name", recipes.RECIPES)
@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_every_recipe_trains(name, algo, cfg):
    if name == "lora":
        pytest.importorskip("peft")
    for recipe, wants in (("discount_per_turn", "ppo"), ("gspo", "grpo")):
        if name == recipe and algo != wants:
            with pytest.raises(UserError, match=f"is for --algo {wants}"):
                recipes.RECIPES[name](cfg("--algo", algo))
            return
    rows, models = recipes.RECIPES[name](cfg("--algo", algo))
    assert len(rows) == 3 and rows_of(models_out(cfg)) == rows
    if name != "own_model":  # a random one earns the same in all episodes
        trained(rows)


def models_out(cfg):
    return cfg().out


def test_rloo_is_the_groups_mean_without_the_episode(cfg, monkeypatch):
    seen = []
    compute = rm.compute_advantages
    monkeypatch.setattr(rm, "compute_advantages", lambda *args: seen.append(args) or compute(*args))
    recipes.rloo(cfg("--keep", 0.5))
    _, R, models, settings = seen[0]
    assert R.shape == (1, 8), "the filter still filters"
    assert models.critic is None and Path(models_out(cfg), "config.json").read_text().count('"rloo"') == 1
    for i, A in enumerate(rm.BY_GROUP[settings.algo](R, "std")[0]):
        rest = [x for j, x in enumerate(R[0].tolist()) if j != i]
        assert A == pytest.approx(R[0, i].item() - sum(rest) / 7, abs=1e-5)


def test_a_run_whose_algorithm_a_script_added(cfg, monkeypatch):
    """Without its script one can still watch it, but not train on with other advantages."""
    recipes.discount_per_turn(cfg("--rollouts", 1, "--prompts", 8))
    run = models_out(cfg)
    monkeypatch.delitem(rm.BY_CRITIC, "ppo-per-turn")
    assert rm.parse_config(["--model", run, "--play", "0"]).algo == "ppo-per-turn"
    for flags in (["--model", run], ["--resume", run, "--iterations", "3"]):
        with pytest.raises(UserError, match="no algo ppo-per-turn: ppo, .*, or run its script"):
            rm.parse_config(flags)
    with pytest.raises(UserError, match=f"no X-ray of {run}: only its script knows --algo ppo-per-turn"):
        xray.xray(run)


OWN_OPTION = """
from __future__ import annotations  # makes annotations texts
from dataclasses import dataclass
import ragen_mini as rm

@dataclass
class Config(rm.Config):
    token_cost: float = 0.001  # of every token that the model writes
    patience: rm.Share = 0.5

def train(cfg):
    print("cost", cfg.token_cost)
    rm.train(cfg)

rm.main(train, Config)
"""


def test_a_script_may_have_options_of_its_own(cfg, monkeypatch, tmp_path, capsys):
    script, run = tmp_path / "costly.py", str(tmp_path / "run")
    script.write_text(OWN_OPTION)

    def command(name, *options):
        monkeypatch.setattr(sys, "argv", [str(name), *options])
        try:
            runpy.run_path(str(name), run_name="__main__")
        except UserError as error:
            return str(error)
        return capsys.readouterr().out

    with pytest.raises(SystemExit):
        command(script, "--help")
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ") and re.search("The script's own: (token_cost, patience|patience, token_cost)$", shown, re.M)
    first = command(script, *SMALL, "--token-cost", "0.5", "--out", run)
    assert "cost 0.5\n" in first and f"watch:   python {script} --model {run!r} --play 8\n" in first, "ragen_mini.py would refuse"
    assert Path(xray.xray(run)).exists(), "for which the run's own options are nothing"
    assert "cost 0.5\n" in command(script, "--resume", run, "--iterations", "3"), "it is a setting like the others"
    assert "cost 0.001\n" in command(script, "--resume", run, "--iterations", "4", "--token-cost", "0.001")
    assert "frozenlake" in command(script, "--model", run, "--play", "0")
    assert "--token-cost -1.0: must be a number, 0 to 1e+15" in command(script, "--token-cost", "-1")
    assert "--patience 2.0: must be a number, 0 to 1" in command(script, "--patience", "2")
    assert "another script's?" in command(ROOT / "ragen_mini.py", "--resume", run, "--iterations", "5")


WORLD_AND_MAIN = """
import envs, ragen_mini as rm

class Short(envs.FrozenLake):
    actions = envs.FrozenLake.actions

rm.main()  # without a guard
"""


def test_a_script_may_hold_the_world_that_it_trains(monkeypatch, tmp_path, capsys):
    """It is not run again to find the class: that would train once more, inside of the first."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(WORLD_AND_MAIN)
    monkeypatch.setattr(sys, "argv", ["./mine.py", *SMALL, "--env", "mine.py:Short", "--out", "run"])
    runpy.run_path("./mine.py", run_name="__main__")
    assert capsys.readouterr().out.count("tiny learns Short") == 1


def test_a_loss_that_is_already_a_mean_is_refused(cfg):
    """It would be divided by the number of tokens a second time."""
    models = rm.load_models(cfg("--iterations", 1))
    models.loss = lambda logp, entropy, old_logp, adv, cfg: (-(logp * adv).mean(), adv > 0)
    with pytest.raises(AssertionError, match="a number for each token"):
        rm.train(cfg("--iterations", 1), models)


def test_cispo_is_ppo_where_ratios_are_1(cfg):
    def weights(train, *flags):
        _, models = train(cfg("--iterations", 1, "--update-size", 16, *flags))
        return torch.nn.utils.parameters_to_vector(models.policy.parameters())
    assert weights(recipes.cispo).allclose(weights(rm.train), atol=1e-5)
    assert not weights(recipes.cispo, "--epochs", 2).allclose(weights(rm.train, "--epochs", 2), atol=1e-5)


def test_cispo_drops_no_token(cfg):
    """Ratios of 3, 1 and 0.2; A of 2, 2 and -1: the gradient is -A times the ratio, cut at 1.2."""
    _, models = recipes.cispo(cfg("--iterations", 1))
    logp = torch.tensor([3.0, 1.0, 0.2]).log().requires_grad_()
    adv = torch.tensor([2.0, 2.0, -1.0])
    loss, was_clipped = models.loss(logp, torch.zeros(3), torch.zeros(3), adv, cfg())
    loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([-2.4, -2.0, 0.2]) and was_clipped.tolist() == [True, False, False]


def test_gspo_has_the_gradient_of_a_loop_over_episodes(cfg, monkeypatch):
    """Ratios are moved away from 1, some beyond the clip; parts of an update are small."""
    cfg = cfg("--algo", "grpo", "--kl-coef", 0, "--update-size", 16, "--max-turns", 3)
    seen = []
    monkeypatch.setattr(rm, "train", lambda cfg, learn: seen.append(learn))
    recipes.gspo(cfg)
    models = rm.load_models(cfg)
    trajs = rm.rollout(models, range(500, 502), 8, cfg, 0)
    noise = torch.Generator().manual_seed(0)
    for traj in trajs:
        shift = torch.randn(1, generator=noise).item() / 3
        traj.old_logp = [logp + shift * own for logp, own in zip(traj.old_logp, traj.mask)]
        traj.reward[-1] += torch.rand(1, generator=noise).item()
    weights = list(models.policy.parameters())
    found = []
    monkeypatch.setattr(rm, "take_step", lambda models: found.extend(weight.grad.clone() for weight in weights) or 1.0)
    monkeypatch.setattr(rm, "MICRO_TOKENS", 300)
    _, steps = seen[0](trajs, models, cfg, 0)
    advantages = rm.grpo_advantages(rm.returns(trajs, cfg)).flatten()
    models.policy.zero_grad()
    total, clipped = 0.0, 0
    for traj, adv in zip(trajs, advantages):
        logps = models.policy(torch.tensor([traj.ids])).logits[0, :-1].log_softmax(-1)
        moved = [logps[t - 1, traj.ids[t]] - traj.old_logp[t] for t in range(1, len(traj.ids)) if traj.mask[t]]
        ratio = torch.stack(moved).mean().exp()
        clipped += not 0.8 < ratio < 1.2
        total = total - torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv) / 16
    total.backward()
    assert steps[0]["policy_loss"] == pytest.approx(total.item(), abs=1e-5) and 2 < clipped < 14
    for weight, grad in zip(weights, found):
        torch.testing.assert_close(weight.grad, grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("algo", ["grpo", "rloo"])
def test_gspo_trains_on_the_groups_that_the_filter_keeps(cfg, monkeypatch, algo):
    seen = []
    compute = rm.compute_advantages
    monkeypatch.setattr(rm, "compute_advantages", lambda *args: seen.append(args) or compute(*args))
    trained(recipes.gspo(cfg("--algo", algo, "--keep", 0.5))[0])
    for trajs, R, *_ in seen:
        assert len(trajs) == 8 and R.tolist() == [pytest.approx([traj.R for traj in trajs])]


def test_a_discount_of_1_per_turn_changes_nothing(cfg):
    plain = trained(rm.train(cfg())[0])
    assert trained(recipes.discount_per_turn(cfg())[0]) == plain


def test_the_discount_is_per_turn(cfg):
    """The critic's targets at lambda 1, against a sum over turns."""
    found = []

    def watch(row, trajs, learned, models, cfg):
        found.extend((trajs, batch) for batch, _ in learned)
    train = rm.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rm, "train", lambda cfg, **seams: train(cfg, watch=watch, **seams))
        recipes.discount_per_turn(cfg("--gamma", 0.5, "--kl-coef", 0, "--iterations", 1))
    (trajs, batch), = found
    several = 0
    for traj, ret in zip(trajs, batch["ret"]):
        turn = -1
        for t in range(1, len(traj.ids)):
            turn += traj.mask[t] and not traj.mask[t - 1]
            if traj.mask[t]:
                earned = [0.5 ** (k - turn) * one["reward"] for k, one in enumerate(traj.turns) if k >= turn]
                assert ret[t - 1].item() == pytest.approx(sum(earned), abs=1e-4)
        several += turn > 0
    assert several


def test_rewards_of_later_turns_and_of_long_answers_are_less(cfg):
    for recipe, expected in (
            (recipes.early_turns_count_more, lambda traj: sum(0.9 ** k * turn["reward"] for k, turn in enumerate(traj.turns))),
            (recipes.short_answers, lambda traj: sum(turn["reward"] - 0.001 * turn["tokens"] for turn in traj.turns))):
        found = []

        def watch(row, trajs, learned, models, cfg):
            found.extend(trajs)
        train = rm.train
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rm, "train", lambda cfg, **seams: train(cfg, watch=watch, **seams))
            recipe(cfg("--iterations", 1))
        assert len(found) == 16 and all(traj.R == pytest.approx(expected(traj), abs=1e-6) for traj in found)


def test_sgd_steps_along_the_gradient(cfg):
    before = rm.load_models(cfg()).policy
    rows, models = recipes.sgd(cfg("--iterations", 1, "--update-size", 16, "--lr", 0.25, "--critic-lr", 0.125))
    assert [group["lr"] for group in models.optimizer.param_groups] == [0.25, 0.125]
    moved = [(new - old).flatten() for new, old in zip(models.policy.parameters(), before.parameters())]
    length = 0.25 * min(1.0, rows[1]["grad_norm"])
    assert torch.cat(moved).norm().item() == pytest.approx(length, rel=1e-3)


def test_muon_goes_on_where_it_stopped(cfg, tmp_path):
    whole = trained(recipes.muon(cfg())[0])
    recipes.muon(cfg("--iterations", 1, "--out", tmp_path / "again"))
    rows, models = recipes.muon(rm.parse_config(["--resume", str(tmp_path / "again"), "--iterations", "2"]))
    assert trained(rows) == whole
    start = rm.load_models(cfg()).policy
    changed = [name for (name, new), old in zip(models.policy.named_parameters(), start.parameters()) if not equal(new, old)]
    assert len(changed) == len(list(start.parameters()))


def test_rates_rise_step_by_step_also_where_a_run_goes_on(cfg, tmp_path):
    """Adam's first step moves each weight with a gradient by its rate (with a longer epsilon: a little less)."""
    before = rm.load_models(cfg()).policy
    _, models = recipes.warm_up(cfg("--iterations", 1, "--update-size", 16))
    moved = [(new - old).abs().max().item() for new, old in zip(models.policy.parameters(), before.parameters())]
    assert max(moved) == pytest.approx(1e-3 / 40, rel=0.02)
    whole = trained(recipes.warm_up(cfg("--out", tmp_path / "whole"))[0])
    recipes.warm_up(cfg("--iterations", 1, "--out", tmp_path / "again"))
    rows, models = recipes.warm_up(rm.parse_config(["--resume", str(tmp_path / "again"), "--iterations", "2"]))
    assert trained(rows) == whole
    steps = sum(row["updates"] for row in rows[1:])
    assert [group["lr"] for group in models.optimizer.param_groups] == pytest.approx([1e-3 * steps / 40] * 2)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_hidden_matrices_alone(tied):
    """GPT-2 has a table of places; its own matrices are called c_attn and so on, Llama's ..._proj."""
    sizes = dict(vocab_size=12, bos_token_id=0, eos_token_id=1, tie_word_embeddings=tied)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, **sizes))
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=16, n_embd=8, n_layer=1, n_head=2, **sizes))
    for policy, marks in ((llama, ("_proj.weight",)), (gpt, ("c_attn.weight", "c_proj.weight", "c_fc.weight"))):
        matrices, others = recipes.hidden_matrices(policy)
        for name, weight in policy.named_parameters():
            assert any(weight is matrix for matrix in matrices) == name.endswith(marks)
        assert len(matrices) + len(others) == len(list(policy.parameters()))


def test_lora_trains_its_adapters_alone_and_merges(cfg, tmp_path):
    pytest.importorskip("peft")
    start = dict(rm.load_models(cfg()).policy.named_parameters())
    rows, models = recipes.lora(cfg())
    trained(rows)
    for name, weight in models.policy.named_parameters():
        assert weight.requires_grad == ("lora_" in name)
        if "lora_B" in name:
            assert weight.abs().max() > 0
    assert (tmp_path / "run/checkpoint/adapter_config.json").is_file()
    merged = copy.deepcopy(models.policy).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    models.tok.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, models.policy(ids).logits, atol=1e-4)
    changed = [name for name, weight in again.named_parameters() if not torch.allclose(weight, start[name], atol=1e-7)]
    assert changed and all("q_proj" in name or "v_proj" in name for name in changed)
    with pytest.raises(UserError, match="is an adapter already: merge it first"):
        recipes.lora(cfg("--algo", "grpo", "--model", tmp_path / "run", "--out", tmp_path / "again"))


def test_the_command_line(cfg, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recipes.py", "said", *SMALL, "--iterations", "1", "--out", str(tmp_path / "run")])
    runpy.run_path(str(ROOT / "extras/recipes.py"), run_name="__main__")
    assert json.loads((tmp_path / "run/config.json").read_text())["env"].endswith("recipes.py:GoalLake")
    monkeypatch.setattr(sys, "argv", ["recipes.py", "said", "--resume", str(tmp_path / "run"), "--iterations", "2"])
    runpy.run_path(str(ROOT / "extras/recipes.py"), run_name="__main__")
    assert len((tmp_path / "run/log.jsonl").read_text().splitlines()) == 3
    for words, said in (([], ""), (["--help"], ""), (["ppo"], "no recipe 'ppo': ")):
        monkeypatch.setattr(sys, "argv", ["recipes.py", *words])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / "extras/recipes.py"), run_name="__main__")
        told = stop.value.code or capsys.readouterr().out
        assert re.search(f"rloo  .*leave-one-out[^$]*\n{said}choose one of these", told) and bool(stop.value.code) == bool(said)


@pytest.mark.parametrize("env", ["bandit", "frozenlake", "sokoban"])
@pytest.mark.parametrize("rows", [range(0, 16, 2), range(8), [3], [5, 5]])
@pytest.mark.parametrize("tokens", [2048, 100])
def test_read_once_has_the_gradients_of_today(env, rows, tokens, cfg, monkeypatch):
    """In policy and critic, the penalty of the reference included; groups whole or spread over updates and over passes;
    where only one row is left, or rows are alike to the end."""
    plain = rm.micro_batches
    monkeypatch.setattr(recipes, "ONCE_TOKENS", tokens)

    def of(wrapped):
        c = cfg("--env", env, "--prompts", 2, "--algo", "ppo", "--kl-coef", 0.1)
        models = rm.load_models(c)
        trajs = rm.rollout(models, [300, 301], 8, c, 0)
        with torch.no_grad():
            models.ref.get_output_embeddings().weight += 0.1  # or its penalty were 0
        rm.micro_batches = plain
        if wrapped:
            recipes.read_messages_once(models)
        batch = rm.compute_advantages(trajs, rm.returns(trajs, c), models, c)
        stats = rm.add_gradients(batch, list(rows), models, c)
        weights = [weight for network in (models.policy, models.critic) for weight in network.parameters()]
        return batch, stats, [weight.grad for weight in weights if weight.grad is not None]
    (batch, stats, gradients), (today, today_stats, truth) = of(True), of(False)
    assert equal_to(batch["kl"], today["kl"]) and equal_to(batch["value"], today["value"]) and batch["kl"].abs().max() > 0
    assert stats == pytest.approx(today_stats, abs=1e-5) and len(gradients) == len(truth)
    for gradient, true in zip(gradients, truth):
        assert (gradient - true).abs().max() <= 1e-5 * max(1, true.abs().max())


def test_bf16_rounds_what_is_calculated_but_not_the_weights(cfg):
    c = cfg("--algo", "grpo", "--env", "bandit")
    models = rm.load_models(c)
    traj = rm.rollout(models, [300], 1, c, 0)[0]

    def logps():
        _, part = next(rm.micro_batches(rm.collate([traj], "cpu"), [0]))
        with torch.no_grad(), rm.autocast:
            return rm.token_logps(models.policy, part, c)[0]
    exact = logps()
    recipes.calculate_in_bf16()
    gap = (logps() - exact).abs().max()
    assert 1e-4 < gap < 0.1 and not torch.is_autocast_enabled("cpu")
    assert all(weight.dtype == torch.float32 for weight in models.policy.parameters())


def equal_to(one, other):
    return torch.allclose(one, other, atol=1e-5)


def test_read_once_reads_less(cfg, monkeypatch):
    """The decoder sees each first message in one row; where that makes too many tokens, rows of one message are divided,
    the longest ones together."""
    c = cfg("--env", "bandit", "--algo", "grpo", "--kl-coef", 0)
    models = rm.load_models(c)
    trajs = rm.rollout(models, [300, 301, 302, 303], 4, c, 0)
    messages = {tuple(traj.ids[:traj.mask.index(True)]) for traj in trajs}
    assert len(messages) == 2, "the two orders of the arms"
    read = []
    decoder = models.policy.get_decoder()
    plain = decoder.forward

    def spy(input_ids, **options):
        read.append(tuple(input_ids.shape))
        return plain(input_ids=input_ids, **options)
    decoder.forward = spy
    recipes.read_messages_once(models)
    batch = rm.collate(trajs, "cpu")

    def look():
        read.clear()
        rm.on_grid(lambda part: rm.token_logps(models.policy, part, c)[0], batch)
        return list(zip(read[::2], read[1::2]))
    passes = look()
    assert len(passes) == 2 and sum(b for _, (b, _) in passes) == 16
    for (one, shared), (_, rest) in passes:
        assert one == 1 and shared >= min(map(len, messages)) and shared + rest <= batch["inputs"].shape[1]
    monkeypatch.setattr(recipes, "ONCE_TOKENS", 100)
    passes = look()
    assert len(passes) > 2 and sum(b for _, (b, _) in passes) == 16
    for (_, shared), (b, rest) in passes:
        message = max(len(message) for message in messages if len(message) <= shared)
        assert b == 1 or message + b * (shared + rest - message) <= 100
