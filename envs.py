"""RAGEN's environments (arXiv 2504.20073, Sec. 3.1, App. B.1) as text: Bandit, Sokoban, FrozenLake.

An environment takes an action, and answers with its next state and a reward. Its rules are one
function, `outcomes`, which lists what can happen and how probable that is. `step` draws one of the
outcomes.

    env.outcomes(state, action) -> [(probability, next state, reward, over?), ...]
    env = make("sokoban")
    obs, info = env.reset(seed=7, options={"episode": 3})
        # # # # # #
        # _ P _ _ #        P player, X box, O target (push the box there), # wall, _ floor
        # _ _ # _ #
        # _ # # # #        env.state is ((1, 2), ((4, 2),)): the cells (row, column) of the player
        # _ X O # #        and of the boxes. env.level is what stays fixed: floor and targets
        # # # # # #
    env.outcomes(env.state, "Down") -> [(1.0, ((2, 2), ((4, 2),)), -0.1, False)]
    obs, reward, terminated, truncated, info = env.step("Down")    # truncated: always False

The seed fixes the level. Seed and episode (its number in the group) together fix the dice, which
decide about slips and pay-outs.

    python envs.py      how often random and optimal play succeed in every environment
"""
import itertools
import runpy
import sys
import zlib
from functools import cache, lru_cache, partial
from pathlib import Path
from statistics import fmean

import numpy as np

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
EVAL_SEEDS = range(256)  # these seeds draw held-out levels, all others draw training levels


def shift(cell, move, times=1):  # shift((2, 2), "Up") -> (1, 2)
    down, right = MOVES[move]
    return cell[0] + times * down, cell[1] + times * right


def draw_grid(size, symbols, elsewhere):  # symbols: {cell: symbol} -> text, a square
    rows = [[symbols.get((row, col), elsewhere) for col in range(size)] for row in range(size)]
    return "\n".join(" ".join(row) for row in rows)


# ---------------------------------------------------------------------- what the environments share
class Env:
    """`reset` sets self.level, which stays fixed, and self.state (hashable), which changes.

    An environment of your own defines these four, and the attributes below:
        draw(rng, *draw_args)       -> (level, initial state), or None if it failed: then find_level
                                       tries again. A staticmethod, so that levels can be cached
        outcomes(state, action)     -> [(probability, next state, reward, over?), ...],
                                       with the intended next state first, if there is one
        won(state)                  -> True or False
        render()                    -> self.state as text
    """
    instruction = ""  # the task in words
    actions = ()      # the words that `step` takes
    draw_args = ()    # what `draw` gets besides rng
    split = True      # is a quarter of the levels held out for evaluation? Not if there are few
    over = True       # so that `step` fails before `reset`

    def reset(self, seed, options=None):  # -> observation, info: as in Gymnasium
        assert not isinstance(self.actions, str), "actions must be a tuple, such as ('Push',)"
        episode = (options or {}).get("episode", 0)
        self.level, self.state = find_level(type(self), self.draw_args, seed)
        self.dice = np.random.default_rng([seed, episode, 1])  # 1: other numbers than find_level's
        self.over = False
        return self.render(), {"success": False}

    def step(self, action):  # -> observation, reward, terminated, truncated (always False), info
        assert action in self.actions, f"{action!r} is not one of {self.actions}"
        assert not self.over, "the episode is over: call reset"
        outcomes = self.outcomes(self.state, action)
        chosen = self.dice.choice(len(outcomes), p=[chance for chance, _, _, _ in outcomes])
        _, self.state, reward, over = outcomes[chosen]
        self.over = bool(over)  # JSON cannot store NumPy's bool
        info = {"success": bool(self.won(self.state))}
        return self.render(), float(reward), self.over, False, info


class EnvError(ValueError):
    """There is no such environment, or it draws too few levels."""


@lru_cache(maxsize=8192)  # a group's episodes ask for the same level, and so do all evaluations
def find_level(env_class, draw_args, seed):  # -> level, initial state
    """The level of a seed. Two seeds may draw the same one, but no held-out level is trained on.

    A level's hash decides whether it is held out. (Here a level is what stays fixed *and* the
    initial state.) What is returned is cached, so do not change it.
    """
    for attempt in range(1000):
        drawn = env_class.draw(np.random.default_rng([seed, attempt]), *draw_args)
        if drawn is None:
            continue
        held_out = zlib.crc32(repr(drawn).encode()) % 4 == 0  # `hash` differs between processes
        if not env_class.split or held_out == (seed in EVAL_SEEDS):
            return drawn
    raise EnvError(f"{env_class.__name__} gave no level in 1000 attempts. If it has only a few "
                   f"levels, none can be held out: set split = False. If not, see why its draw "
                   f"returns None so often.")


# ------------------------------------------------------------------------------------------- bandit
class Bandit(Env):
    """Pull one of two arms, once. Their names hint at which is which.

    The sure arm always pays 0.15. The risky arm pays 1 with probability 0.25, else 0, which is more
    on average. Pulling the risky arm counts as success, whether it pays or not.
    Level: the order of the names. State: the name of the arm that was pulled; None before that.
    """
    split = False  # there are only two levels: nothing is held out

    def __init__(self, sure="Teacher", risky="Engineer"):
        self.sure = sure
        self.risky = risky
        self.actions = self.draw_args = (sure, risky)
        self.instruction = (
            "You are playing a bandit game with two arms. The name of an arm hints at its rewards: "
            "one pays a small sure reward, the other is risky but pays more on average. Answer "
            "with the arm to pull.")

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
    """Walk over ice to the goal. The goal pays 1; the goal and the holes end the episode.

    A move goes as intended with probability `success_rate` (paper: 1/3). Otherwise you slip to one
    of the two sides. State: your cell.
    Symbols: P you, _ ice, O hole, G goal, X you in a hole, √ you at the goal.
    """
    # In the order of a circle: the two neighbours of a move are the ways in which it may slip.
    actions = ("Left", "Down", "Right", "Up")

    def __init__(self, size=4, frozen=0.8, success_rate=0.8):  # frozen: chance that a cell is ice
        self.size = size
        self.draw_args = (size, frozen)
        self.success_rate = success_rate
        self.instruction = (
            "You are solving a FrozenLake puzzle. Go to the goal, avoid the holes. Ice is "
            "slippery: you may move sideways instead. Symbols: P you, _ ice, O hole, G goal. "
            "Actions: Left, Down, Right, Up.")

    @staticmethod
    def draw(rng, size, frozen):
        cells = list(itertools.product(range(size), repeat=2))
        melted = rng.random((size, size)) >= frozen
        places = rng.choice(size * size, 2, replace=False)
        start, goal = (cells[place] for place in places)
        holes = {cell for cell in cells if melted[cell]} - {start, goal}
        reached = [start]
        for cell in reached:  # a flood: the list grows while we walk along it
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
            cell = min(max(row, 0), last), min(max(col, 0), last)  # nobody leaves the lake
            won = self.won(cell)
            outcomes.append((chance, cell, float(won), won or cell in self.level["holes"]))
        return outcomes

    def won(self, state):
        return state == self.level["goal"]

    def render(self):
        grid = dict.fromkeys(self.level["holes"], "O") | {self.level["goal"]: "G"}
        under_you = grid.get(self.state)
        grid[self.state] = {None: "P", "O": "X", "G": "√"}[under_you]
        return draw_grid(self.size, grid, "_")


# ------------------------------------------------------------------------------------------ sokoban
class Sokoban(Env):
    """Push all boxes onto targets.

    Rewards: -0.1 for every action, +1 when a box is pushed onto a target, -1 when it is pushed off,
    +10 when all are on. So a level of one box, solved in n actions, pays 11 - 0.1 n.
    State: (player, boxes), the boxes sorted.
    Symbols: # wall, _ floor, O target, X box, √ box on target, P you, S you on a target.
    """
    actions = tuple(MOVES)

    def __init__(self, size=6, boxes=1, symbols="#_OX√PS"):
        self.size = size
        self.draw_args = (size, boxes)
        self.symbols = symbols
        self.instruction = (
            "You are solving a Sokoban puzzle. Push every box onto a target by walking into it; it "
            "cannot be pulled. Symbols: {} wall, {} floor, {} target, {} box, {} box on target, "
            "{} you, {} you on target. Actions: Up, Down, Left, Right.").format(*symbols)

    @staticmethod
    def draw(rng, size, boxes):
        """Carve a room, put boxes on the targets, and play *backwards*, so that it can be solved.

        Layer k holds all states that need k actions, not fewer. For example, in a corridor of four
        cells with the target at its right end:
            layer 0    P _ _ √    _ P _ √    _ _ P √      solved
            layer 1    _ P X O
            layer 2    P _ X O    P X _ O
        We draw k (1 to 8 with one box, 4 to 16 with two), then a state of layer k. If this room has
        no such state, find_level tries again.
        """
        floor = sorted(carve(rng, size))  # sorted, so that a seed always gives the same level
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
        if not layer:
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
        return draw_grid(self.size, grid, wall)


def carve(rng, size):  # -> set of cells
    """A random walk inside the walls, and neighbours of its cells.

    Its length and its chance of a turn are those of gym-sokoban.
    """
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


def undo(state, floor):
    """Yields all other states from which one action leads to `state`.

    now                                          _ P X
    before, if the player walked right           P _ X
    before, if it walked right and pushed a box  P X _
    """
    player, boxes = state
    for action in MOVES:
        back, ahead = shift(player, action, -1), shift(player, action)
        if back in floor and back not in boxes:
            yield back, boxes
            if ahead in boxes:
                yield back, tuple(sorted({player, *boxes} - {ahead}))


# -------------------------------------------------------------- yardsticks: random and optimal play
def yardsticks(env, horizon):  # -> (2, horizon + 1)
    """The chance that random play and optimal play succeed within 0, 1, ..., horizon actions.

    Both are exact, because all probabilities are known. Looking one action ahead, random play gets
    the mean over all actions of what each is worth, optimal play the maximum.
    For the room at the top and 10 actions these are 0.04 and 1.00.
    NOTE: optimal play looks at the state after every action, a model only once a turn.
    """
    outcomes = cache(env.outcomes)  # many paths lead to the same state

    @cache
    def value(state, left, combine):  # the chance of success with `left` actions left
        if left == 0:
            return float(env.won(state))
        by_action = []
        for action in env.actions:
            mean = 0.0
            for p, new, _, over in outcomes(state, action):
                mean += p * value(new, 0 if over else left - 1, combine)
            by_action.append(mean)
        return combine(by_action)

    random = [value(env.state, left, fmean) for left in range(horizon + 1)]
    optimal = [value(env.state, left, max) for left in range(horizon + 1)]
    return np.array([random, optimal])


def mean_yardsticks(name, horizon, seeds=EVAL_SEEDS, success_rate=None):  # -> (2, horizon + 1)
    if horizon > 200:  # the recursion goes so deep
        raise ValueError(f"Optimal play is known for 200 actions at most, not for {horizon}.")
    return yardsticks_of_class(find_class(name), horizon, seeds, success_rate)


@lru_cache  # by class, so that those of a file that was edited are calculated anew
def yardsticks_of_class(env_class, horizon, seeds, success_rate):  # -> (2, horizon + 1)
    env = make(env_class, success_rate)
    curves = []
    for seed in seeds:
        env.reset(seed)
        curves.append(yardsticks(env, horizon))
    return np.mean(curves, axis=0)


# ----------------------------------------------------------------------------- environments by name
# Does skill carry over to a variant? python ragen_mini.py --model RUN --env bandit_test --eval-only
ENVS = {
    "bandit": Bandit,
    "bandit_test": partial(Bandit, sure="Librarian", risky="Trader"),
    "bandit_rev": partial(Bandit, sure="Trader", risky="Librarian"),  # the names mislead
    "sokoban": Sokoban,
    "sokoban_large": partial(Sokoban, size=8, boxes=2),
    "sokoban_newvocab": partial(Sokoban, symbols="W.GBCA@"),  # the same rooms
    "frozenlake": FrozenLake,
}


def make(name, success_rate=None):  # -> Env
    """name: a key of ENVS, or FILE.py:CLASS, or the class itself.

    success_rate is for lakes. If it is None, they keep their own.
    """
    env_class = find_class(name)
    try:
        env = env_class()
    except TypeError as error:
        raise EnvError(f"{title(name)} cannot be made without arguments: {error}") from error
    if not hasattr(env, "outcomes"):
        raise EnvError(f"{title(name)} must be a class made from envs.Env.")
    if success_rate is not None and hasattr(env, "success_rate"):
        env.success_rate = success_rate
    return env


def find_class(name):
    known = ENVS.get(name, name)
    if isinstance(known, (type, partial)):
        return known
    file, _, class_name = str(name).rpartition(":")
    if not file:
        raise EnvError(f"{name} is no environment. Choose one of {', '.join(ENVS)}, or give "
                       f"FILE.py:CLASS for one of your own.")
    if not Path(file).is_file():
        raise EnvError(f"There is no file {file} for {name}.")
    defined = run_file(Path(file).resolve(), Path(file).stat().st_mtime_ns)
    if not callable(defined.get(class_name)):
        raise EnvError(f"{file} does not define a class {class_name}.")
    return defined[class_name]


@lru_cache  # running a file twice would define two classes of the same name
def run_file(file, changed_at):  # -> what it defines: {name: object}
    """changed_at: when the file was changed. If that is another time, it is run again."""
    if file == Path(sys.argv[0]).resolve():  # the script that is running
        return vars(sys.modules["__main__"])
    sys.path.append(str(file.parent))  # it may import its neighbours
    return runpy.run_path(str(file))


def title(name):  # -> "Guess" of "folder/my_world.py:Guess" or of the class Guess
    return getattr(name, "__name__", str(name)).rpartition(":")[2]


if __name__ == "__main__":
    budgets = (1, 2, 5, 10, 15)
    print("Success in % on the held-out levels, random / optimal, by number of actions")
    print(f"{'actions:':18}" + "".join(f"{budget:>13}" for budget in budgets))
    for name in ENVS:
        random, best = 100 * mean_yardsticks(name, max(budgets))
        print(f"{name:18}", *(f"{random[budget]:5.1f} /{best[budget]:5.1f}" for budget in budgets))
