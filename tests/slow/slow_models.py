"""Which architectures are right, and which are refused in one line?

They are refused by the program when it loads them, by extras/check_model.py, and at the latest in
the first iteration. The models have random weights and the tokenizer of tiny. The independent truth
is a plain forward pass of the unmodified model over the finished episode.
"""
import pytest
import torch
import transformers

import ragen_mini as rm
from conftest import refused, save
from extras import check_model
from extras.my_world import Guess

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=2, pad_token_id=0,
             bos_token_id=None)
OLD_SIZES = dict(n_embd=64, n_layer=2, n_head=4, n_positions=4096, eos_token_id=2)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
NARROW = dict(sliding_window=100)
WIDE = dict(sliding_window=4000)
SOFT = dict(head_dim=16, initializer_range=0.1)  # at 0.3 it always says the same
RIGHT = {
    "Llama": {}, "Qwen2": {}, "Qwen3": dict(head_dim=16), "Gemma": dict(head_dim=16),
    "Gemma3Text": SOFT, "GPT2": {}, "GPTNeoX": {}, "GPTJ": dict(rotary_dim=16), "Phi3": {},
    "Mistral": WIDE, "Olmo2": {}, "SmolLM3": {}, "Mixtral": EXPERTS,
    "Qwen3Moe": EXPERTS | dict(head_dim=16), "GraniteMoe": EXPERTS}
# They look back 100 tokens only, which the first message does not show.
WINDOW = {
    "Mistral": NARROW,
    "Qwen2": dict(use_sliding_window=True, max_window_layers=0, **NARROW),
    "Gemma3Text": dict(head_dim=16, **NARROW)}
# They change their logits after the output layer, or remember in another way than by a KVCache.
WRONG = {
    "Gemma2": dict(head_dim=16),
    "Granite": dict(logits_scaling=4.0),
    "Cohere": {},
    "Rwkv": dict(attention_hidden_size=64)}
# They raise an exception of their own.
RAISING = {
    "Mamba": {},
    "Falcon": {},
    "OPT": dict(ffn_dim=128, word_embed_proj_dim=64),
    "Llama4Text": EXPERTS | dict(head_dim=16, intermediate_size_mlp=128)}


def random_model(kind, tok, **options):
    torch.manual_seed(0)
    sizes = OLD_SIZES if kind in ("GPT2", "GPTJ") else SIZES
    sizes = dict(vocab_size=len(tok), initializer_range=0.3) | sizes | options
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def models_of(policy, tok, cfg):
    models = rm.Models(policy, None, None, None, tok)
    models.optimizer = rm.make_optimizer(models, cfg)
    return models


def check(policy, tok, cfg):  # as extras/check_model.py does -> tokens, difference
    rm.check_policy(policy, tok, cfg)
    return check_model.check(models_of(policy, tok, cfg), cfg)


def plain_logps(policy, batch):
    with torch.no_grad():
        logp = policy(input_ids=batch["inputs"]).logits.log_softmax(-1)
    return logp.gather(2, batch["targets"][:, :, None])[:, :, 0]


def largest_error(policy, tok, cfg):  # of the rollout's and of the update's log-probs
    cfg = rm.replace(cfg, env="sokoban")
    trajs = rm.rollout(models_of(policy, tok, cfg), [300, 301], 2, cfg, 0)
    batch = rm.collate(trajs, "cpu")
    plain = plain_logps(policy, batch)
    in_update = rm.per_token(lambda part: rm.token_logps(policy, part, cfg)[0], batch, cfg)
    errors = [ours - plain for ours in (batch["old_logp"], in_update)]
    return max(error[batch["mask"]].abs().max().item() for error in errors)


@pytest.fixture
def training(cfg, monkeypatch):
    """Settings for an iteration in which returns differ. Random models say nothing valid, so they
    are paid for what they say.
    """
    take_turn = rm.take_turn

    def paid(traj, *rest):
        last = len(traj.ids) - 1
        take_turn(traj, *rest)
        traj.reward[last] += len(traj.turns[-1]["answer"]) % 7
    monkeypatch.setattr(rm, "take_turn", paid)
    return rm.replace(cfg, algo="grpo", env=Guess, prompts=2, rollouts=4, minibatch_size=4,
                      max_turns=3, max_new_tokens=16)


# ------------------------------------------------------------------------------------------ right
@pytest.mark.parametrize("kind", RIGHT)
def test_right(kind, tok, training):
    cfg = rm.replace(training, max_turns=2)
    policy = random_model(kind, tok, **RIGHT[kind])
    assert check(policy, tok, cfg)[1] < 1e-4
    assert largest_error(policy, tok, cfg) < 2e-4
    row, _ = rm.iterate(1, models_of(policy, tok, cfg), cfg)
    assert row["updates"] == 2, "and the program trains it, and finds its ratios right"


def test_a_window_is_no_harm_to_shorter_episodes(tok, cfg):
    policy = random_model("Mistral", tok, sliding_window=250)
    cfg = rm.replace(cfg, max_new_tokens=16, max_turns=3)
    check(policy, tok, cfg)
    assert "--max-turns" in refused(check, policy, tok, rm.replace(cfg, max_turns=5))


@pytest.mark.parametrize("kind", WINDOW)
def test_a_window_that_is_too_short_is_refused(kind, tok, cfg):
    cfg = rm.replace(cfg, max_new_tokens=16)
    assert "differ" in refused(check, random_model(kind, tok, **WINDOW[kind]), tok, cfg)


# ---------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("kind", [*WRONG, *RAISING])
def test_what_does_not_suit_is_refused_when_it_is_loaded(kind, tok, tmp_path):
    model = save(tmp_path, random_model(kind, tok, **(WRONG | RAISING)[kind]), tok)
    cfg = rm.Config(model=model, device="cpu", algo="grpo", max_new_tokens=16, play=7)
    assert model in refused(rm.load_models, cfg)


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2", "Rwkv"])
def test_what_the_first_message_does_not_show_is_refused_in_the_first_iteration(
        kind, tok, training):
    policy = random_model(kind, tok, **(WINDOW | WRONG)[kind])
    models = models_of(policy, tok, training)
    assert "differ" in refused(rm.iterate, 1, models, training)
    assert largest_error(policy, tok, training) > 2e-3, "or the check would forbid what works"


def test_who_cannot_be_a_critic_is_told_of_grpo(tok, tmp_path):
    folder = save(tmp_path, random_model("Olmo2", tok), tok)
    assert rm.load_models(rm.Config(model=folder, device="cpu", algo="grpo")).critic is None
    assert "--algo grpo" in refused(rm.load_models, rm.Config(model=folder, device="cpu"))
