"""Models: which are loaded, with which weights, and which are refused in one line."""
import importlib.metadata
import shutil
from types import SimpleNamespace

import pytest
import torch

import ragen_mini as rm
from conftest import random_llama, refused, save
from support import device, errors, loading


def grpo(**settings):
    return rm.Config(**dict(device="cpu", algo="grpo", kl_coef=0.0) | settings)


def test_an_adapter_is_no_model(folder, tmp_path):
    """It would load, with all weights frozen, play, and fail at the first step."""
    adapter = shutil.copytree(folder, tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    assert "adapter" in refused(rm.load_models, grpo(model=str(adapter)))


def test_a_tokenizer_may_not_know_more_tokens_than_the_network(tok, tmp_path):
    for rows, ok in ((len(tok) + 5, True), (len(tok) - 2, False)):
        model = save(tmp_path / str(rows), random_llama(rows), tok)
        cfg = grpo(model=model, max_new_tokens=40)
        if ok:
            rm.load_models(cfg)
        else:
            assert str(rows) in refused(rm.load_models, cfg)


def test_a_model_without_a_layer_or_a_chat_template_is_refused(folder, tmp_path):
    """transformers would fill in random weights."""
    model = shutil.copytree(folder, tmp_path / "model")
    config = (model / "config.json").read_text()
    assert '"num_hidden_layers": 3' in config
    (model / "config.json").write_text(
        config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    assert "lack" in refused(rm.load_models, grpo(model=str(model)))
    (model / "config.json").write_text(config)
    (model / "chat_template.jinja").unlink()
    assert "chat template" in refused(rm.load_models, grpo(model=str(model)))


@pytest.mark.parametrize("package", loading.OLDEST)
def test_versions_are_compared_before_anything_is_played(package, monkeypatch):
    loading.check_versions()
    monkeypatch.setattr(importlib.metadata, "version",
                        lambda name: "1.0" if name == package else "99")
    assert package in refused(rm.load_models, grpo())


def test_a_model_that_is_nowhere_is_refused_at_once(monkeypatch):
    """One question to the hub, not fifty seconds of them."""
    asked = []

    def model_info(self, name, timeout):
        asked.append((name, timeout))
        raise OSError("no network\nat all")
    monkeypatch.setattr(loading.huggingface_hub.HfApi, "model_info", model_info)
    for name in ("owner/name", "name"):
        assert name in refused(rm.load_models, grpo(model=name))
    assert [name for name, _ in asked] == ["owner/name", "name"]
    assert all(timeout <= 10 for _, timeout in asked)
    refused(rm.load_models, grpo(model="/no/such/folder"))
    assert len(asked) == 2


def test_words_that_a_model_does_not_know_are_told(tmp_path, capsys):
    """It would silently win nothing."""
    file = tmp_path / "worded.py"
    file.write_text("import envs\nclass Worded(envs.FrozenLake):\n"
                    "    def render(self):\n"
                    "        return super().render().replace('P', 'wanderer')\n")
    for env, told in ((f"{file}:Worded", True), ("frozenlake", False)):
        rm.load_models(grpo(env=env))
        assert ("does not know" in capsys.readouterr().out) == told


def test_tiny_is_known_by_its_config_wherever_it_is(folder, random_folder):
    """Another model, as small, does not get its settings."""
    assert rm.Config(model=folder, device="cpu").lr == rm.Config(device="cpu").lr == 4e-4
    for model in (random_folder, "owner/tiny", "no/such/folder"):
        assert rm.Config(model=model, device="cpu").lr == 1e-6


def test_a_folder_called_checkpoint_may_be_a_model(folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "project/checkpoint")
    (tmp_path / "project/config.json").write_text("{}")
    rm.load_models(grpo(model=str(model)))
    assert loading.weights_of(str(model)) == model


# -------------------------------------------------------------------------- networks of one's own
def test_frozen_weights_are_refused_when_training_begins(llama, tok, cfg, tmp_path):
    """And models that do not suit the settings. Nothing is left behind by a run that did not begin.
    """
    cfg = rm.replace(cfg, algo="grpo", kl_coef=0.0, out=str(tmp_path / "run"))
    frozen = random_llama(len(tok)).requires_grad_(False)
    rm.check_policy(frozen, tok, cfg)
    assert "frozen" in refused(rm.train, cfg, rm.Models(frozen, None, None, None, tok))
    assert "critic" in refused(rm.train, rm.replace(cfg, algo="ppo"),
                               rm.Models(llama, None, None, None, tok))
    critic = rm.load_models(rm.replace(cfg, algo="ppo")).critic
    assert "critic" in refused(rm.train, cfg, rm.Models(llama, critic, None, None, tok))
    assert not (tmp_path / "run").exists()


class Empty(torch.nn.Linear):
    """As a container of modules may be."""
    def __len__(self):
        return 0


def test_a_network_whose_truth_is_false_is_a_network():
    policy, critic = Empty(1, 1), Empty(1, 1)
    models = rm.Models(policy, critic, None, None, None)
    assert models.trained() == [policy, critic]
    assert len(rm.make_optimizer(models, grpo()).param_groups) == 2
    rm.check_trainable(models, grpo(algo="ppo"))


# ------------------------------------------------------------------------------- device and memory
@pytest.mark.parametrize("name", ["gpu", "cuda0", "", "cpu:x", "cuda:77"])
def test_a_device_is_named(name):
    assert "--device" in refused(rm.load_models, grpo(device=name))


def test_as_many_episodes_as_have_room(monkeypatch):
    """30 layers, 3 heads of 64: keys and values of a token are 46,080 bytes in fp32."""
    config = SimpleNamespace(num_hidden_layers=30, num_key_value_heads=3, head_dim=64)
    cfg = grpo(max_new_tokens=400)
    of_an_episode = 46_080 * 5 * 600
    for quarter, episodes in ((1, 1), (2, 2), (3.9, 2), (4, 4), (70, 64), (900, 256), (0.2, 1)):
        monkeypatch.setattr(device, "memory", lambda name: int(4 * quarter * of_an_episode) + 100)
        assert device.episodes_at_once(SimpleNamespace(config=config), cfg) == episodes


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")])
def test_when_memory_runs_out_one_line_names_the_options(error):
    with pytest.raises(SystemExit) as stop, errors.one_line_errors():
        raise error
    assert "\n" not in stop.value.code
    for option in ("--prompts", "--rollouts", "--micro-tokens", "--max-new-tokens"):
        assert option in stop.value.code
    with pytest.raises(RuntimeError, match="size mismatch"), errors.one_line_errors():
        raise RuntimeError("size mismatch")
