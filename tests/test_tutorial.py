"""tutorial.ipynb: its form, its checks against what students write, and that both meet in its cells. Kernels, nbgrader
and whole classes take longer: slow_course.py."""
import ast
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
import envs
import exercises
import ragen_mini as rm
from staff import answers
from staff.answers import RIGHT, WRONG

BOOK = answers.notebook()
CODE = [cell for cell in BOOK["cells"] if cell["cell_type"] == "code"]
PROSE = [cell for cell in BOOK["cells"] if cell["cell_type"] == "markdown"]
GRADED = [name for name in exercises.EXERCISES]


def source(cell):
    return "".join(cell["source"])


def cell_of(name):
    return next(cell for cell in CODE if cell["id"] == name)


def run(text, name):  # -> what the cell defines
    space = dict(__name__="__main__", torch=torch, np=np, rm=rm, envs=envs, re=re, math=math, Counter=dict)
    exec(text, space)
    return space[name]


def lists():
    for name, wrong in WRONG.items():
        for number, (words, text) in enumerate(wrong):
            yield pytest.param(name, words, text, id=f"{name}-{number}")


# ----------------------------------------------------------------------------------------------------- its form
def test_the_notebook_is_stripped_and_small():
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    assert all(len(source(cell).splitlines()) <= 30 for cell in CODE)
    ids = [cell["id"] for cell in BOOK["cells"]]
    assert len(set(ids)) == len(ids)


def test_metadata_of_nbgrader():
    """Schema 3; every exercise has an answer cell and a locked cell with its points, in this order; 20 in all."""
    found = {}
    for place, cell in enumerate(CODE):
        data = cell["metadata"].get("nbgrader")
        if data:
            assert data["schema_version"] == 3 and data["grade_id"] == cell["id"] and data["grade_id"] not in found
            assert data["solution"] != data["locked"] and not data["task"], data
            assert ("points" in data) == data["grade"]
            found[data["grade_id"]] = (place, data)
    for name, exercise in exercises.EXERCISES.items():
        place, data = found[name]
        assert data["points"] == exercise.points and data["locked"] and found[f"{name}-answer"][0] < place
        assert "raises-exception" in CODE[place]["metadata"]["tags"] and source(CODE[place]).startswith('"""Check ')
    graded = [data["points"] for _, data in found.values() if data["grade"]]
    assert sum(graded) == 20 and len(graded) == len(GRADED)


def test_points_and_exercises_in_the_text():
    """The table at the top adds up, and every exercise's points stand in its heading."""
    table = re.findall(r"^\| \d .*? \| (\d+) \| (\d+) \|", source(BOOK["cells"][0]), re.M)
    assert sum(int(points) for points, _ in table) == 20
    text = "\n".join(map(source, PROSE))
    # those of the bug hunt stand in its text
    for part, (_, minutes) in zip(re.split(r"^## ", text, flags=re.M)[1:6], table):
        assert sum(map(int, re.findall(r"### Exercise .*?(\d+) minutes\)", part))) == int(minutes)
    core = re.findall(r"### Exercise (\d+).*?\((.*?) points?, (\d+) minutes\)( · core)?", text)
    assert [int(number) for number, *_ in core] == [number for number in range(17) if number != 14]
    marked = sum(int(minutes) for *_, minutes, marked in core if marked)
    assert f"*core* (6½ points, {marked} minutes); with the text" in text
    of_core = {number for number, *_, is_core in core if is_core}
    names = {name for name, e in exercises.EXERCISES.items() if e.title.split()[0] in of_core}
    page = (checks.COURSE / "staff/points.py").read_text()
    listed = set(re.findall(r'"([\w-]+)"', page[page.index("CORE = ("):page.index("if __name__")]))
    assert listed == names | {"words-baseline", "words-ratio"} and sum(exercises.EXERCISES[name].points for name in names) == 6.5
    for number, points, _, _ in core:
        value = float(points.replace("½", ".5"))
        assert value == sum(e.points for e in exercises.EXERCISES.values() if e.title.startswith(f"{number} "))


def test_the_prose_stays_short():
    """All that is not code, with its formulas and questions."""
    assert sum(len(source(cell).split()) for cell in PROSE) <= 3000


def test_questions_to_be_answered_in_words():
    """Graded by hand, apart from the 20 points of the checks: each has a rubric, and all are in the table of points."""
    rubric = re.findall(r"^## (\S+)\n((?:.+\n)+)", (checks.COURSE / "staff/rubric.md").read_text(), re.M)
    questions = [cell for cell in PROSE if "nbgrader" in cell["metadata"]]
    for number, (cell, (name, lines)) in enumerate(zip(questions, rubric, strict=True), 1):
        data = dict(grade_id=cell["id"], grade=True, solution=True, locked=False, task=False, points=1,
                    schema_version=3)
        assert cell["metadata"]["nbgrader"] == data and name == cell["id"]
        assert source(cell).startswith(f"**In words {number}** (1 point). ") and len(lines.splitlines()) <= 5
    asked = re.findall(r"^\| \d .*? \| \d+ \| \d+ \| (\d) \|", source(BOOK["cells"][0]), re.M)
    assert sum(map(int, asked)) == len(questions) == 6
    pages = [(checks.COURSE / name).read_text() for name in ("README.md", "staff/README.md")]
    assert "6 more" in source(BOOK["cells"][0]) and all("6 points" in page for page in pages)


@pytest.mark.parametrize("given", [dict(env="bandit"), dict(iterations=4), dict(iterations=2, eval_every=2)])
def test_training_accepts_what_its_check_accepts(given, monkeypatch):
    assert not checks.check(exercises.EXERCISES["settings"], lambda: given, [0])
    monkeypatch.setattr(rm, "train", lambda cfg, watch: (cfg, None))
    space = dict(vars(course), rm=rm, settings=lambda: given, use=lambda name, answer: answer,
                 SETTINGS=exercises.SETTINGS)
    exec(source(cell_of("train")), space)
    expected = exercises.SETTINGS | dict(eval_every=max(1, given.get("iterations", 20) // 4)) | given
    assert {name: getattr(space["cfg"], name) for name in expected} == expected


def test_every_answer_of_the_staff_can_be_made():
    """If you edited one of the three files: these pieces of text are to be adapted in course/answers.txt or course/staff."""
    assert not answers.MISSING


@pytest.mark.parametrize("name", exercises.BUGS)
def test_a_function_with_a_bug_is_the_shipped_one_with_this_bug(name):
    """Apart from comments, docstring, the module's name and the tables of advantages: so it cannot go out of step
    with the program."""
    def tree(text):
        for shipped, taught in (("rm.", ""), ("cfg.algo in BY_CRITIC:", "cfg.algo == 'ppo':"),
                                ("BY_CRITIC[cfg.algo](", "gae("), ("BY_GROUP[cfg.algo](", "grpo_advantages(")):
            text = text.replace(shipped, taught)
        function = ast.parse(text).body[0]
        if isinstance(function.body[0], ast.Expr):
            del function.body[0]
        return ast.unparse(function)
    wrong = checks.text_of(exercises.EXERCISES[name].solution)
    for old, new in zip(exercises.BUGS[name][::2], exercises.BUGS[name][1::2]):
        wrong = wrong.replace(old, new)
    assert tree(source(cell_of(f"{name}-answer"))) == tree(wrong), "only the text changed? Then adapt course/ (see tests/README.md)"


# -------------------------------------------------------------------------------------------------- the checks
@pytest.mark.parametrize("name", GRADED)
def test_the_inputs(name):
    """The same ones for the same number; at least five in the notebook, unless an exercise has none, and three times as
    many of the same kind beside them, others for every number of a lecturer."""
    exercise = exercises.EXERCISES[name]
    first, again, other = (dict(checks.parts(exercise.inputs(i), "")) for i in (1000, 1000, 2000))
    assert first == again
    if exercise.draw is not exercises.nothing:
        assert first != other and len(exercise.cases()) >= 5
    assert len(exercise.cases(1)) == len(set(exercise.cases(1)) | set(exercise.cases())) == 4 * len(exercise.cases())
    assert len(set(exercise.cases(2)) & set(exercise.cases(1))) == len(exercise.cases())


def test_the_inputs_of_an_update_reach_beyond_the_clips(monkeypatch):
    """In the notebook already, with the entropy on, in several parts, with and without a critic."""
    exercise = exercises.EXERCISES["add_gradients"]
    ratios, moves = [], []
    for i in exercise.cases():
        inputs = exercise.inputs(i)
        batch, models, cfg = inputs["batch"], inputs["models"], inputs["cfg"]
        mask = batch["mask"]
        logp, _ = rm.token_logps(models.policy, batch, cfg)
        ratios.append((logp - batch["old_logp"][mask]).exp())
        if models.critic:
            moves.append(rm.token_values(models.critic, batch) - batch["value"][mask])
        monkeypatch.setattr(rm, "MICRO_TOKENS", exercise.constants(i)["MICRO_TOKENS"])
        assert len(list(rm.micro_batches(batch, inputs["rows"]))) > 1 and cfg.entropy_coef > 0
    for numbers, least, most in ((ratios, 0.8, 1.2), (moves, -0.4, 0.4)):
        numbers = torch.cat(numbers)
        assert (numbers < least).sum() > 5 and (numbers > most).sum() > 5
    assert 0 < len(moves) < len(ratios)


def test_the_turns():
    """In the notebook already: some win, some end without, some go on, some are invalid, one is cut off."""
    exercise = exercises.EXERCISES["take_turn"]
    found = [checks.spec_of(exercise, i) for i in exercise.cases()]
    ends = [(spec["traj.success afterwards"], spec["traj.done afterwards"], spec["traj.turns.0.valid afterwards"])
            for spec in found]
    assert set(ends) >= {(True, True, True), (False, True, True), (False, False, True), (False, False, False)}
    assert 5 in [spec["traj.turns.0.tokens afterwards"] for spec in found]


def loses_its_points(name, words, answer):
    """In the lecturer's inputs; in the notebook's, too, with a message that says what it may be."""
    exercise = exercises.EXERCISES[name]
    assert checks.check(exercise, answer, exercise.cases(1)[exercise.shown:]), "passes the hidden inputs"
    said = checks.check(exercise, answer, exercise.cases())
    assert words in said and (said or not words), said or "keeps its points"


@pytest.mark.parametrize("scale, at_0, hint", [(1.5, 1.0, "all numbers are 1.5 times"), (1.0, 0.0, "0, not nan"),
                                               (1.5, 0.0, "there is a nan or inf")])
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


def test_there_are_enough_answers():
    """A dozen wrong ones for every function of the program. Nine of ten are caught in the notebook already, most of
    them named."""
    few = [name for name, wrong in WRONG.items() if len(wrong) < 12]
    assert few == ["moves", "settings", "returns", "paradox"]
    all_words = [words for wrong in WRONG.values() for words, _ in wrong]
    assert len(all_words) >= 236 and sum(map(len, RIGHT.values())) >= 60
    assert all_words.count("") <= len(all_words) / 10
    assert sum(words not in ("", "Yours") for words in all_words) > 0.8 * len(all_words)


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
        assert course.passed("policy_loss") and f"right in every case ({cases})" in capsys.readouterr().out


def test_replacing_the_shipped_functions_fools_nobody(monkeypatch):
    """A student puts a wrong function in the place of ragen_mini's: this check knows better, and so does the next."""
    wrong = run(WRONG["policy_loss"][0][1], "policy_loss")
    monkeypatch.setattr(rm, "policy_loss", wrong)
    assert checks.check(exercises.EXERCISES["policy_loss"], wrong, exercises.EXERCISES["policy_loss"].cases())
    monkeypatch.setattr(rm, "MAX_GRAD_NORM", 1e9)
    monkeypatch.setattr(envs.FrozenLake, "outcomes", run(WRONG["outcomes"][0][1], "outcomes"))
    exercise = exercises.EXERCISES["yardsticks"]
    assert not checks.check(exercise, run(RIGHT["yardsticks"][0], "yardsticks"), exercise.cases())


def test_learned_needs_more_than_chance(monkeypatch, capsys):
    def rows(before, after):
        return [{"eval": {"sokoban": before}}, {"reward": 1.0}, {"eval": {"sokoban": after}}]
    monkeypatch.setattr(course, "RESULTS", {"settings": False})
    assert not course.learned(rows(0.4, 0.6)) and "the shipped settings: repair yours" in capsys.readouterr().out
    course.RESULTS["settings"] = True
    assert course.learned(rows(0.4, 0.6)) and not course.learned(rows(0.4, 0.45)) and not course.learned(rows(0.6, 0.4))
    assert not course.learned(rows(0.4, 0.9)[:1])
    said = capsys.readouterr().out
    assert "before 0.40 [0.34, 0.46]" in said and "it has grown" in said and "not grown" in said
    course.earned("settings")
    assert capsys.readouterr().out == "1 of 1 points\n"


def test_zero_is_drawn(monkeypatch):
    """A logarithmic axis has no place for it."""
    monkeypatch.setattr(plt, "show", lambda: None)
    runs = course.shipped_runs()
    course.draw_runs({"right": runs["right, ppo"], "with the bug": runs["sample"]}, ["reward_std", "grad_norm"])
    spread, norms = plt.gcf().axes
    assert spread.get_yscale() == "linear" and spread.get_ylim()[0] < 0 and spread.get_xlabel() == "iteration"
    assert len(spread.lines[1].get_ydata()) == 10  # then the program gave it up
    plt.close("all")


def test_the_live_picture(tmp_path, monkeypatch, pictures):
    """`watch` draws before a row is logged, every five iterations and at the end."""
    import IPython.display
    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    config = dict(env="bandit", model="tiny", eval_prompts=1, iterations=7)
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    log = tmp_path / "log.jsonl"
    log.write_text("")
    cfg = rm.Config(model="tiny", device="cpu", env="bandit", iterations=7, out=str(tmp_path))
    for i in range(8):
        row = {"iteration": 0, "eval": {"bandit": 0.4}} if i == 0 else {"iteration": i, "reward": 0.1 * i,
                                                                        "entropy": 1.0}
        assert not course.watch(row, [], [], None, cfg)
        log.write_text(log.read_text() + json.dumps(row) + "\n")
        assert len(shown) == (i >= 5) + (i >= 7)
    assert shown[0].data.startswith(b"\x89PNG")


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


# ------------------------------------------------------------------------------------------- text and shipped logs
def test_the_paradox_on_paper():
    """By hand: the mean of the group moves by 3/4 of the difference; divided by the std the only one of four is 3/2."""
    assert exercises.expected_advantages() == pytest.approx((0.75 * (0.25 - 0.15), 0.25 * 1.5 - 0.75 * 1.5), abs=1e-4)


@pytest.mark.parametrize("beta2, first, whole", [(0.999, "3.16", "32"), (0.9, "0.32", "6")])
def test_adam_after_a_calm(beta2, first, whole):
    """By how many learning rates one gradient moves a weight at once, and until its momentum is spent."""
    weight = torch.zeros(1, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=1.0, betas=(0.9, beta2))
    weight.grad = torch.zeros(1)
    adam.step()
    adam.state[weight]["step"] += 20_000  # of quiet, as a calm of so many steps would leave it
    weight.grad = torch.full((1,), -5.0)
    adam.step()
    assert f"{weight.item():.2f}" == first
    weight.grad = torch.zeros(1)
    for _ in range(100):
        adam.step()
    assert f"{weight.item():.0f}" == whole
    text = next(source(cell) for cell in PROSE if cell["id"] == "text-take_step")
    assert first in text and f"{whole} in all" in text or f"{first} and {whole}" in text


def test_adam_after_a_short_calm():
    """v was divided by 1 - beta2^t, so that one gradient moves less."""
    text = next(source(cell) for cell in PROSE if cell["id"] == "text-take_step")
    weight = torch.zeros(1, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=1.0)
    for i in range(120):
        weight.grad = torch.full((1,), -5.0 if i == 119 else 0.0)
        adam.step()
    assert f"{weight.item():.2f}" == "1.06" and "1.06 at step 120" in text


def test_no_step_is_longer_than_the_rate_where_both_averages_are_equally_long():
    """In words 5: beta2 = 0.9. It is reached where a weight's gradients are all alike."""
    g = torch.Generator().manual_seed(0)
    weight = torch.zeros(1000, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=1.0, betas=(0.9, 0.9), eps=1e-30)
    longest = 0.0
    for _ in range(200):
        before = weight.detach().clone()
        weight.grad = torch.randn(1000, generator=g) ** 5
        weight.grad[0] = 1e-3
        adam.step()
        longest = max(longest, (weight.detach() - before).abs().max().item())
    assert longest == pytest.approx(1, abs=1e-3)


def test_the_collapse_is_as_the_text_says():
    config, rows = exercises.collapse_rows()
    assert config["starpo_s"] and config["env"] == "bandit" and config["model"] == "tiny" and config["lr"] > 1e-3
    assert all(row["iteration"] == i for i, row in enumerate(rows)) and len(rows) == 195
    valid = [row.get("valid", 1.0) for row in rows]
    assert valid[56] < 0.9 and valid[108] < 0.9 and min(valid[109:161]) > 0.9
    assert max(valid[171:]) < 0.5 and max(valid[175:]) < 0.002


def test_what_moved_first_does_not_hang_on_the_rule():
    _, rows = exercises.collapse_rows()
    for until, moved in ((157, []), (158, ["entropy"]), (173, ["entropy"]), (174, ["entropy", "valid"])):
        assert exercises.order_of_alarm(rows[:until]) == moved
    for window, factor, band in itertools.product((5, 7), (1.5, 2, 3), ((123, 143), (130, 145), (113, 143))):
        order = exercises.order_of_alarm(rows, window=window, factor=factor, band=band)
        assert order == ["entropy", "valid", "reward_std"]


def test_the_shipped_runs_show_what_the_text_says():
    runs = course.shipped_runs()
    last = {name: course.series(*run, "eval")[1][-1] for name, run in runs.items()}
    assert set(runs) == set(course.RUNS)
    assert not course.gained(last["returns"], last["right, grpo"] - 0.2) and course.gained(last["returns"],
                                                                                           last["right, grpo"])
    assert not course.gained(last["compute_advantages"], last["right, ppo"])
    norms = {name: np.mean(course.series(*runs[name], "grad_norm")[1]) for name in ("right, ppo", "compute_advantages")}
    assert norms["compute_advantages"] > 2 * norms["right, ppo"]
    assert max(course.series(*runs["sample"], "reward_std")[1]) == 0 and last["take_turn"] < 0.2
    risky = {norm: [last[f"bandit, {norm}, {seed}"] for seed in range(8)] for norm in ("mean", "std")}
    assert min(risky["mean"][0], risky["std"][0]) > 0.9 and np.mean(risky["mean"]) > np.mean(risky["std"]) + 0.2
