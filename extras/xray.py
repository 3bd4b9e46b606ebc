"""RUN/xray.html: two episodes token by token, with all that an update knew about each token.

    python extras/xray.py RUN

It takes RUN's checkpoint, plays the iteration that would come next, and trains on it; then it shows the best and the
worst episode of the group whose returns differ most. Nothing but the page is written to RUN. (A run that another
program trained, such as extras/thoughts.py, goes on here with the core's worlds, rewards and losses; one whose script
added an --algo is refused.)
"""
import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch

import ragen_mini as rm
from envs import UserError


def xray(run):  # -> path of the page
    rm.need(Path(run, "checkpoint").is_dir(), f"{run} is not the folder of a run with a checkpoint")
    cfg = settings_of(run)
    models = rm.load_models(cfg)
    with rm.or_say(f"{run}/checkpoint/trainer.pt is unusable"):
        saved = torch.load(f"{run}/checkpoint/trainer.pt", map_location="cpu", weights_only=True, mmap=True)
        cfg.origin = saved.get("origin", cfg.origin)  # whichever program trained it
    rm.need(cfg.origin.startswith(f"{cfg.name} by"), f"{run}/config.json is of {cfg.name}, its checkpoint of {cfg.origin}")
    models.optimizer = rm.make_optimizer(models, cfg)
    own = f"no X-ray of {run}, {cfg.origin}: is trainer.pt damaged, or has its script networks or an optimizer of its own?"
    try:
        log = rm.restore(models, cfg)
    except UserError as error:  # the file itself can be read, see above
        raise UserError(own) from error
    i = len(log.splitlines())  # the log begins with iteration 0
    with rm.or_say(own):
        _, trajs, learned = rm.iterate(i, models, cfg)
    page = Path(run, "xray.html")
    title = f"{run}, iteration {i}"
    if not cfg.origin.endswith("by ragen_mini.py"):
        title += f" (played and learnt by ragen_mini.py alone, not as in {cfg.origin})"
    html = make_page(title, two_episodes(trajs, learned, models, cfg))
    with rm.or_say(f"cannot write {page}"):
        page.write_text(html, encoding="utf-8")
    return page


def settings_of(run):  # without options that only its own script knows
    known = rm.Config.__annotations__
    with rm.or_say(f"{run}/config.json is damaged"):
        settings = json.loads(Path(run, "config.json").read_text())
        settings = {name: value for name, value in settings.items() if name in known}
        algo = settings.get("algo", rm.Config.algo)
        rm.need(algo in rm.BY_CRITIC | rm.BY_GROUP, f"no X-ray of {run}: only its script knows --algo {algo}")
        return rm.Config(**settings | {"device": rm.Config.device, "resume": run})


def make_page(title, episodes):  # -> html
    data = json.dumps({"title": title, "episodes": episodes})
    data = data.replace("<", "\\u003c")  # or a </script> that a model wrote would end the page's own
    template = (HERE / "xray.html").read_text(encoding="utf-8")
    return template.replace("EPISODES", data)


def two_episodes(trajs, learned, models, cfg):  # -> list of dicts; one, if the group is one episode
    """trajs, learned: of an iteration, as `watch` gets them. If nothing could be compared in it, the columns that an
    update makes are missing. With --online-k: of the first slice."""
    batch, steps = learned[0]
    trajs = [traj for traj in trajs if traj.group < cfg.prompts]
    R = rm.returns(trajs, cfg)
    kept = sorted(rm.uncertainty_filter(R, cfg.keep).tolist())  # as `learn` did: the batch has the rows of these groups
    if not batch:
        kept = list(range(len(R)))
        batch = rm.collate(trajs, cfg.device)
    group = rm.uncertainty_filter(R, 0).item()  # it keeps one at least, and that one is kept in any case
    order = R[group].argsort(stable=True).tolist()
    chosen = list(dict.fromkeys([order[-1], order[0]]))
    first_row = kept.index(group) * cfg.rollouts
    part = {name: x[[first_row + n for n in chosen]] for name, x in batch.items()}
    if steps:
        part["ratio"] = ratios(part, models, cfg)
    episodes = []
    for k, n in enumerate(chosen):
        traj = trajs[group * cfg.rollouts + n]
        episodes.append(describe(traj, k, part, models.tok))
    return episodes


def ratios(part, models, cfg):  # (2,T-1): after the updates
    logp = rm.on_grid(lambda some: rm.token_logps(models.policy, some, cfg)[0], part)
    return (logp - part["old_logp"]).exp()


def describe(traj, k, part, tok):  # row k of the part is this trajectory
    length = len(traj.ids) - 1  # the rest of the row is padding. Entry t of a column is about token t + 1
    columns = {}
    for name, x in part.items():
        if x.is_floating_point():
            columns[name] = x[k, :length].tolist()
    return {
        "group": traj.group,
        "R": traj.R,
        "success": traj.success,
        "turns": traj.turns,
        "end": traj.env.render(),
        "mask": traj.mask,
        "tokens": [tok.decode([token]) for token in traj.ids],
        "columns": columns,
    }


if __name__ == "__main__":
    rm.signal(rm.SIGINT, rm.SIG_DFL)  # Ctrl-C ends it at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    print(f"open in a browser: {xray(parser.parse_args().run)}")
