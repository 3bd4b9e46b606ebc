"""Play yourself. You see the states that the model reads.

    python extras/play.py sokoban 7                     level 7 (python envs.py lists environments)
    python extras/play.py extras/my_world.py:Guess      an environment of your own
"""
import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import envs


def play(env):
    print(f"{env.instruction}\n\n{env.render()}")
    info = {"success": False}
    while not env.over:
        print(f"\n{' / '.join(env.actions)} (or first letters; several: a || b; nothing: stop): ",
              end="", flush=True)
        # It is also empty where the input has ended. There is no stdin at all if it was closed.
        line = sys.stdin.readline().strip().lower() if sys.stdin else ""
        if not line:
            return
        info = run_actions(env, line) or info
    print("success!" if info["success"] else "over.")


def run_actions(env, line):  # -> info of the last action, or None
    info = None
    words = [word.strip() for word in line.split("||")]
    for word in filter(None, words):  # "" would be the beginning of any action
        meant = [action for action in env.actions if action.lower().startswith(word)]
        if not meant:
            print(f"{word!r} is no action")
            break
        action = min(meant, key=len)  # "up" may be the beginning of "upstairs", too
        obs, reward, _, _, info = env.step(action)
        print(f"\n{obs}\nreward {reward:.2f}")
        if env.over:
            break
    return info


def main():
    sys.stdout.reconfigure(errors="replace")  # not every terminal has a √
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", nargs="?", default="sokoban", help="its name, or FILE.py:CLASS")
    parser.add_argument("level", nargs="?", type=int, default=0, help="its seed, from 0 on")
    args = parser.parse_args()
    if args.level < 0:
        parser.exit(1, f"The level is {args.level}. It must be a whole number from 0 on.\n")
    try:
        env = envs.make(args.env)
        env.reset(args.level)
    except ValueError as error:  # there is no such environment, or it has no levels
        parser.exit(1, f"{error}\n")
    try:
        play(env)
        sys.stdout.flush()
    except KeyboardInterrupt:  # the way out of a game
        print()
    except BrokenPipeError:  # as in runs.py, which would need seconds to import torch
        os._exit(141)


if __name__ == "__main__":
    main()
