"""The programs on a GPU, with the included model: README's first command, --resume, recipes.

    python extras/dev/gpu_programs.py          six minutes on a machine with 16 cores

Each should end with exit code 0. (lora needs peft.)
"""
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

import plots
import ragen_mini as rm
from extras.dev import bench

SHORT = "--iterations 3 --prompts 4 --rollouts 8 --eval-prompts 16"
TWICE = "ragen_mini.py --env frozenlake --eval-every 0 --epochs 2 --iterations"
# Those of a group run one after another, the groups at the same time.
PROGRAMS = [
    (f"ragen_mini.py --env sokoban --algo grpo --starpo-s {SHORT} --out OUT/sokoban",
     "ragen_mini.py --resume OUT/sokoban --iterations 4",
     "ragen_mini.py --model OUT/sokoban --eval-only",
     "ragen_mini.py --model OUT/sokoban --play 8",
     "extras/xray.py OUT/sokoban"),
    (f"ragen_mini.py --env bandit --online-k 2 --epochs 2 {SHORT} --out OUT/bandit",
     "plots.py collapse OUT/bandit"),
    (f"ragen_mini.py --env frozenlake --no-think --eval-every 1 {SHORT} --out OUT/lake",
     "extras/episode.py OUT/lake", "extras/episode.py OUT/lake --gif"),
    (f"extras/thoughts.py --env sokoban --pay 0.1 {SHORT} --out OUT/thoughts",
     "extras/check_model.py tiny"),
    (f"-m torch.distributed.run --nproc-per-node 1 extras/torchrun.py --env frozenlake {SHORT} "
     f"--out OUT/torchrun",)]
RECIPES = ("rloo --algo grpo", "muon", "sgd", "lora", "gspo --algo grpo", "cispo", "read_once",
           "warm_up", "own_model", "discount_per_turn")


def try_programs(folder):
    groups = list(PROGRAMS)
    for name in RECIPES:
        out = f"OUT/{name.split()[0]}"
        groups.append((f"extras/recipes.py {name} --env bandit {SHORT} --out {out}",))

    def call_all(commands):
        return [called(command, folder) for command in commands]
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(call_all, groups)
    for commands, results_of_group in zip(groups, results):
        for command, (_, result) in zip(commands, results_of_group):
            print(f"exit code {result.returncode}: python {command}", flush=True)
            if result.returncode:
                print(result.stderr[-2000:])


def called(command, folder):  # -> seconds, what became of it
    words = command.replace("OUT", str(folder)).split()
    start = time.perf_counter()
    result = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    return time.perf_counter() - start, result


def differ(name, x, other):
    return x != other and isinstance(x, float) and not name.startswith("seconds")


def print_times(rows):
    for row in rows[1:]:
        print(f"iteration {row['iteration']}: rollout {row['seconds_rollout']:.2f} s, "
              f"update {row['seconds_update']:.2f} s, {row['tokens']} tokens")


def programs(device, iterations=(30, 4, 4, 2), also=""):
    """iterations: of the first command, on the CPU, twice, until it is stopped. also: more options.
    """
    whole, on_cpu, twice, stopped = iterations
    folder = Path(tempfile.mkdtemp())
    first = f"ragen_mini.py --env frozenlake --iterations {whole}"
    duration, _ = called(f"{first} --out OUT/first{also}", folder)
    print(f"\npython {first}: {duration:.1f} s in all, evaluations included")
    rows = plots.load(folder / "first").rows
    for row in rows:
        if "eval" in row:
            print(f"iteration {row['iteration']}: success {row['eval']['frozenlake']}, "
                  f"random and optimal {row['yardsticks']['frozenlake']}")
    print_times(rows)

    first = (f"ragen_mini.py --env frozenlake --device cpu --iterations {on_cpu} "
             f"--eval-every {on_cpu}")
    called(f"{first} --out OUT/cpu{also}", folder)
    print(f"\nthe CPU of that machine, one thread: python {first}")
    print_times(plots.load(folder / "cpu").rows)

    called(f"{TWICE} {twice} --out OUT/at-once{also}", folder)
    called(f"{TWICE} {stopped} --out OUT/resumed{also}", folder)
    called(f"ragen_mini.py --resume OUT/resumed --iterations {twice}", folder)
    print(f"\npython {TWICE} {twice}, and {stopped} of them, then --resume: columns that differ "
          f"(at once, resumed)")
    at_once, resumed = (plots.load(folder / name).rows for name in ("at-once", "resumed"))
    for one, other in zip(at_once, resumed, strict=True):
        print(one["iteration"], {name: (x, other[name]) for name, x in one.items()
                                 if differ(name, x, other[name])})

    print(f"\nwith `tiny` on {device}, several at once:", flush=True)
    try_programs(folder)
    shutil.rmtree(folder)


def main():
    device = torch.cuda.get_device_name() if rm.CUDA else "CPU"
    print(bench.about(device, "gpu_programs.py"), flush=True)
    programs(device)


if __name__ == "__main__":
    main()
