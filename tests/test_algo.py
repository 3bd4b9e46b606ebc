"""Advantages, filter, losses and per-token quantities, against slow loops, hand-worked numbers and torch's own."""
import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import envs
import ragen_mini as rm
from conftest import equal, random_llama


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


def test_the_example_of_the_docstrings():
    """Two messages, two answers: the tables of collate and gae."""
    traj = rm.Trajectory(None, 0, 10)
    traj.append([1, 2], sampled=False)
    traj.append([11], True, -0.5)
    traj.append([12], True, -0.5)
    traj.append([3], sampled=False)
    traj.append([13], True, -0.5)
    traj.reward[-1] = 1.0
    batch = rm.collate([traj], "cpu")
    assert batch["inputs"].tolist() == [[1, 2, 11, 12, 3]] and batch["targets"].tolist() == [[2, 11, 12, 3, 13]]
    assert batch["old_logp"].tolist() == [[0, -0.5, -0.5, 0, -0.5]]
    assert batch["mask"].int().tolist() == [[0, 1, 1, 0, 1]] and batch["reward"].tolist() == [[0, 0, 0, 0, 1]]
    adv, ret = rm.gae(batch["reward"], torch.tensor([[9, 0.2, 0.3, 9, 0.6]]), batch["mask"], 1.0, 1.0)
    assert adv[0].tolist() == pytest.approx([0, 0.8, 0.7, 0, 0.4]) and ret[0].tolist() == pytest.approx([0, 1, 1, 0, 1])


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


def test_grpo_compares_within_the_group():
    """Two groups with different means and spreads: over the whole batch, or over the wrong dimension, all would differ."""
    R = torch.tensor([[0.0, 0, 0, 1], [10, 10, 10, 12]])
    adv = rm.grpo_advantages(R)
    assert adv.tolist()[0] == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-4)
    assert adv.tolist()[1] == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-4)
    assert rm.grpo_advantages(R, "mean").tolist()[1] == pytest.approx([-0.5, -0.5, -0.5, 1.5])


def test_the_bandit_paradox_by_enumeration():
    """One risky pull among 16, paid in a quarter of the cases: divided by the std its mean advantage is negative, else positive."""
    def expected(norm):
        paid, unpaid = (rm.grpo_advantages(torch.tensor([[0.15] * 15 + [x]]), norm)[0, 15].item() for x in (1.0, 0.0))
        return 0.25 * paid + 0.75 * unpaid
    assert expected("std") == pytest.approx(-3.75 / 2, abs=1e-3)
    assert expected("mean") == pytest.approx(15 / 16 * (0.25 - 0.15), abs=1e-6)
    for x, said in ((1.0, "A =  0.797 / 0.2125 =  3.75\n"), (0.0, "A = -0.141 / 0.0375 = -3.75\n")):
        R = np.array([0.15] * 15 + [x])
        off, std = x - R.mean(), R.std(ddof=1)
        assert said == f"A = {off:6.3f} / {std:.4f} = {off / std:5.2f}\n" and said in rm.grpo_advantages.__doc__


@pytest.mark.parametrize("value", [0.0, 0.3, -0.1, 10.9, 0.15])
@pytest.mark.parametrize("n", [2, 3, 16])
def test_grpo_advantages_of_equal_returns_are_zero(value, n):
    """Exactly, also where the mean is not: 16 times 10.9 has a float32 std of 1e-6, and 1e-6 / 1e-6 is no signal."""
    assert (rm.grpo_advantages(torch.full((1, n), value)) == 0).all()


def test_filter_keeps_the_most_uncertain_prompts():
    R = torch.tensor([[0.0, 0, 0, 0], [0, 1, 0, 1], [5, 5, 5, 5.2], [0, 10, 0, 10]])
    assert rm.uncertainty_filter(R, 0.25).tolist() == [3]
    assert rm.uncertainty_filter(R, 0.5).tolist() == [3, 1]
    assert rm.uncertainty_filter(R, 0.75).tolist() == [3, 1, 2]
    assert rm.uncertainty_filter(R, 1.0).tolist() == [3, 1, 2, 0]
    assert rm.uncertainty_filter(R, 0.01).tolist() == [3], "at least one"
    assert rm.uncertainty_filter(R, 0.7).tolist() == [3, 1], "2.8 are two: no more than the share"


def test_filter_sees_raw_returns():
    """After group normalisation all spreads are equal but for rounding, and the two largest would not be found."""
    spreads = torch.tensor([300.0, 100, 800, 500, 200, 700, 400, 600])
    R = spreads[:, None] * torch.tensor([0.0, 1, 0, 1])
    for shift in range(8):
        expected = [(2 + shift) % 8, (5 + shift) % 8]
        assert rm.uncertainty_filter(R.roll(shift, 0), 0.25).tolist() == expected


def test_filter_asks_how_far_returns_differ_not_how_high_they_are():
    """Eq. 7: a number added to all returns of a group changes nothing. And U is their std: neither range nor mean deviation."""
    one_of_eight, half, half_but_less = [0.0] * 7 + [4], [0.0, 3] * 4, [0.0, 2.2] * 4  # their std: 1.32, 1.5, 1.1
    R = torch.tensor([one_of_eight, half, half_but_less])
    for height in torch.cartesian_prod(*[torch.tensor([-20.0, 0, 20])] * 3):
        assert rm.uncertainty_filter(R + height[:, None], 1.0).tolist() == [1, 0, 2]


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


@pytest.fixture(scope="module")
def played(llama, tok):
    """Two groups of four; the second one stops after two turns, so that lengths differ. A random model never answers
    validly, so the returns are dealt out."""
    trajs = []
    for group, max_turns in enumerate((4, 2)):
        players = SimpleNamespace(policy=llama, tok=tok)
        trajs += rm.rollout(players, [300 + group], 4, config(max_turns=max_turns), group)
    for k, (traj, bonus) in enumerate(zip(trajs, [0, 0, 0, 1, 0.3, 2, 0, 0.3])):
        traj.group = k // 4
        traj.reward[-1] += 2 * bonus
    return trajs


@pytest.fixture
def trajs(played):
    return copy.deepcopy(played)


def full_logits(model, traj, temperature=1.0):
    """A plain forward pass over one whole trajectory: logits (n,V) and tokens (n,) of what the model wrote."""
    ids = torch.tensor([traj.ids])
    written = [t for t, mine in enumerate(traj.mask) if mine]
    logits = model(input_ids=ids).logits[0, [t - 1 for t in written]] / temperature
    return logits, ids[0, written]


@pytest.fixture
def models(llama, tok, cfg):
    """The policy and a critic with learning rate 0, so that every gradient is of the same weights."""
    cfg.algo = "ppo"
    critic = rm.load_models(cfg).critic
    policy = copy.deepcopy(llama)
    optimizer = torch.optim.SGD([{"params": policy.parameters()}, {"params": critic.parameters()}], lr=0.0)
    return rm.Models(policy, critic, None, optimizer, tok)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logp_and_entropy_are_categoricals(llama, cfg, trajs, temperature):
    cfg.temperature = temperature
    logp, entropy = rm.token_logps(llama, rm.collate(trajs, "cpu"), cfg)
    truth = [full_logits(llama, traj, temperature) for traj in trajs]
    choice = torch.distributions.Categorical(logits=torch.cat([logits for logits, _ in truth]))
    assert torch.allclose(logp, choice.log_prob(torch.cat([tokens for _, tokens in truth])), atol=1e-4)
    assert torch.allclose(entropy, choice.entropy(), atol=1e-4)


def test_values_are_of_the_context_before_the_token_and_flat(models, trajs):
    value = rm.token_values(models.critic, rm.collate(trajs, "cpu"))
    assert value.shape == (sum(sum(traj.mask) for traj in trajs),), "(n,1) would broadcast against (n,)"
    sixth = [t for t, mine in enumerate(trajs[0].mask) if mine][5]
    alone = models.critic(input_ids=torch.tensor([trajs[0].ids[:sixth]])).logits[0, -1, 0]
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
    cfg.max_new_tokens, cfg.temperature = 24, 1.5
    trajs = rm.rollout(SimpleNamespace(policy=llama, tok=tok), [300, 301, 302], 4, cfg, 0)
    assert len({turn["tokens"] for traj in trajs for turn in traj.turns}) > 2, "else the test shows nothing"
    for traj in trajs:
        with torch.no_grad():
            logits, tokens = full_logits(llama, traj, 1.5)
        truth = torch.distributions.Categorical(logits=logits)
        old_logp = torch.tensor([logp for logp, mine in zip(traj.old_logp, traj.mask) if mine])
        assert torch.allclose(truth.log_prob(tokens), old_logp, atol=1e-4)
        assert truth.entropy().sum().item() == pytest.approx(traj.entropy, rel=1e-4)


def test_micro_batches_cover_every_row_once_and_bound_the_padding(trajs, monkeypatch):
    monkeypatch.setattr(rm, "MICRO_TOKENS", 300)
    batch, covered = rm.collate(trajs, "cpu"), []
    for rows, part in rm.micro_batches(batch, range(len(trajs))):
        assert part["inputs"].numel() <= 300 or len(rows) == 1
        assert part["inputs"].shape == part["mask"].shape == (len(rows), max(len(trajs[row].ids) for row in rows) - 1)
        covered += rows
    assert sorted(covered) == list(range(len(trajs))) and covered != sorted(covered)


# ------------------------------------------------------------------------------ the gradient of a whole update
def gradient_of_update(models, trajs, cfg):  # -> (steps, weights): what the optimizer was given in every step; batch
    seen = []

    class Spy(torch.optim.SGD):
        def step(self):
            weights = [weight for group in self.param_groups for weight in group["params"]]
            seen.append(torch.cat([weight.grad.flatten() for weight in weights]))
    parts = [part for part in (models.policy, models.critic) if part is not None]
    models.optimizer = Spy([{"params": part.parameters()} for part in parts], lr=0.0)
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    rm.updates(batch, models, cfg, 0)
    return torch.stack(seen), batch


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_micro_batched_gradient_is_the_whole_batchs(models, cfg, trajs, algo, monkeypatch):
    cfg.algo, cfg.rollouts, cfg.update_size, found = algo, 4, len(trajs), []
    if algo == "grpo":
        models.critic = None
    for limit in (10 ** 9, 300):
        monkeypatch.setattr(rm, "MICRO_TOKENS", limit)
        found.append(gradient_of_update(models, trajs, cfg)[0])
    assert found[0].abs().max() > 1e-4 and torch.allclose(*found, atol=1e-5)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.5])
def test_the_gradient_is_that_of_a_mean_over_the_models_tokens(models, cfg, trajs, monkeypatch, entropy_coef):
    """Lengths differ, and the truth is a plain loop: dividing by rows times columns, pads and all, would shrink it."""
    monkeypatch.setattr(rm, "MAX_GRAD_NORM", 1e9)
    models.critic, cfg.algo, cfg.rollouts, cfg.update_size, cfg.entropy_coef = None, "grpo", 4, len(trajs), entropy_coef
    (found,), batch = gradient_of_update(models, trajs, cfg)
    assert len({len(traj.ids) for traj in trajs}) > 1
    total, tokens = 0.0, 0
    for row, traj in enumerate(trajs):
        logits, written = full_logits(models.policy, traj)
        adv = batch["adv"][row][batch["mask"][row]]
        logp = logits.log_softmax(-1)[torch.arange(len(written)), written]
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        total, tokens = total - (adv * logp + entropy_coef * entropy).sum(), tokens + len(written)
    models.policy.zero_grad()
    (total / tokens).backward()
    truth = torch.cat([weight.grad.flatten() for weight in models.policy.parameters()])
    assert truth.abs().max() > 1e-3 and torch.allclose(found, truth, atol=1e-4 * truth.abs().max())


def test_the_critics_gradient_is_that_of_the_mean_squared_error(models, cfg, trajs, monkeypatch):
    """Half of it, over the model's tokens; by plain passes over one episode at a time."""
    monkeypatch.setattr(rm, "MAX_GRAD_NORM", 1e9)
    cfg.rollouts, cfg.update_size = 4, len(trajs)
    (found,), batch = gradient_of_update(models, trajs, cfg)
    total, tokens = 0.0, 0
    for row, traj in enumerate(trajs):
        before = [t - 1 for t, own in enumerate(traj.mask) if own]
        forecast = models.critic(input_ids=torch.tensor([traj.ids])).logits[0, before, 0]
        total, tokens = total + ((forecast - batch["ret"][row][batch["mask"][row]]) ** 2).sum() / 2, tokens + len(before)
    models.critic.zero_grad()
    (total / tokens).backward()
    truth = torch.cat([weight.grad.flatten() for weight in models.critic.parameters()])
    found = found[-len(truth):]
    assert truth.abs().max() > 1e-3 and torch.allclose(found, truth, atol=1e-4 * truth.abs().max())


def test_adam_is_plain(models, cfg):
    """No decay, and PyTorch's defaults: some findings turn on Adam's memory."""
    adam = rm.make_optimizer(models, cfg)
    assert type(adam) is torch.optim.Adam and [group["lr"] for group in adam.param_groups] == [cfg.lr, cfg.critic_lr]
    for group in adam.param_groups:
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 0)


def test_a_share_is_not_rounded_down_by_floating_point():
    assert len(rm.uncertainty_filter(torch.rand(100, 2), 0.29)) == 29, "0.29 * 100 is 28.999..."


def test_grpo_compares_within_groups_ppo_all(cfg):
    R = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert rm.nothing_to_compare(R, rm.replace(cfg, algo="grpo"))
    assert not rm.nothing_to_compare(R, rm.replace(cfg, algo="ppo"))


def test_every_step_has_its_own_gradient(models, cfg, trajs, monkeypatch):
    """Learning rate 0, the same trajectories three times: without zero_grad the second gradient would be twice the first."""
    monkeypatch.setattr(rm, "MAX_GRAD_NORM", 1e9)  # cut to one length, both would look alike
    cfg.rollouts, cfg.update_size, cfg.epochs = 4, len(trajs), 3
    grads, _ = gradient_of_update(models, trajs, cfg)
    assert len(grads) == 3 and torch.allclose(grads[0], grads[1], atol=1e-5) and torch.allclose(grads[0], grads[2], atol=1e-5)


def test_better_episodes_become_likelier(models, cfg, trajs):
    """One step of gradient descent by hand: the objective sum A log pi rises. (A wrong sign of anything lowers it.)"""
    cfg.rollouts, cfg.algo, cfg.update_size, models.critic = 4, "grpo", len(trajs), None
    models.optimizer = torch.optim.SGD(models.policy.parameters(), lr=0.05)
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    def objective():
        return (batch["adv"] * rm.on_grid(lambda part: rm.token_logps(models.policy, part, cfg)[0], batch)).sum()
    before = objective()
    rm.updates(batch, models, cfg, 0)
    assert objective() > before + 0.01


def test_ratios_are_1_before_the_first_step_and_then_what_plain_passes_say(models, cfg, trajs, monkeypatch):
    cfg.algo, cfg.rollouts, cfg.update_size, cfg.epochs, models.critic = "grpo", 4, len(trajs), 2, None
    models.optimizer = torch.optim.SGD(models.policy.parameters(), lr=0.05)
    seen = []
    policy_loss = rm.policy_loss

    def spy(logp, entropy, old_logp, *rest):
        seen[-1] += (logp - old_logp).abs().tolist()
        return policy_loss(logp, entropy, old_logp, *rest)
    monkeypatch.setattr(rm, "policy_loss", spy)
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    for _ in range(2):
        seen.append([])
        rm.add_gradients(batch, range(len(trajs)), models, cfg)
        rm.take_step(models)
    before, after = seen
    assert max(before) < 1e-4 and max(after) > 1e-3
    gaps = []
    monkeypatch.undo()
    seen.append([])
    monkeypatch.setattr(rm, "policy_loss", spy)
    rm.add_gradients(batch, range(len(trajs)), models, cfg)
    for traj in trajs:
        logits, tokens = full_logits(models.policy, traj)
        logp = torch.distributions.Categorical(logits=logits).log_prob(tokens)
        gaps += (logp - torch.tensor(traj.old_logp)[torch.tensor(traj.mask)]).abs().tolist()
    assert sorted(seen[2]) == pytest.approx(sorted(gaps), abs=1e-4)


def gradients(models):
    found = [weight.grad.flatten() for weight in models.policy.parameters()]
    models.optimizer.zero_grad()
    return torch.cat(found)


def test_gradients_of_shares_add_up_by_their_tokens(models, cfg, trajs):
    """As when several processes share an update: each has some of the rows."""
    cfg.algo, cfg.rollouts, models.critic = "grpo", 4, None
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    rm.add_gradients(batch, range(8), models, cfg)
    whole = gradients(models)
    added = 0.0
    for rows in ([0, 5, 6], [1, 2, 3, 4, 7]):
        rm.add_gradients(batch, rows, models, cfg)
        added = added + gradients(models) * batch["mask"][rows].sum() / batch["mask"].sum()
    assert whole.abs().max() > 1e-4 and torch.allclose(added, whole, atol=1e-5)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_step_shortens_each_gradient_on_its_own_and_uses_its_own_rate(models, cfg, algo):
    """By hand, with plain gradient descent: gradients of length 10 become 1, shorter ones stay as they are."""
    if algo == "grpo":
        models.critic = None
    networks = [network for network in (models.policy, models.critic) if network]
    models.optimizer = torch.optim.SGD([{"params": network.parameters(), "lr": lr}
                                        for network, lr in zip(networks, (0.5, 0.1))])
    before = [copy.deepcopy(network.state_dict()) for network in networks]
    for network, length in zip(networks, (10.0, 0.3)):
        first, *others = network.parameters()
        for weight in (first, *others):
            weight.grad = torch.zeros_like(weight)
        first.grad[0, 0] = length
    assert rm.take_step(models) == pytest.approx(10.0), "the norm before it was shortened"
    for network, old, moved in zip(networks, before, (0.5 * 1.0, 0.1 * 0.3)):
        name, first = next(network.named_parameters())
        change = old[name] - first.detach()
        assert change[0, 0].item() == pytest.approx(moved, abs=1e-5)
        assert change.flatten()[1:].abs().max() == 0 and first.grad is None


def test_own_rates_for_policy_and_critic(models, cfg):
    cfg.lr, cfg.critic_lr = 3e-4, 7e-3
    policy, critic = rm.make_optimizer(models, cfg).param_groups
    for group, network, lr in ((policy, models.policy, 3e-4), (critic, models.critic, 7e-3)):
        assert group["lr"] == lr and [id(weight) for weight in group["params"]] == [id(w) for w in network.parameters()]
    models.critic = None
    only, = rm.make_optimizer(models, cfg).param_groups
    assert only["lr"] == 3e-4


def test_a_number_that_is_not_finite_never_reaches_the_weights(models, cfg, trajs):
    cfg.rollouts = 4
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    before = copy.deepcopy(models.policy.state_dict())
    batch["adv"][0, batch["mask"][0].nonzero()[0]] = float("nan")
    with pytest.raises(envs.UserError, match="not finite"):
        rm.updates(batch, models, cfg, 0)
    assert equal(dict(before), dict(models.policy.state_dict()))


def test_entropy_with_forbidden_tokens():
    """A model may give some tokens no chance at all: log 0 is -inf, and 0 * -inf is nan."""
    logp = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).log()
    assert rm.entropy_of(logp).tolist() == pytest.approx([math.log(2), 0.0], abs=1e-6)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_the_advantage_stands_on_its_own_token(models, cfg, trajs, algo):
    """Against a loop over one trajectory's lists, before any tensor: rewards to come minus value, or the group's number."""
    cfg.rollouts, cfg.algo = 4, algo
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    truth = []
    for row, traj in enumerate(trajs):
        for t, mine in enumerate(traj.mask):
            if mine:
                value = batch["value"][row, t - 1].item() if algo == "ppo" else 0.0
                group = [other.R for other in trajs if other.group == traj.group]
                by_group = (traj.R - np.mean(group)) / (np.std(group, ddof=1) + 1e-6) if np.std(group) > 1e-4 else 0.0
                truth.append(sum(traj.reward[t:]) - value if algo == "ppo" else by_group)
    if algo == "ppo":
        assert batch["ret"][batch["mask"]].tolist() == pytest.approx(
            [sum(traj.reward[t:]) for traj in trajs for t, mine in enumerate(traj.mask) if mine], abs=1e-4)
        truth = (np.array(truth) - np.mean(truth)) / np.std(truth)
    assert batch["adv"][batch["mask"]].tolist() == pytest.approx(list(truth), abs=1e-3)
    assert (batch["adv"][~batch["mask"]] == 0).all()


def test_kl_penalty_in_the_reward(models, cfg, trajs, llama):
    """GRPO: every token bears the penalty that is still ahead of it, on top of the group's advantage."""
    cfg.algo, cfg.rollouts, cfg.kl_coef = "grpo", 4, 0.1
    models.ref = copy.deepcopy(llama)
    with torch.no_grad():
        models.ref.lm_head.weight.mul_(0.9)
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    group = rm.grpo_advantages(torch.tensor([t.R for t in trajs]).view(-1, 4)).flatten()
    for b, traj in enumerate(trajs):
        where = batch["mask"][b].nonzero()[:, 0].tolist()
        logits, tokens = full_logits(models.ref, traj)
        ref_logp = torch.distributions.Categorical(logits=logits).log_prob(tokens).tolist()
        k1 = [batch["old_logp"][b, t].item() - x for t, x in zip(where, ref_logp)]
        for i, t in enumerate(where):
            assert batch["adv"][b, t].item() == pytest.approx(group[b].item() - 0.1 * sum(k1[i:]), abs=1e-3)
    assert (batch["adv"][~batch["mask"]] == 0).all()


def test_kl_penalty_costs_ppo_reward(models, cfg, trajs, llama):
    """The returns to come of PPO: rewards minus kl_coef times k1, from the token on."""
    cfg.rollouts, cfg.kl_coef, models.ref = 4, 0.1, copy.deepcopy(llama)
    with torch.no_grad():
        models.ref.lm_head.weight.mul_(0.9)
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    for b in range(len(trajs)):
        to_come = (batch["reward"] - 0.1 * batch["kl"])[b].flip(0).cumsum(0).flip(0)
        mask = batch["mask"][b]
        assert torch.allclose(batch["ret"][b][mask], to_come[mask], atol=1e-3)
    assert batch["kl"].abs().max() > 0.01


def test_ppo_advantages_are_white_and_scoring_changes_no_input(models, cfg, trajs):
    cfg.rollouts = 4
    before = [(list(t.ids), list(t.mask), list(t.reward), list(t.old_logp)) for t in trajs]
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
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


# ----------------------------------------------------------------------- seams; what only a GPU would show: autocast
def test_advantages_of_ones_own_are_used_under_their_name(models, cfg, trajs, monkeypatch):
    with pytest.raises(envs.UserError, match="no algo mine: ppo, .*, or run its script"):
        rm.replace(cfg, algo="mine")
    assert rm.replace(cfg, algo="mine", play=3).algo == "mine", "who only looks needs no advantages"
    monkeypatch.setitem(rm.BY_GROUP, "mine", lambda R, norm: 2 * R)
    cfg = rm.replace(cfg, algo="mine", rollouts=4)
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    for row, traj in enumerate(trajs):
        assert equal(batch["adv"][row], 2 * traj.R * batch["mask"][row])
    assert "value" not in batch
    # one number a group, one in all, turned as a view and as a new tensor, flat: nothing is silent
    for wrong in (lambda R: R.mean(1)), torch.mean, torch.t, (lambda R: R.T.contiguous()), torch.flatten:
        monkeypatch.setitem(rm.BY_GROUP, "mine", lambda R, norm: wrong(R))
        with pytest.raises(AssertionError, match="a function in BY_GROUP must return an advantage for each episode"):
            rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    monkeypatch.delitem(rm.BY_GROUP, "mine")
    monkeypatch.setitem(rm.BY_CRITIC, "mine", lambda reward, value, mask, gamma, lam: (value ** 3, value + 5))
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    assert equal(batch["ret"], batch["value"] + 5)
    adv = batch["value"][batch["mask"]] ** 3
    assert torch.allclose(batch["adv"][batch["mask"]], (adv - adv.mean()) / adv.std(correction=0), atol=1e-4)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_filter_of_ones_own_may_keep_nothing(models, cfg, trajs, monkeypatch, algo):
    monkeypatch.setattr(rm, "uncertainty_filter", lambda R, keep: torch.arange(0))
    assert rm.learn(trajs, models, rm.replace(cfg, algo=algo, rollouts=4), 0) == ({}, [])


def test_learn_hands_on_gradients_of_ones_own(models, cfg, trajs):
    """After its filter: two groups of four are three updates of at most three, those of one group two."""
    for keep, sizes in ((1.0, [3, 3, 2]), (0.5, [3, 1])):
        seen = []
        cfg = rm.replace(cfg, algo="grpo", rollouts=4, keep=keep, update_size=3)
        rm.learn(trajs, models, cfg, 0, gradients=lambda batch, rows, *rest: seen.append(len(rows)) or {})
        assert seen == sizes


def test_only_a_device_that_rounds_to_bf16_may_repeat_log_probs_roughly(cfg, monkeypatch):
    """A GPU in the machine must not loosen the check for --device cpu."""
    cfg = rm.replace(cfg, env="bandit", prompts=1, rollouts=2)
    models = rm.load_models(cfg)
    trajs = rm.rollout(models, [300], 2, cfg, 0)
    for traj in trajs:
        traj.old_logp = [logp + 0.01 * own for logp, own in zip(traj.old_logp, traj.mask)]
    monkeypatch.setattr(rm, "autocast", torch.autocast("cuda", torch.bfloat16, enabled=False))
    with pytest.raises(envs.UserError, match="differ by 0.01 in"):
        rm.check_ratios(trajs, models, cfg)
    monkeypatch.setattr(rm, "autocast", torch.autocast("cpu", torch.bfloat16))
    rm.check_ratios(trajs, models, cfg)


@pytest.mark.parametrize("beta2, step, in_all", [(0.999, 3.16, 31.6), (0.9, 0.316, 6.16)])
@pytest.mark.parametrize("spike", [0.1, 1.0])
def test_after_a_calm_adam_makes_one_step_of_any_spike(beta2, step, in_all, spike):
    """Adam after a calm: (1 - beta1) / sqrt(1 - beta2) learning rates, however long the gradient is. Momentum goes on:
    the k-th step after it is (beta1 / sqrt(beta2))^k of that."""
    weight = torch.zeros(1, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=1.0, betas=(0.9, beta2))
    weight.grad = torch.full((1,), 1e-9)
    adam.step()
    adam.state[weight]["step"] += 10_000  # a long calm: the averages are no longer corrected for their start
    before = weight.item()
    weight.grad = torch.full((1,), spike)
    adam.step()
    assert before - weight.item() == pytest.approx(step, rel=0.01)
    assert step / (1 - 0.9 / beta2 ** 0.5) == pytest.approx(in_all, rel=0.02)
    for _ in range(200):
        weight.grad = torch.zeros(1)
        adam.step()
    assert before - weight.item() == pytest.approx(in_all, rel=0.02)
