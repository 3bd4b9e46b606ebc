"""Everything that a run needs besides the method. ragen_mini.py can be read without this file.

    settings    presets, checks, the command line, the settings of an older run
    models      loading them
    a run       its folder, which only one process may use; log, save and restore
    a process   Ctrl-C, threads, memory, what the user is told

The folder of a run holds
    config.json      its settings
    log.jsonl        a row for each iteration, beginning with 0, the model before training
    samples.jsonl    a few whole episodes of each evaluation
    checkpoint/      the trained model (a Hugging Face folder), and trainer.pt for --resume
    curves.png       drawn when the run ends
    lock             held while a process trains there
"""
import argparse
import contextlib
import contextvars
import importlib.metadata
import inspect
import json
import os
import re
import shlex
import sys
import tempfile
import threading
import traceback
from dataclasses import asdict, fields, replace
from pathlib import Path
from signal import SIGINT, signal
from typing import get_args

import filelock  # comes with torch
import huggingface_hub  # comes with transformers, as packaging does
import torch
from packaging.version import Version
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
from transformers import logging

import envs

TINY = Path(__file__).parent / "tiny"

HELP = """Train a language model to play games by reinforcement learning (RAGEN, StarPO).

examples:
  %(prog)s --env frozenlake                          the included model, with PPO
  %(prog)s --env sokoban --algo grpo --starpo-s      GRPO, with the three changes of StarPO-S
  %(prog)s --env sokoban --online-k 5                learn from one rollout in five slices
  %(prog)s --env bandit --model runs/warm ...        a model of your own (README: On a GPU)
  %(prog)s --resume RUN --iterations 100             train a run for longer
  %(prog)s --model RUN --eval-only                   evaluate what a run has learned
  %(prog)s --model RUN --play 8                      watch one episode"""


class UserError(Exception):
    """A mistake that the user can mend. On the command line its message is all that is shown."""


def need(condition, message):
    if not condition:
        raise UserError(message)


# ----------------------------------------------------------------------------------------- settings
AT_LEAST_1 = ("max_turns", "max_actions_per_turn", "max_actions", "max_new_tokens", "prompts",
              "rollouts", "minibatch_size", "epochs", "online_k", "eval_prompts", "save_every",
              "micro_tokens")
AT_LEAST_0 = ("iterations", "seed", "eval_every", "play")
SHARES = ("success_rate", "keep", "clip_high", "clip_low", "gamma", "lam")
NUMBERS = ("lr", "critic_lr", "kl_coef", "entropy_coef", "temperature")
ABOVE_0 = ("keep", "temperature")
MAY_BE_NONE = ("success_rate", "play", "micro_tokens")
# These have no effect where nothing is trained.
FOR_TRAINING = ("iterations", "prompts", "rollouts", "minibatch_size", "epochs", "online_k", "lr",
                "critic_lr", "algo", "starpo_s", "keep", "kl_coef", "clip_high", "clip_low",
                "entropy_coef", "gamma", "lam", "adv_norm", "eval_every", "save_every", "out",
                "micro_tokens")


def fill_in(cfg, *presets):
    """Gives settings that are None the values of the presets, and notes them in cfg.filled.

    If cfg.filled is not empty, cfg is a copy of settings that were filled in before. What still is
    as the old presets had it is chosen anew, since these may have been other presets. (That is so
    even if somebody has set it to the same value by hand.)
    """
    for name, value in cfg.filled.items():
        if getattr(cfg, name) == value:
            setattr(cfg, name, None)
    cfg.filled = {}
    for preset in presets:
        for name, value in preset.items():
            if getattr(cfg, name) is None:
                setattr(cfg, name, value)
                cfg.filled[name] = value


def is_tiny(model):
    """Is this the included model, or a model that was trained from it? Its config.json says so."""
    try:
        config = json.loads(Path(weights_of(model), "config.json").read_text())
    except (OSError, ValueError):  # such as the name of a model of the hub
        return False
    return isinstance(config, dict) and config.get("ragen_mini_presets") == "tiny"


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
    for field in fields(cfg):
        name, value = field.name, getattr(cfg, field.name)
        if value is None and name in MAY_BE_NONE:
            continue
        whole = isinstance(value, int)
        number = isinstance(value, (int, float))
        said = f"{option(name)} is {value!r}. It must be"
        if name in AT_LEAST_1:
            need(whole and 1 <= value < 1e9, f"{said} a whole number from 1 on.")
        elif name in AT_LEAST_0:
            need(whole and 0 <= value < 1e15, f"{said} a whole number from 0 on.")
        elif name in SHARES:
            need(number and 0 <= value <= 1, f"{said} a number from 0 to 1.")
        elif name in NUMBERS:
            need(number and 0 <= value < 1e15, f"{said} a number from 0 on.")
        elif field.type is bool:
            need(isinstance(value, bool), f"{said} true or false.")
        need(name not in ABOVE_0 or value > 0, f"{option(name)} is 0. It must be more than 0.")
    need(cfg.eval_prompts <= len(envs.EVAL_SEEDS),
         f"--eval-prompts is {cfg.eval_prompts}. There are {len(envs.EVAL_SEEDS)} held-out levels.")


def option(name):  # max_turns -> --max-turns
    return "--" + name.replace("_", "-")


# Do the settings come from the command line? Then what is printed at the end of a run are commands.
by_command_line = False


def parse_config(argv, config_class):  # -> a config_class (the Config of ragen_mini.py)
    """A setting is what was typed, else what the run of --resume or --model had, else the default.
    """
    global by_command_line
    by_command_line = argv is None
    given = parse_arguments(argv, config_class)
    settings = {}
    if "resume" in given:
        run = Path(given["resume"]).expanduser()
        check_resume(run, given)
        settings = settings_of(run, config_class)
    elif run := run_of(given.get("model", "tiny")):
        settings = settings_of(run, config_class)
    settings |= {"device": config_class.device, "out": "", "resume": ""}  # not those of the old run
    # What was typed is no longer filled in, even if it is the same value.
    filled = settings.get("filled", {})
    settings["filled"] = {name: filled[name] for name in filled if name not in given}
    unknown = settings.keys() - {field.name for field in fields(config_class)}
    need(not unknown, f"{run}/config.json has settings that are unknown here: {sorted(unknown)}")
    try:
        cfg = config_class(**settings | given)
    except UserError as error:
        source = f" (Settings that were not typed are those of {run}/config.json.)" if run else ""
        raise UserError(f"{error}{source}") from error
    if run and "resume" not in given:
        print(settings_handed_on(run, cfg, given))
    note_what_has_no_effect(cfg, given)
    return cfg


def parse_arguments(argv, config_class):  # -> {setting: value} of what was typed
    parser = make_parser(config_class)
    given, rest = parser.parse_known_args(argv)
    if rest:
        advice = f"Write --env {rest[0]}" if rest[0] in envs.ENVS else "--help lists the options."
        parser.error(f"unknown: {' '.join(rest)}. {advice}")
    for name in ("env", "model", "resume"):
        if getattr(given, name, None) == "":  # a shell variable that is not set, perhaps
            parser.error(f"{option(name)} is empty")
    return vars(given)


def check_resume(run, given):  # run: the folder, given: what was typed
    need(Path(run, "checkpoint").is_dir(),
         f"--resume {run}: this is not the folder of a run, because it has no checkpoint/.")
    for name in ("env", "model", "algo", "starpo_s", "seed", "eval_prompts", "out"):
        need(name not in given, f"--resume keeps {option(name)} as it was. To begin a new run with "
                                f"the model of this one, give --model {run}")
    for name in ("play", "eval_only"):
        need(name not in given, f"--resume trains. For {option(name)}, give --model {run}")


def settings_handed_on(run, cfg, given):  # -> text: those settings of a run that are no defaults
    taken = [f"{option(field.name)} {getattr(cfg, field.name)}" for field in fields(cfg)
             if field.name not in given and field.name not in ("filled", "device", "out", "model")
             and field.name not in cfg.filled and getattr(cfg, field.name) != field.default]
    return f"settings of {run}: {' '.join(taken) or 'the defaults'}"


def make_parser(config_class):
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description=HELP,
        argument_default=argparse.SUPPRESS,  # what is not typed does not appear in the result
        formatter_class=argparse.RawDescriptionHelpFormatter)
    types = {field.name: field.type for field in fields(config_class)}
    defaults = {field.name: field.default for field in fields(config_class)}
    for group, comments in comments_of(config_class).items():
        section = parser.add_argument_group(group)
        for name, text in comments.items():
            if types[name] is bool:  # --starpo-s, or --starpo-s false
                section.add_argument(option(name), nargs="?", const=True, type=true_or_false,
                                     metavar="false", help=text)
                continue
            kind, *_ = get_args(types[name]) or [types[name]]  # of int | None: int
            if defaults[name] not in (None, ""):
                text = f"{text} (default: {defaults[name]})"
            section.add_argument(option(name), type=kind, metavar=kind.__name__, help=text)
    return parser


def true_or_false(text):
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} is neither true nor false")
    return text.lower() == "true"


def comments_of(config_class):  # -> {group: {setting: its comment}}
    """They stand in the source: `# the model` above a group, `# ...` behind each setting."""
    groups = {}
    for line in inspect.getsource(config_class).splitlines():
        if found := re.fullmatch(r"    # (.*[^.])", line):
            group = groups.setdefault(found[1], {})
        elif found := re.fullmatch(r"    (\w+): .*?  # (.*)", line):
            group[found[1]] = found[2].replace("%", "%%")
    return {group: comments for group, comments in groups.items() if comments}


def run_of(model):  # what --model names -> the folder of a run, or None
    folder = Path(model).expanduser().resolve()
    if folder.name == "checkpoint":
        folder = folder.parent
    return folder if is_run(folder) else None


def is_run(folder):
    """Other programs, too, have folders called checkpoint. Those of a run have our files."""
    if not Path(folder, "checkpoint").is_dir():
        return False
    if Path(folder, "log.jsonl").exists() or Path(folder, "checkpoint", "trainer.pt").exists():
        return True
    try:
        return "env" in json.loads(Path(folder, "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return False


def settings_of(run, config_class):  # -> dict
    file = Path(run, "config.json")
    try:
        settings = json.loads(file.read_text()) if file.exists() else {}
        settings = dict(settings, filled=dict(settings.get("filled", {}))) if settings else {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read: {one_line(error)}. If it is beyond repair, delete "
                        f"it. The checkpoint has a copy of the settings.") from error
    old = "update_size" in settings
    missing = {field.name for field in fields(config_class)} - settings.keys()
    if missing and not old and Path(run, "checkpoint", "trainer.pt").exists():
        settings = load_trainer(run)["settings"] | settings  # the copy
    need("env" in settings, f"{file} has no env, so it is not the settings of a run.")
    # Older runs have another name for it, and do not say what --starpo-s had filled in.
    if old:
        settings["minibatch_size"] = settings.pop("update_size")
        usual = config_class(starpo_s=settings.get("starpo_s", False)).filled
        settings["filled"] = {name: usual[name] for name in ("keep", "kl_coef", "clip_high")
                              if settings.get(name) == usual[name]}
    return settings


def note_what_has_no_effect(cfg, given):
    if not cfg.trains:
        for name in sorted(set(FOR_TRAINING).intersection(given)):
            print(f"note: {option(name)} has no effect, because nothing is trained")
        return
    if cfg.lr == 0:
        print("note: with --lr 0 the policy learns nothing")
    unused = {"adv_norm"} if cfg.uses_critic else {"gamma", "lam", "critic_lr"}
    if not hasattr(envs.make(cfg.env), "success_rate"):  # an environment in which nothing slips
        unused.add("success_rate")
    for name in sorted(unused.intersection(given)):
        print(f"note: {option(name)} has no effect on {envs.title(cfg.env)} with {cfg.algo}")


# ------------------------------------------------------------------------------------------- models
def weights_of(model):  # -> a folder, or the name of a model of the Hugging Face hub
    if model == "tiny":
        return TINY
    run = run_of(model)
    return Path(run, "checkpoint") if run else Path(model).expanduser()


def load_policy(cfg):  # -> policy, tokenizer
    check_versions()
    source = weights_of(cfg.model)
    check_source(source, cfg)
    check_device(cfg.device)
    policy, missing = load_network(AutoModelForCausalLM, cfg)
    need(not missing, f"--model {cfg.model}: its files lack {len(missing)} weights of the network.")
    try:
        tok = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # transformers raises many kinds, and says best what is wrong
        raise UserError(f"--model {cfg.model}: its tokenizer cannot be loaded: "
                        f"{one_line(error)}") from error
    need(tok.chat_template,
         f"--model {cfg.model} has no chat template. Take a model that was made for chat.")
    known = policy.get_input_embeddings().weight.shape[0]
    need(len(tok) <= known,
         f"--model {cfg.model}: its tokenizer has {len(tok)} tokens, but the network knows only "
         f"{known}. Call policy.resize_token_embeddings({len(tok)}), and save the model again.")
    return policy, tok


# The oldest versions with which this was tested.
OLDEST = {"torch": "2.11", "transformers": "5.17", "matplotlib": "3.10"}


def check_versions():
    for package, oldest in OLDEST.items():
        found = importlib.metadata.version(package)
        need(Version(found) >= Version(oldest),
             f"{package} {found} is installed, but {oldest} or later is needed: "
             f"pip install -r requirements.txt")


def check_source(source, cfg):  # source: a folder, or the name of a model of the hub
    if source.is_dir():
        need(not Path(source, "adapter_config.json").exists(),
             f"--model {cfg.model} is an adapter (LoRA), not a whole model. Merge it first: "
             f"peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload()"
             f".save_pretrained(NEW), and save the tokenizer in NEW, too.")
        need(any(source.glob("*.safetensors*")),
             f"--model {cfg.model}: there is no *.safetensors in this folder.")
        return
    # owner/name may be on the hub, unless there is a folder `owner`.
    need(len(source.parts) == 1 or (len(source.parts) == 2 and not source.parent.is_dir()),
         f"--model {cfg.model}: there is no such folder.")
    name = source.as_posix()
    if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
        return
    try:  # one short question, since from_pretrained would try again for a minute
        huggingface_hub.HfApi().model_info(name, timeout=10)
    except Exception as error:
        raise UserError(f"--model {cfg.model} is neither a folder here, nor in the cache of the "
                        f"Hugging Face hub, and the hub says: {one_line(error)}") from error


def check_device(device):
    need(re.fullmatch(r"cpu|mps|cuda(:\d+)?", device),
         f"--device is {device}. It must be cpu, cuda, cuda:N or mps.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device} cannot be used: {one_line(error)}") from error
    if device == "mps":
        print("note: --device mps is untested. Networks calculate in fp32 there.")
    if device.startswith("cuda") and torch.cuda.get_device_capability(device) < (8, 0):
        print("note: this GPU has no bf16 arithmetic, so networks calculate in fp32")


def load_critic(cfg):
    """The network of the policy (causal, too), with a new head of one output."""
    try:
        critic, _ = load_network(AutoModelForTokenClassification, cfg, num_labels=1)
    except UserError as error:
        raise UserError(f"{error} (as a critic; --algo grpo needs none)") from error
    return critic


LOADING = threading.Lock()  # from_pretrained must not run in two threads at once


def load_network(kind, cfg, **options):  # kind: a class of transformers -> network, missing weights
    """The weights are fp32. from_pretrained leaves dropout off."""
    try:
        with LOADING, quiet_transformers():
            network, report = kind.from_pretrained(
                weights_of(cfg.model), dtype=torch.float32, output_loading_info=True, **options)
    except Exception as error:
        raise UserError(f"--model {cfg.model} cannot be loaded: {one_line(error):.400}") from error
    if report["unexpected_keys"] and kind is AutoModelForCausalLM:
        print(f"note: {len(report['unexpected_keys'])} weights in the files of {cfg.model} have no "
              f"place in the network that its config.json describes")
    return network.to(cfg.device), report["missing_keys"]


@contextlib.contextmanager
def quiet_transformers():
    """Inside, transformers shows no progress bars, and is silent about the critic's new head."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def check_longest_episode(policy, prompt, cfg):  # prompt: tokens of the first message
    """Later messages are shorter, but for a line with the reward. It takes less than 16 tokens."""
    longest = cfg.max_turns * (prompt + 16 + cfg.max_new_tokens)
    need(longest <= room(policy),
         f"An episode may take {longest} tokens, but {cfg.model} reads at most {room(policy)}. "
         f"Lower --max-new-tokens or --max-turns.")


def check_length(policy, trajs, cfg):  # while they are played: messages may have grown
    longest = max((len(traj.ids) for traj in trajs), default=0) + cfg.max_new_tokens
    need(longest <= room(policy),
         f"With the next answer an episode may take {longest} tokens, but {cfg.model} reads at "
         f"most {room(policy)}. Are the messages of {envs.title(cfg.env)} too long? Lower "
         f"--max-new-tokens or --max-turns.")


def room(policy):  # -> the number of tokens that it reads at most
    config = getattr(policy, "config", None)
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def episodes_at_once(policy, cfg):
    """As many as have a cache that fits into a quarter of the memory, rounded down to a power of
    two. What counts is all the memory, not what is free now, so that evaluations can be repeated.
    """
    config = getattr(policy, "config", None)
    layers = getattr(config, "num_hidden_layers", None) or 1
    width = getattr(config, "head_dim", None) or (
        getattr(config, "hidden_size", 0) // (getattr(config, "num_attention_heads", None) or 1))
    heads = getattr(config, "num_key_value_heads", None) or (
        getattr(config, "num_attention_heads", None) or 1)
    tokens = cfg.max_turns * (cfg.max_new_tokens + 200)
    cache = 2 * layers * heads * width * 4 * tokens  # bytes of an episode
    fitting = memory(cfg.device) // 4 // max(cache, 1)
    return 2 ** max(0, fitting.bit_length() - 1)


def memory(device):  # -> bytes
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows does not say
        return 8 * 2 ** 30


# ----------------------------------------------------------------------------------- a run's folder
class RunInProgress:
    """What `train` writes to: the settings, the rows of the log so far, the progress bar."""
    def __init__(self, cfg, rows, bar):
        self.cfg = cfg  # its folder is cfg.out
        self.rows = rows  # of iterations 0, 1, ...
        self.bar = bar

    def log(self, row):
        self.rows.append(row)
        add_lines(self.cfg.out, "log.jsonl", [row])
        if row["iteration"] > 0:
            self.bar.update()
            self.bar.set_postfix_str(f"won {row['success']:.2f}, "
                                     f"valid answers {row['valid']:.2f} (training)")


def log_samples(cfg, i, trajs, tok):  # whole episodes of an evaluation
    samples = []
    for traj in trajs:
        samples.append({"iteration": i, "env": envs.title(cfg.env), "turns": traj.turns,
                        "text": transcript(traj, tok)})
    add_lines(cfg.out, "samples.jsonl", samples)


def transcript(traj, tok):  # -> a whole episode as text
    return f"{tok.decode(traj.ids)}\n\n{traj.env.render()}\nreturn {traj.R:g}\n"


@contextlib.contextmanager
def open_run(models, cfg):  # -> a RunInProgress: new, or that of --resume as it was last saved
    """Inside, the folder is locked, Ctrl-C only asks to stop, and torch is set up for this model.
    """
    out = Path(cfg.resume).expanduser() if cfg.resume else free_folder(cfg)
    Path(out, "checkpoint").mkdir(parents=True, exist_ok=True)
    with (lock(out), ctrl_c_asks_to_stop(), torch_settings(models.policy),
          passes_that_fill_the_card(models, cfg)):
        log = restore(models, cfg) if cfg.resume else ""
        rows = [json.loads(line) for line in log.splitlines()]
        done = len(rows) - 1
        need(done < cfg.iterations,
             f"{out} has had its {done} iterations. To go on, give --iterations {done + 30}")
        check_writable(out)
        # What was logged after the checkpoint will be logged again.
        Path(out, "log.jsonl").write_text(log)
        drop_samples_after(out, done)
        was_resumed = bool(cfg.resume)
        cfg = replace(cfg, out=str(out), resume="")
        if not was_resumed:  # new settings of --resume count from the next checkpoint on
            write_settings(cfg)
        print(f"{cfg.model} learns {envs.title(cfg.env)} ({cfg.algo}) on {cfg.device}, in {out}, "
              f"from iteration {done + 1} on")
        with tqdm(total=cfg.iterations, initial=max(0, done),
                  bar_format="{n}/{total} |{bar:12}| {elapsed}<{remaining}{postfix}") as bar:
            yield RunInProgress(cfg, rows, bar)


def check_writable(out):  # before anything is played
    for folder in (out, Path(out, "checkpoint")):
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"can anything be saved here?")
    need(not Path(out, "checkpoint.new").is_file(),
         f"{out}/checkpoint.new is a file. A folder of this name is needed: remove it.")


def write_settings(cfg):
    new = Path(cfg.out, "config.json.new")
    new.write_text(json.dumps(as_json(cfg), indent=1))
    new.replace(Path(cfg.out, "config.json"))


def as_json(cfg):  # -> dict
    """Paths become absolute, so that they mean the same wherever the run is resumed."""
    settings = asdict(cfg)
    if not isinstance(cfg.env, str):  # a class
        settings["env"] = envs.title(cfg.env)
    elif ":" in cfg.env:
        file, _, name = cfg.env.rpartition(":")
        settings["env"] = f"{Path(file).resolve()}:{name}"
    if cfg.model != "tiny" and Path(cfg.model).expanduser().exists():
        settings["model"] = str(Path(cfg.model).expanduser().resolve())
    return settings


def free_folder(cfg):  # -> the folder that is wanted, or with a number after its name: a new one
    starpo_s = "-s" if cfg.starpo_s else ""
    by = "" if script() in ("ragen_mini", "notebook") else f"-by-{script()}"
    name = f"{envs.title(cfg.env)}-{cfg.algo}{starpo_s}-seed{cfg.seed}{by}"
    wanted = Path(cfg.out or f"runs/{name}").expanduser()
    need(wanted.name not in ("", ".."), f"--out {cfg.out}: a run gets a new folder. Give its name.")
    out = wanted
    number = 1
    while out.exists():
        number += 1
        out = Path(f"{wanted}-{number}")
    return out


def script():  # -> "ragen_mini", "notebook", or such as "recipes-rloo" for `recipes.py rloo`
    """Runs of a script carry its name, and only that script resumes them, because the script may
    have changed the method.
    """
    name = Path(sys.argv[0]).name.replace(".py", "").replace(" ", "-")
    others = {"ipykernel_launcher": "notebook", "": "python", "-c": "python", "-": "python"}
    return others.get(name, name)


@contextlib.contextmanager
def lock(out):
    try:
        held = filelock.FileLock(Path(out, "lock")).acquire(timeout=0)
    except filelock.Timeout as error:
        raise UserError(f"Another process trains in {out}. Wait for it, or give another --out."
                        ) from error
    with held:
        yield


def add_lines(folder, name, dicts):  # one line for each, at the end of a file
    with open(Path(folder, name), "a") as file:
        for x in dicts:
            file.write(json.dumps(x, default=float) + "\n")  # NumPy's numbers become floats


def drop_samples_after(out, iteration):
    file = Path(out, "samples.jsonl")
    if not file.exists():
        return
    try:
        lines = file.read_text().split("\n")[:-1]  # the last may be unfinished
        kept = [line for line in lines if json.loads(line)["iteration"] <= iteration]
    except (ValueError, TypeError, KeyError):  # damaged, but of no importance for the run
        return
    file.write_text("".join(line + "\n" for line in kept))


def save(models, cfg):
    """Writes RUN/checkpoint: a Hugging Face folder, for --model, and trainer.pt, for --resume.

    The process may die at any time. So all new files are complete before one takes the place of an
    old one, and trainer.pt alone holds all that --resume needs.
    """
    new = Path(cfg.out, "checkpoint.new")
    state = {"log": Path(cfg.out, "log.jsonl").read_text(), "script": script(),
             "settings": as_json(cfg)}
    for name, part in vars(models).items():
        if hasattr(part, "state_dict"):  # the networks that there are, and the optimizer
            state[name] = part.state_dict()
    try:
        with quiet_transformers():
            models.policy.save_pretrained(new)
            # Otherwise the chat template becomes a file, or, if there are several, a folder.
            models.tok.save_pretrained(new, save_jinja_files=False)
        torch.save(state, Path(new, "trainer.pt"))
    except Exception as error:  # not only an OSError, if the disk is full
        saved = Path(cfg.out, "checkpoint", "trainer.pt").exists()
        advice = f"then --resume {cfg.out}, which is whole as last saved" if saved else "begin anew"
        raise UserError(f"{new} cannot be written: {one_line(error)}. Make room, {advice}."
                        ) from error
    for file in sorted(new.iterdir()):
        file.replace(Path(cfg.out, "checkpoint", file.name))
    new.rmdir()
    write_settings(cfg)


def load_trainer(run):  # -> what `save` has put into trainer.pt
    file = Path(run, "checkpoint", "trainer.pt")
    need(file.is_file(), f"{run} has no checkpoint/trainer.pt, so it cannot be resumed. Begin a "
                         f"new run, with its policy if that was saved: --model {run}")
    try:
        state = torch.load(file, map_location="cpu", mmap=True)
        if "origin" in state:  # of an older version, such as "bandit-ppo-seed0 by ragen_mini.py"
            state["script"] = state["origin"].rpartition(" by ")[2].removesuffix(".py")
            state["settings"] = json.loads(Path(run, "config.json").read_text())
        need(isinstance(state, dict) and {"log", "script", "settings", "optimizer"} <= state.keys()
             and isinstance(state["settings"], dict), "it is not the file of a run")
        for line in state["log"].splitlines():
            json.loads(line)
        return state
    except Exception as error:  # torch raises many kinds for a damaged file
        raise UserError(f"{file} cannot be read: {one_line(error)}. If the policy is whole, begin "
                        f"a new run with it: --model {run}") from error


def restore(models, cfg):  # -> the log as it was when it was saved
    run = Path(cfg.resume).expanduser()
    state = load_trainer(run)
    need(state["script"] == script(),
         f"--resume {run}: it was trained by {state['script']}. Use that script.")
    for name in ("env", "algo", "seed"):
        was, now = state["settings"].get(name), getattr(cfg, name)
        if name == "env":  # a file may have another path now
            was, now = envs.title(was), envs.title(now)
        need(was == now, f"--resume {run}: its checkpoint is of a run with {option(name)} {was}, "
                         f"not {now}. Were files of two runs mixed up?")
    try:
        # With --lr another rate may follow, but the state of Adam is that of the run.
        state["optimizer"]["param_groups"] = models.optimizer.state_dict()["param_groups"]
        for name, part in vars(models).items():
            must_be_there = part and name in ("policy", "critic", "optimizer")
            need(name in state or not must_be_there, f"it has no {name}")
            if part and name in state:  # with --kl-coef 0 there was no reference
                part.load_state_dict(state[name])
    except Exception as error:
        raise UserError(f"--resume {run}: its checkpoint does not fit the model {cfg.model}: "
                        f"{one_line(error)}") from error
    return state["log"]


# ------------------------------------------------------------------- the process, while a run lasts
STOP = threading.Event()


def asked_to_stop():
    return STOP.is_set()


@contextlib.contextmanager
def ctrl_c_asks_to_stop():
    """Inside, Ctrl-C (or a notebook's Interrupt) only asks to stop. A second one stops at once."""
    STOP.clear()
    if threading.current_thread() is not threading.main_thread():  # Python forbids handlers there
        yield
        return
    old_handler = signal(SIGINT, ask_to_stop)
    try:
        yield
    finally:
        signal(SIGINT, old_handler)


def ask_to_stop(*_):
    if STOP.is_set():
        raise KeyboardInterrupt
    STOP.set()
    print("\nfinishing this iteration, then saving (Ctrl-C again: stop at once, as last saved)",
          file=sys.stderr)


@contextlib.contextmanager
def torch_settings(policy):
    """Inside, a small model uses one thread, because it gains nothing from more. And cuDNN's
    attention is off: it would plan anew for each length of a text, and ours grow with each token.
    """
    threads, cudnn = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()
    if sum(weights.numel() for weights in policy.parameters()) < 2.5e6:
        torch.set_num_threads(1)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


# ----------------------------------------------------------------------- passes that fill the card
# The tokens of a pass (a micro-batch) of the present run. None stands for the default.
micro_tokens = contextvars.ContextVar("micro_tokens", default=None)


def tokens_of_a_pass(default):  # default: MICRO_TOKENS of ragen_mini.py
    return micro_tokens.get() or default


@contextlib.contextmanager
def passes_that_fill_the_card(models, cfg):
    """Inside, the passes of updates have --micro-tokens, or else as many as fit."""
    before = micro_tokens.set(cfg.micro_tokens or tokens_that_fit(models, cfg))
    try:
        yield
    finally:
        micro_tokens.reset(before)


def tokens_that_fit(models, cfg):
    """A power of two, from 2048 on. None, which means the default, for cards of less than 24 GB.

    A trained weight still needs 14 bytes: gradient 4, Adam's state 8, copy in bf16 2. A chunk of
    logits needs 2 GB. Half of the rest of the free memory is for what the layers keep for the
    backward pass. The factors were counted, for layers in bf16.
    """
    config = getattr(models.policy, "config", None)
    layers = getattr(config, "num_hidden_layers", None)
    hidden = getattr(config, "hidden_size", None)
    # Cards that are sold with 24 GB report a little less.
    if not (layers and hidden and cfg.device.startswith("cuda") and memory(cfg.device) > 23e9):
        return None
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    a_token = layers * (33 * hidden + 8 * inner)
    free = free_memory(cfg.device) - 2e9
    for network in (models.policy, models.critic):
        if network:
            free -= 14 * sum(weights.numel() for weights in network.parameters()
                             if weights.requires_grad)
    fitting = max(2048, int(free / 2 / a_token))
    return 2 ** (fitting.bit_length() - 1)


def free_memory(device):  # of a GPU, with what PyTorch holds but does not use -> bytes
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextlib.contextmanager
def shorter_passes_if_out_of_memory(batch, models, default):
    """If the card's memory runs out inside, the passes of this run get half as many tokens, and the
    gradients that were added so far are dropped.
    """
    tokens = tokens_of_a_pass(default)
    try:
        yield
    except torch.OutOfMemoryError:
        if tokens <= batch["mask"].shape[1]:  # already a single row is too long
            raise
        for network in (models.policy, models.critic):
            if network:
                network.zero_grad()
        micro_tokens.set(tokens // 2)
        say(f"out of memory: from now on passes have {tokens // 2} tokens, not {tokens} "
            f"(--micro-tokens)")


# ------------------------------------------------------------------------------- what the user sees
def say(text):  # prints it above the progress bar
    with contextlib.suppress(BrokenPipeError):  # Ctrl-C ends both programs of `... | tee log`
        tqdm.write(text)


def one_line(error):
    return " ".join(str(error).split()) or type(error).__name__


def program_of(argument):  # "my folder/recipes.py rloo" -> "my folder/recipes.py", "rloo"
    script, py, recipe = argument.rpartition(".py")
    return [script + py, *recipe.split()] if py else [argument]


def print_next_steps(cfg, i, dead):  # dead: the number of its last iterations without an update
    """Where the picture of a run is, how to see the model play, how to go on."""
    iterations = cfg.iterations + 30 if i == cfg.iterations else cfg.iterations
    if Path(cfg.out, "curves.png").exists():
        print(f"curves:  {cfg.out}/curves.png")
    if dead:
        print(f"ended at {i}: no update in {dead} iterations, because returns were equal. "
              f"See: python plots.py collapse {cfg.out!r}")
    if not isinstance(cfg.env, str):  # only who has the class can go on
        return
    if not by_command_line or script() in ("notebook", "python"):
        print(f"go on:   import ragen_mini as rm; rm.train(rm.parse_config("
              f"['--resume', {cfg.out!r}, '--iterations', '{iterations}']))")
        return
    # A recipe has its name behind that of the script: recipes.py rloo.
    program = " ".join(shlex.quote(part) for part in program_of(sys.argv[0]))
    out = shlex.quote(cfg.out)
    if not Path(cfg.out, "checkpoint", "adapter_config.json").exists():  # --model takes no adapter
        print(f"watch:   python {program} --model {out} --play 8")
    if not dead:
        print(f"go on:   python {program} --resume {out} --iterations {iterations}")


@contextlib.contextmanager
def one_line_errors():
    """The command line shows the message of a mistake, without a traceback. Ctrl-C exits with 130.
    """
    for stream in (sys.stdout, sys.stderr):  # a terminal may not know all characters
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        yield
        if STOP.is_set():  # `train` has saved and returned early
            sys.exit(130)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, envs.EnvError) as error:
        sys.exit(one_line(error))
    except BrokenPipeError:  # the output goes to a program that has ended, such as `head`
        os._exit(141)
    except (OSError, UnicodeEncodeError) as error:  # such as a full disk
        sys.exit(f"{type(error).__name__}: {one_line(error)}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(out_of_memory(error))


def is_out_of_memory(error):  # torch raises a plain RuntimeError on a CPU
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error))


def out_of_memory(error):  # -> what was too large, which option lowers it
    functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if "evaluate" in functions:
        what, options = "playing the held-out levels", "--eval-prompts or --max-new-tokens"
    elif "rollout" in functions:
        what, options = "the rollout", "--prompts, --rollouts or --max-new-tokens"
    elif "learn" in functions:
        what, options = "the update", "--max-new-tokens or --max-turns, or take --algo grpo"
    else:
        return f"Out of memory: the model is too large ({one_line(error)}). Take a smaller one."
    return (f"Out of memory: {what} did not fit ({one_line(error)}). Lower {options}. "
            f"A run that had begun goes on with --resume.")
