"""A world of your own: copy this file and change it. Then

    python extras/check_world.py tests/my_world.py:Guess                      is it right?
    python ragen_mini.py --env tests/my_world.py:Guess --iterations 20

What the first command does not tell you:

- A state is a word, a number or a tuple of them. What stays fixed in an episode is in self.level.
- Whether the episode is over must follow from the next state alone.
- Where `draw` returns None (not solvable, say) it is asked again.
- Unless `split` is False, a quarter of the levels is held out for evaluation.
- tiny writes the actions Up, Down, Left and Right (Teacher, Engineer, Librarian and Trader only where it reads of arms, as
  in the bandit); all words that its vocabulary (tiny/tokenizer.json) lacks look alike to it; and it reads the state, not
  the instruction. Larger models have no such limits.
"""
import envs


class Guess(envs.Env):
    instruction = "Open the door that the sign names."
    actions = ("Left", "Up", "Right")
    split = False  # three levels only: none can be held out

    @staticmethod
    def draw(rng):  # -> what stays fixed, the initial state
        return {"prize": ("Left", "Up", "Right")[rng.integers(3)]}, "closed"

    def outcomes(self, state, action):  # -> a list of (probability, next state, reward, over?)
        return [(1.0, action, float(action == self.level["prize"]), True)]

    def won(self, state):
        return state == self.level["prize"]

    def render(self):
        return f"The sign says {self.level['prize']}."  # where things move, it shows self.state
