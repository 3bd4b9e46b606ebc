"""The points of a class: by checks, in words, and of both those of the core path.

In the folder of the nbgrader course:

    python source/tutorial/course/staff/points.py
"""
from nbgrader.api import Gradebook

CORE = ("moves", "Trajectory", "collate", "grpo_advantages", "uncertainty_filter", "policy_loss",
        "settings", "words-baseline", "words-ratio")


def main():
    with Gradebook("sqlite:///gradebook.db") as book:
        for handed_in in book.assignment_submissions("tutorial"):
            points = {}
            for notebook in handed_in.notebooks:
                points |= {grade.name: grade.score for grade in notebook.grades}
            words = sum(points[name] for name in points if name.startswith("words"))
            checks = sum(points.values()) - words
            core = sum(points[name] for name in CORE)
            print(f"{handed_in.student.id:20} checks {checks:4g}   words {words:4g}   "
                  f"core {core:4g}")


if __name__ == "__main__":
    main()
