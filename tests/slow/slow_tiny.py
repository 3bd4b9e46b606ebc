"""The included model: what its teachers say is true, and what it has learned from them."""
import re

import numpy as np
import pytest
import transformers

import envs
import plots
import ragen_mini as rm
import runs
from tiny import cold_start

WAYS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def claimed(text, thing):
    """"... the goal, it is 2 down and 1 right." -> (2, 1)"""
    found = re.search(rf"[Tt]he {thing}(?:, it)? is ([^.]*)", text)[1]
    down = right = 0
    for number, word in re.findall(r"(\d) (\w+)", found):
        down += int(number) * WAYS[word][0]
        right += int(number) * WAYS[word][1]
    return down, right


def minus(a, b):
    return a[0] - b[0], a[1] - b[1]


@pytest.mark.parametrize("name", ["sokoban", "frozenlake"])
def test_the_planner_tells_the_truth_and_acts_well(name):
    rng = np.random.default_rng(0)
    solved = 0
    for seed in range(300, 360):
        env = envs.make(name, success_rate=1.0)
        env.reset(seed)
        thought, actions = cold_start.planner(env, 10, rng)
        if name == "sokoban":
            player, (box,) = env.state
            assert claimed(thought, "box") == minus(box, player)
            assert claimed(thought, "target") == minus(env.level["targets"][0], box)
            for action in actions:
                env.step(action)
            solved += env.won(env.state)
        else:
            assert claimed(thought, "goal") == minus(env.level["goal"], env.state)
            assert 0 < len(actions) <= 4
    assert name == "frozenlake" or solved == 60


@pytest.mark.parametrize("rate", [1 / 3, 0.8])
def test_one_action_at_a_time_the_best_path_is_optimal(rate):
    """With a new plan before each action it wins as often as dynamic programming says."""
    wins = expected = 0
    for seed in range(300, 312):
        env = envs.make("frozenlake", success_rate=rate)
        env.reset(seed)
        expected += envs.yardsticks(env, 10)[1, 10]
        for episode in range(10):
            env.reset(seed, {"episode": episode})
            for left in range(10, 0, -1):
                if not env.over:
                    env.step(cold_start.best_path(env, rate, left, 1)[0])
            wins += env.won(env.state) / 10
    assert abs(wins - expected) < 4 * np.sqrt(12 * 0.25 / 10)


def test_demonstrations_are_what_the_model_would_be_trained_on(tok):
    rng = np.random.default_rng(0)
    planned = [cold_start.demonstration(tok, rng, cold_start.PLANNER, 5) for _ in range(40)]
    mixed = [cold_start.demonstration(tok, rng, cold_start.MIXTURE, 5) for _ in range(40)]

    def turns(trajs):
        return [turn for traj in trajs for turn in traj.turns]
    valid = [np.mean([turn["valid"] for turn in turns(trajs)]) for trajs in (planned, mixed)]
    assert valid[0] == 1 and 0.4 < valid[1] < 0.9, "the sloppy player forgets its tags"
    longest = max(turn["tokens"] for turn in turns(planned + mixed))
    assert longest <= rm.Config(device="cpu").max_new_tokens, "or they would be cut off"


def test_another_cold_start_has_the_presets_of_tiny(tok, tmp_path):
    """Its config.json is that of the included model."""
    cold_start.untrained(tok).save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == (runs.TINY / "config.json").read_text()
    ours = rm.Config(model=str(tmp_path), device="cpu")
    assert ours.filled == rm.Config(device="cpu").filled


@pytest.mark.parametrize("name, opening", [
    ("sokoban", "The box is"), ("frozenlake", "The goal is")])
def test_asked_for_the_planner_it_answers_validly_and_beats_random_play(name, opening):
    """Its thoughts begin as the planner's do: then it plans. (Left to itself, it mostly guesses.)
    """
    class Begun(rm.Config):
        first_tag = "<think>" + opening
    cfg = Begun(device="cpu", env=name, success_rate=0.8, algo="grpo", kl_coef=0.0,
                temperature=rm.EVAL_TEMPERATURE)
    trajs = rm.rollout(rm.load_models(cfg), envs.EVAL_SEEDS[:100], 1, cfg, 0)
    success = np.mean([traj.success for traj in trajs])
    random, _ = envs.mean_yardsticks(name, cfg.max_actions, range(100))[:, -1]
    assert plots.interval(success, 100)[0] > random + 0.1
    assert np.mean([turn["valid"] for traj in trajs for turn in traj.turns]) > 0.9


def test_the_folder_is_plain_hugging_face():
    model = transformers.AutoModelForCausalLM.from_pretrained(runs.TINY)
    tok = transformers.AutoTokenizer.from_pretrained(runs.TINY)
    assert tok.chat_template and model.config.vocab_size == len(tok)
    assert sum(weight.numel() for weight in model.parameters()) < 1e6
    actions = [action for name in envs.ENVS for action in envs.make(name).actions]
    assert all(tok.convert_tokens_to_ids(action) != tok.unk_token_id for action in actions)
