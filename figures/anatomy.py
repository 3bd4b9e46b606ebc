"""The anatomy of a run (Fig. 6): when did it collapse, and which signals moved before?"""
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.figure
import matplotlib.style
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import plots

# Find the peak, the iteration at which success was best, and the collapse, if there was one. The values of a signal up to
# the peak give its healthy range. Which signals leave that range before the collapse? The rule is a rough one, the same
# for all signals: it says what is unusual, not what is bad. In healthy runs, too, signals leave the range that they had
# while the task was learnt: compare with such runs.
ANATOMY = ("success", "valid", "reward", "reward_std", "entropy", "grad_norm_max", "kl", "distinct", "true_claims")
HISTORY = 20  # This many values before some point tell what is usual there,
MIN_HISTORY = 5  # or fewer, at the beginning of a run, but not fewer than this.
OUTSIDE_FOR = 3  # A signal leaves its range with this many values in a row outside,
SPIKE = 5  # or with one value above this many times the median of the HISTORY values before it.


@dataclass
class Signal:
    metric: str
    x: np.ndarray  # iterations
    y: np.ndarray  # values
    healthy: tuple | None = None  # low, high; None: the peak came too early to tell
    left_at: int | None = None  # iteration at which it left that range, before the collapse; None: it did not
    how: str = ""  # "outside" or "spike"


def healthy_range(x, y, peak_at):  # -> lowest, highest; or None
    """The range of the last HISTORY values up to the peak, widened by half its width on each side."""
    healthy = y[x <= peak_at][-HISTORY:]
    if len(healthy) < MIN_HISTORY:
        return None
    margin = (healthy.max() - healthy.min()) / 2
    return healthy.min() - margin, healthy.max() + margin


def left_range(x, y, healthy, peak_at, collapsed_at):  # -> iteration, how; or None, ""
    """The first iteration after the peak, and before any collapse, at which OUTSIDE_FOR values in a row, from this one on,
    lie outside the healthy range, or this value is a spike, even inside the range."""
    low, high = healthy
    outside = (y < low) | (y > high)
    end = math.inf if collapsed_at is None else collapsed_at  # what moves later is no warning
    for i in np.flatnonzero((x > peak_at) & (x < end)):
        if outside[i:i + OUTSIDE_FOR].sum() == OUTSIDE_FOR:
            return x[i], "outside"
        usual = np.median(y[max(0, i - HISTORY):i])
        if y[i] > SPIKE * usual > 0:
            return x[i], "spike"
    return None, ""


def anatomy(run, metrics=ANATOMY):  # -> iterations of peak and collapse (or None), list of Signal
    peak_at, collapsed_at = plots.peak_and_collapse(run)
    signals = []
    for metric in metrics:
        signal = Signal(metric, *run.series(metric))
        if len(signal.x) < HISTORY and not metric.startswith("eval "):  # too few values; evaluations always are
            continue
        signal.healthy = healthy_range(signal.x, signal.y, peak_at)
        if signal.healthy:
            signal.left_at, signal.how = left_range(signal.x, signal.y, signal.healthy, peak_at, collapsed_at)
        signals.append(signal)
    return peak_at, collapsed_at, signals


@matplotlib.style.context(plots.STYLE)
def draw_signals(title, signals, collapsed_at, out):  # -> out: one below the other, above the same iterations
    fig = matplotlib.figure.Figure(figsize=(8, 1.4 * len(signals) + 1), layout="constrained")
    axes = fig.subplots(len(signals), 1, sharex=True, squeeze=False)[:, 0]
    end = max(signal.x[-1] for signal in signals)
    for ax, signal in zip(axes, signals):
        draw_signal(ax, signal)
        if collapsed_at is not None:
            ax.axvspan(collapsed_at, end, color="0.5", alpha=0.15, lw=0)
    axes[-1].set_xlabel("iteration")
    fig.suptitle(title)
    fig.savefig(out, dpi=90)
    return out


def draw_signal(ax, signal):
    ax.plot(signal.x, signal.y, color="C0", lw=1)
    ax.set_title(plots.LOOKS.get(signal.metric, signal.metric), loc="left")
    if signal.metric in plots.LOG_AXIS:
        ax.set_yscale("symlog", linthresh=1e-4)
    limits = ax.get_ylim()
    if signal.healthy:
        ax.axhspan(*signal.healthy, color="tab:green", alpha=0.12, lw=0)
    ax.set_ylim(limits)  # the range may be wider than the curve
    if signal.left_at is not None:
        ax.axvline(signal.left_at, color="tab:red", lw=1.5)
        text = f" {signal.left_at} ({signal.how})"
        ax.annotate(text, (signal.left_at, 0.85), xycoords=("data", "axes fraction"), color="tab:red")
