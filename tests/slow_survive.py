"""The slower part of test_survive.py, a second or so each: .ci/run runs these behind the quick tests."""
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
import survive
from survive import assert_same, rows_of, saved_rows
from test_survive import ONE, OTHER, SMALL, Killed, fails, half, run, train, whole  # noqa: F401 (three are fixtures)


def test_stopped_by_a_signal_it_resumes_to_an_equal_run(tmp_path, monkeypatch, capsys):
    """The signal comes in iteration 1: that is finished and saved. GRPO with two slices and a filter."""
    flags, out = [*SMALL, *OTHER, "--iterations", 2], tmp_path / "stopped"
    train(*flags, "--out", tmp_path / "whole")
    iterate = rm.iterate

    def interrupted(i, *rest):
        if i == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return iterate(i, *rest)
    with monkeypatch.context() as patch:
        patch.setattr(rm, "iterate", interrupted)
        assert len(train(*flags, "--out", out)) == 2
    assert len(saved_rows(out)) == len(rows_of(out)) == 2
    assert f"--resume {out}" in capsys.readouterr().out
    train("--resume", out)
    assert_same(out, tmp_path / "whole")


def test_a_closed_terminal_does_not_keep_the_run_from_saving(tmp_path, monkeypatch):
    """Ctrl-C in `python ragen_mini.py | tee log` ends tee, too: to whom should the run report?"""
    def nobody_listens(text):
        raise BrokenPipeError
    monkeypatch.setattr(rm.tqdm, "write", nobody_listens)

    def watch(cfg, rows):
        if len(rows) == 1:
            os.kill(os.getpid(), signal.SIGINT)
    rm.train(rm.parse_config([*SMALL, "--out", str(tmp_path / "run")]), watch)
    assert len(saved_rows(tmp_path / "run")) == 2


def test_the_reference_comes_from_the_checkpoint(folder, tmp_path):
    """The model that the run began with is replaced by another of the same shape: the KL penalty must not notice."""
    source = shutil.copytree(folder, tmp_path / "source")
    flags = [*SMALL, "--model", source, "--lr", "1e-3", "--iterations", 2, "--eval-every", 0]
    rows = train(*flags, "--out", tmp_path / "whole")
    train(*flags, "--iterations", 1, "--out", tmp_path / "run")
    other = transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(1.5)
    other.save_pretrained(source)
    assert train("--resume", tmp_path / "run", "--iterations", 2)[2]["kl"] == rows[2]["kl"] != 0


def test_a_full_disk_leaves_the_last_checkpoint(run, whole):
    """No file may grow to the size of a checkpoint with Adam's state: a model can be written, trainer.pt cannot."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = (run / survive.TRAINER).read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 5000, limits[1]))
    try:
        told = fails("--resume", run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot save" in told and f"--resume {run}" in told
    assert (run / survive.TRAINER).read_bytes() == before
    train("--resume", run)
    assert_same(run, whole)


def test_a_tokenizer_with_several_chat_templates_is_saved_again_and_again(folder, tok, tmp_path):
    source = shutil.copytree(folder, tmp_path / "source")
    several = transformers.AutoTokenizer.from_pretrained(source)
    several.chat_template = {"default": tok.chat_template, "tool_use": tok.chat_template}
    several.save_pretrained(source)
    train(*SMALL, *ONE, "--model", source, "--save-every", 1, "--out", tmp_path / "run")
    names = [path.name for path in (tmp_path / "run/checkpoint/additional_chat_templates").iterdir()]
    assert names == ["tool_use.jinja"]


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


# seven files of the model and trainer.pt are put in their place one by one, then a folder is removed
MOMENTS = [(torch, torch.save, 0), *[(os, os.replace, n) for n in range(8)], (shutil, shutil.rmtree, 0)]


@pytest.mark.parametrize("first", [True, False])
def test_whenever_a_save_dies_there_is_a_whole_checkpoint(first, whole, tmp_path, monkeypatch):
    """Either the old trainer.pt or the new one, never a part, and never one without a whole model beside it."""
    cfg = rm.Config(**rm.saved_state(whole / "checkpoint")["config"])
    models = rm.load_models(cfg)
    reader = copy.deepcopy(models)
    weight = next(models.policy.parameters()).detach()
    for number, (module, function, calls) in enumerate(MOMENTS):
        cfg.out = str(shutil.copytree(whole, tmp_path / str(number)))
        rm.append(cfg, "log.jsonl", {"iteration": 5})
        checkpoint = Path(cfg.out, "checkpoint")
        if first:
            shutil.rmtree(checkpoint)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(module, *dying(function, calls))
            rm.save(models, cfg)
        is_new = function is shutil.rmtree
        assert (checkpoint / "trainer.pt").exists() == (is_new or not first)
        if is_new or not first:
            state = rm.saved_state(checkpoint)
            assert len(state["logs"]["log.jsonl"].splitlines()) == (6 if is_new else 5)
            assert torch.equal(next(iter(state["policy"].values())), weight) == is_new
            transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
            cfg.resume = cfg.out
            rm.restore(reader, cfg)
