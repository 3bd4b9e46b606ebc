"""Where a wrong program would train on, and print a good success: results worked out on paper.

Most of these tests replace a part of the program, hand it episodes that were made up, and compare
with numbers that stand here.
"""
from types import SimpleNamespace

import pytest
import torch
import transformers

import envs
import plots
import ragen_mini as rm
from conftest import refused
from support import chat, device


class Walk(envs.Env):
    """Up takes a step and pays 1, Down stands still. The goal is two steps away, and one may go on.
    """
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


def walked(group=0, rewards=(0.0,), answers=None, tokens=None, success=False, entropy=0.0):
    """-> a finished episode, without ids"""
    traj = rm.Trajectory(None, group, 0)
    for k, reward in enumerate(rewards):
        turn = dict(state="", answer=answers[k] if answers else "<think></think>", valid=True,
                    reward=reward, tokens=tokens[k] if tokens else 1)
        traj.turns.append(turn)
        traj.reward.append(reward)
    traj.success, traj.entropy = success, entropy
    return traj


# -------------------------------------------------------------------------------------- one episode
def test_no_episode_takes_more_actions_than_it_has(play, cfg):
    cfg.max_actions, cfg.max_new_tokens = 3, 32
    traj, = play(["</think><answer>Up || Up || Up || Up || Up</answer>"], Walk, [0], cfg)
    assert traj.env.state == 3 and traj.actions_left == 0 and traj.done and len(traj.turns) == 1
    cfg.max_actions = 4
    traj, = play(["</think><answer>Up || Up || Up</answer>"], Walk, [0], cfg)
    assert [turn["state"] for turn in traj.turns] == ["P", "_ _ _ P"]
    assert traj.env.state == 4 and traj.actions_left == 0


def test_the_model_is_told_what_its_answer_earned_and_what_is_left(play, cfg, tok, monkeypatch):
    """Two steps earn 2; then a step and a stand earn 1; a malformed answer costs 0.1, and a valid
    one after it is not punished for it.
    """
    told, encode = [], rm.encode

    def spy(tok, first_tag, text, after_answer=False):
        if after_answer:
            told.append(text.splitlines())
        return encode(tok, first_tag, text, after_answer)
    monkeypatch.setattr(rm, "encode", spy)
    cfg.max_turns, cfg.max_new_tokens = 5, 32
    answers = ["</think><answer>Up || Up</answer>", "</think><answer>Up || Down</answer>", "Up",
               "</think><answer>Down</answer>", "</think><answer>Up</answer>"]
    traj, = play(answers, Walk, [0], cfg)
    assert [lines[0] for lines in told] == [
        "Reward: 2.0", "Reward: 1.0", "Reward: -0.1", "Reward: 0.0"]
    assert [lines[-1] for lines in told] == [
        f"You have {left} actions left." for left in (8, 6, 6, 5)]
    assert [lines[2] for lines in told] == ["_ _ P", "_ _ _ P", "_ _ _ P", "_ _ _ P"]
    assert [turn["reward"] for turn in traj.turns] == [2.0, 1.0, -0.1, 0.0, 1.0]
    assert [turn["valid"] for turn in traj.turns] == [True, True, False, True, True]
    assert traj.R == pytest.approx(3.9)
    ends = [t for t, mine in enumerate(traj.mask)
            if mine and (t + 1 == len(traj.mask) or not traj.mask[t + 1])]
    assert [traj.reward[t] for t in ends] == [2.0, 1.0, -0.1, 0.0, 1.0], "on the last token"
    assert sum(traj.reward) == pytest.approx(3.9), "and nowhere else"
    written = [len(tok(text + "<|im_end|>").input_ids) for text in answers]
    assert [turn["tokens"] for turn in traj.turns] == written, "with the end token"


# ----------------------------------------------------------------------- what is trained, with what
def plain_logps(policy, traj, temperature):  # -> (T-1,): one episode, one pass
    with torch.no_grad():
        logits = policy(torch.tensor([traj.ids[:-1]])).logits[0] / temperature
    targets = torch.tensor(traj.ids[1:])
    return logits.log_softmax(-1)[torch.arange(len(targets)), targets]


def test_a_policy_that_left_its_reference_pays_for_it(cfg):
    """KL token by token, against plain passes of both models. Then its mean over tokens."""
    cfg.temperature, cfg.kl_coef, cfg.max_turns, cfg.rollouts, cfg.env = 0.7, 0.5, 2, 2, "bandit"
    models = rm.load_models(cfg)
    before = transformers.AutoModelForCausalLM.from_pretrained(cfg.model)
    with torch.no_grad():
        for weight in models.policy.parameters():
            weight.mul_(1.1)
    trajs = rm.rollout(models, [300, 301], 2, cfg, 0)
    trajs[0].append(trajs[0].ids[:1], sampled=False)  # so that rows differ in length
    batch = rm.compute_advantages(trajs, rm.returns(trajs, cfg), models, cfg)
    of_all = []
    for row, traj in enumerate(trajs):
        ours = torch.tensor(traj.mask[1:])
        k1 = (plain_logps(models.policy, traj, 0.7) - plain_logps(before, traj, 0.7)) * ours
        assert batch["kl"][row, :len(k1)].tolist() == pytest.approx(k1.tolist(), abs=1e-4)
        rewards = torch.tensor(traj.reward[1:]) - 0.5 * k1
        to_come = rewards.flip(0).cumsum(0).flip(0)[ours]
        target = batch["value_target"][row, :len(k1)][ours]
        assert target.tolist() == pytest.approx(to_come.tolist(), abs=1e-3)
        of_all += k1[ours].tolist()
    assert max(map(abs, of_all)) > 0.01
    row = rm.log_columns(trajs, rm.returns(trajs, cfg), [(batch, [{"grad_norm": 1.0}])])
    assert row["kl"] == pytest.approx(sum(of_all) / len(of_all), abs=1e-4)


def numbered(rewards, size):
    """-> episodes of one message token and one written token, which is the episode's number"""
    trajs = []
    for number, reward in enumerate(rewards):
        traj = walked(number // size, [])
        traj.append([99], sampled=False)
        traj.append([number], True, -1.0)
        traj.reward[-1] = float(reward)
        trajs.append(traj)
    return trajs


@pytest.fixture
def no_networks(tok):
    return rm.Models(None, None, None, None, tok)


@pytest.fixture
def updated(monkeypatch):
    monkeypatch.setattr(rm, "updates", lambda *rest: ["updated"])


def test_kept_episodes_are_trained_by_their_own_returns(cfg, no_networks, updated):
    """Four groups of two, of which the second and the last one differ most."""
    cfg.algo, cfg.adv_norm, cfg.keep, cfg.prompts, cfg.rollouts = "grpo", "mean", 0.5, 4, 2
    trajs = numbered([0, 0, 1, 3, 5, 5.5, 0, 10], 2)
    for first in (0, 4):  # in a second slice of --online-k the groups have higher numbers
        for traj in trajs:
            traj.group = traj.group % 4 + first
        batch, steps = rm.learn(trajs, no_networks, cfg, 0)
        assert batch["targets"].tolist() == [[2], [3], [6], [7]] and steps == ["updated"]
        assert batch["adv"].tolist() == [[-1.0], [1.0], [-5.0], [5.0]]


@pytest.mark.parametrize("algo, keep, rewards, learns", [
    ("ppo", 0.5, [0, 0, 1, 1], False),  # in all it differs, but not in the kept group
    ("ppo", 1.0, [0, 0, 1, 1], True),
    ("ppo", 0.5, [0, 0, 1, 2], True),
    ("grpo", 1.0, [0, 0, 1, 1], False),
    ("grpo", 1.0, [0, 0, 1, 2], True),
    ("grpo", 0.5, [0, 0, 1, 2], True)])
def test_whether_there_is_something_to_compare_is_asked_after_the_filter(
        cfg, no_networks, updated, monkeypatch, algo, keep, rewards, learns):
    cfg.algo, cfg.keep, cfg.prompts, cfg.rollouts = algo, keep, 2, 2
    monkeypatch.setattr(rm, "token_values", lambda critic, part: torch.zeros(len(part["mask"])))
    batch, steps = rm.learn(numbered(rewards, 2), no_networks, cfg, 0)
    assert (steps == ["updated"]) == learns and bool(batch) == learns


@pytest.fixture
def recorded(monkeypatch):
    """Which rows each gradient step took. No model is needed."""
    steps = []

    def add_gradients(batch, rows, models, cfg):
        steps.append(rows)
        return {"policy_loss": 2.0}
    monkeypatch.setattr(rm, "add_gradients", add_gradients)
    monkeypatch.setattr(rm, "take_step", lambda models: 1.0)
    return steps


def test_every_epoch_takes_every_trajectory_once_in_an_order_of_its_own(cfg, recorded):
    cfg.minibatch_size, cfg.epochs = 4, 2
    batch = {"mask": torch.ones(10, 3, dtype=torch.bool)}
    steps = rm.updates(batch, None, cfg, seed=5)
    assert steps == [{"policy_loss": 2.0, "grad_norm": 1.0}] * 6
    assert [len(rows) for rows in recorded] == [4, 4, 2] * 2
    first, second = sum(recorded[:3], []), sum(recorded[3:], [])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != sorted(first) and first != second
    rm.updates(batch, None, cfg, seed=5)
    assert recorded[6:] == recorded[:6]
    rm.updates(batch, None, cfg, seed=6)
    assert recorded[12:] != recorded[:6]


def test_learn_orders_minibatches_of_the_kept_episodes_by_its_seed(cfg, no_networks, recorded):
    """Minibatches of at most three: two groups of four are three updates, those of one group two.
    """
    for seed, keep in ((0, 1.0), (1, 1.0), (0, 1.0), (0, 0.5)):
        cfg = rm.replace(cfg, algo="grpo", rollouts=4, keep=keep, minibatch_size=3)
        rm.learn(numbered([0, 1, 0, 1, 0, 5, 0, 5], 4), no_networks, cfg, seed)
    assert [len(rows) for rows in recorded] == [3, 3, 2] * 3 + [3, 1]
    assert recorded[:3] == recorded[6:9] != recorded[3:6]


def test_statistics_of_a_step_are_means_over_all_its_tokens(cfg, no_networks, monkeypatch):
    """Rows of one and of three tokens, each a micro-batch of its own. Two of the four tokens were
    clipped, and the loss is 2 (1 + 0 - 3 + 1) / 4.
    """
    cfg.micro_tokens = 1
    weight = torch.tensor(2.0, requires_grad=True)
    monkeypatch.setattr(rm, "token_logps", lambda policy, part, cfg: (
        weight * part["old_logp"][part["mask"]], None))
    monkeypatch.setattr(rm, "policy_loss", lambda logp, entropy, old_logp, adv, cfg: (
        adv * weight, adv > 0))
    batch = {"mask": torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0]]).bool(),
             "adv": torch.tensor([[1.0, 0, 0], [0, -3, 1], [1, 1, 0]])}
    batch["old_logp"] = batch["adv"]
    stats = rm.add_gradients(batch, [0, 1], no_networks, cfg)
    assert stats == {"clip_fraction": 0.5, "policy_loss": 2 * -0.25}
    assert weight.grad == -0.25


def test_the_value_is_clipped_around_that_of_before_the_first_update(cfg, no_networks, monkeypatch):
    """The old value is 0, now it is 1, the target is 2. 1 is too far, so 0.5 counts: 1.5 ** 2 / 2.
    Around the present value nothing would be clipped.
    """
    one = torch.ones(1, requires_grad=True)
    monkeypatch.setattr(rm, "token_logps", lambda policy, part, cfg: (one, None))
    monkeypatch.setattr(rm, "token_values", lambda critic, part: one)
    monkeypatch.setattr(rm, "policy_loss", lambda logp, *rest: (0 * logp, logp > 0))
    batch = {"mask": torch.tensor([[True]]), "adv": torch.zeros(1, 1),
             "old_logp": torch.zeros(1, 1), "value": torch.zeros(1, 1),
             "value_target": torch.full((1, 1), 2.0)}
    no_networks.critic = torch.nn.Identity()
    assert rm.add_gradients(batch, [0], no_networks, cfg)["value_loss"] == 1.5 ** 2 / 2
    assert one.grad == 0, "it has moved far enough"


def test_success_is_that_of_the_last_state(cfg):
    """What one can win and lose again counts as it ended."""
    class Door(Walk):
        actions = ("Open", "Shut")

        def outcomes(self, state, action):
            return [(1.0, 2 if action == "Open" else 0, 0.0, False)]
    for said, won in ((["Open", "Shut"], False), (["Shut", "Open"], True)):
        answer = f"</think><answer>{' || '.join(said)}</answer>"
        tok = SimpleNamespace(decode=lambda ids, **_: answer)
        env = Door()
        env.reset(0)
        traj = rm.Trajectory(env, 0, 2)
        traj.append([7], sampled=False)
        traj.append([8], sampled=True)
        rm.take_turn(traj, tok, cfg, (9, 9))
        assert traj.success == won and traj.done


# ------------------------------------------------------------------------------------ one iteration
@pytest.fixture
def made_up(monkeypatch):
    """Episodes that were made up have no log-probs."""
    monkeypatch.setattr(rm, "logp_gap", lambda *rest: 0.0)
    monkeypatch.setattr(chat, "check_gap", lambda *rest: None)


@pytest.fixture
def drawn(made_up, monkeypatch):
    """drawn(cfg, seed, i) -> (the levels' seeds, sampling seed), then what each `learn` was given
    """
    def run(cfg, seed, i):
        calls = []

        def rollout(models, seeds, N, cfg, sampling_seed):
            calls.append((list(seeds), sampling_seed))
            return [walked(group) for group in range(len(seeds)) for _ in range(N)]

        def learn(trajs, models, cfg, seed):
            calls.append(([traj.group for traj in trajs], seed))
            return {}, []
        monkeypatch.setattr(rm, "rollout", rollout)
        monkeypatch.setattr(rm, "learn", learn)
        rm.iterate(i, None, rm.replace(cfg, seed=seed))
        return calls
    return run


def test_other_seeds_and_other_iterations_draw_everything_anew(cfg, drawn):
    cfg.prompts, cfg.rollouts = 4, 2
    settings = [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]
    calls = [drawn(cfg, seed, i) for seed, i in settings]
    levels = [level for (of_iteration, _), _ in calls for level in of_iteration]
    assert len(set(levels)) == 4 * len(settings) and min(levels) > max(envs.EVAL_SEEDS)
    assert max(levels) > 2 ** 30, "there are as many levels as seeds"
    assert len({sampling_seed for (_, sampling_seed), _ in calls}) == len(settings)
    assert len({learn_seed for _, (_, learn_seed) in calls}) == len(settings)
    assert calls == [drawn(cfg, seed, i) for seed, i in settings], "the same again for the same"


def test_training_never_draws_a_seed_of_the_evaluation(cfg, drawn, monkeypatch):
    """Nearly all seeds are made seeds of the evaluation."""
    monkeypatch.setattr(envs, "EVAL_SEEDS", range(2 ** 31 - 10 ** 6))
    cfg.prompts, cfg.rollouts = 40, 2
    (levels, _), _ = drawn(cfg, 0, 1)
    assert len(set(levels)) == 40 and min(levels) >= 2 ** 31 - 10 ** 6


def test_slices_of_online_k_share_nothing(cfg, drawn):
    """Three slices of two prompts: six levels are played at once, then each slice is learnt from.
    """
    cfg.prompts, cfg.rollouts, cfg.online_k = 2, 2, 3
    (levels, _), *slices = drawn(cfg, 0, 1)
    assert len(set(levels)) == 6
    assert [groups for groups, _ in slices] == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]
    assert len({seed for _, seed in slices}) == 3


# ------------------------------------------------------------- rollout and update, the same numbers
@pytest.fixture
def uncertain(llama, tok, cfg):
    """uncertain(*changes) -> the gap after each change of old_logp, a function of (k, log-prob)"""
    cfg.temperature, cfg.max_turns = 0.7, 2
    models = SimpleNamespace(policy=llama, tok=tok)
    trajs = rm.rollout(models, [300, 301], 2, cfg, 0)
    trajs[1].append([5] * 50, sampled=False)  # it is the longest

    def gap(change, which=1):
        kept = trajs[which].old_logp
        trajs[which].old_logp = [change(k, logp) for k, logp in enumerate(kept)]
        found = rm.logp_gap(trajs, models, cfg)
        trajs[which].old_logp = kept
        return found
    return gap


def test_the_gap_is_the_mean_distance_of_log_probs_times_the_temperature(uncertain):
    """Differences of opposite sign do not cancel. The longest episode is the one that is looked at,
    because a sliding window, for example, shows only there.
    """
    assert uncertain(lambda k, logp: logp) < 1e-4
    assert uncertain(lambda k, logp: logp - 0.5) == pytest.approx(0.35, abs=1e-3)
    assert uncertain(lambda k, logp: logp + 0.5 * (-1) ** k) == pytest.approx(0.35, abs=1e-3)
    assert uncertain(lambda k, logp: logp - 0.5, which=0) < 1e-4


def test_a_gap_is_refused_in_the_first_iteration_and_later_logged(cfg, monkeypatch):
    """Before anything is learnt from it."""
    learnt = []
    monkeypatch.setattr(rm, "rollout", lambda *rest: [walked(0), walked(0)])
    monkeypatch.setattr(rm, "logp_gap", lambda *rest: 0.05)
    monkeypatch.setattr(rm, "learn", lambda *rest: learnt.append(1) or ({}, []))
    models = SimpleNamespace(policy=torch.nn.Identity().eval())
    cfg = rm.replace(cfg, prompts=1, rollouts=2)
    assert "0.05" in refused(rm.iterate, 1, models, cfg) and not learnt
    models.policy.train()
    assert "eval()" in refused(rm.iterate, 1, models, cfg)
    row, _ = rm.iterate(2, models, cfg)
    assert row["logp_gap"] == 0.05 and learnt
    monkeypatch.setattr(device, "rounding", lambda device: 0.1 if device == "cuda" else 1e-4)
    chat.check_gap(0.05, models, rm.replace(cfg, device="cuda"))


# ----------------------------------------------------------------------------------- what is logged
def test_a_row_of_the_log(cfg, monkeypatch):
    """Two prompts, two episodes each, five turns. R = 1, -0.1; 0.5, 0, so that the stds are 0.55
    and 0.25, on average 0.4. The mean KL of the three trained tokens is 0.1.
    """
    answers = ["<think>a b</think><answer>Up</answer>", "<think>c</think><answer>Up</answer>",
               "<think>a b c d"]
    trajs = [walked(0, [0.0, 1.0], answers[:2], [6, 4], success=True, entropy=5.0),
             walked(0, [-0.1], answers[2:], [10], entropy=2.0),
             walked(1, [0.5], answers[1:2], [3], entropy=1.0),
             walked(1, [0.0], answers[:1], [7], entropy=2.0)]
    trajs[1].turns[0]["valid"] = False
    steps = [dict(policy_loss=1.0, clip_fraction=0.0, grad_norm=2.0) for _ in range(8)]
    steps += [dict(policy_loss=3.0, clip_fraction=0.5, grad_norm=3.0) for _ in range(8)]
    steps[1]["grad_norm"] = 26.0  # a spike in the second of 16 steps
    batch = {"mask": torch.tensor([[1, 1, 0, 0, 0], [0] * 5, [0, 0, 1, 0, 0]]).bool(),
             "kl": torch.tensor([[0.4, -0.2, 0, 0, 0], [0] * 5, [0, 0, 0.1, 0, 0]])}
    now = [0.0]

    def passes(seconds, result):  # the rollout takes 5, the gap 100, which are nobody's, `learn` 2
        now[0] += seconds
        return result
    monkeypatch.setattr(rm, "perf_counter", lambda: now[0])
    monkeypatch.setattr(rm, "rollout", lambda *rest: passes(5, trajs))
    monkeypatch.setattr(rm, "logp_gap", lambda *rest: passes(100, 0.25))
    monkeypatch.setattr(rm, "learn", lambda *rest: passes(2, (batch, steps)))
    row, played = rm.iterate(7, None, rm.replace(cfg, prompts=2, rollouts=2))
    assert played is trajs
    assert (row.pop("seconds_rollout"), row.pop("seconds_update")) == (5, 2)
    assert row == pytest.approx(dict(
        iteration=7, logp_gap=0.25, reward=0.35, reward_std=0.4, success=0.25, valid=0.8,
        turns=1.25, tokens=30, response_length=7.5, entropy=10 / 30, think_length=10 / 5,
        distinct=3 / 5, updates=16, policy_loss=2.0, clip_fraction=0.25, grad_norm=4.0,
        grad_norm_max=26.0, kl=0.1), abs=1e-6)


def test_a_row_counts_all_slices_of_online_k(cfg, made_up, monkeypatch):
    """Three slices, of which the second one made no update. The statistics are those of all steps,
    the KL that of all slices which have one.
    """
    batch = {"mask": torch.ones(1, 2).bool()}
    results = [(batch | {"kl": torch.full((1, 2), 0.1)}, [{"grad_norm": 9.0}, {"grad_norm": 1.0}]),
               ({}, []),
               (batch | {"kl": torch.full((1, 2), 0.3)}, [{"grad_norm": 2.0}])]
    waiting = list(results)
    rewards = (1.0, 0.0, 2.0, 2.0, 5.0, 5.0)
    trajs = [walked(k // 2, [reward], success=k == 0) for k, reward in enumerate(rewards)]
    monkeypatch.setattr(rm, "rollout", lambda *rest: trajs)
    monkeypatch.setattr(rm, "learn", lambda *rest: waiting.pop(0))
    row, _ = rm.iterate(1, None, rm.replace(cfg, prompts=1, rollouts=2, online_k=3))
    assert (row["updates"], row["grad_norm"], row["grad_norm_max"]) == (3, 4.0, 9.0)
    assert row["kl"] == pytest.approx(0.2)
    assert row["reward"] == 2.5 and row["success"] == pytest.approx(1 / 6, abs=1e-6)
    assert row["reward_std"] == pytest.approx(0.5 / 3, abs=1e-6)
    monkeypatch.setattr(rm, "learn", lambda *rest: ({}, []))
    row, _ = rm.iterate(1, None, rm.replace(cfg, prompts=3, rollouts=2))
    assert row["updates"] == 0 and "grad_norm" not in row and "kl" not in row


@pytest.mark.parametrize("answer, thought", [
    ("<think>Go up .</think> <answer>Up</answer>", "Go up ."),
    ("<think>Go up and up", "Go up and up"),  # one that does not end
    ("<think>Go</think> <answer>Up</think>", "Go"),
    ("<think>one\ntwo</think>", "one\ntwo"),
    ("<think></think>", ""), ("<answer>Up</answer>", "")])
def test_thoughts(answer, thought):
    assert rm.thought_of({"answer": answer}) == thought


def test_a_run_is_dead_after_ten_iterations_without_an_update():
    rows = [{"iteration": 0}] + [{"iteration": i, "updates": 0} for i in range(1, 10)]
    assert not rm.is_dead(rows), "nine, and row 0, which has none"
    assert not rm.is_dead(rows[1:])
    assert rm.is_dead([*rows, {"updates": 0}])
    assert not rm.is_dead([*rows, {"updates": 1}])
    learnt = [*rows[:5], {"updates": 4}, *rows[6:]]
    assert not rm.is_dead([*learnt, {"updates": 0}]), "in the ten there was one"
    assert rm.is_dead([{"updates": 4}, *rows[1:], {"updates": 0}]), "but not in the last ten"


# ------------------------------------------------------------------------------------ an evaluation
@pytest.mark.parametrize("turns, per_turn, actions, random, optimal", [
    (1, 3, 10, 0.5, 1.0),  # of the 8 ways to act three times, 4 go up twice or more
    (3, 1, 10, 0.5, 1.0),
    (5, 5, 2, 0.25, 1.0),
    (5, 5, 1, 0.0, 0.0)])
def test_an_evaluation(turns, per_turn, actions, random, optimal, cfg, tok, capsys,
                       monkeypatch):
    """Three of five levels are won, 0.6, with Wilson's interval from 0.23 to 0.88. Returns say the
    opposite.
    """
    monkeypatch.setattr(device, "episodes_at_once", lambda policy, cfg: 2)
    cfg.max_turns, cfg.max_actions_per_turn, cfg.max_actions = turns, per_turn, actions
    cfg.env, cfg.eval_prompts, cfg.temperature = Walk, 5, 1.0
    parts = []

    def rollout(models, seeds, N, cfg, sampling_seed):
        parts.append((list(seeds), sampling_seed))
        assert cfg.env is Walk and N == 1 and cfg.temperature == 0.5, "Sec. 3.2"
        trajs = []
        for group, seed in enumerate(seeds):
            traj = rm.begin(seed, 0, group, tok, cfg)
            traj.success = seed in (1, 3, 4)
            traj.reward[-1] = -1.0 if traj.success else 1.0
            trajs.append(traj)
        return trajs
    monkeypatch.setattr(rm, "rollout", rollout)
    columns, trajs = rm.evaluate(SimpleNamespace(policy=None, tok=tok), cfg, "iteration 3: ")
    assert columns["eval"] == {"Walk": pytest.approx(0.6)}
    assert columns["yardsticks"] == {"Walk": pytest.approx([random, optimal])}
    assert [traj.R for traj in trajs] == [1, -1, 1, -1, -1]
    assert [seed for seeds, _ in parts for seed in seeds] == [0, 1, 2, 3, 4]
    sampling_seeds = {sampling_seed for _, sampling_seed in parts}
    assert len(sampling_seeds) == len(parts) == 3, "else different parts would have the same luck"
    said = capsys.readouterr().out
    numbers = f"Walk 0.60 [0.23, 0.88]  random {random:.2f}  optimal {optimal:.2f}"
    assert said.startswith("iteration 3: ") and numbers in said
    assert cfg.temperature == 1.0, "the caller's settings stay"


def test_peak_and_collapse(monkeypatch):
    """Means of two: .55 .95 1 .8 .35 .05 0. The peak, 1, begins at 3. From 6 on three iterations
    are below half of it, and 0.6 at 5 is not.
    """
    def found(*success):  # in iteration 1, 2, ...
        rows = [{"iteration": i, "success": value} for i, value in enumerate((0.0, *success))]
        return plots.peak_and_collapse(plots.Run({}, [{"iteration": 0}, *rows[1:]]))
    assert found(*[0.75] * 5, *[0.0] * 10) == (1, 6) and found(*[0.75] * 5, *[0.0] * 9)[1] is None
    monkeypatch.setattr(plots, "WINDOW", 2)
    monkeypatch.setattr(plots, "COLLAPSED_FOR", 3)
    assert found(.2, .9, 1, 1, .6, .1, 0, 0) == found(.2, .9, 1, 1, .6, .1, 0, .49) == (3, 6)
    assert found(.2, .9, 1, 1, .6, .1, 0, .5) == (3, None), "half of it"
    assert found(1, 1, 0, 0, 1, 1, 0, 0, 0) == (1, 7), "the first peak"
    assert found(1, 1, 0, 0, 0, 1, 1) == (1, 3), "it may recover"
    assert found(0, 0, 0, 1, 1) == (4, None), "low before the peak"
    assert found(1) == (1, None), "shorter than a window"
