"""The program as its user meets it: runs, folders, checkpoints, settings, mistakes."""
import copy
import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import transformers

import envs
import plots
import ragen_mini as rm
import survive
from conftest import random_llama, save
from survive import untimed

SMALL = ("--device cpu --prompts 2 --rollouts 4 --update-size 4 --iterations 2 --max-new-tokens 20 --max-turns 3 --lr 1e-3 "
         "--eval-prompts 4").split()


def run(out, *flags, model="tiny"):  # one run of the real command line, in this process -> rows of its log
    return rm.run(rm.parse_config(["--model", str(model), *SMALL, "--out", str(out), *map(str, flags)]))


@pytest.fixture(scope="module")
def bandit(tmp_path_factory):
    """A finished run, with its picture; its rows."""
    out = tmp_path_factory.mktemp("bandit") / "run"
    return out, run(out, "--env", "bandit", "--algo", "grpo", "--eval-prompts", 32)


# --------------------------------------------------------------------------------------------------------- runs
@pytest.mark.parametrize("flags", ["--env bandit --algo grpo --starpo-s", "--env sokoban --algo ppo --starpo-s",
                                   "--env sokoban --algo grpo", "--env frozenlake --algo ppo"])
def test_algorithms_run_on_worlds(tmp_path, folder, flags):
    rows = run(tmp_path / "run", *flags.split(), model=folder)
    assert survive.rows_of(tmp_path / "run") == rows and [row["iteration"] for row in rows] == [0, 1, 2]
    columns = ("reward reward_std success entropy response_length think_length distinct valid turns grad_norm clip_fraction "
               "policy_loss seconds_rollout seconds_update tokens").split() + ["value_loss"] * ("ppo" in flags)
    columns += ["kl"] * ("--starpo-s" not in flags)
    trained = [row for row in rows[1:] if row["updates"]]
    assert trained
    for row in trained:
        assert torch.tensor([float(row[name]) for name in columns]).isfinite().all()
        assert (row["kept"], row["updates"]) == ((4, 1) if "--starpo-s" in flags else (8, 2)), "keep 0.25: one prompt"
    assert list(rows[0]["eval"]) == list(rows[2]["eval"]) == [flags.split()[1]] and "eval" not in rows[1]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "log.jsonl", "samples.jsonl", "xray.json", "checkpoint", "curves.png"}
    for line in (tmp_path / "run/samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert sample["R"] == pytest.approx(sum(turn["reward"] for turn in sample["turns"]))


def test_same_seed_same_log(tmp_path):
    logs = [untimed(run(tmp_path / str(i), "--seed", seed, "--iterations", 1)) for i, seed in enumerate((5, 5, 6))]
    assert logs[0] == logs[1] != logs[2]


def test_online_k_uses_each_trajectory_once_in_k_slices(tmp_path, monkeypatch):
    """Every slice has P prompts of its own, whole groups, and is updated on once, by what the slice before left."""
    slices, weights = [], []
    compute_advantages = rm.compute_advantages

    def spy(trajs, R, models, cfg):
        slices.append(trajs)
        weights.append(next(models.policy.parameters()).sum().item())
        return compute_advantages(trajs, R, models, cfg)
    monkeypatch.setattr(rm, "compute_advantages", spy)
    rows = run(tmp_path / "run", "--online-k", 3, "--iterations", 1, "--update-size", 8, "--eval-every", 0, "--seed", 1)
    assert [len(trajs) for trajs in slices] == [8, 8, 8]
    assert len({id(traj) for trajs in slices for traj in trajs}) == 24
    assert [sorted({traj.group for traj in trajs}) for trajs in slices] == [[0, 1], [2, 3], [4, 5]]
    assert rows[1]["updates"] == 3 and rows[1]["kept"] == 24 and len(set(weights)) == 3


def test_no_step_remembers_the_gradient_of_the_one_before(cfg, tok, llama):
    """Two steps, against the same two steps of which the second one is made by a copy that never had a gradient."""
    def models_of(policy):
        policy = copy.deepcopy(policy)
        policy.zero_grad(set_to_none=True)
        return rm.Models(policy, None, None, torch.optim.SGD(policy.parameters(), lr=1.0), tok)
    batch = rm.collate(rm.rollout(llama, tok, "bandit", [300, 301, 302, 303], 1, cfg, 0, 1.0), "cpu")
    batch["adv"] = torch.tensor([[1.0], [-2.0], [3.0], [-4.0]]) * batch["mask"]
    one = models_of(llama)
    rm.gradient_step(batch, [0, 1], one, cfg)
    other = models_of(one.policy)
    rm.gradient_step(batch, [2, 3], one, cfg)
    assert not survive.equal(dict(one.policy.state_dict()), dict(other.policy.state_dict()))
    rm.gradient_step(batch, [2, 3], other, cfg)
    assert survive.equal(dict(one.policy.state_dict()), dict(other.policy.state_dict()))


def test_evaluation_on_other_worlds(tmp_path):
    others = "sokoban_newvocab,frozenlake,sokoban"
    rows = run(tmp_path / "run", "--env", "sokoban", "--eval-envs", others, "--eval-only")
    assert list(rows) == ["sokoban", "sokoban_newvocab", "frozenlake"]
    assert not (tmp_path / "run").exists(), "an evaluation makes no folder"


def test_training_levels_are_no_evaluation_levels(tmp_path, monkeypatch):
    """Nearly all seeds are made evaluation seeds: training draws none of them, and no seed twice."""
    monkeypatch.setattr(envs, "EVAL_SEEDS", range(2 ** 31 - 10 ** 6))
    drawn = []
    rollout = rm.rollout

    def spy(policy, tok, name, seeds, *rest):
        drawn.append(list(seeds))
        return rollout(policy, tok, name, seeds, *rest)
    monkeypatch.setattr(rm, "rollout", spy)
    run(tmp_path / "run", *"--env bandit --prompts 20 --rollouts 2 --max-turns 1 --max-new-tokens 1".split())
    before, first, second, after = drawn
    assert before == after == [0, 1, 2, 3]
    assert len({*first, *second}) == 40 and min(first + second) >= 2 ** 31 - 10 ** 6


def test_learning_on_a_toy(tmp_path, random_folder, monkeypatch):
    """An executable claim: where the token 'Up' pays, a random model learns to write it."""
    def toy(traj, tok, cfg, ends):
        answer = traj.ids[traj.answer_start:]
        reward = answer.count(tok.convert_tokens_to_ids("Up")) / cfg.max_new_tokens
        traj.reward[-1], traj.done = reward, True
        traj.turns.append(dict(state="", answer="", valid=True, reward=reward, tokens=len(answer), claims=[]))
    monkeypatch.setattr(rm, "take_turn", toy)
    sizes = ("--env bandit --prompts 2 --rollouts 32 --update-size 32 --iterations 12 --max-new-tokens 6 --lr 1e-2 "
             "--critic-lr 5e-3 --eval-every 0")
    for algo in ("ppo", "grpo"):
        rows = run(tmp_path / algo, *sizes.split(), "--algo", algo, model=random_folder)
        assert rows[-1]["reward"] > rows[1]["reward"] + 0.5, (algo, rows[1]["reward"], rows[-1]["reward"])


def test_pictures_of_a_run(bandit, capsys):
    """The dashboard that it drew at its end, and the page of two of its episodes."""
    out, _ = bandit
    assert (out / "curves.png").stat().st_size > 10_000
    plots.main(["xray", str(out)])
    assert capsys.readouterr().out == f"{out / 'xray.html'}\n"
    assert json.dumps(str(out)) in (out / "xray.html").read_text()


# ------------------------------------------------------------------------------------- folders, checkpoints, settings
def test_a_checkpoint_is_plain_transformers_and_evaluates_to_what_the_run_said(bandit, capsys):
    """With the settings of its run: --eval-only names nothing but the folder."""
    out, rows = bandit
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    tok = transformers.AutoTokenizer.from_pretrained(out / "checkpoint")
    start = transformers.AutoModelForCausalLM.from_pretrained(rm.TINY)
    assert tok.chat_template and not survive.equal(dict(model.state_dict()), dict(start.state_dict()))
    again = rm.run(rm.parse_config(["--eval-only", "--model", str(out / "checkpoint")]))
    assert again == rows[-1]["eval"] and rows[-1]["eval"] != rows[0]["eval"]
    assert re.search(r"bandit \d\.\d\d \[\d\.\d\d, \d\.\d\d\]  random 0.50  optimal 1.00", capsys.readouterr().out)


def test_nothing_is_overwritten(tmp_path, bandit):
    out = shutil.copytree(bandit[0], tmp_path / "run")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    run(f"{out}/", "--iterations", 1, "--eval-every", 0)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert len(survive.rows_of(tmp_path / "run-2")) == 2


@pytest.mark.parametrize("copied", [False, True])
def test_a_checkpoint_brings_the_settings_of_its_run(bandit, tmp_path, copied):
    """RUN/checkpoint, or a copy of it anywhere; what is given beside it counts more."""
    checkpoint = bandit[0] / "checkpoint"
    if copied:
        checkpoint = shutil.copytree(checkpoint, tmp_path / "elsewhere")
    cfg = rm.parse_config(["--model", f"{checkpoint}/", "--iterations", "7"])
    assert (cfg.env, cfg.algo, cfg.max_new_tokens, cfg.lr, cfg.iterations) == ("bandit", "grpo", 20, 1e-3, 7)
    assert cfg.out == "" and cfg.model == f"{checkpoint}/"
    s = rm.parse_config(["--model", str(checkpoint), "--starpo-s"])
    assert (s.keep, s.kl_coef, s.clip_high) == (0.25, 0.0, 0.28), "what its run had for these is forgotten"


def test_starpo_s_is_three_values_and_each_can_be_set_alone():
    base, s = rm.Config(device="cpu"), rm.Config(device="cpu", starpo_s=True)
    changed = {name for name in vars(base) if vars(base)[name] != vars(s)[name]}
    assert changed == {"starpo_s", "keep", "kl_coef", "clip_high"}
    assert (s.keep, s.kl_coef, s.clip_high) == (0.25, 0.0, 0.28)
    assert (base.keep, base.kl_coef, base.clip_high) == (1.0, 0.001, 0.2)
    assert rm.parse_config("--starpo-s --keep 0.5 --device cpu".split()).keep == 0.5
    assert rm.parse_config("--starpo-s --kl-coef 0.01 --device cpu".split()).clip_high == 0.28
    assert "keeps 2 of 8" in rm.explain(s) and "KL off" in rm.explain(s) and "never clipped" in rm.explain(s)
    assert "clipped to 0.8..1.2" in rm.explain(base)


# ----------------------------------------------------------------------------------------------------- mistakes
MISTAKES = [  # what is given; what the user is told
    ("--foo 1", "--help"), ("--iter 5", "--help"), ("--prompts two", "int"), ("--env chess", "frozenlake"),
    ("--keep 0", "above 0"), ("--keep 1.5", "at most 1"), ("--rollouts 0", "above 0"), ("--lr nan", "above 0"),
    ("--lr inf", "at most"), ("--seed -1", "at least 0"), ("--eval-envs bandit,chess", "chess"),
    ("--starpo-s --rollouts 1", "--rollouts 2"), ("--algo grpo --rollouts 1", "--rollouts 2"),
    ("--algo dpo", "ppo or grpo"), ("--adv-norm max", "std or mean"), ("--device moon", "cpu"),
    ("--model {tmp}", "folder"), ("--model no/such-model", "tiny"), ("--model {base}", "chat template"),
    ("--model tiny --max-new-tokens 5000", "lower --max-new-tokens"), ("--out {file}/run", "Not a directory"),
    ("--resume {tmp}", "does not exist: nothing to go on with")]


def test_mistakes_are_one_line_that_says_what_to_do(tmp_path, tok):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    base = save(tmp_path / "base", random_llama(len(tok)), tok)
    Path(base, "chat_template.jinja").unlink()
    mistakes = MISTAKES if torch.cuda.is_available() else [*MISTAKES, ("--device cuda", "cpu")]
    for flags, says in mistakes:
        flags = flags.format(tmp=tmp_path / "empty", file=tmp_path / "file", base=base)
        with pytest.raises((rm.UserError, OSError)) as error:
            rm.train(rm.parse_config(["--device", "cpu", *flags.split()]))
        assert says in str(error.value) and "\n" not in str(error.value), (flags, str(error.value))


@pytest.mark.parametrize("error, says", [
    (rm.UserError("too hot"), "too hot"), (OSError(28, "No space left on device"), "No space left on device"),
    (rm.SafetensorError("No space left"), "--resume RUN")])
def test_main_prints_one_line_and_exits_with_2(error, says, monkeypatch, capsys):
    def fail(cfg):
        raise error
    monkeypatch.setattr(rm, "train", fail)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keeps the handlers of this process
    monkeypatch.setattr(rm.sys, "argv", ["ragen_mini.py", "--device", "cpu"])
    with pytest.raises(SystemExit) as end:
        rm.main()
    told = capsys.readouterr().err
    assert end.value.code == 2 and says in told and told.count("\n") == 1


def test_help_reads_like_config(capsys):
    with pytest.raises(SystemExit) as end:
        rm.parse_config(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    for name, option in rm.Config.__dataclass_fields__.items():
        assert re.search(rf"--{name.replace('_', '-')}\b", text), name
        assert option.metadata["help"].split()[0] in text, name


# --------------------------------------------------------------------------------------------- small things
def test_in_the_folder_of_a_run_its_checkpoint_is_not_taken_unasked(bandit, monkeypatch):
    out, _ = bandit
    for folder in (out, out / "checkpoint"):
        monkeypatch.chdir(folder)
        cfg = rm.parse_config(["--device", "cpu"])
        assert (cfg.model, cfg.env, cfg.algo) == ("tiny", "frozenlake", "ppo")


@pytest.mark.parametrize("wanted", [dict(play=7), dict(eval_only=True)])
def test_who_only_plays_needs_neither_critic_nor_reference(wanted, folder):
    models = rm.load_models(rm.Config(model=folder, device="cpu", env="bandit", **wanted))
    assert models.critic is None and models.ref is None


@pytest.mark.parametrize("reward, said", [(1.0, "1.0"), (-0.1, "-0.1"), (0.1 + 0.2, "0.3"), (10.9, "10.9"), (0.15, "0.15"), (0.0, "0.0")])
def test_a_reward_is_told_as_it_is(reward, said, cfg):
    env = envs.make("bandit")
    env.reset(0)
    assert rm.message(env, cfg, 3, reward).startswith(f"Reward: {said}\n")


def test_out_of_memory_keeps_its_own_advice():
    with pytest.raises(torch.OutOfMemoryError), rm.otherwise("--model cannot be loaded"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_who_stops_before_the_first_iteration_is_told_how_to_go_on(cfg, tmp_path, capsys):
    cfg.out = str(tmp_path)
    rm.sum_up([{"iteration": 0}], cfg)
    assert capsys.readouterr().out == f"Go on: python ragen_mini.py --resume {tmp_path}\n"
