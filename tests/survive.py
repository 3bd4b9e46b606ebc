"""Kill runs, fill disks, poison gradients, damage files: a run is never lost, and never lies.

    python tests/survive.py             all of it with `tiny`, about half an hour on two cores; prints what it counted
    python tests/survive.py kills 30    only that part: parser, kills, signals, disk, poison, damage or cache; how many

test_survive.py does a small subset with a model that was taught for seconds. Everything runs as a user's process would,
on the CPU; "equal" means the rows of log.jsonl without their seconds, the bytes of samples.jsonl and of model.safetensors,
and every number in trainer.pt.
"""
import argparse
import itertools
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
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "Agg"}
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import transformers

import envs
import plots
import ragen_mini as rm

SMALL = ("--device cpu --prompts 2 --rollouts 4 --batch 4 --iterations 6 --save-every 2 --eval-every 2 --eval-prompts 8 "
         "--max-new-tokens 24").split()
POISON = """import sys, torch, runpy, plots
step = torch.nn.utils.clip_grad_norm_
def poisoned(params, *args):
    params = list(params)
    poisoned.calls += 1
    if poisoned.calls == {call}:
        params[0].grad[0, 0] = float("nan")
    return step(params, *args)
poisoned.calls = 0
torch.nn.utils.clip_grad_norm_ = poisoned
sys.argv = ["ragen_mini.py", *sys.argv[1:]]
runpy.run_path({script!r}, run_name="__main__")"""


def start(*args, script=(str(ROOT / "ragen_mini.py"),), **how):  # -> process, which writes to files: a full pipe would stop it
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    process = subprocess.Popen([sys.executable, *script, *map(str, args)], stdout=out, stderr=err, cwd=ROOT, **how)
    process.files = out, err
    return process


def finish(process):  # -> exit code, stdout, the lines of stderr without progress bars
    process.wait()
    out, err = (file.seek(0) or file.read() for file in process.files)
    lines = [line for line in re.split(r"[\r\n]+", err) if line.strip() and not re.search(r"\d+%\|| \[\d\d:\d\d<|it/s", line)]
    return process.returncode, out, lines


def run(*args, **how):
    return finish(start(*args, **how))


def logged(out):  # -> rows in the log so far, of a run that may not have begun
    return len(plots.load(out)[1]) if (out / "config.json").exists() and (out / "log.jsonl").exists() else 0


def equal(a, b):
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a == b


def same(one, other):  # two run folders -> "" or what differs
    rows = [[{key: x for key, x in row.items() if not key.startswith("seconds")} for row in plots.load(run)[1]]
            for run in (one, other)]
    files = [[Path(run, name).read_bytes() for name in ("samples.jsonl", "checkpoint/model.safetensors")] for run in (one, other)]
    states = [torch.load(Path(run, "checkpoint/trainer.pt"), weights_only=True) for run in (one, other)]
    parts = [{name: x for name, x in state.items() if name != "config" and name not in plots.LOGS} for state in states]
    return " ".join(what for what, ok in (("log", rows[0] == rows[1]), ("samples", files[0][0] == files[1][0]),
                                          ("weights", files[0][1] == files[1][1]), ("trainer.pt", equal(*parts)),
                                          ("leftovers", not Path(one, "checkpoint.new").exists())) if not ok)


def one_line(result, *words):  # the run ended as a user's mistake or bad luck should: one line that says what to do
    code, _, lines = result
    assert code == 2 and len(lines) == 1 and all(word in lines[0] for word in words), (code, lines)
    return lines[0]


# ------------------------------------------------------------------------------------------------------------- kills
def kill_once(args, out, delay, dice, env):  # -> phase in which the process died, or None if it was faster
    """delay: seconds after which it is killed; a string "save": as soon as the k-th checkpoint is being written."""
    process, began, saves, seen = start(*args, env=env), time.time(), dice.randrange(1, 4), False
    while process.poll() is None:
        writing = (out / "checkpoint.new").exists()
        saves, seen = saves - (writing and not seen), writing
        if delay != "save" and time.time() - began > delay or delay == "save" and writing and saves <= 0:
            time.sleep(dice.random() * 0.02 if delay == "save" else 0)
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.0005)
    code, _, lines = finish(process)
    assert code in (0, -9), lines
    if code == 0:
        return None
    if not (out / "config.json").exists():
        return "before the run folder"
    if (out / "checkpoint.new").exists():
        return "while a checkpoint was written"
    return "in training" if logged(out) > 1 else "before the first iteration"


def kills(count, work, model="tiny", settings=("--algo ppo", "--algo grpo", "--algo ppo --online-k 2", "--algo grpo --online-k 2"),
          cold=0, seed=0):
    """`count` runs, killed one to three times each and resumed; of those, `cold` in their cold start, too."""
    dice, phases, references, bad = random.Random(seed), {}, {}, []
    for number in range(count):
        setting = settings[number % len(settings)]
        flags = ["--env", "frozenlake", *setting.split(), *SMALL, "--model", model]
        if setting not in references:
            references[setting], began = work / f"reference-{len(references)}", time.time()
            assert run(*flags, "--out", references[setting])[0] == 0
            seconds = time.time() - began
        out, env = work / f"killed-{number}", dict(os.environ)
        if number < cold:
            env["XDG_CACHE_HOME"] = str(work / f"cache-{number}")
        args = [*flags, "--out", out]
        for attempt in range(dice.randrange(1, 4)):
            delay = "save" if dice.random() < 0.4 else dice.uniform(0, 60 if number < cold and not attempt else seconds)
            phase = kill_once(args, out, delay, dice, env)
            phases[phase or "too late"] = phases.get(phase or "too late", 0) + 1
            if (out / "config.json").exists():
                args = ["--resume", out]
        code, _, lines = run(*args, env=env)
        difference = lines if code else same(out, references[setting])
        bad += [(number, setting, difference)] if difference else []
        print(f"run {number + 1} of {count}, {setting}: {difference or 'equal'}", flush=True)
    print(f"kills: {count} runs, {count - len(bad)} equal to the uninterrupted one; killed " +
          ", ".join(f"{phase} {n} x" for phase, n in phases.items()))
    assert not bad, bad
    return phases


def signals(work, model="tiny"):
    """SIGINT and SIGTERM: the iteration is finished and saved, the resume command printed, exit 130 and 143."""
    flags = ["--env", "frozenlake", *SMALL, "--model", model]
    assert run(*flags, "--out", work / "whole")[0] == 0
    for number in (signal.SIGINT, signal.SIGTERM):
        out = work / f"signal-{number}"
        process = start(*flags, "--out", out)
        while process.poll() is None and not logged(out):
            time.sleep(0.001)
        process.send_signal(number)
        code, said, lines = finish(process)
        assert code == 128 + number and f"--resume {out}" in said and not any("Traceback" in line for line in lines), (code, lines)
        assert logged(out) < 6
        assert run("--resume", out)[0] == 0 and not same(out, work / "whole"), same(out, work / "whole")
    print("signals: SIGINT exits with 130, SIGTERM with 143, both resume to equal runs")


# -------------------------------------------------------------------------------------------------------------- disk
def file_limit(work, model="tiny"):
    """No file may grow beyond what the first checkpoint needs (RLIMIT_FSIZE: no root needed): the second one fails."""
    flags = ["--env", "frozenlake", *SMALL, "--model", model]
    assert run(*flags, "--out", work / "whole")[0] == 0
    limit, out = (work / "whole/checkpoint/trainer.pt").stat().st_size - 5000, work / "limited"
    result = run(*flags, "--out", out, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    one_line(result, "cannot save", f"--resume {out}")
    rm.transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    assert run("--resume", out)[0] == 0 and not same(out, work / "whole"), same(out, work / "whole")


def disk(work, model="tiny", rooms=(0.02, 0.5, 1, 2, 3, 4, 5, 6, 7, 8), fills=5):
    """Runs on a tmpfs (root) of so many MB; and on one that somebody else fills while the run writes its log."""
    file_limit(work, model)
    counted, dice = {"at a limit of the file size": 1}, random.Random(0)
    for number, room in enumerate((*rooms, *[30] * fills)):
        mount, out, flags = work / "tmpfs", work / "tmpfs/run", ["--env", "frozenlake", *SMALL, "--model", model]
        mount.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(room * 1024)}k", "tmpfs", mount], check=True)
        try:
            process = start(*flags, *["--iterations", "60"] * (room == 30), "--out", out)
            if room == 30:
                enough = dice.randrange(3, 30)
                while process.poll() is None and logged(out) < enough:
                    time.sleep(0.001)
                with open(mount / "filler", "wb", buffering=0) as filler:
                    try:
                        while filler.write(bytes(4096)):
                            pass
                    except OSError:
                        pass
            result = finish(process)
            line = one_line(result) if result[0] else "had room for everything"
            what = re.search("cannot save|had room|No space left", line)[0]
            saved = (out / "checkpoint/trainer.pt").exists()
            what += ", a checkpoint there" if saved else ", nothing saved yet"
            counted[what] = counted.get(what, 0) + 1
            if saved:  # the previous checkpoint loads, and where there is room the run goes on
                rm.transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
                moved = shutil.copytree(out, work / f"moved-{number}")
                code, _, lines = run("--resume", moved, "--iterations", 6 if room != 30 else 60)
                assert code == 0, lines
                assert room == 30 or not same(moved, work / "whole"), same(moved, work / "whole")
        finally:
            subprocess.run(["umount", mount], check=True)
    print("disk:", "; ".join(f"{what}: {n}" for what, n in counted.items()))


# ------------------------------------------------------------------------------------------------------------ parser
PIECES = ["<think>", "</think>", "<answer>", "</answer>", "||", "|", "Up", "down", " LEFT ", "Right", "Teacher", "Jump", "", " ", "\n",
          "\0", "é", "\u202e", "\ud800", "😀", "İ", "<", ">", "think", "<|im_end|>", "<ANSWER>", "\x1c", "a" * 50, "&lt;"]


def by_hand(text, actions, limit):  # the same grammar without a regular expression for it
    parts = re.split("(</?think>|</?answer>)", text)
    if parts[1::2] != ["<think>", "</think>", "<answer>", "</answer>"] or parts[0] or parts[4].strip() or parts[8].strip():
        return None
    names = {action.lower(): action for action in actions}
    words = [word.strip().lower() for word in parts[6].split("||")]
    return [names[word] for word in words][:limit] if all(word in names for word in words) else None


def model_texts(count):  # -> what a random and a taught model write, at three temperatures, up to `count` turns
    from conftest import random_llama, teach
    tok, texts = transformers.AutoTokenizer.from_pretrained(rm.TOKENIZER), []
    taught = teach(random_llama(len(tok), sharpen=1), tok)
    for seed in itertools.count():
        for model, temperature in itertools.product((random_llama(len(tok)), taught), (0.7, 1.0, 2.0)):
            cfg = rm.Config(model="tiny", device="cpu", max_new_tokens=48, no_think=seed % 2 == 1)
            trajs = rm.rollout(model, tok, ("frozenlake", "sokoban", "bandit")[seed % 3], range(300, 316), 16, cfg, seed, temperature)
            texts += [turn["answer"] for traj in trajs for turn in traj.turns]
            if len(texts) >= count:
                return texts[:count]


def parser(count, seed=0, generated=None):
    """Random, adversarial and model-written strings: never an exception, never too many or unknown actions, and the same
    verdict as a parser written by hand."""
    dice, valid, longest, began = random.Random(seed), 0, 0, time.time()
    generated = count // 10 if generated is None else generated
    written = model_texts(generated) if generated else []
    for number in range(count):
        kind = number % 4
        if number < len(written):
            text = written[number]
        elif kind == 0:  # pieces in any order
            text = "".join(dice.choices(PIECES, k=dice.randrange(12)))
        elif kind == 1:  # almost right: a valid answer with a few edits
            words = dice.choices(["Up", "down", " LEFT ", "Right"], k=dice.randrange(1, 9))
            parts = ["<think>", dice.choice(PIECES), "</think>", dice.choice(["", " ", "\n"]), "<answer>", "||".join(words), "</answer>"]
            for _ in range(dice.randrange(3)):
                where = dice.randrange(len(parts))
                parts[where:where + dice.randrange(2)] = [dice.choice(PIECES)]
            text = "".join(parts)
        elif kind == 2:  # any characters
            text = "".join(chr(dice.randrange(0x110000)) for _ in range(dice.randrange(40)))
        else:  # storms of one piece, up to 100 kB now and then
            text = dice.choice(PIECES[:8]) * dice.randrange(12000 if number % 100 == 3 else 40)
            text = dice.choice(["", "<think></think><answer>Up||"]) + text + dice.choice(["", "</answer>"])
        actions, limit = dice.choice([(envs.Sokoban.actions, 5), (envs.FrozenLake.actions, 1), (("Teacher", "Engineer"), 2)])
        found = rm.parse_answer(text, actions, limit)
        assert found is None or 0 < len(found) <= limit and set(found) <= set(actions), (text, found)
        assert found == by_hand(text, actions, limit), (text, found)
        valid, longest = valid + (found is not None), max(longest, len(text))
    print(f"parser: {count} strings ({len(written)} written by models, {valid} valid, the longest of {longest} characters), "
          f"{time.time() - began:.0f} s: no exception, every verdict that of the parser by hand")


# ------------------------------------------------------------------------------------------------------------- cache
def cache(work, make="import ragen_mini; print(ragen_mini.tiny_folder())", processes=2):
    """Two first runs at once, then with files of the cache cut off: always one whole model of the same bytes."""
    env = os.environ | {"XDG_CACHE_HOME": str(work / "cache")}
    results = [finish(process) for process in [start(make, script=["-c"], env=env) for _ in range(processes)]]
    folders = {out.strip() for _, out, _ in results}
    assert [code for code, _, _ in results] == [0] * processes and len(folders) == 1, results
    folder = Path(folders.pop())
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "leftovers"
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(whole[name][:len(whole[name]) // 2])
        code, _, lines = run(make, script=["-c"], env=env)
        assert code == 0 and {path.name: path.read_bytes() for path in folder.iterdir()} == whole, (name, lines)
    print(f"cache: {processes} first runs at once share one folder; a cut-off model.safetensors and tokenizer.json were made again, "
          "all bytes as before")


# ------------------------------------------------------------------------------------------------------------ poison
def poison(work, model="tiny", algos=("ppo", "grpo")):
    """One NaN in the gradient of a late update: the run stops before the step, and goes on from the state before."""
    for algo in algos:
        flags = ["--env", "frozenlake", "--algo", algo, *SMALL, "--model", model]
        assert run(*flags, "--out", work / f"clean-{algo}")[0] == 0
        out, call = work / f"poisoned-{algo}", 7 * (2 if algo == "ppo" else 1)
        code = POISON.format(call=call, script=str(ROOT / "ragen_mini.py"))
        one_line(run(code, *flags, "--out", out, script=["-c"]), "not finite", f"--resume {out}")
        assert 1 < logged(out) < 7
        assert run("--resume", out)[0] == 0 and not same(out, work / f"clean-{algo}"), same(out, work / f"clean-{algo}")
    print(f"poison: a NaN in a gradient stopped {len(algos)} runs before the step; resumed, they equal the clean ones")


# ------------------------------------------------------------------------------------------------------------ damage
class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def damage(work, model="tiny"):
    """Files cut off, foreign or edited, then --resume: one line that says what is wrong, or a run equal to the whole one."""
    flags = ["--env", "frozenlake", *SMALL, "--model", model]
    whole, half, other = work / "whole", work / "half", work / "other"
    for out, more in ((whole, ()), (half, ()), (other, ("--seed", 1)), (work / "grpo", ("--algo", "grpo"))):
        assert run(*flags, *more, "--out", out)[0] == 0
    shutil.rmtree(half)
    process = start(*flags, "--out", half)
    while process.poll() is None and logged(half) < 4:
        time.sleep(0.001)
    process.kill()
    finish(process)
    trainer, evil, counted = "checkpoint/trainer.pt", work / "evil.pt", {"error": 0, "equal": 0}
    torch.save({"policy": Evil()}, evil)

    def cut(name, share):
        return lambda run: (run / name).write_bytes((run / name).read_bytes()[:int(len((run / name).read_bytes()) * share)])

    def edit(old, new):
        return lambda run: (run / "config.json").write_text((run / "config.json").read_text().replace(old, new))

    def take(name, source):
        return lambda run: shutil.copy(source, run / name)

    cases = [("error", *case) for case in (
        ("trainer.pt empty", cut(trainer, 0)), ("trainer.pt cut", cut(trainer, 0.5)), ("trainer.pt cut", cut(trainer, 0.999)),
        ("trainer.pt is text", take(trainer, whole / "log.jsonl")), ("trainer.pt is a model", take(trainer, whole / "checkpoint/model.safetensors")),
        ("trainer.pt of another seed", take(trainer, other / trainer)), ("trainer.pt of GRPO", take(trainer, work / "grpo" / trainer)),
        ("trainer.pt with code", take(trainer, evil)), ("no trainer.pt", lambda run: (run / trainer).unlink()),
        ("config of another world", edit('"frozenlake"', '"sokoban"')), ("config of another algorithm", edit('"ppo"', '"grpo"')),
        ("config cut", cut("config.json", 0.5)), ("config empty", cut("config.json", 0)),
        ("config with an unknown option", edit('"env"', '"enviroment"')), ("no config", lambda run: (run / "config.json").unlink()),
        ("config of another seed", take("config.json", other / "config.json")))]
    cases += [("equal", *case) for case in (
        ("log with half a last line", cut("log.jsonl", 0.97)), ("log cut in the middle", cut("log.jsonl", 0.4)),
        ("log with a false row", lambda run: open(run / "log.jsonl", "a").write('{"iteration": 99}\n')),
        ("log not text", take("log.jsonl", whole / trainer)), ("no samples", lambda run: (run / "samples.jsonl").unlink()),
        ("a checkpoint half written", lambda run: shutil.copytree(run / "checkpoint", run / "checkpoint.new") and
            cut("checkpoint.new/trainer.pt", 0.3)(run)),
        ("model.safetensors cut", cut("checkpoint/model.safetensors", 0.5)), ("nothing", lambda run: None))]
    for number, (verdict, what, spoil) in enumerate(cases):
        out = shutil.copytree(half, work / f"damaged-{number}")
        spoil(out)
        result = run("--resume", out)
        if verdict == "error":
            line = one_line(result)
        else:
            assert result[0] == 0 and not same(out, whole), (what, result, same(out, whole))
            line = "equal to the whole run"
        counted[verdict] += 1
        print(f"  {what}: {line}", flush=True)
    for given in (["--env", "sokoban"], ["--seed", "1"], ["--model", "tiny"], ["--algo", "grpo"], ["--out", "x"]):
        one_line(run("--resume", half, *given), given[0][2:])
    assert not (ROOT / "pwned").exists(), "a pickle was executed"
    print(f"damage: {counted['error']} damaged runs and 5 contradicting options gave a one-line error, {counted['equal']} went on to equal runs")


if __name__ == "__main__":
    todo = {"parser": parser, "kills": kills, "signals": signals, "disk": disk, "poison": poison, "damage": damage, "cache": cache}
    arguments = argparse.ArgumentParser("survive.py", description="A run is never lost, and never lies: all of it, or one part.")
    arguments.add_argument("part", nargs="?", choices=todo)
    arguments.add_argument("number", nargs="?", type=int, help="of strings (parser) or runs (kills)")
    args = arguments.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        for name in [args.part] if args.part else todo:
            work = Path(folder, name)
            work.mkdir()
            if name == "parser":
                parser(args.number or 200_000)
            elif name == "kills":
                kills(args.number or 32, work, cold=2)
            else:
                todo[name](work)
