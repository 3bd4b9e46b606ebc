"""Token bookkeeping: who wrote what, what is trained, where the rewards land."""
import copy
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

import envs
import plots
import ragen_mini as rm
from conftest import random_llama


def written(traj):
    return [i for i, mine in zip(traj.ids, traj.mask) if mine]


@pytest.mark.parametrize("text, expected", [
    ("<think>It is below.</think><answer>down || Left</answer>", ["Down", "Left"]),
    ("<think></think> \n <answer> UP </answer>\n", ["Up"]),
    ("<think>a < b</think><answer>Up||Up||Up||Up||Up||Up||Up</answer>", ["Up"] * 5),  # the limit
    ("<think>x</think><answer>Up||Up||Up||Up||Up||jump</answer>", ["Up"] * 5),  # what is dropped is not judged
    ("<answer>Down</answer>", ["Down"]),  # with --no-think; else every text begins with <think>
    (" <answer>Down</answer>", None),
    ("<think>x</think><answer>Down || jump</answer>", None),
    ("<think>x</think><answer></answer>", None),
    ("<think>x</think><answer>Down ||</answer>", None),
    ("<think>x</think><answer>Down</answer> and more", None),
    ("<think>x</think>so<answer>Down</answer>", None),
    ("<think>x<think></think><answer>Down</answer>", None),
    ("<think>x</think><answer><answer>Down</answer>", None),
    ("<think>x</think><answer>Down</answer><answer>Up</answer>", None),
    ("<think>x", None), ("", None)])
def test_parse_answer(text, expected):
    assert rm.parse_answer(text, envs.Sokoban.actions, 5) == expected


def test_parser_is_fast_on_hostile_input():
    start = time.perf_counter()
    for text in ("<think>" * 20000, "<think></think><answer>" + "||" * 50000, "<think></think>" * 8000,
                 "<think>" + " " * 100000, "<think></think>" + " " * 100000, "\0" * 100000, "<answer>" * 20000):
        assert rm.parse_answer(text, envs.Sokoban.actions, 5) is None
    assert time.perf_counter() - start < 5


@pytest.fixture
def players(llama, tok):
    return SimpleNamespace(policy=llama, tok=tok)


def test_trained_tokens_are_exactly_the_sampled_ones(players, cfg, monkeypatch):
    """Record what was sampled for whom, compare with what the trajectories hold and with the mask after collate."""
    writing, sampled = [], {}
    sample, multinomial = rm.sample, torch.multinomial

    def spy_sample(trajs, logp, generator):  # the next tokens are for these
        writing[:] = trajs
        sample(trajs, logp, generator)

    def spy_multinomial(*args, **kwargs):
        ids = multinomial(*args, **kwargs)
        for traj, (token,) in zip(writing, ids.tolist(), strict=True):
            sampled[id(traj)] = sampled.get(id(traj), []) + [token]
        return ids
    monkeypatch.setattr(rm, "sample", spy_sample)
    monkeypatch.setattr(torch, "multinomial", spy_multinomial)
    trajs = rm.rollout(players, [300, 301, 302], 2, cfg, 0)
    batch = rm.collate(trajs, "cpu")
    for i, traj in enumerate(trajs):
        assert written(traj) == sampled[id(traj)]
        assert batch["targets"][i][batch["mask"][i]].tolist() == sampled[id(traj)]


def test_tokens_are_drawn_as_often_as_their_probability_says(tok):
    """4,000 trajectories draw one token each from the same distribution."""
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    trajs = [rm.Trajectory(None, 0, 10) for _ in range(4000)]
    rm.sample(trajs, p.log().expand(4000, -1), torch.Generator().manual_seed(0))
    counts = torch.tensor([traj.ids[0] for traj in trajs]).bincount(minlength=4)
    assert counts[3] == 0
    for count, chance in zip(counts[:3].tolist(), p.tolist()):
        assert abs(count - 4000 * chance) < 4 * (4000 * chance * (1 - chance)) ** 0.5
    assert all(traj.old_logp == [pytest.approx(p[traj.ids[0]].log().item())] and traj.mask == [True] for traj in trajs)
    assert trajs[0].entropy == pytest.approx(torch.distributions.Categorical(p).entropy().item())


def test_bookkeeping_of_one_episode(play, tok, cfg):
    """Two turns, one of them invalid: prompt, prefill and observations are context, the end of turn is trained."""
    cfg.max_turns = 2
    traj, = play(["sure.</think><answer>Left</answer>", "just try"], "sokoban", [300], cfg)
    text = tok.decode(written(traj))
    assert text == "sure . </think> <answer> Left </answer> <|im_end|> just try <|im_end|>"
    first = traj.ids[:traj.mask.index(True)]
    assert tok.decode(first).endswith("<|im_start|> assistant \n <think>"), "the prefill belongs to the prompt"
    assert [turn["valid"] for turn in traj.turns] == [True, False]
    assert traj.ids.count(tok.eos_token_id) == 4, "two messages and two answers: each ends once"
    ends = [i for i, token in enumerate(traj.ids) if token == tok.eos_token_id and traj.mask[i]]
    assert [traj.reward[i] for i in ends] == [turn["reward"] for turn in traj.turns], "on the last token of the answer"
    assert traj.turns[1]["reward"] == rm.FORMAT_PENALTY
    assert sum(traj.reward) == pytest.approx(traj.R) == pytest.approx(sum(t["reward"] for t in traj.turns))
    assert sum(r != 0 for r in traj.reward) == 2 and traj.actions_left == 9


def test_an_invalid_answer_moves_nothing(play, cfg):
    traj, = play(["just try"], "frozenlake", [300], cfg)
    assert len({turn["state"] for turn in traj.turns}) == 1 and len(traj.turns) == 5
    assert traj.R == pytest.approx(-0.5), "a fully collapsed run sits at -0.5"
    assert traj.actions_left == 10 and traj.done and not traj.success


def test_limits_of_actions_and_turns(play, cfg):
    """At most 5 actions a turn, 10 an episode: 7 wished-for actions give 5 + 5, then the episode is over."""
    wish = "</think><answer>" + " || ".join(["Up", "Down"] * 3 + ["Up"]) + "</answer>"
    cfg.max_new_tokens = 32
    for seed in range(300, 340):
        traj, = play([wish], "sokoban", [seed], cfg)
        if not traj.success:
            assert len(traj.turns) == 2 and traj.actions_left == 0 and traj.done
            assert traj.turns[0]["reward"] <= -0.5 + 1e-6
            break
    cfg.max_turns, cfg.max_new_tokens = 1, 60
    traj, = play([wish], "sokoban", [seed], cfg)
    assert len(traj.turns) == 1 and traj.actions_left == 5


def test_an_answer_that_is_cut_off_gets_its_end_of_turn_as_context(play, tok, cfg):
    cfg.max_new_tokens, cfg.max_turns = 3, 2
    traj, = play(["I am not sure, let me just try."], "frozenlake", [300], cfg)
    assert tok.decode(written(traj)) == "I am not I am not" and traj.turns[0]["tokens"] == 3
    last = max(i for i, mine in enumerate(traj.mask[:-3]) if mine)
    assert traj.ids[last + 1] == tok.eos_token_id and not traj.mask[last + 1]


def test_with_thinking_an_answer_without_its_thought_is_invalid(play, cfg):
    traj, = play(["<answer>Left</answer>"], "frozenlake", [300], cfg)
    assert not any(turn["valid"] for turn in traj.turns)


def test_no_think(play, tok, cfg):
    cfg = replace(cfg, no_think=True)
    traj, = play(["Left</answer>"], "frozenlake", [300], cfg)
    assert traj.turns[0]["valid"] and traj.turns[0]["answer"].startswith("<answer>")
    assert tok.decode(traj.ids[:traj.mask.index(True)]).endswith("assistant \n <answer>")


def test_groups_share_the_state_but_not_the_dice(tok, cfg, play):
    trajs = play(["</think><answer>Left || Up || Left || Up || Down</answer>"], "frozenlake", [301, 302], cfg, n=8)
    assert [t.group for t in trajs] == [0] * 8 + [1] * 8
    for group in (trajs[:8], trajs[8:]):
        assert len({t.turns[0]["state"] for t in group}) == 1
    assert len({t.turns[1]["state"] for t in trajs[:8] if len(t.turns) > 1}) > 1, "they slip differently"


@pytest.fixture(scope="module")
def bpe():
    """A byte-level BPE chat tokenizer whose pad token is its end of turn, as SmolLM2's."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|im_start|>", "<|im_end|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(["<think></think><answer>Left || Down</answer>", "Down Down Down Down"] * 50, trainer)
    template = ("{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}{% for m in messages"
                " %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|im_end|>",
                                                chat_template=template)


def test_tokens_that_would_encode_differently_stay_as_they_were_sampled(bpe, cfg, play):
    """The model may spell a word with tokens that its tokenizer would never choose: decode-encode would lose them."""
    cfg.max_new_tokens, cfg.max_turns = 64, 2
    spelled = [i for c in "</think><answer>Down</answer>" for i in bpe(c).input_ids]
    assert len(spelled) > len(bpe("</think><answer>Down</answer>").input_ids), "single letters, not merged tokens"
    answer = spelled + [bpe.eos_token_id]
    traj, = play([answer], "frozenlake", [300], cfg, tok=bpe)
    assert written(traj)[:len(answer)] == answer and traj.turns[0]["valid"]


def test_end_of_turn_is_trained_although_it_is_the_pad_token(bpe, cfg, play):
    cfg.max_turns, cfg.max_new_tokens = 1, 60
    cfg.max_new_tokens = 64
    short, long = bpe("</think><answer>Up</answer>").input_ids, bpe("Hm, hm.</think><answer>Down</answer>").input_ids
    trajs = [play([ids + [bpe.eos_token_id]], "frozenlake", [300], cfg, tok=bpe)[0] for ids in (short, long)]
    batch = rm.collate(trajs, "cpu")
    for row, traj in enumerate(trajs):
        target = batch["targets"][row][batch["mask"][row]]
        assert target[-1] == bpe.eos_token_id and len(target) == sum(traj.mask)
    assert batch["mask"].sum() == len(short) + len(long) + 2, "padding is never trained"


def test_template_text_between_answers_is_what_the_template_says(bpe, cfg):
    """Prompt + answer + continuation, decoded, is the template applied to the whole conversation."""
    first, then = rm.encode(bpe, cfg.first_tag, "question", False), rm.encode(bpe, cfg.first_tag, "observation", True)
    ours = bpe.decode(first + bpe("thought</think><answer>Up</answer>").input_ids + then)
    chat = [dict(role="user", content="question"), dict(role="assistant", content="<think>thought</think><answer>Up</answer>"),
            dict(role="user", content="observation")]
    assert ours == bpe.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + "<think>"


def test_a_template_that_puts_a_blank_behind_an_answer(bpe, cfg):
    """The model did not write it: what follows an answer begins with the token that ends it."""
    bpe = copy.deepcopy(bpe)
    bpe.chat_template = bpe.chat_template.replace("| trim }}<|im_end|>", "| trim }} <|im_end|>")
    assert rm.encode(bpe, cfg.first_tag, "observation", True)[0] == bpe.eos_token_id


def test_a_token_of_the_template_is_no_part_of_an_answer(bpe, cfg, play):
    cfg.max_turns, cfg.max_new_tokens = 1, 64
    answer = bpe("</think><answer>Left</answer>").input_ids
    for more, valid in (([], True), (bpe("<|im_start|>").input_ids, False)):
        traj, = play([answer + more + [bpe.eos_token_id]], "frozenlake", [300], cfg, tok=bpe)
        assert traj.turns[0]["valid"] == valid


def test_a_template_that_opens_the_thought_itself_gets_no_second_tag(tok, cfg):
    tok = copy.deepcopy(tok)  # encode remembers by tokenizer
    tok.chat_template = tok.chat_template.replace("assistant\n", "assistant\n<think>")
    assert tok.decode(rm.encode(tok, cfg.first_tag, "State", False)).count("<think>") == 1
    cfg = replace(cfg, no_think=True)
    assert tok.decode(rm.encode(tok, cfg.first_tag, "State", True)).endswith("assistant \n <answer>")


def test_an_answer_may_also_end_with_the_tokenizers_own_end(tok, cfg, play):
    """Some models know two such tokens. Behind the one that is not the template's, the template's is written."""
    tok = copy.deepcopy(tok)
    tok.eos_token = "."
    assert tok.eos_token_id == tok.convert_tokens_to_ids(".") != tok.convert_tokens_to_ids("<|im_end|>")
    cfg.max_turns = 2
    traj, = play([tok("Left.").input_ids], "frozenlake", [300], cfg, tok=tok)
    assert tok.decode(written(traj)) == "Left . Left ." and traj.turns[0]["answer"] == "<think>Left"
    end = traj.mask.index(True) + 2
    assert traj.ids[end] == tok.convert_tokens_to_ids("<|im_end|>") and not traj.mask[end]


def test_batch_of_one_equals_batch_of_eight(cfg):
    """Greedy: padding, the other rows and rows that leave must not change an episode."""
    cfg.max_new_tokens, cfg.algo, cfg.temperature, seeds = 40, "grpo", 1e-4, list(range(300, 308))
    models = rm.load_models(cfg)
    together = rm.rollout(models, seeds, 1, rm.replace(cfg, env="sokoban"), 0)
    assert len({len(t.ids) for t in together}) > 2, "different lengths, or the test shows nothing"
    for seed, traj in list(zip(seeds, together))[:4]:
        alone, = rm.rollout(models, [seed], 1, rm.replace(cfg, env="sokoban"), 0)
        assert alone.ids == traj.ids and alone.R == traj.R
        gap = (torch.tensor(alone.old_logp) - torch.tensor(traj.old_logp)).abs().max()
        assert gap * cfg.temperature < 1e-4, "rounding of the logits, which a low temperature magnifies"


def generated(policy, tok, cfg, name, seed):  # -> Trajectory of transformers' own `generate`
    traj = rm.begin(seed, 0, 0, tok, rm.replace(cfg, env=name))
    while not traj.done:
        ids = torch.tensor([traj.ids])  # every turn reads the whole history again
        text = policy.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=cfg.max_new_tokens,
                               do_sample=False, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
        traj.append(text[0, len(traj.ids):].tolist(), sampled=True)
        rm.take_turn(traj, tok, cfg, [tok.eos_token_id])
    return traj


def test_greedy_rollout_is_what_generate_writes(players, tok, cfg):
    """transformers' own `generate`, called for every turn on the whole history, is the independent truth."""
    players.policy.generation_config.eos_token_id = None
    cfg.temperature, seeds = 1e-4, range(300, 308)
    ours = rm.rollout(players, seeds, 1, cfg, 0)
    theirs = [generated(players.policy, tok, cfg, "frozenlake", seed) for seed in seeds]
    assert [traj.ids for traj in ours] == [traj.ids for traj in theirs]
    assert [traj.mask for traj in ours] == [traj.mask for traj in theirs]
    assert [traj.R for traj in ours] == [traj.R for traj in theirs]


@pytest.mark.parametrize("length, cached, q, columns", [(6, 3, 3, [3, 4, 5]), (2, 1, 3, [2, 3, 1]), (4, 2, 2, [2, 3])])
def test_the_columns_of_the_docstring_of_read(length, cached, q, columns):
    """Pads go behind the ids, which overwrite them when they are read."""
    cache = rm.KVCache()
    cache.aim([SimpleNamespace(ids=[7] * length, cached=cached, cache_row=0)], q)
    assert cache.columns.tolist() == [columns] and f" to columns {' '.join(map(str, columns))} " in rm.read.__doc__


def test_read_against_plain_passes_with_rows_that_wait(llama, tok, cfg):
    """Rows of different lengths read different numbers of tokens; some wait, leave, or are copied."""
    cfg.temperature = 0.7
    rng, cache = torch.Generator().manual_seed(0), rm.KVCache()

    def number(low, high):
        return torch.randint(low, high, (), generator=rng).item()

    def lengthen(traj, most):
        traj.append([number(3, len(tok)) for _ in range(number(1, most))], sampled=False)

    @torch.no_grad()
    def compare(trajs):
        found = rm.read(llama, cache, trajs, cfg)
        for traj, logp in zip(trajs, found, strict=True):
            plain = llama(torch.tensor([traj.ids])).logits[0, -1] / cfg.temperature
            assert torch.allclose(logp, plain.log_softmax(-1), atol=1e-4)
            traj.cached = len(traj.ids)

    rows = [rm.Trajectory(None, group, 10) for group in range(5)]
    for traj in rows:
        lengthen(traj, 12)
    compare(rows)
    for turn in range(30):
        if turn == 10:  # a row that leaves, and one that is there twice
            rows = [rows[4], rows[1], copy.deepcopy(rows[1]), rows[0]]
            cache.select(rows)
        some = torch.randperm(len(rows), generator=rng)[:number(1, len(rows) + 1)]
        reading = [rows[i] for i in sorted(some.tolist())]  # the others wait
        for traj in reading:
            lengthen(traj, 2 if turn % 3 else 20)
        compare(reading)
    assert len({len(traj.ids) for traj in rows}) == 4


def test_a_model_whose_numbers_are_lost_stops_the_run(llama, tok, cfg):
    broken = copy.deepcopy(llama)
    broken.lm_head.weight.data[5] = float("nan")
    with pytest.raises(envs.UserError, match="not finite"):
        rm.rollout(SimpleNamespace(policy=broken, tok=tok), [300], 1, rm.replace(cfg, env="bandit"), 0)


def test_finished_episodes_never_grow(players, cfg):
    trajs = rm.rollout(players, list(range(300, 308)), 2, rm.replace(cfg, env="bandit"), 0)
    for traj in trajs:
        assert traj.done and traj.mask[-1], "an episode ends with the model's own last token"
        assert sum(turn["valid"] for turn in traj.turns) <= 1, "one pull"


# ----------------------------------------------------------------------- models whose updates would read other numbers
def refused(players, cfg, spoil=lambda trajs: None):  # -> is it refused in one line?
    trajs = rm.rollout(players, [300, 301], 2, cfg, 0)
    spoil(trajs)
    try:
        rm.check_ratios(trajs, players, cfg)
    except envs.UserError as error:
        assert "differ by" in str(error) and "\n" not in str(error)
        return True
    return False


def test_what_the_rollout_wrote_down_is_what_an_update_reads(players, cfg):
    def off(trajs):
        trajs[0].old_logp = [logp - 0.1 for logp in trajs[0].old_logp]
    assert not refused(players, cfg) and refused(players, cfg, off)
    for cfg.temperature in (0.5, 1e-4):
        assert not refused(players, cfg)


def test_a_policy_that_changes_its_logits_behind_the_output_layer_is_refused(llama, tok, cfg):
    """As Granite, Cohere and Gemma 2 do."""
    scaled = copy.deepcopy(llama)
    forward = scaled.forward
    scaled.forward = lambda **inputs: SimpleNamespace(logits=forward(**inputs).logits / 4)
    assert refused(SimpleNamespace(policy=scaled, tok=tok), cfg)


def test_a_policy_with_dropout_is_refused(tok, cfg):
    players = SimpleNamespace(policy=random_llama(len(tok), attention_dropout=0.1), tok=tok)
    assert not refused(players, cfg)
    players.policy.train()
    assert refused(players, cfg)


@pytest.mark.parametrize("answer, thought", [
    ("<think>Go up .</think> <answer>Up</answer>", "Go up ."), ("<think>Go up and up", "Go up and up"),
    ("<think>Go</think> <answer>Up</think>", "Go"), ("<think></think>", ""), ("<answer>Up</answer>", "")])
def test_thoughts_that_do_not_end_are_thoughts(answer, thought):
    assert plots.thought_of({"answer": answer}) == thought


# ------------------------------------------------------------------------------------------- pay for what is said
def test_a_bonus_is_paid_but_not_told(cfg, play, tok):
    """Valid or not; the world is asked before anything moves."""
    heard = []

    class Talk(envs.Sokoban):
        def bonus(self, turn):
            heard.append((turn["state"], self.render(), turn["answer"], turn["valid"]))
            return 0.5 * turn["answer"].count("box")
    cfg.max_turns, cfg.max_new_tokens = 3, 30
    texts = ["box</think><answer>Up || Down || Left || Right</answer>", "box box", "Let me try"]
    plain, = play(texts, "sokoban", [300], cfg)
    paid, = play(texts, Talk, [300], cfg)
    for bonus, one, other in zip((0.5, 1.0, 0.0), plain.turns, paid.turns, strict=True):
        assert other["reward"] == pytest.approx(one["reward"] + bonus) and other["state"] == one["state"]
    assert paid.turns[0]["state"] != paid.turns[1]["state"] and plain.turns[1]["reward"] == rm.FORMAT_PENALTY
    assert paid.R == pytest.approx(plain.R + 1.5) == pytest.approx(sum(paid.reward))
    assert paid.ids == plain.ids, "no message says what the bonus has paid"
    assert [(state, answer, valid) for state, _, answer, valid in heard] == [
        (turn["state"], turn["answer"], turn["valid"]) for turn in paid.turns]
    assert all(told == seen for told, seen, _, _ in heard)
    assert [valid for *_, valid in heard] == [True, False, False]
