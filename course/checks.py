"""The engine of the exercises: an answer and the shipped function get the same inputs. Compared is all that they return
and all that then has changed in the inputs: numbers, shapes, kinds, and the gradients of what they returned.

There are no solutions here: an exercise (exercises.py) names the shipped function that solves it. What a usual mistake
(answers.txt) would give is not written down either: it is what the shipped function gives with a piece of its text
replaced. So a mistake is recognised by its numbers, however it was written.
"""
import contextlib
import functools
import importlib.util
import inspect
import itertools
import json
import re
import sys
import textwrap
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

COURSE = Path(__file__).resolve().parent
ROOT = COURSE.parent
sys.path[:0] = [str(ROOT), str(COURSE), str(ROOT / "extras")]

import ragen_mini

CLOSE = 1e-4
SECONDS = 5  # for an input
UNWRITTEN = "not written yet"


def pristine(name):
    """A second copy of a module: whatever a notebook does to `ragen_mini` does not reach this one."""
    spec = importlib.util.spec_from_file_location(f"pristine_{name}", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


envs = pristine("envs")
rm = pristine("ragen_mini")
rm.envs = envs
OURS = (SimpleNamespace, rm.Trajectory, rm.Models, rm.Config, envs.Env)


# ------------------------------------------------------------------------------------------------ exercises
@dataclass(eq=False)
class Exercise:
    name: str
    title: str
    points: float
    solution: object  # the shipped function
    draw: object  # draw(g, i) -> {name of an input: its value}, by the generator g; i runs through the corner cases
    run: object  # run(answer, *inputs) -> {name of a result: its value}
    shown: int = 6  # inputs in the notebook's check
    show_spec: bool = True
    everywhere: bool = False  # must what it returns be on the device of its inputs?

    def inputs(self, i):  # always the same ones for the same i; "rm.X" is no input, but a constant of ragen_mini
        return self.draw(np.random.default_rng(i), i)

    def cases(self, hidden=0):  # numbers of inputs: those of the notebook, and more, others for each `hidden`
        more = range(1000 * hidden, 1000 * hidden + 3 * self.shown) if hidden else ()
        return [*range(self.shown), *more]


def read_answers(file):  # -> {exercise: [(words, old piece, new piece, ...), ...]}
    answers = {}
    for line in file.read_text().replace("\n    ", " ").splitlines():  # an indented line belongs to the one before
        if line.startswith("["):
            answers[line.strip("[]")] = answers_of_one = []
        elif line and not line.startswith("#"):
            words, *changes = line.split(" :: ")
            pieces = [piece.replace("\\n", "\n").strip(" ") for change in changes for piece in change.split("=>", 1)]
            answers_of_one.append((words, *pieces))
    return answers


ANSWERS = read_answers(COURSE / "answers.txt")


@functools.lru_cache
def text_of(function):
    return textwrap.dedent(inspect.getsource(function))


def mutated(text, *pieces):  # old, new, old, new, ...; an old piece of no letters is all of the text
    for old, new in zip(pieces[::2], pieces[1::2]):
        old = old or text
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {text[:40]!r}"
        text = text.replace(old, new)
    return text


def mutant(function, *pieces, names=None):
    """The function (or class) with pieces of its text replaced; made among `names`, or in a copy of its module's."""
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


# --------------------------------------------------------------------------------------- what an answer did
def plain(x):
    """In numbers, text, lists and dicts alone: this can be compared and printed."""
    if isinstance(x, np.ndarray):
        x = torch.as_tensor(x)
    if isinstance(x, torch.Tensor):
        kind = "bool" if x.dtype == torch.bool else "float" if x.dtype.is_floating_point else "int"
        return {"shape": list(x.shape), "kind": kind, "values": x.detach().tolist()}
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, dict):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    raise TypeError(f"returned a {type(x).__name__}")


def parts(x, name):  # yields (name, plain value) of all that an answer could change in an input
    if isinstance(x, torch.nn.Module):
        weights = list(x.parameters())
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        yield f"{name}'s weights afterwards", plain(torch.cat([weight.flatten() for weight in weights]))
        yield f"{name}'s gradient", plain(torch.cat([gradient.flatten() for gradient in gradients]))
    elif isinstance(x, OURS):
        yield from parts(vars(x), name)
    elif isinstance(x, dict):
        for key, value in x.items():
            yield from parts(value, f"{name}.{key}".lstrip("."))
    elif isinstance(x, (list, tuple)) and any(isinstance(value, (*OURS, dict, list)) for value in x):
        yield from parts(dict(enumerate(x)), name)
    elif isinstance(x, (bool, int, float, str, list, tuple, torch.Tensor, type(None))):
        yield f"{name} afterwards", plain(x)
        if isinstance(x, torch.Tensor) and x.requires_grad:
            yield f"{name}'s gradient", plain(torch.zeros_like(x) if x.grad is None else x.grad)


def send_back(found):
    """The gradient of a sum of all that was returned, each number with a weight of its own."""
    for x in found.values():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            x.backward(torch.arange(1, x.numel() + 1).to(x).view_as(x), retain_graph=True)


def outcome(exercise, answer, i):  # -> {what it returned or changed: plain value}, what went wrong
    inputs = exercise.inputs(i)
    constants = {name[3:]: inputs.pop(name) for name in list(inputs) if name.startswith("rm.")}
    begin = time.perf_counter()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))  # nbgrader takes any warning for an error
            for space in (vars(ragen_mini), vars(rm), getattr(answer, "__globals__", {})) if constants else ():
                stack.enter_context(mock.patch.dict(space, constants))
            found = exercise.run(answer, *inputs.values())
            if time.perf_counter() - begin > SECONDS:
                raise TimeoutError(f"more than {SECONDS} seconds")
            with contextlib.suppress(RuntimeError):  # something was changed that the gradient needs: it is seen below
                send_back(found)
            return {name: plain(value) for name, value in found.items()} | dict(parts(inputs, "")), ""
    except NotImplementedError:
        return {}, UNWRITTEN
    except (Exception, SystemExit) as error:
        own = [f"line {line} of {frame.f_code.co_name}" for frame, line in traceback.walk_tb(error.__traceback__)
               if frame.f_globals.get("__name__") == "__main__"]  # where notebooks put what they define
        return {}, ", ".join([type(error).__name__, *own[-1:]]) + f": {error}"


@functools.cache
def spec_of(exercise, i):  # what the shipped function gives
    spec, error = outcome(exercise, exercise.solution, i)
    assert not error, f"{exercise.name}, input {i}: {error}"
    assert not re.search("NaN|Infinity", json.dumps(spec)), f"{exercise.name}, input {i}: the shipped one gives {spec}"
    return spec


def agree(yours, spec):  # both plain; a nan is like a nan: no shipped function gives one, but mistakes are compared, too
    if isinstance(spec, dict) and isinstance(yours, dict):
        if yours.keys() != spec.keys():
            return False
        if "values" not in spec:
            return all(agree(yours[key], spec[key]) for key in spec)
        if yours["kind"] != spec["kind"] or yours["shape"] != spec["shape"]:
            return False
        a, b = (torch.tensor(x["values"], dtype=torch.float64) for x in (yours, spec))
        finite = b.isfinite()
        most = b[finite].abs().max() if finite.any() else 0
        near = (a - b).abs() <= CLOSE * (b.abs() + most + 0.5)  # never for nan
        return bool(torch.where(finite, near, a.eq(b) | a.isnan() & b.isnan()).all())
    if isinstance(spec, list):
        return isinstance(yours, list) and len(yours) == len(spec) and all(map(agree, yours, spec))
    if isinstance(spec, float):
        near = isinstance(yours, (int, float)) and abs(yours - spec) <= CLOSE * (1 + abs(spec))  # never for nan
        return near if np.isfinite(spec) else repr(yours) == repr(spec)
    return type(yours) is type(spec) and yours == spec


def differing(yours, spec):  # -> names
    return [name for name in spec | yours if not agree(yours.get(name), spec.get(name)) or name not in yours]


# ------------------------------------------------------------------------------------------------- the check
def check(exercise, answer, cases):  # -> what is wrong, in words; nothing if all is right
    for number, i in enumerate(cases, 1):
        yours, error = outcome(exercise, answer, i)
        if error == UNWRITTEN:
            return error
        if differing(yours, spec_of(exercise, i)):
            break
    else:
        return leaves_the_device(exercise, answer)
    before = dict(parts(exercise.inputs(i), ""))
    lines = [f"case {number} of {len(cases)} differs", *describe(exercise, i, yours, before, error)]
    hint = advise(exercise, answer, i, yours, before, error)
    return "\n".join(lines + [f"  Perhaps: {hint}"] * bool(hint))


def leaves_the_device(exercise, answer):  # -> words, or nothing
    """The device meta has shapes and no numbers. Once the inputs are there, once what is made anew without a word about
    a device. An answer that only asked for numbers in vain passes."""
    if not exercise.everywhere:
        return ""
    inputs = {name: value for name, value in exercise.inputs(0).items() if not name.startswith("rm.")}
    there = devices(exercise, answer, {name: on_meta(value) for name, value in inputs.items()}, "cpu")
    anew = devices(exercise, answer, inputs, "meta")
    mixed = "no data" in there and "expected device" in anew
    if mixed or "device cpu" in there or "all on device meta" in anew:
        return "right, but not on a GPU: make new tensors on the device of the others, with zeros_like or device=..."
    return ""


def devices(exercise, answer, inputs, default):  # -> of what was returned, or what was raised
    try:
        with torch.device(default):
            found = exercise.run(answer, *inputs.values())
        return str([f"all on device {x.device}" for x in found.values()])
    except (Exception, SystemExit) as error:
        return str(error)


def on_meta(x):
    if isinstance(x, dict):
        return {key: on_meta(value) for key, value in x.items()}
    return x.detach().to("meta") if isinstance(x, torch.Tensor) else "meta" if x == "cpu" else x


# ------------------------------------------------------------------------------------------- what is printed
def short(value):  # plain -> one line, numbers with four digits
    shape = ""
    if isinstance(value, dict) and "values" in value:
        shape, value = f"({','.join(map(str, value['shape']))})  ", value["values"]
    text = repr(json.loads(json.dumps(value), parse_float=lambda number: float(f"{float(number):.4g}")))
    return shape + (text if len(text) <= 240 else text[:120] + " ...")


def describe(exercise, i, yours, before, error):  # -> lines
    spec = spec_of(exercise, i)
    lines = input_lines(exercise.inputs(i))
    wrong = [name for name in differing(yours, spec) if not error or spec.get(name) != before.get(name)][:5]
    shown = [(f"    {name:12}", *from_difference(yours.get(name), spec.get(name))) for name in wrong]
    lines += ["  Yours"]
    lines += [f"    {error}"] if error else [f"{name} {short(value)}" for name, value, _ in shown]
    if exercise.show_spec:
        lines += ["  Spec"] + [f"{name} {short(value)}" for name, _, value in shown]
    return lines


def from_difference(a, b):  # long lists without what is the same in front
    if isinstance(a, list) and isinstance(b, list) and len(repr((a, b))) > 240:
        first = len(list(itertools.takewhile(lambda pair: agree(*pair), zip(a, b))))
        return ["...", *a[first:]], ["...", *b[first:]]
    return a, b


def input_lines(inputs):
    lines = []
    for name, value in inputs.items():
        if isinstance(value, envs.Env):
            lines += [f"    {name}", textwrap.indent(value.render(), " " * 17)]
        elif isinstance(value, rm.Trajectory):
            lines.append(f"    the answer   {inputs['tok'].decode(value.ids[value.answer_start:])}")
        elif name == "trajs":
            for traj in value[:4]:
                for row in ("ids", "mask", "old_logp", "reward"):
                    lines.append(f"    {row:12} {short(getattr(traj, row))}")
        elif isinstance(value, dict):
            lines += input_lines({f"{name}.{key}": part for key, part in value.items()})
        else:
            with contextlib.suppress(TypeError):  # networks, tokenizers: nothing to print
                value = vars(value) if isinstance(value, SimpleNamespace) else value
                lines.append(f"    {name:12} {short(plain(value))}")
    return lines


def advise(exercise, answer, i, yours, before, error):  # -> a hint, or nothing
    visible = [outcome(exercise, answer, j)[0] for j in exercise.cases()]
    if all(next(iter(found.values()), 0) is None for found in visible):
        return "nothing was returned: is there a `return`?"
    hint = recognise(exercise, visible)
    if hint or error:
        return hint
    spec = spec_of(exercise, i)
    wrong = differing(yours, spec)
    for name in wrong:
        if name.endswith(" afterwards") and spec.get(name) == before.get(name):
            return f"{name[:-11]!r} is another one afterwards: `x -= 1`, `x[0] = 1` change it, `x - 1` makes a new one"
    return general_hint(yours.get(wrong[0]), spec.get(wrong[0]))


def recognise(exercise, visible):
    """The mistake, in words, that gives the same as the answer in the first case that differs, and in most others."""
    first = next((i for i in exercise.cases() if differing(visible[i], spec_of(exercise, i))), None)
    best, most = "", 0
    for words, gave in usual_mistakes(exercise) if first is not None else ():
        agreeing = sum(map(same, visible, gave))
        if gave[first] and same(visible[first], gave[first]) and agreeing > most:
            best, most = words, agreeing
    return best


@functools.cache
def usual_mistakes(exercise):  # -> [(in words, what it gives in the visible cases), ...]
    mistakes = []
    for words, *pieces in ANSWERS.get(exercise.name, ()):
        if words.startswith(("~", "right")):
            continue
        with contextlib.suppress(AssertionError):  # it is no piece of the shipped function
            wrong = mutant(exercise.solution, *pieces)
            mistakes.append((words, [outcome(exercise, wrong, i)[0] for i in exercise.cases()]))
    return mistakes


def same(a, b):
    return not differing(a, b)


WANTED = {"bool": "bools are wanted: as a mask, x[mask] takes numbers for places", "int": "whole numbers are wanted",
          "float": "numbers with a fraction are wanted (dtype float)"}


def general_hint(yours, spec):
    """What can be said without knowing the exercise."""
    if yours is None:
        return "None was returned: does every way through the function end at a `return`?"
    if not all(isinstance(x, dict) and "values" in x for x in (yours, spec)):
        return ""
    if yours["shape"] != spec["shape"]:
        return f"the shape is {tuple(yours['shape'])} and should be {tuple(spec['shape'])}"
    if yours["kind"] != spec["kind"]:
        return WANTED[spec["kind"]]
    a, b = (np.array(x["values"], dtype=float) for x in (yours, spec))
    if not np.isfinite(a).all():
        return "there is a nan or inf: was something divided by 0, or the logarithm of 0 taken (softmax, then log)?"
    factor = (a * b).sum() / max((b * b).sum(), CLOSE)
    if a.size > 1 and abs(factor) > CLOSE and np.allclose(a, factor * b, atol=CLOSE):
        return f"all numbers are {factor:.3g} times what they should be: what is it that you divide by?"
    for places in (1, -1):
        if a.ndim and np.allclose(np.roll(a, places, -1), b, atol=CLOSE):
            return "everything stands one place too far to one side"
    return ""
