"""Three ways to a faster rollout on a GPU. They are prepared, and not yet measured.

    python extras/fast_rollout.py graph --model MODEL ...       options as of ragen_mini.py
    python extras/fast_rollout.py compile --model MODEL ...
    python extras/fast_rollout.py batching --model MODEL ...

graph     The rollout of ragen_mini.py spends most of its time on launching kernels, 1,300 for each
          token of Qwen2.5-0.5B. A CUDA graph launches them all at once. It needs tensors that stay
          at their places. So rows are padded to the next power of two, columns to the next 256,
          and there is a graph for each such size. The cache lives as long as the run. The copy of
          the policy that plays has its large weights in bf16, so nothing is cast in the loop. All
          else is as in ragen_mini.py. On a CPU, where nothing is recorded, so are the episodes.
compile   The same, where torch.compile has merged kernels before the graph is recorded.
batching  Continuous batching, an engine of transformers. In each turn it gets the ids so far, of
          which it finds whole blocks of 256 in its cache. NOTE: its thread knows no autocast, so
          on a GPU all of the copy that plays is bf16, and ratios are further from 1. It tells no
          entropy, for which -log p of the sampled tokens stands. Its thread decides which answers
          share a pass, so equal seeds need not give equal episodes. And without the package
          flash-attn it records no graphs, and each answer looks at the keys of all others.
"""
import copy
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

import ragen_mini as rm
import runs

# Columns are padded to a multiple of this.
COLUMNS = 256
# Who turns the traced step into kernels (`compile`). On a CPU nobody, as that takes a minute.
BACKEND = "inductor" if rm.CUDA else "eager"


# ---------------------------------------------------------------------- the copy that plays
def in_bf16(policy):
    with rm.autocast():
        return torch.is_autocast_enabled(policy.get_input_embeddings().weight.device.type)


def copy_of(policy):
    """Where autocast is on, the layers that would cast their weights have them in bf16 already."""
    player = copy.deepcopy(policy).requires_grad_(False)
    for layer in player.modules():
        if isinstance(layer, torch.nn.Linear) and in_bf16(policy):
            # A new tensor, because the head may share its weight with the embedding.
            for name, weights in layer.named_parameters(recurse=False):
                setattr(layer, name, torch.nn.Parameter(weights.bfloat16(), requires_grad=False))
    return player


def copy_in_bf16(policy):
    """Where autocast is on, all weights are bf16."""
    player = copy.deepcopy(policy).requires_grad_(False)
    if in_bf16(policy):
        # policy.to(bf16) would also round the frequencies of the position embedding.
        for weights in player.parameters():
            weights.data = weights.bfloat16()
    return player


def room_for_columns(cfg):  # as in runs.episodes_at_once
    return padded(cfg.max_turns * (cfg.max_new_tokens + 200))


def padded(columns):
    return -(-columns // COLUMNS) * COLUMNS


# ----------------------------------------------------------------------------------- graph, compile
def graph(compiled=False):
    rollout_, read_, KVCache = rm.rollout, rm.read, rm.KVCache
    player = None

    def rollout(models, seeds, N, cfg, sampling_seed):
        nonlocal player
        if player is None or player.policy is not models.policy:
            player = Player(models.policy, compiled)
        player.copy.load_state_dict(models.policy.state_dict())  # as it is now
        rm.KVCache = lambda: player.cache_for(len(seeds) * N, cfg)
        try:
            models = replace(models, policy=player.copy)
            return rollout_(models, seeds, N, cfg, sampling_seed)
        finally:
            rm.KVCache = KVCache

    def read(policy, cache, trajs, cfg):
        one_each = all(len(traj.ids) == traj.cached + 1 for traj in trajs)
        if isinstance(cache, StaticCache) and one_each:
            return player.next_logps(trajs, cfg)
        return read_(policy, cache, trajs, cfg)
    rm.rollout, rm.read = rollout, read


def compile_():
    graph(compiled=True)


class StaticCache(rm.KVCache):
    """Its tables stay at their places, and the columns in use are a multiple of COLUMNS.

    The last row is for rows of a pass that belong to no episode.
    """
    def __init__(self, rows, columns):
        super().__init__()
        self.shape = rows + 1, columns
        self.forget()

    def forget(self):
        self.recorded = {}  # (rows of a pass, columns in use) -> its inputs, the pass
        self.pool = torch.cuda.graph_pool_handle() if rm.CUDA else None  # the graphs' memory

    def prepare(self, trajs, q, device):
        columns = super().prepare(trajs, q, device)
        self.used = padded(self.used)
        return columns

    def update(self, keys, values, layer, *_):
        if layer not in self.layers:
            heads, width = keys.shape[1], 2 * keys.shape[3]
            self.layers[layer] = values.new_zeros(*self.shape, heads, width)
        if self.layers[layer].shape[1] < self.used:  # then the table moves, as it grows
            self.forget()
        return super().update(keys, values, layer)

    def select(self, trajs):
        rows = [traj.cache_row for traj in trajs]
        for table in self.layers.values():
            table[:len(rows)] = table[rows]
        for row, traj in enumerate(trajs):
            traj.cache_row = row


class Player:
    """What lives as long as the run: the copy that plays, its cache, its recorded passes."""
    def __init__(self, policy, compiled):
        self.policy = policy
        self.copy = copy_of(policy)
        self.copy.set_attn_implementation("grouped")
        self.step = self.logits
        if compiled:
            self.step = torch.compile(self.logits, dynamic=True, backend=BACKEND)
        self.cache = StaticCache(0, 0)

    def cache_for(self, rows, cfg):
        columns = room_for_columns(cfg)
        if rows >= self.cache.shape[0] or columns > self.cache.shape[1]:
            self.cache = StaticCache(rows, columns)
        return self.cache

    def next_logps(self, trajs, cfg):  # as rm.read, with one new id in each trajectory
        B = 1 << (len(trajs) - 1).bit_length()
        used = padded(max(len(traj.ids) for traj in trajs))
        new = [(traj.ids[-1], traj.cache_row, traj.cached) for traj in trajs]
        new += [(0, self.cache.shape[0] - 1, 0)] * (B - len(trajs))
        new = torch.tensor(new).T  # (3,B): id, row, column
        if (B, used) not in self.cache.recorded:
            inputs = new.to(cfg.device)
            self.cache.recorded[B, used] = inputs, self.record(inputs, used)
        inputs, run = self.cache.recorded[B, used]
        inputs.copy_(new)
        logits = run()[:len(trajs)]
        for traj in trajs:
            traj.cached = len(traj.ids)
        logp = (logits.float() / cfg.temperature).log_softmax(-1)
        if logp.isnan().any():
            self.cache = StaticCache(0, 0)  # what is in this one would spoil later rollouts
            raise runs.UserError(f"The model {cfg.model} gives probabilities that are not numbers. "
                                 f"If this run has broken it, --resume the run with a lower --lr.")
        return logp

    def record(self, inputs, used):  # -> a function: the logits for what `inputs` holds then
        if not can_record(inputs):
            return lambda: self.step(inputs, used)
        # Libraries set themselves up in a first pass, outside of the recording.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step(inputs, used)
        torch.cuda.current_stream().wait_stream(side)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, pool=self.cache.pool):
            logits = self.step(inputs, used)

        def run():
            recorded.replay()
            return logits
        return run

    def logits(self, inputs, used):  # inputs (3,B): id, row, column -> (B,V)
        ids, rows, columns = inputs[0], inputs[1], inputs[2]
        self.cache.rows, self.cache.columns, self.cache.used = rows, columns[:, None], used
        future = torch.arange(used, device=ids.device) > columns.view(-1, 1, 1, 1)  # (B,1,1,used)
        hidden = self.copy.get_decoder()(
            input_ids=ids[:, None], position_ids=columns[:, None], past_key_values=self.cache,
            attention_mask=-1e30 * future).last_hidden_state
        return self.copy.get_output_embeddings()(hidden[:, 0])


def can_record(inputs):
    return inputs.device.type == "cuda"


def grouped(module, query, key, value, attention_mask, scaling=None, **_):
    """Attention where several heads share the keys and values of one, which are not copied here.

    The queries of these heads stand below each other, as if they were later tokens of one head.
    """
    b, heads, q, width = query.shape  # keys and values: (b, shared, used, width)
    shared = key.shape[1]
    query = query.reshape(b, shared, heads // shared * q, width)
    mask = attention_mask.to(query.dtype).repeat(1, 1, heads // shared, 1)
    seen = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling)
    return seen.view(b, heads, q, width).transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("grouped", grouped)


# ----------------------------------------------------------------------------- continuous batching
def batching():
    rm.rollout = rollout_by_batching


@torch.no_grad()
def rollout_by_batching(models, seeds, N, cfg, sampling_seed):  # as rm.rollout
    trajs = [rm.begin(seed, episode, group, models.tok, cfg)
             for group, seed in enumerate(seeds) for episode in range(N)]
    ends = rm.end_tokens(models, cfg)
    player = copy_in_bf16(models.policy)
    how = transformers.GenerationConfig(
        do_sample=True, temperature=cfg.temperature, top_k=0, top_p=1.0, eos_token_id=ends,
        pad_token_id=0, max_new_tokens=cfg.max_new_tokens)
    # Its cache would outlive a step of the policy. So each rollout has an engine of its own.
    engine = transformers.ContinuousBatchingConfig(
        return_logprobs=True, seed=sampling_seed, max_batch_tokens=max(1024, len(trajs)),
        num_blocks=len(trajs) * (room_for_columns(cfg) // 256 + 1))
    with player.continuous_batching_context_manager(
            generation_config=how, continuous_batching_config=engine) as manager:
        live = trajs
        while live:
            for traj, answer in zip(live, answers(manager, live, cfg)):
                for token, logp in zip(answer.generated_tokens, answer.logprobs, strict=True):
                    traj.append([token], sampled=True, logp=logp)
                    traj.entropy -= logp
                rm.take_turn(traj, models.tok, cfg, ends)
            live = [traj for traj in live if not traj.done]
            runs.check_length(models.policy, live, cfg)
    return trajs


def answers(manager, trajs, cfg):  # -> what the engine says of each trajectory
    wanted = manager.add_requests([traj.ids for traj in trajs], max_new_tokens=cfg.max_new_tokens)
    found = {}
    while len(found) < len(wanted):
        answer = manager.get_result(timeout=1)
        if answer is None:
            assert manager.is_running(), "The engine of transformers has ended with an error."
        elif answer.is_finished():
            assert not answer.error, answer.error
            found[answer.request_id] = answer
    return [found[name] for name in wanted]


WAYS = {"graph": graph, "compile": compile_, "batching": batching}


def main():
    way = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if way not in WAYS:
        with runs.one_line_errors():
            print(__doc__, flush=True)
        sys.exit(0 if way in ("-h", "--help") else f"There is no way {way}.")
    sys.argv[:2] = [f"{sys.argv[0]} {way}"]  # so a run has the name of the way, see runs.script
    WAYS[way]()
    rm.main()


if __name__ == "__main__":
    main()
