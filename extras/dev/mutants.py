"""Wrong programs that run without a word: is each one caught by a test?

    python extras/mutants.py            all of them, and writes figures/mutants.txt; some twenty minutes
    python extras/mutants.py gae        those whose name contains "gae"; writes nothing

Most of these bugs still reach a success of 1.00 on an easy world, so that a good curve says nothing. Each mutant is the
program with one piece replaced, in a copy of the project in which the tests of the method run until one fails.
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "figures" / "mutants.txt"
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "course", "*.png", "*.bz2")
CORE = ["tests/test_by_hand.py", "tests/test_algo.py", "tests/test_rollout.py", "tests/test_train.py", "tests/slow_models.py"]
TESTS = {  # a mutant of this file must be caught by one of these
    "ragen_mini.py": CORE,
    "envs.py": ["tests/test_by_hand.py", "tests/test_envs.py"],
    "plots.py": ["tests/test_by_hand.py"],
    "extras/torchrun.py": ["tests/slow_torchrun_gradient.py"],
    "extras/check_model.py": ["tests/slow_models.py"],
}
MUTANTS = {  # file -> what is wrong; a piece of the file; what stands there instead
    "ragen_mini.py": [
        # an episode
        ("environment tokens are trained", "self.mask += [sampled]", "self.mask += [sampled or len(self.mask) > 0]"),
        ("different states in a group", "[begin(seed, episode,", "[begin(seed + episode, episode,"),
        ("dice shared in a group", "[begin(seed, episode,", "[begin(seed, 0,"),
        ("a parser that takes text behind the answer", "SHAPE.fullmatch(text)", "SHAPE.match(text)"),
        ("the budget of actions is overrun", "if traj.actions_left == 0 or env.over:", "if env.over:"),
        ("success, once won, stays", 'traj.success = info["success"]', 'traj.success |= info["success"]'),
        ("only the last action's reward counts", "reward += gained", "reward = gained"),
        ("the reward is on the answer's first token", "traj.reward[-1] =", "traj.reward[traj.answer_start] ="),
        ("the message tells all actions as left",
         "message(env, cfg, traj.actions_left, ", "message(env, cfg, cfg.max_actions, "),
        ("what is said is judged after the move", "= reward + bonus", "= reward + env.bonus(turn)"),
        ("the bonus is told to the model", "message(env, cfg, traj.actions_left, reward)",
         'message(env, cfg, traj.actions_left, turn["reward"])'),
        ("--success-rate is not played", "envs.make(cfg.env, cfg.success_rate)", "envs.make(cfg.env)"),
        ("yardsticks of another success rate", "horizon, seeds, cfg.success_rate)", "horizon, seeds)"),
        ("the end of turn stands there twice", "reply = reply[1:]", "reply = reply[0:]"),
        ("the end of turn is not trained", "    actions = parse_answer(text,",
         "    traj.mask[-1] = traj.ids[-1] not in ends\n    actions = parse_answer(text,"),
        ("a template's blank stays behind an answer", '.lstrip(" ")', ""),
        ("the template's tokens are dropped from an answer", "clean_up_tokenization_spaces=False)",
         "clean_up_tokenization_spaces=False, skip_special_tokens=True)"),
        # the rollout
        ("greedy sampling", "torch.multinomial(next_logps.exp(), 1, generator=generator)", "next_logps.argmax(1, keepdim=True)"),
        ("temperature forgotten in the rollout", "(logits.float() / cfg.temperature)", "logits.float()"),
        ("a shorter message's pad is sampled from", "[0] * (q - len(ids)) + ids for ids", "ids + [0] * (q - len(ids)) for ids"),
        ("pads come first, but not into the columns behind", "[*range(len(traj.ids), traj.cached + q),  # first its pads, if any: behind the end of the row\n"
         "             *range(traj.cached, len(traj.ids))]", "[*range(traj.cached, traj.cached + q)]"),
        ("pads are attended to", "> cache.columns[:, None, :, None]", "> cache.columns.amax(1)[:, None, None, None]"),
        ("a boolean attention mask", "attention_mask=-1e30 * future", "attention_mask=~future"),
        ("a forbidden token has entropy nan", "logp.clamp(-1e4)", "logp"),
        ("the rollout keeps its graph", "@torch.no_grad()\ndef rollout(", "def rollout("),
        # filter, advantages
        ("returns of the first groups, not of the kept", "compute_advantages(chosen, R[kept],",
         "compute_advantages(chosen, R[:len(kept)],"),
        ("kept returns in another order than their episodes", "sorted(uncertainty_filter(R, cfg.keep).tolist())",
         "uncertainty_filter(R, cfg.keep).tolist()"),
        ("the filter keeps the lowest std", "argsort(descending=True, stable=True)", "argsort(stable=True)"),
        ("the filter prefers groups of low returns", "U = R.std(1, correction=0)",
         "U = R.std(1, correction=0) / (1 + R.mean(1).abs())"),
        ("the filter sees normalised returns", "U = R.std(1, correction=0)",
         "U = grpo_advantages(R).std(dim=1, correction=0)"),
        ("gae counts the environment's tokens as steps", "torch.where(wrote, value[:, t], next_value)", "value[:, t]"),
        ("gae discounts the environment's tokens", "gamma * lam * next_advantage, next_advantage)",
         "gamma * lam * next_advantage, gamma * lam * next_advantage)"),
        ("critic without squeeze", ".float().squeeze(-1)", ".float()"),
        ("value target A - V", "(advantage + value) * mask", "(advantage - value) * mask"),
        ("whitening over all tokens", "adv = (adv - adv[mask].mean()) / (adv[mask].std(correction=0) + 1e-8)",
         "adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)"),
        ("the advantage is shifted by one token", 'batch["adv"] = adv * mask', 'batch["adv"] = adv.roll(1, 1) * mask'),
        ("sign of KL", "penalty = -cfg.kl_coef", "penalty = cfg.kl_coef"),
        ("KL penalty only of the token itself", "penalty.flip(1).cumsum(1).flip(1)", "penalty"),
        ("the reference is the policy itself", "ref = copy.deepcopy(policy)", "ref = policy"),
        ("the reference reads at temperature 1", "token_logps(models.ref, part, cfg)",
         "token_logps(models.ref, part, replace(cfg, temperature=1.0))"),
        ("GRPO over the batch", "R - R.mean(1, keepdim=True)", "R - R.mean()"),
        ("GRPO by the std of the batch", "std = R.std(1, keepdim=True)", "std = R.std() + 0 * R"),
        ("GRPO over the wrong dimension", "R - R.mean(1, keepdim=True)", "R - R.mean(0, keepdim=True)"),
        ("GRPO with the population std", "std = R.std(1, keepdim=True)",
         "std = R.std(1, keepdim=True, correction=0)"),
        # losses
        ("gradients of one's own are ignored", "(gradients or add_gradients)(", "add_gradients("),
        ("an algorithm of one's own is trained as GRPO", "A = BY_GROUP[cfg.algo](", "A = BY_GROUP[\"grpo\"]("),
        ("no group kept is no case of its own", "if not kept or nothing_to_compare(", "if nothing_to_compare("),
        ("advantages of another shape are trained", "assert A.shape == R.shape,", "assert A is not None,"),
        ("the filter keeps 28 of 100 for 0.29", "int(keep * len(R) + 1e-9)", "int(keep * len(R))"),
        ("GRPO compares over all groups", "R.std(None if cfg.algo in BY_CRITIC else 1, correction=0)", "R.std(correction=0)"),
        ("the critic learns at a tenth", 'part["ret"][mask]).sum() / total', 'part["ret"][mask]).sum() / total / 10'),
        ("Adam with a shorter memory", "for net, lr in networks if net])",
         "for net, lr in networks if net], betas=(0.9, 0.99))"),
        ("the filter rounds up", "int(keep * len(R) + 1e-9)", "-int(-keep * len(R) // 1)"),
        ("forecasts are clipped around the present one", 'value_loss(value, part["value"][mask]', "value_loss(value, value.detach()"),
        ("a loss of one's own is ignored", "(models.loss or policy_loss)(", "policy_loss("),
        ("targets not shifted", '"targets": [traj.ids[1:] for', '"targets": [traj.ids[:-1] for'),
        ("mask not shifted", "getattr(traj, name)[1:]", 'getattr(traj, name)[name != "mask":][:len(traj.ids) - 1]'),
        ("temperature forgotten in the update", "(head(hidden).float() / cfg.temperature)", "head(hidden).float()"),
        ("ratio without exp", "ratio = (logp - old_logp).exp()", "ratio = 1 + logp - old_logp"),
        ("no clipping", "ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)", "ratio"),
        ("symmetric clip", "1 + cfg.clip_high)", "1 + cfg.clip_low)"),
        ("max for min", "-torch.min(unclipped, clipped)", "-torch.max(unclipped, clipped)"),
        ("sign of the loss", "-torch.min(unclipped, clipped)", "torch.min(unclipped, clipped)"),
        ("sign of entropy", "- cfg.entropy_coef * entropy", "+ cfg.entropy_coef * entropy"),
        ("the entropy bonus has no gradient", "entropy_of(logp)\n    size", "entropy_of(logp.detach())\n    size"),
        ("value loss not clipped", "torch.max((value - ret) ** 2, (clipped - ret) ** 2)", "(value - ret) ** 2"),
        ("value loss by the better error", "torch.max((value - ret) ** 2", "torch.min((value - ret) ** 2"),
        # updates
        ("no shuffling", 'torch.randperm(len(batch["mask"]), generator=shuffler)', 'torch.arange(len(batch["mask"]))'),
        ("one order for all epochs", "generator=shuffler)", "generator=torch.Generator().manual_seed(seed))"),
        ("the last, smaller minibatch is dropped", "in order.split(cfg.update_size):",
         "in order[:len(order) // cfg.update_size * cfg.update_size].split(cfg.update_size):"),
        ("no zero_grad", "    models.optimizer.zero_grad()\n", ""),
        ("mean over the grid", 'int(batch["mask"][rows].sum())', 'batch["mask"][rows].numel()'),
        ("mean over each micro-batch", "part_loss = loss.sum() / total", "part_loss = loss.float().mean()"),
        ("clip_fraction per part", "was_clipped.sum().item() / total", "was_clipped.float().mean().item()"),
        ("autocast around a whole iteration", "def iterate(i,", "@autocast\ndef iterate(i,"),
        # iterations
        ("the run's seed is ignored", "default_rng([cfg.seed, i])", "default_rng([0, i])"),
        ("slices of --online-k share a seed", "sampling_seed + first)", "sampling_seed)"),
        ("slices of --online-k tear groups apart", "first <= traj.group < first + cfg.prompts",
         "traj.group % cfg.online_k == first // cfg.prompts"),
        ("--resume forgets the optimizer's memory", "owner.load_state_dict(state[name])",
         'name == "optimizer" or owner.load_state_dict(state[name])'),
        ("--resume forgets the critic", "owner.load_state_dict(state[name])", 'name == "critic" or owner.load_state_dict(state[name])'),
        ("--resume keeps rows that came after the checkpoint", 'Path(f"{out}/log.jsonl").write_text(log)',
         'log or Path(f"{out}/log.jsonl").write_text(log)'),
        ("all iterations shuffle alike", "cfg, sampling_seed + first)", "cfg, 1 + first)"),
        ("the critic begins as another network", "critic.to(cfg.device)",
         "critic.apply(lambda part: getattr(part, 'reset_parameters', int)()).to(cfg.device)"),
        # evaluation, log
        ("evaluation at the training temperature", "temperature=EVAL_TEMPERATURE", "temperature=cfg.temperature"),
        ("evaluation of the last part alone", "trajs += rollout(", "trajs = rollout("),
        ("success is a return above 0 in an evaluation", "np.mean([traj.success for", "np.mean([traj.R > 0 for"),
        ("interval of another number of episodes", "envs.with_interval(success, len(trajs))", "envs.with_interval(success, 128)"),
        ("yardsticks of a horizon that turns forbid", "min(cfg.max_actions, cfg.max_turns * cfg.max_actions_per_turn)",
         "cfg.max_actions"),
    ],
    "plots.py": [
        ("kl over the grid", 'batch["kl"][batch["mask"]].mean()', 'batch["kl"].mean()'),
        ("the KL of the last slice alone", 'row["kl"] = fmean(kl)', 'row["kl"] = kl[-1]'),
        ("success is a return above 0 in the log", "fmean(traj.success for", "fmean(traj.R > 0 for"),
        ("reward_std over prompts", "R.std(1, correction=0)", "R.std(0, correction=0)"),
        ("entropy per episode",
         "sum(traj.entropy for traj in trajs) / tokens", "fmean(traj.entropy for traj in trajs)"),
        ("grad_norm_max is a mean", 'max(step["grad_norm"] for', 'fmean(step["grad_norm"] for'),
        ("grad_norm_max sees the last steps alone", 'step["grad_norm"] for step in steps', 'step["grad_norm"] for step in steps[-4:]'),
        ("length of answers per turn", "tokens / len(trajs)", "tokens / len(turns)"),
        ("thoughts are counted once each", "for thought in thoughts)", "for thought in set(thoughts))"),
        ("nine bad iterations at the end are a collapse", "len(success) - COLLAPSED_FOR + 1", "len(success) - COLLAPSED_FOR + 2"),
    ],
    "envs.py": [
        ("a world's own success rate is overwritten", "if success_rate is not None and hasattr", "if hasattr"),
        ("yardsticks of one action less", "for left in range(horizon + 1)]", "for left in (0, *range(horizon))]"),
        ("held-out levels are trained on", "held_out == (seed in EVAL_SEEDS)", "True"),
    ],
    "extras/torchrun.py": [
        ("every process takes every row", "mine = rows[RANK::PROCESSES]", "mine = rows"),
        ("gradients are not added up", "dist.all_reduce(weight.grad)", "pass"),
        ("each process divides by its own tokens", "weight.grad *= share", "pass"),
        ("the same dice in all processes", "sampling_seed + RANK", "sampling_seed"),
    ],
    "extras/check_model.py": [
        ("a recurrent model is accepted", "need(cache.layers,", "need(True,"),
    ],
}


def misplaced(project):  # -> lines: patterns that do not stand in their file exactly once
    errors = []
    for file, mutants in MUTANTS.items():
        text = Path(project, file).read_text()
        for name, old, _ in mutants:
            times = text.count(old)
            if times != 1:
                errors.append(f"{name}: {old!r} stands {times} times in {file}")
    return errors


def killer(project, file, old, new):  # -> the test that failed, or None: it survives
    program = Path(project, file)
    text = program.read_text()
    program.write_text(text.replace(old, new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS[file]]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    program.write_text(text)
    for line in done.stdout.splitlines():
        if line.startswith("FAILED"):
            return line.split("::")[1].split(" ")[0]
    if done.returncode:  # not even that: the program could not be imported, say
        sys.exit(f"{old!r} in {file}: the tests could not run\n{done.stdout[-500:]}")


def commit():
    def git(*args):
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    changed = git("status", "--porcelain", "--", ".", ":!figures")
    return git("rev-parse", "--short", "HEAD") + (" + changes" if changed else "")


def main(wanted):
    errors = misplaced(ROOT)
    if errors:
        sys.exit("\n".join(errors))
    names = [name for mutants in MUTANTS.values() for name, _, _ in mutants]
    if not any(wanted in name for name in names):
        sys.exit(f"no mutant has {wanted!r} in its name: python extras/mutants.py [PART OF A NAME]")
    lines = [f"python extras/mutants.py, commit {commit()}: which test fails first where the program is wrong?"]
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        project = shutil.copytree(ROOT, Path(folder, "project"), ignore=LEFT_OUT)
        for file, mutants in MUTANTS.items():
            for name, old, new in mutants:
                if wanted in name:
                    test = killer(project, file, old, new)
                    alive += test is None
                    lines.append(f"{name}: caught by {test}" if test else f"{name}: SURVIVES")
                    print(lines[-1], flush=True)
    lines.append(f"{len(lines) - 1} mutants, {alive} survive")
    print(lines[-1])
    if not wanted:  # all at once, so that the file is never half of one
        new_report = REPORT.with_suffix(".new")
        new_report.write_text("\n".join(lines) + "\n")
        os.replace(new_report, REPORT)
    return alive


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])) > 0)
