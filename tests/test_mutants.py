"""Each wrong program of extras/dev/mutants.py can be made, and a test that exists catches it."""
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "extras" / "dev"))
import mutants

ALL = [(file, *mutant) for file, some in mutants.MUTANTS.items() for mutant in some]
NAMES = [name for _, name, _, _ in ALL]


def test_every_mutant_can_be_made():
    assert mutants.misplaced(ROOT) == [], "was code changed? Then adapt extras/dev/mutants.py"
    assert len(set(NAMES)) == len(NAMES)


def test_the_report_names_every_mutant_and_a_test_that_exists():
    header, *lines, count = mutants.REPORT.read_text().splitlines()
    assert [line.partition(": caught by test_")[0] for line in lines] == NAMES
    assert count == f"{len(NAMES)} mutants, 0 survive"
    assert "commit" in header and str(ROOT) not in header
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    for line in lines:
        name = line.partition(": caught by ")[2].partition("[")[0]
        assert f"def {name}(" in tests, line


@pytest.mark.parametrize("times", [0, 2])
def test_a_piece_that_does_not_stand_there_once_is_named_before_anything_runs(
        times, monkeypatch, tmp_path):
    old = "no such piece" if times == 0 else "import"
    (tmp_path / "some.py").write_text("import this\nimport that\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "REPORT", tmp_path / "report.txt")
    monkeypatch.setattr(mutants, "MUTANTS", {"some.py": [("wrong", old, "right")]})
    with pytest.raises(SystemExit, match=f"wrong: .*{times} times"):
        mutants.main("")
    assert not mutants.REPORT.exists()
