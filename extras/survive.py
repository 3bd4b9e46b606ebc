"""Kill runs, fill disks, poison gradients, damage files: a run is never lost, and never lies.

    python extras/survive.py             all of it, about half an hour on two cores; prints what it counted
    python extras/survive.py kills 30    only that part: parser, kills, signals, disk, poison or damage; how many

tests/slow_interrupted.py does a small subset inside one process. Here everything runs as a user's process would, with
`tiny` on the CPU. "equal" means: the rows of log.jsonl without their seconds, the bytes of model.safetensors, and every
number in trainer.pt. An evaluation that is made again stands in samples.jsonl again: all must be there, at least once.
"""
import argparse
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
for setting in ("HF_HUB_OFFLINE", "OMP_NUM_THREADS"):
    os.environ[setting] = "1"
os.environ["MPLBACKEND"] = "Agg"

import torch
import transformers

import envs
import ragen_mini as rm

transformers.utils.logging.disable_progress_bar()
SMALL = ("--model tiny --device cpu --env frozenlake --prompts 2 --rollouts 4 --update-size 4 --iterations 6 "
         "--save-every 2 --eval-every 2 --eval-prompts 8 --max-new-tokens 24")
STUCK = 300  # nothing here takes so many seconds
TRAINER = "checkpoint/trainer.pt"
BAR = re.compile(r"\d+/\d+ \|.{12}\| [\d:]+<[\d:?]+(, \w+=[\d.]+)*")  # of progress

# Programs that train as the real command line does, but for one thing that happens to them.
DIES = """
import os, signal
import ragen_mini as rm

def watch(row, *rest):
    if row["iteration"] == {iteration}:
        os.kill(os.getpid(), signal.SIGKILL)
rm.train(rm.parse_config(), watch=watch)"""
POISONED = """
import ragen_mini as rm
calls = []

def learn(trajs, models, cfg, seed):
    calls.append(seed)
    if len(calls) == {call}:
        weight = next(models.{whose}.parameters())
        weight.register_hook(lambda gradient: float("nan") * gradient)
    return rm.learn(trajs, models, cfg, seed)
rm.train(rm.parse_config(), learn=learn)"""


# --------------------------------------------------------------------------------------------------- processes
def start(flags, program=("ragen_mini.py",), **how):  # -> process; it writes to files: a full pipe would stop it
    files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    how = dict(stdout=files[0], stderr=files[1]) | how
    process = subprocess.Popen([sys.executable, *program, *flags.split()], cwd=ROOT, **how)
    process.files = files
    return process


def finish(process):  # -> exit code, stdout, the lines of stderr without progress bars
    process.wait(STUCK)
    texts = []
    for file in process.files:
        file.seek(0)
        texts.append(file.read())
    lines = [line for line in texts[1].splitlines() if line.strip() and not BAR.fullmatch(line)]
    return process.returncode, texts[0], lines


def run(flags, **how):
    return finish(start(flags, **how))


def finished(flags):
    code, _, lines = run(flags)
    assert code == 0, lines


def wait_until(condition, process):
    began = time.time()
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.time() - began < STUCK
        time.sleep(0.001)


def one_line(result, *words):  # the run ended as a user's mistake or bad luck should: one line that says what to do
    code, _, lines = result
    assert code == 1 and len(lines) == 1, (code, lines)
    assert all(word in lines[0] for word in words), lines[0]
    return lines[0]


# ------------------------------------------------------------------------------------------------- equal runs
def rows_of(out):  # -> finished rows of the log, of a run that may not have begun, or died while it wrote
    file = Path(out, "log.jsonl")
    text = file.read_text(errors="replace") if file.exists() else ""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("}\n")]
    return [json.loads(line) for line in lines]


def saved(out):  # -> all that is in trainer.pt
    return torch.load(Path(out, TRAINER), weights_only=True)


def saved_rows(out):  # -> of the log that came with the last checkpoint
    return saved(out)["log"].splitlines()


def untimed(rows):
    seconds = {"seconds_rollout": 0, "seconds_update": 0}
    return [row | seconds for row in rows]


def equal(a, b):
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if not isinstance(a, dict):
        return a == b
    return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)


def same(one, other):  # two folders of runs -> "" or what differs
    wrong = []
    if untimed(rows_of(one)) != untimed(rows_of(other)):
        wrong.append("log.jsonl")
    weights = "checkpoint/model.safetensors"
    if Path(one, weights).read_bytes() != Path(other, weights).read_bytes():
        wrong.append(weights)
    states = []
    for out in (one, other):
        state = saved(out)
        if state.pop("log") != Path(out, "log.jsonl").read_text():
            wrong.append(f"the log in {out}/{TRAINER}")
        states.append(state)
    for name in states[0].keys() | states[1].keys():
        if not equal(states[0].get(name), states[1].get(name)):
            wrong.append(name)
    return " ".join(wrong)


def assert_same(one, other):
    assert not same(one, other), f"{one} and {other} differ in {same(one, other)}"


def lacks_samples(one, other):  # does `one` lack an episode that `other` tells of?
    text = Path(one, "samples.jsonl").read_text()
    return any(line not in text for line in Path(other, "samples.jsonl").read_text().splitlines())


# ------------------------------------------------------------------------------------------------------ kills
def kill_once(flags, out, seconds, dice):  # -> where the process died
    """After so many seconds; or, where seconds is None, as soon as one of its first checkpoints is being written."""
    process = start(flags)
    began = time.time()
    saves, was_writing = dice.randrange(1, 4), False
    while process.poll() is None:
        writing = is_writing(out)
        saves -= writing and not was_writing
        was_writing = writing
        if seconds is None and writing and saves <= 0:
            time.sleep(dice.random() * 0.02)
            process.kill()
            break
        if seconds is not None and time.time() - began > seconds:
            process.kill()
            break
        time.sleep(0.0005)
    writing = is_writing(out)
    code, _, lines = finish(process)
    if is_whole(code, lines):
        return "too late"
    assert code == -signal.SIGKILL, lines
    if not Path(out, "config.json").exists():
        return "before the run folder"
    if writing:
        return "while a checkpoint was written"
    return "in training" if len(rows_of(out)) > 1 else "before the first iteration"


def is_whole(code, lines):  # or the process died after its last checkpoint, and --resume finds nothing left to do
    return code == 0 or "raise --iterations" in " ".join(lines)


def is_writing(out):  # a checkpoint: it grows beside the old one
    new = Path(out, "checkpoint.new")
    return new.is_dir() and any(new.iterdir())


def kills(work, count=32, seed=0):
    """Runs that are killed one to three times each. Their user resumes them; if there is no checkpoint yet, anew."""
    dice = random.Random(seed)
    settings = ("--algo ppo", "--algo grpo", "--algo ppo --online-k 2", "--algo grpo --online-k 2 --starpo-s")
    phases, whole, bad = Counter(), {}, []
    for number in range(count):
        setting = settings[number % len(settings)]
        flags = f"{SMALL} {setting}"
        if setting not in whole:
            began = time.time()
            reference = work / f"whole-{len(whole)}"
            finished(f"{flags} --out {reference}")
            whole[setting] = reference, time.time() - began
        reference, duration = whole[setting]
        out = work / f"killed-{number}"
        flags += f" --out {out}"
        for _ in range(dice.randrange(1, 4)):
            seconds = None if dice.random() < 0.4 else dice.uniform(0, duration)
            phases[kill_once(flags, out, seconds, dice)] += 1
            if Path(out, TRAINER).exists():
                flags = f"--resume {out}"
            else:
                shutil.rmtree(out, ignore_errors=True)
        code, _, lines = run(flags)
        whole_run = is_whole(code, lines)
        difference = same(out, reference) if whole_run else " ".join(lines)
        if whole_run and lacks_samples(out, reference):
            difference += " samples.jsonl"
        if difference:
            bad.append((number, setting, difference))
        print(f"run {number + 1} of {count}, {setting}: {difference or 'equal'}", flush=True)
    where = ", ".join(f"{phase} {times} x" for phase, times in phases.items())
    print(f"kills: {count} runs, {count - len(bad)} equal to the uninterrupted one; killed {where}")
    assert not bad, bad


# ---------------------------------------------------------------------------------------------------- signals
def interrupted(out, flags, **how):  # -> process; a long run gets a Ctrl-C after its first iteration
    process = start(f"{flags} --iterations 1000000 --out {out}", **how)
    wait_until(lambda: len(rows_of(out)) > 1, process)
    if process.stdout:  # the reader of the pipe has gone
        process.stdout.close()
    process.send_signal(signal.SIGINT)
    return process


def signals(work):
    """Ctrl-C: the iteration is finished and saved, exit code 130. In `python ragen_mini.py | tee log` it ends tee, too:
    nobody reads what the run still has to say."""
    flags = f"{SMALL} --eval-every 1 --save-every 1000000"
    for name, how in (("alone", {}), ("tee", {"stdout": subprocess.PIPE})):
        out = work / name
        code, said, lines = finish(interrupted(out, flags, **how))
        if name == "alone":
            assert code == 130 and "stopping" in lines[0] and len(lines) == 1, (code, said, lines)
        done = len(rows_of(out)) - 1
        assert len(saved_rows(out)) == done + 1, f"{name}: nothing should be lost"
        whole = work / f"{name}-whole"
        finished(f"--resume {out} --iterations {done + 1}")
        finished(f"{flags} --iterations {done + 1} --out {whole}")
        assert_same(out, whole)
    print("signals: after a Ctrl-C (exit code 130), and one that ends tee, runs resume to equal ones")


# ------------------------------------------------------------------------------------------------------- disk
def file_limit(work):
    """No file may grow to what the second checkpoint needs, with Adam's state (RLIMIT_FSIZE: no root needed)."""
    whole, out = work / "whole", work / "limited"
    finished(f"{SMALL} --out {whole}")
    limit = (whole / TRAINER).stat().st_size - 5000
    set_limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    result = run(f"{SMALL} --out {out}", preexec_fn=set_limit)
    one_line(result, f"cannot save in {out}")
    transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    finished(f"--resume {out}")
    assert_same(out, whole)


def fill(folder):
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


def disk(work, rooms=(0.02, 0.5, 1, 2, 3, 4, 5, 6, 7, 8), fills=5):
    """Runs on a tmpfs (root) of so many MB; and on a large one that somebody else fills while the run writes."""
    file_limit(work)
    counted, dice = Counter({"at a limit of the file size": 1}), random.Random(0)
    mount = work / "tmpfs"
    mount.mkdir()
    large = 30
    for number, room in enumerate(list(rooms) + [large] * fills):
        size = f"size={int(room * 1024)}k"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", mount], check=True)
        try:
            moved = work / f"moved-{number}"
            what = on_a_small_disk(mount, moved, dice, room == large)
            counted[what] += 1
            if moved.exists() and room != large:
                assert_same(moved, work / "whole")
        finally:
            subprocess.run(["umount", mount], check=True)
    print("disk:", "; ".join(f"{what}: {times}" for what, times in counted.items()))


def on_a_small_disk(mount, moved, dice, somebody_fills_it):  # -> what happened; the run is in `moved`, if it was saved
    iterations = 60 if somebody_fills_it else 6
    out = mount / "run"
    process = start(f"{SMALL} --iterations {iterations} --out {out}")
    if somebody_fills_it:
        enough = dice.randrange(3, 30)
        wait_until(lambda: len(rows_of(out)) >= enough, process)
        fill(mount)
    result = finish(process)
    line = one_line(result) if result[0] else "had room for everything"
    what = re.search("cannot save|had room|No space left", line)[0]
    if not (out / TRAINER).exists():
        return f"{what}, nothing saved yet"
    if result[0]:  # and again: with no more room than before it may fail, but must spoil nothing
        result = run(f"--resume {out} --iterations {iterations}")
        if result[0]:
            one_line(result)
    transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    shutil.copytree(out, moved)
    finished(f"--resume {moved} --iterations {iterations}")
    return f"{what}, a checkpoint there"


# ----------------------------------------------------------------------------------------------------- parser
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
WORDS = ["Up", "down", " LEFT ", "Right"]
PIECES = [*TAGS, "||", "|", *WORDS, "Teacher", "Jump", "<|im_end|>", "<ANSWER>", "think", "&lt;", "<", ">", "a" * 50]
PIECES += ["", " ", "\n", "\0", "é", "\u202e", "\ud800", "😀", "İ", "\x1c"]


def by_hand(text, actions, limit):  # the same grammar without a regular expression for it
    parts = re.split("(</?think>|</?answer>)", text)
    if parts[1:4:2] == ["<think>", "</think>"]:  # the thought may be missing
        if parts[0]:
            return None
        parts = ["", *parts[5:]] if not parts[4].strip() else []
    if parts[1::2] != ["<answer>", "</answer>"] or parts[0] or parts[4].strip():
        return None
    names = {action.lower(): action for action in actions}
    words = [word.strip().lower() for word in parts[2].split("||")][:limit]
    if not all(word in names for word in words):
        return None
    return [names[word] for word in words]


def written_by_models(count):  # -> that many answers of tiny; at high temperatures it writes anything
    tok = transformers.AutoTokenizer.from_pretrained(rm.TINY)
    policy = transformers.AutoModelForCausalLM.from_pretrained(rm.TINY)
    models = SimpleNamespace(policy=policy, tok=tok)
    texts = []
    for seed in itertools.count():
        world = ("frozenlake", "sokoban", "bandit")[seed % 3]
        for temperature in (0.7, 1.0, 2.0, 8.0):
            cfg = rm.Config(env=world, model="tiny", device="cpu", max_new_tokens=48, temperature=temperature)
            cfg.no_think = seed % 2 == 1
            for traj in rm.rollout(models, range(300, 304), 4, cfg, seed):
                texts += [turn["answer"] for turn in traj.turns]
            if len(texts) >= count:
                return texts[:count]


def some_text(kind, dice):
    if kind == 0:  # pieces in any order
        return "".join(dice.choices(PIECES, k=dice.randrange(12)))
    if kind == 1:
        return almost_right(dice)
    if kind == 2:  # any characters
        return "".join(chr(dice.randrange(0x110000)) for _ in range(dice.randrange(40)))
    most = 12000 if dice.random() < 0.04 else 40
    storm = dice.choice([*TAGS, "||", "|", *WORDS]) * dice.randrange(most)  # up to 100 kB
    before = dice.choice(["", "<think></think><answer>Up||"])
    return before + storm + dice.choice(["", "</answer>"])


def almost_right(dice):  # a valid answer with a few edits
    words = dice.choices(WORDS, k=dice.randrange(1, 9))
    between = dice.choice(["", " ", "\n"])
    parts = ["<think>", dice.choice(PIECES), "</think>", between, "<answer>", "||".join(words), "</answer>"]
    for _ in range(dice.randrange(3)):
        where = dice.randrange(len(parts))
        parts[where:where + dice.randrange(2)] = [dice.choice(PIECES)]
    return "".join(parts)


def parser(work=None, count=200_000, seed=0, written=None):
    """Random, hostile and model-written strings: never an exception, and always the verdict of the parser by hand."""
    dice, began = random.Random(seed), time.time()
    written = written_by_models(count // 10 if written is None else written)
    worlds = [(envs.Sokoban.actions, 5), (envs.FrozenLake.actions, 1), (("Teacher", "Engineer"), 2)]
    valid = longest = 0
    for number in range(count):
        text = written[number] if number < len(written) else some_text(number % 4, dice)
        actions, limit = dice.choice(worlds)
        found = rm.parse_answer(text, actions, limit)
        assert found == by_hand(text, actions, limit), (text, found)
        if found is not None:
            valid += 1
            assert 0 < len(found) <= limit and set(found) <= set(actions), (text, found)
        longest = max(longest, len(text))
    print(f"parser: {count} strings ({len(written)} written by models, {valid} valid, the longest of {longest} "
          f"characters), {time.time() - began:.0f} s: no exception, every verdict that of the parser by hand")
    return valid


# ----------------------------------------------------------------------------------------------------- poison
def poison(work):
    """NaN in the gradient of a late update: the run stops before the step, and goes on from the state before."""
    for algo, whose in (("ppo", "policy"), ("ppo", "critic"), ("grpo", "policy")):
        flags = f"{SMALL} --algo {algo}"
        whole = work / f"clean-{algo}"
        if not whole.exists():
            finished(f"{flags} --out {whole}")
        out = work / f"poisoned-{algo}-{whose}"
        result = run(f"{flags} --out {out}", program=["-c", POISONED.format(call=4, whose=whose)])
        one_line(result, "finite", "--resume")
        assert 1 < len(rows_of(out)) < 7
        finished(f"--resume {out}")
        assert_same(out, whole)
    print("poison: a NaN in a gradient stopped 3 runs before the step; resumed, they equal the clean ones")


# ----------------------------------------------------------------------------------------------------- damage
class Evil:  # unpickled, it would run a command
    def __reduce__(self):
        return os.system, ("touch pwned",)


def cut(name, share):
    def spoil(run):
        file = Path(run, name)
        file.write_bytes(file.read_bytes()[:int(share * file.stat().st_size)])
    return spoil


def put(name, content):  # a Path: that file; else something to be pickled
    def spoil(run):
        if isinstance(content, Path):
            shutil.copy(content, Path(run, name))
        else:
            torch.save(content, Path(run, name))
    return spoil


def delete(name):
    return lambda run: Path(run, name).unlink()


def half_a_checkpoint(run):  # a process died while it wrote one
    shutil.copytree(run / "checkpoint", run / "checkpoint.new", dirs_exist_ok=True)
    for name in ("model.safetensors", "trainer.pt"):
        cut(f"checkpoint.new/{name}", 0.3)(run)


def false_row(run):
    with open(run / "log.jsonl", "a") as file:
        file.write('{"iteration": 99}\n')


ERRORS = {  # what was damaged: how; --resume is then one line that says what to do
    "trainer.pt empty": cut(TRAINER, 0),
    "trainer.pt cut": cut(TRAINER, 0.5),
    "trainer.pt cut at its end": cut(TRAINER, 0.999),
    "trainer.pt is text": put(TRAINER, ROOT / "README.md"),
    "trainer.pt is a model": put(TRAINER, rm.TINY / "model.safetensors"),
    "trainer.pt with code": put(TRAINER, {"policy": Evil()}),
    "trainer.pt a list": put(TRAINER, ["foreign"]),
    "trainer.pt without weights": put(TRAINER, {"log": ""}),
    "no trainer.pt": delete(TRAINER),
    "config.json empty": cut("config.json", 0),
    "config.json cut": cut("config.json", 0.5),
    "config.json is text": put("config.json", ROOT / "README.md"),
    "config.json is a model": put("config.json", rm.TINY / "model.safetensors"),
    "no config.json": delete("config.json"),
    "no folder": shutil.rmtree,
}
HARMLESS = {  # what was damaged: how; trainer.pt has all of it, too
    "log with half a last line": cut("log.jsonl", 0.97),
    "log cut in the middle": cut("log.jsonl", 0.4),
    "log with a false row": false_row,
    "log not text": put("log.jsonl", rm.TINY / "model.safetensors"),
    "no log": delete("log.jsonl"),
    "samples cut": cut("samples.jsonl", 0.5),
    "no samples": delete("samples.jsonl"),
    "a checkpoint half written": half_a_checkpoint,
    "model.safetensors cut": cut("checkpoint/model.safetensors", 0.5),
    "nothing": lambda run: None,
}


def damage(work):
    """Files cut off, foreign or deleted, then --resume: one line that says what to do, or an equal run."""
    whole, half = work / "whole", work / "half"
    finished(f"{SMALL} --out {whole}")
    code, _, lines = run(f"{SMALL} --out {half}", program=["-c", DIES.format(iteration=4)])
    assert code == -signal.SIGKILL and len(rows_of(half)) == 4, lines
    for what, spoil in (ERRORS | HARMLESS).items():
        out = shutil.copytree(half, work / what.replace(" ", "-"))
        spoil(out)
        result = run(f"--resume {out}")
        if what in ERRORS:
            line = one_line(result)
        else:
            assert result[0] == 0, result
            assert_same(out, whole)
            line = "equal to the whole run"
        print(f"  {what}: {line.replace(str(work), '...')}", flush=True)
    assert not (ROOT / "pwned").exists(), "a pickle was executed"
    print(f"damage: {len(ERRORS)} damaged runs gave a one-line error, {len(HARMLESS)} went on to equal runs")


def main():
    parts = {part.__name__: part for part in (parser, kills, signals, disk, poison, damage)}
    arguments = argparse.ArgumentParser("survive.py", description=__doc__.partition("\n")[0])
    arguments.add_argument("part", nargs="?", choices=parts)
    arguments.add_argument("count", nargs="?", type=int, help="of strings (parser) or runs (kills)")
    args = arguments.parse_args()
    if args.count is not None and args.count < 1:
        arguments.error("count: at least 1")
    if args.count and args.part not in ("parser", "kills"):
        arguments.error("a count is for parser or kills")
    count = {"count": args.count} if args.count else {}
    with tempfile.TemporaryDirectory() as folder:
        if not args.part:
            print("all parts take about half an hour, and each says at its end what it found", flush=True)
        for name in [args.part] if args.part else parts:
            work = Path(folder, name)
            work.mkdir()
            parts[name](work, **count)


if __name__ == "__main__":
    main()
