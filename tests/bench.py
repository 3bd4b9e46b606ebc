"""How long does an iteration take, ours against what a student would write: `model.generate` for every turn over the
whole history, then padded updates on logits of every token, old log-probs from a pass of their own.

    python tests/bench.py [--model FOLDER] [--env ENV] [--prompts P] [--rollouts N] [--max-new-tokens n] [--rounds n]
    python tests/bench.py --growth         how time grows with P*N and with the number of turns
    python tests/bench.py --turns          the rollout of five and of ten turns alone, for large models
    python tests/bench.py --agree          by how much the fast paths differ from the plain ones
    python tests/bench.py --activations    memory a token of the backward pass, for README's table of cards

Both sides: the same weights (learning rate 0), levels, caps and environment code, GRPO without KL, on the CPU, in one
process, taking turns; they sample different answers, hence also the time per token. Peak memory: resident set of a
process that does one side's work alone (Linux). A model folder called frozenlake_sft was trained on other texts than
ours: it gets those. No test asserts a time.
"""
import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import transformers

import envs
import ragen_mini as rm


# ------------------------------------------------------------------------------------- what a student would write
@torch.no_grad()
def student_rollout(policy, tok, cfg, seeds, dice_seed, **how):  # -> trajectories
    """Every turn reads the whole history again. how: of `generate`; by default it samples."""
    how = how or dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    torch.manual_seed(dice_seed)
    end_of_turn = rm.encode(tok, cfg.no_think, ".", after_answer=True)[0]
    trajs = []
    for group, seed in enumerate(seeds):
        for episode in range(cfg.rollouts):
            trajs.append(rm.begin(cfg.env, seed, episode, group, tok, cfg))
    live = trajs
    while live:
        width = max(len(traj.ids) for traj in live)
        pads = [width - len(traj.ids) for traj in live]  # on the left: generate writes on the right
        ids = torch.tensor([[tok.pad_token_id] * pad + traj.ids for pad, traj in zip(pads, live)]).to(policy.device)
        seen = torch.tensor([[0] * pad + [1] * len(traj.ids) for pad, traj in zip(pads, live)]).to(policy.device)
        written = policy.generate(input_ids=ids, attention_mask=seen, max_new_tokens=cfg.max_new_tokens,
                                  pad_token_id=tok.pad_token_id, eos_token_id=end_of_turn, **how)
        for traj, answer in zip(live, written[:, width:].tolist()):
            if end_of_turn in answer:  # what follows is padding
                answer = answer[:answer.index(end_of_turn) + 1]
            for token in answer:
                traj.add_sampled(token, 0.0)
            rm.take_turn(traj, tok, cfg, [end_of_turn])
        live = [traj for traj in live if not traj.done]
    return trajs


def student_update(trajs, policy, optimizer, cfg):
    R = torch.tensor([traj.R for traj in trajs]).view(-1, cfg.rollouts)
    advantage = rm.grpo_advantages(R).flatten()

    def logps(batch):  # (B,T-1)
        logp = policy(input_ids=batch["inputs"], attention_mask=batch["seen"]).logits.log_softmax(-1)
        return logp.gather(2, batch["targets"][:, :, None]).squeeze(2)

    parts = []
    for rows in torch.randperm(len(trajs)).split(cfg.update_size):
        some = [trajs[row] for row in rows]
        batch = rm.collate(some, "cpu")
        batch["seen"] = rm.pad([[1] * (len(traj.ids) - 1) for traj in some], "cpu")
        with torch.no_grad():
            old_logp = logps(batch)
        parts.append((batch, advantage[rows, None], old_logp))
    for batch, A, old_logp in parts:
        ratio = (logps(batch) - old_logp).exp()
        loss = -torch.min(ratio * A, ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * A)
        loss = (loss * batch["mask"]).sum() / batch["mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), rm.MAX_GRAD_NORM)
        optimizer.step()


# --------------------------------------------------------------------------------------------- side by side
SYSTEM = "<|im_start|>system\nYou are solving the FrozenLake puzzle. Avoid the holes and go to the target.<|im_end|>\n"


def speak_like_frozenlake_sft(tok):
    """It knows one system message and no instructions, and counts its actions without "You have"."""
    message = rm.message
    rm.message = lambda *args: message(*args).replace("You have ", "")
    tok.chat_template = SYSTEM + (rm.TINY / "chat_template.jinja").read_text()


def load(args):  # -> models with learning rate 0, cfg
    cfg = rm.Config(env=args.env, model=args.model, device="cpu", algo="grpo", kl_coef=0.0, prompts=args.prompts,
                    rollouts=args.rollouts, max_new_tokens=args.max_new_tokens)
    models = rm.load_models(cfg)
    models.policy.generation_config = transformers.GenerationConfig()  # plain sampling, no penalties of its maker
    models.optimizer.param_groups[0]["lr"] = 0.0
    if "frozenlake_sft" in args.model:
        speak_like_frozenlake_sft(models.tok)
    return models, cfg


def our_rollout(models, cfg, seeds, dice_seed):
    return rm.rollout(models.policy, models.tok, cfg.env, seeds, cfg.rollouts, cfg, dice_seed, temperature=1.0)


def iteration(side, models, cfg, i):  # -> seconds of the rollout, of the update; tokens written
    first = len(envs.EVAL_SEEDS) + i * cfg.prompts
    seeds = range(first, first + cfg.prompts)
    start = time.perf_counter()
    if side == "ours":
        trajs = our_rollout(models, cfg, seeds, i)
        middle = time.perf_counter()
        rm.updates(rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg), models, cfg, i)
    else:
        trajs = student_rollout(models.policy, models.tok, cfg, seeds, i)
        middle = time.perf_counter()
        student_update(trajs, models.policy, models.optimizer, cfg)
    return middle - start, time.perf_counter() - middle, sum(sum(traj.mask) for traj in trajs)


def compare(args):
    models, cfg = load(args)
    times = {"ours": [], "generate": []}
    for i in range(args.rounds + 1):  # the first round warms up
        for side in list(times)[::1 if i % 2 else -1]:  # taking turns at going first
            times[side].append(iteration(side, models, cfg, i))
    each = {}
    for side, rows in times.items():
        rollout, update, tokens = np.array(rows[1:]).T
        each[side] = np.array([rollout + update, rollout, update, (rollout + update) / tokens])
        total, _, _, per_token = np.median(each[side], axis=1)
        print(f"{side:9} {total:6.2f} s an iteration = "
              f"rollout {np.median(rollout):.2f} + update {np.median(update):.2f}; "
              f"{np.median(tokens):.0f} tokens, {np.median(tokens / rollout):.0f} tokens/s in the rollout, "
              f"{1e6 * per_token:.0f} ms per 1,000 tokens; peak {memory_of(side)} MiB", flush=True)
    for name, row in zip(("iteration", "rollout", "update", "per token"), each["ours"] / each["generate"]):
        rounds = f"of {len(row)} rounds: {row.min():.2f} to {row.max():.2f}"
        print(f"ours / generate, {name:9} {np.median(row):.2f}  ({rounds})")


def memory_of(side):  # -> peak in MiB of a process that only does its side's work
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", side]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def peak_memory(args):  # what that process does
    models, cfg = load(args)
    for i in range(2):
        iteration(args.memory_of, models, cfg, i)
    print(int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024)  # Linux


# --------------------------------------------------------------------------------------------------- growth
ENCODE = rm.encode


def without_end_of_turn(tok, no_think, text, after_answer):
    """Answers of exactly max_new_tokens, invalid: every episode lasts to its last turn. "." is how a rollout asks for
    the token that ends a turn; there is none."""
    return [-1] if text == "." else ENCODE(tok, no_think, text, after_answer)


def growth(args):
    models, cfg = load(args)
    sizes = [(args.prompts * 2 ** i // 8, 5) for i in range(6) if args.prompts * 2 ** i >= 8]
    turns = [(args.prompts, k) for k in (1, 2, 5, 10)]
    for title, side, settings in (("full length", "ours", sizes), ("full length", "ours", turns),
                                  ("full length", "generate", turns[2:]), ("real episodes", "ours", turns)):
        rm.encode = ENCODE if title == "real episodes" else without_end_of_turn
        for cfg.prompts, cfg.max_turns in settings:
            rows = [iteration(side, models, cfg, i)[:2] for i in range(args.rounds + 1)]
            rollout, update = np.median(rows[1:], axis=0)  # the first one warms up
            print(f"{title}, {side}: {cfg.prompts * cfg.rollouts} trajectories, {cfg.max_turns} turns of "
                  f"{cfg.max_new_tokens} tokens: rollout {rollout:.2f} s, update {update:.2f} s", flush=True)


def turns(args):
    """The rollout alone: a large model's updates would take minutes."""
    models, cfg = load(args)
    rm.encode = without_end_of_turn
    for cfg.max_turns in (5, 10):
        seconds = []
        for i in range(args.rounds + 1):
            start = time.perf_counter()
            trajs = our_rollout(models, cfg, range(1000, 1000 + cfg.prompts), i)
            seconds.append(time.perf_counter() - start)
        written = np.mean([sum(traj.mask) for traj in trajs])
        read = np.mean([len(traj.ids) for traj in trajs])
        print(f"full length, ours: {len(trajs)} trajectories, {cfg.max_turns} turns of {cfg.max_new_tokens} tokens: "
              f"rollout {np.median(seconds[1:]):.2f} s; {written:.0f} tokens written, {read:.0f} in all", flush=True)


# ------------------------------------------------------------------------------------------ fast against plain
def gradient(trajs, models, cfg):  # -> of the GRPO loss on all trajectories at once
    seen = []

    class Catch(torch.optim.SGD):
        def step(self):
            seen.append(torch.cat([p.grad.flatten() for p in models.policy.parameters()]))
    cfg.update_size = len(trajs)
    models.optimizer = Catch(models.policy.parameters(), lr=0.0)
    rm.updates(rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg), models, cfg, 0)
    return seen[0]


def largest(one, other):
    return (one - other).abs().max().item()


def agree(args):
    """The fast paths against the plain ones, on real answers of the model."""
    models, cfg = load(args)
    policy = models.policy
    trajs = our_rollout(models, cfg, range(len(envs.EVAL_SEEDS), len(envs.EVAL_SEEDS) + cfg.prompts), 0)
    full = rm.CHUNK_LOGITS
    cached = plain = chunked = 0.0
    for traj in trajs:
        batch = rm.collate([traj], "cpu")
        mask = batch["mask"]
        with torch.no_grad():
            logp_of_all = policy(input_ids=batch["inputs"]).logits[mask].log_softmax(-1)
            logp = logp_of_all.gather(1, batch["targets"][mask][:, None])[:, 0]
            entropy = torch.distributions.Categorical(logits=logp_of_all).entropy()
            whole = rm.token_logps(policy, batch, cfg)
            rm.CHUNK_LOGITS = 64 * policy.config.vocab_size
            pieces = rm.token_logps(policy, batch, cfg)
            rm.CHUNK_LOGITS = full
        cached = max(cached, largest(logp, batch["old_logp"][mask]))
        plain = max(plain, largest(logp, whole[0]), largest(entropy, whole[1]))
        chunked = max(chunked, largest(whole[0], pieces[0]), largest(whole[1], pieces[1]))
    micro = gradient(trajs, models, cfg)
    rm.MICRO_TOKENS, rm.CHUNK_LOGITS = 10 ** 9, 10 ** 12
    whole = gradient(trajs, models, cfg)
    tokens = sum(sum(traj.mask) for traj in trajs)
    print(f"largest differences over {tokens} tokens: log-probs of the cached rollout and of a fresh pass {cached:.1e}; "
          f"log-probs and entropies of trained tokens only and of all {plain:.1e}; in chunks of 64 tokens and whole "
          f"{chunked:.1e}; gradient by micro-batches and whole {largest(micro, whole):.1e} "
          f"(its largest entry {whole.abs().max():.1e})")


def activations(args):
    """Bytes a token that the forward pass keeps for the backward one, under bf16 autocast, random weights: the slope
    between 128 and 256 tokens, in which the bf16 copies of the weights cancel."""
    shapes = {
        "SmolLM2-135M": transformers.LlamaConfig(hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                                                 num_attention_heads=9, num_key_value_heads=3),
        "Qwen2.5-0.5B": transformers.Qwen2Config(hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                                                 num_attention_heads=14, num_key_value_heads=2)}
    for name, config in shapes.items():
        config.vocab_size = 1000  # the logits are counted apart
        body = transformers.AutoModel.from_config(config)
        kept = []
        for T in (128, 256):
            storages = {}

            def pack(x):
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x
            with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                hidden = body(input_ids=torch.randint(1000, (1, T)), use_cache=False).last_hidden_state
            kept.append(sum(storages.values()))
            del hidden
        print(f"{name}: {(kept[1] - kept[0]) / 128 / 1e6:.2f} MB a token")


def main():
    parser = argparse.ArgumentParser("bench.py", description=__doc__.partition("\n\n")[0])
    for name, default in (("model", "tiny"), ("env", "frozenlake"), ("prompts", 8), ("rollouts", 16),
                          ("max-new-tokens", 32), ("rounds", 10), ("threads", 2), ("memory-of", "")):
        parser.add_argument("--" + name, type=type(default), default=default)
    modes = (growth, turns, agree, activations)
    for mode in modes:
        parser.add_argument("--" + mode.__name__, action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        return peak_memory(args)
    for mode in modes:
        if getattr(args, mode.__name__):
            return mode(args)
    compare(args)


if __name__ == "__main__":
    main()
