"""Settings: their presets and limits, and the command line, which is made from them."""
import argparse
import json
from dataclasses import field, fields
from pathlib import Path
from typing import get_args

import envs
from support.errors import UserError, need, one_line

PROGRAM = """Train a language model to play games by reinforcement learning (RAGEN, StarPO).

examples:
  %(prog)s --env frozenlake                          the included model, with PPO
  %(prog)s --env sokoban --algo grpo --starpo-s      GRPO, with the three changes of StarPO-S
  %(prog)s --env sokoban --online-k 5                learn from one rollout in five slices
  %(prog)s --env bandit --model runs/warm ...        a model of your own (README: On a GPU)
  %(prog)s --resume RUN --iterations 100             train a run for longer
  %(prog)s --env sokoban --model RUN --eval-only     evaluate what a run has learned
  %(prog)s --env sokoban --model RUN --play 8        watch one episode"""


def option(default, help):  # -> a field of Config
    return field(default=default, metadata={"help": help})


# --help has a section for each group of settings. This is the first setting of each group.
SECTIONS = {"env": "the environment", "model": "the model", "iterations": "one iteration",
            "algo": "the objective", "seed": "the run"}

# ------------------------------------------------------------------------------ presets and limits
AT_LEAST_1 = ("max_turns", "max_actions_per_turn", "max_actions", "max_new_tokens", "prompts",
              "rollouts", "minibatch_size", "epochs", "online_k", "eval_prompts", "save_every",
              "micro_tokens")
AT_LEAST_0 = ("iterations", "seed", "eval_every", "play")
SHARES = ("success_rate", "keep", "clip_high", "clip_low", "gamma", "lam")
NUMBERS = ("lr", "critic_lr", "kl_coef", "entropy_coef", "temperature")
ABOVE_0 = ("keep", "temperature")
MAY_BE_NONE = ("success_rate", "play")


def fill_in(cfg, *presets):  # settings that were not given get the values of the presets
    for preset in presets:
        for name, value in preset.items():
            if getattr(cfg, name) is None:
                setattr(cfg, name, value)


def check(cfg):
    check_numbers(cfg)
    need(cfg.algo in ("ppo", "grpo"), f"--algo is {cfg.algo}. It must be ppo or grpo. (StarPO-S is "
                                      f"an option of both: --starpo-s)")
    need(cfg.adv_norm in ("std", "mean"), f"--adv-norm is {cfg.adv_norm}. It must be std or mean.")
    need(cfg.rollouts > 1 or (cfg.keep == 1 and cfg.algo == "ppo"),
         "--rollouts is 1. GRPO and the filter compare the episodes of a group: take 2 or more.")
    need(not (cfg.starpo_s and cfg.keep == 1),
         "--starpo-s with --keep 1 has no filter. Leave out one of the two. To take over the other "
         "changes of StarPO-S without its filter, give --kl-coef 0 --clip-high 0.28")
    need(not (cfg.eval_only and cfg.play is not None), "Give --play or --eval-only, not both.")
    evaluates = cfg.eval_only or (cfg.play is None and cfg.eval_every > 0)
    advice = "" if cfg.eval_only else ", or give --eval-every 0"
    need(cfg.horizon <= 200 or not evaluates,
         f"An episode may have {cfg.horizon} actions. Evaluations compare with optimal play, which "
         f"is known for 200 at most. Lower --max-actions{advice}")
    try:
        envs.make(cfg.env)
    except envs.EnvError as error:
        raise UserError(f"--env: {error}") from error


def check_numbers(cfg):
    for setting in fields(cfg):
        name, value = setting.name, getattr(cfg, setting.name)
        if value is None and name in MAY_BE_NONE:
            continue
        whole = isinstance(value, int)
        number = isinstance(value, (int, float))
        said = f"{as_option(name)} is {value!r}. It must be"
        if name in AT_LEAST_1:
            need(whole and 1 <= value < 1e9, f"{said} a whole number from 1 on.")
        elif name in AT_LEAST_0:
            need(whole and 0 <= value < 1e15, f"{said} a whole number from 0 on.")
        elif name in SHARES:
            need(number and 0 <= value <= 1, f"{said} a number from 0 to 1.")
        elif name in NUMBERS:
            need(number and 0 <= value < 1e15, f"{said} a number from 0 on.")
        elif setting.type is bool:
            need(isinstance(value, bool), f"{said} true or false.")
        need(name not in ABOVE_0 or value > 0, f"{as_option(name)} is 0. It must be more than 0.")
    need(cfg.eval_prompts <= len(envs.EVAL_SEEDS),
         f"--eval-prompts is {cfg.eval_prompts}. There are {len(envs.EVAL_SEEDS)} held-out levels.")


def as_option(name):  # max_turns -> --max-turns
    return "--" + name.replace("_", "-")


# ------------------------------------------------------------------------------ the command line
def parse(argv, config_class):  # -> a config_class (the Config of ragen_mini.py)
    """A setting is what was typed, else what the run of --resume had, else the default."""
    given = parse_arguments(argv, config_class)
    settings = {}
    if "resume" in given:
        settings = settings_of(given["resume"], given, config_class)
    cfg = config_class(**settings | given)
    note_what_has_no_effect(cfg, given)
    return cfg


def parse_arguments(argv, config_class):  # -> {setting: value} of what was typed
    parser = make_parser(config_class)
    given, rest = parser.parse_known_args(argv)
    if rest:
        advice = f"Write --env {rest[0]}" if rest[0] in envs.ENVS else "--help lists the options."
        parser.error(f"unknown: {' '.join(rest)}. {advice}")
    for name in ("env", "model", "resume", "out"):
        if getattr(given, name, None) == "":  # a shell variable that is not set, perhaps
            parser.error(f"{as_option(name)} is empty")
    return vars(given)


def make_parser(config_class):
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description=PROGRAM,
        argument_default=argparse.SUPPRESS,  # what is not typed does not appear in the result
        formatter_class=argparse.RawDescriptionHelpFormatter)
    for setting in fields(config_class):
        if setting.name in SECTIONS:
            section = parser.add_argument_group(SECTIONS[setting.name])
        text = setting.metadata["help"].replace("%", "%%")
        if setting.type is bool:  # --starpo-s, or --starpo-s false
            section.add_argument(as_option(setting.name), nargs="?", const=True, metavar="false",
                                 type=true_or_false, help=text)
            continue
        kind, *_ = get_args(setting.type) or [setting.type]  # of int | None: int
        if setting.default not in (None, ""):
            text = f"{text} (default: {setting.default})"
        section.add_argument(as_option(setting.name), type=kind, metavar=kind.__name__, help=text)
    return parser


def true_or_false(text):
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} is neither true nor false")
    return text.lower() == "true"


def settings_of(run, given, config_class):  # -> {setting: value} of the run that --resume names
    run = Path(run).expanduser()
    need(Path(run, "checkpoint").is_dir(),
         f"--resume {run}: this is not the folder of a run, because it has no checkpoint/.")
    for name in ("env", "model", "algo", "starpo_s", "seed", "eval_prompts", "out"):
        need(name not in given, f"--resume keeps {as_option(name)} as it was. To begin a new run "
                                f"with the model of this one, give --model {run}")
    for name in ("play", "eval_only"):
        need(name not in given, f"--resume trains. For {as_option(name)}, give --model {run}")
    file = Path(run, "config.json")
    try:
        settings = json.loads(file.read_text())
        unknown = settings.keys() ^ {setting.name for setting in fields(config_class)}
        need(not unknown, f"it lacks settings, or has unknown ones: {sorted(unknown)}")
    except (OSError, ValueError, AttributeError, UserError) as error:
        raise UserError(f"{file} cannot be read: {one_line(error)}") from error
    return settings | {"device": config_class.device, "out": "", "resume": ""}


def note_what_has_no_effect(cfg, given):
    if not cfg.trains:
        return
    if cfg.lr == 0:
        print("note: with --lr 0 the policy learns nothing")
    unused = {"adv_norm"} if cfg.uses_critic else {"gamma", "lam", "critic_lr"}
    if not hasattr(envs.make(cfg.env), "success_rate"):  # an environment in which nothing slips
        unused.add("success_rate")
    for name in sorted(unused.intersection(given)):
        print(f"note: {as_option(name)} has no effect on {envs.title(cfg.env)} with {cfg.algo}")
