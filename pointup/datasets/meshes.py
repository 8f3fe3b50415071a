"""Pairs from meshes: source and target are independent samplings of one surface."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from pointup.datasets.block_pairs import PATTERNS, thin
from pointup.datasets.pair import Pair
from pointup.errors import ConfigError
from pointup.geometry.surfaces import Surface
from pointup.io.files import read_mesh

# Number of points drawn for each point that scan-line thinning keeps.
SCANLINE_OVERSAMPLING = 8


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The options of sampling a surface.

    The source has `num_source` points by `pattern`: "poisson", "random", "scanline", or "mixed",
    which takes these in turn. The target has round(ratio * num_source) points by Poisson-disk
    sampling, with normals. With `num_patches` > 0, each pair is a patch: the points of source,
    target and second sampling in one ball around a random source point, which holds `patch_size`
    source points. The source gets Gaussian noise, whose standard deviation is drawn for each sample
    from the range `noise`.

    Raises ConfigError for impossible values.
    """

    num_source: int
    ratio: float
    pattern: str
    num_patches: int = 0
    patch_size: int = 256
    noise: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if not (np.isfinite(self.ratio) and self.ratio >= 1):
            raise ConfigError(f"ratio {self.ratio}: must be at least 1")
        if self.num_source < 1 or self.num_patches < 0:
            raise ConfigError(
                f"{self.num_source} source points in {self.num_patches} patches: "
                "at least one point is needed"
            )
        if self.num_patches and not 2 <= self.patch_size <= self.num_source:
            raise ConfigError(
                f"patch size {self.patch_size}: must be 2 to {self.num_source}, the source's points"
            )
        low, high = self.noise
        if not 0 <= low <= high < 1:
            raise ConfigError(f"noise {low:g} to {high:g}: must lie in [0, 1), lowest first")

    @property
    def num_patterns(self) -> int:
        return len(PATTERNS) if self.pattern == "mixed" else 1


def mesh_file_pairs(
    path: Path, name: str, sampling: Sampling, num_samples: int, truth: bool, seed: int
) -> tuple[list[Pair], Surface]:
    """Pairs of a mesh file, and its surface, normalised to a largest distance of 1 from the centre.

    With `truth` the pairs get a second sampling and the file name of the surface, for metrics that
    compare with the true surface. Raises FileError for an unreadable mesh.
    """
    surface = read_mesh(path).normalized()
    pairs = surface_pairs(surface, name, sampling, num_samples, truth, seed)
    if truth:
        for pair in pairs:
            pair.surface = surface_file(name)
    return pairs, surface


def surface_file(name: str) -> str:
    """The file name in `surfaces/` of a dataset for the surface of the mesh `name`."""
    return name.replace("%", "%25").replace("/", "%2F") + ".npz"


def surface_pairs(
    surface: Surface, name: str, sampling: Sampling, num_samples: int, resample: bool, seed: int
) -> list[Pair]:
    """Sample one surface `num_samples` times; returns the pairs or their patches.

    They are named NAME/SAMPLE-PATTERN and NAME/SAMPLE-PATTERN/PATCH. With `resample`, pairs get a
    second sampling of the surface, the resampled ground truth of evaluations. Coordinates are those
    of the surface. The result depends only on the arguments.
    """
    pairs = []
    first_pattern = crc32(name.encode())
    for sample in range(num_samples):
        # The first pattern depends on the name, so that the patterns are mixed even if each mesh
        # has one sample.
        kind = PATTERNS[(first_pattern + sample) % len(PATTERNS)]
        kind = kind if sampling.pattern == "mixed" else sampling.pattern
        rng = np.random.default_rng([seed, crc32(name.encode()), sample])
        source = draw_source(surface, sampling.num_source, kind, rng)
        target, normals = surface.poisson_disk(round(sampling.ratio * sampling.num_source), rng)
        second = surface.poisson_disk(len(target), rng)[0] if resample else None
        if sampling.noise[1]:
            source = source + rng.uniform(*sampling.noise) * rng.standard_normal(source.shape)
        whole = Pair(
            name=f"{name}/{sample}-{kind}",
            source=source.astype(np.float32),
            target=target.astype(np.float32),
            target_normals=normals.astype(np.float32),
            resample=None if second is None else second.astype(np.float32),
            vertical=False,
        )
        if sampling.num_patches:
            pairs += _cut_patches(whole, sampling.num_patches, sampling.patch_size, rng)
        else:
            pairs.append(whole)
    return pairs


def draw_source(
    surface: Surface, num_points: int, pattern: str, rng: np.random.Generator
) -> np.ndarray:
    """Draw points (num_points, 3) float64 from the surface; scan lines get a random orientation."""
    if pattern == "poisson":
        return surface.poisson_disk(num_points, rng)[0]
    if pattern == "random":
        return surface.sample(num_points, rng)[0]
    dense, _ = surface.sample(SCANLINE_OVERSAMPLING * num_points, rng)
    turned = Rotation.random(rng=rng).apply(dense)
    return dense[thin(turned, SCANLINE_OVERSAMPLING, pattern, rng)]


def _cut_patches(
    whole: Pair, num_patches: int, patch_size: int, rng: np.random.Generator
) -> list[Pair]:
    assert whole.target_normals is not None
    source_tree, target_tree = cKDTree(whole.source), cKDTree(whole.target)
    resample_tree = None if whole.resample is None else cKDTree(whole.resample)
    patches = []
    for patch in range(num_patches):
        centre = whole.source[rng.integers(len(whole.source))]
        distance, rows = source_tree.query(centre, k=patch_size)
        radius = np.max(distance)
        inside = np.sort(target_tree.query_ball_point(centre, radius))
        second = None
        if whole.resample is not None and resample_tree is not None:
            second = whole.resample[np.sort(resample_tree.query_ball_point(centre, radius))]
        patches.append(
            Pair(
                name=f"{whole.name}/{patch}",
                source=whole.source[np.sort(rows)],
                target=whole.target[inside],
                target_normals=whole.target_normals[inside],
                resample=second,
                vertical=False,
            )
        )
    return patches
