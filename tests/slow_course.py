"""The tutorial in real kernels, in nbgrader, and a class of notebooks for grade.py: a few minutes, so it is run by name.

    python -m pytest -q tests/slow_course.py        needs nbgrader beside requirements.txt; .ci/run does it
"""
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import nbclient
import nbformat
import pytest

from test_tutorial import CODE, GRADED, lists, loses_its_points, source  # it says where the course is
import checks
import course
import exercises
import grade
import ragen_mini as rm
from answers import SOLVED, notebook, save, with_cell
from wrong_answers import RIGHT, WRONG

ROOT = checks.ROOT
SHORTER = {"train": ("chosen = settings()", "chosen = dict(iterations=2) | settings()"),  # settings of one's own stay as they are
           "train-paradox": ("iterations=20", "iterations=2")}


TRAINED = ("train", "settings", "show-run", "show-before-after", "show-xray", "train-paradox")


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
    assert {name: getattr(rm, name) for name in shipped} == shipped, "the shipped functions train where nothing was written"
    assert capsys.readouterr().out.splitlines()[-1].split() == ["0", "of", "20"]


@pytest.mark.parametrize("name, words, text", list(lists()))
def test_wrong_answers(name, words, text):
    loses_its_points(name, words, text)


@pytest.mark.parametrize("name", GRADED)
def test_every_usual_mistake_is_a_mistake_and_is_named(name):
    exercise = exercises.EXERCISES[name]
    for words, *pieces in exercise.mistakes:
        wrong = checks.mutant(exercise.solution, *pieces)
        assert words in checks.check(exercise, wrong, exercise.cases)


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
    client = nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
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
    failed = [cell["id"] for cell in book["cells"] for output in cell.get("outputs", ()) if output["output_type"] == "error"]
    assert failed == list(exercises.EXERCISES), "every graded cell, and no other"


def test_run_all_with_the_shipped_functions():
    book = run_all(shorter(notebook(SOLVED)))
    assert points(book) == ["20", "of", "20"]
    outputs = {cell["id"]: cell["outputs"] for cell in book["cells"] if cell["cell_type"] == "code"}
    assert "shipped" not in outputs["plug-in"][0]["text"], "his own functions train"
    for picture in ("show-board", "show-mask", "show-advantages", "show-xray"):
        assert "text/html" in outputs[picture][-1]["data"]
    for picture in ("show-spread", "show-clip", "show-returns", "show-paradox", "train-paradox", "show-collapse",
                    "show-run"):
        assert "image/png" in outputs[picture][-1]["data"]


def test_a_notebook_alone_fetches_the_project(tmp_path):
    """As on Colab: the first two cells in an empty folder."""
    project = shutil.copytree(ROOT, tmp_path / "project", ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__"))
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=project, check=True)
    (tmp_path / "alone").mkdir()
    book = notebook()
    book["cells"] = [cell for cell in book["cells"] if cell["id"] in ("get", "imports", "show-board")]
    run_all(book, tmp_path / "alone", RAGEN_MINI=str(project), PIP_NO_INDEX="1", PIP_NO_DEPS="1")
    assert (tmp_path / "alone" / "ragen-mini" / "ragen_mini.py").exists()


# ---------------------------------------------------------------------------------------------------- a class
MOST = {name: source for name, source in SOLVED.items() if name != "settings"}  # 19 points, and no training
WRITES = f"""
for path in ({str(ROOT / 'ragen_mini.py')!r}, {str(ROOT / 'course' / 'course.py')!r}, {str(ROOT / 'new.txt')!r}):
    try:
        open(path, "a").write("# was here")
    except OSError:
        pass
import os, shutil
os.remove({str(ROOT / 'README.md')!r})
"""
FOOLS = """
import checks
import course
import exercises
for exercise in exercises.EXERCISES.values():
    exercise.solution = lambda *args: None
checks.agree = checks.check = checks.first_difference = course.passed = lambda *args: True
rm.gae = rm.policy_loss = checks.rm.policy_loss = lambda *args: None
"""


def the_class(folder):  # -> {student: points}
    def wrong(name):
        return WRONG[name][0][1]
    own_words = {name: right[0] for name, right in RIGHT.items()}
    half = {name: SOLVED[name] for name in list(SOLVED)[:9]}
    broken = dict(SOLVED) | {"gae": "def gae(:\n    return"}
    endless = MOST | {"gae": "def gae(reward, value, mask, gamma, lam):\n    while True:\n        pass"}
    exits = MOST | {"policy_loss": "import os\ndef policy_loss(*args):\n    os._exit(0)", "value_loss": "import sys\nsys.exit()"}
    edited = notebook({"gae": wrong("gae")})
    for cell in edited["cells"]:
        if cell["id"] == "gae":
            cell["source"] = "import course\ncourse.RESULTS['gae'] = True"
    deleted = notebook(MOST)
    deleted["cells"] = [cell for cell in deleted["cells"] if not cell["id"].startswith(("gae", "collate"))]
    books = {
        "right": (notebook(SOLVED), 20), "untouched": (notebook(), 0), "half": (notebook(half), 9.5),
        "own-words": (notebook(MOST | own_words), 19),
        "syntax": (notebook(broken | {"settings": "settings = 3"}), 16.5), "endless": (notebook(endless), 16.5),
        "endless-cell": (with_cell(notebook(MOST), "while True:\n    pass"), 19), "exits": (notebook(exits), 16.5),
        "deletes": (deleted, 15), "prints": (with_cell(notebook(MOST), "print('x' * 100_000_000)"), 19),
        "writes": (with_cell(notebook(MOST), WRITES), 19), "edits": (edited, 0),
        "fools": (with_cell(notebook({"gae": wrong("gae"), "policy_loss": wrong("policy_loss")}), FOOLS), 0),
        "memory": (with_cell(notebook(MOST), "x = [0] * 10 ** 10"), 19),
        "network": (with_cell(notebook(MOST), "import socket\nsocket.create_connection(('127.0.0.1', 22), 2)"), 19)}
    for student, (book, _) in books.items():
        save(book, folder / student / "tutorial.ipynb")
    save({"cells": 3}, folder / "damaged" / "tutorial.ipynb")
    return {f"{student}/tutorial": right for student, (_, right) in books.items()} | {"damaged/tutorial": 0}


def fingerprint():  # of all files of the project
    aside = {".git", ".venv", "runs", "__pycache__", ".pytest_cache"}
    files = [file for file in sorted(ROOT.rglob("*")) if file.is_file() and not aside & set(file.parts)]
    return {str(file): hashlib.sha1(file.read_bytes()).hexdigest() for file in files}


def test_a_class_of_notebooks(tmp_path):
    """The right points for each, a reason for what is missing, nothing written, nothing left running, and in time."""
    right, before, begun = the_class(tmp_path), fingerprint(), time.monotonic()
    grade.main([str(tmp_path), "--timeout", "200", "--jobs", "2"])
    assert time.monotonic() - begun < 200 * len(right) / 2
    with open(tmp_path / "points.csv", newline="") as file:
        lines = {line["student"]: line for line in csv.DictReader(file)}
    assert {student: float(line["points"]) for student, line in lines.items()} == right
    for student, name, words in (("endless", "gae", "longer than"), ("exits", "policy_loss", "ended itself"), ("syntax", "gae", "SyntaxError"),
                                 ("deletes", "collate", "not in the notebook"), ("fools", "gae", "environment's tokens"),
                                  ("damaged", "gae", "no notebook")):
        remarks = lines[f"{student}/tutorial"]["remarks"]
        assert f"{name}: " in remarks and words in remarks
    assert fingerprint() == before


# --------------------------------------------------------------------------------------------------- nbgrader
def test_nbgrader(tmp_path, short_default):
    """generate_assignment and autograde, by nbgrader itself: 20 and 0 points. The notebook is the students' version, so that
    ClearSolutions has nothing to do; training takes longer than the 30 seconds that a cell has there. A wrong answer that only
    the hidden checks find loses its points, too."""
    pytest.importorskip("nbgrader")
    skip = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "*.ipynb", "*.csv")
    source = shutil.copytree(ROOT, tmp_path / "source" / "tutorial", ignore=skip)
    save(short_default, source / "tutorial.ipynb")
    (tmp_path / "nbgrader_config.py").write_text("c = get_config()\nc.CourseDirectory.course_id = 'agents'\n")

    programs = str(Path(sys.executable).parent)  # nbgrader calls another one of them
    environment = os.environ | {"HIDDEN_CHECKS": "1", "PATH": programs + os.pathsep + os.environ["PATH"]}

    def nbgrader(*words):
        done = subprocess.run([f"{programs}/nbgrader", *words], cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    nbgrader("generate_assignment", "tutorial", "--create", "--ClearSolutions.enabled=False")
    released = json.loads((tmp_path / "release" / "tutorial" / "tutorial.ipynb").read_text())
    hidden = next(text for words, text in WRONG["parse_answer"] if words == "")
    for student, solved in (("right", SOLVED), ("untouched", {}), ("sly", {"gae": SOLVED["gae"], "parse_answer": hidden})):
        book = json.loads(json.dumps(released))
        for cell in book["cells"]:
            name = cell["id"].removesuffix("-answer")
            if cell["id"].endswith("-answer") and name in solved:
                cell["source"] = solved[name]
        save(book, tmp_path / "submitted" / student / "tutorial" / "tutorial.ipynb")
    nbgrader("autograde", "tutorial", "--Execute.timeout=600")
    nbgrader("export", "--to", "grades.csv")
    with open(tmp_path / "grades.csv", newline="") as file:
        found = {line["student_id"]: float(line["score"]) for line in csv.DictReader(file)}
    assert found == {"right": 20, "untouched": 0, "sly": 2.5}
