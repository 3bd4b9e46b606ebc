"""Who wrote which token, what is trained, where rewards are put, what the cache holds."""
import copy
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import ByteLevel

import envs
import ragen_mini as rm
import runs
from conftest import random_llama


def written(traj):
    return [i for i, mine in zip(traj.ids, traj.mask) if mine]


# -------------------------------------------------------------------------------- answers, messages
@pytest.mark.parametrize("text, expected", [
    ("<think>It is below.</think><answer>down || Left</answer>", ["Down", "Left"]),
    ("<think></think> \n <answer> UP </answer>\n", ["Up"]),
    ("<think>One line,\nand another.\n</think>\n<answer>Up ||\nDown</answer>", ["Up", "Down"]),
    ("<think>a < b</think><answer>Up||Up||Up||Up||Up||Up||Up</answer>", ["Up"] * 5),  # the limit
    # What is dropped is not judged.
    ("<think>x</think><answer>Up||Up||Up||Up||Up||jump</answer>", ["Up"] * 5),
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
    for text in ("<think>" * 20000, "<think></think><answer>" + "||" * 50000,
                 "<think></think>" * 8000, "<think>" + " " * 100000,
                 "<think></think>" + " " * 100000, "\0" * 100000, "<answer>" * 20000):
        assert rm.parse_answer(text, envs.Sokoban.actions, 5) is None
    assert time.perf_counter() - start < 5


def test_the_first_message_asks_for_what_is_valid(cfg):
    """With --no-think it must not ask for a thought, since an answer with one is then invalid."""
    env = envs.make("frozenlake")
    env.reset(300)
    for no_think in (False, True):
        some = replace(cfg, no_think=no_think, max_actions_per_turn=3)
        text = rm.message(env, some, 7)
        assert ("<think>" in text) == ("</think>" in text) == (not no_think)
        assert "<answer>" in text and env.instruction in text and env.render() in text
        assert "up to 3 actions" in text and "7 actions left" in text
        assert some.first_tag == ("<answer>" if no_think else "<think>")


# -------------------------------------------------------------------------------- whose token it is
@pytest.fixture
def players(llama, tok):
    return SimpleNamespace(policy=llama, tok=tok)


def test_trained_tokens_are_exactly_the_sampled_ones(players, cfg, monkeypatch):
    """What was sampled for whom, compared with the trajectories and with the mask of collate."""
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


def test_all_chance_of_a_rollout_follows_from_its_seed(players, cfg):
    once, again, otherwise = (rm.rollout(players, [300, 301], 2, cfg, seed) for seed in (0, 0, 1))
    assert [traj.ids for traj in once] == [traj.ids for traj in again]
    for traj in once + otherwise:
        traj.ids = written(traj)
    assert all(one.ids != other.ids for one, other in zip(once, otherwise))
    assert len({tuple(traj.ids) for traj in once}) == 4, "episodes of a group differ"


def test_tokens_are_drawn_as_often_as_their_probability_says(tok):
    """4,000 trajectories draw one token each from the same distribution."""
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    trajs = [rm.Trajectory(None, 0, 10) for _ in range(4000)]
    rm.sample(trajs, p.log().expand(4000, -1), torch.Generator().manual_seed(0))
    counts = torch.tensor([traj.ids[0] for traj in trajs]).bincount(minlength=4)
    assert counts[3] == 0
    for count, chance in zip(counts[:3].tolist(), p.tolist()):
        assert abs(count - 4000 * chance) < 4 * (4000 * chance * (1 - chance)) ** 0.5
    for traj in trajs:
        assert traj.mask == [True]
        assert traj.old_logp == [pytest.approx(p[traj.ids[0]].log().item())]
    entropy = torch.distributions.Categorical(p).entropy().item()
    assert trajs[0].entropy == pytest.approx(entropy)


def test_bookkeeping_of_one_episode(play, tok, cfg):
    """Two turns, one of them invalid. Prompt, first tag and messages are context, the end of an
    answer is trained.
    """
    cfg.max_turns = 2
    traj, = play(["sure.</think><answer>Left</answer>", "just try"], "sokoban", [300], cfg)
    assert tok.decode(written(traj)) == (
        "sure . </think> <answer> Left </answer> <|im_end|> just try <|im_end|>")
    first = traj.ids[:traj.mask.index(True)]
    assert tok.decode(first).endswith("<|im_start|> assistant \n <think>")
    assert [turn["valid"] for turn in traj.turns] == [True, False]
    assert [turn["tokens"] for turn in traj.turns] == [7, 3], "with the end token"
    assert traj.ids.count(tok.eos_token_id) == 4, "two messages, two answers: each ends once"
    ends = [t for t, mine in enumerate(traj.mask) if mine and traj.ids[t] == tok.eos_token_id]
    assert [traj.reward[t] for t in ends] == [turn["reward"] for turn in traj.turns]
    assert traj.turns[1]["reward"] == -0.1
    assert sum(traj.reward) == pytest.approx(traj.R)
    assert traj.R == pytest.approx(sum(turn["reward"] for turn in traj.turns))
    assert sum(reward != 0 for reward in traj.reward) == 2 and traj.actions_left == 9


def test_an_invalid_answer_moves_nothing(play, cfg):
    traj, = play(["just try"], "frozenlake", [300], cfg)
    assert len({turn["state"] for turn in traj.turns}) == 1 and len(traj.turns) == 5
    assert traj.R == pytest.approx(-0.5), "as in a run that has collapsed"
    assert traj.actions_left == 10 and traj.done and not traj.success


def test_a_valid_turn_after_an_invalid_one_is_not_punished(play, cfg):
    """On a level where the box is not yet pushed onto the target, an action costs 0.1."""
    cfg.max_turns = 3
    traj, = play(["Left", "</think><answer>Left</answer>", "Left"], "sokoban", [300], cfg)
    assert [turn["valid"] for turn in traj.turns] == [False, True, False]
    assert [turn["reward"] for turn in traj.turns] == pytest.approx([-0.1, -0.1, -0.1])
    assert traj.actions_left == 9
    traj, = play(["Left", "</think><answer>Teacher</answer>"], "bandit", [300], cfg)
    assert [turn["reward"] for turn in traj.turns] == [-0.1, 0.15]


def test_limits_of_actions_and_turns(play, cfg):
    """At most 5 actions a turn and 10 an episode: of 7 that are wished for, 5 run in each of two
    turns, then the episode is over.
    """
    wish = "</think><answer>" + " || ".join(["Up", "Down"] * 3 + ["Up"]) + "</answer>"
    cfg.max_new_tokens = 32
    trajs = play([wish], "sokoban", range(300, 310), cfg)
    lost = [traj for traj in trajs if not traj.success]
    assert lost
    for traj in lost:
        assert len(traj.turns) == 2 and traj.actions_left == 0 and traj.done
    cfg.max_turns = 1
    for traj in play([wish], "sokoban", range(300, 310), cfg):
        assert len(traj.turns) == 1 and (traj.actions_left == 5 or traj.success)


def test_an_answer_that_is_cut_off_gets_its_end_as_context(play, tok, cfg):
    cfg.max_new_tokens, cfg.max_turns = 3, 2
    traj, = play(["I am not sure, let me just try."], "frozenlake", [300], cfg)
    assert tok.decode(written(traj)) == "I am not I am not" and traj.turns[0]["tokens"] == 3
    last = max(t for t, mine in enumerate(traj.mask[:-3]) if mine)
    assert traj.ids[last + 1] == tok.eos_token_id and not traj.mask[last + 1]


def test_with_thinking_an_answer_without_its_thought_is_invalid(play, cfg):
    traj, = play(["<answer>Left</answer>"], "frozenlake", [300], cfg)
    assert not any(turn["valid"] for turn in traj.turns)


def test_no_think(play, tok, cfg):
    cfg = replace(cfg, no_think=True)
    traj, = play(["Left</answer>"], "frozenlake", [300], cfg)
    assert traj.turns[0]["valid"] and traj.turns[0]["answer"].startswith("<answer>")
    assert tok.decode(traj.ids[:traj.mask.index(True)]).endswith("assistant \n <answer>")


def test_groups_share_the_level_but_not_the_dice(cfg, play):
    wish = "</think><answer>Left || Up || Left || Up || Down</answer>"
    trajs = play([wish], "frozenlake", [301, 302], cfg, n=8)
    assert [traj.group for traj in trajs] == [0] * 8 + [1] * 8
    for group in (trajs[:8], trajs[8:]):
        assert len({traj.turns[0]["state"] for traj in group}) == 1
    after = {traj.turns[1]["state"] for traj in trajs[:8] if len(traj.turns) > 1}
    assert len(after) > 1, "they slip differently"


# -------------------------------------------------------------------- tokenizers and chat templates
TEMPLATE = """\
{% if messages[0].role != 'system' %}<|im_start|>system
Be good.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def byte_level_bpe():
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    texts = ["<think></think><answer>Left || Down</answer>", "Down Down Down Down"]
    tok.train_from_iterator(texts * 50, trainer)
    return tok


@pytest.fixture(scope="module")
def bpe():
    """A chat tokenizer whose pad token is the end of its turn, as that of SmolLM2."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(), eos_token="<|im_end|>", pad_token="<|im_end|>",
        chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def bpe_with_bos():
    """One that puts <s> before everything it encodes, as that of Llama 3. So does its template."""
    tok = byte_level_bpe()
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tok.token_to_id("<s>"))])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|im_end|>",
        chat_template="{{ bos_token }}" + TEMPLATE)


def test_tokens_that_would_encode_differently_stay_as_they_were_sampled(bpe, cfg, play):
    """The model may spell a word with tokens that its tokenizer would never choose. Decoding and
    encoding again would lose them.
    """
    cfg.max_new_tokens, cfg.max_turns = 64, 2
    text = "</think><answer>Down</answer>"
    spelled = [i for letter in text for i in bpe(letter).input_ids]
    assert len(spelled) > len(bpe(text).input_ids), "single letters, not merged tokens"
    answer = [*spelled, bpe.eos_token_id]
    traj, = play([answer], "frozenlake", [300], cfg, tok=bpe)
    assert written(traj)[:len(answer)] == answer and traj.turns[0]["valid"]


def test_the_end_of_an_answer_is_trained_although_it_is_the_pad_token(bpe, cfg, play):
    cfg.max_turns, cfg.max_new_tokens = 1, 64
    short = bpe("</think><answer>Up</answer>").input_ids
    long = bpe("Hm, hm.</think><answer>Down</answer>").input_ids
    trajs = []
    for ids in (short, long):
        trajs += play([[*ids, bpe.eos_token_id]], "frozenlake", [300], cfg, tok=bpe)
    batch = rm.collate(trajs, "cpu")
    for row, traj in enumerate(trajs):
        target = batch["targets"][row][batch["mask"][row]]
        assert target[-1] == bpe.eos_token_id and len(target) == sum(traj.mask)
    assert batch["mask"].sum() == len(short) + len(long) + 2, "padding is never trained"


@pytest.mark.parametrize("kind", ["bpe", "bpe_with_bos"])
def test_prompt_answer_and_next_message_are_one_chat(kind, request, cfg):
    """Decoded, they are what the template makes of the whole conversation. In particular a BOS
    stands at its beginning, and nowhere else.
    """
    tok = request.getfixturevalue(kind)
    answer = "<think>thought</think><answer>Up</answer>"
    first = rm.encode(tok, cfg.first_tag, "question")
    then = rm.encode(tok, cfg.first_tag, "observation", after_answer=True)
    of_answer = tok(answer.removeprefix("<think>"), add_special_tokens=False).input_ids
    chat = [dict(role="user", content="question"), dict(role="assistant", content=answer),
            dict(role="user", content="observation")]
    whole = tok.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + "<think>"
    assert tok.decode([*first, *of_answer, *then]) == whole
    ends = rm.end_tokens(SimpleNamespace(policy=None, tok=tok), cfg)
    assert set(ends) == {tok.eos_token_id}


def test_a_template_that_puts_a_space_behind_an_answer(bpe, cfg):
    """The model did not write it. What follows an answer begins with the token that ends it."""
    bpe = copy.deepcopy(bpe)
    bpe.chat_template = bpe.chat_template.replace("| trim }}<|im_end|>", "| trim }} <|im_end|>")
    assert rm.encode(bpe, cfg.first_tag, "observation", True)[0] == bpe.eos_token_id


def test_a_token_of_the_template_is_no_part_of_a_valid_answer(bpe, cfg, play):
    cfg.max_turns, cfg.max_new_tokens = 1, 64
    answer = bpe("</think><answer>Left</answer>").input_ids
    for more, valid in (([], True), (bpe("<|im_start|>").input_ids, False)):
        traj, = play([[*answer, *more, bpe.eos_token_id]], "frozenlake", [300], cfg, tok=bpe)
        assert traj.turns[0]["valid"] == valid


def test_an_answer_is_read_as_it_was_written(tok, cfg, play):
    """Some tokenizers tidy up what they decode. Then "not sure , ." would become "not sure,."."""
    tok = copy.deepcopy(tok)
    tok.clean_up_tokenization_spaces = True
    cfg.max_turns = 1
    text = "I am not sure , ."
    assert tok.decode(tok(text).input_ids) != text, "else the test shows nothing"
    traj, = play([text], "frozenlake", [300], cfg, tok=tok)
    assert traj.turns[0]["answer"] == "<think>" + text


@pytest.mark.parametrize("opens", ["<think>", "<think>\n", "<think>\n\n</think>\n\n"])
def test_a_template_that_writes_think_itself_gets_no_second_tag(tok, cfg, opens):
    """As that of DeepSeek R1, or of Qwen3 without thinking."""
    tok = copy.deepcopy(tok)  # because encode remembers by tokenizer
    tok.chat_template = tok.chat_template.replace("assistant\n", "assistant\n" + opens)
    text = tok.decode(rm.encode(tok, cfg.first_tag, "State"))
    assert text.count("<think>") == 1 and text.endswith("assistant \n <think>")
    cfg = replace(cfg, no_think=True)
    text = tok.decode(rm.encode(tok, cfg.first_tag, "State", True))
    assert text.endswith("assistant \n <answer>")


def test_an_answer_may_also_end_with_the_end_token_of_the_tokenizer(tok, cfg, play):
    """Some models know two such tokens. Behind that of the tokenizer, that of the template is put.
    """
    tok = copy.deepcopy(tok)
    tok.eos_token = "."
    dot, end = tok.convert_tokens_to_ids([".", "<|im_end|>"])
    assert tok.eos_token_id == dot != end
    cfg.max_turns = 2
    traj, = play([tok("Left.").input_ids], "frozenlake", [300], cfg, tok=tok)
    assert tok.decode(written(traj)) == "Left . Left ."
    assert traj.turns[0]["answer"] == "<think>Left"
    behind = traj.mask.index(True) + 2
    assert traj.ids[behind] == end and not traj.mask[behind]


# ------------------------------------------------------------------------------- rows and the cache
def test_an_episode_alone_is_the_same_as_among_eight(cfg):
    """Greedy: padding, the other rows, and rows that leave, must not change an episode."""
    cfg.max_new_tokens, cfg.algo, cfg.temperature, cfg.env = 40, "grpo", 1e-4, "sokoban"
    seeds = list(range(300, 308))
    players = rm.load_models(cfg)
    together = rm.rollout(players, seeds, 1, cfg, 0)
    assert len({len(traj.ids) for traj in together}) > 2, "else the test shows nothing"
    for seed, traj in list(zip(seeds, together))[:4]:
        alone, = rm.rollout(players, [seed], 1, cfg, 0)
        assert alone.ids == traj.ids and alone.R == traj.R
        gap = (torch.tensor(alone.old_logp) - torch.tensor(traj.old_logp)).abs().max()
        # A low temperature magnifies the rounding of logits.
        assert gap * cfg.temperature < 1e-4


def generated(policy, tok, cfg, seed):  # -> a Trajectory of transformers' own `generate`
    traj = rm.begin(seed, 0, 0, tok, cfg)
    while not traj.done:
        ids = torch.tensor([traj.ids])  # every turn reads the whole history again
        text = policy.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=cfg.max_new_tokens, eos_token_id=tok.eos_token_id,
            pad_token_id=tok.pad_token_id)
        traj.append(text[0, len(traj.ids):].tolist(), sampled=True)
        rm.take_turn(traj, tok, cfg, [tok.eos_token_id])
    return traj


def test_a_greedy_rollout_is_what_generate_writes(players, tok, cfg):
    """`generate`, called for every turn on the whole history, is the independent truth."""
    players.policy.generation_config.eos_token_id = None
    cfg.temperature, seeds = 1e-4, range(300, 308)
    ours = rm.rollout(players, seeds, 1, cfg, 0)
    theirs = [generated(players.policy, tok, cfg, seed) for seed in seeds]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.ids, one.mask, one.R) == (other.ids, other.mask, other.R)


@pytest.mark.parametrize("length, cached, q, columns", [
    (6, 3, 3, [3, 4, 5]), (2, 1, 3, [1, 2, 3]), (4, 2, 2, [2, 3])])
def test_new_ids_go_behind_those_that_are_cached(length, cached, q, columns):
    """And pads behind the ids. The next ids overwrite them."""
    cache = rm.KVCache()
    traj = SimpleNamespace(ids=[7] * length, cached=cached, cache_row=0)
    assert cache.prepare([traj], q, "cpu").tolist() == [columns]


# Eager attention adds the mask to its scores, sdpa would also take a boolean one.
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_read_against_plain_passes_with_rows_that_wait(llama, tok, cfg, attention):
    """Rows of different lengths read different numbers of tokens. Some wait, leave, are copied."""
    llama = copy.deepcopy(llama)
    llama.set_attn_implementation(attention)
    cfg.temperature = 0.7
    rng, cache = torch.Generator().manual_seed(0), rm.KVCache()

    def number(low, high):
        return torch.randint(low, high, (), generator=rng).item()

    def lengthen(traj, most):
        ids = [number(3, len(tok)) for _ in range(number(1, most))]
        traj.append(ids, sampled=False)

    @torch.no_grad()
    def compare(trajs):
        found = rm.read(llama, cache, trajs, cfg)
        for traj, logp in zip(trajs, found, strict=True):
            plain = llama(torch.tensor([traj.ids])).logits[0, -1] / cfg.temperature
            assert torch.allclose(logp, plain.log_softmax(-1), atol=1e-4)
            assert traj.cached == len(traj.ids)

    rows = [rm.Trajectory(None, group, 10) for group in range(5)]
    for traj in rows:
        lengthen(traj, 12)
    compare(rows)
    for turn in range(30):
        if turn == 10:  # a row leaves, and another one is there twice
            rows = [rows[4], rows[1], copy.deepcopy(rows[1]), rows[0]]
            cache.select(rows)
        some = torch.randperm(len(rows), generator=rng)[:number(1, len(rows) + 1)]
        reading = [rows[i] for i in sorted(some.tolist())]  # the others wait
        for traj in reading:
            lengthen(traj, 2 if turn % 3 else 20)
        compare(reading)
    assert len({len(traj.ids) for traj in rows}) == 4


def test_finished_episodes_never_grow(players, cfg):
    for traj in rm.rollout(players, range(300, 308), 2, rm.replace(cfg, env="bandit"), 0):
        assert traj.done and traj.mask[-1], "an episode ends with the model's own last token"
        assert sum(turn["valid"] for turn in traj.turns) <= 1, "one pull"


# ------------------------------------------------------------- models that this program must refuse
def test_a_model_whose_numbers_are_lost_stops_the_run(llama, tok, cfg):
    broken = copy.deepcopy(llama)
    broken.lm_head.weight.data[5] = float("nan")
    with pytest.raises(runs.UserError):
        rm.rollout(SimpleNamespace(policy=broken, tok=tok), [300], 1, cfg, 0)


def refused(players, cfg, change=lambda trajs: None):  # -> bool
    trajs = rm.rollout(players, [300, 301], 2, cfg, 0)
    change(trajs)
    try:
        rm.check_ratios(trajs, players, cfg)
    except runs.UserError as error:
        assert "\n" not in str(error)
        return True
    return False


def test_what_the_rollout_wrote_down_is_what_an_update_reads(players, cfg):
    def off(trajs):
        for traj in trajs:
            traj.old_logp = [logp - 0.1 for logp in traj.old_logp]
    assert not refused(players, cfg) and refused(players, cfg, off)
    for cfg.temperature in (0.5, 1e-4):
        assert not refused(players, cfg)


def test_the_ratios_of_the_longest_episode_are_checked(players, cfg):
    """A sliding window, for example, shows only there."""
    def off(pick):
        def change(trajs):
            # The others become shorter: they end after their first answer.
            for traj in trajs[:1] + trajs[2:]:
                end = traj.mask.index(False, traj.mask.index(True))
                for name in ("ids", "mask", "old_logp", "reward"):
                    setattr(traj, name, getattr(traj, name)[:end])
            some = pick(trajs, key=lambda traj: len(traj.ids))
            some.old_logp = [logp - 0.1 for logp in some.old_logp]
        return change
    assert refused(players, cfg, off(max)) and not refused(players, cfg, off(min))


def test_a_policy_that_changes_its_logits_after_the_head_is_refused(llama, tok, cfg):
    """As Granite, Cohere and Gemma 2 do."""
    rm.check_policy(llama, tok, cfg)
    changed = copy.deepcopy(llama)
    forward = changed.forward
    changed.forward = lambda **inputs: SimpleNamespace(logits=forward(**inputs).logits / 4)
    with pytest.raises(runs.UserError):
        rm.check_policy(changed, tok, cfg)


def test_a_policy_with_large_logits_suits_in_bf16_too(llama, tok, cfg, monkeypatch):
    """As a model has them that has been trained for long. bf16 rounds 16 to 32 to eighths, so two
    ways to the same logits may differ by a tenth. Even so a change of one percent is refused.
    """
    confident = copy.deepcopy(llama)
    confident.model.norm.weight.data *= 100
    monkeypatch.setattr(rm, "autocast", lambda: torch.autocast("cpu", torch.bfloat16))
    rm.check_policy(confident, tok, cfg)
    forward = confident.forward
    confident.forward = lambda **inputs: SimpleNamespace(logits=forward(**inputs).logits / 1.01)
    with pytest.raises(runs.UserError):
        rm.check_policy(confident, tok, cfg)


def test_a_policy_that_forgets_what_it_has_read_is_refused(llama, tok, cfg, monkeypatch):
    """Its layers see only what is new, as if they did not use the cache."""
    monkeypatch.setattr(rm.KVCache, "update", lambda self, keys, values, *_: (keys, values))
    with pytest.raises(runs.UserError):
        rm.check_policy(llama, tok, cfg)


def test_a_policy_with_dropout_is_refused(tok, cfg):
    policy = random_llama(len(tok), attention_dropout=0.1)
    players = SimpleNamespace(policy=policy, tok=tok)
    assert not refused(players, cfg)
    policy.train()
    assert refused(players, cfg)
