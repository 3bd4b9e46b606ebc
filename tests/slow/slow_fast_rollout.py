"""extras/fast_rollout.py on a CPU, where all of it runs but the recording of CUDA graphs."""
import contextlib
import copy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ragen_mini as rm
import runs
from extras import fast_rollout

ROOT = Path(__file__).resolve().parents[2]
GREEDY = 1e-4


@pytest.fixture
def cfg(cfg):  # lakes: answers and episodes have unequal lengths
    return rm.replace(cfg, algo="grpo", kl_coef=0.0, max_new_tokens=40, max_turns=3)


@pytest.fixture
def models(cfg):
    return rm.load_models(cfg)


@pytest.fixture
def way(monkeypatch):
    """way("graph") replaces what this way replaces. After the test it is as before."""

    def choose(name):
        monkeypatch.setattr(rm, "read", rm.read)
        monkeypatch.setattr(rm, "rollout", rm.rollout)
        fast_rollout.WAYS[name]()
    return choose


def play(models, cfg, seeds=range(300, 303), N=5):
    return rm.rollout(models, seeds, N, cfg, 7)


def same_episodes(one, other):
    return [traj.ids for traj in one] == [traj.ids for traj in other] and \
        [traj.mask for traj in one] == [traj.mask for traj in other] and \
        [traj.reward for traj in one] == [traj.reward for traj in other]


def largest_gap(one, other):  # of the log-probs
    return max((torch.tensor(a.old_logp) - torch.tensor(b.old_logp)).abs().max().item()
               for a, b in zip(one, other, strict=True))


def gap_to_an_update(trajs, models, cfg):
    batch = rm.collate(trajs, cfg.device)
    logp = rm.per_token(lambda part: rm.token_logps(models.policy, part, cfg)[0], batch)
    return (logp - batch["old_logp"])[batch["mask"]].abs()


@pytest.mark.parametrize("name", ["graph", "compile"])
@pytest.mark.parametrize("temperature", [1.0, GREEDY])
def test_it_plays_as_today(models, cfg, way, name, temperature):
    """Equal seeds give equal episodes, also after a step of the policy, whose copy must follow."""
    cfg = rm.replace(cfg, temperature=temperature)
    today = play(models, cfg)
    before = copy.deepcopy(models.policy.state_dict())
    learn_something(models.policy)
    later = play(models, cfg)
    models.policy.load_state_dict(before)
    way(name)
    ours = play(models, cfg)
    assert same_episodes(ours, today)
    assert temperature == GREEDY or largest_gap(ours, today) < 1e-4
    learn_something(models.policy)
    assert same_episodes(play(models, cfg), later) and not same_episodes(today, later)


def learn_something(policy):
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in policy.parameters():
            weights += 0.05 * weights.std() * torch.randn_like(weights)


def test_continuous_batching_greedily_writes_the_same_tokens(models, cfg, way):
    cfg = rm.replace(cfg, temperature=GREEDY)
    today = play(models, cfg)
    way("batching")
    assert same_episodes(play(models, cfg), today)


@pytest.mark.parametrize("name", list(fast_rollout.WAYS))
def test_log_probs_are_those_of_an_update(models, cfg, way, name):
    way(name)
    trajs = play(models, cfg)
    assert len({len(traj.ids) for traj in trajs}) > 3
    assert gap_to_an_update(trajs, models, cfg).max() < 1e-4
    rm.check_ratios(trajs, models, cfg)


def test_a_cache_that_is_too_small_grows(models, cfg, way, monkeypatch):
    today = play(models, cfg)
    way("graph")
    monkeypatch.setattr(fast_rollout, "COLUMNS", 64)
    monkeypatch.setattr(fast_rollout, "room_for_columns", lambda cfg: 64)
    assert same_episodes(play(models, cfg), today)  # of more than 64 tokens
    assert max(len(traj.ids) for traj in today) > 64
    assert same_episodes(play(models, cfg), today)


def test_more_episodes_than_before_get_a_larger_cache(models, cfg, way):
    today = play(models, cfg, range(300, 308))
    way("graph")
    play(models, cfg, range(300, 301))
    assert same_episodes(play(models, cfg, range(300, 308)), today)


def test_there_are_few_sizes_of_passes(models, cfg, way, monkeypatch):
    """Powers of two, and multiples of 256. Nothing is recorded twice."""
    sizes = []
    record = fast_rollout.Player.record

    def spy(player, inputs, used):
        sizes.append((inputs.shape[1], used))
        return record(player, inputs, used)
    monkeypatch.setattr(fast_rollout.Player, "record", spy)
    way("graph")
    for seed in range(2):
        rm.rollout(models, range(300, 303), 5, cfg, seed)
    assert len(sizes) == len(set(sizes))
    assert {B for B, _ in sizes} <= {1, 2, 4, 8, 16} and {used % 256 for _, used in sizes} == {0}


def test_a_replay_needs_only_what_was_recorded(models, cfg, way, monkeypatch):
    """A made-up recorder keeps the tensors of a pass. A replay calculates anew from these, and puts
    the result where it was.
    """
    today = play(models, cfg), play(models, cfg)
    last = {}
    logits_of = fast_rollout.Player.logits

    def logits(player, inputs, used):
        last["result"] = logits_of(player, inputs, used)
        # What a graph would read and write: these tensors, at these places.
        cache = player.cache
        last["given"] = player, inputs, used, cache, dict(cache.layers)
        return last["result"]

    class Graph:
        def replay(self):
            player, inputs, used, cache, layers = self.given
            assert player.cache is cache
            for layer, table in layers.items():
                assert cache.layers[layer] is table  # no table has moved
            self.result.copy_(logits_of(player, inputs, used))
            replays.append(used)

    @contextlib.contextmanager
    def graph(recorded, pool):
        yield
        recorded.given, recorded.result = last["given"], last["result"]
    replays = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = dict(Stream=lambda: stream, current_stream=lambda: stream, CUDAGraph=Graph, graph=graph,
                 stream=contextlib.nullcontext)
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(fast_rollout, "can_record", lambda inputs: True)
    monkeypatch.setattr(fast_rollout.Player, "logits", logits)
    # So the cache grows, and what was recorded before must be forgotten.
    monkeypatch.setattr(fast_rollout, "COLUMNS", 64)
    monkeypatch.setattr(fast_rollout, "room_for_columns", lambda cfg: 64)
    way("graph")
    assert same_episodes(play(models, cfg), today[0])
    assert same_episodes(play(models, cfg), today[1])
    assert len(replays) > 100


def test_attention_with_shared_keys():
    torch.manual_seed(0)
    query = torch.randn(3, 6, 4, 8)
    key, value = torch.randn(3, 2, 10, 8), torch.randn(3, 2, 10, 8)
    mask = torch.where(torch.rand(3, 1, 4, 10) < 0.3, -1e30, 0.0)
    mask[..., 0] = 0.0
    found, _ = fast_rollout.grouped(None, query, key, value, mask, scaling=0.3)
    key, value = key.repeat_interleave(3, 1), value.repeat_interleave(3, 1)
    expected = (0.3 * query @ key.transpose(2, 3) + mask).softmax(-1) @ value
    torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize("name", ["graph", "batching"])
def test_where_autocast_is_on_the_copy_is_bf16(models, cfg, way, name, monkeypatch):
    """The policy stays fp32. `graph` is no further from fp32 than today's rollout is."""
    exact = play(models, cfg)
    monkeypatch.setattr(rm, "autocast", lambda: torch.autocast("cpu", torch.bfloat16))
    today = gap_to_an_update(play(models, cfg), models, cfg)
    way(name)
    trajs = play(models, cfg)
    gap = gap_to_an_update(trajs, models, cfg)
    assert gap.max() > 1e-4 and gap.mean() < 0.05  # in fp32 the maximum is 2e-5
    assert name == "batching" or gap.mean() < 1.3 * today.mean() + 1e-4
    assert not same_episodes(trajs, exact)
    assert {weights.dtype for weights in models.policy.parameters()} == {torch.float32}


def test_a_broken_policy_is_reported_and_leaves_no_trace(models, cfg, way):
    today = play(models, cfg)
    weight = models.policy.get_decoder().layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    way("graph")
    play(models, cfg)
    with torch.no_grad():
        weight[0, 0] = torch.nan
    with pytest.raises(runs.UserError):
        play(models, cfg)
    with torch.no_grad():
        weight.copy_(before)
    assert same_episodes(play(models, cfg), today)


def test_an_evaluation_plays_so_too(models, cfg, way, capsys):
    cfg = rm.replace(cfg, eval_prompts=8)
    columns, _ = rm.evaluate(models, cfg)
    way("graph")
    assert rm.evaluate(models, cfg)[0] == columns


def test_as_a_program(folder, tmp_path):
    command = [sys.executable, ROOT / "extras" / "fast_rollout.py", "graph", "--model", folder,
               "--device", "cpu", "--env", "bandit", "--iterations", "1", "--prompts", "2",
               "--rollouts", "4", "--eval-prompts", "4"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    run = tmp_path / "runs" / "bandit-ppo-seed0-by-fast_rollout-graph"
    assert len((run / "log.jsonl").read_text().splitlines()) == 2
    said = subprocess.run([*command[:2], "nonsense"], capture_output=True, text=True)
    assert said.returncode == 1 and "nonsense" in said.stderr


def test_the_rows_of_a_run_are_those_of_today(cfg, way, tmp_path):
    """What is played is the same, up to rounding. So is what is learned from it."""
    cfg = rm.replace(cfg, iterations=2, eval_every=2, eval_prompts=8, prompts=2, rollouts=4)
    today, _ = rm.train(rm.replace(cfg, out=str(tmp_path / "today")))
    way("graph")
    ours, _ = rm.train(rm.replace(cfg, out=str(tmp_path / "ours")))
    for one, other in zip(today, ours, strict=True):
        assert one.keys() == other.keys()
        for name, x in one.items():
            if name in ("eval", "yardsticks"):
                assert other[name] == x
            elif not name.startswith("seconds"):
                assert other[name] == pytest.approx(x, rel=1e-3, abs=1e-4), name
