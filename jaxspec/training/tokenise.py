"""Conversations to token ids and loss masks, exactly.

Each piece of a template's text is encoded on its own, and the mask follows the pieces. So no token can lie across the
edge of an answer: an answer that begins with a line break would otherwise melt into the header's ("\\n" + "\\n" is
one token of Qwen's vocabulary), offsets that skip white space would miss it, and re-encoding prefixes would shift the
mask by one. It is also what the target sees when it serves: the prompt was encoded before the answer existed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.errors import DataError, problem
from jaxspec.training.templates import ChatTemplate, Message, Piece

__all__ = ["check_pieces", "encode"]


def check_pieces(tokenizer: Any) -> None:
    """Refuse tokenizers that change a text when it is encoded in pieces (those that put a blank before every text).

    Raises:
      DataError: pieces do not decode to the text.
    """
    pieces = ["one", " two\n", "\nthree"]
    ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != "".join(pieces):
        raise DataError(
            problem(
                "data.template",
                "a tokenizer that changes text when it is encoded in pieces",
                "a byte-level tokenizer (Qwen, Llama 3, SmolLM)",
                "tokenise the data yourself and give data.path an .npz file",
            )
        )


def encode(
    tokenizer: Any, template: ChatTemplate, messages: Sequence[Message], max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 [S] and loss mask bool [S] of one conversation, cut at `max_length` (an answer may end mid-way).

    A last answer that says it was cut ("finish_reason": "length") ends the sequence before its end of turn, which the
    target did not say there.

    Raises:
      TemplateMismatch: the template cannot say what to supervise.
    """
    ids: list[int] = []
    mask: list[bool] = []
    pieces = template.render(messages)
    if messages and messages[-1].get("finish_reason") == "length":
        pieces = _without_the_end(pieces, template.eot)
    for piece in pieces:
        tokens = tokenizer.encode(piece.text, add_special_tokens=False)
        ids += tokens
        mask += [piece.supervised] * len(tokens)
    return np.asarray(ids[:max_length], np.int32), np.asarray(mask[:max_length], bool)


def _without_the_end(pieces: Sequence[Piece], eot: str) -> list[Piece]:
    last = max(index for index, piece in enumerate(pieces) if piece.supervised)
    return [*pieces[:last], Piece(pieces[last].text.removesuffix(eot), True)]
