"""Kill runs, fill disks, poison gradients, damage files: a run is never lost, and never lies.

    python tests/survive.py             all of it, about half an hour on two cores; prints what it counted
    python tests/survive.py kills 30    only that part: parser, kills, signals, disk, poison or damage; how many

test_survive.py does a small subset inside one process. Here everything runs as a user's process would, with `tiny` on
the CPU. "equal" means: the rows of log.jsonl without their seconds, the bytes of samples.jsonl, xray.json and
model.safetensors, and every number in trainer.pt.
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
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "Agg"}
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import transformers

import envs
import ragen_mini as rm

SMALL = ("--model tiny --device cpu --env frozenlake --prompts 2 --rollouts 4 --update-size 4 --iterations 6 --save-every 2 "
         "--eval-every 2 --eval-prompts 8 --max-new-tokens 24").split()
LONG = 300  # seconds after which anything here is stuck

# Programs that are the real command line, but for one thing that happens to them.
DIES = """
import os, signal, ragen_mini as rm
iterate = rm.iterate

def mortal(i, *rest):
    if i == {iteration}:
        os.kill(os.getpid(), signal.SIGKILL)
    return iterate(i, *rest)
rm.iterate = mortal
rm.main()"""
POISONED = """
import torch, ragen_mini as rm
clip, calls = torch.nn.utils.clip_grad_norm_, []

def poisoned(params, *rest):
    params = list(params)
    calls.append(1)
    if len(calls) == {call}:
        params[0].grad[0, 0] = float("nan")
    return clip(params, *rest)
torch.nn.utils.clip_grad_norm_ = poisoned
rm.main()"""


# --------------------------------------------------------------------------------------------------- processes
def start(*args, program=("ragen_mini.py",), **how):  # -> process; it writes to files: a full pipe would stop it
    process_files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    how = dict(stdout=process_files[0], stderr=process_files[1]) | how
    process = subprocess.Popen([sys.executable, *program, *map(str, args)], cwd=ROOT, **how)
    process.files = process_files
    return process


def finish(process):  # -> exit code, stdout, the lines of stderr without progress bars
    process.wait(LONG)
    texts = []
    for file in process.files:
        file.seek(0)
        texts.append(file.read())
    lines = re.split(r"[\r\n]+", texts[1])
    lines = [line for line in lines if line.strip() and not re.search(r"\d+%\|| \[\d\d:\d\d<|it/s", line)]
    return process.returncode, texts[0], lines


def run(*args, **how):
    return finish(start(*args, **how))


def finished(*args):
    code, _, lines = run(*args)
    assert code == 0, lines


def wait_until(condition, process):
    began = time.time()
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.time() - began < LONG
        time.sleep(0.001)


def one_line(result, *words):  # the run ended as a user's mistake or bad luck should: one line that says what to do
    code, _, lines = result
    assert code == 2 and len(lines) == 1, (code, lines)
    assert all(word in lines[0] for word in words), lines[0]
    return lines[0]


# ------------------------------------------------------------------------------------------------- equal runs
def rows_of(out):  # -> finished rows of the log, of a run that may not have begun or died in mid-write
    file = Path(out, "log.jsonl")
    text = file.read_text(errors="replace") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


def saved_rows(out):  # -> of the log that came with the last checkpoint
    return rm.saved_state(Path(out, "checkpoint"))["logs"]["log.jsonl"].splitlines()


def untimed(rows):
    return [{key: x for key, x in row.items() if not key.startswith("seconds")} for row in rows]


def equal(a, b):
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a == b


def same(one, other):  # two folders of runs -> "" or what differs
    wrong = []
    if untimed(rows_of(one)) != untimed(rows_of(other)):
        wrong.append("log.jsonl")
    for name in ("samples.jsonl", "xray.json", "checkpoint/model.safetensors"):
        if Path(one, name).read_bytes() != Path(other, name).read_bytes():
            wrong.append(name)
    states = [torch.load(Path(out, "checkpoint/trainer.pt"), weights_only=True) for out in (one, other)]
    for state, out in zip(states, (one, other)):
        del state["config"]  # has the name of the folder
        for name, text in state.pop("logs").items():
            if Path(out, name).read_text() != text:
                wrong.append(f"{name} in {out}/checkpoint/trainer.pt")
    for name in states[0].keys() | states[1].keys():
        if not equal(states[0].get(name), states[1].get(name)):
            wrong.append(name)
    wrong += [name for name in ("checkpoint.new", "trainer.new") if Path(one, name).exists()]
    return " ".join(wrong)


def assert_same(one, other):
    assert not same(one, other), f"{one} and {other} differ in {same(one, other)}"


# ------------------------------------------------------------------------------------------------------ kills
def kill_once(args, out, seconds, dice):  # -> where the process died
    """After so many seconds; or, where seconds is None, as soon as one of its first checkpoints is being written."""
    process = start(*args)
    began = time.time()
    saves, was_writing = dice.randrange(1, 4), False
    while process.poll() is None:
        writing = Path(out, "checkpoint.new").exists()
        saves -= writing and not was_writing
        was_writing = writing
        now = writing and saves <= 0 if seconds is None else time.time() - began > seconds
        if now:
            if seconds is None:
                time.sleep(dice.random() * 0.02)
            process.kill()
            break
        time.sleep(0.0005)
    code, _, lines = finish(process)
    assert code in (0, -signal.SIGKILL), lines
    if code == 0:
        return "too late"
    if not Path(out, "config.json").exists():
        return "before the run folder"
    if Path(out, "checkpoint.new").exists():
        return "while a checkpoint was written"
    return "in training" if len(rows_of(out)) > 1 else "before the first iteration"


def kills(work, count=32, seed=0):
    """Runs that are killed one to three times each. Their user resumes them; if there is no checkpoint yet, anew."""
    dice = random.Random(seed)
    settings = ("--algo ppo", "--algo grpo", "--algo ppo --online-k 2", "--algo grpo --online-k 2 --starpo-s")
    phases, whole, bad = Counter(), {}, []
    for number in range(count):
        setting = settings[number % len(settings)]
        flags = [*SMALL, *setting.split()]
        if setting not in whole:
            began = time.time()
            reference = work / f"whole-{len(whole)}"
            finished(*flags, "--out", reference)
            whole[setting] = reference, time.time() - began
        reference, duration = whole[setting]
        out = work / f"killed-{number}"
        args = [*flags, "--out", out]
        for _ in range(dice.randrange(1, 4)):
            seconds = None if dice.random() < 0.4 else dice.uniform(0, duration)
            phases[kill_once(args, out, seconds, dice)] += 1
            if Path(out, "checkpoint/trainer.pt").exists():
                args = ["--resume", out]
            else:
                shutil.rmtree(out, ignore_errors=True)
        code, _, lines = run(*args)
        difference = " ".join(lines) if code else same(out, reference)
        if difference:
            bad.append((number, setting, difference))
        print(f"run {number + 1} of {count}, {setting}: {difference or 'equal'}", flush=True)
    where = ", ".join(f"{phase} {times} x" for phase, times in phases.items())
    print(f"kills: {count} runs, {count - len(bad)} equal to the uninterrupted one; killed {where}")
    assert not bad, bad


# ---------------------------------------------------------------------------------------------------- signals
def send(number, out, flags, **how):  # -> the process; a long run gets the signal after its first iteration
    process = start(*flags, "--iterations", 10 ** 6, "--out", out, **how)
    wait_until(lambda: len(rows_of(out)) > 1, process)
    if process.stdout:  # the reader of the pipe has gone
        process.stdout.close()
    process.send_signal(number)
    return process


def signals(work):
    """SIGINT and SIGTERM: the iteration is finished and saved, the command to go on is printed, exit 130 and 143.
    Ctrl-C in `python ragen_mini.py | tee log` ends tee, too: nobody reads what the run still has to say."""
    flags = [*SMALL, "--eval-every", 1, "--save-every", 10 ** 6]
    for name, number, how in (("sigint", signal.SIGINT, {}), ("sigterm", signal.SIGTERM, {}),
                              ("tee", signal.SIGINT, {"stdout": subprocess.PIPE})):
        out = work / name
        code, said, lines = finish(send(number, out, flags, **how))
        if name != "tee":
            assert code == 128 + number and f"--resume {out}" in said and not lines, (code, said, lines)
        done = len(rows_of(out)) - 1
        assert len(saved_rows(out)) == done + 1, "nothing was lost"
        finished("--resume", out, "--iterations", done + 1)
        finished(*flags, "--iterations", done + 1, "--out", work / f"{name}-whole")
        assert_same(out, work / f"{name}-whole")
    print("signals: SIGINT exits with 130, SIGTERM with 143; these, and a Ctrl-C that ends tee, resume to equal runs")


# ------------------------------------------------------------------------------------------------------- disk
def file_limit(work):
    """No file may grow to what the second checkpoint needs, with Adam's state (RLIMIT_FSIZE: no root needed)."""
    whole, out = work / "whole", work / "limited"
    finished(*SMALL, "--out", whole)
    limit = (whole / "checkpoint/trainer.pt").stat().st_size - 5000
    result = run(*SMALL, "--out", out, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    one_line(result, "cannot save", f"--resume {out}")
    transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    finished("--resume", out)
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
    for number, room in enumerate([*rooms, *[large] * fills]):
        iterations = 60 if room == large else 6
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(room * 1024)}k", "tmpfs", mount], check=True)
        try:
            out = mount / "run"
            process = start(*SMALL, "--iterations", iterations, "--out", out)
            if room == large:
                enough = dice.randrange(3, 30)
                wait_until(lambda: len(rows_of(out)) >= enough, process)
                fill(mount)
            result = finish(process)
            line = one_line(result) if result[0] else "had room for everything"
            what = re.search("cannot save|had room|No space left", line)[0]
            saved = (out / "checkpoint/trainer.pt").exists()
            counted[f"{what}, {'a checkpoint there' if saved else 'nothing saved yet'}"] += 1
            if saved:  # the last checkpoint loads, and where there is room the run goes on
                transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
                moved = shutil.copytree(out, work / f"moved-{number}")
                finished("--resume", moved, "--iterations", iterations)
                if room != large:
                    assert_same(moved, work / "whole")
        finally:
            subprocess.run(["umount", mount], check=True)
    print("disk:", "; ".join(f"{what}: {times}" for what, times in counted.items()))


# ----------------------------------------------------------------------------------------------------- parser
PIECES = ["<think>", "</think>", "<answer>", "</answer>", "||", "|", "Up", "down", " LEFT ", "Right", "Teacher", "Jump",
          "", " ", "\n", "\0", "é", "\u202e", "\ud800", "😀", "İ", "<", ">", "think", "<|im_end|>", "<ANSWER>", "\x1c",
          "a" * 50, "&lt;"]


def by_hand(text, actions, limit):  # the same grammar without a regular expression for it
    parts = re.split("(</?think>|</?answer>)", text)
    if parts[1::2] != ["<think>", "</think>", "<answer>", "</answer>"]:
        return None
    if parts[0] or parts[4].strip() or parts[8].strip():
        return None
    names = {action.lower(): action for action in actions}
    words = [word.strip().lower() for word in parts[6].split("||")][:limit]
    return [names[word] for word in words] if all(word in names for word in words) else None


def written_by_models(count):  # -> that many answers of a random model and of tiny, at three temperatures
    from conftest import random_llama
    tok = transformers.AutoTokenizer.from_pretrained(rm.TINY)
    tiny = transformers.AutoModelForCausalLM.from_pretrained(rm.TINY)
    texts = []
    for seed in itertools.count():
        cfg = rm.Config(model="tiny", device="cpu", max_new_tokens=48, no_think=seed % 2 == 1)
        world = ("frozenlake", "sokoban", "bandit")[seed % 3]
        for temperature, model in itertools.product((0.7, 1.0, 2.0), (random_llama(len(tok)), tiny)):
            trajs = rm.rollout(model, tok, world, range(300, 302), 4, cfg, seed, temperature)
            texts += [turn["answer"] for traj in trajs for turn in traj.turns]
            if len(texts) >= count:
                return texts[:count]


def some_text(kind, dice):
    if kind == 0:  # pieces in any order
        return "".join(dice.choices(PIECES, k=dice.randrange(12)))
    if kind == 1:  # almost right: a valid answer with a few edits
        words = dice.choices(["Up", "down", " LEFT ", "Right"], k=dice.randrange(1, 9))
        parts = ["<think>", dice.choice(PIECES), "</think>", dice.choice(["", " ", "\n"]), "<answer>", "||".join(words),
                 "</answer>"]
        for _ in range(dice.randrange(3)):
            where = dice.randrange(len(parts))
            parts[where:where + dice.randrange(2)] = [dice.choice(PIECES)]
        return "".join(parts)
    if kind == 2:  # any characters
        return "".join(chr(dice.randrange(0x110000)) for _ in range(dice.randrange(40)))
    storm = dice.choice(PIECES[:8]) * dice.randrange(12000 if dice.random() < 0.04 else 40)  # up to 100 kB
    return dice.choice(["", "<think></think><answer>Up||"]) + storm + dice.choice(["", "</answer>"])


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
        assert found is None or (0 < len(found) <= limit and set(found) <= set(actions)), (text, found)
        valid += found is not None
        longest = max(longest, len(text))
    print(f"parser: {count} strings ({len(written)} written by models, {valid} valid, the longest of {longest} "
          f"characters), {time.time() - began:.0f} s: no exception, every verdict that of the parser by hand")
    return valid


# ----------------------------------------------------------------------------------------------------- poison
def poison(work):
    """One NaN in the gradient of a late update: the run stops before the step, and goes on from the state before."""
    for algo in ("ppo", "grpo"):
        flags = [*SMALL, "--algo", algo]
        finished(*flags, "--out", work / f"clean-{algo}")
        call = 14 if algo == "ppo" else 7  # PPO clips two gradients a step
        out = work / f"poisoned-{algo}"
        result = run(*flags, "--out", out, program=["-c", POISONED.format(call=call)])
        one_line(result, "not finite", f"--resume {out}")
        assert 1 < len(rows_of(out)) < 7
        finished("--resume", out)
        assert_same(out, work / f"clean-{algo}")
    print("poison: a NaN in a gradient stopped 2 runs before the step; resumed, they equal the clean ones")


# ----------------------------------------------------------------------------------------------------- damage
TRAINER = "checkpoint/trainer.pt"


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
    shutil.copytree(run / "checkpoint", run / "checkpoint.new", ignore=shutil.ignore_patterns("trainer.pt"))
    cut("checkpoint.new/model.safetensors", 0.3)(run)
    shutil.copy(run / TRAINER, run / "trainer.new")
    cut("trainer.new", 0.3)(run)


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
    "trainer.pt without settings": put(TRAINER, {"config": {}}),
    "no trainer.pt": delete(TRAINER),
    "no folder": shutil.rmtree,
}
HARMLESS = {  # what was damaged: how; trainer.pt has all of it, too
    "log with half a last line": cut("log.jsonl", 0.97),
    "log cut in the middle": cut("log.jsonl", 0.4),
    "log with a false row": false_row,
    "log not text": put("log.jsonl", rm.TINY / "model.safetensors"),
    "no samples": delete("samples.jsonl"),
    "samples cut": cut("samples.jsonl", 0.5),
    "config cut": cut("config.json", 0.5),
    "no config": delete("config.json"),
    "a checkpoint half written": half_a_checkpoint,
    "model.safetensors cut": cut("checkpoint/model.safetensors", 0.5),
    "nothing": lambda run: None,
}


def damage(work):
    """Files cut off, foreign or deleted, then --resume: one line that says what to do, or an equal run."""
    whole, half = work / "whole", work / "half"
    finished(*SMALL, "--out", whole)
    code, _, lines = run(*SMALL, "--out", half, program=["-c", DIES.format(iteration=4)])
    assert code == -signal.SIGKILL and len(rows_of(half)) == 4, lines
    for what, spoil in (ERRORS | HARMLESS).items():
        out = shutil.copytree(half, work / what.replace(" ", "-"))
        spoil(out)
        result = run("--resume", out)
        if what in ERRORS:
            line = one_line(result)
        else:
            assert result[0] == 0, result
            assert_same(out, whole)
            line = "equal to the whole run"
        print(f"  {what}: {line}", flush=True)
    for given in (["--env", "sokoban"], ["--seed", "1"], ["--model", "tiny"], ["--algo", "grpo"], ["--out", "x"]):
        one_line(run("--resume", half, *given), "cannot change", given[0][2:])
    assert not (ROOT / "pwned").exists(), "a pickle was executed"
    print(f"damage: {len(ERRORS)} damaged runs and 5 contradicting options gave a one-line error, {len(HARMLESS)} went "
          "on to equal runs")


def main():
    parts = {part.__name__: part for part in (parser, kills, signals, disk, poison, damage)}
    arguments = argparse.ArgumentParser("survive.py", description=__doc__.partition("\n")[0])
    arguments.add_argument("part", nargs="?", choices=parts)
    arguments.add_argument("count", nargs="?", type=int, help="of strings (parser) or runs (kills)")
    args = arguments.parse_args()
    if args.count and args.part not in ("parser", "kills"):
        arguments.error("a count is for parser or kills")
    count = {"count": args.count} if args.count else {}
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        for name in [args.part] if args.part else parts:
            work = Path(folder, name)
            work.mkdir()
            parts[name](work, **count)


if __name__ == "__main__":
    main()
