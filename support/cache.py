"""Reading: the model sees each token once, and keeps its keys and values in a cache."""
import torch
from torch import nn

from support.errors import need


def read(policy, cache, trajs, cfg):  # -> log-probs (b,V) of the next token of each trajectory
    """The model reads those ids of each trajectory that are not in the cache yet.

    The result is that of a plain pass over the whole trajectory:
        (policy(torch.tensor([traj.ids])).logits[0, -1] / cfg.temperature).log_softmax(-1)
    But nothing is read twice. (`policy.generate` would read the whole history again in each turn.
    On a CPU that takes twice as long. On a GPU it is slower only where answers differ in length.)

    Rows with fewer new ids are padded on the right. In this batch of two, h is cached, a b c x are
    new, and - is a pad:
        h h h a b c      input a b c      written to columns 3 4 5      at positions 3 4 5
        h x              input x - -      written to columns 1 2 3      at positions 1 1 1
    So the keys and values of pads come to lie behind the end of their row. There a mask hides them,
    and the next ids of the row overwrite them. What the model computes at a pad is never used. (Its
    position is that of the last id, because a model may know no later one.)
    """
    device = cfg.device
    new = [traj.ids[cache.length.get(traj, 0):] for traj in trajs]
    q = max(len(ids) for ids in new)
    inputs = torch.tensor([ids + [0] * (q - len(ids)) for ids in new], device=device)  # (b,q)
    last = torch.tensor([len(ids) - 1 for ids in new], device=device)  # (b,)
    columns = cache.prepare(trajs, q, device)  # (b,q)
    positions = columns.minimum(columns[:, :1] + last[:, None])
    # A token may look at the columns up to its own.
    beyond = torch.arange(cache.used, device=device) > columns[:, None, :, None]  # (b,1,q,used)

    decoder, head = policy.get_decoder(), policy.get_output_embeddings()
    hidden = decoder(input_ids=inputs, position_ids=positions, past_key_values=cache,
                     attention_mask=-1e30 * beyond).last_hidden_state  # (b,q,D)
    for traj in trajs:
        cache.length[traj] = len(traj.ids)

    # The head makes logits for the last id of each row alone, because logits are large.
    logits = head(hidden[torch.arange(len(new), device=device), last])  # (b,V)
    logp = (logits.float() / cfg.temperature).log_softmax(-1)
    need(not logp.isnan().any(), f"The model {cfg.model} gives probabilities that are not numbers. "
                                 f"If this run has broken it, --resume the run with a lower --lr.")
    return logp


class KVCache:
    """Keys and values of everything that was read: a row for each episode, a column for each token.

    It takes the place of the library's caches, which keep all rows equally long. An attention layer
    of transformers calls only its `update`.
    """
    def __init__(self):
        self.layers = {}  # number of the layer -> table (rows, columns, heads, 2 * width)
        self.row = {}  # trajectory -> its row
        self.length = {}  # trajectory -> how many of its ids are in the cache

    def prepare(self, trajs, q, device):  # -> columns (b,q)
        """Must be called before each pass: it chooses the places where `update` will store."""
        for traj in trajs:
            self.row.setdefault(traj, len(self.row))
        lengths = [self.length.get(traj, 0) for traj in trajs]
        begin = torch.tensor(lengths, device=device)[:, None]  # (b,1)
        self.columns = begin + torch.arange(q, device=device)
        self.rows = torch.tensor([self.row[traj] for traj in trajs], device=device)  # (b,)
        self.used = max(lengths) + q  # columns that are in use
        return self.columns

    def update(self, keys, values, layer, *_):  # (b, heads, q, width) -> (b, heads, used, width)
        """Stores the new keys and values, and returns all those of the same episodes."""
        # Under autocast values are bf16, but keys come in fp32 from their position embedding.
        keys = keys.to(values.dtype)
        new = torch.cat((keys, values), -1).transpose(1, 2)  # (b, q, heads, 2 * width)
        table = self.layers.get(layer, new[:, :0])  # at first a table without columns
        if table.shape[1] < self.used:
            # Growing copies the table, so it grows by 64 columns at once, or by more.
            more = -(-(self.used - table.shape[1]) // 64) * 64
            table = nn.functional.pad(table, (0, 0, 0, 0, 0, more))
        self.layers[layer] = table
        table[self.rows[:, None], self.columns] = new
        seen = table[:, :self.used].index_select(0, self.rows)
        keys, values = seen.transpose(1, 2).chunk(2, -1)
        return keys, values

    def select(self, trajs, sources=None):
        """Keeps the rows of these trajectories alone. Row i is then that of trajs[i].

        sources: trajectories that were read, of which trajs[i] is to get a copy of the i-th's row.
        """
        sources = sources or trajs
        rows = [self.row[traj] for traj in sources]
        for layer, table in self.layers.items():
            self.layers[layer] = table[rows]
        self.length = {traj: self.length[source] for traj, source in zip(trajs, sources)}
        self.row = {traj: row for row, traj in enumerate(trajs)}


@torch.no_grad()
def gap_of_reading(policy, traj, cfg):  # -> mean difference of the logits, in fp32
    """Between reading in two steps and a plain pass. It is 0, but for rounding, if the model's
    layers work with KVCache, and if its logits are those of its head.
    """
    cache = KVCache()
    ids = traj.ids
    traj.ids = ids[:len(ids) // 2]
    read(policy, cache, [traj], cfg)
    traj.ids = ids
    by_cache = read(policy, cache, [traj], cfg)
    logits = policy(input_ids=torch.tensor([ids], device=cfg.device), use_cache=False).logits
    plain = (logits[:, -1].float() / cfg.temperature).log_softmax(-1)
    return (by_cache.clamp(-1e4) - plain.clamp(-1e4)).abs().mean() * cfg.temperature
