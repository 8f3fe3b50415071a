"""Reference implementation of `Upsampler` in plain PyTorch, for tests.

It processes one cloud at a time, holds each intermediate value as one tensor over all neighbours
of all children, differentiates by autograd and searches neighbours by brute force. With the same
weights it returns the same children as `Upsampler`.

Legend of shape suffixes: as in `pointup.model.upsampler`, with H heads and D channels per head.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

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


@torch.no_grad()
def reference_knn(pos: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Squared distances and indices (N, k) of the nearest points, the point itself first.

    Distances are by differences: the matrix product that torch uses for large clouds rounds, and
    that gives wrong neighbours.
    """
    distances = torch.cdist(pos, pos, compute_mode="donot_use_mm_for_euclid_dist")
    distance, index = distances.topk(min(k, len(pos)), largest=False)
    missing = k - index.shape[1]
    distance = nn.functional.pad(distance, (0, missing), value=torch.inf)
    return distance.square(), nn.functional.pad(index, (0, missing), value=-1)


def reference_upsample(model: Upsampler, pos: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """Upsample one cloud (N, 3) with `model`: the points kept, (M, 3), and all children.

    The package's `farthest_point_sample` thins the children to an even spacing, as an untrained
    model does.
    """
    config = model.config
    ptr = torch.tensor([0, len(pos)])
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
    picked = farthest_point_sample(
        children.detach(), torch.tensor([0, len(children)]), output_sizes(ptr, ratio)
    )
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
