"""What depends on the machine: bf16, threads, memory."""
import contextlib
import os
import re

import torch

from support.errors import UserError, need, one_line


def check(device):
    need(re.fullmatch(r"cpu|mps|cuda(:\d+)?", device),
         f"--device is {device}. It must be cpu, cuda, cuda:N or mps.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device} cannot be used: {one_line(error)}") from error
    if device == "mps":
        print("note: --device mps is untested. Networks calculate in fp32 there.")
    if device.startswith("cuda") and not has_bf16(device):
        print("note: this GPU has no bf16 arithmetic, so networks calculate in fp32")


def has_bf16(device):  # older GPUs would only imitate it, which is slow
    return device.startswith("cuda") and torch.cuda.get_device_capability(device) >= (8, 0)


def autocast(device):
    """On a GPU that has bf16, networks calculate in it. Their weights stay fp32, because a step of
    1e-6 would vanish in bf16.

    Autocast keeps its bf16 copies of the weights until its `with` ends.
    """
    return torch.autocast("cuda", torch.bfloat16, enabled=has_bf16(device))


def rounding(device):  # -> how far apart two ways to the same logits may be, on average
    with autocast(device):
        in_bf16 = torch.is_autocast_enabled(torch.device(device).type)
    # Measured in bf16: 0.004 for random weights, up to 0.051 in an episode of SmolLM2-135M.
    return 0.1 if in_bf16 else 1e-4


@contextlib.contextmanager
def torch_settings(policy):
    """Inside, a small model uses one thread, because it gains nothing from more. And cuDNN's
    attention is off: it would plan anew for each length of a text, and ours grow with each token.
    """
    threads, cudnn = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()
    if sum(weights.numel() for weights in policy.parameters()) < 2.5e6:
        torch.set_num_threads(1)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def episodes_at_once(policy, cfg):
    """How many episodes an evaluation plays side by side: 256 on a CPU, 64 on a GPU, or the largest
    power of two whose cache fits into a quarter of the memory. What counts is all the memory, not
    what is free now, so that evaluations can be repeated.
    """
    config = getattr(policy, "config", None)
    layers = getattr(config, "num_hidden_layers", None) or 1
    width = getattr(config, "head_dim", None) or (
        getattr(config, "hidden_size", 0) // (getattr(config, "num_attention_heads", None) or 1))
    heads = getattr(config, "num_key_value_heads", None) or (
        getattr(config, "num_attention_heads", None) or 1)
    tokens = cfg.max_turns * (cfg.max_new_tokens + 200)
    cache = 2 * layers * heads * width * 4 * tokens  # bytes of an episode
    fitting = memory(cfg.device) // 4 // max(cache, 1)
    at_most = 64 if cfg.device.startswith("cuda") else 256
    return min(at_most, 2 ** max(0, fitting.bit_length() - 1))


def memory(device):  # -> bytes
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows does not say
        return 8 * 2 ** 30
