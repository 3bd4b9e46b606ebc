"""Does a model suit? The program reads through a cache of its own and makes logits only where they are needed, which
not every architecture bears. Here both are compared with plain forward passes, in fp32, at the end of the longest
episode that your settings allow.

    python extras/check_model.py Qwen/Qwen2.5-0.5B-Instruct        any options of ragen_mini.py may follow
    right: at 2945 tokens log-probs differ by up to 2e-05 through the cache, 1e-05 in an update

While training, the program itself compares rollout and update in every iteration. This check comes before any training,
looks at every token and names the reason.
"""
import contextlib
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import ragen_mini as rm
from envs import UserError, need

TOLERANCE = 2e-3  # of log-probs. Right ones differ by rounding: 1e-4 happens in mixtures of experts
LIKELY = -20.0  # log-prob; the rounding of what is less likely does not matter
LEVELS = 32  # in which messages are measured
COMPARED = 256  # last tokens of an episode: the logits of all might take much memory


@torch.no_grad()
def check(models, cfg):  # -> tokens, largest difference through the cache, in an update; a UserError: not suited
    cfg = replace(cfg, temperature=1.0)  # a low one would only magnify the rounding
    first, later = longest_messages(models.tok, cfg)
    tokens = first + (cfg.max_turns - 1) * later + cfg.max_turns * cfg.max_new_tokens
    check_room(models.policy, tokens, cfg)
    refused = f"--model {cfg.model} ({type(models.policy).__name__}) cannot be used here: "
    trajs, cached = read_long_episodes(models, tokens, refused, cfg)
    in_cache, in_update = [], []
    for traj, from_cache in zip(trajs, cached):
        plain = plain_logps(models.policy, traj, cfg)
        in_cache.append(largest_gap(from_cache, plain[-1]))
        in_update.append(gap_of_update(models.policy, traj, plain, refused, cfg))
    need(max(in_update) < TOLERANCE, refused + "it changes its logits behind the output layer (log-probs are off by up "
         f"to {max(in_update):.1g})")
    need(max(in_cache) < TOLERANCE, refused + why_not(models.policy, tokens, max(in_cache)))
    return tokens, max(in_cache), max(in_update)


def longest_messages(tok, cfg):  # -> tokens of the longest first message, and of the longest later one
    """Measured in random play, since some worlds' texts grow. Half of the episodes act once in a turn, the other half
    as often as they may."""
    first = later = 0
    dice = np.random.default_rng(0)
    for seed in range(LEVELS):
        traj = rm.begin(seed, 0, 0, tok, cfg)
        need("State" in tok.decode(traj.ids), f"--model {cfg.model}: its chat template does not show the message")
        first = max(first, len(traj.ids))
        in_a_turn = 1 if seed % 2 else cfg.max_actions_per_turn
        for text in messages_of_random_play(traj.env, in_a_turn, dice, cfg):
            ids = rm.encode(tok, cfg.first_tag, text, after_answer=True)
            later = max(later, len(ids))
    return first, later


def messages_of_random_play(env, in_a_turn, dice, cfg):  # yields texts; the first one follows a malformed answer
    left = cfg.max_actions
    reward = rm.FORMAT_PENALTY
    for _ in range(1, cfg.max_turns):
        yield rm.message(env, cfg, left, reward)
        reward = 0.0
        for _ in range(min(in_a_turn, left - 1)):  # after the last action there would be no message
            action = env.actions[dice.integers(len(env.actions))]
            _, gained, over, _, _ = env.step(action)
            reward += gained
            left -= 1
            if over:
                return
    yield rm.message(env, cfg, left, reward)  # as if the first answer had not been malformed


def check_room(policy, tokens, cfg):
    room = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
    need(not room or tokens <= room,  # some models know no limit
         f"episodes take up to {tokens} tokens, --model {cfg.model} {room}: lower --max-new-tokens or --max-turns")


def read_long_episodes(models, tokens, refused, cfg):  # -> two episodes, log-probs (2,V) of the next token of each
    """Any tokens will do; these are drawn from a first message. They come in pieces, as turns do."""
    words = rm.begin(0, 0, 0, models.tok, cfg).ids
    dice = np.random.default_rng(0)
    trajs = [rm.Trajectory(None, 0, 0), rm.Trajectory(None, 1, 0)]
    cache = rm.KVCache()
    with suits(refused + "it does not work with the cache of the rollout"):
        for turn in range(cfg.max_turns):
            for traj, share in zip(trajs, (1, 0.6)):  # one reads more than the other
                more = int(share * tokens * (turn + 1) / cfg.max_turns) - len(traj.ids)
                traj.append(dice.choice(words, more).tolist(), False)
            logp = rm.read(models.policy, cache, trajs, cfg)
            for traj in trajs:
                traj.cached = len(traj.ids)
    need(cache.layers, refused + "it does not ask the cache for keys and values (recurrent memory?)")
    return trajs, logp


def plain_logps(policy, traj, cfg):  # -> (256,V): the truth
    ids = torch.tensor([traj.ids], device=cfg.device)
    logits = policy(input_ids=ids, use_cache=False, logits_to_keep=COMPARED).logits
    return logits[0, -COMPARED:].float().log_softmax(-1)


def gap_of_update(policy, traj, plain, refused, cfg):
    """For every token one that the model might have written is drawn: what stands there may be hardly possible."""
    torch.manual_seed(0)
    ids = torch.tensor([traj.ids], device=cfg.device)
    targets = torch.multinomial(plain.exp(), 1)  # (256,1)
    behind = torch.zeros_like(ids)
    behind[0, -len(targets):] = targets[:, 0]
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, -len(targets):] = True
    with suits(refused + "an update cannot read with it"):
        ours, _ = rm.token_logps(policy, {"inputs": ids, "targets": behind, "mask": mask}, cfg)
    return largest_gap(ours, plain.gather(1, targets)[:, 0])


@contextlib.contextmanager
def suits(reason):
    """Any exception of the model becomes one line, with the kind of exception."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (Exception, UserError) as error:
        cause = error.__cause__ or error  # rm.read tells it in words of its own
        said = " ".join(str(cause).split())[:150]
        raise UserError(f"{reason} ({type(cause).__name__}: {said})") from error


def largest_gap(ours, plain):  # of two lists of log-probs
    gap = (ours - plain).abs()
    gap[plain < LIKELY] = 0.0
    return gap.max().item()


def why_not(policy, tokens, gap):
    config = policy.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window and window < tokens:
        return (f"it looks back {window} tokens only (sliding window), and episodes take up to {tokens}: lower "
                "--max-new-tokens or --max-turns")
    return f"through the cache log-probs are off by up to {gap:.1g}, it is not clear why. Llama, Qwen2 and Qwen3 work"


if __name__ == "__main__":
    need(len(sys.argv) > 1 and not sys.argv[1].startswith("-"), f"{__doc__}\nWhich model? python extras/check_model.py MODEL")
    model, *options = sys.argv[1:]
    cfg = rm.parse_config(["--model", model, *options])
    models = rm.load_models(replace(cfg, kl_coef=0.0))  # no second copy for the KL penalty
    _, report = AutoModelForCausalLM.from_pretrained(cfg.source, output_loading_info=True)
    if report["unexpected_keys"]:  # another part of the model, such as one for pictures; or a layer that config.json lacks
        print(f"note: of its files {len(report['unexpected_keys'])} tensors are not used: {min(report['unexpected_keys'])}, ...")
    tokens, in_cache, in_update = check(models, cfg)
    print(f"right: at {tokens} tokens log-probs differ by up to {in_cache:.1g} through the cache, {in_update:.1g} in an "
          "update")
