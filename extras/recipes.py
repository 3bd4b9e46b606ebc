"""Change the method in your own script, without an edit of ragen_mini.py. Each recipe is one function below.

    python extras/recipes.py rloo --env bandit       one of them, with any options of ragen_mini.py
    python extras/recipes.py                         their names

The ways in:
    train(cfg, models)       models of your own: rm.load_models(cfg), then change what it returned. A part of them that has
                             a state_dict, also one that you add, is in the checkpoint. models.optimizer: your own; if it is
                             None, `train` makes one for the networks as they then are. models.loss: another policy_loss, a
                             number for each token, which knows nothing of its episode. (It shows from the second update on:
                             --update-size 16, --epochs 2)
                             NOTE: another policy wants another models.ref (or kl_coef=0), from which the KL is measured
    rm.BY_GROUP["rloo"] = f  other advantages, for --algo rloo: of a group's returns; rm.BY_CRITIC: of rewards and forecasts,
                             as rm.gae. Filter, KL penalty and updates stay. There is no update where all returns are equal
                             (BY_GROUP: equal within each group)
    train(cfg, learn=...)    another method. Another filter: hand rm.learn some of the groups, whole ones, in their order; or
                             write what mean_of_episodes does. A loss of whole episodes, or one that needs the whole batch:
                             rm.learn(..., gradients=your_add_gradients) as in gspo; under PPO it must train the critic, too
    train(cfg, rollout=...)  another way to play, in evaluations, too (seeds in envs.EVAL_SEEDS); rewards may be changed:
                             traj.reward, one number a token. It returns groups 0, 1, ..., N episodes each. Training
                             levels: seeds from 256 on. --play and --eval-only, which train nothing, use rm.rollout
    train(cfg, watch=...)    sees every row of the log, with all trajectories, before it is written (row 0, before training,
                             has none)
    Env.bonus(turn)          what a world pays for what was said: a subclass of a world, Config(env=TheClass)

    main(train, Config)      the command line for your script, with --resume. Config: a subclass of rm.Config with more options
                             (@dataclass class Config(rm.Config): token_cost: float = 0.001), then cfg.token_cost. A float or
                             int is at least 0, an rm.Count at least 1, an rm.Share from 0 to 1

A run goes on by the program, and the recipe, that began it: --resume refuses another one. NOTE: hand functions over. Some
are bound where ragen_mini.py defines them, so `rm.learn = mine`, rm.rollout, rm.gae, rm.grpo_advantages have no effect.
"""
import functools
import inspect
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

import envs
import plots
import ragen_mini as rm


# ------------------------------------------------------------------------------------------- other advantages
def rloo(cfg):
    """REINFORCE leave-one-out: an episode against the mean of the *others* of its group. (As GRPO: no critic.)"""
    return rm.train(rm.replace(cfg, algo="rloo"))


def leave_one_out(R, norm):  # (P,N) -> (P,N)
    others = (R.sum(1, keepdim=True) - R) / (R.shape[1] - 1)
    return R - others


def discount_per_turn(cfg):
    """PPO, where --gamma 0.9 discounts once a turn instead of once a token.
    Rewards and forecasts of turn k are scaled by gamma ** k, which turns the discounted sum into a plain one; then back."""
    rm.need(cfg.algo in rm.BY_CRITIC, "discount_per_turn is for --algo ppo")
    rm.need(cfg.gamma > 0, "--gamma must be above 0")
    return rm.train(rm.replace(cfg, algo="ppo-per-turn"))


def gae_per_turn(reward, value, mask, gamma, lam):  # as rm.gae
    begins = mask & ~torch.nn.functional.pad(mask, (1, -1))  # an answer's first token
    scale = gamma ** (begins.cumsum(1) - 1)
    adv, ret = rm.gae(reward * scale, value * scale, mask, 1.0, lam)
    return adv / scale, ret / scale


rm.BY_GROUP["rloo"] = leave_one_out
rm.BY_CRITIC["ppo-per-turn"] = gae_per_turn


def early_turns_count_more(cfg):
    """GRPO (or PPO): the reward of turn k is scaled by 0.9 ** k. The log, too, shows the scaled returns."""
    def rollout(*args):
        trajs = rm.rollout(*args)
        for traj in trajs:
            turn = -1
            for t, own in enumerate(traj.mask):  # the first token is the world's
                turn += own and not traj.mask[t - 1]
                traj.reward[t] *= 0.9 ** turn
        return trajs
    return rm.train(cfg, rollout=rollout)


# -------------------------------------------------------------------------------------------------- another loss
def mean_of_episodes(cfg):
    """Eq. 4 and 6 as printed: the mean over episodes of their means over tokens, so that long ones count no more.
    The loss is proportional to the advantages (but for the entropy bonus): a token's weight may as well be put there.
    NOTE: exact for one update an iteration. One of several is scaled by the mean length of all / of its own episodes."""
    def learn(trajs, models, cfg, seed):
        chosen, R = chosen_by(trajs, cfg)
        if not chosen or rm.nothing_to_compare(R, cfg):
            return {}, []
        batch = rm.compute_advantages(chosen, R, models, cfg)
        tokens = batch["mask"].sum(1, keepdim=True)
        batch["adv"] *= tokens.float().mean() / tokens
        return batch, rm.updates(batch, models, cfg, seed)
    return rm.train(cfg, learn=learn)


def chosen_by(trajs, cfg):  # the first half of rm.learn -> trajectories of the kept prompts, their returns (k,N)
    R = rm.returns(trajs, cfg)
    kept = sorted(rm.uncertainty_filter(R, cfg.keep).tolist())
    return [traj for traj in trajs if traj.group % cfg.prompts in kept], R[kept]


def cispo(cfg):
    """CISPO (MiniMax-M1, arXiv 2506.13585): what is clipped is a token's weight, not its gradient: all tokens learn.
    It shows from an iteration's second update on, where ratios are no longer 1."""
    def loss(logp, entropy, old_logp, adv, cfg):  # (n,) x4 -> (n,) x2
        ratio = (logp - old_logp).exp().detach()
        weight = ratio.clamp(max=1 + cfg.clip_high)
        return -weight * adv * logp - cfg.entropy_coef * entropy, weight < ratio
    models = rm.load_models(cfg)
    models.loss = loss
    return rm.train(cfg, models)


def gspo(cfg):
    """GSPO (arXiv 2507.18071): GRPO with one ratio for an episode, the geometric mean of its tokens'; episodes weigh alike.
    It wants a narrower clip, such as --clip-low 0.0003 --clip-high 0.0004. It has no entropy bonus. For one ratio an
    answer, or sums divided by a constant (Dr. GRPO, arXiv 2503.20783), change `of_episodes`."""
    rm.need(cfg.algo in rm.BY_GROUP, "gspo is for --algo grpo")

    def of_episodes(part, logp, cfg):  # -> losses of its rows
        mask = part["mask"]
        moved = torch.zeros_like(part["adv"])
        moved[mask] = logp - part["old_logp"][mask]
        length = mask.sum(1)
        ratio = (moved.sum(1) / length).exp()
        adv = part["adv"].sum(1) / length  # of all its tokens the same, but for KL penalties
        return -torch.min(ratio * adv, ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * adv)

    @rm.autocast
    def add_gradients(batch, rows, models, cfg):  # -> statistics
        total = 0.0
        for _, part in rm.micro_batches(batch, rows):
            logp, _ = rm.token_logps(models.policy, part, cfg)
            loss = of_episodes(part, logp, cfg).sum() / len(rows)
            loss.backward()
            total += loss.item()
        return {"policy_loss": total}

    return rm.train(cfg, learn=functools.partial(rm.learn, gradients=add_gradients))


# ----------------------------------------------------------------------------------------------- other rewards
def short_answers(cfg):
    """Every token that the model writes costs 0.001. In any world: the rewards of the rollout are changed."""
    def rollout(*args):
        trajs = rm.rollout(*args)
        for traj in trajs:
            for t, own in enumerate(traj.mask):
                traj.reward[t] -= 0.001 * own
        return trajs
    return rm.train(cfg, rollout=rollout)


class GoalLake(envs.FrozenLake):
    """A thought that names the goal earns 0.1; the model is not told. Also: --env extras/recipes.py:GoalLake"""
    def bonus(self, turn):
        return 0.1 * ("goal" in plots.thought_of(turn))


def said(cfg):
    """The lake, with a reward for what is said."""
    rm.need(envs.title(cfg.env) in ("frozenlake", "GoalLake"), "said: its world is the lake, no other --env")
    return rm.train(rm.replace(cfg, env=f"{__file__}:GoalLake"))


# ------------------------------------------------------------------------------------------- another optimizer
def sgd(cfg):
    """Gradient descent with momentum wants rates of its own, such as --lr 0.05 --critic-lr 0.01."""
    models = rm.load_models(cfg)
    groups = [{"params": models.policy.parameters(), "lr": cfg.lr}]
    if models.critic:
        groups.append({"params": models.critic.parameters(), "lr": cfg.critic_lr})
    models.optimizer = torch.optim.SGD(groups, momentum=0.9)
    return rm.train(cfg, models)


def muon(cfg):
    """Muon for the policy's matrices, Adam for all else; it steps whenever Adam steps.
    Tables of words or places are none of these matrices, nor is the last layer, which scores the words."""
    models = rm.load_models(cfg)
    matrices, others = hidden_matrices(models.policy)
    models.muon = torch.optim.Muon(matrices, lr=2e-3, weight_decay=0.0)
    models.optimizer = rm.make_optimizer(models, cfg)
    models.optimizer.param_groups[0]["params"] = others  # the policy's
    models.optimizer.register_step_post_hook(lambda *_: (models.muon.step(), models.muon.zero_grad()))
    return rm.train(cfg, models)


def warm_up(cfg, steps=40):
    """The rates rise from step to step. Counted by Adam, which is in the checkpoint: exact where a run goes on, too.
    (--resume sets the rates themselves to those of the settings.)"""
    models = rm.load_models(cfg)
    models.optimizer = rm.make_optimizer(models, cfg)
    usual = [group["lr"] for group in models.optimizer.param_groups]

    def set_rates(optimizer, *_):  # before each step
        done = max((int(state["step"]) for state in optimizer.state.values()), default=0)
        for group, lr in zip(optimizer.param_groups, usual):
            group["lr"] = lr * min(1, (done + 1) / steps)
    models.optimizer.register_step_pre_hook(set_rates)
    return rm.train(cfg, models)


def hidden_matrices(policy):  # -> these, all other weights
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


# ---------------------------------------------------------------------------------------------- other networks
ONCE_TOKENS = 2 * rm.MICRO_TOKENS  # that a pass of read_once reads


def lora(cfg):
    """Low-rank adapters (pip install peft).
    The checkpoint holds the adapter alone beside trainer.pt: models.policy.merge_and_unload().save_pretrained(FOLDER)
    makes a folder that --model takes."""
    with rm.or_say("this recipe needs peft: pip install peft"):
        import peft
    models = rm.load_models(cfg)
    rm.need(not hasattr(models.policy, "peft_config"), f"{cfg.model} is an adapter already: merge it first, or --resume")
    adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    models.policy = peft.get_peft_model(models.policy, adapters)
    return rm.train(cfg, models)


def read_once(cfg):
    """The first message of a group's episodes is read once in the update, too: pays where it is long.
    The same gradients, to rounding."""
    models = rm.load_models(cfg)
    read_messages_once(models)
    return rm.train(cfg, models)


def bf16(cfg):
    """A CPU that multiplies in bf16 (avx512_bf16, AMX) does so, as a GPU does: half the time for SmolLM2-135M.
    Weights, gradients and Adam stay fp32. The first ratios are 1 only roughly, as on a GPU."""
    calculate_in_bf16()
    return rm.train(cfg)


def calculate_in_bf16(enabled=True):
    rm.autocast.__init__("cpu", torch.bfloat16, enabled)  # the object that decorates what is calculated, made anew


def read_messages_once(models):
    rm.micro_batches = alike_together
    for network in (models.policy, models.critic, models.ref):
        if network:
            share_beginning(network)


def alike_together(batch, rows):  # yields what rm.micro_batches yields
    """A pass has rows of one first message, which counts once. Else as there: similar lengths, bounded memory."""
    length = (batch["mask"].cumsum(1).argmax(1) + 1).tolist()
    of_message = {}  # first message: rows
    for row in sorted(rows, key=length.__getitem__):
        first = batch["mask"][row].int().argmax() + 1  # so many tokens have been read when the model begins to write
        message = tuple(batch["inputs"][row, :first].tolist())
        of_message.setdefault(message, []).append(row)
    for message, group in of_message.items():
        packs = []
        for row in group:
            more = length[row] - len(message)
            if not packs or len(message) + (len(packs[-1]) + 1) * more > ONCE_TOKENS:  # this row would be too much
                packs.append([])
            packs[-1].append(row)
        for pack in packs:  # its last row is the longest
            yield pack, {name: x[pack, :length[pack[-1]]] for name, x in batch.items()}


def share_beginning(network):
    """Its decoder reads (b,T) as 1 row of what all b rows have in common, and then b rows of the rest, which attend to
    the keys and values of the first. Gradients flow through those, and add up there."""
    decoder = network.get_decoder()
    plain = decoder.forward

    def forward(input_ids, past_key_values=None, **options):
        if past_key_values is not None:  # the rollout has a cache of its own
            return plain(input_ids=input_ids, past_key_values=past_key_values, **options)
        b, T = input_ids.shape
        common = (input_ids == input_ids[0]).all(0).long().cumprod(0)  # 1 up to the first difference, then 0
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


def own_model(cfg):
    """A model that exists as an object only (here a random one, which says nothing valid).
    It is saved once, so that critic and reference can be made of it, too. What the program asks of a policy, as all causal
    models of transformers have it: get_decoder(), get_output_embeddings(), save_pretrained(); and a call with input_ids,
    position_ids, past_key_values (each layer calls its `update`), attention_mask (b,1,q,columns), which is added to the
    scores, and logits_to_keep=1 (only the last logits). Whatever is done to logits after the head must not matter."""
    tok = transformers.AutoTokenizer.from_pretrained(rm.TINY)
    shape = transformers.LlamaConfig(
        vocab_size=len(tok),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2)
    folder = f"{cfg.out or 'runs/own-model'}-begin"
    if cfg.resume:  # its settings name the model
        return rm.train(cfg)
    rm.need(cfg.model == "tiny", "own_model makes its own model: no --model")
    rm.need(not Path(folder).exists(), f"{folder} exists: give another --out (or --model {folder} to ragen_mini.py)")
    with rm.or_say(f"cannot save in {folder}: is the disk full?"):
        transformers.LlamaForCausalLM(shape).save_pretrained(folder)
        tok.save_pretrained(folder)
    return rm.train(rm.replace(cfg, model=folder))


ALL = (rloo, discount_per_turn, early_turns_count_more, mean_of_episodes, cispo, gspo, short_answers, said, sgd, muon,
       warm_up, lora, read_once, bf16, own_model)
RECIPES = {recipe.__name__: recipe for recipe in ALL}

if __name__ == "__main__":
    table = ""
    for name, recipe in RECIPES.items():
        about, *_ = inspect.getdoc(recipe).splitlines()
        table += f"{name:24}{about}\n"
    name = "".join(sys.argv[1:2])
    choose = "choose one of these, such as python extras/recipes.py rloo --env bandit"
    if name in ("", "-h", "--help"):
        sys.exit(print(f"{table}\n{choose}"))
    rm.need(name in RECIPES, f"{table}\nno recipe {name!r}: {choose}")
    sys.argv[:2] = [f"{sys.argv[0]} {name}"]  # whose run it is, for --resume
    rm.main(RECIPES[name])
