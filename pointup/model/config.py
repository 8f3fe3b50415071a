"""Options of the model, validated: `--model.*` of train.py and config.json of a model directory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

MAX_OVERSAMPLING = 8.0
"""Largest `oversampling`."""
MAX_PASS_RATIO = 8.0
"""Default of `max_pass_ratio`, and its smallest value."""
MAX_REACH = 8.0
"""Largest `reach`."""

# Far beyond useful values: a larger number is a typing error and would exhaust the memory.
RANGES: dict[str, tuple[float, float]] = {
    "feature_dim": (1, 4096),
    "k": (1, 1024),
    "num_layers": (0, 128),
    "heads": (1, 128),
    "child_heads": (1, 128),
    "position_hidden": (1, 4096),
    "num_refinements": (1, 128),
    "column_layers": (0, 128),
    "column_neighbors": (1, 1024),
    "column_stride": (1, 64),
    "error_exponent": (0.0, 1e9),
    "reach": (0.01, MAX_REACH),
    "max_pass_ratio": (MAX_PASS_RATIO, 64.0),
    "slots_per_ratio": (1.0, 64.0),
    "density_exponent": (0.0, 1.0),
    "quota_exponent": (0.0, 1.0),
    "quota_noise": (0.0, 1e9),
    "oversampling": (1.0, MAX_OVERSAMPLING),
    "relaxation_steps": (0, 10_000),
    "relaxation_residual": (0.0, 1e9),
    "relaxation_radius": (0.5, 2.0),
    "volume_relaxation": (0.0, 4.0),
    "dropout": (0.0, 0.99),
}
"""Smallest and largest value of each option that is a number."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Options of the model."""

    feature_dim: int = 48
    """Channels of the feature vector of each point."""
    k: int = 12
    """Neighbours that each point attends to, itself not counted."""
    num_layers: int = 2
    """Attention layers over the input points, before the node shuffle."""
    heads: int = 4
    """Heads of the attention between input points."""
    child_heads: int = 4
    """Heads of the attention of children to their parent's neighbours."""
    position_hidden: int = 24
    """Hidden size of the MLP that encodes relative positions."""
    num_refinements: int = 1
    """Refinements of each child: it attends to its parent's neighbours and moves. All refinements
    share weights."""
    column_layers: int = 0
    """Attention layers over points of the same column: neighbours in the horizontal plane, at any
    height. With them the model knows the vertical profile around each point. For surveys only: the
    third coordinate must be a height."""
    column_neighbors: int = 24
    """Points of its column that each point attends to in these layers, itself among them."""
    column_stride: int = 4
    """Of the horizontally nearest points every `column_stride`-th is used."""
    extrapolation: bool = False
    """Every second candidate starts beyond its parent, opposite to a neighbour, instead of half way
    to the neighbour. Such candidates reach into holes and below crowns."""
    descent: bool = False
    """Every eighth candidate starts straight below its parent, down to the lowest point of the
    parent's column, by at most `reach`: walls below the edges of roofs, stems and shrubs below
    crowns. Needs `column_layers`."""
    predict_error: bool = False
    """Predict the distance of each candidate to the target, for the uncertainty of new points.
    Thinning prefers reliable candidates, by `error_exponent`."""
    error_exponent: float = 0.5
    """Exponent of the predicted error in the spacing of candidates: 0 selects evenly spaced
    candidates, as without predicted errors; larger values leave places without reliable candidates
    emptier. No weight depends on it: it can be changed in the config.json of a trained model."""
    reach: float = 1.5
    """Largest distance of a new point of `pointup upsample` from its nearest measured point, in
    local spacings, and of a candidate of `descent` below its parent. It can be changed in the
    config.json of a trained model."""
    max_pass_ratio: float = MAX_PASS_RATIO
    """Largest ratio of a single pass of `pointup upsample`; larger ratios take several passes. No
    weight depends on it."""
    slots_per_ratio: float = 2.0
    """Candidates per output point; thinning keeps the most evenly spaced ones."""
    density_exponent: float = 0.7
    """Exponent of the predicted quotas (share of the output per input point) by which the first
    pass of `pointup upsample` distributes new points: 1 follows the prediction, 0 keeps differences
    in density as measured. Where predicted errors choose candidates (`error_exponent`), quotas
    follow from them: in inverse proportion to their square. No weight depends on it: it can be
    changed in the config.json of a trained model."""
    quota_exponent: float = 0.0
    """Where predicted errors choose candidates: exponent of the predicted quotas, by which the
    quotas of the errors are multiplied, so that new points lie where a second survey has its
    points. 0 leaves them out. No weight depends on it: it can be changed in the config.json of a
    trained model."""
    quota_noise: float = 0.0
    """Variance of the errors in the logarithms of the quotas. Quotas are drawn towards equal ones
    by its share of their variance: an evenly sampled cloud keeps its density, an uneven one gets
    the predicted one. No weight depends on it: it can be changed in the config.json of a trained
    model."""
    oversampling: float = 1.0
    """Candidates per output point that `pointup upsample` computes in a second pass, over the
    output of a first one; 1 means one pass. The second pass fills holes beyond the neighbours of
    measured points; 4 takes five to six times as long as 1. No weight depends on it: it can be
    changed in the config.json of a trained model."""
    relaxation_steps: int = 5
    """Steps in which `pointup upsample` pushes new points apart along the surface. More steps give
    a more even spacing and slightly larger distances to the surface. No weight depends on it."""
    relaxation_residual: float = 0.0
    """Residual of the surface that relaxation fits to the neighbours of a new point, in spacings
    of the output, from which on the point stays where the network put it: on edges and in thin
    parts. Up to a fifth of it a point moves freely. 0: points move everywhere. No weight depends on
    it."""
    relaxation_radius: float = 1.0
    """Radius of the repulsion, in spacings of the output. More than 1 spreads points into places
    without candidates, as on ridges, and between close sheets, unless `relaxation_residual` holds
    them. No weight depends on it."""
    volume_relaxation: float = 0.0
    """Radius of the repulsion, in spacings of the output, where the neighbours of a new point fill
    a volume, as leaves do: relaxation pushes points apart in all directions there. 0: it moves
    points along surfaces only, and fits one everywhere. No weight depends on it."""
    heights: bool = False
    """The third coordinate is a height, as for `lidar` and models fine-tuned from it: `pointup
    upsample` puts no new point below the ground. No weight depends on it: it can be changed in the
    config.json of a trained model. Models with `column_layers` have heights, whatever it says."""
    concat: bool = True
    """Concatenate the heads; otherwise each head has all channels and heads are averaged."""
    beta: bool = True
    """Multiply the output of each attention by a learned gate."""
    dropout: float = 0.0
    """Share of attention weights dropped in training."""

    @property
    def chooses_by_error(self) -> bool:
        """Whether predicted errors decide which candidates become new points."""
        return self.predict_error and self.error_exponent > 0

    @property
    def has_heights(self) -> bool:
        """Whether the third coordinate of all clouds of the model is a height."""
        return self.heights or self.column_layers > 0

    @property
    def column_size(self) -> int:
        """Number of horizontally nearest points that make up the column of a point; 0 without
        column layers."""
        return self.column_stride * (self.column_neighbors - 1) + 1 if self.column_layers else 0

    def __post_init__(self) -> None:
        """Raise ValueError for a value of the wrong type or out of range."""
        for option in fields(self):
            _check_type(option.name, str(option.type), getattr(self, option.name))
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                limit = f"at least {low:g}" if value < low else f"at most {high:g}"
                raise ValueError(f"model.{name} is {value!s:.40}; it must be {limit}")
        for name in ("heads", "child_heads"):
            if self.concat and self.feature_dim % getattr(self, name):
                raise ValueError(
                    f"model.feature_dim {self.feature_dim} is not a multiple of model.{name} "
                    f"{getattr(self, name)}; change one, or set concat to False"
                )


def _check_type(name: str, kind: str, value: object) -> None:
    if kind == "bool":
        fits, expected = isinstance(value, bool), "true or false"
    elif kind == "int":
        fits, expected = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    else:
        fits = isinstance(value, float | int) and not isinstance(value, bool) and isfinite(value)
        expected = "a finite number"
    if not fits:
        raise ValueError(f"model.{name} is {value!r:.40}; it must be {expected}")
