"""Wrong programs that run without a word: is each one caught by a test?

    python extras/dev/mutants.py        all of them, and writes figures/mutants.txt: half an hour
    python extras/dev/mutants.py gae    those whose name contains "gae"; writes nothing

Most of these bugs still reach a success of 1.00 in an easy environment, so a good curve says
nothing. Each mutant is the program with one piece of code replaced, in a copy of the project in
which the tests of the method run until one fails.
"""
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "figures" / "mutants.txt"
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "course", "*.png", "*.bz2")
BY_HAND, ALGO, ROLLOUT, TEMPLATES, ENVS, PLOTS, TRAIN = (
    f"tests/test_{name}.py"
    for name in ("by_hand", "algo", "rollout", "templates", "envs", "plots", "train"))
MODELS = "tests/slow/slow_models.py"
TESTS = {  # a mutant of this file must be caught by one of these, which run in this order
    "ragen_mini.py": [BY_HAND, ALGO, ROLLOUT, TRAIN, MODELS],
    "support/cache.py": [BY_HAND, ROLLOUT, MODELS],
    "support/chat.py": [ROLLOUT, TEMPLATES, MODELS],
    "support/folder.py": [TRAIN],
    "support/loading.py": [ALGO, TRAIN],
    "envs.py": [BY_HAND, ENVS],
    "plots.py": [BY_HAND, PLOTS],
    "extras/torchrun.py": ["tests/slow/slow_torchrun_gradient.py"],
    "extras/check_model.py": [MODELS],
}
MUTANTS = {  # file -> what is wrong; a piece of its code; what stands there instead
    "ragen_mini.py": [
        # an episode
        ("environment tokens are trained",
         "self.mask += [sampled]", "self.mask += [sampled or len(self.mask) > 0]"),
        ("different levels in a group", "[begin(seed, episode,", "[begin(seed + episode, episode,"),
        ("dice shared in a group", "[begin(seed, episode,", "[begin(seed, 0,"),
        ("a parser that takes text behind the answer",
         "ANSWER.fullmatch(text)", "ANSWER.match(text)"),
        ("a thought of several lines is malformed",
         '</answer>\\s*", re.DOTALL)', '</answer>\\s*")'),
        ("the budget of actions is overrun",
         "if traj.actions_left == 0 or env.over:\n            break",
         "if env.over:\n            break"),
        ("success, once won, stays",
         'traj.success = info["success"]', 'traj.success |= info["success"]'),
        ("only the last action's reward counts",
         "reward += reward_of_action", "reward = reward_of_action"),
        ("an invalid answer costs nothing",
         "reward = 0.0 if valid else FORMAT_PENALTY", "reward = 0.0"),
        ("the reward is on the answer's first token",
         "traj.reward[-1] = reward", "traj.reward[traj.answer_start] = reward"),
        ("the end token of a turn is not counted",
         '"tokens": len(written)}', '"tokens": len(without_end)}'),
        ("the message tells all actions as left",
         "tok, traj.actions_left, reward)", "tok, cfg.max_actions, reward)"),
        ("without thinking, the first message still asks for a thought",
         'thought = "" if cfg.no_think else ', "thought = "),
        ("--success-rate is not played",
         "envs.make(cfg.env, cfg.success_rate)", "envs.make(cfg.env)"),
        ("yardsticks of another success rate",
         "cfg.horizon, seeds, cfg.success_rate)", "cfg.horizon, seeds)"),
        ("the end of an answer stands there twice",
         "ids = ids[ids.index(ends[0]) + 1:]", "ids = ids[ids.index(ends[0]):]"),
        ("the end of an answer is not trained",
         '    turn["reward"] = reward\n',
         '    turn["reward"] = reward\n    traj.mask[-1] = traj.ids[-1] not in ends\n'),
        ("control tokens are dropped from an answer",
         "clean_up_tokenization_spaces=False)",
         "clean_up_tokenization_spaces=False, skip_special_tokens=True)"),
        # the rollout
        ("greedy sampling",
         "torch.multinomial(next_logps.exp(), 1, generator=generator)",
         "next_logps.argmax(1, keepdim=True)"),
        ("the seed of the rollout is forgotten", "manual_seed(sampling_seed)", "manual_seed(0)"),
        ("an answer is tidied up when it is decoded",
         "tok.decode(without_end, clean_up_tokenization_spaces=False)", "tok.decode(without_end)"),
        ("a forbidden token has entropy nan", "logp.clamp(-1e4)).sum(1)", "logp).sum(1)"),
        ("the rollout keeps its graph", "@torch.no_grad()\ndef rollout(", "def rollout("),
        # filter, advantages
        ("returns of the first groups, not of the kept",
         "compute_advantages(chosen, R[kept],", "compute_advantages(chosen, R[:len(kept)],"),
        ("kept returns in another order than their episodes",
         "sorted(uncertainty_filter(R, cfg.keep).tolist())",
         "uncertainty_filter(R, cfg.keep).tolist()"),
        ("episodes of the first groups, not of the kept",
         "for group in kept for traj in", "for group in range(len(kept)) for traj in"),
        ("the filter keeps the lowest std",
         "argsort(descending=True, stable=True)", "argsort(stable=True)"),
        ("the filter sees normalised returns",
         "U = R.std(1, correction=0)", "U = grpo_advantages(R).std(dim=1, correction=0)"),
        ("the filter keeps 28 of 100 for 0.29", "int(keep * len(R) + 1e-9)", "int(keep * len(R))"),
        ("the filter rounds up", "int(keep * len(R) + 1e-9)", "-int(-keep * len(R) // 1)"),
        ("no group kept is no case of its own",
         "if not kept or nothing_to_compare(", "if nothing_to_compare("),
        ("nothing to compare is asked before the filter",
         "nothing_to_compare(R[kept], cfg)", "nothing_to_compare(R, cfg)"),
        ("GRPO compares over all groups", "R.std(1, correction=0).max()", "R.std(correction=0)"),
        ("GRPO skips where any group is alike",
         "R.std(1, correction=0).max()", "R.std(1, correction=0).min()"),
        ("PPO compares within groups", "R.std(correction=0) if cfg.uses_critic else ", ""),
        ("gae counts the environment's tokens as steps",
         "torch.where(wrote, value[:, t], next_value)", "value[:, t]"),
        ("gae discounts the environment's tokens",
         "gamma * lam * next_advantage, next_advantage)",
         "gamma * lam * next_advantage, gamma * lam * next_advantage)"),
        ("gamma and lambda are swapped", "mask, cfg.gamma, cfg.lam)", "mask, cfg.lam, cfg.gamma)"),
        ("critic without squeeze", ".float().squeeze(-1)", ".float()"),
        ("value target A - V", "(advantage + value) * mask", "(advantage - value) * mask"),
        ("whitening over all tokens",
         "adv[mask].mean(), adv[mask].std(correction=0)", "adv.mean(), adv.std(correction=0)"),
        ("no whitening", "adv = (adv - mean) / (std + 1e-8)", "adv = adv + 0 * (mean + std)"),
        ("the advantage is shifted by one token",
         'batch["adv"] = adv * mask', 'batch["adv"] = adv.roll(1, 1) * mask'),
        ("sign of KL", "penalty = -cfg.kl_coef", "penalty = cfg.kl_coef"),
        ("KL penalty only of the token itself", "penalty.flip(1).cumsum(1).flip(1)", "penalty"),
        ("PPO pays no KL penalty",
         'reward = batch["reward"] + penalty', 'reward = batch["reward"]'),
        ("the reference is the policy itself", "ref = copy.deepcopy(policy)", "ref = policy"),
        ("the reference reads at temperature 1",
         "token_logps(models.ref, part, cfg)",
         "token_logps(models.ref, part, replace(cfg, temperature=1.0))"),
        ("GRPO over the batch", "R - R.mean(1, keepdim=True)", "R - R.mean()"),
        ("GRPO by the std of the batch", "std = R.std(1, keepdim=True)", "std = R.std() + 0 * R"),
        ("GRPO with the population std",
         "std = R.std(1, keepdim=True)", "std = R.std(1, keepdim=True, correction=0)"),
        ("advantages of another shape are trained",
         "assert adv.shape == R.shape,", "assert adv is not None,"),
        # losses
        ("the critic learns at a tenth",
         "part_loss = error.sum() / total", "part_loss = error.sum() / total / 10"),
        ("values are clipped around the present one",
         'value_loss(value, part["value"][mask]', "value_loss(value, value.detach()"),
        ("targets not shifted", '"targets": [traj.ids[1:] for', '"targets": [traj.ids[:-1] for'),
        ("mask not shifted", '"mask": [traj.mask[1:] for', '"mask": [traj.mask[:-1] for'),
        ("old log-probs not shifted",
         '"old_logp": [traj.old_logp[1:] for', '"old_logp": [traj.old_logp[:-1] for'),
        ("rewards not shifted",
         '"reward": [traj.reward[1:] for', '"reward": [traj.reward[:-1] for'),
        ("temperature forgotten in the update",
         "logp = (head(hidden).float() / temperature)", "logp = head(hidden).float()"),
        ("ratio without exp", "ratio = (logp - old_logp).exp()", "ratio = 1 + logp - old_logp"),
        ("no clipping", "ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)", "ratio"),
        ("symmetric clip", "1 + cfg.clip_high)", "1 + cfg.clip_low)"),
        ("max for min", "-torch.min(unclipped, clipped)", "-torch.max(unclipped, clipped)"),
        ("sign of the loss", "-torch.min(unclipped, clipped)", "torch.min(unclipped, clipped)"),
        ("sign of entropy", "- cfg.entropy_coef * entropy", "+ cfg.entropy_coef * entropy"),
        ("the entropy bonus has no gradient",
         "targets[:, None]).flatten(), entropy_of(logp)",
         "targets[:, None]).flatten(), entropy_of(logp.detach())"),
        ("value loss not clipped",
         "torch.max((value - target) ** 2, (clipped - target) ** 2)", "(value - target) ** 2"),
        ("value loss by the better error",
         "torch.max((value - target) ** 2", "torch.min((value - target) ** 2"),
        # updates
        ("the seed of learn is forgotten",
         "updates(batch, models, cfg, seed)\n", "updates(batch, models, cfg, 0)\n"),
        ("no shuffling",
         'torch.randperm(len(batch["mask"]), generator=shuffler)',
         'torch.arange(len(batch["mask"]))'),
        ("one order for all epochs",
         "generator=shuffler)", "generator=torch.Generator().manual_seed(seed))"),
        ("one epoch, whatever --epochs says", "for _ in range(cfg.epochs):", "for _ in range(1):"),
        ("the last, smaller minibatch is dropped",
         "in order.split(cfg.minibatch_size):",
         "in order[:len(order) // cfg.minibatch_size * "
         "cfg.minibatch_size].split(cfg.minibatch_size):"),
        ("no zero_grad", "    models.optimizer.zero_grad()\n", ""),
        ("mean over all columns", 'int(batch["mask"][rows].sum())', 'batch["mask"][rows].numel()'),
        ("mean over each micro-batch",
         "part_loss = loss.sum() / total", "part_loss = loss.float().mean()"),
        ("clip_fraction per micro-batch",
         "was_clipped.sum().item() / total", "was_clipped.float().mean().item()"),
        ("autocast around all steps",
         "    return batch, updates(",
         "    with device.autocast(cfg.device):\n        return batch, updates("),
        ("passes of an update without autocast",
         "with device.autocast(cfg.device):\n        for _, part in",
         "with device.autocast('cpu'):\n        for _, part in"),
        ("Adam with a shorter memory",
         "torch.optim.Adam(groups)", "torch.optim.Adam(groups, betas=(0.9, 0.99))"),
        ("Adam with decay", "torch.optim.Adam(groups)", "torch.optim.AdamW(groups)"),
        ("the critic learns at the policy's rate", '"lr": cfg.critic_lr}', '"lr": cfg.lr}'),
        ("policy and critic share the norm of their gradients",
         "clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)",
         "clip_grad_norm_([w for n in (models.policy, models.critic) if n for w in "
         "n.parameters()], MAX_GRAD_NORM)"),
        ("a critic whose gradient is not finite goes on",
         "np.isfinite(norms).all()", "np.isfinite(norms[0])"),
        # iterations
        ("the run's seed is ignored", "default_rng([cfg.seed, i])", "default_rng([0, i])"),
        ("seeds of the evaluation are trained on",
         "rng.integers(envs.EVAL_SEEDS.stop,", "rng.integers(0,"),
        ("slices of --online-k share a seed", "sampling_seed + first)", "sampling_seed)"),
        ("slices of --online-k tear groups apart",
         "trajs[first * cfg.rollouts:(first + cfg.prompts) * cfg.rollouts]",
         "trajs[first // cfg.prompts::cfg.online_k]"),
        ("seconds_update contain the rollout",
         "    start = perf_counter()\n    learned = []", "    learned = []"),
        ("--online-k logs the last slice alone",
         "log_columns(trajs, returns(trajs, cfg), learned)",
         "log_columns(trajs, returns(trajs, cfg), learned[-1:])"),
        ("a dead run needs only nine iterations", "DEAD_AFTER = 10", "DEAD_AFTER = 9"),
        ("a function is looked up when its file is read",
         "def iterate(i, models, cfg):",
         "def iterate(i, models, cfg, learn=learn if 'learn' in globals() else None):"),
        # evaluation, checks
        ("evaluation at the training temperature",
         "seeds, 1, as_evaluated(cfg), seeds[0])", "seeds, 1, cfg, seeds[0])"),
        ("evaluation of the last part alone", "trajs += play(", "trajs = play("),
        ("all parts of an evaluation have the same luck",
         "as_evaluated(cfg), seeds[0])", "as_evaluated(cfg), 0)"),
        ("success is a return above 0 in an evaluation",
         "np.mean([traj.success for", "np.mean([traj.R > 0 for"),
        ("interval of another number of episodes",
         "plots.with_interval(success, len(trajs))", "plots.with_interval(success, 128)"),
        ("random and optimal play in each other's place",
         "random, optimal = yardsticks", "optimal, random = yardsticks"),
        ("yardsticks of a horizon that turns forbid",
         "min(self.max_actions, self.max_turns * self.max_actions_per_turn)", "self.max_actions"),
        ("the ratios of the shortest episode are checked",
         "longest = max(trajs, key=", "longest = min(trajs, key="),
        ("the ratios of an evaluation at another temperature",
         "logp_gap(trajs, models, as_evaluated(cfg))", "logp_gap(trajs, models, cfg)"),
        ("the gap of a first iteration is not looked at",
         "chat.check_gap(gap, models, cfg)\n\n", "pass\n\n"),
        ("--starpo-s has the numbers of StarPO",
         "settings.fill_in(self, STARPO_S if self.starpo_s else STARPO,",
         "settings.fill_in(self, STARPO,"),
        ("the learning rate of other models",
         '"lr": 1e-6, "critic_lr": 1e-5', '"lr": 1e-5, "critic_lr": 1e-5'),
        ("the critic's learning rate of tiny",
         '"lr": 4e-4, "critic_lr": 1e-3', '"lr": 4e-4, "critic_lr": 1e-4'),
        # the log
        ("kl over all columns", 'batch["kl"][batch["mask"]].mean()', 'batch["kl"].mean()'),
        ("success is a return above 0 in the log",
         "fmean(traj.success for", "fmean(traj.R > 0 for"),
        ("reward_std over prompts",
         "R.std(1, correction=0).mean()", "R.std(0, correction=0).mean()"),
        ("entropy per episode",
         "sum(traj.entropy for traj in trajs) / tokens", "fmean(traj.entropy for traj in trajs)"),
        ("grad_norm_max is a mean", 'max(step["grad_norm"] for', 'fmean(step["grad_norm"] for'),
        ("length of answers per turn", "tokens / len(trajs)", "tokens / len(turns)"),
        ("thoughts are counted once each",
         "for thought in thoughts)", "for thought in set(thoughts))"),
    ],
    "support/cache.py": [
        ("temperature forgotten in the rollout",
         "logp = (logits.float() / cfg.temperature)", "logp = logits.float()"),
        ("logits after the pads of a shorter message",
         "[len(ids) - 1 for ids in new]", "[q - 1 for ids in new]"),
        ("pads are attended to",
         "> columns[:, None, :, None]", "> columns.amax(1)[:, None, None, None]"),
        ("a boolean attention mask", "attention_mask=-1e30 * ", "attention_mask=~"),
        ("new ids overwrite the last one that is cached",
         "self.columns = begin +", "self.columns = (begin - 1).clamp(0) +"),
    ],
    "support/chat.py": [
        ("a template's space stays behind an answer", 'return rest.lstrip(" ")', "return rest"),
        ("a message begins with a second BOS",
         "tok(rendered + first_tag, add_special_tokens=False)", "tok(rendered + first_tag)"),
        ("a model that changes its logits is accepted", 'gap < device.rounding("cpu")', "True"),
        ("words of an environment end its message",
         'text = text.replace(token, f"{token[0]} {token[1:]}")', "pass"),
    ],
    "support/folder.py": [
        ("--resume forgets the optimizer's memory",
         "part.load_state_dict(state[name])",
         'name == "optimizer" or part.load_state_dict(state[name])'),
        ("--resume forgets the critic",
         "part.load_state_dict(state[name])",
         'name == "critic" or part.load_state_dict(state[name])'),
        ("--resume forgets the reference",
         "part.load_state_dict(state[name])", 'name == "ref" or part.load_state_dict(state[name])'),
        ("--lr beside --resume has no effect",
         '        state["optimizer"]["param_groups"] = '
         'models.optimizer.state_dict()["param_groups"]\n',
         ""),
        ("--resume keeps rows that came after the checkpoint",
         'Path(cfg.out, "log.jsonl").write_text(log)',
         'log or Path(cfg.out, "log.jsonl").write_text(log)'),
    ],
    "support/loading.py": [
        ("a bf16 checkpoint is trained in bf16", "dtype=torch.float32", 'dtype="auto"'),
        ("dropout is on",
         "return network.to(cfg.device), ", "return network.train().to(cfg.device), "),
        ("the critic begins as another network",
         'return network.to(cfg.device), report["missing_keys"]',
         'if "num_labels" in options:\n'
         '        network.apply(lambda part: getattr(part, "reset_parameters", int)())\n'
         '    return network.to(cfg.device), report["missing_keys"]'),
        ("every model has the presets of tiny",
         'config.get("ragen_mini_presets") == "tiny"', "True"),
    ],
    "plots.py": [
        ("nine bad iterations at the end are a collapse",
         "len(success) - COLLAPSED_FOR + 1)", "len(success) - COLLAPSED_FOR + 2)"),
        ("a collapse is below the whole peak",
         "success < means[peak] / 2", "success < means[peak]"),
        ("one lucky rollout is a peak",
         "peak = means.argmax()", "peak = min(success.argmax(), len(means) - 1)"),
        ("a collapse may come before the peak",
         "for i in range(peak, len(success)", "for i in range(0, len(success)"),
        ("grey begins at the peak", "ax.axvspan(collapsed_at,", "ax.axvspan(peak_at,"),
        ("the evaluation panel shows success in training",
         "    for number, (label, run) in enumerate(runs.items()):\n"
         "        iterations, success = run.series(column)",
         "    for number, (label, run) in enumerate(runs.items()):\n"
         '        iterations, success = run.series("success")'),
        ("every panel shows the return",
         "iterations, values = run.series(column)", 'iterations, values = run.series("reward")'),
        ("labels of random and optimal swapped",
         "random, optimal = run.yardsticks[env]", "optimal, random = run.yardsticks[env]"),
        ("two runs swapped in the legend",
         "lw=2, label=label, **style)", "lw=2, label=list(runs)[-1 - number], **style)"),
        ("the interval of another number of levels",
         'interval(success, run.config["eval_prompts"])', "interval(success, 128)"),
        ("online-k counts iterations, not updates",
         'updates += row.get("updates", 0)', 'updates += "updates" in row'),
    ],
    "envs.py": [
        ("an environment's own success rate is overwritten",
         "if success_rate is not None and hasattr", "if hasattr"),
        ("yardsticks of one action less",
         "[value(env.state, left, max) for left in range(horizon + 1)]",
         "[value(env.state, left, max) for left in (0, *range(horizon))]"),
        ("held-out levels are trained on", "held_out == (seed in EVAL_SEEDS)", "True"),
        ("held-out levels differ between processes",
         "zlib.crc32(repr(drawn).encode()) % 4", "hash(repr(drawn)) % 4"),
        ("no hardest levels of Sokoban",
         "rng.integers(fewest, most + 1)", "rng.integers(fewest, most)"),
        ("two targets of Sokoban in one cell",
         "rng.choice(len(floor), boxes, replace=False)", "rng.choice(len(floor), boxes)"),
        ("levels and dice share their numbers",
         "default_rng([seed, episode, 1])", "default_rng([seed, episode])"),
        ("a lake of a third of holes",
         "frozen=0.8, success_rate=0.8):", "frozen=0.67, success_rate=0.8):"),
        ("a box may push another one",
         "if beyond not in floor or beyond in boxes:", "if beyond not in floor:"),
        ("the lake slips backwards", "(slip, -1), (slip, 1)", "(slip, 2), (slip, 1)"),
    ],
    "extras/torchrun.py": [
        ("every process takes every row", "mine = rows[RANK::PROCESSES]", "mine = rows"),
        ("gradients are not added up", "dist.all_reduce(weight.grad)", "pass"),
        ("each process divides by its own tokens", "weight.grad *= share", "pass"),
        ("the same dice in all processes", "sampling_seed + RANK", "sampling_seed"),
    ],
    "extras/check_model.py": [
        ("check_model accepts a model that looks back only a little",
         'gap < device.rounding("cpu")', "True"),
    ],
}


def misplaced(project):  # -> lines: pieces that do not stand in their file exactly once
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
    if done.returncode:  # not even that: the program could not be imported, for example
        sys.exit(f"{old!r} in {file}: the tests could not run\n{done.stdout[-500:]}")


def commit():
    def git(*args):
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()
    changed = git("status", "--porcelain", "--", ".", ":!figures")
    return git("rev-parse", "--short", "HEAD") + (" + changes" if changed else "")


def main(wanted):
    errors = misplaced(ROOT)
    if errors:
        sys.exit("\n".join(errors))
    chosen = [(file, *mutant) for file, mutants in MUTANTS.items() for mutant in mutants
              if wanted in mutant[0]]
    if not chosen:
        sys.exit(f"No mutant has {wanted!r} in its name: python extras/dev/mutants.py [PART]")
    lines = [f"python extras/dev/mutants.py, commit {commit()}: "
             f"which test fails first where the program is wrong?"]
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        free = queue.Queue()  # copies of the project, one for each core
        for core in range(os.cpu_count() or 1):
            free.put(shutil.copytree(ROOT, Path(folder, f"project{core}"), ignore=LEFT_OUT))

        def first_to_fail(mutant):
            file, _, old, new = mutant
            project = free.get()
            try:
                return killer(project, file, old, new)
            finally:
                free.put(project)

        with ThreadPoolExecutor(free.qsize()) as pool:
            unchanged = [(file, "", "", "") for file in dict.fromkeys(file for file, *_ in chosen)]
            for test in pool.map(first_to_fail, unchanged):
                if test:
                    sys.exit(f"{test} fails, although the program was not changed.")
            for (_, name, _, _), test in zip(chosen, pool.map(first_to_fail, chosen)):
                alive += test is None
                lines.append(f"{name}: caught by {test}" if test else f"{name}: SURVIVES")
                print(lines[-1], flush=True)
    lines.append(f"{len(chosen)} mutants, {alive} survive")
    print(lines[-1])
    if not wanted:  # all at once, so that the file is never half of one
        new_report = REPORT.with_suffix(".new")
        new_report.write_text("\n".join(lines) + "\n")
        os.replace(new_report, REPORT)
    return alive


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])) > 0)
