"""Advantages, filter, losses, gradients: against slow loops, numbers on paper, and torch's own.

Then the models: how they are loaded, and how a step changes them.
"""
import copy
import math
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ragen_mini as rm
from conftest import equal, random_llama, refused, save
from support import device


def config(**options):
    settings = dict(model="none", device="cpu", max_new_tokens=8, iterations=1, lr=1e-3,
                    critic_lr=1e-3)
    return rm.Config(**settings | options)


# ------------------------------------------------------------------------------- advantages, filter
def some_batch(seed=0, B=3, T=17):
    """Random rewards and values, with tokens of the environment in between and at the ends."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=g) < 0.5
    mask[:, 3] = True
    return torch.randn(B, T, generator=g) * mask, torch.randn(B, T, generator=g), mask


def gae_by_loops(reward, value, mask, gamma, lam):  # of one trajectory -> {column: advantage}
    """A_t = sum_l (gamma lam)^l delta_t+l, where t counts only tokens that the model wrote."""
    steps = [t for t in range(len(mask)) if mask[t]]
    deltas = []
    for t, after in zip(steps, [*steps[1:], None]):
        next_value = 0.0 if after is None else value[after]
        deltas.append(float(reward[t] + gamma * next_value - value[t]))
    advantage = {}
    for i, t in enumerate(steps):
        advantage[t] = sum((gamma * lam) ** l * delta for l, delta in enumerate(deltas[i:]))
    return advantage


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0), (0.0, 0.5)])
def test_gae_is_the_double_loop_over_the_models_tokens(gamma, lam):
    reward, value, mask = some_batch()
    # Values before tokens of the environment must not matter.
    advantage, target = rm.gae(reward, torch.where(mask, value, 123.0), mask, gamma, lam)
    for b in range(len(mask)):
        for t, expected in gae_by_loops(reward[b], value[b], mask[b], gamma, lam).items():
            assert advantage[b, t] == pytest.approx(expected, abs=1e-5)
            assert target[b, t] == pytest.approx(expected + value[b, t].item(), abs=1e-5)
    assert (advantage[~mask] == 0).all() and (target[~mask] == 0).all()


def test_the_example_of_collate_and_gae():
    """Two messages and two answers: m1 m2 a1 a2 m3 a3."""
    traj = rm.Trajectory(None, 0, 10)
    traj.append([1, 2], sampled=False)
    traj.append([11], True, -0.5)
    traj.append([12], True, -0.5)
    traj.append([3], sampled=False)
    traj.append([13], True, -0.5)
    traj.reward[-1] = 1.0
    batch = rm.collate([traj], "cpu")
    assert batch["inputs"].tolist() == [[1, 2, 11, 12, 3]]
    assert batch["targets"].tolist() == [[2, 11, 12, 3, 13]]
    assert batch["old_logp"].tolist() == [[0, -0.5, -0.5, 0, -0.5]]
    assert batch["mask"].int().tolist() == [[0, 1, 1, 0, 1]]
    assert batch["reward"].tolist() == [[0, 0, 0, 0, 1]]
    value = torch.tensor([[9, 0.2, 0.3, 9, 0.6]])
    advantage, target = rm.gae(batch["reward"], value, batch["mask"], 1.0, 1.0)
    assert advantage[0].tolist() == pytest.approx([0, 0.8, 0.7, 0, 0.4])
    assert target[0].tolist() == pytest.approx([0, 1, 1, 0, 1])


def test_grpo_advantages_by_hand():
    """(0, 0, 0, 1): the mean is 1/4, the sample std 1/2. A second group, with another mean and
    another spread, shows that nothing is taken over the batch, or over the wrong dimension.
    """
    R = torch.tensor([[0.0, 0, 0, 1], [10, 10, 10, 12]])
    for group in rm.grpo_advantages(R).tolist():
        assert group == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-4)
    first, second = rm.grpo_advantages(R, "mean").tolist()
    assert first == pytest.approx([-0.25, -0.25, -0.25, 0.75])
    assert second == pytest.approx([-0.5, -0.5, -0.5, 1.5])


@pytest.mark.parametrize("value", [0.0, 0.3, -0.1, 10.9, 0.15])
@pytest.mark.parametrize("n", [2, 3, 16])
def test_grpo_advantages_of_equal_returns_are_zero(value, n):
    """Exactly, also where the mean is not: 16 times 10.9 has a float32 std of 1e-6, and 1e-6 / 1e-6
    is no signal.
    """
    assert (rm.grpo_advantages(torch.full((1, n), value)) == 0).all()


def test_filter_keeps_the_groups_whose_returns_differ_most():
    R = torch.tensor([[0.0, 0, 0, 0], [0, 1, 0, 1], [5, 5, 5, 5.2], [0, 10, 0, 10]])
    for keep, kept in ((0.25, [3]), (0.5, [3, 1]), (0.75, [3, 1, 2]), (1.0, [3, 1, 2, 0]),
                       (0.01, [3]),  # at least one
                       (0.7, [3, 1])):  # 2.8 are two: not more than the share
        assert rm.uncertainty_filter(R, keep).tolist() == kept
    assert len(rm.uncertainty_filter(torch.rand(100, 2), 0.29)) == 29, "0.29 * 100 is 28.999..."


def test_filter_sees_raw_returns():
    """After group normalisation all spreads are equal but for rounding, and the two largest would
    not be found.
    """
    spreads = torch.tensor([300.0, 100, 800, 500, 200, 700, 400, 600])
    R = spreads[:, None] * torch.tensor([0.0, 1, 0, 1])
    for shift in range(8):
        expected = [(2 + shift) % 8, (5 + shift) % 8]
        assert rm.uncertainty_filter(R.roll(shift, 0), 0.25).tolist() == expected


def test_filter_asks_how_far_returns_differ_not_how_high_they_are():
    """A number added to all returns of a group changes nothing. And U is their std, neither range
    nor mean deviation. Here the stds are 1.32, 1.5 and 1.1.
    """
    R = torch.tensor([[0.0] * 7 + [4], [0.0, 3] * 4, [0.0, 2.2] * 4])
    for height in torch.cartesian_prod(*[torch.tensor([-20.0, 0, 20])] * 3):
        assert rm.uncertainty_filter(R + height[:, None], 1.0).tolist() == [1, 0, 2]


@pytest.mark.parametrize("R, ppo, grpo", [
    ([[0, 0], [0, 0]], True, True),
    ([[0, 0], [1, 1]], False, True),
    ([[0, 0], [0, 1]], False, False),  # one group of two that differs is enough
    ([[0, 1], [5, 5]], False, False),
    ([[0] * 15 + [-0.1]] + [[0] * 16] * 7, False, False)])  # one malformed answer of 128
def test_what_cannot_be_compared(cfg, R, ppo, grpo):
    """GRPO compares within each group, PPO all episodes."""
    R = torch.tensor(R).float()
    assert bool(rm.nothing_to_compare(R, rm.replace(cfg, algo="ppo"))) == ppo
    assert bool(rm.nothing_to_compare(R, rm.replace(cfg, algo="grpo"))) == grpo
    malformed = rm.grpo_advantages(R)[0, -1]
    assert (malformed == 0) == bool((R[0] == R[0, 0]).all()), "as small a difference is a signal"


# ------------------------------------------------------------------------------------------- losses
def test_policy_gradient_at_ratio_one_is_reinforce():
    """d/d theta of the loss at the old policy is -A d log pi. (The entropy bonus is off here.)"""
    logits, actions = torch.randn(5, 7, requires_grad=True), torch.tensor([0, 3, 6, 2, 2])
    adv = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    logp = logits.log_softmax(-1)[torch.arange(5), actions]
    loss, clipped = rm.policy_loss(logp, torch.zeros(5), logp.detach(), adv,
                                   config(entropy_coef=0.0))
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
                                       config(starpo_s=flags))
        loss.sum().backward()
        assert (logp.grad.abs().item() > 0) == alive and clipped.item() != alive
        clipped_ratio = min(max(ratio, 0.8), 1.28 if flags else 1.2)
        assert loss.item() == pytest.approx(-min(ratio * adv, clipped_ratio * adv))


def test_value_loss_by_hand():
    """The old value is 0, the target 2. At 0.3 nothing is clipped. At 1 the value is clipped to
    0.5, whose error is worse and counts. At -0.8 its own error is worse than that of -0.5.
    """
    loss = rm.value_loss(torch.tensor([0.3, 1.0, -0.8]), torch.zeros(3), torch.full((3,), 2.0))
    assert loss.tolist() == pytest.approx([0.5 * 1.7 ** 2, 0.5 * 1.5 ** 2, 0.5 * 2.8 ** 2])


def test_entropy_with_forbidden_tokens():
    """A model may give some tokens no chance at all: log 0 is -inf, and 0 * -inf is nan."""
    logp = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).log()
    assert rm.entropy_of(logp).tolist() == pytest.approx([math.log(2), 0.0], abs=1e-6)


# ----------------------------------------------------------------- log-probs, values, micro-batches
@pytest.fixture(scope="module")
def played(llama, tok):
    """Two groups of four. The second one stops after two turns, so that lengths differ. A random
    model never answers validly, so some rewards are given away.
    """
    trajs = []
    players = SimpleNamespace(policy=llama, tok=tok)
    for group, max_turns in enumerate((4, 2)):
        trajs += rm.rollout(players, [300 + group], 4, config(max_turns=max_turns), group)
    for k, gift in enumerate([0, 0, 0, 2, 0.6, 4, 0, 0.6]):
        trajs[k].group = k // 4
        trajs[k].reward[-1] += gift
    return trajs


@pytest.fixture
def trajs(played):
    return copy.deepcopy(played)


def full_logits(model, traj, temperature=1.0):  # -> logits (n,V), tokens (n,)
    """A plain pass over one whole trajectory, at the tokens that the model wrote."""
    ids = torch.tensor([traj.ids])
    written = [t for t, mine in enumerate(traj.mask) if mine]
    logits = model(input_ids=ids).logits[0, [t - 1 for t in written]] / temperature
    return logits, ids[0, written]


@pytest.fixture
def models(llama, tok, cfg):
    """The policy, and a critic, with learning rate 0, so that all gradients are of these weights.
    """
    cfg.algo, cfg.rollouts = "ppo", 4
    critic = rm.load_models(cfg).critic
    policy = copy.deepcopy(llama)
    groups = [{"params": policy.parameters()}, {"params": critic.parameters()}]
    return rm.Models(policy, critic, None, torch.optim.SGD(groups, lr=0.0), tok)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logp_and_entropy_are_those_of_a_categorical(llama, cfg, trajs, temperature):
    cfg.temperature = temperature
    logp, entropy = rm.token_logps(llama, rm.collate(trajs, "cpu"), cfg)
    truth = [full_logits(llama, traj, temperature) for traj in trajs]
    choice = torch.distributions.Categorical(logits=torch.cat([logits for logits, _ in truth]))
    tokens = torch.cat([tokens for _, tokens in truth])
    assert torch.allclose(logp, choice.log_prob(tokens), atol=1e-4)
    assert torch.allclose(entropy, choice.entropy(), atol=1e-4)


def test_chunks_change_neither_values_nor_gradient(llama, cfg, trajs, monkeypatch):
    batch, results = rm.collate(trajs, "cpu"), []
    for tokens in (10 ** 6, 7):  # of a chunk
        monkeypatch.setattr(rm, "CHUNK_LOGITS", tokens * llama.config.vocab_size)
        llama.zero_grad()
        logp, entropy = rm.token_logps(llama, batch, cfg)
        (logp.sum() + 0.1 * entropy.sum()).div(len(logp)).backward()
        gradient = torch.cat([weight.grad.flatten() for weight in llama.parameters()])
        results.append((logp, entropy, gradient))
    llama.zero_grad()
    for whole, chunked in zip(*results):
        assert torch.allclose(whole, chunked, atol=1e-5)


def test_micro_batches_cover_every_row_once_and_bound_the_padding(trajs):
    batch, covered = rm.collate(trajs, "cpu"), []
    for rows, part in rm.micro_batches(batch, range(len(trajs)), 300):
        assert part["inputs"].numel() <= 300 or len(rows) == 1
        longest = max(len(trajs[row].ids) for row in rows)
        assert part["inputs"].shape == part["mask"].shape == (len(rows), longest - 1)
        covered += rows
    assert sorted(covered) == list(range(len(trajs))) and covered != sorted(covered)


# -------------------------------------------------------------------- what compute_advantages makes


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_the_advantage_stands_on_its_own_token(models, cfg, trajs, algo):
    """Against a loop over the lists of one trajectory, before any tensor: under PPO the rewards to
    come minus the value, whitened; under GRPO the number of the group.
    """
    cfg.algo = algo
    before = copy.deepcopy([vars(traj) | {"env": None} for traj in trajs])
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    assert [vars(traj) | {"env": None} for traj in trajs] == before, "no trajectory changes"
    truth, to_come = [], []
    for row, traj in enumerate(trajs):
        group = [other.R for other in trajs if other.group == traj.group]
        by_group = (traj.R - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
        for t in [t for t, mine in enumerate(traj.mask) if mine]:
            to_come.append(sum(traj.reward[t:]))
            truth.append(to_come[-1] - batch["value"][row, t - 1].item() if algo == "ppo"
                         else by_group)
    mask = batch["mask"]
    if algo == "ppo":
        assert batch["value_target"][mask].tolist() == pytest.approx(to_come, abs=1e-4)
        truth = (np.array(truth) - np.mean(truth)) / np.std(truth)
    assert batch["adv"][mask].tolist() == pytest.approx(list(truth), abs=1e-3)
    assert (batch["adv"][~mask] == 0).all()


def test_gamma_is_the_discount_and_lambda_is_lambda(models, cfg, trajs):
    """Against loops. With 0.99 and 0.5 in each other's place, the targets would be others."""
    cfg.gamma, cfg.lam = 0.99, 0.5
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    for row in range(len(trajs)):
        reward, value, mask, target = (batch[name][row].tolist() for name in (
            "reward", "value", "mask", "value_target"))
        expected = gae_by_loops(reward, value, mask, gamma=0.99, lam=0.5)
        for t, advantage in expected.items():
            assert target[t] == pytest.approx(advantage + value[t], abs=1e-4)
        swapped = gae_by_loops(reward, value, mask, gamma=0.5, lam=0.99)
        assert max(abs(expected[t] - swapped[t]) for t in expected) > 0.01


def drifted(llama):
    ref = copy.deepcopy(llama)
    with torch.no_grad():
        ref.lm_head.weight.mul_(0.9)
    return ref


def test_kl_penalty_of_grpo(models, cfg, trajs, llama):
    """Every token bears the penalties that are still ahead of it, besides its group's advantage."""
    cfg.algo, cfg.kl_coef, models.ref = "grpo", 0.1, drifted(llama)
    R = rm.returns(trajs, cfg)
    batch = rm.compute_advantages(trajs, R, models, cfg)
    group = rm.grpo_advantages(R).flatten()
    for b, traj in enumerate(trajs):
        where = batch["mask"][b].nonzero()[:, 0].tolist()
        logits, tokens = full_logits(models.ref, traj)
        ref_logp = torch.distributions.Categorical(logits=logits).log_prob(tokens).tolist()
        k1 = [batch["old_logp"][b, t].item() - x for t, x in zip(where, ref_logp)]
        for i, t in enumerate(where):
            expected = group[b].item() - 0.1 * sum(k1[i:])
            assert batch["adv"][b, t].item() == pytest.approx(expected, abs=1e-3)
    assert (batch["adv"][~batch["mask"]] == 0).all()


# ------------------------------------------------------------------- the gradient of a whole update
def gradients_of_updates(models, trajs, cfg):
    """-> what the optimizer was given in each step (steps, weights); batch"""
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


def all_gradients(network, loss):
    network.zero_grad()
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in network.parameters()])


@pytest.mark.parametrize("entropy_coef, micro_tokens", [(0.0, 300), (0.5, 300), (0.5, 10 ** 9)])
def test_the_gradient_is_that_of_a_mean_over_the_models_tokens(models, cfg, trajs, monkeypatch,
                                                               entropy_coef, micro_tokens):
    """Lengths differ, and the truth is a plain loop. Dividing by all columns, pads included, would
    shrink it. Micro-batches change nothing.
    """
    cfg.micro_tokens = micro_tokens
    monkeypatch.setattr(rm, "MAX_GRAD_NORM", 1e9)
    models.critic, cfg.algo = None, "grpo"
    cfg.minibatch_size, cfg.entropy_coef = len(trajs), entropy_coef
    (found,), batch = gradients_of_updates(models, trajs, cfg)
    assert len({len(traj.ids) for traj in trajs}) > 1
    total, tokens = 0.0, 0
    for row, traj in enumerate(trajs):
        logits, written = full_logits(models.policy, traj)
        adv = batch["adv"][row][batch["mask"][row]]
        logp = logits.log_softmax(-1)[torch.arange(len(written)), written]
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        total -= (adv * logp + entropy_coef * entropy).sum()
        tokens += len(written)
    truth = all_gradients(models.policy, total / tokens)
    assert truth.abs().max() > 1e-3
    assert torch.allclose(found, truth, atol=1e-4 * truth.abs().max())


def test_the_critics_gradient_is_that_of_the_mean_squared_error(models, cfg, trajs, monkeypatch):
    """It is half the error, over the model's tokens, by plain passes over one episode at a time."""
    monkeypatch.setattr(rm, "MAX_GRAD_NORM", 1e9)
    cfg.minibatch_size, cfg.micro_tokens = len(trajs), 300
    (found,), batch = gradients_of_updates(models, trajs, cfg)
    total, tokens = 0.0, 0
    for row, traj in enumerate(trajs):
        before = [t - 1 for t, own in enumerate(traj.mask) if own]
        value = models.critic(input_ids=torch.tensor([traj.ids])).logits[0, before, 0]
        target = batch["value_target"][row][batch["mask"][row]]
        total += ((value - target) ** 2).sum() / 2
        tokens += len(before)
    truth = all_gradients(models.critic, total / tokens)
    found = found[-len(truth):]
    assert truth.abs().max() > 1e-3
    assert torch.allclose(found, truth, atol=1e-4 * truth.abs().max())


# ------------------------------------------------------------------------------------------- a step
@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_step_shortens_each_gradient_on_its_own_and_uses_its_own_rate(models, algo):
    """By hand, with plain gradient descent: a gradient of norm 10 becomes one of norm 1, shorter
    ones stay as they are.
    """
    if algo == "grpo":
        models.critic = None
    networks = [network for network in (models.policy, models.critic) if network]
    models.optimizer = torch.optim.SGD([{"params": network.parameters(), "lr": lr}
                                        for network, lr in zip(networks, (0.5, 0.1))])
    before = [copy.deepcopy(network.state_dict()) for network in networks]
    for network, norm in zip(networks, (10.0, 0.3)):
        first, *_ = network.parameters()
        for weight in network.parameters():
            weight.grad = torch.zeros_like(weight)
        first.grad[0, 0] = norm
    assert rm.take_step(models) == pytest.approx(10.0), "the norm before it was shortened"
    for network, old, moved in zip(networks, before, (0.5 * 1.0, 0.1 * 0.3)):
        name, first = next(network.named_parameters())
        change = old[name] - first.detach()
        assert change[0, 0].item() == pytest.approx(moved, abs=1e-5)
        assert change.flatten()[1:].abs().max() == 0 and first.grad is None


def test_adam_is_plain_with_a_rate_for_each_network(models, cfg):
    """No decay, and PyTorch's defaults, because some findings depend on Adam's memory."""
    cfg.lr, cfg.critic_lr = 3e-4, 7e-3
    adam = rm.make_optimizer(models, cfg)
    assert type(adam) is torch.optim.Adam
    policy, critic = adam.param_groups
    for group, network, lr in ((policy, models.policy, 3e-4), (critic, models.critic, 7e-3)):
        assert group["lr"] == lr
        assert [id(weight) for weight in group["params"]] == [id(w) for w in network.parameters()]
        assert group["betas"] == (0.9, 0.999)
        assert (group["eps"], group["weight_decay"]) == (1e-8, 0)
    models.critic = None
    only, = rm.make_optimizer(models, cfg).param_groups
    assert only["lr"] == 3e-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("network", ["policy", "critic"])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(models, network, bad):
    models.optimizer = torch.optim.SGD([*models.policy.parameters(), *models.critic.parameters()],
                                       lr=0.1)
    for part in (models.policy, models.critic):
        for weight in part.parameters():
            weight.grad = torch.ones_like(weight)
    next(getattr(models, network).parameters()).grad[0, 0] = bad
    before = copy.deepcopy([dict(models.policy.state_dict()), dict(models.critic.state_dict())])
    refused(rm.take_step, models)
    after = [dict(models.policy.state_dict()), dict(models.critic.state_dict())]
    assert equal(before[0], after[0]) and equal(before[1], after[1])


# ------------------------------------------------------------------------ models as they are loaded
@pytest.fixture(scope="module")
def bf16_folder(tmp_path_factory, tok):
    """A checkpoint as most are on the hub, with dropout for whoever switches it on."""
    llama = random_llama(len(tok), attention_dropout=0.5)
    return save(tmp_path_factory.mktemp("bf16"), llama.to(torch.bfloat16), tok)


def test_weights_are_fp32_and_dropout_is_off(bf16_folder):
    """A step of 1e-6 would vanish in bf16."""
    models = rm.load_models(config(model=bf16_folder, kl_coef=0.1))
    for network in (models.policy, models.critic, models.ref):
        assert {weight.dtype for weight in network.parameters()} == {torch.float32}
        assert not network.training


def test_critic_and_reference_begin_as_the_policy(folder):
    """But for the critic's head, which has one output, and is the same for the same seed."""
    cfg = config(model=folder, kl_coef=0.1)
    models, again = rm.load_models(cfg), rm.load_models(cfg)
    other = rm.load_models(rm.replace(cfg, seed=1))
    body = dict(models.policy.model.state_dict())
    assert equal(dict(models.critic.model.state_dict()), body)
    assert equal(dict(models.ref.model.state_dict()), body)
    assert models.critic.num_labels == 1
    heads = [dict(some.critic.score.state_dict()) for some in (models, again, other)]
    assert equal(heads[0], heads[1]) and not equal(heads[0], heads[2])
    weights = [weight for network in (models.policy, models.critic, models.ref)
               for weight in network.parameters()]
    assert len({weight.data_ptr() for weight in weights}) == len(weights), "none is shared"


@pytest.mark.parametrize("options, critic, ref", [
    ({}, True, True), ({"kl_coef": 0.0}, True, False), ({"algo": "grpo"}, False, True),
    ({"starpo_s": True}, True, False), ({"play": 3}, False, False),
    ({"eval_only": True}, False, False)])
def test_only_what_is_needed_is_loaded(folder, options, critic, ref):
    models = rm.load_models(config(model=folder, **options))
    assert (models.critic is not None, models.ref is not None) == (critic, ref)


# ----------------------------------------------------------- to change the method; what a GPU shows
def test_every_function_is_looked_up_when_it_is_called(folder, tmp_path, monkeypatch):
    """Each is replaced by one that counts. After two short runs every one of them was called."""
    called = set()

    def count(name, function):
        def counted(*args, **named):
            called.add(name)
            return function(*args, **named)
        return counted
    names = {name for name, x in vars(rm).items() if getattr(x, "__module__", "") == rm.__name__
             and isinstance(x, types.FunctionType)}
    names -= {"main", "parse_config", "train"}  # they begin a program, or are called here
    for name in names:
        monkeypatch.setattr(rm, name, count(name, getattr(rm, name)))
    for algo in ("ppo", "grpo"):
        rm.train(config(model=folder, algo=algo, prompts=2, rollouts=4, max_turns=2, eval_prompts=2,
                        env="bandit", max_new_tokens=20, out=str(tmp_path / algo)))
    assert names - called == set()


# ---------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize("wrong", [
    lambda R: R.mean(1), torch.mean, torch.t, lambda R: R.T.contiguous(), torch.flatten])
def test_what_a_function_of_ones_own_returns_is_looked_at(models, cfg, trajs, monkeypatch, wrong):
    """Such as one advantage for a group, one in all, or groups and episodes in each other's place.
    """
    cfg.algo, R = "grpo", rm.returns(trajs, cfg)
    batch = rm.compute_advantages(trajs, R, models, cfg)
    monkeypatch.setattr(rm, "policy_loss", lambda logp, *rest: (logp.mean(), logp > 0))
    with pytest.raises(AssertionError):
        rm.add_gradients(batch, [0, 1], models, cfg)
    monkeypatch.setattr(rm, "grpo_advantages", lambda R, norm: wrong(R))
    with pytest.raises(AssertionError):
        rm.compute_advantages(trajs, R, models, cfg)
    monkeypatch.setattr(rm, "uncertainty_filter", lambda R, keep: torch.arange(0))
    assert rm.learn(trajs, models, cfg, 0) == ({}, []), "a filter may keep nothing"


def test_an_iteration_calculates_in_bf16_where_the_device_does_but_steps_outside(
        models, cfg, trajs, monkeypatch):
    """And each minibatch sees the weights of the last step, not autocast's bf16 copies of older
    ones: its log-probs are those of a fresh copy of the policy.
    """
    asked = []

    def autocast(name):
        asked.append(name)
        return torch.autocast("cpu", torch.bfloat16)
    monkeypatch.setattr(device, "autocast", autocast)
    cfg.algo, cfg.minibatch_size, cfg.epochs, models.critic = "grpo", len(trajs), 2, None
    cfg.prompts, cfg.device = 2, "cpu:0"
    models.optimizer = torch.optim.SGD(models.policy.parameters(), lr=0.5)
    seen, fresh, inside = [], [], []
    token_logps, take_step = rm.token_logps, rm.take_step

    def spy(policy, part, cfg):
        inside.append(torch.is_autocast_enabled("cpu"))
        found = token_logps(policy, part, cfg)
        seen.append(found[0].detach())
        with torch.autocast("cpu", torch.bfloat16):
            fresh.append(token_logps(copy.deepcopy(policy), part, cfg)[0].detach())
        return found

    def step(models):
        inside.append(not torch.is_autocast_enabled("cpu"))
        return take_step(models)
    monkeypatch.setattr(rm, "rollout", lambda *rest: trajs)
    monkeypatch.setattr(rm, "token_logps", spy)
    monkeypatch.setattr(rm, "take_step", step)
    row, _ = rm.iterate(2, models, cfg)
    assert row["updates"] == 2 and len(inside) >= 4 and all(inside)
    assert set(asked) == {"cpu:0"}, "whatever other devices the machine has"
    for ours, truth in zip(seen, fresh):
        assert torch.allclose(ours, truth, atol=1e-5)


@pytest.mark.parametrize("name, tokens", [("cpu", 1024), ("cuda", 2048)])
def test_the_tokens_of_a_pass_and_the_rounding_are_of_the_device_of_the_run(name, tokens,
                                                                           monkeypatch):
    """A GPU in the machine must not loosen the check for --device cpu."""
    monkeypatch.setattr(device, "has_bf16", lambda device: device == "cuda")
    assert rm.Config(device=name).micro_tokens == tokens
    assert rm.Config(device=name, micro_tokens=300).micro_tokens == 300
    assert device.rounding("cpu") < 0.001
    asked = []
    monkeypatch.setattr(torch, "autocast", lambda *_, enabled: asked.append(enabled))
    device.autocast(name)
    assert asked == [name == "cuda"]
