"""The target's tokenizer and chat template, through transformers' fast tokenizer (no torch needed)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import CheckpointError, DataError

__all__ = ["chat_ids", "eos_ids", "load_tokenizer"]


def load_tokenizer(directory: str | os.PathLike[str] | None) -> Any:
    """The PreTrainedTokenizerFast of a checkpoint folder.

    The class named in tokenizer_config.json is not looked up: tokenizer.json says everything, and code in the folder
    is never run. Raises CheckpointError naming the file that is missing or unreadable.
    """
    if directory is None:
        raise CheckpointError("tokenizer: this target was made in memory, expected one loaded from a folder")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it asks for PyTorch, which nothing here needs
    from transformers import PreTrainedTokenizerFast

    directory = Path(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (directory / name).is_file():
            raise CheckpointError(
                f"{directory / name}: found no such file, expected a fast tokenizer (tokenizer.json and "
                "tokenizer_config.json); "
                "copy them from the model's repository into the folder"
            )
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    # The Rust library raises plain Exception for a broken tokenizer.json.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{directory}: the tokenizer cannot be read ({reason}), expected a whole tokenizer.json and "
            "tokenizer_config.json"
        ) from error


def eos_ids(tokenizer: Any, config_ids: Sequence[int] = ()) -> tuple[int, ...]:
    """Stop tokens: those of the model's config, then the tokenizer's own, each once."""
    own = getattr(tokenizer, "eos_token_id", None)
    return tuple(dict.fromkeys((*config_ids, *(() if own is None else (own,)))))


def chat_ids(
    tokenizer: Any,
    messages: str | Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    **template_arguments: Any,
) -> list[int]:
    """Token ids of a conversation in the target's own template; a plain string is one user turn.

    Args:
      template_arguments: what the template itself takes, for example enable_thinking=False.

    Raises:
      CheckpointError: the tokenizer has no chat template.
      DataError: the template refuses these messages.
    """
    from jinja2 import TemplateError

    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not getattr(tokenizer, "chat_template", None):
        raise CheckpointError(
            "tokenizer: found no chat_template, expected one in tokenizer_config.json or chat_template.jinja; pass "
            "token ids instead"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **template_arguments
        )
    except (TemplateError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"messages: the chat template refuses them ({error}), expected role and content per message in the order "
            "it allows"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False))
