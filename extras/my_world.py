"""An environment of your own: copy this file and change it. Then

    python extras/check_world.py extras/my_world.py:Guess                      is it right?
    python ragen_mini.py --env extras/my_world.py:Guess --iterations 20

What the first command does not tell you:

- A state is a word, a number or a tuple of them. What stays fixed in an episode is in self.level.
- Whether the episode is over must follow from the next state alone.
- If `draw` returns None, for example because its level cannot be solved, it is asked again.
- A quarter of the levels is held out for evaluation, unless `split` is False.
- Larger models can read and write any words. The included model, tiny, has limits:
    - It writes the actions Up, Down, Left and Right. Teacher, Engineer, Librarian and Trader it
      writes only where it reads of arms, as in the bandit.
    - All words that its vocabulary (tiny/tokenizer.json) lacks look alike to it.
    - It reads the state, not the instruction.
"""
import envs


class Guess(envs.Env):
    instruction = "Open the door that the sign names."
    actions = ("Left", "Up", "Right")
    split = False  # there are only three levels, so none can be held out

    @staticmethod
    def draw(rng):  # -> what stays fixed, the initial state
        return {"prize": ("Left", "Up", "Right")[rng.integers(3)]}, "closed"

    def outcomes(self, state, action):  # -> a list of (probability, next state, reward, over?)
        return [(1.0, action, float(action == self.level["prize"]), True)]

    def won(self, state):
        return state == self.level["prize"]

    def render(self):  # where things move, it shows self.state
        return f"The sign says {self.level['prize']}."
