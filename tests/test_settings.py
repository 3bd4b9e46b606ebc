"""Settings, their presets, the command line, and one table of users' mistakes."""
import json
import re
import runpy
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import pytest

import envs
import ragen_mini as rm
from conftest import ROOT, random_llama, refused, rows_of, save
from support import loading
from support import settings as settings_of
from test_train import bandit, copied, resumed  # noqa: F401 (fixtures)


def changed(one, other):  # -> names of the settings that differ
    one, other = asdict(one), asdict(other)
    return {name for name in one if one[name] != other[name]}


# ----------------------------------------------------------------------------- defaults, presets
TINY = {"iterations": 60, "minibatch_size": 8, "lr": 4e-4, "critic_lr": 1e-3,
        "max_new_tokens": 40, "eval_every": 10}
OTHERS = {"iterations": 200, "minibatch_size": 32, "lr": 1e-6, "critic_lr": 1e-5,
          "max_new_tokens": 400, "eval_every": 20}
STARPO = {"keep": 1.0, "kl_coef": 0.001, "clip_high": 0.2}
STARPO_S = {"keep": 0.25, "kl_coef": 0.0, "clip_high": 0.28}


@pytest.mark.parametrize("model, by_model", [("tiny", TINY), ("owner/name", OTHERS)])
@pytest.mark.parametrize("starpo_s, by_method", [(False, STARPO), (True, STARPO_S)])
def test_the_numbers_of_the_presets(model, by_model, starpo_s, by_method):
    """Those of the paper (Sec. 3.2, 4.2), for models of its kind, and those found for tiny."""
    cfg = rm.Config(model=model, starpo_s=starpo_s)
    for name, value in {**by_model, **by_method}.items():
        assert getattr(cfg, name) == value
    cfg = rm.Config(model=model, starpo_s=starpo_s, lr=0.5, keep=0.75, kl_coef=0.0)
    assert (cfg.lr, cfg.keep, cfg.kl_coef) == (0.5, 0.75, 0.0), "what is given is kept"


def test_defaults():
    """As the paper and its code have them (PPO)."""
    cfg = rm.Config(device="cpu", model="owner/name")
    assert (cfg.prompts, cfg.rollouts, cfg.minibatch_size, cfg.epochs) == (8, 16, 32, 1)
    assert (cfg.max_turns, cfg.max_actions_per_turn, cfg.max_actions) == (5, 5, 10)
    assert (cfg.temperature, cfg.entropy_coef, cfg.clip_low, cfg.online_k) == (1.0, 0.001, 0.2, 1)
    assert (cfg.gamma, cfg.lam, cfg.algo, cfg.adv_norm) == (1.0, 1.0, "ppo", "std")


def test_starpo_s_is_three_values_and_each_can_be_set_alone():
    base, s = rm.Config(device="cpu"), rm.Config(device="cpu", starpo_s=True)
    assert changed(base, s) == {"starpo_s", *STARPO_S}
    for flag, value in (("--keep", 0.5), ("--kl-coef", 0.01), ("--clip-high", 0.2)):
        one = rm.parse_config(["--starpo-s", "--device", "cpu", flag, str(value)])
        assert changed(s, one) == {flag[2:].replace("-", "_")}


# ------------------------------------------------------------------------------------ run, resume
def test_a_saved_config_has_plain_values_and_resume_takes_them_with_what_is_typed(bandit):
    out, _ = bandit
    config = json.loads((out / "config.json").read_text())
    assert config.keys() == {field.name for field in fields(rm.Config)}
    assert (config["keep"], config["kl_coef"], config["critic_lr"]) == (1.0, 0.001, 1e-3)
    again = rm.parse_config(["--resume", str(out), *"--iterations 9 --kl-coef 0.5".split()])
    assert asdict(again) == config | {
        "iterations": 9, "kl_coef": 0.5, "resume": str(out), "out": "", "device": again.device}


@pytest.mark.parametrize("name", ["", "/", "/checkpoint", "/checkpoint/"])
def test_a_run_as_model_is_its_model_and_hands_on_no_settings(name, bandit):
    out, _ = bandit
    cfg = rm.parse_config(["--model", f"{out}{name}"])
    assert changed(cfg, rm.Config()) == {"model"}, "those of tiny, because it was made from it"
    assert loading.weights_of(cfg.model) == out / "checkpoint"


@pytest.mark.parametrize("setting, value", [
    ("prompts", None), ("rollouts", 4.0), ("max_turns", 2.5), ("lr", "0.001"),
    ("no_think", "false"), ("gamma", [1]), ("critic_lrr", 0.5)])
def test_a_setting_that_makes_no_sense_in_config_json_is_named(setting, value, copied):
    """As somebody writes it there by hand."""
    file = copied / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {setting: value}))
    told = refused(rm.parse_config, ["--resume", str(copied)])
    assert re.search(setting.replace("_", "[-_]"), told)


# ------------------------------------------------------------------------------- the command line
def test_every_flag_is_a_switch():
    switches = [field.name for field in fields(rm.Config) if field.type is bool]
    assert switches == ["no_think", "starpo_s", "eval_only"]
    for name in switches:
        flag = settings_of.as_option(name)
        for given, value in (([flag], True), ([], False), ([flag, "false"], False)):
            assert getattr(rm.parse_config([*given, "--device", "cpu"]), name) is value


def test_numbers_and_options_may_be_short():
    assert rm.Config(temperature=3, kl_coef=0, device="cpu").temperature == 3
    assert rm.parse_config(["--iter", "5"]).iterations == 5


def test_help_shows_every_setting(capsys):
    with pytest.raises(SystemExit) as end:
        rm.parse_config(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    for field in fields(rm.Config):
        option = settings_of.as_option(field.name)
        assert re.search(rf"^  {option}( \[?\w+\]?)?\s+\w", text, re.MULTILINE), field.name


@pytest.mark.parametrize("flags, of_no_use", [
    ("--algo grpo --gamma 0.9", ["gamma"]),
    ("--adv-norm mean", ["adv-norm"]),
    ("--algo grpo --adv-norm mean", []),
    ("--success-rate 0.5 --lam 0.9", []),
    ("--env sokoban --success-rate 0.5", ["success-rate"]),
    ("--env bandit --algo grpo --lam 1 --critic-lr 1", ["critic-lr", "lam"])])
def test_a_setting_without_effect_is_told(flags, of_no_use, capsys):
    rm.parse_config(["--device", "cpu", *flags.split()])
    assert re.findall(r"^note: --(\S+) ", capsys.readouterr().out, re.MULTILINE) == of_no_use


# --------------------------------------------------------------------------------------- mistakes
MISTAKES = [  # what is given; what the user is told of
    ("--env chess", "--env"),
    ("--env chess", "frozenlake"),
    ("--env nowhere.py", "nowhere.py"),
    ("--env nowhere.py:Mine", "nowhere.py"),
    ("--env {world}:five", "five"),
    ("--env {world}:Plain", "envs.Env"),
    ("--env {world}:Wants", "arguments"),
    ("--env {world}:Missing", "Missing"),
    ("--env {world}:OneLevel", "OneLevel"),
    ("--env {world}:Endless", "--max-new-tokens"),
    ("--success-rate 1.5", "--success-rate"),
    ("--gamma 2", "--gamma"),
    ("--keep 7", "--keep"),
    ("--keep 0", "--keep"),
    ("--temperature 0", "--temperature"),
    ("--max-new-tokens 0", "--max-new-tokens"),
    ("--micro-tokens 0", "--micro-tokens"),
    ("--eval-prompts 300", "--eval-prompts"),
    ("--clip-high 1.28", "--clip-high"),
    ("--starpo-s --keep 1", "--keep"),
    ("--starpo-s --rollouts 1", "--rollouts"),
    ("--algo grpo --rollouts 1", "--rollouts"),
    ("--lr nan", "--lr"),
    ("--lr inf", "--lr"),
    ("--lr -1", "--lr"),
    ("--seed -1", "--seed"),
    ("--iterations -1", "--iterations"),
    ("--play -1", "--play"),
    ("--play 3 --eval-only", "--eval-only"),
    ("--algo dpo", "--algo"),
    ("--adv-norm max", "--adv-norm"),
    ("--device moon", "moon"),
    ("--model no/such-model", "no/such-model"),
    ("--model {tmp}/no", "empty/no"),
    ("--model {tmp}", "safetensors"),
    ("--model {base}", "chat template"),
    ("--model tiny --max-new-tokens 5000", "--max-new-tokens"),
    ("--out {file}/run", "file/run"),
    ("--max-actions 300 --max-actions-per-turn 60 --max-new-tokens 1", "--max-actions"),
    ("--resume {tmp}", "--resume"),
    ("--resume {tmp} --env bandit", "--resume"),
    ("--foo 1", "--foo"),
    ("--clip 0.1", "--clip-low"),
    ("--prompts two", "--prompts"),
    ("--lr 1e-4x", "--lr"),
    ("--filled 1", "--filled"),
    ("--no-think perhaps", "perhaps"),
    ("bandit", "--env bandit"),
    ("--resume=", "--resume"),  # a shell variable that is not set, perhaps
    ("--model=", "--model"),
    ("--env=", "--env"),
]
WORLD = """import envs
five = 5
class Plain: pass
class Wants(envs.FrozenLake):
    def __init__(self, size): pass
class OneLevel(envs.FrozenLake):
    split = True
    @staticmethod
    def draw(rng, *_):
        return {"goal": (0, 0), "holes": ()}, (1, 1)
class Endless(envs.FrozenLake):
    def render(self):
        return super().render() + " _" * 1000
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory, tok):
    """What MISTAKES name: an empty folder, a file, environments, a model that is not for chat."""
    tmp = tmp_path_factory.mktemp("places")
    (tmp / "empty").mkdir()
    (tmp / "file").touch()
    (tmp / "world.py").write_text(WORLD)
    base = save(tmp / "base", random_llama(len(tok)), tok)
    Path(base, "chat_template.jinja").unlink()
    return dict(tmp=tmp / "empty", file=tmp / "file", base=base, world=tmp / "world.py")


def command_line(*flags):  # as `python ragen_mini.py` would do it, but in this process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["ragen_mini.py", "--device", "cpu", *map(str, flags)])
        runpy.run_path(str(ROOT / "ragen_mini.py"), run_name="__main__")


@pytest.mark.parametrize("flags, names", MISTAKES)
def test_a_mistake_is_one_line_that_names_it(flags, names, places, tmp_path, capsys):
    """A text as exit code: Python prints it, and exits with 1. argparse exits with 2."""
    flags = flags.format(**places).split()
    out = () if "--out" in flags or "--resume" in flags else ("--out", tmp_path / "run")
    with pytest.raises(SystemExit) as end:
        command_line(*out, *flags)
    told = end.value.code
    if told == 2:
        *usage, told = capsys.readouterr().err.splitlines()
        assert len(usage) == 1
    assert names in told and "\n" not in told
    assert not (tmp_path / "run").exists(), "nothing is written"


@pytest.mark.parametrize("env", [None, 3, envs.Bandit()])
def test_what_is_no_environment_in_a_script_is_one_line_too(env):
    refused(partial(rm.Config, env=env))


def test_a_mistake_in_the_file_of_an_environment_keeps_its_place(tmp_path):
    (tmp_path / "bad.py").write_text("x = int('three')\n")
    with pytest.raises(ValueError, match="three") as error:
        rm.Config(env=f"{tmp_path}/bad.py:Mine")
    assert error.traceback[-1].path.name == "bad.py"


@pytest.mark.parametrize("text", ["1\n2\n", "no\n", "{}\n"])
def test_damaged_samples_do_not_keep_a_run_from_going_on(text, copied):
    (copied / "samples.jsonl").write_text(text)
    resumed(copied, *"--iterations 3 --eval-every 0".split())
    assert len(rows_of(copied)) == 4
