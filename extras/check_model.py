"""Does a model suit this program, in the longest episode that your settings allow?

    python extras/check_model.py Qwen/Qwen2.5-0.5B-Instruct
    right: in an episode of 2945 tokens log-probs differ by 2e-06

Any options of ragen_mini.py may follow.

The program itself makes the same check when it loads a model, but with a first message only (see
check_policy), and compares rollout and update in each iteration. Some mistakes show only in long
episodes, such as attention that does not look back to the beginning. Here they show at once.
"""
import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import ragen_mini as rm
import runs
from runs import need

LEVELS = 32  # in which messages are measured


def check(models, cfg):  # -> tokens of the longest episode, difference of the log-probs
    """Raises a UserError if the model does not suit."""
    policy = models.policy
    traj = longest_episode(models, cfg)
    tokens = len(traj.ids)
    advice = "Lower --max-new-tokens or --max-turns, or take another model."
    need(tokens <= runs.room(policy), f"An episode may take {tokens} tokens, but {cfg.model} reads "
                                      f"at most {runs.room(policy)}. {advice}")
    by_cache, plain = rm.next_logps_in_two_ways(policy, traj, replace(cfg, temperature=1.0))
    gap = (by_cache.clamp(-1e4) - plain.clamp(-1e4)).abs().mean().item()
    window = getattr(policy.config.get_text_config(), "sliding_window", None)
    why = f"It looks back {window} tokens only. " if window and window < tokens else ""
    need(gap < rm.FP32_ROUNDING, f"--model {cfg.model} cannot be used here, because in an episode "
                                 f"of {tokens} tokens log-probs differ by {gap:.1g}. {why}{advice}")
    return tokens, gap


def longest_episode(models, cfg):  # -> a Trajectory
    """All answers are as long as they may be. Levels are played at random, since the messages of
    some environments grow.
    """
    ends = rm.end_tokens(models, cfg)
    dice = np.random.default_rng(0)
    longest = []
    for seed in range(LEVELS):
        traj = rm.begin(seed, 0, 0, models.tok, cfg)
        while not traj.done:
            # Invalid answers never end an episode. Valid ones let the state grow, if it can.
            answer = valid_answer(traj, dice, cfg) if seed % 2 else ""
            traj.append([*full_length(answer, traj.env, models.tok, cfg), ends[0]], sampled=True)
            rm.take_turn(traj, models.tok, cfg, ends)
        longest = max(longest, traj.ids, key=len)
    traj.ids = longest
    return traj


def valid_answer(traj, dice, cfg):  # -> text
    most = min(cfg.max_actions_per_turn, traj.actions_left - 1)  # the last action ends the episode
    actions = dice.choice(traj.env.actions, max(1, most))
    return f"</think><answer>{' || '.join(actions)}</answer>"


def full_length(answer, env, tok, cfg):  # -> ids: the state, again and again, then the answer
    ids = tok(answer, add_special_tokens=False).input_ids
    state = tok(env.render(), add_special_tokens=False).input_ids
    thought = np.resize(state, max(0, cfg.max_new_tokens - 1 - len(ids))).tolist()
    return thought + ids


def main():
    parser = argparse.ArgumentParser(
        usage="%(prog)s MODEL [options of ragen_mini.py]", description=__doc__,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a folder or a hub id")
    parser.parse_known_args()  # for --help
    with runs.one_line_errors():
        need(len(sys.argv) > 1 and not sys.argv[1].startswith("-"),
             "Which model? For example: python extras/check_model.py Qwen/Qwen2.5-0.5B-Instruct")
        cfg = rm.parse_config(["--model", *sys.argv[1:]])
        models = rm.load_models(replace(cfg, kl_coef=0.0))  # without a copy for the KL penalty
        tokens, gap = check(models, cfg)
        if "strftime_now" in models.tok.chat_template:
            print("note: its chat template tells the date, so the same level reads differently on "
                  "another day")
        print(f"right: in an episode of {tokens} tokens log-probs differ by {gap:.1g}")


if __name__ == "__main__":
    main()
