"""Which architectures are right, and which are refused in one line? By extras/check_model.py, which names the reason,
and by the program itself (but for one, whose exception is shown as it is). Random weights, `tiny`'s tokenizer. The
independent truth is a plain forward pass of the unmodified model over the finished episode."""
import runpy
import sys

import numpy as np
import pytest
import torch
import transformers

import ragen_mini as rm
from conftest import ROOT, save
from envs import UserError
from my_world import Guess

sys.path.insert(0, str(ROOT / "extras"))
import check_model

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=4096, eos_token_id=2, pad_token_id=0, bos_token_id=None)
OLD_SIZES = dict(n_embd=64, n_layer=2, n_head=4, n_positions=4096, eos_token_id=2)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
NARROW = dict(sliding_window=100)
WIDE = dict(sliding_window=4000)
SOFT = dict(head_dim=16, initializer_range=0.1)  # at 0.3 it always says the same
RIGHT = {
    "Llama": {}, "Qwen2": {}, "Qwen3": dict(head_dim=16), "Gemma": dict(head_dim=16), "Gemma3Text": SOFT,
    "GPT2": {}, "GPTNeoX": {}, "GPTJ": dict(rotary_dim=16), "Phi3": {}, "Mistral": WIDE, "Olmo2": {}, "SmolLM3": {},
    "Mixtral": EXPERTS, "Qwen3Moe": EXPERTS | dict(head_dim=16), "GraniteMoe": EXPERTS}
WINDOW = "it looks back 100 tokens only (sliding window)"
HEAD = "it changes its logits behind the output layer"
CACHE = "it does not work with the cache of the rollout"
QWEN2_NARROW = dict(use_sliding_window=True, max_window_layers=0, **NARROW)
REFUSED = {
    "Mistral": (NARROW, WINDOW),
    "Qwen2": (QWEN2_NARROW, WINDOW),
    "Gemma3Text": (dict(head_dim=16, **NARROW), WINDOW),
    "Gemma2": (dict(head_dim=16), HEAD),
    "Granite": (dict(logits_scaling=4.0), HEAD),
    "Cohere": ({}, HEAD),
    "Rwkv": (dict(attention_hidden_size=64), "recurrent"),
    "Mamba": ({}, CACHE),
    "Falcon": ({}, CACHE + " (AttributeError: "),
    "OPT": (dict(ffn_dim=128, word_embed_proj_dim=64), CACHE + " (AttributeError: "),
    "Llama4Text": (EXPERTS | dict(head_dim=16, intermediate_size_mlp=128),
                   "an update cannot read with it (AttributeError: ")}
SILENT = ["Mistral", "Qwen2", "Granite", "Cohere", "Rwkv"]  # they raise nothing, but would train on wrong numbers


def random_model(kind, tok, attention=None, **options):
    torch.manual_seed(0)
    sizes = SIZES
    if kind in ("GPT2", "GPTJ"):
        sizes = OLD_SIZES
    sizes = dict(vocab_size=len(tok), initializer_range=0.3) | sizes | options
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def models_of(policy, tok, cfg):
    models = rm.Models(policy, None, None, None, tok)
    models.optimizer = rm.make_optimizer(models, cfg)
    return models


def check(policy, tok, cfg):  # -> tokens, largest difference through the cache, in an update
    cfg = rm.replace(cfg, max_new_tokens=16)
    return check_model.check(models_of(policy, tok, cfg), cfg)


def plain_logps(policy, batch):
    with torch.no_grad():
        logp = policy(input_ids=batch["inputs"]).logits.log_softmax(-1)
    return logp.gather(2, batch["targets"][:, :, None])[:, :, 0]


def largest_error(policy, tok, cfg):  # of the rollout's and of the update's log-probs
    trajs = rm.rollout(models_of(policy, tok, cfg), [300, 301], 2, rm.replace(cfg, env="sokoban"), 0)
    batch = rm.collate(trajs, "cpu")
    plain = plain_logps(policy, batch)
    in_update = rm.on_grid(lambda part: rm.token_logps(policy, part, cfg)[0], batch)
    errors = [ours - plain for ours in (batch["old_logp"], in_update)]
    return max(error[batch["mask"]].abs().max().item() for error in errors)


class Paid(Guess):
    """Random models say nothing valid. For what they say their returns differ, and there is something to train."""

    def bonus(self, turn):
        return len(turn["answer"]) % 7


@pytest.fixture
def training(cfg):
    return rm.replace(cfg, algo="grpo", env=Paid, prompts=2, rollouts=4, update_size=4, max_turns=3,
                      max_new_tokens=16)


# ----------------------------------------------------------------------------------------- extras/check_model.py
EAGER = ("Llama", "Olmo2", "GPT2")


@pytest.mark.parametrize("kind, attention", [*((kind, None) for kind in RIGHT), *((kind, "eager") for kind in EAGER)])
def test_right(kind, attention, tok, training):
    """Eager attention adds its mask to the scores: a boolean one would hide nothing."""
    cfg = rm.replace(training, max_turns=2)
    policy = random_model(kind, tok, attention, **RIGHT[kind])
    _, in_cache, in_update = check(policy, tok, cfg)
    assert max(in_cache, in_update) < 2e-4
    assert largest_error(policy, tok, cfg) < 2e-4
    row, _, _ = rm.iterate(1, models_of(policy, tok, cfg), cfg)
    assert row["updates"] == 2, "and the program trains it, and finds its ratios right"


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind, tok, cfg):
    options, says = REFUSED[kind]
    policy = random_model(kind, tok, **options)
    with pytest.raises(UserError) as error:
        check(policy, tok, cfg)
    assert says in str(error.value)
    assert f"({kind.removesuffix('Text')}ForCausalLM)" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", SILENT)
def test_what_is_refused_would_be_wrong(kind, tok, cfg):
    """Or the check would forbid what works."""
    cfg.max_new_tokens = 16
    assert largest_error(random_model(kind, tok, **REFUSED[kind][0]), tok, cfg) > 0.01


def test_a_window_is_no_harm_to_shorter_episodes(tok, cfg):
    policy = random_model("Mistral", tok, sliding_window=250)
    cfg.max_turns = 3
    check(policy, tok, cfg)
    cfg.max_turns = 5
    with pytest.raises(UserError, match="lower --max-new-tokens or --max-turns"):
        check(policy, tok, cfg)


class Diary(Guess):
    """Its text grows: a line for every action."""
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
    cfg.max_new_tokens, cfg.max_turns, cfg.env = 30, 3, Diary
    cfg = rm.replace(cfg)
    answers = ["Left || Right || Left || Right || Left", "Left || Right || Left || Right"]
    traj, = play([f"</think><answer>{answer}</answer>" for answer in answers], Diary, [0], cfg)
    starts = [at for at, sampled in enumerate(traj.mask) if sampled and not traj.mask[at - 1]]
    ends = [at for at, sampled in enumerate(traj.mask) if at and not sampled and traj.mask[at - 1]]
    message = starts[2] - ends[1] + 1  # + 1: the end of turn, which this model writes itself
    assert check_model.longest_messages(tok, cfg) == (starts[0], message)
    assert message > starts[0]
    first, later = starts[0], message
    tokens, _, _ = check(random_model("Mistral", tok, **WIDE), tok, cfg)
    assert tokens == first + 2 * later + 3 * 16
    with pytest.raises(UserError, match=f"looks back {tokens - 1} tokens only .* up to {tokens}"):
        check(random_model("Mistral", tok, sliding_window=tokens - 1), tok, cfg)


@pytest.mark.parametrize("temperature", [1e-3, 100.0])
def test_the_temperature_changes_nothing(temperature, tok, cfg):
    """A low one makes all but one token of a distribution impossible, and magnifies rounding."""
    cfg.temperature = temperature
    check(random_model("Llama", tok), tok, cfg)
    with pytest.raises(UserError, match="behind the output layer"):
        check(random_model("Granite", tok, logits_scaling=4.0), tok, cfg)


def test_rounding_of_what_is_hardly_possible_does_not_matter():
    plain = torch.tensor([-0.1, -3.0, -30.0, -torch.inf])
    assert check_model.largest_gap(torch.tensor([-0.1, -3.5, -99.0, -torch.inf]), plain) == 0.5
    assert check_model.largest_gap(plain - 1, plain - 40) == 0, "of nothing"
    assert check_model.largest_gap(torch.tensor([torch.nan]), torch.tensor([-1.0])) != 0, "a lost number is no 0"


def test_too_long_for_the_model(tok, cfg):
    with pytest.raises(UserError, match="episodes take up to .* lower --max-new-tokens or --max-turns"):
        check(random_model("Llama", tok, max_position_embeddings=200), tok, cfg)


def test_a_template_without_the_message_is_named(tok, cfg):
    policy = random_model("Llama", tok)
    template = tok.chat_template
    try:
        tok.chat_template = "hello"
        rm.encode.cache_clear()
        with pytest.raises(UserError, match="its chat template does not show the message"):
            check(policy, tok, cfg)
    finally:
        tok.chat_template = template
        rm.encode.cache_clear()


def command_line(*words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["check_model.py", *words])
        runpy.run_path(str(ROOT / "extras/check_model.py"), run_name="__main__")


def test_the_command_line(tok, tmp_path, capsys):
    command_line("tiny", "--device", "cpu", "--max-turns", "2")
    assert capsys.readouterr().out.startswith("right: at ")
    narrow = save(tmp_path, random_model("Mistral", tok, **NARROW), tok)
    with pytest.raises(UserError, match="sliding window"):
        command_line(narrow, "--device", "cpu", "--algo", "grpo")
    with pytest.raises(UserError, match="python extras/check_model.py Qwen"):
        command_line()


# --------------------------------------------------------------------------------------------------- the program itself
@pytest.mark.parametrize("kind", SILENT)
def test_what_would_be_wrong_is_refused_in_the_first_iteration(kind, tok, training):
    policy = random_model(kind, tok, **REFUSED[kind][0])
    models = models_of(policy, tok, training)
    with pytest.raises(UserError) as error:
        rm.iterate(1, models, training)
    assert "rollout and update differ" in str(error.value) and "\n" not in str(error.value)


def test_the_same_before_it_plays(tok, training):
    """--play and --eval-only"""
    models = models_of(random_model("Mistral", tok, **NARROW), tok, training)
    trajs = rm.rollout(models, [300], 2, rm.replace(training, env="sokoban"), 0)
    with pytest.raises(UserError, match="rollout and update differ"):
        rm.check_ratios(trajs, models, training)
    models.policy = random_model("Mistral", tok, **WIDE)
    trajs = rm.rollout(models, [300], 2, rm.replace(training, env="sokoban"), 0)
    rm.check_ratios(trajs, models, training)


@pytest.mark.parametrize("kind", [kind for kind, (_, says) in REFUSED.items() if says.startswith(CACHE)])
def test_an_exception_of_the_model_is_one_line(kind, tok, tmp_path):
    """In the first evaluation, from the cache."""
    folder = save(tmp_path, random_model(kind, tok, **REFUSED[kind][0]), tok)
    cfg = rm.Config(model=folder, device="cpu", algo="grpo", max_new_tokens=16, eval_prompts=2)
    with pytest.raises(UserError, match=f"--model {folder} failed in `read`") as error:
        rm.evaluate(0, rm.load_models(cfg), cfg)
    assert "\n" not in str(error.value)


def test_an_exception_of_an_updates_pass_shows_where_it_is(tok, training):
    """Mostly it is a learner's own, in token_logps. So who brings a model that raises one there, sees it as it is, too."""
    models = models_of(random_model("Llama4Text", tok, **REFUSED["Llama4Text"][0]), tok, training)
    trajs = rm.rollout(models, [300], 2, training, 0)
    with pytest.raises(AttributeError, match="last_hidden_state"):
        rm.check_ratios(trajs, models, training)


def test_who_cannot_be_a_critic_is_told_of_grpo(tok, tmp_path):
    folder = save(tmp_path, random_model("Olmo2", tok), tok)
    assert rm.load_models(rm.Config(model=folder, device="cpu", algo="grpo")).critic is None
    with pytest.raises(UserError, match="cannot be a critic: take --algo grpo"):
        rm.load_models(rm.Config(model=folder, device="cpu"))
    assert rm.load_models(rm.Config(model=folder, device="cpu", play=7)).critic is None, "a player needs none"


def first_ratios(cfg, monkeypatch, dtype=None):
    """-> of each gradient step of one iteration: the mean of |ratio - 1|. With a dtype: under autocast, here on the CPU."""
    found = []
    policy_loss = rm.policy_loss

    def spy(logp, entropy, old_logp, adv, cfg):
        found.append(((logp - old_logp).exp() - 1).abs().mean().item())
        return policy_loss(logp, entropy, old_logp, adv, cfg)
    with monkeypatch.context() as patch:
        patch.setattr(rm, "policy_loss", spy)
        patch.setattr(rm, "check_ratios", lambda *rest: None)  # it wants fp32's equality on a CPU
        if dtype is not None:
            for name, value in dict(device="cpu", fast_dtype=dtype, _enabled=True).items():
                patch.setattr(rm.autocast, name, value)
        models = rm.load_models(cfg)
        models.optimizer = rm.make_optimizer(models, cfg)
        rm.iterate(1, models, cfg)
    return found


def test_under_autocast_every_update_sees_the_weights_of_the_last_step(folder, monkeypatch):
    """autocast keeps its copies of the weights until its outermost block ends: around a whole iteration all updates would
    read those of the rollout. And a block inside itself would leave it switched on."""
    cfg = rm.Config(model=folder, device="cpu", env="bandit", prompts=2, rollouts=4, update_size=8, epochs=4, lr=3e-3)
    plain, under_autocast = first_ratios(cfg, monkeypatch), first_ratios(cfg, monkeypatch, torch.bfloat16)
    assert len(plain) == len(under_autocast) >= 4 and not torch.is_autocast_enabled("cpu")
    assert under_autocast[0] < 0.05 and plain[0] < 1e-4, "before the first step all ratios are 1, in bf16 roughly"
    moved, truth = np.mean(under_autocast[2:]), np.mean(plain[2:])
    assert moved > 0.75 * truth > 0.1, "after the first step they move as in fp32"
