"""Chat templates and masks: what is supervised is the assistant's text and its end-of-turn token, nothing else."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from jaxspec.errors import DataError
from jaxspec.training.templates import LLAMA3, QWEN, TemplateMismatch, TokenizerTemplate, choose
from jaxspec.training.tokenise import check_pieces, encode

# Behaves like Qwen3's: thoughts of earlier turns are dropped, the last answer gets an empty think block if it has none.
QWEN3_LIKE = """{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set last.user = loop.index0 %}\
{% endif %}{% endfor %}{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' %}\
{% set answer = text.split('</think>')[-1].lstrip('\n') %}<|im_start|>assistant
{% if loop.index0 > last.user %}{% if '</think>' in text %}<think>
{{ text.split('</think>')[0].split('<think>')[-1].strip('\n') }}
</think>

{{ answer }}{% else %}<think>

</think>

{{ answer }}{% endif %}{% else %}{{ answer }}{% endif %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ text }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA3_LIKE = """{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def make_tokenizer(chat_template=None, special=SPECIAL, prefix_space=False):
    """Byte-level BPE whose line breaks melt together, as Qwen's and Llama's do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = token_decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["\n\n\n\n user assistant hello hello\n\nworld <think>\n\n</think>\n\n"] * 40, trainer
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin_of_text|>" if special else None)
    fast.chat_template = chat_template
    return fast


def supervised(tokenizer, template, messages, max_length=1 << 20):
    ids, mask = encode(tokenizer, template, messages, max_length)
    return tokenizer.decode(ids[mask]), tokenizer.decode(ids)


def talk(*answers, system=None):
    turns = [{"role": "system", "content": system}] if system else []
    for index, answer in enumerate(answers):
        turns += [{"role": "user", "content": f"question {index} \u2603"}, {"role": "assistant", "content": answer}]
    return turns


ANSWERS = ["hello", "\n\nhello\n", " hello ", "\u4f60\u597d \u2603\u2603", "a\n\nb <b>"]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("turns", [1, 3])
def test_B53_qwen_masks_answer_and_end_of_turn(answer, turns):
    tokenizer = make_tokenizer()
    assert "\n\n" in tokenizer.decode(tokenizer.encode("\n\n")) and len(tokenizer.encode("\n\n")) == 1
    masked, whole = supervised(tokenizer, QWEN, talk(*[answer] * turns))
    assert masked == f"{answer}<|im_end|>" * turns
    assert whole.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("own", [False, True])
def test_B53_llama_masks_answer_and_end_of_turn(answer, own):
    tokenizer = make_tokenizer(LLAMA3_LIKE)
    template = TokenizerTemplate(tokenizer) if own else LLAMA3
    masked, whole = supervised(tokenizer, template, talk(answer, answer, system="be brief"))
    assert masked == f"{answer.strip()}<|eot_id|>" * 2
    assert whole == tokenizer.apply_chat_template(talk(answer, answer, system="be brief"), tokenize=False)


@pytest.mark.parametrize("answer", ["hello", "\u2603 hello"])
def test_B53_own_template_without_thoughts_leaves_the_inserted_think_block_out(answer):
    tokenizer = make_tokenizer(QWEN3_LIKE)
    template = TokenizerTemplate(tokenizer)
    assert (template.header, template.eot) == ("<|im_start|>assistant\n", "<|im_end|>")
    masked, whole = supervised(tokenizer, template, talk(answer, answer))
    assert masked == f"{answer}<|im_end|>" * 2 and whole.count("<think>") == 1


def test_B53_own_template_with_thoughts_supervises_them_where_they_are_shown():
    tokenizer = make_tokenizer(QWEN3_LIKE)
    answer = "<think>\nhm\n</think>\n\nhello"
    masked, _ = supervised(tokenizer, TokenizerTemplate(tokenizer), talk(answer, answer))
    assert masked == f"hello<|im_end|>{answer}<|im_end|>"
    empty = "<think>\n\n</think>\n\nhello"
    masked, _ = supervised(tokenizer, TokenizerTemplate(tokenizer), talk(empty))
    assert masked == f"{empty}<|im_end|>"  # the answer itself says it, so it is supervised


@pytest.mark.parametrize("template", [QWEN, LLAMA3])
def test_B53_truncated_in_mid_answer(template):
    tokenizer = make_tokenizer()
    ids, mask = encode(tokenizer, template, talk("hello hello hello"), 1 << 20)
    for length in range(len(ids) + 1):
        cut_ids, cut_mask = encode(tokenizer, template, talk("hello hello hello"), length)
        assert cut_ids.tolist() == ids[:length].tolist() and cut_mask.tolist() == mask[:length].tolist()
    first = int(mask.argmax())
    assert tokenizer.decode(ids[first : first + 2]) and mask[first : first + 2].all() and not mask[:first].any()


def test_pieces_equal_the_whole_text_where_no_token_crosses_an_edge():
    tokenizer = make_tokenizer(CHATML)
    turns = talk("hello", "world")
    ids, _ = encode(tokenizer, TokenizerTemplate(tokenizer), turns, 1 << 20)
    assert ids.tolist() == tokenizer.encode(
        tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False
    )


@pytest.mark.parametrize(
    ("own", "header"),
    [(CHATML, "<|im_start|>assistant\n"), (QWEN3_LIKE, "<|im_start|>assistant\n"), (LLAMA3_LIKE, None), (None, None)],
)
def test_a_prompt_ends_where_the_answer_begins(own, header):
    """What the target is asked with is what stands before a trained answer."""
    tokenizer = make_tokenizer(own)
    template = TokenizerTemplate(tokenizer) if own else LLAMA3
    header = header or "<|start_header_id|>assistant<|end_header_id|>\n\n"
    turns = talk("hello", "world", system="be brief")
    prompt = template.prompt(turns[:-1])
    assert prompt.endswith("\u2603" + template.eot + ("\n" if header.endswith("t\n") else "") + header)
    assert "".join(piece.text for piece in template.render(turns)).startswith(prompt)


def test_an_answer_that_cannot_be_located_is_refused():
    template = TokenizerTemplate(make_tokenizer(QWEN3_LIKE))
    with pytest.raises(TemplateMismatch, match="headers"):
        template.render(
            [{"role": "user", "content": "say <|im_start|>assistant\n"}, {"role": "assistant", "content": "x"}]
        )
    with pytest.raises(TemplateMismatch, match="not the answer"):
        template.render(talk("a <|im_end|> b"))


def test_templates_that_cannot_work_are_named():
    with pytest.raises(DataError, match=r"data\.template.*no chat_template"):
        TokenizerTemplate(make_tokenizer())
    with pytest.raises(DataError, match=r"data\.template.*no start or end"):
        TokenizerTemplate(make_tokenizer("{% for m in messages %}{{ m.content }} {% endfor %}"))
    with pytest.raises(DataError, match="changes text"):
        check_pieces(make_tokenizer(prefix_space=True))


def test_choice_of_template():
    assert isinstance(choose("auto", make_tokenizer(QWEN3_LIKE)), TokenizerTemplate)
    assert choose("auto", make_tokenizer()) is QWEN
    assert choose("llama", make_tokenizer()) is LLAMA3
    with pytest.raises(DataError, match=r"data\.template.*<\|eot_id\|>"):
        choose("llama", make_tokenizer(special=SPECIAL[:2]))
    with pytest.raises(DataError, match=r"data\.template"):
        choose("auto", make_tokenizer(special=[]))
