"""All that needs a GPU, without network (nine minutes are the aim); what it prints goes into tests/README.md.

    python tests/gpu.py                            a random model of Qwen2.5-0.5B's shape: no weights are needed
    python tests/gpu.py --model SmolLM2-FOLDER     a real one
    python tests/gpu.py --shape tiny --device cpu  everything once, as slow_gpu.py does it where no GPU is

1. The start check (fp32), then the ratios of a rollout under bf16 autocast. 2. Greedy rollout and `generate`, token for
token. 3. Whole iterations, PPO and GRPO, 8 x 16 trajectories whose every turn has all its tokens: seconds, tokens a
second, memory. 4. The same rollout by `generate`, a turn at a time. 5. One decode step: how long, and how many kernels?
"""
import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

import bench
import ragen_mini as rm

SHAPES = {  # Llama with attention_bias is Qwen2, but for the name
    "qwen": dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                 num_attention_heads=14, num_key_value_heads=2),
    "tiny": dict(vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2)}


def random_model(shape):  # -> folder
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[shape], attention_bias=True, tie_word_embeddings=True, bos_token_id=None,
                                      eos_token_id=None, max_position_embeddings=32_768)
    folder = tempfile.mkdtemp()
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(rm.TINY).save_pretrained(folder)
    return folder


def seconds(work):  # -> seconds, what it returned
    wait()
    start = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - start, result


def wait():
    if rm.CUDA:
        torch.cuda.synchronize()


def settings(args, **options):
    return rm.Config(env="sokoban", model=args.model, device=args.device, prompts=args.prompts, rollouts=args.rollouts,
                     max_new_tokens=args.tokens, **options)


# ------------------------------------------------------------------------------------------------ is it right?
def check_ratios(args):
    """`load_models` makes the start check. Under autocast a ratio is 1 only roughly: by how much?"""
    cfg = settings(args, algo="grpo", kl_coef=0.0)
    models = rm.load_models(cfg)
    trajs = rm.rollout(models.policy, models.tok, cfg.env, range(300, 302), 4, replace(cfg, max_new_tokens=32), 0, 1.0)
    batch = rm.collate(trajs, cfg.device)
    gap = (rm.grid_logps(models.policy, batch, cfg) - batch["old_logp"])[batch["mask"]].abs()
    rm.self_check(trajs, models.policy, cfg)
    print(f"start check passed; log-probs of rollout and update differ by {gap.mean():.1e} on average, at most {gap.max():.1e}")


def check_greedy(args):
    """In fp32: bf16 rounds differently in batches of different shapes, and greedy choices tip over."""
    cfg = settings(args, algo="grpo", kl_coef=0.0)
    cfg = replace(cfg, max_new_tokens=min(args.tokens, 64), rollouts=2)
    models = rm.load_models(cfg)
    seeds = range(300, 304)
    autocast_off = rm.rollout.__wrapped__  # beneath autocast
    with torch.no_grad():
        ours = autocast_off(models.policy, models.tok, cfg.env, seeds, 2, cfg, 0, 0.0)
    theirs = bench.student_rollout(models.policy, models.tok, cfg, seeds, 0, do_sample=False)
    same = sum(one.ids == other.ids for one, other in zip(ours, theirs))
    print(f"greedy rollout and generate: {same} of {len(ours)} episodes alike, token for token, of "
          f"{max(len(traj.ids) for traj in ours)} tokens and less")
    return same == len(ours)


# ----------------------------------------------------------------------------------------------- how fast is it?
def measure(args, algo):
    cfg = settings(args, algo=algo, lr=1e-9, critic_lr=1e-9)
    models = rm.load_models(cfg)
    short = replace(cfg, max_new_tokens=4, max_turns=1)
    rm.iterate(2, models, short)  # warms up
    if rm.CUDA:
        torch.cuda.reset_peak_memory_stats()
    row, _, _ = rm.iterate(3, models, cfg)
    rollout, update = row["seconds_rollout"], row["seconds_update"]
    memory = f"{torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB" if rm.CUDA else "-"
    print(f"| {algo} | {rollout + update:.1f} s | {rollout:.1f} s | {update:.1f} s | {row['tokens'] / rollout:.0f} | "
          f"{row['tokens']} | {memory} |", flush=True)
    return rollout


def measure_generate(args):
    cfg = settings(args, algo="grpo", kl_coef=0.0)
    models = rm.load_models(cfg)
    models.policy.generation_config = transformers.GenerationConfig()
    with rm.autocast:
        duration, trajs = seconds(lambda: bench.student_rollout(models.policy, models.tok, cfg, range(300, 300 + cfg.prompts), 0))
    tokens = sum(sum(traj.mask) for traj in trajs)
    print(f"| generate | | {duration:.1f} s | | {tokens / duration:.0f} | {tokens} | |", flush=True)


def profile(args, steps=10):
    cfg = settings(args, algo="grpo", kl_coef=0.0)
    models = rm.load_models(cfg)
    trajs = [rm.begin(cfg.env, 300 + group, episode, group, models.tok, cfg)
             for group in range(cfg.prompts) for episode in range(cfg.rollouts)]
    cache = rm.KVCache(cfg.prompts, cfg.device, cfg.rollouts)
    generator = torch.Generator(cfg.device).manual_seed(0)

    def step():
        rm.sample(trajs, rm.next_token_logp(models.policy, cache, trajs, 1.0), generator, greedy=False)
    with torch.no_grad(), rm.autocast:
        step()
        step()
        duration, _ = seconds(lambda: [step() for _ in range(steps)])
        if not rm.CUDA:
            return print(f"a decode step of {len(trajs)} rows: {1e3 * duration / steps:.1f} ms")
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as found:
            step()
    kernels = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(event.time_range.elapsed_us() for event in kernels) / 1e3
    print(f"a decode step of {len(trajs)} rows: {1e3 * duration / steps:.1f} ms; {len(kernels)} kernels, which take "
          f"{busy:.1f} ms: the rest is launching them")


def main(argv=None):
    parser = argparse.ArgumentParser("gpu.py")
    parser.add_argument("--model", help="folder of a real model")
    parser.add_argument("--shape", default="qwen", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    for name, default in (("prompts", 8), ("rollouts", 16), ("tokens", 400)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    random = not args.model
    if random:
        args.model = random_model(args.shape)
    device = torch.cuda.get_device_name() if rm.CUDA else "CPU"
    print(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}; "
          f"{'random weights, shape ' + args.shape if random else args.model}", flush=True)
    check_ratios(args)
    alike = check_greedy(args)
    if random:
        rm.encode = bench.without_end_of_turn  # every turn has all its tokens
    print(f"\n| {args.prompts} x {args.rollouts}, {args.tokens} tokens a turn, 5 turns | iteration | rollout | update | "
          "tokens a second of the rollout | tokens | peak memory |\n|---|---|---|---|---|---|---|", flush=True)
    for algo in ("ppo", "grpo"):
        measure(args, algo)
    measure_generate(args)
    print()
    profile(args)
    if random:
        rm.encode = bench.ENCODE
        shutil.rmtree(args.model)
    sys.exit(not alike)


if __name__ == "__main__":
    main()
