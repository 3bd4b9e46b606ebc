"""Teach a chat model the form of an answer, in a few steps of supervised learning.

A pretrained chat model mostly writes no valid answer at first. Then all returns are equal, and
there is nothing to learn from. A few scripted episodes teach it the form, but hardly how to play:

    python extras/warm_start.py MODEL OUT --env bandit

MODEL is a folder or a hub id. All options of ragen_mini.py that make sense here may follow. Then
train the model in the folder OUT. What made SmolLM2-135M learn is

    python ragen_mini.py --model OUT --env bandit --algo grpo --adv-norm mean --kl-coef 0 --lr 2e-5

The scripts are those of tiny/cold_start.py: mostly a habit (a stock phrase, then random actions),
now and then a planner. It ends when nine of ten turns are valid.

--lessons 40 begins with 40 steps on the planner's turns alone. They taught SmolLM2-135M to play the
lake in words (extras/told_lake.py).

--reading 400 comes before that, for the lake and Sokoban as maps: 400 steps on maps alone, without
the instruction. In these and in the lessons that follow the thoughts say where everything is.
--random-moves 0.7 makes the moves random in 70% of the turns of these lessons, so that RL has
something to find in a model that reads well.

--lora (pip install peft) trains low-rank adapters, which need less memory, and merges them.
"""
import argparse
import functools
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tiny")]

import numpy as np
import torch

import cold_start
import envs
import ragen_mini as rm
import runs
from cold_start import offset
from extras import recipes
from runs import need

# The planner of tiny/cold_start.py knows these environments.
PLANNED = (envs.Bandit, envs.FrozenLake, envs.Sokoban)
PLAYERS = {"habit": 0.8, "planner": 0.2}
# At most so many steps, on so many episodes each. After every fifth step it is tried.
STEPS = 200
EPISODES = 4
TRIED_EVERY = 5
# This share of valid turns is enough.
ENOUGH = 0.9
# A step of the lessons has so many first turns, or so many whole episodes if there are random moves
# in them. A step of reading has so many maps.
TURNS_OF_A_LESSON = 32
EPISODES_OF_A_LESSON = 10
MAPS_OF_A_LESSON = 16
REPORTED_EVERY = 10
# These options of ragen_mini.py have no effect here, where nothing is learned from rewards.
OF_RL = ("lr", "critic_lr", "iterations", "out", "resume", "play", "eval_only")
# With the presets, PPO at a learning rate of 1e-6, such a model would hardly change.
AFTER_IT = "--algo grpo --adv-norm mean --kl-coef 0 --lr 2e-5"


def teach_reading(models, cfg, lr, steps):
    teach("map", maps_to_read, models, cfg, lr, steps)


def teach_planning(models, cfg, lr, steps, random_moves=0.0):
    lesson = turns_of_the_planner
    if random_moves:
        lesson = functools.partial(episodes_with_random_moves, random_moves)
    teach("lesson", lesson, models, cfg, lr, steps)


def teach(name, lesson, models, cfg, lr, steps):  # lesson(rng, tok, cfg) -> trajectories
    rng = np.random.default_rng(cfg.seed)
    optimizer = make_optimizer(models, lr)
    start = perf_counter()
    for step in range(1, steps + 1):
        warm_up = min(1, step / 20)
        decay = 1 - (step - 1) / steps
        optimizer.param_groups[0]["lr"] = lr * warm_up * decay
        loss = learn(models.policy, lesson(rng, models.tok, cfg), optimizer, cfg)
        if step % REPORTED_EVERY == 0 or step == steps:
            print(f"{name} {step}: loss {loss:.2f}, {perf_counter() - start:.0f} s", flush=True)


def turns_of_the_planner(rng, tok, cfg):  # the first of each episode, so that many levels are seen
    one_turn = replace(cfg, max_turns=1)
    return demonstrations(tok, rng, one_turn, {"planner": 1.0}, TURNS_OF_A_LESSON)


def episodes_with_random_moves(share, rng, tok, cfg):  # whole ones: later turns are read, too
    players = {"planner": 1 - share, "habit": share}
    return demonstrations(tok, rng, cfg, players, EPISODES_OF_A_LESSON)


def teach_form(models, cfg, lr):  # -> share of valid turns, after it
    rng = np.random.default_rng(cfg.seed)
    optimizer = make_optimizer(models, lr)
    valid = valid_turns(models, cfg, 0)
    print(f"valid turns {valid:.2f}", flush=True)
    start = perf_counter()
    for step in range(1, STEPS + 1):
        if valid >= ENOUGH:
            break
        loss = learn(models.policy, demonstrations(models.tok, rng, cfg), optimizer, cfg)
        if step % TRIED_EVERY == 0:
            valid = valid_turns(models, cfg, step)
            print(f"step {step}: loss {loss:.2f}, valid turns {valid:.2f}, "
                  f"{perf_counter() - start:.0f} s", flush=True)
    return valid


# ------------------------------------------------------------------------------------ reading maps
def reader(env, actions_left, rng):  # -> thought, actions; None if nothing can be won any more
    """The planner, but its thought names where everything is. See `reading`."""
    if isinstance(env, envs.Sokoban):
        path = cold_start.solve(env)
        return path and (reading(env), path)
    # On slippery ice it is better to look again before all moves are made.
    length = rng.integers(2, 6)
    return reading(env), cold_start.best_path(env, env.success_rate, actions_left, length)


guess_of_the_habit = cold_start.guess  # `warm_start` puts reader_at_random in its place


def reader_at_random(env, rng):  # -> thought, actions
    _, moves = guess_of_the_habit(env, rng)
    return reading(env), moves


def reading(env):  # -> thought
    """Cells have names as on a chess board, but row 1 is the upper one. For example

        P _      P a1, G b2, O a2. The goal is 1 down and 1 right.
        O G

    The long list is there to be learned from: "The goal is 1 down and 1 right" says little about
    how to read a map.
    """
    if isinstance(env, envs.Sokoban):
        player, boxes = env.state
        box, target = boxes[0], env.level["targets"][0]
        wall, _, target_symbol, box_symbol, _, you, _ = env.symbols
        inside = range(1, env.size - 1)
        others = [(row, column) for row in inside for column in inside
                  if (row, column) not in env.level["floor"]]
        places = {you: [player], box_symbol: [box], target_symbol: [target], wall: others}
        claims = f"The box is {offset(player, box)}. The target is {offset(box, target)} of it."
    else:
        goal = env.level["goal"]
        places = {"P": [env.state], "G": [goal], "O": sorted(env.level["holes"])}
        claims = f"The goal is {offset(env.state, goal)}."
    listed = [" ".join([symbol, *map(name_of, cells)]) for symbol, cells in places.items() if cells]
    return f" {', '.join(listed)}. {claims}"


def name_of(cell):  # (row, column) -> "b1"
    row, column = cell
    return f"{ascii_lowercase[column]}{row + 1}"


def maps_to_read(rng, tok, cfg):
    return [map_and_reading(rng, tok, cfg) for _ in range(MAPS_OF_A_LESSON)]


def map_and_reading(rng, tok, cfg):  # -> Trajectory, without the instruction, which costs time
    env = envs.make(cfg.env, cfg.success_rate)
    env.reset(int(rng.integers(len(envs.EVAL_SEEDS), 2 ** 31)))
    traj = rm.Trajectory(env, 0, 0)
    for text, sampled in ((f"State:\n{env.render()}\n<think>", False), (reading(env), True)):
        traj.append(tok(text, add_special_tokens=False).input_ids, sampled)
    return traj


# ------------------------------------------------------------------------------------- supervision
def make_optimizer(models, lr):
    trained = [weight for weight in models.policy.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr)


def demonstrations(tok, rng, cfg, players=PLAYERS, episodes=EPISODES):  # -> trajectories
    """Scripted episodes in training levels."""
    if not has_planner(cfg):
        players = {"habit": 1.0}
    trajs = []
    for _ in range(episodes):
        seed, episode = rng.integers(len(envs.EVAL_SEEDS), 2 ** 31, 2).tolist()
        traj = rm.begin(seed, episode, 0, tok, cfg)
        cold_start.play_by_script(traj, players, rng, tok, cfg)
        trajs.append(traj)
    return trajs


def has_planner(cfg):
    return isinstance(envs.make(cfg.env), PLANNED)


def has_map(cfg):  # one that `reading` can read
    env = envs.make(cfg.env)
    env.reset(envs.EVAL_SEEDS.stop)
    if isinstance(env, envs.Sokoban):
        return len(env.state[1]) == 1
    return type(env) is envs.FrozenLake  # others may tell their state in words


@rm.bf16_on_gpu
def learn(policy, trajs, optimizer, cfg):  # -> loss
    """One step on the cross-entropy of what the scripts wrote."""
    batch = rm.collate(trajs, cfg.device)
    total = batch["mask"].sum()
    loss = 0.0
    for _, part in rm.micro_batches(batch, range(len(trajs))):
        logp, _ = rm.token_logps(policy, part, cfg)
        part_loss = -logp.sum() / total
        part_loss.backward()
        loss += part_loss.item()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), rm.MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def valid_turns(models, cfg, sampling_seed):  # -> their share, in eight training levels
    first = len(envs.EVAL_SEEDS)
    trajs = rm.rollout(models, range(first, first + 8), 1, cfg, sampling_seed)
    return np.mean([turn["valid"] for traj in trajs for turn in traj.turns])


def with_adapters(policy):  # -> the policy with low-rank adapters; only they are trained
    try:
        import peft
    except ImportError as error:
        raise runs.UserError("--lora needs peft: pip install peft") from error
    return peft.get_peft_model(policy, peft.LoraConfig(r=16, target_modules="all-linear"))


def make_parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="calculate in bf16, if the CPU can")
    parser.add_argument("--warm-lr", type=float,
                        help="learning rate (default: 2e-5, with --lora 2e-4)")
    parser.add_argument("--lessons", type=int, default=0,
                        help="steps on the planner's turns, which come first (default: 0)")
    parser.add_argument("--reading", type=int, default=0,
                        help="steps on maps alone, before the lessons (default: 0)")
    parser.add_argument("--random-moves", type=float, default=0.0,
                        help="share of the lessons' turns whose moves are random (default: 0)")
    parser.add_argument("--lesson-lr", type=float, default=3e-4,
                        help="learning rate of these, which falls to 0 (default: 3e-4)")
    return parser


def parse(argv):  # -> options of this program, cfg
    argv = sys.argv[1:] if argv is None else argv
    options_first = any(word.startswith("--") for word in argv[:2]) and "--help" not in argv
    need(not options_first, "MODEL and OUT come first, then the options.")
    args, options = make_parser().parse_known_args(argv)
    args.out = Path(args.out).expanduser()
    if args.warm_lr is None:
        args.warm_lr = 2e-4 if args.lora else 2e-5

    options = ["--model", args.model, *options]
    given = runs.parse_arguments(options, rm.Config)
    for name in OF_RL:
        need(name not in given, f"{runs.option(name)} has no effect here. The options of this "
                                f"program are MODEL OUT --warm-lr --lora --bf16 --reading "
                                f"--lessons --random-moves --lesson-lr")
    cfg = rm.parse_config(options)
    need(not args.out.exists(), f"{args.out} exists. Give another folder.")
    need(0 < args.warm_lr < 1 and 0 < args.lesson_lr < 1,
         "--warm-lr and --lesson-lr must be above 0 and below 1.")
    need(args.lessons >= 0, f"--lessons is {args.lessons}. It must be 0 or more.")
    need(args.lessons == 0 or has_planner(cfg),
         f"--lessons: there is no planner for {envs.title(cfg.env)}. Leave it out.")
    need(args.reading >= 0, f"--reading is {args.reading}. It must be 0 or more.")
    need(args.reading == 0 or has_map(cfg),
         f"--reading is for frozenlake, and for sokoban with one box, not for "
         f"{envs.title(cfg.env)}. Leave it out.")
    need(args.reading == 0 or not cfg.no_think,
         "--reading is for thoughts, and --no-think leaves none. Leave out one of the two.")
    need(0 <= args.random_moves <= 1,
         f"--random-moves is {args.random_moves:g}. It is a share, from 0 to 1.")
    need(args.random_moves == 0 or (args.reading and args.lessons),
         "--random-moves is about the lessons after --reading. Give both: --reading and --lessons.")
    return args, cfg


def check_can_be_made(folder):
    """If it cannot be made, that is said now, not after the lessons. Nothing is left behind."""
    folder = folder.resolve()
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True)
    for path in missing:
        path.rmdir()


def warm_start(args, cfg):
    check_can_be_made(args.out)
    if args.bf16:
        recipes.calculate_in_bf16()
    if args.reading:
        cold_start.planner = reader
        cold_start.guess = reader_at_random
    models = rm.load_models(replace(cfg, eval_only=True))  # without critic and reference
    recipes.share_beginning(models.policy)  # the same gradients, sooner
    if args.lora:
        models.policy = with_adapters(models.policy)
    with runs.torch_settings(models.policy), runs.passes_that_fill_the_card(models, cfg):
        teach_reading(models, cfg, args.lesson_lr, args.reading)
        teach_planning(models, cfg, args.lesson_lr, args.lessons, args.random_moves)
        valid = teach_form(models, cfg, args.warm_lr)
        need(valid >= ENOUGH,
             f"{STEPS} steps were too few, because only {valid:.2f} of the turns are valid, not "
             f"{ENOUGH}. Nothing was saved. Try another --warm-lr than {args.warm_lr:g}.")
        rm.evaluate(models, replace(cfg, eval_prompts=min(cfg.eval_prompts, 64)))
    if args.lora:
        models.policy = models.policy.merge_and_unload()
    out = runs.free_folder(replace(cfg, out=str(args.out)))  # somebody may have made it meanwhile
    models.policy.save_pretrained(out)
    models.tok.save_pretrained(out, save_jinja_files=False)
    options = "" if runs.is_tiny(str(out)) else f" {AFTER_IT}"
    print(f"saved. Next: python ragen_mini.py --model {shlex.quote(str(out))} "
          f"--env {shlex.quote(str(cfg.env))}{options}")


def main(argv=None):
    with runs.one_line_errors():
        warm_start(*parse(argv))


if __name__ == "__main__":
    main()
