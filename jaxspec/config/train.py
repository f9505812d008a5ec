"""The schema of a training run (`train.py --config X`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from jaxspec.config import rules
from jaxspec.config.schema import FORMAT_VERSION, MAX_BLOCK, MAX_LAYERS, Section, key, required

Dtype = Literal["float32", "bfloat16"]


class TargetSection(Section):
    """The model that is being sped up; frozen."""

    source: str = required("HF folder, GGUF file, org/name[@revision], or the built-in `smollm2`", min_length=1)
    dtype: Dtype = key("bfloat16", "dtype of the target's parameters and activations")
    lora: str | None = key(
        None, "PEFT adapter (adapter_config.json, adapter_model.safetensors) that is merged at load", min_length=1
    )
    quantization: Literal["int8"] | None = key(
        None, "int8 holds the layers' matrices in eight bits, with a scale a row; embedding and head stay"
    )


class DrafterSection(Section):
    """The drafter that is trained. Keys left out take the method's published values."""

    method: Literal["dflash", "dflash2", "dflare", "dspark", "eagle", "eagle3"] = required("drafter method")
    source: str | None = key(None, "drafter checkpoint whose weights the training starts from", min_length=1)
    num_layers: int = key(5, "decoder layers of the drafter", shown="dflare 7, eagle 1, else 5", ge=1, le=MAX_LAYERS)
    block_size: int = key(
        16, "rows of a draft block, anchor row included", shown="dspark 7, eagle 1, else 16", ge=1, le=MAX_BLOCK
    )
    mask_token_id: int | None = key(None, "id that fills the open rows; null takes the target's known spare id", ge=0)
    target_layer_ids: tuple[int, ...] | None = key(
        None,
        "target layers whose outputs are the features; null spreads num_layers of them",
        strict=False,
        min_length=1,
    )
    num_heads: int | None = key(None, "attention heads; null takes the target's", ge=1)
    num_kv_heads: int | None = key(None, "key/value heads; null takes the target's", ge=1)
    head_dim: int | None = key(None, "width of a head; null takes the target's", ge=2)
    intermediate_size: int | None = key(None, "width of the MLP; null takes the target's", ge=1)
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = key(
        None, "attention of each layer; null is full attention everywhere", strict=False
    )
    sliding_window: int | None = key(None, "window of the sliding layers, in positions", ge=1)
    is_causal: bool | None = key(
        None, "block mask: true causal, false bidirectional, null the legacy rule (sliding layers causal)"
    )
    markov_rank: int = key(0, "rank of the Markov head; 0 has none", shown="dspark 256, else 0", ge=0)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = key("vanilla", "form of the Markov head")
    confidence_head: bool = key(False, "train a confidence head", shown="dspark true, else false")
    confidence_head_with_markov: bool = key(
        False, "the confidence head also reads the Markov embedding", shown="true with both heads"
    )
    sample_from_anchor: bool = key(False, "the anchor row predicts too", shown="dspark true, else false")
    conv_kernel_size: int = key(0, "taps of the grouped convolutions", shown="dflash2 2, else 0", ge=0)
    conv_group_size: int = key(0, "channels that share a dynamic coefficient", shown="dflash2 16, else 0", ge=0)
    selector_rank: int = key(0, "rank of the candidate selector's codebooks", shown="dflash2 256, else 0", ge=0)
    selector_top_k: int = key(0, "candidates that the selector chooses from", shown="dflash2 16, else 0", ge=0)
    draft_vocab_size: int | None = key(
        None, "eagle3: tokens it can propose, the most frequent supervised ones; null is the whole vocabulary", ge=1
    )
    fc_norm: bool = key(False, "eagle3: norm each tapped layer before they are fused")
    norm_output: bool = key(True, "eagle3: norm the state before the head")
    dtype: Dtype = key("bfloat16", "dtype the drafter computes and is exported in; masters and moments are float32")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        return rules.fill_drafter(data)

    @model_validator(mode="after")
    def _check(self) -> DrafterSection:
        rules.check_drafter(self)
        return self


class ObjectiveSection(Section):
    """The loss. Keys left out take the method's published values."""

    gamma: float | None = key(
        None, "position decay exp(-k/gamma); null is no decay", shown="by method and block size", gt=0
    )
    gamma_per_epoch: float = key(
        0.0, "progressive decay: gamma grows by this each epoch", shown="dflare 0.5, else 0.0", ge=0
    )
    loss_type: Literal["weighted_ce", "dpace", "dpace-cumulative-confidence-only", "dpace-continuation-value-only"] = (
        key("weighted_ce", "weights of DFlash's cross-entropy")
    )
    dpace_alpha: float = key(0.5, "smoothing of D-PACE's probabilities", ge=0, le=1)
    dpace_normalizer: Literal["weights", "batch"] = key("weights", "what D-PACE's sum is divided by")
    lk: Literal["alpha", "lambda", "tv"] | None = key(None, "LK loss in place of the cross-entropy")
    kl_scale: float = key(1.0, "lk=lambda: scale of the mixing weight", ge=0)
    kl_decay: float = key(3.0, "lk=lambda: decay of the mixing weight with the mean probability", ge=0)
    ce_alpha: float = key(1.0, "weight of the cross-entropy", shown="dspark and eagle 0.1, else 1.0", ge=0)
    l1_alpha: float = key(0.0, "weight of the L1 distance to the target", shown="dspark 0.9, else 0.0", ge=0)
    confidence_alpha: float = key(
        0.0, "weight of the confidence loss", shown="1.0 with a confidence head, else 0.0", ge=0
    )
    selector_alpha: float = key(
        0.0, "weight of the selector's cross-entropy; 0 freezes it", shown="dflash2 1.0, else 0.0", ge=0
    )
    selector_warmup_ratio: float = key(0.0, "share of the steps with selector_alpha at 0", ge=0, le=1)
    selector_ramp_ratio: float = key(0.0, "share of the steps over which selector_alpha then grows", ge=0, le=1)
    selector_stop_gradient: bool = key(False, "keep the selector's loss from moving the backbone")
    feature_alpha: float = key(0.0, "weight of the feature regression", shown="eagle 1.0, else 0.0", ge=0)
    feature_noise: float = key(0.0, "width of the noise on the input features", shown="eagle 0.2, else 0.0", ge=0)
    ttt_length: int = key(0, "steps of the training-time test", shown="eagle3 7, else 0", ge=0)
    step_decay: float = key(0.0, "weight of each step by the one before", shown="eagle3 0.8, else 0.0", ge=0, le=1)
    keep_products: bool = key(
        True, "eagle3: keep what the layer's matrices gave in each step; false multiplies again, in less memory"
    )
    chunk_blocks: int = key(128, "draft blocks per slice of the vocabulary projection; 0 is one slice", ge=0)


class DataSection(Section):
    """Where the training sequences come from and which anchors are drawn."""

    path: str = required("conversations (.jsonl, .json, .parquet) or a token file (.npz)", min_length=1)
    template: Literal["auto", "qwen", "llama", "tokenizer"] = key("auto", "chat template and its loss mask")
    max_length: int = key(4096, "longest sequence, in tokens; the rest is cut", ge=2)
    min_loss_tokens: int = key(2, "sequences with fewer supervised tokens are left out", ge=1)
    num_anchors: int = key(512, "anchors drawn from a sequence", ge=1)
    anchor_rule: Literal["adjacent", "legacy"] = key(
        "adjacent", "which positions may be anchors", shown="dflare legacy, else adjacent"
    )
    max_empty_fraction: float = key(
        0.5, "largest share of sequences without a valid anchor before the run stops", ge=0, le=1
    )
    shuffle: bool = key(True, "new order each epoch")


class FeaturesSection(Section):
    """Where the target's hidden states come from."""

    mode: Literal["online", "offline", "spool"] = key(
        "online",
        "online: the target runs in the step; offline: files of `jaxspec capture`; spool: as they come",
    )
    path: str | None = key(None, "offline: the files' folder (or a DeepSpec cache); spool: the spool", min_length=1)
    storage: Literal["bfloat16", "float32", "int8"] = key(
        "bfloat16", "dtype of the files; int8 has a scale for 32 channels, row 0 and the teacher stay bfloat16"
    )
    shard_examples: int = key(64, "offline: sequences of a file", ge=1)
    shard_batches: int = key(1, "spool: micro-batches of a file", ge=1)
    spool_shards: int = key(16, "spool: files that may wait, those of steps without a checkpoint included", ge=1)
    lease_seconds: float = key(60.0, "spool: a file whose producer was silent for so long is free", gt=0)
    wait_seconds: float = key(1800.0, "spool: longest wait of the trainer for a file", gt=0)
    verify_files: bool = key(True, "offline: compare every file's SHA-256 at the start; false compares sizes alone")
    read_threads: int = key(2, "offline: threads that read ahead; 0 reads when a batch is asked for", ge=0)


class OptimizerSection(Section):
    """AdamW, warm-up, schedule and batch."""

    learning_rate: float = key(6e-4, "peak learning rate", gt=0)
    warmup_ratio: float = key(0.04, "share of the steps that warm up", ge=0, le=1)
    warmup_offset: Literal[0, 1] = key(1, "1: the first step uses 1/warm of the rate, 0: it uses zero")
    schedule: Literal["cosine", "constant"] = key("cosine", "after the warm-up")
    clip_norm: float = key(1.0, "largest global gradient norm", gt=0)
    b1: float = key(0.9, "decay of the first moment", ge=0, lt=1)
    b2: float = key(0.999, "decay of the second moment", ge=0, lt=1)
    eps: float = key(1e-8, "AdamW epsilon", gt=0)
    weight_decay: float = key(0.0, "decoupled weight decay", ge=0)
    ema_decay: float | None = key(
        None, "average the parameters too, in float32; evaluations and the export take the average", gt=0, lt=1
    )
    batch_size: int = key(4, "sequences of a micro-step; a step has batch_size x accumulation of them", ge=1)
    accumulation: int = key(1, "micro-steps of a step", ge=1)


class TrainMeshSection(Section):
    """The devices: data x fsdp x tensor of them."""

    data: int = key(0, "parts of the batch; 0 takes as many devices as there are and divide the batch", ge=0)
    fsdp: int = key(1, "parts of the parameters and moments; the batch is split over them too", ge=1)
    tensor: int = key(1, "parts of heads, MLP width and vocabulary", ge=1)
    coordinator: str | None = key(
        None,
        "several processes train as one: host:port of process 0, or auto on a cluster",
        min_length=1,
    )
    num_processes: int | None = key(None, "how many; auto knows", ge=1)
    process_id: int | None = key(None, "which of them this one is; auto knows", ge=0)
    topology: str | None = key(None, "TPU topology that --plan compiles for, such as v5p:2x4x4", min_length=1)


class RunSection(Section):
    """Length, directory, saving and logging of a run."""

    directory: str = required("run directory: checkpoints, logs, resolved config", min_length=1)
    steps: int | None = key(None, "optimizer steps; the first limit that is reached ends the run", ge=1)
    epochs: int | None = key(None, "passes over the data", ge=1)
    seconds: float | None = key(None, "wall-clock budget of the training loop", gt=0)
    seed: int = key(42, "seed of initialisation, order and anchors", ge=0, lt=2**32)
    fresh: bool = key(False, "start anew although the directory holds a run")
    checkpoint_every: int = key(200, "steps between checkpoints; 0 saves only at the end", ge=0)
    checkpoint_seconds: float | None = key(None, "save after so many seconds without a checkpoint too", gt=0)
    keep: int = key(3, "checkpoints kept", ge=1)
    keep_every: int = key(0, "checkpoints of steps that it divides are kept for good; 0 keeps none of them", ge=0)
    log_every: int = key(10, "steps between log lines", ge=1)
    export: str | None = key(None, "folder the drafter is exported to at the end", min_length=1)
    export_weights: Literal["last", "best"] = key(
        "last", "export the last weights, or those of the evaluation with the highest tau"
    )
    anchor_attention: Literal["auto", "reference", "tpu", "gpu"] = key(
        "auto", "attention of the drafter's blocks; auto takes the device's kernel where there is one"
    )
    tensorboard: bool = key(True, "write TensorBoard events beside the JSONL")
    wandb: str | None = key(None, "project of Weights & Biases that gets the log too; needs the package", min_length=1)
    eval_every: int = key(0, "steps between evaluations of tau; 0 has none", ge=0)
    eval_prompts: str | None = key(None, "JSONL of prompts for the evaluation", min_length=1)
    eval_new_tokens: int = key(64, "new tokens of an evaluation prompt", ge=1)


class TrainConfig(Section):
    """A training run."""

    version: Literal[1] = key(FORMAT_VERSION, "format version of this file")
    preset: str | None = key(
        None,
        "a published recipe: dflash, dspark, eagle3, dflash2 or dflare; every key that is given replaces its value",
    )
    target: TargetSection
    drafter: DrafterSection
    objective: ObjectiveSection
    data: DataSection
    features: FeaturesSection
    optimizer: OptimizerSection
    mesh: TrainMeshSection
    run: RunSection

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        return rules.fill_train(data)

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        rules.check_train(self)
        return self
