"""Teach a chat model the form of an answer, in a few steps of supervised learning.

A pretrained chat model mostly writes no valid answer at first. Then all returns are equal, and
there is nothing to learn from. A few scripted episodes teach it the form, but not how to play,
because their moves are random:

    python extras/warm_start.py MODEL OUT --env bandit

MODEL is a folder or a hub id. Options of ragen_mini.py may follow, such as --max-new-tokens. It
ends when nine of ten turns are valid. Then train the model in the folder OUT. What made
SmolLM2-135M learn is

    python ragen_mini.py --model OUT --env bandit --algo grpo --adv-norm mean --kl-coef 0 --lr 2e-5

--reading 400 comes before that, for the lake and Sokoban: 400 steps on turns whose thoughts say
truly what is on the map. The moves are random there, too, so that RL has something to find.

--lora (pip install peft) trains low-rank adapters, which need less memory, and merges them.
"""
import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tiny")]

import numpy as np
import torch

import envs
import lessons
import ragen_mini as rm
from support import device, errors, folder, loading, settings
from support.errors import need

# At most so many steps, on so many episodes each. After every fifth step it is tried.
STEPS = 200
EPISODES = 4
TRIED_EVERY = 5
# This share of valid turns is enough.
ENOUGH = 0.9
# A step of reading has so many first turns, so that many levels are seen.
TURNS_OF_READING = 16
READING_LR = 3e-4
# The thoughts of the other lessons say nothing. Those of reading are true, and of these kinds.
PHRASES = ("I am not sure, let me just try.", "Let me just try.", "I am not sure.")
KINDS = {"goal": 0.3, "around": 0.3, "both": 0.4}
# These options of ragen_mini.py have no effect here, where nothing is learned from rewards.
OF_RL = {"lr", "critic_lr", "iterations", "algo", "out", "resume", "play"}
# With the presets, PPO at a learning rate of 1e-6, such a model would hardly change.
AFTER_IT = "--algo grpo --adv-norm mean --kl-coef 0 --lr 2e-5"


# ------------------------------------------------------------------------------------- the lessons
def teach_reading(models, cfg, steps):
    rng = np.random.default_rng(cfg.seed)
    optimizer = make_optimizer(models, READING_LR)
    one_turn = replace(cfg, max_turns=1)
    for step in range(1, steps + 1):
        warm_up = min(1, step / 20)
        decay = 1 - (step - 1) / steps
        optimizer.param_groups[0]["lr"] = READING_LR * warm_up * decay
        trajs = [demonstration(models.tok, rng, one_turn, True) for _ in range(TURNS_OF_READING)]
        loss = learn(models.policy, trajs, optimizer, cfg)
        if step % 10 == 0 or step == steps:
            print(f"reading {step}: loss {loss:.2f}", flush=True)


def teach_form(models, cfg, lr, reads):  # -> share of valid turns, after it
    rng = np.random.default_rng(cfg.seed)
    optimizer = make_optimizer(models, lr)
    valid = valid_turns(models, cfg, 0)
    print(f"valid turns {valid:.2f}", flush=True)
    start = perf_counter()
    for step in range(1, STEPS + 1):
        if valid >= ENOUGH:
            break
        trajs = [demonstration(models.tok, rng, cfg, reads) for _ in range(EPISODES)]
        loss = learn(models.policy, trajs, optimizer, cfg)
        if step % TRIED_EVERY == 0:
            valid = valid_turns(models, cfg, step)
            print(f"step {step}: loss {loss:.2f}, valid turns {valid:.2f}, "
                  f"{perf_counter() - start:.0f} s", flush=True)
    return valid


def demonstration(tok, rng, cfg, reads):  # -> Trajectory: an episode of random moves
    """In a training level. reads: do its thoughts say what is there?"""
    end = rm.end_tokens(SimpleNamespace(policy=None, tok=tok), cfg)[0]
    seed, episode = rng.integers(envs.EVAL_SEEDS.stop, 2 ** 31, 2).tolist()
    traj = rm.begin(seed, episode, 0, tok, cfg)
    while not traj.done:
        env = traj.env
        most = 1 if isinstance(env, envs.Bandit) else 2
        moves = rng.choice(env.actions, rng.integers(1, most + 1))
        thought = lessons.thought(env, rng, KINDS) if reads else rng.choice(PHRASES)
        text = f"<answer>{' || '.join(moves)}</answer>"
        if not cfg.no_think:
            text = f"<think>{thought}</think>{text}"
        text = text.removeprefix(cfg.first_tag)
        traj.append([*tok(text, add_special_tokens=False).input_ids, end], sampled=True)
        rm.take_turn(traj, tok, cfg, [end])
    return traj


# ------------------------------------------------------------------------------------- supervision
def make_optimizer(models, lr):
    trained = [weight for weight in models.policy.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr)


def learn(policy, trajs, optimizer, cfg):  # -> loss
    """One step on the cross-entropy of what the scripts wrote."""
    batch = rm.collate(trajs, cfg.device)
    total = batch["mask"].sum()
    loss = 0.0
    with device.autocast(cfg.device):
        for _, part in rm.micro_batches(batch, range(len(trajs)), cfg.micro_tokens):
            logp, _ = rm.token_logps(policy, part, cfg)
            part_loss = -logp.sum() / total
            part_loss.backward()
            loss += part_loss.item()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), rm.MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def valid_turns(models, cfg, sampling_seed):  # -> their share, in eight training levels
    first = envs.EVAL_SEEDS.stop
    trajs = rm.rollout(models, range(first, first + 8), 1, cfg, sampling_seed)
    return np.mean([turn["valid"] for traj in trajs for turn in traj.turns])


def with_adapters(policy):  # -> the policy with low-rank adapters; only they are trained
    try:
        import peft
    except ImportError as error:
        raise errors.UserError("--lora needs peft: pip install peft") from error
    return peft.get_peft_model(policy, peft.LoraConfig(r=16, target_modules="all-linear"))


# ------------------------------------------------------------------------------------- the program
def parse():  # -> options of this program, cfg
    parser = argparse.ArgumentParser(
        usage="%(prog)s MODEL OUT [options]", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--warm-lr", type=float,
                        help="learning rate (default: 2e-5, with --lora 2e-4)")
    parser.add_argument("--reading", type=int, default=0, metavar="STEPS")
    args, options = parser.parse_known_args()
    args.warm_lr = args.warm_lr or (2e-4 if args.lora else 2e-5)

    options = ["--model", args.model, "--eval-only", *options]
    unused = OF_RL.intersection(settings.parse_arguments(options, rm.Config))
    need(not unused, f"{', '.join(map(settings.as_option, unused))}: this has no effect here. The "
                     f"learning rate is --warm-lr.")
    cfg = rm.parse_config(options)
    need(not any(args.out.glob("*")), f"{args.out} is not empty. Give another folder.")
    env = envs.make(cfg.env)
    can_be_read = type(env) is envs.FrozenLake or getattr(env, "draw_args", ())[1:] == (1,)
    need(args.reading == 0 or (can_be_read and not cfg.no_think),
         "--reading is for thoughts about frozenlake, and about sokoban with one box.")
    return args, cfg


def warm_start(args, cfg):
    models = rm.load_models(cfg)
    args.out.mkdir(parents=True, exist_ok=True)  # if that cannot be, it is said now
    if args.lora:
        models.policy = with_adapters(models.policy)
    with device.torch_settings(models.policy):
        teach_reading(models, cfg, args.reading)
        valid = teach_form(models, cfg, args.warm_lr, args.reading > 0)
        need(valid >= ENOUGH,
             f"{STEPS} steps were too few, because only {valid:.2f} of the turns are valid, not "
             f"{ENOUGH}. Nothing was saved. If the loss still falls, give a higher --warm-lr than "
             f"{args.warm_lr:g}. If it jumps, give a lower one.")
        rm.evaluate(models, replace(cfg, eval_prompts=min(cfg.eval_prompts, 64)))
    if args.lora:
        models.policy = models.policy.merge_and_unload()
    with loading.quiet_transformers():
        models.policy.save_pretrained(args.out)
        models.tok.save_pretrained(args.out, save_jinja_files=False)
    options = "" if loading.is_tiny(str(args.out)) else f" {AFTER_IT}"
    print(f"saved. Next: python ragen_mini.py --model {shlex.quote(str(args.out))} "
          f"{folder.settings_to_play(cfg)}--max-new-tokens {cfg.max_new_tokens}{options}")


if __name__ == "__main__":
    with errors.one_line_errors():
        warm_start(*parse())
