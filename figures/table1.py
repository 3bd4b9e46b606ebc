"""Table 1: what a model thinks, and in how many ways, before and after training.

    python figures/table1.py tiny runs/bandit-ppo-seed0 ...        models, or folders of runs
"""
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ragen_mini as rm

LEVELS = range(1000, 1032)  # not held out
EPISODES = 4  # of each level


def first_answers(model, world):  # -> the answers of all first turns, as the rollout samples them
    cfg = rm.parse_config(["--model", model, "--env", world, "--device", "cpu"])
    models = rm.load_models(cfg)
    trajs = rm.rollout(models.policy, models.tok, world, LEVELS, EPISODES, cfg, sampling_seed=0, temperature=1.0)
    return [traj.turns[0] for traj in trajs]


def show(model, world):
    turns = first_answers(model, world)
    thoughts = Counter(turn["answer"].split("</think>")[0].removeprefix("<think>").strip() for turn in turns)
    valid = sum(turn["valid"] for turn in turns)
    print(f"{model}, {world}: {len(thoughts)} different thoughts in {len(turns)} answers, {valid} of them valid. "
          "Most often:")
    for thought, times in thoughts.most_common(5):
        print(f"  {times:4} x  {thought[:100] or '(nothing)'}")
    print()


def main():
    for model in sys.argv[1:]:
        show(model, "bandit")


if __name__ == "__main__":
    main()
