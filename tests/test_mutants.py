"""Each wrong program of extras/mutants.py can still be made, and figures/mutants.txt says which test caught it."""
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "extras"))
import mutants

ALL = [(file, *mutant) for file, some in mutants.MUTANTS.items() for mutant in some]
NAMES = [name for _, name, _, _ in ALL]


def test_every_mutant_can_be_made():
    assert mutants.misplaced(ROOT) == [], "only the text changed? Then adapt extras/mutants.py (see tests/README.md)"
    assert len(set(NAMES)) == len(NAMES)
    assert all(old != new for _, _, old, new in ALL)


def test_the_report_names_every_mutant_and_its_killer():
    header, *lines, count = mutants.REPORT.read_text().splitlines()
    assert [line.partition(": caught by test_")[0] for line in lines] == NAMES
    assert count == f"{len(NAMES)} mutants, 0 survive"
    assert "commit" in header and str(ROOT) not in header


def test_each_killer_is_a_test_that_exists():
    tests = "".join(file.read_text() for file in (ROOT / "tests").glob("*.py"))
    for line in mutants.REPORT.read_text().splitlines()[1:-1]:
        name = line.partition(": caught by ")[2].partition("[")[0]
        assert f"def {name}(" in tests, line


@pytest.mark.parametrize("times", [0, 2])
def test_a_pattern_that_does_not_stand_there_once_is_told_before_anything_runs(times, monkeypatch, tmp_path):
    old = "no such piece" if times == 0 else "import"
    (tmp_path / "some.py").write_text("import this\nimport that\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "REPORT", tmp_path / "report.txt")
    monkeypatch.setattr(mutants, "MUTANTS", {"some.py": [("wrong", old, "right")]})
    with pytest.raises(SystemExit, match=f"wrong: '{old}' stands {times} times in some.py"):
        mutants.main("")
    assert not mutants.REPORT.exists()
