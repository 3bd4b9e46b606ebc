"""What needs a GPU, without network: one prepared run of at most nine minutes.

    python extras/dev/gpu.py                                  on the GPU
    python extras/dev/gpu.py --shape tiny --device cpu --model tiny --prompts 2 --rollouts 2 \\
        --tokens 8 --iterations 2                             a rehearsal without one

Its parts, the most important ones first. --parts chooses some of them. Each figure is printed as
soon as it is known, and what would not fit into --minutes is left out.

    rollouts   today's rollout, that of fast_rollout.py, and `generate`. A random model of the shape
               of Qwen2.5-0.5B plays 8 x 16 episodes of five turns, whose answers have all their
               tokens, or end at random
    passes     iterations of PPO and GRPO: seconds, memory at most. Updates in passes of 32,768,
               8,192 and 2,048 tokens
    ratios     how far log-probs of rollout and update differ. In fp32: is the greedy rollout that
               of `generate`, token for token?
    learns     a real model, --model, learns with GRPO, and its held-out levels before and after.
               Log, samples and the picture go to --out. Without --model it is left out
    others     the two other ways of fast_rollout.py

Beforehand, without a GPU. SMOLLM2 is the folder of SmolLM2-135M-Instruct. (The first command takes
four minutes with --bf16, if the CPU has bf16, else longer.)

    python extras/warm_start.py SMOLLM2 runs/warm --env extras/told_lake.py:ToldLake \\
        --max-new-tokens 60 --seed 3 --device cpu --bf16
    python extras/dev/parts.py split runs/warm runs/parts      six files of at most 50 MB
    python extras/dev/gpu.py --shape tiny --device cpu ...     as above

On the GPU's machine, once all parts are there, with OUT for what shall come back:

    python extras/dev/parts.py join runs/parts /tmp/model
    python extras/dev/gpu.py --model /tmp/model --out $OUT/learns 2>&1 | tee $OUT/gpu.txt
    python extras/dev/gpu.py --parts others --minutes 5        if there was no time left for them

All parts of the model and this repository need not travel at once: each call may bring one part.
"""
import argparse
import contextlib
import gc
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import transformers

import ragen_mini as rm
import runs
from extras import fast_rollout
from extras.dev import bench

# Llama with attention_bias is Qwen2 under another name.
SHAPES = {
    "qwen": {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
             "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    "tiny": {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}}
PASSES = (32_768, 8192, 2048)
# At this temperature the likeliest token is sampled.
GREEDY = 1e-4
# A log-prob at that temperature. Below it, the logit of another token is less than 0.0007 away.
TIE = -1e-3
# What made SmolLM2-135M learn the lake in words on a CPU (figures/smollm2, `alone`), but 8 x 16.
LEARNS = dict(env="extras/told_lake.py:ToldLake", algo="grpo", adv_norm="mean", kl_coef=0.0,
              lr=2e-5, minibatch_size=64, max_new_tokens=60, eval_prompts=128, seed=3)


# ------------------------------------------------------------------------------------------ helpers
def random_model(shape):  # -> folder
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SHAPES[shape], attention_bias=True, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, max_position_embeddings=32_768)
    folder = tempfile.mkdtemp()
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(runs.TINY).save_pretrained(folder)
    return folder


def settings(args, **options):
    cfg = rm.Config(env="sokoban", model=args.random, device=args.device, prompts=args.prompts,
                    rollouts=args.rollouts, max_new_tokens=args.tokens, lr=1e-9, critic_lr=1e-9)
    return replace(cfg, **{"algo": "grpo", "kl_coef": 0.0} | options)


def load(cfg):
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    models.policy.generation_config = transformers.GenerationConfig()
    return models


def seconds(work):  # -> seconds, what it returned
    wait()
    start = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - start, result


def wait():
    if rm.CUDA:
        torch.cuda.synchronize()


def free():  # memory of networks that are no longer used
    gc.collect()
    if rm.CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak():
    return f"{torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB" if rm.CUDA else "-"


def say(text):
    print(text, flush=True)


def left(args):  # -> seconds
    return args.end - time.monotonic()


def fits(args, needed, what):  # needed: seconds
    if left(args) > needed:
        return True
    say(f"left out, because {left(args):.0f} s remain: {what} (about {needed:.0f} s)")
    return False


@contextlib.contextmanager
def playing(way):  # today, generate, or a way of fast_rollout.py
    before = rm.rollout, rm.read
    if way == "generate":
        rm.rollout = with_generate
    elif way != "today":
        fast_rollout.WAYS[way]()
    try:
        yield
    finally:
        rm.rollout, rm.read = before
        free()


def with_generate(models, seeds, N, cfg, sampling_seed):  # as rm.rollout
    with rm.autocast():
        return bench.student_rollout(models, replace(cfg, rollouts=N), seeds, sampling_seed)


# ----------------------------------------------------------------------------------------- rollouts
def rollouts(args, ways=("graph", "today", "generate")):
    say("\n| rollout | answers | seconds | tokens a second | tokens | memory at most |\n"
        "|---|---|---|---|---|---|")
    for equal in (True, False):
        for way in ways:
            try:
                measure_rollout(args, way, equal)
            except Exception:
                report_error(args, way)
            bench.write_as_usual()


def measure_rollout(args, way, equal):
    """Of the new ways the second rollout counts, since in the first one they record or compile.

    A short rollout tells beforehand how long the whole one will take.
    """
    cfg = settings(args)
    models = load(cfg)
    if equal:  # its answers mean nothing, so every turn may have all its tokens
        bench.write_to_the_limit()
    else:
        end_at_random(models)
    lengths = "of equal length" if equal else "of unequal lengths"
    seeds = range(300, 300 + cfg.prompts)

    def play(cfg):
        return rm.rollout(models, seeds, cfg.rollouts, cfg, 0)
    with playing(way):
        short = replace(cfg, max_new_tokens=max(1, cfg.max_new_tokens // 10), max_turns=1)
        play(short)  # warms up
        tenth, _ = seconds(lambda: play(short))
        if not fits(args, 10 * cfg.max_turns * tenth, f"{way}, answers {lengths}"):
            return
        first, trajs = seconds(lambda: play(cfg))
        again = first
        if way in fast_rollout.WAYS and fits(args, first, f"{way} once more"):
            again, trajs = seconds(lambda: play(cfg))
        tokens = sum(sum(traj.mask) for traj in trajs)
        say(f"| {way} | {lengths} | {again:.1f} (at first {first:.1f}) | {tokens / again:.0f} "
            f"| {tokens} | {peak()} |")


def end_at_random(models):
    """The token that ends an answer gets a bias: at each token about one answer in 128 ends."""
    head = models.policy.get_output_embeddings()
    bias = torch.zeros(len(head.weight), device=head.weight.device)
    bias[models.tok.eos_token_id] = torch.tensor(len(head.weight) / 128).log()
    head.bias = torch.nn.Parameter(bias)


def others(args):
    rollouts(args, ("compile", "batching"))


# ------------------------------------------------------------------------------------------- passes
def passes(args):
    """Whole iterations, whose rollout is recorded. Then the same trajectories are learned from in
    passes of other sizes.
    """
    bench.write_to_the_limit()
    for algo in ("ppo", "grpo"):
        if not fits(args, 60, f"passes of {algo}"):
            continue
        cfg = settings(args, algo=algo, kl_coef=0.001 if algo == "ppo" else 0.0)
        models = load(cfg)
        say(f"\n{algo}: tokens that fit into a pass: {runs.tokens_that_fit(models, cfg)}")
        say("| | seconds | rollout | update | tokens | memory at most |\n|---|---|---|---|---|---|")
        trajs = iteration(args, models, cfg)
        for tokens in PASSES:
            if fits(args, 40, f"passes of {tokens} tokens"):
                update_in_passes(trajs, models, replace(cfg, micro_tokens=tokens))
        del models
        free()
    bench.write_as_usual()


def iteration(args, models, cfg):  # -> trajectories
    """Answers up to the limit are invalid, so all returns are equal, and nothing would be learned.
    Therefore every second episode pays 1.
    """
    with playing(args.way), runs.passes_that_fill_the_card(models, cfg):
        rollout = rm.rollout

        def rollout_with_pay(*given):
            trajs = rollout(*given)
            for traj in trajs[::2]:
                traj.reward[-1] += 1.0
            return trajs
        rm.rollout = rollout_with_pay
        rm.iterate(2, models, replace(cfg, max_new_tokens=4, max_turns=1))  # warms up
        free()
        row, trajs = rm.iterate(3, models, cfg)
    runs.need(row["updates"], "No update was made.")
    rollout, update = row["seconds_rollout"], row["seconds_update"]
    say(f"| {cfg.algo}, an iteration | {rollout + update:.1f} | {rollout:.1f} | {update:.1f} | "
        f"{row['tokens']} | {peak()} |")
    return trajs


def update_in_passes(trajs, models, cfg):
    free()
    with runs.passes_that_fill_the_card(models, cfg):
        try:
            duration, _ = seconds(lambda: rm.learn(trajs, models, cfg, 0))
            used = runs.micro_tokens.get()
            say(f"| {cfg.algo}, passes of {used} tokens | | | {duration:.1f} | | {peak()} |")
        except torch.OutOfMemoryError as error:
            say(f"| {cfg.algo}, passes of {cfg.micro_tokens} tokens | | | {runs.one_line(error)} "
                f"| | |")


# ------------------------------------------------------------------------------------------- ratios
def ratios(args):
    say("")
    for way in ("graph", "today"):
        with playing(way):
            print_gap(args, way)
    for way in ("graph", "today"):
        with playing(way):
            check_greedy(args, way)
    step_by_step(args)


def print_gap(args, way):
    """Under bf16 the first ratios are 1 only roughly. rm.check_ratios refuses a large gap."""
    cfg = settings(args, max_new_tokens=min(args.tokens, 64))
    models = load(cfg)
    trajs = rm.rollout(models, range(300, 302), 4, cfg, 0)
    batch = rm.collate(trajs, cfg.device)
    logp = rm.per_token(lambda part: rm.token_logps(models.policy, part, cfg)[0], batch)
    gap = (logp - batch["old_logp"])[batch["mask"]]
    rm.check_ratios(trajs, models, cfg)
    say(f"{way}: check of the ratio passed; log-probs of rollout and update differ by "
        f"{gap.abs().mean():.1e} on average, at most {gap.abs().max():.1e}; mean {gap.mean():.1e}")


def check_greedy(args, way):
    """In fp32, because bf16 rounds differently in batches of different shapes."""
    cfg = settings(args, max_new_tokens=min(args.tokens, 32), rollouts=2, temperature=GREEDY)
    models = load(cfg)
    seeds = range(300, 304)
    autocast = rm.autocast
    rm.autocast = lambda: torch.autocast("cuda", enabled=False)
    ours = rm.rollout(models, seeds, 2, cfg, 0)
    theirs = bench.student_rollout(models, cfg, seeds, 0, do_sample=False)
    rm.autocast = autocast
    same = sum(one.ids == other.ids for one, other in zip(ours, theirs))
    alike = sum(alike_up_to_a_tie(one, other) for one, other in zip(ours, theirs))
    longest = max(len(traj.ids) for traj in ours)
    say(f"{way}: greedy rollout and generate: {same} of {len(ours)} episodes alike, token for "
        f"token, of {longest} tokens and less; {alike} up to a token beside which another was "
        f"nearly as likely")
    args.failed |= alike < len(ours)


def alike_up_to_a_tie(one, other):
    """At a tie rounding decides which token is taken, and all that follows differs."""
    for mine, its, logp in zip(one.ids, other.ids, one.old_logp):
        if mine != its:
            return logp < TIE
    return len(one.ids) == len(other.ids)


def step_by_step(args, steps=10):
    """How long a decode step of all rows takes, and how much of it the kernels."""
    cfg = settings(args)
    models = load(cfg)
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
    with torch.no_grad(), rm.autocast():
        step()  # reads the messages
        step()
        duration, _ = seconds(lambda: [step() for _ in range(steps)])
        said = f"today: a decode step of {len(trajs)} rows: {1e3 * duration / steps:.1f} ms"
        if not rm.CUDA:
            return say(said)
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds, acc_events=True) as found:
            step()
    on_gpu = torch.autograd.DeviceType.CUDA
    kernels = [event for event in found.events() if event.device_type == on_gpu]
    busy = sum(event.time_range.elapsed_us() for event in kernels) / 1e3
    say(f"{said}; {len(kernels)} kernels, which take {busy:.1f} ms: the rest is launching them")


# ------------------------------------------------------------------------------------------- learns
def learns(args):
    """As many iterations as fit. The last one is evaluated, as the model before training was."""
    if not args.model or not fits(args, 60, "a real model learns"):
        return
    out = Path(tempfile.mkdtemp(), "run")
    cfg = rm.Config(**learning(args), device=args.device, prompts=args.prompts,
                    rollouts=args.rollouts, out=str(out), iterations=args.iterations,
                    eval_every=args.iterations, save_every=args.iterations)
    start = time.monotonic()
    evaluation = 0.0

    def callback(row, trajs, models, cfg):
        """If there is no time for two more iterations and an evaluation, the next is the last."""
        nonlocal start, evaluation
        took = time.monotonic() - start
        start = time.monotonic()
        if row["iteration"] == 0:
            evaluation = took
            return
        say(f"iteration {row['iteration']}: rollout {row['seconds_rollout']:.1f} s, update "
            f"{row['seconds_update']:.1f} s, success {row['success']:.2f}, valid answers "
            f"{row['valid']:.2f}")
        # 20 seconds are for saving and drawing.
        if left(args) < 2 * took + evaluation + 20:
            cfg.iterations = min(cfg.iterations, row["iteration"] + 1)
    say(f"\n{args.model} learns, its rollout is {args.way}:")
    with playing(args.way):
        rm.train(cfg, callback=callback)
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "log.jsonl", "samples.jsonl", "curves.png"):
            shutil.copy(out / name, args.out)
    shutil.rmtree(out.parent)


def learning(args):  # -> settings
    if runs.is_tiny(args.model):  # a rehearsal
        return dict(model=args.model, algo="grpo", eval_prompts=8)
    return LEARNS | {"model": args.model}


# ---------------------------------------------------------------------------------------- all of it
PARTS = {"rollouts": rollouts, "passes": passes, "ratios": ratios, "learns": learns,
         "others": others}


def main(argv=None):
    parser = argparse.ArgumentParser(
        "gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--model", help="a real model, which learns")
    parser.add_argument("--out", help="folder for its log and its picture")
    parser.add_argument("--shape", default="qwen", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    for name, default in (("prompts", 8), ("rollouts", 16), ("tokens", 256), ("iterations", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    runs.need(rm.CUDA or args.device != "cuda",
              "There is no GPU here. --device cpu tries the program itself.")
    args.end = time.monotonic() + 60 * args.minutes
    args.failed = False
    args.way = "graph"  # how the parts play that measure something else, unless it fails
    args.random = random_model(args.shape)
    device = torch.cuda.get_device_name() if rm.CUDA else "CPU"
    say(f"{bench.about(device, 'gpu.py')}; random weights, shape {args.shape}")
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in runs.torch_settings
    for part in PARTS:
        if part in args.parts:
            run_part(part, args)
    shutil.rmtree(args.random)
    sys.exit(args.failed)


def run_part(part, args):
    start = time.monotonic()
    try:
        PARTS[part](args)
    except Exception:
        report_error(args, part)
    bench.write_as_usual()
    free()
    say(f"({part}: {time.monotonic() - start:.0f} s, {left(args):.0f} s remain)")


def report_error(args, what):
    """An error must not keep other figures from being measured."""
    say(f"{what} failed:\n{traceback.format_exc()}")
    args.failed = True
    if what == args.way:
        args.way = "today"


if __name__ == "__main__":
    main()
