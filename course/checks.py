"""The engine of the exercises: an answer and the shipped function get the same inputs.

Compared is all that they return, and all that has changed in the inputs afterwards: numbers,
shapes, kinds, and the gradients of what was returned.

No solution stands here: an exercise (exercises.py) names the shipped function that solves it. What
a usual mistake (answers.txt) gives is not written down either: it is what the shipped function
gives with a piece of its code replaced. So a mistake is recognised by its numbers, however it was
written.
"""
import ast
import contextlib
import functools
import importlib.util
import inspect
import json
import re
import signal
import sys
import textwrap
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector

COURSE = Path(__file__).resolve().parent
ROOT = COURSE.parent
for folder in (ROOT / "extras", COURSE, ROOT):
    sys.path.insert(0, str(folder))

import ragen_mini

CLOSE = 1e-4
SECONDS = 5  # of computing, for an input
TOO_LONG = f"more than {SECONDS} seconds. Is the same calculated again and again?"
UNWRITTEN = "not written yet"


def pristine(name):
    """A second copy of a module, which nothing reaches that a notebook does to `ragen_mini`."""
    spec = importlib.util.spec_from_file_location(f"pristine_{name}", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


envs = pristine("envs")
rm = pristine("ragen_mini")
rm.envs = envs
OURS = (SimpleNamespace, rm.Trajectory, rm.Models, rm.Config, envs.Env)


# --------------------------------------------------------------------------------------- exercises
@dataclass(eq=False)
class Exercise:
    """draw(g, i) makes the inputs of case i: {name: value}. It takes random numbers from the
    generator g, and the number i runs through the corner cases.

    run(answer, *inputs) calls the answer, and names what it returned: {name of a result: value}.
    """
    name: str
    title: str
    points: float
    solution: object  # the shipped function
    draw: object
    run: object
    shown: int = 6  # cases of the notebook's check
    show_spec: bool = True
    everywhere: bool = False  # must what it returns be on the device of its inputs?

    def inputs(self, i):  # always the same ones for the same i
        return {name: x for name, x in self.drawn(i).items() if not name.startswith("rm.")}

    def constants(self, i):  # of ragen_mini, while the answer runs: they are drawn as "rm.X"
        return {name[3:]: x for name, x in self.drawn(i).items() if name.startswith("rm.")}

    def drawn(self, i):
        return self.draw(np.random.default_rng(i), i)

    def cases(self, hidden=0):  # those of the notebook, and three times as many for each `hidden`
        numbers = list(range(self.shown))
        if hidden:
            first = 1000 * hidden
            numbers += range(first, first + 3 * self.shown)
        return numbers


def read_answers(file):  # -> {exercise: [[words, old piece, new piece, ...], ...]}
    answers = {}
    # An indented line belongs to the one before.
    for line in file.read_text().replace("\n    ", " ").splitlines():
        if line.startswith("["):
            name = line.strip("[]")
            answers[name] = []
        elif line and not line.startswith("#"):
            words, *changes = line.replace("\\n", "\n").split(" :: ")
            answer = [words]
            for change in changes:
                old, new = change.split("=>", 1)
                answer += [old.strip(" "), new.strip(" ")]
            answers[name].append(answer)
    return answers


ANSWERS = read_answers(COURSE / "answers.txt")
HELPERS = {"token_logps": "chunk_logps"}  # a shipped function that does its work in another one


@functools.lru_cache
def text_of(function):
    """Its code in one fixed form, without comments and docstrings: only code is replaced."""
    neighbours = vars(sys.modules[function.__module__])
    helper = neighbours.get(HELPERS.get(function.__name__))
    texts = [inspect.getsource(one) for one in (helper, function) if one]
    tree = ast.parse(textwrap.dedent("\n\n".join(texts)))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            del node.body[0]
    return ast.unparse(tree)


def mutated(text, *pieces):
    """pieces: old, new, old, new, ... An old piece of no letters is all of the text."""
    for old, new in zip(pieces[::2], pieces[1::2]):
        old = old or text
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {text[:40]!r}"
        text = text.replace(old, new)
    return text


def mutant(function, *pieces, names=None):
    """The function (or class) with pieces of its code replaced.

    It is made among `names`, where it takes the place of the right one, or in a copy of its module.
    """
    if names is None:
        names = vars(sys.modules[function.__module__]) | {"__name__": "__main__"}
    exec(mutated(text_of(function), *pieces), names)
    return names[function.__name__]


def results(*names):  # -> run: calls the answer and names what it returned
    def run(answer, *inputs):
        found = answer(*inputs)
        if len(names) == 1:
            return {names[0]: found}
        if len(given(found)) != len(names):
            raise ValueError(f"should return {len(names)} things: {', '.join(names)}")
        return dict(zip(names, found))
    return run


def given(found):
    if found is None:
        raise ValueError("nothing was returned: is there a `return`?")
    return found


# ------------------------------------------------------------------------------ what an answer did
def plain(x):
    """In numbers, text, lists and dicts alone, which can be compared and printed."""
    if isinstance(x, np.ndarray):
        x = torch.as_tensor(x)
    if isinstance(x, torch.Tensor):
        return {"shape": list(x.shape), "kind": kind_of(x), "values": x.detach().tolist()}
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, dict):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    raise TypeError(f"returned a {type(x).__name__}")


def kind_of(x):
    if x.dtype == torch.bool:
        return "bool"
    return "float" if x.dtype.is_floating_point else "int"


def parts(x, name):  # yields (name, plain value) of all that an answer could change in an input
    if isinstance(x, torch.nn.Module):
        gradients = [gradient_of(weight) for weight in x.parameters()]
        yield f"{name}'s weights afterwards", plain(parameters_to_vector(x.parameters()))
        yield f"{name}'s gradient", plain(parameters_to_vector(gradients))
    elif isinstance(x, OURS):
        yield from parts(vars(x), name)
    elif isinstance(x, dict):
        for key, value in x.items():
            yield from parts(value, f"{name}.{key}".lstrip("."))
    elif isinstance(x, (list, tuple)) and any(isinstance(y, (*OURS, dict, list)) for y in x):
        yield from parts(dict(enumerate(x)), name)
    elif x is None or isinstance(x, (bool, int, float, str, list, tuple, torch.Tensor)):
        yield f"{name} afterwards", plain(x)
        if isinstance(x, torch.Tensor) and x.requires_grad:
            yield f"{name}'s gradient", plain(gradient_of(x))


def gradient_of(x):
    return torch.zeros_like(x) if x.grad is None else x.grad


def send_back(found):
    """The gradient of a sum of all that was returned, each number with a weight of its own."""
    for x in found.values():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            weights = torch.arange(1, x.numel() + 1).to(x)
            x.backward(weights.view_as(x), retain_graph=True)


def outcome(exercise, answer, i):  # -> {what it returned or changed: value}, what went wrong
    inputs = exercise.inputs(i)
    begin = time.process_time()
    try:
        with with_constants(answer, exercise.constants(i)), time_limit():
            found = exercise.run(answer, *inputs.values())
            if time.process_time() - begin > SECONDS:
                raise TimeoutError(TOO_LONG)
            # An error here means that something was changed which the gradient needs. That is seen
            # below.
            with contextlib.suppress(RuntimeError):
                send_back(found)
            return plain(found) | dict(parts(inputs, "")), ""
    except (Exception, SystemExit) as error:
        # An unwritten answer says nothing. torch's own errors of this kind say something.
        is_stub = isinstance(error, NotImplementedError) and not str(error)
        return {}, UNWRITTEN if is_stub else in_words(error)


@contextlib.contextmanager
def with_constants(answer, constants):
    """Where an answer may look for them. Without warnings, since nbgrader takes any for an error.
    """
    spaces = [vars(ragen_mini), vars(rm), getattr(answer, "__globals__", {})]
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        for space in spaces:
            stack.enter_context(mock.patch.dict(space, constants))
        yield


@contextlib.contextmanager
def time_limit():
    """Where the system has such an alarm. Elsewhere one waits, and is told afterwards."""
    def stop(*_):
        raise TimeoutError(TOO_LONG)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not hasattr(signal, "setitimer") or not in_main_thread:
        yield
        return
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def in_words(error):
    where = type(error).__name__
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "__main__":  # where notebooks put what they define
            where = f"{type(error).__name__}, line {line} of {frame.f_code.co_name}"
    return f"{where}: {error}"


@functools.cache
def spec_of(exercise, i):  # what the shipped function gives
    spec, error = outcome(exercise, exercise.solution, i)
    assert not error, f"{exercise.name}, input {i}: {error}"
    unclear = re.search("NaN|Infinity", json.dumps(spec))
    assert not unclear, f"{exercise.name}, input {i}: the shipped one gives {spec}"
    return spec


def agree(yours, spec):
    """Both are plain. (A nan is like a nan: no shipped function gives one, but mistakes are
    compared with each other, too.)
    """
    if isinstance(spec, dict) and isinstance(yours, dict):
        if yours.keys() != spec.keys():
            return False
        if "values" not in spec:
            return all(agree(yours[key], spec[key]) for key in spec)
        if yours["kind"] != spec["kind"] or yours["shape"] != spec["shape"]:
            return False
        a = np.array(yours["values"], dtype=float)
        b = np.array(spec["values"], dtype=float)
        largest = np.abs(b[np.isfinite(b)]).max(initial=0)
        return np.allclose(a, b, rtol=CLOSE, atol=CLOSE * (largest + 0.5), equal_nan=True)
    if isinstance(spec, list):
        same_length = isinstance(yours, list) and len(yours) == len(spec)
        return same_length and all(map(agree, yours, spec))
    if isinstance(spec, float):
        is_number = isinstance(yours, (int, float))
        return is_number and np.isclose(yours, spec, rtol=CLOSE, atol=CLOSE, equal_nan=True)
    return type(yours) is type(spec) and yours == spec


def differing(yours, spec):  # -> names
    names = []
    for name in spec | yours:
        if name not in yours or not agree(yours[name], spec.get(name)):
            names.append(name)
    return names


# --------------------------------------------------------------------------------------- the check
def check(exercise, answer, cases):  # -> what is wrong, in words; nothing if all is right
    for number, i in enumerate(cases, 1):
        yours, error = outcome(exercise, answer, i)
        if error == UNWRITTEN:
            return error
        if differing(yours, spec_of(exercise, i)):
            break
    else:
        return leaves_the_device(exercise, answer)
    lines = [f"case {number} of {len(cases)} differs", *describe(exercise, i, yours, error)]
    hint = advise(exercise, answer, i, yours, error)
    return "\n".join(lines + [f"  Hint: {hint}"] * bool(hint))


def leaves_the_device(exercise, answer):  # -> words, or nothing
    """The device meta has shapes and no numbers.

    Once the inputs are there, once what is made anew without a word about a device. An answer that
    only asked for numbers in vain passes.
    """
    if not exercise.everywhere:
        return ""
    inputs = exercise.inputs(0)
    there = devices(exercise, answer, on_meta(inputs), "cpu")
    anew = devices(exercise, answer, inputs, "meta")
    mixed = "no data" in there and "expected device" in anew
    if mixed or "device cpu" in there or "all on device meta" in anew:
        return ("right, but not on a GPU: make new tensors on the device of the others, with "
                "zeros_like or device=...")
    return ""


def devices(exercise, answer, inputs, default):  # -> of what was returned, or what was raised
    try:
        with torch.device(default):
            found = exercise.run(answer, *inputs.values())
        tensors = [x for x in found.values() if isinstance(x, torch.Tensor)]
        return str([f"all on device {x.device}" for x in tensors])
    except (Exception, SystemExit) as error:
        return str(error)


def on_meta(x):
    if isinstance(x, dict):
        return {key: on_meta(value) for key, value in x.items()}
    if isinstance(x, torch.Tensor):
        return x.detach().to("meta")
    return "meta" if x == "cpu" else x


# ---------------------------------------------------------------------------------- what is printed
def short(value):  # plain -> one line, numbers with four digits
    shape = ""
    if isinstance(value, dict) and "values" in value:
        shape, value = f"({','.join(map(str, value['shape']))})  ", value["values"]
    text = repr(rounded(value))
    if len(text) > 240:
        text = text[:120] + " ..."
    return shape + text


def rounded(value):
    if isinstance(value, list):
        return [rounded(x) for x in value]
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in value.items()}
    if isinstance(value, float):
        return float(f"{round(value, 6):.4g}") + 0.0  # + 0.0: no -0.0
    return value


def describe(exercise, i, yours, error):  # -> lines
    spec = spec_of(exercise, i)
    wrong = differing(yours, spec)
    if error:  # all is missing: what the function would only have left alone says nothing
        before = inputs_before(exercise, i)
        wrong = [name for name in wrong if spec.get(name) != before.get(name)]
    # Single numbers say most. They come first.
    wrong.sort(key=lambda name: isinstance(spec.get(name), (list, dict)))
    lines_yours, lines_spec = [], []
    for name in wrong[:5]:
        a, b = from_difference(yours.get(name), spec.get(name))
        lines_yours.append(f"    {name:12} {short(a)}")
        lines_spec.append(f"    {name:12} {short(b)}")
    if error:
        lines_yours = [f"    {error}"]
    lines = [*input_lines(exercise.drawn(i)), "  Yours", *lines_yours]
    if exercise.show_spec:
        lines += ["  Spec", *lines_spec]
    # The gradient of `models.` the answer itself makes.
    if any(name.endswith("gradient") and "." not in name for name in wrong):
        lines.append("  (A gradient is that of 1 x the first number that was returned "
                     "+ 2 x the second + ...)")
    return lines


def inputs_before(exercise, i):
    return dict(parts(exercise.inputs(i), ""))


def from_difference(a, b):  # long lists without what is the same in front
    if not (isinstance(a, list) and isinstance(b, list)) or len(repr((a, b))) <= 240:
        return a, b
    while a and b and agree(a[0], b[0]):
        a, b = a[1:], b[1:]
    return ["...", *a], ["...", *b]


def input_lines(inputs):
    lines = []
    for name, value in inputs.items():
        if isinstance(value, envs.Env):
            lines += [f"    {name}", textwrap.indent(value.render(), " " * 17)]
        elif isinstance(value, rm.Trajectory):
            answer = inputs["tok"].decode(value.ids[value.answer_start:])
            lines.append(f"    the answer   {answer}")
        elif name == "trajs":
            for traj in value[:4]:
                for row in ("ids", "mask", "old_logp", "reward"):
                    lines.append(f"    {row:12} {short(getattr(traj, row))}")
        elif isinstance(value, dict):
            lines += input_lines({f"{name}.{key}": part for key, part in value.items()})
        else:
            if isinstance(value, SimpleNamespace):
                value = vars(value)
            with contextlib.suppress(TypeError):  # networks, tokenizers: nothing to print
                lines.append(f"    {name:12} {short(plain(value))}")
    return lines


# ------------------------------------------------------------ hints, where the mistake is certain
def advise(exercise, answer, i, yours, error):  # -> a hint, or nothing
    if TOO_LONG in error:  # it would run in every case again
        return ""
    hint = recognise(exercise, answer)
    if hint or error:
        return hint
    spec = spec_of(exercise, i)
    wrong = differing(yours, spec)
    for name in wrong:
        if name.endswith(" afterwards") and always_left_alone(exercise, name):
            return f"it changes its input: {name.removesuffix(' afterwards')}"
    if wrong[0] not in yours:
        return f"there is no {wrong[0]!r}"
    if wrong[0].endswith("gradient") and not np.any(yours[wrong[0]]["values"]):
        return "no gradient arrives there: was something detached, or calculated under no_grad?"
    return general_hint(yours[wrong[0]], spec.get(wrong[0]))


def recognise(exercise, answer):
    """The mistake, in words, that gives the same as the answer in all cases of the notebook."""
    visible = in_visible_cases(exercise, answer)
    wrong = [i for i in exercise.cases() if differing(visible[i], spec_of(exercise, i))]
    if not wrong:  # only a hidden case differs
        return ""
    for words, gave in usual_mistakes(exercise):
        if gave[wrong[0]] and not any(map(differing, visible, gave)):
            return words
    return ""


def in_visible_cases(exercise, answer):  # -> of each case: what it returned or changed
    return [outcome(exercise, answer, i)[0] for i in exercise.cases()]


@functools.cache
def usual_mistakes(exercise):  # -> [(in words, what it gives in the visible cases), ...]
    mistakes = []
    for words, *pieces in ANSWERS.get(exercise.name, ()):
        wrong = mutant(exercise.solution, *pieces)
        mistakes.append((words, in_visible_cases(exercise, wrong)))
    return mistakes


def always_left_alone(exercise, name):  # by the shipped function, in all cases where it is there
    for i in exercise.cases():
        spec, before = spec_of(exercise, i), inputs_before(exercise, i)
        if spec.get(name) != before.get(name):
            return False
    return True


WANTED = {"bool": "bools are wanted: as a mask, x[mask] takes numbers for places",
          "int": "whole numbers are wanted",
          "float": "numbers with a fraction are wanted (dtype float)"}


def general_hint(yours, spec):
    """What can be said without knowing the exercise."""
    if yours is None:
        return "None was returned, where the shipped function returns something else"
    if not all(isinstance(x, dict) and "values" in x for x in (yours, spec)):
        return ""
    if yours["shape"] != spec["shape"]:
        return f"the shape is {tuple(yours['shape'])} and should be {tuple(spec['shape'])}"
    if yours["kind"] != spec["kind"]:
        return WANTED[spec["kind"]]
    a = np.array(yours["values"], dtype=float)
    b = np.array(spec["values"], dtype=float)
    if not np.isfinite(a).all():
        return ("there is a nan or an inf, as after a division by 0, a logarithm of 0, or exp of a "
                "large number")
    factor = (a * b).sum() / max((b * b).sum(), CLOSE)
    proportional = np.allclose(a, factor * b, atol=CLOSE)
    if a.size > 1 and abs(factor) > CLOSE and abs(factor - 1) > 0.005 and proportional:
        return f"all numbers are {factor:.3g} times what they should be"
    if a.ndim and a.shape[-1] > 2:
        for places in (1, -1):
            if np.allclose(np.roll(a, places, axis=-1), b, atol=CLOSE):
                return "everything stands one place too far to one side"
    return ""
