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


@pytest.mark.parametrize("total, free, tokens", [
    (16e9, 15e9, None),  # a smaller card
    (25.4e9, 0.0, 2048),  # hardly any memory is left: as today
    # By hand, for the tiny model: half of the rest, by what its layers keep for a token.
    (25.4e9, 24e9, "half"), (140e9, 130e9, "half")])
def test_passes_fill_half_of_the_memory_that_is_left(
        models, cfg, monkeypatch, total, free, tokens):
    a_card(monkeypatch, total, free)
    fitting = runs.tokens_that_fit(models, rm.replace(cfg, device="cuda"))
    if tokens != "half":
        assert fitting == tokens
        return
    config = models.policy.config
    a_token = config.num_hidden_layers * (33 * config.hidden_size + 8 * config.intermediate_size)
    trained = sum(weights.numel() for network in (models.policy, models.critic)
                  for weights in network.parameters())
    rest = (free - 2e9 - 14 * trained) / 2
    assert fitting * a_token <= rest < 2 * fitting * a_token
    assert fitting & (fitting - 1) == 0  # a power of two


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
