"""What students write: answers with one plausible mistake, and right ones that look different from the shipped functions.

WRONG: {exercise: [(words of the message that must appear, or "" where only the hidden checks find it; source), ...]}
RIGHT: {exercise: [source, ...]}. Where an answer differs from another in a word or two, it is made by `change`.
"""


def change(source, *pieces):
    for old, new in zip(pieces[::2], pieces[1::2]):
        assert old in source, old
        source = source.replace(old, new)
    return source


OUTCOMES = """
def outcomes(env, state, action):
    def land(move, chance):
        row, col = envs.shift(state, move)
        if not (0 <= row < env.size and 0 <= col < env.size):
            row, col = state
        goal = (row, col) == env.level["goal"]
        hole = (row, col) in env.level["holes"]
        return (chance, (row, col), 1.0 if goal else 0.0, goal or hole)
    k = env.actions.index(action)
    p = env.success_rate
    sides = [env.actions[(k + 1) % 4], env.actions[(k + 3) % 4]]
    return [land(action, p)] + [land(side, (1 - p) / 2) for side in sides]
"""

YARDSTICKS = """
def yardsticks(env, horizon):
    def V(state, over, h, best):
        if h == 0 or over:
            return float(env.won(state))
        if (state, h, best) not in known:
            Q = []
            for action in env.actions:
                Q.append(sum(p * V(new, end, h - 1, best) for p, new, _, end in env.outcomes(state, action)))
            known[state, h, best] = max(Q) if best else sum(Q) / len(Q)
        return known[state, h, best]
    known = {}
    return [[V(env.state, False, h, best) for h in range(horizon + 1)] for best in (False, True)]
"""

PARSE = r"""
def parse_answer(text, actions, limit):
    match = re.fullmatch(r"(?:<think>(.*?)</think>\s*)?<answer>(.*?)</answer>\s*", text, re.DOTALL)
    if match is None:
        return None
    if any(tag in (part or "") for part in match.groups() for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return None
    names = {a.lower(): a for a in actions}
    words = [w.strip().lower() for w in match.group(2).split("||")][:limit]
    if any(w not in names for w in words):
        return None
    return [names[w] for w in words]
"""

TRAJECTORY = """
class Trajectory(rm.Trajectory):
    def append(self, ids, sampled, logp=0.0):
        for token in ids:
            self.ids.append(token)
            self.mask.append(sampled)
            self.old_logp.append(logp)
            self.reward.append(0.0)
        if not sampled:
            self.answer_start = len(self.ids)
"""

COLLATE = """
def collate(trajs, device):
    T = max(len(t.ids) for t in trajs)
    out = {
        "inputs": torch.zeros(len(trajs), T - 1, dtype=torch.long),
        "targets": torch.zeros(len(trajs), T - 1, dtype=torch.long),
        "mask": torch.zeros(len(trajs), T - 1, dtype=torch.bool),
        "old_logp": torch.zeros(len(trajs), T - 1),
        "reward": torch.zeros(len(trajs), T - 1),
    }
    for row, traj in enumerate(trajs):
        n = len(traj.ids) - 1
        out["inputs"][row, :n] = torch.tensor(traj.ids[:-1])
        out["targets"][row, :n] = torch.tensor(traj.ids[1:])
        out["mask"][row, :n] = torch.tensor(traj.mask[1:])
        out["old_logp"][row, :n] = torch.tensor(traj.old_logp[1:])
        out["reward"][row, :n] = torch.tensor(traj.reward[1:])
    return out
"""

PAD_THEN_SLICE = """
def collate(trajs, device):
    whole = {}
    for key in ("ids", "mask", "old_logp", "reward"):
        rows = [torch.tensor(getattr(traj, key)) for traj in trajs]
        whole[key] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    ids = whole.pop("ids")
    batch = {key: x[:, 1:] for key, x in whole.items()}
    return batch | {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
"""

LOGPS = """
def token_logps(policy, part, cfg):
    logits = policy(input_ids=part["inputs"]).logits[part["mask"]]
    targets = part["targets"][part["mask"]]
    probs = torch.softmax(logits / cfg.temperature, dim=-1)
    logp = torch.log(probs[torch.arange(len(targets)), targets])
    entropy = -(probs * torch.log(probs)).sum(dim=-1)
    return logp, entropy
"""

GRPO = """
def grpo_advantages(R, norm="std"):
    mean = R.mean(1).unsqueeze(1)
    std = R.std(1).unsqueeze(1)
    A = R - mean
    if norm == "std":
        A = A / (std + 1e-6)
    A[(std < 1e-4).expand_as(A)] = 0
    return A
"""

FILTER = """
def uncertainty_filter(R, keep):
    k = max(1, int(len(R) * keep + 1e-9))
    return torch.topk(R.std(dim=1), k).indices
"""

GAE = """
def gae(reward, value, mask, gamma, lam):
    advantage = torch.zeros_like(value)
    ret = torch.zeros_like(value)
    for b in range(len(value)):
        A, v = 0.0, 0.0
        for t in range(value.shape[1] - 1, -1, -1):
            if mask[b, t]:
                delta = reward[b, t] + gamma * v - value[b, t]
                A = delta + gamma * lam * A
                v = value[b, t]
                advantage[b, t] = A
                ret[b, t] = A + v
    return advantage, ret
"""

LOSS = """
def policy_loss(logp, entropy, old_logp, adv, cfg):
    ratio = torch.exp(logp - old_logp)
    a = ratio * adv
    b = torch.clamp(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high) * adv
    return -torch.minimum(a, b) - cfg.entropy_coef * entropy, b < a
"""

VALUE = """
def value_loss(value, old_value, ret):
    clipped = torch.clamp(value, old_value - rm.VALUE_CLIP, old_value + rm.VALUE_CLIP)
    return 0.5 * torch.maximum((value - ret).square(), (clipped - ret).square())
"""

GRADIENTS = """
def add_gradients(batch, rows, models, cfg):
    count = batch["mask"][rows].sum()
    for some, part in rm.micro_batches(batch, rows):
        mask = part["mask"]
        logp, entropy = rm.token_logps(models.policy, part, cfg)
        loss = rm.policy_loss(logp, entropy, part["old_logp"][mask], part["adv"][mask], cfg)[0].sum()
        if models.critic is not None:
            value = rm.token_values(models.critic, part)
            loss = loss + rm.value_loss(value, part["value"][mask], part["ret"][mask]).sum()
        (loss / count).backward()
    return {"loss": float(loss)}
"""

BY_LOSSES = """
def add_gradients(batch, rows, models, cfg):
    stats = {}
    count = int(batch["mask"][rows].sum())
    for some, part in rm.micro_batches(batch, rows):
        mask = part["mask"]
        logp, entropy = rm.token_logps(models.policy, part, cfg)
        found = [rm.policy_loss(logp, entropy, part["old_logp"][mask], part["adv"][mask], cfg)[0]]
        if models.critic is not None:
            found.append(rm.value_loss(rm.token_values(models.critic, part), part["value"][mask], part["ret"][mask]))
        for i, x in enumerate(found):
            (x.sum() / count).backward()
            stats[i] = stats.get(i, 0.0) + float(x.sum()) / count
    return stats
"""

STEP = """
def take_step(models, cfg):
    norms = [torch.nn.utils.clip_grad_norm_(g["params"], rm.MAX_GRAD_NORM) for g in models.optimizer.param_groups]
    models.optimizer.step()
    models.optimizer.zero_grad()
    return float(norms[0])
"""

COLLAPSE = """
def collapse(log):
    moved = {}
    for name in ("entropy", "reward_std", "valid"):
        band = np.median([row[name] for row in log[15:26]])
        for row in log[26:]:
            i = row["iteration"]
            now = np.median([log[j][name] for j in range(i - 4, i + 1)])
            if name not in moved and (now > 2 * band or now < band / 2):
                moved[name] = i
    return sorted(moved, key=moved.get)
"""

PPO = """
def compute_advantages(trajs, R, models, cfg):
    batch = rm.collate(trajs, cfg.device)
    mask = batch["mask"]
    penalty = torch.zeros_like(batch["reward"])
    if models.ref is not None:
        batch["kl"] = batch["old_logp"] - rm.on_grid(lambda part: rm.token_logps(models.ref, part, cfg)[0], batch)
        penalty = -cfg.kl_coef * batch["kl"] * mask
    if cfg.algo != "ppo":
        later = penalty.sum(1, keepdim=True) - penalty.cumsum(1) + penalty
        batch["adv"] = (rm.grpo_advantages(R, cfg.adv_norm).view(-1, 1) + later) * mask
        return batch
    batch["value"] = rm.on_grid(lambda part: rm.token_values(models.critic, part), batch)
    adv, batch["ret"] = rm.gae(batch["reward"] + penalty, batch["value"], mask, cfg.gamma, cfg.lam)
    ours = adv[mask]
    batch["adv"] = torch.where(mask, (adv - ours.mean()) / (ours.std(correction=0) + 1e-8), 0.0)
    return batch
"""

SAMPLE = """
def sample(trajs, logp, generator):
    for traj, row in zip(trajs, logp):
        token = int(torch.multinomial(row.exp(), 1, generator=generator))
        traj.cached = len(traj.ids)
        traj.append([token], True, row[token].item())
        traj.entropy += float(rm.entropy_of(row[None]))
"""

RIGHT = {
    "outcomes": [OUTCOMES, change(OUTCOMES, "(k + 1) % 4], env.actions[(k + 3) % 4]", "(k - 1) % 4], env.actions[k - 3]")],
    "yardsticks": [YARDSTICKS, change(YARDSTICKS, "return [[", "return np.array([[", "(False, True)]", "(False, True)])")],
    "parse_answer": [PARSE],
    "Trajectory": [TRAJECTORY],
    "collate": [COLLATE, change(COLLATE, "torch.zeros(len(trajs), T - 1)",
        "torch.zeros(len(trajs), T - 1, dtype=torch.float64)"), PAD_THEN_SLICE],
    "token_logps": [LOGPS, """
def token_logps(policy, part, cfg):
    hidden = policy.base_model(input_ids=part["inputs"]).last_hidden_state[part["mask"]]
    choice = torch.distributions.Categorical(logits=policy.get_output_embeddings()(hidden).double() / cfg.temperature)
    return choice.log_prob(part["targets"][part["mask"]]), choice.entropy()
"""],
    "grpo_advantages": [GRPO, """
def grpo_advantages(R, norm="std"):
    R = R - R.mean(1, keepdim=True)  # a new one, that may be changed
    for row in R:
        std = row.std()
        if norm == "std":
            row /= std + 1e-6
        if std < 1e-4:
            row[:] = 0
    return R
""", change(GRPO, "mean = R", "R = R.double()\n    mean = R")],
    "uncertainty_filter": [FILTER, change(FILTER, "R.std(dim=1)", "R.var(dim=1)"), """
def uncertainty_filter(R, keep):
    order = sorted(range(len(R)), key=lambda i: -float(R[i].std(correction=0)))
    return torch.tensor(order[:max(1, int(keep * len(R) + 1e-9))])
"""],
    "gae": [GAE, change(GAE, "torch.zeros_like(value)", "torch.zeros_like(value, dtype=torch.float64)")],
    "policy_loss": [LOSS, change(LOSS, "-torch.minimum(a, b)", "torch.maximum(-a, -b)"),
                    change(LOSS, "b < a", "((ratio > 1 + cfg.clip_high) & (adv > 0)) | ((ratio < 1 - cfg.clip_low) & (adv < 0))")],
    "value_loss": [VALUE],
    "add_gradients": [GRADIENTS, BY_LOSSES],
    "take_step": [STEP],
    "moves": ["from exercises import solve\n\n\ndef moves():\n    room = envs.make('sokoban')\n    room.reset(7)\n"
              "    return tuple(['Up'] + solve(room))"],  # a detour
    "paradox": ["def paradox():\n    return [0.075, -0.75]"],
    "collapse": [COLLAPSE, "def collapse(log):\n    return ('entropy', 'valid')"],
    "compute_advantages": [PPO],
    "sample": [SAMPLE],
}

CHANGED = "is another one afterwards"


def changing(name, parameters, first):  # the shipped function, after a line that changes an input
    return f"""
def {name}({parameters}):
    {first}
    return rm.{name}({parameters})
"""


WRONG = {
    "outcomes": [
        ("nothing slip", change(OUTCOMES, " + [land(side, (1 - p) / 2) for side in sides]", "", "land(action, p)",
         "land(action, 1.0)")),
        ("more than 1", change(OUTCOMES, "(1 - p) / 2", "1 - p")),
        ("slip backwards", change(OUTCOMES, "(k + 1) % 4], env.actions[(k + 3) % 4]",
         "(k + 2) % 4], env.actions[(k + 2) % 4]")),
        ("falls off the edge", change(OUTCOMES, "row, col = state", "pass")),
        ("holes do not end", change(OUTCOMES, "goal or hole", "goal")),
        ("only the goal pays", change(OUTCOMES, "1.0 if goal", "1.0 if goal or hole")),
        ("the goal ends the episode", change(OUTCOMES, "goal or hole", "hole")),
        ("line", change(OUTCOMES, "env.level[\"goal\"]", "env.goal"))],
    "yardsticks": [
        ("0 actions left", change(YARDSTICKS, "range(horizon + 1)", "range(1, horizon + 1)")),
        ("mean over his actions", change(YARDSTICKS, "max(Q) if best else sum(Q) / len(Q)", "max(Q)")),
        ("takes the maximum", change(YARDSTICKS, "max(Q) if best else sum(Q) / len(Q)", "sum(Q) / len(Q)")),
        ("probabilities", change(YARDSTICKS, "p * V", "V")),
        ("random comes first", change(YARDSTICKS, "(False, True)]", "(True, False)]")),
        ("play on after the end", change(YARDSTICKS, "h == 0 or over", "h == 0")),
        ("nothing was returned", change(YARDSTICKS, "return [[", "curves = [[")),
        ("Yours", change(YARDSTICKS, "sum(p * V(new, end, h - 1, best) for p, new, _, end in env.outcomes(state, action))",
                         "V(*[(new, end) for p, new, _, end in env.outcomes(state, action)][0], h - 1, best)"))],
    "parse_answer": [
        ("text behind the answer", change(PARSE, "fullmatch", "match")),
        ("behind and before", change(PARSE, "fullmatch", "search")),
        ("`limit`", change(PARSE, "[:limit]", "")),
        ("same word", change(PARSE, ".strip().lower()", ".strip()", "a.lower()", "a")),
        ("invalid as a whole", change(PARSE, "    if any(w not in names for w in words):\n        return None\n", "",
         "for w in words]", "for w in words if w in names]")),
        ("as the world writes it", change(PARSE, "[names[w] for w in words]", "words")),
        ("blanks around", change(PARSE, "w.strip().lower()", "w.lower()")),
        ("not an empty list", change(PARSE, "if match is None:\n        return None",
         "if match is None:\n        return []")),
        ("may hold <", change(PARSE, "(.*?)</think>", "([^<]*)</think>")),
        ("several lines", change(PARSE, ', re.DOTALL', '')),
        ("no tag may stand", change(PARSE, 'tag in ("<think>", "</think>", "<answer>", "</answer>")', 'tag in ("<think>",)',
         ">(.*?)</answer>", ">(.*)</answer>")),
        ("without a thought", change(PARSE, r"(?:<think>(.*?)</think>\s*)?<", r"<think>(.*?)</think>\s*<")),
        ("blanks inside an action", change(PARSE, "w.strip().lower()", 'w.replace(" ", "").lower()')),
        ("", change(PARSE, "re.DOTALL", "re.DOTALL | re.I")),
        ("no tag may stand inside the thought", change(PARSE, "if any(tag", "if False and any(tag")),
        ("no tag may stand inside the thought", change(PARSE, "match.groups() for tag", "[match.group(2)] for tag")),
        ("white space neither", change(PARSE, 'r"(?:', r'r"\s*(?:')),
        ("behind the first `limit`", change(PARSE, '[:limit]', '', 'for w in words]', 'for w in words][:limit]')),
        ("empty action", change(PARSE, '.split("||")]', '.split("||") if w.strip()]')),
        ("nothing was returned", change(PARSE, "return [names", "[names")),
        ("", change(PARSE, "for a in actions", 'for a in ("Up", "Down", "Left", "Right")'))],
    "Trajectory": [
        ("train the world's tokens", change(TRAJECTORY, "append(sampled)", "append(True)")),
        ("end of turn is not trained", change(TRAJECTORY, "append(sampled)", "append(sampled and token != 0)")),
        ("appended", change(TRAJECTORY, "        for token in ids:",
         "        if not sampled:\n            self.ids = []\n        for token in ids:")),
        ("old_logp, 0", change(TRAJECTORY, "            self.old_logp.append(logp)\n",
         "            if sampled:\n                self.old_logp.append(logp)\n")),
        ("world's tokens need a reward, 0", change(TRAJECTORY, "            self.reward.append(0.0)\n",
         "            if sampled:\n                self.reward.append(0.0)\n")),
        ("entries", change(TRAJECTORY, "            self.mask.append(sampled)\n", "", "            self.old_logp.append(logp)\n", "",
         "            self.reward.append(0.0)\n",
         "        self.mask.append(sampled)\n        self.old_logp.append(logp)\n        self.reward.append(0.0)\n")),
        ("answer_start", change(TRAJECTORY, "            self.answer_start = len(self.ids)\n", "            pass\n")),
        ("*next* answer", change(TRAJECTORY, "            self.answer_start = len(self.ids)\n", "            pass\n",
         "        for token in ids:",
         "        if not sampled:\n            self.answer_start = len(self.ids)\n        for token in ids:")),
        ("moves with every token", change(TRAJECTORY, "        if not sampled:\n            self", "        self")),
        ("belongs into old_logp", change(TRAJECTORY, "append(logp)", "append(0.0)"))],
    "collate": [
        ("the mask is one column off", change(COLLATE, "traj.mask[1:]", "traj.mask[:-1]")),
        ("*next* tokens", change(COLLATE, "traj.ids[1:]", "traj.ids[:-1]")),
        ("rewards are one column off", change(COLLATE, "traj.reward[1:]", "traj.reward[:-1]")),
        ("old log-probabilities are one column off", change(COLLATE, "traj.old_logp[1:]", "traj.old_logp[:-1]")),
        ("padding", change(COLLATE, "torch.tensor(traj.mask[1:])",
         "torch.tensor(traj.mask[1:]) & (torch.tensor(traj.ids[1:]) != 0)")),
        ("world's tokens are trained", change(COLLATE, "torch.tensor(traj.mask[1:])", "True")),
        ("bools", change(COLLATE, "dtype=torch.bool", "dtype=torch.long")),
        ("Yours", change(COLLATE, "[row, :n]", "[row, -n:]"))],
    "token_logps": [
        ("temperature is missing", change(LOGPS, " / cfg.temperature", "")),
        ("*divided*", change(LOGPS, " / cfg.temperature", " * cfg.temperature")),
        ("then log_softmax", """
def token_logps(policy, part, cfg):
    logp = torch.log_softmax(policy(input_ids=part["inputs"]).logits[part["mask"]], dim=-1) / cfg.temperature
    targets = part["targets"][part["mask"]]
    return logp[torch.arange(len(targets)), targets], -(logp.exp() * logp).sum(-1)
"""),
        ("only the tokens that the model wrote", change(LOGPS, '.logits[part["mask"]]', ".logits.flatten(0, 1)",
         'part["targets"][part["mask"]]', 'part["targets"].flatten()')),
        ("what was read", change(LOGPS, 'part["targets"]', 'part["inputs"]')),
        ("wrong sign", change(LOGPS, "-(probs", "(probs")),
        ("over the vocabulary", change(LOGPS, "temperature, dim=-1", "temperature, dim=0")),
        ("not of the likeliest", change(LOGPS, "torch.arange(len(targets)), targets",
         "torch.arange(len(targets)), probs.argmax(1)")),
        ("that is -log pi", change(LOGPS, "entropy = -(probs * torch.log(probs)).sum(dim=-1)", "entropy = -logp")),
        ("not a mean", change(LOGPS, ".sum(dim=-1)", ".mean(dim=-1)")),
        ("not its logarithm", change(LOGPS, "torch.log(probs[torch.arange(len(targets)), targets])",
         "probs[torch.arange(len(targets)), targets]")),
        ("was something detached", change(LOGPS, "torch.log(probs[torch", "torch.log(probs.detach()[torch")),
        ("Yours", change(LOGPS, ".sum(dim=-1)", ".sum()"))],
    "grpo_advantages": [
        ("over the batch, not over the group",
         change(GRPO, "R.mean(1).unsqueeze(1)", "R.mean()", "std = R.std(1).unsqueeze(1)",
          "std = R.std() + torch.zeros(len(R), 1)")),
        ("mean is that of the batch", change(GRPO, "R.mean(1).unsqueeze(1)", "R.mean()")),
        ("std is that of the batch", change(GRPO, "std = R.std(1).unsqueeze(1)", "std = R.std() + torch.zeros(len(R), 1)")),
        ("dimension 0", change(GRPO, "R.mean(1).unsqueeze(1)", "R.mean(0)", "R.std(1).unsqueeze(1)", "R.std(0)")),
        ("population", change(GRPO, "R.std(1)", "R.std(1, unbiased=False)")),
        ("rounding noise", change(GRPO, "    A[(std < 1e-4).expand_as(A)] = 0\n", "")),
        ("mean of the group is not subtracted", change(GRPO, "A = R - mean", "A = R")),
        ("variance", change(GRPO, "A / (std", "A / (std ** 2")),
        ("only subtracts", change(GRPO, 'if norm == "std":', "if True:")),
        (CHANGED, change(GRPO, "A = R - mean", "R -= mean\n    A = R"))],
    "uncertainty_filter": [
        ("*least* uncertain", change(FILTER, "k).indices", "k, largest=False).indices")),
        ("best returns", change(FILTER, "R.std(dim=1)", "R.mean(dim=1)")),
        ("largest return", change(FILTER, "R.std(dim=1)", "R.max(dim=1).values")),
        ("Yours", change(FILTER, "R.std(dim=1)",
         "((R - R.mean(1, keepdim=True)) / (R.std(1, keepdim=True) + 1e-6)).std(dim=1)")),
        ("at least one", change(FILTER, "max(1, int(len(R) * keep + 1e-9))", "int(len(R) * keep + 1e-9)")),
        ("rounded down", change(FILTER, "int(len(R) * keep + 1e-9)", "math.ceil(len(R) * keep)")),
        ("order of their numbers", change(FILTER, "torch.topk(R.std(dim=1), k).indices", "torch.arange(k)")),
        ("numbers of the kept", change(FILTER, ".indices", ".values")),
        (CHANGED, changing("uncertainty_filter", "R, keep", "R -= R.mean()"))],
    "gae": [
        ("walk over the environment's tokens", change(GAE, "if mask[b, t]:", "if True:")),
        ("bootstrap through", change(GAE, "                v = value[b, t]\n", "", "                ret[b, t] = A + v\n",
         "                ret[b, t] = A + value[b, t]\n            v = value[b, t]\n")),
        ("must not discount", change(GAE, "                ret[b, t] = A + v\n",
         "                ret[b, t] = A + v\n            else:\n                A = gamma * lam * A\n")),
        ("ret should be 0 at", change(GAE, "                advantage[b, t] = A\n                ret[b, t] = A + v\n",
         "            advantage[b, t] = A\n            ret[b, t] = A + value[b, t]\n")),
        ("starts anew", change(GAE, "                ret[b, t] = A + v\n",
         "                ret[b, t] = A + v\n            else:\n                A = 0.0\n")),
        ("lambda is missing", change(GAE, "gamma * lam * A", "gamma * A")),
        ("before A_t'", change(GAE, "gamma * lam * A", "lam * A")),
        ("before v_t'", change(GAE, "gamma * v -", "v -")),
        ("v_t is not subtracted", change(GAE, " + gamma * v - value[b, t]", "")),
        ("next value is missing", change(GAE, " + gamma * v", "")),
        ("*plus*", change(GAE, "ret[b, t] = A + v", "ret[b, t] = A - v")),
        ("ret is not the advantage", change(GAE, "ret[b, t] = A + v", "ret[b, t] = A")),
        ("walk forwards", change(GAE, "range(value.shape[1] - 1, -1, -1)", "range(value.shape[1])")),
        (CHANGED, changing("gae", "reward, value, mask, gamma, lam", "value *= mask"))],
    "policy_loss": [
        ("symmetric", change(LOSS, "1 + cfg.clip_high", "1 + cfg.clip_low")),
        ("`max` instead of `min`", change(LOSS, "torch.minimum", "torch.maximum")),
        ("nothing is clipped", change(LOSS, "torch.clamp(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high)", "ratio")),
        ("only the clipped term", change(LOSS, "-torch.minimum(a, b)", "-b")),
        ("is exp of", change(LOSS, "torch.exp(logp - old_logp)", "1 + (logp - old_logp)")),
        ("upside down", change(LOSS, "logp - old_logp)", "old_logp - logp)")),
        ("must be negated", change(LOSS, "-torch.minimum", "torch.minimum")),
        ("it is a bonus", change(LOSS, "- cfg.entropy_coef", "+ cfg.entropy_coef")),
        ("bonus is missing", change(LOSS, " - cfg.entropy_coef * entropy", "")),
        ("Yours", change(LOSS, "entropy, b < a", "entropy.mean(), b < a")),
        ("gradient at the entropy", change(LOSS, "cfg.entropy_coef * entropy", "cfg.entropy_coef * entropy.detach()")),
        (CHANGED, changing("policy_loss", "logp, entropy, old_logp, adv, cfg", "adv *= 2"))],
    "value_loss": [
        ("not clipped", change(VALUE, "torch.maximum((value - ret).square(), (clipped - ret).square())",
         "(value - ret).square()")),
        ("max, not min", change(VALUE, "torch.maximum", "torch.minimum")),
        ("only the clipped", change(VALUE, "torch.maximum((value - ret).square(), (clipped - ret).square())",
         "(clipped - ret).square()")),
        ("half is missing", change(VALUE, "0.5 * ", "")),
        ("*change* of the forecast", change(VALUE, "old_value - rm.VALUE_CLIP, old_value + rm.VALUE_CLIP",
         "-rm.VALUE_CLIP, rm.VALUE_CLIP")),
        ("squared", change(VALUE, ".square()", ".abs()")),
        ("gradient", change(VALUE, "def value_loss(value, old_value, ret):\n", "def value_loss(value, old_value, ret):\n    value = value.detach()\n")),
        (CHANGED, changing("value_loss", "value, old_value, ret", "ret += 1")),
        ("shape", change(VALUE, "(value - ret).square(), (clipped - ret).square())",
         "(value - ret).square(), (clipped - ret).square()).mean()"))],
    "add_gradients": [
        ("*all* parts", change(GRADIENTS, "(loss / count)", "(loss / mask.sum())")),
        ("rows times columns", change(GRADIENTS, 'batch["mask"][rows].sum()', 'batch["mask"][rows].numel()')),
        ("whole batch", change(GRADIENTS, 'batch["mask"][rows].sum()', 'batch["mask"].sum()')),
        ("number of trajectories", change(GRADIENTS, 'batch["mask"][rows].sum()', "len(rows)")),
        ("critic is not trained", change(GRADIENTS, "if models.critic is not None:", "if False:")),
        ("`backward` is missing", change(GRADIENTS, "(loss / count).backward()", "loss / count")),
        ("all rows of the batch", change(GRADIENTS, "rm.micro_batches(batch, rows)",
         'rm.micro_batches(batch, range(len(batch["mask"])))')),
        ("parts' means", change(GRADIENTS, "(loss / count)", "(loss / mask.sum() / parts)", "    count =",
         "    parts = len(list(rm.micro_batches(batch, rows)))\n    count =")),
        ("critic's loss is not divided", change(BY_LOSSES, "x.sum() / count)",
         '(x.sum() / count if i == 0 else x.mean()))')),
        ("of add_gradients: 'NoneType'", change(GRADIENTS, "if models.critic is not None:", "if True:")),
        ("nothing was returned", change(GRADIENTS, 'return {"loss"', '{"loss"')),
        ("Yours", change(GRADIENTS, "        (loss / count).backward()\n", "", "    return", "    (loss / count).backward()\n    return"))],
    "take_step": [
        ("each network's gradient", change(STEP, 'clip_grad_norm_(g["params"], rm.MAX_GRAD_NORM) for g in models.optimizer.param_groups]',
         'clip_grad_norm_([w for g in models.optimizer.param_groups for w in g["params"]], rm.MAX_GRAD_NORM)]')),
        ("MAX_GRAD_NORM", change(STEP, '(g["params"], rm.MAX_GRAD_NORM)', '(g["params"], 1e9)')),
        ("critic's gradient is not", change(STEP, "param_groups]", "param_groups[:1]]")),
        ("zero_grad", change(STEP, "    models.optimizer.zero_grad()\n", "")),
        ("before the step", change(STEP, "    models.optimizer.zero_grad()\n", "", "    models.optimizer.step()\n",
         "    models.optimizer.zero_grad(set_to_none=False)\n    models.optimizer.step()\n")),
        ("never steps", change(STEP, "    models.optimizer.step()\n", "")),
        ("policy's is wanted", change(STEP, "norms[0]", "norms[-1]")),
        ("nothing was returned", change(STEP, "return float(norms[0])", "float(norms[0])"))],
    "moves": [("Yours", "def moves():\n    return ['Up'] * 10"), ("jump", "def moves():\n    return ['jump']")],
    "settings": [("Yours", "def settings():\n    return dict(env='sokoban', iterations=500)"),
                 ("Yours", "def settings():\n    return dict(env='sokoban', iterations=5, eval_every=0)"),
                 ("chess", "def settings():\n    return dict(env='chess')"),
                  ("unexpected", "def settings():\n    return dict(world='sokoban')")],
    "paradox": [("Yours", "def paradox():\n    return 0.075, 0.75"), ("2 things", "def paradox():\n    return 0.075"),
                ("population", "def paradox():\n    return 0.075, -0.866"), ("comes first", "def paradox():\n    return -0.75, 0.075")],
    "collapse": [("Yours", "def collapse(log):\n    return ['entropy', 'valid', 'grad_norm']"),
                 ("wrong way round", "def collapse(log):\n    return ['valid', 'entropy']"),
                 ("median over five", change(COLLAPSE, "i - 4, i", "i, i"))],
    "compute_advantages": [
        ("the std is still", change(PPO, "ours.std(", "adv.std(")), ("the mean is still", change(PPO, "ours.mean()", "adv.mean()")),
        ("it is added", change(PPO, "+ penalty", "- penalty"))],
    "returns": [("still", "def returns(trajs, cfg):\n    R = torch.tensor([traj.R for traj in trajs])\n    return R.view(cfg.rollouts, -1).T"),
                ("shape", "def returns(trajs, cfg):\n    return torch.tensor([traj.R for traj in trajs]).view(cfg.rollouts, -1)")],
}
