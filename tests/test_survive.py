"""A small part of survive.py, with a model taught for seconds, mostly in this process; and skipped updates, the warning."""
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import plots
import ragen_mini as rm
import survive
from conftest import random_llama


def train(*flags):
    return rm.train(rm.parse_config([str(flag) for flag in flags]))


def fails(capsys, *flags):  # -> the one line on stderr
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        train(*flags)
    line, = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if line.strip() and "it/s" not in line
             and "%|" not in line]
    assert stop.value.code == 2
    return line


@pytest.fixture(scope="module")
def flags(folder):
    return ["--env", "frozenlake", *survive.SMALL, "--model", folder]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):  # a run that nothing happened to
    out = tmp_path_factory.mktemp("whole") / "run"
    train(*flags, "--out", out)
    assert any(row["updates"] for row in plots.load(out)[1][1:])
    return out


@pytest.fixture(scope="module")
def half(flags, whole, tmp_path_factory):  # one that was killed by SIGKILL while its third checkpoint was written
    out = tmp_path_factory.mktemp("half") / "run"
    process = survive.start(*flags, "--out", out)
    while process.poll() is None and not ((out / "checkpoint.new").exists() and survive.logged(out) > 4):
        time.sleep(0.0005)
    process.kill()
    survive.finish(process)
    assert 4 < survive.logged(out) < 7
    return out


@pytest.fixture
def copy(half, tmp_path):
    return shutil.copytree(half, tmp_path / "copy")


def test_a_run_killed_while_it_saves_resumes_to_an_equal_run(copy, whole):
    train("--resume", copy)
    assert not survive.same(copy, whole), survive.same(copy, whole)
    rows = plots.load(copy)[1]
    assert [row["iteration"] for row in rows] == [*range(7)]
    train("--resume", copy)  # a finished run only reports again
    assert plots.load(copy)[1] == rows and not survive.same(copy, whole)


@pytest.mark.parametrize("setting", ["--algo grpo", "--algo ppo --online-k 2", "--algo grpo --online-k 2 --starpo-s"])
def test_stopped_after_any_iteration_it_resumes_to_an_equal_run(flags, setting, tmp_path, monkeypatch):
    train(*flags, *setting.split(), "--out", tmp_path / "whole")
    statistics, calls, out = plots.statistics, [], tmp_path / "stopped"

    def stop(*args):  # as if SIGTERM came in every second iteration
        calls.append(signal.SIGTERM)
        rm.STOP[:] = calls[:len(calls) % 2]
        return statistics(*args)
    monkeypatch.setattr(plots, "statistics", stop)
    for i in (1, 3, 5):
        with pytest.raises(SystemExit) as end:
            train(*(["--resume", out] if i > 1 else [*flags, *setting.split(), "--out", out]))
        assert end.value.code == 128 + signal.SIGTERM and len(plots.load(out)[1]) == i + 1
    train("--resume", out)
    assert not survive.same(out, tmp_path / "whole"), survive.same(out, tmp_path / "whole")


def test_ctrl_c_ends_a_run_with_a_command_to_go_on(flags, whole, tmp_path):
    out, number = tmp_path / "run", signal.SIGINT
    process = survive.start(*flags, "--iterations", 200, "--out", out)
    while process.poll() is None and not survive.logged(out):
        time.sleep(0.001)
    process.send_signal(number)
    code, said, lines = survive.finish(process)
    assert code == 128 + number and f"--resume {out}" in said and not lines, (code, said, lines)
    train("--resume", out, "--iterations", 6)
    assert not survive.same(out, whole), survive.same(out, whole)


def test_a_full_disk_leaves_the_last_checkpoint(flags, whole, tmp_path):
    """No file may grow to the size of a checkpoint with Adam's state: the first one, without, is written, the next one fails."""
    limit, out = (whole / "checkpoint/trainer.pt").stat().st_size - 5000, tmp_path / "run"
    result = survive.run(*flags, "--out", out, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    survive.one_line(result, "cannot save", f"--resume {out}")
    rm.transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    train("--resume", out)
    assert not survive.same(out, whole), survive.same(out, whole)


@pytest.mark.parametrize("call", [6, 9])  # the critic's gradient, the policy's: they take turns
def test_a_poisoned_gradient_stops_before_the_step(flags, whole, call, tmp_path, monkeypatch, capsys):
    real, calls, poisoned, out = torch.nn.utils.clip_grad_norm_, [], [], tmp_path / "run"

    def clip(params, *args):
        params = list(params)
        calls.append(1)
        if len(calls) == call:
            params[0].grad.view(-1)[0] = float("nan")
            poisoned.extend((p, p.detach().clone()) for p in params)
        return real(params, *args)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    line = fails(capsys, *flags, "--out", out)
    assert "not finite" in line and f"--resume {out}" in line
    assert poisoned and all(torch.equal(p, before) for p, before in poisoned), "no step was made"
    train("--resume", out)
    assert not survive.same(out, whole), survive.same(out, whole)


def test_weights_that_are_not_finite_stop_the_run(flags, tmp_path, capsys):
    line = fails(capsys, *flags, "--batch", 8, "--lr", 1e9, "--out", tmp_path / "run")  # finite gradients, one step each
    assert "log-prob is not finite" in line and f"--resume {tmp_path / 'run'}" in line


def test_the_reference_comes_from_the_checkpoint(flags, whole, tok, folder, tmp_path):
    """The model that the run began with is replaced by another of the same shape: the KL penalty must not notice."""
    source, out = shutil.copytree(folder, tmp_path / "source"), tmp_path / "run"
    train(*flags[:-1], source, "--iterations", 3, "--out", out)
    other = rm.transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(1.5)
    other.save_pretrained(source)
    rows = train("--resume", out, "--iterations", 6)
    assert rows[6]["kl"] == plots.load(whole)[1][6]["kl"]


def test_ctrl_c_that_ends_tee_too_loses_nothing(flags, whole, tmp_path):
    """Nobody reads stdout any more when the signal comes, and the iteration that is finished has an evaluation to print."""
    out = tmp_path / "run"
    process = survive.subprocess.Popen([survive.sys.executable, str(survive.ROOT / "ragen_mini.py"), *flags, "--eval-every", "1",
                                        "--iterations", "200", "--out", str(out)], stdout=survive.subprocess.PIPE,
                                       stderr=survive.subprocess.DEVNULL)
    while process.poll() is None and survive.logged(out) < 2:
        time.sleep(0.001)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    process.wait()
    saved = torch.load(out / "checkpoint/trainer.pt", weights_only=True)
    assert len(saved["log.jsonl"].splitlines()) == survive.logged(out) >= 2


def test_a_tokenizer_with_several_chat_templates_is_saved_again_and_again(flags, tok, folder, tmp_path):
    source = shutil.copytree(folder, tmp_path / "source")
    several = rm.transformers.AutoTokenizer.from_pretrained(source)
    several.chat_template = {"default": tok.chat_template, "tool_use": tok.chat_template}
    several.save_pretrained(source)
    train(*flags[:-1], source, "--out", tmp_path / "run")
    assert [path.name for path in (tmp_path / "run/checkpoint/additional_chat_templates").iterdir()] == ["tool_use.jinja"]


def test_resume_in_a_notebook(copy, whole):
    cfg = rm.Config(**plots.load(copy)[0] | {"resume": str(copy)})
    rm.train(cfg)
    assert not survive.same(copy, whole) and cfg.resume == str(copy), "the caller's Config is left alone"


def test_fewer_iterations_than_were_done(copy, capsys):
    assert "iterations already" in fails(capsys, "--resume", copy, "--iterations", 1)


def test_a_return_that_is_not_finite_stops_the_run(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rm, "FORMAT_PENALTY", float("nan"))
    for algo in ("ppo", "grpo"):
        assert "not finite" in fails(capsys, *flags, "--algo", algo, "--out", tmp_path / algo)


def cut(name, share):
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[:int((run / name).stat().st_size * share)])


def edit(old, new):
    return lambda run: (run / "config.json").write_text((run / "config.json").read_text().replace(old, new))


@pytest.mark.parametrize("spoil, says", [
    (cut("checkpoint/trainer.pt", 0.6), "start anew"), (cut("checkpoint/trainer.pt", 0), "start anew"),
    (lambda run: (run / "checkpoint/trainer.pt").unlink(), "start anew"),
    (lambda run: torch.save({"policy": survive.Evil()}, run / "checkpoint/trainer.pt"), "start anew"),
    (lambda run: torch.save({"config": {}}, run / "checkpoint/trainer.pt"), "start anew"),
    (lambda run: torch.save(["foreign"], run / "checkpoint/trainer.pt"), "start anew"),
    (edit('"seed": 0', '"seed": 1'), "not that of its checkpoint"), (edit('"gamma": 1.0', '"gamma": 0.9'), "not that of its checkpoint"),
    (edit('"lam"', '"lambda"'), "another version"), (cut("config.json", 0.5), "damaged"), (cut("config.json", 0), "damaged"),
    (lambda run: (run / "config.json").unlink(), "not the folder of a run"), (shutil.rmtree, "not the folder of a run")])
def test_damage_is_one_line(copy, spoil, says, capsys):
    before = (copy / "log.jsonl").read_bytes()
    spoil(copy)
    assert says in fails(capsys, "--resume", copy) and not Path("pwned").exists()
    assert not copy.exists() or (copy / "log.jsonl").read_bytes() == before, "nothing was changed"


@pytest.mark.parametrize("spoil", [cut("log.jsonl", 0.97), cut("log.jsonl", 0), cut("samples.jsonl", 0.5),
                                   lambda run: (run / "samples.jsonl").unlink(), cut("checkpoint/model.safetensors", 0.5)])
def test_what_the_checkpoint_holds_is_restored(copy, whole, spoil):
    spoil(copy)
    train("--resume", copy)
    assert not survive.same(copy, whole), survive.same(copy, whole)


def test_a_trainer_of_another_model_does_not_fit(copy, tok, flags, tmp_path, capsys):
    """The same settings, other weights: the folder that --model names was replaced."""
    path = tmp_path / "model"
    for part in (random_llama(len(tok), hidden_size=16), tok):
        part.save_pretrained(path)
    edit(flags[-1], str(path))(copy)
    assert "not that of its checkpoint" in fails(capsys, "--resume", copy)
    state = torch.load(copy / "checkpoint/trainer.pt", weights_only=True)
    torch.save(state | {"config": state["config"] | {"model": str(path)}}, copy / "checkpoint/trainer.pt")
    assert "start anew" in fails(capsys, "--resume", copy)


@pytest.mark.parametrize("given", [["--env", "sokoban"], ["--seed", 1], ["--algo", "grpo"], ["--out", "x"], ["--model", "tiny"]])
def test_resume_keeps_the_settings_of_the_run(copy, given, capsys):
    assert fails(capsys, "--resume", copy, *given).endswith(f"cannot change {given[0][2:]}")


def test_resume_with_a_lower_learning_rate(copy):
    train("--resume", copy, "--lr", "1e-9", "--iterations", 5)
    assert plots.load(copy)[0]["lr"] == 1e-9 and rm.parse_config(["--resume", str(copy)]).lr == 1e-9
    groups = torch.load(copy / "checkpoint/trainer.pt", weights_only=True)["optimizer"]["param_groups"]
    assert groups[0]["lr"] == 1e-9 and groups[1]["lr"] == plots.load(copy)[0]["critic_lr"]


def test_killed_before_anything_was_trained_it_starts_again(flags, whole, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    shutil.copy(whole / "config.json", out)
    (out / "log.jsonl").write_text('{"iterat')
    train("--resume", out)
    assert not survive.same(out, whole), survive.same(out, whole)


def test_parser_takes_anything():
    survive.parser(5000, generated=500)


def test_two_first_runs_share_the_cache_and_a_damaged_one_is_made_again(tmp_path, llama, tok, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made, folders = [], []

    def cold_start():
        made.append(1)
        if len(made) == 1:  # another process is faster
            folders.append(rm.tiny_folder())
        return llama, tok
    monkeypatch.setattr(rm, "cold_start", cold_start)
    folders.append(rm.tiny_folder())
    assert len(made) == 2 and len({*folders}) == 1 and [*folders[0].parent.iterdir()] == [folders[0]]
    whole = {path.name: path.read_bytes() for path in folders[0].iterdir()}
    assert rm.tiny_folder() == folders[0] and len(made) == 2
    for i, name in enumerate(("model.safetensors", "tokenizer.json", "config.json"), 3):
        cut(name, 0.5)(folders[0])
        rm.tiny_folder()
        assert len(made) == i and {path.name: path.read_bytes() for path in folders[0].iterdir()} == whole


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_where_all_end_alike_nothing_is_updated(tmp_path, random_folder, algo, capsys):
    """A random model: every turn is malformed, every return -0.5. No step, no change of weights, counted in the log."""
    rows = train(*survive.SMALL, "--model", random_folder, "--algo", algo, "--iterations", 2, "--out", tmp_path / "run")
    start, end = (rm.transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
                  for path in (random_folder, tmp_path / "run/checkpoint"))
    assert all(torch.equal(start[name], end[name]) for name in start)
    assert [row["updates"] for row in rows[1:]] == [0, 0] and rows[1]["reward_std"] == 0 and "grad_norm" not in rows[1]
    assert "iterations skipped: 2" in capsys.readouterr().out


def test_one_rollout_a_prompt_is_no_reason_to_skip(tmp_path, folder):
    rows = train(*survive.SMALL, "--model", folder, "--rollouts", 1, "--iterations", 1, "--batch", 2, "--out", tmp_path / "run")
    assert rows[1]["updates"] == 1


def rows_of(**columns):
    return [{"iteration": 0}] + [dict(zip(columns, values), iteration=i) for i, values in enumerate(zip(*columns.values()), 1)]


@pytest.mark.parametrize("sign, columns", [
    ("std", dict(reward_std=[0.5] * 10 + [0.01] * 10, grad_norm=[1.0] * 20, valid=[0.9] * 20)),
    ("gradient", dict(reward_std=[0.5] * 20, grad_norm=[1.0] * 19 + [10.5], valid=[0.9] * 20)),
    ("valid", dict(reward_std=[0.5] * 20, grad_norm=[1.0] * 20, valid=[0.9] * 10 + [0.3] * 10)),
    ("", dict(reward_std=[0.5] * 10 + [0.06] * 10, grad_norm=[1.0] * 19 + [9.5], valid=[0.9] * 10 + [0.51] * 10)),
    ("", dict(reward_std=[0.5] * 20, grad_norm=[1.0] * 20, valid=[0.1] * 20))])  # malformed from the start: no collapse
def test_collapse_is_announced_once(sign, columns, capsys):
    rows, said = rows_of(**columns), []
    for i in range(1, len(rows) + 1):
        plots.warn_of_collapse(rows[:i])
    said = [line for line in capsys.readouterr().out.splitlines() if "collapse" in line]
    marked = [row["iteration"] for row in rows if "collapse" in row]
    assert len(said) == len(marked) == bool(sign)
    if sign:
        assert sign in said[0] and f"iteration {marked[0]}," in said[0] and sign in rows[marked[0]]["collapse"]
