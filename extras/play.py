"""Play yourself: you see the states that the model reads.

    python extras/play.py sokoban 7             level 7 of a world that `python envs.py` lists
    python extras/play.py my_world.py:Guess     a world of your own
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import envs


def play(name, seed):
    env = envs.make(name)
    obs, _ = env.reset(seed)
    print(f"{env.instruction}\n\n{obs}")
    while not env.over:
        print(f"\n{' / '.join(env.actions)} (or its start; several: a || b; empty: stop): ", end="", flush=True)
        line = sys.stdin.readline().strip().lower()  # also empty where the input has ended
        if not line:
            return
        for word in filter(None, map(str.strip, line.split("||"))):  # else "" would be the start of any action
            meant = [action for action in env.actions if action.lower().startswith(word)]
            if not meant:
                print(f"{word!r} is none of these words")
                break
            obs, reward, _, _, info = env.step(min(meant, key=len))  # "up" may be the start of "upstairs", too
            print(f"\n{obs}\nreward {reward:.2f}")
            if env.over:
                break
    print("success!" if info["success"] else "over.")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # not every terminal has a √
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", nargs="?", default="sokoban", help="a name, or my_world.py:Class")
    parser.add_argument("level", nargs="?", type=int, default=0)
    args = parser.parse_args()
    envs.need(args.level >= 0, f"level {args.level}: at least 0")
    try:
        play(args.world, args.level)
    except KeyboardInterrupt:  # the way out of a game
        print()
