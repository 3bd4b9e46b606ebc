"""All that needs a GPU, without network (nine minutes are the aim); what it prints goes into extras/README.md.

    python extras/gpu.py                            a random model of Qwen2.5-0.5B's shape: no weights are needed
    python extras/gpu.py --model SmolLM2-FOLDER     a real one
    python extras/gpu.py --shape tiny --device cpu  everything once, as slow_gpu.py does it where no GPU is
    python extras/gpu.py --programs                 instead: README's first command, --resume, extras and recipes

1. The log-probs of a rollout and of an update under bf16 autocast. 2. Greedy rollout and `generate`, token for token.
3. Whole iterations, PPO and GRPO, 8 x 16 trajectories whose every turn has all its tokens: seconds, tokens a second,
memory. 4. The same rollout by `generate`, a turn at a time; and both with answers of different lengths. 5. One decode
step: how long, how many kernels, and what if cuDNN's attention were not switched off?
"""
import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import transformers

import bench
import plots
import ragen_mini as rm

SHAPES = {  # Llama with attention_bias is Qwen2, but for the name
    "qwen": dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                 num_attention_heads=14, num_key_value_heads=2),
    "tiny": dict(vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2)}
GREEDY = 1e-4  # a temperature: the likeliest token
TIE = -1e-3  # a log-prob at that temperature: another token's logit is less than 0.0007 away


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


def load(args, cfg):
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    if args.random:  # its answers mean nothing: every turn has all its tokens
        bench.write_to_the_limit(models.tok)
    return models


# ------------------------------------------------------------------------------------------------ is it right?
def check_ratios(args):
    """Under autocast a ratio is 1 only roughly: by how much? The core refuses a model whose gap is too large."""
    cfg = settings(args, algo="grpo", kl_coef=0.0)
    models = rm.load_models(cfg)
    short = replace(cfg, max_new_tokens=32)
    trajs = rm.rollout(models, range(300, 302), 4, short, 0)
    batch = rm.collate(trajs, cfg.device)
    logp = rm.on_grid(lambda part: rm.token_logps(models.policy, part, cfg)[0], batch)
    gap = (logp - batch["old_logp"])[batch["mask"]].abs()
    rm.check_ratios(trajs, models, cfg)
    print("check of the ratio passed; log-probs of rollout and update differ by "
          f"{gap.mean():.1e} on average, at most {gap.max():.1e}")


def check_greedy(args):
    """In fp32: bf16 rounds differently in batches of different shapes, and greedy choices tip over."""
    cfg = settings(args, algo="grpo", kl_coef=0.0)
    cfg = replace(cfg, max_new_tokens=min(args.tokens, 64), rollouts=2, temperature=GREEDY)
    models = rm.load_models(cfg)
    seeds = range(300, 304)
    autocast_off = rm.rollout.__wrapped__  # beneath autocast
    with torch.no_grad():
        ours = autocast_off(models, seeds, 2, cfg, 0)
    theirs = bench.student_rollout(models.policy, models.tok, cfg, seeds, 0, do_sample=False)
    same = sum(one.ids == other.ids for one, other in zip(ours, theirs))
    alike = sum(alike_up_to_a_tie(one, other) for one, other in zip(ours, theirs))
    longest = max(len(traj.ids) for traj in ours)
    print(f"greedy rollout and generate: {same} of {len(ours)} episodes alike, token for token, of {longest} tokens "
          f"and less; {alike} up to a token beside which another was nearly as likely")
    return alike == len(ours)


def alike_up_to_a_tie(one, other):
    """At a tie rounding decides which token is taken, and all that follows differs."""
    for mine, its, logp in zip(one.ids, other.ids, one.old_logp):
        if mine != its:
            return logp < TIE
    return len(one.ids) == len(other.ids)


# ----------------------------------------------------------------------------------------------- how fast is it?
def measure(args, algo):
    cfg = settings(args, algo=algo, lr=1e-9, critic_lr=1e-9)
    models = load(args, cfg)
    short = replace(cfg, max_new_tokens=4, max_turns=1)
    rm.iterate(2, models, short)  # warms up
    memory = "-"
    if rm.CUDA:
        torch.cuda.reset_peak_memory_stats()
    row, _, _ = rm.iterate(3, models, cfg, rollout=play_and_pay)
    rm.need(row["updates"], "no update was made")
    if rm.CUDA:
        memory = f"{torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB"
    rollout, update, tokens = row["seconds_rollout"], row["seconds_update"], row["tokens"]
    print(f"| {algo} | {rollout + update:.1f} s | {rollout:.1f} s | {update:.1f} s | "
          f"{tokens / rollout:.0f} | {tokens} | {memory} |", flush=True)


def play_and_pay(models, seeds, N, cfg, sampling_seed):
    """Answers to the limit are invalid, so all returns are equal, and nothing would be learnt: every second pays 1."""
    trajs = rm.rollout(models, seeds, N, cfg, sampling_seed)
    for traj in trajs[::2]:
        traj.reward[-1] += 1.0
    return trajs


def measure_generate(args):
    cfg = settings(args, algo="grpo", kl_coef=0.0)
    models = load(args, cfg)
    print_rollout("generate", with_generate, models, cfg)


def measure_unequal(args):
    """The token that ends an answer gets a bias: about one answer in 128 ends at each token, so that lengths differ."""
    cfg = settings(args, algo="grpo", kl_coef=0.0)
    models = rm.load_models(cfg)
    head = models.policy.get_output_embeddings()
    bias = torch.zeros(len(head.weight), device=args.device)
    bias[models.tok.eos_token_id] = torch.tensor(len(head.weight) / 128).log()
    head.bias = torch.nn.Parameter(bias)
    for name, play in (("ours", rm.rollout), ("generate", with_generate)):
        print_rollout(f"{name}, answers of unequal lengths", play, models, cfg)


def with_generate(models, seeds, N, cfg, sampling_seed):
    models.policy.generation_config = transformers.GenerationConfig()
    with rm.autocast:
        return bench.student_rollout(models.policy, models.tok, cfg, seeds, sampling_seed)


def print_rollout(name, play, models, cfg):
    seeds = range(300, 300 + cfg.prompts)
    play(models, seeds[:1], cfg.rollouts, replace(cfg, max_new_tokens=4, max_turns=1), 0)  # warms up
    duration, trajs = seconds(lambda: play(models, seeds, cfg.rollouts, cfg, 0))
    tokens = sum(sum(traj.mask) for traj in trajs)
    print(f"| {name} | | {duration:.1f} s | | {tokens / duration:.0f} | {tokens} | |", flush=True)


def decode_step(args):  # -> a function that samples one token for every trajectory
    cfg = settings(args, algo="grpo", kl_coef=0.0)
    models = load(args, cfg)
    trajs = []
    for group in range(cfg.prompts):
        for episode in range(cfg.rollouts):
            trajs.append(rm.begin(300 + group, episode, group, models.tok, cfg))
    for row, traj in enumerate(trajs):
        traj.cache_row = row
    cache = rm.KVCache()
    generator = torch.Generator(cfg.device).manual_seed(0)

    def step():
        rm.sample(trajs, rm.read(models.policy, cache, trajs, cfg), generator)
    return step


def profile(args, steps=10):
    step = decode_step(args)
    rows = args.prompts * args.rollouts
    with torch.no_grad(), rm.autocast:
        step()  # reads the messages
        step()
        duration, _ = seconds(lambda: [step() for _ in range(steps)])
        torch.backends.cuda.enable_cudnn_sdp(True)
        step()
        with_cudnn, _ = seconds(lambda: [step() for _ in range(steps)])
        torch.backends.cuda.enable_cudnn_sdp(False)
        said = (f"a decode step of {rows} rows: {1e3 * duration / steps:.1f} ms "
                f"(if torch may choose cuDNN's attention: {1e3 * with_cudnn / steps:.1f} ms)")
        if not rm.CUDA:
            return print(said)
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds, acc_events=True) as found:
            step()
    kernels = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(event.time_range.elapsed_us() for event in kernels) / 1e3
    print(f"{said}; {len(kernels)} kernels, which take {busy:.1f} ms: the rest is launching them")


# ------------------------------------------------------------------------- the programs, with the embedded model
SHORT = "--iterations 3 --prompts 4 --rollouts 8 --eval-prompts 16"
TWICE = "ragen_mini.py --env frozenlake --eval-every 0 --epochs 2 --iterations"
PROGRAMS = [  # one after another in each line, the lines side by side
    (f"ragen_mini.py --env sokoban --algo grpo --starpo-s {SHORT} --out OUT/sokoban",
     "ragen_mini.py --resume OUT/sokoban --iterations 4", "ragen_mini.py --model OUT/sokoban --eval-only",
     "ragen_mini.py --model OUT/sokoban --play 8", "extras/xray.py OUT/sokoban"),
    (f"ragen_mini.py --env bandit --online-k 2 --epochs 2 {SHORT} --out OUT/bandit", "plots.py collapse OUT/bandit"),
    (f"ragen_mini.py --env frozenlake --no-think --eval-every 1 {SHORT} --out OUT/lake", "extras/episode.py OUT/lake"),
    (f"extras/thoughts.py --env sokoban --pay 0.1 {SHORT} --out OUT/thoughts", "extras/check_model.py tiny"),
    (f"-m torch.distributed.run --nproc-per-node 1 extras/torchrun.py --env frozenlake {SHORT} --out OUT/torchrun",)]
RECIPES = ("rloo", "muon", "sgd", "lora", "gspo --algo grpo", "cispo", "read_once", "warm_up", "own_model",
           "discount_per_turn")


def try_programs(folder):
    """Each should end with exit code 0; lora needs peft."""
    recipes = [(f"extras/recipes.py {name} --env bandit {SHORT} --out OUT/{name.split()[0]}",) for name in RECIPES]
    with ThreadPoolExecutor(8) as pool:
        lines = pool.map(lambda commands: [called(command, folder) for command in commands], PROGRAMS + recipes)
    for commands, done in zip(PROGRAMS + recipes, lines):
        for command, (_, result) in zip(commands, done):
            print(f"exit code {result.returncode}: python {command}", flush=True)
            if result.returncode:
                print(result.stderr[-2000:])


def called(command, folder):  # -> seconds, what became of it
    words = command.replace("OUT", str(folder)).split()
    start = time.perf_counter()
    result = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    return time.perf_counter() - start, result


def print_times(rows):
    for row in rows[1:]:
        print(f"iteration {row['iteration']}: rollout {row['seconds_rollout']:.2f} s, "
              f"update {row['seconds_update']:.2f} s, {row['tokens']} tokens")


def programs(device, iterations=(30, 4, 4, 2), also=""):  # also: options that make a test short
    whole, on_cpu, twice, stopped = iterations
    folder = Path(tempfile.mkdtemp())
    first = f"ragen_mini.py --env frozenlake --iterations {whole}"
    duration, _ = called(f"{first} --out OUT/first{also}", folder)
    print(f"\npython {first}: {duration:.1f} s in all, evaluations included")
    rows = plots.load(folder / "first").rows
    for row in rows:
        if "eval" in row:
            print(f"iteration {row['iteration']}: success {row['eval']['frozenlake']}, "
                  f"random and optimal {row['yardsticks']['frozenlake']}")
    print_times(rows)

    first = f"ragen_mini.py --env frozenlake --device cpu --iterations {on_cpu} --eval-every {on_cpu}"
    called(f"{first} --out OUT/cpu{also}", folder)
    print(f"\nthe CPU of that machine, one thread: python {first}")
    print_times(plots.load(folder / "cpu").rows)

    called(f"{TWICE} {twice} --out OUT/at-once{also}", folder)
    called(f"{TWICE} {stopped} --out OUT/resumed{also}", folder)
    called(f"ragen_mini.py --resume OUT/resumed --iterations {twice}", folder)
    print(f"\npython {TWICE} {twice}, and {stopped} of them, then --resume: columns that differ (at once, resumed)")
    for one, other in zip(plots.load(folder / "at-once").rows, plots.load(folder / "resumed").rows, strict=True):
        print(one["iteration"], {name: (x, other[name]) for name, x in one.items()
                                 if x != other[name] and isinstance(x, float) and not name.startswith("seconds")})

    print(f"\nwith `tiny` on {device}, several at once:", flush=True)
    try_programs(folder)
    shutil.rmtree(folder)


def main(argv=None):
    parser = argparse.ArgumentParser("gpu.py")
    parser.add_argument("--model", help="folder of a real model")
    parser.add_argument("--shape", default="qwen", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--programs", action="store_true")
    for name, default in (("prompts", 8), ("rollouts", 16), ("tokens", 400)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    rm.need(rm.CUDA or args.device != "cuda", "there is no GPU here (--device cpu tries the program itself)")
    device = torch.cuda.get_device_name() if rm.CUDA else "CPU"
    if args.programs:
        print(bench.about(device, "gpu.py"), flush=True)
        return programs(device)
    args.random = not args.model
    weights = args.model
    if args.random:
        args.model = random_model(args.shape)
        weights = f"random weights, shape {args.shape}"
    print(f"{bench.about(device, 'gpu.py')}; {weights}", flush=True)
    check_ratios(args)
    alike = check_greedy(args)
    print(f"\n| {args.prompts} x {args.rollouts}, {args.tokens} tokens a turn, 5 turns | iteration | rollout | "
          "update | tokens a second of the rollout | tokens | peak memory |\n|---|---|---|---|---|---|---|", flush=True)
    if args.random:
        measure_unequal(args)
    for algo in ("ppo", "grpo"):
        measure(args, algo)
    measure_generate(args)
    print()
    profile(args)
    if args.random:
        rm.encode = bench.ENCODE
        shutil.rmtree(args.model)
    sys.exit(not alike)


if __name__ == "__main__":
    main()
