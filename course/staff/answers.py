"""Answers to the exercises of tutorial.ipynb as cells: the shipped functions, what students write; notebooks of them.

    python course/staff/answers.py FILE      a solved notebook; not below nbgrader's `source`, or it would be handed out
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checks
from exercises import EXERCISES
from staff import right_answers

NOTEBOOK = checks.ROOT / "tutorial.ipynb"


def cell_of(name, *pieces):  # the shipped function; with pieces of an answers.txt: the first text that has these
    shipped = EXERCISES[name].solution
    module = shipped.__module__.removeprefix("pristine_")
    try:
        text = checks.mutated(checks.text_of(shipped), *pieces)
    except AssertionError:
        if not hasattr(right_answers, name):
            raise
        return checks.mutated(checks.text_of(getattr(right_answers, name)), *pieces)
    if pieces and not pieces[0]:  # all of it is another one's
        return text
    return f"from {module} import *\n\n\n{text}\n\n\n{name} = {shipped.__name__}"


SOLVED = {name: cell_of(name) for name in EXERCISES} | {
    "moves": "def moves():\n    from exercises import level_7, solve\n    return solve(level_7())",
    # seconds, not minutes
    "settings": "def settings():\n    return dict(env='bandit', iterations=20, starpo_s=True, lr=1e-3)",
}

MORE = checks.read_answers(Path(__file__).with_name("more_answers.txt"))
RIGHT, WRONG = {}, {}  # {exercise: [source, ...]}, {exercise: [(words of the message, source), ...]}
MISSING = []  # pieces that a shipped function no longer has, since it was edited
for name in EXERCISES:
    RIGHT[name], WRONG[name] = [], []
    if hasattr(right_answers, name):
        RIGHT[name].append(checks.text_of(getattr(right_answers, name)))
    for words, *pieces in checks.ANSWERS.get(name, []) + MORE.get(name, []):
        try:
            text = cell_of(name, *pieces)
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


if __name__ == "__main__":
    print(save(notebook(SOLVED), sys.argv[1]))
