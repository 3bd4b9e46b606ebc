"""How many tokens a pass of an update has, and what happens if memory runs out. GPUs are faked."""
import copy

import pytest
import torch

import ragen_mini as rm
import runs


@pytest.fixture
def models(cfg):
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    return models


@pytest.fixture
def batch(cfg, models):
    trajs = rm.rollout(models, range(300, 304), 4, cfg, 0)
    R = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    return rm.compute_advantages(trajs, R, models, cfg)


@pytest.fixture(autouse=True)
def _as_before():
    before = runs.micro_tokens.set(None)
    yield
    runs.micro_tokens.reset(before)


def tokens_of_passes(batch):
    return [len(rows) * (part["inputs"].shape[1] + 1)
            for rows, part in rm.micro_batches(batch, range(len(batch["mask"])))]


def weights_after_an_update(batch, models, cfg):  # -> statistics, weights
    """It learns with copies, so the next update begins with the same weights."""
    models = rm.Models(copy.deepcopy(models.policy), copy.deepcopy(models.critic), None, None, None)
    models.optimizer = rm.make_optimizer(models, cfg)
    steps = rm.updates(batch, models, cfg, 0)
    return steps, torch.cat([weight.detach().flatten() for weight in models.policy.parameters()])


def test_the_setting_limits_the_passes_of_a_run_only(batch, models, cfg):
    assert max(tokens_of_passes(batch)) > 300  # by the default
    with runs.passes_that_fill_the_card(models, rm.replace(cfg, micro_tokens=300)):
        assert max(tokens_of_passes(batch)) <= 300
    assert runs.micro_tokens.get() is None
    with runs.passes_that_fill_the_card(models, cfg):  # on a CPU the default stays
        assert runs.micro_tokens.get() is None


def test_the_setting_is_checked():
    with pytest.raises(runs.UserError):
        rm.Config(micro_tokens=0)


def test_a_run_that_sets_it_trains(cfg, tmp_path, monkeypatch):
    seen = []
    micro_batches = rm.micro_batches

    def spy(batch, rows):
        seen.append(runs.micro_tokens.get())
        return micro_batches(batch, rows)
    monkeypatch.setattr(rm, "micro_batches", spy)
    rows, _ = rm.train(rm.replace(cfg, micro_tokens=300, iterations=1, eval_every=0, env="bandit",
                                  max_turns=1, out=str(tmp_path / "run")))
    assert set(seen) == {300} and rows[1]["updates"] > 0


def test_if_memory_runs_out_the_minibatch_is_repeated_in_shorter_passes(
        batch, models, cfg, monkeypatch, capsys):
    """Nothing of the failed attempts remains: the step is that of a run that had these passes."""
    width = batch["mask"].shape[1]
    limit = 2 * width  # a longer pass does not "fit"
    tokens = 4 * limit
    runs.micro_tokens.set(limit)
    expected_steps, expected = weights_after_an_update(batch, models, cfg)

    passes = []
    token_logps = rm.token_logps

    def on_a_small_card(policy, part, cfg):
        passes.append(part["inputs"].numel())
        result = token_logps(policy, part, cfg)
        # The first passes, of short rows, leave gradients.
        if passes[-1] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result
    monkeypatch.setattr(rm, "token_logps", on_a_small_card)
    runs.micro_tokens.set(tokens)
    steps, weights = weights_after_an_update(batch, models, cfg)
    assert max(passes) > limit and runs.micro_tokens.get() == limit
    assert capsys.readouterr().out.count("out of memory") == 2  # halved twice
    assert torch.equal(weights, expected) and steps == expected_steps


def test_the_gradients_of_a_failed_attempt_are_forgotten(batch, models, cfg, monkeypatch):
    attempts = []
    original = rm.add_gradients

    def add_gradients(batch, rows, models, cfg):
        attempts.append(runs.micro_tokens.get())
        stats = original(batch, rows, models, cfg)
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return stats
    monkeypatch.setattr(rm, "add_gradients", add_gradients)
    monkeypatch.setattr(rm, "take_step", lambda models: 0.0)  # so that the gradients remain
    rows = list(range(len(batch["mask"])))
    runs.micro_tokens.set(4096)
    rm.updates(batch, models, rm.replace(cfg, minibatch_size=len(rows)), 0)
    twice = [weight.grad.clone() for weight in models.policy.parameters()]
    models.optimizer.zero_grad()
    original(batch, rows, models, cfg)
    assert attempts == [4096, 2048]
    for one, other in zip(twice, models.policy.parameters()):
        torch.testing.assert_close(one, other.grad, rtol=1e-3, atol=1e-6)


def test_a_single_row_that_does_not_fit_is_an_error(batch, models, cfg, monkeypatch):
    def add_gradients(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(rm, "add_gradients", add_gradients)
    with pytest.raises(torch.OutOfMemoryError):
        rm.updates(batch, models, cfg, 0)
    assert runs.micro_tokens.get() <= batch["mask"].shape[1]


# -------------------------------------------------------------------------------- a GPU is made up
def a_card(monkeypatch, total, free):
    monkeypatch.setattr(runs, "memory", lambda device: total)
    monkeypatch.setattr(runs, "free_memory", lambda device: free)


def room_for(tokens, models):  # -> bytes: by hand, what is free where half of the rest fits these
    config = models.policy.config
    a_token = config.num_hidden_layers * (33 * config.hidden_size + 8 * config.intermediate_size)
    trained = 0
    for network in (models.policy, models.critic):
        trained += sum(weights.numel() for weights in network.parameters() if weights.requires_grad)
    return 2e9 + (4 + 8 + 2) * trained + 2 * tokens * a_token


@pytest.mark.parametrize("room, tokens", [
    (-1e6, 2048), (4095, 2048), (4097, 4096), (8191, 4096), (8193, 8192), (40_000, 32_768)])
@pytest.mark.parametrize("frozen", [False, True])
def test_passes_fill_half_of_the_memory_that_is_left(
        models, cfg, monkeypatch, room, tokens, frozen):
    """After gradients, Adam's state and bf16 copies of trained weights, and logits."""
    models.policy.requires_grad_(not frozen)
    a_card(monkeypatch, 25.4e9, room_for(room, models))
    assert runs.tokens_that_fit(models, rm.replace(cfg, device="cuda")) == tokens


def test_what_the_layers_keep_was_counted():
    """0.92 and 1.60 MB a token (bench.py --activations, figures/bench-epyc.txt)."""
    for layers, hidden, inner, counted in ((30, 576, 1536, 0.92e6), (24, 896, 4864, 1.60e6)):
        assert layers * (33 * hidden + 8 * inner) == pytest.approx(counted, rel=0.05)


def test_on_a_cpu_and_on_a_small_card_passes_are_as_before(models, cfg, monkeypatch):
    assert runs.tokens_that_fit(models, cfg) is None
    a_card(monkeypatch, 16e9, 16e9)
    assert runs.tokens_that_fit(models, rm.replace(cfg, device="cuda")) is None


# ------------------------------------------------------------------- cards without bf16 arithmetic
@pytest.mark.parametrize("capability, in_bf16", [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_bf16_only_where_the_card_has_it(monkeypatch, capsys, capability, in_bf16):
    monkeypatch.setattr(rm, "CUDA", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    asked = []
    monkeypatch.setattr(torch, "autocast", lambda *given, enabled: asked.append(enabled))
    rm.autocast()
    assert asked == [in_bf16]
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    runs.check_device("cuda")
    assert ("fp32" in capsys.readouterr().out) is not in_bf16
