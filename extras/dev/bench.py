"""How long does an iteration take, with this code and with what a student would write?

The student calls `model.generate` on the whole history in every turn. Then it makes padded updates
on logits of every token, with old log-probs from a forward pass of their own.

    python extras/dev/bench.py [--model FOLDER] [--env ENV] [--prompts P] [--rollouts N]
                               [--max-new-tokens n] [--max-turns K] [--rounds n] [--threads n]
    python extras/dev/bench.py --agree         how far fast paths and plain ones differ
    python extras/dev/bench.py --activations   memory per token: which model fits on which card?

Both sides have the same weights (the learning rate is 0), levels, limits and environments. Both do
GRPO without KL penalty on the CPU, in one process, taking turns. They sample different answers, so
time per token is reported, too. Peak memory is the resident set of a process that does the work of
one side alone (on Linux). No test asserts a time. In commit afbae63 this program measures more: how
time grows, bf16 on a CPU, and updates that read the first message of a group once.
"""
import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

import envs
import ragen_mini as rm
from extras.dev import mutants

# Lower ones belong to the held-out levels.
FIRST_SEED = len(envs.EVAL_SEEDS)


# ----------------------------------------------------------------------- what a student would write
@torch.no_grad()
def student_rollout(models, cfg, seeds, sampling_seed):  # -> trajectories
    """Every turn reads the whole history again."""
    torch.manual_seed(sampling_seed)
    policy, tok = models.policy, models.tok
    ends = rm.end_tokens(models, cfg)
    trajs = []
    for group, seed in enumerate(seeds):
        for episode in range(cfg.rollouts):
            trajs.append(rm.begin(seed, episode, group, tok, cfg))
    live = trajs
    while live:
        ids, seen = padded_on_the_left(live, tok, policy.device)
        written = policy.generate(
            input_ids=ids, attention_mask=seen, max_new_tokens=cfg.max_new_tokens,
            pad_token_id=tok.pad_token_id, eos_token_id=ends,
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        answers = written[:, ids.shape[1]:].tolist()
        for traj, answer in zip(live, answers):
            for token in answer:
                traj.append([token], True)
                if token in ends:  # what follows is padding
                    break
            rm.take_turn(traj, tok, cfg, ends)
        live = [traj for traj in live if not traj.done]
    return trajs


def padded_on_the_left(trajs, tok, device):  # generate writes on the right -> ids, seen: (b,T)
    width = max(len(traj.ids) for traj in trajs)
    ids, seen = [], []
    for traj in trajs:
        pads = width - len(traj.ids)
        ids.append([tok.pad_token_id] * pads + traj.ids)
        seen.append([0] * pads + [1] * len(traj.ids))
    return torch.tensor(ids, device=device), torch.tensor(seen, device=device)


def student_update(trajs, policy, optimizer, cfg):
    R = rm.returns(trajs, cfg)
    advantage = rm.grpo_advantages(R).flatten()
    parts = []
    for rows in torch.randperm(len(trajs)).split(cfg.minibatch_size):
        some = [trajs[row] for row in rows]
        batch = rm.collate(some, "cpu")
        seen = [torch.ones(len(traj.ids) - 1, dtype=torch.long) for traj in some]
        batch["seen"] = pad_sequence(seen, batch_first=True)
        with torch.no_grad():
            old_logp = student_logps(policy, batch)
        parts.append((batch, advantage[rows, None], old_logp))
    for batch, A, old_logp in parts:
        ratio = (student_logps(policy, batch) - old_logp).exp()
        clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
        loss = -torch.min(ratio * A, clipped * A)
        loss = (loss * batch["mask"]).sum() / batch["mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), rm.MAX_GRAD_NORM)
        optimizer.step()


def student_logps(policy, batch):  # -> (B,T-1)
    logits = policy(input_ids=batch["inputs"], attention_mask=batch["seen"]).logits
    logp = logits.log_softmax(-1)
    return logp.gather(2, batch["targets"][:, :, None]).squeeze(2)


# ------------------------------------------------------------------------------------- side by side
def load(args):  # -> models with learning rate 0, cfg
    cfg = rm.Config(
        env=args.env, success_rate=1 / 3, max_turns=args.max_turns,
        model=args.model, max_new_tokens=args.max_new_tokens, device="cpu",
        prompts=args.prompts, rollouts=args.rollouts, algo="grpo", kl_coef=0.0, lr=0.0)
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    # Plain sampling, without the penalties that the maker of the model may have set:
    models.policy.generation_config = transformers.GenerationConfig()
    return models, cfg


def our_rollout(models, cfg, seeds, dice_seed):
    return rm.rollout(models, seeds, cfg.rollouts, cfg, dice_seed)


def our_update(trajs, models, cfg, seed):
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    rm.updates(batch, models, cfg, seed)


def iteration(side, models, cfg, i):  # -> seconds of rollout and of update, tokens written
    """side: ours or generate."""
    first = FIRST_SEED + i * cfg.prompts
    seeds = range(first, first + cfg.prompts)
    start = time.perf_counter()
    if side == "ours":
        trajs = our_rollout(models, cfg, seeds, i)
        middle = time.perf_counter()
        our_update(trajs, models, cfg, i)
    else:
        trajs = student_rollout(models, cfg, seeds, i)
        middle = time.perf_counter()
        student_update(trajs, models.policy, models.optimizer, cfg)
    end = time.perf_counter()
    return middle - start, end - middle, sum(sum(traj.mask) for traj in trajs)


def compare(args):
    models, cfg = load(args)
    times = {"ours": [], "generate": []}
    for i in range(args.rounds + 1):  # the first round warms up
        for side in sorted(times, reverse=i % 2 == 0):  # taking turns at going first
            times[side].append(iteration(side, models, cfg, i))
    each = {}
    for side, rows in times.items():
        rollout, update, tokens = np.array(rows[1:]).T
        total = rollout + update
        each[side] = {"iteration": total, "rollout": rollout, "update": update,
                      "per token": total / tokens}
        medians = {name: np.median(column) for name, column in each[side].items()}
        print(f"{side:9} {medians['iteration']:6.2f} s an iteration = "
              f"rollout {medians['rollout']:.2f} + update {medians['update']:.2f}; "
              f"{np.median(tokens):.0f} tokens, "
              f"{np.median(tokens / rollout):.0f} tokens/s in the rollout, "
              f"{1e6 * medians['per token']:.0f} ms per 1,000 tokens; "
              f"peak {memory_of(side)} MiB", flush=True)
    for name, seconds in each["ours"].items():
        ratio = seconds / each["generate"][name]
        rounds = f"of {len(ratio)} rounds: {ratio.min():.2f} to {ratio.max():.2f}"
        print(f"ours / generate, {name:9} {np.median(ratio):.2f}  ({rounds})")


def memory_of(side):  # -> peak in MiB of a process that only does its side's work
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", side]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return found.stdout.strip()


def peak_memory(args):  # what that process does
    models, cfg = load(args)
    for i in range(2):
        iteration(args.memory_of, models, cfg, i)
    status = Path("/proc/self/status").read_text()  # Linux
    peak = re.search(r"VmHWM:\s+(\d+)", status)
    print(int(peak[1]) // 1024)


# ------------------------------------------------------------------------------- fast against plain
def gradient(trajs, models, cfg):  # -> of the GRPO loss on all trajectories at once, clipped
    seen = []

    class Catch(torch.optim.SGD):
        def step(self):
            all_grads = [weight.grad.flatten() for weight in models.policy.parameters()]
            seen.append(torch.cat(all_grads))
    cfg.minibatch_size = len(trajs)
    models.optimizer = Catch(models.policy.parameters(), lr=0.0)
    our_update(trajs, models, cfg, 0)
    return seen[0]


def largest(one, other):
    return (one - other).abs().max().item()


@torch.no_grad()
def differences(traj, policy, cfg):  # -> cached, plain, chunked of one trajectory (see `agree`)
    batch = rm.collate([traj], "cpu")
    mask = batch["mask"]
    logp_of_all = policy(input_ids=batch["inputs"]).logits[mask].log_softmax(-1)
    targets = batch["targets"][mask]
    logp = logp_of_all.gather(1, targets[:, None])[:, 0]
    entropy = torch.distributions.Categorical(logits=logp_of_all).entropy()
    whole_logp, whole_entropy = rm.token_logps(policy, batch, cfg)
    full = rm.CHUNK_LOGITS
    rm.CHUNK_LOGITS = 64 * policy.config.vocab_size
    chunked_logp, chunked_entropy = rm.token_logps(policy, batch, cfg)
    rm.CHUNK_LOGITS = full
    cached = largest(logp, batch["old_logp"][mask])
    plain = max(largest(logp, whole_logp), largest(entropy, whole_entropy))
    chunked = max(largest(whole_logp, chunked_logp), largest(whole_entropy, chunked_entropy))
    return cached, plain, chunked


def agree(args):
    """Compares the fast paths with the plain ones, on real answers of the model."""
    models, cfg = load(args)
    trajs = our_rollout(models, cfg, range(FIRST_SEED, FIRST_SEED + cfg.prompts), 0)
    found = [differences(traj, models.policy, cfg) for traj in trajs]
    cached, plain, chunked = np.max(found, axis=0)
    micro = gradient(trajs, models, cfg)
    cfg.micro_tokens, rm.CHUNK_LOGITS = 10 ** 9, 10 ** 12
    whole = gradient(trajs, models, cfg)
    tokens = sum(sum(traj.mask) for traj in trajs)
    print(f"largest differences over {tokens} tokens: "
          f"log-probs of the cached rollout and of a fresh pass {cached:.1e}; "
          f"log-probs and entropies of trained tokens only and of all {plain:.1e}; "
          f"in chunks of 64 tokens and whole {chunked:.1e}; "
          f"gradient by micro-batches and whole {largest(micro, whole):.1e} "
          f"(its largest entry {whole.abs().max():.1e})")


def activations(args):
    """Bytes per token that the forward pass keeps for the backward pass, under bf16 autocast.

    They are the slope between 128 and 256 tokens, in which the bf16 copies of the weights cancel.
    """
    import peft
    shapes = {
        "SmolLM2-135M": transformers.LlamaConfig(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3),
        "Qwen2.5-0.5B": transformers.Qwen2Config(
            hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
            num_attention_heads=14, num_key_value_heads=2)}
    for name, config in shapes.items():
        config.vocab_size = 1000  # the logits are counted apart
        body = transformers.AutoModel.from_config(config)
        print(f"{name}: {bytes_a_token(body) / 1e6:.2f} MB a token", end="")
        adapters = peft.LoraConfig(r=8, target_modules="all-linear")
        print(f", with LoRA {bytes_a_token(peft.get_peft_model(body, adapters)) / 1e6:.2f}")


def bytes_a_token(body):
    return (bytes_kept(body, 256) - bytes_kept(body, 128)) / 128


def bytes_kept(body, T):
    storages = {}

    def pack(x):
        storage = x.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return x

    def unpack(x):
        return x
    ids = torch.randint(1000, (1, T))
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        # It is held, because otherwise its storages would be used again.
        hidden = body(input_ids=ids, use_cache=False)  # noqa: F841
    return sum(storages.values())


def about():  # -> first line of the output: where it comes from
    command = " ".join(["python extras/dev/bench.py", *sys.argv[1:]])
    return (f"{command}: commit {mutants.commit()}, {cpu()}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}")


def cpu():
    return re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]


def main():
    parser = argparse.ArgumentParser("bench.py", description=__doc__.partition("\n\n")[0])
    defaults = {"model": "tiny", "env": "frozenlake", "prompts": 8, "rollouts": 16,
                "max-new-tokens": 32, "max-turns": 5, "rounds": 10, "threads": 2, "memory-of": ""}
    for name, default in defaults.items():
        parser.add_argument("--" + name, type=type(default), default=default)
    modes = (agree, activations)
    for mode in modes:
        parser.add_argument("--" + mode.__name__, action="store_true")
    args = parser.parse_args()
    if min(args.rounds, args.threads) < 1:
        parser.error("--rounds and --threads: at least 1")
    torch.set_num_threads(args.threads)
    if args.memory_of:
        return peak_memory(args)
    print(about(), flush=True)
    for mode in modes:
        if getattr(args, mode.__name__):
            return mode(args)
    compare(args)


if __name__ == "__main__":
    main()
