"""Does what was learnt carry over? Training as it is, but evaluated in other worlds, too:

    python extras/elsewhere.py --eval-envs bandit_test,bandit_rev --env bandit     any options of ragen_mini.py
    python extras/elsewhere.py --resume RUN                                        in the worlds of its log

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
        if envs.title(name) in row["eval"]:  # evaluated already: the world of training, or named twice
            continue
        columns, samples = rm.evaluate(row["iteration"], models, rm.replace(cfg, env=name))
        for column in columns:  # "eval" and "yardsticks", each {world: ...}
            row[column] |= columns[column]
        plots.add_lines(cfg.out, "samples.jsonl", samples)


def own_options():  # sets NAMES; the other options stay on the command line, for ragen_mini.py
    parser = argparse.ArgumentParser(usage="%(prog)s --eval-envs WORLD,... [options of ragen_mini.py, see there]",
                                     description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eval-envs", default="", help="the other worlds, with commas between them")
    own, sys.argv[1:] = parser.parse_known_args()
    NAMES[:] = own.eval_envs.replace(",", " ").split()
    only = [option for option in sys.argv[1:] if option.replace("_", "-").startswith("--eval-o")]  # may be cut short
    rm.need(not (NAMES and only), "--eval-only evaluates in --env alone: leave out --eval-envs")


def train(cfg):
    if cfg.resume and not NAMES:
        NAMES[:] = [world for world in plots.load(cfg.resume).yardsticks if world != envs.title(cfg.env)]
    rm.need(NAMES, "in which worlds? --eval-envs bandit_test,bandit_rev")
    for name in NAMES:
        envs.find_world(name)  # or say so before anything is trained
    rm.need(cfg.eval_every, "--eval-every 0: nothing would be evaluated")
    return rm.train(cfg, watch=watch)


if __name__ == "__main__":
    own_options()
    rm.main(train)
