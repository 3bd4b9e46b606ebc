"""Change the method from a script of your own. Each recipe replaces functions of ragen_mini.

    python extras/recipes.py                                  the names of all recipes
    python extras/recipes.py rloo --env bandit --algo grpo    one of them, with options as usual

Every function of ragen_mini is looked up when it is called. So after `rm.policy_loss = mine` all
of the program uses yours. To build on the original, keep it first: `rollout = rm.rollout`.
Recipes can be combined: call several of them, then rm.main() or rm.train(cfg).
"""
import copy
import inspect
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

import plots
import ragen_mini as rm
from support import device, errors, loading


def only_if(fits, message):
    """Training is refused if not fits(cfg), so that no recipe is chosen without having an effect.
    """
    train = rm.train

    def train_if_it_fits(cfg, *rest, **named):
        errors.need(fits(cfg), message)
        return train(cfg, *rest, **named)
    rm.train = train_if_it_fits


# ------------------------------------------------------------------- other groups, other advantages
def ragen2_filter():
    """RAGEN-2 (arXiv 2604.06268) keeps the groups that hold 90% of the variance of the returns.

    How many these are differs from iteration to iteration. Groups without variance are left out,
    because they teach nothing.
    """
    only_if(lambda cfg: cfg.keep == 1 and cfg.rollouts > 1,
            "ragen2_filter decides how many groups to keep. Leave out --keep and --starpo-s, and "
            "take 2 --rollouts or more.")

    def top_p(R, keep):  # (P,N) -> the numbers of the kept groups
        variance, groups = R.var(1, correction=0).sort(descending=True, stable=True)
        before = variance.cumsum(0) - variance  # of the groups with a larger variance
        return groups[(before < 0.9 * variance.sum()) & (variance > 1e-8)]
    rm.uncertainty_filter = top_p


def rloo():
    """REINFORCE leave-one-out compares an episode with the mean of the *others* of its group."""
    only_if(lambda cfg: cfg.algo == "grpo", "rloo is for --algo grpo, which has no critic.")

    def leave_one_out(R, norm):  # (P,N) -> (P,N)
        others = (R.sum(1, keepdim=True) - R) / (R.shape[1] - 1)
        return R - others
    rm.grpo_advantages = leave_one_out


def discount_per_turn():
    """PPO, where --gamma 0.9 discounts once a turn instead of once a token."""
    only_if(lambda cfg: cfg.algo == "ppo" and cfg.gamma > 0,
            "discount_per_turn is for --algo ppo, with a --gamma above 0.")
    gae = rm.gae
    # Scaling turn k by gamma ** k makes the discounted sum a plain one. Then all is scaled back.
    def gae_per_turn(reward, value, mask, gamma, lam):
        begins = mask & ~torch.nn.functional.pad(mask, (1, -1))  # the first token of each answer
        scale = gamma ** (begins.cumsum(1) - 1)
        results = gae(reward * scale, value * scale, mask, 1.0, lam)
        return [result / scale for result in results]
    rm.gae = gae_per_turn


# ------------------------------------------------------------------------------------- other losses
def mean_of_episodes():
    """Eq. 4 and 6 as printed: the mean over episodes of their means over tokens.

    Apart from the entropy bonus the loss is proportional to the advantages, so the weight of a
    token can be put there. NOTE: this is exact for one update an iteration. If there are several,
    the loss of each is too large by the factor (mean length of all episodes) / (mean length of its
    own episodes).
    """
    compute_advantages = rm.compute_advantages

    def weighted(*args):
        batch = compute_advantages(*args)
        tokens = batch["mask"].sum(1, keepdim=True)
        batch["adv"] *= tokens.float().mean() / tokens
        return batch
    rm.compute_advantages = weighted


def cispo():
    """CISPO (arXiv 2506.13585) clips the weight of a token, not its gradient, so all tokens learn.
    It shows from an iteration's second update on, where ratios are no longer 1 (--epochs 2).
    """
    def loss(logp, entropy, old_logp, adv, cfg):  # (n,) x4 -> (n,) x2
        ratio = (logp - old_logp).exp().detach()
        weight = ratio.clamp(max=1 + cfg.clip_high)
        return -weight * adv * logp - cfg.entropy_coef * entropy, weight < ratio
    rm.policy_loss = loss


def gspo():
    """GSPO (arXiv 2507.18071): one ratio for an episode, the geometric mean of its tokens' ratios.
    Clip it narrowly: --clip-low 0.0003 --clip-high 0.0004. There is no entropy bonus.
    """
    only_if(lambda cfg: cfg.algo == "grpo", "gspo is for --algo grpo, which has no critic.")

    def of_episodes(part, logp, cfg):  # -> losses of its rows
        mask = part["mask"]
        moved = torch.zeros_like(part["adv"])
        moved[mask] = logp - part["old_logp"][mask]
        length = mask.sum(1)
        ratio = (moved.sum(1) / length).exp()
        adv = part["adv"].sum(1) / length  # all its tokens have the same, but for KL penalties
        return -torch.min(ratio * adv, ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * adv)

    def add_gradients(batch, rows, models, cfg):  # -> statistics
        total = 0.0
        with device.autocast(cfg.device):
            for _, part in rm.micro_batches(batch, rows, cfg.micro_tokens):
                logp, _ = rm.token_logps(models.policy, part, cfg)
                loss = of_episodes(part, logp, cfg).sum() / len(rows)
                loss.backward()
                total += loss.item()
        return {"policy_loss": total}
    rm.add_gradients = add_gradients


# ------------------------------------------------------------------------------------ other rewards
def short_answers():
    """Every token that the model writes costs 0.001."""
    rollout = rm.rollout
    def rollout_with_cost(*args):
        trajs = rollout(*args)
        for traj in trajs:
            traj.reward = [reward - 0.001 * own for reward, own in zip(traj.reward, traj.mask)]
        return trajs
    rm.rollout = rollout_with_cost


def early_turns_count_more():
    """The reward of turn k is scaled by 0.9 ** k. The log shows the scaled returns, too."""
    take_turn = rm.take_turn

    def take_turn_and_scale(traj, tok, cfg, ends):
        last = len(traj.ids) - 1  # the last token of the answer has its reward
        take_turn(traj, tok, cfg, ends)
        traj.reward[last] *= 0.9 ** (len(traj.turns) - 1)
    rm.take_turn = take_turn_and_scale


def said():
    """On the lake, a thought that names the goal earns 0.1. No message tells the model so."""
    only_if(lambda cfg: cfg.env == "frozenlake", "said is for --env frozenlake, which has a goal.")
    take_turn = rm.take_turn

    def take_turn_and_pay(traj, tok, cfg, ends):
        last = len(traj.ids) - 1
        take_turn(traj, tok, cfg, ends)
        if "goal" in rm.thought_of(traj.turns[-1]):
            traj.reward[last] += 0.1
            traj.turns[-1]["reward"] += 0.1
    rm.take_turn = take_turn_and_pay


# --------------------------------------------------------------------------------- other optimizers
def sgd():
    """Gradient descent with momentum wants its own rates, such as --lr 0.05 --critic-lr 0.01."""
    def make_optimizer(models, cfg):
        groups = [{"params": models.policy.parameters(), "lr": cfg.lr}]
        if models.critic is not None:
            groups.append({"params": models.critic.parameters(), "lr": cfg.critic_lr})
        return torch.optim.SGD(groups, momentum=0.9)
    rm.make_optimizer = make_optimizer


def muon():
    """Muon for the hidden matrices of the policy, Adam for all else."""
    make_optimizer = rm.make_optimizer

    def make_both(models, cfg):
        matrices, others = hidden_matrices(models.policy)
        models.muon = torch.optim.Muon(matrices, lr=2e-3, weight_decay=0.0)  # is saved, too
        adam = make_optimizer(models, cfg)
        adam.param_groups[0]["params"] = others
        adam.register_step_post_hook(lambda *_: (models.muon.step(), models.muon.zero_grad()))
        return adam
    rm.make_optimizer = make_both


def hidden_matrices(policy):  # -> its matrices, all its other weights
    """The tables of words and places are not meant, nor is the head, which scores the words."""
    tables = [policy.get_output_embeddings().weight]
    for module in policy.modules():
        if isinstance(module, torch.nn.Embedding):
            tables.append(module.weight)
    matrices, others = [], []
    for weight in policy.parameters():
        is_table = any(weight is table for table in tables)
        kind = matrices if weight.ndim == 2 and not is_table else others
        kind.append(weight)
    return matrices, others


def warm_up(steps=40):
    """The rates rise during the first 40 gradient steps. Adam counts them, so --resume is exact."""
    make_optimizer = rm.make_optimizer

    def make_with_warm_up(models, cfg):
        optimizer = make_optimizer(models, cfg)

        def set_rates(*_):  # before each step
            done = max((int(state["step"]) for state in optimizer.state.values()), default=0)
            for group, lr in zip(optimizer.param_groups, (cfg.lr, cfg.critic_lr)):
                group["lr"] = lr * min(1, (done + 1) / steps)
        optimizer.register_step_pre_hook(set_rates)
        return optimizer
    rm.make_optimizer = make_with_warm_up


# ----------------------------------------------------------------------------------- other networks
def lora():
    """Low-rank adapters in all layers, from the package peft. The checkpoint holds them alone."""
    import peft
    load_models = rm.load_models

    def load_with_adapters(cfg):
        models = load_models(cfg)
        adapters = peft.LoraConfig(r=8, target_modules="all-linear")  # but for the output layer
        models.policy = peft.get_peft_model(models.policy, adapters)
        return models
    rm.load_models = load_with_adapters


def own_model():
    """A model that exists as an object only. Here it is random, and says nothing valid."""
    only_if(lambda cfg: cfg.model == "tiny", "own_model makes its own model. Leave out --model.")
    load_models = rm.load_models

    def make_models(cfg):
        if cfg.model != "tiny":  # to --play a run of this recipe
            return load_models(cfg)
        torch.manual_seed(cfg.seed)
        tok = transformers.AutoTokenizer.from_pretrained(loading.TINY)
        shape = transformers.LlamaConfig(
            vocab_size=len(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, ragen_mini_presets="tiny", num_labels=1)
        policy = transformers.LlamaForCausalLM(shape).to(cfg.device).eval()
        ref = copy.deepcopy(policy) if cfg.kl_coef else None
        critic = None
        if cfg.uses_critic:
            # eval() turns off the dropout of its head.
            critic = transformers.LlamaForTokenClassification(shape).to(cfg.device).eval()
            critic.get_decoder().load_state_dict(policy.get_decoder().state_dict())
        rm.check_policy(policy, tok, cfg)
        return rm.Models(policy, critic, ref, None, tok)
    rm.load_models = make_models


# --------------------------------------------------------------------------------- other arithmetic
def bf16():
    """A CPU multiplies in bf16, as a GPU does, which pays where it has avx512_bf16 or AMX.

    Weights, gradients and Adam stay fp32. As on a GPU, the first ratios are 1 only roughly.
    """
    only_if(lambda cfg: cfg.device == "cpu", "bf16 is for --device cpu. A GPU always does so.")
    calculate_in_bf16()


def calculate_in_bf16(enabled=True):
    device.autocast = lambda _: torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def read_once():
    """Updates, too, read the first message of a group only once, which pays where it is long.

    The gradients are the same, to rounding.
    """
    load_models = rm.load_models
    rm.load_models = lambda cfg: read_messages_once(load_models(cfg))


def read_messages_once(models):
    rm.micro_batches = alike_together
    for network in (models.policy, models.critic, models.ref):
        if network is not None:
            share_beginning(network)
    return models


def alike_together(batch, rows, limit):  # yields what rm.micro_batches yields
    """All rows of a micro-batch have one first message, which counts once. Apart from that it is as
    there: rows of similar length go together, in bounded memory.
    """
    limit *= 2  # since a message counts once
    length = (batch["mask"].cumsum(1).argmax(1) + 1).tolist()
    by_message = {}  # {first message: rows}
    for row in sorted(rows, key=lambda row: length[row]):
        first = batch["mask"][row].int().argmax() + 1  # tokens read before the first one is written
        message = tuple(batch["inputs"][row, :first].tolist())
        by_message.setdefault(message, []).append(row)
    for message, group in by_message.items():
        packs = []
        for row in group:
            more = length[row] - len(message)
            if not packs or len(message) + (len(packs[-1]) + 1) * more > limit:
                packs.append([])
            packs[-1].append(row)
        for pack in packs:
            longest = length[pack[-1]]
            yield pack, {name: x[pack, :longest] for name, x in batch.items()}


def share_beginning(network):
    """Its decoder reads what all rows have in common as one row, then the rest of each row, which
    attends to the keys and values of that one. Gradients flow through them, and add up there.
    """
    decoder = network.get_decoder()
    plain = decoder.forward

    def forward(input_ids, past_key_values=None, **options):
        if past_key_values is not None:  # the rollout has its own cache
            return plain(input_ids=input_ids, past_key_values=past_key_values, **options)
        b, T = input_ids.shape
        common = (input_ids == input_ids[0]).all(0).long().cumprod(0)  # 1 1 1 0 0 0
        shared = min(int(common.sum()), T - 1)
        cache = transformers.DynamicCache()
        options["use_cache"] = True
        first = plain(input_ids=input_ids[:1, :shared], past_key_values=cache, **options)
        cache.batch_repeat_interleave(b)
        output = plain(input_ids=input_ids[:, shared:], past_key_values=cache, **options)
        beginning = first.last_hidden_state.expand(b, -1, -1)
        output.last_hidden_state = torch.cat((beginning, output.last_hidden_state), 1)
        return output
    decoder.forward = forward


# --------------------------------------------------------------------------------- more is measured
def mutual_information(every=5):
    """Every 5 iterations the log says how much thoughts depend on their prompts (as in RAGEN-2)."""
    only_if(lambda cfg: not cfg.no_think, "mutual_information is about thoughts. Drop --no-think.")
    iterate, learn = rm.iterate, rm.learn
    due = False
    measured = []

    # The policy that played is measured, before it learns. With --online-k that is the first slice.
    def measure_and_learn(trajs, models, cfg, seed):
        nonlocal due
        if due:
            measured.append(information(trajs, models, cfg))
            due = False
        return learn(trajs, models, cfg, seed)

    def iterate_and_log(i, models, cfg):
        nonlocal due
        due = i % every == 0
        row, trajs = iterate(i, models, cfg)
        if measured:
            row["mutual_information"] = measured.pop()
        return row, trajs
    rm.learn, rm.iterate = measure_and_learn, iterate_and_log
    plots.TITLES["mutual_information"] = "I(prompt; thought)\nnear 0: they ignore the prompt"
    plots.QUESTIONS["Do its thoughts depend on the prompt?"] = ("mutual_information",)


def information(trajs, models, cfg):  # -> nats, at most log P; None if there is no thought
    """I(X;Z) = mean of log p(z|own x), minus mean of log of the mean of p(z|x) over the P prompts.

    x is the first prompt, up to <think>, and z the thought that follows. Prompts that are equal
    count once. Only valid turns are taken, because only there it is clear what the thought is.
    """
    found = [prompt_and_thought(traj, models.tok) for traj in trajs if traj.turns[0]["valid"]]
    if not found:
        return None
    prompts = list(dict.fromkeys(x for x, _ in found))
    own = []
    pairs = []
    for x, z in found:
        if not z:  # an empty thought is equally probable after all prompts, so it adds 0
            continue
        own.append(prompts.index(x))
        for prompt in prompts:
            pair = rm.Trajectory(env=None, group=0, actions_left=0)
            pair.append(list(prompt), sampled=False)
            pair.append(z, sampled=True)
            pairs.append(pair)
    if not pairs:
        return 0.0
    batch = rm.collate(pairs, cfg.device)
    logps = rm.per_token(lambda part: rm.token_logps(models.policy, part, cfg)[0], batch, cfg)
    logp = logps.sum(1).view(len(own), len(prompts))  # of thought i after prompt j
    terms = logp[range(len(own)), own] - logp.logsumexp(1) + math.log(len(prompts))
    return terms.sum().item() / len(found)


def prompt_and_thought(traj, tok):  # -> ids up to the first <think>, ids from there to </think>
    turn = traj.turns[0]
    start = traj.mask.index(True)
    z = traj.ids[start:start + turn["tokens"]]  # at first the whole answer
    while not rm.thought_of(turn).startswith(tok.decode(z, clean_up_tokenization_spaces=False)):
        z.pop()
    return tuple(traj.ids[:start]), z


RECIPES = {recipe.__name__: recipe for recipe in (
    ragen2_filter, rloo, discount_per_turn, mean_of_episodes, cispo, gspo, short_answers,
    early_turns_count_more, said, sgd, muon, warm_up, lora, own_model, bf16, read_once,
    mutual_information)}


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in RECIPES:
        with errors.one_line_errors():
            for known, recipe in RECIPES.items():
                print(f"{known:24}{inspect.getdoc(recipe).splitlines()[0]}")
            print("\nChoose one: python extras/recipes.py rloo --env bandit --algo grpo")
            sys.stdout.flush()
        sys.exit(0 if name in ("-h", "--help") else f"There is no recipe {name}.")
    sys.argv[:2] = [f"{sys.argv[0]} {name}"]  # so a run has the recipe's name, see folder.script
    try:
        RECIPES[name]()
    except ImportError as error:
        sys.exit(f"{name} needs a package: pip install {error.name}")
    rm.main()


if __name__ == "__main__":
    main()
