"""The tutorial in real kernels, and a class of notebooks in nbgrader: some minutes, so it is run by name.

    python -m pytest -q tests/slow_course.py        needs nbgrader beside requirements.txt; .ci/run does it
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

from test_tutorial import CODE, GRADED, cell_of, lists, loses_its_points, run, source  # it says where the course is
import checks
import course
import exercises
import ragen_mini as rm
from staff.answers import RIGHT, SOLVED, WRONG, notebook, save

ROOT = checks.ROOT
# settings of one's own stay as they are
SHORTER = {"train": ("SETTINGS | settings()", "SETTINGS | dict(iterations=2) | settings()")}


TRAINED = ("train", "settings", "show-run", "show-before-after", "show-xray")


def test_stubs_are_not_solved():
    for name, exercise in exercises.EXERCISES.items():
        text = source(cell_of(f"{name}-answer"))
        assert ("raise NotImplementedError()" in text and "# YOUR CODE HERE" in text) or name in exercises.BUGS
        assert checks.check(exercise, run(text, name), exercise.cases()), f"{name} passes as it is"


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
    """Each of the eleven, also those that are defaults of other functions in the program."""
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
    space = dict(rm=rm, tempfile=tempfile, passed=lambda name: True, SETTINGS={}, watch=lambda *_: False,
                 use=lambda name, answer: answer, settings=lambda: settings)
    for name in names:
        space[name] = counted(name, getattr(rm, name))
        monkeypatch.setattr(rm, name, getattr(rm, name))  # put back at the end
    for table in "BY_CRITIC", "BY_GROUP":
        monkeypatch.setattr(rm, table, dict(getattr(rm, table)))
    exec(source(cell_of("plug-in")), space)
    exec(source(cell_of("train")), space)
    assert set(names) - called == ({"grpo_advantages"} if algo == "ppo" else {"gae", "value_loss"})


def test_all_cells_but_training_run(monkeypatch, capsys):
    """From top to bottom as a student finds them; only the graded ones fail."""
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
    assert {name: getattr(rm,
                          name) for name in shipped} == shipped, "the shipped functions train where nothing was written"
    assert capsys.readouterr().out.splitlines()[-1].split() == ["0", "of", "20"]


@pytest.mark.parametrize("name, text", [*SOLVED.items(), *((name, text) for name, texts in RIGHT.items() for text in texts)])
def test_right_answers(name, text):
    exercise = exercises.EXERCISES[name]
    assert not checks.check(exercise, run(text, name), exercise.cases(1))


@pytest.mark.parametrize("name, words, text", list(lists()))
def test_wrong_answers(name, words, text):
    loses_its_points(name, words, run(text, name))


@pytest.mark.parametrize("name", GRADED)
def test_every_usual_mistake_is_known(name):
    """Its words are said in the notebook, where the staff's folder is not: so its pieces must be the shipped text's."""
    usual = [words for words, *_ in checks.ANSWERS.get(name, ())]
    assert [words for words, _ in checks.usual_mistakes(exercises.EXERCISES[name])] == usual


@pytest.mark.parametrize("name", [name for name in course.RUNS if not re.search("[1-7]", name)])  # the first seed of those of Exercise 15
def test_the_curves_of_the_bug_hunt_are_of_this_program(name, tmp_path):
    """The first iteration is made again; another processor may round a few choices differently."""
    _, rows = course.train_run(name, tmp_path, iterations=2)
    _, shipped = course.shipped_runs()[name]
    assert rows[1].keys() == shipped[1].keys()
    for column in rows[1]:
        assert rows[1][column] == pytest.approx(shipped[1][column], rel=0.1, abs=0.02), column


def test_the_command_for_missing_curves():
    """Nothing is missing: it only has to find the project."""
    done = subprocess.run([sys.executable, ROOT / "course" / "course.py"], cwd="/", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("all runs are in ")


def with_cell(book, source, after="imports"):  # the student adds a cell of his own
    book = json.loads(json.dumps(book))
    place = [cell["id"] for cell in book["cells"]].index(after) + 1
    own = dict(cell_type="code", id=f"own-{place}", metadata={}, source=source, outputs=[], execution_count=None)
    book["cells"].insert(place, own)
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
            cell["source"] = "".join(cell["source"]) + "\nimport exercises\nexercises.SETTINGS['iterations'] = 2"
    return book


def test_run_all_of_the_untouched_notebook(short_default):
    book = run_all(short_default)
    assert points(book) == ["0", "of", "20"]
    failed = [cell["id"] for cell in book["cells"] for output in cell.get("outputs",
                                                                          ()) if output["output_type"] == "error"]
    assert failed == list(exercises.EXERCISES), "every graded cell, and no other"


def test_run_all_with_the_shipped_functions():
    book = run_all(shorter(notebook(SOLVED)))
    assert points(book) == ["20", "of", "20"]
    outputs = {cell["id"]: cell["outputs"] for cell in book["cells"] if cell["cell_type"] == "code"}
    assert "shipped" not in outputs["plug-in"][0]["text"], "his own functions train"
    for picture in ("show-board", "show-mask", "show-advantages", "show-xray"):
        assert "text/html" in outputs[picture][-1]["data"]
    for picture in ("show-spread", "show-clip", "show-returns", "show-paradox", "paradox-curves", "show-collapse",
                    "show-run"):
        assert "image/png" in outputs[picture][-1]["data"]


def test_a_notebook_alone_fetches_the_project(tmp_path):
    """As on Colab: the first two cells in an empty folder."""
    project = shutil.copytree(ROOT, tmp_path / "project", ignore=shutil.ignore_patterns(".git", ".venv", "runs",
                                                                                        "__pycache__"))
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=project, check=True)
    (tmp_path / "alone").mkdir()
    book = notebook()
    book["cells"] = [cell for cell in book["cells"] if cell["id"] in ("get", "imports", "show-board")]
    run_all(book, tmp_path / "alone", RAGEN_MINI=str(project), PIP_NO_INDEX="1", PIP_NO_DEPS="1")
    assert (tmp_path / "alone" / "ragen-mini" / "ragen_mini.py").exists()


# ------------------------------------------------------------------------------------------- a class, in nbgrader
MOST = {name: source for name, source in SOLVED.items() if name != "settings"}  # 19 points, and the default settings
README = (ROOT / "course/staff/README.md").read_text()


def the_class(released):
    """-> {student: (notebook, points)}. A notebook takes a minute, so two of them have many mishaps."""
    def solved(answers):
        book = json.loads(json.dumps(released))
        for cell in book["cells"]:
            name = cell["id"].removesuffix("-answer")
            if cell["id"].endswith("-answer") and name in answers:
                cell["source"] = answers[name]
        return book

    def without(*names):
        return 20 - sum(exercises.EXERCISES[name].points for name in names)
    endless = "def gae(reward, value, mask, gamma, lam):\n    while True:\n        pass"
    # right, in words of one's own
    unlucky = MOST | {name: right[0] for name, right in RIGHT.items() if right}
    unlucky |= {"gae": endless, "policy_loss": "def policy_loss(:\n    return", "settings": "settings = 3"}
    unlucky = solved(unlucky)
    for own in ("%%time\n!echo hello\nfrom IPython.display import display\ndisplay('experiment')", "1 / 0",
                "print('x' * 10_000_000)"):
        unlucky = with_cell(unlucky, own)
    hidden = next(text for words, text in WRONG["parse_answer"] if words == "")  # only the hidden checks find it
    sly = solved(MOST | {"parse_answer": hidden, "gae": WRONG["gae"][0][1]})
    sly["cells"] = [cell for cell in sly["cells"] if cell["id"] != "collate-answer"]
    for cell in sly["cells"]:
        if cell["id"] == "gae":  # nbgrader puts its own check back
            cell["source"] = "import course\ncourse.RESULTS['gae'] = True"
    return {"right": (solved(SOLVED), 20), "untouched": (solved({}), 0),
            "unlucky": (unlucky, without("gae", "policy_loss", "settings")),
            "sly": (sly, without("parse_answer", "gae", "collate", "settings"))}


def test_nbgrader(tmp_path, short_default):
    """Settings and commands of course/staff/README.md, in a clean folder, for a class with the usual mishaps."""
    pytest.importorskip("nbgrader")
    generate, autograde, feedback = re.findall(r"^nbgrader (.*)$", README, re.M)
    settings, = re.findall(r"```python\n(c = get_config.*?)```", README, re.S)
    assert "c.Execute.timeout = 600" in settings
    settings = settings.replace("timeout = 600", "timeout = 60")  # for the endless one
    skip = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "*.ipynb", "*.csv")
    source = shutil.copytree(ROOT, tmp_path / "source" / "tutorial", ignore=skip)
    save(short_default, source / "tutorial.ipynb")
    (tmp_path / "nbgrader_config.py").write_text(settings)
    programs = str(Path(sys.executable).parent)  # nbgrader calls another one of them
    environment = os.environ | {"HIDDEN_CHECKS": "1", "PATH": programs + os.pathsep + os.environ["PATH"]}

    def nbgrader(words):
        done = subprocess.run([f"{programs}/nbgrader", *words.split()], cwd=tmp_path, capture_output=True, text=True,
                              env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    nbgrader(generate)
    for_the_staff = {file.name for file in (source / "course" / "staff").iterdir()} - {"README.md"}
    assert {"rubric.md", "answers.py"} <= for_the_staff
    assert not for_the_staff & {file.name for file in (tmp_path / "release").rglob("*")}
    released = json.loads((tmp_path / "release" / "tutorial" / "tutorial.ipynb").read_text())
    right = the_class(released)
    for student, (book, _) in right.items():
        save(book, tmp_path / "submitted" / student / "tutorial" / "tutorial.ipynb")
    nbgrader(autograde)
    assert not list((tmp_path / "autograded").rglob("staff")), "the checks do without it"
    nbgrader("export --to grades.csv")
    with open(tmp_path / "grades.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert {float(line["max_score"]) for line in lines} == {26}, "20 by checks, 6 for the questions that are graded by hand"
    found = {line["student_id"]: float(line["score"]) for line in lines}
    assert found == {student: points for student, (_, points) in right.items()}
    told = subprocess.run([sys.executable, source / "course/staff/points.py"], cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    by_student = {line.split()[0]: line.split()[1:] for line in told.stdout.splitlines()}
    assert by_student["right"] == "checks 20 words 0 core 6.5".split() and by_student.keys() == right.keys()
    nbgrader(feedback)
    page = (tmp_path / "feedback" / "untouched" / "tutorial" / "tutorial.html").read_text()
    assert "none of the" in page and "not written yet" in page, "why there are no points"


@pytest.mark.parametrize("answer", [None, 3, "gae", lambda *args, **named: None, lambda *args, **named: object(),
                                    lambda: 1 / 0,
                                    lambda *args, **named: exit(), lambda *args, **named: float("nan")])
@pytest.mark.parametrize("name", GRADED)
def test_no_answer_can_crash_a_check(name, answer, capsys):
    assert course.use(name, answer) is course.SHIPPED[name] and not course.passed(name)
    assert name in capsys.readouterr().out
    with pytest.raises(course.NoPoints):
        course.earned(name)
    course.use(name, course.SHIPPED[name])
    assert not course.passed(name), "running the check once more would earn the points with the shipped one"
