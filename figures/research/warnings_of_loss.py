"""Fig. 6: do signals warn of a loss? The probability of a loss soon after an alarm, and otherwise.

There is an *alarm* in an iteration if a signal leaves the range of its HISTORY values before,
widened on each side by half of that range. For the gradient norm it is an alarm if it is above
SPIKE times their median. The rule looks back only. It is the same for runs that are lost and for
runs that are not. Of lost runs the iterations before the loss count, of others all but the last
ten.
"""
import numpy as np

import plots

HISTORY = 20
SPIKE = 5
SOON = 10  # iterations
SIGNALS = {
    "reward_std": "in-group return std", "entropy": "entropy per token",
    "valid": "share of valid turns", "distinct": "different thoughts / thoughts",
    "grad_norm_max": "largest gradient norm"}


def alarms(run, metric):  # -> {iteration: True or False}
    iterations, y = run.series(metric)
    found = {}
    for i in range(HISTORY, len(y)):
        before = y[i - HISTORY:i]
        if metric == "grad_norm_max":
            alarm = y[i] > SPIKE * np.median(before)
        else:
            margin = (before.max() - before.min()) / 2
            alarm = not before.min() - margin <= y[i] <= before.max() + margin
        found[int(iterations[i])] = bool(alarm)
    return found


def cases(run, metric):  # -> (n,2): was there an alarm? Was the run lost soon after it?
    _, lost_at = plots.peak_and_collapse(run)
    last = run.rows[-1]["iteration"] - SOON
    rows = []
    for i, alarm in alarms(run, metric).items():
        if lost_at is None and i <= last:
            rows.append((alarm, False))
        if lost_at is not None and i < lost_at:
            rows.append((alarm, lost_at - i <= SOON))
    return np.array(rows, dtype=bool).reshape(-1, 2)


def chances(counted):  # (n,2) -> of a loss after an alarm, and after none
    """One of them is nan if there was no such case."""
    alarm, soon = counted.T
    return [soon[which].mean() if which.any() else np.nan for which in (alarm, ~alarm)]


def interval(by_run, draws=2000):  # -> 95% interval of the difference of both chances
    """By drawing runs anew (bootstrap), because runs are what is independent."""
    rng = np.random.default_rng(0)
    differences = []
    for _ in range(draws):
        drawn = rng.integers(len(by_run), size=len(by_run))
        after, otherwise = chances(np.concatenate([by_run[i] for i in drawn]))
        differences.append(after - otherwise)
    return np.nanpercentile(differences, [2.5, 97.5])


def row_of(runs, metric):  # -> cells of a table
    by_run = [cases(run, metric) for run in runs]
    everything = np.concatenate(by_run)
    after, otherwise = chances(everything)
    low, high = interval(by_run)
    often = 100 * everything[:, 0].mean()
    return [SIGNALS[metric], f"{often:.1f}", f"{after:.2f}", f"{otherwise:.2f}",
            f"{after - otherwise:.2f} [{low:.2f}, {high:.2f}]"]
