"""How the included model was made: it was taught to read, and not to play.

    python tiny/lessons.py                        writes runs/tiny-seed0, in about half an hour
    python tiny/lessons.py --seed 1 --share 0.1   another one, with a tenth of the lessons

It is a small Llama with one token per word and grid cell. It learns by supervised learning from
episodes that this file writes. Each answer in them is a thought and a move:

    thought    a *true reading* of the state, of one of four kinds: a stock phrase ("nothing"),
               where the goal is ("goal"), what lies in the four directions, up to two cells far
               ("around"), or both of these ("both"). On Sokoban the goal is the box and its target.
               On the bandit a thought says what the arms' names sound like
    moves      one or two actions, each drawn *uniformly at random*, whatever the thought says. (The
               bandit's arm is the first that is named in 55% of the cases, the second in 45%, so
               that the likeliest arm, too, is the better one in half of the levels)
    form       a tenth of the answers lacks its tag <answer>

So the model reads, and knows the form of an answer. That one move is better than another it has
never seen. This is left to reinforcement learning.

In the first lessons only the thoughts are trained, and all of them say something. So hardly
anything that is trained is random, and the model learns quickly to read. Then everything is
trained.
"""
import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from torch.nn import functional
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import envs
import ragen_mini as rm
from support import loading

# How often an episode is played in which environment, and which kinds of thoughts it has.
GAMES = {"frozenlake": 0.40, "sokoban": 0.45, "sokoban_newvocab": 0.07, "bandit": 0.04,
         "bandit_test": 0.04}
MAPS = {"frozenlake": 0.43, "sokoban": 0.49, "sokoban_newvocab": 0.08}
KINDS = {"nothing": 0.2, "goal": 0.25, "around": 0.25, "both": 0.3}
TELLING = {"goal": 0.3, "around": 0.2, "both": 0.5}
MALFORMED = 0.1
NO_THINK = 0.1  # share of the episodes without thoughts, so that --no-think can begin

NOTHING = ("I am not sure, let me just try.", "Let me just try.", "I am not sure.")
GOAL = ("The goal is {}.", "I see the goal {}.")
BOX = ("The box is {box}, the target is {target} of it.",
       "I see the box {box}, the target {target} of it.")
AROUND = ("{}.", "I see {}.")
SOUNDS = {"Teacher": "safe", "Librarian": "safe", "Engineer": "risky", "Trader": "risky"}


# ----------------------------------------------------------------------------------- true readings
def look(env):  # -> {move: what lies one and two cells in this direction}, such as "ice hole"
    player = env.state if isinstance(env, envs.FrozenLake) else env.state[0]
    seen = {}
    for move in envs.MOVES:
        near = what_lies_at(env, envs.shift(player, move))
        far = what_lies_at(env, envs.shift(player, move, 2))
        seen[move] = near if near in ("edge", "wall") else f"{near} {far}"
    return seen


def what_lies_at(env, cell):  # -> a word
    if isinstance(env, envs.FrozenLake):
        if not (0 <= cell[0] < env.size and 0 <= cell[1] < env.size):
            return "edge"
        if cell == env.level["goal"]:
            return "goal"
        return "hole" if cell in env.level["holes"] else "ice"
    if cell in env.state[1]:
        return "box"
    if cell in env.level["targets"]:
        return "target"
    return "free" if cell in env.level["floor"] else "wall"


def offset(a, b):
    """offset((0, 0), (2, 1)) -> "2 Down and 1 Right" """
    down, right = b[0] - a[0], b[1] - a[1]
    parts = []
    for steps, word in ((-down, "Up"), (down, "Down"), (-right, "Left"), (right, "Right")):
        if steps > 0:
            parts.append(f"{steps} {word}")
    return " and ".join(parts)


def thought(env, rng, kinds):  # kinds: {kind: its share} -> text
    kind = rng.choice(list(kinds), p=list(kinds.values()))
    if kind == "nothing":
        return choose(rng, NOTHING)
    if isinstance(env, envs.Bandit):
        arms = list(env.level)
        rng.shuffle(arms)
        return " ".join(f"{name} sounds {SOUNDS[name]}." for name in arms)
    parts = []
    if kind in ("around", "both"):
        seen = " ".join(f"{move} {words}" for move, words in look(env).items())
        parts.append(choose(rng, AROUND).format(seen))
    if kind in ("goal", "both"):
        parts.append(where_to(env, rng))
    return " ".join(parts)


def where_to(env, rng):  # -> text
    if isinstance(env, envs.FrozenLake):
        return choose(rng, GOAL).format(offset(env.state, env.level["goal"]))
    player, boxes = env.state
    return choose(rng, BOX).format(box=offset(player, boxes[0]),
                                   target=offset(boxes[0], env.level["targets"][0]))


def choose(rng, options):
    return options[rng.integers(len(options))]


# ------------------------------------------------------------------------------------- the lessons
def lesson(tok, rng, games, kinds, all_is_trained):  # -> Trajectory
    max_turns = 5 if rng.random() < 0.2 else 1  # short ones show more levels a second
    traj, cfg = begin(tok, rng, games, max_turns=max_turns, no_think=bool(rng.random() < NO_THINK))
    ends = rm.end_tokens(SimpleNamespace(policy=None, tok=tok), cfg)
    while not traj.done:
        if not cfg.no_think:
            text = f"{thought(traj.env, rng, kinds)}</think>"
            traj.append(ids_of(tok, text), sampled=True)
        answer = f"<answer>{moves(traj.env, rng)}</answer>"
        if rng.random() < MALFORMED:
            answer = answer.removeprefix("<answer>").removesuffix("</answer>")
        ids = [*ids_of(tok, answer.removeprefix(cfg.first_tag)), ends[0]]
        traj.append(ids, sampled=True)
        traj.mask[-len(ids):] = [all_is_trained] * len(ids)
        rm.take_turn(traj, tok, cfg, ends)
    return traj


def moves(env, rng):  # -> text
    if isinstance(env, envs.Bandit):
        return rng.choice(env.level, p=[0.55, 0.45])
    return " || ".join(rng.choice(env.actions, rng.integers(1, 3)))


def ids_of(tok, text):
    ids = tok(text, add_special_tokens=False).input_ids
    assert tok.unk_token_id not in ids, f"a word of {text!r} is not in the vocabulary"
    return ids


def begin(tok, rng, games, **settings):  # -> Trajectory in a training level, Config
    name = rng.choice(list(games), p=list(games.values()))
    cfg = rm.Config(env=name, device="cpu", **settings)
    seed, episode = rng.integers(envs.EVAL_SEEDS.stop, 2 ** 31, 2).tolist()
    return rm.begin(seed, episode, 0, tok, cfg), cfg


def teach(model, lessons, steps, speed, rng):
    """Minimizes the cross-entropy of the answers' tokens.

    Muon, an optimizer that makes each step of a matrix an orthogonal one, learns this faster than
    AdamW alone. It is for matrices only. The rest gets AdamW.
    """
    matrices, others = [], []
    for name, weight in model.named_parameters():
        (matrices if weight.ndim == 2 and "embed" not in name else others).append(weight)
    muon = torch.optim.Muon(matrices, weight_decay=0.0)
    adam = torch.optim.AdamW(others)
    bar = tqdm(range(steps))
    for step in bar:
        chosen = [lessons[i] for i in rng.integers(len(lessons), size=64)]
        batch = rm.collate(chosen, "cpu")
        total = 0.0
        for _, part in rm.micro_batches(batch, range(len(chosen)), limit=4096):
            mask = part["mask"]
            logits = model(input_ids=part["inputs"], use_cache=False).logits[mask]
            loss = functional.cross_entropy(logits, part["targets"][mask], reduction="sum")
            loss = loss / batch["mask"].sum()
            loss.backward()
            total += loss.item()
        bar.set_postfix_str(f"loss {total:.3f}")
        rate = speed * min(1, (step + 1) / 50) * (1 - step / steps)
        muon.param_groups[0]["lr"] = 0.02 * rate
        adam.param_groups[0]["lr"] = 0.003 * rate
        muon.step()
        adam.step()
        model.zero_grad()


def untrained(tok):  # -> model
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tok),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        # Texts are short, and which of two cells is left of the other must be seen exactly.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tok.eos_token_id,
        # By this the program knows the model, and all that is trained from it (loading.is_tiny).
        ragen_mini_presets="tiny"))


def taught(tok, seed, share):  # -> model
    """share: of the usual number of lessons and steps."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = untrained(tok)
    for games, kinds, all_is_trained, count, steps, speed in (
            (MAPS, TELLING, False, 60_000, 5000, 1.0), (GAMES, KINDS, True, 15_000, 2500, 0.5)):
        lessons = [lesson(tok, rng, games, kinds, all_is_trained)
                   for _ in tqdm(range(int(count * share)), "lessons")]
        teach(model, lessons, int(steps * share), speed, rng)
    return model


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the lessons and steps")
    parser.add_argument("--out", type=Path, help="folder for the model (runs/tiny-seed<n>)")
    args = parser.parse_args()
    out = args.out or ROOT / f"runs/tiny-seed{args.seed}"
    if out.exists():
        sys.exit(f"{out} exists. Give another --out")
    tok = transformers.AutoTokenizer.from_pretrained(loading.TINY)
    taught(tok, args.seed, args.share).save_pretrained(out)
    tok.save_pretrained(out)
    print(f"saved in {out}")


if __name__ == "__main__":
    main()
