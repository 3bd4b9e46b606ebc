"""extras/gymnasium_env.py, against gymnasium's own checker.

(That the probabilities of FrozenLake are those of gymnasium is shown in test_envs.py.)
"""
import runpy
import sys

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from conftest import ROOT
from gymnasium.utils.env_checker import check_env

import envs
from extras.gymnasium_env import TextEnv
from extras.my_world import Guess


class Numpy(Guess):
    """As one may write it at first, with NumPy's numbers everywhere. It has letters of its own."""

    @staticmethod
    def draw(rng):
        return {"prize": rng.choice(("Left", "Up", "Right"))}, rng.integers(3)

    def outcomes(self, state, action):
        right = np.bool_(action == self.level["prize"])
        half, over = np.float64(0.5), np.bool_(True)
        return [(half, action, np.float32(right), over), (half, action, right, over)]

    def won(self, state):
        return np.bool_(state == self.level["prize"])

    def render(self):
        return f"标志上写着 {self.level['prize']}. 🧊 Où ça ?"


@pytest.mark.parametrize("name", [*envs.ENVS, f"{ROOT}/extras/my_world.py:Guess", Numpy])
@pytest.mark.filterwarnings("ignore::UserWarning")  # that it has no frame rate
def test_gymnasium_accepts_every_environment(name):
    env = TextEnv(name)
    check_env(env)
    assert env.reset(seed=3)[0] == env.render() == env.reset(seed=3)[0]
    for action in (-1, len(env.game.actions), "Left"):
        with pytest.raises(AssertionError, match="is not in Discrete"):
            env.step(action)
    assert env.step(0)[0] == env.render()
    assert TextEnv("frozenlake", success_rate=0.0).game.success_rate == 0


@pytest.mark.parametrize("seeded", [True, False])
def test_levels_differ_and_none_is_held_out(seeded):
    held_out = {repr(envs.find_level(envs.Sokoban, (6, 1), seed)) for seed in envs.EVAL_SEEDS}
    env = TextEnv("sokoban")
    levels = set()
    for seed in range(50):
        env.reset(seed=seed if seeded else None)
        levels.add(repr((env.game.level, env.game.state)))
    assert len(levels) > 10 and not levels & held_out


@pytest.mark.parametrize("argv, says", [
    ([], "success"), (["bandit"], "er: reward"), (["chess"], "chess is no environment")])
def test_the_script_plays_an_episode(argv, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gymnasium_env.py", *argv])
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
    try:
        runpy.run_path(str(ROOT / "extras/gymnasium_env.py"), run_name="__main__")
    except SystemExit as stop:
        print(stop.code)
    assert says in capsys.readouterr().out
