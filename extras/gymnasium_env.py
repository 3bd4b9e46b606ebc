"""Our environments as a gymnasium.Env, for other libraries. It gives text, and takes the number of
an action.

    pip install gymnasium
    python extras/gymnasium_env.py                 plays a few random actions on the lake
    python extras/gymnasium_env.py sokoban         or elsewhere; FILE.py:CLASS is possible, too

Levels that are held out for evaluation do not occur. An episode has no limit, but
gymnasium.wrappers.TimeLimit sets one. The task in words is env.unwrapped.game.instruction.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gymnasium

import envs


class TextEnv(gymnasium.Env):
    metadata = {"render_modes": ["ansi"]}
    render_mode = "ansi"

    def __init__(self, name, success_rate=None):
        self.game = envs.make(name, success_rate)
        self.action_space = gymnasium.spaces.Discrete(len(self.game.actions))
        # A world may have letters of its own. These are those of nearly all scripts, and emojis.
        letters = frozenset(map(chr, range(0x20000)))
        self.observation_space = gymnasium.spaces.Text(10_000, charset=letters)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # it seeds self.np_random
        # Seeds below EVAL_SEEDS.stop belong to the held-out levels.
        level = int(self.np_random.integers(envs.EVAL_SEEDS.stop, 2 ** 31))
        return self.game.reset(level, options)

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        return self.game.step(self.game.actions[action])

    def render(self):
        return self.game.render()


def play(name):
    env = gymnasium.wrappers.TimeLimit(TextEnv(name), 10)
    print(env.reset()[0])
    over = truncated = False
    while not (over or truncated):
        action = env.action_space.sample()
        text, reward, over, truncated, info = env.step(action)
        print(f"\n{env.unwrapped.game.actions[action]}: reward {reward:g}\n{text}")
    print("\nsuccess" if info["success"] else "\nno success")


def main():
    sys.stdout.reconfigure(errors="replace")  # not every terminal has a √
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", nargs="?", default="frozenlake", help="its name, or FILE.py:CLASS")
    args = parser.parse_args()
    try:
        play(args.env)
    except ValueError as error:  # no such environment
        sys.exit(str(error))


if __name__ == "__main__":
    main()
