"""Wrong programs that run without a word: is each one caught by a quick test?

    python tests/mutants.py            all of them, about ten minutes on two cores
    python tests/mutants.py gae        those whose name contains "gae"

Every row of the course's table of bugs is here: most of them still reach a success of 1.00 on an easy world, so that a
good curve says nothing. Each mutant is ragen_mini.py with one piece replaced, in a copy of the project in which the
tests of the method (TESTS) run until the first failure. A mutant that survives is printed as such.
"""
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/test_algo.py", "tests/test_rollout.py", "tests/test_models.py", "tests/test_torchrun.py"]
MUTANTS = [  # what is wrong; the piece of ragen_mini.py; what stands there instead
    ("gae counts the environment's tokens as steps", "next_value = torch.where(ours, value[:, t], next_value)", "next_value = value[:, t]"),
    ("gae discounts the environment's tokens", "next_advantage = torch.where(ours, delta + gamma * lam * next_advantage, next_advantage)",
     "next_advantage = torch.where(ours, delta + gamma * lam * next_advantage, gamma * lam * next_advantage)"),
    ("critic without squeeze", ".float().squeeze(-1)", ".float()"),
    ("whitening over all tokens", "white = (adv - adv[mask].mean()) / (adv[mask].std(correction=0) + 1e-8)",
     "white = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)"),
    ("sign of entropy", "- cfg.entropy_coef * entropy", "+ cfg.entropy_coef * entropy"),
    ("sign of KL", "penalty = -cfg.kl_coef", "penalty = cfg.kl_coef"),
    ("value target A - V", "(advantage + value) * mask", "(advantage - value) * mask"),
    ("dice shared in a group", "append(begin(name, seed, episode, group", "append(begin(name, seed, 0, group"),
    ("no clipping", "ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)", "ratio"),
    ("symmetric clip", "1 + cfg.clip_high)", "1 + cfg.clip_low)"),
    ("no zero_grad", "    models.optimizer.zero_grad()\n", ""),
    ("mean over the grid", 'total = int(batch["mask"][rows].sum())', 'total = batch["mask"][rows].numel()'),
    ("mean over each micro-batch", "loss = losses.sum() / total", "loss = losses.mean()"),
    ("GRPO over the batch", "centered = R - R.mean(dim=1, keepdim=True)", "centered = R - R.mean()"),
    ("GRPO by the std of the batch", "std = R.std(dim=1, keepdim=True)", "std = R.std() + 0 * R"),
    ("GRPO over the wrong dimension", "centered = R - R.mean(dim=1, keepdim=True)", "centered = R - R.mean(dim=0, keepdim=True)"),
    ("GRPO with the population std", "std = R.std(dim=1, keepdim=True)", "std = R.std(dim=1, keepdim=True, correction=0)"),
    ("filter keeps the lowest std", "argsort(descending=True, stable=True)", "argsort(stable=True)"),
    ("filter on normalised returns", "U = R.std(dim=1, correction=0)", "U = grpo_advantages(R).std(dim=1, correction=0)"),
    ("advantage shifted by one token", 'batch["adv"] = white * mask', 'batch["adv"] = white.roll(1, 1) * mask'),
    ("reward on the answer's first token", 'traj.reward[-1] = turn["reward"]', 'traj.reward[traj.answer_start] = turn["reward"]'),
    ("ratio without exp", "ratio = (logp - old_logp).exp()", "ratio = 1 + logp - old_logp"),
    ("max for min", "-torch.min(unclipped, clipped)", "-torch.max(unclipped, clipped)"),
    ("sign of the loss", "-torch.min(unclipped, clipped)", "torch.min(unclipped, clipped)"),
    ("greedy sampling", "logp.argmax(1, keepdim=True) if greedy else", "logp.argmax(1, keepdim=True) if True else"),
    ("environment tokens are trained", "self.mask += [False] * len(ids)", "self.mask += [len(self.mask) > 0] * len(ids)"),
    ("targets not shifted", '"targets": pad([traj.ids[1:] for', '"targets": pad([traj.ids[:-1] for'),
    ("mask not shifted", '"mask": pad([traj.mask[1:] for', '"mask": pad([traj.mask[:-1] for'),
    ("different states in a group", "append(begin(name, seed, episode, group", "append(begin(name, seed + episode, episode, group"),
    ("temperature forgotten in the update", "(head(hidden).float() / temperature)", "(head(hidden).float())"),
    ("temperature forgotten in the rollout", "/ (temperature or 1))", ")"),
    ("end of turn untrained", "    actions = parse_answer(empty_thought + text", "    traj.mask[-1] = not ended\n    actions = parse_answer(empty_thought + text"),
    ("end of turn stands there twice", "following = following[1:]", "following = following[0:]"),
    ("value loss not clipped", "torch.max((value - ret) ** 2, (clipped - ret) ** 2)", "(value - ret) ** 2"),
    ("value loss by the better error", "torch.max((value - ret) ** 2", "torch.min((value - ret) ** 2"),
    ("KL penalty only of the token itself", "penalty.flip(1).cumsum(1).flip(1)", "penalty"),
    ("pads are attended to", "torch.arange(cache.used, device=cache.device) > cache.columns[:, None, :, None]",
     "torch.arange(cache.used, device=cache.device) > cache.columns.amax(1)[:, None, None, None]"),
    ("a boolean attention mask", "unseen = later * torch.finfo(torch.float32).min", "unseen = ~later"),
    ("autocast around a whole iteration", "def iterate(i, models, cfg):", "@autocast\ndef iterate(i, models, cfg):"),
    ("every process takes every micro-batch", "parts[RANK::PROCESSES]", "parts"),
    ("gradients are not added up", "torch.distributed.all_reduce(weight.grad)", "pass"),
    ("a recurrent model is accepted", 'need(cache.layers, refused', 'need(True, refused'),
    ("a forbidden token has entropy nan", "logp.clamp(min=-1e4)", "logp"),
    ("a parser that takes text behind the answer", "SHAPE.fullmatch(text)", "SHAPE.match(text)"),
]


def survives(old, new):  # -> the test that failed, or None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "figures"))
        program = copy / "ragen_mini.py"
        text = program.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in ragen_mini.py"
        program.write_text(text.replace(old, new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        failed = [line.split("::")[1].split(" ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0] if done.returncode else None


if __name__ == "__main__":
    wanted, alive = " ".join(sys.argv[1:]), 0
    for name, old, new in MUTANTS:
        if wanted in name:
            killer = survives(old, new)
            alive += killer is None
            print(f"{name}: {'SURVIVES' if killer is None else 'caught by ' + killer}", flush=True)
    print(f"{alive} survive")
    sys.exit(alive > 0)
