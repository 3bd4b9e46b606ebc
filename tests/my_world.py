import envs


class Guess(envs.Env):
    instruction = "Open the door that the sign names."
    actions = ("Left", "Up", "Right")
    split = False  # three levels only: none can be held out

    @staticmethod
    def draw(rng):  # -> what stays fixed (self.level), the initial state
        return {"prize": ("Left", "Up", "Right")[rng.integers(3)]}, "closed"

    def outcomes(self, state, action):  # -> a list of (probability, next state, reward, over?)
        return [(1.0, action, float(action == self.level["prize"]), True)]

    def won(self, state):
        return state == self.level["prize"]

    def render(self):
        return f"The sign says {self.level['prize']}."  # where things move, it shows self.state
