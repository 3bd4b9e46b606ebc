"""tutorial.ipynb: its form, its checks against what students write, and that both meet in its
cells. Kernels, nbgrader and whole classes take longer: slow/slow_course.py.
"""
import itertools
import json
import math
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "course"))
import checks
import course
import drawings
import envs
import exercises
import ragen_mini as rm
from staff import answers
from staff.answers import RIGHT, WRONG

BOOK = answers.notebook()
CODE = [cell for cell in BOOK["cells"] if cell["cell_type"] == "code"]
PROSE = [cell for cell in BOOK["cells"] if cell["cell_type"] == "markdown"]
GRADED = list(exercises.EXERCISES)


def source(cell):
    return "".join(cell["source"])


def cell_of(name):
    return next(cell for cell in CODE if cell["id"] == name)


def text_of_cell(name):
    return next(source(cell) for cell in PROSE if cell["id"] == name)


def run(text, name):  # -> what the cell defines
    space = dict(__name__="__main__", torch=torch, np=np, rm=rm, envs=envs, re=re, math=math,
                 Counter=dict)
    exec(text, space)
    return space[name]


def lists():
    for name, wrong in WRONG.items():
        for number, (words, text) in enumerate(wrong):
            yield pytest.param(name, words, text, id=f"{name}-{number}")


# ---------------------------------------------------------------------------------------- its form
def test_the_notebook_is_stripped():
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    ids = [cell["id"] for cell in BOOK["cells"]]
    assert len(set(ids)) == len(ids)


def test_metadata_of_nbgrader():
    """Schema 3. Every exercise has an answer cell and a locked cell with its points, in this order;
    20 points in all.
    """
    found = {}
    for place, cell in enumerate(CODE):
        data = cell["metadata"].get("nbgrader")
        if data:
            assert data["schema_version"] == 3 and data["grade_id"] == cell["id"] not in found
            assert data["solution"] != data["locked"] and not data["task"], data
            assert ("points" in data) == data["grade"]
            found[data["grade_id"]] = (place, data)
    for name, exercise in exercises.EXERCISES.items():
        place, data = found[name]
        assert data["points"] == exercise.points and data["locked"]
        assert found[f"{name}-answer"][0] < place
        assert "raises-exception" in CODE[place]["metadata"]["tags"]
        assert source(CODE[place]).startswith('"""Check ')
    graded = [data["points"] for _, data in found.values() if data["grade"]]
    assert sum(graded) == 20 and len(graded) == len(GRADED)


def headings():  # -> (number, points, minutes, is it of the core path?) of each exercise's heading
    pattern = r"### Exercise (\d+).*?\((.*?) points?.*?, (\d+) minutes\)( · core)?"
    for number, points, minutes, core in re.findall(pattern, "\n".join(map(source, PROSE))):
        yield int(number), float(points.replace("½", ".5")), int(minutes), bool(core)


def test_points_and_minutes_in_the_text():
    """The table at the top adds up, and every exercise's points stand in its heading."""
    table = re.findall(r"^\| \d .*? \| (\d+) \| (\d+) \|", source(BOOK["cells"][0]), re.M)
    assert sum(int(points) for points, _ in table) == 20
    parts = re.split(r"^## ", "\n".join(map(source, PROSE)), flags=re.M)[1:8]
    for number, (part, (_, minutes)) in enumerate(zip(parts, table, strict=True), 1):
        said = re.findall(r"### Exercise .*?(\d+) minutes\)", part)
        # The bug hunt has no such headings.
        assert sum(map(int, said)) == int(minutes) or number == 6
    assert [number for number, *_ in headings()] == [n for n in range(17) if n != 14]
    for number, points, _, _ in headings():
        titled = [e for e in exercises.EXERCISES.values() if e.title.startswith(f"{number} ")]
        assert points == sum(e.points for e in titled) or number == 16  # the experiment: by hand


def test_the_core_path_is_what_points_py_adds_up():
    minutes = sum(minutes for _, _, minutes, core in headings() if core)
    assert f"*core* (7½ points, {minutes} minutes); with the text" in source(BOOK["cells"][0])
    of_core = {str(number) for number, _, _, core in headings() if core}
    names = {name for name, e in exercises.EXERCISES.items() if e.title.split()[0] in of_core}
    assert set(answers.CORE) == names | {"words-baseline", "words-ratio"}
    assert sum(exercises.EXERCISES[name].points for name in names) == 7.5


def test_what_the_lecturer_grades():
    """Apart from the 20 points of the checks: questions in words, and an experiment. Each has a
    rubric, and all are in the table of points.
    """
    rubric = re.findall(r"^## (\w+-\w+)\n", (checks.COURSE / "staff/rubric.md").read_text(), re.M)
    questions = [cell for cell in PROSE if "nbgrader" in cell["metadata"]]
    assert [cell["id"] for cell in questions] == rubric
    points = []
    for cell in questions:
        data = cell["metadata"]["nbgrader"]
        points.append(data["points"])
        assert data == dict(grade_id=cell["id"], grade=True, solution=True, locked=False,
                            task=False, points=points[-1], schema_version=3)
        assert f"({points[-1]} point" in source(cell).splitlines()[0]
    table = re.findall(r"^\| \d .*? \| \d+ \| \d+ \| (\d) \|", source(BOOK["cells"][0]), re.M)
    assert sum(map(int, table)) == sum(points) == 10


@pytest.mark.parametrize("given", [dict(env="bandit"), dict(iterations=4),
                                   dict(iterations=2, eval_every=2)])
def test_training_accepts_what_its_check_accepts(given, monkeypatch):
    assert not checks.check(exercises.EXERCISES["settings"], lambda: given, [0])
    monkeypatch.setattr(rm, "train", lambda cfg, callback: (cfg, None))
    space = dict(vars(course), rm=rm, settings=lambda: given, use=lambda name, answer: answer,
                 SETTINGS=exercises.SETTINGS)
    exec(source(cell_of("train")), space)
    iterations = (exercises.SETTINGS | given)["iterations"]
    evaluated = dict(eval_every=max(1, iterations // 4))
    expected = exercises.SETTINGS | evaluated | given
    assert {name: getattr(space["cfg"], name) for name in expected} == expected


def test_every_answer_of_the_staff_can_be_made():
    """If you edited one of the core files: these pieces of code are to be adapted in
    course/answers.txt or course/staff.
    """
    assert not answers.MISSING


@pytest.mark.parametrize("name", exercises.BUGS)
def test_a_function_with_a_bug_behaves_as_the_shipped_one_with_this_bug(name):
    exercise = exercises.EXERCISES[name]
    given = run(source(cell_of(f"{name}-answer")), name)
    wrong = checks.mutant(exercise.solution, *exercises.BUGS[name])
    for i in exercise.cases(1):
        outcomes = [checks.outcome(exercise, answer, i)[0] for answer in (given, wrong)]
        assert outcomes[0] and not checks.differing(*outcomes)


# -------------------------------------------------------------------------------------- the checks
@pytest.mark.parametrize("name", GRADED)
def test_the_inputs(name):
    """The same ones for the same number. At least five in the notebook, unless an exercise has
    none, and three times as many of the same kind beside them, others for every number of a
    lecturer.
    """
    exercise = exercises.EXERCISES[name]
    first, again, other = (checks.inputs_before(exercise, i) for i in (1000, 1000, 2000))
    assert first == again
    shown, hidden = exercise.cases(), exercise.cases(1)
    if exercise.draw is not exercises.nothing:
        assert first != other and len(shown) >= 5
    assert len(hidden) == len(set(hidden) | set(shown)) == 4 * len(shown)
    assert len(set(exercise.cases(2)) & set(hidden)) == len(shown)


def test_the_inputs_of_an_update_reach_beyond_the_clips():
    """In the notebook already, with the entropy on, in several parts, with and without a critic."""
    exercise = exercises.EXERCISES["add_gradients"]
    ratios, moves = [], []
    for i in exercise.cases():
        inputs = exercise.inputs(i)
        batch, models, cfg = inputs["batch"], inputs["models"], inputs["cfg"]
        mask = batch["mask"]
        logp, _ = rm.token_logps(models.policy, batch, cfg)
        ratios.append((logp - batch["old_logp"][mask]).exp())
        if models.critic is not None:
            moves.append(rm.token_values(models.critic, batch) - batch["value"][mask])
        parts = list(rm.micro_batches(batch, inputs["rows"], cfg.micro_tokens))
        assert len(parts) > 1 and cfg.entropy_coef > 0
    for numbers, least, most in ((ratios, 0.8, 1.2), (moves, -rm.VALUE_CLIP, rm.VALUE_CLIP)):
        numbers = torch.cat(numbers)
        assert (numbers < least).sum() > 5 and (numbers > most).sum() > 5
    assert 0 < len(moves) < len(ratios)


def test_the_turns():
    """In the notebook already some turns win, some end without, some go on, some are invalid, and
    one is cut off.
    """
    exercise = exercises.EXERCISES["take_turn"]
    found = [checks.spec_of(exercise, i) for i in exercise.cases()]
    names = ("traj.success", "traj.done", "traj.turns.0.valid")
    ends = {tuple(spec[f"{name} afterwards"] for name in names) for spec in found}
    assert ends >= {(True, True, True), (False, True, True), (False, False, True),
                    (False, False, False)}
    assert 5 in [spec["traj.turns.0.tokens afterwards"] for spec in found]


def test_probabilities_matter_to_a_random_player():
    """In the windy lake: by hand, where the wind blows from beside the goal into it or past it."""
    lake = exercises.WindyLake(size=2)
    lake.level, lake.state = {"goal": (1, 1), "holes": ()}, (0, 1)
    random, optimal = envs.yardsticks(lake, 1)
    # Down wins for sure. After each of the other three moves the wind does, with 0.3.
    assert random[1] == pytest.approx((1 + 3 * 0.3) / 4) and optimal[1] == pytest.approx(1)


def loses_its_points(name, words, answer):
    """In the lecturer's inputs. In the notebook's, too, with a message that says what it may be."""
    exercise = exercises.EXERCISES[name]
    hidden = exercise.cases(1)[exercise.shown:]
    assert checks.check(exercise, answer, hidden), "passes the hidden inputs"
    said = checks.check(exercise, answer, exercise.cases())
    if words == "no hint":
        assert said and "Hint" not in said
    else:
        assert words in said and (said or not words), said or "keeps its points"


@pytest.mark.parametrize("scale, at_0, hint", [
    (1.5, 1.0, "all numbers are 1.5 times"), (1.0, 0.0, "0, not nan"),
    (1.5, 0.0, "there is a nan or an inf")])
def test_beside_an_inf_nothing_is_close(scale, at_0, hint):
    """A usual mistake of this exercise gives nan and inf where all returns are equal."""
    def answer(R, norm="std"):
        A, std = R - R.mean(1, keepdim=True), R.std(1, keepdim=True)
        if norm == "mean":
            return scale * A
        equal = std < 1e-4
        return scale * (~equal if at_0 else 1) * A / torch.where(equal, at_0, std)
    exercise = exercises.EXERCISES["grpo_advantages"]
    assert hint in checks.check(exercise, answer, exercise.cases())


def test_a_hint_needs_all_cases():
    """A mistake in one case alone, where it gives the numbers of a usual mistake, is another one.
    """
    exercise = exercises.EXERCISES["value_loss"]
    calls = []

    def answer(value, old_value, target):
        calls.append(1)
        loss = rm.value_loss(value, old_value, target)
        return 2 * loss if len(calls) == 1 else loss + 1
    said = checks.check(exercise, answer, exercise.cases())
    assert "the half is missing" not in said and "Spec" in said


@pytest.mark.parametrize("name", ["Trajectory", "gae", "outcomes"])
def test_the_shipped_function_itself_is_no_answer(name, monkeypatch, capsys):
    monkeypatch.setattr(course, "RESULTS", {})
    course.use(name, course.SHIPPED[name])
    assert not course.passed(name) and "an answer of your own" in capsys.readouterr().out


def test_an_agent_that_did_not_learn_earns_nothing_in_the_table_either(monkeypatch, capsys):
    monkeypatch.setattr(course, "RESULTS", {"settings": True})
    with pytest.raises(course.NoPoints):
        course.earned("settings", good=False)
    course.score()
    assert "0 of 20" in capsys.readouterr().out


def test_hints_of_missing_gradients_and_of_time(monkeypatch):
    exercise = exercises.EXERCISES["policy_loss"]
    answer = run(answers.SOLVED["policy_loss"], "policy_loss")
    said = checks.check(exercise, torch.no_grad()(answer), exercise.cases())
    assert "no gradient arrives" in said and "that of 1 x the first number" in said
    monkeypatch.setattr(checks, "SECONDS", 0.2)

    def slow(env, horizon):
        while True:
            pass
    assert "again and again" in checks.check(exercises.EXERCISES["yardsticks"], slow, [0])


def test_any_word_is_a_secret(monkeypatch, capsys):
    """`export HIDDEN_CHECKS=...`, taken literally, once cost all students all points."""
    answer = run(answers.SOLVED["policy_loss"], "policy_loss")
    shown = exercises.EXERCISES["policy_loss"].shown
    for word, cases in (("", shown), ("...", 4 * shown), ("7", 4 * shown)):
        monkeypatch.setenv("HIDDEN_CHECKS", word)
        course.use("policy_loss", answer)
        assert course.passed("policy_loss")
        assert f"right in every case ({cases})" in capsys.readouterr().out


def test_replacing_the_shipped_functions_fools_nobody(monkeypatch):
    """A student puts a wrong function in the place of ragen_mini's: this check knows better, and so
    does the next.
    """
    _, wrong = WRONG["policy_loss"][0]
    wrong = run(wrong, "policy_loss")
    monkeypatch.setattr(rm, "policy_loss", wrong)
    exercise = exercises.EXERCISES["policy_loss"]
    assert checks.check(exercise, wrong, exercise.cases())
    monkeypatch.setattr(rm, "MAX_GRAD_NORM", 1e9)
    _, wrong = WRONG["outcomes"][0]
    monkeypatch.setattr(envs.FrozenLake, "outcomes", run(wrong, "outcomes"))
    exercise = exercises.EXERCISES["yardsticks"]
    assert not checks.check(exercise, run(RIGHT["yardsticks"][0], "yardsticks"), exercise.cases())


def test_learned_needs_more_than_chance(monkeypatch, capsys):
    def rows(before, after):
        return [{"eval": {"sokoban": before}}, {"reward": 1.0}, {"eval": {"sokoban": after}}]
    monkeypatch.setattr(course, "RESULTS", {"settings": False})
    assert not course.learned(rows(0.4, 0.6))
    assert "the shipped settings: repair yours" in capsys.readouterr().out
    course.RESULTS["settings"] = True
    assert course.learned(rows(0.4, 0.6))
    assert not course.learned(rows(0.4, 0.45)) and not course.learned(rows(0.6, 0.4))
    assert not course.learned(rows(0.4, 0.9)[:1])
    said = capsys.readouterr().out
    assert "before 0.40 [0.34, 0.46]" in said and "it has grown" in said and "not grown" in said
    course.earned("settings")
    assert capsys.readouterr().out == "1 of 1 points\n"


def test_zero_is_drawn(monkeypatch):
    """A logarithmic axis has no place for it."""
    monkeypatch.setattr(plt, "show", lambda: None)
    logs = course.shipped_runs()
    course.draw_runs({"right": logs["right, ppo"], "with the bug": logs["sample"]},
                     ["reward_std", "grad_norm"])
    spread, norms = plt.gcf().axes
    assert spread.get_yscale() == "linear" and spread.get_ylim()[0] < 0
    assert spread.get_xlabel() == "iteration"
    assert len(spread.lines[1].get_ydata()) == 10  # then the program gave it up
    plt.close("all")


def test_the_live_picture(tmp_path, monkeypatch, pictures):
    """`watch` draws before a row is logged, every five iterations and at the end. Success in
    evaluations is in the picture.
    """
    import IPython.display
    shown = []
    evaluations = []
    draw = course.plots.draw_evaluations
    monkeypatch.setattr(course.plots, "draw_evaluations",
                        lambda *args: evaluations.append(1) or draw(*args))
    monkeypatch.setattr(IPython.display, "display", shown.append)
    config = dict(env="bandit", model="tiny", eval_prompts=1, online_k=1, iterations=7)
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    log = tmp_path / "log.jsonl"
    log.write_text("")
    cfg = rm.Config(model="tiny", device="cpu", env="bandit", iterations=7, out=str(tmp_path))
    for i in range(8):
        row = {"iteration": i, "reward": 0.1 * i, "entropy": 1.0}
        if i == 0:
            row = {"iteration": 0, "eval": {"bandit": 0.4}}
        assert not course.watch(row, [], None, cfg)
        log.write_text(log.read_text() + json.dumps(row) + "\n")
        assert len(shown) == len(evaluations) == (i >= 5) + (i >= 7)
    assert shown[0].data.startswith(b"\x89PNG")


def rows_of_drawing(draw):  # -> what is written, line by line from the top
    draw()
    lines = {}
    for text in plt.gcf().axes[0].texts:
        x, y = text.get_position()
        if x >= 0 and not isinstance(text, plt.Annotation):  # which is an arrow
            lines.setdefault(y, []).append((x, text.get_text()))
    plt.close("all")
    return [[text for _, text in sorted(line)] for _, line in sorted(lines.items(), reverse=True)]


def test_the_drawings(monkeypatch):
    """The shift as `collate` makes it, and GAE by hand."""
    monkeypatch.setattr(plt, "show", lambda: None)
    words, mine, rewards, _ = zip(*drawings.EPISODE)
    traj = rm.Trajectory(None, 0, 10)
    traj.ids, traj.mask, traj.reward = list(range(8)), list(mine), list(rewards)
    traj.old_logp = [0.0] * 8
    batch = rm.collate([traj], "cpu")
    _, *rows = rows_of_drawing(drawings.shift)
    for row, name in zip(rows, ("inputs", "targets", "mask", "reward"), strict=True):
        found = batch[name][0].tolist()
        assert row == [words[x] if name in ("inputs", "targets") else str(x) for x in found]
    _, _, _, delta, advantage, _ = rows_of_drawing(drawings.gae)
    assert [x for x in delta if x] == ["0.10", "0.30", "0.10", "0.30"]
    # 0.3; 0.1 + 0.3/2; 0.3 + 0.25/2; 0.1 + 0.425/2
    assert [float(x) for x in advantage if x] == pytest.approx([0.3125, 0.425, 0.25, 0.3], abs=6e-3)


def test_a_shortest_way_out():
    """It wins, and by dynamic programming nothing shorter does."""
    env = envs.make("sokoban")
    for seed in range(3):
        env.reset(seed)
        way = exercises.solve(env)
        chances = envs.yardsticks(env, len(way))[1]
        assert list(chances) == [0] * len(way) + [1]
        for action in way:
            _, _, _, _, info = env.step(action)
        assert info["success"]


# --------------------------------------------------------------------------- text and shipped logs
def test_the_paradox_on_paper():
    """By hand: the mean of the group moves by 3/4 of the difference. Divided by the std, the only
    one of four is 3/2.
    """
    by_hand = (0.75 * (0.25 - 0.15), 0.25 * 1.5 - 0.75 * 1.5)
    assert exercises.expected_advantages() == pytest.approx(by_hand, abs=1e-4)


def test_starpo_s_makes_one_update():
    """In the paper 2 x 16 = 32 trajectories are one minibatch, 8 x 16 are four."""
    cfg = rm.Config(model="owner/name")
    assert cfg.prompts * cfg.rollouts == 4 * cfg.minibatch_size == 128 and cfg.epochs == 1
    R = torch.randn(cfg.prompts, cfg.rollouts)
    kept = rm.uncertainty_filter(R, rm.STARPO_S["keep"])
    assert len(kept) * cfg.rollouts == cfg.minibatch_size


def exact_mean_and_std(weight, x=0.5, N=2, T=2):
    """Of the estimated slope, over all episodes that N times T pulls can give."""
    cases = [(1 - x, False, 0.15), (x / 4, True, 1.0), (3 * x / 4, True, 0.0)]  # of a pull
    total = square = 0.0
    for pulls in itertools.product(cases, repeat=N * T):
        chance = math.prod(pull[0] for pull in pulls)
        risky = torch.tensor([pull[1] for pull in pulls]).view(N, T)
        reward = torch.tensor([pull[2] for pull in pulls]).view(N, T)
        found = float(exercises.estimated_slope(risky, reward, x, weight))
        total += chance * found
        square += chance * found ** 2
    return total, math.sqrt(square - total ** 2)


def test_the_slope_of_the_bandit():
    """Exercise 7: the mean over all that can happen is the slope, with the group's mean times
    1 - 1/N. No weight spreads more than the bare return.
    """
    found = {weight: exact_mean_and_std(weight)
             for weight in ("return", "constant", "to come", "group")}
    for weight, (mean, _) in found.items():
        assert mean == pytest.approx(0.2 * (0.5 if weight == "group" else 1), abs=1e-6)
    assert found["return"][1] > found["to come"][1]


def test_the_collapse_is_as_the_text_says(monkeypatch):
    """And the order of the rubric: when the lines of the picture leave their bands."""
    run = json.loads((checks.COURSE / "collapse.jsonl").read_text())
    config, rows = run["config"], run["rows"]
    assert config["starpo_s"] and config["env"] == "bandit" and config["model"] == "tiny"
    assert config["lr"] == pytest.approx(5 * rm.FOR_TINY["lr"])
    assert all(row["iteration"] == i for i, row in enumerate(rows)) and len(rows) == 195
    valid = [row.get("valid", 1.0) for row in rows]
    assert valid[56] < 0.9 and valid[108] < 0.9 and min(valid[109:161]) > 0.9
    assert max(valid[171:]) < 0.5 and max(valid[175:]) < 0.002
    monkeypatch.setattr(plt, "show", lambda: None)
    course.show_collapse()
    left = {}
    for ax in plt.gcf().axes:
        low, high = ax.patches[0].get_y(), ax.patches[0].get_y() + ax.patches[0].get_height()
        x, y = ax.lines[0].get_data()
        left[ax.get_title()] = x[(x > 145) & ((y < low) | (y > high))][0]
    assert (left["entropy"], left["grad_norm"]) == (157, 158)
    assert left["grad_norm"] + 14 <= left["valid"] <= left["reward_std"]
    plt.close("all")


def test_the_shipped_runs_show_what_the_text_says():
    logs = course.shipped_runs()
    evals = {name: course.series(*log, "eval")[1] for name, log in logs.items()}
    last = {name: values[-1] for name, values in evals.items()}
    assert set(logs) == set(course.RUNS)
    assert not course.gained(last["returns"], last["right, grpo"] - 0.2)
    assert course.gained(last["returns"], last["right, grpo"])
    assert not course.gained(last["compute_advantages"], last["right, ppo"])
    norms = {name: np.mean(course.series(*logs[name], "grad_norm")[1])
             for name in ("right, ppo", "compute_advantages")}
    assert norms["compute_advantages"] > 2 * norms["right, ppo"]
    assert max(course.series(*logs["sample"], "reward_std")[1]) == 0 and last["take_turn"] < 0.2


def test_the_paradox_in_training_is_as_the_text_says():
    """With the std most learn more slowly, one of eight unlearns: seed 5, from 0.40 to 0.17."""
    logs = course.shipped_runs()
    evals = {norm: [course.series(*logs[f"bandit, {norm}, {seed}"], "eval")[1] for seed in range(8)]
             for norm in ("mean", "std")}
    slower = [a[-1] < b[-1] for a, b in zip(evals["std"], evals["mean"])]
    assert sum(slower) > 4
    fell = [seed for seed, values in enumerate(evals["std"]) if values[-1] <= values[0]]
    assert fell == [5]
    assert [f"{evals['std'][5][i]:.2f}" for i in (0, -1)] == ["0.40", "0.17"]
    assert min(values[-1] - values[0] for values in evals["mean"]) > 0


def test_what_is_said_of_online_k_is_in_its_runs():
    found = {}
    for one in course.online_k_runs().values():
        updates, success = course.plots.evaluations(one, "sokoban")
        found[one.config["online_k"], one.config["seed"]] = dict(zip(updates, success))
    text = text_of_cell("text-online-k")
    for k, said in ((1, "0.77"), (10, "0.58")):
        after_20 = [points[20] for (k_of, _), points in found.items() if k_of == k]
        assert f"{np.mean(after_20):.2f}" == said and said in text


def test_the_picture_of_online_k():
    assert course.show_online_k().data.startswith(b"\x89PNG")


def test_the_lecturers_table_names_what_there_is():
    """course/README.md: every function, and every exercise once."""
    table = re.findall(r"^\| [^|]+ \| (.*?) \| (.*?) \| (\d+) \|$",
                       (checks.COURSE / "README.md").read_text(), re.M)
    assert len(table) == 8
    for code, _, _ in table:
        for name in re.findall(r"`(\w+)`", code):
            assert any(hasattr(module, name) for module in (rm, envs, course.plots)), name
    numbers = [int(number) for _, exercises_of, _ in table
               for number in re.findall(r"\d+", exercises_of.partition("in words")[0])]
    assert numbers == list(range(17))
    in_the_notebook = re.findall(r"^\| \d .*? \| \d+ \| (\d+) \|", source(BOOK["cells"][0]), re.M)
    assert sum(int(minutes) for *_, minutes in table) == sum(map(int, in_the_notebook))
