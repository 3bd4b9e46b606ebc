"""extras/episode.py: which episodes are shown, and whether what is drawn is what was said."""
import json

import pytest
from matplotlib.figure import Figure
from PIL import Image

from conftest import refused
from extras import episode

LAKE = ["O _\nP G", "O _\n_ √"]


def sample(iteration, level, R, turns=1):
    answer = "<think>It is 1 Right.</think><answer>Right</answer>"
    first, last = ({"state": LAKE[0], "answer": answer, "valid": True, "reward": reward}
                   for reward in (0.0, R))
    return {"iteration": iteration, "env": "frozenlake", "turns": [first] * (turns - 1) + [last],
            "text": f"<|im_start|>user\n\nlevel {level}\n\n{LAKE[1]}\nreturn {R:g}\n"}


@pytest.fixture
def write(tmp_path):
    def samples(*some):
        (tmp_path / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in some))
        return str(tmp_path)
    return samples


@pytest.fixture
def draw(monkeypatch, write):
    """draw(samples) -> the words of the figure that would be saved, and what stands below it."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda fig, out, **_: figures.append(fig))

    def run(*samples):
        episode.episode(write(*samples))
        fig, = figures
        titles = [ax.get_title(loc="left") for ax in fig.axes]
        return [text.get_text() for ax in fig.axes for text in ax.texts] + titles, (
            fig.get_supxlabel())
    return run


def test_the_level_that_gained_most_is_shown_before_and_after(draw):
    said, below = draw(sample(0, 0, 0.0), sample(0, 1, -0.1), sample(20, 0, 9.0),
                       sample(20, 1, 9.0), sample(40, 0, 0.0), sample(40, 1, 1.0))
    assert "before training: return -0.1" in said and "after iteration 40: return 1" in said
    assert said.count("It is 1 Right.") == 2
    assert "Right\nreward 1" in said and "Right\nreward -0.1" in said
    assert "Of 2 levels" in below and "gained" in below and "-0.05 before, 0.50 after" in below
    # Each episode has a state before its answer and one after it.
    assert said.count("√") == said.count("P") == said.count("G") == 2


def test_if_the_levels_lost_on_average_one_that_lost_is_shown(draw):
    said, below = draw(sample(0, 0, 0.0), sample(0, 1, 1.0), sample(20, 0, 0.1), sample(20, 1, 0.5))
    assert "after iteration 20: return 0.5" in said and "lost" in below


def test_the_animation_goes_turn_by_turn_up_to_the_end(write):
    """And shows the longer episode of those that gained alike."""
    out = episode.episode(write(sample(0, 0, 0.0), sample(0, 1, 0.0), sample(20, 0, 1.0),
                                sample(20, 1, 1.0, turns=3)), gif=True)
    with Image.open(out) as gif:
        assert out.name == "episode.gif" and gif.n_frames == 3 + 1
        assert gif.info["loop"] == 0  # for ever


def test_mistakes_are_named(write, tmp_path):
    assert "nowhere" in refused(episode.episode, "nowhere")
    assert "only one evaluation" in refused(episode.episode, write(sample(20, 0, 1.0)))
