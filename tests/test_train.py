"""The program as its user meets it: runs, folders, checkpoints, bad input, README."""
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import envs
import plots
import ragen_mini as rm
from conftest import ROOT, random_llama


def run(tmp_path, folder, *flags, name="run"):
    """One run of the real command line (in this process); returns its folder and its log."""
    out = tmp_path / name
    argv = (f"--model {folder} --device cpu --out {out} --prompts 2 --rollouts 4 --iterations 2 --max-new-tokens 20 --lr 1e-3 "
            f"--eval-prompts 8 --batch 4").split() + [str(flag) for flag in flags]
    return out, rm.train(rm.parse_config(argv))


@pytest.mark.parametrize("env", ["bandit", "sokoban", "frozenlake"])
@pytest.mark.parametrize("algo", ["ppo", "grpo"])
@pytest.mark.parametrize("starpo_s", [False, True])
def test_every_algorithm_runs_on_every_world(tmp_path, folder, env, algo, starpo_s):
    out, rows = run(tmp_path, folder, "--env", env, "--algo", algo, *["--starpo-s"] * starpo_s)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert log == rows and [row["iteration"] for row in log] == [0, 1, 2]
    keys = ("updates reward reward_std success entropy response_length think_length valid turns kl grad_norm clip_fraction "
            "policy_loss kept seconds_rollout seconds_update tokens").split() + ["value_loss"] * (algo == "ppo")
    assert set(keys) <= set(log[1]) and all(torch.isfinite(torch.tensor(float(log[1][key]))) for key in keys)
    assert log[1]["kept"] == (4 if starpo_s else 8) and log[1]["updates"] == (1 if starpo_s else 2)
    assert set(log[0]["eval"]) == set(log[2]["eval"]) == {env}
    assert {p.name for p in out.iterdir()} == {"config.json", "log.jsonl", "samples.jsonl", "checkpoint", "curves.png"}
    sample = json.loads((out / "samples.jsonl").read_text().splitlines()[0])
    assert sample["R"] == pytest.approx(sum(turn["reward"] for turn in sample["turns"]))


def untimed(rows):
    return [{key: x for key, x in row.items() if not key.startswith("seconds")} for row in rows]


def test_same_seed_same_log(tmp_path, folder):
    logs = [run(tmp_path, folder, "--seed", seed, name=str(i))[1] for i, seed in enumerate((5, 5, 6))]
    assert untimed(logs[0]) == untimed(logs[1]) != untimed(logs[2])


def test_checkpoint_is_plain_transformers_and_evaluates_to_what_the_run_said(tmp_path, folder, capsys):
    out, rows = run(tmp_path, folder, "--env", "bandit", "--eval-prompts", 64)
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    tok = transformers.AutoTokenizer.from_pretrained(out / "checkpoint")
    start = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert tok.chat_template and any(not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters()))
    capsys.readouterr()
    again = rm.train(rm.parse_config(["--eval-only", "--model", str(out / "checkpoint")]))  # its run's settings
    assert again[0]["eval"] == rows[-1]["eval"]
    assert re.search(r"bandit \d\.\d\d \[\d\.\d\d, \d\.\d\d\]  random 0.50  optimal 1.00", capsys.readouterr().out)


def test_nothing_is_overwritten(tmp_path, folder):
    first, _ = run(tmp_path, folder)
    before = (first / "log.jsonl").read_bytes()
    run(tmp_path, folder, "--out", f"{first}/")
    assert (first / "log.jsonl").read_bytes() == before and (tmp_path / "run-2" / "log.jsonl").exists()


def test_a_checkpoint_brings_the_settings_of_its_run(tmp_path, folder):
    out, _ = run(tmp_path, folder, "--env", "sokoban", "--algo", "grpo", "--iterations", 1)
    cfg = rm.parse_config(["--model", f"{out}/checkpoint/", "--iterations", "7"])
    assert (cfg.env, cfg.algo, cfg.max_new_tokens, cfg.lr, cfg.iterations, cfg.out) == ("sokoban", "grpo", 20, 1e-3, 7, "")


def test_starpo_s_on_a_checkpoint_is_starpo_s(tmp_path, folder):
    out, _ = run(tmp_path, folder, "--iterations", 1)
    cfg = rm.parse_config(["--model", f"{out}/checkpoint", "--starpo-s"])
    assert (cfg.keep, cfg.kl_coef, cfg.clip_high) == (0.25, 0.0, 0.28)


def test_online_k_uses_each_trajectory_once_in_k_slices(tmp_path, folder, monkeypatch):
    slices, real = [], rm.score
    monkeypatch.setattr(rm, "score", lambda trajs, *rest: slices.append([id(t) for t in trajs]) or real(trajs, *rest))
    _, rows = run(tmp_path, folder, "--online-k", 3, "--iterations", 1, "--batch", 8)
    assert [len(s) for s in slices] == [8, 8, 8] and len({i for s in slices for i in s}) == 24
    assert rows[1]["updates"] == 3 and rows[1]["kept"] == 24


def test_evaluation_on_other_worlds(tmp_path, folder):
    _, rows = run(tmp_path, folder, "--env", "sokoban", "--eval-envs", "sokoban_newvocab,frozenlake", "--iterations", 1)
    assert list(rows[0]["eval"]) == ["sokoban", "sokoban_newvocab", "frozenlake"]


def test_training_seeds_are_no_evaluation_seeds(tmp_path, folder, monkeypatch):
    seeds, real = [], rm.Trajectory
    monkeypatch.setattr(rm, "Trajectory", lambda name, group, seed, *rest: seeds.append(seed) or real(name, group, seed, *rest))
    run(tmp_path, folder, "--eval-every", 0)
    drawn = seeds[1:]  # without the probe of the context's length
    assert drawn and not set(drawn) & set(envs.EVAL_SEEDS)


def test_starpo_s_is_three_values_and_each_can_be_set_alone(folder):
    base, s = rm.Config(model=folder), rm.Config(model=folder, starpo_s=True)
    changed = {k for k in vars(base) if vars(base)[k] != vars(s)[k]} - {"starpo_s"}
    assert changed == {"keep", "kl_coef", "clip_high"} and (s.keep, s.kl_coef, s.clip_high) == (0.25, 0.0, 0.28)
    assert rm.parse_config(["--starpo-s", "--keep", "0.5", "--device", "cpu"]).keep == 0.5
    assert "never clipped" in plots.explain(s) and "KL off" in plots.explain(s) and "keeps 2 of 8" in plots.explain(s)
    assert "clipped to 0.8..1.2" in plots.explain(base)


@pytest.fixture
def no_template(tmp_path, tok):
    path = tmp_path / "base"
    random_llama(len(tok)).save_pretrained(path)
    tok.save_pretrained(path)
    (path / "chat_template.jinja").unlink()
    return str(path)


@pytest.mark.parametrize("flags, says", [
    ("--foo 1", "--help"), ("--env chess", "frozenlake"), ("--keep 0", "above 0"), ("--keep 1.5", "at most 1"),
    ("--rollouts 0", "above 0"), ("--starpo-s --rollouts 1", "--rollouts 2"), ("--algo grpo --rollouts 1", "--rollouts 2"),
    ("--algo dpo", "ppo or grpo"), ("--eval-envs bandit,chess", "chess"), ("--lr nan", "above 0"), ("--lr inf", "at most"), ("--seed -1", "at least 0"), ("--prompts two", "int"),
    ("--model {tmp}", "folder"), ("--model no/such-model", "tiny"), ("--model {base}", "chat template"),
    ("--model {folder} --max-new-tokens 5000", "--max-new-tokens"), ("--device cuda", "cpu"), ("--device moon", "cpu")])
def test_bad_input_is_one_line_and_exit_code_2(flags, says, tmp_path, folder, no_template, capsys):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    flags = flags.format(tmp=tmp_path, folder=folder, base=no_template).split()
    with pytest.raises(SystemExit) as stop:
        rm.train(rm.parse_config(flags))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and says in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err


def test_help_reads_like_config(capsys):
    with pytest.raises(SystemExit):
        rm.parse_config(["--help"])
    text = capsys.readouterr().out
    for name in rm.Config.__dataclass_fields__:
        assert re.search(rf"--{name.replace('_', '-')} .*|--{name.replace('_', '-')}\n", text), name


def test_command_line_as_a_process(tmp_path, folder):
    """The real thing once: a run, and an error without traceback."""
    cmd = [sys.executable, str(ROOT / "ragen_mini.py"), "--model", folder, "--device", "cpu", "--out", str(tmp_path / "r"),
           *"--prompts 2 --rollouts 2 --iterations 1 --max-new-tokens 8 --eval-prompts 4".split()]
    done = subprocess.run(cmd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"before +frozenlake .*random .*optimal", done.stdout) and (tmp_path / "r" / "curves.png").exists()
    done = subprocess.run([*cmd, "--keep", "0"], capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_learning_on_a_toy(tmp_path, random_folder, monkeypatch):
    """An executable claim: where the token 'Up' pays, a random model learns to write it."""
    def toy(traj, tok, cfg, stop):
        answer = traj.ids[traj.start:]
        reward = sum(token == tok.convert_tokens_to_ids("Up") for token in answer) / cfg.max_new_tokens
        traj.reward[-1], traj.R, traj.done = reward, reward, True
        traj.turns.append(dict(state="", answer="", valid=True, reward=reward, tokens=len(answer)))
    monkeypatch.setattr(rm, "take_turn", toy)
    for algo in ("ppo", "grpo"):
        _, rows = run(tmp_path, random_folder, "--algo", algo, "--prompts", 4, "--rollouts", 16, "--iterations", 30, "--eval-every", 0,
                      "--lr", "3e-3", "--batch", 32, "--max-new-tokens", 6, name=algo)
        assert rows[-1]["reward"] > rows[1]["reward"] + 0.3, (algo, rows[1]["reward"], rows[-1]["reward"])


def test_plots_of_several_runs_and_bad_folders(tmp_path, folder, capsys, pictures):
    runs = [run(tmp_path, folder, "--algo", algo, name=algo)[0] for algo in ("ppo", "grpo")]
    with open(runs[1] / "log.jsonl", "a") as file:
        file.write('{"iteration": 3, "rew')  # a run that was killed in mid-write
    plots.main(["curves", *map(str, runs), "--out", str(tmp_path / "both.png")])
    assert (tmp_path / "both.png").stat().st_size > 10_000
    with pytest.raises(SystemExit) as stop:
        plots.main(["curves", str(tmp_path)])
    assert stop.value.code == 2


# ------------------------------------------------------------------------------------------- the house rules
def test_budgets():
    for name, budget in (("ragen_mini.py", 550), ("envs.py", 260), ("plots.py", 300)):
        text = (ROOT / name).read_text()
        lines = text.splitlines()
        longest = max(n.end_lineno - n.lineno + 1 for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
        assert len(lines) <= budget, (name, len(lines))
        assert max(map(len, lines)) <= 110 and longest <= 40, (name, longest)


def test_readme_commands_exist():
    """Every option in README's code blocks is one of ours, every file that it names exists."""
    readme = (ROOT / "README.md").read_text()
    options = {"--" + name.replace("_", "-") for name in rm.Config.__dataclass_fields__} | {"--help", "--out"}
    for block in re.findall(r"```.*?\n(.*?)```", readme, re.S):
        for line in block.splitlines():
            if "ragen_mini.py" in line:
                assert set(re.findall(r"--[a-z][a-z-]*", line)) <= options, line
            if "plots.py" in line:
                assert set(re.findall(r"--[a-z]+", line)) <= {"--run", "--seeds", "--model", "--iterations", "--out", "--jobs"}, line
                assert line.split()[2] in {*plots.PAPER["figures"], "all", "claims", "curves", "xray"}, line
    for name in re.findall(r"\]\(([\w./]+)\)", readme):
        assert (ROOT / name).exists(), name


def test_readme_speed_is_that_of_the_log():
    """The rows of README's speed tables, rebuilt from the output in figures/bench.txt."""
    readme, log = (ROOT / "README.md").read_text(), (ROOT / "figures" / "bench.txt").read_text()
    sides = re.findall(r"^(?:ours|generate) +(.*) s an iteration = rollout (.*) \+ update (.*); .*; .* in the rollout, (.*) ms per .*"
                       r"peak (.*) MiB$", re.sub("tokens, ", "tokens; ", log), re.M)
    assert len(sides) == 4, "ours and generate, for the small model and for SmolLM2"
    for name, (total, rollout, update, ms, peak) in zip(("this code", "`generate`"), sides[:2]):
        assert f"| {name} | {total} s | {rollout} s | {update} s | {ms} ms | {peak} MiB |" in readme
    for name, row in zip(("this code", "`generate`"), sides[2:]):
        total, rollout, update, ms, peak = map(float, row)
        assert f"| {name} | {total:.1f} s | {rollout:.1f} s | {update:.1f} s | {ms / 1000:.1f} s | {peak / 1024:.1f} GiB |" in readme
    ratios = re.findall(r"^ours / generate, [a-z ]+ ([\d.]+)  \(of 10 rounds: (.*) to (.*)\)$", log, re.M)
    assert len(ratios) == 4 and " | ".join("{} ({} - {})".format(*ratio) for ratio in ratios) in readme
    growth = dict(re.findall(r"^(full length, .*) of 32 tokens: rollout (.*) s, update", log, re.M))
    for side in ("ours", "generate"):
        five, ten = (growth[f"full length, {side}: 128 trajectories, {k} turns"] for k in (5, 10))
        assert f"{float(ten) / float(five):.1f} times" in readme and five in readme and ten in readme
    five, ten = re.findall(r"^full length, ours: 8 trajectories, (?:5|10) turns of 32 tokens: rollout (.*) s; .* written", log, re.M)
    assert f"{float(ten) / float(five):.1f} times ({five} and {ten} s" in readme


def test_readme_environment_example_works(cfg, tok, play):
    """The world that README defines in a code block is played through the real rollout."""
    code = next(b for b in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if "(envs.Env)" in b)
    space = {}
    try:
        exec(code, space)
        traj, = play(["</think><answer>" + envs.make("guess").actions[0] + "</answer>"], "guess", [300], cfg)
        assert traj.turns[0]["valid"]
        assert envs.mean_yardsticks("guess", 1, 64)[1, 1] == 1.0
    finally:
        envs.ENVS.pop("guess", None)


@pytest.mark.parametrize("run", sorted(path.parent for path in (ROOT / "figures").glob("*/log.jsonl")), ids=lambda p: p.name)
def test_readme_results_are_those_of_the_logs(run):
    config, rows = plots.load(run)
    success = [row["eval"][config["env"]] for row in rows if "eval" in row]
    low, high = envs.interval(success[-1], config["eval_prompts"])
    random, optimal = plots.yardsticks(config["env"], config)
    line = next(line for line in (ROOT / "README.md").read_text().splitlines()
                if f"{success[0]:.2f} -> {success[-1]:.2f} [{low:.2f}, {high:.2f}]" in line)
    assert f"| {random:.2f} | {optimal:.2f} |" in line
    assert len(rows) == config["iterations"] + 1 and low > (random if config["env"] != "bandit" else 0.95)
