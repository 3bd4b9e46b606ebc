"""Which architectures are right, and which are refused in one line? Random weights, `tiny`'s tokenizer. The independent
truth is a plain forward pass of the unmodified model over the finished episode."""
import copy

import pytest
import torch
import transformers

import ragen_mini as rm
from envs import UserError

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=4096, eos_token_id=2, pad_token_id=0, bos_token_id=None)
OLD_SIZES = dict(n_embd=64, n_layer=2, n_head=4, n_positions=4096, eos_token_id=2)
NARROW = dict(sliding_window=100)
WIDE = dict(sliding_window=4000)
RIGHT = {
    "Llama": {}, "Qwen2": {}, "Qwen3": dict(head_dim=16), "Gemma": dict(head_dim=16), "Gemma3Text": dict(head_dim=16),
    "GPT2": {}, "GPTNeoX": {}, "GPTJ": dict(rotary_dim=16), "Phi3": {}, "Mistral": WIDE, "Olmo2": {}, "SmolLM3": {}}
WINDOW = "it looks back 100 tokens only (sliding window)"
HEAD = "it changes its logits behind the output layer"
CACHE = "it does not work with the cache of the rollout"
REFUSED = {
    "Mistral": (NARROW, WINDOW),
    "Qwen2": (dict(use_sliding_window=True, max_window_layers=0, **NARROW), WINDOW),
    "Gemma3Text": (dict(head_dim=16, **NARROW), WINDOW),
    "Gemma2": (dict(head_dim=16), HEAD),
    "Granite": (dict(logits_scaling=4.0), HEAD),
    "Rwkv": (dict(attention_hidden_size=64), "recurrent"),
    "Mamba": ({}, CACHE),
    "Falcon": ({}, CACHE),
    "OPT": (dict(ffn_dim=128, word_embed_proj_dim=64), CACHE)}


def random_model(kind, tok, attention=None, **options):
    torch.manual_seed(0)
    sizes = SIZES
    if kind in ("GPT2", "GPTJ"):
        sizes = OLD_SIZES
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(tok), initializer_range=0.3, **sizes | options)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def check(policy, tok, cfg):
    cfg.max_new_tokens = 16
    first, longest = rm.check_chat(tok, policy, cfg)
    rm.check_short_cuts(policy, first, longest, cfg)


def largest_error(policy, tok, cfg):  # of the rollout's and of the update's log-probs
    trajs = rm.rollout(policy, tok, "sokoban", [300, 301], 2, cfg, 0, 1.0)
    batch = rm.collate(trajs, "cpu")
    mask = batch["mask"]
    with torch.no_grad():
        plain = policy(input_ids=batch["inputs"]).logits.log_softmax(-1).gather(2, batch["targets"][:, :, None])[:, :, 0]
    in_update = rm.grid_logps(policy, batch, cfg)
    return max((ours - plain)[mask].abs().max().item() for ours in (batch["old_logp"], in_update))


EAGER = ("Llama", "Olmo2", "GPT2")


@pytest.mark.parametrize("kind, attention", [*((kind, None) for kind in RIGHT), *((kind, "eager") for kind in EAGER)])
def test_right(kind, attention, tok, cfg):
    """Eager attention adds its mask to the scores: a boolean one would hide nothing."""
    policy = random_model(kind, tok, attention, **RIGHT[kind])
    check(policy, tok, cfg)
    assert largest_error(policy, tok, cfg) < 2e-4


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind, tok, cfg):
    options, says = REFUSED[kind]
    policy = random_model(kind, tok, **options)
    with pytest.raises(UserError) as error:
        check(policy, tok, cfg)
    assert says in str(error.value)
    assert f"({kind.removesuffix('Text')}ForCausalLM)" in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_refused_would_be_wrong(tok, cfg):
    """Or the check would forbid what works."""
    cfg.max_new_tokens = 16
    for kind, options in (("Mistral", NARROW), ("Granite", dict(logits_scaling=4.0))):
        assert largest_error(random_model(kind, tok, **options), tok, cfg) > 0.01


def test_a_window_is_no_harm_to_shorter_episodes(tok, cfg):
    policy = random_model("Mistral", tok, sliding_window=250)
    cfg.max_turns = 3
    check(policy, tok, cfg)
    cfg.max_turns = 5
    with pytest.raises(UserError, match="lower --max-new-tokens or --max-turns"):
        check(policy, tok, cfg)


def test_who_cannot_be_a_critic_is_told_of_grpo(tok, tmp_path):
    random_model("Olmo2", tok).save_pretrained(tmp_path)
    tok.save_pretrained(tmp_path)
    cfg = rm.Config(model=str(tmp_path), device="cpu", algo="grpo")
    assert rm.load_models(cfg).critic is None
    cfg.algo = "ppo"
    with pytest.raises(UserError, match="cannot be a critic: --algo grpo needs none"):
        rm.load_models(cfg)


# -------------------------------------------------------------------------------------- ends of answers
def test_any_end_of_sequence_ends_an_answer(play, tok, cfg):
    """A model may have two: the template's end of turn, and one for the end of a text."""
    other = tok("Up", add_special_tokens=False).input_ids[0]  # any token will do
    assert other != tok.eos_token_id
    ids = tok("</think><answer>Down</answer>", add_special_tokens=False).input_ids

    class Ends:
        eos_token_id = [other, tok.eos_token_id]
    for last in (other, tok.eos_token_id):
        cfg.max_turns, cfg.max_new_tokens = 2, 30
        traj, = play([ids + [last]], "frozenlake", [300], cfg, ends=Ends)
        assert traj.turns[0]["valid"] and traj.turns[0]["tokens"] == len(ids) + 1
        at = traj.mask.index(True) + len(ids)
        assert traj.ids[at] == last and traj.mask[at]
        assert not traj.mask[at + 1]
        assert (traj.ids[at + 1] == tok.eos_token_id) == (last == other), "the template's end stands there once"


def test_a_template_that_leaves_an_empty_thought_gets_no_second_tag(tok, cfg):
    tok = copy.deepcopy(tok)
    tok.chat_template = tok.chat_template.replace("assistant\n", "assistant\n<think>\n\n</think>\n")
    text = tok.decode(rm.encode(tok, cfg.no_think, "State", False))
    assert text.count("<think>") == 1 and "</think>" not in text


def test_a_forbidden_token_has_no_entropy_and_no_gradient():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    entropy = rm.entropy_of(logits.log_softmax(-1))
    truth = torch.distributions.Categorical(logits=torch.tensor([[0.0, 1.0]])).entropy()
    assert torch.allclose(entropy, truth)
    entropy.sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[0, 2] == 0
