"""From the logs of runs to a verdict: measures of one run, and what follows from their values.

Every claim is a row of paper.json. Its measure gives one number for each seed; if the claim is
about several setups, that is their mean. Then there are three kinds of claims about these numbers:

    kind "more"     Is the mean, or the difference of the means of two methods, above `bound`? This
                    is Student's t test, or Welch's for two methods. With a "margin" the answer may
                    also be that there is no difference: the whole interval is in -margin..margin.
    kind "same"     There is no difference: is the whole 95% interval in -bound..bound?
    kind "often"    Does something happen in more than the share `bound` of the seeds? This is the
                    exact binomial test.

A run is *lost* if it collapses, as plots.peak_and_collapse defines it. A run that never learns, and
loses what the model could do before training, is lost, too.

Thirty tests at 5% find something even if nothing is there. Holm's correction keeps the probability
of one or more such errors at 5%.
"""
import functools
import itertools
import math

import numpy as np

import plots
import ragen_mini as rm
from research import warnings_of_loss

# The updates of a run of the trap, and of one of the long trap, which uses a quarter of the groups.
UPDATES = 6400
# Those of one iteration of PPO. Ten of its iterations are 40 of StarPO-S, if a rule counts updates.
MOST_UPDATES = 16
WON = 0.9


class Run(plots.Run):
    """A run as it is packed. Its yardsticks are in its config, because its rows have lost them.

    It also has a column "seconds", the time from the beginning of the run.
    """
    def __post_init__(self):
        super().__post_init__()
        self.config = with_new_names(self.config)
        self.yardsticks |= self.config.setdefault("yardsticks", self.yardsticks)
        seconds = 0
        for row in self.rows:
            seconds += row.get("seconds_rollout", 0) + row.get("seconds_update", 0)
            row["seconds"] = seconds


# Runs that were made before minibatch_size got its name call it update_size.
OLD_NAMES = {"minibatch_size": "update_size"}
NEW_NAMES = {old: new for new, old in OLD_NAMES.items()}


def with_new_names(config):
    return {NEW_NAMES.get(name, name): value for name, value in config.items()}


def with_old_names(config):
    return {OLD_NAMES.get(name, name): value for name, value in config.items()}


# ----------------------------------------------------------------------------- measures of one run
def curve(run, metric):
    return run.series(metric)[1]


def mean(run, metric):
    """The mean over training tells speed and height of learning in one number."""
    return curve(run, metric).mean()


def end(run, metric):
    return curve(run, metric)[-1]


def early_gain(run, metric):
    """The best value of the first half, minus the first value."""
    y = curve(run, metric)
    return max(y[:len(y) // 2 + 1]) - y[0]


def fall(run, metric):
    """The mean of the first quarter, minus that of the last."""
    y = curve(run, metric)
    quarter = max(1, len(y) // 4)
    return y[:quarter].mean() - y[-quarter:].mean()


def yardsticks_of(run, metric):  # -> success of random and of optimal play, or [] if unknown
    return run.yardsticks.get(metric.removeprefix("eval "), [])


def above_random(run, metric):
    random, _ = yardsticks_of(run, metric)
    return end(run, metric) - random


def held(run, metric):
    """The share of the planned iterations before success was lost, or 1 if it was not."""
    _, lost_at = plots.peak_and_collapse(run)
    return 1.0 if lost_at is None else lost_at / run.config["iterations"]


def lost(run, metric):
    _, lost_at = plots.peak_and_collapse(run)
    return float(lost_at is not None)


def lost_at(run, window, for_long):  # -> iteration; infinite if the run is not lost
    """As plots.peak_and_collapse, but with other numbers than WINDOW and COLLAPSED_FOR.

    The model of a run that ended early no longer changed. So its last ten iterations stand for all
    that would have followed.
    """
    iterations, success = run.series("success")
    means = forward_means(success, window)
    peak = means.argmax()
    if len(success) < run.config["iterations"]:
        missing = max(0, for_long - plots.COLLAPSED_FOR)
        success = np.append(success, np.full(missing, success[-plots.COLLAPSED_FOR:].mean()))
    below_half = success[peak:] < means.max() / 2
    if len(below_half) < for_long:
        return math.inf
    all_below = forward_means(below_half, for_long) > 1 - 1e-9
    return iterations[peak] + all_below.argmax() if all_below.any() else math.inf


def to_the_end(y, run):
    """Up to the last planned iteration. A run that ended early keeps its last value."""
    return np.append(y, np.full(run.config["iterations"] - len(y), y[-1]))


def updates_until_lost(run, times=1):  # -> number of updates; infinite if the run is not lost
    """With times = 4, all numbers of iterations in the rule are four times as large."""
    first_bad = lost_at(run, times * plots.WINDOW, times * plots.COLLAPSED_FOR)
    if first_bad == math.inf:
        return math.inf
    return sum(row.get("updates", 0) for row in run.rows if row["iteration"] < first_bad)


def updates_held(runs):  # -> (runs,): the updates until they were lost, at most UPDATES
    return np.minimum([updates_until_lost(run) for run in runs], UPDATES)


def has_won(run):
    """At some time the mean success of five iterations was 0.9 or more."""
    return forward_means(run.series("success")[1], plots.WINDOW).max() >= WON


def trapped(run, metric):
    """Did the run take the whole course of the Echo Trap? That is:

    Success gains 0.3 or more. Then at least half of the gain is lost for ten iterations. The share
    of valid turns, or the in-group std, comes near 0. And after the best iterations one gradient is
    five times as long as was usual before.
    """
    iterations, success = run.series("success")
    success = extend_if_dead(success, run)
    smooth = forward_means(success, plots.WINDOW)
    place = smooth.argmax()
    since = iterations[place]
    gain = smooth[place] - success[0]
    lost_half = smooth[place:] < smooth[place] - gain / 2
    stays_lost = forward_means(lost_half, plots.COLLAPSED_FOR).max() > 0.99
    silent = lowest(run, "valid", since) < 0.1
    alike = lowest(run, "reward_std", since) < 0.05 * run.rows[1]["reward_std"]
    spike = largest_jump(run, since) >= warnings_of_loss.SPIKE
    return float(gain >= 0.3 and stays_lost and (silent or alike) and spike)


def lowest(run, metric, since):
    """The lowest mean of ten iterations in a row."""
    iterations, y = run.series(metric)
    y = extend_if_dead(y[iterations >= since], run)
    return forward_means(y, plots.COLLAPSED_FOR).min()


def extend_if_dead(y, run):
    """A dead run was stopped. It counts as if it had gone on, with its last value."""
    if not rm.is_dead(run.rows):
        return y
    return np.append(y, np.full(plots.COLLAPSED_FOR, y[-1]))


def forward_means(y, n):
    """The mean of each value and the n - 1 that follow. If y has fewer than n, the mean of all."""
    n = min(n, len(y))
    return np.convolve(y, np.ones(n) / n, "valid")


def largest_jump(run, since):
    """The largest gradient norm of an iteration, divided by what was usual before.

    What is usual is the median, over the 20 iterations before, of their mean norms. (The norms of
    single updates are not logged. Their median is below their mean.) This is a weak condition,
    because healthy runs meet it, too.
    """
    iterations, longest = run.series("grad_norm_max")
    _, means = run.series("grad_norm")
    jumps = [0.0]
    for i in range(warnings_of_loss.HISTORY, len(longest)):
        if iterations[i] >= since:
            usual = np.median(means[i - warnings_of_loss.HISTORY:i])
            jumps.append(longest[i] / usual)
    return max(jumps)


MEASURES = {
    "mean": mean,
    "end": end,
    "early gain": early_gain,
    "fall": fall,
    "above random": above_random,
    "held": held,
    "lost": lost,
    "trapped": trapped}


# ---------------------------------------------------------------------------------- over the seeds
def tail(t, df):
    """The probability that Student's t is farther from 0 than t.

    With t = sqrt(df) tan(angle) the density is cos(angle)^(df - 1).
    """
    def area(low):  # under the density, up to pi / 2, by the midpoints of 20,000 steps
        step = (math.pi / 2 - low) / 20_000
        angles = low + (np.arange(20_000) + 0.5) * step
        return (np.cos(angles) ** (df - 1)).sum() * step
    return area(math.atan(abs(t) / math.sqrt(df))) / area(0)


def bisect(function, low, high):
    """Where a monotonic function changes its sign, to a 3e-10th of the range."""
    sign = function(low) > 0
    for _ in range(35):
        middle = (low + high) / 2
        if (function(middle) > 0) == sign:
            low = middle
        else:
            high = middle
    return low


@functools.lru_cache
def quantile(df):
    """Student's t is farther from 0 than this in 5% of cases."""
    return bisect(lambda t: tail(t, df) - 0.05, 0, 100)


# In what follows, `samples` are the values by seed of a claim's methods: [ours] or [ours, theirs].
def mean_of(samples):
    """The mean, or the difference of two means."""
    means = [values.mean() for values in samples]
    if len(means) == 1:
        return means[0]
    return means[0] - means[1]


def estimate(samples):  # -> mean (or difference of means), its standard error, degrees of freedom
    """For two methods it is Welch's test. Their seeds share the first model and the levels, but no
    random numbers of sampling, so there is nothing to pair. Their spreads may differ, and one may
    have more seeds. (With one method the formula gives n - 1.)
    """
    # The squared errors of the means.
    squares = np.array([values.var(ddof=1) / len(values) for values in samples])
    each_df = np.array([len(values) - 1 for values in samples])
    square = squares.sum()
    df = each_df.sum()
    if square > 0:
        df = square ** 2 / (squares ** 2 / each_df).sum()
    return mean_of(samples), math.sqrt(square), df


def fewest(samples):
    return min(len(values) for values in samples)


def interval(samples):  # -> 95% interval of the mean, or of the difference of two means
    if fewest(samples) < 2:
        return -math.inf, math.inf
    mean, error, df = estimate(samples)
    half = quantile(df) * error
    return mean - half, mean + half


def at_least(k, n, p):
    """The probability of k or more of n, if each has the probability p."""
    return sum(math.comb(n, i) * p ** i * (1 - p) ** (n - i) for i in range(k, n + 1))


def exact_interval(k, n):
    """The 95% interval of a share of which k of n were seen (Clopper and Pearson)."""
    low, high = 0.0, 1.0
    if k > 0:
        low = bisect(lambda p: at_least(k, n, p) - 0.025, 0, 1)
    if k < n:
        high = bisect(lambda p: at_least(n - k, n, 1 - p) - 0.025, 0, 1)
    return low, high


def interval_of(kind, samples):
    if kind == "often":
        return exact_interval(int(samples[0].sum()), len(samples[0]))
    return interval(samples)


def p_value(bound, samples):
    """Two-sided: how likely is a mean that far from the bound, if the bound is the truth?

    Where all seeds of a method agree, there is no variance to go by. Then the test is by
    permutation, or, if there is no variance at all, by the side on which all of them lie.
    """
    if fewest(samples) < 2:
        return 1.0
    mean, error, df = estimate(samples)
    one_is_constant = len(samples) == 2 and min(values.std() for values in samples) < 1e-9
    if error > 1e-9 and one_is_constant:
        return p_by_permutation(samples[0] - bound, samples[1])
    if error > 1e-9:
        return tail((mean - bound) / error, df)
    if abs(mean - bound) < 1e-9:
        return 1.0
    sizes = [len(values) for values in samples]
    # Of so many signs, or of so many divisions into two methods, two are as extreme.
    ways = 2 ** sizes[0]
    if len(sizes) == 2:
        ways = math.comb(sum(sizes), sizes[0])
    return 2 / ways


def p_by_permutation(ours, theirs):
    """The share of all divisions of the seeds whose means differ by as much as was seen."""
    values = np.concatenate([ours, theirs])
    n = len(ours)
    divisions = np.array(list(itertools.combinations(range(len(values)), n)))
    sums = values[divisions].sum(1)
    differences = sums / n - (values.sum() - sums) / len(theirs)
    return (np.abs(differences) >= abs(ours.mean() - theirs.mean()) - 1e-9).mean()


def p_often(bound, happened):
    """Did a thing happen in more, or in less, than the share `bound` of the seeds?"""
    k, n = int(happened.sum()), len(happened)
    above = at_least(k, n, bound)
    below = at_least(n - k, n, 1 - bound)
    return min(1.0, 2 * min(above, below))


def p_within(margin, samples):
    """That the truth is inside -margin..margin. It is the worse p of two tests: above the one, and
    below the other.
    """
    if abs(mean_of(samples)) >= margin:
        return 1.0
    return max(p_value(-margin, samples), p_value(margin, samples))


def judge(claim, samples):  # -> the answer that the seeds support, its p before any correction
    """With a margin there are three answers, and the one with the smallest p is given.

    All of them are right whenever the interval holds the truth. So asking for more than one costs
    nothing.
    """
    bound, margin = claim["bound"], claim.get("margin", 0)
    mean = mean_of(samples)
    answer = "holds" if mean > bound else "opposite here"
    if claim["kind"] == "often":
        return answer, p_often(bound, samples[0])
    if claim["kind"] == "same" and abs(mean) >= bound:
        return "a difference", p_value(math.copysign(bound, mean), samples)
    if claim["kind"] == "same":
        return f"no difference within {bound:g}", p_within(bound, samples)
    p, p_alike = p_value(bound, samples), p_within(margin, samples)
    if p_alike < p:
        return f"no difference within {margin:g}", p_alike
    return answer, p


def holm(ps, looks):  # of each row -> corrected, in the same order
    """Who looks at the results, adds seeds where nothing is decided yet, and looks again, has one
    more chance to err. So each p is first multiplied by the number of looks (Bonferroni).
    """
    ps = np.multiply(ps, looks)
    corrected = np.zeros(len(ps))
    worst = 0.0
    for rank, row in enumerate(np.argsort(ps, kind="stable")):
        p = (len(ps) - rank) * ps[row]
        worst = max(worst, min(1.0, p))
        corrected[row] = worst
    return corrected


def verdict(claim, answer, p, samples):  # p: corrected
    if p < 0.05:
        return answer
    return f"open: would need {seeds_needed(claim, samples)}"


def log_rank(ours, theirs, in_updates=False):  # two lists of runs -> two-sided p
    """Are two sets of runs lost equally soon, counted in updates? (Mantel 1966)

    At each loss it asks how many of ours would be expected among the lost, if all runs that are
    left were alike. A run that is not lost counts up to UPDATES.
    in_updates: all numbers of iterations in the rule of loss become equal numbers of updates.
    """
    lost_after = []
    for runs in (ours, theirs):
        times = times_of(runs) if in_updates else 1
        lost_after.append(np.array([updates_until_lost(run, times) for run in runs]))
    _, p = chi_square(*lost_after)
    return p


def chi_square(ours, theirs):  # times of loss, infinite if there is none -> log-rank statistic, p
    excess = variance = 0.0
    everyone = np.concatenate([ours, theirs])
    for time in np.unique(everyone[np.isfinite(everyone)]):
        left = (everyone >= time).sum()
        lost = (everyone == time).sum()
        share = (ours >= time).sum() / left  # of ours among those left
        excess += (ours == time).sum() - lost * share
        if left > 1:
            variance += lost * share * (1 - share) * (left - lost) / (left - 1)
    statistic = excess ** 2 / variance if variance else 0.0
    return statistic, math.erfc(math.sqrt(statistic / 2))


def lost_by_updates(runs, horizons=(1600, 6400), times=1):
    """Cells of a table: the updates of an iteration, then "k of n [interval]" for each horizon, or
    "-" if the runs were not planned to make so many updates.
    """
    lost_after = np.array([updates_until_lost(run, times) for run in runs])
    each = updates_an_iteration(runs)
    cells = [f"{each:g}"]
    for horizon in horizons:
        planned = each * runs[0].config["iterations"]
        lost = int((lost_after < horizon).sum())
        cells.append(k_of_n(lost, len(runs)) if planned >= horizon else "-")
    return cells


def k_of_n(k, n):  # -> "1 of 5 [0.01, 0.72]"
    low, high = exact_interval(k, n)
    return f"{k} of {n} [{low:.2f}, {high:.2f}]"


def lost_in_iterations(runs, most=400):  # -> "k of n [interval]", of each run's first iterations
    lost = sum(lost_at(run, plots.WINDOW, plots.COLLAPSED_FOR) < most for run in runs)
    return k_of_n(lost, len(runs))


def times_of(runs):  # -> how many of their iterations make as many updates as one of PPO's
    return MOST_UPDATES // max(1, updates_an_iteration(runs))


def updates_an_iteration(runs):  # where all trajectories are used
    return max((row.get("updates", 0) for run in runs for row in run.rows), default=0)


def seeds_needed(claim, samples):
    """Seeds of each method for a power of 80% at 5%, if means and spreads are as seen. Holm's
    correction would ask for more.
    """
    seeds = fewest(samples)
    if seeds < 2:
        return "more seeds"
    mean = mean_of(samples)
    spread = math.sqrt(sum(values.var(ddof=1) for values in samples))
    distance = abs(mean - claim["bound"])
    if claim["kind"] == "same":
        distance = abs(abs(mean) - claim["bound"])
    # The answer "no difference" may be the easier one.
    distance = max(distance, claim.get("margin", 0) - abs(mean))
    if spread == 0:
        return "more seeds"
    if distance < spread / 10:
        return "more than 1,000 seeds"
    n = math.ceil((2.8 * spread / distance) ** 2)
    return f"about {max(n, seeds + 1)} seeds"


def markdown(head, rows):  # -> a table
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)
