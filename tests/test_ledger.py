"""The statistics behind figures/CLAIMS.md, against numbers of SciPy and of textbooks; and every row of the ledger."""
import itertools
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "figures"))

import critic
import ledger
import paper
import plots
import warnings_of_loss


# -------------------------------------------------------------------------------------- statistics
@pytest.mark.parametrize("t, df, p", [  # scipy.stats.t.sf(t, df) * 2
    (4.302652729749464, 2, 0.05), (2.7764451051977987, 4, 0.05), (2.2621571628540993, 9, 0.05),
    (1.0, 1, 0.5), (3.0, 4, 0.03994196807171)])
def test_students_t(t, df, p):
    assert ledger.tail(t, df) == pytest.approx(p, rel=2e-3)


def test_interval_of_a_mean():
    d = np.array([0.1, 0.2, 0.3])
    half = 4.302652729749464 * 0.1 / math.sqrt(3)
    assert ledger.interval([d]) == pytest.approx((0.2 - half, 0.2 + half), abs=1e-4)
    assert ledger.interval([np.array([1.0])]) == (-math.inf, math.inf), "one seed tells nothing"


@pytest.mark.parametrize("k, n, low, high", [  # scipy.stats.binomtest(k, n).proportion_ci(method="exact")
    (7, 10, 0.34754715, 0.93326053), (10, 10, 0.69150289, 1.0), (0, 5, 0.0, 0.52182376), (3, 5, 0.14663280, 0.94725505)])
def test_exact_interval(k, n, low, high):
    assert ledger.exact_interval(k, n) == pytest.approx((low, high), abs=1e-6)


def test_exact_test():  # of a coin
    assert ledger.p_often(0.5, np.array([1.0] * 10)) == pytest.approx(2 / 1024)
    assert ledger.p_often(0.5, np.array([1.0] * 9 + [0.0])) == pytest.approx(2 * 11 / 1024)
    assert ledger.p_often(0.5, np.array([1.0, 0.0])) == 1


def test_two_sided_test():
    d = np.array([0.2, 0.4, 0.3, 0.5, 0.1])  # t = 0.3 / (0.1581 / sqrt 5) = 4.243; scipy.stats.ttest_1samp
    assert ledger.p_value(0, [d]) == pytest.approx(0.013236, rel=1e-3)
    assert ledger.p_value(0, [np.array([1.0, 1.0, 1.0])]) == 0.25, "all alike: three on one side"
    assert ledger.p_value(0, [np.array([1.0])]) == 1


def test_two_methods():  # scipy.stats.ttest_ind(ours, theirs, equal_var=False)
    ours, theirs = np.array([0.2, 0.4, 0.3, 0.5, 0.1]), np.array([0.0, 0.1, 0.05])
    assert ledger.estimate([ours, theirs]) == pytest.approx((0.25, 0.0763763, 5.157895), rel=1e-3)
    assert ledger.p_value(0, [ours, theirs]) == pytest.approx(0.0211348, rel=1e-3)
    assert ledger.interval([ours, theirs]) == pytest.approx((0.0554626, 0.4445374), abs=1e-4)
    assert ledger.p_value(0, [np.ones(3), np.zeros(3)]) == pytest.approx(2 / 20), "all alike: 2 of 20 divisions"
    assert ledger.interval([ours, np.array([1.0])]) == (-math.inf, math.inf), "one seed tells nothing"


def test_holm_by_hand():
    """Sorted 0.01 0.02 0.03 0.04, times 4 3 2 1, never falling: 0.04 0.06 0.06 0.06."""
    assert ledger.holm([0.04, 0.01, 0.03, 0.02], [1, 1, 1, 1]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert ledger.holm([0.9, 0.8], [1, 1]) == pytest.approx([1.0, 1.0])
    assert ledger.holm([0.01, 0.02], [3, 1]) == pytest.approx([0.04, 0.04]), "the first was looked at three times: 0.03"


@pytest.mark.parametrize("kind, d, bound, verdict", [
    ("more", [0.5, 0.6, 0.4, 0.5], 0.0, "holds"),
    ("more", [-0.5, -0.6, -0.4, -0.5], 0.0, "opposite here"),
    ("more", [0.5, -0.4, 0.1, 0.3], 0.0, "open: would need about"),
    ("same", [0.01, -0.01, 0.0, 0.005], 0.05, "no difference within 0.05"),
    ("same", [0.5, 0.51, 0.49, 0.5], 0.05, "a difference"),
    ("same", [0.1, -0.1, 0.0, 0.05], 0.05, "open"),
    ("often", [1] * 10, 0.5, "holds"), ("often", [0] * 10, 0.5, "opposite here"), ("often", [0, 1] * 5, 0.5, "open")])
def test_verdicts(kind, d, bound, verdict):
    d = np.array(d, float)
    claim = {"kind": kind, "bound": bound}
    answer, p = ledger.judge(claim, [d])
    assert ledger.verdict(claim, answer, p, [d]).startswith(verdict)


@pytest.mark.parametrize("center, verdict", [
    (0.0, "no difference within 0.05"), (0.3, "holds"), (-0.3, "opposite here"), (0.06, "holds"), (0.049, "holds"),
    (0.004, "no difference within 0.05")])
def test_a_margin_gives_a_third_answer(center, verdict):
    claim = {"kind": "more", "bound": 0, "margin": 0.05}
    d = center + 0.01 * np.array([1, -1, 0.5, -0.5, 0])
    assert ledger.verdict(claim, *ledger.judge(claim, [d]), [d]) == verdict


def test_no_answer_is_wrong_more_often_than_it_may():
    """Two methods that do not differ, or differ by just the margin: a wrong answer comes in about 5% of 100 trials."""
    claim = {"kind": "more", "bound": 0, "margin": 0.05}
    rng = np.random.default_rng(0)
    wrong_answers = {0.0: ("holds", "opposite here"), 0.05: ("opposite here", "no")}
    for truth, wrong in wrong_answers.items():
        said = 0
        for _ in range(100):
            ours, theirs = truth + 0.03 * rng.standard_normal(5), 0.03 * rng.standard_normal(5)
            answer, p = ledger.judge(claim, [ours, theirs])
            said += p < 0.05 and answer.split()[0] in wrong
        assert said <= 10, (truth, said)


def test_seeds_needed_for_80_percent_power():
    """Mean 0.1, spread 0.1 (so one seed is one spread from 0): the textbook's 2.8^2 = 7.84, rounded up."""
    d = np.array([0.0, 0.1, 0.2])
    assert ledger.seeds_needed({"kind": "more", "bound": 0}, [d]) == "about 8 seeds"
    near = np.array([0.0, 0.01, -0.01])  # nothing to show that it is more, but soon that it is within 0.05: 2.8^2 / 25
    assert ledger.seeds_needed({"kind": "more", "bound": 0, "margin": 0.05}, [near]) == "about 4 seeds"
    assert ledger.seeds_needed({"kind": "more", "bound": 0}, [near]) == "more than 1,000 seeds"


# -------------------------------------------------------------------------------------- measures
def run(success, planned=None, **columns):
    rows = [{"iteration": 0}]
    for i, value in enumerate(success, 1):
        rows.append({"iteration": i, "success": value, **{name: y[i - 1] for name, y in columns.items()}})
    return plots.Run({"online_k": 1, "env": "bandit", "iterations": planned or len(success)}, rows)


def collapsing(lost_at=60, n=100, first=0.3, last=0.0, spike=10.0, valid=0.0):
    """Success rises from `first` to 1 in 30 iterations, holds, and is `last` from iteration lost_at on."""
    success = [min(1.0, first + i * (1 - first) / 30) for i in range(n)]
    success[lost_at - 1:] = [last] * (n - lost_at + 1)
    norms = [1.0 + 0.1 * (i % 3) for i in range(n)]
    norms[lost_at - 3] = spike
    share = [0.9] * (lost_at - 1) + [valid] * (n - lost_at + 1)
    return run(success, grad_norm_max=norms, grad_norm=[1.0] * n, valid=share, reward_std=[0.4] * n, entropy=[0.5] * n, reward=success, kl=[0.0] * n)


def test_means_of_neighbours():
    assert ledger.forward_means(np.array([1.0, 2, 6]), 2).tolist() == [1.5, 4.0]
    assert ledger.forward_means(np.array([1.0, 2, 6]), 5).tolist() == [3.0], "a run that has just begun"


def test_the_whole_course():
    assert ledger.trapped(collapsing(), None) == 1
    assert ledger.lost(collapsing(), None) == 1
    assert ledger.held(collapsing(), None) == pytest.approx(0.6, abs=0.05)
    assert ledger.trapped(collapsing(spike=3.0), None) == 0, "no spike"
    assert ledger.trapped(collapsing(valid=0.8), None) == 0, "valid turns and in-group std stay"
    assert ledger.trapped(collapsing(first=0.8), None) == 0, "a gain of 0.2 only"
    assert ledger.trapped(collapsing(last=0.8), None) == 0, "less than half of the gain is lost"
    assert ledger.trapped(collapsing(lost_at=95), None) == 0, "for five iterations only"
    short = collapsing(lost_at=95)
    for row in short.rows[-10:]:
        row["updates"] = 0
    assert ledger.trapped(short, None) == 1, "and it would have stayed so"
    healthy = collapsing(lost_at=101)
    assert ledger.trapped(healthy, None) == ledger.lost(healthy, None) == 0
    assert ledger.held(healthy, None) == 1


def test_losses_are_counted_by_updates():
    """Lost at iteration 60 of 100, after 59 x 30 updates but for a skipped iteration, and a run that is not lost."""
    lost, healthy = collapsing(lost_at=60), collapsing(lost_at=101)
    for each in (lost, healthy):
        for row in each.rows[1:]:
            row["updates"] = 30
    lost.rows[7]["updates"] = 0
    assert ledger.updates_until_lost(lost) == 58 * 30 == 1740
    assert ledger.updates_until_lost(healthy) == math.inf
    low, high = ledger.exact_interval(1, 2)
    assert ledger.lost_by_updates([lost, healthy], (1740, 1741, 3001)) == ["30", "0 of 2 [0.00, 0.84]", f"1 of 2 [{low:.2f}, {high:.2f}]", "-"]


def test_alarms_look_back_and_are_the_same_for_lost_and_for_healthy_runs():
    """Entropy leaves its range at iteration 54, a gradient is ten times the median at 58."""
    fallen, healthy = collapsing(lost_at=60), collapsing(lost_at=101, spike=1.0)
    for row in fallen.rows[54:]:
        row["entropy"] = 0.1
    entropy = warnings_of_loss.alarms(fallen, "entropy")
    assert min(entropy) == 21 and [i for i, alarm in entropy.items() if alarm] == [54], "later it is within its last range"
    assert [i for i, alarm in warnings_of_loss.alarms(fallen, "grad_norm_max").items() if alarm] == [58]
    counted = warnings_of_loss.cases(fallen, "entropy")
    assert len(counted) == 59 - 20 and counted[:, 1].sum() == 10, "the ten iterations before the loss"
    assert len(warnings_of_loss.cases(healthy, "entropy")) == 90 - 20
    both = np.concatenate([counted, warnings_of_loss.cases(healthy, "entropy")])
    assert warnings_of_loss.chances(both) == [1.0, pytest.approx(9 / 108)]


def test_simple_measures():
    short = run([0.2, 0.5, 0.4, 0.1, 0.1, 0.1, 0.1, 2.0])
    by_hand = {"mean": 3.5 / 8, "end": 2, "early gain": 0.3, "fall": 0.35 - 1.05}
    for name, value in by_hand.items():
        assert ledger.MEASURES[name](short, "success") == pytest.approx(value), name


# -------------------------------------------------------------------------------------- every row can come out either way
def invented(measure, metric, value):
    """A run of which this measure is `value`, as nearly as the measure can tell."""
    if measure in ("trapped", "lost"):
        return collapsing() if value > 0.5 else collapsing(lost_at=101)
    if measure == "held":
        return collapsing(lost_at=min(101, 2 + round(value * 100)), n=100)
    y = [value] * 8
    if measure == "early gain":
        y = [0.0] + [value] * 7
    if measure == "fall":
        y = [value] * 4 + [0.0] * 4
    rows = []
    for i, x in enumerate(y):
        row = {"iteration": i, metric: x}
        if metric.startswith("eval "):
            row = {"iteration": i, "eval": {metric.split()[1]: x}}
        if metric == "seconds":
            row = {"iteration": i, "seconds_rollout": x if i == 0 else 0.0, "seconds_update": 0.0}
        rows.append(row)
    config = dict(online_k=1, env="bandit", iterations=8, yardsticks={"sokoban": [0.2, 1.0]})
    return ledger.Run(config, rows)


def test_log_rank_by_hand():
    """Lost after 2 and 4 and not; and after 1, 3, 5. Among those left, ours are 3 of 6, 3 of 5, 2 of 4, 2 of 3, 1 of 2."""
    excess = (0 - 1 / 2) + (1 - 3 / 5) + (0 - 1 / 2) + (1 - 2 / 3) + (0 - 1 / 2)
    variance = 1 / 4 + 6 / 25 + 1 / 4 + 2 / 9 + 1 / 4
    statistic, p = ledger.chi_square(np.array([2, 4, math.inf]), np.array([1, 3, 5]))
    assert statistic == pytest.approx(excess ** 2 / variance) and p == pytest.approx(0.4862, abs=1e-4)
    # two of five at once, two of the five are ours: the number among them is hypergeometric
    chances = [math.comb(2, k) * math.comb(3, 2 - k) / math.comb(5, 2) for k in range(3)]
    mean = sum(k * chance for k, chance in enumerate(chances))
    variance = sum((k - mean) ** 2 * chance for k, chance in enumerate(chances))
    statistic, _ = ledger.chi_square(np.array([7, 7]), np.array([math.inf] * 3))
    assert statistic == pytest.approx((2 - mean) ** 2 / variance)
    assert ledger.chi_square(np.full(3, math.inf), np.full(4, math.inf)) == (0, 1), "nothing is lost"


def test_log_rank_finds_what_is_there_and_not_more():
    rng = np.random.default_rng(0)
    found = []
    for scale in (1, 3):
        ps = []
        for _ in range(400):
            times = [rng.exponential(longer, 20) for longer in (scale, 1)]
            ps.append(ledger.chi_square(*(np.where(time > 2, math.inf, time) for time in times))[1])
        found.append(np.mean(np.array(ps) < 0.05))
    assert found[0] < 0.09 and found[1] > 0.7


def test_what_the_page_says_of_equal_updates():
    """Counts and means by loops over the log's rows; the differences' intervals by scipy's formula (Welch), in test_two_methods."""
    args = paper.parse(["equal"])
    args.folder = ROOT / "figures/tiny"
    lost, held = {}, {}
    for world, method in paper.pairs_of("equal"):
        held[method] = []
        for run in paper.runs_of(world, method, args):
            success = [row["success"] for row in run.rows if row["iteration"]]
            fives = [np.mean(success[i:i + 5]) for i in range(len(success) - 4)]
            if max(fives) < 0.9:
                continue  # never won
            _, lost_at = plots.peak_and_collapse(run)
            made = sum(row["updates"] for row in run.rows[1:lost_at])
            held[method].append(6400 if lost_at is None else made)
            assert lost_at is not None or len(success) in (400, 1600), "not lost: it was trained to the end"
        lost[method] = f"{sum(x < 6400 for x in held[method])} of {len(held[method])}"
    assert list(lost.values()) == ["14 of 18", "16 of 20", "16 of 20", "15 of 16"]
    ppo, of_32, ours, _ = map(np.array, held.values())
    (low, high), (low_32, high_32) = ledger.interval([ours, ppo]), ledger.interval([of_32, ppo])
    runs = {method: list(filter(ledger.has_won, paper.runs_of(world, method, args))) for world, method in paper.pairs_of("equal")}
    p = ledger.log_rank(runs["StarPO-S, plain"], runs["PPO, plain"])
    said = (f"StarPO-S loses 16 of 20, and lasts {ours.mean() - ppo.mean():.0f} [{low:.0f}, {high:.0f}] updates longer than PPO "
            f"(log-rank p {p:.2f}); *StarPO-S of 32* 16 of 20, {of_32.mean() - ppo.mean():.0f} [{low_32:.0f}, {high_32:.0f}] longer; "
            "a random quarter loses 15 of 16. All *open*")
    assert said in (ROOT / "figures/CLAIMS.md").read_text()
    assert high < 1600 < -low, "no difference would need both within"
    early = [sum(ledger.held(plots.Run(run.config | {"iterations": 400}, run.rows[:401]), None) < 1 for run in runs[method])
             for method in ("StarPO-S, plain", "random quarter")]
    assert early == [5, 3]
    assert "StarPO-S loses 5 of 20 fresh ones (a look not planned)" in (ROOT / "figures/CLAIMS.md").read_text()
    dead = {method: [run.config["seed"] for run in some if not ledger.lost(run, None) and ledger.end(run, "eval bandit") == 0]
            for method, some in runs.items()}
    assert list(dead.values()) == [[74], [], [67, 77], []]
    assert "(StarPO-S's 67 and 77, PPO's 74 end at 0.00)" in (ROOT / "figures/TABLES.md").read_text()
    power, after_holm = (math.exp(math.sqrt(4 * (z + 0.8416) ** 2 / 30)) for z in (1.96, 2.394))  # Schoenfeld's formula
    assert f"about {power:.1f} ({after_holm:.1f} after Holm)" in (ROOT / "figures/TABLES.md").read_text()


def first_collapse(run):  # -> number of its iteration, after a mean of five of 0.9; not only after the best one
    iterations, success = run.series("success")
    for i in range(5, len(success) + 1):
        means = ledger.forward_means(success[:i], 5)
        following = success[i:i + 10]
        bad = (following < means.max() / 2).all() and len(following) == 10
        if means.max() >= 0.9 and bad:
            return iterations[i] if i < len(success) else math.inf
    return math.inf


def test_what_the_page_says_of_other_ways_to_count():
    """None was planned: the first collapse instead of that after the best iterations; all runs; episodes played."""
    args = paper.parse(["equal"])
    args.folder = ROOT / "figures/tiny"
    page = (ROOT / "figures/TABLES.md").read_text()
    runs = {method: paper.runs_of(world, method, args) for world, method in paper.pairs_of("equal")}
    held, early = {}, {}
    for method in ("StarPO-S, plain", "random quarter"):
        first = [(run, first_collapse(run)) for run in filter(ledger.has_won, runs[method])]
        early[method] = sum(collapsed <= 400 for _, collapsed in first)
        held[method] = np.array([min(6400, sum(row["updates"] for row in run.rows[1:] if row["iteration"] < collapsed))
                                 for run, collapsed in first])
    low, high = ledger.interval(list(held.values()))
    longer = ledger.mean_of(list(held.values()))
    assert list(early.values()) == [5, 4] and "the random quarter would have 4 of 16 in 400 iterations" in page
    assert f"StarPO-S last {longer:.0f} [{low:.0f}, {high:.0f}] updates longer than it." in page

    of_all = [ledger.updates_held(runs[method]) for method in ("StarPO-S of 32", "PPO, plain")]
    low, high = ledger.interval(of_all)
    assert f"*of 32* lasts {ledger.mean_of(of_all):.0f} [{low:.0f}, {high:.0f}] longer than PPO (uncorrected)" in page
    for world, method in paper.pairs_of("equal"):
        cfg = runs[method][0].config
        episodes = cfg["prompts"] * cfg["rollouts"] * cfg["iterations"]
        assert episodes == (204_800 if "StarPO-S" in method else 51_200)


def test_the_search_uses_todays_rule():
    """Seed, places of success and length name the run; what was seen is what plots.peak_and_collapse says."""
    runs = {}
    for run in paper.unpack(ROOT / "figures/search.jsonl.bz2").values():
        _, success = run.series("success")
        six = " ".join(f"{x:.2f}" for x in success[np.linspace(0, len(success) - 1, 6).astype(int)])
        valid = " ".join(f"{x:.2f}" for x in run.series("valid")[1][np.linspace(0, len(success) - 1, 6).astype(int)])
        runs[str(run.config["seed"]), six, valid, str(len(success))] = run
    rows = re.findall(r"^\| \w[^|]* \| (\d+) \| ([^|]+) \| ([^|]+) \| (\d+) \| ([^|]+) \|$", (ROOT / "figures/SEARCH.md").read_text(), re.M)
    assert len(rows) == len(runs) == 43
    for *which, seen in rows:
        _, lost_at = plots.peak_and_collapse(runs[tuple(which)])
        said = re.search(r"lost at (\d+|once)", seen)
        assert (said[1] if said else None) in ((None,) if lost_at is None else (str(lost_at), "once" if lost_at <= 2 else None)), which


def test_what_the_search_taught():
    page = (ROOT / "figures/SEARCH.md").read_text()
    with_16_updates, first, lost, gentle = [], [], [], []  # gentle: at most 3e-3
    spiky, all_runs = {True: 0, False: 0}, {True: 0, False: 0}  # lost or not
    for name, run in paper.unpack(ROOT / "figures/search.jsonl.bz2").items():
        iterations, success = run.series("success")
        _, lost_at = plots.peak_and_collapse(run)
        ppo = name.startswith(("ppo-", "bandit-ppo-")) and run.config["env"] == "bandit"
        if ppo and run.config["update_size"] == 32 and run.config["epochs"] == 1 and run.config["lr"] <= 3e-3:
            gentle.append(lost_at)
        if name.startswith(("bandit-ppo-2e3-E8-1", "bandit-ppo-2e3-ep4-1")):
            with_16_updates.append(success)
            first.append(int(iterations[success >= 0.9][0]))
            lost.append(lost_at)
        _, gradient = run.series("grad_norm")
        all_runs[lost_at is not None] += 1
        spiky[lost_at is not None] += gradient.max() > 20 * np.median(gradient[gradient > 0])
    assert len(gentle) == 3 and not any(gentle)
    assert "not lost in 250 iterations at up to 7.5 times the default rate (3e-3; three runs)" in page
    assert len(lost) == 7 and sum(at is not None for at in lost) == 2 and "lost within 250 in two of seven runs" in page
    assert f"reaches 0.9 after {min(first)} to {max(first)} iterations" in page
    for success, at in zip(with_16_updates, lost):
        assert at is None or success[int(at) - 2] > 0.9 > 0.1 > success[int(at) - 1], "from one iteration to the next"
    assert (f"In {spiky[False]} of the {all_runs[False]} runs without a loss, and in {spiky[True]} of the {all_runs[True]} with "
            "one") in page


def test_lost_runs_made_to_learn_on_stay_lost():
    args = paper.parse(["claims"])
    args.folder = ROOT / "figures/tiny"
    further = []
    for run in paper.runs_of("trap", "PPO, never ended", args):
        _, success = run.series("success")
        _, lost_at = plots.peak_and_collapse(run)
        if lost_at is not None:
            assert success[int(lost_at) - 1:].max() < 0.23
            further.append(len(success) - int(lost_at))
    assert len(further) == 4
    page = (ROOT / "figures/TABLES.md").read_text()
    assert (f"Four lost runs, made to learn from equal returns, never exceeded 0.23 in {min(further)} to {max(further)} more "
            "iterations") in page


def test_an_ended_run_may_have_come_back():
    """Seed 2 had nothing to compare for a while; made to learn from that, it stayed lost; else it came back."""
    args = paper.parse(["claims"])
    args.folder = ROOT / "figures/tiny"
    iterations, success = paper.runs_of("trap", "PPO", args)[2].series("success")
    assert iterations[126] == 127 and success[125] > 0.5 and (success[126:132] < 0.5).all() and success[132:].max() > 0.99
    assert "where it was skipped, seed 2 came back after six." in (ROOT / "figures/TABLES.md").read_text()


def test_what_the_page_says_of_adams_memory():
    """Lost with beta2 0.9 and with the default; and Fisher's exact test of these counts, by hand."""
    args = paper.parse(["claims"])
    args.folder = ROOT / "figures/tiny"
    lost, runs = [], []
    for method in ("PPO, Adam beta2 0.9", "PPO"):
        found = paper.runs_of("trap", method, args)
        runs.append(len(found))
        lost.append(int(sum(ledger.lost(run, None) for run in found)))
    assert (lost, runs) == ([1, 11], [10, 13])

    def fisher(others):  # 1 of 10, and how many of `others`
        n, k = others

        def chance(i):  # that of the lost runs so many are among the first ten
            return math.comb(10, i) * math.comb(n, 1 + k - i) / math.comb(10 + n, 1 + k)
        return sum(chance(i) for i in range(11) if i <= 1 + k and chance(i) <= chance(1) * (1 + 1e-9))
    without = [ledger.lost(run, None) for run in found[:10]]
    assert sum(without) == 8 and (f"By Fisher's test, chosen after the counts were seen, p is {fisher((13, 11)):.4f} "
                                  f"({fisher((10, 8)):.3f} without the seeds 10 to 12);") in (ROOT / "figures/CLAIMS.md").read_text()


def test_what_the_page_says_of_the_usual_rate():
    """The trap's updates at the default rate: none of ten is lost; Fisher's exact test of 0 of 10 and 16 of 20, by hand."""
    args = paper.parse(["updates-rate"])
    args.folder = ROOT / "figures/tiny"
    runs = paper.runs_of("trap, usual rate", "PPO, plain", args)
    trap = paper.runs_of("trap, fresh seeds", "PPO, plain", args)
    changed = {name for name in runs[0].config if runs[0].config[name] != trap[0].config.get(name)} - {"eval_every", "yardsticks"}
    assert changed == {"lr"} and runs[0].config["update_size"] == 8
    assert (runs[0].config["lr"], trap[0].config["lr"]) == (4e-4, 2e-3)
    for run in runs:
        assert ledger.has_won(run) and not ledger.lost(run, None) and sum(row.get("updates", 0) for row in run.rows) > 6000
    assert len(runs) == 10 and sum(ledger.lost(run, None) for run in trap) == 16

    def chance(k):  # that k of the 16 lost runs are among these ten
        return math.comb(16, k) * math.comb(14, 10 - k) / math.comb(30, 10)
    p = sum(chance(k) for k in range(11) if chance(k) <= chance(0) * (1 + 1e-9))
    page = "".join((ROOT / "figures" / name).read_text() for name in ("CLAIMS.md", "TABLES.md"))
    assert f"Fisher's p {p:.5f})" in page and f"Found: p {p:.5f}." in page
    assert all(run.config["lr"] == 4e-4 for run in runs)
    assert trap[0].config["lr"] == 5 * 4e-4
    for said in "4e-4, none of ten runs collapses in 6,400 updates", "At five times that rate most winning runs collapse;":
        assert said in (ROOT / "README.md").read_text()
    different = [100 * run.series("distinct")[1][-100:].mean() for run in runs]
    assert f"{min(different):.0f} to {max(different):.0f} of 100 are different" in page
    assert max(different) < 15
    assert "(at the default rate, too, without harm)" in (ROOT / "README.md").read_text()


def came_back(run):
    _, lost_at = plots.peak_and_collapse(run)
    if lost_at is None:
        return False
    iterations, success = run.series("success")
    return ledger.forward_means(success[iterations >= lost_at] > 0.5, 10).max() > 0.99


def test_what_the_page_says_of_fresh_seeds_and_of_other_models():
    args = paper.parse(["claims"])
    args.folder = ROOT / "figures/tiny"
    page = "".join((ROOT / "figures" / name).read_text() for name in ("CLAIMS.md", "TABLES.md"))
    fresh = paper.runs_of("trap, fresh seeds", "PPO, plain", args)
    never, back = {}, {}
    for world, method in paper.pairs_of("equal"):
        runs = dict(enumerate(paper.runs_of(world, method, args), 60))
        never[method] = [seed for seed, run in runs.items() if not ledger.has_won(run) and ledger.lost(run, None)]
        back[method] = [seed for seed, run in runs.items() if came_back(run)]
    assert list(never.values()) == [[66, 71], [], [], [61, 72, 73, 74]]
    assert list(back.values()) == [[64, 72], [], [79], [70]]
    assert "PPO's seeds 10, 66 and 71, GRPO's 1 and 4, *no KL*'s 4, the random quarter's 0, 1, 61 and 72 to 74, tiny-c's 0." in page
    never, back, of_winners = [], [], []
    for name in ("tiny-b", "tiny-c"):
        other = paper.parse(["starts"])
        other.folder, other.model, other.seeds = ROOT / "figures" / name, name, 3
        of_winners += [ledger.lost(run, None) for run in paper.runs_of("trap", "PPO", other) if ledger.has_won(run)]
        for method in ("PPO", "StarPO-S"):
            for seed, run in enumerate(paper.runs_of("trap", method, other)):
                if ledger.lost(run, None) and not ledger.has_won(run):
                    never.append((name, method, seed))
                if came_back(run):
                    back.append((name, method, seed))
    assert never == [("tiny-c", "PPO", 0)] and back == [("tiny-b", "StarPO-S", 2)]
    assert f"with two other cold starts {sum(of_winners):.0f} of {len(of_winners)} winning PPO runs are lost." in page
    all_of_ppo = [ledger.lost(run, None) for run in paper.runs_of("trap", "PPO", args) + fresh]
    k, n = int(sum(all_of_ppo)), len(all_of_ppo)
    low, high = ledger.exact_interval(k, n)
    assert f"PPO loses {k} of {n} [{low:.2f}, {high:.2f}]" in page

    last = fresh[18].rows[-1]
    assert ledger.lost(fresh[18], None) and f"{100 * last['distinct']:.0f} of 100 at the end of PPO's seed 78" in page
    first = paper.runs_of("trap", "PPO", args)[:10]
    assert sum(ledger.lost(run, None) for run in first) == 8 and "(without them 8 of 10 are lost)" in page
    counts = []
    for runs in (paper.runs_of("trap", "PPO", args), fresh):
        won = list(filter(ledger.has_won, runs))
        counts.append(f"{sum(ledger.lost(run, None) for run in won):.0f} of {len(won)}")
    assert "of PPO's runs that had won {} are lost, {} with fresh seeds.".format(*counts) in page


def test_what_the_page_says_of_truth_on_sokoban_and_of_lengths():
    """Pay changes neither truth nor success there; single thoughts grow while episodes shorten."""
    args = paper.parse(["claims"])
    args.folder = ROOT / "figures/tiny"
    paid, plain = (paper.runs_of("sokoban", method, args) for method in ("truth rewarded", "PPO"))
    assert len(paid) == 5
    for measure, metric in ((ledger.mean, "true_claims"), (ledger.end, "eval sokoban")):
        low, high = ledger.interval([np.array([measure(run, metric) for run in runs]) for runs in (paid, plain)])
        assert low < 0 < high and high - low < 0.05
    for world in ("sokoban", "gentle lake"):
        runs = paper.runs_of(world, "PPO", args)
        thoughts, episodes = ([ledger.fall(run, metric) for run in runs] for metric in ("think_length", "response_length"))
        assert max(thoughts) < 0 < min(episodes), "a fall is positive"


def test_what_the_page_says_of_single_runs():
    args = paper.parse(["claims"])
    args.folder = ROOT / "figures/tiny"
    page = "".join((ROOT / "figures" / name).read_text() for name in ("CLAIMS.md", "TABLES.md"))
    never, back = [], []
    of_trap = [("trap", method) for method in ("PPO", "no KL", "clip-higher", "StarPO-S", "GRPO", "random quarter", "StarPO-S of 32")]
    for world, method in (*of_trap, ("trap, long", "keep 25%")):
        for seed, found in enumerate(paper.runs_of(world, method, args)):
            if ledger.lost(found, None) and not ledger.has_won(found):
                never.append((method, seed))
            if came_back(found):
                back.append((method, seed))
    assert never == [("PPO", 10), ("no KL", 4), ("GRPO", 1), ("GRPO", 4), ("random quarter", 0), ("random quarter", 1)]
    assert back == [("no KL", 2), ("StarPO-S", 7), ("keep 25%", 4)]
    assert ("PPO's 64 and 72, StarPO-S's 7 and 79, *no KL*'s 2, *keep 25%*'s 4 (long trap), the random quarter's 70, tiny-b's "
            "StarPO-S 2;") in page

    six, one = (np.array([ledger.end(found, "eval sokoban") for found in paper.runs_of("sokoban", method, args)])
                for method in ("6 actions", "1 action"))
    low, high = ledger.interval([six, one])
    assert f"{six.mean() - one.mean():.2f} [{low:.2f}, {high:.2f}]" in page
    lengths = [ledger.end(found, "think_length") for found in paper.runs_of("gentle lake", "truth rewarded", args)]
    assert sum(length >= 18 for length in lengths) == 5 and "in five of 25 seeds" in page

    filtered, ppo = ([ledger.held(found, None) for found in paper.runs_of("trap", method, args)] for method in ("keep 25%", "PPO"))
    assert ledger.p_value(0, [np.array(filtered), np.array(ppo)]) < 0.02, "no spread in one arm: not Welch's"
    values = np.array(filtered + ppo)
    seen = np.mean(filtered) - np.mean(ppo)
    as_extreme = []
    for some in itertools.combinations(range(len(values)), len(filtered)):
        mean = values[list(some)].mean()
        rest = (values.sum() - mean * len(some)) / (len(values) - len(some))
        as_extreme.append(abs(mean - rest) >= abs(seen) - 1e-12)
    assert f"(the filter's row; Table 4's bandit), p comes from a permutation test: {np.mean(as_extreme):.3f} and 0.0001 before" in page
    assert ledger.p_by_permutation(np.array(filtered), np.array(ppo)) == pytest.approx(np.mean(as_extreme))


def test_the_trap_with_several_turns():
    """What success was in the end, how many runs were lost by which rule, and which came back: as page and caption say."""
    args = paper.parse(["turns"])
    args.folder = paper.FIGURES / "tiny"
    counts, late, ended, drawn, lost, back, falls, more = {}, {}, 0, 0, 0, 0, {}, {}
    for method in paper.PAPER["sets"]["turns"]:
        counts[method] = np.zeros(4, dtype=int)
        for world in ("trap, sokoban", "trap, gentle lake"):
            runs = paper.runs_of(world, method, args)
            assert len(runs) == 8
            for i, rule in enumerate(((5, 10), *paper.OTHER_RULES)):
                counts[method][i] += sum(ledger.lost_at(run, *rule) < math.inf for run in runs)
            assert sum(ledger.lost_at(run, 5, 10) < math.inf for run in runs) == sum(ledger.lost(run, None) for run in runs), "our rule"
            ended += sum(len(run.rows) <= 400 for run in runs)
            drawn += sum(len(run.rows) <= 400 for run in runs if method in ("PPO", "StarPO-S"))
            success = [list(run.series("success")[1]) for run in runs]
            whole = [y + [y[-1]] * (400 - len(y)) for y in success]
            late[method, world] = np.mean([y[-100:] for y in whole])
            falls[method, world] = np.array([np.mean(y[:20]) - np.mean(y[-100:]) for y in whole])
            more[method, world] = -sum(ledger.lost(run, None) for run in runs)
            for run, y in zip(runs, success):
                kept_on = np.append(y, np.full(400 - len(y), np.mean(y[-10:])))
                best = ledger.forward_means(np.array(y), 5)
                bad = kept_on[best.argmax():] < best.max() / 2
                more[method, world] += ledger.forward_means(bad, 10).max() > 0.99
            if (method, world) == ("GRPO", "trap, sokoban"):
                assert sum(len(y) < 400 for y in success) == 7
            for run, y in zip(runs, whole):
                lost += ledger.lost(run, None)
                back += ledger.lost(run, None) and np.mean(y[-100:]) >= ledger.forward_means(np.array(y), 5).max() / 2
            distinct = [np.median(run.series("distinct")[1][-100:]) for run in runs]
            assert np.median(distinct) < 0.15, "thoughts become alike in most runs"
    page = "".join((ROOT / "figures" / name).read_text() for name in ("CLAIMS.md", "TABLES.md"))
    ends = []
    for world, play in (("trap, sokoban", 0.22), ("trap, gentle lake", 0.20)):
        values = np.array([np.mean(ledger.to_the_end(run.series("success")[1], run)[-100:]) for run in paper.runs_of(world, "StarPO-S", args)])
        low, high = ledger.interval([values])
        assert low < play < high
        ends.append(f"{values.mean():.2f} [{low:.2f}, {high:.2f}] ({world.split()[-1].replace('s', 'S', 1)})")
    assert f"StarPO-S's success ends at {', '.join(ends)}, much like random play's." in page
    assert {pair for pair in more if more[pair]} == {("GRPO", "trap, sokoban"), ("StarPO-S", "trap, sokoban")}
    assert (more["GRPO", "trap, sokoban"], more["StarPO-S", "trap, sokoban"]) == (3, 1)
    assert "three more of GRPO and one of StarPO-S would be lost on Sokoban" in page
    (low, high), (low_lake, high_lake) = (ledger.interval([falls["PPO", world]]) for world in ("trap, sokoban", "trap, gentle lake"))
    assert f"in the first 20 by 0.13 [{low:.2f}, {high:.2f}] on Sokoban, 0.13 [{low_lake:.2f}, {high_lake:.2f}] on the lake" in page
    by_quarters = []
    for world in ("trap, sokoban", "trap, gentle lake"):
        whole = [ledger.to_the_end(run.series("success")[1], run) for run in paper.runs_of(world, "PPO", args)]
        each = np.array([y[:100].mean() - y[-100:].mean() for y in whole])
        low, high = ledger.interval([each])
        by_quarters.append(f"{each.mean():.2f} [{low:.2f}, {high:.2f}]")
    assert f"(by quarters {', '.join(by_quarters)}; unplanned)." in page
    assert all(ledger.interval([falls["StarPO-S", world]])[0] > 0 for world in ("trap, sokoban", "trap, gentle lake"))
    kept = []  # ended runs at their last value
    for method in ("StarPO-S", "PPO"):
        of_worlds = [[ledger.to_the_end(run.series("success")[1], run).mean() for run in paper.runs_of(world, method, args)]
                     for world in ("trap, sokoban", "trap, gentle lake")]
        kept.append(np.mean(of_worlds, axis=0))
    low, high = ledger.interval(kept)
    assert f"several turns on success would be {ledger.mean_of(kept):.2f} [{low:.2f}, {high:.2f}]." in page

    def told(method):
        return " and ".join(f"{late[method, world]:.2f}" for world in ("trap, sokoban", "trap, gentle lake"))

    def between(method):
        return f"{min(counts[method])} to {max(counts[method])}"
    assert f"the rule: PPO {between('PPO')}, StarPO-S {between('StarPO-S')}, PPO with beta2 0.9: " in page
    assert f"PPO with beta2 0.9: {between('PPO, Adam beta2 0.9')}." in page
    assert ended == 15
    assert (f"({drawn} of the 32 runs drawn had ended) PPO has {told('PPO')}, StarPO-S, with a quarter of the updates, "
            f"{told('StarPO-S')}") in page
    assert f"with several turns {back:.0f} of {lost:.0f} average half their best or more in the last 100 iterations" in page



# ----------------------------------------------------------------------------------------------------- the critic
@pytest.mark.parametrize("value, explained", [([1.0, 2.0, 3.0], 1.0), ([7.0, 7.0, 7.0], 0.0), ([-1.0, -2.0, -3.0], -3.0)])
@pytest.mark.parametrize("R, by_others", [([[0.0, 0.0], [1.0, 1.0]], 1.0), ([[0.0, 1.0]], -3.0)])
def test_what_a_critic_explains(value, explained, R, by_others):
    """By hand: of forecasts that are right, all alike, of the wrong sign; of levels that differ, of one level."""
    batch = {"mask": torch.tensor([[True, True, False, True]]), "ret": torch.tensor([[1.0, 2.0, 99.0, 3.0]]),
             "value": torch.tensor([[*value[:2], -99.0, value[2]]])}
    trajs = [SimpleNamespace(R=x) for group in R for x in group]
    row = {}
    critic.watch(row, trajs, [(batch, [{}]), ({}, [])], None, SimpleNamespace(rollouts=2))
    assert row == {"explained": pytest.approx(explained), "by_others": pytest.approx(by_others)}
    rows = [{}] + 30 * [row, {}]
    assert critic.means(rows, "explained") == 4 * [pytest.approx(explained)], "rows without updates have none"


def test_what_is_said_of_the_critic_is_what_was_measured():
    printed, page = [(ROOT / "figures" / name).read_text() for name in ("critic.txt", "DIFFERENCES.md")]
    assert re.match(rf"python figures/critic.py, commit [0-9a-f]{{7}}: mean .lowest, highest. of the seeds {re.escape(str(critic.SEEDS))}\n\niterations +"
                    + " +".join(critic.PERIODS), printed)
    last = {tuple(line.split()[:2]): line.split()[-3] for line in printed.splitlines()[3:]}  # mean, lowest, highest
    explained, by_others = ([last[world, column].replace("-0.00", "0.00") for world in ("frozenlake", "sokoban", "bandit")]
                            for column in ("explained", "by_others"))
    assert "explain {} of the variance of the rewards to come on the gentle lake, {} on Sokoban, {} on the bandit.".format(*explained) in page
    args = paper.parse(["claims"])
    args.folder = ROOT / "figures/tiny"
    unclipped, clipped = (np.array([ledger.mean(run, "eval sokoban") for run in paper.runs_of("sokoban", method, args)])
                          for method in ("PPO, free critic", "PPO"))
    low, high = ledger.interval([unclipped, clipped])
    difference = unclipped.mean() - clipped.mean()
    assert f"differs by {difference:.2f} [{low:.2f}, {high:.2f}] ({len(unclipped)} and {len(clipped)} seeds)" in page
    assert f"explains {by_others[0]} and {by_others[1]} of the returns' variance on lake and Sokoban" in page
