"""Bandit, Sokoban and FrozenLake: the worlds of RAGEN (arXiv 2504.20073, Sec. 3.1, App. B.1), as text.

    obs, info = env.reset(seed=7, options={"noise": 3})           # Gymnasium's shape, without the dependency
    obs, reward, terminated, truncated, info = env.step("Right")  # info["success"]; the caller counts actions

`seed` fixes the initial state, one for a whole group of rollouts; `noise` fixes slips and pay-outs. Nothing
touches a global random state. Every world is a pure function, from which `step` merely samples,

    env.outcomes(state, action) -> [(probability, next state, reward, terminated), ...]  the intended first

and which also gives `solve` (breadth-first search) and `yardsticks` (exact success of random, optimal play).

    python envs.py                   the yardsticks of every world, by number of actions
    python envs.py play sokoban 7    play level 7: you read what the language model reads
"""
import itertools, math, sys, zlib
from functools import lru_cache

import numpy as np

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
EVAL_SEEDS = range(256)  # these seeds give evaluation levels, all others training levels

def picture(size, symbol):
    return "\n".join(" ".join(symbol((row, col)) for col in range(size)) for row in range(size))

def shift(cell, way, times=1):  # shift((2, 2), "Up") -> (1, 2)
    return cell[0] + times * MOVES[way][0], cell[1] + times * MOVES[way][1]

def way(a, b):  # way((0, 0), (2, 1)) -> "2 down and 1 right"
    moves = zip((b[0] - a[0], b[1] - a[1]), (("up", "down"), ("left", "right")))
    return " and ".join(f"{abs(d)} {ways[d > 0]}" for d, ways in moves if d)

@lru_cache(maxsize=8192)  # a group shares its level, and so do all evaluations
def find_level(world, spec, seed):
    """The level of a seed; one that is rejected is redrawn, reproducibly. A quarter of all levels, chosen by
    content, is held out for evaluation: no training seed can ever draw one of them."""
    for attempt in itertools.count():
        level = world.draw(np.random.default_rng([seed, attempt]), *spec)
        held_out = zlib.crc32(repr(level).encode()) % 4 == 0
        if level is not None and (not world.split or held_out == (seed in EVAL_SEEDS)):
            return level

class Env:
    """What the worlds share. A world adds `draw`, `outcomes`, `render` and `goal`, a state (or `won`)."""
    instruction = ""  # the task in words
    actions = ()      # the words that `step` takes
    spec = ()         # the arguments of `draw`
    split = True      # hold out a quarter of the levels?

    def reset(self, seed=0, options=None):  # -> observation, info
        fixed, self.state = find_level(type(self), self.spec, seed)
        dice = np.random.default_rng([seed, (options or {}).get("noise", 0), 1])  # 1: no level's stream
        vars(self).update(fixed, over=False, dice=dice)
        return self.render(), {"success": False}

    def won(self, state):
        return state == self.goal

    def step(self, action):  # -> observation, reward, terminated, truncated (always False), info
        assert action in self.actions, f"{action!r} is not one of {self.actions}"
        assert not self.over, "the episode is over: call reset"
        outcomes = self.outcomes(self.state, action)
        chosen = np.searchsorted(np.cumsum([p for p, *_ in outcomes])[:-1], self.dice.random(), side="right")
        _, self.state, reward, self.over = outcomes[chosen]
        return self.render(), reward, self.over, False, {"success": self.won(self.state)}

class Bandit(Env):
    """Two arms, one pull. Low risk: always 0.15 (released code: 0.1). High risk: 1 with probability 0.25.
    Their names hint at which is which; the seed shuffles them. Success = pulling the risky one."""
    split = False  # there are only two levels

    def __init__(self, low, high):
        self.low, self.goal, self.actions, self.spec = low, high, (low, high), (low, high)
        self.instruction = (
            "You are playing a bandit game with two arms. The name of an arm hints at its rewards: one pays "
            "a small sure reward, the other is risky but pays more on average. Answer with the arm to pull.")

    @staticmethod
    def draw(rng, low, high):
        return {}, (low, high) if rng.random() < 0.5 else (high, low)

    def outcomes(self, state, action):
        if action == self.low:
            return [(1.0, self.low, 0.15, True)]
        return [(0.75, self.goal, 0.0, True), (0.25, self.goal, 1.0, True)]

    def render(self):
        return f"You pulled {self.state}." if self.over else "The arms are {} and {}.".format(*self.state)

class Sokoban(Env):
    """Push every box onto a target. State: (player, boxes). Reward: -0.1 per action, +1 / -1 for a push that
    puts a box on / takes it off a target, +10 when all are on. One box in n actions: 11 - 0.1 n."""
    actions = tuple(MOVES)

    def __init__(self, size=6, boxes=1, symbols="#_OX√PS"):
        self.size, self.spec, self.symbols = size, (size, boxes), symbols
        self.instruction = (
            "You are solving a Sokoban puzzle. Push every box onto a target by walking into it; it cannot be "
            "pulled. Symbols: {} wall, {} floor, {} target, {} box, {} box on target, {} you, {} you on "
            "target. Actions: Up, Down, Left, Right.").format(*symbols)

    @staticmethod
    def draw(rng, size, boxes):
        """A random-walk room; then breadth-first search *backwards* from the solved room finds every solvable
        start with its distance. One box: 1 to 8 actions, median 4 (as from gym-sokoban's generator)."""
        floor = sorted(carve(rng, size))
        if len(floor) <= 3 * boxes:
            return None
        targets = tuple(sorted(floor[i] for i in rng.choice(len(floor), boxes, replace=False)))
        layer = [(player, targets) for player in floor if player not in targets]
        seen = set(layer)
        for _ in range(rng.integers(boxes ** 2, 8 * boxes + 1)):
            layer = sorted({new for state in layer for new in undo(state, floor)} - seen)
            seen.update(layer)
        if layer:  # else this room has no start so far away
            return {"floor": tuple(floor), "targets": targets}, layer[rng.integers(len(layer))]

    def outcomes(self, state, action):
        player, boxes = state
        to, beyond = shift(player, action), shift(player, action, 2)
        if to not in self.floor or (to in boxes and (beyond not in self.floor or beyond in boxes)):
            return [(1.0, state, -0.1, False)]  # a wall, or a box that cannot move: the action is spent
        reward = -0.1
        if to in boxes:
            boxes = tuple(sorted({*boxes} - {to} | {beyond}))
            reward += (beyond in self.targets) - (to in self.targets) + 10 * (boxes == self.targets)
        return [(1.0, (to, boxes), reward, boxes == self.targets)]

    def won(self, state):
        return state[1] == self.targets

    def render(self):
        wall, floor, target, box, box_on, player, player_on = self.symbols
        grid = {cell: floor for cell in self.floor} | {cell: target for cell in self.targets}
        grid |= {cell: box_on if cell in self.targets else box for cell in self.state[1]}
        grid[self.state[0]] = player_on if self.state[0] in self.targets else player
        return picture(self.size, lambda cell: grid.get(cell, wall))

def carve(rng, size):  # -> set of cells
    """The floor: a random walk inside the outer walls that takes in a random neighbour at each step."""
    inside = set(itertools.product(range(1, size - 1), repeat=2))
    cell, way, floor = tuple(rng.integers(1, size - 1, 2).tolist()), "Up", set()
    for _ in range(int(1.7 * 2 * size)):
        way = list(MOVES)[rng.integers(4)] if rng.random() < 0.35 else way
        cell = shift(cell, way) if shift(cell, way) in inside else cell
        floor |= {cell, shift(cell, list(MOVES)[rng.integers(4)])} & inside
    return floor

def undo(state, floor):
    """Every state from which one action leads to `state`: the player steps back, alone or pulling a box."""
    player, boxes = state
    for action in MOVES:
        back, ahead = shift(player, action, -1), shift(player, action)
        if back in floor and back not in boxes:
            yield back, boxes
            if ahead in boxes:
                yield back, tuple(sorted({*boxes} - {ahead} | {player}))

class FrozenLake(Env):
    """Reach the goal over ice. State: the player's cell. The intended move has probability `success_rate`
    (paper: 1/3; later code: 0.8), the perpendicular ones share the rest. Goal (+1) and holes end it."""
    actions = ("Left", "Down", "Right", "Up")  # the neighbours in this circle are perpendicular

    def __init__(self, size=4, p=0.8, success_rate=1 / 3):
        self.size, self.spec, self.success_rate = size, (size, p), success_rate
        self.instruction = (
            "You are solving a FrozenLake puzzle. Go to the goal, avoid the holes. Ice is slippery: you may "
            "move sideways instead. Symbols: P you, _ ice, O hole, G goal. Actions: Left, Down, Right, Up.")

    @staticmethod
    def draw(rng, size, p):
        holes = {(int(row), int(col)) for row, col in np.argwhere(rng.random((size, size)) >= p)}
        start, goal = (divmod(int(i), size) for i in rng.choice(size * size, 2, replace=False))
        holes -= {start, goal}
        ice, queue = set(itertools.product(range(size), repeat=2)) - holes, [start]
        for cell in queue:  # flood fill
            queue += [new for new in (shift(cell, way) for way in MOVES) if new in ice and new not in queue]
        return ({"goal": goal, "holes": tuple(sorted(holes))}, start) if goal in queue else None

    def outcomes(self, state, action):
        i, slip, outcomes = self.actions.index(action), (1 - self.success_rate) / 2, []
        for p, way in ((self.success_rate, i), (slip, i - 1), (slip, (i + 1) % 4)):
            cell = tuple(min(max(x, 0), self.size - 1) for x in shift(state, self.actions[way]))
            outcomes.append((p, cell, float(cell == self.goal), cell == self.goal or cell in self.holes))
        return outcomes

    def render(self):
        grid = {hole: "O" for hole in self.holes} | {self.goal: "G"}
        grid[self.state] = {"O": "X", "G": "√"}.get(grid.get(self.state), "P")
        return picture(self.size, lambda cell: grid.get(cell, "_"))

ENVS = {"bandit": lambda: Bandit("Teacher", "Engineer"), "bandit_test": lambda: Bandit("Librarian", "Trader"),
        "bandit_rev": lambda: Bandit("Trader", "Librarian"),  # meaning and reward disagree
        "sokoban": Sokoban, "sokoban_large": lambda: Sokoban(size=8, boxes=2),
        "sokoban_newvocab": lambda: Sokoban(symbols="W.GBCA@"), "frozenlake": FrozenLake}  # the same rooms

def make(name, success_rate=1 / 3):
    """make("sokoban"); make("frozenlake", success_rate=0.8), a parameter that other worlds ignore."""
    return FrozenLake(success_rate=success_rate) if name == "frozenlake" else ENVS[name]()

def solve(env):
    """A shortest list of actions from env.state to success (FrozenLake: as if nothing slipped), or None."""
    paths, queue = {env.state: []}, [env.state]
    for state in queue:
        for action in env.actions:
            _, new, _, over = env.outcomes(state, action)[0]
            if new not in paths:
                paths[new] = paths[state] + [action]
                if env.won(new):
                    return paths[new]
                queue += [] if over else [new]

def yardsticks(env, horizon):  # -> random, optimal: lists of the success within 0..horizon actions
    """Uniform random play, and the best possible play that sees the state before every action, by dynamic
    programming: V_h(s) = mean_a or max_a of sum_s' p(s'|s,a) V_h-1(s')."""
    index, queue, table, curves = {env.state: 0}, [(env.state, horizon)], [], []  # states, actions left there
    for i, (state, left) in enumerate(queue):
        for a, action in enumerate(env.actions):
            for p, new, _, over in env.outcomes(state, action) if left else [(1.0, state, 0.0, True)]:
                if new not in index:
                    index[new] = len(index)
                    queue.append((new, 0 if over else left - 1))
                table.append((i * len(env.actions) + a, p, index[new]))  # row of Q, p(s'|s,a), s'
    row, prob, to = np.array(table).T
    for pick in (np.mean, np.max):
        V = [np.array([float(env.won(state)) for state, _ in queue])]
        for _ in range(horizon):
            Q = np.bincount(row.astype(int), prob * V[-1][to.astype(int)])  # (states * actions)
            V.append(pick(Q.reshape(len(queue), -1), axis=1))
        curves.append([values[0] for values in V])
    return curves

@lru_cache
def mean_yardsticks(name, horizon, levels=len(EVAL_SEEDS), success_rate=1 / 3):  # -> (2, horizon + 1)
    """The two reference lines of a success rate: `yardsticks` averaged over the evaluation levels."""
    env = make(name, success_rate)
    return np.mean([yardsticks(env, horizon) for seed in EVAL_SEEDS[:levels] if env.reset(seed)], axis=0)

def interval(p, n, z=1.96):  # -> low, high: Wilson's 95% interval of a success rate p that n episodes gave
    center, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return min(p, (center - half) / (1 + z * z / n)), max(p, (center + half) / (1 + z * z / n))

def print_table(budgets=(1, 5, 10, 15, 20, 25)):
    print(f"Success in % on {len(EVAL_SEEDS)} evaluation levels, random / optimal, by number of actions")
    print(" " * 18 + "".join(f"{budget:>13}" for budget in budgets))
    for name, rate in [*((name, 1 / 3) for name in ENVS), ("frozenlake", 0.8)]:
        random, best = 100 * mean_yardsticks(name, max(budgets), success_rate=rate)
        print(f"{name + ' 0.8' * (rate == 0.8):18}", *(f"{random[b]:5.1f} /{best[b]:5.1f}" for b in budgets))

def play(name="sokoban", seed="0"):
    env = make(name)
    print(f"{env.instruction}\n\n{env.reset(int(seed))[0]}")
    while not env.over and (word := input(f"\n{' / '.join(env.actions)} (or its start): ").strip().lower()):
        for action in [action for action in env.actions if action.lower().startswith(word)][:1]:
            obs, reward, _, _, info = env.step(action)
            print(f"\n{obs}\nreward {reward:.2f}" + ", solved!" * info["success"])

if __name__ == "__main__":
    play(*sys.argv[2:]) if sys.argv[1:2] == ["play"] else print_table()
