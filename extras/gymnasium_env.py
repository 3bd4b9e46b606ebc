"""A world as a gymnasium.Env, for other libraries: it gives text, and takes the number of an action.

    pip install gymnasium
    python extras/gymnasium_env.py                 plays a few random actions on ice
    python extras/gymnasium_env.py sokoban         or in another world, my_world.py:Class too

Levels that are held out for evaluation do not occur. An episode has no limit (gymnasium.wrappers.TimeLimit sets one),
and the task in words is world.instruction.
"""
import string
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import envs

with envs.or_say("this program needs gymnasium: pip install gymnasium"):
    import gymnasium


class World(gymnasium.Env):
    metadata = {"render_modes": ["ansi"]}
    render_mode = "ansi"

    def __init__(self, name, success_rate=None):
        self.world = envs.make(name, success_rate)
        self.action_space = gymnasium.spaces.Discrete(len(self.world.actions))
        self.observation_space = gymnasium.spaces.Text(10_000, charset=string.printable + "√")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # it seeds self.np_random
        level = int(self.np_random.integers(len(envs.EVAL_SEEDS), 2 ** 31))
        return self.world.reset(level, options)

    def step(self, action):
        return self.world.step(self.world.actions[action])

    def render(self):
        return self.world.render()


def play(name):
    env = gymnasium.wrappers.TimeLimit(World(name), 10)
    print(env.reset()[0])
    over = truncated = False
    while not (over or truncated):
        action = env.action_space.sample()
        text, reward, over, truncated, info = env.step(action)
        print(f"\n{env.unwrapped.world.actions[action]}: reward {reward:g}\n{text}")
    print("\nsuccess" if info["success"] else "\nno success")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # not every terminal has a √
    envs.need(len(sys.argv) <= 2, "one world, no level: python extras/gymnasium_env.py sokoban")
    play(*sys.argv[1:2] or ["frozenlake"])
