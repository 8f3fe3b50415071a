"""Benchmark of training steps against the reference implementation in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

import psutil
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pointup.benchmark.clouds import RATIO, one_cloud, training_batch
from pointup.benchmark.optimizer_steps import SingleProcess, TrainingWork
from pointup.benchmark.peak_memory import PeakMemory
from pointup.benchmark.tables import Column, Row, Section
from pointup.benchmark.timing import Effort, compare
from pointup.benchmark.training_speed import token_budget
from pointup.geometry.local_geometry import (
    LocalGeometry,
    arches,
    describe_neighbors,
    describe_neighbors_of_children,
    directions,
    local_geometry,
    shortened,
    without_bridges,
)
from pointup.geometry.midpoints import output_sizes, slots_for_ratio
from pointup.geometry.thinning import farthest_point_sample
from pointup.model.attention import AttentionBlock
from pointup.model.upsampler import Upsampler
from pointup.training.distributed.accelerator import device_module
from pointup.training.objective import LossConfig

QUICK_SIZES = (500, 2000)
SIZES = (500, 2000, 5000, 20_000)
SHARE_OF_MEMORY = 0.8
LONGEST = 15.0
"""Seconds for all rounds of one size; a single round may take longer."""


class ReferenceWork:
    """The default model, its optimizer and a training step of the reference implementation."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = Upsampler().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, pos: Tensor, target: Tensor, recompute: bool = False) -> None:
        output, _ = reference_upsample(self.model, pos, RATIO)
        self.optimizer.zero_grad()
        reference_chamfer_distance(output, target, recompute).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def measure(effort: Effort) -> Iterator[Row]:
    bound = effort.bound()
    device = effort.device
    # Without a learned density thinning is even, as in the reference.
    work = TrainingWork(SingleProcess(device), loss=LossConfig(density=0.0))
    reference = ReferenceWork(device)
    seconds = bytes_per_token = 0.0
    measured = 1
    for size in QUICK_SIZES if effort.quick else SIZES:
        tokens = round((1 + RATIO) * size)
        row: Row = {"size": size}
        # Bytes of the distance matrices between output and target, both directions.
        matrices = 2 * 4 * round(RATIO * size) ** 2
        room = SHARE_OF_MEMORY * free_memory(device) - bytes_per_token * tokens
        recompute = matrices > room
        # The time of brute force is quadratic in the size.
        expected = seconds * (size / measured) ** 2 * (1 + recompute / 3)
        if refusal := bound.refusal(expected):
            yield row | {"left_out": refusal}
            continue
        if room < 0:
            needed = bytes_per_token * tokens / 1e9
            yield row | {"left_out": f"the plain PyTorch step would need {needed:.0f} GB"}
            continue
        num_clouds = max(1, token_budget(device) // (2 if effort.quick else 1) // tokens)
        batch = training_batch([size] * num_clouds).to(device)
        single = training_batch([size]).to(device)
        with PeakMemory(device) as memory:
            work.step(batch)
        plain_step = partial(reference.step, single.pos, single.target, recompute)
        # Outside of the comparison: measuring the memory takes time, too.
        with PeakMemory(device) as plain_memory:
            plain_step()
        ours, theirs = compare(
            partial(work.step, batch), plain_step, min(bound.left, LONGEST), device
        )
        seconds, measured = theirs, size
        bytes_per_token = max(0, plain_memory.bytes - matrices * (not recompute)) / tokens
        rate, reference_rate = num_clouds * tokens / ours, tokens / theirs
        yield row | {
            "step": rate,
            "plain": reference_rate,
            "ratio": rate / reference_rate,
            "memory": memory.bytes / (num_clouds * tokens),
            "plain_memory": plain_memory.bytes / tokens,
            "matrices": "again" if recompute else "kept",
        }


def free_memory(device: torch.device) -> int:
    module = device_module(device)
    if module is not None:
        return int(module.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


SECTION = Section(
    "reference",
    "Training steps against plain PyTorch, tokens/s",
    (
        Column("size", "points", ",", is_key=True),
        Column("step", "pointup", ",.0f", "higher"),
        Column("plain", "plain PyTorch", ",.0f"),
        Column("ratio", "times as fast", ".1f", "higher"),
        Column("memory", "bytes/token", ",.0f", "lower"),
        Column("plain_memory", "plain bytes/token", ",.0f"),
        Column("matrices", "plain matrices"),
    ),
    measure,
    note="Plain PyTorch: the same network on one cloud per step, each tensor whole, derivatives\n"
    "by autograd, Chamfer distance and neighbours by torch.cdist in chunks, the same thinning.\n"
    "Both without the density loss, which section `step` includes. Distance matrices that do not\n"
    "fit in memory are computed again in the backward pass.",
)


# Reference implementation in plain PyTorch, the baseline of the training benchmark.
#
# It processes one cloud at a time, holds each intermediate value as one tensor over all neighbours
# of all children, differentiates by autograd and searches neighbours by brute force. With the same
# weights it returns the same children as `Upsampler`.
#
# Legend of shape suffixes: as in `pointup.model.upsampler`, with H heads and D channels per head.

ROWS = 4096
"""Rows of the distance matrix held at a time."""


def distances(query: Tensor, pos: Tensor) -> Tensor:
    """All distances, (Q, N), by differences. The matrix product that torch uses for large clouds is
    no faster here, and its rounding gives wrong neighbours."""
    return torch.cdist(query, pos, compute_mode="donot_use_mm_for_euclid_dist")


@torch.no_grad()
def reference_knn(pos: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Squared distances and indices (N, k) of the nearest points, the point itself first."""
    found = [distances(rows, pos).topk(min(k, len(pos)), largest=False) for rows in pos.split(ROWS)]
    distance, index = (torch.cat(parts) for parts in zip(*found, strict=True))
    missing = k - index.shape[1]
    distance = nn.functional.pad(distance, (0, missing), value=torch.inf)
    return distance.square(), nn.functional.pad(index, (0, missing), value=-1)


def reference_chamfer_distance(pos: Tensor, target: Tensor, recompute: bool = False) -> Tensor:
    """Chamfer distance of a single pair of clouds.

    The backward pass needs both distance matrices. With `recompute` it computes them again in
    parts, for pairs whose matrices do not fit in memory.
    """

    def nearest(rows: Tensor, others: Tensor) -> Tensor:
        return distances(rows, others).min(1).values.sum()

    total = pos.new_zeros(())
    for query, others in ((pos, target), (target, pos)):
        for rows in query.split(ROWS):
            if recompute:
                found = checkpoint(nearest, rows, others, use_reentrant=False)
            else:
                found = nearest(rows, others)
            total = total + found / len(query)
    return total


def reference_farthest_point_sample(pos: Tensor, num_samples: int) -> Tensor:
    """Indices (num_samples,) of farthest points, one pick at a time."""
    distance = torch.full((len(pos),), torch.inf, device=pos.device)
    picks = torch.zeros(num_samples, dtype=torch.int64, device=pos.device)
    for step in range(1, num_samples):
        distance = torch.minimum(distance, (pos - pos[picks[step - 1]]).square().sum(1))
        picks[step] = distance.argmax()
    return picks


def reference_upsample(model: Upsampler, pos: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """Upsample one cloud (N, 3) with `model`: the points kept, (M, 3), and all children.

    The package's `farthest_point_sample` thins the children to an even spacing, as an untrained
    model does.
    """
    config = model.config
    ptr = one_cloud(pos)
    num_slots = int(slots_for_ratio(ratio, config.slots_per_ratio))
    squared, neighbors = reference_knn(pos, max(config.k + 1, num_slots))
    geometry = local_geometry(pos, ptr, squared[:, : config.k + 1], neighbors[:, : config.k + 1])
    own = torch.arange(len(pos), device=pos.device).unsqueeze(1)
    slot_neighbor = without_bridges(
        neighbors[:, :num_slots], slice(0, len(pos)), pos, geometry.local_spacing
    )
    slot_neighbor = torch.where(slot_neighbor < 0, own, slot_neighbor)
    to_slot = (pos[slot_neighbor] - pos.unsqueeze(1)) / geometry.spacing.unsqueeze(1)

    features, g = reference_encode(model, geometry)
    described = describe_neighbors(
        geometry, to_slot, geometry.spacing[slot_neighbor], geometry.normal[slot_neighbor]
    )
    x_NRC = model.slot(
        torch.cat(
            [
                features.unsqueeze(1).expand(-1, num_slots, -1),
                features[slot_neighbor],
                model.neighbor_position(described),
            ],
            dim=-1,
        )
    )
    x_NRC = reference_block(model.shuffle, x_NRC, features, g.unsqueeze(1), geometry)

    normals = reference_normals(model, features, g, geometry)
    arch = arches(to_slot, normals, normals[slot_neighbor])
    fitted, turned = geometry.normal[geometry.index], normals[geometry.index].unsqueeze(1)
    offset = torch.zeros_like(to_slot)
    for _ in range(config.num_refinements):
        from_parent = 0.5 * to_slot + offset
        described = describe_neighbors_of_children(geometry, from_parent, to_slot, fitted)
        g_NRKP = model.child_position(described[:-1].permute(1, 2, 3, 0))
        x_NRC = reference_block(model.refine, x_NRC, features, g_NRKP, geometry)
        x_normed_NRC = model.pull_norm(x_NRC)
        directions_NR2P = model.pull(x_normed_NRC).unflatten(-1, (2, -1))
        weight_NRK2 = torch.einsum("nrdp,nrkp->nrkd", directions_NR2P, g_NRKP)
        weight_NRK2 = weight_NRK2.masked_fill(geometry.missing[:, None, :, None], 0.0)
        to_points = geometry.relative.unsqueeze(1) - from_parent.unsqueeze(2)
        to_planes = (to_points * turned).sum(-1, keepdim=True) * turned
        vectors = torch.stack([to_points, to_planes], dim=3)
        offset = offset + (weight_NRK2.unsqueeze(4) * vectors).sum(3).mean(2)
        offset = offset + model.arch(x_normed_NRC) * arch
    children = (pos.unsqueeze(1) + pos[slot_neighbor]) * 0.5
    children = (children + shortened(offset) * geometry.spacing.unsqueeze(1)).flatten(0, 1)
    picked = farthest_point_sample(children.detach(), one_cloud(children), output_sizes(ptr, ratio))
    return children[picked], children


def reference_normals(
    model: Upsampler, features: Tensor, g: Tensor, geometry: LocalGeometry
) -> Tensor:
    """Normals (N, 3) of the points, as `PointEncoder.turn_normals`."""
    directions_N2P = model.normal(model.normal_norm(features)).unflatten(-1, (2, -1))
    weights_NK2 = torch.einsum("ndp,nkp->nkd", directions_N2P, g)
    fit_NK, follow_NK = weights_NK2.masked_fill(geometry.missing.unsqueeze(-1), 0.0).unbind(-1)
    own, others = geometry.normal.unsqueeze(1), geometry.normal[geometry.index]
    fit_NK = fit_NK * (geometry.relative * own).sum(-1)
    follow_NK = follow_NK * (others * own).sum(-1).sign()
    turned = follow_NK.unsqueeze(-1) * others - fit_NK.unsqueeze(-1) * geometry.relative
    return directions(geometry.normal + turned.mean(1))


def reference_encode(model: Upsampler, geometry: LocalGeometry) -> tuple[Tensor, Tensor]:
    """Features (N, C) of the points and encoded positions (N, K, P), as `PointEncoder.encode`."""
    index = geometry.index
    described = describe_neighbors(
        geometry, geometry.relative, geometry.spacing[index], geometry.normal[index]
    )
    g = model.neighbor_position(described)
    missing = geometry.missing.unsqueeze(-1)
    mean = g.masked_fill(missing, 0.0).sum(1) / (~missing).sum(1)
    highest = g.masked_fill(missing, float("-inf")).amax(1)
    features = model.embed(torch.cat([mean, highest], dim=-1))
    for layer in model.layers:
        block = cast(AttentionBlock, layer)
        x_NRC = reference_block(block, features.unsqueeze(1), features, g.unsqueeze(1), geometry)
        features = x_NRC.squeeze(1)
    return features, g


def reference_block(
    block: AttentionBlock, x_NRC: Tensor, features_NC: Tensor, g: Tensor, geometry: LocalGeometry
) -> Tensor:
    """An `AttentionBlock` for R queries per point and encoded positions g (N, R or 1, K, P)."""
    attention = block.attention
    heads = (attention.heads, attention.head_dim)
    normed_NRC = block.query_norm(x_NRC)
    q_NRHD = attention.query(normed_NRC).unflatten(-1, heads)
    kv_NK2C = attention.key_value(block.feature_norm(features_NC))[geometry.index]
    k_NKHD, v_NKHD = (half.unflatten(-1, heads) for half in kv_NK2C.chunk(2, dim=-1))
    k_NRKHD = k_NKHD.unsqueeze(1) + torch.einsum("nrkp,hdp->nrkhd", g, attention.position_key)
    v_NRKHD = v_NKHD.unsqueeze(1) + torch.einsum("nrkp,hpd->nrkhd", g, attention.position_value)
    logits_NRKH = (q_NRHD.unsqueeze(2) * k_NRKHD).sum(-1) * attention.head_dim**-0.5
    logits_NRKH = logits_NRKH.masked_fill(geometry.missing[:, None, :, None], float("-inf"))
    weights_NRKH = nn.functional.dropout(
        logits_NRKH.softmax(2), attention.dropout, training=attention.training
    )
    out_NRHD = (weights_NRKH.unsqueeze(-1) * v_NRKHD).sum(2)
    out = attention.out(out_NRHD.flatten(2) if attention.concat else out_NRHD.mean(2))
    if attention.gate is not None:
        out = out * torch.sigmoid(attention.gate(torch.cat([normed_NRC, out], dim=-1)))
    x_NRC = x_NRC + out
    return x_NRC if block.feed_forward is None else x_NRC + block.feed_forward(x_NRC)
