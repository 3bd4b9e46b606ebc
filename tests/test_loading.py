"""What is loaded is verified where it is loaded, and what does not suit is refused in one line."""
import importlib.metadata
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

import ragen_mini as rm
import runs
from conftest import random_llama, save
from extras import check_model


def refused(function, *args):  # -> the message, which must be one line
    with pytest.raises(runs.UserError) as stop:
        function(*args)
    message = str(stop.value)
    assert message and "\n" not in message
    return message


def test_an_adapter_is_no_model(folder, tmp_path):
    """It would load, with all weights frozen, play, and fail at the first step."""
    adapter = shutil.copytree(folder, tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text("{}")
    assert str(adapter) in refused(rm.load_models, rm.Config(model=str(adapter), device="cpu"))


def test_a_tokenizer_may_not_know_more_tokens_than_the_network(tok, tmp_path):
    for rows, ok in ((len(tok), True), (len(tok) + 5, True), (len(tok) - 2, False)):
        model = save(tmp_path / str(rows), random_llama(rows), tok)
        cfg = rm.Config(model=model, device="cpu", algo="grpo", kl_coef=0.0, max_new_tokens=40)
        if ok:
            rm.load_models(cfg)
        else:
            assert str(rows) in refused(rm.load_models, cfg)


@pytest.mark.parametrize("package", runs.OLDEST)
def test_versions_are_compared_before_anything_is_played(package, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0" if name == package else "99")
    assert package in refused(rm.load_models, rm.Config(device="cpu"))


def test_the_versions_that_are_required_are_allowed():
    runs.check_versions()


@pytest.mark.parametrize("device", ["gpu", "cuda0", "", "cpu:x", "tpu"])
def test_a_device_is_named(device):
    assert "--device" in refused(rm.load_models, rm.Config(device=device))


def test_a_model_that_is_nowhere_is_refused_at_once(monkeypatch):
    """One question to the hub, not fifty seconds of them."""
    asked = []

    def model_info(self, name, timeout):
        asked.append((name, timeout))
        raise OSError("no network\nat all")
    monkeypatch.setattr(runs.huggingface_hub.HfApi, "model_info", model_info)
    for name in ("owner/name", "name"):
        assert name in refused(rm.load_models, rm.Config(model=name, device="cpu"))
    assert [name for name, _ in asked] == ["owner/name", "name"] and all(timeout <= 10 for _, timeout in asked)
    refused(rm.load_models, rm.Config(model="/no/such/folder", device="cpu"))
    assert len(asked) == 2


def test_weights_are_fp32_whatever_the_file_holds(folder, tmp_path):
    """In bf16 a step of 1e-6 would vanish."""
    policy, tok = runs.load_policy(rm.Config(model=folder, device="cpu"))
    model = save(tmp_path / "bf16", policy.to(torch.bfloat16), tok)
    models = rm.load_models(rm.Config(model=model, device="cpu"))
    for network in (models.policy, models.critic, models.ref):
        weights = list(network.parameters())
        assert weights and all(weight.dtype == torch.float32 for weight in weights)
    assert all(weight.requires_grad for network in (models.policy, models.critic) for weight in network.parameters())


def test_words_that_a_model_does_not_know_are_told(capsys):
    """tiny cannot read the lake in words. It would silently win nothing."""
    cfg = rm.Config(env="extras/told_lake.py:ToldLake", device="cpu", algo="grpo", kl_coef=0.0)
    rm.load_models(cfg)
    assert "does not know" in capsys.readouterr().out
    rm.load_models(rm.Config(device="cpu", algo="grpo", kl_coef=0.0))
    assert "does not know" not in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- memory
def policy_of(layers, heads, width):
    config = SimpleNamespace(num_hidden_layers=layers, num_key_value_heads=heads, head_dim=width)
    return SimpleNamespace(config=config)


def test_as_many_episodes_as_have_room(monkeypatch):
    """30 layers, 3 heads of 64: keys and values of a token are 46,080 bytes in fp32."""
    cfg = rm.Config(device="cpu", max_new_tokens=400)
    of_an_episode = 46_080 * 5 * 600
    for quarter, episodes in ((1, 1), (2, 2), (3.9, 2), (4, 4), (70, 64), (0.2, 1)):
        monkeypatch.setattr(runs, "memory", lambda device: int(4 * quarter * of_an_episode) + 100)
        assert runs.episodes_at_once(policy_of(30, 3, 64), cfg) == episodes


def test_an_evaluation_plays_in_parts_that_fit(llama, tok, monkeypatch):
    played = []

    def play(seeds, models, cfg):
        played.append(len(seeds))
        return original(seeds[:1], models, cfg) * len(seeds)
    original = rm.play
    monkeypatch.setattr(rm, "play", play)
    monkeypatch.setattr(runs, "episodes_at_once", lambda policy, cfg: 8)
    cfg = rm.Config(env="bandit", device="cpu", eval_prompts=20, max_new_tokens=3)
    rm.evaluate(rm.Models(llama, None, None, None, tok), cfg)
    assert played == [8, 8, 4]


def fails(where, error):
    """A program whose function of that name fails."""
    namespace = {"error": error}
    exec(f"def {where}():\n    raise error\n", namespace)
    return namespace[where]


@pytest.mark.parametrize("kind, text", [
    (torch.OutOfMemoryError, "CUDA out of memory"), (MemoryError, ""),
    (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")])
@pytest.mark.parametrize("where, options", [
    ("evaluate", "--eval-prompts"), ("rollout", "--rollouts"), ("learn", "--max-turns"), ("load_models", "model")])
def test_when_memory_runs_out_it_says_what_was_too_large(kind, text, where, options):
    with pytest.raises(SystemExit) as stop, runs.one_line_errors():
        fails(where, kind(text))()
    assert options in str(stop.value) and "\n" not in str(stop.value)


def test_other_errors_of_torch_are_no_lack_of_memory():
    with pytest.raises(RuntimeError, match="size mismatch"), runs.one_line_errors():
        raise RuntimeError("size mismatch")


# ------------------------------------------------------------------------- settings and checkpoints
@pytest.fixture
def run(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ragen_mini.py"])
    monkeypatch.chdir(tmp_path)
    small = rm.replace(cfg, env="bandit", prompts=2, rollouts=2, iterations=1, eval_every=0, out="run")
    rm.train(small)
    return tmp_path / "run"


def test_a_lost_config_does_not_lock_out_a_sound_checkpoint(run):
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").unlink()
    rows, _ = rm.train(rm.parse_config(["--resume", "run", "--iterations", "2", "--device", "cpu"]))
    assert len(rows) == 3
    assert json.loads((run / "config.json").read_text()) == settings | {"iterations": 2}


def test_new_settings_of_a_resume_that_fails_are_not_kept(run, monkeypatch):
    before = (run / "config.json").read_text()

    def fail(*_):
        raise runs.UserError("a gradient is not finite")
    monkeypatch.setattr(rm, "learn", fail)
    refused(rm.train, rm.parse_config(["--resume", "run", "--lr", "1e14", "--iterations", "3", "--device", "cpu"]))
    assert (run / "config.json").read_text() == before


def test_the_checkpoint_of_another_run_is_refused(run, cfg):
    rm.train(rm.replace(cfg, env="bandit", prompts=2, rollouts=2, iterations=1, eval_every=0, seed=5, out="other"))
    shutil.copy("other/checkpoint/trainer.pt", run / "checkpoint")
    refused(rm.train, rm.parse_config(["--resume", "run", "--iterations", "2", "--device", "cpu"]))


def test_switches_can_be_switched_off(run, cfg):
    rm.train(rm.replace(cfg, env="bandit", no_think=True, prompts=2, rollouts=2, iterations=0, eval_every=0, out="brief"))
    assert rm.parse_config(["--model", "brief"]).no_think
    assert not rm.parse_config(["--model", "brief", "--no-think", "false"]).no_think


def test_settings_that_a_run_hands_on_are_told(run, capsys):
    """A learning rate and a seed of an old run, say, in an experiment that is thought to be a new one."""
    rm.parse_config(["--model", "run", "--env", "frozenlake"])
    told = capsys.readouterr().out
    for option in ("--lr", "--prompts 2", "--rollouts 2"):
        assert option in told
    for option in ("--env", "--seed", "--keep"):  # typed; as usual; from a preset
        assert option not in told


def test_a_template_with_the_date_is_told(folder, tmp_path, monkeypatch, capsys):
    """An evaluation cannot be repeated on another day."""
    model = shutil.copytree(folder, tmp_path / "dated")
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text())
    for name, told in ((model, True), (folder, False)):
        monkeypatch.setattr(sys, "argv", ["check_model.py", str(name), "--device", "cpu", "--env", "bandit"])
        check_model.main()
        assert ("date" in capsys.readouterr().out) is told
