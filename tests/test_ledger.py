"""The statistics behind figures/CLAIMS.md, against numbers of SciPy, textbooks and loops over logs.

What the pages say is compared with the shipped runs: `says` finds a sentence that has a number.
"""
import functools
import itertools
import json
import math
import re
import sys
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import ROOT

FIGURES = ROOT / "figures"
sys.path.insert(0, str(FIGURES))

import ledger
import paper
import plots
import unpack
from research import critic, smollm2, warnings_of_loss

CLAIMS = (FIGURES / "CLAIMS.md").read_text()
TABLES = (FIGURES / "TABLES.md").read_text()
SEARCH = (FIGURES / "research" / "SEARCH.md").read_text()


def says(page, *parts):
    """Does a sentence of the page have all these parts? It may have other words, too."""
    sentences = re.split(r"(?<=[.?!])[)*]*\s|\n", page)
    found = any(all(part in sentence for part in parts) for sentence in sentences)
    assert found, f"no sentence has {parts}"
    return found


def runs_of(setup, method, model="tiny", seeds=None):
    args = paper.parse(["claims"])
    args.folder, args.model, args.seeds = FIGURES / model, model, seeds
    return paper.runs_of(setup, method, args)


def in_brackets(low, high):
    return f"[{low:.2f}, {high:.2f}]"


# ------------------------------------------------------------------------------------------ links
@pytest.mark.parametrize("page", sorted(FIGURES.rglob("*.md")), ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), link


# ------------------------------------------------------------------------------------- statistics
# scipy.stats.t.sf(t, df) * 2
@pytest.mark.parametrize("t, df, p", [
    (4.302652729749464, 2, 0.05), (2.7764451051977987, 4, 0.05), (2.2621571628540993, 9, 0.05),
    (1.0, 1, 0.5), (3.0, 4, 0.03994196807171)])
def test_students_t(t, df, p):
    assert ledger.tail(t, df) == pytest.approx(p, rel=2e-3)


def test_interval_of_a_mean():
    d = np.array([0.1, 0.2, 0.3])
    half = 4.302652729749464 * 0.1 / math.sqrt(3)
    assert ledger.interval([d]) == pytest.approx((0.2 - half, 0.2 + half), abs=1e-4)
    one_seed = [np.array([1.0])]
    assert ledger.interval(one_seed) == (-math.inf, math.inf)


# scipy.stats.binomtest(k, n).proportion_ci(method="exact")
@pytest.mark.parametrize("k, n, low, high", [
    (7, 10, 0.34754715, 0.93326053), (10, 10, 0.69150289, 1.0), (0, 5, 0.0, 0.52182376),
    (3, 5, 0.14663280, 0.94725505)])
def test_exact_interval(k, n, low, high):
    assert ledger.exact_interval(k, n) == pytest.approx((low, high), abs=1e-6)


def test_exact_test():  # of a coin
    assert ledger.p_often(0.5, np.array([1.0] * 10)) == pytest.approx(2 / 1024)
    assert ledger.p_often(0.5, np.array([1.0] * 9 + [0.0])) == pytest.approx(2 * 11 / 1024)
    assert ledger.p_often(0.5, np.array([1.0, 0.0])) == 1


def test_two_sided_test():
    # t = 0.3 / (0.1581 / sqrt 5) = 4.243; scipy.stats.ttest_1samp
    d = np.array([0.2, 0.4, 0.3, 0.5, 0.1])
    assert ledger.p_value(0, [d]) == pytest.approx(0.013236, rel=1e-3)
    all_alike = np.array([1.0, 1.0, 1.0])
    assert ledger.p_value(0, [all_alike]) == 0.25
    assert ledger.p_value(0, [np.array([1.0])]) == 1


def test_two_methods():  # scipy.stats.ttest_ind(ours, theirs, equal_var=False)
    ours, theirs = np.array([0.2, 0.4, 0.3, 0.5, 0.1]), np.array([0.0, 0.1, 0.05])
    expected = (0.25, 0.0763763, 5.157895)
    assert ledger.estimate([ours, theirs]) == pytest.approx(expected, rel=1e-3)
    assert ledger.p_value(0, [ours, theirs]) == pytest.approx(0.0211348, rel=1e-3)
    assert ledger.interval([ours, theirs]) == pytest.approx((0.0554626, 0.4445374), abs=1e-4)
    # If all are alike, 2 of the 20 divisions are as extreme.
    assert ledger.p_value(0, [np.ones(3), np.zeros(3)]) == pytest.approx(2 / 20)
    assert ledger.interval([ours, np.array([1.0])]) == (-math.inf, math.inf)


def test_holm_by_hand():
    """Sorted 0.01 0.02 0.03 0.04, times 4 3 2 1, never falling: 0.04 0.06 0.06 0.06."""
    expected = [0.06, 0.04, 0.06, 0.06]
    assert ledger.holm([0.04, 0.01, 0.03, 0.02], [1, 1, 1, 1]) == pytest.approx(expected)
    assert ledger.holm([0.9, 0.8], [1, 1]) == pytest.approx([1.0, 1.0])
    # The first was looked at three times: 0.03.
    assert ledger.holm([0.01, 0.02], [3, 1]) == pytest.approx([0.04, 0.04])


@pytest.mark.parametrize("kind, d, bound, verdict", [
    ("more", [0.5, 0.6, 0.4, 0.5], 0.0, "holds"),
    ("more", [-0.5, -0.6, -0.4, -0.5], 0.0, "opposite here"),
    ("more", [0.5, -0.4, 0.1, 0.3], 0.0, "open: would need about"),
    ("same", [0.01, -0.01, 0.0, 0.005], 0.05, "no difference within 0.05"),
    ("same", [0.5, 0.51, 0.49, 0.5], 0.05, "a difference"),
    ("same", [0.1, -0.1, 0.0, 0.05], 0.05, "open"),
    ("often", [1] * 10, 0.5, "holds"),
    ("often", [0] * 10, 0.5, "opposite here"),
    ("often", [0, 1] * 5, 0.5, "open")])
def test_verdicts(kind, d, bound, verdict):
    d = np.array(d, float)
    claim = {"kind": kind, "bound": bound}
    answer, p = ledger.judge(claim, [d])
    assert ledger.verdict(claim, answer, p, [d]).startswith(verdict)


@pytest.mark.parametrize("center, verdict", [
    (0.0, "no difference within 0.05"), (0.3, "holds"), (-0.3, "opposite here"), (0.06, "holds"),
    (0.049, "holds"), (0.004, "no difference within 0.05")])
def test_a_margin_gives_a_third_answer(center, verdict):
    claim = {"kind": "more", "bound": 0, "margin": 0.05}
    d = center + 0.01 * np.array([1, -1, 0.5, -0.5, 0])
    assert ledger.verdict(claim, *ledger.judge(claim, [d]), [d]) == verdict


def test_no_answer_is_wrong_more_often_than_it_may():
    """Two methods do not differ, or differ by just the margin. Then about 5% of 100 trials give a
    wrong answer.
    """
    claim = {"kind": "more", "bound": 0, "margin": 0.05}
    rng = np.random.default_rng(0)
    wrong_answers = {0.0: ("holds", "opposite here"), 0.05: ("opposite here", "no")}
    for truth, wrong in wrong_answers.items():
        said = 0
        for _ in range(100):
            ours = truth + 0.03 * rng.standard_normal(5)
            theirs = 0.03 * rng.standard_normal(5)
            answer, p = ledger.judge(claim, [ours, theirs])
            said += p < 0.05 and answer.startswith(wrong)
        assert said <= 10, (truth, said)


def test_seeds_needed_for_80_percent_power():
    """Mean 0.1 and spread 0.1, so one seed is one spread from 0: 2.8^2 = 7.84, rounded up."""
    d = np.array([0.0, 0.1, 0.2])
    assert ledger.seeds_needed({"kind": "more", "bound": 0}, [d]) == "about 8 seeds"
    near = np.array([0.0, 0.01, -0.01])
    assert ledger.seeds_needed({"kind": "more", "bound": 0}, [near]) == "more than 1,000 seeds"
    # That it is within 0.05 can be shown sooner: 2.8^2 / 25.
    claim = {"kind": "more", "bound": 0, "margin": 0.05}
    assert ledger.seeds_needed(claim, [near]) == "about 4 seeds"


def test_log_rank_by_hand():
    """Lost after 2, after 4 and never; and after 1, 3 and 5. Among those left, ours are 3 of 6, 3
    of 5, 2 of 4, 2 of 3 and 1 of 2.
    """
    excess = (0 - 1 / 2) + (1 - 3 / 5) + (0 - 1 / 2) + (1 - 2 / 3) + (0 - 1 / 2)
    variance = 1 / 4 + 6 / 25 + 1 / 4 + 2 / 9 + 1 / 4
    statistic, p = ledger.chi_square(np.array([2, 4, math.inf]), np.array([1, 3, 5]))
    assert statistic == pytest.approx(excess ** 2 / variance)
    assert p == pytest.approx(0.4862, abs=1e-4)
    # Two of five are lost at once, and two of the five are ours: it is hypergeometric.
    chances = [math.comb(2, k) * math.comb(3, 2 - k) / math.comb(5, 2) for k in range(3)]
    mean = sum(k * chance for k, chance in enumerate(chances))
    variance = sum((k - mean) ** 2 * chance for k, chance in enumerate(chances))
    statistic, _ = ledger.chi_square(np.array([7, 7]), np.array([math.inf] * 3))
    assert statistic == pytest.approx((2 - mean) ** 2 / variance)
    nothing_is_lost = np.full(3, math.inf), np.full(4, math.inf)
    assert ledger.chi_square(*nothing_is_lost) == (0, 1)


def test_log_rank_finds_what_is_there_and_not_more():
    rng = np.random.default_rng(0)
    found = []
    for scale in (1, 3):
        ps = []
        for _ in range(400):
            times = [rng.exponential(longer, 20) for longer in (scale, 1)]
            censored = [np.where(time > 2, math.inf, time) for time in times]
            ps.append(ledger.chi_square(*censored)[1])
        found.append(np.mean(np.array(ps) < 0.05))
    assert found[0] < 0.09 and found[1] > 0.7


# ---------------------------------------------------------------------------------------- measures
def run(success, **columns):
    rows = [{"iteration": 0}]
    for i, value in enumerate(success, 1):
        others = {name: y[i - 1] for name, y in columns.items()}
        rows.append({"iteration": i, "success": value, **others})
    return plots.Run({"online_k": 1, "env": "bandit", "iterations": len(success)}, rows)


def collapsing(lost_at=60, n=100, first=0.3, last=0.0, spike=10.0, valid=0.0):
    """Success rises from `first` to 1 in 30 iterations, and is `last` from iteration lost_at on."""
    success = [min(1.0, first + i * (1 - first) / 30) for i in range(n)]
    success[lost_at - 1:] = [last] * (n - lost_at + 1)
    norms = [1.0 + 0.1 * (i % 3) for i in range(n)]
    norms[lost_at - 3] = spike
    share = [0.9] * (lost_at - 1) + [valid] * (n - lost_at + 1)
    return run(success, grad_norm_max=norms, grad_norm=[1.0] * n, valid=share,
               reward_std=[0.4] * n, entropy=[0.5] * n, reward=success, kl=[0.0] * n)


def test_means_of_neighbours():
    assert ledger.forward_means(np.array([1.0, 2, 6]), 2).tolist() == [1.5, 4.0]
    # A run that has just begun has one mean, of all.
    assert ledger.forward_means(np.array([1.0, 2, 6]), 5).tolist() == [3.0]


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
    """One run is lost at iteration 60 of 100, after 58 iterations with 30 updates each and a
    skipped one. Another run is not lost.
    """
    lost, healthy = collapsing(lost_at=60), collapsing(lost_at=101)
    for each in (lost, healthy):
        for row in each.rows[1:]:
            row["updates"] = 30
    lost.rows[7]["updates"] = 0
    assert ledger.updates_until_lost(lost) == 58 * 30 == 1740
    assert ledger.updates_until_lost(healthy) == math.inf
    one_of_two = f"1 of 2 {in_brackets(*ledger.exact_interval(1, 2))}"
    found = ledger.lost_by_updates([lost, healthy], (1740, 1741, 3001))
    assert found == ["30", "0 of 2 [0.00, 0.84]", one_of_two, "-"]


def test_alarms_look_back_and_are_the_same_for_lost_and_for_healthy_runs():
    """Entropy leaves its range at iteration 54, and a gradient norm is ten times the median at 58.
    """
    fallen, healthy = collapsing(lost_at=60), collapsing(lost_at=101, spike=1.0)
    for row in fallen.rows[54:]:
        row["entropy"] = 0.1
    entropy = warnings_of_loss.alarms(fallen, "entropy")
    assert min(entropy) == 21
    # Later it is within the range that it had last.
    assert [i for i, alarm in entropy.items() if alarm] == [54]
    gradient = warnings_of_loss.alarms(fallen, "grad_norm_max")
    assert [i for i, alarm in gradient.items() if alarm] == [58]
    counted = warnings_of_loss.cases(fallen, "entropy")
    # The ten iterations before the loss are "soon".
    assert len(counted) == 59 - 20 and counted[:, 1].sum() == 10
    assert len(warnings_of_loss.cases(healthy, "entropy")) == 90 - 20
    both = np.concatenate([counted, warnings_of_loss.cases(healthy, "entropy")])
    assert warnings_of_loss.chances(both) == [1.0, pytest.approx(9 / 108)]


def test_simple_measures():
    short = run([0.2, 0.5, 0.4, 0.1, 0.1, 0.1, 0.1, 2.0])
    by_hand = {"mean": 3.5 / 8, "end": 2, "early gain": 0.3, "fall": 0.35 - 1.05}
    for name, value in by_hand.items():
        assert ledger.MEASURES[name](short, "success") == pytest.approx(value), name


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


# ------------------------------------------------------------------------------------ shipped runs
def test_old_and_new_names_of_a_setting_are_read():
    """Shipped runs say update_size. New ones say minibatch_size."""
    shipped = runs_of("trap", "PPO")[0]
    new = ledger.Run({"minibatch_size": 8}, [{"iteration": 0}])
    assert shipped.config["minibatch_size"] == new.config["minibatch_size"] == 8
    assert "update_size" not in shipped.config


def test_shipped_runs_become_folders_that_plots_draws(tmp_path, monkeypatch, capsys):
    """The two pictures of README, from runs that are written out."""
    monkeypatch.chdir(tmp_path)
    unpack.main(["trap-PPO-seed9", "trap-long-StarPO-S-seed9"])
    unpack.main(["sokoban-elsewhere-StarPO-S-seed?", "sokoban-elsewhere-k-*"])
    folders = capsys.readouterr().out.split()
    assert len(folders) == 2 + 4 + 3 + 3 + 3
    runs = {folder: plots.load(folder) for folder in folders}
    assert runs[folders[0]].config["seed"] == 9
    assert plots.peak_and_collapse(runs[folders[0]]) == (17, 164)
    assert runs[folders[2]].yardsticks["sokoban"] == [pytest.approx(0.2232, abs=1e-4), 1.0]
    for folder in folders[2:]:
        updates, success = plots.evaluations(runs[folder], "sokoban")
        assert updates == list(range(0, 101, 10))
        assert success[0] == pytest.approx(0.43, abs=0.005) and success[-1] > 0.8
    plots.collapse({folder: runs[folder] for folder in folders[:2]}, "collapse.png")
    plots.online_k({folder: runs[folder] for folder in folders[2:]}, "online-k.png")
    for name in ("collapse.png", "online-k.png"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_a_run_that_is_not_shipped_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="nothing-of-that-name"):
        unpack.main(["nothing-of-that-name"])


def winners(method_runs):
    return list(filter(ledger.has_won, method_runs))


def equal_runs():  # -> {method: its 20 runs}
    return {method: runs_of(setup, method) for setup, method in paper.pairs_of("equal")}


def test_what_the_page_says_of_equal_updates():
    """Counts and means by loops over the rows of the log. (Welch's interval: see test_two_methods.)
    """
    lost, held = {}, {}
    for method, runs in equal_runs().items():
        held[method] = []
        for run in runs:
            success = [row["success"] for row in run.rows if row["iteration"]]
            fives = [np.mean(success[i:i + 5]) for i in range(len(success) - 4)]
            if max(fives) < 0.9:
                continue  # it never won
            _, lost_at = plots.peak_and_collapse(run)
            made = sum(row["updates"] for row in run.rows[1:lost_at])
            held[method].append(6400 if lost_at is None else made)
            # A run that is not lost was trained to the end.
            assert lost_at is not None or len(success) in (400, 1600)
        lost[method] = f"{sum(x < 6400 for x in held[method])} of {len(held[method])}"
    assert list(lost.values()) == ["14 of 18", "16 of 20", "16 of 20", "15 of 16"]
    says(CLAIMS, "StarPO-S", "equally many updates", "16 of 20")
    says(CLAIMS, "random quarter", "15 of 16")
    says(CLAIMS, "14 of 18", "PPO")
    ppo, of_32, ours, _ = map(np.array, held.values())
    for samples in ([ours, ppo], [of_32, ppo]):
        low, high = ledger.interval(samples)
        says(CLAIMS, f"{ledger.mean_of(samples):.0f} [{low:.0f}, {high:.0f}] updates longer")
    runs = equal_runs()
    p = ledger.log_rank(winners(runs["StarPO-S, plain"]), winners(runs["PPO, plain"]))
    says(CLAIMS, f"log-rank p {p:.2f}")
    low, high = ledger.interval([ours, ppo])
    assert high < 1600 < -low, "no difference would need both within"


def test_what_the_pages_say_of_the_first_400_iterations_and_of_ends():
    runs = {method: winners(found) for method, found in equal_runs().items()}
    early = []
    for method in ("StarPO-S, plain", "random quarter"):
        first = [plots.Run(run.config | {"iterations": 400}, run.rows[:401])
                 for run in runs[method]]
        early.append(sum(ledger.held(run, None) < 1 for run in first))
    assert early == [5, 3]
    says(CLAIMS, "StarPO-S", "5 of 20")
    says(CLAIMS, "random quarter", "3 of 16", "7 of all 20")
    assert ledger.lost_in_iterations(equal_runs()["random quarter"]).startswith("7 of 20 ")
    dead = []
    for found in runs.values():
        dead.append([run.config["seed"] for run in found
                     if not ledger.lost(run, None) and ledger.end(run, "eval bandit") == 0])
    assert dead == [[74], [], [67, 77], []]
    says(TABLES, "StarPO-S's 67 and 77", "PPO's 74", "0.00")
    # Schoenfeld's formula
    for z, name in ((1.96, "hazard ratio"), (2.394, "Holm")):
        ratio = math.exp(math.sqrt(4 * (z + 0.8416) ** 2 / 30))
        says(TABLES, f"{ratio:.1f}", name)


def first_collapse(run):
    """The iteration of the first collapse after a mean of five of 0.9, not only after the best."""
    iterations, success = run.series("success")
    for i in range(5, len(success) + 1):
        means = ledger.forward_means(success[:i], 5)
        following = success[i:i + 10]
        bad = (following < means.max() / 2).all() and len(following) == 10
        if means.max() >= 0.9 and bad:
            return iterations[i] if i < len(success) else math.inf
    return math.inf


def test_what_the_page_says_of_other_ways_to_count():
    """None was planned: the first collapse instead of that after the best iterations; all runs;
    episodes played.
    """
    runs = equal_runs()
    held, early = [], []
    for method in ("StarPO-S, plain", "random quarter"):
        first = [(run, first_collapse(run)) for run in winners(runs[method])]
        early.append(sum(collapsed <= 400 for _, collapsed in first))
        updates = []
        for run, collapsed in first:
            made = sum(row["updates"] for row in run.rows[1:] if row["iteration"] < collapsed)
            updates.append(min(6400, made))
        held.append(np.array(updates))
    assert early == [5, 4]
    says(TABLES, "random quarter", "4 of 16 in 400 iterations")
    low, high = ledger.interval(held)
    says(TABLES, f"{ledger.mean_of(held):.0f} [{low:.0f}, {high:.0f}] updates longer")

    of_all = [ledger.updates_held(runs[method]) for method in ("StarPO-S of 32", "PPO, plain")]
    low, high = ledger.interval(of_all)
    says(TABLES, f"{ledger.mean_of(of_all):.0f} [{low:.0f}, {high:.0f}]", "longer than PPO")
    for method, found in runs.items():
        cfg = found[0].config
        episodes = cfg["prompts"] * cfg["rollouts"] * cfg["iterations"]
        assert episodes == (204_800 if "StarPO-S" in method else 51_200)
    says(TABLES, "51,200 episodes", "204,800")


# ------------------------------------------------------------------------------------- SEARCH.md
def searched():  # -> {name: Run}
    return paper.unpack(FIGURES / "research" / "search.jsonl.bz2")


def test_the_search_uses_todays_rule():
    """Seed, six places of success and of valid turns, and length name the run. What happened is
    what plots.peak_and_collapse says.
    """
    runs = {}
    for run in searched().values():
        key = [str(run.config["seed"])]
        for column in ("success", "valid"):
            _, y = run.series(column)
            places = np.linspace(0, len(y) - 1, 6).astype(int)
            key.append(" ".join(f"{x:.2f}" for x in y[places]))
        runs[*key, str(len(y))] = run
    row = r"^\| \w[^|]* \| (\d+) \| ([^|]+) \| ([^|]+) \| (\d+) \| ([^|]+) \|$"
    rows = re.findall(row, SEARCH, re.M)
    assert len(rows) == len(runs) == 43
    for *which, happened in rows:
        _, lost_at = plots.peak_and_collapse(runs[tuple(which)])
        said = re.search(r"lost at (\d+|once)", happened)
        if lost_at is None:
            assert said is None, which
        else:
            assert said[1] == str(lost_at) or (said[1] == "once" and lost_at <= 2), which


def test_what_the_search_taught():
    gentle, first, lost = [], [], []
    spiky, all_runs = {True: 0, False: 0}, {True: 0, False: 0}  # lost or not
    for name, run in searched().items():
        cfg = run.config
        iterations, success = run.series("success")
        _, lost_at = plots.peak_and_collapse(run)
        is_ppo = name.startswith(("ppo-", "bandit-ppo-")) and cfg["env"] == "bandit"
        one_epoch = cfg["minibatch_size"] == 32 and cfg["epochs"] == 1
        if is_ppo and one_epoch and cfg["lr"] <= 3e-3:
            gentle.append(lost_at)
        # These make 16 updates an iteration.
        if name.startswith(("bandit-ppo-2e3-E8-1", "bandit-ppo-2e3-ep4-1")):
            first.append(int(iterations[success >= 0.9][0]))
            lost.append(lost_at)
            if lost_at is not None:  # from one iteration to the next
                assert success[int(lost_at) - 2] > 0.9 > 0.1 > success[int(lost_at) - 1]
        _, gradient = run.series("grad_norm")
        all_runs[lost_at is not None] += 1
        spiky[lost_at is not None] += gradient.max() > 20 * np.median(gradient[gradient > 0])
    assert len(gentle) == 3 and not any(gentle)
    says(SEARCH, "250 iterations", "7.5 times the default rate", "three runs")
    assert len(lost) == 7 and sum(at is not None for at in lost) == 2
    says(SEARCH, "two of seven runs")
    says(SEARCH, f"reaches 0.9 after {min(first)} to {max(first)} iterations")
    says(SEARCH, f"In {spiky[False]} of the {all_runs[False]} runs without a loss",
         f"{spiky[True]} of the {all_runs[True]} with one")


# ---------------------------------------------------------------------- CLAIMS.md, TABLES.md: trap
def test_lost_runs_made_to_learn_on_stay_lost():
    further = []
    for run in runs_of("trap", "PPO, never ended"):
        _, success = run.series("success")
        _, lost_at = plots.peak_and_collapse(run)
        if lost_at is not None:
            assert success[int(lost_at) - 1:].max() < 0.23
            further.append(len(success) - int(lost_at))
    assert len(further) == 4
    says(TABLES, "0.23", f"{min(further)} to {max(further)} more iterations")


def test_an_ended_run_may_have_come_back():
    """Seed 2 had nothing to compare for six iterations. Made to learn from that, it stayed lost;
    else it came back.
    """
    iterations, success = runs_of("trap", "PPO")[2].series("success")
    assert iterations[126] == 127
    assert success[125] > 0.5 and (success[126:132] < 0.5).all() and success[132:].max() > 0.99
    says(TABLES, "seed 2 came back after six")


def fisher(table):
    """Fisher's exact test, two-sided, of [[lost, all], [lost, all]]."""
    (lost, n), (others_lost, others) = table

    def chance(k):  # that k of the lost runs are among the first n
        all_lost = lost + others_lost
        ways = math.comb(all_lost, k) * math.comb(n + others - all_lost, n - k)
        return ways / math.comb(n + others, n)
    return sum(chance(k) for k in range(n + 1) if chance(k) <= chance(lost) * (1 + 1e-9))


def test_what_the_page_says_of_adams_memory():
    lost = [ledger.lost(run, None) for run in runs_of("trap", "PPO, Adam beta2 0.9")]
    default = [ledger.lost(run, None) for run in runs_of("trap", "PPO")]
    assert (sum(lost), len(lost)) == (1, 10)
    assert (sum(default), len(default)) == (11, 13)
    assert sum(default[:10]) == 8
    says(CLAIMS, "one of ten runs with beta2 = 0.9", "11 of 13")
    p, without = fisher([(1, 10), (11, 13)]), fisher([(1, 10), (8, 10)])
    says(CLAIMS, "Fisher", f"p {p:.4f}", f"{without:.3f} without the seeds 10 to 12")
    says(CLAIMS, "Without them", "8 of 10 are lost")


def test_what_the_page_says_of_the_usual_rate():
    """The trap's updates at the default rate: none of ten is lost."""
    runs = runs_of("trap, usual rate", "PPO, plain")
    trap = runs_of("trap, fresh seeds", "PPO, plain")
    usual, high = runs[0].config, trap[0].config
    changed = {name for name in usual if usual[name] != high.get(name)}
    assert changed - {"eval_every", "yardsticks"} == {"lr"} and usual["minibatch_size"] == 8
    assert (usual["lr"], high["lr"]) == (4e-4, 5 * 4e-4)
    assert len(runs) == 10
    for run in runs:
        assert ledger.has_won(run) and not ledger.lost(run, None)
        assert sum(row.get("updates", 0) for row in run.rows) > 6000
    assert sum(ledger.lost(run, None) for run in trap) == 16
    p = fisher([(0, 10), (16, 20)])
    says(CLAIMS, f"Fisher's p is {p:.5f}")
    says(TABLES, f"p is {p:.5f}")
    says(CLAIMS, "At the rate of the trap 16 of 20")
    different = [100 * run.series("distinct")[1][-100:].mean() for run in runs]
    says(TABLES, f"{min(different):.0f} to {max(different):.0f} of 100 are different")
    assert max(different) < 15


def test_no_run_at_the_default_rate_is_lost():
    """Of all that are shipped. Those of the trap have a higher rate."""
    runs = []
    for model in ("tiny", "tiny-b", "tiny-c"):
        runs += unpack.shipped(FIGURES / model).values()
    usual = [run for run in runs if run.config["lr"] == 4e-4]
    assert not any(ledger.lost(run, None) for run in usual)
    says(CLAIMS, f"none of {len(usual)} runs collapses")


def came_back(run):
    _, lost_at = plots.peak_and_collapse(run)
    if lost_at is None:
        return False
    iterations, success = run.series("success")
    return ledger.forward_means(success[iterations >= lost_at] > 0.5, 10).max() > 0.99


def never_won_but_lost(runs):  # -> seeds
    return [run.config["seed"] for run in runs
            if ledger.lost(run, None) and not ledger.has_won(run)]


def seeds_that_came_back(runs):
    return [run.config["seed"] for run in runs if came_back(run)]


def test_what_the_page_says_of_single_runs():
    """Runs that were lost without having won, and lost runs that came back."""
    never, back = [], []
    pairs = [("trap", method) for method in (
        "PPO", "no KL", "clip-higher", "StarPO-S", "GRPO", "random quarter", "StarPO-S of 32")]
    pairs += [("trap, long", "keep 25%"), *paper.pairs_of("equal")]
    for setup, method in pairs:
        runs = runs_of(setup, method)
        never += [(method, seed) for seed in never_won_but_lost(runs)]
        back += [(method, seed) for seed in seeds_that_came_back(runs)]
    for model in ("tiny-b", "tiny-c"):
        for method in ("PPO", "StarPO-S"):
            runs = runs_of("trap", method, model, seeds=3)
            never += [(f"{model} {method}", seed) for seed in never_won_but_lost(runs)]
            back += [(f"{model} {method}", seed) for seed in seeds_that_came_back(runs)]
    assert never == [
        ("PPO", 10), ("no KL", 4), ("GRPO", 1), ("GRPO", 4), ("random quarter", 0),
        ("random quarter", 1), ("PPO, plain", 66), ("PPO, plain", 71), ("random quarter", 61),
        ("random quarter", 72), ("random quarter", 73), ("random quarter", 74),
        ("tiny-c PPO", 0)]
    says(TABLES, "PPO's seeds 10, 66 and 71", "GRPO's 1 and 4", "*no KL*'s 4",
         "the random quarter's 0, 1, 61 and 72 to 74", "tiny-c's 0")
    assert back == [
        ("no KL", 2), ("StarPO-S", 7), ("keep 25%", 4), ("PPO, plain", 64), ("PPO, plain", 72),
        ("StarPO-S, plain", 79), ("random quarter", 70), ("tiny-b StarPO-S", 2)]
    says(TABLES, "PPO's seeds 64 and 72", "StarPO-S's 7 and 79", "*no KL*'s 2", "*keep 25%*'s 4",
         "the random quarter's 70", "tiny-b's StarPO-S 2")


def test_what_the_page_says_of_fresh_seeds_and_of_other_models():
    fresh = runs_of("trap, fresh seeds", "PPO, plain")
    first = runs_of("trap", "PPO")
    counts = []
    for runs in (first, fresh):
        won = winners(runs)
        counts.append(f"{sum(ledger.lost(run, None) for run in won):.0f} of {len(won)}")
    says(CLAIMS, "PPO's runs that had won", counts[0], f"{counts[1]} with fresh seeds")
    both = [ledger.lost(run, None) for run in first + fresh]
    says(CLAIMS, "PPO loses", ledger.k_of_n(int(sum(both)), len(both)))
    others = [run for model in ("tiny-b", "tiny-c")
              for run in winners(runs_of("trap", "PPO", model, seeds=3))]
    lost = sum(ledger.lost(run, None) for run in others)
    says(CLAIMS, "two other cold starts", f"{lost:.0f} of {len(others)} winning")
    last = fresh[18]
    assert last.config["seed"] == 78 and ledger.lost(last, None)
    says(TABLES, "PPO's seed 78", f"{100 * last.rows[-1]['distinct']:.0f} of 100")


def test_what_the_page_says_of_permutation_tests():
    """One of the methods has no spread, so it is not Welch's test."""
    samples = []
    for method in ("keep 25%", "PPO"):
        samples.append([ledger.held(run, None) for run in runs_of("trap", method)])
    values = np.array(samples[0] + samples[1])
    seen = np.mean(samples[0]) - np.mean(samples[1])
    as_extreme = []
    for some in itertools.combinations(range(len(values)), len(samples[0])):
        mean = values[list(some)].mean()
        rest = (values.sum() - mean * len(some)) / (len(values) - len(some))
        as_extreme.append(abs(mean - rest) >= abs(seen) - 1e-12)
    p = ledger.p_value(0, [np.array(of_method) for of_method in samples])
    assert p == pytest.approx(np.mean(as_extreme))
    says(TABLES, f"{p:.3f} for the filter's row")
    bandit = []
    for method in ("StarPO-S", "StarPO-S, no think"):
        runs = runs_of("bandit, elsewhere", method)
        bandit.append(np.array([ledger.mean(run, "eval bandit") for run in runs]))
    assert ledger.judge({"kind": "more", "bound": 0, "margin": 0.05}, bandit)[1] < 0.001
    says(TABLES, "0.0001 for Table 4's bandit")


def test_what_the_page_says_of_the_run_in_its_picture():
    longest = [row.get("grad_norm_max") for row in runs_of("trap", "PPO")[12].rows]
    assert np.median(longest[1:21]) == pytest.approx(1.7, abs=0.05)
    assert np.median(longest[200:310]) == pytest.approx(0.003, abs=0.0005)
    says(CLAIMS, "from 1.7 to 0.003", "1-20", "200-309")


def test_what_the_page_says_of_rare_tokens():
    log = (FIGURES / "rare_tokens.txt").read_text()
    shares = {"0": [], "0.3": []}
    for start, share in re.findall(r"^\| (0|0\.3) to \S+ \| .* ([\d.]+) \|$", log, re.M):
        shares[start].append(float(share))
    assert len(shares["0"]) == len(shares["0.3"]) == 4
    says(TABLES, f"at most {max(shares['0']):.0%} have a token rarer than 0.3")
    says(TABLES, f"{min(shares['0.3']):.0%} to {max(shares['0.3']):.0%}")


# ------------------------------------------------------------------------- the default rate: truth
def test_what_the_page_says_of_truth_on_sokoban_and_of_lengths():
    """The reward changes neither truth nor success there. Single thoughts grow while episodes
    become shorter.
    """
    paid, plain = (runs_of("sokoban", method) for method in ("truth rewarded", "PPO"))
    assert len(paid) == 5
    for measure, metric in ((ledger.mean, "true_claims"), (ledger.end, "eval sokoban")):
        samples = [np.array([measure(run, metric) for run in runs]) for runs in (paid, plain)]
        low, high = ledger.interval(samples)
        assert low < 0 < high and high - low < 0.05
    for setup in ("sokoban", "gentle lake"):
        runs = runs_of(setup, "PPO")
        thoughts = [ledger.fall(run, "think_length") for run in runs]
        episodes = [ledger.fall(run, "response_length") for run in runs]
        assert max(thoughts) < 0 < min(episodes), "a fall is positive"


def test_what_the_page_says_of_actions_and_of_long_thoughts():
    six, one = (np.array([ledger.end(run, "eval sokoban") for run in runs_of("sokoban", method)])
                for method in ("6 actions", "1 action"))
    interval = in_brackets(*ledger.interval([six, one]))
    says(CLAIMS, "6 actions lead by", f"{six.mean() - one.mean():.2f} {interval}")
    runs = runs_of("gentle lake", "truth rewarded")
    lengths = [ledger.end(run, "think_length") for run in runs]
    assert sum(length >= 18 for length in lengths) == 5 and len(lengths) == 25
    says(CLAIMS, "in five of 25 seeds", "18 words")


# ----------------------------------------------------------------------------------- several turns
LAKE_AND_SOKOBAN = ("trap, sokoban", "trap, gentle lake")


def whole(run, metric="success"):  # to the last planned iteration, at its last value
    y = list(run.series(metric)[1])
    return y + [y[-1]] * (400 - len(y))


def test_the_trap_with_several_turns_ends_as_the_pages_say():
    ends, late = [], {}
    for setup, play in zip(LAKE_AND_SOKOBAN, (0.22, 0.20)):
        values = np.array([np.mean(whole(run)[-100:]) for run in runs_of(setup, "StarPO-S")])
        low, high = ledger.interval([values])
        assert low < play < high, "much like random play"
        ends.append(f"{values.mean():.2f} {in_brackets(low, high)}")
        for method in ("PPO", "StarPO-S"):
            last = np.mean([whole(run)[-100:] for run in runs_of(setup, method)])
            late.setdefault(method, []).append(f"{last:.2f}")
    says(CLAIMS, *ends, "random play")
    says(CLAIMS, "last 100 iterations", "PPO has " + " and ".join(late["PPO"]),
         "has " + " and ".join(late["StarPO-S"]))


def test_the_trap_with_several_turns_falls_as_the_pages_say():
    falls, quarters = [], []
    for setup in LAKE_AND_SOKOBAN:
        for method in ("PPO", "StarPO-S"):
            y = [whole(run) for run in runs_of(setup, method)]
            fall = np.array([np.mean(of_run[:20]) - np.mean(of_run[-100:]) for of_run in y])
            quarter = np.array([np.mean(of_run[:100]) - np.mean(of_run[-100:]) for of_run in y])
            low, high = ledger.interval([fall])
            if method == "StarPO-S":
                assert low > 0
            else:
                falls.append(f"{fall.mean():.2f} {in_brackets(low, high)}")
                quarters.append(f"{quarter.mean():.2f} "
                                f"{in_brackets(*ledger.interval([quarter]))}")
    for fall in falls:
        says(CLAIMS, fall)
    says(CLAIMS, *quarters)

    kept = []  # ended runs at their last value
    for method in ("StarPO-S", "PPO"):
        of_setups = [[np.mean(whole(run)) for run in runs_of(setup, method)]
                     for setup in LAKE_AND_SOKOBAN]
        kept.append(np.mean(of_setups, axis=0))
    says(TABLES, f"{ledger.mean_of(kept):.2f} {in_brackets(*ledger.interval(kept))}")


def test_losses_with_several_turns_depend_on_the_rule_as_the_pages_say():
    counts, ended, drawn, lost, back, more = {}, 0, 0, 0, 0, {}
    for method in paper.PAPER["sets"]["turns"]:
        counts[method] = np.zeros(4, dtype=int)
        for setup in LAKE_AND_SOKOBAN:
            runs = runs_of(setup, method)
            assert len(runs) == 8
            by_rules = []
            for rule in ((5, 10), *paper.OTHER_RULES):
                by_rules.append(sum(ledger.lost_at(run, *rule) < math.inf for run in runs))
            ours = sum(ledger.lost(run, None) for run in runs)
            assert by_rules[0] == ours, "lost_at with plots' numbers is plots' rule"
            counts[method] += by_rules
            ends = sum(len(run.rows) <= 400 for run in runs)
            ended += ends
            drawn += ends * (method in ("PPO", "StarPO-S"))
            lost += ours
            more[method, setup] = sum(lost_if_it_kept_its_mean(run) for run in runs) - ours
            for run in runs:
                best = ledger.forward_means(run.series("success")[1], 5).max()
                back += ledger.lost(run, None) and np.mean(whole(run)[-100:]) >= best / 2
            distinct = [np.median(run.series("distinct")[1][-100:]) for run in runs]
            assert np.median(distinct) < 0.15, "thoughts become alike in most runs"
    assert ended == 15
    says(CLAIMS, f"{drawn} of the 32 runs drawn had ended")
    says(CLAIMS, f"{min(counts['PPO'])} to {max(counts['PPO'])} of PPO",
         f"{min(counts['StarPO-S'])} to {max(counts['StarPO-S'])} of StarPO-S")
    memory = counts["PPO, Adam beta2 0.9"]
    says(CLAIMS, f"{min(memory)} to {max(memory)} of PPO with beta2 = 0.9")
    says(TABLES, f"{back:.0f} of {lost:.0f} lost runs", "half of their best or more")
    assert {pair: k for pair, k in more.items() if k} == {
        ("GRPO", "trap, sokoban"): 3, ("StarPO-S", "trap, sokoban"): 1}
    says(TABLES, "three more runs of GRPO and one of StarPO-S", "Sokoban")


def lost_if_it_kept_its_mean(run):  # of the last ten iterations, if it ended early
    y = run.series("success")[1]
    kept_on = np.append(y, np.full(400 - len(y), y[-10:].mean()))
    best = ledger.forward_means(y, 5)
    bad = kept_on[best.argmax():] < best.max() / 2
    return ledger.forward_means(bad, 10).max() > 0.99


# -------------------------------------------------------------------------------------- the critic
@pytest.mark.parametrize("value, explained", [
    ([1.0, 2.0, 3.0], 1.0), ([7.0, 7.0, 7.0], 0.0), ([-1.0, -2.0, -3.0], -3.0)])
@pytest.mark.parametrize("R, by_others", [([[0.0, 0.0], [1.0, 1.0]], 1.0), ([[0.0, 1.0]], -3.0)])
def test_what_a_critic_explains(value, explained, R, by_others, monkeypatch):
    """By hand: values that are right, all alike, or of the wrong sign; levels that differ, or one
    level. An iteration whose slices made no update gets no columns.
    """
    batch = {"mask": torch.tensor([[True, True, False, True]]),
             "value_target": torch.tensor([[1.0, 2.0, 99.0, 3.0]]),
             "value": torch.tensor([[*value[:2], -99.0, value[2]]])}
    trajs = [SimpleNamespace(R=x) for group in R for x in group]
    results = iter([(batch, [{}]), ({}, []), ({}, [])])
    monkeypatch.setattr(critic, "original_learn", lambda *args: next(results))
    rows = [{}, {}]
    for row, slices in zip(rows, (2, 1)):
        for _ in range(slices):
            critic.learn(trajs, None, None, 0)
        critic.add_columns(row, trajs, None, SimpleNamespace(rollouts=2))
    columns = {"explained": pytest.approx(explained), "by_others": pytest.approx(by_others)}
    assert rows == [columns, {}]
    rows = [{}] + 30 * [rows[0], {}]
    assert critic.means(rows, "explained") == 4 * [pytest.approx(explained)]


def test_what_is_said_of_the_critic_is_what_was_measured():
    printed = (FIGURES / "research" / "critic.txt").read_text()
    page = (FIGURES / "DIFFERENCES.md").read_text()
    head = printed.splitlines()[:3]
    assert str(critic.SEEDS) in head[0] and head[2].split()[1:] == list(critic.PERIODS)
    last = {}  # the mean of the last period; behind it are the lowest and the highest
    for line in printed.splitlines()[3:]:
        env, column, *_, mean, _, _ = line.split()
        last[env, column] = mean.replace("-0.00", "0.00")
    says(page, f"explain {last['frozenlake', 'explained']} of the variance",
         f"{last['sokoban', 'explained']} on Sokoban",
         f"{last['bandit', 'explained']} on the bandit")
    says(page, f"{last['frozenlake', 'by_others']} of the returns' variance on the lake",
         f"{last['sokoban', 'by_others']} on Sokoban")
    samples = [np.array([ledger.mean(run, "eval sokoban") for run in runs_of("sokoban", method)])
               for method in ("PPO, free critic", "PPO")]
    interval = in_brackets(*ledger.interval(samples))
    says(page, f"differs by {ledger.mean_of(samples):.2f} {interval}",
         f"{len(samples[0])} and {len(samples[1])} seeds")


# ----------------------------------------------------------------------------------------- SmolLM2
@pytest.fixture(scope="module")
def page():
    return (FIGURES / "smollm2" / "README.md").read_text()


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def looks():
    return smollm2.load_looks()


def test_what_a_real_model_learned_is_what_its_logs_say(page):
    reports = smollm2.load()
    seeds = {"bandit": range(1, 6), "lake": (1, 2), "told": (1, 2), "alone": (3, 4, 6),
             "map": (1,), "sokoban": (1,), "read_lake": (1, 2), "read_sokoban": (1,),
             "paid_lake": (1,), "rewarded_lake": (1,), "kl_lake": (1,), "taught_lake": (1,),
             "taught_sokoban": (1,), "slow_sokoban": (1, 2), "rewarded_sokoban": (1,),
             "lessons_read_lake": (1, 2), "lessons_taught_sokoban": (1,)}
    assert list(reports) == [f"{task}-seed{seed}" for task in seeds for seed in seeds[task]]
    assert smollm2.table(reports) in page
    lessons = {"told": ("lesson 40:",), "map": ("map 200:", "lesson 30:"),
               "sokoban": ("map 200:", "lesson 30:")}
    lessons |= dict.fromkeys(seeds.keys() - {"bandit", "lake", "alone", *lessons},
                             ("map 400:", "lesson 40:"))
    success, steps = {}, {}
    for name, report in reports.items():
        task, _ = name.split("-")
        success[name] = [*success_of(report)]
        if task in lessons:
            for begins in lessons[task]:
                assert any(line.startswith(begins) for line in report["warm start"])
        else:
            assert report["warm start"][0] == "valid turns 0.00"
            step, = re.findall(r"^step (\d+):", report["warm start"][-2])
            steps.setdefault(task, []).append(int(step))
    says(page, f"{min(steps['bandit'])} to {max(steps['bandit'])} steps")
    before, _, after = zip(*(success[f"bandit-seed{seed}"] for seed in range(1, 6)))
    *befores, last_before = [f"{share:.2f}" for share in before]
    *afters, last_after = [f"{share:.2f}" for share in after]
    says(page, f"{', '.join(befores)} and {last_before} to {', '.join(afters)} and {last_after}")
    between = [f"{share:.2f}" for share in success["told-seed2"][1:-1]]
    says(page, f"{', '.join(between[:-1])} and {between[-1]} in between")
    assert sum(min(success[f"bandit-seed{seed}"][1:]) > 0.97 for seed in range(1, 6)) == 4
    assert [success[f"bandit-seed{seed}"][0] > 0.9 for seed in range(1, 6)].count(True) == 1
    # The sure arm in four of five episodes.
    assert success["bandit-seed2"][0] == pytest.approx(0.2, abs=0.02)
    shares = [row["success"] for row in reports["bandit-seed2"]["rows"][1:]]
    assert np.mean(np.isin(shares, (0, 0.25, 0.5, 0.75, 1))) > 0.6, "groups choose alike"
    assert max(success["lake-seed1"] + success["lake-seed2"]) < 0.2
    for task in seeds.keys() - {"bandit", "lake"}:
        pairs = []
        for seed in seeds[task]:
            first, *later = success[f"{task}-seed{seed}"]
            pairs.append(f"{first:.2f} to {later[-1]:.2f}")
            if task == "alone":  # better than any moves that ignore the state
                assert plots.interval(later[-1], 128)[0] > 0.29 > first
        says(page, *pairs)
    losses = []
    for task in ("map", "sokoban"):
        said = reading_of(reports[f"{task}-seed1"])
        losses += [said[0][1], said[-1][1], f"in {said[-1][2] / 60:.0f}"]
    says(page, *losses)
    minutes = []
    for task in ("read_lake", "read_sokoban"):
        step, loss, seconds = reading_of(reports[f"{task}-seed1"])[-1]
        assert (step, loss) == (400, "0.00")
        minutes.append(f"{seconds / 60:.0f}")
    says(page, f"below 0.005 in both games, in {' and '.join(minutes)} minutes")
    says(page, "With seed 2 it was {} on the lake and {} on Sokoban".format(
        *(reading_of(reports[f"{task}-seed2"])[-1][1] for task in ("read_lake", "slow_sokoban"))))


def reading_of(report):  # -> [(step, loss, seconds), ...]
    pattern = r"map (\d+): loss (.*), (\d+) s"
    found = [re.fullmatch(pattern, line) for line in report["warm start"]]
    return [(int(match[1]), match[2], int(match[3])) for match in found if match]


def evaluated(task, column, form="{:.0%}"):  # of seed 1
    rows = smollm2.load()[f"{task}-seed1"]["rows"]
    return [form.format(row[column]) for row in rows if "eval" in row]


def test_what_a_real_model_thought_of_its_maps_is_what_its_logs_say(page):
    reports = smollm2.load()
    true = {task: evaluated(task, "true_claims")
            for task in ("map", "sokoban", "read_lake", "read_sokoban")}
    lake, sokoban = [[share(f"warm-{task}-seed1, 0 iterations", column)
                      for column in ("true_claims", "whole_readings")]
                     for task in ("read_lake", "read_sokoban")]
    says(page, f"{lake[0]} of its claims (`The goal is ...`) were true, and {lake[1]} of its")
    says(page, f"Sokoban: {sokoban[0]} and {sokoban[1]}")
    a, b, c = [f"{success:.2f}" for success in success_of(reports["map-seed1"])]
    says(page, f"*map* won {a}, {b} and {c}, while only {', '.join(true['map'][:2])} and "
               f"{true['map'][2]} of its claims")

    before, after = [f"{success:.2f}" for success in success_of(reports["sokoban-seed1"])]
    says(page, f"won {before} before and {after} after 10 iterations",
         f"from {true['sokoban'][0]} to {true['sokoban'][1]}")
    rows = reports["read_sokoban-seed1"]["rows"]
    says(page, f"success was {logged('read_sokoban-seed1')[1]:.2f} in 128 levels")
    says(page, f"{true['read_sokoban'][1]} of the claims",
         f"(before RL {true['read_sokoban'][0]})",
         "{1} of the first moves fitted ({0})".format(*evaluated("read_sokoban", "fitting")))
    tokens = [row["response_length"] / row["turns"] for row in rows[1:]]
    says(page, f"from {tokens[0]:.0f} to {tokens[13]:.0f} tokens")
    assert rows[14]["entropy"] > 2 * rows[1]["entropy"]


# The same task with two seeds, before and after RL.
PAIRS = [(f"warm-read_lake-seed{seed}, 0 iterations", f"read_lake-seed{seed}, 20 iterations")
         for seed in (1, 2)]
TAUGHT_LAKE = "warm-taught_lake-seed1, 0 iterations", "taught_lake-seed1, 20 iterations"
LESSONS_LAKE = "lessons_read_lake-seed1, 124 lessons"
SECOND_LESSONS_LAKE = "lessons_read_lake-seed2, 114 lessons"
REWARDED_LAKE = "rewarded_lake-seed1, 23 iterations"


def won(name):  # in all held-out levels
    success, = smollm2.load_looks()[name]["eval"].values()
    return success


def share(name, column):
    return f"{smollm2.load_looks()[name][column]:.0%}"


def logged(name):  # -> success in 128 levels, in each evaluation
    return [*success_of(smollm2.load()[name])]


def test_what_rl_did_on_the_lake_is_what_all_held_out_levels_say(page, readme, looks):
    assert smollm2.table_of_looks(looks) in page
    fit, whole, on_map = [[[share(name, column) for name in pair] for pair in PAIRS]
                          for column in ("fitting", "whole_readings", "fitting_the_map")]
    rises = [f"from {won(before):.2f} to {won(after):.2f}" for before, after in PAIRS]
    says(page, f"{fit[0][0]} of the first moves in a turn fitted",
         f"after 20 iterations {fit[0][1]}")
    says(page, f"Success rose {rises[0]}")
    says(page, f"these were {fit[1][0]} and {fit[1][1]}, and success rose {rises[1]}")
    says(page, "In neither seed do the intervals of before and after overlap")
    for before, after in PAIRS:
        assert plots.interval(won(before), 256)[1] < plots.interval(won(after), 256)[0]
    logs = [logged(f"read_lake-seed{seed}") for seed in (1, 2)]
    says(page, "In 128 levels success rose " + ", and ".join(
        f"from {log[0]:.2f} to {log[2]:.2f}" for log in logs))
    after_10 = [f"{row['fitting']:.0%}" for row in smollm2.load()["read_lake-seed2"]["rows"]
                if "eval" in row][1]
    says(page, f"after 10 iterations {after_10} of its first moves",
         f"success was {logs[1][1]:.2f} in 128 levels",
         f"{evaluated('read_lake', 'fitting')[1]} and {logs[0][1]:.2f}")
    says(page, f"fell from {whole[0][0]} to {whole[0][1]}",
         f"from {whole[1][0]} to {whole[1][1]}")
    says(page, f"{on_map[0][1]} and {on_map[1][1]} of the first moves fit the map")
    says(page, f"began with {evaluated('map', 'fitting')[0]} of fitting moves")
    rises = [[plots.with_interval(won(name), 256) for name in pair] for pair in PAIRS]
    says(readme, *(f"from {before} to {after}" for before, after in rises))
    says(readme, "{} and {} of its claims".format(
        *(share(before, "true_claims") for before, _ in PAIRS)))


def test_where_success_stopped_is_what_the_logs_and_levels_say(page, readme, looks):
    later, entropy, spread = [], [], []
    for seed in (1, 2):
        rows = smollm2.load()[f"read_lake-seed{seed}"]["rows"]
        later.append(", ".join(f"{rows[i]['eval']['frozenlake']:.2f}" for i in (20, 30, 40)))
        for column, said in (("entropy", entropy), ("reward_std", spread)):
            means = [fmean(row[column] for row in rows[i:i + 5]) for i in (16, 36)]
            said.append("from {:.2f} to {:.2f}".format(*means))
    says(page, f"success was {later[0]} after 20, 30 and 40 iterations", f"seed {later[1]}")
    says(page, f"{entropy[0]} in the first seed", f"{entropy[1]} in the second",
         f"a group {spread[0]} and {spread[1]}")
    ends = [f"read_lake-seed{seed}, 40 iterations" for seed in (1, 2)]
    says(page, "After 40 iterations these are {} and {}".format(
        *(share(label, "whole_readings") for label in ends)))
    says(readme, "after 40 iterations it was {:.2f} and {:.2f}".format(*map(won, ends)))

    holes, after = [], (*ends, LESSONS_LAKE, SECOND_LESSONS_LAKE)
    taken = [looks[label]["into_a_hole_at_forks"] for label in after]
    says(readme, f"in {min(taken):.0%} to {max(taken):.0%} of the cases")
    for label in (*after, *TAUGHT_LAKE):
        moves = looks[label]["first_moves_at_forks"]
        holes.append(f"{moves * looks[label]['into_a_hole_at_forks']:.0f} of {moves}")
    says(page, f"in {holes[0]} cases in the first seed, and in {holes[1]} in the second")
    says(page, f"after lessons in place of RL in {holes[2]} and {holes[3]}")
    says(page, f"in *taught_lake* in {holes[4]} before RL, and in {holes[5]} after")


def test_how_much_rl_regains_is_what_the_levels_say(page, readme):
    before, after = [plots.with_interval(won(name), 256) for name in TAUGHT_LAKE]
    first, _, last = logged("taught_lake-seed1")
    says(page, f"it won {before}, and after 20 iterations {after}",
         f"in 128 levels {first:.2f} and {last:.2f}")
    says(page, f"it won {before[:4]} before any GRPO, and {after[:4]} after")
    says(readme, f"won {before} before RL, and {after[:4]} after")
    taught, read = [[share(name, "true_claims_of_later_turns") for name in names]
                    for names in (TAUGHT_LAKE, PAIRS[0])]
    says(page, f"{taught[0]} of its claims are true before RL, and {taught[1]} after")
    says(page, f"these are {read[0]} and {read[1]}")
    whole, true = [[share(name, column) for name in TAUGHT_LAKE]
                   for column in ("whole_readings", "true_claims")]
    says(page, f"from {whole[0]} to {whole[1]}", f"rose from {true[0]} to {true[1]}")
    ends = [f"{won(name):.2f}" for _, name in (*PAIRS, TAUGHT_LAKE)]
    assert ends == ["0.58", "0.59", "0.58"], "where a walker ends who ignores holes"


def test_what_lessons_in_place_of_rl_did_is_what_all_held_out_levels_say(page, readme, looks):
    first, second = [logged(f"lessons_read_lake-seed{seed}")[-1] for seed in (1, 2)]
    by_rl = logged("read_lake-seed2")[2]  # after 20 iterations
    says(page, f"at the end {first:.2f}, but {won(LESSONS_LAKE):.2f} in 256")
    says(page, f"After its 20 iterations RL had {won(PAIRS[0][1]):.2f} in both")
    in_all = [f"{won(label):.2f}" for label in (LESSONS_LAKE, SECOND_LESSONS_LAKE)]
    assert in_all[0] == in_all[1]
    says(readme, f"won as much: {in_all[0]} in both seeds")
    says(page, f"with {second:.2f} in 128 levels and with {in_all[1]} in 256",
         f"RL had {by_rl:.2f} and {won(PAIRS[1][1]):.2f}")
    says(page, f"leave {share(LESSONS_LAKE, 'whole_readings')} of the thoughts",
         f"in the second seed {share(SECOND_LESSONS_LAKE, 'whole_readings')}")
    look = looks[LESSONS_LAKE]
    assert look["true_claims_of_later_turns"] < look["true_claims_of_first_turns"] - 0.1


def test_what_a_reward_for_reading_did_is_what_all_held_out_levels_say(page, readme, looks):
    says(page, f"After 23 iterations {share(REWARDED_LAKE, 'whole_readings')} of the thoughts",
         f"{share(REWARDED_LAKE, 'fitting')} of the first moves",
         f"success was {won(REWARDED_LAKE):.2f}")
    tasks = "rewarded_lake", "read_lake"
    success = [logged(f"{task}-seed1")[2] for task in tasks]
    whole, fit = [[evaluated(task, column)[2] for task in tasks]
                  for column in ("whole_readings", "fitting")]
    with_it, without = [f"{whole[i]}, {fit[i]} and {success[i]:.2f}" for i in (0, 1)]
    says(page, f"these were {with_it} (without the reward {without})")
    turns = [looks[label]["turns_of_eval"] for label in (REWARDED_LAKE, PAIRS[0][1])]
    says(page, f"in {turns[0]:.1f} turns an episode in place of {turns[1]:.1f}")
    says(readme, "kept", *whole, f"was {success[0]:.2f} with it and {success[1]:.2f} without",
         f"after three more iterations {won(REWARDED_LAKE):.2f} with it")


def test_what_lessons_and_pay_did_to_thoughts_is_what_the_logs_say(page):
    reports = smollm2.load()
    _, *between, _ = [f"{success:.2f}" for success in logged("lessons_read_lake-seed1")]
    says(page, f"Success was {', '.join(between)} in 128 levels")
    whole, fit = (functools.partial(evaluated, column=column)
                  for column in ("whole_readings", "fitting"))

    before, after = success_of(reports["kl_lake-seed1"])
    assert before == after
    says(page, f"{whole('kl_lake')[1]} of the thoughts", f"({whole('read_lake')[1]} without",
         f"{fit('kl_lake')[1]} of the first moves", f"({fit('read_lake')[1]} without",
         f"success was {after:.2f}")

    valid = evaluated("paid_lake", "valid_of_eval")
    says(page, f"{whole('paid_lake')[-1]} of the thoughts had no error, but only {valid[-1]}")
    last = reports["paid_lake-seed1"]["rows"][-1]
    says(page, f"success was {last['success']:.2f} and {last['valid']:.0%} of the answers")


def test_why_rl_gains_nothing_on_sokoban_is_what_the_logs_say(page, readme, looks):
    reports = smollm2.load()

    def by_first_move(name):  # -> success if it fits, and if not, and numbers of episodes
        look = looks[f"warm-{name}-seed1, 0 iterations"]
        return [f"{look['success_' + so]:.2f}" for so in ("fits_the_map", "not_fits_the_map")] + [
            look["episodes_" + so] for so in ("fits_the_map", "not_fits_the_map")]
    says(page, "won {}, and the others {} ({} and {} of the 256)".format(
        *by_first_move("read_sokoban")))
    says(page, "won {} with such a first move, and {} without ({} and {} episodes)".format(
        *by_first_move("read_lake")))

    rows = reports["taught_sokoban-seed1"]["rows"]
    whole = [f"{row['whole_readings_of_rollout']:.0%}" for row in rows[1:]]
    says(page, f"{whole[0]} had no error in iteration 1, {whole[7]} in iteration 8, and only "
               f"{whole[11]} in iteration 12")
    labels = ("warm-taught_sokoban-seed1, 0 iterations", "taught_sokoban-seed1, 10 iterations",
              "warm-read_sokoban-seed1, 0 iterations")
    began, ended, random = [plots.with_interval(won(label), 256) for label in labels]
    says(page, f"won {began} before RL in all levels", f"left {random}")
    says(page, f"After 10 iterations it was {ended[:4]} again")
    slow, paid, plain = [reports[f"{task}_sokoban-seed1"]["rows"]
                         for task in ("slow", "rewarded", "taught")]
    before, *after = [f"{row['whole_readings']:.0%}"
                      for row in (slow[0], slow[10], paid[10], plain[10])]
    says(page, f"In the evaluations {before} of the thoughts had no error before GRPO")
    says(page, "these were {} and {} (in *taught_sokoban* {})".format(*after))
    success = [f"{row['eval']['sokoban']:.2f}" for row in (slow[10], paid[10], plain[10], slow[20])]
    says(page, "success was {} and {} (in *taught_sokoban* {}), and after 20 iterations of "
               "*slow_sokoban* {}".format(*success))
    second = reports["slow_sokoban-seed2"]["rows"]
    says(page, f"{second[0]['whole_readings']:.0%} of its thoughts have no error")
    by_lessons = [f"{success:.2f}" for success in logged("lessons_taught_sokoban-seed1")]
    lessons = reports["lessons_taught_sokoban-seed1"]["rows"][-1]["iteration"]
    says(page, f"Success was {', '.join(by_lessons)} after 0, 20, 40, 60 and {lessons} lessons",
         f"RL had left it at {success[2]}")
    control, slow_end = [plots.with_interval(won(label), 256) for label in (
        "lessons_taught_sokoban-seed1, 76 lessons", "slow_sokoban-seed1, 25 iterations")]
    says(page, f"this control won {control}", f"after RL {ended}", f"iterations {slow_end}")
    says(page, f"raised success from {began[:4]} to {control[:4]}")
    says(readme, f"raised success from {began} to {control}")
    says(page, "It won {}, {} and {} after 0, 10 and 20 iterations".format(
        *(f"{second[i]['eval']['sokoban']:.2f}" for i in (0, 10, 20))))


def test_the_two_episodes_of_a_real_model_are_those_of_its_log(page):
    episodes = smollm2.load()["read_lake-seed1"]["episodes"]
    said = [re.findall("<think> (.*)</think><answer>(.*)</answer>", episode["text"])
            for episode in episodes]
    assert f"after {episodes[-1]['iteration']} iterations:" in page
    for level in ("O O _ _    before RL", "_ _ _ P    before RL"):
        part = page[page.index(level):]
        for turns in said[0::2] if level.startswith("O O") else said[1::2]:
            for thought, answer in turns[1:]:  # the first is the instruction's example
                part = part[part.index(f"{thought} -> {answer}\n"):]


def test_the_prompt_and_its_answer_are_those_of_the_log(page):
    answer = smollm2.load()["read_lake-seed1"]["plain generate"][0]
    assert "".join(f"    {line}".rstrip() + "\n" for line in answer.splitlines()) in page


def success_of(report):
    for row in report["rows"]:
        if "eval" in row:
            yield from row["eval"].values()
