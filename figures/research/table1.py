"""Table 1: what a model thinks, and in how many ways, before and after training.

    python figures/research/table1.py tiny runs/bandit-ppo-seed0 ...     models, or folders of runs

The temperature is 1, and the levels are not held out. table1.txt shows `tiny`, and four runs of
`python figures/paper.py equal`.
"""
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ragen_mini as rm
from extras.dev import mutants

LEVELS = range(1000, 1032)  # not held out
EPISODES = 4  # of each level


def first_turns(model, env):  # -> the first turn of each episode
    cfg = rm.Config(model=model, env=env, device="cpu", eval_only=True)
    trajs = rm.rollout(rm.load_models(cfg), LEVELS, EPISODES, cfg, sampling_seed=0)
    return [traj.turns[0] for traj in trajs]


def show(model, env):
    turns = first_turns(model, env)
    thoughts = Counter()
    valid = 0
    for turn in turns:
        thoughts[rm.thought_of(turn).strip()] += 1
        valid += turn["valid"]
    print(f"{model}, {env}: {len(thoughts)} different thoughts in {len(turns)} answers, {valid} of "
          f"them valid. Most often:")
    for thought, times in thoughts.most_common(5):
        print(f"  {times:4} x  {thought[:100] or '(nothing)'}")
    print()


def main():
    print(f"python figures/research/table1.py, commit {mutants.commit()}: "
          f"the same thought in every answer?\n")
    for model in sys.argv[1:]:
        show(model, "bandit")


if __name__ == "__main__":
    main()
