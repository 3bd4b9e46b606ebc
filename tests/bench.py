"""How long does an iteration take, ours against what a student would write: `model.generate` per turn over the whole
history, then padded updates on logits of every token, old log-probs from a pass of their own.

    python tests/bench.py [--model FOLDER] [--env ENV] [--prompts P] [--rollouts N] [--max-new-tokens n] [--rounds n]
    python tests/bench.py --growth    how time grows with P*N and with the number of turns
    python tests/bench.py --turns     the rollout of five and of ten turns alone, for large models
    python tests/bench.py --agree     by how much the fast paths differ from the plain ones
    python tests/bench.py --activations     memory a token of the backward pass, for README's table of cards

Both sides: the same weights (learning rate 0), levels, caps and environment code, GRPO without KL, on the CPU, in one process,
taking turns; they sample different answers, hence also the time per token. Peak memory: resident set of a process that
does one side's work alone (Linux). A model folder called frozenlake_sft was trained on other texts than ours: it gets
those. No test asserts a time.
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

SYSTEM = "<|im_start|>system\nYou are solving the FrozenLake puzzle. Avoid the holes and go to the target.<|im_end|>\n"


def speak_like_frozenlake_sft(tok):
    """It knows one system message and no instructions, and counts its actions without "You have"."""
    message = rm.message
    rm.message = lambda *args: message(*args).replace("You have ", "")
    tok.chat_template = SYSTEM + (rm.TOKENIZER / "chat_template.jinja").read_text()


@torch.no_grad()
def student_rollout(policy, tok, cfg, seeds, seed, **how):  # -> trajectories
    """Every turn reads the whole history again. how: of `generate`; by default it samples."""
    torch.manual_seed(seed)
    trajs = [rm.Trajectory(cfg.env, g, s, n, tok, cfg) for g, s in enumerate(seeds) for n in range(cfg.rollouts)]
    stop, pad = rm.encode(tok, cfg.no_think, ".", after_answer=True)[0], tok.pad_token_id
    while live := [traj for traj in trajs if not traj.done]:
        width = max(len(traj.ids) for traj in live)
        ids = torch.tensor([[pad] * (width - len(traj.ids)) + traj.ids for traj in live])
        seen = torch.tensor([[0] * (width - len(traj.ids)) + [1] * len(traj.ids) for traj in live])
        out = policy.generate(input_ids=ids, attention_mask=seen, max_new_tokens=cfg.max_new_tokens, pad_token_id=pad,
                              eos_token_id=stop, **how or dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0))
        for traj, answer in zip(live, out[:, width:].tolist()):
            answer = answer[:answer.index(stop) + 1] if stop in answer else answer
            traj.add(answer, [0.0] * len(answer))
            rm.take_turn(traj, tok, cfg, stop)
    return trajs


def student_update(trajs, policy, optimizer, cfg):
    R = torch.tensor([traj.R for traj in trajs]).view(-1, cfg.rollouts)
    adv = rm.grpo_advantages(R).flatten()

    def logps(batch):
        logits = policy(input_ids=batch["ids"], attention_mask=batch["seen"]).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, batch["ids"][:, 1:, None]).squeeze(2)

    batches = []
    for rows in torch.randperm(len(trajs)).split(cfg.batch):
        batch = rm.collate([trajs[row] for row in rows], "cpu")
        batch["seen"] = (torch.arange(batch["ids"].shape[1]) < batch["length"]).long()
        with torch.no_grad():
            batches.append((batch, adv[rows, None], logps(batch)))
    for batch, A, old_logp in batches:
        ratio = (logps(batch) - old_logp).exp()
        loss = -(torch.min(ratio * A, ratio.clamp(0.8, 1.2) * A) * batch["mask"]).sum() / batch["mask"].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def iteration(side, policy, tok, optimizer, cfg, seed):  # -> seconds of the rollout, of the update; tokens written
    seeds, start = [len(envs.EVAL_SEEDS) + seed * cfg.prompts + p for p in range(cfg.prompts)], time.perf_counter()
    if side == "ours":
        trajs = rm.rollout(policy, tok, cfg.env, seeds, cfg.rollouts, cfg, seed, 1.0)
        middle = time.perf_counter()
        rm.update(rm.score(trajs, None, None, cfg), policy, None, optimizer, cfg, seed)
    else:
        trajs = student_rollout(policy, tok, cfg, seeds, seed)
        middle = time.perf_counter()
        student_update(trajs, policy, optimizer, cfg)
    return middle - start, time.perf_counter() - middle, sum(sum(traj.mask) for traj in trajs)


def load(args):  # -> policy, tokenizer, optimizer with learning rate 0, cfg
    cfg = rm.Config(env=args.env, model=args.model, device="cpu", algo="grpo", kl_coef=0.0, prompts=args.prompts,
                    rollouts=args.rollouts, max_new_tokens=args.max_new_tokens)
    parts, tok = rm.load_models(cfg)
    policy, optimizer = parts["policy"], parts["optimizer"]
    policy.generation_config = transformers.GenerationConfig()  # plain sampling, no penalties of the model's maker
    if "frozenlake_sft" in args.model:
        speak_like_frozenlake_sft(tok)
    optimizer.param_groups[0]["lr"] = 0.0
    return policy, tok, optimizer, cfg


def compare(args):
    policy, tok, optimizer, cfg = load(args)
    times = {"ours": [], "generate": []}
    for i in range(args.rounds + 1):  # the first round warms up
        for side in list(times)[::1 if i % 2 else -1]:  # taking turns at going first
            times[side].append(iteration(side, policy, tok, optimizer, cfg, i))
    each = {}
    for side, rows in times.items():
        rollout, update, tokens = np.array(rows[1:]).T
        each[side] = np.array([rollout + update, rollout, update, (rollout + update) / tokens])
        median = np.median(each[side], axis=1)
        memory = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--memory-of", side], stdout=subprocess.PIPE,
                                text=True, check=True)
        print(f"{side:9} {median[0]:6.2f} s an iteration = rollout {median[1]:.2f} + update {median[2]:.2f}; "
              f"{np.median(tokens):.0f} tokens, {np.median(tokens / rollout):.0f} tokens/s in the rollout, "
              f"{1e6 * median[3]:.0f} ms per 1,000 tokens; peak {memory.stdout.strip()} MiB", flush=True)
    for name, row in zip(("iteration", "rollout", "update", "per token"), each["ours"] / each["generate"]):
        print(f"ours / generate, {name:9} {np.median(row):.2f}  (of {len(row)} rounds: {row.min():.2f} to {row.max():.2f})")


def gradient(trajs, policy, cfg):  # -> of the GRPO loss on all trajectories at once
    seen = []

    class Catch(torch.optim.SGD):
        def step(self):
            seen.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    cfg.batch = len(trajs)
    rm.update(rm.score(trajs, None, None, cfg), policy, None, Catch(policy.parameters(), lr=0.0), cfg, 0)
    return seen[0]


def agree(args):
    """The fast paths against the plain ones, on real answers of the model."""
    policy, tok, _, cfg = load(args)
    seeds = range(len(envs.EVAL_SEEDS), len(envs.EVAL_SEEDS) + cfg.prompts)
    trajs = rm.rollout(policy, tok, cfg.env, seeds, cfg.rollouts, cfg, 0, 1.0)
    cached = plain = chunked = 0.0
    for traj in trajs:
        batch = rm.collate([traj], "cpu")
        with torch.no_grad():
            logp = policy(input_ids=batch["ids"]).logits[:, :-1][batch["mask"]].log_softmax(-1)
            target, full = batch["ids"][:, 1:][batch["mask"]], rm.CHUNK_LOGITS
            truth = logp.gather(1, target[:, None])[:, 0], torch.distributions.Categorical(logits=logp).entropy()
            whole = rm.token_logps(policy, batch, cfg)
            rm.CHUNK_LOGITS = 64 * policy.config.vocab_size
            pieces, rm.CHUNK_LOGITS = rm.token_logps(policy, batch, cfg), full
        cached = max(cached, (truth[0] - batch["old_logp"][batch["mask"]]).abs().max().item())
        plain = max([plain] + [(a - b).abs().max().item() for a, b in zip(truth, whole)])
        chunked = max([chunked] + [(a - b).abs().max().item() for a, b in zip(whole, pieces)])
    micro = gradient(trajs, policy, cfg)
    rm.MICRO_TOKENS, rm.CHUNK_LOGITS = 10 ** 9, 10 ** 12
    whole = gradient(trajs, policy, cfg)
    print(f"largest differences over {sum(sum(traj.mask) for traj in trajs)} tokens: log-probs of the cached rollout and of "
          f"a fresh pass {cached:.1e}; log-probs and entropies of trained tokens only and of all {plain:.1e}; in chunks of "
          f"64 tokens and whole {chunked:.1e}; "
          f"gradient by micro-batches and whole {(micro - whole).abs().max():.1e} (its largest entry {whole.abs().max():.1e})")


def peak_memory(args):  # of a process that only does its side's work
    policy, tok, optimizer, cfg = load(args)
    for i in range(2):
        iteration(args.memory_of, policy, tok, optimizer, cfg, i)
    print(int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024)  # Linux


def turns(args):
    """The rollout alone: SmolLM2's updates would take minutes."""
    policy, tok, _, cfg = load(args)
    encode = rm.encode
    rm.encode = lambda tok, *rest, **named: (-1,) if "." in rest else encode(tok, *rest, **named)  # as in growth
    for cfg.max_turns in (5, 10):
        seconds = []
        for i in range(args.rounds + 1):
            start = time.perf_counter()
            trajs = rm.rollout(policy, tok, cfg.env, range(1000, 1000 + cfg.prompts), cfg.rollouts, cfg, i, 1.0)
            seconds.append(time.perf_counter() - start)
        written, read = (sum(map(count, trajs)) / len(trajs) for count in (lambda t: sum(t.mask), lambda t: len(t.ids)))
        print(f"full length, ours: {len(trajs)} trajectories, {cfg.max_turns} turns of {cfg.max_new_tokens} tokens: rollout "
              f"{np.median(seconds[1:]):.2f} s; {written:.0f} tokens written, {read:.0f} in all", flush=True)


def growth(args):
    """Full length: answers of exactly max_new_tokens, no ends of turn, invalid: every episode lasts to its last turn."""
    policy, tok, optimizer, cfg = load(args)
    encode = rm.encode  # replaced only now: the embedded model may just have been made

    def without_end(tok, no_think, user, after_answer):  # "." is how a rollout asks for the token that ends a turn
        return (-1,) if user == "." else encode(tok, no_think, user, after_answer)
    sizes = [(args.prompts * 2 ** i // 8, 5) for i in range(6) if args.prompts * 2 ** i >= 8]
    turns = [(args.prompts, k) for k in (1, 2, 5, 10)]
    for title, side, settings in (("full length", "ours", sizes), ("full length", "ours", turns),
                                  ("full length", "generate", turns[2:]), ("real episodes", "ours", turns)):
        rm.encode = encode if title == "real episodes" else without_end
        for cfg.prompts, cfg.max_turns in settings:
            rows = [iteration(side, policy, tok, optimizer, cfg, i)[:2] for i in range(args.rounds + 1)]
            rollout, update = np.median(rows[1:], axis=0)  # the first one warms up
            print(f"{title}, {side}: {cfg.prompts * cfg.rollouts} trajectories, {cfg.max_turns} turns of {cfg.max_new_tokens} "
                  f"tokens: rollout {rollout:.2f} s, update {update:.2f} s", flush=True)


def activations():
    """Bytes a token that the forward pass keeps for the backward one, under bf16 autocast, random weights: the slope
    between 128 and 256 tokens, in which the bf16 copies of the weights cancel."""
    shapes = {"SmolLM2-135M": transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3),
              "Qwen2.5-0.5B": transformers.Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2)}
    for name, config in shapes.items():
        config.vocab_size, body = 1000, transformers.AutoModel.from_config(config)  # the logits are counted apart
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser("bench.py", description=re.sub(r"\n\n.*", "", __doc__, flags=re.S))
    for name, default in (("model", "tiny"), ("env", "frozenlake"), ("prompts", 8), ("rollouts", 16), ("max-new-tokens", 32),
                          ("rounds", 10), ("threads", 2), ("memory-of", "")):
        parser.add_argument("--" + name, type=type(default), default=default)
    for name in ("growth", "turns", "agree", "activations"):
        parser.add_argument("--" + name, action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.activations:
        activations()
    else:
        chosen = [mode for mode in (growth, turns, agree) if getattr(args, mode.__name__)]
        mode = peak_memory if args.memory_of else chosen[0] if chosen else compare
        mode(args)
