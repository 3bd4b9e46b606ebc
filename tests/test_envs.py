"""The worlds, against gymnasium's FrozenLake, exhaustive search, simulation and drawings."""
import functools
import itertools
import re
import subprocess
import sys

import numpy as np
import pytest

import envs
from conftest import ROOT
from tiny.cold_start import solve


def draw(picture):
    """A Sokoban world from a drawing in its own symbols."""
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
    """Walk, bump, push on (+1), push off (-1) and solve with two boxes (+1 +10), each action -0.1."""
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
    assert act("Down") == (-0.1, False, False)
    assert act("Right") == (-0.1, False, False)
    assert act("Right") == (-0.1, False, False)
    assert act("Up") == (-0.1, False, False)
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
    assert env.outcomes(before, "Right") == [(1.0, before, -0.1, False)], "two boxes in a row do not move"
    assert env.outcomes(((2, 1), before[1]), "Right")[0][1] == ((2, 2), ((1, 2), (1, 3), (2, 3)))


def shortest(env, depth):
    """Exhaustive search: the length of a shortest solution by trying every action sequence."""
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
def test_solve_is_optimal_and_every_level_solvable(name):
    env, lengths = envs.make(name, success_rate=1.0), []
    for seed in range(200, 400):  # evaluation levels and training levels
        env.reset(seed)
        path = solve(env)
        lengths.append(len(path))
        if len(path) <= 5:
            assert len(path) == shortest(env, 5)
        total = 0.0
        for action in path:
            _, reward, over, _, info = env.step(action)
            total += reward
        assert over and info["success"]
        assert total == pytest.approx(11 - 0.1 * len(path) if name == "sokoban" else 1.0)
    if name == "sokoban":
        assert 3 <= np.median(lengths) <= 4 and max(lengths) <= 10


def test_sokoban_layers_of_a_corridor():
    """The drawing at Sokoban.draw: four cells, the target at the right end."""
    cells = [(1, col) for col in range(4)]
    env = envs.Sokoban()
    env.level = {"floor": tuple(cells), "targets": (cells[3],)}
    layer = [(player, (cells[3],)) for player in cells[:3]]
    drawn = []
    visited = set()
    while layer:
        visited.update(layer)
        pictures = []
        for env.state in layer:
            pictures.append(env.render().splitlines()[1][:7])
        drawn.append(pictures)
        layer = sorted({earlier for state in layer for earlier in envs.undo(state, cells)} - visited)
    text = envs.Sokoban.draw.__doc__
    for k, pictures in enumerate(drawn):
        line = re.search(rf"layer {k} +(.*)", text)[1].removesuffix("solved")
        assert sorted(line.strip().split("    ")) == sorted(pictures)
    assert len(drawn) == 3


def test_sokoban_large_is_solvable():
    env = envs.make("sokoban_large")
    for seed in range(300, 305):
        env.reset(seed)
        assert len(env.state[1]) == 2 and solve(env)


def test_newvocab_is_a_pure_relabelling():
    plain, new = envs.make("sokoban"), envs.make("sokoban_newvocab")
    for seed in (0, 5, 999):
        a, b = plain.reset(seed)[0], new.reset(seed)[0]
        assert a.translate(str.maketrans("#_OX√PS", "W.GBCA@")) == b


def test_paper_symbols_of_newvocab():
    """App. G: # W, _ ., O G, √ C, X B, P A, S @."""
    env = envs.Sokoban(symbols=envs.make("sokoban_newvocab").symbols)
    assert dict(zip("#_OX√PS", env.symbols)) == {"#": "W", "_": ".", "O": "G", "√": "C", "X": "B", "P": "A", "S": "@"}


@pytest.mark.parametrize("rate", [1 / 3, 0.8, 1.0])
def test_frozenlake_is_gymnasiums(rate):
    """Transition probabilities, rewards and endings of gymnasium's own model, on 20 maps."""
    gym = pytest.importorskip("gymnasium.envs.toy_text.frozen_lake")
    env = envs.make("frozenlake", success_rate=rate)
    for seed in range(20):
        env.reset(seed)
        start, n = env.state, env.size
        goal, holes = env.level["goal"], env.level["holes"]
        grid = [["F"] * n for _ in range(n)]
        grid[start[0]][start[1]], grid[goal[0]][goal[1]] = "S", "G"
        for r, c in holes:
            grid[r][c] = "H"
        theirs = gym.FrozenLakeEnv(desc=["".join(row) for row in grid], is_slippery=True, success_rate=rate).P
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
                assert {k: p for k, p in ours.items() if p > 1e-12} == pytest.approx(
                    {k: p for k, p in reference.items() if p > 1e-12})


def test_frozenlake_slips_as_often_as_it_says():
    env, moves, n = envs.make("frozenlake", 1 / 3), {}, 3000
    for episode in range(n):
        env.reset(400, {"episode": episode})
        env.level, env.state = {"goal": (3, 3), "holes": ()}, (1, 1)
        env.step("Left")
        moves[env.state] = moves.get(env.state, 0) + 1
    assert set(moves) == {(1, 0), (0, 1), (2, 1)}
    assert all(abs(count - n / 3) < 4 * np.sqrt(n * 2 / 9) for count in moves.values()), moves


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
    assert envs.make("bandit_rev").risky == "Librarian" and envs.make("bandit_test").risky == "Trader"


@pytest.mark.parametrize("name", envs.ENVS)
def test_one_seed_is_one_level_and_the_episode_only_changes_the_dynamics(name):
    a, b = envs.make(name), envs.make(name)
    np.random.seed(0)
    state = np.random.get_state()[1].tolist()
    for seed in (0, 1000, 12345):
        assert a.reset(seed, {"episode": 0})[0] == b.reset(seed, {"episode": 1})[0]
        assert a.reset(seed, {"episode": 7}) == b.reset(seed, {"episode": 7}) and a.step(a.actions[1]) == b.step(b.actions[1])
    assert np.random.get_state()[1].tolist() == state, "no global random state may be touched"


@pytest.mark.parametrize("name, count", [("sokoban", 1000), ("sokoban_large", 100), ("frozenlake", 1000)])
def test_evaluation_levels_are_never_training_levels(name, count):
    """Not only other seeds: other levels. (The bandit has just two, both in both.)"""
    env = envs.make(name)
    levels = {kind: {repr(envs.find_level(type(env), env.draw_args, seed)) for seed in seeds}
              for kind, seeds in (("eval", envs.EVAL_SEEDS[:count]), ("train", range(256, 256 + count)))}
    assert not levels["eval"] & levels["train"]
    assert len(levels["eval"]) > 0.8 * len(envs.EVAL_SEEDS[:count]) and len(levels["train"]) > 0.8 * count


@pytest.mark.parametrize("name, rate", [("frozenlake", 1 / 3), ("sokoban", 1 / 3), ("bandit", 1 / 3)])
def test_random_yardstick_is_what_a_random_player_gets(name, rate):
    env, rng, budget, n = envs.make(name, rate), np.random.default_rng(0), 10, 8
    levels, wins = envs.EVAL_SEEDS[:64], 0
    expected = envs.mean_yardsticks(name, budget, levels, rate)[0, budget]
    for seed, episode in itertools.product(levels, range(n)):
        env.reset(seed, {"episode": episode})
        for _ in range(budget):
            if not env.over:
                env.step(env.actions[rng.integers(len(env.actions))])
        wins += env.won(env.state)
    p = wins / n / len(levels)
    assert abs(p - expected) < 4 * np.sqrt(expected * (1 - expected) / n / len(levels))


def test_optimal_yardstick_is_what_solve_says():
    """Sokoban: solvable within the budget. FrozenLake without slips: always."""
    env, lengths = envs.make("sokoban"), []
    for seed in envs.EVAL_SEEDS[:64]:
        env.reset(seed)
        lengths.append(len(solve(env)))
    best = envs.mean_yardsticks("sokoban", 10, range(64))[1]
    assert best == pytest.approx([np.mean([n <= h for n in lengths]) for h in range(11)])
    assert envs.mean_yardsticks("frozenlake", 10, range(64), 1.0)[1, 10] == 1.0


def test_optimal_yardstick_by_playing_it():
    """FrozenLake, paper's slip: play the greedy policy of a separate value iteration and count."""
    env, budget, rng, wins, expected = envs.make("frozenlake"), 10, np.random.default_rng(1), 0, 0.0
    for seed in range(20):
        env.reset(seed)
        def value(state, left, over, memo={}):
            key = seed, state, left
            if over or left == 0:
                return float(env.won(state))
            if key not in memo:
                memo[key] = max(sum(p * value(new, left - 1, o) for p, new, _, o in env.outcomes(state, a))
                                for a in env.actions)
            return memo[key]
        expected += value(env.state, budget, False)
        assert envs.yardsticks(env, budget)[1][budget] == pytest.approx(value(env.state, budget, False))
        for episode in range(40):
            env.reset(seed, {"episode": int(rng.integers(10 ** 6))})
            for left in range(budget, 0, -1):
                if not env.over:
                    env.step(max(env.actions, key=lambda a: sum(
                        p * value(new, left - 1, o) for p, new, _, o in env.outcomes(env.state, a))))
            wins += env.won(env.state)
    p, expected = wins / 800, expected / 20
    assert abs(p - expected) < 4 * np.sqrt(expected * (1 - expected) / 800)


def test_frozenlake_picture():
    env = envs.make("frozenlake")
    env.reset(0)
    env.level, env.state = {"goal": (0, 3), "holes": ((1, 0), (3, 3))}, (2, 1)
    assert env.render() == "_ _ _ G\nO _ _ _\n_ P _ _\n_ _ _ O"
    env.state = (1, 0)
    assert env.render() == "_ _ _ G\nX _ _ _\n_ _ _ _\n_ _ _ O"
    env.state = (0, 3)
    assert env.render() == "_ _ _ √\nO _ _ _\n_ _ _ _\n_ _ _ O"


def test_the_example_at_the_top_is_what_the_code_gives():
    env = envs.make("sokoban")
    board, _ = env.reset(7)
    shown = [line.strip()[:11] for line in envs.__doc__.splitlines() if line.startswith("        #")]
    assert shown == board.splitlines()
    random, optimal = envs.yardsticks(env, 10)[:, -1]
    assert [f"{random:.2f}", f"{optimal:.2f}"] == ["0.04", "1.00"]
    assert f"env.state is {env.state}:" in envs.__doc__
    assert f'env.outcomes(env.state, "Down") -> {env.outcomes(env.state, "Down")}' in envs.__doc__


def test_the_lake_in_words_is_the_same_lake():
    """extras/told_lake.py: the same levels, held out alike, and outcomes; its words give back where goal and holes are."""
    lake, told = envs.make("frozenlake"), envs.make("extras/told_lake.py:ToldLake", success_rate=0.5)
    assert told.success_rate == envs.make(f"{ROOT}/envs.py:FrozenLake", success_rate=0.5).success_rate == 0.5
    told.success_rate = lake.success_rate
    for seed in (0, 7, 300, 301):
        lake.reset(seed)
        words, _ = told.reset(seed)
        assert (lake.level, lake.state) == (told.level, told.state)
        assert all(lake.outcomes(lake.state, action) == told.outcomes(told.state, action) for action in lake.actions)
        places = []
        for place in re.split("[.:;]", words.removeprefix("The goal is ").replace(" Holes:", "").rstrip(".")):
            moves = {word: int(n) for n, word in re.findall(r"(\d) (up|down|left|right)", place)}
            assert moves
            places.append((told.state[0] + moves.get("down", 0) - moves.get("up", 0),
                           told.state[1] + moves.get("right", 0) - moves.get("left", 0)))
        assert (places[0], tuple(places[1:])) == (told.level["goal"], told.level["holes"])
    told.state = told.level["goal"]
    assert told.render() == "You are at the goal."
    told.state = told.level["holes"][0]
    assert told.render() == "You are in a hole."


def test_dice_are_independent_of_the_level():
    """The stream that drew the level must not also roll the dice: order of the arms against pay-out, episode 0."""
    env, first = envs.make("bandit"), {True: [], False: []}
    for seed in range(256, 2256):
        env.reset(seed, {"episode": 0})
        order = env.level[0] == "Engineer"
        first[order].append(env.step("Engineer")[1])
    means = [np.mean(paid) for paid in first.values()]
    assert all(abs(mean - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 900) for mean in means), means


def test_yardsticks_take_any_number_of_outcomes():
    class Dice(envs.Env):
        actions, split, draw = ("Roll",), False, staticmethod(lambda rng: ({}, 0))
        outcomes = lambda self, state, action: [(1 / 6, i, 0.0, True) for i in range(1, 7)]
        won = lambda self, state: state >= 3
        render = lambda self: "?"
    env = Dice()
    env.reset(0)
    assert envs.yardsticks(env, 2)[0][1] == pytest.approx(4 / 6)


class Coin(envs.Env):
    """A world of one's own, which a notebook may hand over as a class."""
    actions, split = ("Toss",), False
    draw = staticmethod(lambda rng: ((), None))
    outcomes = lambda self, state, action: [(0.3, "heads", 1.0, True), (0.7, "tails", 0.0, True)]
    won = lambda self, state: state == "heads"
    render = lambda self: f"{self.state}"


def test_a_worlds_file_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "the_neighbour.py").write_text("from envs import Bandit as Mine\n")
    (tmp_path / "mine.py").write_text("from the_neighbour import Mine\n")
    assert isinstance(envs.make(f"{tmp_path}/mine.py:Mine"), envs.Bandit)


def test_a_world_by_its_class_or_its_file():
    guess = f"{ROOT}/tests/my_world.py:Guess"
    assert type(envs.make(Coin)) is Coin and envs.title(Coin) == "Coin"
    assert envs.mean_yardsticks(Coin, 1, range(8))[:, 1] == pytest.approx([0.3, 0.3])
    assert type(envs.make(guess)) is type(envs.make(guess)), "the file is run once"
    assert envs.title(guess) == "Guess" and envs.title("sokoban") == "sokoban"
    assert envs.mean_yardsticks(guess, 1, range(8))[:, 1] == pytest.approx([1 / 3, 1])
    lake = envs.make(envs.FrozenLake, 0.8)
    assert type(lake) is envs.FrozenLake and lake.success_rate == 0.8


@pytest.mark.parametrize("name, says", [("chess", "frozenlake"), ("no.py:Chess", "no.py:Chess"),
                                        (f"{ROOT}/tests/my_world.py:Chess", "does not define Chess")])
def test_worlds_that_are_not_there(name, says):
    with pytest.raises(envs.UserError, match=re.escape(says)):
        envs.make(name)


def test_a_world_with_too_few_levels_to_hold_some_out_says_so():
    class Single(Coin):
        split = True
    held_out = set()
    for seed in (0, 300):  # of evaluation, of training: one of them finds no level
        try:
            Single().reset(seed)
        except envs.UserError as error:
            assert "split = False" in str(error)
            held_out.add(seed)
    assert len(held_out) == 1


def test_a_world_that_has_ended_or_does_not_know_an_action_refuses():
    env = Coin()
    with pytest.raises(AssertionError, match="reset"):
        env.step("Toss")
    env.reset(0)
    with pytest.raises(AssertionError, match="not one of"):
        env.step("Heads")
    env.step("Toss")
    with pytest.raises(AssertionError, match="reset"):
        env.step("Toss")


def test_a_world_keeps_its_own_chance_of_a_slip_if_none_is_given():
    class Slippery(envs.FrozenLake):
        def __init__(self):
            super().__init__(size=3, success_rate=0.4)
    assert [envs.make(Slippery, rate).success_rate for rate in (None, 0.9, 0.0)] == [0.4, 0.9, 0.0]
    by_default, as_it_is, sure = (envs.mean_yardsticks(Slippery, 5, range(8), *rate) for rate in ((), (0.4,), (1.0,)))
    assert (by_default == as_it_is).all() and by_default[1, -1] < sure[1, -1] == 1


def test_the_chance_of_a_slip_reaches_every_lake():
    """Also one that is made by a partial, as ENVS has them, and a subclass."""
    class Pond(envs.FrozenLake):
        pass
    for name in ("frozenlake", Pond):
        assert envs.make(name, 0.5).success_rate == 0.5
    envs.ENVS["pond"] = functools.partial(Pond, size=3)
    try:
        pond = envs.make("pond", 0.5)
    finally:
        del envs.ENVS["pond"]
    pond.reset(300)
    assert (pond.size, [p for p, _, _, _ in pond.outcomes(pond.state, "Up")]) == (3, [0.5, 0.25, 0.25])


def test_advice_is_one_line_and_developers_see_where():
    code = "import envs\nwith envs.or_say('try another'):\n    1 / 0"
    for flags, expected in ((), "try another (ZeroDivisionError('division by zero'); python -X dev shows more)\n"), (("-X", "dev"), 'in <module>\n'):
        done = subprocess.run([sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1 and expected in done.stderr and ("Traceback" in done.stderr) == bool(flags)
    class OutOfMemoryError(RuntimeError):  # the name of torch's
        pass
    with pytest.raises(OutOfMemoryError), envs.or_say("another model"):
        raise OutOfMemoryError("the model is right, the card too small")


def matrices():  # of the lake's evaluation levels -> start (128,17), reward (128,4,17), move (128,4,17,17); the last state: over
    starts, rewards, moves, goals = np.zeros((128, 17)), np.zeros((128, 4, 17)), np.zeros((128, 4, 17, 17)), []
    cells = list(itertools.product(range(4), repeat=2))
    for level, seed in enumerate(envs.EVAL_SEEDS[:128]):
        lake = envs.make("frozenlake")
        lake.reset(seed, options={"episode": 0})
        starts[level, cells.index(lake.state)] = 1
        goals.append(lake.level["goal"])
        moves[level, :, 16, 16] = 1
        for (place, cell), (number, action) in itertools.product(enumerate(cells), enumerate(lake.actions)):
            for chance, new, gained, over in lake.outcomes(cell, action):
                rewards[level, number, place] += chance * gained
                moves[level, number, place, 16 if over else cells.index(new)] += chance
    return starts, rewards, moves, goals


def towards(cell, goal, axes):  # straight to the goal, whatever holes are there. axes: (0, 1) rows first, (1, 0) columns
    for axis in axes:
        if cell[axis] != goal[axis]:
            return (("Up", "Down"), ("Left", "Right"))[axis][cell[axis] < goal[axis]]


def test_who_ignores_holes_or_plays_the_slips_of_the_evaluation():
    """README and figures/DIFFERENCES.md: to the goal, blind to holes (exact); optimal play in the slips that are drawn."""
    blind, optimal = [], []
    for rate in (0.8, 1 / 3):
        won, expected = 0, np.zeros(2)
        for seed in envs.EVAL_SEEDS:
            lake = envs.make("frozenlake", rate)
            lake.reset(seed, options={"episode": 0})
            goal = lake.level["goal"]

            @functools.cache
            def value(cell, left, how):  # how: 4, the best of all moves; or the order of a walk's axes
                if left == 0 or cell == goal:
                    return float(cell == goal)
                actions = lake.actions if how == 4 else [towards(cell, goal, how)]
                return max(after(cell, action, left, how) for action in actions)

            def after(cell, action, left, how):
                return sum(p * (won if over else value(new, left - 1, how)) for p, new, won, over in lake.outcomes(cell, action))
            expected += [value(lake.state, 10, order) for order in ((0, 1), (1, 0))]
            for left in range(10, 0, -1):
                if not lake.over:
                    lake.step(max(lake.actions, key=lambda action: after(lake.state, action, left, 4)))
            won += lake.won(lake.state)
        blind += (expected / 256).tolist()
        optimal.append(won / 256)
    assert blind == pytest.approx([0.65, 0.67, 0.34, 0.34], abs=0.005) and optimal == pytest.approx([0.91, 0.52], abs=0.005)
    assert "(walking straight, blind to holes, wins 0.67)" in (ROOT / "README.md").read_text()
    assert "blind to holes, wins 0.65 or 0.67 (columns first) on the gentle lake, 0.34 on the paper's." in (ROOT / "tiny/README.md").read_text()
    page = (ROOT / "figures/DIFFERENCES.md").read_text()
    assert "optimal play wins 0.91 on the gentle lake, 0.52 on the paper's, not 0.89 and 0.47" in page


def test_what_one_wins_on_the_lake_without_reading_all():
    """Yardsticks between random and optimal play: the best of all ten moves that ignore the state; to the goal, blind to holes."""
    starts, rewards, moves, goals = matrices()
    first, then = [(0.0, starts)], [np.zeros_like(starts)]  # all five moves: won by them, where one then is; won from each state
    for _ in range(5):
        first = [(won + (at * rewards[:, a]).sum(1).mean(), np.einsum("ls,lst->lt", at, moves[:, a])) for won, at in first for a in range(4)]
        then = [rewards[:, a] + np.einsum("lst,lt->ls", moves[:, a], value) for value in then for a in range(4)]
    won, at = zip(*first)
    both = np.reshape(at, (1024, -1)) @ np.reshape(then, (1024, -1)).T / 128
    blind = (both + np.array(won)[:, None]).max()

    won, at = 0.0, starts
    for _ in range(10):
        new = np.zeros_like(at)
        for level, (row, column) in enumerate(goals):
            for place in range(16):
                down, right = row - place // 4, column - place % 4
                a = (3 if down < 0 else 1) if down else (0 if right < 0 else 2)  # rows first; Left, Down, Right, Up
                won += at[level, place] * rewards[level, a, place] / 128
                new[level] += at[level, place] * moves[level, a, place]
            new[level, 16] += at[level, 16]
        at = new
    assert (blind, won) == (pytest.approx(0.29, abs=0.005), pytest.approx(0.64, abs=0.005))
    page = (ROOT / "figures/smollm2/README.md").read_text()
    assert "moves that ignore the state win at most 0.29, walking to the goal without a look at holes 0.64" in page


def test_one_episode_has_no_interval():
    assert [envs.with_interval(p, 1) for p in (0.0, 1.0)] == ["not won", "won"]
    assert envs.with_interval(0.0, 2).startswith("0.00 [0.00,")
