"""The environments: against gymnasium's FrozenLake, exhaustive search, simulation and drawings."""
import functools
import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import envs
from conftest import ROOT
from tiny.cold_start import solve

GUESS = f"{ROOT}/extras/my_world.py:Guess"


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
    for action in ("Down", "Right", "Right", "Up"):
        assert act(action) == (-0.1, False, False)
    assert act("Left") == (0.9, False, False)      # back on it
    for action in ("Down", "Left", "Left", "Left", "Down"):
        assert act(action) == (-0.1, False, False)
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
    before = env.state
    assert env.outcomes(before, "Right") == [(1.0, before, -0.1, False)], "two boxes in a row"
    after = env.outcomes(((2, 1), before[1]), "Right")[0][1]
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


def test_sokoban_layers_of_a_corridor():
    """Four cells, with the target at the right end, played backwards."""
    cells = [(1, col) for col in range(4)]
    env = envs.Sokoban()
    env.level = {"floor": tuple(cells), "targets": (cells[3],)}
    layer = [(player, (cells[3],)) for player in cells[:3]]
    visited = set()
    drawn = []
    while layer:
        visited.update(layer)
        pictures = set()
        for env.state in layer:
            pictures.add(env.render().splitlines()[1][:7])
        drawn.append(pictures)
        layer = sorted({before for state in layer for before in envs.undo(state, cells)} - visited)
    assert drawn == [{"P _ _ √", "_ P _ √", "_ _ P √"}, {"_ P X O"}, {"P _ X O", "P X _ O"}]


def test_newvocab_has_the_same_rooms_in_the_symbols_of_the_paper():
    """App. G: # W, _ ., O G, √ C, X B, P A, S @."""
    plain, new = envs.make("sokoban"), envs.make("sokoban_newvocab")
    symbols = str.maketrans({"#": "W", "_": ".", "O": "G", "√": "C", "X": "B", "P": "A", "S": "@"})
    for seed in (0, 5, 999):
        assert plain.reset(seed)[0].translate(symbols) == new.reset(seed)[0]
        for action in solve(plain):
            assert plain.step(action)[0].translate(symbols) == new.step(action)[0]
    on_target = draw("""
        # # # #
        # S X #
        # _ O #
        # # # #""")
    new.size, new.level, new.state = 4, on_target.level, on_target.state
    assert new.render() == on_target.render().translate(symbols)


# -------------------------------------------------------------------------------------- frozen lake
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
                ours, reference = {}, {}
                for p, new, reward, over in env.outcomes((r, c), action):
                    ours[new, reward, over] = ours.get((new, reward, over), 0) + p
                for p, new, reward, over in theirs[r * n + c][i]:
                    key = divmod(new, n), float(reward), bool(over)
                    reference[key] = reference.get(key, 0) + p
                possible = [{key: p for key, p in some.items() if p > 1e-12}
                            for some in (ours, reference)]
                assert possible[0] == pytest.approx(possible[1])


def test_frozenlake_slips_as_often_as_it_says():
    env, moves, n = envs.make("frozenlake", 1 / 3), {}, 3000
    for episode in range(n):
        env.reset(400, {"episode": episode})
        env.level, env.state = {"goal": (3, 3), "holes": ()}, (1, 1)
        env.step("Left")
        moves[env.state] = moves.get(env.state, 0) + 1
    assert set(moves) == {(1, 0), (0, 1), (2, 1)}
    assert all(abs(count - n / 3) < 4 * np.sqrt(n * 2 / 9) for count in moves.values()), moves


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
    env.state = (1, 0)
    assert env.render() == "_ _ _ G\nX _ _ _\n_ _ _ _\n_ _ _ O"
    env.state = (0, 3)
    assert env.render() == "_ _ _ √\nO _ _ _\n_ _ _ _\n_ _ _ O"


def test_the_lake_in_words_is_the_same_lake():
    """extras/told_lake.py has the same levels, held out alike, and outcomes. Its words give back
    where goal and holes are.
    """
    lake = envs.make("frozenlake")
    told = envs.make(f"{ROOT}/extras/told_lake.py:ToldLake", success_rate=0.5)
    assert told.success_rate == 0.5
    told.success_rate = lake.success_rate
    for seed in (0, 7, 300, 301):
        lake.reset(seed)
        words, _ = told.reset(seed)
        assert (lake.level, lake.state) == (told.level, told.state)
        for action in lake.actions:
            assert lake.outcomes(lake.state, action) == told.outcomes(told.state, action)
        places = []
        for place in re.split("[.:;]", words.replace(" Holes:", "").rstrip(".")):
            moves = {word: int(n) for n, word in re.findall(r"(\d) (up|down|left|right)", place)}
            assert moves
            places.append((told.state[0] + moves.get("down", 0) - moves.get("up", 0),
                           told.state[1] + moves.get("right", 0) - moves.get("left", 0)))
        assert (places[0], tuple(places[1:])) == (told.level["goal"], told.level["holes"])


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


def test_the_optimal_yardstick_by_playing_it():
    """FrozenLake: the policy that a separate value iteration finds is played, and its wins counted.
    """
    env, budget, wins, expected = envs.make("frozenlake"), 10, 0, 0.0
    for seed in range(20):
        env.reset(seed)

        @functools.cache
        def value(state, left, over):
            if over or left == 0:
                return float(env.won(state))
            return best_action(env, state, left, value)[1]
        expected += value(env.state, budget, False) / 20
        assert envs.yardsticks(env, budget)[1][budget] == pytest.approx(
            value(env.state, budget, False))
        for episode in range(40):
            env.reset(seed, {"episode": 1000 * seed + episode})
            for left in range(budget, 0, -1):
                if not env.over:
                    env.step(best_action(env, env.state, left, value)[0])
            wins += env.won(env.state)
    assert abs(wins / 800 - expected) < 4 * np.sqrt(expected * (1 - expected) / 800)


def towards(cell, goal, axes):  # straight to the goal. axes: (0, 1) rows first, (1, 0) columns
    for axis in axes:
        if cell[axis] != goal[axis]:
            back, forth = (("Up", "Down"), ("Left", "Right"))[axis]
            return back if cell[axis] > goal[axis] else forth


STEPS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}


def walk_to_the_goal(lake, axes, left):  # -> the chance of success, blind to holes
    goal = lake.level["goal"]

    @functools.cache
    def value(cell, left, over):
        if over or left == 0:
            return float(cell == goal)
        return sum(p * value(new, left - 1, over)
                   for p, new, _, over in lake.outcomes(cell, towards(cell, goal, axes)))
    return value(lake.state, left, lake.won(lake.state))


@pytest.mark.parametrize("rate, blind, by_optimal_play", [
    (0.8, (0.65, 0.67), 0.91), (1 / 3, (0.34, 0.34), 0.52)])
def test_what_the_pages_say_of_the_lake(rate, blind, by_optimal_play):
    """Of the gentle lake and the paper's: how often a walk straight to the goal succeeds, blind to
    holes, rows first or columns first; and optimal play in the slips that an evaluation draws.
    """
    walks, won = np.zeros(2), 0
    for seed in envs.EVAL_SEEDS:
        lake = envs.make("frozenlake", rate)
        lake.reset(seed, options={"episode": 0})
        walks += [walk_to_the_goal(lake, axes, 10) for axes in ((0, 1), (1, 0))]

        @functools.cache
        def value(cell, left, over):
            if over or left == 0:
                return float(lake.won(cell))
            return best_action(lake, cell, left, value)[1]
        for left in range(10, 0, -1):
            if not lake.over:
                lake.step(best_action(lake, lake.state, left, value)[0])
        won += lake.won(lake.state)
    assert walks / 256 == pytest.approx(blind, abs=0.005)
    assert won / 256 == pytest.approx(by_optimal_play, abs=0.005)


def walk_by_turns(lake, axes, moves, turns, left):  # -> the chance of success
    """So many moves a turn are chosen at once, as if nothing slipped."""
    goal = lake.level["goal"]

    @functools.cache
    def value(cell, turns, left):
        planned, success, at = cell, 0.0, {cell: 1.0}
        for _ in range(min(moves, left) if turns else 0):
            if planned == goal:
                break
            action = towards(planned, goal, axes)
            planned = tuple(np.add(planned, STEPS[action]).tolist())
            left -= 1
            before, at = at, {}
            for place, chance in before.items():
                for p, new, reward, over in lake.outcomes(place, action):
                    if over:
                        success += chance * p * reward
                    else:
                        at[new] = at.get(new, 0.0) + chance * p
        if turns == 0 or left == 0:
            return success
        return success + sum(chance * value(place, turns - 1, left) for place, chance in at.items())
    return value(lake.state, turns, left)


def matrices():
    """Of 128 held-out lakes -> start (128,17), reward (128,4,17), move (128,4,17,17). State 16 is
    the end of the episode.
    """
    starts, rewards = np.zeros((128, 17)), np.zeros((128, 4, 17))
    moves = np.zeros((128, 4, 17, 17))
    moves[:, :, 16, 16] = 1
    cells = list(itertools.product(range(4), repeat=2))
    for level, seed in enumerate(envs.EVAL_SEEDS[:128]):
        lake = envs.make("frozenlake")
        lake.reset(seed)
        starts[level, cells.index(lake.state)] = 1
        for number, action in enumerate(lake.actions):
            for place, cell in enumerate(cells):
                for chance, new, gained, over in lake.outcomes(cell, action):
                    rewards[level, number, place] += chance * gained
                    moves[level, number, place, 16 if over else cells.index(new)] += chance
    return starts, rewards, moves


def test_what_one_wins_on_the_lake_without_reading_all():
    """figures/smollm2/README.md: with the best of all sequences of ten moves, the same in every
    level, 0.29; with a walk to the goal that looks at the map in five turns, 0.58 with one move a
    turn, and 0.62 to 0.64 with more.
    """
    starts, rewards, moves = matrices()
    # For each of the 1024 sequences of five moves: what is won by it and where one then is, if it
    # comes first; what is won from each state, if it comes last.
    first, last = [(0.0, starts)], [np.zeros_like(starts)]
    for _ in range(5):
        longer = []
        for won, at in first:
            for a in range(4):
                gained = (at * rewards[:, a]).sum(1).mean()
                longer.append((won + gained, np.einsum("ls,lst->lt", at, moves[:, a])))
        first = longer
        last = [rewards[:, a] + np.einsum("lst,lt->ls", moves[:, a], value)
                for value in last for a in range(4)]
    at = np.reshape([at for _, at in first], (1024, -1))
    both = at @ np.reshape(last, (1024, -1)).T / 128
    assert (both + np.reshape([won for won, _ in first], (-1, 1))).max() == pytest.approx(
        0.29, abs=0.005)

    walks = np.zeros((2, 5))
    for seed in envs.EVAL_SEEDS[:128]:
        lake = envs.make("frozenlake")
        lake.reset(seed)
        walks += [[walk_by_turns(lake, axes, moves, 5, 10) for moves in range(1, 6)]
                  for axes in ((0, 1), (1, 0))]
    assert walks[:, 0] / 128 == pytest.approx(0.58, abs=0.005)
    assert (walks[:, 1:].min() / 128, walks.max() / 128) == pytest.approx((0.62, 0.64), abs=0.005)


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


def test_yardsticks_take_any_number_of_outcomes():
    class Die(Coin):
        def outcomes(self, state, action):
            return [(1 / 6, eyes, 0.0, True) for eyes in range(1, 7)]

        def won(self, state):
            return state is not None and state >= 3
    env = Die()
    env.reset(0)
    assert envs.yardsticks(env, 2) == pytest.approx(np.array([[0, 4 / 6, 4 / 6]] * 2))


def test_a_file_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "the_neighbour.py").write_text("from envs import Bandit as Mine\n")
    (tmp_path / "mine.py").write_text("from the_neighbour import Mine\n")
    assert isinstance(envs.make(f"{tmp_path}/mine.py:Mine"), envs.Bandit)


def test_an_environment_by_its_class_or_its_file():
    assert type(envs.make(Coin)) is Coin and envs.title(Coin) == "Coin"
    assert envs.mean_yardsticks(Coin, 1, range(8))[:, 1] == pytest.approx([0.3, 0.3])
    assert type(envs.make(GUESS)) is type(envs.make(GUESS)), "the file is run once"
    assert envs.title(GUESS) == "Guess" and envs.title("sokoban") == "sokoban"
    assert envs.mean_yardsticks(GUESS, 1, range(8))[:, 1] == pytest.approx([1 / 3, 1])
    lake = envs.make(envs.FrozenLake, 0.8)
    assert type(lake) is envs.FrozenLake and lake.success_rate == 0.8


@pytest.mark.parametrize("name", ["chess", "no.py:Chess", GUESS.replace("Guess", "Chess")])
def test_environments_that_are_not_there(name):
    with pytest.raises(ValueError, match="Chess|chess"):
        envs.make(name)


def test_an_environment_with_too_few_levels_to_hold_some_out_says_so():
    class Single(Coin):
        split = True
    refused = set()
    for seed in (0, 300):  # held out, and trained: one of them finds no level
        try:
            Single().reset(seed)
        except ValueError as error:
            assert "split = False" in str(error)
            refused.add(seed)
    assert len(refused) == 1


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


def test_an_environment_keeps_its_own_success_rate_if_none_is_given():
    class Slippery(envs.FrozenLake):
        def __init__(self):
            super().__init__(size=3, success_rate=0.4)
    rates = [envs.make(Slippery, rate).success_rate for rate in (None, 0.9, 0.0)]
    assert rates == [0.4, 0.9, 0.0]
    by_default, as_it_is, sure = (envs.mean_yardsticks(Slippery, 5, range(8), *rate)
                                  for rate in ((), (0.4,), (1.0,)))
    assert (by_default == as_it_is).all() and by_default[1, -1] < sure[1, -1] == 1


def test_the_success_rate_reaches_every_lake(monkeypatch):
    """Also a subclass, and one that is made by a partial, as those of ENVS."""
    class Pond(envs.FrozenLake):
        pass
    for name in ("frozenlake", Pond, f"{ROOT}/envs.py:FrozenLake"):
        assert envs.make(name, 0.5).success_rate == 0.5
    monkeypatch.setitem(envs.ENVS, "pond", functools.partial(Pond, size=3))
    pond = envs.make("pond", 0.5)
    pond.reset(300)
    assert pond.size == 3
    assert [p for p, _, _, _ in pond.outcomes(pond.state, "Up")] == [0.5, 0.25, 0.25]
