"""A run is never lost, and never lies: the quick part of extras/survive.py, all of it inside this process."""
import copy
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import transformers

import envs
import plots
import ragen_mini as rm
from conftest import ROOT, random_llama, save

sys.path.insert(0, str(ROOT / "extras"))
import survive
from survive import assert_same, rows_of, saved_rows

SMALL = ("--model tiny --device cpu --env frozenlake --prompts 2 --rollouts 4 --update-size 4 --iterations 4 "
         "--save-every 2 --eval-every 3 --eval-prompts 2 --max-new-tokens 16 --max-turns 2")
ONE = "--iterations 1 --eval-every 0"
DAYS = f"{SMALL} --iterations 1000000 --save-every 1000000"
OTHER = "--algo grpo --online-k 2 --starpo-s"


class Killed(BaseException):
    """The process dies here: nobody catches this."""


def settings(flags):
    return rm.parse_config(flags.split())


def train(flags, **seams):  # -> rows
    rows, _ = rm.train(settings(flags), **seams)
    return rows


def fails(flags, **seams):  # -> what the user is told
    with pytest.raises(envs.UserError) as error:
        train(flags, **seams)
    assert "\n" not in str(error.value)
    return str(error.value)


def dies_in(iteration):  # a watch: the row of this iteration is not logged any more
    def watch(row, *rest):
        if row["iteration"] == iteration:
            raise Killed
    return watch


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "curves", lambda runs: "no picture")
        train(f"{SMALL} --out {out}")
    assert all(row["updates"] for row in rows_of(out)[1:]), "each of its iterations trains"
    return out


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The same run, killed in iteration 4: it was saved after 2, its log and its samples go to 3."""
    out = tmp_path_factory.mktemp("half") / "run"
    with pytest.raises(Killed):
        train(f"{SMALL} --out {out}", watch=dies_in(4))
    assert len(rows_of(out)) == 4 and len(saved_rows(out)) == 3
    return out


@pytest.fixture
def run(half, tmp_path):
    """A copy of it, to be spoilt."""
    return shutil.copytree(half, tmp_path / "run")


# ----------------------------------------------------------------------------------------- killed and resumed
def test_a_killed_run_resumes_to_an_equal_run(run, whole):
    """Rows and weights are equal, bit by bit. Evaluations that are made again are told again."""
    train(f"--resume {run}")
    assert_same(run, whole)
    assert not survive.lacks_samples(run, whole)


def test_whatever_became_of_the_files_beside_trainer_pt(run, whole):
    """What they held at the save is in there, too."""
    for what, spoil in survive.HARMLESS.items():
        if what not in ("no log", "no samples"):  # later ones want to damage them
            spoil(run)
    train(f"--resume {run}")
    assert_same(run, whole)


def test_a_finished_run_says_so_and_nothing_changes(whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "run")
    cfg = settings(f"--resume {out}")
    before = copy.copy(cfg)
    with pytest.raises(envs.UserError, match="is finished .4 iterations.: raise --iterations"):
        rm.train(cfg)
    assert cfg == before
    assert_same(out, whole)


def test_nothing_is_overwritten(half, tmp_path):
    """A second run of the same name gets a folder of its own."""
    out = shutil.copytree(half, tmp_path / "run")
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    train(f"{SMALL} {ONE} --out {out}")
    assert len(rows_of(tmp_path / "run-2")) == 2
    assert before == {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}


def test_interrupt_in_a_notebook_keeps_what_was_trained(tmp_path, monkeypatch):
    """As a kernel does it: SIGINT while the cell runs. The rows come back, and the next cell can go on."""
    monkeypatch.setattr(plots, "curves", lambda runs: "no picture")
    before = signal.default_int_handler  # a shell in the background may have switched it off
    signal.signal(signal.SIGINT, before)
    seen = []

    def watch(row, *rest):
        seen.append(row["iteration"])
        if row["iteration"] == 1:
            os.kill(os.getpid(), signal.SIGINT)
    out = tmp_path / "run"
    assert len(train(f"{SMALL} --out {out}", watch=watch)) == 3, "in `watch` processes agree whether to go on: it is too late then"
    assert seen == [0, 1, 2] and signal.getsignal(signal.SIGINT) is before
    assert len(train(f"--resume {out} --iterations 3")) == 4, "an old signal does not stop it"


def test_a_second_interrupt_does_not_wait(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def watch(row, *rest):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        seen.append(row)
    with pytest.raises(KeyboardInterrupt):
        train(f"{SMALL} --out {tmp_path}/run", watch=watch)
    assert not seen and signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupted_program_ends_as_shells_expect(times, tmp_path, monkeypatch):
    """Also a script that trains by a function of its own."""
    def own(cfg):
        rm.STOP.append(signal.SIGINT)
        if times == 2:
            raise KeyboardInterrupt
    monkeypatch.setattr(sys, "argv", ["mine.py", "--env", "bandit"])
    with pytest.raises(SystemExit) as stopped:
        rm.main(own)
    rm.STOP.clear()
    assert stopped.value.code == 130


# --------------------------------------------------------------------------------------- numbers that are not finite
@pytest.mark.parametrize("whose", ["policy", "critic"])
def test_a_poisoned_gradient_stops_before_the_step(run, whole, whose):
    """NaN, in iteration 4: nothing moved, Adam neither, and the run goes on from the state before."""
    cfg = settings(f"--resume {run}")
    models = rm.load_models(cfg)
    before = []

    def learn(trajs, models, cfg, seed):
        before[:] = copy.deepcopy([models.policy, models.critic, models.optimizer])
        if len(rows_of(run)) == 4:
            weight = next(getattr(models, whose).parameters())
            weight.register_hook(lambda gradient: float("nan") * gradient)
        return rm.learn(trajs, models, cfg, seed)
    with pytest.raises(envs.UserError, match="finite.*--resume"):
        rm.train(cfg, models, learn=learn)
    assert len(rows_of(run)) == 4
    for part, old in zip((models.policy, models.critic, models.optimizer), before):
        assert survive.equal(dict(part.state_dict()), dict(old.state_dict()))
    if whose == "policy":
        train(f"--resume {run}")
        assert_same(run, whole)


def test_weights_that_are_not_finite_stop_the_run(tmp_path):
    """One step of an iteration has a finite gradient, but is much too long: the next rollout sees it."""
    told = fails(f"{SMALL} --lr 1e9 --update-size 8 --eval-every 0 --out {tmp_path}/run")
    assert "finite" in told and "--resume" in told


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_return_that_is_not_finite_stops_the_run(tmp_path, random_folder, monkeypatch, algo):
    monkeypatch.setattr(rm, "FORMAT_PENALTY", float("nan"))
    told = fails(f"{SMALL} --model {random_folder} --algo {algo} --eval-every 0 --out {tmp_path}/run")
    assert "finite" in told
    assert len(rows_of(tmp_path / "run")) == 1


# ------------------------------------------------------------------------------------------- damage, contradictions
@pytest.mark.parametrize("what", survive.ERRORS)
def test_a_damaged_run_is_one_line_and_changes_nothing(what, half, tmp_path):
    run = shutil.copytree(half, tmp_path / "run")
    survive.ERRORS[what](run)
    left = [file for file in run.rglob("*") if file.is_file()] if run.exists() else []
    before = {file: file.read_bytes() for file in left}
    told = fails(f"--resume {run}")
    named = [word for word in ("config.json", "trainer.pt") if word in what]
    assert str(run) in told and all(word in told for word in named or ["no such run, with checkpoint"])
    for file, content in before.items():
        assert file.read_bytes() == content, file
    assert not Path("pwned").exists() and not (ROOT / "pwned").exists(), "a pickle was executed"


def test_a_checkpoint_of_another_model_does_not_fit(half, run, tok, tmp_path):
    """The folder that --model named was replaced by a larger model."""
    about = json.loads((run / "config.json").read_text())
    about["model"] = save(tmp_path / "other", random_llama(len(tok), hidden_size=16), tok)
    (run / "config.json").write_text(json.dumps(about))
    assert "trainer.pt is unusable (never saved: begin anew; else try --model RUN)" in fails(f"--resume {run}")
    assert (run / "log.jsonl").read_bytes() == (half / "log.jsonl").read_bytes()


def test_fewer_iterations_than_were_done_lose_nothing(run):
    before = rows_of(run)
    with pytest.raises(envs.UserError, match="is finished .* raise"):
        train(f"--resume {run} --iterations 1")
    assert rows_of(run) == before and len(saved_rows(run)) == 3 and settings(f"--resume {run}").iterations > 1


def test_resume_with_a_lower_learning_rate(run):
    train(f"--resume {run} --lr 1e-9 --iterations 3")
    assert settings(f"--resume {run}").lr == 1e-9, "it stays so"
    policy, critic = survive.saved(run)["optimizer"]["param_groups"]
    assert policy["lr"] == 1e-9 and critic["lr"] == settings(f"--resume {run}").critic_lr == 1e-3


def test_a_run_may_go_on_without_a_penalty_and_then_with_it_again(run):
    """The reference is the first model, kept in the checkpoint or loaded anew."""
    first = survive.saved(run)["ref"]
    train(f"--resume {run} --kl-coef 0 --iterations 3")
    assert "ref" not in survive.saved(run) and "kl" not in rows_of(run)[3]
    train(f"--resume {run} --kl-coef 0.001 --iterations 4")
    assert survive.equal(survive.saved(run)["ref"], first) and rows_of(run)[4]["kl"] != 0


# ------------------------------------------------------------------------------------------------ the parser, skips
def test_parser_takes_anything():
    assert survive.parser(count=4000, written=80) > 200


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_where_all_end_alike_nothing_is_updated(tmp_path, random_folder, algo):
    """A random model: all turns are malformed, all returns equal. No step, no change of weights."""
    rows = train(f"{SMALL} {ONE} --model {random_folder} --algo {algo} --lr 1e-3 --out {tmp_path}/run")
    start, end = [transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
                  for path in (random_folder, tmp_path / "run/checkpoint")]
    assert survive.equal(dict(start), dict(end))
    assert rows[1]["updates"] == rows[1]["reward_std"] == 0 and "grad_norm" not in rows[1]


def test_one_rollout_a_prompt_is_no_reason_to_skip(tmp_path):
    rows = train(f"{SMALL} {ONE} --rollouts 1 --prompts 8 --update-size 8 --out {tmp_path}/run")
    assert rows[1]["updates"] == 1


def test_a_dead_run_ends_by_itself(tmp_path):
    """From iteration 3 on nothing is updated. The tenth such iteration is the last: evaluated and saved."""
    calls = []

    def learn(trajs, models, cfg, seed):
        calls.append(seed)
        return rm.learn(trajs, models, cfg, seed) if len(calls) < 3 else ({}, [])
    out = tmp_path / "run"
    rows = train(f"{SMALL} --iterations 30 --eval-every 20 --out {out}", learn=learn)
    assert [row.get("updates") for row in rows] == [None, 2, 2] + [0] * 10
    assert "eval" in rows[-1] and len(saved_rows(out)) == 13
