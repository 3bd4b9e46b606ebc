"""RUN/xray.html: two episodes token by token, with all that an update knew about each token.

    python extras/xray.py RUN

It loads RUN's checkpoint, plays the iteration that would come next, and trains on it. Then it shows
the best and the worst episode of the group whose returns differ most. Nothing but the page is
written to RUN.

The method is that of ragen_mini.py, also if another script has trained the run.
"""
import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import ragen_mini as rm
from support import device, errors, folder


def xray(run):  # -> path of the page
    cfg = rm.parse_config(["--resume", run])
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    i = len(folder.restore(models, cfg).splitlines())  # the log begins with iteration 0
    with device.torch_settings(models.policy):
        trajs, learned = iterate(i, models, cfg)
        episodes = two_episodes(trajs, learned, models, cfg)
    page = Path(run, "xray.html").expanduser()
    page.write_text(make_page(f"{run}, iteration {i}", episodes), encoding="utf-8")
    return page


def iterate(i, models, cfg):  # -> trajectories, what `learn` has returned for each slice of them
    """rm.iterate keeps no batch, so rm.learn is replaced by a function that does."""
    learn = rm.learn
    learned = []

    def learn_and_keep(*args):
        learned.append(learn(*args))
        return learned[-1]
    rm.learn = learn_and_keep
    try:
        _, trajs = rm.iterate(i, models, cfg)
    finally:
        rm.learn = learn  # a notebook goes on
    return trajs, learned


# ----------------------------------------------------------------------------------------- the page
def make_page(title, episodes):  # -> html
    data = json.dumps({"title": title, "episodes": episodes})
    # Otherwise a </script> that a model wrote would end the page's own script.
    data = data.replace("<", "\\u003c")
    template = (HERE / "xray.html").read_text(encoding="utf-8")
    return template.replace("EPISODES", data)


def two_episodes(trajs, learned, models, cfg):  # -> list of dicts; one, if a group is one episode
    """With --online-k they are of the first slice. If nothing was learned from it, the columns that
    an update makes are missing.
    """
    batch, steps = learned[0]
    trajs = [traj for traj in trajs if traj.group < cfg.prompts]
    R = rm.returns(trajs, cfg)
    # As in `learn`. The batch has the rows of these groups.
    kept = sorted(rm.uncertainty_filter(R, cfg.keep).tolist())
    if not batch:
        kept = list(range(len(R)))
        batch = rm.collate(trajs, cfg.device)
    group = rm.uncertainty_filter(R, 0).item()  # it keeps one group at least, which is in `kept`
    order = R[group].argsort(stable=True).tolist()
    chosen = [order[-1], order[0]][:cfg.rollouts]
    first_row = kept.index(group) * cfg.rollouts
    part = {name: x[[first_row + n for n in chosen]] for name, x in batch.items()}
    if steps:
        part["ratio"] = ratios(part, models, cfg)
    episodes = []
    for row, n in enumerate(chosen):
        traj = trajs[group * cfg.rollouts + n]
        episodes.append(describe(traj, row, part, models.tok))
    return episodes


def ratios(part, models, cfg):  # (2,T-1): after the updates
    logp = rm.per_token(lambda some: rm.token_logps(models.policy, some, cfg)[0], part, cfg)
    return (logp - part["old_logp"]).exp()


def describe(traj, row, part, tok):  # the trajectory is this row of the part -> dict
    # The rest of the row is padding. Entry t of a column is about token t + 1.
    length = len(traj.ids) - 1
    columns = {name: x[row, :length].tolist() for name, x in part.items() if x.is_floating_point()}
    return {"group": traj.group,
            "R": traj.R,
            "success": traj.success,
            "turns": traj.turns,
            "end": traj.env.render(),
            "mask": traj.mask,
            "tokens": [tok.decode([token]) for token in traj.ids],
            "columns": columns}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    args = parser.parse_args()
    sys.argv[0] = "ragen_mini.py"  # by which the method is named that plays and learns
    with errors.one_line_errors():
        print(f"open in a browser: {xray(args.run)}")


if __name__ == "__main__":
    main()
