"""Does what was learnt carry over? A run is evaluated in other environments, too.

    python extras/elsewhere.py --env bandit --eval-envs bandit_test,bandit_rev
    python extras/elsewhere.py --resume RUN          in the environments of its log

All options of ragen_mini.py can be given. To evaluate a finished run, no script is needed:
    python ragen_mini.py --model RUN --env bandit_test --eval-only
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import envs
import plots
import ragen_mini as rm
import runs

NAMES = []  # of the other environments


def watch(row, trajs, models, cfg):  # a callback of rm.train
    if "eval" not in row:
        return
    for name in NAMES:
        if envs.title(name) in row["eval"]:  # that of training, or one that was named twice
            continue
        there = rm.replace(cfg, env=name)
        columns, evaluated = rm.evaluate(models, there, f"iteration {row['iteration']}: ")
        for column in columns:  # "eval" and "yardsticks", each {environment: ...}
            row[column] |= columns[column]
        runs.log_samples(there, row["iteration"], evaluated[:8], models.tok)


def own_options():  # sets NAMES. The other options stay on the command line
    parser = argparse.ArgumentParser(
        usage="%(prog)s --eval-envs NAME,... [options of ragen_mini.py]", description=__doc__,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eval-envs", default="", metavar="NAME,...",
                        help="the other environments, with commas between them")
    own, sys.argv[1:] = parser.parse_known_args()
    NAMES[:] = own.eval_envs.replace(",", " ").split()


def check(cfg):
    if cfg.resume and not NAMES:
        NAMES[:] = names_in_log(cfg)
    runs.need(NAMES, "--eval-envs is missing. For example: --eval-envs bandit_test,bandit_rev")
    runs.need(cfg.eval_every, "--eval-every is 0, so nothing would be evaluated. Leave it out.")
    for name in NAMES:
        try:
            envs.make(name)
        except ValueError as error:
            raise runs.UserError(f"--eval-envs: {error}") from error
    called = {envs.title(cfg.env): cfg.env}
    for name in NAMES:
        other = called.setdefault(envs.title(name), name)
        # One file can be named in several ways.
        runs.need(Path(other).resolve() == Path(name).resolve(),
                  f"--eval-envs: in the log, {other} and {name} would have the same name. Rename "
                  f"one of the classes.")
    runs.need(len(called) > 1, f"--eval-envs names only {cfg.env}, in which it is evaluated "
                               f"anyway. Name others.")


def names_in_log(cfg):  # of the other environments in which the run of --resume was evaluated
    try:
        logged = plots.load(Path(cfg.resume).expanduser()).yardsticks
    except ValueError as error:
        raise runs.UserError(f"--resume: {error}") from error
    names = [name for name in logged if name != envs.title(cfg.env)]
    for name in names:
        runs.need(name in envs.ENVS, f"--resume {cfg.resume}: its log does not say in which file "
                                     f"{name} is. Give --eval-envs again.")
    return names


def main():
    own_options()
    parse_config, train = rm.parse_config, rm.train

    def parse_and_check(*argv):
        cfg = parse_config(*argv)
        runs.need(cfg.trains or not NAMES,
                  "--eval-only and --play are about --env alone. Leave out --eval-envs.")
        return cfg

    def train_and_watch(cfg):
        check(cfg)
        return train(cfg, callback=watch)
    rm.parse_config, rm.train = parse_and_check, train_and_watch
    rm.main()


if __name__ == "__main__":
    main()
