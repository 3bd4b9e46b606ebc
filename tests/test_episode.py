"""extras/episode.py: which episodes are shown, and whether what is drawn is what was said."""
import json
import shutil

import pytest
from matplotlib.figure import Figure
from PIL import Image

from conftest import ROOT
from extras import episode
from runs import UserError

LAKE = ["O _\nP G", "O _\n_ √"]
OTHER_LAKE = ["_ O\nP G", "_ O\n_ √"]
ARMS = ["The arms are Teacher and Engineer.", "You pulled Engineer."]
LONG = "<think>" + 40 * "long " + "</think><answer>" + 20 * "word " + "</answer>"


def sample(iteration, level, R, env="frozenlake", states=LAKE, turns=1):
    answer = "<think>It is 1 right.</think><answer>Right</answer>"
    first, last = ({"state": states[0], "answer": answer, "valid": True, "reward": reward}
                   for reward in (0.0, R))
    return {"iteration": iteration, "env": env, "turns": [first] * (turns - 1) + [last],
            "text": f"<|im_start|>user\n\nlevel {level}\n\n{states[1]}\nreturn {R:g}\n"}


def written(folder, samples):
    (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    return folder


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """draw(samples) -> the figure that would be saved."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda fig, out, **_: figures.append(fig))

    def run(samples):
        episode.episode(str(written(tmp_path, samples)))
        return figures.pop()
    return run


def words(fig):
    titles = [ax.get_title(loc="left") for ax in fig.axes]
    return [text.get_text() for ax in fig.axes for text in ax.texts] + titles


# ------------------------------------------------------------------ which episodes, which words
def test_the_level_that_gained_most_is_shown_before_and_after(draw):
    fig = draw([sample(0, 0, 0.0), sample(0, 1, -0.1), sample(20, 0, 9.0), sample(20, 1, 9.0),
                sample(40, 0, 0.0), sample(40, 1, 1.0), sample(40, 2, 99.0, env="elsewhere")])
    said = words(fig)
    assert "before training: return -0.1" in said and "after iteration 40: return 1" in said
    assert said.count("It is 1 right.") == 2
    assert "Right\nreward 1" in said and "Right\nreward -0.1" in said
    why, key = fig.get_supxlabel().split("\n")
    assert "Of 2 levels" in why and "gained" in why and "-0.05 before, 0.50 after" in why
    assert key.startswith("P player, O hole")
    # Each episode has a state before its answer and one after it.
    assert said.count("√") == said.count("P") == said.count("G") == 2


def test_if_the_levels_lost_on_average_one_that_lost_is_shown(draw):
    fig = draw([sample(0, 0, 0.0), sample(0, 1, 1.0), sample(20, 0, 0.1), sample(20, 1, 0.5)])
    assert "before training: return 1" in words(fig)
    assert "after iteration 20: return 0.5" in words(fig)
    assert "lost most (mean return of all: 0.50 before, 0.30 after)" in fig.get_supxlabel()


def test_of_those_that_gained_alike_a_short_one_of_two_turns_is_shown(draw):
    before = [sample(0, level, 0.0) for level in range(4)]
    after = [sample(20, 0, 1.0, turns=1), sample(20, 1, 1.0, turns=3), sample(20, 2, 1.0, turns=2),
             sample(20, 3, 0.5, turns=2)]
    said = words(draw(before + after))
    assert sum(word.startswith("turn ") for word in said) == 1 + 2
    assert "after iteration 20: return 1" in said


@pytest.mark.parametrize("samples", [
    # The run was killed after iteration 20 and resumed at an older one. So 20 comes twice.
    [[sample(0, level, 0.0) for level in range(8)], [sample(20, level, 9.0) for level in range(8)],
     [sample(20, level, 2.0) for level in range(8)]],
    # An older checkpoint was put back, and the run went on from there. 40 is no more.
    [[sample(0, 0, 0.0)], [sample(40, 0, 9.0)], [sample(20, 0, 2.0)]]])
def test_what_was_given_up_by_resuming_is_not_shown(samples, draw):
    assert "after iteration 20: return 2" in words(draw(sum(samples, [])))


def test_a_first_evaluation_after_training_says_so(draw):
    said = words(draw([sample(10, 0, 0.0), sample(20, 0, 1.0)]))
    assert "after iteration 10: return 0" in said


def test_the_luck_of_a_bandit_does_not_count(draw):
    """Engineer pays 0.25 on average, so a pay-out of 0 is no loss. An invalid answer is one."""
    begins, risky = ARMS
    sure = "You pulled Teacher."
    fig = draw([sample(0, 0, 0.15, "bandit", [begins, sure]),
                sample(0, 1, -0.1, "bandit", [begins, begins]),
                sample(20, 0, 0.0, "bandit", [begins, risky]),
                sample(20, 1, 0.0, "bandit", [begins, risky])])
    # (0.15 - 0.1) / 2 and 0.25
    assert "on average (mean return of all: 0.02 before, 0.25 after)" in fig.get_supxlabel()
    said = [" ".join(text.split()) for text in words(fig)]
    assert "before training: return -0.1" in said and "You pulled Engineer." in said


def test_an_unfinished_answer_and_an_unknown_environment_are_drawn(draw):
    one = sample(0, 0, -0.1, "Mine", ["a b\nc d", "a b\nc d"])
    one["turns"][0] |= {"answer": "<think>" + "word " * 200, "valid": False}
    said = words(draw([one, one | {"iteration": 20}]))
    assert "invalid: (no answer)\nreward -0.1" in said
    assert any(text.endswith(" ...") for text in said)


def test_samples_of_different_levels_are_not_compared(draw):
    """The second evaluation has lost its first sample. What is now first there is another level."""
    fig = draw([sample(0, 0, 0.5), sample(0, 1, 0.0, states=OTHER_LAKE),
                sample(20, 1, 1.0, states=OTHER_LAKE)])
    assert "Of 1 level" in fig.get_supxlabel() and "0.00 before, 1.00 after" in fig.get_supxlabel()
    with pytest.raises(UserError, match="no level in common"):
        draw([sample(0, 0, 0.5), sample(20, 1, 1.0, states=OTHER_LAKE)])


# ------------------------------------------------------------------------------- what it looks like
def boxes_of(fig):
    """The places of all texts in pixels. They must be inside the figure."""
    canvas = episode.FigureCanvasAgg(fig)
    canvas.draw()
    texts = [text for ax in fig.axes for text in [*ax.texts, ax._left_title]]
    texts += [fig._supxlabel]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert all(fig.bbox.contains(*corner) for box in boxes for corner in (box.min, box.max))
    return boxes


def none_overlap(boxes):
    return not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])


@pytest.mark.parametrize("env, states", [("frozenlake", LAKE), ("bandit", ARMS), ("sokoban", LAKE)])
def test_grids_are_of_one_size_and_texts_do_not_overlap(env, states, draw):
    """Three turns and one, with the longest thought and answer that are shown."""
    before = sample(0, 0, 0.0, env, states, turns=3)
    before["turns"] = [turn | {"answer": LONG, "valid": False} for turn in before["turns"]]
    after = sample(20, 0, 1.0, env, states)
    fig = draw([before, after])
    boxes = boxes_of(fig)
    assert len(boxes) > 10 and none_overlap(boxes)
    grids = [ax for ax in fig.axes if ax.images]
    sizes = {tuple(ax.get_window_extent().size.round(3)) for ax in grids}
    assert len(grids) == (0 if env == "bandit" else 4 + 2) and len(sizes) <= 1

    for number in range(4):
        pair = before, before | {"iteration": 20}
        frame = episode.draw_frame(pair, number, "Of 8 levels the one " * 3)
        assert none_overlap(boxes_of(frame))


def test_the_animation_of_the_figures(tmp_path):
    """The level that gained most and has most turns: five before training, three after it."""
    shutil.copy(ROOT / "figures/tiny/first-command-samples.jsonl", tmp_path / "samples.jsonl")
    out = episode.episode(str(tmp_path), gif=True)
    assert out == tmp_path / "episode.gif" and out.stat().st_size < 1e6
    pixels = []
    with Image.open(out) as gif:
        assert gif.format == "GIF" and gif.n_frames == 5 + 1 and gif.width == 900
        assert gif.info["loop"] == 0  # for ever
        for number in range(gif.n_frames):
            gif.seek(number)
            assert 1000 <= gif.info["duration"] <= 4000
            pixels.append(gif.convert("RGB").tobytes())
    assert len(set(pixels)) == 6


def test_a_frame_shows_the_turn_of_each_episode_or_its_end():
    before, after = sample(0, 0, 0.0, turns=1), sample(20, 0, 1.0, turns=2)
    shown = [words(episode.draw_frame((before, after), number, "")) for number in range(3)]
    assert shown[0].count("turn 1") == 2 and shown[0].count("P") == 2
    assert "end after turn 1" in shown[1] and "return 0" in shown[1]
    assert "turn 2" in shown[1] and "It is 1 right." in shown[1] and "Right" in shown[1]
    assert "end after turn 2" in shown[2] and "return 1" in shown[2]
    assert shown[2].count("√") == 2 and "P" not in shown[2]


# ----------------------------------------------------------------------------------------- mistakes
def test_bytes_that_are_no_text_are_named_and_a_folder_at_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/samples.jsonl").write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match="run/samples.jsonl is empty or damaged"):
        episode.episode("~/run")


@pytest.mark.parametrize("files, says", [
    ({}, "no samples.jsonl"),
    ({"samples.jsonl": "{\n"}, "empty or damaged"),
    ({"samples.jsonl": "5\n[1]\nnull\n"}, "empty or damaged"),
    ({"samples.jsonl": {"iteration": 0, "env": "bandit", "turns": []}}, "empty or damaged"),
    ({"samples.jsonl": sample(20, 0, 1.0)}, "only one evaluation"),
    ({"samples.jsonl": sample(0, 0, 0.0), "config.json": {"env": "bandit"}}, "trained in bandit"),
    ({"samples.jsonl": sample(0, 0, 0.0), "config.json": []}, "config.json is damaged"),
    ({"samples.jsonl": sample(0, 0, 0.0), "config.json": "{"}, "config.json is damaged")])
def test_mistakes_are_named(files, says, tmp_path):
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=says):
        episode.episode(str(tmp_path))
