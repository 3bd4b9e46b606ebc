"""From the curves of runs to a verdict: measures of one run, and what follows from their values over seeds.

Every claim is a row of paper.json. Its measure gives one number a seed (worlds averaged within a seed). Then, over seeds:

    kind "more"     is the mean, or the difference of two methods' means, above `bound`? Student's t, Welch's for two.
                    With a "margin" the answer may also be: no difference, the whole interval is within -margin..margin
    kind "same"     the claim is that there is no difference: is the whole 95% interval within -bound..bound?
    kind "often"    is a thing that a run has or has not seen in more than the share `bound` of the seeds? Exact binomial

*Lost*: what plots.py calls a collapse. (A run that never learns, and loses what it could do before, counts, too.)
Thirty tests at 5% find something where nothing is; Holm's correction keeps the chance of even one such error at 5%.
"""
import functools
import itertools
import math

import numpy as np

import plots
import warnings_of_loss

UPDATES = 6400  # of a run of the trap, and of one of the long trap with a quarter of the groups
MOST_UPDATES = 16  # an iteration, PPO's: ten of its iterations are 40 of StarPO-S's, if a rule counts updates
WON = 0.9


class Run(plots.Run):
    """Adds to rows a column "seconds": so far. Packed rows have no yardsticks, so they lie in its config."""
    def __post_init__(self):
        super().__post_init__()
        self.yardsticks |= self.config.setdefault("yardsticks", self.yardsticks)
        seconds = 0
        for row in self.rows:
            seconds += row.get("seconds_rollout", 0) + row.get("seconds_update", 0)
            row["seconds"] = seconds


# ------------------------------------------------------------------------------------------ measures of one run
def curve(run, metric):
    return run.series(metric)[1]


def mean(run, metric):  # over training: speed and height of learning in one number
    return curve(run, metric).mean()


def end(run, metric):
    return curve(run, metric)[-1]


def early_gain(run, metric):  # the best value of the first half, less the first value
    y = curve(run, metric)
    return max(y[:len(y) // 2 + 1]) - y[0]


def fall(run, metric):  # the mean of the first quarter, less that of the last
    y = curve(run, metric)
    quarter = max(1, len(y) // 4)
    return y[:quarter].mean() - y[-quarter:].mean()


def yardsticks_of(run, metric):  # -> success of random and of optimal play, if they are known
    return run.yardsticks.get(metric.removeprefix("eval "), [])


def above_random(run, metric):  # at the end
    random, _ = yardsticks_of(run, metric)
    return end(run, metric) - random


def held(run, metric):
    """The share of the planned iterations before success was lost; 1: it was not. A run that loses what it could do
    before training, and never learns, counts as lost."""
    _, lost_at = plots.peak_and_collapse(run)
    return 1.0 if lost_at is None else lost_at / run.config["iterations"]


def lost(run, metric):
    _, lost_at = plots.peak_and_collapse(run)
    return float(lost_at is not None)


def lost_at(run, window, for_long):  # -> iteration; inf: not lost. plots.peak_and_collapse, but for its 5 and 10
    iterations, success = run.series("success")
    means = forward_means(success, window)
    peak = means.argmax()
    if len(success) < run.config["iterations"]:  # it ended, and its model no longer changed: its mean from then on
        longer = max(0, for_long - plots.COLLAPSED_FOR)
        success = np.append(success, np.full(longer, success[-plots.COLLAPSED_FOR:].mean()))
    below_half = success[peak:] < means.max() / 2
    if len(below_half) < for_long:
        return math.inf
    all_below = forward_means(below_half, for_long) > 1 - 1e-9
    return iterations[peak] + all_below.argmax() if all_below.any() else math.inf


def to_the_end(y, run):  # of the planned iterations; a run that ended early keeps its last value
    return np.append(y, np.full(run.config["iterations"] - len(y), y[-1]))


def updates_until_lost(run, times=1):  # -> number of gradient steps; inf: it was not lost
    """`times` 4: all numbers of iterations in the rule are four times as many."""
    first_bad = lost_at(run, times * plots.WINDOW, times * plots.COLLAPSED_FOR)
    if first_bad == math.inf:
        return math.inf
    return sum(row.get("updates", 0) for row in run.rows if row["iteration"] < first_bad)


def updates_held(runs):  # -> (runs,): those until they were lost, of at most UPDATES
    return np.minimum([updates_until_lost(run) for run in runs], UPDATES)


def has_won(run):  # a mean success of five iterations of 0.9 or more, at some time
    return forward_means(run.series("success")[1], plots.WINDOW).max() >= WON


def trapped(run, metric):
    """The Echo Trap's whole course: success gains 0.3 or more; at least half of the gain is lost for ten iterations; the
    valid turns or the in-group std come near 0; and one gradient after the best is five times what was usual before."""
    iterations, success = run.series("success")
    success = extend_if_dead(success, run)
    smooth = forward_means(success, plots.WINDOW)
    place = smooth.argmax()
    since = iterations[place]
    gain = smooth[place] - success[0]
    lost_half = smooth[place:] < smooth[place] - gain / 2
    for_long = forward_means(lost_half, plots.COLLAPSED_FOR).max() > 0.99  # all of them
    silent = lowest(run, "valid", since) < 0.1
    alike = lowest(run, "reward_std", since) < 0.05 * run.rows[1]["reward_std"]
    spike = largest_jump(run, since) >= warnings_of_loss.SPIKE
    return float(gain >= 0.3 and for_long and (silent or alike) and spike)


def lowest(run, metric, since):  # the lowest mean of ten iterations in a row
    iterations, y = run.series(metric)
    y = extend_if_dead(y[iterations >= since], run)
    return forward_means(y, plots.COLLAPSED_FOR).min()


def extend_if_dead(y, run):  # a dead run was stopped: it counts as if it had gone on, with its last value
    return np.append(y, np.full(plots.COLLAPSED_FOR, y[-1])) if plots.is_dead(run.rows) else y


def forward_means(y, n):  # of n neighbours, the first, the second, ...; of all, if there are not so many
    n = min(n, len(y))
    return np.convolve(y, np.ones(n) / n, "valid")


def largest_jump(run, since):
    """A gradient of one update over what is usual for one: the longest of an iteration over the median, of the 20
    iterations before, of their mean lengths. (The lengths of single updates are not in the log; their median is below
    their mean.) A weak condition: healthy runs meet it, too."""
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


# ------------------------------------------------------------------------------------------------- over the seeds
def tail(t, df):
    """The chance that Student's t is farther from 0 than t. With t = sqrt(df) tan(angle) its density is
    cos(angle)^(df - 1)."""
    def area(low):  # under it, from there to pi / 2, by the midpoints of 20,000 steps
        step = (math.pi / 2 - low) / 20_000
        angles = low + (np.arange(20_000) + 0.5) * step
        return (np.cos(angles) ** (df - 1)).sum() * step
    return area(math.atan(abs(t) / math.sqrt(df))) / area(0)


def bisect(function, low, high):  # where a monotonous function changes its sign
    sign = function(low) > 0
    for _ in range(35):  # to a 3e-10th of the range
        middle = (low + high) / 2
        if (function(middle) > 0) == sign:
            low = middle
        else:
            high = middle
    return low


@functools.lru_cache
def quantile(df):  # Student's t is farther from 0 in 5% of cases
    return bisect(lambda t: tail(t, df) - 0.05, 0, 100)


# `samples` are the values by seed of a claim's methods: [ours] or [ours, theirs]
def mean_of(samples):  # or the difference of two means
    means = [values.mean() for values in samples]
    if len(means) == 1:
        return means[0]
    return means[0] - means[1]


def estimate(samples):  # -> mean (or difference of means), its standard error, degrees of freedom
    """Two methods: Welch's. Their seeds share the first model and the levels, but no dice: there is nothing to pair,
    their spreads may differ, and one may have more seeds. (With one method the formula gives n - 1.)"""
    squares = np.array([values.var(ddof=1) / len(values) for values in samples])  # of the errors of the means
    each_df = np.array([len(values) - 1 for values in samples])
    square = squares.sum()
    df = each_df.sum()
    if square > 0:
        df = square ** 2 / (squares ** 2 / each_df).sum()
    return mean_of(samples), math.sqrt(square), df


def fewest(samples):
    return min(len(values) for values in samples)


def interval(samples):  # -> 95% interval of the mean, or of the difference of two
    if fewest(samples) < 2:
        return -math.inf, math.inf
    mean, error, df = estimate(samples)
    half = quantile(df) * error
    return mean - half, mean + half


def at_least(k, n, p):  # the chance of k or more of n, each with chance p
    return sum(math.comb(n, i) * p ** i * (1 - p) ** (n - i) for i in range(k, n + 1))


def exact_interval(k, n):  # 95%, of a share of which k of n were seen (Clopper and Pearson)
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
    """Two-sided: how likely is a mean that far from the bound, if the bound is the truth? Where all seeds are alike there
    is no variance to go by, and what remains is that all of them lie on one side."""
    if fewest(samples) < 2:
        return 1.0
    mean, error, df = estimate(samples)
    if error > 1e-9 and len(samples) == 2 and min(values.std() for values in samples) < 1e-9:
        return p_by_permutation(samples[0] - bound, samples[1])  # Welch's test wants the spread of both
    if error > 1e-9:
        return tail((mean - bound) / error, df)
    if abs(mean - bound) < 1e-9:
        return 1.0
    sizes = [len(values) for values in samples]
    ways = 2 ** sizes[0]  # of so many signs, or of so many divisions into two methods, two are as extreme
    if len(sizes) == 2:
        ways = math.comb(sum(sizes), sizes[0])
    return 2 / ways


def p_by_permutation(ours, theirs):  # the share of all divisions of the seeds whose means differ by as much
    values = np.concatenate([ours, theirs])
    n = len(ours)
    divisions = np.array(list(itertools.combinations(range(len(values)), n)))
    sums = values[divisions].sum(1)
    differences = sums / n - (values.sum() - sums) / len(theirs)
    return (np.abs(differences) >= abs(ours.mean() - theirs.mean()) - 1e-9).mean()


def p_often(bound, d):  # did a thing happen in more, or in less, than this share of the seeds?
    k, n = int(d.sum()), len(d)
    above = at_least(k, n, bound)
    below = at_least(n - k, n, 1 - bound)
    return min(1.0, 2 * min(above, below))


def p_within(margin, samples):
    """That the truth is inside -margin..margin: above the one and below the other, the worse of the two."""
    if abs(mean_of(samples)) >= margin:
        return 1.0
    return max(p_value(-margin, samples), p_value(margin, samples))


def judge(claim, samples):  # -> the answer that the seeds speak for, and its p before any correction
    """With a margin there are three answers, and the surest is given. All of them are right whenever the interval holds
    the truth, so that asking for more than one costs nothing."""
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


def holm(ps, looks):  # of each row; -> corrected, in the same order
    """Whoever looks at the results, adds seeds where nothing is decided yet, and looks again, has one chance more to err:
    each p counts as often as its row was looked at (Bonferroni)."""
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
    """Are two sets of runs lost equally soon, counted in updates? At each loss: how many of ours would be expected among
    the lost, if all that are left were alike (Mantel 1966)? A run that is not lost counts up to UPDATES.
    `in_updates`: with all numbers of iterations in the rule of loss turned into equal numbers of updates."""
    lost_after = []
    for runs in (ours, theirs):
        times = times_of(runs) if in_updates else 1
        lost_after.append(np.array([updates_until_lost(run, times) for run in runs]))
    _, p = chi_square(*lost_after)
    return p


def chi_square(ours, theirs):  # times of loss, inf: none -> the log-rank statistic, its p
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


def lost_by_updates(runs, horizons=(1600, 6400), times=1):  # -> cells: updates an iteration, k of n [interval] for each
    lost_after = np.array([updates_until_lost(run, times) for run in runs])
    each = updates_an_iteration(runs)
    cells = [f"{each:g}"]
    for horizon in horizons:
        cell = "-"
        if each * runs[0].config["iterations"] >= horizon:  # else they were not planned to make so many
            k, n = int((lost_after < horizon).sum()), len(runs)
            low, high = exact_interval(k, n)
            cell = f"{k} of {n} [{low:.2f}, {high:.2f}]"
        cells.append(cell)
    return cells


def lost_in_iterations(runs, most=400):  # -> cell: of each run's first so many
    k, n = sum(lost_at(run, plots.WINDOW, plots.COLLAPSED_FOR) < most for run in runs), len(runs)
    low, high = exact_interval(k, n)
    return f"{k} of {n} [{low:.2f}, {high:.2f}]"


def times_of(runs):  # -> how many of their iterations make as many updates as one of PPO's
    return MOST_UPDATES // max(1, updates_an_iteration(runs))


def updates_an_iteration(runs):  # where all trajectories are used
    return max((row.get("updates", 0) for run in runs for row in run.rows), default=0)


def seeds_needed(claim, samples):
    """Of each method, for 80% power at 5%, if means and spreads are as seen; Holm's correction would ask for more."""
    seeds = fewest(samples)
    if seeds < 2:
        return "more seeds"
    mean = mean_of(samples)
    spread = math.sqrt(sum(values.var(ddof=1) for values in samples))
    distance = abs(mean - claim["bound"])
    if claim["kind"] == "same":
        distance = abs(abs(mean) - claim["bound"])
    distance = max(distance, claim.get("margin", 0) - abs(mean))  # whichever answer is the easier one
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
