"""extras/gymnasium_env.py, against gymnasium's own checker. (That FrozenLake's dice are gymnasium's: test_envs.py.)"""
import runpy
import sys

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from conftest import ROOT
from gymnasium.utils.env_checker import check_env

import envs
from extras.gymnasium_env import World
from my_world import Guess

MINE = f"{ROOT / 'tests/my_world.py'}:Guess"


class Numpy(Guess):
    """The natural first version: NumPy's numbers wherever they may be."""

    @staticmethod
    def draw(rng):
        return {"prize": rng.choice(("Left", "Up", "Right"))}, rng.integers(3)

    def outcomes(self, state, action):
        right = np.bool_(action == self.level["prize"])
        half, over = np.float64(0.5), np.bool_(True)
        return [(half, action, np.float32(right), over), (half, action, right, over)]

    def won(self, state):
        return np.bool_(state == self.level["prize"])


@pytest.mark.parametrize("name", [*envs.ENVS, MINE, Numpy])
@pytest.mark.filterwarnings("ignore::UserWarning")  # that it has no frame rate
def test_gymnasium_accepts_every_world(name):
    env = World(name)
    check_env(env)
    assert env.reset(seed=3)[0] == env.render() == env.reset(seed=3)[0]
    assert env.step(0)[0] == env.render()


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_ice_obeys_as_often_as_it_is_told(rate):
    env = World("frozenlake", success_rate=rate)
    for seed in range(20):
        env.reset(seed=seed)
        before = env.world.state
        intended = env.world.outcomes(before, "Left")[0][1]
        env.step(env.world.actions.index("Left"))
        assert env.world.state == intended or rate == 0.0
        assert env.world.success_rate == rate


@pytest.mark.parametrize("seeded", [True, False])
def test_levels_differ_and_none_is_held_out(seeded):
    held_out = {repr(envs.find_level(envs.Sokoban, (6, 1), seed)) for seed in envs.EVAL_SEEDS}
    env = World("sokoban")
    levels = set()
    for seed in range(50):
        env.reset(seed=seed if seeded else None)
        levels.add(repr((env.world.level, env.world.state)))
    assert len(levels) > 10 and not levels & held_out


@pytest.mark.parametrize("argv, actions", [([], envs.FrozenLake.actions), (["bandit"], ("Teacher", "Engineer"))])
def test_the_script_plays_an_episode(argv, actions, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gymnasium_env.py", *argv])
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
    runpy.run_path(str(ROOT / "extras/gymnasium_env.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.rstrip().endswith("success") and any(f"{action}: reward" in said for action in actions)
