"""The three drawings of tutorial.ipynb and of the slides: the loop, the shift of `collate`, GAE."""
import matplotlib.pyplot as plt
import torch

from checks import rm

# An episode of two turns: a token, did the model write it, its reward, the critic's value before it.
EPISODE = [("State", False, 0, 0), ("<think>", False, 0, 0),
           ("Up", True, 0, 0.2), ("<end>", True, 0, 0.3),
           ("Reward", False, 0, 0), ("<think>", False, 0, 0),
           ("Left", True, 0, 0.6), ("<end>", True, 1, 0.7)]
MODEL, ENVIRONMENT = "#bcd8ff", "#e6e6e6"


def canvas(size, xlim, ylim):
    _, ax = plt.subplots(figsize=size, layout="constrained")
    ax.axis("off")
    ax.set(xlim=xlim, ylim=ylim)
    return ax


def write(ax, x, y, text, color=None):
    box = dict(boxstyle="round,pad=0.35", facecolor=color, edgecolor="0.5") if color else None
    ax.text(x, y, text, ha="center", va="center", bbox=box, fontsize=9)


def arrow(ax, start, end, bend=0.0):
    style = dict(arrowstyle="-|>", color="0.25", lw=1.2, connectionstyle=f"arc3,rad={bend}")
    ax.annotate("", end, start, arrowprops=style | dict(shrinkA=0, shrinkB=0))


def row(ax, y, name, cells, mine):
    """A line of a table, in the model's colour where the model wrote."""
    ax.text(-0.7, y, name, ha="right", va="center", fontsize=9)
    for x, (text, own) in enumerate(zip(cells, mine)):
        shade = MODEL if own else ENVIRONMENT
        ax.add_patch(plt.Rectangle((x - 0.48, y - 0.36), 0.96, 0.72, facecolor=shade))
        write(ax, x, y, text)


def loop():
    """One iteration, with the exercises in which its parts are written."""
    ax = canvas((10, 2.9), (-1.3, 9.6), (-1.8, 1.6))
    write(ax, 0, 1.2, "environment (1, 2)", ENVIRONMENT)
    write(ax, 0, -1.2, "policy: the model", MODEL)
    arrow(ax, (-0.15, 0.9), (-0.15, -0.9))
    arrow(ax, (0.15, -0.9), (0.15, 0.9))
    write(ax, -0.75, 0, "message")
    write(ax, 0.85, 0, "answer (3)")
    steps = ((2.9, "episodes\nas tokens\n(4, 5)"), (5, "returns,\nfilter\n(8)"),
             (6.9, "advantages\n(7, 8, 9)"), (8.9, "loss,\ngradient\n(10-12)"))
    for x, text in steps:
        write(ax, x, 0, text, "#fff3d6")
    for start, end in ((1.5, 2.35), (3.45, 4.5), (5.5, 6.3), (7.5, 8.4)):
        arrow(ax, (start, 0), (end, 0))
    arrow(ax, (8.9, -0.6), (0.9, -1.2), bend=-0.12)
    write(ax, 2.9, 1.2, "16 episodes in each of 8 levels")
    write(ax, 5, -1.05, "a gradient step: better tokens become likelier")
    plt.show()


def shift():
    """Why everything but the inputs belongs to the token to come."""
    words, mine, rewards, _ = zip(*EPISODE)
    ax = canvas((9, 3.1), (-1.8, 7.6), (-3.6, 1.9))
    row(ax, 1.4, "episode", words, mine)
    row(ax, 0, "inputs", words[:-1], mine[:-1])
    row(ax, -1, "targets", words[1:], mine[1:])
    row(ax, -2, "mask", mine[1:], mine[1:])
    row(ax, -3, "reward", rewards[1:], mine[1:])
    for x in range(len(EPISODE) - 1):
        arrow(ax, (x, 1.0), (x, 0.4))
        arrow(ax, (x + 0.8, 1.0), (x + 0.15, -0.62), bend=-0.1)
    ax.add_patch(plt.Rectangle((0.5, -3.45), 1, 3.9, fill=False, edgecolor="tab:red", lw=1.5))
    plt.show()


def gae(lam=0.5):
    """Over two turns, with gamma = 1: value and advantage wait while the environment writes."""
    words, mine, rewards, values = zip(*EPISODE)
    reward, value, mask = torch.tensor([rewards, values, mine]).float()[:, None]
    delta, _ = rm.gae(reward, value, mask.bool(), 1.0, 0.0)
    advantage, _ = rm.gae(reward, value, mask.bool(), 1.0, lam)
    ax = canvas((9, 3.3), (-1.8, 7.6), (-4.6, 1.5))
    rows = {"reward r": reward, "value v": value, "delta": delta, "advantage A": advantage}
    row(ax, 1, "token", words, mine)
    for y, (name, numbers) in enumerate(rows.items()):
        cells = [f"{x:.2f}" if wrote else "" for x, wrote in zip(numbers[0], mine)]
        row(ax, -y, name, cells, mine)
    own = [t for t, wrote in enumerate(mine) if wrote]
    for before, after in zip(own, own[1:]):
        arrow(ax, (after, -3.38), (before, -3.38), bend=-0.25)
    write(ax, 3, -4.35, f"gamma lambda = {lam:g} of the next own token's A")
    plt.show()
