"""A random two-layer Llama on `tiny`'s tokenizer (no cold start, no download), and policies that say what a test wants."""
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # no network, no window
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch
import transformers

import ragen_mini


def random_llama(vocab, **options):
    torch.manual_seed(0)
    sizes = dict(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=None, eos_token_id=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | options)).eval()
    with torch.no_grad():  # the default initialisation is nearly uniform: sharpen it, or greedy choices are coin flips
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(12)
    return model


@pytest.fixture(scope="session")
def tok():
    return ragen_mini.tiny_tokenizer()


@pytest.fixture(scope="session")
def llama(tok):
    return random_llama(len(tok))


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tok, llama):
    path = tmp_path_factory.mktemp("model")
    llama.save_pretrained(path)
    tok.save_pretrained(path)
    return str(path)


@pytest.fixture
def cfg(folder):
    return ragen_mini.Config(model=folder, device="cpu", max_new_tokens=12, iterations=2, lr=1e-3, critic_lr=1e-3)


class Scripted(torch.nn.Module):
    """A policy whose answers are given: answers[k] in turn k (the last one again from then on), to every row alike."""

    def __init__(self, answers, vocab):
        super().__init__()
        self.answers, self.vocab, self.turn = answers, vocab, -1

    def forward(self, input_ids, **kwargs):
        self.turn, self.t = (self.turn + 1, 0) if input_ids.shape[1] > 1 else (self.turn, self.t + 1)
        answer = self.answers[min(self.turn, len(self.answers) - 1)]
        logits = torch.zeros(len(input_ids), 1, self.vocab)
        logits[:, :, answer[self.t % len(answer)]] = 50.0
        return SimpleNamespace(logits=logits)


@pytest.fixture
def play(monkeypatch, tok):
    """play(texts, name, seeds, cfg) -> trajectories in which every turn was answered with the given texts."""
    def run(texts, name, seeds, cfg, n=1, tok=tok):
        answers = [text if isinstance(text, list) else tok(text + "<|im_end|>").input_ids for text in texts]
        return ragen_mini.rollout(Scripted(answers, len(tok)), tok, name, seeds, n, cfg, 0, 1.0)
    return run
