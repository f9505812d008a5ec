"""The schema of a server (`serve.py --config X`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from jaxspec.config import rules
from jaxspec.config.schema import FORMAT_VERSION, MAX_CHUNK, MAX_CONTEXT, MAX_SLOTS, Section, key
from jaxspec.config.train import TargetSection


class EngineSection(Section):
    """Slots, shapes, pages and what requests may ask for; all of it is fixed at start-up and compiled once."""

    num_slots: int = key(8, "requests decoded together", ge=1, le=MAX_SLOTS)
    slot_buckets: tuple[int, ...] = key(
        (), "smaller numbers of slots (of a data shard) to compile for; empty is 1, 4, 16 …", strict=False
    )
    max_context: int = key(2048, "longest prompt + output of a request, in tokens", ge=2, le=MAX_CONTEXT)
    prefill_chunk: int = key(64, "prompt rows of a round", ge=1, le=MAX_CHUNK)
    prefill_pieces: int = key(4, "prompts that share the prompt rows of a round", ge=1)
    page_size: int = key(16, "positions of a cache page", ge=1)
    num_pages: int | None = key(None, "cache pages; null is enough for every slot's max_context", ge=2)
    prefix_cache: bool = key(True, "prompts that begin alike share their pages")
    overlap: bool = key(True, "start a round before the one before it was read")
    acceptance: Literal["ratio", "block"] = key("ratio", "acceptance of sampled proposals; both are lossless")
    num_proposals: int | None = key(None, "proposals of a round; null takes the drafter's (ngram: 8, a model: 5)", ge=1)
    tree_nodes: int | None = key(None, "verify a tree of this many nodes (DDTree over a DFlash drafter)", ge=1, le=1024)
    ngram_min: int | None = key(None, "shortest suffix that drafter `ngram` looks up; null is 1", ge=1)
    ngram_max: int | None = key(None, "longest suffix that drafter `ngram` looks up; null is 3", ge=1)
    draft_sampling: Literal["argmax", "sample"] | None = key(
        None, "how a sampled request's proposals are drawn; null takes the drafter's"
    )
    survival_confidence: bool = key(False, "confidence from the mode's mass, for drafters without a confidence head")
    sts_temperatures: str | None = key(None, "STS file that calibrates a DSpark drafter's confidence", min_length=1)
    confidence_threshold: float = key(
        0.0, "verify the proposals before the first whose confidence is below it, and a tree's nodes alike", ge=0, le=1
    )
    cost_table: str | None = key(
        None, "JSON table of what a round costs; with it a budget of proposals follows the load", min_length=1
    )
    align: bool = key(True, "fill the bucket that a budget needs anyway")
    min_verify_rows: int = key(1, "rows that a request verifies at least under a budget, anchor included", ge=1)
    max_verify_rows: int | None = key(None, "rows that it verifies at most; null is num_proposals + 1", ge=1)
    pause_drafting: bool = key(True, "stop drafting for a request or a load where it is measured to lose")
    attention: Literal["auto", "reference", "gpu", "tpu"] = key(
        "auto",
        "how rows read the cache's pages: gathered, or by a kernel; auto is gpu on an NVIDIA GPU, else reference",
    )
    pack_weights: bool | None = key(None, "join each target layer's projections at load; null is on a GPU")
    bare_rounds: bool | None = key(
        None, "compile each shape once more without options that a request rarely asks for; null is on a GPU"
    )
    rules: bool = key(True, "serve penalties, logit bias and min_new_tokens")
    max_logprobs: int | None = key(20, "most ids beside the chosen one in log probabilities; null refuses them", ge=0)
    grammar: bool = key(False, "serve grammars (extra `grammar`); a shape is then compiled three times")


class MeshSection(Section):
    """The devices: data x tensor of them, the first ones there are."""

    data: int = key(1, "shards of the slots and their pages; num_slots and num_pages are split evenly", ge=1)
    tensor: int = key(1, "shards of each model: heads, MLP and vocabulary, which it must divide", ge=1)


class ServerSection(Section):
    """The gRPC end point."""

    host: str = key("127.0.0.1", "address to listen on; 0.0.0.0 is every interface", min_length=1)
    port: int = key(50051, "TCP port; 0 lets the system choose", ge=0, le=65535)
    max_queue: int = key(64, "requests that may wait for a slot; more are refused", ge=0)
    drain_seconds: float = key(30.0, "how long running requests may finish after SIGTERM", ge=0)


class ServeConfig(Section):
    """A server."""

    version: Literal[1] = key(FORMAT_VERSION, "format version of this file")
    target: TargetSection
    drafter: str | None = key(
        None,
        "drafter folder or org/name, a smaller language model, or `ngram`; `none` or null decodes plainly",
        min_length=1,
    )
    engine: EngineSection
    mesh: MeshSection
    server: ServerSection
    compilation_cache: str | None = key(None, "folder of compiled executables, kept between starts", min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        return {"engine": {}, "mesh": {}, "server": {}, **data} if isinstance(data, dict) else data

    @field_validator("drafter")
    @classmethod
    def _none(cls, drafter: str | None) -> str | None:
        return None if drafter is not None and drafter.lower() == "none" else drafter

    @model_validator(mode="after")
    def _check(self) -> ServeConfig:
        rules.check_serve(self)
        return self
