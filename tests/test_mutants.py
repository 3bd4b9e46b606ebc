"""Each wrong program of extras/dev/mutants.py can be made, is another program, and was caught."""
import ast
import sys

from conftest import ROOT

sys.path.insert(0, str(ROOT / "extras" / "dev"))
import mutants


def code_of(text):  # -> the program without comments and docstrings
    tree = ast.parse(text)
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node):
            del node.body[0]
    return ast.dump(tree)


def test_every_mutant_is_another_program():
    assert mutants.misplaced(ROOT) == [], "was code changed? Then adapt extras/dev/mutants.py"
    for file, wrong in mutants.MUTANTS.items():
        text = (ROOT / file).read_text()
        right = code_of(text)
        for name, old, new in wrong:
            assert code_of(text.replace(old, new)) != right, name
