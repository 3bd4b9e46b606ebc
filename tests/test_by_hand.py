"""Where a wrong program would train on, and print a good success: outcomes that were worked out on paper.

Most of these tests hand the program scripted episodes through its seams, and compare with numbers that stand here."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import envs
import plots
import ragen_mini as rm
from conftest import DRAW


class Walk(envs.Env):
    """Up takes a step and pays 1, Down stands still. The goal is two steps away; walking on is allowed."""
    actions = ("Up", "Down")
    split = False

    @staticmethod
    def draw(rng):
        return "straight", 0

    def outcomes(self, state, action):
        step = int(action == "Up")
        return [(1.0, state + step, float(step), False)]

    def won(self, state):
        return state >= 2

    def render(self):
        return "_ " * self.state + "P"

    def bonus(self, turn):  # for what is said before the first step
        return 0.25 * (self.state == 0)


def walked(group=0, rewards=(0.0,), answers=None, tokens=None, success=False, entropy=0.0):  # -> a finished episode
    traj = rm.Trajectory(None, group, 0)
    for k, reward in enumerate(rewards):
        turn = dict(state="", answer=answers[k] if answers else "<think></think>", valid=True, reward=reward)
        turn["tokens"] = tokens[k] if tokens else 1
        traj.turns.append(turn)
        traj.reward.append(reward)
    traj.success, traj.entropy = success, entropy
    return traj


# ---------------------------------------------------------------------------------------------------- one episode
def test_no_episode_takes_more_actions_than_it_has(play, cfg):
    cfg.max_actions, cfg.max_new_tokens = 3, 32
    traj, = play(["</think><answer>Up || Up || Up || Up || Up</answer>"], Walk, [0], cfg)
    assert traj.env.state == 3 and traj.actions_left == 0 and traj.done and len(traj.turns) == 1
    cfg.max_actions = 4
    traj, = play(["</think><answer>Up || Up || Up</answer>"], Walk, [0], cfg)
    assert [turn["state"] for turn in traj.turns] == ["P", "_ _ _ P"] and traj.env.state == 4 and traj.actions_left == 0


def test_the_model_is_told_what_its_answer_earned_and_what_is_left(play, cfg, monkeypatch):
    """Two steps earn 2; then a step and a stand earn 1; a malformed answer costs 0.1. The bonus is not told."""
    told, encode = [], rm.encode

    def spy(tok, first_tag, text, after_answer=False):
        if after_answer and text != ".":
            told.append(text.splitlines())
        return encode(tok, first_tag, text, after_answer)
    monkeypatch.setattr(rm, "encode", spy)
    cfg.max_turns, cfg.max_new_tokens = 4, 32
    answers = ["</think><answer>Up || Up</answer>", "</think><answer>Up || Down</answer>", "Up"]
    traj, = play(answers, Walk, [0], cfg)
    assert [lines[0] for lines in told] == ["Reward: 2.0", "Reward: 1.0", "Reward: -0.1"]
    assert [lines[-1] for lines in told] == [f"You have {left} actions left." for left in (8, 6, 6)]
    assert [lines[2] for lines in told] == ["_ _ P", "_ _ _ P", "_ _ _ P"]
    assert [turn["reward"] for turn in traj.turns] == [2.25, 1.0, -0.1, -0.1], "said at the start: 0.25"
    assert traj.R == pytest.approx(3.05)


def test_a_rollout_keeps_no_graph(folder, cfg):
    models = rm.load_models(cfg)
    seen = []
    models.policy.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    cfg.max_new_tokens, cfg.max_turns = 2, 1
    rm.rollout(models, [300], 2, rm.replace(cfg, env="bandit"), 0)
    assert seen and not any(seen)


# ------------------------------------------------------------------------------------- what is trained, and with what
def test_a_policy_that_left_its_reference_pays_for_it(cfg):
    """KL token by token, against plain passes of both models over one episode at a time; then its mean over tokens."""
    cfg.temperature, cfg.kl_coef, cfg.max_turns, cfg.rollouts, cfg.env = 0.7, 0.5, 2, 2, "bandit"
    models = rm.load_models(cfg)
    before = transformers.AutoModelForCausalLM.from_pretrained(cfg.model)
    with torch.no_grad():
        for weight in models.policy.parameters():
            weight.mul_(1.1)
    trajs = rm.rollout(models, [300, 301], 2, rm.replace(cfg, env="bandit"), 0)
    trajs[0].ids.append(trajs[0].ids[0])  # so that rows differ in length, and the grid has pads
    for entries, value in ((trajs[0].mask, False), (trajs[0].old_logp, 0.0), (trajs[0].reward, 0.0)):
        entries.append(value)
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    of_all = []
    for row, traj in enumerate(trajs):
        inputs, targets = torch.tensor([traj.ids[:-1]]), torch.tensor(traj.ids[1:])
        expected = []
        for policy in (models.policy, before):
            with torch.no_grad():
                logits = policy(inputs).logits[0] / 0.7
            expected.append(logits.log_softmax(-1)[torch.arange(len(targets)), targets])
        ours = torch.tensor(traj.mask[1:])
        k1 = (expected[0] - expected[1]) * ours
        assert batch["kl"][row, :len(k1)].tolist() == pytest.approx(k1.tolist(), abs=1e-4)
        rewards = torch.tensor(traj.reward[1:]) - 0.5 * k1
        to_come = rewards.flip(0).cumsum(0).flip(0)
        assert batch["ret"][row, :len(k1)][ours].tolist() == pytest.approx(to_come[ours].tolist(), abs=1e-3)
        of_all += k1[ours].tolist()
    assert max(map(abs, of_all)) > 0.01
    row = plots.log_columns(trajs, rm.returns(trajs, cfg), [(batch, [{"grad_norm": 1.0}])])
    assert row["kl"] == pytest.approx(sum(of_all) / len(of_all), abs=1e-4)
    slices = [(batch | {"kl": factor * batch["kl"]}, [{"grad_norm": factor}]) for factor in (1.0, 3.0)]  # of --online-k 2
    both = plots.log_columns(trajs, rm.returns(trajs, cfg), slices)
    assert (both["kl"], both["grad_norm"], both["updates"]) == (pytest.approx(2 * row["kl"], abs=1e-5), 2.0, 2)


def test_kept_episodes_are_trained_by_their_own_returns(cfg, tok, monkeypatch):
    """Four groups of two; the second and the last one differ most. Each episode's last token is its number."""
    cfg.algo, cfg.adv_norm, cfg.keep, cfg.prompts, cfg.rollouts = "grpo", "mean", 0.5, 4, 2
    trajs = []
    for number, reward in enumerate([0, 0, 1, 3, 5, 5.5, 0, 10]):
        traj = walked(number // 2, [])
        traj.append([99], sampled=False)
        traj.append([number], True, -1.0)
        traj.reward[-1] = float(reward)
        trajs.append(traj)
    monkeypatch.setattr(rm, "updates", lambda *rest: ["updated"])
    for first in (0, 4):  # in a second slice of --online-k the groups have higher numbers
        for traj in trajs:
            traj.group = traj.group % 4 + first
        batch, steps = rm.learn(trajs, rm.Models(None, None, None, None, tok), cfg, 0)
        assert batch["targets"].tolist() == [[2], [3], [6], [7]] and steps == ["updated"]
        assert batch["adv"].tolist() == [[-1.0], [1.0], [-5.0], [5.0]]


@pytest.fixture
def recorded(monkeypatch):
    """Which rows each gradient step took; no model is needed."""
    steps = []
    monkeypatch.setattr(rm, "add_gradients", lambda batch, rows, *rest: steps.append(rows) or {})
    monkeypatch.setattr(rm, "take_step", lambda *rest: 1.0)
    return steps


def test_every_epoch_takes_every_trajectory_once_in_an_order_of_its_own(cfg, recorded):
    cfg.update_size, cfg.epochs = 4, 2
    batch = {"mask": torch.ones(10, 3, dtype=torch.bool)}
    assert len(rm.updates(batch, None, cfg, seed=5)) == 6
    assert [len(rows) for rows in recorded] == [4, 4, 2] * 2
    first, second = sum(recorded[:3], []), sum(recorded[3:], [])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != sorted(first) and first != second
    rm.updates(batch, None, cfg, seed=5)
    assert recorded[6:] == recorded[:6]
    rm.updates(batch, None, cfg, seed=6)
    assert recorded[12:] != recorded[:6]


def test_gradients_of_ones_own_take_the_same_rows(cfg, recorded):
    cfg.update_size, cfg.epochs = 4, 1
    batch = {"mask": torch.ones(10, 3, dtype=torch.bool)}
    rm.updates(batch, None, cfg, seed=5)
    own = []
    steps = rm.updates(batch, "models", cfg, 5, lambda *args: own.append(args) or {"policy_loss": 2.0})
    assert own == [(batch, rows, "models", cfg) for rows in recorded] and len(recorded) == 3
    assert steps == [{"policy_loss": 2.0, "grad_norm": 1.0}] * 3


def test_statistics_of_a_step_are_means_over_all_its_tokens(cfg, monkeypatch):
    """Rows of one and of three tokens, each a part of its own: (1 + 1) / 4."""
    monkeypatch.setattr(rm, "MICRO_TOKENS", 1)
    weight = torch.tensor(2.0, requires_grad=True)
    monkeypatch.setattr(rm, "token_logps", lambda policy, part, cfg: (weight * part["old_logp"][part["mask"]], None))
    batch = {"mask": torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0]]).bool(),
             "adv": torch.tensor([[1.0, 0, 0], [0, -3, 1], [1, 1, 0]])}
    batch["old_logp"] = batch["adv"]
    models = rm.Models(None, None, None, None, None, loss=lambda logp, entropy, old_logp, adv, cfg: (adv * weight, adv > 0))
    assert rm.add_gradients(batch, [0, 1], models, cfg) == {"clip_fraction": 0.5, "policy_loss": 2 * -0.25}
    assert weight.grad == -0.25, "(1 + 0 - 3 + 1) / 4"


def test_the_forecast_is_clipped_around_that_of_before_the_first_update(cfg, monkeypatch):
    """Old 0, now 1, return 2: 1 is too far, 0.5 counts: 1.5 ** 2 / 2. Around the present forecast nothing is clipped."""
    one = torch.ones(1, requires_grad=True)
    monkeypatch.setattr(rm, "token_logps", lambda policy, part, cfg: (one, None))
    monkeypatch.setattr(rm, "token_values", lambda critic, part: one)
    batch = {"mask": torch.tensor([[True]]), "adv": torch.zeros(1, 1), "old_logp": torch.zeros(1, 1)}
    batch |= {"value": torch.zeros(1, 1), "ret": torch.full((1, 1), 2.0)}
    models = rm.Models(None, None, None, None, None, loss=lambda logp, *rest: (logp, logp > 0))
    assert rm.add_gradients(batch, [0], models, cfg)["value_loss"] == 1.5 ** 2 / 2


def test_success_is_that_of_the_last_state(cfg):
    """A world that one can win and lose again: what counts is how it ended."""
    class Door(Walk):
        actions = ("Open", "Shut")

        def outcomes(self, state, action):
            return [(1.0, 2 * (action == "Open"), 0.0, False)]
    tok = SimpleNamespace(decode=lambda ids, **_: "</think><answer>" + " || ".join(said) + "</answer>")
    for said, won in ((["Open", "Shut"], False), (["Shut", "Open"], True)):
        env = Door()
        env.reset(0)
        traj = rm.Trajectory(env, 0, 2)
        traj.append([7], sampled=False)
        traj.append([8], sampled=True)
        rm.take_turn(traj, tok, cfg, (9, 9))
        assert traj.success == won and traj.done


# ----------------------------------------------------------------------------------------- what an iteration draws
@pytest.fixture
def drawn(monkeypatch):
    """drawn(seed, i) -> seeds of the levels, and of the sampling, of an iteration; what `learn` was given."""
    monkeypatch.setattr(rm, "check_ratios", lambda *rest: None)  # they are made up
    def run(cfg, seed, i):
        calls = []

        def play(models, seeds, N, cfg, sampling_seed):
            calls.append((list(seeds), sampling_seed))
            return [walked(group) for group in range(len(seeds)) for _ in range(N)]

        def learn(trajs, models, cfg, seed):
            calls.append(([traj.group for traj in trajs], seed))
            return {}, []
        cfg.seed = seed
        rm.iterate(i, None, cfg, learn, play)
        return calls
    return run


def test_runs_of_other_seeds_and_other_iterations_draw_everything_anew(cfg, drawn):
    cfg.prompts, cfg.rollouts = 4, 2
    settings = [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]
    calls = [drawn(cfg, seed, i)[0] for seed, i in settings]
    assert len({level for levels, _ in calls for level in levels}) == 4 * len(settings)
    assert len({sampling_seed for _, sampling_seed in calls}) == len(settings)
    assert calls == [drawn(cfg, seed, i)[0] for seed, i in settings], "but the same again for the same"


def test_slices_of_online_k_share_nothing(cfg, drawn):
    """Three slices of two prompts: six levels are played at once, then each slice learns from its own episodes."""
    cfg.prompts, cfg.rollouts, cfg.online_k = 2, 2, 3
    (levels, _), *slices = drawn(cfg, 0, 1)
    assert len(set(levels)) == 6
    assert [groups for groups, _ in slices] == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]
    assert len({seed for _, seed in slices}) == 3


# ------------------------------------------------------------------------------------------------ what is reported
def test_a_row_of_the_log(cfg, monkeypatch):
    """Two prompts, two episodes each, five turns. R = 1, -0.1; 0.5, 0, so that std is 0.55 and 0.25, on average 0.4.
    The mean KL of the three trained tokens is 0.1."""
    monkeypatch.setattr(rm, "check_ratios", lambda *rest: None)  # they are made up
    thoughts = ["<think>a b</think><answer>Up</answer>", "<think>c</think><answer>Up</answer>", "<think>a b c d"]
    cfg.prompts = cfg.rollouts = 2
    trajs = [walked(0, [0.0, 1.0], thoughts[:2], [6, 4], success=True, entropy=5.0),
             walked(0, [-0.1], thoughts[2:], [10], entropy=2.0),
             walked(1, [0.5], thoughts[1:2], [3], entropy=1.0),
             walked(1, [0.0], thoughts[:1], [7], entropy=2.0)]
    trajs[1].turns[0]["valid"] = False
    steps = [dict(policy_loss=1.0, clip_fraction=0.0, grad_norm=2.0)] * 8  # a spike in the second of 16
    steps += [dict(policy_loss=3.0, clip_fraction=0.5, grad_norm=3.0)] * 8
    steps[1] = steps[1] | {"grad_norm": 26.0}
    mask = torch.tensor([[1, 1, 0, 0, 0], [0] * 5, [0, 0, 1, 0, 0]]).bool()
    learned = {"mask": mask, "kl": torch.tensor([[0.4, -0.2, 0, 0, 0], [0] * 5, [0, 0, 0.1, 0, 0]])}, steps
    row, played, returned = rm.iterate(7, None, cfg, lambda *rest: learned, lambda *rest: trajs)
    assert played is trajs and returned == [learned]
    assert row.pop("seconds_rollout") >= 0 and row.pop("seconds_update") >= 0
    assert row == pytest.approx(dict(
        iteration=7, reward=0.35, reward_std=0.4, success=0.25, valid=0.8, turns=1.25, tokens=30, response_length=7.5,
        entropy=10 / 30, think_length=10 / 5, distinct=3 / 5, updates=16, policy_loss=2.0, clip_fraction=0.25,
        grad_norm=4.0, grad_norm_max=26.0, kl=0.1), abs=1e-6)


def test_a_row_of_an_iteration_without_updates(cfg, monkeypatch):
    monkeypatch.setattr(rm, "check_ratios", lambda *rest: None)  # they are made up
    cfg.prompts, cfg.rollouts = 1, 2
    row, _, _ = rm.iterate(1, None, cfg, lambda *rest: ({}, []), lambda *rest: [walked(), walked()])
    assert row["updates"] == row["reward_std"] == 0 and "grad_norm" not in row


@pytest.mark.parametrize("turns, per_turn, actions, random, optimal", [
    (1, 3, 10, "0.50", "1.00"),  # of the 8 ways to act three times 4 go up twice or more
    (3, 1, 10, "0.50", "1.00"),
    (5, 5, 2, "0.25", "1.00"),
    (5, 5, 1, "0.00", "0.00")])
def test_an_evaluation(turns, per_turn, actions, random, optimal, cfg, tok, tmp_path, capsys, monkeypatch):
    """Three of five levels are won, 0.6; Wilson's interval of that: 0.23 to 0.88. Returns say the opposite."""
    monkeypatch.setattr(rm, "EVALUATED_AT_ONCE", 2)
    monkeypatch.setattr(rm, "check_ratios", lambda *rest: None)  # they are made up
    cfg.max_turns, cfg.max_actions_per_turn, cfg.max_actions = turns, per_turn, actions
    cfg.env, cfg.eval_prompts, cfg.temperature, cfg.out = Walk, 5, 1.0, str(tmp_path)
    parts = []

    def play(models, seeds, N, cfg, sampling_seed):
        parts.append((list(seeds), sampling_seed))
        assert cfg.env is Walk and N == 1 and cfg.temperature == 0.5, "Sec. 3.2"
        trajs = []
        for group, seed in enumerate(seeds):
            traj = rm.begin(seed, 0, group, tok, cfg)
            traj.success = seed in (1, 3, 4)
            traj.reward[-1] = -1.0 if traj.success else 1.0
            trajs.append(traj)
        return trajs
    columns, samples = rm.evaluate(3, SimpleNamespace(tok=tok), cfg, play)
    assert columns["eval"] == {"Walk": pytest.approx(0.6)}
    assert columns["yardsticks"] == {"Walk": pytest.approx([float(random), float(optimal)])}
    assert [sample["text"].endswith("return -1\n") for sample in samples] == [False, True, False, True, True]
    assert sum([seeds for seeds, _ in parts], []) == [0, 1, 2, 3, 4]
    assert len({sampling_seed for _, sampling_seed in parts}) == len(parts) == 3
    said = capsys.readouterr().out
    for piece in ("iteration 3", "Walk 0.60", "[0.23, 0.88]", f"random {random}", f"optimal {optimal}"):
        assert piece in said


def test_smoothed_curves():
    """The median of a value and its two neighbours on either side; in 200 values five; at the ends as many as there are
    on both sides, so that the line begins and ends where the values do."""
    def smoothed(y):  # the thick line
        rows = [{"iteration": i, "reward": value} for i, value in enumerate(y)]
        ax = plots.matplotlib.figure.Figure().add_subplot()
        plots.draw_training(ax, {"a run": plots.Run({}, rows)}, "reward")
        thin, thick = ax.get_lines()
        assert thin.get_ydata().tolist() == list(y)
        return np.array(thick.get_ydata())
    assert smoothed([1.0, 3, 4, 7, 8, 9, 9, 9]).tolist() == [1, 3, 4, 7, 8, 9, 9, 9]
    assert smoothed([1.0, 9, 9, 2, 3, 9, 5]).tolist() == [1, 9, 3, 9, 5, 5, 5]
    assert smoothed([1.0, 3, 4]).tolist() == [1, 3, 4] and smoothed([1.0, 3, 2, 7, 8]).tolist() == [1, 2, 3, 7, 8]
    fall = np.repeat([1.0, 0.0], 100)
    assert (smoothed(fall) == fall).all(), "a fall stays where it is, and as steep"
    spikes = np.where(np.arange(200) % 11 < 5, 1.0, 0.0)  # five of eleven
    assert (smoothed(spikes)[5:-5] == 0).all()
    assert len(smoothed([])) == 0


def test_a_collapse_lasts_ten_iterations_also_in_a_dead_run():
    """Success of 0.75, then (from there on dead) about half of it: a last low value alone is no collapse."""
    def seen(*success):
        rows = [{"iteration": 0}]
        for i, value in enumerate(success, 1):
            rows.append({"iteration": i, "success": value, "updates": 4 if i <= 5 else 0})
        assert plots.is_dead(rows)
        return plots.peak_and_collapse(plots.Run({}, rows))
    high = [0.75] * 5
    assert seen(*high, *[0.5] * 9, 0.0) == (1, None)
    assert seen(*high, *[0.5] * 6, *[0.0] * 9) == (1, None), "nine"
    assert seen(*high, *[0.0] * 10) == (1, 6)


def test_a_run_without_a_row_to_draw_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"env": "bandit", "model": "tiny"}')
    (tmp_path / "log.jsonl").write_text('{"iteration": 0}\n')
    with pytest.raises(envs.UserError, match="no curve yet"):
        DRAW({"run": plots.load(tmp_path)}, tmp_path / "curves.png")
