"""extras/recipes.py: every recipe trains, and changes what it says."""
import copy
import itertools
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, equal, rows_of, untimed
from slow_models import RIGHT, models_of, random_model

import plots
import ragen_mini as rm
from extras import recipes
from support import device
from support.errors import UserError

SMALL = ("--model tiny --device cpu --prompts 2 --rollouts 8 --minibatch-size 8 --iterations 2 "
         "--max-new-tokens 24 --max-turns 3 --lr 1e-3 --eval-every 0 --env frozenlake").split()
ONLY_FOR = {"rloo": "grpo", "gspo": "grpo", "discount_per_turn": "ppo"}


@pytest.fixture(autouse=True)
def originals():
    """Whatever a recipe replaces is put back."""
    changed = vars(rm), vars(device), plots.TITLES, plots.QUESTIONS
    before = [dict(now) for now in changed]
    yield
    for now, then in zip(changed, before):
        now.clear()
        now.update(then)


@pytest.fixture
def cfg(tmp_path):
    """cfg("--algo", "grpo") -> Config of a small run"""
    def make(*flags):
        return rm.parse_config([*SMALL, "--out", str(tmp_path / "run"), *map(str, flags)])
    return make


@pytest.fixture
def watched(monkeypatch):
    """watched() -> a list, which gets the trajectories and the batch of every call of rm.learn"""
    def begin():
        found = []
        learn = rm.learn

        def spy(trajs, *rest):
            batch, steps = learn(trajs, *rest)
            found.append((trajs, batch))
            return batch, steps
        monkeypatch.setattr(rm, "learn", spy)
        return found
    return begin


def trained(rows):
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert all(row["updates"] > 0 for row in rows[1:])
    return untimed(rows)


def vector(network):
    return torch.nn.utils.parameters_to_vector(network.parameters()).detach().clone()


def learn_and_look(trajs, models, cfg, monkeypatch):  # -> gradients of each step, statistics
    found = []

    def look(models):
        found.append([weight.grad.clone() for weight in models.policy.parameters()])
        return 1.0
    monkeypatch.setattr(rm, "take_step", look)
    _, steps = rm.learn(trajs, models, cfg, 0)
    models.policy.zero_grad()
    return found, steps


def logps_of(policy, traj):  # of its own tokens, by a plain pass -> new, old: (n,)
    logp = policy(torch.tensor([traj.ids])).logits[0, :-1].log_softmax(-1)
    wrote = [t for t in range(1, len(traj.ids)) if traj.mask[t]]
    new = torch.stack([logp[t - 1, traj.ids[t]] for t in wrote])
    return new, torch.tensor([traj.old_logp[t] for t in wrote])


@pytest.mark.parametrize("name", recipes.RECIPES)
@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_every_recipe_trains(name, algo, cfg):
    if name == "lora":
        pytest.importorskip("peft")
    recipes.RECIPES[name]()
    config = cfg("--algo", algo)
    if ONLY_FOR.get(name, algo) != algo:
        with pytest.raises(UserError, match=f"{name} is for --algo {ONLY_FOR[name]}"):
            rm.train(config)
        assert not Path(config.out).exists()
        return
    rows, _ = rm.train(config)
    assert rows_of(config.out) == rows
    if name != "own_model":  # all its episodes earn the same
        trained(rows)


@pytest.mark.parametrize("name, flags", [
    ("ragen2_filter", "--keep 0.5"), ("ragen2_filter", "--starpo-s"), ("said", "--env bandit"),
    ("discount_per_turn", "--gamma 0"), ("own_model", "--model some/model"),
    ("mutual_information", "--no-think")])
def test_settings_on_which_a_recipe_has_no_effect_are_refused(name, flags, cfg):
    recipes.RECIPES[name]()
    with pytest.raises(UserError, match=name):
        rm.train(cfg(*flags.split()))


def test_recipes_can_be_combined(cfg, watched):
    """The rewards of later turns and the cost of tokens count in the advantages of rloo, which
    compares with the others of a group. What was said is the same.
    """
    c = cfg("--algo", "grpo", "--iterations", 1, "--kl-coef", 0)
    found = watched()
    rm.train(c)
    recipes.rloo()
    recipes.short_answers()
    recipes.early_turns_count_more()
    rm.train(c)
    (plain, _), (trajs, batch) = found
    assert [traj.ids for traj in trajs] == [traj.ids for traj in plain]
    R = [sum(0.9 ** k * turn["reward"] - 0.001 * turn["tokens"]
             for k, turn in enumerate(traj.turns)) for traj in trajs]
    for i, adv in enumerate(batch["adv"]):
        group = R[i // 8 * 8:i // 8 * 8 + 8]
        truth = R[i] - (sum(group) - R[i]) / 7
        assert trajs[i].R == pytest.approx(R[i])
        assert adv[batch["mask"][i]].tolist() == pytest.approx(
            [truth] * int(batch["mask"][i].sum()), abs=1e-5)


# --------------------------------------------------------------------- groups, advantages
def fewest_groups(variances):  # by trying all subsets, the smallest first
    total = sum(variances)
    groups = [g for g, variance in enumerate(variances) if variance > 1e-8]
    for size in range(1, len(groups) + 1):
        fitting = [some for some in itertools.combinations(groups, size)
                   if sum(variances[g] for g in some) >= 0.9 * total]
        if fitting:
            return max(fitting, key=lambda some: sum(variances[g] for g in some))
    return ()


def test_the_filter_of_ragen2_keeps_the_fewest_groups_with_90_percent():
    recipes.ragen2_filter()
    rng = np.random.default_rng(0)
    sizes = set()
    for _ in range(200):
        spread = rng.choice([0.0, 0.1, 0.3, 1.0, 3.0], size=(6, 1))
        R = rng.normal(size=(6, 5)) * spread + rng.normal(size=(6, 1))
        kept = rm.uncertainty_filter(torch.tensor(R, dtype=torch.float32), 1.0).tolist()
        assert sorted(kept) == sorted(fewest_groups(R.var(1).tolist()))
        sizes.add(len(kept))
    assert len(sizes) >= 4
    assert rm.uncertainty_filter(torch.full((3, 4), 0.3), 1.0).tolist() == []


def test_the_discount_is_per_turn(cfg, watched):
    """The critic's targets at lambda 1, compared with a sum over turns."""
    recipes.discount_per_turn()
    found = watched()
    rm.train(cfg("--gamma", 0.5, "--kl-coef", 0, "--iterations", 1))
    (trajs, batch), = found
    several = 0
    for traj, target in zip(trajs, batch["value_target"]):
        turn = -1
        for t in range(1, len(traj.ids)):
            turn += traj.mask[t] and not traj.mask[t - 1]
            if traj.mask[t]:
                to_come = [0.5 ** (k - turn) * one["reward"]
                           for k, one in enumerate(traj.turns) if k >= turn]
                assert target[t - 1].item() == pytest.approx(sum(to_come), abs=1e-4)
        several += turn > 0
    assert several


# ---------------------------------------------------------------------------------- losses
def test_the_mean_of_episodes_has_the_gradient_of_a_loop_over_episodes(cfg, monkeypatch):
    """One update with ratios of 1 has the gradient of eq. 6 times the mean length."""
    recipes.mean_of_episodes()
    config = cfg("--algo", "grpo", "--kl-coef", 0, "--entropy-coef", 0, "--minibatch-size", 16)
    models = rm.load_models(config)
    trajs = rm.rollout(models, range(500, 502), 8, config, 0)
    found, = learn_and_look(trajs, models, config, monkeypatch)[0]
    loss = 0.0
    for traj, adv in zip(trajs, rm.grpo_advantages(rm.returns(trajs, config)).flatten()):
        new, old = logps_of(models.policy, traj)
        loss = loss - ((new - old).exp() * adv).mean() / 16
    loss.backward()
    assert len({sum(traj.mask) for traj in trajs}) > 4
    # The core divides by all tokens. So its loss is eq. 6 if each weight is mean length / length.
    for weight, grad in zip(models.policy.parameters(), found):
        torch.testing.assert_close(weight.grad, grad, atol=1e-5, rtol=1e-3)


def test_a_loss_that_is_already_a_mean_is_refused(cfg):
    """It would be divided by the number of tokens a second time."""
    rm.policy_loss = lambda logp, entropy, old_logp, adv, cfg: (-(logp * adv).mean(), adv > 0)
    with pytest.raises(AssertionError, match="a number for each token"):
        rm.train(cfg("--iterations", 1))


def test_cispo_drops_no_token(cfg):
    """Ratios of 3, 1 and 0.2; A of 2, 2 and -1. The gradient is -A times the ratio, cut at 1.2."""
    recipes.cispo()
    logp = torch.tensor([3.0, 1.0, 0.2]).log().requires_grad_()
    adv = torch.tensor([2.0, 2.0, -1.0])
    loss, was_clipped = rm.policy_loss(logp, torch.zeros(3), torch.zeros(3), adv, cfg())
    loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([-2.4, -2.0, 0.2])
    assert was_clipped.tolist() == [True, False, False]


def test_gspo_has_the_gradient_of_a_loop_over_episodes(cfg, monkeypatch):
    """Ratios are moved away from 1, some beyond the clip. The parts of an update are small."""
    recipes.gspo()
    config = cfg("--algo", "grpo", "--kl-coef", 0, "--minibatch-size", 16, "--micro-tokens", 300)
    models = rm.load_models(config)
    trajs = rm.rollout(models, range(500, 502), 8, config, 0)
    noise = torch.Generator().manual_seed(0)
    for traj in trajs:
        shift = torch.randn(1, generator=noise).item() / 3
        traj.old_logp = [logp + shift * own for logp, own in zip(traj.old_logp, traj.mask)]
        traj.reward[-1] += torch.rand(1, generator=noise).item()
    (found,), steps = learn_and_look(trajs, models, config, monkeypatch)
    total, clipped = 0.0, 0
    for traj, adv in zip(trajs, rm.grpo_advantages(rm.returns(trajs, config)).flatten()):
        new, old = logps_of(models.policy, traj)
        ratio = (new - old).mean().exp()
        clipped += not 0.8 < ratio < 1.2
        total = total - torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv) / 16
    total.backward()
    assert steps[0]["policy_loss"] == pytest.approx(total.item(), abs=1e-5) and 2 < clipped < 14
    for weight, grad in zip(models.policy.parameters(), found):
        torch.testing.assert_close(weight.grad, grad, atol=1e-5, rtol=1e-3)


# --------------------------------------------------------------------------------- rewards
def test_naming_the_goal_is_paid(cfg, watched):
    """What the model reads is the same. An answer that is invalid is paid for its thought, too."""
    plain = watched()
    rm.train(cfg("--iterations", 1))
    recipes.said()
    found = watched()
    rm.train(cfg("--iterations", 1))
    times = set()
    for old, traj in zip(plain[0][0], found[0][0]):
        assert traj.ids == old.ids
        for before, turn in zip(old.turns, traj.turns):
            named = "goal" in before["answer"].split("</think>")[0]
            assert turn["reward"] == pytest.approx(before["reward"] + 0.1 * named)
            times.add(named)
        assert traj.R == pytest.approx(sum(turn["reward"] for turn in traj.turns))
        ends = [t for t in range(len(traj.ids)) if traj.reward[t]]
        assert all(traj.mask[t] and not any(traj.mask[t + 1:t + 2]) for t in ends)
    assert times == {True, False}


# ------------------------------------------------------------------------------ optimizers
def test_sgd_steps_along_the_gradient(cfg):
    before = rm.load_models(cfg()).policy
    recipes.sgd()
    rows, models = rm.train(cfg("--iterations", 1, "--minibatch-size", 16, "--lr", 0.25,
                                "--critic-lr", 0.125))
    assert [group["lr"] for group in models.optimizer.param_groups] == [0.25, 0.125]
    length = 0.25 * min(1.0, rows[1]["grad_norm"])
    moved = vector(models.policy) - vector(before)
    assert moved.norm().item() == pytest.approx(length, rel=1e-3)


@pytest.mark.parametrize("name", ["muon", "warm_up", "own_model", "lora"])
def test_it_goes_on_where_it_stopped(name, cfg, tmp_path):
    if name == "lora":
        pytest.importorskip("peft")
    recipes.RECIPES[name]()
    whole, true_models = rm.train(cfg())
    rm.train(cfg("--iterations", 1, "--out", tmp_path / "again"))
    resumed = rm.parse_config(["--resume", str(tmp_path / "again"), "--iterations", "2"])
    rows, models = rm.train(resumed)
    assert untimed(rows) == untimed(whole)
    assert equal(models.policy.state_dict(), true_models.policy.state_dict())


def test_muon_moves_all_weights(cfg):
    start = rm.load_models(cfg()).policy
    recipes.muon()
    _, models = rm.train(cfg())
    for new, old in zip(models.policy.parameters(), start.parameters()):
        assert not equal(new, old)


def test_rates_rise_step_by_step(cfg):
    """Adam's first step moves each weight that has a gradient by its rate."""
    before = vector(rm.load_models(cfg()).policy)
    recipes.warm_up()
    _, models = rm.train(cfg("--iterations", 1, "--minibatch-size", 16))
    moved = (vector(models.policy) - before).abs().max().item()
    assert moved == pytest.approx(1e-3 / 40, rel=0.02)
    rows, models = rm.train(cfg("--critic-lr", 1e-2))
    steps = sum(row["updates"] for row in rows[1:])
    rates = [group["lr"] for group in models.optimizer.param_groups]
    assert rates == pytest.approx([1e-3 * steps / 40, 1e-2 * steps / 40])


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_hidden_matrices_alone(tied):
    """GPT-2 has a table of places. Its matrices are called c_attn and so on, Llama's ..._proj."""
    sizes = dict(vocab_size=12, bos_token_id=0, eos_token_id=1, tie_word_embeddings=tied)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, **sizes))
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_positions=16, n_embd=8, n_layer=1, n_head=2, **sizes))
    for policy, marks in ((llama, ("_proj.weight",)),
                          (gpt, ("c_attn.weight", "c_proj.weight", "c_fc.weight"))):
        matrices, others = recipes.hidden_matrices(policy)
        for name, weight in policy.named_parameters():
            assert any(weight is matrix for matrix in matrices) == name.endswith(marks)
        assert len(matrices) + len(others) == len(list(policy.parameters()))


# -------------------------------------------------------------------------------- networks
def test_lora_trains_its_adapters_alone_and_merges(cfg, tmp_path):
    pytest.importorskip("peft")
    start = dict(rm.load_models(cfg()).policy.named_parameters())
    recipes.lora()
    rows, models = rm.train(cfg())
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
    changed = [name for name, weight in again.named_parameters()
               if not torch.allclose(weight, start[name], atol=1e-7)]
    layers = [name for name, weight in start.items() if ".layers." in name and weight.ndim == 2]
    assert sorted(changed) == sorted(layers)
    assert rm.parse_config(["--model", str(tmp_path / "merged")]).lr == 4e-4, "it is still tiny"


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # peft adapts itself
def test_lora_has_adapters_in_every_architecture(kind, cfg, tok):
    """All of them learn: in each layer, and not in the output layer."""
    pytest.importorskip("peft")
    c = cfg("--algo", "grpo", "--kl-coef", 0)
    models = models_of(random_model(kind, tok, **RIGHT[kind]), tok, c)
    rm.load_models = lambda cfg: models
    recipes.lora()
    policy = rm.load_models(c).policy
    trajs = rm.rollout(models, [300], 2, c, 0)
    batch = rm.compute_advantages(trajs, torch.tensor([[0.0, 1.0]]), models, c)
    rm.add_gradients(batch, [0, 1], models, c)
    learn = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    assert all("lora_" in name and "head" not in name for name in learn)
    for layer in ("0", "1"):
        grads = [weight.grad.abs().max() for name, weight in policy.named_parameters()
                 if "lora_B" in name and f".{layer}." in name]
        assert len(grads) >= 4 and min(grads) > 0


def test_own_model_begins_with_three_copies_of_one_network(cfg, tmp_path):
    recipes.own_model()
    models = rm.load_models(cfg("--seed", 3))
    truth = models.policy.get_decoder().state_dict()
    assert equal(models.critic.get_decoder().state_dict(), truth)
    assert equal(models.ref.state_dict(), models.policy.state_dict())
    assert not equal(rm.load_models(cfg("--seed", 4)).policy.state_dict(),
                     models.policy.state_dict())
    assert not any(part.training for part in (models.policy, models.critic, models.ref))
    rm.train(cfg("--iterations", 1), models)
    played = rm.parse_config(["--model", str(tmp_path / "run"), "--play", "300"])
    assert played.max_new_tokens == 40, "it has the presets of tiny"
    assert equal(rm.load_models(played).policy.state_dict(), models.policy.state_dict())
    assert rm.parse_config(["--model", str(tmp_path / "run"), "--max-new-tokens", "9"]).lr == 4e-4


# ------------------------------------------------------------------------------ arithmetic
def test_bf16_rounds_what_is_calculated_but_not_the_weights(cfg):
    c = cfg("--algo", "grpo", "--env", "bandit")
    models = rm.load_models(c)
    traj, = rm.rollout(models, [300], 1, c, 0)

    def logps():
        _, part = next(rm.micro_batches(rm.collate([traj], "cpu"), [0], c.micro_tokens))
        with torch.no_grad(), device.autocast("cpu"):
            return rm.token_logps(models.policy, part, c)[0]
    exact = logps()
    recipes.bf16()
    gap = (logps() - exact).abs().max()
    assert 1e-4 < gap < 0.1 and not torch.is_autocast_enabled("cpu")
    assert all(weight.dtype == torch.float32 for weight in models.policy.parameters())
    recipes.calculate_in_bf16(False)
    assert torch.equal(logps(), exact)


@pytest.mark.parametrize("env", ["bandit", "frozenlake"])
@pytest.mark.parametrize("rows", [range(0, 16, 2), range(8), [3], [5, 5]])
@pytest.mark.parametrize("tokens", [2048, 100])
def test_read_once_has_the_same_gradients(env, rows, tokens, cfg):
    """In policy and critic, the penalty of the reference included. Groups are whole, or spread over
    updates and over passes. Also where only one row is left, or rows are alike to the end.
    """
    plain = rm.micro_batches

    def gradients(once):
        c = cfg("--env", env, "--prompts", 2, "--algo", "ppo", "--kl-coef", 0.1,
                "--micro-tokens", tokens // 2)
        models = rm.load_models(c)
        trajs = rm.rollout(models, [300, 301], 8, c, 0)
        with torch.no_grad():
            models.ref.get_output_embeddings().weight += 0.1  # or its penalty would be 0
        rm.micro_batches = plain
        if once:
            recipes.read_messages_once(models)
        batch = rm.compute_advantages(trajs, rm.returns(trajs, c), models, c)
        stats = rm.add_gradients(batch, list(rows), models, c)
        weights = [*models.policy.parameters(), *models.critic.parameters()]
        return batch, stats, [weight.grad for weight in weights if weight.grad is not None]
    batch, stats, found = gradients(once=True)
    true_batch, true_stats, truth = gradients(once=False)
    for name in ("kl", "value"):
        assert torch.allclose(batch[name], true_batch[name], atol=1e-5)
    assert batch["kl"].abs().max() > 0
    assert stats == pytest.approx(true_stats, rel=1e-5, abs=1e-5)
    assert len(found) == len(truth)
    for gradient, true in zip(found, truth):
        assert (gradient - true).abs().max() <= 1e-5 * max(1, true.abs().max())


def test_read_once_reads_less(cfg):
    """The decoder sees each first message in one row."""
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

    rm.per_token(lambda part: rm.token_logps(models.policy, part, c)[0], batch, c)
    passes = list(zip(read[::2], read[1::2]))
    assert len(passes) == 2 and sum(b for _, (b, _) in passes) == 16
    for (one, shared), (_, rest) in passes:
        assert one == 1 and shared >= min(map(len, messages))
        assert shared + rest <= batch["inputs"].shape[1]


# ------------------------------------------------------------------------ what is measured
@torch.no_grad()
def information_by_loops(trajs, policy, tok):  # -> the estimate, the number of prompts
    """By its definition, one text at a time. Thoughts end before the id of `tiny`'s </think>."""
    end = tok.convert_tokens_to_ids("</think>")
    found = []
    for traj in trajs:
        if traj.turns[0]["valid"]:
            start = traj.mask.index(True)
            found.append((traj.ids[:start], traj.ids[start:traj.ids.index(end, start)]))
    prompts = []
    for x, _ in found:
        if x not in prompts:
            prompts.append(x)

    def probability(x, z):
        logps = policy(input_ids=torch.tensor([x + z])).logits[0].double().log_softmax(-1)
        return math.exp(sum(logps[len(x) + i - 1, token] for i, token in enumerate(z)))
    terms = []
    for x, z in found:
        mean = sum(probability(other, z) for other in prompts) / len(prompts)
        terms.append(math.log(probability(x, z)) - math.log(mean))
    return sum(terms) / len(terms), len(prompts)


def test_mutual_information_of_answers_that_were_written(play, llama, tok, cfg):
    """A thought that is the same everywhere, one that is empty, and an answer without any."""
    models = rm.Models(llama, None, None, None, tok)
    c = cfg("--max-new-tokens", 40)
    goal = "The goal is 2 down .</think><answer>Down</answer>"
    trajs = play([goal], "frozenlake", [1, 2, 3], c, n=2)
    trajs += play(["</think><answer>Left</answer>"], "frozenlake", [4], c)
    trajs += play(["no tags"], "frozenlake", [5], c)
    truth, prompts = information_by_loops(trajs, llama, tok)
    assert prompts == 4
    assert recipes.information(trajs, models, c) == pytest.approx(truth, abs=1e-4)
    one = recipes.information(trajs[:2], models, c)
    assert one == pytest.approx(0, abs=1e-5), "one prompt tells nothing"
    assert recipes.information(trajs[-1:], models, c) is None
    assert recipes.information(trajs[-2:-1], models, c) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("flags", ["", "--online-k 2"])
def test_the_log_has_the_information_of_the_policy_that_played(flags, cfg, watched):
    """Measuring changes nothing. With --online-k it is the first slice that is measured."""
    c = cfg(*flags.split())
    plain = trained(rm.train(c)[0])
    before = []
    learn = rm.learn

    def spy(trajs, models, cfg, seed):
        before.append(information_by_loops(trajs, models.policy, models.tok)[0])
        return learn(trajs, models, cfg, seed)
    rm.learn = spy
    recipes.mutual_information(every=2)
    rows = trained(rm.train(c)[0])
    assert ["mutual_information" in row for row in rows] == [False, False, True]
    slices = len(before) // 2
    assert slices == (2 if flags else 1)
    assert rows[2].pop("mutual_information") == pytest.approx(before[slices], abs=1e-4)
    assert rows == plain


def test_the_information_has_a_curve():
    recipes.mutual_information()
    rows = [{"iteration": 1, "mutual_information": 1.0}]
    panels = plots.panels_of({"run": plots.Run({}, rows)}, None)
    assert list(panels.values()) == [["mutual_information"]]
    assert "I(prompt; thought)" in plots.TITLES["mutual_information"]


# ------------------------------------------------------------------------ the command line
def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["recipes.py", *words])
    runpy.run_path(str(ROOT / "extras/recipes.py"), run_name="__main__")


def test_the_command_line(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    command(monkeypatch, "rloo", *SMALL, "--algo", "grpo", "--iterations", "1", "--out", str(run))
    state = torch.load(run / "checkpoint/trainer.pt")
    assert state["script"] == "recipes-rloo"
    assert f"recipes.py rloo --resume {run}" in capsys.readouterr().out
    command(monkeypatch, "rloo", "--resume", str(run), "--iterations", "2")
    assert len(rows_of(run)) == 3
    assert "note: this run was made" not in capsys.readouterr().out
    command(monkeypatch, "sgd", "--resume", str(run), "--iterations", "3")
    assert "made by recipes-rloo, and goes on by recipes-sgd" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="rloo is for --algo grpo"):
        command(monkeypatch, "rloo", *SMALL, "--out", str(tmp_path / "other"))


@pytest.mark.parametrize("words, code", [
    ([], 0), (["--help"], 0), (["ppo"], "There is no recipe ppo.")])
def test_the_names_of_all_recipes_are_shown(words, code, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        command(monkeypatch, *words)
    assert stop.value.code == code
    shown = capsys.readouterr().out
    for name in recipes.RECIPES:
        assert f"\n{name} " in "\n" + shown


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match="pip install peft"):
        command(monkeypatch, "lora", *SMALL)


ENVIRONMENT_AND_MAIN = """
import envs, ragen_mini as rm

class Short(envs.FrozenLake):
    actions = envs.FrozenLake.actions

rm.main()  # without a guard
"""


def test_a_script_may_hold_the_environment_that_it_trains(monkeypatch, tmp_path, capsys):
    """It is not run again to find the class: that would train once more, inside of the first."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(ENVIRONMENT_AND_MAIN)
    words = ["./mine.py", *SMALL, "--env", "mine.py:Short", "--out", "run"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path("./mine.py", run_name="__main__")
    assert capsys.readouterr().out.count("tiny learns Short") == 1
