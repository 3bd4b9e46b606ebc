"""The environments: against gymnasium's FrozenLake, exhaustive search, simulation and drawings."""
import functools
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

import envs
from conftest import ROOT

GUESS = f"{ROOT}/extras/my_world.py:Guess"


def solve(env):
    """A shortest list of actions from env.state to success (FrozenLake: as if nothing slipped), or
    None. To be called before the level is won.
    """
    paths = {env.state: []}
    queue = [env.state]
    for state in queue:  # the list grows while we walk along it: breadth first
        for action in env.actions:
            _, new, _, over = env.outcomes(state, action)[0]
            if new in paths:
                continue
            paths[new] = paths[state] + [action]
            if env.won(new):
                return paths[new]
            if not over:
                queue.append(new)


# ------------------------------------------------------------------------------------------ sokoban
def draw(picture):
    """A Sokoban environment from a drawing in its own symbols."""
    env = envs.Sokoban()
    env.reset(0)
    rows = [line.split() for line in picture.strip().splitlines()]
    cells = {(r, c): x for r, row in enumerate(rows) for c, x in enumerate(row)}
    env.size = len(rows)
    floor = tuple(sorted(cell for cell, x in cells.items() if x != "#"))
    targets = tuple(sorted(cell for cell, x in cells.items() if x in "O√S"))
    env.level = {"floor": floor, "targets": targets}
    player = next(cell for cell, x in cells.items() if x in "PS")
    env.state = player, tuple(sorted(cell for cell, x in cells.items() if x in "X√"))
    assert env.render().split() == picture.split()
    return env


def test_sokoban_rewards_on_a_drawn_room():
    """Walk, bump, push on (+1), push off (-1), and solve with two boxes (+1 +10). Each action costs
    0.1.
    """
    env = draw("""
        # # # # # # #
        # P X O _ _ #
        # _ _ _ _ _ #
        # _ X _ O _ #
        # _ _ _ _ _ #
        # _ _ _ _ _ #
        # # # # # # #""")

    def act(action):
        _, reward, over, truncated, info = env.step(action)
        assert not truncated
        return round(reward, 6), over, info["success"]
    assert act("Up") == (-0.1, False, False)       # a wall
    assert act("Right") == (0.9, False, False)     # pushed onto the target
    assert act("Right") == (-1.1, False, False)    # and off again
    assert env.state[1] == ((1, 4), (3, 2))
    assert {act(a) for a in ("Down", "Right", "Right", "Up")} == {(-0.1, False, False)}
    assert act("Left") == (0.9, False, False)      # back on it
    assert {act(a) for a in ("Down", "Left", "Left", "Left", "Down")} == {(-0.1, False, False)}
    assert act("Right") == (-0.1, False, False)    # a push between targets
    assert act("Right") == (10.9, True, True)      # all boxes on targets
    with pytest.raises(AssertionError):
        env.step("Up")


def test_sokoban_boxes_block():
    env = draw("""
        # # # # #
        # P X X #
        # _ X _ #
        # _ O O #
        # # # # #""")
    boxes = env.state[1]
    assert env.outcomes(env.state, "Right") == [(1.0, env.state, -0.1, False)], "two in a row"
    (_, after, _, _), = env.outcomes(((2, 1), boxes), "Right")
    assert after == ((2, 2), ((1, 2), (1, 3), (2, 3)))


def shortest(env, depth):
    """Exhaustive search: the length of a shortest solution by trying every sequence of actions."""
    for n in range(1, depth + 1):
        for actions in itertools.product(env.actions, repeat=n):
            state = env.state
            for action in actions:
                _, state, _, over = env.outcomes(state, action)[0]
                if over:
                    break
            if env.won(state):
                return n


@pytest.mark.parametrize("name", ["sokoban", "frozenlake"])
def test_solve_is_optimal_and_every_level_can_be_solved(name):
    env = envs.make(name, success_rate=1.0)
    for seed in range(200, 400):  # held-out levels and training levels
        env.reset(seed)
        path = solve(env)
        if len(path) <= 5:
            assert len(path) == shortest(env, 5)
        total = 0.0
        for action in path:
            _, reward, over, _, info = env.step(action)
            total += reward
        assert over and info["success"]
        assert total == pytest.approx(11 - 0.1 * len(path) if name == "sokoban" else 1.0)


@pytest.mark.parametrize("size, boxes, easiest, hardest, count", [
    (6, 1, 1, 8, 500), (6, 2, 4, 16, 500), (8, 2, 4, 16, 100)])
def test_sokoban_has_levels_of_all_distances(size, boxes, easiest, hardest, count):
    """And two boxes have two targets, in two cells."""
    env = envs.Sokoban(size, boxes)
    distances = set()
    for seed in range(1000, 1000 + count):
        env.reset(seed)
        assert len(set(env.level["targets"])) == len(set(env.state[1])) == boxes
        assert {*env.level["targets"], *env.state[1], env.state[0]} <= {*env.level["floor"]}
        assert env.state[0] not in env.state[1]
        distances.add(len(solve(env)))
    assert min(distances) == easiest and max(distances) == hardest
    assert distances == set(range(easiest, hardest + 1)) or size == 8


def test_newvocab_has_the_same_rooms_in_the_symbols_of_the_paper():
    """App. G: # W, _ ., O G, √ C, X B, P A, S @."""
    plain, new = envs.make("sokoban"), envs.make("sokoban_newvocab")
    symbols = str.maketrans({"#": "W", "_": ".", "O": "G", "√": "C", "X": "B", "P": "A", "S": "@"})
    for seed in (0, 5, 999):
        assert plain.reset(seed)[0].translate(symbols) == new.reset(seed)[0]
        for action in solve(plain):
            assert plain.step(action)[0].translate(symbols) == new.step(action)[0]


# -------------------------------------------------------------------------------------- frozen lake
def chances(outcomes):  # -> {(state, reward, over): probability}, if that is above 0
    total = {}
    for p, *what in outcomes:
        total[tuple(what)] = total.get(tuple(what), 0) + p
    return {what: p for what, p in total.items() if p > 1e-12}


@pytest.mark.parametrize("rate", [1 / 3, 0.8, 1.0])
def test_frozenlake_is_that_of_gymnasium(rate):
    """Probabilities, rewards and endings of its own model, on 20 maps."""
    gym = pytest.importorskip("gymnasium.envs.toy_text.frozen_lake")
    env = envs.make("frozenlake", success_rate=rate)
    for seed in range(20):
        env.reset(seed)
        start, n = env.state, env.size
        goal, holes = env.level["goal"], env.level["holes"]
        letters = dict.fromkeys(holes, "H") | {start: "S", goal: "G"}
        desc = ["".join(letters.get((r, c), "F") for c in range(n)) for r in range(n)]
        theirs = gym.FrozenLakeEnv(desc=desc, is_slippery=True, success_rate=rate).P
        for r, c in itertools.product(range(n), repeat=2):
            if (r, c) == goal or (r, c) in holes:
                continue
            for i, action in enumerate(env.actions):
                reference = [(p, divmod(new, n), float(reward), bool(over))
                             for p, new, reward, over in theirs[r * n + c][i]]
                ours, truth = map(chances, (env.outcomes((r, c), action), reference))
                assert ours == pytest.approx(truth)


def test_one_cell_in_five_of_the_lake_is_a_hole():
    """A few less, since lakes whose goal cannot be reached are dropped. 14 cells may be holes."""
    env, holes, places = envs.make("frozenlake"), [], {"start": set(), "goal": set()}
    for seed in range(1000, 2000):
        env.reset(seed)
        holes.append(len(env.level["holes"]))
        places["start"].add(env.state)
        places["goal"].add(env.level["goal"])
        assert not {env.state, env.level["goal"]} & {*env.level["holes"]}
        assert env.state != env.level["goal"]
    assert 0.15 < np.mean(holes) / 14 < 0.2
    assert len(places["start"]) == len(places["goal"]) == 16, "anywhere"


def test_frozenlake_picture():
    env = envs.make("frozenlake")
    env.reset(0)
    env.level, env.state = {"goal": (0, 3), "holes": ((1, 0), (3, 3))}, (2, 1)
    assert env.render() == "_ _ _ G\nO _ _ _\n_ P _ _\n_ _ _ O"
    for env.state, symbol in (((1, 0), "X"), ((0, 3), "√")):
        grid = [row.split() for row in env.render().splitlines()]
        assert grid[env.state[0]][env.state[1]] == symbol and "P" not in sum(grid, [])


# ------------------------------------------------------------------------------------------- bandit
def test_bandit():
    env, paid = envs.make("bandit"), []
    assert {env.reset(seed)[0] for seed in range(20)} == {
        "The arms are Teacher and Engineer.", "The arms are Engineer and Teacher."}
    for episode in range(2000):
        env.reset(3, {"episode": episode})
        _, reward, over, _, info = env.step("Engineer")
        assert over and info["success"] and reward in (0.0, 1.0)
        paid.append(reward)
    assert abs(np.mean(paid) - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 2000)
    env.reset(3)
    assert env.step("Teacher")[1:] == (0.15, True, False, {"success": False})
    assert envs.make("bandit_rev").risky == "Librarian"
    assert envs.make("bandit_test").risky == "Trader"


def test_dice_are_independent_of_the_level():
    """The stream that drew the level must not also roll the dice: the order of the arms against
    the pay-out, in episode 0.
    """
    env, first = envs.make("bandit"), {True: [], False: []}
    for seed in range(256, 2256):
        env.reset(seed, {"episode": 0})
        order = env.level[0] == "Engineer"
        first[order].append(env.step("Engineer")[1])
    means = [np.mean(paid) for paid in first.values()]
    assert all(abs(mean - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 900) for mean in means), means


# ------------------------------------------------------------------------------------ levels, seeds
@pytest.mark.parametrize("name", envs.ENVS)
def test_one_seed_is_one_level_and_the_episode_only_changes_the_dice(name):
    a, b = envs.make(name), envs.make(name)
    np.random.seed(0)
    state = np.random.get_state()[1].tolist()
    for seed in (0, 1000, 12345):
        assert a.reset(seed, {"episode": 0})[0] == b.reset(seed, {"episode": 1})[0]
        assert a.reset(seed, {"episode": 7}) == b.reset(seed, {"episode": 7})
        assert a.step(a.actions[1]) == b.step(b.actions[1])
    assert np.random.get_state()[1].tolist() == state, "no global random state may be touched"


@pytest.mark.parametrize("name, count", [
    ("sokoban", 1000), ("sokoban_large", 100), ("frozenlake", 1000)])
def test_held_out_levels_are_never_training_levels(name, count):
    """Not only other seeds, but other levels. (The bandit has just two, both in both.)"""
    env = envs.make(name)

    def levels(seeds):
        return {repr(envs.find_level(type(env), env.draw_args, seed)) for seed in seeds}
    held_out, trained = levels(envs.EVAL_SEEDS[:count]), levels(range(256, 256 + count))
    assert not held_out & trained
    assert len(held_out) > 0.8 * len(envs.EVAL_SEEDS[:count]) and len(trained) > 0.8 * count


def test_levels_are_the_same_in_every_process():
    """Also which of them are held out: Python's `hash` of text differs between processes."""
    code = ("import envs\n"
            "for name in ('sokoban', 'frozenlake', 'bandit'):\n"
            "    env = envs.make(name)\n"
            "    for seed in (*range(20), *range(300, 320)):\n"
            "        env.reset(seed)\n"
            "        print(env.level, env.state)\n")
    said = [subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, text=True,
                           env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE).stdout
            for seed in ("1", "2")]
    assert said[0] == said[1] and len(set(said[0].splitlines())) > 70


def test_the_example_at_the_top_of_the_file():
    env = envs.make("sokoban")
    board, _ = env.reset(7)
    shown = [line.strip()[:11] for line in envs.__doc__.splitlines()
             if line.strip().startswith("# ")]
    assert shown == board.splitlines()
    assert f"{env.state}" in envs.__doc__
    assert f"{env.outcomes(env.state, 'Down')}" in envs.__doc__
    # As the docstring of `yardsticks` says.
    assert envs.yardsticks(env, 10)[:, -1] == pytest.approx([0.04, 1.0], abs=0.005)


# --------------------------------------------------------------------------------------- yardsticks
@pytest.mark.parametrize("name", ["frozenlake", "sokoban", "bandit"])
def test_the_random_yardstick_is_what_a_random_player_gets(name):
    env, rng, budget, n = envs.make(name, 1 / 3), np.random.default_rng(0), 10, 8
    levels, wins = envs.EVAL_SEEDS[:64], 0
    expected = envs.mean_yardsticks(name, budget, levels, 1 / 3)[0, budget]
    for seed, episode in itertools.product(levels, range(n)):
        env.reset(seed, {"episode": episode})
        for _ in range(budget):
            if not env.over:
                env.step(env.actions[rng.integers(len(env.actions))])
        wins += env.won(env.state)
    p = wins / n / len(levels)
    assert abs(p - expected) < 4 * np.sqrt(expected * (1 - expected) / n / len(levels))


def test_the_optimal_yardstick_is_what_solve_says():
    """Sokoban: solvable within the budget. FrozenLake without slips: always."""
    env, lengths = envs.make("sokoban"), []
    for seed in envs.EVAL_SEEDS[:64]:
        env.reset(seed)
        lengths.append(len(solve(env)))
    best = envs.mean_yardsticks("sokoban", 10, range(64))[1]
    assert best == pytest.approx([np.mean([n <= h for n in lengths]) for h in range(11)])
    assert envs.mean_yardsticks("frozenlake", 10, range(64), 1.0)[1, 10] == 1.0


def best_action(env, state, left, value):  # value(state, left, over) -> the chance of success
    def worth(action):
        return sum(p * value(new, left - 1, over)
                   for p, new, _, over in env.outcomes(state, action))
    return max(env.actions, key=worth), max(worth(action) for action in env.actions)


@pytest.mark.parametrize("rate, won", [(0.8, 0.91), (1 / 3, 0.52)])
def test_the_optimal_yardstick_by_playing_it(rate, won):
    """The best actions by a value iteration of its own, in the slips that an evaluation draws."""
    wins, worth = 0, 0.0
    for seed in envs.EVAL_SEEDS:
        lake = envs.make("frozenlake", rate)
        lake.reset(seed, options={"episode": 0})

        @functools.cache
        def value(cell, left, over):
            if over or left == 0:
                return float(lake.won(cell))
            return best_action(lake, cell, left, value)[1]
        worth += value(lake.state, 10, False) / 256
        for left in range(10, 0, -1):
            if not lake.over:
                lake.step(best_action(lake, lake.state, left, value)[0])
        wins += lake.won(lake.state)
    assert envs.mean_yardsticks("frozenlake", 10, success_rate=rate)[1, 10] == pytest.approx(worth)
    assert wins / 256 == pytest.approx(won, abs=0.005)
    assert abs(won - worth) < 4 * np.sqrt(worth * (1 - worth) / 256)


# ------------------------------------------------------------------------ environments of one's own
class Coin(envs.Env):
    """A notebook may hand over a class."""
    actions = ("Toss",)
    split = False

    @staticmethod
    def draw(rng):
        return (), None

    def outcomes(self, state, action):
        return [(0.3, "heads", 1.0, True), (0.7, "tails", 0.0, True)]

    def won(self, state):
        return state == "heads"

    def render(self):
        return f"{self.state}"


def test_an_environment_by_its_class_or_its_file():
    assert type(envs.make(Coin)) is Coin and envs.title(Coin) == "Coin"
    assert envs.mean_yardsticks(Coin, 1, range(8))[:, 1] == pytest.approx([0.3, 0.3])
    assert type(envs.make(GUESS)) is type(envs.make(GUESS)), "the file is run once"
    assert envs.title(GUESS) == "Guess" and envs.title("sokoban") == "sokoban"
    assert envs.mean_yardsticks(GUESS, 1, range(8))[:, 1] == pytest.approx([1 / 3, 1])


def test_a_file_that_was_edited_is_read_again(tmp_path, monkeypatch):
    """As in a notebook. Its random and optimal play are calculated anew. It imports a neighbour."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "the_neighbour.py").write_text("from envs import Bandit as Arms\n")
    file, mine = tmp_path / "mine.py", f"{tmp_path}/mine.py:Mine"
    text = "from the_neighbour import Arms\nclass Mine(Arms):\n    won = lambda self, state: "
    for second, won, expected in ((1, "state == 'Engineer'", [0.5, 1]), (2, "False", [0, 0])):
        file.write_text(text + won)
        os.utime(file, (second, second))
        assert isinstance(envs.make(mine), envs.Bandit)
        assert envs.mean_yardsticks(mine, 1, range(8))[:, 1] == pytest.approx(expected)
    file.write_text("class Mine")
    with pytest.raises(SyntaxError):
        envs.make(mine)


@pytest.mark.parametrize("name, says", [
    ("chess", "chess is no environment. Choose one of bandit"), ("no.py:Chess", "no file no.py"),
    ("no.py", "no.py is no environment.*FILE.py:CLASS"),
    (GUESS.replace("Guess", "Chess"), "my_world.py does not define a class Chess")])
def test_environments_that_are_not_there(name, says):
    with pytest.raises(envs.EnvError, match=says):
        envs.make(name)


def test_an_environment_with_too_few_levels_to_hold_some_out_says_so():
    class Single(Coin):
        split = True
    with pytest.raises(envs.EnvError, match="split = False"):
        for seed in (0, 300):  # held out, and trained: one of them finds no level
            Single().reset(seed)


def test_an_episode_that_is_over_and_an_unknown_action_are_refused():
    env = Coin()
    with pytest.raises(AssertionError, match="reset"):
        env.step("Toss")
    env.reset(0)
    with pytest.raises(AssertionError, match="not one of"):
        env.step("Heads")
    env.step("Toss")
    with pytest.raises(AssertionError, match="reset"):
        env.step("Toss")


def test_the_success_rate_reaches_every_lake_and_if_none_is_given_it_keeps_its_own(monkeypatch):
    """Also a subclass, and one that is made by a partial, as those of ENVS."""
    class Pond(envs.FrozenLake):
        def __init__(self, size=4):
            super().__init__(size, success_rate=0.4)
    monkeypatch.setitem(envs.ENVS, "pond", functools.partial(Pond, size=3))
    for name in ("frozenlake", Pond, f"{ROOT}/envs.py:FrozenLake", "pond"):
        assert envs.make(name, 0.5).success_rate == 0.5 and envs.make(name, 0.0).success_rate == 0
    pond = envs.make("pond", 0.5)
    pond.reset(300)
    assert pond.size == 3
    assert [p for p, _, _, _ in pond.outcomes(pond.state, "Up")] == [0.5, 0.25, 0.25]
    assert envs.make("pond").success_rate == 0.4
    own, same, sure = (envs.mean_yardsticks("pond", 5, range(8), r) for r in (None, 0.4, 1.0))
    assert (own == same).all() and own[1, -1] < sure[1, -1] == 1
