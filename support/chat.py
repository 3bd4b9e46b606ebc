"""A model's chat template and its end tokens, and whether a model suits this program.

Templates differ from model to model. This file is all that knows of it.
"""
import functools
import re
import sys

import envs
from support import cache, device
from support.errors import UserError, is_out_of_memory, need, one_line


# -------------------------------------------------------------------------- messages become tokens
def encode(tok, first_tag, text, after_answer=False):  # -> ids, a tuple
    """A message in the model's chat template, followed by the first tag of the answer.

    after_answer: it is not the first message. What is returned then begins with the token that ends
    an answer, such as <|im_end|>.
    """
    # Some models have several templates, in a dict. Of these "default" is taken.
    return encode_in(str(tok.chat_template), tok, first_tag, text, after_answer)


@functools.lru_cache  # the episodes of a group often read the same message
def encode_in(template, tok, first_tag, text, after_answer):
    rendered = render(tok, text, after_answer)
    # Some templates write <think> themselves, or even <think></think>. We write our own tag.
    rendered = re.sub(r"<think>\s*(</think>\s*)?$", "", rendered)
    return tuple(tok(rendered + first_tag, add_special_tokens=False).input_ids)


def render(tok, text, after_answer):  # -> text
    """The chat template with one message.

    NOTE: what the model wrote before is never encoded again, because its text might give other ids
    than those that were sampled. So a later message is rendered behind a dummy chat, in which
    "(seam)" stands for the answer, and everything up to there is cut off:
        rendered    <|im_start|>user . <|im_end|> <|im_start|>assistant (seam) <|im_end|> ...
        kept                                                                   <|im_end|> ...
    """
    chat = [{"role": "user", "content": text}]
    if not after_answer:
        return apply_template(tok, chat)
    dummy = [{"role": "user", "content": "."}, {"role": "assistant", "content": "(seam)"}]
    _, seam, rest = apply_template(tok, dummy + chat).partition("(seam)")
    need(seam, "The model's chat template changes or drops earlier answers. Take another model.")
    # Some templates put a space after an answer. The model did not write it.
    return rest.lstrip(" ")


def apply_template(tok, chat):  # -> text
    try:
        return tok.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are programs, and may raise anything
        raise UserError(f"The model's chat template fails: {one_line(error):.300}. "
                        f"Take another model.") from error


def quote(tok, text):  # -> text
    """The words of an environment are data. If they hold a control token, such as <|im_end|>, that
    becomes < |im_end|>, so that it cannot end the message.
    """
    for token in control_tokens(tok).values():
        if len(token) > 2:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def control_tokens(tok):  # -> {id: text}
    return {i: token.content for i, token in tok.added_tokens_decoder.items() if token.special}


def end_tokens(models, cfg):  # -> ids that end an answer
    """That of the chat template comes first: the first control token between an answer and the next
    message. Then come the end tokens that the tokenizer and the model declare.
    """
    tok = models.tok
    between, _, _ = render(tok, "(message)", after_answer=True).partition("(message)")
    control = control_tokens(tok)
    ends = [i for i in tok(between, add_special_tokens=False).input_ids if i in control][:1]
    need(ends, f"--model {cfg.model}: no single token ends an answer in its chat template. Take a "
               f"model that was made for chat.")
    generation = getattr(models.policy, "generation_config", None)
    declared = getattr(generation, "eos_token_id", None)  # a number, a list of them, or None
    for i in (tok.eos_token_id, *(declared if isinstance(declared, list) else [declared])):
        if i is not None and i not in ends:
            ends.append(i)
    return ends


# ----------------------------------------------------------------------- does the model suit?
def check_template(tok, text, traj, cfg):  # text: the first message of traj, which has just begun
    state = "".join(traj.env.render().split())
    for after_answer in (False, True):
        rendered = render(tok, text, after_answer)
        need(state in "".join(rendered.split()),
             f"--model {cfg.model}: the state of the game does not appear in its chat template. "
             f"(Some templates take a list of parts instead of text. That of tiny drops all before "
             f"an empty line.) Take another model, or change the state's text.")
    unknown = traj.ids.count(tok.unk_token_id)
    if unknown:
        print(f"note: {cfg.model} does not know {unknown} of the {len(traj.ids)} words and symbols "
              f"of its first message")


def check_reading(policy, traj, cfg):  # traj has just begun
    """In two steps `read` must find what a plain pass finds.

    That refuses models whose attention cannot use KVCache, and models that change their logits
    after the head, as Gemma 2 does, because `read` and `token_logps` leave that out.
    """
    # Later messages are shorter, but for a line with the reward. It takes less than 16 tokens.
    longest = cfg.max_turns * (len(traj.ids) + 16 + cfg.max_new_tokens)
    need(longest <= room(policy),
         f"An episode may take {longest} tokens, but {cfg.model} reads at most {room(policy)}. "
         f"Lower --max-new-tokens or --max-turns.")
    try:
        # In fp32 everywhere. In bf16 a logit of 16 or more is rounded to the next eighth, so that a
        # model that has learned much would look like one that cannot be used.
        gap = cache.gap_of_reading(policy, traj, cfg)
    except Exception as error:
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        raise UserError(
            f"--model {cfg.model} cannot be used here, because it fails with our KVCache: "
            f"{one_line(error)}. Take a model whose layers attend to all earlier tokens."
        ) from error
    need(gap < device.rounding("cpu"),
         f"--model {cfg.model} cannot be used here. It changes its logits after the output layer, "
         f"or it does not attend to all earlier tokens: logits differ by {gap:.1g}.")


def check_gap(gap, models, cfg):  # gap: see logp_gap in ragen_mini.py
    advice = ("Its dropout is on: call models.policy.eval()." if models.policy.training else
              "Take a model whose layers attend to all earlier tokens.")
    need(gap < device.rounding(cfg.device),
         f"{cfg.model} cannot be trained here, because the logits of rollout and update differ by "
         f"{gap:.1g}. {advice}")


def check_length(policy, trajs, cfg):  # while they are played: messages may have grown
    longest = max((len(traj.ids) for traj in trajs), default=0) + cfg.max_new_tokens
    need(longest <= room(policy),
         f"With the next answer an episode may take {longest} tokens, but {cfg.model} reads at "
         f"most {room(policy)}. Are the messages of {envs.title(cfg.env)} too long? Lower "
         f"--max-new-tokens or --max-turns.")


def room(policy):  # -> the number of tokens that it reads at most
    config = getattr(policy, "config", None)
    return getattr(config, "max_position_embeddings", None) or sys.maxsize
