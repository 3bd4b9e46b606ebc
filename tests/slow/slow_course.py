"""The tutorial in real kernels, its checks against right and wrong answers, and a class of
notebooks in nbgrader. It takes some minutes, so it is run by name:

    python -m pytest -q tests/slow/slow_course.py    needs nbgrader beside requirements.txt
"""
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import nbclient
import nbformat
import pytest

# First, because it says where the course is.
from test_tutorial import CODE, GRADED, cell_of, lists, loses_its_points, run, source
import checks
import course
import exercises
import ragen_mini as rm
from staff import answers
from staff.answers import RIGHT, SOLVED, WRONG, notebook, save

ROOT = checks.ROOT
# Of the training cell. Settings of one's own stay as they are.
SHORTER = {"train": ("SETTINGS | settings()", "SETTINGS | dict(iterations=2) | settings()")}
TRAINED = ("train", "settings", "show-run", "show-before-after", "show-xray", "show-stale")


# ------------------------------------------------------------------------------ stubs and plugging
def test_stubs_are_not_solved():
    for name, exercise in exercises.EXERCISES.items():
        text = source(cell_of(f"{name}-answer"))
        stub = "raise NotImplementedError()" in text and "# YOUR CODE HERE" in text
        assert stub or name in exercises.BUGS
        passes = not checks.check(exercise, run(text, name), exercise.cases())
        assert not passes, f"{name} passes as it is"


@pytest.mark.parametrize("name", exercises.BUGS)
def test_a_function_with_a_bug_is_right_when_the_line_is_repaired(name):
    text = source(cell_of(f"{name}-answer"))
    right, wrong = exercises.BUGS[name]
    assert text.count(wrong) == 1
    repaired = run(text.replace(wrong, right), name)
    exercise = exercises.EXERCISES[name]
    assert not checks.check(exercise, repaired, exercise.cases(1))


@pytest.mark.parametrize("name", GRADED)
def test_the_shipped_function_passes(name):
    exercise = exercises.EXERCISES[name]
    assert not checks.check(exercise, run(SOLVED[name], name), exercise.cases())


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_training_calls_what_was_plugged_in(algo, monkeypatch):
    names = re.findall(r'"(\w+)"', source(cell_of("plug-in")).partition("]")[0])
    assert len(names) == 11
    called = set()

    def counted(name, function):
        class Counted(function if isinstance(function, type) else object):
            def __init__(self, *args):
                called.add(name)
                super().__init__(*args)

        def counting(*args, **options):
            called.add(name)
            return function(*args, **options)
        return Counted if isinstance(function, type) else counting
    settings = dict(env="bandit", algo=algo, iterations=1, prompts=2, rollouts=4, eval_prompts=2)
    space = dict(rm=rm, tempfile=tempfile, passed=lambda name: True, SETTINGS={},
                 watch=lambda *_: False, use=lambda name, answer: answer,
                 settings=lambda: settings)
    for name in names:
        space[name] = counted(name, getattr(rm, name))
        monkeypatch.setattr(rm, name, getattr(rm, name))  # put back at the end
    exec(source(cell_of("plug-in")), space)
    exec(source(cell_of("train")), space)
    unused = {"grpo_advantages"} if algo == "ppo" else {"gae", "value_loss"}
    assert set(names) - called == unused


def test_plugged_in_answers_train_as_the_shipped_functions_do(tmp_path, monkeypatch):
    """Those of right_answers.py, written in another style: the same rows, but for rounding, and
    `tiny` with the same presets.
    """
    cfg = rm.Config(model="tiny", device="cpu", env="sokoban", iterations=1, prompts=2, rollouts=4,
                    minibatch_size=4, eval_every=0)
    rows = []
    for plug in (False, True):
        if plug:
            texts = {name: texts[0] for name, texts in RIGHT.items() if texts and hasattr(rm, name)}
            plugged = {name: run(text, name) for name, text in texts.items()
                       if name in source(cell_of("plug-in"))}
            assert len(plugged) == 11
            for name, answer in plugged.items():
                monkeypatch.setattr(rm, name, answer)
            assert rm.Config(model="tiny", device="cpu").lr == rm.FOR_TINY["lr"]
        rows.append(rm.train(rm.replace(cfg, out=str(tmp_path / str(plug))))[0][1])
    for name in ("reward", "success", "entropy", "valid", "grad_norm", "updates"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-3, abs=1e-5), name


def test_all_cells_but_training_run(monkeypatch, capsys):
    """From top to bottom as a student finds them. Only the graded ones fail, and the shipped
    functions train where nothing was written.
    """
    monkeypatch.setattr(course, "html", str)
    monkeypatch.chdir(checks.ROOT)
    shipped = {name: getattr(rm, name) for name in course.SHIPPED if hasattr(rm, name)}
    space = {"__name__": "__main__"}
    for cell in CODE:
        if cell["id"] not in TRAINED:
            try:
                exec(source(cell), space)
            except course.NoPoints:
                assert cell["id"] in exercises.EXERCISES
    plt.close("all")
    assert {name: getattr(rm, name) for name in shipped} == shipped
    assert capsys.readouterr().out.splitlines()[-1].split() == ["0", "of", "20"]


# -------------------------------------------------------------------------- right and wrong answers
def right_ones():
    for name, texts in RIGHT.items():
        for text in (SOLVED[name], *texts):
            yield name, text


@pytest.mark.parametrize("name, text", list(right_ones()))
def test_right_answers(name, text):
    exercise = exercises.EXERCISES[name]
    assert not checks.check(exercise, run(text, name), exercise.cases(1))


@pytest.mark.parametrize("name, words, text", list(lists()))
def test_wrong_answers(name, words, text):
    loses_its_points(name, words, run(text, name))


@pytest.mark.parametrize("name", GRADED)
def test_every_usual_mistake_is_known(name):
    """Its words are said in the notebook, where the staff's folder is not: so its pieces must be
    those of the shipped code.
    """
    usual = [words for words, *_ in checks.ANSWERS.get(name, ())]
    known = checks.usual_mistakes(exercises.EXERCISES[name])
    assert [words for words, _ in known] == usual


@pytest.mark.parametrize("answer", [
    None, 3, "gae", lambda *args, **named: None, lambda *args, **named: object(), lambda: 1 / 0,
    lambda *args, **named: exit(), lambda *args, **named: float("nan")])
@pytest.mark.parametrize("name", GRADED)
def test_no_answer_can_crash_a_check(name, answer, capsys):
    assert course.use(name, answer) is course.SHIPPED[name] and not course.passed(name)
    assert name in capsys.readouterr().out
    with pytest.raises(course.NoPoints):
        course.earned(name)
    # Running the check once more does not earn the points with the shipped one.
    course.use(name, course.SHIPPED[name])
    assert not course.passed(name)


# ---------------------------------------------------------------------------------- the experiment
def test_an_experiment_replaces_a_function_and_puts_it_back():
    shipped, groups = rm.grpo_advantages, []

    def rloo(R, norm):
        groups.append(R.shape)
        return R - (R.sum(1, keepdim=True) - R) / (R.shape[1] - 1)
    small = dict(prompts=2, rollouts=4, minibatch_size=8, iterations=2, algo="grpo")
    success = course.bandit_runs(seeds=(0, 1), grpo_advantages=rloo, **small)
    assert success.shape == (2, 2) and groups == [(2, 4)] * 4
    assert rm.grpo_advantages is shipped
    keeps_none = course.bandit_runs(seeds=(0,), uncertainty_filter=lambda R, keep: R.new_empty(0),
                                    **small | dict(iterations=rm.DEAD_AFTER + 2))
    assert keeps_none.shape == (1, rm.DEAD_AFTER + 2)
    with pytest.raises(AssertionError, match="has no rloo"):
        course.bandit_runs(rloo=rloo, **small)


def test_the_command_for_missing_curves():
    """Nothing is missing: it only has to find the project."""
    done = subprocess.run([sys.executable, ROOT / "course" / "course.py"], cwd="/",
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("all runs are in ")


# ------------------------------------------------------------------------------------------ kernels
def with_cell(book, text, after="imports"):  # the student adds a cell
    book = json.loads(json.dumps(book))
    place = [cell["id"] for cell in book["cells"]].index(after) + 1
    book["cells"].insert(place, dict(cell_type="code", id=f"own-{place}", metadata={}, source=text,
                                     outputs=[], execution_count=None))
    return book


def shorter(book):
    """The notebook with short training runs where nobody has chosen other settings."""
    for cell in book["cells"]:
        if cell["id"] in SHORTER:
            text = "".join(cell["source"])
            assert SHORTER[cell["id"]][0] in text
            cell["source"] = text.replace(*SHORTER[cell["id"]])
    return book


def run_all(book, folder=ROOT, **environment):  # -> the notebook, executed from top to bottom
    book = nbformat.reads(json.dumps(book), as_version=4)
    nbformat.validate(book)
    client = nbclient.NotebookClient(book, timeout=300, kernel_name="python3",
                                     resources={"metadata": {"path": str(folder)}})
    before = dict(os.environ)
    os.environ.update(environment, MPLBACKEND="module://matplotlib_inline.backend_inline")
    try:
        client.execute()  # raises where a cell fails that has no tag raises-exception
    finally:
        os.environ.clear()
        os.environ.update(before)
    return book


def points(book):  # -> the last line of score()
    return book["cells"][-1]["outputs"][0]["text"].splitlines()[-1].split()


@pytest.fixture
def short_default(monkeypatch):
    """The untouched notebook trains with the default settings: 2 iterations."""
    book = shorter(notebook())
    for cell in book["cells"]:
        if cell["id"] == "imports":
            text = "\nimport exercises\nexercises.SETTINGS['iterations'] = 2"
            cell["source"] = "".join(cell["source"]) + text
    return book


def test_run_all_of_the_untouched_notebook(short_default):
    """An error in every graded cell, and in no other."""
    book = run_all(short_default)
    assert points(book) == ["0", "of", "20"]
    failed = [cell["id"] for cell in book["cells"]
              if "error" in [output["output_type"] for output in cell.get("outputs", ())]]
    assert failed == list(exercises.EXERCISES)


def test_run_all_with_the_shipped_functions():
    book = run_all(shorter(notebook(SOLVED)))
    assert points(book) == ["20", "of", "20"]
    outputs = {cell["id"]: cell["outputs"] for cell in book["cells"] if cell["cell_type"] == "code"}
    assert "shipped" not in outputs["plug-in"][0]["text"], "the student's own functions train"
    for picture in ("show-board", "show-mask", "show-advantages", "show-xray"):
        assert "text/html" in outputs[picture][-1]["data"]
    for picture in ("show-slopes", "show-spread", "show-clip", "show-returns", "show-paradox",
                    "paradox-curves", "show-collapse", "show-run", "show-online-k"):
        assert "image/png" in outputs[picture][-1]["data"]
    slices = "".join(output["text"] for output in outputs["show-stale"]).splitlines()
    outside = [float(re.search(r"([\d.]+)% outside", line)[1]) for line in slices]
    assert slices[0].startswith("slice 1: ratios from 1.00 to 1.00, 0.0% outside")
    assert len(outside) == 4 and outside[3] > outside[1]
    assert not any("from 1.00 to 1.00" in line for line in slices[1:])


def test_a_notebook_alone_fetches_the_project(tmp_path):
    """As on Colab: the first two cells in an empty folder."""
    skip = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__")
    project = shutil.copytree(ROOT, tmp_path / "project", ignore=skip)
    author = ("-c", "user.name=a", "-c", "user.email=b")
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=project, check=True)
    (tmp_path / "alone").mkdir()
    book = notebook()
    wanted = ("get", "imports", "show-board")
    book["cells"] = [cell for cell in book["cells"] if cell["id"] in wanted]
    run_all(book, tmp_path / "alone", RAGEN_MINI=str(project), PIP_NO_INDEX="1", PIP_NO_DEPS="1")
    assert (tmp_path / "alone" / "ragen-mini" / "ragen_mini.py").exists()


def test_the_slides():
    """Their pictures can be drawn anew, and nbconvert makes a slide of each part, with its note."""
    from nbconvert import SlidesExporter
    book = run_all(json.loads((checks.COURSE / "slides.ipynb").read_text()), checks.COURSE)
    kinds = [cell["metadata"]["slideshow"]["slide_type"] for cell in book["cells"]]
    page, _ = SlidesExporter().from_notebook_node(book)
    assert page.count('<aside class="notes">') == kinds.count("notes") == kinds.count("slide")
    drawn = [cell for cell in book["cells"] if cell["metadata"]["slideshow"]["slide_type"] == "-"]
    assert len(drawn) == 4
    assert all("image/png" in cell["outputs"][-1]["data"] for cell in drawn)


def test_an_executed_copy():
    """Of a few cells. The command makes it of all."""
    book = notebook()
    wanted = ("get", "imports", "show-loop", "show-board")
    book["cells"] = [cell for cell in book["cells"] if cell["id"] in wanted]
    page = answers.executed(book)
    assert "data:image/png" in page and "You are solving a Sokoban puzzle" in page


# ----------------------------------------------------------------------------- a class, in nbgrader
# 19 points, and the default settings.
MOST = {name: text for name, text in SOLVED.items() if name != "settings"}
README = (ROOT / "course/staff/README.md").read_text()
ENDLESS = "def gae(reward, value, mask, gamma, lam):\n    while True:\n        pass"


def filled_in(book, solutions):  # {exercise: its cell} -> a notebook
    book = json.loads(json.dumps(book))
    for cell in book["cells"]:
        name = cell["id"].removesuffix("-answer")
        if cell["id"].endswith("-answer") and name in solutions:
            cell["source"] = solutions[name]
    return book


def without(*names):
    return 20 - sum(exercises.EXERCISES[name].points for name in names)


def unlucky(released):
    """Right in words of one's own, with mishaps: an endless function, a syntax error, no function,
    cells that fail or print without end.
    """
    solutions = MOST | {name: right[0] for name, right in RIGHT.items() if right}
    solutions |= {"gae": ENDLESS, "policy_loss": "def policy_loss(:\n    return",
                  "settings": "settings = 3"}
    book = filled_in(released, solutions)
    for own in ("%%time\n!echo hello\nfrom IPython.display import display\ndisplay('experiment')",
                "1 / 0", "print('x' * 10_000_000)"):
        book = with_cell(book, own)
    return book


def sly(released):
    """One answer that only hidden checks refuse, a cell that is missing, a check that was changed.
    """
    hidden = next(text for words, text in WRONG["parse_answer"] if words == "")
    _, wrong_gae = WRONG["gae"][0]
    book = filled_in(released, MOST | {"parse_answer": hidden, "gae": wrong_gae})
    book["cells"] = [cell for cell in book["cells"] if cell["id"] != "collate-answer"]
    for cell in book["cells"]:
        if cell["id"] == "gae":  # nbgrader puts its own check back
            cell["source"] = "import course\ncourse.RESULTS['gae'] = True"
    return book


def the_class(released):  # -> {student: (notebook, points)}
    """A notebook takes a minute, so two of them have many mishaps."""
    return {"right": (filled_in(released, SOLVED), 20),
            "untouched": (filled_in(released, {}), 0),
            "unlucky": (unlucky(released), without("gae", "policy_loss", "settings")),
            "sly": (sly(released), without("parse_answer", "gae", "collate", "settings"))}


@pytest.fixture
def course_folder(tmp_path, short_default):
    """A clean folder for a course, with the project and the settings of course/staff/README.md."""
    settings, = re.findall(r"```python\n(c = get_config.*?)```", README, re.S)
    assert "c.Execute.timeout = 600" in settings
    settings = settings.replace("timeout = 600", "timeout = 60")  # for the endless one
    skip = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "*.ipynb", "*.csv")
    project = shutil.copytree(ROOT, tmp_path / "source" / "tutorial", ignore=skip)
    save(short_default, project / "tutorial.ipynb")
    (tmp_path / "nbgrader_config.py").write_text(settings)
    return tmp_path


def in_course(folder, *words):  # runs a program in the folder of the course -> what it prints
    programs = str(Path(sys.executable).parent)  # nbgrader calls another one of them
    environment = os.environ | {"HIDDEN_CHECKS": "1",
                                "PATH": programs + os.pathsep + os.environ["PATH"]}
    done = subprocess.run([f"{programs}/{words[0]}", *words[1:]], cwd=folder, capture_output=True,
                          text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_nbgrader(course_folder):
    """The commands of course/staff/README.md, for a class with the usual mishaps."""
    generate, autograde, feedback = re.findall(r"^nbgrader (.*)$", README, re.M)
    in_course(course_folder, "nbgrader", *generate.split())
    staff = course_folder / "source" / "tutorial" / "course" / "staff"
    for_the_staff = {file.name for file in staff.iterdir()} - {"README.md"}
    assert {"rubric.md", "answers.py"} <= for_the_staff
    released = course_folder / "release"
    assert not for_the_staff & {file.name for file in released.rglob("*")}

    handed_in = the_class(json.loads((released / "tutorial" / "tutorial.ipynb").read_text()))
    for student, (book, _) in handed_in.items():
        save(book, course_folder / "submitted" / student / "tutorial" / "tutorial.ipynb")
    in_course(course_folder, "nbgrader", *autograde.split())
    assert not list((course_folder / "autograded").rglob("staff")), "the checks do without it"

    in_course(course_folder, "nbgrader", "export", "--to", "grades.csv")
    with open(course_folder / "grades.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    # 20 by checks, 10 that are given by hand.
    assert {float(line["max_score"]) for line in lines} == {30}
    found = {line["student_id"]: float(line["score"]) for line in lines}
    assert found == {student: points for student, (_, points) in handed_in.items()}

    told = in_course(course_folder, "python", "source/tutorial/course/staff/points.py")
    by_student = {line.split()[0]: line.split()[1:] for line in told.splitlines()}
    assert by_student["right"] == "checks 20 by hand 0 core 7.5".split()
    assert by_student.keys() == handed_in.keys()

    in_course(course_folder, "nbgrader", *feedback.split())
    page = course_folder / "feedback" / "untouched" / "tutorial" / "tutorial.html"
    assert "none of the" in page.read_text() and "not written yet" in page.read_text()
