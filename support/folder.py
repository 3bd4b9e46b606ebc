"""The folder of a run, which only one process may use:

    config.json      its settings
    log.jsonl        a row for each iteration, beginning with 0, the model before training
    samples.jsonl    a few whole episodes of each evaluation
    checkpoint/      the trained model (a Hugging Face folder), and trainer.pt for --resume
    curves.png       drawn when the run ends
    lock             held while a process trains there
"""
import contextlib
import json
import shlex
import sys
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path

import filelock  # comes with torch
import torch
from tqdm import tqdm

import envs
from support.errors import UserError, need, one_line
from support.loading import quiet_transformers
from support.settings import as_option


# -------------------------------------------------------------------------------- beginning a run
def claim(cfg):  # -> settings with the run's folder in cfg.out
    """That of --resume, or a new one: the folder that is wanted, or with a number after its name.
    """
    if cfg.resume:
        return replace(cfg, out=str(Path(cfg.resume).expanduser()))
    starpo_s = "-s" if cfg.starpo_s else ""
    by = f"-by-{script()}" if script() else ""
    name = f"{envs.title(cfg.env)}-{cfg.algo}{starpo_s}-seed{cfg.seed}{by}"
    wanted = Path(cfg.out or f"runs/{name}").expanduser()
    out = wanted
    number = 1
    while out.exists():
        number += 1
        out = Path(f"{wanted}-{number}")
    return replace(cfg, out=str(out))


def script():  # -> "" for ragen_mini.py and notebooks, "recipes-rloo" for recipes.py rloo
    name = Path(sys.argv[0]).name
    if "ipykernel" in sys.modules or name in ("ragen_mini.py", "-c", ""):
        return ""
    return name.replace(".py", "").replace(" ", "-")


@contextlib.contextmanager
def lock(out):
    Path(out, "checkpoint").mkdir(parents=True, exist_ok=True)
    try:
        held = filelock.FileLock(Path(out, "lock")).acquire(timeout=0)
    except filelock.Timeout as error:
        raise UserError(f"Another process trains in {out}. Wait until it has ended.") from error
    except (OSError, NotImplementedError) as error:
        raise UserError(f"{out} cannot be locked: {one_line(error)}. Give --out on another drive."
                        ) from error
    with held:
        yield


def open_log(models, cfg):  # -> rows of the log so far: none of a new run
    """A run that goes on gives the models what it has saved."""
    log = restore(models, cfg) if cfg.resume else ""
    rows = [json.loads(line) for line in log.splitlines()]
    done = max(0, len(rows) - 1)
    need(done < cfg.iterations or not rows,
         f"{cfg.out} has had its {done} iterations. To go on, give --iterations {done + 30}")
    check_writable(cfg.out)
    # What was logged after the checkpoint will be logged again.
    Path(cfg.out, "log.jsonl").write_text(log)
    drop_samples_after(cfg.out, done if rows else -1)
    if not cfg.resume:  # new settings of --resume count from the next checkpoint on
        write_settings(cfg)
    print(f"{cfg.model} learns {envs.title(cfg.env)} ({cfg.algo}) on {cfg.device}, in {cfg.out}, "
          f"from iteration {len(rows)} on")
    return rows


def check_writable(out):  # before anything is played
    for folder in (out, Path(out, "checkpoint")):
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"can anything be saved here?")


def progress_bar(rows, cfg):
    return tqdm(total=cfg.iterations, initial=max(0, len(rows) - 1),
                bar_format="{n}/{total} |{bar:12}| {elapsed}<{remaining}{postfix}")


# ---------------------------------------------------------------------------- while a run lasts
def log_row(row, bar, cfg):
    add_lines(cfg.out, "log.jsonl", [row])
    if row["iteration"] > 0:
        bar.update()
        bar.set_postfix_str(f"won {row['success']:.2f}, "
                            f"valid answers {row['valid']:.2f} (training)")


def log_samples(cfg, i, trajs, tok):  # whole episodes of an evaluation
    samples = []
    for traj in trajs:
        samples.append({"iteration": i, "env": envs.title(cfg.env), "turns": traj.turns,
                        "text": transcript(traj, tok)})
    add_lines(cfg.out, "samples.jsonl", samples)


def transcript(traj, tok):  # -> a whole episode as text
    return f"{tok.decode(traj.ids)}\n\n{traj.env.render()}\nreturn {traj.R:g}\n"


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


def say(text):  # prints it above the progress bar
    with contextlib.suppress(BrokenPipeError):  # Ctrl-C ends both programs of `... | tee log`
        tqdm.write(text)


# ------------------------------------------------------------------------------- save and restore
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


def write_settings(cfg):
    new = Path(cfg.out, "config.json.new")
    new.write_text(json.dumps(as_json(cfg), indent=1))
    new.replace(Path(cfg.out, "config.json"))


def as_json(cfg):  # -> dict
    """Paths become absolute, so that they mean the same wherever the run is resumed."""
    settings = asdict(replace(cfg, resume=""))
    if not isinstance(cfg.env, str):  # a class
        settings["env"] = envs.title(cfg.env)
    elif ":" in cfg.env:
        file, _, name = cfg.env.rpartition(":")
        settings["env"] = f"{Path(file).resolve()}:{name}"
    if cfg.model != "tiny" and Path(cfg.model).expanduser().exists():
        settings["model"] = str(Path(cfg.model).expanduser().resolve())
    return settings


def restore(models, cfg):  # -> the log as it was when it was saved
    file = Path(cfg.resume, "checkpoint", "trainer.pt").expanduser()
    need(file.is_file(), f"--resume {cfg.resume}: there is no checkpoint/trainer.pt. Begin a new "
                         f"run, with its policy if that was saved: --model {cfg.resume}")
    try:
        state = torch.load(file, map_location="cpu")
        made_by = state["script"]
        # With --lr another rate may follow, but the state of Adam is that of the run.
        state["optimizer"]["param_groups"] = models.optimizer.state_dict()["param_groups"]
        for name, part in vars(models).items():
            must_be_there = name in ("policy", "critic", "optimizer") and part is not None
            need(name in state or not must_be_there, f"it has no {name}")
            if name in state and part is not None:  # with --kl-coef 0 there was no reference
                part.load_state_dict(state[name])
    except Exception as error:  # torch raises many kinds for a damaged file
        raise UserError(f"{file} cannot be read, or does not fit the model {cfg.model}: "
                        f"{one_line(error)}") from error
    for name in ("env", "algo", "seed"):
        was, now = state["settings"][name], getattr(cfg, name)
        if name == "env":  # a file may have another path now
            was, now = envs.title(was), envs.title(now)
        need(was == now, f"--resume {cfg.resume}: its checkpoint is of a run with "
                         f"{as_option(name)} {was}, not {now}. Were files of two runs mixed up?")
    if made_by != script():
        print(f"note: this run was made by {made_by or 'ragen_mini'}, and goes on by "
              f"{script() or 'ragen_mini'}, whose method may be another one")
    return state["log"]


# ------------------------------------------------------------------------------- when a run ends
def print_next_steps(rows, cfg, dead):
    """Where the picture of a run is, how to see the model play, how to go on."""
    out = shlex.quote(cfg.out)
    i = rows[-1]["iteration"]
    if Path(cfg.out, "curves.png").exists():
        print(f"curves:  {cfg.out}/curves.png")
    if dead:
        print(f"ended at {i}: no update in the last iterations, because returns were equal. Valid "
              f"answers: {rows[-1]['valid']:.2f}. See: python plots.py collapse {out}")
    if not isinstance(cfg.env, str):  # only who has the class can go on
        return
    program = program_of(sys.argv[0]) if script() else "ragen_mini.py"
    if not Path(cfg.out, "checkpoint", "adapter_config.json").exists():  # --model takes no adapter
        print(f"watch:   python {program} {settings_to_play(cfg)}--model {out} --play 8")
    if not dead:
        iterations = cfg.iterations + 30 if i == cfg.iterations else cfg.iterations
        print(f"go on:   python {program} --resume {out} --iterations {iterations}")


def program_of(argument):  # "my folder/recipes.py rloo" -> "'my folder/recipes.py' rloo"
    file, py, recipe = argument.rpartition(".py")
    return f"{shlex.quote(file + py)}{recipe}"


def settings_to_play(cfg):  # -> "--env sokoban --max-turns 3 ": those that are not the default
    names = ("env", "success_rate", "max_turns", "max_actions_per_turn", "max_actions", "no_think")
    defaults = {setting.name: setting.default for setting in fields(cfg)}
    options = [f"{as_option(name)} {shlex.quote(str(getattr(cfg, name)))} "
               for name in names if name == "env" or getattr(cfg, name) != defaults[name]]
    return "".join(options)
