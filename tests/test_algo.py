"""Advantages, filter, losses and per-token quantities, against slow loops, hand-worked numbers and torch's own."""
import copy
import math

import pytest
import torch

import envs
import ragen_mini as rm
from conftest import random_llama


def config(**options):
    return rm.Config(model="none", device="cpu", max_new_tokens=8, iterations=1, lr=1e-3, critic_lr=1e-3, **options)


def some_batch(seed=0, B=3, T=17):
    """Random rewards and values on random masks, with environment tokens in between and at the ends."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=g) < 0.5
    mask[:, 3] = True
    return torch.randn(B, T, generator=g) * mask, torch.randn(B, T, generator=g), mask


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0)])
def test_gae_is_the_double_loop_over_the_models_tokens(gamma, lam):
    """A_t = sum_l (gamma lam)^l delta_t+l, where t counts only tokens that the model wrote."""
    reward, value, mask = some_batch()
    value_seen = torch.where(mask, value, torch.tensor(float("nan")))  # the environment's values must not matter
    adv, ret = rm.gae(reward, torch.nan_to_num(value_seen, nan=123.0), mask, gamma, lam)
    for b in range(len(mask)):
        steps = [t for t in range(mask.shape[1]) if mask[b, t]]
        for i, t in enumerate(steps):
            expected = 0.0
            for l, u in enumerate(steps[i:]):
                after = value[b, steps[i + l + 1]] if i + l + 1 < len(steps) else 0.0
                expected += (gamma * lam) ** l * (reward[b, u] + gamma * after - value[b, u])
            assert adv[b, t] == pytest.approx(float(expected), abs=1e-5)
            assert ret[b, t] == pytest.approx(float(expected + value[b, t]), abs=1e-5)
    assert (adv[~mask] == 0).all() and (ret[~mask] == 0).all()


def test_gae_without_critic_is_reward_to_go():
    reward, _, mask = some_batch(1)
    adv, _ = rm.gae(reward, torch.zeros_like(reward), mask, 1.0, 1.0)
    to_go = reward.flip(1).cumsum(1).flip(1)
    assert torch.allclose(adv[mask], to_go[mask], atol=1e-5)


def test_grpo_advantages_by_hand():
    """(0, 0, 0, 1): mean 1/4, sample std 1/2."""
    adv = rm.grpo_advantages(torch.tensor([[0.0, 0, 0, 1]]))
    assert adv[0].tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-4)
    mean_only = rm.grpo_advantages(torch.tensor([[0.0, 0, 0, 1]]), "mean")
    assert mean_only.tolist()[0] == pytest.approx([-0.25, -0.25, -0.25, 0.75])


@pytest.mark.parametrize("value", [0.0, 0.3, -0.1, 10.9, 0.15])
@pytest.mark.parametrize("n", [2, 3, 16])
def test_grpo_advantages_of_equal_returns_are_zero(value, n):
    """Exactly, also where the mean is not: 16 times 10.9 has a float32 std of 1e-6, and 1e-6 / 1e-6 is no signal."""
    assert (rm.grpo_advantages(torch.full((1, n), value)) == 0).all()


def test_filter_keeps_the_most_uncertain_prompts():
    R = torch.tensor([[0.0, 0, 0, 0], [0, 1, 0, 1], [5, 5, 5, 5.2], [0, 10, 0, 10]])
    assert rm.uncertainty_filter(R, 0.25).tolist() == [3]
    assert rm.uncertainty_filter(R, 0.5).tolist() == [1, 3]
    assert rm.uncertainty_filter(R, 0.75).tolist() == [1, 2, 3]
    assert rm.uncertainty_filter(R, 1.0).tolist() == [0, 1, 2, 3]
    assert rm.uncertainty_filter(R, 0.01).tolist() == [3], "at least one"


def test_filter_sees_raw_returns():
    """After group normalisation every live group has std 1 and the order would be lost: it must not be invariant."""
    R = torch.tensor([[0.0, 1, 0, 1], [0, 10, 0, 10]])
    assert rm.uncertainty_filter(R, 0.5).tolist() == [1] and rm.uncertainty_filter(R.flip(0), 0.5).tolist() == [0]


def test_policy_gradient_at_ratio_one_is_reinforce():
    """d/d theta of the loss at the old policy = -A d log pi (minus the entropy bonus, which is switched off here)."""
    logits, actions = torch.randn(5, 7, requires_grad=True), torch.tensor([0, 3, 6, 2, 2])
    adv = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    logp = logits.log_softmax(-1)[torch.arange(5), actions]
    loss, clipped = rm.policy_loss(logp, torch.zeros(5), logp.detach(), adv, config(entropy_coef=0.0))
    ours, = torch.autograd.grad(loss.mean(), logits, retain_graph=True)
    reinforce, = torch.autograd.grad(-(adv * logp).mean(), logits)
    assert torch.allclose(ours, reinforce, atol=1e-7) and not clipped.any()


@pytest.mark.parametrize("ratio, adv, starpo, starpo_s", [
    (1.25, 1.0, False, True),   # between 1.2 and 1.28: only clip-higher lets it pass
    (1.30, 1.0, False, False),  # above both
    (1.30, -1.0, True, True),   # a bad token that became likelier is always pushed back
    (0.75, -1.0, False, False),  # below 1 - 0.2, the same for both
    (0.75, 1.0, True, True),
    (1.10, 1.0, True, True)])
def test_clip_edges(ratio, adv, starpo, starpo_s):
    """Does the token still have a gradient?"""
    for flags, alive in ((False, starpo), (True, starpo_s)):
        logp = torch.tensor([math.log(ratio)], requires_grad=True)
        loss, clipped = rm.policy_loss(logp, torch.zeros(1), torch.zeros(1), torch.tensor([adv]),
                                       config(starpo_s=flags, rollouts=2))
        loss.sum().backward()
        assert (logp.grad.abs().item() > 0) == alive and clipped.item() != alive
        assert loss.item() == pytest.approx(-min(ratio * adv, min(max(ratio, 0.8), 1.28 if flags else 1.2) * adv))


def test_entropy_bonus_lowers_the_loss():
    zero = torch.zeros(2)
    loss, _ = rm.policy_loss(zero, torch.tensor([1.0, 2.0]), zero, zero, config(entropy_coef=0.1))
    assert loss.tolist() == pytest.approx([-0.1, -0.2])


def test_value_loss_by_hand():
    """Old value 0, return 2. At 0.3: plain. At 1: clipped to 0.5, the worse error counts."""
    loss = rm.value_loss(torch.tensor([0.3, 1.0]), torch.zeros(2), torch.full((2,), 2.0))
    assert loss.tolist() == pytest.approx([0.5 * 1.7 ** 2, 0.5 * 1.5 ** 2])


@pytest.fixture
def trajs(llama, tok, cfg):
    return rm.rollout(llama, tok, "frozenlake", [300, 301], 4, cfg, 0, 1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logp_and_entropy_are_categoricals(llama, tok, cfg, trajs, temperature):
    cfg.temperature = temperature
    batch = rm.collate(trajs, "cpu")
    logp, entropy = rm.token_logps(llama, batch, cfg)
    logits = llama(input_ids=batch["ids"]).logits[:, :-1][batch["mask"]] / temperature
    truth = torch.distributions.Categorical(logits=logits)
    assert torch.allclose(logp, truth.log_prob(batch["ids"][:, 1:][batch["mask"]]), atol=1e-4)
    assert torch.allclose(entropy, truth.entropy(), atol=1e-4)


def test_values_are_of_the_context_before_the_token_and_flat(cfg, trajs):
    cfg.algo = "ppo"
    critic = rm.load_models(cfg)[0]["critic"]
    batch = rm.collate(trajs, "cpu")
    value = rm.token_values(critic, batch, cfg)
    assert value.shape == (int(batch["mask"].sum()),), "(n,1) would broadcast against (n,)"
    b, t = batch["mask"].nonzero()[5].tolist()
    alone = critic(input_ids=batch["ids"][b:b + 1, :t + 1]).logits[0, -1, 0]
    assert value[5].item() == pytest.approx(alone.item(), abs=1e-5)


def test_chunks_change_neither_values_nor_gradient(llama, cfg, trajs, monkeypatch):
    batch, results = rm.collate(trajs, "cpu"), []
    for tokens in (10 ** 6, 7):  # of a chunk
        monkeypatch.setattr(rm, "CHUNK_LOGITS", tokens * llama.config.vocab_size)
        llama.zero_grad()
        logp, entropy = rm.token_logps(llama, batch, cfg)
        (logp.sum() + 0.1 * entropy.sum()).div(len(logp)).backward()
        results.append((logp, entropy, torch.cat([p.grad.flatten() for p in llama.parameters()])))
    llama.zero_grad()
    for whole, chunked in zip(*results):
        assert torch.allclose(whole, chunked, atol=1e-5)


@pytest.mark.parametrize("heads", [4, 2])  # 2: two query heads share one key head, as in SmolLM2 and Qwen2.5
def test_cached_rollout_against_a_fresh_full_forward(tok, cfg, heads):
    """Rows end their turns at different tokens, read observations of different lengths, leave the batch."""
    llama = random_llama(len(tok), num_key_value_heads=heads, tie_word_embeddings=True)
    trajs = rm.rollout(llama, tok, "frozenlake", [300, 301, 302], 4, cfg, 0, 1.5)
    assert len({turn["tokens"] for traj in trajs for turn in traj.turns}) > 3, "else the test shows nothing"
    for traj in trajs:
        batch = rm.collate([traj], "cpu")
        with torch.no_grad():
            logits = llama(input_ids=batch["ids"]).logits[:, :-1][batch["mask"]] / 1.5
        truth = torch.distributions.Categorical(logits=logits)
        logp = truth.log_prob(batch["ids"][:, 1:][batch["mask"]])
        assert torch.allclose(logp, batch["old_logp"][batch["mask"]], atol=1e-4)
        assert truth.entropy().sum().item() == pytest.approx(traj.entropy, rel=1e-4)


def test_micro_batches_cover_every_row_once_and_bound_the_padding(trajs, monkeypatch):
    monkeypatch.setattr(rm, "MICRO_TOKENS", 300)
    batch, seen = rm.collate(trajs, "cpu"), []
    for rows, part in rm.micro_batches(batch, torch.arange(len(trajs))):
        assert part["ids"].numel() <= 300 or len(rows) == 1
        assert part["ids"].shape[1] == max(len(trajs[row].ids) for row in rows) == part["mask"].shape[1] + 1
        seen += rows
    assert sorted(seen) == list(range(len(trajs))) and len(seen) > 1


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_micro_batched_gradient_is_the_whole_batchs(cfg, trajs, algo, monkeypatch):
    cfg.algo, cfg.rollouts, cfg.batch, grads = algo, 4, len(trajs), []
    for limit in (10 ** 9, 300):
        monkeypatch.setattr(rm, "MICRO_TOKENS", limit)
        policy, critic, *_ = rm.load_models(cfg)[0].values()
        seen = {}
        class Spy(torch.optim.SGD):
            def step(self):
                seen["grad"] = torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]])
        models = [policy] + ([critic] if critic is not None else [])
        optimizer = Spy([{"params": m.parameters()} for m in models], lr=0.0)
        batch = rm.score(trajs, None, critic, cfg)
        rm.update(batch, policy, critic, optimizer, cfg, 0)
        grads.append(seen["grad"])
    assert grads[0].abs().max() > 1e-4
    assert torch.allclose(grads[0], grads[1], atol=1e-5)


def test_kl_penalty_in_the_reward(cfg, trajs, llama):
    """GRPO: every token bears the penalty that is still ahead of it, on top of the group's advantage."""
    cfg.algo, cfg.rollouts, cfg.kl_coef = "grpo", 4, 0.1
    ref = copy.deepcopy(llama)
    with torch.no_grad():
        ref.lm_head.weight.mul_(0.9)
    batch = rm.score(trajs, ref, None, cfg)
    R = torch.tensor([t.R for t in trajs]).view(-1, 4)
    group = rm.grpo_advantages(R).flatten()
    for b, traj in enumerate(trajs):
        where = batch["mask"][b].nonzero()[:, 0].tolist()
        ref_logp = rm.token_logps(ref, rm.collate([traj], "cpu"), cfg)[0].tolist()
        k1 = [batch["old_logp"][b, t].item() - x for t, x in zip(where, ref_logp)]
        for i, t in enumerate(where):
            assert batch["adv"][b, t].item() == pytest.approx(group[b].item() - 0.1 * sum(k1[i:]), abs=1e-3)
    assert (batch["adv"][~batch["mask"]] == 0).all()


def test_ppo_advantages_are_white_and_scoring_changes_no_input(cfg, trajs):
    cfg.rollouts = 4
    critic = rm.load_models(cfg)[0]["critic"]
    before = [(list(t.ids), list(t.mask), list(t.reward), list(t.old_logp)) for t in trajs]
    batch = rm.score(trajs, None, critic, cfg)
    adv = batch["adv"][batch["mask"]]
    assert adv.mean().abs() < 1e-5 and abs(adv.std(correction=0) - 1) < 1e-4
    assert before == [(t.ids, t.mask, t.reward, t.old_logp) for t in trajs]


@pytest.mark.parametrize("p, n, low, high", [(0.5, 256, 0.4391, 0.5609), (0.0, 256, 0.0, 0.0148), (1.0, 256, 0.9852, 1.0)])
def test_wilson_interval(p, n, low, high):
    """Against the closed form's tabulated values."""
    assert envs.interval(p, n) == pytest.approx((low, high), abs=1e-3)


@pytest.mark.parametrize("n", [11, 20, 77, 100, 128])
def test_wilson_interval_holds_its_rate(n):
    """Rounding must not put 0 or 1 outside: error bars may not be negative."""
    for p in (0.0, 1.0):
        low, high = envs.interval(p, n)
        assert low <= p <= high
