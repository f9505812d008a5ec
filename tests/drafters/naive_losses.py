"""The training objectives once more, one block and one token at a time, in float64 numpy."""

from __future__ import annotations

import math

import numpy as np


def softmax(rows: np.ndarray) -> np.ndarray:
    weights = np.exp(rows - rows.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def blocks(batch, count: int, offset: int, contiguous: bool):
    """(sequence, block, slot, label position) of every supervised slot."""
    ids, mask = np.asarray(batch.input_ids), np.asarray(batch.loss_mask)
    for b, n in np.ndindex(*batch.anchors.shape):
        if not bool(batch.keep[b, n]):
            continue
        for slot in range(count):
            position = int(batch.anchors[b, n]) + offset + slot
            if position < ids.shape[1] and mask[b, position]:
                yield b, n, slot, position
            elif contiguous:
                break


def dpace(probabilities: list, mask: list, alpha: float, kind: str) -> list:
    """D-PACE weights of one block."""
    prefix, running = [], 1.0
    for p, on in zip(probabilities, mask, strict=True):
        running *= (1 - alpha) * p + alpha if on else 1.0
        prefix.append(running)
    suffix = [sum(prefix[i] for i in range(k, len(mask)) if mask[i]) for k in range(len(mask))]
    if kind == "dpace":
        return suffix
    if kind == "dpace-cumulative-confidence-only":
        return prefix
    return [s / p for s, p in zip(suffix, prefix, strict=True)]


def dflash(logits: np.ndarray, batch, objective) -> float:
    """`logits` [B, N, m, V] of rows 1 …."""
    q = softmax(logits.astype(np.float64))
    count = logits.shape[2]
    supervised = list(blocks(batch, count, 1, contiguous=False))
    label = {key[:3]: int(batch.input_ids[key[0], key[3]]) for key in supervised}
    hit = {key: q[key][token] for key, token in label.items()}
    weights = {}
    for b, n in {key[:2] for key in label}:
        mask = [(b, n, slot) in label for slot in range(count)]
        if objective.loss_type == "weighted_ce":
            row = [math.exp(-slot / objective.gamma) if objective.gamma else 1.0 for slot in range(count)]
        else:
            row = dpace(
                [hit.get((b, n, s), 1.0) for s in range(count)], mask, objective.dpace_alpha, objective.loss_type
            )
        weights |= {(b, n, slot): row[slot] for slot in range(count) if mask[slot]}
    by_batch = objective.loss_type != "weighted_ce" and objective.dpace_normalizer == "batch"
    total = batch.anchors.shape[0] if by_batch else sum(weights.values())
    if not weights:
        return 0.0
    ce = sum(weights[key] * -math.log(hit[key]) for key in label) / total
    tv = sum(weights[key] * (1 - hit[key]) for key in label) / total
    if objective.lk == "tv":
        return tv
    if objective.lk == "lambda":
        share = objective.kl_scale * math.exp(-objective.kl_decay * sum(hit.values()) / len(hit))
        return share * ce + (1 - share) * tv
    return ce


def dspark(logits: np.ndarray, confidence: np.ndarray, teacher: np.ndarray, batch, objective, eps: float = 0.0) -> dict:
    """`logits` [B, N, m, V] corrected, `teacher` [B, S, V] logits of the target at each position."""
    q, p = softmax(logits.astype(np.float64)), softmax(teacher.astype(np.float64))
    sums = {"ce": 0.0, "l1": 0.0, "confidence": 0.0}
    total = 0.0
    for b, n, slot, position in blocks(batch, logits.shape[2], 1, contiguous=True):
        weight = math.exp(-slot / objective.gamma) if objective.gamma else 1.0
        total += weight
        mine, theirs = q[b, n, slot], p[b, position - 1]
        l1 = np.abs(mine - theirs).sum()
        accept = 1 - 0.5 * l1
        c = 1 / (1 + math.exp(-confidence[b, n, slot]))
        sums["ce"] += weight * -math.log(mine[int(batch.input_ids[b, position])])
        sums["l1"] += weight * l1
        sums["confidence"] += weight * -(accept * math.log(c) + (1 - accept) * math.log(1 - c))
    return {name: value / (total + eps) if total else 0.0 for name, value in sums.items()}
