"""A run is never lost, and never lies: interrupted, poisoned and damaged runs, in this process.

"The same" means: the rows of log.jsonl without their seconds, the bytes of model.safetensors and of
samples.jsonl, and every number in trainer.pt.
"""
import copy
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import ragen_mini as rm
from conftest import equal, random_llama, rows_of, save, untimed
from support import folder as folders
from support import loading
from support.errors import UserError
from test_train import files_of

SMALL = ("--model tiny --device cpu --env frozenlake --prompts 2 --rollouts 4 --minibatch-size 4 "
         "--iterations 4 --save-every 2 --eval-every 3 --eval-prompts 2 --max-new-tokens 16 "
         "--max-turns 2")
OTHER = "--algo grpo --online-k 2 --starpo-s"
ONE = "--iterations 1 --eval-every 0"
TRAINER = "checkpoint/trainer.pt"


class Killed(BaseException):
    """The process dies here: nobody catches this."""


def settings(flags):
    return rm.parse_config(flags.split())


def train(flags, callback=None):  # -> rows
    rows, _ = rm.train(settings(flags), callback=callback)
    return rows


def fails(flags, models=None):  # -> what the user is told
    with pytest.raises((UserError, OSError)) as error:
        rm.train(settings(flags), models)
    assert "\n" not in str(error.value)
    return str(error.value)


def saved(out):  # -> all that is in trainer.pt
    return torch.load(Path(out, TRAINER), weights_only=True)


def saved_rows(out):  # -> of the log that came with the last checkpoint
    return saved(out)["log"].splitlines()


def assert_same(one, other):  # the folders of two runs
    assert untimed(rows_of(one)) == untimed(rows_of(other))
    for name in ("checkpoint/model.safetensors", "samples.jsonl"):
        both = [Path(out, name) for out in (one, other)]
        assert both[0].exists() == both[1].exists()
        assert not both[0].exists() or both[0].read_bytes() == both[1].read_bytes(), name
    states = [saved(one), saved(other)]
    for out, state in zip((one, other), states):
        assert state.pop("log") == Path(out, "log.jsonl").read_text()
        del state["settings"]  # they name the folder
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        assert equal(states[0][name], states[1][name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(f"{SMALL} --out {out}")
    assert all(row["updates"] for row in rows_of(out)[1:]), "each of its iterations trains"
    return out


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The same run, killed in iteration 4. It was saved after 2, its log and samples go to 3."""
    def dies(row, *rest):
        if row["iteration"] == 4:
            raise Killed
    out = tmp_path_factory.mktemp("half") / "run"
    with pytest.raises(Killed):
        train(f"{SMALL} --out {out}", dies)
    assert len(rows_of(out)) == 4 and len(saved_rows(out)) == 3
    return out


@pytest.fixture
def run(half, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(half, tmp_path / "run")


# ----------------------------------------------------------------------------- killed, interrupted
def test_a_killed_run_resumes_to_the_same_run(run, whole):
    train(f"--resume {run}")
    assert_same(run, whole)


# ------------------------------------------------------------------------ saving that is cut short
def dying(function, calls_left):
    """As the function, until the process dies: before one call more, or, in torch.save, with half a
    file written.
    """
    def call(*args, **named):
        nonlocal calls_left
        if calls_left == 0:
            if function is torch.save:
                Path(args[1]).write_bytes(b"PK\x03\x04")
            raise Killed
        calls_left -= 1
        return function(*args, **named)
    return call


@pytest.mark.parametrize("first", [True, False])
def test_whenever_a_save_dies_there_is_a_whole_checkpoint(first, whole, tmp_path, monkeypatch):
    """Either the old trainer.pt or the new one, and never without a whole model beside it."""
    cfg = settings(f"--resume {whole}")
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    reader = copy.deepcopy(models)
    weight = next(models.policy.parameters()).detach()
    # After torch.save, files are put in their places one by one.
    files = len(list(Path(whole, "checkpoint").iterdir()))
    moments = [(torch, "save", 0), *[(os, "replace", done) for done in range(files)]]
    for number, (module, name, calls) in enumerate(moments):
        cfg.out = str(shutil.copytree(whole, tmp_path / str(number)))
        with open(Path(cfg.out, "log.jsonl"), "a") as log:
            log.write('{"iteration": 5}\n')
        checkpoint = Path(cfg.out, "checkpoint")
        if first:
            shutil.rmtree(checkpoint)
            checkpoint.mkdir()
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(module, name, dying(getattr(module, name), calls))
            folders.save(models, cfg)
        if first and not (checkpoint / "trainer.pt").exists():
            continue
        state = saved(cfg.out)
        is_new = len(state["log"].splitlines()) == 6
        assert torch.equal(next(iter(state["policy"].values())), weight) == is_new
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        folders.restore(reader, rm.replace(cfg, resume=cfg.out))
    folders.save(models, cfg)
    assert len(saved_rows(cfg.out)) == 6


def test_a_full_disk_leaves_the_last_checkpoint(run, whole):
    """A model can be written, but trainer.pt, with Adam's state, grows beyond what a file may have.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = (run / TRAINER).read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 5000, limits[1]))
    try:
        fails(f"--resume {run}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (run / TRAINER).read_bytes() == before
    train(f"--resume {run}")
    assert_same(run, whole)


def test_a_tokenizer_with_several_chat_templates_is_saved_again_and_again(folder, tok, tmp_path):
    source = shutil.copytree(folder, tmp_path / "source")
    several = transformers.AutoTokenizer.from_pretrained(source)
    several.chat_template = {"default": tok.chat_template, "tool_use": tok.chat_template}
    several.save_pretrained(source)
    train(f"{SMALL} {ONE} --model {source} --save-every 1 --out {tmp_path}/run")
    reloaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "run/checkpoint")
    assert reloaded.chat_template == several.chat_template


def test_weights_that_are_not_finite_stop_the_run(tmp_path):
    """A step has a finite gradient, but is much too long: the next rollout sees it."""
    flags = f"{SMALL} --lr 1e9 --minibatch-size 8 --eval-every 0"
    assert "--lr" in fails(f"{flags} --out {tmp_path}/run")


# ------------------------------------------------------------------------ damage, contradictions
def cut(name, share):
    def damage(run):
        content = Path(run, name).read_bytes()
        Path(run, name).write_bytes(content[:int(share * len(content))])
    return damage


def put(name, content):  # a Path: that file; else something to be pickled
    def damage(run):
        if isinstance(content, Path):
            shutil.copy(content, Path(run, name))
        else:
            torch.save(content, Path(run, name))
    return damage


def delete(name):
    return lambda run: Path(run, name).unlink()


def add(name, text):
    def damage(run):
        with open(run / name, "a") as file:
            file.write(text)
    return damage


def half_a_checkpoint(run):  # a process died while it wrote one
    shutil.copytree(run / "checkpoint", run / "checkpoint.new", dirs_exist_ok=True)
    for name in ("model.safetensors", "trainer.pt"):
        cut(f"checkpoint.new/{name}", 0.3)(run)


class Evil:  # unpickled, it would run a command
    def __reduce__(self):
        return os.system, ("touch pwned",)


MODEL = loading.TINY / "model.safetensors"
HARMLESS = {  # trainer.pt has it, too
    "log with half a last line": cut("log.jsonl", 0.97),
    "log with a false row": add("log.jsonl", '{"iteration": 99}\n'),
    "log not text": put("log.jsonl", MODEL),
    "no log": delete("log.jsonl"),
    "a checkpoint half written": half_a_checkpoint,
    "model.safetensors cut": cut("checkpoint/model.safetensors", 0.5),
    "samples with half a last line": add("samples.jsonl", '{"iteration": 3, "tur')}
FATAL = [  # the file that is damaged: how; --resume is one line then
    ("trainer.pt", cut(TRAINER, 0)),
    ("trainer.pt", cut(TRAINER, 0.999)),
    ("trainer.pt", put(TRAINER, MODEL)),
    ("trainer.pt", put(TRAINER, {"policy": Evil()})),
    ("trainer.pt", put(TRAINER, ["foreign"])),
    ("trainer.pt", put(TRAINER, {"log": ""})),
    ("run", delete(TRAINER)),
    ("config.json", delete("config.json")),
    ("config.json", cut("config.json", 0.5)),
    ("config.json", put("config.json", MODEL)),
    ("run", shutil.rmtree)]


@pytest.mark.parametrize("what", HARMLESS)
def test_whatever_became_of_the_files_beside_trainer_pt(what, run, whole):
    HARMLESS[what](run)
    train(f"--resume {run}")
    assert_same(run, whole)


@pytest.mark.parametrize("name, damage", FATAL)
def test_a_damaged_run_is_one_line_and_changes_nothing(name, damage, run):
    damage(run)
    before = files_of(run)
    told = fails(f"--resume {run}")
    assert name in told and str(run) in told
    assert {file: file.read_bytes() for file in before} == before
    assert not Path("pwned").exists(), "a pickle was executed"


def test_a_checkpoint_of_another_model_does_not_fit(run, tok, tmp_path):
    """The folder that --model named was replaced by a larger model."""
    config = json.loads((run / "config.json").read_text())
    config["model"] = save(tmp_path / "other", random_llama(len(tok), hidden_size=16), tok)
    (run / "config.json").write_text(json.dumps(config))
    log = (run / "log.jsonl").read_bytes()
    assert str(run) in fails(f"--resume {run}")
    assert (run / "log.jsonl").read_bytes() == log


def test_a_run_may_go_on_without_a_penalty_and_then_with_it_again(run):
    """The reference is the first model, kept in the checkpoint or loaded anew."""
    first = saved(run)["ref"]
    train(f"--resume {run} --kl-coef 0 --iterations 3")
    assert "ref" not in saved(run) and "kl" not in rows_of(run)[3]
    train(f"--resume {run} --kl-coef 0.001 --iterations 4")
    assert equal(saved(run)["ref"], first) and rows_of(run)[4]["kl"] != 0
