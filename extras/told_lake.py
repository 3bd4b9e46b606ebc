"""The lake in words. By RL alone, SmolLM2-135M learns it, but not to read the map.

    python extras/warm_start.py MODEL OUT --env extras/told_lake.py:ToldLake \\
        --lessons 40 --lesson-lr 1e-4
    python ragen_mini.py --model OUT --env extras/told_lake.py:ToldLake

Levels, dice and yardsticks are those of the lake. All is told as seen by the player:
    The goal is 2 down and 1 right. Holes: 1 left; 1 down and 2 right.
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tiny")]

import envs
from cold_start import offset


class ToldLake(envs.FrozenLake):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.instruction = (
            "You are on a frozen lake. Go to the goal, avoid the holes. Ice is slippery: you may "
            "move sideways instead. Actions: Left, Down, Right, Up.")

    def render(self):
        if self.won(self.state):
            return "You are at the goal."
        if self.state in self.level["holes"]:
            return "You are in a hole."
        goal = offset(self.state, self.level["goal"])
        holes = [offset(self.state, hole) for hole in self.level["holes"]]
        return f"The goal is {goal}. Holes: {'; '.join(holes) or 'none'}."


if __name__ == "__main__":
    print(__doc__)
