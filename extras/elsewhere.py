"""Does what was learnt carry over? Training as it is, but evaluated in other worlds, too:

    python extras/elsewhere.py --eval-envs bandit_test,bandit_rev --env bandit     any options of ragen_mini.py
    python extras/elsewhere.py --eval-envs bandit_test --resume RUN

(One evaluation of a finished run needs no program: python ragen_mini.py --model RUN --env bandit_test --eval-only)
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import envs
import plots
import ragen_mini as rm

NAMES = []  # of the other worlds


def watch(row, trajs, learned, models, cfg):
    if "eval" not in row:
        return
    for name in NAMES:
        columns, samples = rm.evaluate(row["iteration"], models, rm.replace(cfg, env=name))
        for column in columns:  # "eval" and "yardsticks", each {world: ...}
            row[column] |= columns[column]
        plots.append(cfg.out, "samples.jsonl", samples)


def settings(argv=None):  # -> Config
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # --help is that of ragen_mini.py
    parser.add_argument("--eval-envs", default="")
    own, others = parser.parse_known_args(argv)
    NAMES[:] = own.eval_envs.replace(",", " ").split()
    for name in NAMES:
        envs.find_world(name)  # or say so before anything is trained
    return rm.parse_config(others)


if __name__ == "__main__":
    cfg = settings()
    rm.need(cfg.trains, "--play and --eval-only are for ragen_mini.py: this program trains")
    rm.train(cfg, watch=watch)
    if rm.STOP:
        sys.exit(130)
