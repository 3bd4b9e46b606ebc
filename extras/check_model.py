"""Does a model suit this program, in the longest episode that your settings allow?

    python extras/check_model.py Qwen/Qwen2.5-0.5B-Instruct
    right: in an episode of 2945 tokens log-probs differ by 2e-06

Any options of ragen_mini.py may follow.

When a model is loaded, the program itself makes the same check with a first message only. Some
mistakes show only in long episodes, such as attention that does not look back to the beginning.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import ragen_mini as rm
from support import cache, device, errors


def check(models, cfg):  # -> tokens of the longest episode, difference of the log-probs
    traj = longest_episode(models, cfg)
    gap = cache.gap_of_reading(models.policy, traj, cfg).item()
    errors.need(gap < device.rounding("cpu"),
                f"--model {cfg.model} cannot be used here, because in an episode of "
                f"{len(traj.ids)} tokens log-probs differ by {gap:.1g}. Does it look back so far? "
                f"Lower --max-new-tokens or --max-turns, or take another model.")
    return len(traj.ids), gap


def longest_episode(models, cfg):  # -> a Trajectory
    """Each answer is as long as it may be. It is invalid, so the episode has all its turns."""
    ends = rm.end_tokens(models, cfg)
    traj = rm.begin(seed=0, episode=0, group=0, tok=models.tok, cfg=cfg)
    state = models.tok(traj.env.render(), add_special_tokens=False).input_ids
    answer = np.resize(state, cfg.max_new_tokens - 1).tolist()  # the state, again and again
    while not traj.done:
        traj.append([*answer, ends[0]], sampled=True)
        rm.take_turn(traj, models.tok, cfg, ends)
    return traj


def main():
    parser = argparse.ArgumentParser(
        usage="%(prog)s MODEL [options of ragen_mini.py]", description=__doc__,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    own, options = parser.parse_known_args()
    with errors.one_line_errors():
        cfg = rm.parse_config(["--model", own.model, "--eval-only", *options])
        models = rm.load_models(cfg)
        tokens, gap = check(models, cfg)
        if "strftime_now" in models.tok.chat_template:
            print("note: its chat template tells the date, so the same level reads differently on "
                  "another day")
        print(f"right: in an episode of {tokens} tokens log-probs differ by {gap:.1g}")


if __name__ == "__main__":
    main()
