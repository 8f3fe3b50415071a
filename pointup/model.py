"""The upsampler: node shuffle with relative attention, on packed clouds.

Legend of shape suffixes:
    N points of all clouds   K neighbours of a point, itself among them   R slots (children) a point
    C = feature_dim   P = position_hidden   B clouds   M output points
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import Tensor, nn

from pointup.attention import AttentionBlock, RelativeAttention
from pointup.errors import ModelError
from pointup.geometry.local import (
    LocalGeometry,
    describe_neighbors,
    describe_neighbors_of_children,
    local_geometry,
)
from pointup.geometry.midpoints import output_sizes, slots_for_ratio
from pointup.geometry.neighbors import knn
from pointup.geometry.packed import ptr_from_sizes, sizes_from_ptr
from pointup.geometry.thinning import farthest_point_sample

FORMAT = 1
"""Version of the layout of weights and options; a model of another one is refused."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Options of the model."""

    feature_dim: int = 48
    """Channels of each point's feature vector."""
    k: int = 12
    """Neighbours each point attends to, itself not counted."""
    num_layers: int = 3
    """Attention layers over the input points, before the node shuffle."""
    heads: int = 4
    """Heads of the attention among input points."""
    child_heads: int = 4
    """Heads of the attention of children to their parent's neighbours."""
    position_hidden: int = 24
    """Hidden size of the MLP that encodes relative positions."""
    num_refinements: int = 2
    """How often each child looks at its parent's neighbours and moves; the weights are shared."""
    slots_per_ratio: float = 2.0
    """Candidates made for each output point; thinning keeps the most even ones."""
    concat: bool = True
    """Concatenate the heads; otherwise each head has all channels and they are averaged."""
    beta: bool = True
    """Gate the residual connection of each attention by a learned share."""
    dropout: float = 0.0
    """Share of attention weights dropped in training."""

    def __post_init__(self) -> None:
        at_least_one = (
            "feature_dim", "k", "heads", "child_heads", "position_hidden", "num_refinements",
        )  # fmt: skip
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_layers < 0:
            raise ValueError(f"model.num_layers is {self.num_layers}; it can't be negative")
        for name in ("heads", "child_heads"):
            if self.concat and self.feature_dim % getattr(self, name):
                raise ValueError(
                    f"model.feature_dim {self.feature_dim} is not a multiple of model.{name} "
                    f"{getattr(self, name)}; change one, or set concat to False"
                )
        if self.slots_per_ratio < 1.0:
            raise ValueError(
                f"model.slots_per_ratio is {self.slots_per_ratio}; at least 1 candidate is needed "
                "for each output point"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout is {self.dropout}; it must lie in [0, 1)")


class Upsampled(NamedTuple):
    """What `Upsampler` returns; everything packed, clouds in the order of the input."""

    pos: Tensor
    """(M, 3) float32: exactly `round(ratio * N)` points a cloud."""
    ptr: Tensor
    """(B+1,) borders of the clouds in `pos`."""
    parent: Tensor
    """(M,) int64: the input point that each output point was made from."""
    candidates: Tensor
    """(sum of N * R, 3) float32: all children, before thinning."""
    candidates_ptr: Tensor
    """(B+1,) borders of the clouds in `candidates`."""


class Upsampler(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="pointup",
    tags=["point-cloud", "upsampling", "lidar"],
    license="apache-2.0",
):
    """Upsample packed point clouds by any ratio.

    Each point attends to its k nearest neighbours. Its features are then expanded, by relative
    attention, to R slots, one for each of its R nearest neighbours, and reshaped into R children
    (the node shuffle). A child starts at the midpoint between its parent and the neighbour of its
    slot, attends to its parent's neighbours and moves by a weighted sum of the directions to them.
    Thinning by farthest-point sampling leaves exactly `round(ratio * N)` of the children.

    The offsets are zero before training, so that the untrained model equals `midpoint_upsample`.
    Slots are tied to neighbours and share weights: their number follows the ratio. The model is
    equivariant to translation and scale, and no cloud sees another. Coordinates are float32:
    centre a cloud (in float64) before casting it.

    Keyword arguments are those of `ModelConfig`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        try:
            config = ModelConfig(**options)
        except TypeError as error:
            raise ModelError(f"unknown model option: {error}") from None
        self.config = config
        dim, hidden = config.feature_dim, config.position_hidden

        def block(heads: int, feed_forward: bool = True) -> AttentionBlock:
            attention = RelativeAttention(
                dim, heads, hidden, config.concat, config.beta, config.dropout
            )
            return AttentionBlock(dim, attention, feed_forward)

        self.neighbor_position = nn.Sequential(
            nn.Linear(7, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()
        )
        self.embed = nn.Sequential(nn.Linear(2 * hidden, dim), nn.GELU(), nn.Linear(dim, dim))
        self.layers = nn.ModuleList([block(config.heads) for _ in range(config.num_layers)])
        self.slot = nn.Linear(2 * dim + hidden, dim)
        self.shuffle = block(config.heads, feed_forward=False)
        # One layer: there are R x K of these positions a point.
        self.child_position = nn.Sequential(nn.Linear(6, hidden), nn.ReLU())
        self.refine = block(config.child_heads)
        self.pull_norm = nn.LayerNorm(dim)
        self.pull = nn.Linear(dim, hidden)
        nn.init.zeros_(self.pull.weight)
        nn.init.zeros_(self.pull.bias)

    def forward(self, pos: Tensor, ptr: Tensor, ratio: Tensor | float) -> Upsampled:
        """Upsample each cloud to `round(ratio * N)` points.

        Shapes: `pos` (N, 3) float32, `ptr` (B+1,) int64, `ratio` a number or (B,), at least 1.
        The result has gradients with respect to the weights; which children are kept has none.
        Raises ValueError for a ratio below 1 and for non-finite points.
        """
        num_out = output_sizes(ptr, ratio)
        sizes = sizes_from_ptr(ptr)
        slots = slots_for_ratio(ratio, self.config.slots_per_ratio).to(ptr.device)
        slots = slots.expand(sizes.shape)
        candidates_ptr = ptr_from_sizes(sizes * slots)
        if len(pos) == 0:
            # Joined to every weight, so that a backward pass through it is valid.
            nothing = pos.reshape(0, 3) + sum(p.sum() * 0.0 for p in self.parameters())
            return Upsampled(nothing, ptr, ptr.new_empty(0), nothing, candidates_ptr)

        num_neighbors = self.config.k + 1
        squared, neighbors = knn(pos, ptr, max(num_neighbors, int(slots.max())))
        geometry = local_geometry(
            pos, ptr, squared[:, :num_neighbors], neighbors[:, :num_neighbors]
        )
        features, g = self.encode(geometry)
        slots_of_point = slots.repeat_interleave(sizes)
        pieces = []
        # Clouds with the same number of slots are expanded together, in the order of the input.
        for num_slots, rows in same_number_of_slots(slots, ptr):
            index = neighbors[rows, :num_slots]
            pieces.append(self.place_children(pos, rows, index, features, g, geometry))
        candidates = torch.cat([piece.flatten(0, 1) for piece in pieces])

        picked = farthest_point_sample(candidates.detach(), candidates_ptr, num_out)
        own = torch.arange(len(pos), device=pos.device)
        parent = own.repeat_interleave(slots_of_point)[picked]
        return Upsampled(
            candidates[picked], ptr_from_sizes(num_out), parent, candidates, candidates_ptr
        )

    def encode(self, geometry: LocalGeometry) -> tuple[Tensor, Tensor]:
        """Features (N, C) of the input points, and the encoded neighbour positions (N, K, P)."""
        index, missing = geometry.index, geometry.missing
        g = self.neighbor_position(
            describe_neighbors(geometry, geometry.relative, geometry.spacing[index])
        )
        seen = (~missing).unsqueeze(-1)
        mean = (g * seen).sum(1) / seen.sum(1)
        highest = g.masked_fill(~seen, float("-inf")).amax(1)
        features = self.embed(torch.cat([mean, highest], dim=-1))
        for layer in self.layers:
            features = layer(features.unsqueeze(1), features, index, missing, g).squeeze(1)
        return features, g

    def place_children(
        self,
        pos: Tensor,
        rows: slice,
        slot_neighbor: Tensor,
        features: Tensor,
        g: Tensor,
        geometry: LocalGeometry,
    ) -> Tensor:
        r"""Positions (n, R, 3) of the children of the points in `rows`.

        Child m of a point moves from its anchor by

        .. math:: s \cdot \frac{1}{K} \sum_j (w(x_m) \cdot g_{mj}) \, r_{mj}

        where r leads from the child to its parent's neighbour j in units of the spacing s: it is
        pulled to and pushed from them, as by the masks of subdivision surfaces. On a plane it
        stays on the plane.

        Shapes: `slot_neighbor` (n, R) the neighbour that each slot is tied to, `features` (N, C)
        and `g` (N, K, P) of all points.
        """
        local = geometry.rows(rows)
        spacing = local.spacing.unsqueeze(1)
        own = torch.arange(rows.start, rows.stop, device=pos.device).unsqueeze(1)
        slot_neighbor = torch.where(slot_neighbor < 0, own, slot_neighbor)

        to_slot = (pos[slot_neighbor] - pos[rows].unsqueeze(1)) / spacing
        slot_position = self.neighbor_position(
            describe_neighbors(local, to_slot, geometry.spacing[slot_neighbor])
        )
        of_parent = features[rows].unsqueeze(1).expand(-1, slot_neighbor.shape[1], -1)
        of_neighbor = features.index_select(0, slot_neighbor.flatten()).view(of_parent.shape)
        x_NRC = self.slot(torch.cat([of_parent, of_neighbor, slot_position], dim=-1))
        x_NRC = self.shuffle(x_NRC, features, local.index, local.missing, g[rows])

        offset = torch.zeros_like(to_slot)
        for _ in range(self.config.num_refinements):
            from_parent = 0.5 * to_slot + offset
            to_neighbor = local.relative.unsqueeze(1) - from_parent.unsqueeze(2)
            child_g = self.child_position(
                describe_neighbors_of_children(local, to_neighbor, to_slot)
            )
            x_NRC = self.refine(x_NRC, features, local.index, local.missing, child_g)
            pull = torch.einsum("nrp,nrkp->nrk", self.pull(self.pull_norm(x_NRC)), child_g)
            pull = pull.float().masked_fill(local.missing.unsqueeze(1), 0.0)
            offset = offset + (pull.unsqueeze(-2) @ to_neighbor).squeeze(-2) / pull.shape[2]
        return (pos[rows].unsqueeze(1) + pos[slot_neighbor]) * 0.5 + offset * spacing

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> str | None:
        """Save weights (safetensors) and options, in the Hub's format."""
        kwargs.setdefault("config", {"format": FORMAT, **asdict(self.config)})
        return super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Upsampler:
        """Load a model from a directory or a Hub repository, in evaluation mode.

        Raises ModelError when there is no model, or one of another format.
        """
        name = str(pretrained_model_name_or_path)
        stored = read_config(name, **{k: kwargs[k] for k in ("revision", "token") if k in kwargs})
        if stored.get("format") != FORMAT:
            raise ModelError(
                f"{name}: format {stored.get('format')} of the model is not {FORMAT}, the one this "
                "version of pointup reads; train it again, or install the version that wrote it"
            )
        try:
            return super().from_pretrained(pretrained_model_name_or_path, strict=True, **kwargs)
        except (RuntimeError, SafetensorError, ValueError, FileNotFoundError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(f"{name}: the weights can't be loaded ({reason})") from error

    @classmethod
    def _from_pretrained(cls, **kwargs: Any) -> Upsampler:
        kwargs.pop("format", None)
        return super()._from_pretrained(**kwargs)


def same_number_of_slots(slots: Tensor, ptr: Tensor) -> list[tuple[int, slice]]:
    """Runs of consecutive clouds with equal numbers of slots, as (slots, slice of their points)."""
    values, lengths = torch.unique_consecutive(slots, return_counts=True)
    borders = ptr[F.pad(lengths.cumsum(0), (1, 0))].tolist()
    return [
        (num_slots, slice(start, stop))
        for num_slots, start, stop in zip(values.tolist(), borders, borders[1:], strict=False)
        if stop > start
    ]


def read_config(name: str, **kwargs: Any) -> dict[str, Any]:
    """The config.json of a model directory or Hub repository; ModelError where there is none."""
    path = Path(name) / "config.json"
    try:
        if not Path(name).is_dir():
            path = Path(hf_hub_download(name, "config.json", **kwargs))
        return cast(dict[str, Any], json.loads(path.read_text()))
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: not a valid config.json ({error})") from error
    except (OSError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelError(
            f"{name}: neither a directory with a model (config.json, model.safetensors) nor a Hub "
            "repository that can be reached; train one with train.py, its model/ directory is one"
        ) from error
