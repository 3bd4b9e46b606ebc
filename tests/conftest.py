"""A random two-layer Llama with the tokenizer of `tiny`, and policies that say what a test wants.

Nothing is downloaded.
"""
import gc
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

# No network, no window, no GPU: the expected numbers are those of a CPU.
os.environ |= {"MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Such small models gain nothing from more threads, and threads that wait for a busy core lose much.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch
import transformers

import plots
import ragen_mini
from support import loading
from support.errors import UserError


def pytest_collection_finish():
    """What was imported stays. So the garbage collector need not look through it again and again,
    which saves a tenth of the time.
    """
    gc.freeze()


DRAW = plots.curves


@pytest.fixture(scope="session", autouse=True)
def _no_pictures():
    """Drawing takes longer than a small run. An empty file will do."""
    plots.curves = lambda runs, out, *rest, **named: Path(out).touch() or out


@pytest.fixture(scope="session", autouse=True)
def _the_program():
    """Runs that tests make are named as those of ragen_mini.py."""
    sys.argv[:] = ["ragen_mini.py"]


@pytest.fixture
def pictures(monkeypatch):
    """A test that asks for this gets real pictures."""
    monkeypatch.setattr(plots, "curves", DRAW)


def random_llama(vocab, sharpen=12, **options):
    torch.manual_seed(0)
    sizes = dict(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                 num_attention_heads=4, max_position_embeddings=2048, tie_word_embeddings=False,
                 bos_token_id=None, eos_token_id=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | options)).eval()
    # The default initialisation is nearly uniform, and greedy choices would be tossed coins.
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(sharpen)
    return model


@pytest.fixture(scope="session")
def tok():
    return transformers.AutoTokenizer.from_pretrained(loading.TINY)


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
    """A copy of the included model, for everything that reads and writes folders."""
    return shutil.copytree(ROOT / "tiny", tmp_path_factory.mktemp("model") / "copy").as_posix()


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory, tok, llama):
    return save(tmp_path_factory.mktemp("random"), llama, tok)


@pytest.fixture
def cfg(folder):
    return ragen_mini.Config(model=folder, device="cpu", max_new_tokens=12, iterations=2, lr=1e-3,
                             critic_lr=1e-3)


def refused(function, *args):  # -> the message of a UserError, which must be one line
    with pytest.raises(UserError) as stop:
        function(*args)
    message = str(stop.value)
    assert message and "\n" not in message
    return message


class Scripted(torch.nn.Module):
    """A policy whose answers are given: answers[k] in turn k, and the last one again from then on.

    All rows get the same answer. Its decoder returns logits instead of hidden states, so its head
    has nothing to do.
    """

    def __init__(self, answers, vocab):
        super().__init__()
        self.answers = answers
        self.vocab = vocab
        self.turn = -1
        self.t = 0  # which token of the answer comes next

    def get_decoder(self):
        return self

    def get_output_embeddings(self):
        return torch.nn.Identity()

    def forward(self, input_ids, past_key_values, **kwargs):
        # It remembers nothing, but a cache wants to be filled.
        keys = torch.zeros(len(input_ids), 1, input_ids.shape[1], 1)
        past_key_values.update(keys, keys, 0)
        self.t += 1
        if input_ids.shape[1] > 1:  # a message
            self.turn += 1
            self.t = 0
        answer = self.answers[min(self.turn, len(self.answers) - 1)]
        logits = torch.zeros(*input_ids.shape, self.vocab)
        logits[:, :, answer[self.t % len(answer)]] = 50.0
        return SimpleNamespace(last_hidden_state=logits)


@pytest.fixture
def play(tok):
    """play(texts, name, seeds, cfg) -> trajectories whose turns were answered with these texts. A
    text may also be a list of ids, which then needs its own end.
    """
    def run(texts, name, seeds, cfg, n=1, tok=tok):
        answers = [text if isinstance(text, list) else tok(text + "<|im_end|>").input_ids
                   for text in texts]
        models = SimpleNamespace(policy=Scripted(answers, len(tok)), tok=tok)
        return ragen_mini.rollout(models, seeds, n, ragen_mini.replace(cfg, env=name), 0)
    return run
