"""Which architectures are right, and which are refused in one line?

They are refused by the program when it loads them, by extras/check_model.py, and at the latest in
the first iteration. The models have random weights and the tokenizer of tiny. The independent truth
is a plain forward pass of the unmodified model over the finished episode.
"""
import runpy
import sys

import numpy as np
import pytest
import torch
import transformers

import ragen_mini as rm
import runs
from conftest import ROOT, save
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
EAGER = ("Llama", "Olmo2", "GPT2")
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


def random_model(kind, tok, attention=None, **options):
    torch.manual_seed(0)
    sizes = OLD_SIZES if kind in ("GPT2", "GPTJ") else SIZES
    sizes = dict(vocab_size=len(tok), initializer_range=0.3) | sizes | options
    config = getattr(transformers, f"{kind}Config")(**sizes)
    kwargs = dict(attn_implementation=attention) if attention else {}
    return transformers.AutoModelForCausalLM.from_config(config, **kwargs).eval()


def models_of(policy, tok, cfg):
    models = rm.Models(policy, None, None, None, tok)
    models.optimizer = rm.make_optimizer(models, cfg)
    return models


def check(policy, tok, cfg):  # as extras/check_model.py does -> tokens, difference
    rm.check_policy(policy, tok, cfg)
    return check_model.check(models_of(policy, tok, cfg), cfg)


def refused(policy, tok, cfg):  # -> what the user is told
    with pytest.raises(runs.UserError) as error:
        check(policy, tok, cfg)
    assert "\n" not in str(error.value)
    return str(error.value)


def plain_logps(policy, batch):
    with torch.no_grad():
        logp = policy(input_ids=batch["inputs"]).logits.log_softmax(-1)
    return logp.gather(2, batch["targets"][:, :, None])[:, :, 0]


def largest_error(policy, tok, cfg):  # of the rollout's and of the update's log-probs
    cfg = rm.replace(cfg, env="sokoban")
    trajs = rm.rollout(models_of(policy, tok, cfg), [300, 301], 2, cfg, 0)
    batch = rm.collate(trajs, "cpu")
    plain = plain_logps(policy, batch)
    in_update = rm.per_token(lambda part: rm.token_logps(policy, part, cfg)[0], batch)
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
@pytest.mark.parametrize("kind, attention", [
    *((kind, None) for kind in RIGHT), *((kind, "eager") for kind in EAGER)])
def test_right(kind, attention, tok, training):
    """Eager attention adds its mask to the scores: a boolean one would hide nothing."""
    cfg = rm.replace(training, max_turns=2)
    policy = random_model(kind, tok, attention, **RIGHT[kind])
    assert check(policy, tok, cfg)[1] < 1e-4
    assert largest_error(policy, tok, cfg) < 2e-4
    row, _ = rm.iterate(1, models_of(policy, tok, cfg), cfg)
    assert row["updates"] == 2, "and the program trains it, and finds its ratios right"


def test_a_window_is_no_harm_to_shorter_episodes(tok, cfg):
    policy = random_model("Mistral", tok, sliding_window=250)
    cfg = rm.replace(cfg, max_new_tokens=16, max_turns=3)
    check(policy, tok, cfg)
    assert "250" in refused(policy, tok, rm.replace(cfg, max_turns=5))


@pytest.mark.parametrize("temperature", [1e-3, 100.0])
def test_the_temperature_changes_nothing(temperature, tok, cfg):
    """A low one makes all but one token of a distribution impossible, and magnifies rounding."""
    cfg = rm.replace(cfg, temperature=temperature)
    check(random_model("Llama", tok), tok, cfg)
    refused(random_model("Granite", tok, logits_scaling=4.0), tok, cfg)


# ---------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize("kind", WINDOW)
def test_a_window_is_refused_by_its_size(kind, tok, cfg):
    cfg = rm.replace(cfg, max_new_tokens=16)
    told = refused(random_model(kind, tok, **WINDOW[kind]), tok, cfg)
    assert " 100 tokens" in told and "--max-turns" in told


@pytest.mark.parametrize("kind", [*WRONG, *RAISING])
def test_what_does_not_suit_is_refused_when_it_is_loaded(kind, tok, tmp_path):
    model = save(tmp_path, random_model(kind, tok, **(WRONG | RAISING)[kind]), tok)
    cfg = rm.Config(model=model, device="cpu", algo="grpo", max_new_tokens=16, play=7)
    with pytest.raises(runs.UserError, match=model) as error:
        rm.load_models(cfg)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2", *WRONG])
def test_what_is_refused_would_be_wrong(kind, tok, cfg):
    """Or the checks would forbid what works."""
    cfg = rm.replace(cfg, max_new_tokens=16)
    assert largest_error(random_model(kind, tok, **(WINDOW | WRONG)[kind]), tok, cfg) > 2e-3


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2", "Rwkv"])
def test_what_the_first_message_does_not_show_is_refused_in_the_first_iteration(
        kind, tok, training):
    policy = random_model(kind, tok, **(WINDOW | WRONG)[kind])
    with pytest.raises(runs.UserError, match="differ") as error:
        rm.iterate(1, models_of(policy, tok, training), training)
    assert "\n" not in str(error.value)


def test_too_long_for_the_model(tok, cfg):
    policy = random_model("Llama", tok, max_position_embeddings=200)
    assert "--max-new-tokens" in refused(policy, tok, rm.replace(cfg, max_new_tokens=40))


def test_who_cannot_be_a_critic_is_told_of_grpo(tok, tmp_path):
    folder = save(tmp_path, random_model("Olmo2", tok), tok)
    assert rm.load_models(rm.Config(model=folder, device="cpu", algo="grpo")).critic is None
    with pytest.raises(runs.UserError, match="--algo grpo"):
        rm.load_models(rm.Config(model=folder, device="cpu"))


# ------------------------------------------------------------------------- extras/check_model.py
class Diary(Guess):
    """Its text grows: a line for each action."""
    actions = ("Left", "Right")

    @staticmethod
    def draw(rng):
        return "day", ("Up",)

    def outcomes(self, state, action):
        return [(1.0, state + (action,), 0.0, False)]

    def won(self, state):
        return False

    def render(self):
        return " ".join(self.state * 4)


def test_texts_that_grow_are_measured(play, tok, cfg):
    """The later messages are longer than the first one, and so is what a window must see."""
    cfg = rm.replace(cfg, max_new_tokens=30, max_turns=3, env=Diary)
    answers = ["Left || Right || Left || Right || Left", "Left || Right || Left || Right"]
    traj, = play([f"</think><answer>{answer}</answer>" for answer in answers], Diary, [0], cfg)
    messages = len(traj.ids) - sum(traj.mask)
    models = models_of(random_model("Mistral", tok, **WIDE), tok, cfg)
    longest = check_model.longest_episode(models, cfg)
    assert sum(longest.mask) == 3 * 30
    tokens, _ = check(models.policy, tok, cfg)
    assert tokens == len(longest.ids) == messages + 3 * 30
    narrow = random_model("Mistral", tok, sliding_window=tokens - 40)
    assert f" {tokens} tokens" in refused(narrow, tok, cfg)


def command_line(*words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["check_model.py", *words])
        runpy.run_path(str(ROOT / "extras/check_model.py"), run_name="__main__")


def test_the_command_line(tok, tmp_path, capsys):
    command_line("tiny", "--device", "cpu", "--max-turns", "2")
    assert capsys.readouterr().out.startswith("right: ")
    narrow = save(tmp_path, random_model("Mistral", tok, **NARROW), tok)
    for words, says in (([narrow, "--device", "cpu", "--algo", "grpo"], "100 tokens"),
                        ([], "check_model.py")):
        with pytest.raises(SystemExit, match=says):
            command_line(*words)


# --------------------------------------------------------------------------------------- autocast
def first_ratios(cfg, monkeypatch):  # -> of each gradient step: the mean of |ratio - 1|
    found = []
    policy_loss = rm.policy_loss

    def spy(logp, entropy, old_logp, adv, cfg):
        found.append(((logp - old_logp).exp() - 1).abs().mean().item())
        return policy_loss(logp, entropy, old_logp, adv, cfg)
    with monkeypatch.context() as patch:
        patch.setattr(rm, "policy_loss", spy)
        models = rm.load_models(cfg)
        models.optimizer = rm.make_optimizer(models, cfg)
        rm.iterate(1, models, cfg)
    return found


def test_under_autocast_every_update_sees_the_weights_of_the_last_step(folder, monkeypatch):
    """Autocast keeps its copies of the weights until its outermost block ends. Around a whole
    iteration all updates would read those of the rollout.
    """
    cfg = rm.Config(model=folder, device="cpu", env="bandit", prompts=2, rollouts=4,
                    minibatch_size=8, epochs=4, lr=3e-3)
    plain = first_ratios(cfg, monkeypatch)
    monkeypatch.setattr(rm, "autocast", lambda: torch.autocast("cpu", torch.bfloat16))
    rounded = first_ratios(cfg, monkeypatch)
    assert len(plain) == len(rounded) >= 4 and not torch.is_autocast_enabled("cpu")
    # Before the first step all ratios are 1, in bf16 roughly.
    assert rounded[0] < 0.05 and plain[0] < 1e-4
    moved, truth = np.mean(rounded[2:]), np.mean(plain[2:])
    assert moved > 0.75 * truth > 0.1, "after the first step they move as in fp32"
