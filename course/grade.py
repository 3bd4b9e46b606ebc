"""Grades the notebooks of a class: points for each exercise, one line a student, printed and written to FOLDER/points.csv.

    python course/grade.py FOLDER                every .ipynb in it, at whatever depth; two at a time
    python course/grade.py FOLDER --jobs 8 --timeout 120 --no-training

A notebook is somebody's program. What its author wrote (the answers, and cells of his own) runs in a process that gets
inputs and can only send back results, as JSON. They are compared here, with checks.py and hidden_checks.py, in a process
in which none of his code ever runs. So it does not matter what he does to the check cells, to `course` or to the
shipped functions. The agent that his functions train comes back as a file of weights, and is evaluated here, too.

Around that process: a time limit for every cell and every exercise (what is cut off or kills the process is left out, and
the rest runs again), one for the notebook; limits on memory and on the size of files; output thrown away; a folder of
its own that is deleted afterwards. Python's audit hook refuses network, other processes, and writing outside that folder.
Where the kernel allows it (`unshare`), it has no network and sees no other process anyway.

That stops accidents and ordinary cheating, not somebody who attacks the interpreter from inside: for strangers' notebooks
use a container or a virtual machine. It may read what you may read. Nor can any check tell whose work an answer is: the
solutions are the shipped functions, so ask in class.
"""
import argparse
import concurrent.futures
import contextlib
import csv
import functools
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from checks import COURSE, ROOT, UNWRITTEN, advise, cut, envs, first_difference, first_place, outcome, rm, short_input
import course  # below checks, which says where the project is
import exercises
import hidden_checks
import ragen_mini

PATIENCE = 20  # seconds for one cell, or for all checks of one exercise
GIGABYTES = 4
LARGEST_FILE = 50_000_000
LARGEST_ANSWER = 20_000_000  # bytes that a process may send back
ENDED = "the process ended itself"
ONE_AT_A_TIME = threading.Lock()  # the reference runs in this process, and seeds torch's generator
SLOW = f"longer than {PATIENCE} seconds"


# ------------------------------------------------------------------------------------------- reading notebooks
def cells_of(file):  # -> [(id, grade_id or "", source)] of its code cells
    if file.stat().st_size > LARGEST_FILE:
        raise ValueError("the file is too large")
    cells = []
    for cell in json.loads(file.read_text())["cells"]:
        if cell["cell_type"] == "code":
            grade_id = cell.get("metadata", {}).get("nbgrader", {}).get("grade_id", "")
            cells.append((cell.get("id", ""), grade_id, "".join(cell["source"])))
    return cells


@functools.lru_cache
def original():
    return cells_of(ROOT / "tutorial.ipynb")


def own_cells(file):  # -> sources: the answers, and all that the student added
    given = {source for _, grade_id, source in original() if not grade_id.endswith("-answer")}
    given_ids = {name for cell_id, grade_id, _ in original() if not grade_id.endswith("-answer") for name in (cell_id, grade_id)}
    own = []
    for cell_id, grade_id, source in cells_of(file):
        if source not in given and not {cell_id, grade_id} & (given_ids - {""}):
            own.append(source)
    return own


def preamble():  # -> source of the imports, as the notebook gives them
    return next(source for cell_id, _, source in original() if cell_id == "imports")


# ------------------------------------------------------------------------------- the student's process, its inside
def lock_up(folder):
    """From here on Python refuses what an answer has no use for."""
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES * 2 ** 30,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    refused = ("socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
               "os.kill", "pty.")
    changes = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink",
               "os.truncate", "os.utime", "os.setxattr", "os.removexattr")
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    inside = os.path.realpath(folder) + os.sep
    allowed = (os.devnull,)

    def hook(event, args):
        if event.startswith(refused):
            raise PermissionError(f"{event}: not while grading")
        paths = ()
        if event == "open" and args[2] & writing:
            paths = args[:1]
        elif event in changes:
            paths = args
        for path in paths:
            if isinstance(path, (str, bytes, os.PathLike)):
                path = os.path.realpath(os.fsdecode(path))
                if path not in allowed and not path.startswith(inside):
                    raise PermissionError(f"{path}: writing is not allowed while grading")
    sys.addaudithook(hook)


def inside():
    """The student's process: runs his cells, then the exercises, and says what came out, line by line. Then it is told
    which of his functions are right, and trains with these."""
    control = os.fdopen(os.dup(0))
    channel = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)

    def say(**line):
        channel.write(json.dumps(line) + "\n")
        channel.flush()
    task = json.loads(control.readline())
    os.chdir(task["folder"])
    space = {"__name__": "__main__"}
    exec(task["preamble"], space)
    warm = exercises.EXERCISES["add_gradients"]
    outcome(warm, warm.solution, warm.cases[0])  # torch imports parts of itself when they are first used
    lock_up(task["folder"])
    for number, source in enumerate(task["cells"]):
        if number in task["skip"]:
            continue
        say(begin=number)
        try:
            exec(compile(source, f"cell {number}", "exec"), space)
        except BaseException as error:
            say(cell=number, error=f"{type(error).__name__}: {error}"[:300])
    for name in task["names"]:
        say(begin=name)
        if name in space:
            say(name=name, found=outcomes_of(name, space[name]))
    say(end=True)
    right = json.loads(control.readline())
    if right:
        say(begin="training")
        train(space, right)
        say(name="training", found=[])
    say(bye=True)


def outcomes_of(name, answer):
    try:
        exercise = hidden_checks.exercise_of(name)
        return [outcome(exercise, answer, case) for case in hidden_checks.all_cases(name)]
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:300]


def train(space, right):
    """The student's functions, those that are right, in the real loop."""
    settings = space["settings"]()
    for name in right:
        if course.SHIPPED[name] is getattr(ragen_mini, name, None):
            setattr(ragen_mini, name, space[name])
    ragen_mini.plots.curves = str  # no pictures
    fixed = dict(model="tiny", device="cpu", out="run", eval_every=0)
    ragen_mini.train(ragen_mini.Config(**settings | fixed))
    Path("settings.json").write_text(json.dumps({key: settings[key] for key in ("env", "success_rate") if key in settings}))


# ------------------------------------------------------------------------------ the student's process, its outside
@functools.lru_cache
def fence():  # -> words before the command: no network, no other processes, where the kernel allows it
    words = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]
    allowed = shutil.which("unshare") and subprocess.run([*words, "true"], capture_output=True).returncode == 0
    return words if allowed else []


def start(task):
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "TQDM_DISABLE": "1",
                    "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": task["folder"]}
    command = [*fence(), sys.executable, str(COURSE / "grade.py"), "--inside"]
    child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL, start_new_session=True)
    tell(child, task)
    return child


def tell(child, what):
    with contextlib.suppress(OSError):  # it has ended already
        child.stdin.write(json.dumps(what).encode() + b"\n")
        child.stdin.flush()


def listen(child, deadline):
    """What the process says, line by line; None when it took too long over something, or ended."""
    begun = time.monotonic()
    waiting, received = b"", 0
    patience = 60  # until it has imported everything
    while True:
        until = min(deadline, begun + patience)
        ready, _, _ = select.select([child.stdout], [], [], max(0, until - time.monotonic()))
        chunk = os.read(child.stdout.fileno(), 2 ** 16) if ready else b""
        received += len(chunk)
        if not chunk or received > LARGEST_ANSWER:
            yield {"stopped": ENDED if ready else SLOW}
            return
        *lines, waiting = (waiting + chunk).split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict):
                begun = time.monotonic()
                patience = deadline if said.get("begin") == "training" else PATIENCE
                yield said


def ask(task, deadline, judge):  # -> {name: outcomes, or why there are none}
    """Runs the task, and once more without it whenever a cell or an exercise took too long or ended the process. In the
    end judge(found, what went wrong in which cell) says which functions are right, to train with."""
    found, errors, stopped = {}, {}, {}
    while time.monotonic() < deadline:
        names = [name for name in task["names"] if name not in found]
        child = start(task | {"names": names, "skip": list(stopped)})
        doing = None
        try:
            for said in listen(child, deadline):
                if "begin" in said:
                    doing = said["begin"]
                elif "cell" in said:
                    errors[doing] = str(said.get("error"))
                elif "name" in said:
                    found[doing] = said.get("found")
                elif "end" in said:
                    tell(child, judge(found, errors | stopped))
                elif "bye" in said or doing == "training":
                    return found
                elif "stopped" in said and isinstance(doing, int):
                    stopped[doing] = said["stopped"]
                elif "stopped" in said:
                    found.setdefault(doing, said["stopped"])
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
    judge(found, errors | stopped)
    return found


# ------------------------------------------------------------------------------------------------- the points
def why_not(name, found, errors, cells):  # -> what is wrong with an exercise; nothing if it is right
    exercise, cases = hidden_checks.exercise_of(name), hidden_checks.all_cases(name)
    outcomes = found.get(name)
    if isinstance(outcomes, str):
        return outcomes
    if outcomes is None:
        place = [number for number, source in enumerate(cells) if re.search(rf"(def|class) +{name}\b", source)]
        return errors.get(place[-1], "time was up") if place else "not in the notebook"
    try:
        outcomes = [(yours, str(error)) for yours, error in outcomes]
        assert len(outcomes) == len(cases)
        different = first_difference(exercise, cases, outcomes)
        if different is None:
            return ""
        number, spec = different
        yours, error = outcomes[number]
        if error == UNWRITTEN:
            return error
        inputs = ", ".join(f"{key} {cut(short_input(value), 60)}" for key, value in cases[number].items())
        case = f"case {number + 1} of {len(cases)}" + f" ({cut(inputs, 160)})" * bool(inputs)
        what = error or f"differs in {first_place(yours, spec)}"
        hint = advise(exercise, outcomes, yours, spec, error)
        return f"{case}: {what}" + f". Perhaps: {hint}" * bool(hint)
    except Exception as error:  # what came back has another form than an answer
        return f"no answer ({type(error).__name__})"


@functools.lru_cache
def success_of(weights, env, success_rate):  # -> success of these weights, evaluated here
    with tempfile.TemporaryDirectory() as folder:
        model = shutil.copytree(rm.TINY, Path(folder, "model"))
        shutil.copyfile(weights, model / "model.safetensors")
        cfg = rm.Config(env=env, success_rate=success_rate, model=str(model), device="cpu", algo="grpo", kl_coef=0.0,
                        iterations=1, max_new_tokens=40, temperature=rm.EVAL_TEMPERATURE)
        models = rm.load_models(cfg)
        trajs = rm.rollout(models, env, envs.EVAL_SEEDS, 1, cfg, 0)
    return sum(traj.success for traj in trajs) / len(trajs)


def why_not_learned(folder, found):  # -> what is wrong with the trained agent; nothing if it learned
    if found.get("training") != []:
        return f"training: {found.get('training', 'time was up')}"
    try:
        settings = json.loads(Path(folder, "settings.json").read_text()[:1000])
        env, rate = settings["env"], settings.get("success_rate", 0.8)
        assert env in envs.ENVS, "unknown world"
        before = success_of(rm.TINY / "model.safetensors", env, float(rate))
        after = success_of(Path(folder, "run", "checkpoint", "model.safetensors"), env, float(rate))
    except (Exception, SystemExit) as error:  # rm.UserError is a SystemExit
        return f"training: {type(error).__name__}: {error}"
    return "" if course.gained(before, after) else f"training: success {before:.2f} before, {after:.2f} after"


def grade(file, timeout, training):  # -> {exercise: what is wrong}
    deadline = time.monotonic() + timeout
    names = list(exercises.EXERCISES)
    try:
        cells = own_cells(file)
    except Exception as error:
        return dict.fromkeys(names, f"no notebook ({type(error).__name__}: {error})")
    wrong = {}

    def judge(found, errors):  # -> which functions are right; none if there will be no training
        with ONE_AT_A_TIME:
            wrong.update({name: why_not(name, found, errors, cells) for name in names})
        return [name for name in names if not wrong[name]] if training and not wrong["settings"] else []
    with tempfile.TemporaryDirectory() as folder:
        found = ask(dict(cells=cells, names=names, folder=folder, preamble=preamble()), deadline, judge)
        if training and not wrong["settings"]:
            with ONE_AT_A_TIME:
                wrong["settings"] = why_not_learned(folder, found)
    return wrong


def line_of(student, wrong):  # -> {column: cell}
    points = {name: exercises.EXERCISES[name].points * (not wrong[name]) for name in wrong}
    remarks = "; ".join(f"{name}: {' '.join(text.split())}" for name, text in wrong.items() if text and text != UNWRITTEN)
    return {"student": student, "points": sum(points.values()), **points, "remarks": remarks}


def main(argv=None):
    if argv is None and sys.argv[1:] == ["--inside"]:
        return inside()
    parser = argparse.ArgumentParser("grade.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="notebooks at once (2)")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for a notebook, its training included (300)")
    parser.add_argument("--no-training", action="store_true", help="settings that are accepted count as an agent that learned")
    args = parser.parse_args(argv)
    files = sorted(file for file in args.folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in file.parts)
    if not files:
        parser.error(f"no notebook in {args.folder}")
    torch.set_num_threads(1)
    print(f"{len(files)} notebooks; network and other processes are cut off by {'the kernel' if fence() else 'Python alone'}")
    lines = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(grade, file, args.timeout, not args.no_training): file for file in files}
        for future in concurrent.futures.as_completed(futures):
            student = str(futures[future].relative_to(args.folder).with_suffix(""))
            lines.append(line_of(student, future.result()))
            print(f"{lines[-1]['points']:5g}  {student}  {lines[-1]['remarks'][:200]}", flush=True)
    lines.sort(key=lambda line: line["student"])
    with open(args.folder / "points.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    return lines


if __name__ == "__main__":
    main()
