"""The mask with SmolLM2's own tokenizer and template."""

from __future__ import annotations

import pytest

from jaxspec.checkpoints.smollm2 import smollm2
from jaxspec.checkpoints.tokenizer import load_tokenizer
from jaxspec.errors import HubError
from jaxspec.training.templates import QWEN, TokenizerTemplate, choose
from jaxspec.training.tokenise import check_pieces, encode


@pytest.mark.ci
@pytest.mark.parametrize("answer", ["Hello \u2603 \u4f60\u597d", "\n\nHi\n", "<think>\nhm\n</think>\n\n42", " a  b "])
def test_B53_smollm2_masks_answers_and_end_of_turn(answer):
    try:
        tokenizer = load_tokenizer(smollm2())
    except HubError as error:
        pytest.skip(f"SmolLM2 is neither cached nor to be had: {error}")
    check_pieces(tokenizer)
    own = choose("auto", tokenizer)
    assert isinstance(own, TokenizerTemplate) and (own.header, own.eot) == ("<|im_start|>assistant\n", "<|im_end|>")
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": answer}] * 2
    for template in (own, QWEN):
        ids, mask = encode(tokenizer, template, turns, 4096)
        assert tokenizer.decode(ids[mask]) == f"{answer}<|im_end|>" * 2
    assert tokenizer.decode(encode(tokenizer, own, turns, 4096)[0]) == tokenizer.apply_chat_template(
        turns, tokenize=False
    )
