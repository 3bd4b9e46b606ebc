"""Bandit, Sokoban and FrozenLake, the worlds of RAGEN (arXiv 2504.20073, Sec. 3.1, App. B.1), as text.

A world has a state, takes an action, and answers with a new state and a reward. All of its rules are in one function:

    env.outcomes(state, action) -> [(probability, next state, reward, over?), ...]    first the one that was intended

For example, a move on ice, from cell (1, 0) to the right, that may go astray (no hole or goal is near):

    [(0.8, (1, 1), 0.0, False), (0.1, (2, 0), 0.0, False), (0.1, (0, 0), 0.0, False)]

`step` rolls the dice among them; a level of Sokoban:

    env = make("sokoban")
    obs, info = env.reset(seed=7, options={"episode": 3})

        # # # # # #
        # _ P _ _ #        P: the player; X: a box, to be pushed onto O, the target; #: walls; _: floor
        # _ _ # _ #
        # _ # # # #        env.state is ((1, 2), ((4, 2),)): cells (row, column) of the player and of the boxes
        # _ X O # #        env.level is what stays fixed: floor and targets
        # # # # # #

    env.outcomes(env.state, "Down") -> [(1.0, ((2, 2), ((4, 2),)), -0.1, False)]
    obs, reward, terminated, truncated, info = env.step("Down")    # truncated: never, the caller counts actions

`seed` fixes the level, so that a group of episodes can start alike, to be compared. `episode`, its number in the group,
seeds its own dice: slips and pay-outs. Nothing touches a global random state.

From `outcomes` follow `yardsticks`, the success of random and of optimal play, beside which every success of this project
is printed, and `solve`, a shortest solution:

    yardsticks(env, 10)[:, 10] -> [0.04, 1.00]                     # in 10 actions
    solve(env) -> ["Down", "Left", "Down", "Down", "Right"]

    python envs.py                          the yardsticks of every world, by number of actions
    python envs.py play sokoban 7           play level 7: you read what the language model reads
    python envs.py check my_world.py:Guess  can a world of your own be trained in?
"""
import argparse
import contextlib
import itertools
import math
import re
import runpy
import string
import sys
import traceback
import zlib
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean

import numpy as np

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
EVAL_SEEDS = range(256)  # these seeds give evaluation levels, all others training levels (see `split`)


# Messages to the user, and two tools of the worlds
class UserError(Exception):
    """Something that the user can put right. The command line prints it as one line and exits with code 2."""


def need(condition, message):
    if not condition:
        raise UserError(message)


def shift(cell, move, times=1):
    """shift((2, 2), "Up") -> (1, 2)"""
    down, right = MOVES[move]
    return cell[0] + times * down, cell[1] + times * right


def picture(size, symbols, elsewhere):
    """A square of symbols; `symbols` maps cells to theirs, all other cells get `elsewhere`."""
    lines = []
    for row in range(size):
        line = [symbols.get((row, col), elsewhere) for col in range(size)]
        lines.append(" ".join(line))
    return "\n".join(lines)


# ------------------------------------------------------------------------------------ what the worlds share
class Env:
    """The base of all worlds. After `reset` self.level is what stays fixed in an episode, self.state what changes. A
    world adds four methods:

        draw(rng, *draw_args)       -> (level, initial state); or None, to be called again with other numbers. A
                                       staticmethod: a level depends on the seed alone, so that find_level can keep it
        outcomes(state, action)     -> [(probability, next state, reward, over?), ...], what was intended comes first
        won(state)                  -> True or False
        render()                    -> self.state as text
    """
    instruction = ""  # the task in words
    actions = ()      # the words that `step` takes
    draw_args = ()    # what `draw` gets besides rng
    split = True      # hold out a quarter of the levels? A world with a handful of levels cannot
    over = True       # so that `step` fails before `reset`

    # An extra, for `claims` in the second part: what may thoughts say of the world's things, and what is true of them?
    claim = None  # a regular expression; None: where they are, such as "2 up and 1 left"

    def facts(self):  # -> {thing: what is true of it now}
        return {}

    # `reset` and `step` have Gymnasium's form: the observation is what `render` says, info a dict with "success"
    def reset(self, seed=None, options=None):  # -> observation, info
        """Without a seed: some level that is not held out."""
        if seed is None:
            seed = int(np.random.default_rng().integers(len(EVAL_SEEDS), 2 ** 31))
        episode = (options or {}).get("episode", 0)
        self.level, self.state = find_level(type(self), self.draw_args, seed)
        self.dice = np.random.default_rng([seed, episode, 1])  # the 1 keeps them apart from those that drew the level
        self.over = False
        return self.render(), {"success": False}

    def step(self, action):  # -> observation, reward, terminated, truncated (always False), info
        assert action in self.actions, f"{action!r} is not one of {self.actions}"
        assert not self.over, "the episode is over: call reset"
        outcomes = self.outcomes(self.state, action)
        chances = [chance for chance, _, _, _ in outcomes]
        chosen = self.dice.choice(len(outcomes), p=chances)
        _, self.state, reward, over = outcomes[chosen]
        self.over = bool(over)  # a world may use NumPy's numbers, a log wants Python's
        return self.render(), float(reward), self.over, False, {"success": bool(self.won(self.state))}


TRIES = 1000  # to draw a level that is solvable, and held out or not as the seed wants it


@lru_cache(maxsize=8192)  # a group shares its level, and so do all evaluations
def find_level(world, draw_args, seed):  # -> level, initial state
    """The level of a seed (remembered, so do not change what it returns). Different seeds may draw the same level, so
    separate seeds do not keep evaluation levels out of training. So the level itself decides: a hash puts a quarter of
    all levels on the held-out side, and each seed draws until its level is on its own side (EVAL_SEEDS: held out)."""
    for attempt in range(TRIES):
        drawn = world.draw(np.random.default_rng([seed, attempt]), *draw_args)
        if drawn is None:  # not solvable, for example
            continue
        if not world.split:
            return drawn
        held_out = zlib.crc32(repr(drawn).encode()) % 4 == 0  # Python's own `hash` differs from process to process
        if held_out == (seed in EVAL_SEEDS):
            return drawn
    raise UserError(f"{world.__name__}: {TRIES} tries gave no level for seed {seed}. Does `draw` return None too often? "
                    "Or are there so few levels that none can be held out? Then write split = False")


# --------------------------------------------------------------------------------------------------- bandit
class Bandit(Env):
    """Two arms, known by names that hint at which is which; one pull. The sure one always pays 0.15 (RAGEN's code: 0.1),
    the risky one 1 with probability 0.25, on average more. Success is the better decision, the risky arm, whatever it
    pays. State: None before the pull, then the name of the arm that was pulled. The seed shuffles the order."""
    split = False  # there are only two levels
    claim = "safe|risky"

    def __init__(self, sure, risky):
        self.sure = sure
        self.risky = risky
        self.actions = (sure, risky)
        self.draw_args = (sure, risky)
        self.instruction = (
            "You are playing a bandit game with two arms. The name of an arm hints at its rewards: one pays "
            "a small sure reward, the other is risky but pays more on average. Answer with the arm to pull.")

    @staticmethod
    def draw(rng, sure, risky):
        if rng.random() < 0.5:
            return {"shown": (sure, risky)}, None
        return {"shown": (risky, sure)}, None

    def outcomes(self, state, action):
        if action == self.sure:
            return [(1.0, self.sure, 0.15, True)]
        return [(0.75, self.risky, 0.0, True), (0.25, self.risky, 1.0, True)]

    def won(self, state):
        return state == self.risky

    def render(self):
        if self.state is None:
            first, second = self.level["shown"]
            return f"The arms are {first} and {second}."
        return f"You pulled {self.state}."

    def facts(self):
        return {self.sure: "safe", self.risky: "risky"}


# ---------------------------------------------------------------------------------------------- frozen lake
class FrozenLake(Env):
    """Reach the goal over ice: P you, _ ice, O hole, G goal; X you in a hole, √ you at the goal. State: the player's
    cell. The ice obeys with probability `success_rate` (paper: 1/3; later code: 0.8; the name is gymnasium's); the two
    perpendicular moves share the rest. Goal (+1) and holes end it."""
    actions = ("Left", "Down", "Right", "Up")  # in this circle the ones before and after an action are perpendicular

    def __init__(self, size=4, frozen=0.8, success_rate=1 / 3):
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
        outcomes = []
        for chance, rotation in ((self.success_rate, 0), (slip, -1), (slip, 1)):
            row, col = shift(state, self.actions[(intended + rotation) % 4])
            last = self.size - 1
            cell = min(max(row, 0), last), min(max(col, 0), last)  # one stays on the ice at its edge
            won = self.won(cell)
            outcomes.append((chance, cell, float(won), won or cell in self.level["holes"]))
        return outcomes

    def won(self, state):
        return state == self.level["goal"]

    def render(self):
        grid = dict.fromkeys(self.level["holes"], "O")
        grid[self.level["goal"]] = "G"
        under = grid.get(self.state)
        grid[self.state] = {"O": "X", "G": "√", None: "P"}[under]
        return picture(self.size, grid, "_")

    def facts(self):
        return {"goal": offset(self.state, self.level["goal"])}


# -------------------------------------------------------------------------------------------------- sokoban
class Sokoban(Env):
    """Push every box onto a target: # wall, _ floor, O target, X box, √ box on target, P you, S you on target.
    State: (player, boxes), the boxes sorted. Reward: -0.1 per action, +1 / -1 for a push that puts a box on / takes it
    off a target, +10 when all are on. So one box, solved in n actions, returns 11 - 0.1 n."""
    actions = tuple(MOVES)

    def __init__(self, size=6, boxes=1, symbols="#_OX√PS"):
        self.size = size
        self.draw_args = (size, boxes)
        self.symbols = symbols
        self.instruction = (
            "You are solving a Sokoban puzzle. Push every box onto a target by walking into it; it cannot be "
            "pulled. Symbols: {} wall, {} floor, {} target, {} box, {} box on target, {} you, {} you on "
            "target. Actions: Up, Down, Left, Right.").format(*symbols)

    def outcomes(self, state, action):
        floor, targets = self.level["floor"], self.level["targets"]
        player, boxes = state
        to, beyond = shift(player, action), shift(player, action, 2)
        nothing_moves = [(1.0, state, -0.1, False)]  # but the action is spent
        if to not in floor:
            return nothing_moves
        if to not in boxes:
            return [(1.0, (to, boxes), -0.1, False)]
        if beyond not in floor or beyond in boxes:
            return nothing_moves
        boxes = tuple(sorted({beyond, *boxes} - {to}))
        solved = boxes == targets
        bonus = int(beyond in targets) - int(to in targets) + 10 * int(solved)
        return [(1.0, (to, boxes), -0.1 + bonus, solved)]

    def won(self, state):
        return state[1] == self.level["targets"]

    def render(self):
        wall, floor, target, box, box_on_target, you, you_on_target = self.symbols
        player, boxes = self.state
        grid = dict.fromkeys(self.level["floor"], floor)
        grid.update(dict.fromkeys(boxes, box))
        grid[player] = you
        on_target = {floor: target, box: box_on_target, you: you_on_target}
        for cell in self.level["targets"]:
            grid[cell] = on_target[grid[cell]]
        return picture(self.size, grid, wall)

    def facts(self):
        player, boxes = self.state
        if len(boxes) > 1:  # which one would be meant?
            return {}
        target, = self.level["targets"]
        return {"box": offset(player, boxes[0]), "target": offset(boxes[0], target)}  # the target as seen from the box

    @staticmethod
    def draw(rng, size, boxes):
        return sokoban_level(rng, size, boxes)  # in the second part: it walks backwards from a solved room


# ---------------------------------------------------------------------------------------------- names of worlds
ENVS = {  # those with longer names are for evaluation: does what was learnt carry over?
    "bandit": partial(Bandit, sure="Teacher", risky="Engineer"),
    "bandit_test": partial(Bandit, sure="Librarian", risky="Trader"),
    "bandit_rev": partial(Bandit, sure="Trader", risky="Librarian"),  # the names mislead
    "sokoban": Sokoban,
    "sokoban_large": partial(Sokoban, size=8, boxes=2),
    "sokoban_newvocab": partial(Sokoban, symbols="W.GBCA@"),  # the same rooms
    "frozenlake": FrozenLake,
}
BUILT_IN = tuple(ENVS)  # these need no `check`


def make(name, success_rate=1 / 3):
    """make("sokoban"), or make("frozenlake", success_rate=0.8). Other worlds than the lake ignore success_rate."""
    world = find_world(name)  # mostly ENVS[name]; the second part finds worlds of your own, too
    if world is FrozenLake:
        return FrozenLake(success_rate=success_rate)
    return world()


# ----------------------------------------------------------------------------------- solver and yardsticks
def solve(env):
    """A shortest list of actions from env.state to success (FrozenLake: as if nothing slipped), or None. To be called
    before the level is won."""
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


def yardsticks(env, horizon):  # -> (2, horizon + 1): success of random and of optimal play in 0, 1, ... actions
    """Exact, by recursion:

        chance(state, 0)    = 1 if won(state), else 0
        chance(state, left) = the mean over actions (random play), or their maximum (optimal play), of
                              sum over outcomes of p times chance(next state, left - 1)
                              (where the episode is over no actions are left: 1 or 0)

    Elsewhere this is called a value function. Here the dice are known, so that it can be calculated; PPO's critic must
    learn a similar one (of the return, of the model's own play) from samples.

    Bandit, one action: Teacher leads to a state that is lost, Engineer to one that is won (it is the better decision,
    whatever it pays). The chances are 0 and 1: 0.5 for the random player, 1 for the best one."""
    outcomes = remembered(env, horizon)  # env.outcomes with a memory (second part)

    @lru_cache(maxsize=None)  # many paths lead to the same state
    def chance(state, left, combine):  # of success, with so many actions left
        if left == 0:
            return float(env.won(state))
        by_action = []
        for action in env.actions:
            mean = 0.0
            for p, new, _, over in outcomes(state, action):
                mean += p * chance(new, 0 if over else left - 1, combine)
            by_action.append(mean)
        return combine(by_action)

    curves = []
    for combine in (fmean, max):
        curves.append([chance(env.state, left, combine) for left in range(horizon + 1)])
    return np.array(curves)


# ===========================================================================================================
# END OF THE FIRST READING. Worth reading some day: how Sokoban's levels are drawn. The rest is housekeeping: thoughts,
# yardsticks of a run, worlds of your own, the command line
# ===========================================================================================================
# ------------------------------------------------------------------------------------- how Sokoban's levels are drawn
def sokoban_level(rng, size, boxes):  # -> (level, initial state), or None
    """Carve a room, put the boxes on the targets, then walk *backwards*. Layer k: all states that need k actions to
    be solved, and no fewer. In a corridor of four cells with the target at its right end:

        layer 0    P _ _ √    _ P _ √    _ _ P √      solved
        layer 1    _ P X O
        layer 2    P _ X O    P X _ O

    Draw k, then a state of layer k. One box: k = 1 to 8; a room without a layer k is given up together with its k, so
    that small k survive more often: the median is 3 to 4 actions, as in gym-sokoban. Two boxes: 4 to 16, so that most
    often both must be moved."""
    floor = sorted(carve(rng, size))  # a set has no order, and a seed must always give the same level
    if len(floor) <= 3 * boxes:  # hardly any room to push
        return None
    places = rng.choice(len(floor), boxes, replace=False)
    targets = tuple(sorted(floor[i] for i in places))
    layer = [(player, targets) for player in floor if player not in targets]
    visited = set(layer)
    fewest, most = (1, 8) if boxes == 1 else (4, 16)
    k = rng.integers(fewest, most + 1)
    for _ in range(k):  # from layer 0 to layer k
        earlier = set()
        for state in layer:
            earlier.update(undo(state, floor))
        layer = sorted(earlier - visited)  # without those that need fewer
        visited.update(layer)
    if not layer:  # this room has no state that needs so many
        return None
    return {"floor": tuple(floor), "targets": targets}, layer[rng.integers(len(layer))]


def carve(rng, size):  # -> set of cells
    """The floor: a random walk inside the outer walls that takes in a random neighbour at each step. The length of
    the walk and the chance of a new direction are gym-sokoban's."""
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
    """Every state from which one action leads to `state`: the player steps back, alone or pulling a box.

        now  _ P X    before that  P _ X (it walked right)    or    P X _ (it pushed the box to the right)
    """
    player, boxes = state
    for action in MOVES:
        back, ahead = shift(player, action, -1), shift(player, action)
        if back in floor and back not in boxes:
            yield back, boxes
            if ahead in boxes:
                yield back, tuple(sorted({player, *boxes} - {ahead}))


# ------------------------------------------------------------------------------------- is a thought true?
def offset(a, b):
    """offset((0, 0), (2, 1)) -> "2 down and 1 right" """
    down, right = b[0] - a[0], b[1] - a[1]
    parts = []
    for steps, word in ((-down, "up"), (down, "down"), (-right, "left"), (right, "right")):
        if steps > 0:
            parts.append(f"{steps} {word}")
    return " and ".join(parts)


WHERE = r"\b\d (up|down)( and \d (left|right))?|\b\d (left|right)"  # what `offset` says, as a regular expression


def claims(env, thought):  # -> [(what it says, is that true?), ...]
    """Every sentence that says of one of the world's things where or what it is. "I see the box, it is 1 left. The target
    is 2 up of it." makes two claims, the first one about the box."""
    true = env.facts()
    found = []
    for sentence in re.split("[.?!]", thought):
        said = re.search(env.claim or WHERE, sentence)
        named = [name for name in true if name in sentence]
        if said and named:
            subject = min(named, key=sentence.index)  # "the target is 2 up of the box": about the target
            found.append((said[0], said[0] == true[subject]))
    return found


# ------------------------------------------------------------------- yardsticks of many levels, as a run needs them
def mean_yardsticks(name, horizon, levels=len(EVAL_SEEDS), success_rate=1 / 3):  # -> (2, horizon + 1)
    """`yardsticks`, averaged over the evaluation levels. (success_rate: of the ice, see FrozenLake.)"""
    return of_all_levels(name, find_world(name), horizon, levels, success_rate).mean(axis=0)


@lru_cache  # `world` is only a key: a class that is defined anew in a notebook is calculated anew
def of_all_levels(name, world, horizon, levels, success_rate):  # -> (levels, 2, horizon + 1)
    # More could exceed Python's recursion limit.
    need(horizon <= 200, f"exact yardsticks are calculated for 200 actions at most, not {horizon}: lower --max-actions")
    env = make(name, success_rate)
    curves = []
    for seed in EVAL_SEEDS[:levels]:
        env.reset(seed)
        curves.append(yardsticks(env, horizon))
    return np.array(curves)


def yardsticks_of_run(name, settings):  # -> random, optimal
    """`mean_yardsticks` for levels and number of actions of a run; `settings`: as in its config.json. Optimal play
    looks before every action, a model only once a turn: for the model it is an upper bound."""
    in_turns = settings["max_turns"] * settings["max_actions_per_turn"]
    horizon = min(settings["max_actions"], in_turns)
    curves = mean_yardsticks(name, horizon, settings["eval_prompts"], settings["success_rate"])
    return curves[:, -1]


MOST_STATES = 20_000  # of a level: more would take hours


def remembered(env, horizon):  # -> a function as env.outcomes, which asks it only once
    known = {}
    most = MOST_STATES * len(env.actions)

    def outcomes(state, action):
        if (state, action) not in known:
            need(len(known) < most, f"{type(env).__name__}: {horizon} actions lead to more than {MOST_STATES} states, "
                 "too many for exact yardsticks: make it smaller, or lower --max-actions")
            known[state, action] = env.outcomes(state, action)
        return known[state, action]
    return outcomes


def interval(p, n, z=1.96):
    """Wilson's 95% interval of a share p that was seen in n episodes; it stays inside 0..1 -> low, high."""
    shrink = 1 + z * z / n
    center = (p + z * z / (2 * n)) / shrink
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    return min(p, center - half), max(p, center + half)  # rounding must not put p = 0 or 1 outside


# ------------------------------------------------------------------------------------- a world of your own
WRITABLE = "Up, Down, Left, Right (and, of a bandit's arms, Teacher, Engineer, Librarian, Trader)"  # what tiny was taught
NUMBER = (int, float, np.generic)


@contextlib.contextmanager
def blame(name):
    """Whatever goes wrong in a user's own code becomes one line that says where."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        file = str(name).rpartition(":")[0] or name
        places = [place for place in traceback.extract_tb(error.__traceback__) if place.filename == file]
        where = f" in {places[-1].name}, line {places[-1].lineno}" if places else ""  # the user's line, not one of ours
        reason = " ".join(str(error).split())
        raise UserError(f"{name}: {type(error).__name__}{where}: {reason}") from error


@lru_cache  # once: a world that was loaded twice would be two worlds
def run_file(file):  # -> what it defines
    with blame(file):
        return runpy.run_path(file)


def title(name):
    """title("worlds/my_world.py:Guess") -> "Guess" """
    return name.rpartition(":")[2]


def find_world(name):  # -> what makes the world when it is called
    """A name of ENVS, or file.py:Class for a world of your own. NOTE: the file is run."""
    if isinstance(name, type):  # a class, in a notebook
        return name
    if name in ENVS:
        return ENVS[name]
    file, _, class_name = name.rpartition(":")
    need(file.endswith(".py"), f"{name}: choose {', '.join(ENVS)}, or my_world.py:Class")
    need(Path(file).is_file(), f"{name}: there is no file {file} here")
    found = run_file(file)
    need(class_name in found, f"{name}: {file} does not define {class_name}")
    return found[class_name]


def check(name, tok=None, horizon=10):
    """Can this world be trained in? If not, a UserError says what to change; else a line says what to know about it.
    With a tokenizer: does the model know the words?"""
    with blame(name):
        env = make(name)
        check_class(name, env)
        check_draw(name, env)
        texts = []
        levels = {True: set(), False: set()}  # held out; to train in
        for seed in (*EVAL_SEEDS, *range(1000, 1000 + len(EVAL_SEEDS))):
            env.reset(seed)
            texts.append(env.render())
            levels[seed in EVAL_SEEDS].add(repr((env.level, env.state)))
            if seed % 8 == 0:
                check_states(name, env)
        success = of_all_levels(name, find_world(name), horizon, len(EVAL_SEEDS), 1 / 3)[:, :, -1]
    random, optimal = success.mean(axis=0)
    hopeless = int((success[:, 1] == 0).sum())
    need(optimal > 0, f"{name}: no level can be won in {horizon} actions: is `won` True of any state within reach?")
    print(f"{name}: success in {horizon} actions, random {random:.2f}, optimal {optimal:.2f}")
    if hopeless:
        print(f"  {hopeless} of {len(EVAL_SEEDS)} levels cannot be won in so many")
    held_out, trained = len(levels[True]), len(levels[False])
    if env.split and held_out < 20:
        print(f"  only {held_out} levels are held out, {trained} are trained in: split = False would hold out none")
    if tok is not None:
        unknown = check_words(name, env.actions, texts, tok)
        if unknown:
            print(f"  {len(unknown)} words of `render` look alike to the model: {' '.join(unknown)[:200]}")


def check_class(name, env):
    ours = isinstance(env, Env) and type(env).reset is Env.reset and type(env).step is Env.step
    need(ours, f"{name}: it must be a class of its own (envs.Env) that has `draw`, and no other `reset` or `step`")
    said = isinstance(env.instruction, str) and env.instruction.strip()
    need(said, f"{name}: `instruction` must tell the model its task, it is {env.instruction!r}")
    words = isinstance(env.actions, (tuple, list)) and all(isinstance(word, str) for word in env.actions)
    need(words and env.actions, f"{name}: `actions` is {env.actions!r}, not a tuple of words")
    for action in env.actions:
        alike = [other for other in env.actions if other.lower() == action.lower()]
        plain = action and action == action.strip() and "||" not in action and len(alike) == 1
        need(plain, f"{name}: the action {action!r} is empty, has || or outer blanks, or is there twice (capitals?)")


def check_draw(name, env):
    for seed in range(20):
        one, other = [type(env).draw(np.random.default_rng(seed), *env.draw_args) for _ in range(2)]
        pair = one is None or (isinstance(one, tuple) and len(one) == 2)
        need(pair, f"{name}: `draw` must return what stays fixed and the initial state, it returned {one!r}")
        need(repr(one) == repr(other), f"{name}: `draw` gave {one!r}, then for the same seed {other!r}: it may use no "
             "dice but `rng`, and plain values")


def check_states(name, env, most=100):
    """`outcomes`, `won` and `render` in the states that can be reached from env.state, nearest first."""
    start = env.state
    check_hashable(name, start)
    queue = [(start, False)]
    visited = {start}
    for state, over in queue:  # the list grows while we walk along it
        env.state, env.over = state, over
        text = env.render()
        need(isinstance(text, str) and text.strip(), f"{name}: `render` must return text, it returned {text!r}")
        need("\n\n" not in text, f"{name}: `render` must return one paragraph, without an empty line: {text!r}")
        claims(env, text)  # `facts` and `claim`, if the world has them
        won = env.won(state)
        need(isinstance(won, (bool, np.bool_)), f"{name}: `won` must return True or False, it returned {won!r}")
        env.state = start
        need(env.won(state) == won, f"{name}: `won` must look at its argument, not at self.state")
        if over:
            continue
        for action in env.actions:
            env.state = state
            for _, new, _, ends in check_outcomes(name, env, action, start):
                if new not in visited and len(visited) < most:
                    visited.add(new)
                    queue.append((new, ends))


def check_outcomes(name, env, action, start):  # -> env.outcomes(env.state, action)
    state = env.state
    place = f"{name}: outcomes({state!r}, {action!r})"
    outcomes = env.outcomes(state, action)
    shape = isinstance(outcomes, list) and all(len(outcome) == 4 for outcome in outcomes)
    need(shape, f"{place} must be a list of (probability, next state, reward, over?), it is {outcomes!r}")
    for chance, new, reward, _ in outcomes:
        numbers = isinstance(chance, NUMBER) and isinstance(reward, NUMBER) and math.isfinite(reward)
        need(numbers and 0 <= chance <= 1, f"{place}: {chance!r} is no probability, or {reward!r} no reward")
        check_hashable(name, new)
    total = sum(chance for chance, _, _, _ in outcomes)
    need(abs(total - 1) < 1e-6, f"{place}: the probabilities sum to {total:.3g}, not to 1")
    need(env.state == state, f"{place} must not change self.state: `step` rolls the dice and moves")
    env.state = start
    same = env.outcomes(state, action) == outcomes
    need(same, f"{place}: asked again, with another self.state, it must say the same: what it says follows from its "
         "arguments and the level")
    return outcomes


def check_hashable(name, state):
    try:
        hash(state)
    except TypeError:
        raise UserError(f"{name}: the state {state!r} must be hashable, such as a word, or a tuple of numbers") from None


def check_words(name, actions, texts, tok):  # -> words of the texts that the tokenizer lacks
    for action in actions:
        back = tok.decode(tok(action, add_special_tokens=False).input_ids).strip()
        need(back.lower() == action.lower(), f"{name}: the model cannot write the action {action!r} (its tokenizer "
             f"makes {back!r} of it): choose others. tiny writes {WRITABLE}")
    words = sorted({word for text in texts for word in text.split()})
    return [word for word in words if set(tok(word, add_special_tokens=False).input_ids) == {tok.unk_token_id}]


def to_gymnasium(name, success_rate=1 / 3):
    """The world as a gymnasium.Env: it gives text and takes the number of an action. Held-out levels do not occur. It
    never truncates (gymnasium.wrappers.TimeLimit does), and the task in words is its `world.instruction`."""
    import gymnasium  # only here, and not in requirements.txt

    class World(gymnasium.Env):
        metadata = {"render_modes": ["ansi"]}
        render_mode = "ansi"
        world = make(name, success_rate)
        action_space = gymnasium.spaces.Discrete(len(world.actions))
        observation_space = gymnasium.spaces.Text(10_000, charset=string.printable + "√")

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.world.reset(int(self.np_random.integers(len(EVAL_SEEDS), 2 ** 31)), options)

        def step(self, action):
            return self.world.step(self.world.actions[action])

        def render(self):
            return self.world.render()
    return World()


# --------------------------------------------------------------------------------------------- the command line
def print_table(budgets=(1, 2, 5, 10, 15)):
    print(f"Success in % on {len(EVAL_SEEDS)} evaluation levels, random / optimal, by number of actions")
    print(" " * 18 + "".join(f"{budget:>13}" for budget in budgets))
    for name, rate in [*itertools.product(ENVS, [1 / 3]), ("frozenlake", 0.8)]:
        random, best = 100 * mean_yardsticks(name, max(budgets), success_rate=rate)
        cells = [f"{random[budget]:5.1f} /{best[budget]:5.1f}" for budget in budgets]
        title = f"{name} 0.8" if rate == 0.8 else name
        print(f"{title:18}", *cells)


def play(name, seed):
    env = make(name)
    obs, _ = env.reset(seed)
    print(f"{env.instruction}\n\n{obs}")
    while not env.over:
        try:
            word = input(f"\n{' / '.join(env.actions)} (or its start; empty: stop): ").strip().lower()
        except (EOFError, RuntimeError):  # the input ended, or there is none
            word = ""
        if not word:
            return
        meant = [action for action in env.actions if action.lower().startswith(word)]
        if meant:
            obs, reward, _, _, info = env.step(min(meant, key=len))  # "up" may be the start of "upstairs", too
            print(f"\n{obs}\nreward {reward:.2f}")
    print("solved!" if info["success"] else "over.")


def main(argv=None):
    parser = argparse.ArgumentParser("envs.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda text: need(False, f"{text} (--help shows how)")
    parser.add_argument("what", nargs="?", default="table", choices=["table", "play", "check"])
    parser.add_argument("world", nargs="?", default="sokoban", help="a name of the table, or my_world.py:Class")
    parser.add_argument("level", nargs="?", type=int, default=0)
    try:
        args = parser.parse_args(argv)
        need(args.level >= 0, f"level {args.level}: at least 0")
        if args.what == "table":
            print_table()
        elif args.what == "check":
            check(args.world)
        else:
            with blame(args.world):
                play(args.world, args.level)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, OSError) as error:  # a closed pipe, for example
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    with contextlib.suppress(AttributeError):  # a notebook's output has no such method
        sys.stdout.reconfigure(errors="replace")  # not every terminal has a √
    sys.modules["envs"] = sys.modules["__main__"]  # `import envs` in your world means this, not a second copy
    main()
