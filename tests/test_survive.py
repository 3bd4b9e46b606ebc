"""A run is never lost, and never lies: the quick part of survive.py, nearly all of it inside this process."""
import copy
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import transformers

import plots
import ragen_mini as rm
import survive
from conftest import random_llama, save
from survive import assert_same, rows_of, saved_rows

SMALL = ("--model tiny --device cpu --env frozenlake --prompts 2 --rollouts 4 --update-size 4 --iterations 4 --save-every 2 "
         "--eval-every 3 --eval-prompts 2 --max-new-tokens 16 --max-turns 2").split()
ONE = ["--iterations", 1, "--eval-every", 0]
DAYS = [*SMALL, "--iterations", 10 ** 6, "--save-every", 10 ** 6]
OTHER = "--algo grpo --online-k 2 --starpo-s".split()


class Killed(BaseException):
    """The process dies here: nobody catches this."""


def train(*flags):
    return rm.train(rm.parse_config([str(flag) for flag in flags]))


def fails(*flags):  # -> what the user is told
    with pytest.raises(rm.UserError) as error:
        train(*flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def dies_in(monkeypatch, iteration):
    iterate = rm.iterate

    def mortal(i, *rest):
        if i == iteration:
            raise Killed
        return iterate(i, *rest)
    monkeypatch.setattr(rm, "iterate", mortal)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "curves", lambda runs: "no picture")
        train(*SMALL, "--out", out)
    assert all(row["updates"] for row in rows_of(out)[1:]), "each of its iterations trains"
    return out


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The same run, killed in iteration 4: it was saved after 2, its log and its samples go to 3."""
    out = tmp_path_factory.mktemp("half") / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        dies_in(patch, 4)
        train(*SMALL, "--out", out)
    assert len(rows_of(out)) == 4
    return out


@pytest.fixture
def run(half, tmp_path):
    """A copy of it, to be spoilt."""
    return shutil.copytree(half, tmp_path / "run")


# ----------------------------------------------------------------------------------------- killed and resumed
def test_a_killed_run_resumes_to_an_equal_run(run, whole):
    """Whatever became of the files beside trainer.pt: what they held at the save is in there, too."""
    for what, spoil in survive.HARMLESS.items():
        if what not in ("log with half a last line", "samples cut"):  # of these files one damage will do
            spoil(run)
    train("--resume", run)
    assert_same(run, whole)


def test_a_finished_run_only_reports_again_and_leaves_the_callers_config_alone(whole, tmp_path):
    """As in a notebook: no command line, but the Config of the run."""
    out = shutil.copytree(whole, tmp_path / "run")
    cfg = rm.Config(**rm.saved_state(out / "checkpoint")["config"] | {"resume": str(out)})
    before = copy.copy(cfg)
    assert rm.train(cfg) == rows_of(whole)
    assert cfg == before
    assert_same(out, whole)


def test_interrupt_in_a_notebook_keeps_what_was_trained(tmp_path, monkeypatch):
    """As a kernel does it: SIGINT while the cell runs. The rows come back, the handlers too, and the next cell can go on."""
    monkeypatch.setattr(rm.plots, "curves", lambda runs: "no picture")
    before = signal.default_int_handler  # a shell in the background may have switched it off
    signal.signal(signal.SIGINT, before)
    seen = []

    def watch(cfg, rows):
        seen.append(len(rows))
        if len(rows) == 1:
            os.kill(os.getpid(), signal.SIGINT)
    out = tmp_path / "run"
    rows = rm.train(rm.parse_config([*SMALL, "--out", str(out)]), watch)
    assert len(rows) == 2 and seen == [1, 2] and signal.getsignal(signal.SIGINT) is before
    assert len(train("--resume", out, "--iterations", 2)) == 3

    def twice(cfg, rows):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        rm.train(rm.parse_config([*SMALL, "--out", str(tmp_path / "twice")]), twice)
    assert signal.getsignal(signal.SIGINT) is before


def test_resuming_from_a_script_with_other_settings_is_refused(run):
    with pytest.raises(rm.UserError, match="parse_config"):
        rm.train(rm.Config(model="tiny", device="cpu", resume=str(run)))


# --------------------------------------------------------------------------------------- numbers that are not finite
@pytest.mark.parametrize("whose", ["policy", "critic"])
def test_a_poisoned_gradient_stops_before_the_step(run, whole, whose, monkeypatch):
    """One NaN, in iteration 4: nothing moved, Adam neither, and the run goes on from the state before."""
    clip, poisoned, calls = torch.nn.utils.clip_grad_norm_, [], []
    models = []
    load = rm.load_models
    monkeypatch.setattr(rm, "load_models", lambda cfg: models.append(load(cfg)) or models[-1])

    def poison(params, *rest):
        params = list(params)
        calls.append(1)
        if len(calls) == (7 if whose == "policy" else 8):  # two steps in iteration 3, then this; each clips both
            assert params[0] is next(getattr(models[0], whose).parameters())
            params[0].grad.view(-1)[0] = float("nan")
            poisoned.extend(copy.deepcopy([models[0].policy, models[0].critic, models[0].optimizer.state_dict()]))
        return clip(params, *rest)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", poison)
        told = fails("--resume", run)
    assert "not finite" in told and f"--resume {run}" in told
    for part, before in zip((models[0].policy, models[0].critic), poisoned):
        assert survive.equal(dict(part.state_dict()), dict(before.state_dict()))
    assert survive.equal(models[0].optimizer.state_dict()["state"], poisoned[2]["state"])
    if whose == "policy":
        train("--resume", run)
        assert_same(run, whole)


def test_an_error_stands_on_a_line_of_its_own(tmp_path, capsys, monkeypatch):
    """Not behind the progress bar, where nobody would find it."""
    monkeypatch.setattr(rm, "iterate", lambda i, models, cfg: rm.need(i == 0, "too hot") or ({"iteration": i}, [], []))
    fails(*SMALL, "--eval-every", 0, "--out", tmp_path / "run")
    assert capsys.readouterr().err.endswith("\n")


def test_weights_that_are_not_finite_stop_the_run(tmp_path):
    """One step of an iteration has a finite gradient, but is much too long: the next rollout sees it."""
    told = fails(*SMALL, "--lr", 1e9, "--update-size", 8, "--eval-every", 0, "--out", tmp_path / "run")
    assert "log-probability is not finite" in told and f"--resume {tmp_path / 'run'}" in told


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_return_that_is_not_finite_stops_the_run(tmp_path, random_folder, monkeypatch, algo):
    monkeypatch.setattr(rm, "FORMAT_PENALTY", float("nan"))
    told = fails(*SMALL, "--model", random_folder, "--algo", algo, "--eval-every", 0, "--out", tmp_path / "run")
    assert "a return is not finite" in told


# ------------------------------------------------------------------------------------------- damage, contradictions
def test_a_damaged_checkpoint_is_one_line_and_changes_nothing(half, tmp_path):
    for what, spoil in survive.ERRORS.items():
        run = shutil.copytree(half, tmp_path / what)
        spoil(run)
        told = fails("--resume", run)
        advice = "does not exist: nothing to go on with" if what.startswith("no ") else "put it back or start anew"
        assert advice in told and "trainer.pt" in told, (what, told)
        for name in ("log.jsonl", "samples.jsonl", "config.json"):
            assert what == "no folder" or (run / name).read_bytes() == (half / name).read_bytes(), what
    assert not Path("pwned").exists() and not (survive.ROOT / "pwned").exists(), "a pickle was executed"


def test_a_checkpoint_of_another_model_does_not_fit(half, run, tok, tmp_path):
    """The folder that --model named was replaced by a larger model."""
    state = torch.load(run / survive.TRAINER, weights_only=True)
    state["config"]["model"] = save(tmp_path / "other", random_llama(len(tok), hidden_size=16), tok)
    torch.save(state, run / survive.TRAINER)
    assert "does not fit the model: put it back or start anew" in fails("--resume", run)
    assert (run / "log.jsonl").read_bytes() == (half / "log.jsonl").read_bytes()


@pytest.mark.parametrize("flags", ["--env sokoban", "--seed 1", "--out x", "--model tiny", "--starpo-s"])
def test_resume_keeps_the_settings_of_the_run(half, flags):
    name = flags.split()[0][2:].replace("-", "_")
    assert fails("--resume", half, *flags.split()).endswith(f"cannot change {name}")


def test_fewer_iterations_than_were_done(half):
    assert "2 iterations already" in fails("--resume", half, "--iterations", 1)


def test_resume_with_a_lower_learning_rate(run):
    train("--resume", run, "--lr", "1e-9", "--iterations", 3)
    assert rm.parse_config(["--resume", str(run)]).lr == 1e-9, "it stays so"
    state = rm.saved_state(run / "checkpoint")
    policy, critic = state["optimizer"]["param_groups"]
    assert policy["lr"] == 1e-9 and critic["lr"] == state["config"]["critic_lr"] == 1e-3


# ---------------------------------------------------------------------------------- the parser, skips, the warning
def test_parser_takes_anything():
    assert survive.parser(count=4000, written=80) > 200


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_where_all_end_alike_nothing_is_updated(tmp_path, random_folder, algo, capsys):
    """A random model: all turns are malformed, all returns equal. No step, no change of weights, and it is said."""
    rows = train(*SMALL, *ONE, "--model", random_folder, "--algo", algo, "--lr", "1e-3", "--out", tmp_path / "run")
    start, end = [transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
                  for path in (random_folder, tmp_path / "run/checkpoint")]
    assert survive.equal(dict(start), dict(end))
    assert rows[1]["updates"] == rows[1]["kept"] == rows[1]["reward_std"] == 0 and "grad_norm" not in rows[1]
    assert "nothing to compare: 1" in capsys.readouterr().out


def test_one_rollout_a_prompt_is_no_reason_to_skip(tmp_path):
    rows = train(*SMALL, *ONE, "--rollouts", 1, "--out", tmp_path / "run")
    assert rows[1]["updates"] == 1


@pytest.mark.parametrize("valid, warned_at", [
    ([0.9] * 10 + [0.3] * 10, 14),  # 0.54 on average in rows 9 to 13, 0.42 in 10 to 14
    ([0.5] * 10 + [0.0] * 3, 13),
    ([0.2] * 5 + [0.6] * 10 + [0.2] * 5, 19),  # it had to learn its answers' form first
    ([0.9] * 10 + [0.51] * 10, None),
    ([0.1] * 20, None),  # malformed from the start: no collapse
    ([0.9] * 5 + [0.0] * 4, None)])  # too early to tell


def test_collapse_is_announced_once(valid, warned_at, capsys):
    """Fewer than half as many valid turns in the last five rows as in the best five."""
    rows = [{"iteration": 0}]
    for i, share in enumerate(valid, 1):
        rows.append({"iteration": i, "valid": share})
        rm.warn_of_trouble(rows, [])
    marked = [row["iteration"] for row in rows if "warning" in row]
    said = [line for line in capsys.readouterr().out.splitlines() if "collapse" in line]
    assert marked == ([warned_at] if warned_at else [])
    assert len(said) == len(marked) and all(f"iteration {warned_at}," in line for line in said)


def test_a_dead_run_ends_by_itself(tmp_path, monkeypatch, capsys):
    """From iteration 3 on nothing is updated. The tenth such iteration is the last: evaluated, saved, and final."""
    iterate = rm.iterate

    def dying(i, models, cfg):
        return iterate(i, models, cfg) if i < 3 else ({"iteration": i, "updates": 0}, [], [])
    monkeypatch.setattr(rm, "iterate", dying)
    out = tmp_path / "run"
    rows = train(*SMALL, "--iterations", 30, "--eval-every", 20, "--out", out)
    assert len(rows) == 13 and rows[-1]["dead"] and "eval" in rows[-1] and len(saved_rows(out)) == 13
    assert "dead" in capsys.readouterr().out and "Go on" not in capsys.readouterr().out
    assert train("--resume", out) == rows
