"""From the curves of runs to a verdict: measures of one run, and what follows from their values over seeds.

Every claim is a row of paper.json. Its measure gives one number a seed (worlds averaged within a seed). Then, over seeds:

    kind "more"     is the mean above `bound`? Student's t
    kind "same"     the claim is that there is no difference: is the whole 95% interval within -bound..bound?
    kind "often"    is a thing that a run has or has not seen in more than the share `bound` of the seeds? Exact binomial

Twenty-five tests at 5% find something where nothing is; Holm's correction keeps the chance of even one such error at 5%.
"""
import math

import numpy as np

import envs
import plots


# ------------------------------------------------------------------------------------------ measures of one run
def curve(config, rows, metric):
    return plots.series(config, rows, metric)[1]


def mean(config, rows, metric):  # over training: speed and height of learning in one number
    return curve(config, rows, metric).mean()


def end(config, rows, metric):
    return curve(config, rows, metric)[-1]


def early_gain(config, rows, metric):  # the best value of the first half, less the first value
    y = curve(config, rows, metric)
    return max(y[:len(y) // 2 + 1]) - y[0]


def fall(config, rows, metric):  # the mean of the first quarter, less that of the last
    y = curve(config, rows, metric)
    quarter = max(1, len(y) // 4)
    return y[:quarter].mean() - y[-quarter:].mean()


def above_random(config, rows, metric):  # at the end
    random, _ = envs.yardsticks_of_run(metric.split()[1], config)
    return end(config, rows, metric) - random


def held(config, rows, metric):
    """The share of the planned iterations before success was lost (plots.onset); 1: it was not."""
    _, lost_at, _ = plots.anatomy(config, rows)
    return 1.0 if lost_at is None else lost_at / config["iterations"]


def warning(config, rows, metric):
    """By how many iterations did this signal leave its earlier range before success was lost? nan: one did not happen."""
    _, lost_at, left = plots.anatomy(config, rows)
    if lost_at is None or left.get(metric) is None:
        return math.nan
    return lost_at - left[metric]


def lost(config, rows, metric):
    return float(plots.anatomy(config, rows)[1] is not None)


def trapped(config, rows, metric):
    """The Echo Trap's whole course: success gains 0.3 or more; at least half of the gain is lost for ten iterations; the
    valid turns or the in-group std come near 0; and one gradient after the best is five times what was usual before."""
    iterations, success = plots.series(config, rows, "success")
    success = plots.as_it_stays(success, rows)
    smooth = np.convolve(success, np.ones(5) / 5, "valid")
    best = smooth.argmax()
    gain = smooth[best] - success[0]
    low = smooth[best:] < smooth[best] - gain / 2
    fallen = any(low[i:i + 10].all() for i in range(len(low) - 9))
    silent = lowest(config, rows, "valid", iterations[best]) < 0.1
    alike = lowest(config, rows, "reward_std", iterations[best]) < 0.05 * rows[1]["reward_std"]
    return float(gain >= 0.3 and fallen and (silent or alike) and largest_jump(config, rows, iterations[best]) >= 5)


def lowest(config, rows, metric, since):  # the lowest mean of ten iterations in a row
    iterations, y = plots.series(config, rows, metric)
    y = plots.as_it_stays(y[iterations >= since], rows)
    return np.convolve(y, np.ones(10) / 10, "valid").min()


def largest_jump(config, rows, since):
    """The longest gradient of an iteration over the median, of the 20 iterations before, of their mean lengths."""
    iterations, longest = plots.series(config, rows, "grad_norm_max")
    _, usual = plots.series(config, rows, "grad_norm")
    jumps = [longest[i] / np.median(usual[i - 20:i]) for i in range(20, len(longest)) if iterations[i] >= since]
    return max(jumps, default=0.0)


MEASURES = {
    "mean": mean,
    "end": end,
    "early gain": early_gain,
    "fall": fall,
    "above random": above_random,
    "held": held,
    "warning": warning,
    "lost": lost,
    "trapped": trapped}


# ------------------------------------------------------------------------------------------------- over the seeds
def tail(t, df):
    """The chance that Student's t is farther from 0 than t. With t = sqrt(df) tan(angle) its density is
    cos(angle)^(df - 1)."""
    angles = (np.arange(200_000) + 0.5) * (math.pi / 2 / 200_000)
    density = np.cos(angles) ** (df - 1)
    return density[angles > math.atan(abs(t) / math.sqrt(df))].sum() / density.sum()


def bisect(function, low, high):  # where a monotonous function changes its sign
    sign = function(low) > 0
    for _ in range(60):
        middle = (low + high) / 2
        if (function(middle) > 0) == sign:
            low = middle
        else:
            high = middle
    return low


def interval(d):  # (seeds,) -> 95% interval of the mean
    n = len(d)
    if n < 2:
        return -math.inf, math.inf
    half = bisect(lambda t: tail(t, n - 1) - 0.05, 0, 100) * d.std(ddof=1) / math.sqrt(n)
    return d.mean() - half, d.mean() + half


def at_least(k, n, p):  # the chance of k or more of n, each with chance p
    return sum(math.comb(n, i) * p ** i * (1 - p) ** (n - i) for i in range(k, n + 1))


def exact_interval(k, n):  # 95%, of a share of which k of n were seen (Clopper and Pearson)
    low = bisect(lambda p: at_least(k, n, p) - 0.025, 0, 1) if k else 0.0
    high = bisect(lambda p: at_least(n - k, n, 1 - p) - 0.025, 0, 1) if k < n else 1.0
    return low, high


def interval_of(kind, d):
    return exact_interval(int(d.sum()), len(d)) if kind == "often" else interval(d)


def p_value(d, bound):
    """Two-sided: how likely is a mean that far from the bound, if the bound is the truth? Where all seeds are alike there
    is no variance to go by, and what remains is that all of them lie on one side."""
    n = len(d)
    if n < 2:
        return 1.0
    if d.std() < 1e-9:
        return 2.0 ** (1 - n) if abs(d[0] - bound) > 1e-9 else 1.0
    return tail((d.mean() - bound) / (d.std(ddof=1) / math.sqrt(n)), n - 1)


def p_of(kind, d, bound):
    if kind == "often":
        k, n = int(d.sum()), len(d)
        return min(1.0, 2 * min(at_least(k, n, bound), at_least(n - k, n, 1 - bound)))
    if kind == "same":  # of the worse of two one-sided tests: is it above -bound, is it below bound?
        above, below = p_value(d, -bound), p_value(d, bound)
        inside = abs(d.mean()) < bound
        return max(above, below) if inside else 1.0
    return p_value(d, bound)


def holm(ps):  # -> corrected in the order of the rows
    corrected = np.zeros(len(ps))
    worst = 0.0
    for rank, row in enumerate(np.argsort(ps, kind="stable")):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[row]))
        corrected[row] = worst
    return corrected


def verdict(kind, d, bound, p):  # p: corrected
    if kind == "same":
        if p < 0.05:
            return f"no difference within {bound:g}"
        differs = abs(d.mean()) > bound and p_value(d, math.copysign(bound, d.mean())) < 0.05
        return "contradicted" if differs else f"open: would need {seeds_needed(d, bound)}"
    if p < 0.05:
        return "holds" if d.mean() > bound else "contradicted"
    return f"open: would need {seeds_needed(d, bound)}"


def seeds_needed(d, bound):
    """For 80% power at 5%, if mean and spread are as seen; Holm's correction would ask for more."""
    distance = abs(abs(d.mean()) - abs(bound)) if bound else abs(d.mean())
    if len(d) < 2 or d.std() == 0 or distance == 0:
        return "more seeds"
    n = math.ceil((2.8 * d.std(ddof=1) / distance) ** 2)
    return f"about {max(n, len(d) + 1)} seeds" if n < 1000 else "more than 1,000 seeds"
