"""extras/dev/gpu.py on a CPU, with a tiny model: everything but the GPU."""
import re
from types import SimpleNamespace

import pytest
import torch
import transformers

import ragen_mini as rm
import runs
from extras import fast_rollout
from extras.dev import bench, gpu, gpu_programs, parts

SHORT = "--shape tiny --device cpu --prompts 2 --rollouts 2 --tokens 8 --iterations 2"


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(rm, "read", rm.read)
    monkeypatch.setattr(rm, "rollout", rm.rollout)


def run(options):  # -> exit code
    with pytest.raises(SystemExit) as stop:
        gpu.main(f"{SHORT} {options}".split())
    return stop.value.code


def test_every_part(capsys, tmp_path, pictures):
    read, rollout = rm.read, rm.rollout
    assert run(f"--model tiny --out {tmp_path}") == 0
    said = capsys.readouterr().out
    for way in ("graph", "today", "generate", "compile", "batching"):
        # 2 x 2 trajectories of 5 turns of 8 tokens
        assert re.search(rf"^\| {way} \| of equal length \|.*\| 160 \|", said, re.MULTILINE)
        assert re.search(rf"^\| {way} \| of unequal lengths \|", said, re.MULTILINE)
    for algo in ("ppo", "grpo"):
        assert re.search(rf"^\| {algo}, an iteration \|.*\| 160 \|", said, re.MULTILINE)
        for tokens in (2048, 8192, 32768):
            assert f"| {algo}, passes of {tokens} tokens |" in said
    assert said.count("check of the ratio passed") == 2
    assert said.count("8 of 8 episodes alike, token for token") == 2
    assert "a decode step of 4 rows" in said
    assert re.search(r"^iteration 0: frozenlake 0\.", said, re.MULTILINE)
    assert re.search(r"^iteration 2: frozenlake 0\.", said, re.MULTILINE)
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3
    # Nothing stays replaced.
    assert rm.end_tokens is bench.END_TOKENS and runs.micro_tokens.get() is None
    assert rm.read is read and rm.rollout is rollout


def test_what_has_no_time_is_left_out(capsys):
    assert run("--minutes 0 --model tiny") == 0
    said = capsys.readouterr().out
    assert "| graph |" not in said and said.count("left out") >= 9


def test_a_run_ends_in_time_with_an_evaluation(capsys, tmp_path, monkeypatch):
    """It would be of 200 iterations. After the second one there is no time for two more."""
    times = iter([100, 100, 100])
    monkeypatch.setattr(gpu, "left", lambda args: next(times, 0))
    assert run(f"--parts learns --iterations 200 --model tiny --out {tmp_path}") == 0
    rows = (tmp_path / "log.jsonl").read_text().splitlines()
    assert ["eval" in row for row in rows] == [True, False, False, False, True][-len(rows):]
    assert len(rows) == 5


def test_if_recording_fails_the_rest_is_measured(monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(fast_rollout.Player, "record", fail)
    assert run("--parts rollouts passes") == 1
    said = capsys.readouterr().out
    assert "graph failed" in said and "not permitted when stream is capturing" in said
    assert "| today | of unequal lengths |" in said and "| grpo, an iteration |" in said


def test_if_memory_runs_out_other_passes_are_measured(monkeypatch, capsys):
    add_gradients = rm.add_gradients

    def on_a_small_card(*given):
        if runs.micro_tokens.get() == 32_768:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return add_gradients(*given)
    monkeypatch.setattr(rm, "add_gradients", on_a_small_card)
    assert run("--parts passes") == 0
    said = capsys.readouterr().out
    assert "from now on passes have 16384 tokens, not 32768" in said
    assert "| ppo, passes of 16384 tokens |" in said


def test_the_programs(monkeypatch, capsys):
    """Two of them, since all take three minutes. A failure is reported with its exit code."""
    monkeypatch.setattr(
        gpu_programs, "SHORT", "--iterations 1 --prompts 2 --rollouts 4 --eval-every 0")
    monkeypatch.setattr(
        gpu_programs, "PROGRAMS", [("plots.py curves OUT/first", "plots.py curves nowhere")])
    monkeypatch.setattr(gpu_programs, "RECIPES", ("rloo --algo grpo",))
    gpu_programs.programs("CPU", (1, 1, 2, 1), " --prompts 2 --rollouts 4 --eval-prompts 8")
    said = capsys.readouterr().out
    assert len(re.findall(r"^iteration \d: success [01]\.", said, re.MULTILINE)) == 2
    # On a CPU a resumed run is the same.
    assert re.search(r"columns that differ .*\n0 \{\}\n1 \{\}\n2 \{\}\n", said)
    assert re.findall(r"exit code (\d): python (.*?) ", said) == [
        ("0", "plots.py"), ("1", "plots.py"), ("0", "extras/recipes.py")]
    assert "No such file or directory: 'nowhere" in said


@pytest.mark.parametrize("other, alike", [
    ([1, 2, 3], True), ([1, 2, 4], True), ([1, 2], False), ([1, 5, 3], False)])
def test_a_difference_counts_unless_another_token_was_as_likely(other, alike):
    ours = SimpleNamespace(ids=[1, 2, 3], old_logp=[0, -1e-6, -0.7])
    assert gpu.alike_up_to_a_tie(ours, SimpleNamespace(ids=other)) is alike


# ------------------------------------------------------------------------------- a model in parts
def test_a_model_travels_in_parts(folder, tmp_path, monkeypatch, tok):
    monkeypatch.setattr(parts, "PART", 100_000)
    parts.split(folder, tmp_path / "parts")
    sizes = [part.stat().st_size for part in parts.parts(tmp_path / "parts")]
    assert len(sizes) > 2 and set(sizes[:-1]) == {100_000}
    parts.join(tmp_path / "parts", tmp_path / "model")

    def weights(folder):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for one, other in zip(weights(folder).parameters(), weights(tmp_path / "model").parameters(),
                          strict=True):
        assert torch.equal(one.bfloat16().float(), other)
    chat = [{"role": "user", "content": "State: P _"}]
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert other.apply_chat_template(chat) == tok.apply_chat_template(chat)
    assert runs.is_tiny(str(tmp_path / "model"))


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_damaged_parts_are_refused(folder, tmp_path, monkeypatch, damage):
    monkeypatch.setattr(parts, "PART", 100_000)
    parts.split(folder, tmp_path / "parts")
    part = tmp_path / "parts" / "part-01"
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(bytes(100_000))
    with pytest.raises(runs.UserError):
        parts.join(tmp_path / "parts", tmp_path / "model")
    assert not (tmp_path / "model").exists()
