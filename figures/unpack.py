"""Writes shipped runs as folders, with config.json and log.jsonl, so that plots.py can draw them.

    python figures/unpack.py                                     lists the runs that there are
    python figures/unpack.py trap-PPO-seed9 "*-k-*-seed?"        writes runs/shipped/NAME for each
    python figures/unpack.py trap-PPO-seed9=runs/a               writes runs/a
    python plots.py collapse runs/shipped/trap-PPO-seed9

A pattern may hold *, ? and [...]. paper.json says which settings the words of a name stand for. The
folders have no checkpoint, because none is shipped.
"""
import argparse
import fnmatch
import json
import re
import sys
from pathlib import Path

FIGURES = Path(__file__).resolve().parent
sys.path[:0] = [str(FIGURES.parent), str(FIGURES)]

import paper
from runs import need, one_line_errors

SHIPPED = Path("runs", "shipped")


def shipped(folder):  # -> {short name: Run}
    """In the files a name has a checksum before its seed. The short name is without it."""
    found = {}
    for file in sorted(folder.glob("*.jsonl.bz2")):
        if file.name == "forks.jsonl.bz2":  # it has pieces of runs
            continue
        for name, run in paper.unpack(file).items():
            found[re.sub(r"-[0-9a-f]{8}-seed", "-seed", name)] = run
    return found


def write(run, folder):
    """Packed rows have lost their yardsticks. They go back to the first row. Columns that a Run
    adds are left out.
    """
    config = dict(run.config)
    rows = []
    for row in run.rows:
        rows.append({name: x for name, x in row.items()
                     if name != "seconds" and not name.startswith("eval ")})
    rows[0]["yardsticks"] = config.pop("yardsticks")
    folder.mkdir(parents=True, exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps(config, indent=1))
    Path(folder, "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="NAME")
    parser.add_argument("--model", default="tiny", help="tiny, tiny-b or tiny-c")
    args = parser.parse_args(argv)
    with one_line_errors():
        runs = shipped(FIGURES / args.model)
        need(runs, f"No run of {args.model} is shipped.")
        if not args.patterns:
            print("\n".join(runs))
        for pattern in args.patterns:
            pattern, _, folder = pattern.partition("=")
            names = fnmatch.filter(runs, pattern)
            need(names, f"No shipped run is called {pattern}. Without a name, all are listed.")
            for name in names:
                to = Path(folder) if folder else SHIPPED / name
                need(not folder or (len(names) == 1 and not to.exists()),
                     f"{folder} exists, or {pattern} names several runs. Give a new folder for "
                     f"one.")
                write(runs[name], to)
                print(to)


if __name__ == "__main__":
    main()
