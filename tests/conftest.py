"""A random two-layer Llama on `tiny`'s tokenizer, and policies that say what a test wants. Nothing is downloaded."""
import functools
import gc
import inspect
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # no network, no window
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # numbers of a CPU are expected; what needs a GPU is in extras/gpu.py
# Such small models gain nothing from more, and threads that wait for a busy core lose much.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch
import transformers

import plots
import ragen_mini


def pytest_configure(config):
    """Who edits a function may break what is made of its text (test_tutorial.py): the other tests still say if it is right."""
    config.option.continue_on_collection_errors = True


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not look through it again and again (a tenth of the time)."""
    gc.freeze()


inspect.getsource = functools.cache(inspect.getsource)  # parse_config asks for it, which parses the file each time


DRAW = plots.dashboard


@pytest.fixture(scope="session", autouse=True)
def _no_pictures():
    """Drawing takes longer than a small run: an empty file will do."""
    plots.dashboard = lambda runs, out, *rest, **named: Path(out).touch() or out


@pytest.fixture
def pictures(monkeypatch):
    """A test that asks for this gets real pictures."""
    monkeypatch.setattr(plots, "dashboard", DRAW)


def random_llama(vocab, sharpen=12, **options):
    torch.manual_seed(0)
    sizes = dict(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=None, eos_token_id=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | options)).eval()
    with torch.no_grad():  # the default initialisation is nearly uniform: sharpen it, or greedy choices are coin flips
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(sharpen)
    return model


@pytest.fixture(scope="session")
def tok():
    return transformers.AutoTokenizer.from_pretrained(ragen_mini.TINY)


@pytest.fixture(scope="session")
def llama(tok):
    return random_llama(len(tok))


def save(path, *parts):
    for part in parts:
        part.save_pretrained(path)
    return str(path)


def equal(a, b):  # numbers, tensors, and dictionaries of them
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a == b


def rows_of(out):  # of the log of a run
    return [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]


def untimed(rows):  # what is the same whenever the run is repeated
    return [{key: x for key, x in row.items() if not key.startswith("seconds")} for row in rows]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A copy of the embedded model that does not go by its name: for everything that reads and writes folders."""
    return shutil.copytree(ROOT / "tiny", tmp_path_factory.mktemp("model") / "copy").as_posix()


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory, tok, llama):
    return save(tmp_path_factory.mktemp("random"), llama, tok)


@pytest.fixture
def passes_as_before(monkeypatch):  # after recipes that change how much a pass reads, or how exactly
    monkeypatch.setattr(ragen_mini, "micro_batches", ragen_mini.micro_batches)
    autocast = dict(vars(ragen_mini.autocast))
    yield
    vars(ragen_mini.autocast).update(autocast)


@pytest.fixture
def cfg(folder):
    return ragen_mini.Config(model=folder, device="cpu", max_new_tokens=12, iterations=2, lr=1e-3, critic_lr=1e-3)


class Scripted(torch.nn.Module):
    """A policy whose answers are given: answers[k] in turn k (the last one again from then on), to every row alike."""

    def __init__(self, answers, vocab):
        super().__init__()
        self.answers = answers
        self.vocab = vocab
        self.turn = -1
        self.t = 0  # token of the answer

    def forward(self, input_ids, past_key_values, logits_to_keep, **kwargs):
        keys = torch.zeros(len(input_ids), 1, input_ids.shape[1], 1)
        past_key_values.update(keys, keys, 0)  # it remembers nothing, but a cache wants to be filled
        self.t += 1
        if input_ids.shape[1] > 1:  # a message
            self.turn += 1
            self.t = 0
        answer = self.answers[min(self.turn, len(self.answers) - 1)]
        logits = torch.zeros(len(input_ids), logits_to_keep, self.vocab)
        logits[:, :, answer[self.t % len(answer)]] = 50.0
        return SimpleNamespace(logits=logits)


@pytest.fixture
def play(tok):
    """play(texts, name, seeds, cfg) -> trajectories in which every turn was answered with the given texts."""
    def run(texts, name, seeds, cfg, n=1, tok=tok):
        answers = [text if isinstance(text, list) else tok(text + "<|im_end|>").input_ids for text in texts]
        models = SimpleNamespace(policy=Scripted(answers, len(tok)), tok=tok)
        return ragen_mini.rollout(models, seeds, n, ragen_mini.replace(cfg, env=name), 0)
    return run
