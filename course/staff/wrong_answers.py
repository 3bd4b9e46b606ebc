"""What students write: answers with one plausible mistake, and right ones in another style than the shipped functions.
The usual mistakes of exercises.py are wrong answers, too; but for the first of each exercise, only others are here.

WRONG: {exercise: [(words of the message that must appear, or "" where only the hidden checks find it; source), ...]}
RIGHT: {exercise: [source, ...]}. Where an answer differs from another in a word or two, it is made by `change`.
"""
from exercises import BUGS
from staff import answers


def change(source, *pieces):
    for old, new in zip(pieces[::2], pieces[1::2]):
        assert old in source, old
        source = source.replace(old, new)
    return source


def repaired(name):
    """A cell of the bug hunt, with its line as the shipped function has it."""
    cell = next(cell for cell in answers.notebook()["cells"] if cell["id"] == f"{name}-answer")
    right, wrong = BUGS[name]
    return change("".join(cell["source"]), wrong, right)


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
    return {name: x.to(device) for name, x in out.items()}
"""

PAD_THEN_SLICE = """
def collate(trajs, device):
    whole = {}
    for key in ("ids", "mask", "old_logp", "reward"):
        rows = [torch.tensor(getattr(traj, key)) for traj in trajs]
        whole[key] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    ids = whole.pop("ids")
    batch = {key: x[:, 1:] for key, x in whole.items()} | {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    return {key: x.to(device) for key, x in batch.items()}
"""

LOGPS = """
def token_logps(policy, part, cfg):
    logits = policy(input_ids=part["inputs"]).logits[part["mask"]]
    targets = part["targets"][part["mask"]]
    logp = torch.log_softmax(logits / cfg.temperature, dim=-1)
    entropy = -(logp.exp() * logp).sum(dim=-1)
    return logp[torch.arange(len(targets)), targets], entropy
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
        band = np.median([row[name] for row in log[130:146]])
        for row in log[146:]:
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

DRAWN, TURN = repaired("sample"), repaired("take_turn")
DRAW = BUGS["sample"][0]
RETURNS = "def returns(trajs, cfg):\n    return torch.tensor([traj.R for traj in trajs]).view(-1, cfg.rollouts)"

RIGHT = {
    "outcomes": [OUTCOMES, change(OUTCOMES, "(k + 1) % 4], env.actions[(k + 3) % 4]",
                                  "(k - 1) % 4], env.actions[k - 3]")],
    "yardsticks": [YARDSTICKS, change(YARDSTICKS, "return [[", "return np.array([[", "(False, True)]",
                                      "(False, True)])")],
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
""", change(GRPO, "mean = R", "R = R.double()\n    mean = R"), """
def grpo_advantages(R, norm="std"):
    x = R.numpy() - R.numpy().mean(axis=1, keepdims=True)
    std = R.numpy().std(axis=1, ddof=1, keepdims=True)
    if norm == "std":
        x = np.where(std < 1e-4, 0, x / (std + 1e-6))
    return torch.from_numpy(x * (std >= 1e-4))
"""],
    "uncertainty_filter": [FILTER, change(FILTER, "R.std(dim=1)", "R.var(dim=1)"), """
def uncertainty_filter(R, keep):
    order = sorted(range(len(R)), key=lambda i: -float(R[i].std(correction=0)))
    return torch.tensor(order[:max(1, int(keep * len(R) + 1e-9))])
"""],
    "gae": [GAE, change(GAE, "torch.zeros_like(value)", "torch.zeros_like(value, dtype=torch.float64)")],
    "policy_loss": [LOSS, change(LOSS, "-torch.minimum(a, b)", "torch.maximum(-a, -b)"),
                    change(LOSS, "b < a",
                           "((ratio > 1 + cfg.clip_high) & (adv > 0)) | ((ratio < 1 - cfg.clip_low) & (adv < 0))")],
    "value_loss": [VALUE, change(VALUE, "(value - ret)", "(value.double() - ret)")],
    "add_gradients": [GRADIENTS, BY_LOSSES],
    "take_step": [STEP],
    "moves": ["from exercises import solve\n\n\ndef moves():\n    room = envs.make('sokoban')\n    room.reset(7)\n"
              "    return tuple(['Up'] + solve(room))"],  # a detour
    "paradox": ["def paradox():\n    return [0.075, -0.75]"],
    "collapse": [COLLAPSE, "def collapse(log):\n    return ('entropy', 'valid', 'reward_std')"],
    "compute_advantages": [PPO],
    "sample": [SAMPLE,
               change(DRAWN, DRAW, "torch.rand(len(logp), 1, generator=generator)\n"
                      "    tokens = (logp.exp().cumsum(1)[:, :-1] < tokens).sum(1, keepdim=True)"),
               change(DRAWN, DRAW,
                      "(logp.double() - torch.rand(logp.shape, generator=generator).double().log().neg().log())"
                      ".argmax(1, keepdim=True)")],
    "returns": [RETURNS, "def returns(trajs, cfg):\n    N = cfg.rollouts\n    rows = range(0, len(trajs), N)\n"
                "    return torch.tensor(np.array([[traj.R for traj in trajs[i:i + N]] for i in rows]))"],
    "take_turn": [repaired("take_turn")],
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
        ("line", change(OUTCOMES, "env.level[\"goal\"]", "env.goal")),
        ("", change(OUTCOMES, "env.size", "4")),
        ("", change(OUTCOMES, " for side in sides]", " for side in sides if p < 1]")),
        ("cell: chance", change(OUTCOMES, "env.success_rate", "0.8")),
        ("cell: chance", change(OUTCOMES, "(chance, (row, col)", "(chance, [row, col]")),
        ("cell: chance", change(OUTCOMES, "1.0 if goal else 0.0", "1.0 if goal else -1.0 if hole else 0.0")),
        ("intended", change(OUTCOMES, "[land(action, p)] + [land(side, (1 - p) / 2) for side in sides]",
         "[land(side, (1 - p) / 2) for side in sides] + [land(action, p)]")),
        (CHANGED, change(OUTCOMES, "    k = env", "    env.state = state[::-1]\n    k = env"))],
    "yardsticks": [
        ("0 actions left", change(YARDSTICKS, "range(horizon + 1)", "range(1, horizon + 1)")),
        ("nothing was returned", change(YARDSTICKS, "return [[", "curves = [[")),
        ("Yours",
         change(YARDSTICKS, "sum(p * V(new, end, h - 1, best) for p, new, _, end in env.outcomes(state, action))",
                         "V(*[(new, end) for p, new, _, end in env.outcomes(state, action)][0], h - 1, best)")),
        ("", change(YARDSTICKS, "h == 0 or over", "h == 0 or over or env.won(state)")),
        ("random", change(YARDSTICKS, "len(Q)", "4")),
        ("optimal", change(YARDSTICKS, "            return float(env.won(state))",
                           "            return float(h == 0 and env.won(state))")),
        (CHANGED, change(YARDSTICKS, "    return [[V", "    env.state = None\n    return [[V", "V(env.state", "V(begin",
         "    known = {}", "    known, begin = {}, env.state"))],
    "parse_answer": [
        ("text behind the answer", change(PARSE, "fullmatch", "match")),
        ("behind and before", change(PARSE, "fullmatch", "search")),
        ("not an empty list", change(PARSE, "if match is None:\n        return None",
         "if match is None:\n        return []")),
        ("no tag may stand", change(PARSE, 'tag in ("<think>", "</think>", "<answer>", "</answer>")',
                                    'tag in ("<think>",)',
         ">(.*?)</answer>", ">(.*)</answer>")),
        ("", change(PARSE, "re.DOTALL", "re.DOTALL | re.I")),
        ("nothing was returned", change(PARSE, "return [names", "[names")),
        ("", change(PARSE, "for a in actions", 'for a in ("Up", "Down", "Left", "Right")')),
        ("", change(PARSE, "match = re", "text = text.lower()\n    match = re")),
        ("", change(PARSE, 'split("||")', 'replace(" | ", "||").split("||")')),
        ("", change(PARSE, 'split("||")', 'replace(",", "||").split("||")')),
        ("", change(PARSE, "names[w] for w", "w.title() for w")),
        ("`limit`", change(PARSE, "[:limit]", "[:5]"))],
    "Trajectory": [
        ("train the world's tokens", change(TRAJECTORY, "append(sampled)", "append(True)")),
        ("first message", change(TRAJECTORY, "for token in ids:", "while ids:\n            token = ids.pop(0)")),
        ("ids", change(TRAJECTORY, "append(token)", "append(float(token))")),
        ("mask", change(TRAJECTORY, "append(sampled)", "append(int(sampled))")),
        ("old_logp", change(TRAJECTORY, "append(logp)", "append(-logp)")),
        ("reward", change(TRAJECTORY, "append(0.0)", "append(logp)")),
        ("", change(TRAJECTORY, "append(sampled)", "append(logp != 0)")),
        ("answer_start", change(TRAJECTORY, "if not sampled:", "if not sampled and not self.answer_start:"))],
    "collate": [
        ("the mask is one column off", change(COLLATE, "traj.mask[1:]", "traj.mask[:-1]")),
        ("bools", change(COLLATE, "dtype=torch.bool", "dtype=torch.long")),
        ("Yours", change(COLLATE, "[row, :n]", "[row, -n:]")),
        ("whole numbers", change(COLLATE, "dtype=torch.long", "dtype=torch.float")),
        ("with a fraction", change(COLLATE, '"reward": torch.zeros(len(trajs), T - 1)',
                                   '"reward": torch.zeros(len(trajs), T - 1).long()')),
        (CHANGED, change(COLLATE, "        n = len", "        traj.mask.pop(0)\n        n = len", "traj.mask[1:]",
                         "traj.mask")),
        ("reward", change(COLLATE, "torch.tensor(traj.reward[1:])", "0.0\n        out['reward'][row, n - 1] = traj.R")),
        ("", change(COLLATE, "torch.tensor(traj.mask[1:])", "torch.tensor(traj.old_logp[1:]) != 0")),
        ("targets", change(COLLATE, "torch.tensor(traj.ids[1:])",
                           "torch.tensor(traj.ids[1:]) * torch.tensor(traj.mask[1:])")),
        ("", change(COLLATE, "    T = max", "    trajs = sorted(trajs, key=lambda traj: -len(traj.ids))\n    T = max")),
        ("mask", change(COLLATE, "torch.zeros(len(trajs), T - 1, dtype=torch.bool)",
                        "torch.ones(len(trajs), T - 1, dtype=torch.bool)"))],
    "token_logps": [
        ("temperature is missing", change(LOGPS, " / cfg.temperature", "")),
        ("softmax, then log", change(LOGPS, "torch.log_softmax(logits / cfg.temperature, dim=-1)",
         "torch.log(torch.softmax(logits / cfg.temperature, dim=-1))")),
        ("Yours", change(LOGPS, "torch.log_softmax(logits / cfg.temperature, dim=-1)",
         "torch.log(torch.softmax(logits / cfg.temperature, dim=-1) + 1e-8)")),
        ("gradient", change(LOGPS, "(logp.exp() * logp)", "(logp.exp() * logp).detach()")),
        ("gradient", change(LOGPS, "logp.exp() * logp", "logp.detach().exp() * logp")),
        ("Yours", change(LOGPS, ".sum(dim=-1)", ".sum()")),
        ("gradient", change(LOGPS, "    logits = policy", "    with torch.no_grad():\n        logits = policy",
                            "    logp =", "    logits.requires_grad_()\n    logp =")),
        ("entropy",
         change(LOGPS, "    entropy =", "    whole = logp\n    logp = torch.log_softmax(logits, dim=-1)\n    entropy =",
         "return logp", "return whole")),
        ("logp", change(LOGPS, "logits / cfg", "logits.bfloat16() / cfg")),
        (CHANGED, change(LOGPS, "    logp =", "    part['inputs'] += 1\n    logp ="))],
    "grpo_advantages": [
        ("over the batch, not over the group",
         change(GRPO, "R.mean(1).unsqueeze(1)", "R.mean()", "std = R.std(1).unsqueeze(1)",
          "std = R.std() + torch.zeros(len(R), 1)")),
        (CHANGED, change(GRPO, "A = R - mean", "R -= mean\n    A = R")),
        ("rounding noise", change(GRPO, "std < 1e-4", "std == 0")),
        ("advantages", change(GRPO, "1e-6", "1e-2")),
        ("what they should be", change(GRPO, "R.std(1)", "(R.max(1).values - R.min(1).values)")),
        ("what they should be", change(GRPO, "R.std(1)", "(R - R.mean(1, keepdim=True)).abs().mean(1)")),
        ("advantages", change(GRPO, "R.mean(1)", "R.median(1).values")),
        ("what they should be", change(GRPO, "A = R - mean", "A = (R - mean) * R.shape[1] / (R.shape[1] - 1)"))],
    "uncertainty_filter": [
        ("*least* uncertain", change(FILTER, "k).indices", "k, largest=False).indices")),
        ("Yours", change(FILTER, "R.std(dim=1)",
         "((R - R.mean(1, keepdim=True)) / (R.std(1, keepdim=True) + 1e-6)).std(dim=1)")),
        ("numbers of the kept", change(FILTER, ".indices", ".values")),
        (CHANGED, changing("uncertainty_filter", "R, keep", "R -= R.mean()")),
        ("", change(FILTER, "R.std(dim=1)", "(R - R.mean(1, keepdim=True)).abs().mean(1)")),
        ("", change(FILTER, "R.std(dim=1)", "(R.quantile(0.75, 1) - R.quantile(0.25, 1))")),
        ("", change(FILTER, "int(len(R) * keep + 1e-9)", "round(len(R) * keep)")),
        ("", change(FILTER, " + 1e-9", "")),
        ("kept", change(FILTER, "keep + 1e-9", "0.25 + 1e-9")),
        ("numbers of the kept", change(FILTER, "k).indices", "k).indices.float()")),
        ("numbers of the kept", change(FILTER, "k).indices", "k).indices.tolist()"))],
    "gae": [
        ("walk over the environment's tokens", change(GAE, "if mask[b, t]:", "if True:")),
        (CHANGED, changing("gae", "reward, value, mask, gamma, lam", "value *= mask")),
        ("ret", change(GAE, "    advantage =", "    gamma = 1.0\n    advantage =")),
        ("advantage", change(GAE, "range(len(value))", "range(1)")),
        ("ret", change(GAE, "A, v = 0.0, 0.0", "A, v = 0.0, value[b, -1]")),
        ("with a fraction", change(GAE, "torch.zeros_like(value)", "torch.zeros_like(value).long()")),
        (CHANGED, change(GAE, "    advantage =", "    reward += value * 0.1\n    advantage ="))],
    "policy_loss": [
        ("symmetric", change(LOSS, "1 + cfg.clip_high", "1 + cfg.clip_low")),
        ("Yours", change(LOSS, "entropy, b < a", "entropy.mean(), b < a")),
        ("gradient at the entropy", change(LOSS, "cfg.entropy_coef * entropy", "cfg.entropy_coef * entropy.detach()")),
        (CHANGED, changing("policy_loss", "logp, entropy, old_logp, adv, cfg", "adv *= 2")),
        ("loss", change(LOSS, "(logp - old_logp)", "(logp)")),
        ("gradient", change(LOSS, "(logp - old_logp)", "(logp.detach() - old_logp)")),
        ("", change(LOSS, "1 + cfg.clip_high", "1.28")),
        ("", change(LOSS, "1 - cfg.clip_low", "0.8")),
        ("gradient", change(LOSS, "cfg.entropy_coef *", "0.1 *")),
        ("clipped", change(LOSS, "b < a", "b <= a")),
        ("bools are wanted", change(LOSS, "b < a", "(b < a).float()")),
        ("gradient", change(LOSS, "torch.minimum(a, b)", "torch.where(adv > 0, torch.minimum(a, b), a)"))],
    "value_loss": [
        ("not clipped", change(VALUE, "torch.maximum((value - ret).square(), (clipped - ret).square())",
         "(value - ret).square()")),
        ("gradient", change(VALUE, "def value_loss(value, old_value, ret):\n",
                            "def value_loss(value, old_value, ret):\n    value = value.detach()\n")),
        (CHANGED, changing("value_loss", "value, old_value, ret", "ret += 1")),
        ("shape", change(VALUE, "(value - ret).square(), (clipped - ret).square())",
         "(value - ret).square(), (clipped - ret).square()).mean()")),
        ("gradient", change(VALUE, "(clipped - ret)", "(clipped.detach() - ret)")),
        ("not clipped", change(VALUE, "old_value - rm.VALUE_CLIP", "old_value - 1e9")),
        ("loss", change(VALUE, "rm.VALUE_CLIP", "0.2"))],
    "add_gradients": [
        ("*all* parts", change(GRADIENTS, "(loss / count)", "(loss / mask.sum())")),
        ("of add_gradients: 'NoneType'", change(GRADIENTS, "if models.critic is not None:", "if True:")),
        ("nothing was returned", change(GRADIENTS, 'return {"loss"', '{"loss"')),
        ("Yours", change(GRADIENTS, "        (loss / count).backward()\n", "", "    return",
                         "    (loss / count).backward()\n    return")),
        ("policy's gradient", change(GRADIENTS, "logp, entropy, part", "logp, 0 * entropy, part")),
        ("policy's gradient", change(GRADIENTS, "logp, entropy, part", "logp, entropy.detach(), part")),
        ("policy's gradient", change(GRADIENTS, 'part["old_logp"][mask]', "logp.detach()")),
        ("policy's gradient",
         change(GRADIENTS, 'rm.policy_loss(logp, entropy, part["old_logp"][mask], part["adv"][mask], cfg)[0]',
         '(-(logp - part["old_logp"][mask]).exp() * part["adv"][mask] - cfg.entropy_coef * entropy)')),
        ("policy's gradient",
         change(GRADIENTS, 'rm.policy_loss(logp, entropy, part["old_logp"][mask], part["adv"][mask], cfg)[0]',
         '(-logp * part["adv"][mask] - cfg.entropy_coef * entropy)')),
        ("critic's gradient", change(GRADIENTS, 'rm.value_loss(value, part["value"][mask], part["ret"][mask])',
         '(0.5 * (value - part["ret"][mask]) ** 2)')),
        ("critic's gradient", change(GRADIENTS, "loss + rm", "loss + 0.5 * rm")),
        (CHANGED, change(GRADIENTS, "    count", "    batch['adv'] -= batch['adv'].mean()\n    count")),
        (CHANGED, change(GRADIENTS, "    return", "    rows.clear()\n    return")),
        (CHANGED, change(GRADIENTS, "    return", "    for weights in models.policy.parameters():\n"
         "        weights.data -= 0.01 * weights.grad\n    return"))],
    "take_step": [
        ("each network's gradient",
         change(STEP, 'clip_grad_norm_(g["params"], rm.MAX_GRAD_NORM) for g in models.optimizer.param_groups]',
         'clip_grad_norm_([w for g in models.optimizer.param_groups for w in g["params"]], rm.MAX_GRAD_NORM)]')),
        ("nothing was returned", change(STEP, "return float(norms[0])", "float(norms[0])")),
        ("gradients that it saw", change(STEP, "rm.MAX_GRAD_NORM", "2 * rm.MAX_GRAD_NORM")),
        ("left in", change(STEP, "models.optimizer.zero_grad", "models.policy.zero_grad")),
        ("steps of", change(STEP, "models.optimizer.step()", "models.optimizer.step()\n    models.optimizer.step()")),
        ("returned", change(STEP, "norms[0]", "sum(norms)")),
        ("returned", change(STEP, "float(norms[0])", "min(float(norms[0]), rm.MAX_GRAD_NORM)"))],
    "moves": [
        ("Yours", "def moves():\n    return ['Up'] * 10"),
        ("jump", "def moves():\n    return ['jump']")],
    "settings": [
        ("Yours", "def settings():\n    return dict(env='sokoban', iterations=500)"),
        ("Yours", "def settings():\n    return dict(env='sokoban', iterations=5, eval_every=0)"),
        ("chess", "def settings():\n    return dict(env='chess')"),
        ("unexpected", "def settings():\n    return dict(world='sokoban')")],
    "paradox": [
        ("Yours", "def paradox():\n    return 0.075, 0.75"),
        ("2 things", "def paradox():\n    return 0.075")],
    "collapse": [
        ("Yours", "def collapse(log):\n    return ['entropy', 'valid', 'grad_norm']")],
    "compute_advantages": [
        ("the std is still", change(PPO, "ours.std(", "adv.std(")),
        ("it is added", change(PPO, "+ penalty", "- penalty")),
        ("ret", change(PPO, "cfg.gamma", "1.0")),
        ("adv", change(PPO, "cfg.lam", "1.0")),
        ("adv", change(PPO, "(adv - ours.mean())", "adv")),
        ("adv", change(PPO, " / (ours.std(correction=0) + 1e-8)", "")),
        ("adv", change(PPO, "torch.where(mask, (adv - ours.mean()) / (ours.std(correction=0) + 1e-8), 0.0)",
         "(adv - ours.mean()) / (ours.std(correction=0) + 1e-8)")),
        ("", change(PPO, "cfg.adv_norm", '"std"')),
        (CHANGED, change(PPO, "    mask =", "    trajs[0].reward[-1] = 0.0\n    mask ="))],
    "returns": [
        ("still", change(RETURNS, "-1, cfg.rollouts)", "cfg.rollouts, -1).T")),
        ("shape",
         "def returns(trajs, cfg):\n    return torch.tensor([traj.R for traj in trajs]).view(cfg.rollouts, -1)"),
        ("R ", change(RETURNS, "traj.R", "traj.R - 1")),
        ("with a fraction", change(RETURNS, "traj.R", "int(traj.R)")),
        ("shape", change(RETURNS, "cfg.rollouts", "2")),
        (CHANGED, change(RETURNS, "traj.R for traj in trajs", "trajs.pop(0).R for _ in range(len(trajs))"))],
    "sample": [
        ("no others", change(DRAWN, "logp.exp(), 1", "torch.ones_like(logp), 1")),
        ("chi-square", change(DRAWN, "logp.exp(), 1", "(logp / 2).exp(), 1")),
        ("chi-square", change(DRAWN, "logp.exp(), 1", "(2 * logp).exp(), 1")),
        ("chi-square", change(DRAWN, "logp.exp(), 1", "-logp, 1")),
        ("chi-square", change(SAMPLE, "row.exp()", "logp[0].exp()")),
        ("chi-square", change(DRAWN, "logp.exp(), 1", "torch.where(logp > -2, logp.exp(), 0), 1")),
        ("generator goes on", change(DRAWN, "generator=generator", "generator=torch.Generator().manual_seed(0)")),
        ("log-probability", change(DRAWN, "True, token_logp", "True, 0.0")),
        ("entropy", change(DRAWN, "+= entropy", "-= token_logp")),
        ("cached", change(DRAWN, "len(traj.ids)", "len(traj.ids) + 1")),
        ("mask", change(DRAWN, "[token], True", "[token], False"))],
    "take_turn": [
        ("reward of the turn", change(TURN, "reward += gained", "reward += min(gained, 0.0)")),
        ("", change(TURN, "reward += gained", "reward = gained")),
        ("answer's tokens", change(TURN, "traj.reward[-1]", "traj.reward[-2]")),
        ("reward of the turn", change(TURN, "reward + bonus", "reward")),
        ("reward of the turn", change(TURN, "rm.FORMAT_PENALTY", "0.0")),
        ("reward of the turn", change(TURN, '0.0 if turn["valid"] else rm', "rm")),
        ("actions left", change(TURN, "traj.actions_left -= 1", "pass")),
        ("success", change(TURN, 'traj.success = info["success"]', "pass")),
        ("", change(TURN, "if traj.actions_left == 0 or env.over:", "if env.over:")),
        ("over", change(TURN, "traj.done = env.over or", "traj.done =")),
        ("", change(TURN, "env.over or traj.actions_left == 0 or", "env.over or")),
        ("", change(TURN, " or len(traj.turns) == cfg.max_turns", "")),
        ("next message", change(TURN, "if traj.ids[-1] == ends[0]:", "if False:")),
        ("", change(TURN, "if traj.ids[-1] == ends[0]:", "if True:"))],
}
