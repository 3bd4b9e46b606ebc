"""Do thoughts cause moves? A model plays the held-out levels with thoughts that it did not choose.

    python extras/other_thoughts.py --env frozenlake --model RUN

All options of ragen_mini.py can be given. The levels are played seven times. In each turn the
thought is
    its own          what the model writes itself, as in any evaluation
    another level's  what it wrote itself in the same turn of another level
    empty            <think></think>
    nothing          a stock phrase
    goal             a true one that says where the goal (or the box and its target) is
    around           a true one that says what lies around
    both             a true one that says both
and then the model goes on by itself, with its answer. If success and moves do not change, the model
does not read its thoughts. What is printed is explained in extras/measure.py. The true thoughts are
worded as in the lessons of the included model.
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tiny")]

import numpy as np

import envs
import lessons
import ragen_mini as rm
from extras import measure
from support import device, errors
from support.errors import need

sample_alone = rm.sample


def sample_after(thought_for, tok):  # -> a function that takes the place of rm.sample
    """Where an answer begins, thought_for(traj) is written in the model's place.

    These tokens are marked as sampled, so that they belong to the answer. (Nothing is trained.)
    """
    def sample(trajs, next_logps, generator):
        if len(trajs[0].ids) > trajs[0].answer_start:
            sample_alone(trajs, next_logps, generator)
            return
        for traj in trajs:  # in a rollout all answers begin at the same time
            text = thought_for(traj) + "</think>"
            traj.append(tok(text, add_special_tokens=False).input_ids, sampled=True)
    return sample


def from_another_level(trajs, rng):  # trajs: played before, with the model's own thoughts
    def thought_for(traj):
        number, level, state = len(traj.turns), traj.env.level, traj.env.render()
        others = [other.turns[number] for other in trajs
                  if other.env.level != level and len(other.turns) > number]
        thoughts = [rm.thought_of(turn) for turn in others
                    if turn["state"] != state and "</think>" in turn["answer"]]
        need(thoughts, f"No other level has a thought in turn {number + 1} that could be taken.")
        return thoughts[rng.integers(len(thoughts))]
    return thought_for


def true_thought(kind, rng):
    return lambda traj: lessons.thought(traj.env, rng, {kind: 1.0})


def compare(models, cfg):
    rng = np.random.default_rng(0)
    evaluate = measure.evaluate_in([])
    rm.take_turn = measure.take_turn
    _, own = evaluate(models, cfg, "its own: ")
    conditions = {"another level's": from_another_level(own, rng), "empty": lambda traj: ""}
    conditions |= {kind: true_thought(kind, rng) for kind in measure.KINDS}
    for condition, thought_for in conditions.items():
        rm.sample = sample_after(thought_for, models.tok)
        evaluate(models, cfg, f"{condition}: ")


def main():
    with errors.one_line_errors():
        cfg = rm.parse_config(["--eval-only", *sys.argv[1:]])
        ours = (envs.Bandit, envs.FrozenLake, envs.Sokoban)
        need(isinstance(envs.make(cfg.env), ours) and not cfg.no_think,
             "This is about thoughts in the bandit, Sokoban with one box, or the lake.")
        models = rm.load_models(cfg)
        with device.torch_settings(models.policy):
            compare(models, cfg)


if __name__ == "__main__":
    main()
