"""How long does an iteration take, with this code and with what a student would write?

The student calls `model.generate` on the whole history in every turn. Then it makes padded updates
on logits of every token, with old log-probs from a forward pass of their own.

    python extras/dev/bench.py [--model FOLDER] [--env ENV] [--prompts P] [--rollouts N]
                               [--max-new-tokens n] [--max-turns K] [--rounds n] [--threads n]
    python extras/dev/bench.py --growth        how time grows with P*N, and with the turns
    python extras/dev/bench.py --turns         rollouts of five and of ten turns, for large models
    python extras/dev/bench.py --once          the update as it is, and with recipes.read_once
    python extras/dev/bench.py --bf16          this code with recipes.bf16, and as it is
    python extras/dev/bench.py --agree         how far fast paths and plain ones differ
    python extras/dev/bench.py --activations   memory per token: which model fits on which card?

Both sides have the same weights (the learning rate is 0), levels, limits and environments. Both do
GRPO without KL penalty on the CPU, in one process, taking turns. They sample different answers, so
time per token is reported, too. Peak memory is the resident set of a process that does the work of
one side alone (on Linux). A model folder called frozenlake_sft was trained on other texts than
ours, so it gets those. No test asserts a time.
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
import runs
from extras import recipes
from extras.dev import mutants

# Lower ones belong to the held-out levels.
FIRST_SEED = len(envs.EVAL_SEEDS)


# ----------------------------------------------------------------------- what a student would write
@torch.no_grad()
def student_rollout(models, cfg, seeds, sampling_seed, **how):  # -> trajectories
    """Every turn reads the whole history again. how: of `generate`; by default it samples."""
    how = how or {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(sampling_seed)
    policy, tok = models.policy, models.tok
    ends = rm.end_tokens(models, cfg)
    exist = [token for token in ends if token >= 0]  # see write_to_the_limit
    trajs = []
    for group, seed in enumerate(seeds):
        for episode in range(cfg.rollouts):
            trajs.append(rm.begin(seed, episode, group, tok, cfg))
    live = trajs
    while live:
        ids, seen = padded_on_the_left(live, tok, policy.device)
        written = policy.generate(
            input_ids=ids, attention_mask=seen, max_new_tokens=cfg.max_new_tokens,
            pad_token_id=tok.pad_token_id, eos_token_id=exist or None, **how)
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
SYSTEM = ("<|im_start|>system\nYou are solving the FrozenLake puzzle. "
          "Avoid the holes and go to the target.<|im_end|>\n")


def speak_like_frozenlake_sft(tok):
    """It knows one system message, no instructions, and its actions without "You have"."""
    message = rm.message

    def shorter(*args):
        return message(*args).replace("You have ", "")
    rm.message = shorter
    tok.chat_template = SYSTEM + (runs.TINY / "chat_template.jinja").read_text()


def load(args):  # -> models with learning rate 0, cfg
    cfg = rm.Config(
        env=args.env, success_rate=1 / 3, max_turns=args.max_turns,
        model=args.model, max_new_tokens=args.max_new_tokens, device="cpu",
        prompts=args.prompts, rollouts=args.rollouts, algo="grpo", kl_coef=0.0, lr=0.0)
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    # Plain sampling, without the penalties that the maker of the model may have set:
    models.policy.generation_config = transformers.GenerationConfig()
    if "frozenlake_sft" in args.model:
        speak_like_frozenlake_sft(models.tok)
    return models, cfg


def our_rollout(models, cfg, seeds, dice_seed):
    return rm.rollout(models, seeds, cfg.rollouts, cfg, dice_seed)


def our_update(trajs, models, cfg, seed):
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    rm.updates(batch, models, cfg, seed)


def iteration(side, models, cfg, i):  # -> seconds of rollout and of update, tokens written
    """side: ours, bf16 or generate."""
    first = FIRST_SEED + i * cfg.prompts
    seeds = range(first, first + cfg.prompts)
    recipes.calculate_in_bf16(side == "bf16")
    start = time.perf_counter()
    if side != "generate":
        trajs = our_rollout(models, cfg, seeds, i)
        middle = time.perf_counter()
        our_update(trajs, models, cfg, i)
    else:
        trajs = student_rollout(models, cfg, seeds, i)
        middle = time.perf_counter()
        student_update(trajs, models.policy, models.optimizer, cfg)
    end = time.perf_counter()
    return middle - start, end - middle, sum(sum(traj.mask) for traj in trajs)


def bf16(args):
    compare(args, "bf16", "ours")


def compare(args, one="ours", other="generate"):
    models, cfg = load(args)
    times = {one: [], other: []}
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
    for name, seconds in each[one].items():
        ratio = seconds / each[other][name]
        rounds = f"of {len(ratio)} rounds: {ratio.min():.2f} to {ratio.max():.2f}"
        print(f"{one} / {other}, {name:9} {np.median(ratio):.2f}  ({rounds})")


def memory_of(side):  # -> peak in MiB of a process that only does its side's work
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", side]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return found.stdout.strip()


def peak_memory(args):  # what that process does
    models, cfg = load(args)
    if args.memory_of == "read once":
        recipes.read_messages_once(models)
    for i in range(2):
        iteration(args.memory_of, models, cfg, i)
    status = Path("/proc/self/status").read_text()  # Linux
    peak = re.search(r"VmHWM:\s+(\d+)", status)
    print(int(peak[1]) // 1024)


# ------------------------------------------------------------------------------------------- growth
END_TOKENS = rm.end_tokens


def write_to_the_limit():
    """From now on nothing ends an answer. It has exactly max_new_tokens and is invalid, so every
    episode has all its turns.
    """
    rm.end_tokens = lambda models, cfg: [-1]  # a token that does not exist


def write_as_usual():
    rm.end_tokens = END_TOKENS


def once(args):
    """Both sides take turns, with the same trajectories in every round."""
    models, cfg = load(args)
    seeds = range(FIRST_SEED, FIRST_SEED + cfg.prompts)
    trajs = our_rollout(models, cfg, seeds, 0)
    decoder = models.policy.get_decoder()
    as_it_is = decoder.forward, rm.micro_batches
    recipes.read_messages_once(models)
    sides = {"as it is": as_it_is, "read once": (decoder.forward, rm.micro_batches)}
    times = {side: [] for side in sides}
    for i in range(args.rounds + 1):  # the first round warms up
        for side in sorted(sides, reverse=i % 2 == 0):
            decoder.forward, rm.micro_batches = sides[side]
            start = time.perf_counter()
            our_update(trajs, models, cfg, i)
            times[side].append(time.perf_counter() - start)
    lengths = [len(traj.ids) for traj in trajs]
    message = np.mean([traj.mask.index(True) for traj in trajs])
    print(f"{len(trajs)} trajectories of {np.mean(lengths):.0f} tokens, "
          f"{message:.0f} of them the first message")
    for side, seconds in times.items():
        print(f"{side:10} update {np.median(seconds[1:]):.2f} s, peak {memory_of(side)} MiB",
              flush=True)
    ratio = np.array(times["read once"][1:]) / np.array(times["as it is"][1:])
    print(f"read once / as it is {np.median(ratio):.2f}  "
          f"(of {len(ratio)} rounds: {ratio.min():.2f} to {ratio.max():.2f})")


def growth(args):
    models, cfg = load(args)
    sizes = [args.prompts * 2 ** i // 8 for i in range(6)]
    settings_by_size = [(prompts, 5) for prompts in sizes if prompts]
    by_turns = [(args.prompts, turns) for turns in (1, 2, 5, 10)]
    write_to_the_limit()
    measure_growth("full length", "ours", settings_by_size, models, cfg, args)
    measure_growth("full length", "ours", by_turns, models, cfg, args)
    measure_growth("full length", "generate", by_turns[2:], models, cfg, args)
    write_as_usual()
    measure_growth("real episodes", "ours", by_turns, models, cfg, args)


def measure_growth(title, side, settings, models, cfg, args):
    for cfg.prompts, cfg.max_turns in settings:
        rows = []
        for i in range(args.rounds + 1):
            seconds = iteration(side, models, cfg, i)[:2]
            rows.append(seconds)
        rollout, update = np.median(rows[1:], axis=0)  # the first one warms up
        print(f"{title}, {side}: {cfg.prompts * cfg.rollouts} trajectories, {cfg.max_turns} turns "
              f"of {cfg.max_new_tokens} tokens: rollout {rollout:.2f} s, update {update:.2f} s",
              flush=True)


def turns(args):
    """The rollout alone, because updates of a large model would take minutes."""
    models, cfg = load(args)
    write_to_the_limit()
    for cfg.max_turns in (5, 10):
        seconds = []
        for i in range(args.rounds + 1):
            start = time.perf_counter()
            trajs = our_rollout(models, cfg, range(1000, 1000 + cfg.prompts), i)
            seconds.append(time.perf_counter() - start)
        written = np.mean([sum(traj.mask) for traj in trajs])
        read = np.mean([len(traj.ids) for traj in trajs])
        print(f"full length, ours: {len(trajs)} trajectories, {cfg.max_turns} turns of "
              f"{cfg.max_new_tokens} tokens: rollout {np.median(seconds[1:]):.2f} s; "
              f"{written:.0f} tokens written, {read:.0f} in all", flush=True)


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
    rm.MICRO_TOKENS, rm.CHUNK_LOGITS = 10 ** 9, 10 ** 12
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
        adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])  # as in recipes.lora
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


def about(machine, program="bench.py"):  # -> first line of the output: where it comes from
    command = " ".join([f"python extras/dev/{program}", *sys.argv[1:]])
    return (f"{command}: commit {mutants.commit()}, {machine}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}")


def cpu():
    return re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]


def main():
    parser = argparse.ArgumentParser("bench.py", description=__doc__.partition("\n\n")[0])
    defaults = {"model": "tiny", "env": "frozenlake", "prompts": 8, "rollouts": 16,
                "max-new-tokens": 32, "max-turns": 5, "rounds": 10, "threads": 2, "memory-of": ""}
    for name, default in defaults.items():
        parser.add_argument("--" + name, type=type(default), default=default)
    modes = (once, bf16, growth, turns, agree, activations)
    for mode in modes:
        parser.add_argument("--" + mode.__name__, action="store_true")
    args = parser.parse_args()
    if min(args.rounds, args.threads) < 1:
        parser.error("--rounds and --threads: at least 1")
    torch.set_num_threads(args.threads)
    if args.memory_of:
        return peak_memory(args)
    print(about(cpu()), flush=True)
    for mode in modes:
        if getattr(args, mode.__name__):
            return mode(args)
    compare(args)


if __name__ == "__main__":
    main()
