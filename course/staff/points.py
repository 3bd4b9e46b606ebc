"""The points of a class: by checks, by the lecturer, and of both those of the core path.

In the folder of the nbgrader course:

    python source/tutorial/course/staff/points.py
"""
from nbgrader.api import Gradebook

from answers import CORE


def main():
    with Gradebook("sqlite:///gradebook.db") as book:
        for handed_in in book.assignment_submissions("tutorial"):
            points = {}
            for notebook in handed_in.notebooks:
                points |= {grade.name: grade.score for grade in notebook.grades}
            by_hand = sum(points[name] for name in points if "-" in name)
            checks = sum(points.values()) - by_hand
            core = sum(points[name] for name in CORE)
            print(f"{handed_in.student.id:20} checks {checks:4g}   by hand {by_hand:4g}   "
                  f"core {core:4g}")


if __name__ == "__main__":
    main()
