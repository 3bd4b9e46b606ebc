"""Play yourself. You see the states that the model reads.

    python extras/play.py sokoban 7                     level 7 (python envs.py lists environments)
    python extras/play.py extras/my_world.py:Guess      an environment of your own
"""
import argparse
import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import envs


def play(env):
    print(f"{env.instruction}\n\n{env.render()}")
    info = {"success": False}
    while not env.over:
        actions = " / ".join(env.actions)
        line = input(f"\n{actions} (or first letters; several: a || b; nothing: stop): ")
        if not line.strip():
            return
        info = run_actions(env, line.lower()) or info
    print("success!" if info["success"] else "over.")


def run_actions(env, line):  # -> info of the last action, or None
    info = None
    for word in line.split("||"):
        meant = [action for action in env.actions if action.lower().startswith(word.strip())]
        if not meant or not word.strip():
            print(f"{word.strip()!r} is no action")
            break
        action = min(meant, key=len)  # "up" may be the beginning of "upstairs", too
        obs, reward, _, _, info = env.step(action)
        print(f"\n{obs}\nreward {reward:.2f}")
        if env.over:
            break
    return info


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", nargs="?", default="sokoban", help="its name, or FILE.py:CLASS")
    parser.add_argument("level", nargs="?", type=int, default=0, help="its seed, from 0 on")
    args = parser.parse_args()
    try:
        env = envs.make(args.env)
        env.reset(args.level)
    except ValueError as error:  # there is no such environment, or no such level
        sys.exit(f"{args.env}, level {args.level}: {error}")
    with contextlib.suppress(KeyboardInterrupt, EOFError):  # ways out of a game
        play(env)


if __name__ == "__main__":
    main()
