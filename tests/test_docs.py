"""Links lead to files, commands are understood, programs use what exists, imports go down."""
import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

import pytest

import ragen_mini as rm
from conftest import ROOT

README = (ROOT / "README.md").read_text()
FOLDERS = ("", "extras", "extras/dev", "figures", "course", "tiny")
PROGRAMS = {path.stem: path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))}
SUPPORT = {path.stem: path for path in sorted((ROOT / "support").glob("*.py"))}
PAGES = [page for folder in (".", "extras", "figures", "tests", "course", "course/staff", "tiny")
         for page in sorted((ROOT / folder).glob("*.md"))]


# ------------------------------------------------------------------------------------------- code
def modules_of(tree):  # -> {the name that a program gives it: module}, of ours
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names
                      if alias.name in PROGRAMS}
        if isinstance(node, ast.ImportFrom) and node.module in ("support", "extras"):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}"
                      for alias in node.names}
    return {name: importlib.import_module(module) for name, module in found.items()}


@pytest.mark.parametrize("path", [*PROGRAMS.values(), *SUPPORT.values()],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_a_program_names_only_what_its_neighbours_have(path, monkeypatch):
    """`errors.needs()`, say, after that function got another name. Not all mains run in a test."""
    monkeypatch.setattr(sys, "path", [*(str(ROOT / folder) for folder in FOLDERS), *sys.path])
    if path.stem == "gymnasium_env":
        pytest.importorskip("gymnasium")
    importlib.import_module(f"support.{path.stem}" if path in SUPPORT.values() else path.stem)
    tree = ast.parse(path.read_text())
    modules = modules_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules:
                assert hasattr(modules[node.value.id], node.attr), ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
                *PROGRAMS, "support"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("name, below", [
    ("envs", ()), ("plots", ("envs",)), ("ragen_mini", ("envs", "plots", "support")),
    *((f"support/{name}", ("envs", "support")) for name in SUPPORT)])
def test_imports_go_only_down(name, below):
    """And envs.py and plots.py do without torch."""
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        names = ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                 [node.module] if isinstance(node, ast.ImportFrom) else [])
        for module in [imported.split(".")[0] for imported in names]:
            ours = module in PROGRAMS or module in ("support", "extras", "tests", "figures")
            assert not ours or module in below, node.lineno
            assert name not in ("envs", "plots") or module not in ("torch", "transformers")


def test_plots_draw_without_torch(tmp_path):
    """In an interpreter in which torch cannot be imported: all three pictures."""
    config = asdict(rm.Config(device="cpu", env="bandit"))
    rows = [{"iteration": i, "eval": {"bandit": 0.5}, "yardsticks": {"bandit": [0.5, 1.0]},
             "reward": 0.1 * i, "success": 0.5, "entropy": 1.0, "updates": 4} for i in range(4)]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = (f"import sys; sys.modules['torch'] = None; import plots\n"
            f"for what in ('curves', 'collapse', 'online-k'):\n"
            f"    sys.argv = ['plots.py', what, {str(tmp_path)!r}]; plots.main()")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    for what in ("curves", "collapse", "online-k"):
        assert (tmp_path / f"{what}.png").stat().st_size > 10_000


def test_training_does_not_wait_for_matplotlib():
    code = "import sys, ragen_mini; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ------------------------------------------------------------------------------------------ pages
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_commands_lead_to_files(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        assert link.startswith("http") or (page.parent / link).exists(), link
    for file in re.findall(r"(?:^ *|`)python ([\w/]+\.py)", text, re.MULTILINE):
        first, exists = Path(file).parts[0], (page.parent / file).exists()
        made = file.startswith("my_") or "/" in file and not (ROOT / first).exists()
        assert exists or (ROOT / file).exists() or made, file  # made: by commands of the page


def commands(script):  # the arguments of README's commands, also inside of lines
    pattern = rf"(?:^ *|`)python {re.escape(script)} ?([^`\n]*)"
    for line in re.findall(pattern, README, re.MULTILINE):
        yield shlex.split(line.partition("#")[0].replace("...", ""))


def test_readme_commands_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = list(commands("ragen_mini.py"))
    assert asked
    for argv in asked:
        if "--resume" in argv:
            run = Path(argv[argv.index("--resume") + 1])
            (run / "checkpoint").mkdir(parents=True, exist_ok=True)
            (run / "config.json").write_text(json.dumps(asdict(rm.Config(device="cpu"))))
        rm.parse_config([*argv, "--device", "cpu"])
    for what, *_ in commands("plots.py"):
        assert what in ("curves", "collapse", "online-k")


@pytest.mark.parametrize("block", re.findall(
    r"^    import ragen_mini as rm\n(?:    .*\n|\n)+", README + (rm.__doc__ or ""), re.MULTILINE))
def test_a_change_of_the_method_changes_what_there_is(block):
    tree = ast.parse(textwrap.dedent(block.split("\nWords")[0]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "rm":
            assert hasattr(rm, node.attr), node.attr
