"""The engine of the exercises: an answer and the shipped function get the same inputs, and what they give is compared.

There are no solutions here: an exercise (exercises.py) names the shipped function that solves it. What a usual mistake
would give is not written down either: it is what the shipped function gives with a piece of its text replaced. So a
mistake is recognised by its numbers, however it was written.
"""
import copy
import functools
import importlib.util
import inspect
import json
import sys
import textwrap
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

COURSE = Path(__file__).resolve().parent
ROOT = COURSE.parent
sys.path[:0] = [str(ROOT), str(COURSE), str(ROOT / "extras")]

CLOSE = 1e-4
SPECS = {}
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


# ------------------------------------------------------------------------------------------------ exercises
@dataclass(eq=False)
class Exercise:
    title: str
    points: float
    solution: object  # the shipped function
    run: object  # run(answer, **case) -> {name of a result: its value}; it calls the answer
    cases: list  # the visible inputs, each a dict
    mistakes: list = field(default_factory=list)  # (in words, old piece, new piece, ...) of the solution's text
    show_spec: bool = True
    changes: bool = False  # is it the answer's work to change what it gets?


@functools.lru_cache
def text_of(function):
    return textwrap.dedent(inspect.getsource(function))


def mutant(function, *pieces, module=rm):
    """The function (or class) with pieces of its text replaced: old, new, old, new, ..."""
    text = text_of(function)
    for old, new in zip(pieces[::2], pieces[1::2]):
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {function.__name__}"
        text = text.replace(old, new)
    names = dict(vars(sys.modules[function.__module__])) if module is rm else vars(module)
    exec(text.replace("@staticmethod\n", ""), names)
    return names[function.__name__]


def given(found):
    if found is None:
        raise ValueError("nothing was returned: is there a `return`?")
    return found


def results(*names):  # -> run: calls the answer and names what it returned
    def run(answer, **case):
        found = answer(*case.values())  # the names of the parameters are the student's own affair
        if len(names) == 1:
            return {names[0]: found}
        given(found)
        if not isinstance(found, (tuple, list)) or len(found) != len(names):
            raise ValueError(f"should return {len(names)} things: {', '.join(names)}")
        return dict(zip(names, found))
    return run


def plain(x):
    """In numbers, text, lists and dicts alone: this can be compared, printed and sent to another process."""
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


def agree(yours, spec):  # both plain
    if isinstance(spec, dict):
        same_keys = isinstance(yours, dict) and yours.keys() == spec.keys()
        return same_keys and all(agree(yours[key], spec[key]) for key in spec)
    if isinstance(spec, list):
        return isinstance(yours, list) and len(yours) == len(spec) and all(map(agree, yours, spec))
    if isinstance(spec, float):
        return isinstance(yours, (int, float)) and abs(yours - spec) <= CLOSE * (1 + abs(spec))  # never for nan
    return type(yours) is type(spec) and yours == spec


def contents(x):
    """What an answer could change in an input: the numbers of tensors and weights, lists, fields of objects."""
    if isinstance(x, torch.Tensor):
        return x.tolist()
    if isinstance(x, torch.nn.Module):
        return [parameter.tolist() for parameter in x.parameters()]
    if isinstance(x, dict):
        return {key: contents(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [contents(value) for value in x]
    return contents(vars(x)) if hasattr(x, "__dict__") else repr(x)


class Changed(Exception):
    pass


def watched(exercise, answer):  # -> the answer, which must leave its inputs as they are
    if exercise.changes or not callable(answer):
        return answer

    @functools.wraps(answer)
    def call(*inputs):
        before = contents(inputs)
        found = answer(*inputs)
        names = inspect.signature(exercise.solution).parameters
        for name, old, new in zip(names, before, contents(inputs)):
            if old != new:
                raise Changed(f"the input {name!r} is another one afterwards: `x -= 1` and `x[0] = 1` change it, "
                              "`x - 1` makes a new one")
        return found
    return call


def outcome(exercise, answer, case):  # -> what it returned (plain), what went wrong
    try:
        with warnings.catch_warnings(action="ignore"):  # nbgrader takes any warning for an error
            return plain(exercise.run(watched(exercise, answer), **copy.deepcopy(case))), ""
    except Changed as changed:
        return None, str(changed)
    except NotImplementedError:
        return None, UNWRITTEN
    except (Exception, SystemExit) as error:
        own = [f"line {line} of {frame.f_code.co_name}" for frame, line in traceback.walk_tb(error.__traceback__)
               if frame.f_globals.get("__name__") == "__main__"]  # where notebooks put what they define
        place = f", {own[-1]}" if own else ""
        return None, f"{type(error).__name__}{place}: {error}"


def spec_of(exercise, case):
    """What the shipped function gives, once for every case: the cases live as long as their modules."""
    key = exercise.solution, exercise.run, id(case)
    if key not in SPECS:
        SPECS[key], _ = outcome(exercise, exercise.solution, case)
    return SPECS[key]


def first_difference(exercise, cases, found):  # found: an outcome for each case -> number of the case, spec; or None
    for number, (case, (yours, error)) in enumerate(zip(cases, found)):
        spec = spec_of(exercise, case)
        if error or not agree(yours, spec):
            return number, spec


def check(exercise, answer, cases):  # -> what is wrong, in words; nothing if all cases agree
    found = []

    def outcomes():  # one after another: what comes after the first difference is not run
        for case in cases:
            found.append(outcome(exercise, answer, case))
            yield found[-1]
    different = first_difference(exercise, cases, outcomes())
    if different is None:
        return ""
    number, spec = different
    yours, error = found[number]
    if error == UNWRITTEN:
        return error
    lines = [f"case {number + 1} of {len(cases)} differs", *describe(exercise, cases[number], yours, spec, error)]
    visible = [outcome(exercise, answer, case) for case in exercise.cases]
    hint = advise(exercise, visible, yours, spec, error)
    if hint:
        lines.append(f"  Perhaps: {hint}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------- what is printed
def short(value):  # plain -> one line
    if isinstance(value, str):
        return cut(repr(value))
    if isinstance(value, dict) and "values" in value:
        return f"({','.join(map(str, value['shape']))})  {cut(str(rounded(value['values'])))}"
    return cut(str(rounded(value)))


def cut(text, most=240):
    return text if len(text) <= most else text[:most // 2] + " ..."


def rounded(x):
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.4g}")
    return x


def describe(exercise, case, yours, spec, error):  # -> lines
    lines = []
    for name, value in case.items():
        lines.append(f"    {name:12} {short_input(value)}")
    lines.append("  Yours")
    if error:
        lines.append(f"    {error}")
    wrong = [name for name in spec if error or not agree(yours.get(name), spec[name])]
    if not error:
        lines += [f"    {name:12} {short(yours.get(name))}" for name in wrong]
    if exercise.show_spec:
        lines.append("  Spec")
        lines += [f"    {name:12} {short(spec[name])}" for name in wrong]
    return lines


def short_input(value):
    try:
        return short(plain(value))
    except TypeError:
        return cut(repr(value))


def advise(exercise, found, yours, spec, error):  # -> a hint, or nothing
    returned = [value for values, _ in found if isinstance(values, dict) for value in values.values()]
    if returned and all(value is None for value in returned):
        return "nothing was returned: is there a `return`?"
    hint = recognise(exercise, found)
    if hint or error:
        return hint
    for name in spec:
        if not agree(yours.get(name), spec[name]):
            return general_hint(yours.get(name), spec[name])


def recognise(exercise, found):
    """The mistake, in words, that gives the same as the answer in the first case that differs, and in most others."""
    found = [yours for yours, _ in found[:len(exercise.cases)]]
    different = first_difference(exercise, exercise.cases, [(yours, "") for yours in found])
    best, most = "", 0
    for words, gave in usual_mistakes(exercise):
        agreeing = sum(map(same, found, gave))
        if different and gave[different[0]] and same(found[different[0]], gave[different[0]]) and agreeing > most:
            best, most = words, agreeing
    return best


@functools.cache
def usual_mistakes(exercise):  # -> [(in words, what it gives in the visible cases), ...]
    mistakes = []
    for words, *pieces in exercise.mistakes:
        try:
            wrong = mutant(exercise.solution, *pieces)
        except AssertionError:  # the shipped function has other words now: a hint less (slow_course.py complains)
            continue
        mistakes.append((words, [outcome(exercise, wrong, case)[0] for case in exercise.cases]))
    return mistakes


def same(a, b):
    return json.dumps(a) == json.dumps(b) or agree(a, b)  # nan is like nan here


WANTED = {
    "bool": "bools are wanted: as a mask, x[mask] takes numbers for places",
    "int": "whole numbers are wanted",
    "float": "numbers with a fraction are wanted (dtype float)",
}


def general_hint(yours, spec):
    """What can be said without knowing the exercise."""
    if yours is None:
        return "None was returned: does every way through the function end at a `return`?"
    if isinstance(yours, float) and isinstance(spec, float):
        yours, spec = plain(np.array(yours)), plain(np.array(spec))
    if not (isinstance(yours, dict) and isinstance(spec, dict) and "values" in yours and "values" in spec):
        return ""
    if yours["shape"] != spec["shape"]:
        return f"the shape is {tuple(yours['shape'])} and should be {tuple(spec['shape'])}"
    if yours["kind"] != spec["kind"]:
        return WANTED[spec["kind"]]
    a, b = (np.array(x["values"], dtype=float) for x in (yours, spec))
    if not np.isfinite(a).all():
        return "there is a nan or inf: was something divided by 0, or the logarithm of 0 taken (softmax, then log)?"
    if np.allclose(a, -b, atol=CLOSE):
        return "the sign is the wrong way round"
    factor = (a * b).sum() / max((b * b).sum(), CLOSE)
    if a.size > 1 and abs(factor) > CLOSE and np.allclose(a, factor * b, atol=CLOSE):
        return f"all numbers are {factor:.3g} times what they should be: what is it that you divide by?"
    for places in (1, -1):
        if a.ndim and np.allclose(np.roll(a, places, -1), b, atol=CLOSE):
            return "everything stands one place too far to one side"
    return ""
