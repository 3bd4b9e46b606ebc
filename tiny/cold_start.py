"""How the included model was made: by supervised learning, before any reinforcement learning.

    python tiny/cold_start.py                        writes runs/tiny-seed0. It takes 50 minutes on
                                                     one thread of a busy machine
    python tiny/cold_start.py --seed 1 --steps 500   another one, a quick one

It is a Llama of 0.14 million parameters, with one token per word and grid cell. It learns from
episodes that are written by scripts, in two steps:

    cold start   the lessons of a *planner*, who says where things are, and then acts on an optimal
                 path (the paper's App. C trains on such solutions)
    degraded     then, for a short while, a *mixture* in which each turn is written by somebody
                 else: a little by the planner, more by a *habit* (a stock phrase, then one or two
                 random actions) and by a *sloppy* player (the same, without the answer's tag)

The degraded model is the included one. Reinforcement learning has something to find in it, and
something to collapse into.

Each thought of the planner can be checked against the board, and each player has several wordings.
On the lake the wording goes with the plan: bold thoughts with what is best on gentle ice (the
intended move has probability 0.8), careful ones with what is best on the paper's (1/3). The model
cannot see which ice it is on. It has to find out.
"""
import argparse
import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import envs
import plots
import ragen_mini as rm
import runs

# How often an episode is played in which environment, and who writes its turns.
SHARES = {"frozenlake": 0.41, "sokoban": 0.42, "sokoban_newvocab": 0.07, "bandit": 0.05,
          "bandit_test": 0.05}
PLANNER = {"planner": 1.0}
MIXTURE = {"planner": 0.15, "habit": 0.5, "sloppy": 0.35}

BOLD = ("The goal is {}.", "I see the goal, it is {}.", "I go straight to the goal, it is {}.")
CAREFUL = ("Careful, the goal is {}.", "The ice is slippery. The goal is {}.",
           "I keep away from holes. The goal is {}.")
PUSHING = ("The box is {box}. The target is {target} of it.",
           "I see the box, it is {box}. The target is {target} of it.",
           "The target is {target} of the box. The box is {box} of me.")
HABIT = ("I am not sure, let me just try.", "Let me just try.", "I just go, let me see.")
SOUNDS = {"Teacher": "safe", "Librarian": "safe", "Engineer": "risky", "Trader": "risky"}


# ------------------------------------------------------------------------------------ the players
def best_path(lake, success_rate, actions_left, length):  # -> at most `length` moves
    """Optimal play on ice of this kind, by dynamic programming. It is planned as if none of these
    moves slipped.
    """
    ice = envs.FrozenLake(success_rate=success_rate)
    ice.level = lake.level

    @functools.cache
    def value(cell, left):  # the probability of reaching the goal from here
        if ice.won(cell):
            return 1.0
        if left == 0 or cell in ice.level["holes"]:
            return 0.0
        return max(worth(cell, action, left) for action in ice.actions)

    def worth(cell, action, left):
        outcomes = ice.outcomes(cell, action)
        return sum(chance * value(new, left - 1) for chance, new, _, _ in outcomes)

    cell = lake.state
    path = []
    for left in range(actions_left, max(0, actions_left - length), -1):
        if ice.won(cell) or cell in ice.level["holes"]:
            break
        path.append(max(ice.actions, key=lambda action: worth(cell, action, left)))
        cell = ice.outcomes(cell, path[-1])[0][1]
    return path


def solve(env):
    """A shortest list of actions from env.state to success (FrozenLake: as if nothing slipped), or
    None. To be called before the level is won.
    """
    paths = {env.state: []}
    queue = [env.state]
    for state in queue:  # the list grows while we walk along it: breadth first
        for action in env.actions:
            _, new, _, over = env.outcomes(state, action)[0]
            if new in paths:
                continue
            paths[new] = paths[state] + [action]
            if env.won(new):
                return paths[new]
            if not over:
                queue.append(new)


def offset(a, b):
    """offset((0, 0), (2, 1)) -> "2 down and 1 right" """
    down, right = b[0] - a[0], b[1] - a[1]
    parts = []
    for steps, word in ((-down, "up"), (down, "down"), (-right, "left"), (right, "right")):
        if steps > 0:
            parts.append(f"{steps} {word}")
    return " and ".join(parts)


def choose(rng, options):
    return options[rng.integers(len(options))]


def planner(env, actions_left, rng):  # -> thought, actions; None if nothing can be won any more
    if isinstance(env, envs.FrozenLake):
        careful = rng.random() < 0.5
        length = rng.choice([1, 2, 3, 4], p=[0.15, 0.4, 0.3, 0.15])
        path = best_path(env, 1 / 3 if careful else 0.8, actions_left, length)
        thought = choose(rng, CAREFUL if careful else BOLD)
        return thought.format(offset(env.state, env.level["goal"])), path
    if isinstance(env, envs.Sokoban):
        path = solve(env)
        if path is None:
            return None
        player, boxes = env.state
        to_box = offset(player, boxes[0])
        to_target = offset(boxes[0], env.level["targets"][0])
        return choose(rng, PUSHING).format(box=to_box, target=to_target), path
    arms = list(env.level)
    rng.shuffle(arms)
    arm = choose(rng, arms)
    thoughts = [f"{name} sounds {SOUNDS[name]}." for name in arms]
    thoughts.append(f"I {choose(rng, ('choose', 'take'))} the {SOUNDS[arm]} one.")
    return " ".join(thoughts), [arm]


def guess(env, rng):  # -> thought, actions
    most = 1 if isinstance(env, envs.Bandit) else 2
    thought = choose(rng, HABIT)
    return thought, rng.choice(env.actions, rng.integers(1, most + 1)).tolist()


def demonstration(tok, rng, players, max_turns):  # players: {name: share of turns} -> Trajectory
    name = rng.choice(list(SHARES), p=list(SHARES.values()))
    no_think = bool(rng.random() < 1 / 8)  # so that --no-think has something to begin with
    cfg = rm.Config(env=name, device="cpu", max_turns=max_turns, no_think=no_think,
                    success_rate=choose(rng, (1 / 3, 0.8)))
    seed, episode = rng.integers(len(envs.EVAL_SEEDS), 2 ** 31, 2).tolist()
    traj = rm.begin(seed, episode, 0, tok, cfg)
    play_by_script(traj, players, rng, tok, cfg)
    text = tok.decode(traj.ids)
    assert tok.unk_token_id not in traj.ids, f"a word of {text!r} is not in the vocabulary"
    return traj


def play_by_script(traj, players, rng, tok, cfg):
    """To its end, in any environment that `planner` knows, for any tokenizer."""
    end = rm.end_tokens(SimpleNamespace(policy=None, tok=tok), cfg)[0]
    while not traj.done:
        player = rng.choice(list(players), p=list(players.values()))
        plan = planner(traj.env, traj.actions_left, rng) if player == "planner" else None
        thought, actions = plan or guess(traj.env, rng)
        answer = " || ".join(actions[:cfg.max_actions_per_turn])
        if player != "sloppy":
            answer = f"<answer>{answer}</answer>"
        text = answer if cfg.no_think else f"<think>{thought}</think>{answer}"
        ids = tok(text.removeprefix(cfg.first_tag), add_special_tokens=False).input_ids
        traj.append([*ids, end], sampled=True)
        rm.take_turn(traj, tok, cfg, [end])


# ------------------------------------------------------------------------------------ the lessons
def teach(model, demos, steps, speed, rng, title):
    """Minimizes the cross-entropy of the players' tokens.

    Muon, an optimizer that makes each step of a matrix an orthogonal one, learned this faster than
    AdamW alone in a prototype. It is for matrices only. The rest gets AdamW.
    """
    matrices, others = [], []
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            matrices.append(weight)
        else:
            others.append(weight)
    muon = torch.optim.Muon(matrices, weight_decay=0.0)
    adam = torch.optim.AdamW(others)
    cfg = rm.Config(device="cpu")
    for step in tqdm(range(steps), title):
        chosen = [demos[i] for i in rng.integers(len(demos), size=64)]
        batch = rm.collate(chosen, "cpu")
        for _, part in rm.micro_batches(batch, range(len(chosen))):
            logp, _ = rm.token_logps(model, part, cfg)
            loss = -logp.sum() / batch["mask"].sum()
            loss.backward()
        warm_up = min(1, (step + 1) / 50)
        decay = 1 - step / steps
        for optimizer, rate in ((muon, 0.02), (adam, 0.003)):
            optimizer.param_groups[0]["lr"] = speed * rate * warm_up * decay
            optimizer.step()
        model.zero_grad()


def report(title, model, tok):
    """Success on the held-out levels, nearly greedy and at the temperature of evaluations."""
    models = SimpleNamespace(policy=model, tok=tok)
    games = [("sokoban", 1 / 3), ("frozenlake", 0.8), ("frozenlake", 1 / 3), ("bandit", 1 / 3)]
    for name, success_rate in games:
        cfg = rm.Config(env=name, device="cpu", success_rate=success_rate)
        yardsticks = envs.mean_yardsticks(name, cfg.max_actions, success_rate=success_rate)
        random, optimal = yardsticks[:, -1]
        line = f"{title}: {name} {success_rate:.2f}"
        for cfg.temperature in (1e-4, rm.EVAL_TEMPERATURE):
            trajs = rm.rollout(models, envs.EVAL_SEEDS, 1, cfg, 0)
            success = np.mean([traj.success for traj in trajs])
            share = plots.with_interval(success, len(trajs))
            line += f"  at temperature {cfg.temperature:g}: {share}"
        print(f"{line}  random {random:.2f}  optimal {optimal:.2f}", flush=True)


def untrained(tok):  # -> model
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tok),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tok.eos_token_id,
        # By this the program knows the model, and all that is trained from it (see runs.is_tiny).
        ragen_mini_presets="tiny"))


def cold_start(tok, steps, seed):  # -> model
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = untrained(tok)
    # Turns of each episode. Short ones show more levels a second.
    lessons = [1] * (5 * steps) + [5] * (2 * steps)
    planned = [demonstration(tok, rng, PLANNER, turns)
               for turns in tqdm(lessons, "planner's episodes")]
    mixed = [demonstration(tok, rng, MIXTURE, 5) for _ in tqdm(range(6000), "mixture's episodes")]
    teach(model, planned, steps, 1.0, rng, "planner")
    report("planner", model, tok)
    teach(model, mixed, 300, 0.4, rng, "mixture")
    report("mixture", model, tok)
    return model


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10_000,
                        help="gradient steps on the planner's episodes")
    parser.add_argument("--out", type=Path, help="folder for the model (runs/tiny-seed<n>)")
    args = parser.parse_args()
    out = args.out or ROOT / f"runs/tiny-seed{args.seed}"
    if out.exists():
        sys.exit(f"{out} exists. Give another --out")
    tok = transformers.AutoTokenizer.from_pretrained(runs.TINY)
    cold_start(tok, args.steps, args.seed).save_pretrained(out)
    tok.save_pretrained(out)
    print(f"saved in {out}")


if __name__ == "__main__":
    main()
