"""What a careless user did: each is right, or one line."""
import json
import shutil
import sys
import threading
from functools import partial

import pytest
import torch

import envs
import plots
import ragen_mini as rm
import runs
from conftest import rows_of


def one_line(function, *args, error=runs.UserError):  # -> the message
    with pytest.raises(error) as stop:
        function(*args)
    assert "\n" not in str(stop.value) and str(stop.value)
    return str(stop.value)


@pytest.fixture
def small(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ragen_mini.py"])
    monkeypatch.chdir(tmp_path)
    return rm.replace(cfg, env="bandit", prompts=2, rollouts=2, iterations=1, eval_every=0)


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A run of one iteration, made once."""
    out = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ragen_mini.py"])
        rm.train(rm.Config(model=folder, device="cpu", env="bandit", max_new_tokens=12, prompts=2, rollouts=2,
                           iterations=1, eval_every=0, lr=1e-3, critic_lr=1e-3, out=str(out)))
    return out


@pytest.fixture
def run(small, trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def resume(*more):
    return rm.train(rm.parse_config(["--resume", "run", "--iterations", "2", "--device", "cpu", *more]))


WORLD = """import envs
class Guess(envs.Env):
    split = False
    actions = ("Left", "Right")
    @staticmethod
    def draw(rng):
        return {"prize": "%s"}, "closed"
    def outcomes(self, state, action):
        return [(1.0, action, float(action == self.level["prize"]), True)]
    def won(self, state):
        return state == self.level["prize"]
    def render(self):
        return "# # #"
"""


def test_a_file_is_found_wherever_the_run_is_resumed(small, tmp_path, monkeypatch):
    """Another folder may have another environment in a file of the same name."""
    for name, prize in (("one", "Left"), ("two", "Right")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.py").write_text(WORLD % prize)
    monkeypatch.chdir(tmp_path / "one")
    rm.train(rm.replace(small, env="w.py:Guess", out="../run"))
    monkeypatch.chdir(tmp_path / "two")
    cfg = rm.parse_config(["--resume", "../run", "--iterations", "2", "--device", "cpu"])
    env = envs.make(cfg.env)
    env.reset(0)
    assert env.level["prize"] == "Left"
    rm.train(cfg)


def test_settings_that_are_missing_are_those_of_the_checkpoint(run):
    (run / "config.json").write_text(json.dumps({"env": "bandit"}))
    cfg = rm.parse_config(["--resume", "run", "--device", "cpu"])
    assert (cfg.prompts, cfg.rollouts, cfg.max_new_tokens) == (2, 2, 12)


@pytest.mark.parametrize("text", ["[1]", "null", "no", "{}", '{"env": "bandit", "filled": [3]}'])
def test_settings_that_are_no_settings(text, run):
    (run / "config.json").write_text(text)
    if text in ("{}", "null"):  # as if it were lost
        assert rm.parse_config(["--resume", "run"]).env == "bandit"
    else:
        one_line(rm.parse_config, ["--resume", "run"])
    (run / "checkpoint/config.json").write_text("[1]")
    assert not runs.is_tiny("run")


@pytest.mark.parametrize("name", ["policy", "critic"])
def test_a_checkpoint_without_a_network_is_not_mended_by_a_fresh_one(name, run):
    file = run / "checkpoint/trainer.pt"
    state = torch.load(file)
    del state[name]
    torch.save(state, file)
    assert name in one_line(resume)


@pytest.mark.parametrize("change", [dict(log=3), dict(log="no json\n"), dict(settings=[]), dict(settings={}),
                                    dict(optimizer=3)])
def test_a_damaged_trainer_is_one_line(change, run):
    file = run / "checkpoint/trainer.pt"
    torch.save(torch.load(file) | change, file)
    one_line(resume)


@pytest.mark.parametrize("text", ["1\n2\n", "no\n", "{}\n", "\udcff"])
def test_damaged_samples_do_not_keep_a_run_from_going_on(text, run):
    (run / "samples.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    resume()
    assert len(rows_of("run")) == 3


@pytest.mark.parametrize("argv", [["--resume", ""], ["--model", ""], ["--env", ""]])
def test_a_variable_that_is_not_set_is_named(argv, run, monkeypatch, capsys):
    monkeypatch.chdir(run)
    with pytest.raises(SystemExit):
        rm.parse_config(argv)
    assert argv[0] in capsys.readouterr().err.splitlines()[-1]


def test_play_and_eval_only_are_two_things():
    one_line(partial(rm.Config, play=3, eval_only=True))


def test_models_that_do_not_suit_the_settings(small, tmp_path):
    """Nothing is left behind by a run that did not begin."""
    for algo, other in (("ppo", "grpo"), ("grpo", "ppo")):
        models = rm.load_models(rm.replace(small, algo=other))
        one_line(rm.train, rm.replace(small, algo=algo, out="x"), models)
    assert not (tmp_path / "x").exists()


def test_a_folder_called_checkpoint_may_be_a_model(folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "project/checkpoint")
    assert runs.run_of(str(model)) is None
    rm.load_models(rm.Config(model=str(model), device="cpu", algo="grpo", kl_coef=0.0))


def test_two_threads_load_models(folder):
    found = []
    threads = [threading.Thread(target=lambda: found.append(rm.load_models(rm.Config(model=folder, device="cpu"))))
               for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for %}", "{{ 1 / 0 }}"])
def test_a_template_that_fails(template, tok):
    import copy
    tok = copy.deepcopy(tok)
    tok.chat_template = template
    one_line(rm.render, tok, "State:", False)


@pytest.mark.parametrize("env", ["m.py:envs", "m.py:five", "m.py:Wants", "m.py:Plain", None, 3, envs.Bandit()])
def test_what_is_no_environment_is_one_line(env, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("import envs\nfive = 5\nclass Plain: pass\nclass Wants(envs.Env):\n"
                                   "    def __init__(self, x): pass\n")
    one_line(envs.make, env, error=envs.EnvError)
    one_line(partial(rm.Config, env=env))


def test_a_mistake_in_the_file_of_an_environment_keeps_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("x = int('three')\n")
    with pytest.raises(ValueError, match="three") as error:
        rm.Config(env="bad.py:Mine")
    assert error.traceback[-1].path.name == "bad.py"


def test_a_run_of_a_class_is_not_told_how_to_go_on(small, capsys):
    rm.train(rm.replace(small, env=envs.Bandit, out="of_a_class"))
    assert "go on" not in capsys.readouterr().out


def test_commands_are_quoted(small, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my folder/recipes.py rloo"])
    monkeypatch.setattr(runs, "by_command_line", True)
    runs.print_next_steps(rm.replace(small, out="it's $HOME"), 1, dead=False)
    assert "python 'my folder/recipes.py' rloo --resume 'it'\"'\"'s $HOME'" in capsys.readouterr().out


def test_odd_names_and_rows_can_be_drawn(tmp_path, pictures):
    rows = [{"iteration": i, "success": 0.5, "updates": 1, "mine": "text", "eval": {"bandit": 0.5}} for i in range(3)]
    for name in ("x$_{a$", "_hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"env": "bandit"}')
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = {label: plots.load(folder) for label, folder in
              plots.labels_of([str(tmp_path / "x$_{a$"), str(tmp_path / "_hidden")]).items()}
    for draw in (plots.curves, plots.collapse, plots.online_k):
        draw(loaded, tmp_path / "out.png")
    assert list(loaded) == [r"x\$_{a\$", "hidden"]


@pytest.mark.parametrize("out", ["x", ".", "-", "picture.txt"])
def test_a_picture_has_an_ending(out, run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plots.py", "curves", "run", "--out", out])
    with pytest.raises(SystemExit):
        plots.main()
    assert "--out" in capsys.readouterr().err
