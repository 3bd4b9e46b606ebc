"""extras/episode.py: which episodes are shown, and that what is drawn is what was said."""
import json

import matplotlib.figure
import pytest

import envs
from extras import episode

LAKE = ["O _\nP G", "O _\n_ √"]


def sample(iteration, level, R, env="frozenlake", states=LAKE):
    turn = dict(state=states[0], answer="<think>It is 1 right.</think><answer>Right</answer>", valid=True, reward=R)
    return dict(iteration=iteration, env=env, R=R, turns=[turn],
                text=f"<|im_start|>user\n\nlevel {level}\n\n{states[1]}\nreturn {R:g}\n")


def written(tmp_path, samples):
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    return tmp_path


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda fig, out, **_: figures.append(fig))
    return figures


def words(fig):
    return [text.get_text() for ax in fig.axes for text in ax.texts] + [ax.get_title(loc="left") for ax in fig.axes]


def test_the_level_that_changed_most_is_shown_before_and_after(tmp_path, drawn):
    run = written(tmp_path, [sample(0, 0, 0.0), sample(0, 1, -0.1), sample(20, 0, 9.0), sample(20, 1, 9.0),
                             sample(40, 0, 0.0), sample(40, 1, 1.0), sample(40, 2, 99.0, env="elsewhere")])
    assert episode.episode(str(run)) == run / "episode.png"
    said = words(drawn[0])
    assert "before training: return -0.1" in said and "after iteration 40: return 1" in said
    assert said.count("It is 1 right.") == 2 and "Right\nreward 1" in said and "Right\nreward -0.1" in said
    assert drawn[0].get_supxlabel().startswith("Of 2 levels the one that gained most (mean return of all: -0.05 before, 0.50 after).\nP player, O hole")
    assert said.count("√") == 2 and said.count("P") == said.count("G") == 2, "before the answer, and after it"


@pytest.mark.parametrize("world, states", [("frozenlake", LAKE), ("bandit", ["The arms are A and B.", "You pulled A."])])
def test_boards_are_of_one_size_and_texts_do_not_meet(world, states, tmp_path, drawn):
    """Three turns and one; the longest thought and answer that are shown; words alone need no board's height."""
    before, after = sample(0, 0, 0.0, world, states), sample(20, 0, 1.0, world, states)
    before["turns"] = [before["turns"][0] | {"answer": "<think>" + 40 * "long " + "</think><answer>" + 20 * "word " + "</answer>"}] * 3
    episode.episode(str(written(tmp_path, [before, after])))
    fig, = drawn
    fig.canvas.draw()
    boards = [ax for ax in fig.axes if ax.images]
    sizes = [tuple(ax.get_window_extent().size.round(3)) for ax in boards]
    assert len(boards) == (4 + 2 if world == "frozenlake" else 0) and len(set(sizes)) <= 1
    texts = [text.get_window_extent() for ax in fig.axes for text in ax.texts]
    assert len(texts) > 10 and not any(one.overlaps(other) for i, one in enumerate(texts) for other in texts[:i])


def test_of_two_evaluations_in_one_iteration_the_later_one_is_shown(tmp_path, drawn):
    """The run was killed, and resumed with a lower rate: samples of the part that was lost are still in the file."""
    once, again = ([sample(20, level, R) for level in range(8)] for R in (9.0, 2.0))
    run = written(tmp_path, [sample(0, level, 0.0) for level in range(8)] + once + again)
    episode.episode(str(run))
    assert "after iteration 20: return 2" in words(drawn[0])


def test_a_future_that_was_given_up_is_not_shown(tmp_path, drawn):
    """An older checkpoint was put back, and the run went on from there: the file still has iteration 40."""
    run = written(tmp_path, [sample(0, 0, 0.0), sample(40, 0, 9.0), sample(20, 0, 1.0)])
    episode.episode(str(run))
    assert "after iteration 20: return 1" in words(drawn[0])


def test_if_the_levels_lost_in_all_one_that_lost_is_shown(tmp_path, drawn):
    run = written(tmp_path, [sample(0, 0, 0.0), sample(0, 1, 1.0), sample(20, 0, 0.1), sample(20, 1, 0.5)])
    episode.episode(str(run))
    assert "before training: return 1" in words(drawn[0]) and "after iteration 20: return 0.5" in words(drawn[0])
    assert "the one that lost most (mean return of all: 0.50 before, 0.30 after)" in drawn[0].get_supxlabel()


def test_of_those_that_gained_alike_a_short_one_of_two_turns_is_shown(tmp_path, drawn):
    def turns(iteration, level, R, number):
        one = sample(iteration, level, R)
        return one | {"turns": (number - 1) * [one["turns"][0] | {"reward": 0.0}] + one["turns"]}
    before = [turns(0, level, 0.0, 1) for level in range(4)]
    after = [turns(20, level, R, number) for level, (R, number) in enumerate([(1.0, 1), (1.0, 3), (1.0, 2), (0.5, 2)])]
    episode.episode(str(written(tmp_path, before + after)))
    assert sum(word.startswith("turn ") for word in words(drawn[0])) == 1 + 2
    assert "after iteration 20: return 1" in words(drawn[0])


def test_a_state_in_words_is_written_as_it_is(tmp_path, drawn):
    text = ["The arms are Teacher and Engineer.", "You pulled Engineer."]
    run = written(tmp_path, [sample(0, 0, 0.0, "bandit", text), sample(20, 0, 1.0, "bandit", text)])
    episode.episode(str(run))
    assert "You pulled Engineer." in [" ".join(text.split()) for text in words(drawn[0])]


def test_the_luck_of_a_bandit_does_not_count(tmp_path, drawn):
    """Engineer pays 0.25 on average: 0 is no loss. A malformed answer is."""
    begins, sure, risky = ["The arms are Teacher and Engineer.", *(f"You pulled {arm}." for arm in ("Teacher", "Engineer"))]
    run = written(tmp_path, [sample(0, 0, 0.15, "bandit", [begins, sure]), sample(0, 1, -0.1, "bandit", [begins, begins]),
                             sample(20, 0, 0.0, "bandit", [begins, risky]), sample(20, 1, 0.0, "bandit", [begins, risky])])
    episode.episode(str(run))
    assert drawn[0].get_supxlabel() == ("Of 2 levels the one that gained most on average (mean return of all: 0.02 before, 0.25 after).\n"
                                        "Teacher always pays 0.15, Engineer 1 or 0 (0.25 on average). Episodes are compared by these means.")
    assert "before training: return -0.1" in words(drawn[0])


def test_an_unfinished_answer_and_an_unknown_world_are_drawn(tmp_path, drawn):
    one = sample(0, 0, -0.1, "Mine", ["a b\nc d", "a b\nc d"])
    one["turns"][0] |= dict(answer="<think>" + "word " * 200, valid=False)
    episode.episode(str(written(tmp_path, [one, one | {"iteration": 20}])))
    said = words(drawn[0])
    assert "invalid: (no answer)\nreward -0.1" in said and any(text.endswith(" ...") for text in said)


def test_after_a_lost_line_no_two_levels_are_compared(tmp_path, drawn):
    """The second evaluation lacks its first sample: what stands in the same place is another level."""
    other = ["_ O\nP G", "_ O\n_ √"]
    run = written(tmp_path, [sample(0, 0, 0.5), sample(0, 1, 0.0, states=other), sample(20, 1, 1.0, states=other)])
    episode.episode(str(run))
    assert drawn[0].get_supxlabel().startswith("Of 1 level the one that gained most (mean return of all: 0.00 before, 1.00 after)")
    run = written(tmp_path, [sample(0, 0, 0.5), sample(20, 1, 1.0, states=other)])
    with pytest.raises(envs.UserError, match="no level in common"):
        episode.episode(str(run))


def test_a_run_that_was_evaluated_once_is_one_line(tmp_path):
    with pytest.raises(envs.UserError, match="holds one evaluation only"):
        episode.episode(str(written(tmp_path, [sample(20, 0, 1.0)])))


def test_a_first_evaluation_after_training_says_so(tmp_path, drawn):
    episode.episode(str(written(tmp_path, [sample(10, 0, 0.0), sample(20, 0, 1.0)])))
    assert "after iteration 10: return 0" in words(drawn[0])


def test_samples_of_another_run_are_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"env": "bandit"}')
    with pytest.raises(envs.UserError, match="of another run: .* was trained in bandit"):
        episode.episode(str(written(tmp_path, [sample(0, 0, 0.0), sample(20, 0, 1.0)])))


def test_a_run_without_samples_is_one_line(tmp_path):
    with pytest.raises(envs.UserError, match="it is no run, or was not evaluated"):
        episode.episode(str(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", '{"env": null}', '{"env": "ban'])
def test_a_damaged_config_is_named(text, tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"iteration": 0, "env": "bandit", "turns": []}\n')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(envs.UserError, match="config.json is damaged"):
        episode.episode(tmp_path)
