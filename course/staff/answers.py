"""Answers to the exercises of tutorial.ipynb as cells: the shipped functions, and what students
write. And notebooks of them:

    python course/staff/answers.py FILE    a solved notebook. Not below nbgrader's `source`, or it
                                           would be handed out
    python course/staff/answers.py course/tutorial.html
                                           the notebook with the core path solved, run from top to
                                           bottom, as a page (needs nbconvert; three minutes)
"""
import inspect
import json
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checks
from exercises import EXERCISES
from staff import right_answers

NOTEBOOK = checks.ROOT / "tutorial.ipynb"
CORE = ("moves", "Trajectory", "collate", "slope", "grpo_advantages", "uncertainty_filter",
        "policy_loss", "settings", "words-baseline", "words-ratio")


def solution_of(name):  # -> a cell with the shipped function, as it is written
    shipped = EXERCISES[name].solution
    return as_cell(name, textwrap.dedent(inspect.getsource(shipped)))


def as_cell(name, text):  # text: the code of the shipped function, or of one made of it
    shipped = EXERCISES[name].solution
    cell = f"{text.strip()}\n\n\n{name} = {shipped.__name__}"
    module = shipped.__module__.removeprefix("pristine_")
    if module == "exercises":  # its names are not the notebook's: its `rm` is another copy
        return cell
    return f"from {module} import *\n\n\n{cell}"


def changed(name, *pieces):  # pieces of an answers.txt -> a cell
    """They are pieces of the shipped function, or else of the one in right_answers.py."""
    try:
        text = checks.mutated(checks.text_of(EXERCISES[name].solution), *pieces)
    except AssertionError:
        if not hasattr(right_answers, name):
            raise
        return checks.mutated(checks.text_of(getattr(right_answers, name)), *pieces)
    replaces_all = not pieces[0]
    return text if replaces_all else as_cell(name, text)


SOLVED = {name: solution_of(name) for name in EXERCISES} | {
    "moves": "def moves():\n    from exercises import level_7, solve\n    return solve(level_7())",
    # The bandit takes seconds, not minutes.
    "settings": "def settings():\n"
                "    return dict(env='bandit', iterations=20, starpo_s=True, lr=1e-3)"}

MORE = checks.read_answers(Path(__file__).with_name("more_answers.txt"))
RIGHT = {}  # exercise: [cell, ...]
WRONG = {}  # exercise: [(words that the message must have, cell), ...]
MISSING = []  # pieces that a shipped function no longer has, since it was edited
for name in EXERCISES:
    RIGHT[name], WRONG[name] = [], []
    if hasattr(right_answers, name):
        RIGHT[name].append(checks.text_of(getattr(right_answers, name)))
    for words, *pieces in checks.ANSWERS.get(name, []) + MORE.get(name, []):
        try:
            text = changed(name, *pieces)
        except AssertionError as error:
            MISSING.append(f"{name}: {error}")
            continue
        if words == "right":
            RIGHT[name].append(text)
        else:
            WRONG[name].append((words.removeprefix("~").removeprefix("hidden"), text))


def notebook(answers=None):  # {exercise: source of its answer cell} -> the notebook as a dict
    book = json.loads(NOTEBOOK.read_text())
    for cell in book["cells"]:
        name = cell["id"].removesuffix("-answer")
        if cell["id"].endswith("-answer") and name in (answers or {}):
            cell["source"] = answers[name]
    return book


def save(book, file):
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps(book))
    return file


def executed(book):  # -> a page
    import nbclient
    import nbformat
    from nbconvert import HTMLExporter  # comes with nbgrader and with jupyter notebook
    book = nbformat.reads(json.dumps(book), as_version=4)
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3",
                            resources={"metadata": {"path": str(checks.ROOT)}}).execute()
    page, _ = HTMLExporter().from_notebook_node(book)
    return page


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if target.suffix == ".html":
        core = {name: SOLVED[name] for name in CORE if name in SOLVED}
        core["settings"] = "def settings():\n    return dict(env='sokoban', iterations=20)"
        target.write_text(executed(notebook(core)))
    else:
        save(notebook(SOLVED), target)
    print(target)
