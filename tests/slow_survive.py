"""The slower part of slow_interrupted.py, a second or so each: .ci/run runs these behind the quick tests."""
import copy
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import transformers

import ragen_mini as rm
from slow_interrupted import half, run, whole  # noqa: F401 (fixtures)
from slow_interrupted import ONE, OTHER, SMALL, Killed, fails, settings, survive, train
from survive import assert_same, rows_of, saved, saved_rows


def test_stopped_by_a_signal_it_resumes_to_an_equal_run(tmp_path):
    """The signal comes in iteration 1: that is finished and saved. GRPO with two slices and a filter."""
    flags, out = f"{SMALL} {OTHER} --iterations 2 --eval-every 0", tmp_path / "stopped"
    train(f"{flags} --out {tmp_path}/whole")

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return rm.rollout(*args)
    assert len(train(f"{flags} --out {out}", rollout=interrupted)) == 2
    assert len(saved_rows(out)) == len(rows_of(out)) == 2
    train(f"--resume {out}")
    assert_same(out, tmp_path / "whole")


def test_a_closed_terminal_does_not_keep_the_run_from_saving(tmp_path, monkeypatch):
    """Ctrl-C in `python ragen_mini.py | tee log` ends tee, too: to whom should the run report?"""
    def nobody_listens(text):
        raise BrokenPipeError

    def learn(*args):
        monkeypatch.setattr(rm.tqdm, "write", nobody_listens)
        os.kill(os.getpid(), signal.SIGINT)
        return rm.learn(*args)
    train(f"{SMALL} --eval-every 1 --save-every 9 --out {tmp_path}/run", learn=learn)
    assert len(saved_rows(tmp_path / "run")) == 2


def test_the_reference_comes_from_the_checkpoint(folder, tmp_path):
    """The model that the run began with is replaced by another of the same shape: the KL penalty must not notice."""
    source = shutil.copytree(folder, tmp_path / "source")
    flags = f"{SMALL} --model {source} --lr 1e-3 --iterations 2 --eval-every 0"
    rows = train(f"{flags} --out {tmp_path}/whole")
    train(f"{flags} --iterations 1 --out {tmp_path}/run")
    other = transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(1.5)
    other.save_pretrained(source)
    assert train(f"--resume {tmp_path}/run --iterations 2")[2]["kl"] == rows[2]["kl"] != 0


def test_a_full_disk_leaves_the_last_checkpoint(run, whole):
    """No file may grow to the size of a checkpoint with Adam's state: a model can be written, trainer.pt cannot."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = (run / survive.TRAINER).read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 5000, limits[1]))
    try:
        told = fails(f"--resume {run}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"cannot save in {run}" in told
    assert (run / survive.TRAINER).read_bytes() == before
    train(f"--resume {run}")
    assert_same(run, whole)


def test_where_nothing_can_be_written_a_run_is_not_spoilt(run, whole, monkeypatch):
    """The disk is so full that --resume cannot even write the settings. With room again, it goes on."""
    write = Path.write_text

    def full(path, text, *rest):
        write(path, "")  # the old content is gone as soon as the file is opened
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(Path, "write_text", full)
        train(f"--resume {run}")
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


def dying(function, calls_left):
    """As the function, until the process dies: before one call more, or with half a file written by torch.save."""
    def call(*args, **named):
        nonlocal calls_left
        if calls_left == 0:
            if function is torch.save:
                Path(args[1]).write_bytes(b"PK\x03\x04")
            raise Killed
        calls_left -= 1
        return function(*args, **named)
    return function.__name__, call


@pytest.mark.parametrize("first", [True, False])
def test_whenever_a_save_dies_there_is_a_whole_checkpoint(first, whole, tmp_path, monkeypatch):
    """Either the old trainer.pt or the new one, never a part, and never one without a whole model beside it."""
    cfg = settings(f"--resume {whole}")
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    reader = copy.deepcopy(models)
    weight = next(models.policy.parameters()).detach()
    files = len(list(Path(whole, "checkpoint").iterdir()))  # after torch.save they are put in their place one by one
    moments = [(torch, torch.save, 0), *[(os, os.replace, n) for n in range(files)]]
    for number, (module, function, calls) in enumerate(moments):
        cfg.out = str(shutil.copytree(whole, tmp_path / str(number)))
        with open(Path(cfg.out, "log.jsonl"), "a") as log:
            log.write('{"iteration": 5}\n')
        checkpoint = Path(cfg.out, "checkpoint")
        if first:
            shutil.rmtree(checkpoint)
            checkpoint.mkdir()
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(module, *dying(function, calls))
            rm.save(models, cfg)
        if first and not (checkpoint / "trainer.pt").exists():
            continue
        state = saved(cfg.out)
        is_new = len(state["log"].splitlines()) == 6
        assert torch.equal(next(iter(state["policy"].values())), weight) == is_new
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        rm.restore(reader, rm.replace(cfg, resume=cfg.out))
    rm.save(models, cfg)
    assert len(saved_rows(cfg.out)) == 6
