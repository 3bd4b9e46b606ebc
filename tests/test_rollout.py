"""Token bookkeeping: who wrote what, what is trained, where the rewards land."""
import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

import bench
import envs
import ragen_mini as rm


def written(traj):
    return [i for i, mine in zip(traj.ids, traj.mask) if mine]


@pytest.mark.parametrize("text, expected", [
    ("<think>It is below.</think><answer>down || Left</answer>", ["Down", "Left"]),
    ("<think></think> \n <answer> UP </answer>\n", ["Up"]),
    ("<think>a < b</think><answer>Up||Up||Up||Up||Up||Up||Up</answer>", ["Up"] * 5),  # the limit
    ("<think>x</think><answer>Up||Up||Up||Up||Up||jump</answer>", ["Up"] * 5),  # what is dropped is not judged
    ("<answer>Down</answer>", None),
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
    import time
    start = time.perf_counter()
    for text in ("<think>" * 20000, "<think></think><answer>" + "||" * 50000, "<think></think>" * 8000,
                 "<think>" + " " * 100000, "<think></think>" + " " * 100000, "\0" * 100000, "<answer>" * 20000):
        assert rm.parse_answer(text, envs.Sokoban.actions, 5) is None
    assert time.perf_counter() - start < 5


def test_trained_tokens_are_exactly_the_sampled_ones(llama, tok, cfg, monkeypatch):
    """Record what was sampled for whom, compare with what the trajectories hold and with the mask after collate."""
    begun, readers, sampled = [], [], {}
    begin, real_next, multinomial = rm.begin, rm.next_token_logp, torch.multinomial

    def spy_begin(*args):
        begun.append(begin(*args))
        return begun[-1]

    def spy_next(policy, cache, trajs, temperature):  # the next tokens are for these
        readers[:] = trajs
        return real_next(policy, cache, trajs, temperature)

    def spy_multinomial(*args, **kwargs):
        ids = multinomial(*args, **kwargs)
        for traj, (token,) in zip(readers, ids.tolist(), strict=True):
            sampled[id(traj)] = sampled.get(id(traj), []) + [token]
        return ids
    monkeypatch.setattr(rm, "begin", spy_begin)
    monkeypatch.setattr(rm, "next_token_logp", spy_next)
    monkeypatch.setattr(torch, "multinomial", spy_multinomial)
    trajs = rm.rollout(llama, tok, "frozenlake", [300, 301, 302], 2, cfg, 0, 1.0)
    batch = rm.collate(trajs, "cpu")
    for i, traj in enumerate(trajs):
        assert written(traj) == sampled[id(traj)]
        assert batch["targets"][i][batch["mask"][i]].tolist() == sampled[id(traj)]


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


def test_no_think(play, tok, cfg):
    cfg.no_think = True
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
    first, then = rm.encode(bpe, cfg.no_think, "question", False), rm.encode(bpe, cfg.no_think, "observation", True)
    ours = bpe.decode(first + bpe("thought</think><answer>Up</answer>").input_ids + then)
    chat = [dict(role="user", content="question"), dict(role="assistant", content="<think>thought</think><answer>Up</answer>"),
            dict(role="user", content="observation")]
    assert ours == bpe.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + "<think>"


def test_a_template_that_opens_the_thought_itself_gets_no_second_tag(tok, cfg):
    tok = copy.deepcopy(tok)  # encode remembers by tokenizer
    tok.chat_template = tok.chat_template.replace("assistant\n", "assistant\n<think>")
    assert tok.decode(rm.encode(tok, cfg.no_think, "State", False)).count("<think>") == 1
    cfg.no_think = True
    assert tok.decode(rm.encode(tok, cfg.no_think, "State", True)).endswith("assistant \n <answer>")


def test_batch_of_one_equals_batch_of_eight(cfg):
    """Greedy: padding, the other rows and rows that leave must not change an episode."""
    cfg.max_new_tokens, cfg.algo, seeds = 40, "grpo", list(range(300, 308))
    models = rm.load_models(cfg)
    together = rm.rollout(models.policy, models.tok, "sokoban", seeds, 1, cfg, 0, 0.0)
    assert len({len(t.ids) for t in together}) > 2, "different lengths, or the test shows nothing"
    for seed, traj in list(zip(seeds, together))[:4]:
        alone, = rm.rollout(models.policy, models.tok, "sokoban", [seed], 1, cfg, 0, 0.0)
        assert alone.ids == traj.ids and alone.R == traj.R
        assert torch.allclose(torch.tensor(alone.old_logp), torch.tensor(traj.old_logp), atol=1e-4)


def test_greedy_rollout_is_what_generate_writes(llama, tok, cfg):
    """transformers' own `generate`, called for every turn on the whole history, is the independent truth."""
    llama.generation_config.eos_token_id = None
    seeds = list(range(300, 308))
    ours = rm.rollout(llama, tok, "frozenlake", seeds, 1, cfg, 0, 0.0)
    cfg.env, cfg.rollouts = "frozenlake", 1
    theirs = bench.student_rollout(llama, tok, cfg, seeds, 0, do_sample=False)
    assert [traj.ids for traj in ours] == [traj.ids for traj in theirs]
    assert [traj.R for traj in ours] == [traj.R for traj in theirs]


def test_finished_episodes_never_grow(llama, tok, cfg):
    trajs = rm.rollout(llama, tok, "bandit", list(range(300, 308)), 2, cfg, 0, 1.0)
    for traj in trajs:
        assert traj.done and traj.mask[-1], "an episode ends with the model's own last token"
        assert sum(turn["valid"] for turn in traj.turns) <= 1, "one pull"


def test_self_check_catches_wrong_log_probs_masks_and_logits(llama, tok, cfg):
    trajs = rm.rollout(llama, tok, "frozenlake", [300, 301], 2, cfg, 0, 1.0)
    cfg.rollouts = 2
    rm.self_check(trajs, llama, cfg)
    trajs[0].old_logp = [x - 0.1 for x in trajs[0].old_logp]
    with pytest.raises(AssertionError, match="ratio"):
        rm.self_check(trajs, llama, cfg)
    llama = copy.deepcopy(llama)  # a model that rescales its logits, as Granite, Cohere and Gemma 2 do
    forward = llama.forward
    llama.forward = lambda **inputs: SimpleNamespace(logits=forward(**inputs).logits / 4)
    trajs = rm.rollout(llama, tok, "frozenlake", [300, 301], 2, cfg, 0, 1.0)
    with pytest.raises(AssertionError, match="ratio not 1"):
        rm.self_check(trajs, llama, cfg)
    llama.forward = forward
    trajs = rm.rollout(llama, tok, "frozenlake", [300, 301], 2, cfg, 0, 1.0)
    trajs[0].mask[-1] = False
    with pytest.raises(AssertionError):
        rm.self_check(trajs, llama, cfg)
    trajs = rm.rollout(llama, tok, "frozenlake", [300, 301], 2, cfg, 0, 1.0)
    traj = next(traj for traj in trajs if any(traj.reward))
    place = next(i for i, reward in enumerate(traj.reward) if reward)
    traj.reward[0], traj.reward[place] = traj.reward[place], 0.0  # on a message's token, where gae would pass over it
    with pytest.raises(AssertionError, match="add up"):
        rm.self_check(trajs, llama, cfg)


@pytest.mark.parametrize("answer, thought", [
    ("<think>Go up .</think> <answer>Up</answer>", "Go up ."), ("<think>Go up and up", "Go up and up"),
    ("<think>Go</think> <answer>Up</think>", "Go"), ("<think></think>", ""), ("<answer>Up</answer>", "")])
def test_thoughts_that_do_not_end_are_thoughts(answer, thought):
    assert rm.thought_of({"answer": answer}) == thought


@pytest.mark.parametrize("truth_reward", [0.0, 0.5])
def test_true_claims_may_be_rewarded(cfg, play, tok, truth_reward):
    """One true and two false claims about a goal, then no move: 0.5 less; an answer that is not valid pays its penalty, too."""
    cfg.truth_reward = truth_reward
    cfg.max_turns, cfg.max_new_tokens = 1, 60
    env = envs.make("frozenlake")
    env.reset(300)
    true = env.facts()
    truth = true["goal"]
    thought = f"The goal is {truth} . The goal is 9 up . The goal is 9 down . </think>"
    for ending, penalty in (("<answer>Up</answer>", 0.0), ("", -0.1)):
        traj, = play([thought + ending], "frozenlake", [300], cfg)
        won = float(traj.success)
        assert traj.R == pytest.approx(won + penalty - truth_reward)
        assert [is_true for _, is_true in traj.turns[0]["claims"]] == [True, False, False]
    cfg.max_turns = 2
    traj, = play([thought, thought], "frozenlake", [300], cfg)
    told = rm.encode(tok, False, rm.message(env, cfg, cfg.max_actions, -0.1), after_answer=True)[1:]
    assert traj.turns[0]["reward"] == pytest.approx(-0.1 - truth_reward)
    assert told in [traj.ids[i:i + len(told)] for i in range(len(traj.ids))], "no message says what truth has paid"
