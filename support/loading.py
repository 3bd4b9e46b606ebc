"""Loading a model: the included one, that of a run, a folder, or one of the Hugging Face hub."""
import contextlib
import importlib.metadata
import json
import threading
from pathlib import Path

import huggingface_hub  # comes with transformers, as packaging does
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
from transformers import logging

from support import device
from support.errors import UserError, need, one_line

TINY = Path(__file__).parent.parent / "tiny"

# The oldest versions with which this was tested.
OLDEST = {"torch": "2.11", "transformers": "5.17", "matplotlib": "3.10"}


def weights_of(model):  # -> a folder, or the name of a model of the Hugging Face hub
    if model == "tiny":
        return TINY
    folder = Path(model).expanduser()
    # The folder of a run holds its model, and the log.
    is_run = Path(folder, "checkpoint").is_dir() and Path(folder, "log.jsonl").is_file()
    return Path(folder, "checkpoint") if is_run else folder


def is_tiny(model):
    """Is this the included model, or a model that was trained from it? Its config.json says so."""
    try:
        config = json.loads(Path(weights_of(model), "config.json").read_text())
    except (OSError, ValueError):  # such as the name of a model of the hub
        return False
    return isinstance(config, dict) and config.get("ragen_mini_presets") == "tiny"


def load_policy(cfg):  # -> policy, tokenizer
    check_versions()
    source = weights_of(cfg.model)
    check_source(source, cfg)
    device.check(cfg.device)
    policy, missing = load_network(AutoModelForCausalLM, cfg)
    need(not missing, f"--model {cfg.model}: its files lack {len(missing)} weights of the network.")
    try:
        tok = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # transformers raises many kinds, and says best what is wrong
        raise UserError(f"--model {cfg.model}: its tokenizer cannot be loaded: "
                        f"{one_line(error)}") from error
    need(tok.chat_template,
         f"--model {cfg.model} has no chat template. Take a model that was made for chat.")
    known = policy.get_input_embeddings().weight.shape[0]
    need(len(tok) <= known,
         f"--model {cfg.model}: its tokenizer has {len(tok)} tokens, but the network knows only "
         f"{known}. Call policy.resize_token_embeddings({len(tok)}), and save the model again.")
    return policy, tok


def check_versions():
    for package, oldest in OLDEST.items():
        found = importlib.metadata.version(package)
        need(Version(found) >= Version(oldest),
             f"{package} {found} is installed, but {oldest} or later is needed: "
             f"pip install -r requirements.txt")


def check_source(source, cfg):  # source: a folder, or the name of a model of the hub
    if source.is_dir():
        whole = any(source.glob("model*.safetensors*"))
        need(whole or not Path(source, "adapter_config.json").exists(),
             f"--model {cfg.model} is an adapter (LoRA), not a whole model. Merge it first: "
             f"peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload()"
             f".save_pretrained(NEW), and save the tokenizer in NEW, too.")
        need(any(source.glob("*.safetensors*")),
             f"--model {cfg.model}: there is no *.safetensors in this folder.")
        return
    # owner/name may be on the hub, unless there is a folder `owner`.
    need(len(source.parts) == 1 or (len(source.parts) == 2 and not source.parent.is_dir()),
         f"--model {cfg.model}: there is no such folder.")
    name = source.as_posix()
    if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
        return
    try:  # one short question, since from_pretrained would try again for a minute
        huggingface_hub.HfApi().model_info(name, timeout=10)
    except Exception as error:
        raise UserError(f"--model {cfg.model} is neither a folder here, nor in the cache of the "
                        f"Hugging Face hub, and the hub says: {one_line(error)}") from error


def load_critic(cfg):
    """The network of the policy (causal, too), with a new head of one output."""
    try:
        critic, _ = load_network(AutoModelForTokenClassification, cfg, num_labels=1)
    except UserError as error:
        raise UserError(f"{error} (as a critic; --algo grpo needs none)") from error
    return critic


LOADING = threading.Lock()  # from_pretrained must not run in two threads at once


def load_network(kind, cfg, **options):  # kind: a class of transformers -> network, missing weights
    """The weights are fp32. from_pretrained leaves dropout off."""
    try:
        with LOADING, quiet_transformers():
            network, report = kind.from_pretrained(
                weights_of(cfg.model), dtype=torch.float32, output_loading_info=True, **options)
    except Exception as error:
        raise UserError(f"--model {cfg.model} cannot be loaded: {one_line(error):.400}") from error
    if report["unexpected_keys"] and kind is AutoModelForCausalLM:
        print(f"note: {len(report['unexpected_keys'])} weights in the files of {cfg.model} have no "
              f"place in the network that its config.json describes")
    return network.to(cfg.device), report["missing_keys"]


@contextlib.contextmanager
def quiet_transformers():
    """Inside, transformers shows no progress bars, and is silent about the critic's new head."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
