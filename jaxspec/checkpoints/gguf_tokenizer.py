"""tokenizer.json and tokenizer_config.json from the tokenizer fields of a GGUF file.

Byte-level BPE only. GGUF stores vocabulary and merges but only the *name* of the pre-tokenizer, so each name that is
supported stands here with its splitting rule; a name that is not listed is refused, since a guess would change token
boundaries silently.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxspec.errors import CheckpointError

__all__ = ["tokenizer_files"]

_CONTROL, _USER_DEFINED = 3, 4
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


class _Kind(NamedTuple):
    """A pre-tokenizer: how text is split before the byte-level step, whether NFC comes first, and whether a piece that
    is itself a token skips the merges.
    """

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_pieces: bool = False


_KINDS = {
    "gpt-2": _Kind(),
    "smollm": _Kind(digits=True),
    "qwen2": _Kind(split=_QWEN2_SPLIT, nfc=True),
    "llama-bpe": _Kind(split=_LLAMA3_SPLIT, whole_pieces=True),
}


def tokenizer_files(fields: dict[str, Any], *, where: str, vocab_size: int, max_length: int) -> dict[str, Any]:
    """{"tokenizer.json": text, "tokenizer_config.json": object} for the fields of a GGUF file.

    Raises CheckpointError for a model other than byte-level BPE, an unknown pre-tokenizer or lists of unequal length.
    """
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise CheckpointError(f"{where}: tokenizer.ggml.model: found {model!r}, expected 'gpt2' (byte-level BPE)")
    if pre not in _KINDS:
        raise CheckpointError(f"{where}: tokenizer.ggml.pre: found {pre!r}, expected one of {', '.join(_KINDS)}")
    tokens, merges = fields.get("tokenizer.ggml.tokens") or [], fields.get("tokenizer.ggml.merges") or []
    if len(tokens) != vocab_size or len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"{where}: tokenizer.ggml.tokens: found {len(tokens)} ({len(set(tokens))} distinct), expected {vocab_size} "
            "distinct ones"
        )
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{where}: tokenizer.ggml.token_type: found {len(types)}, expected {len(tokens)}")
    for key in _SPECIAL:
        token = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and not 0 <= token < vocab_size:
            raise CheckpointError(f"{where}: tokenizer.ggml.{key}_token_id: found {token}, expected below {vocab_size}")
    return {
        "tokenizer.json": _tokenizer(fields, where, pre, tokens, merges, types).to_str(pretty=False),
        "tokenizer_config.json": _config(fields, tokens, max_length),
    }


def _tokenizer(
    fields: dict[str, Any], where: str, pre: str, tokens: list[str], merges: list[str], types: list[int]
) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    kind = _KINDS[pre]
    halves = [merge.partition(" ") for merge in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for left, _, right in halves],
            fuse_unk=False,
            ignore_merges=kind.whole_pieces,
        )
    except Exception as error:  # the Rust library has no type of its own for this
        raise CheckpointError(f"{where}: tokenizer.ggml.merges: {error}; expected merges of its own tokens") from error
    tokenizer = Tokenizer(bpe)
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    before: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if kind.digits else []
    if kind.split is not None:
        before.append(pre_tokenizers.Split(Regex(kind.split), behavior="isolated"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.split is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level]) if before else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, code in zip(tokens, types, strict=True) if code == _CONTROL]
    user = [token for token, code in zip(tokens, types, strict=True) if code == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in user])
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token") and bos is not None:
        name = tokens[bos]
        template = processors.TemplateProcessing(
            single=[name, "$A"], pair=[name, "$A", name, "$B"], special_tokens=[(name, bos)]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def _config(fields: dict[str, Any], tokens: list[str], max_length: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    for key, name in _SPECIAL.items():
        token = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[name] = tokens[token]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config
