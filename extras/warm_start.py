"""A pretrained chat model mostly writes no valid answer at first: then all returns are alike, and there is nothing to
learn from. A few steps of supervised learning on scripted episodes teach it the form, hardly how to play:

    python extras/warm_start.py MODEL OUT --env bandit        MODEL: a folder or a hub id; any options of ragen_mini.py
    python ragen_mini.py --model OUT --env bandit             then train as usual

The scripts are those of tiny/cold_start.py: mostly a habit (a stock phrase, then random actions), now and then a planner.
It ends when nine of ten turns are valid. --lessons 40 comes before: so many steps on the planner's turns alone (they
taught SmolLM2-135M to play the lake in words, see README.md; whether they teach a model to read a map is open). --lora
(pip install peft) trains low-rank adapters, which need less memory, and merges them.
"""
import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tiny")]

import cold_start
import numpy as np
import torch

import envs
import ragen_mini as rm
from extras import recipes

KNOWN = (envs.Bandit, envs.FrozenLake, envs.Sokoban)  # to the planner
PLAYERS = {"habit": 0.8, "planner": 0.2}
STEPS, EPISODES, TRIED_EVERY = 200, 4, 5  # at most so many steps, on so many episodes each; steps between two looks
ENOUGH = 0.9  # share of valid turns
LESSONS_A_LINE = 10
OF_RL = ("--lr", "--critic-lr", "--iterations")  # what ragen_mini.py knows, too, and somebody may mean
TURNS_A_LESSON = 32  # each the first of an episode: so one sees most levels a second


def teach_planning(models, cfg, lr, steps):
    rng = np.random.default_rng(cfg.seed)
    optimizer = make_optimizer(models, lr)
    one_turn = replace(cfg, max_turns=1)
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        trajs = demonstrations(models.tok, rng, one_turn, {"planner": 1.0}, TURNS_A_LESSON)
        warm_up = min(1, step / 20)
        decay = 1 - (step - 1) / steps
        optimizer.param_groups[0]["lr"] = lr * warm_up * decay
        loss = learn(models.policy, trajs, optimizer, cfg)
        if step % LESSONS_A_LINE == 0 or step == steps:
            print(f"lesson {step}: loss {loss:.2f}, {time.perf_counter() - begun:.0f} s", flush=True)


def warm_start(models, cfg, lr):  # models.policy learns -> share of valid turns, before and after
    rng = np.random.default_rng(cfg.seed)
    policy = models.policy
    optimizer = make_optimizer(models, lr)
    before = valid = valid_turns(models, cfg, 0)
    print(f"valid turns {before:.2f}", flush=True)
    begun = time.perf_counter()
    for step in range(1, STEPS + 1):
        if valid >= ENOUGH:
            break
        loss = learn(policy, demonstrations(models.tok, rng, cfg), optimizer, cfg)
        if step % TRIED_EVERY == 0:
            valid = valid_turns(models, cfg, step)
            print(f"step {step}: loss {loss:.2f}, valid turns {valid:.2f}, {time.perf_counter() - begun:.0f} s", flush=True)
    return before, valid


def make_optimizer(models, lr):
    return torch.optim.AdamW([weight for weight in models.policy.parameters() if weight.requires_grad], lr)


def demonstrations(tok, rng, cfg, players=PLAYERS, episodes=EPISODES):  # -> trajectories on training levels
    if not isinstance(envs.make(cfg.env), KNOWN):
        players = {"habit": 1.0}
    trajs = []
    for _ in range(episodes):
        seed, episode = rng.integers(len(envs.EVAL_SEEDS), 2 ** 31, 2).tolist()
        traj = rm.begin(seed, episode, 0, tok, cfg)
        cold_start.play_by_script(traj, players, rng, tok, cfg)
        trajs.append(traj)
    return trajs


@rm.autocast
def learn(policy, trajs, optimizer, cfg):  # one step of cross-entropy on the answers' tokens -> its loss
    batch = rm.collate(trajs, cfg.device)
    total = batch["mask"].sum()
    loss = 0.0
    for _, part in rm.micro_batches(batch, range(len(trajs))):
        logp, _ = rm.token_logps(policy, part, cfg)
        mean = -logp.sum() / total
        mean.backward()
        loss += mean.item()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), rm.MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def valid_turns(models, cfg, seed):  # in eight episodes on training levels
    first = len(envs.EVAL_SEEDS)
    trajs = rm.rollout(models, range(first, first + 8), 1, cfg, seed)
    return np.mean([turn["valid"] for traj in trajs for turn in traj.turns])


def adapted(policy):  # -> the same with low-rank adapters, which alone are trained
    import peft
    return peft.get_peft_model(policy, peft.LoraConfig(r=16, target_modules="all-linear"))


def parse(argv):  # -> this program's options, cfg
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="calculate in bf16, where the CPU can")
    parser.add_argument("--warm-lr", type=float, help="AdamW (2e-5; with --lora 2e-4)")
    parser.add_argument("--lessons", type=int, default=0, help="steps on the planner's turns, before (0)")
    parser.add_argument("--lesson-lr", type=float, default=3e-4, help="AdamW, falling to 0 (3e-4)")
    first = [word for word in argv[:2] if word.startswith("--") and word != "--help"]
    rm.need(not first, "first MODEL and OUT, then options")
    args, options = parser.parse_known_args(argv)
    rm.need(not Path(args.out).exists(), f"{args.out} exists: give another folder")
    for word in options:
        name = word.split("=")[0].replace("_", "-")
        means = [option for option in OF_RL if name.startswith("--") and option.startswith(name)]  # it may be cut short
        rm.need(not means, f"{name} is for ragen_mini.py: here nothing is learnt from rewards (--warm-lr, --lesson-lr)")
    cfg = rm.parse_config(["--model", args.model, *options])
    rm.need(not cfg.out, f"OUT is {args.out}: no --out")
    rm.need(cfg.trains, "--play and --eval-only are for ragen_mini.py: this program trains")
    if args.warm_lr is None:
        args.warm_lr = 2e-4 if args.lora else 2e-5
    rm.need(0 < args.warm_lr < 1 and 0 < args.lesson_lr < 1, "--warm-lr and --lesson-lr must be above 0, below 1")
    rm.need(args.lessons >= 0, f"--lessons {args.lessons}: at least 0")
    rm.need(args.lessons == 0 or isinstance(envs.make(cfg.env), KNOWN), f"--lessons: no planner knows {cfg.env}")
    cfg.trains = False  # no critic, no reference
    return args, cfg


def free_name(out):  # what another process saved there in the meantime stays
    number = 1
    name = out
    while Path(name).exists():
        number += 1
        name = f"{out}-{number}"
    return name


def main(argv):
    args, cfg = parse(argv)
    with rm.or_say(f"cannot write {args.out}"):  # now, not after the lessons
        Path(args.out).mkdir(parents=True)
        Path(args.out).rmdir()
    if args.bf16:
        recipes.calculate_in_bf16()
    models = rm.load_models(cfg)
    recipes.share_beginning(models.policy)  # the same gradients, sooner
    if args.lora:
        models.policy = adapted(models.policy)
    teach_planning(models, cfg, args.lesson_lr, args.lessons)
    _, valid = warm_start(models, cfg, args.warm_lr)
    rm.need(valid >= ENOUGH, f"{STEPS} steps were too few: {valid:.2f} of the turns are valid, not {ENOUGH}. "
            f"Nothing was saved. Try another --warm-lr than {args.warm_lr:g}")
    rm.evaluate(0, models, replace(cfg, eval_prompts=min(cfg.eval_prompts, 64)))
    if args.lora:
        models.policy = models.policy.merge_and_unload()
    out = free_name(args.out)
    with rm.or_say(f"cannot save in {out}: is the disk full?"):
        models.policy.save_pretrained(out)
        models.tok.save_pretrained(out, save_jinja_files=False)
    print(f"saved: python ragen_mini.py --model {out} --env {cfg.env}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
