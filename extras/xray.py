"""RUN/xray.html: two episodes token by token, with all that an update knew about each token.

    python extras/xray.py RUN

It loads RUN's checkpoint, plays the iteration that would come next, and trains on it. Then it shows
the best and the worst episode of the group whose returns differ most. Nothing but the page is
written to RUN.

The method is that of ragen_mini.py, also if another script has trained the run. If that script has
networks or an optimizer of its own, it is refused.
"""
import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))


import ragen_mini as rm
import runs
from runs import UserError, need


def xray(run):  # -> path of the page
    run = Path(run).expanduser()
    need(Path(run, "checkpoint").is_dir(), f"{run} is not the folder of a run with a checkpoint.")
    cfg = rm.parse_config(["--resume", str(run)])
    models, state = load(run, cfg)
    i = len(state["log"].splitlines())  # the log begins with iteration 0
    with runs.torch_settings(models.policy):
        trajs, learned = iterate(i, models, cfg)
        episodes = two_episodes(trajs, learned, models, cfg)
    title = f"{run}, iteration {i}"
    if state["script"] not in ("ragen_mini", runs.script()):
        title += f" (of a run by {state['script']}, but played and learned by ragen_mini alone)"
    page = Path(run, "xray.html")
    page.write_text(make_page(title, episodes), encoding="utf-8")
    return page


def load(run, cfg):  # -> models, trainer.pt
    file = Path(run, "checkpoint", "trainer.pt")
    state = runs.load_trainer(run)
    need(state["log"], f"{file} is damaged, because the log in it is empty.")
    for name in ("env", "algo", "seed"):  # as runs.restore does
        was, now = state["settings"].get(name), getattr(cfg, name)
        need(was == now, f"{run}: its checkpoint is of a run with {runs.option(name)} {was}, but "
                         f"its config.json says {now}. Were files of two runs mixed up?")
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    try:
        assert settings(state["optimizer"]) == settings(models.optimizer.state_dict())
        for name, part in vars(models).items():
            if part and name in state:
                part.load_state_dict(state[name])
    except Exception as error:  # torch raises many kinds
        raise UserError(f"{file} does not fit to ragen_mini.py. It is damaged, or the script that "
                        f"trained {run} has networks or an optimizer of its own.") from error
    return models, state


def settings(optimizer):  # its state_dict -> names of its settings, by which Adam and SGD differ
    return [group.keys() for group in optimizer["param_groups"]]


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
        rm.learn = learn
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
    logp = rm.per_token(lambda some: rm.token_logps(models.policy, some, cfg)[0], part)
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
    with runs.one_line_errors():
        print(f"open in a browser: {xray(args.run)}")


if __name__ == "__main__":
    main()
