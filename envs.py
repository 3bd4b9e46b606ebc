"""The worlds of RAGEN (arXiv 2504.20073, Sec. 3.1, App. B.1) as text: Bandit, Sokoban and FrozenLake.

A world takes an action and answers with its next state and a reward. Its rules are one function, `outcomes`,
which lists what can happen and how probable that is. `step` draws one of these outcomes.

    env.outcomes(state, action) -> [(probability, next state, reward, over?), ...]
    env = make("sokoban")
    obs, info = env.reset(seed=7, options={"episode": 3})
        # # # # # #
        # _ P _ _ #        P player, X box, O target (push the box there), # wall, _ floor
        # _ _ # _ #
        # _ # # # #        env.state is ((1, 2), ((4, 2),)): the player's cell (row, column), then the boxes'
        # _ X O # #        env.level is what stays fixed: floor and targets
        # # # # # #
    env.outcomes(env.state, "Down") -> [(1.0, ((2, 2), ((4, 2),)), -0.1, False)]
    obs, reward, terminated, truncated, info = env.step("Down")    # truncated: always False

`seed` fixes the level. `seed` and `episode` (its number in the group) fix the dice: slips and pay-outs.

    python envs.py      the success of random and of optimal play in every world, by number of actions
"""
import contextlib
import itertools
import runpy
import sys
import zlib
from functools import cache, lru_cache, partial
from pathlib import Path
from statistics import fmean

import numpy as np
from tqdm import tqdm

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
EVAL_SEEDS = range(256)  # these seeds draw levels for evaluation, all others for training (see find_level)


def shift(cell, move, times=1):  # shift((2, 2), "Up") -> (1, 2)
    down, right = MOVES[move]
    return cell[0] + times * down, cell[1] + times * right


def picture(size, symbols, elsewhere):  # a square; symbols: {cell: symbol}
    rows = [[symbols.get((row, col), elsewhere) for col in range(size)] for row in range(size)]
    return "\n".join(" ".join(row) for row in rows)


# ---------------------------------------------------------------------------- what the worlds share
class Env:
    """`reset` sets self.level, which stays fixed, and self.state (hashable), which changes. A world defines:
        draw(rng, *draw_args)       -> (level, initial state), or None if it failed: find_level tries again.
                                       A staticmethod, as find_level caches by these arguments
        outcomes(state, action)     -> [(probability, next state, reward, over?), ...], the intended next state first
        won(state)                  -> True or False
        render()                    -> self.state as text"""
    instruction = ""  # the task in words
    actions = ()      # the words that `step` takes
    draw_args = ()    # what `draw` gets besides rng
    split = True      # hold out a quarter of all levels for evaluation; False: in a world of few levels
    over = True       # so that `step` fails before `reset`

    def reset(self, seed, options=None):  # -> observation, info: as in Gymnasium
        assert not isinstance(self.actions, str), "actions must be a tuple, such as ('Push',)"
        episode = (options or {}).get("episode", 0)
        self.level, self.state = find_level(type(self), self.draw_args, seed)
        self.dice = np.random.default_rng([seed, episode, 1])  # the 1 makes it differ from find_level's
        self.over = False
        return self.render(), {"success": False}

    def step(self, action):  # -> observation, reward, terminated, truncated (always False), info
        assert action in self.actions, f"{action!r} is not one of {self.actions}"
        assert not self.over, "the episode is over: call reset"
        outcomes = self.outcomes(self.state, action)
        chosen = self.dice.choice(len(outcomes), p=[chance for chance, _, _, _ in outcomes])
        _, self.state, reward, over = outcomes[chosen]
        self.over = bool(over)  # JSON does not take NumPy's
        return self.render(), float(reward), self.over, False, {"success": bool(self.won(self.state))}

    def bonus(self, turn):  # turn: see take_turn in ragen_mini.py. Called before the answer's actions are run
        """Extra reward for what an answer *says*. It is trained on, but the model is not told of it."""
        return 0.0


@lru_cache(maxsize=8192)  # all episodes of a group ask for one level, all evaluations for the same levels
def find_level(world, draw_args, seed):  # -> level, initial state
    """The level of a seed (cached: do not change it). Seeds may draw the same, but a level of an evaluation is
    never trained on: its hash says which side may draw it. (The same map with another start is another level.)"""
    for attempt in range(1000):
        drawn = world.draw(np.random.default_rng([seed, attempt]), *draw_args)
        held_out = zlib.crc32(repr(drawn).encode()) % 4 == 0  # Python's `hash` differs between processes
        if drawn is not None and (not world.split or held_out == (seed in EVAL_SEEDS)):
            return drawn
    raise UserError(f"{world.__name__}: no level. If there are few: split = False. Else draw returns too many None")


# ------------------------------------------------------------------------------------------- bandit
class Bandit(Env):
    """Pull one of two arms, once. Their names hint at which is which. The sure arm always pays 0.15. The
    risky one pays 1 with probability 0.25, else 0: more on average. Success is pulling it, paid or not.
    Level: the order of the names. State: None before the pull, then the name of the arm that was pulled."""
    split = False  # there are only two levels: nothing is held out

    def __init__(self, sure="Teacher", risky="Engineer"):
        self.sure = sure
        self.risky = risky
        self.actions = self.draw_args = (sure, risky)
        self.instruction = (
            "You are playing a bandit game with two arms. The name of an arm hints at its rewards: one pays "
            "a small sure reward, the other is risky but pays more on average. Answer with the arm to pull.")

    @staticmethod
    def draw(rng, sure, risky):
        order = (sure, risky) if rng.random() < 0.5 else (risky, sure)
        return order, None

    def outcomes(self, state, action):
        if action == self.sure:
            return [(1.0, self.sure, 0.15, True)]
        return [(0.75, self.risky, 0.0, True), (0.25, self.risky, 1.0, True)]

    def won(self, state):
        return state == self.risky

    def render(self):
        if self.state is None:
            return "The arms are {} and {}.".format(*self.level)
        return f"You pulled {self.state}."


# -------------------------------------------------------------------------------------- frozen lake
class FrozenLake(Env):
    """Walk over ice to the goal: P you, _ ice, O hole, G goal, X you in a hole, √ you at the goal. State:
    your cell. A move goes as intended with probability `success_rate` (paper: 1/3). The two perpendicular
    moves share the rest. The goal pays 1. The goal and the holes end the episode."""
    actions = ("Left", "Down", "Right", "Up")  # a circle: both neighbours of a move are perpendicular to it

    def __init__(self, size=4, frozen=0.8, success_rate=0.8):  # frozen: the chance that a cell is ice
        self.size = size
        self.draw_args = (size, frozen)
        self.success_rate = success_rate
        self.instruction = (
            "You are solving a FrozenLake puzzle. Go to the goal, avoid the holes. Ice is slippery: you may "
            "move sideways instead. Symbols: P you, _ ice, O hole, G goal. Actions: Left, Down, Right, Up.")

    @staticmethod
    def draw(rng, size, frozen):
        cells = list(itertools.product(range(size), repeat=2))
        melted = rng.random((size, size)) >= frozen
        places = rng.choice(size * size, 2, replace=False)
        start, goal = (cells[place] for place in places)
        holes = {cell for cell in cells if melted[cell]} - {start, goal}
        reached = [start]
        for cell in reached:  # the list grows while we walk along it: a flood
            for move in MOVES:
                new = shift(cell, move)
                if new in cells and new not in holes and new not in reached:
                    reached.append(new)
        if goal not in reached:
            return None
        return {"goal": goal, "holes": tuple(sorted(holes))}, start

    def outcomes(self, state, action):
        intended = self.actions.index(action)
        slip = (1 - self.success_rate) / 2
        last = self.size - 1
        outcomes = []
        for chance, rotation in ((self.success_rate, 0), (slip, -1), (slip, 1)):
            row, col = shift(state, self.actions[(intended + rotation) % 4])
            cell = min(max(row, 0), last), min(max(col, 0), last)  # at the edge you stay where you are
            won = self.won(cell)
            outcomes.append((chance, cell, float(won), won or cell in self.level["holes"]))
        return outcomes

    def won(self, state):
        return state == self.level["goal"]

    def render(self):
        grid = dict.fromkeys(self.level["holes"], "O") | {self.level["goal"]: "G"}
        under_you = grid.get(self.state)
        grid[self.state] = {None: "P", "O": "X", "G": "√"}[under_you]
        return picture(self.size, grid, "_")


# ------------------------------------------------------------------------------------------ sokoban
class Sokoban(Env):
    """Push boxes onto targets: # wall, _ floor, O target, X box, √ box on target, P you, S you on target.
    State: (player, boxes), the boxes sorted. Rewards: -0.1 for every action, +1 when a box is pushed onto a
    target, -1 when it is pushed off, +10 when all are on. One box, solved in n actions, pays 11 - 0.1 n."""
    actions = tuple(MOVES)

    def __init__(self, size=6, boxes=1, symbols="#_OX√PS"):
        self.size = size
        self.draw_args = (size, boxes)
        self.symbols = symbols
        self.instruction = (
            "You are solving a Sokoban puzzle. Push every box onto a target by walking into it; it cannot be "
            "pulled. Symbols: {} wall, {} floor, {} target, {} box, {} box on target, {} you, {} you on "
            "target. Actions: Up, Down, Left, Right.").format(*symbols)

    @staticmethod
    def draw(rng, size, boxes):
        """Carve a room, put boxes on the targets, play *backwards*: so it can be solved. Layer k holds all
        states that need k actions, not fewer. In a corridor of four cells with the target at its right end:
            layer 0    P _ _ √    _ P _ √    _ _ P √      solved
            layer 1    _ P X O
            layer 2    P _ X O    P X _ O
        k (one box: 1 to 8, two: 4 to 16) and a state of layer k are drawn. If it has none, find_level tries again."""
        floor = sorted(carve(rng, size))  # a set has no order, and a seed must always give the same level
        if len(floor) <= 3 * boxes:  # hardly any room to push
            return None
        places = rng.choice(len(floor), boxes, replace=False)
        targets = tuple(sorted(floor[i] for i in places))
        layer = [(player, targets) for player in floor if player not in targets]
        visited = set(layer)
        fewest, most = (1, 8) if boxes == 1 else (4, 16)
        k = rng.integers(fewest, most + 1)
        for _ in range(k):  # from layer 0 to layer k (undo: below)
            one_more = {before for state in layer for before in undo(state, floor)}
            layer = sorted(one_more - visited)  # without those that need fewer
            visited.update(layer)
        if not layer:  # this room has no state that needs so many
            return None
        return {"floor": tuple(floor), "targets": targets}, layer[rng.integers(len(layer))]

    def outcomes(self, state, action):
        floor, targets = self.level["floor"], self.level["targets"]
        player, boxes = state
        to, beyond = shift(player, action), shift(player, action, 2)
        nothing_moves = [(1.0, state, -0.1, False)]  # but the action costs 0.1
        if to not in floor:
            return nothing_moves
        if to not in boxes:
            return [(1.0, (to, boxes), -0.1, False)]
        if beyond not in floor or beyond in boxes:
            return nothing_moves
        boxes = tuple(sorted({beyond, *boxes} - {to}))
        solved = boxes == targets
        gained = (beyond in targets) - (to in targets) + 10 * solved  # True is 1
        return [(1.0, (to, boxes), -0.1 + gained, solved)]

    def won(self, state):
        return state[1] == self.level["targets"]

    def render(self):
        wall, floor, target, box, box_on_target, you, you_on_target = self.symbols
        player, boxes = self.state
        grid = dict.fromkeys(self.level["floor"], floor) | dict.fromkeys(boxes, box) | {player: you}
        on_target = {floor: target, box: box_on_target, you: you_on_target}
        for cell in self.level["targets"]:
            grid[cell] = on_target[grid[cell]]
        return picture(self.size, grid, wall)


def carve(rng, size):  # -> set of cells
    """A random walk inside the walls, and neighbours of its cells (length and turns are gym-sokoban's)."""
    inside = set(itertools.product(range(1, size - 1), repeat=2))
    cell = tuple(rng.integers(1, size - 1, 2).tolist())
    moves = list(MOVES)
    move = "Up"
    floor = set()
    for _ in range(int(1.7 * (size + size))):
        if rng.random() < 0.35:
            move = moves[rng.integers(4)]
        if shift(cell, move) in inside:
            cell = shift(cell, move)
        neighbour = shift(cell, moves[rng.integers(4)])
        floor.update({cell, neighbour} & inside)
    return floor


def undo(state, floor):  # yields all other states from which one action leads to `state`
    """now                                          _ P X
    before, if the player walked right           P _ X
    before, if it walked right and pushed a box  P X _ """
    player, boxes = state
    for action in MOVES:
        back, ahead = shift(player, action, -1), shift(player, action)
        if back in floor and back not in boxes:
            yield back, boxes
            if ahead in boxes:
                yield back, tuple(sorted({player, *boxes} - {ahead}))


# -------------------------------------------------------------- yardsticks: random and optimal play
def yardsticks(env, horizon):  # -> (2, horizon + 1): success of random and optimal play in 0, 1, ... actions
    """Exact, by recursion, because all probabilities are known:
        value(state, 0)    = 1 if won(state), else 0
        value(state, left) = the mean (random play) or the maximum (optimal play) over all actions of
                             the mean over outcomes of value(next state, 0 if over, else left - 1)
    The room at the top, 10 actions: 0.04, 1.00. NOTE: optimal play looks after every action, a model once a turn."""
    outcomes = cache(env.outcomes)  # many paths lead to the same state

    @cache
    def value(state, left, combine):  # chance of success with `left` actions left
        need(value.cache_info().currsize < 10 ** 6, "too many states: lower --max-actions, or --eval-every 0")
        if left == 0:
            return float(env.won(state))
        by_action = []
        for action in env.actions:
            mean = 0.0
            for p, new, _, over in outcomes(state, action):
                mean += p * value(new, 0 if over else left - 1, combine)
            by_action.append(mean)
        return combine(by_action)
    return np.array([[value(env.state, left, combine) for left in range(horizon + 1)] for combine in (fmean, max)])


@lru_cache
def mean_yardsticks(name, horizon, seeds=EVAL_SEEDS, success_rate=None):  # -> (2, horizon + 1)
    need(horizon <= 200, f"random and optimal play: 200 actions at most, not {horizon}: lower --max-actions")
    env = make(name, success_rate)
    curves = []
    for seed in seeds:
        env.reset(seed)
        curves.append(yardsticks(env, horizon))
    return np.mean(curves, axis=0)


def interval(p, n, z=1.96):  # -> low, high: Wilson's 95% interval of a share p (or several) of n episodes
    shrink = 1 + z * z / n
    center = (p + z * z / (2 * n)) / shrink
    half = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    return np.minimum(p, center - half), np.maximum(p, center + half)  # despite rounding, p is inside


def with_interval(p, n):  # 0.7, 256 -> "0.70 [0.64, 0.75]"
    if n == 1:
        return "won" if p else "not won"
    low, high = interval(p, n)
    return f"{p:.2f} [{low:.2f}, {high:.2f}]"


# ---------------------------------------------------------------------------------- names of worlds
ENVS = {  # does skill carry over to a variant? --model RUN --env bandit_test --eval-only
    "bandit": Bandit,
    "bandit_test": partial(Bandit, sure="Librarian", risky="Trader"),
    "bandit_rev": partial(Bandit, sure="Trader", risky="Librarian"),  # the names mislead
    "sokoban": Sokoban,
    "sokoban_large": partial(Sokoban, size=8, boxes=2),
    "sokoban_newvocab": partial(Sokoban, symbols="W.GBCA@"),  # the same rooms
    "frozenlake": FrozenLake,
}


def make(name, success_rate=None):  # -> Env; success_rate: for lakes (None: the world's own)
    env = find_world(name)()
    if success_rate is not None and hasattr(env, "success_rate"):
        env.success_rate = success_rate
    return env


def find_world(name):  # name: a key of ENVS, file.py:Class (runs the file), or a class -> class or partial
    if isinstance(name, type):
        return name
    if name in ENVS:
        return ENVS[name]
    file, _, class_name = str(name).rpartition(":")
    need(Path(file).is_file(), f"no world {name}: choose {', '.join(ENVS)}, "
                               f"or FILE.py:CLASS, an existing file and its class (see tests/my_world.py)")
    defined = run_file(file)
    need(callable(defined.get(class_name)), f"{name}: {file} does not define {class_name} (a class)")
    return defined[class_name]


@lru_cache  # running a file twice would define two different classes
def run_file(file):  # -> what it defines
    if Path(file).resolve() == Path(sys.argv[0]).resolve():  # the world is in the script that is running
        return vars(sys.modules["__main__"])
    sys.path.append(str(Path(file).parent))  # it may import its neighbours
    return runpy.run_path(file)


def title(name):  # "worlds/my_world.py:Guess" or the class Guess -> "Guess"
    return getattr(name, "__name__", str(name)).rpartition(":")[2]


# ------------------------------------------------------------------------------ what users are told
class UserError(SystemExit):
    """A user's mistake: ends the program with this message. (No Exception: `or_say` lets it pass, and a sweep of
    many runs that is to survive it says `except UserError`.)"""


def need(condition, message):
    if not condition:
        raise UserError(message)


def tell(text):  # above the progress bar
    with contextlib.suppress(BrokenPipeError):  # Ctrl-C ends both programs of `ragen_mini.py | tee log`
        tqdm.write(text)


@contextlib.contextmanager
def or_say(advice):  # turns any exception of a library into our advice, followed by the reason
    try:
        yield
    except Exception as error:
        if sys.flags.dev_mode or "OutOfMemory" in repr(error):  # memory errors (-X dev: all) pass unchanged
            raise
        raise UserError(f"{advice} ({error!r:.200}; python -X dev shows more)") from error


if __name__ == "__main__":
    budgets = (1, 2, 5, 10, 15)
    print(f"Success in % on {len(EVAL_SEEDS)} evaluation levels, random / optimal, by number of actions")
    print(f"{'actions:':18}" + "".join(f"{budget:>13}" for budget in budgets))
    for name in ENVS:
        random, best = 100 * mean_yardsticks(name, max(budgets))
        print(f"{name:18}", *(f"{random[budget]:5.1f} /{best[budget]:5.1f}" for budget in budgets))
