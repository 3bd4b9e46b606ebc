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

GUESS = f"{ROOT}/extras/my_world.py:Guess"


class Numpy(Guess):
    """As one may write it at first, with NumPy's numbers everywhere."""

    @staticmethod
    def draw(rng):
        return {"prize": rng.choice(("Left", "Up", "Right"))}, rng.integers(3)

    def outcomes(self, state, action):
        right = np.bool_(action == self.level["prize"])
        half, over = np.float64(0.5), np.bool_(True)
        return [(half, action, np.float32(right), over), (half, action, right, over)]

    def won(self, state):
        return np.bool_(state == self.level["prize"])


@pytest.mark.parametrize("name", [*envs.ENVS, GUESS, Numpy])
@pytest.mark.filterwarnings("ignore::UserWarning")  # that it has no frame rate
def test_gymnasium_accepts_every_environment(name):
    env = TextEnv(name)
    check_env(env)
    assert env.reset(seed=3)[0] == env.render() == env.reset(seed=3)[0]
    assert env.step(0)[0] == env.render()


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_success_rate_is_played(rate):
    env = TextEnv("frozenlake", success_rate=rate)
    assert env.game.success_rate == rate
    moved_as_intended = []
    for seed in range(20):
        env.reset(seed=seed)
        row, col = env.game.state
        env.step(env.game.actions.index("Left"))
        moved_as_intended.append(env.game.state == (row, max(0, col - 1)))
    assert all(moved_as_intended) if rate == 1 else not all(moved_as_intended)


@pytest.mark.parametrize("seeded", [True, False])
def test_levels_differ_and_none_is_held_out(seeded):
    held_out = {repr(envs.find_level(envs.Sokoban, (6, 1), seed)) for seed in envs.EVAL_SEEDS}
    env = TextEnv("sokoban")
    levels = set()
    for seed in range(50):
        env.reset(seed=seed if seeded else None)
        levels.add(repr((env.game.level, env.game.state)))
    assert len(levels) > 10 and not levels & held_out


@pytest.mark.parametrize("argv, actions", [
    ([], envs.FrozenLake.actions), (["bandit"], ("Teacher", "Engineer"))])
def test_the_script_plays_an_episode(argv, actions, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gymnasium_env.py", *argv])
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
    runpy.run_path(str(ROOT / "extras/gymnasium_env.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.rstrip().endswith("success")
    assert any(f"{action}: reward" in said for action in actions)


def test_the_script_knows_no_chess(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gymnasium_env.py", "chess"])
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
    with pytest.raises(SystemExit, match="chess"):
        runpy.run_path(str(ROOT / "extras/gymnasium_env.py"), run_name="__main__")
