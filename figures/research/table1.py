"""Table 1: what a model thinks, and in how many ways, before and after training.

    python figures/table1.py tiny runs/bandit-ppo-seed0 ...        models, or folders of runs

Temperature 1, levels that are not held out. table1.txt shows `tiny` and four runs of `figures/paper.py equal`.
"""
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import plots
import ragen_mini as rm
from extras import mutants

LEVELS = range(1000, 1032)  # not held out
EPISODES = 4  # of each level


def first_answers(model, world):  # -> the answers of all first turns, as the rollout samples them
    cfg = rm.Config(model=model, env=world, device="cpu", eval_only=True)
    trajs = rm.rollout(rm.load_models(cfg), LEVELS, EPISODES, cfg, sampling_seed=0)
    return [traj.turns[0] for traj in trajs]


def show(model, world):
    turns = first_answers(model, world)
    thoughts = Counter()
    valid = 0
    for turn in turns:
        thoughts[plots.thought_of(turn).strip()] += 1
        valid += turn["valid"]
    print(f"{model}, {world}: {len(thoughts)} different thoughts in {len(turns)} answers, {valid} of them valid. "
          "Most often:")
    for thought, times in thoughts.most_common(5):
        print(f"  {times:4} x  {thought[:100] or '(nothing)'}")
    print()


if __name__ == "__main__":
    print(f"python figures/table1.py, commit {mutants.commit()}: the same thought in every answer?\n")
    for model in sys.argv[1:]:
        show(model, "bandit")
