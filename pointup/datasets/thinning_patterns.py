"""Thins dense clouds to sparse ones, in the sampling patterns of real sparse clouds."""

from __future__ import annotations

import numpy as np

from pointup.errors import ConfigError

PATTERNS = ("random", "poisson", "scanline")

# Spacing of the scan lines, in units of the point spacing along a line.
LINE_SPACING = (2.0, 4.0)
# Standard deviation of a return's distance from its sampling grid point, in the same units.
JITTER = 0.2
GOLDEN_RATIO = (1 + np.sqrt(5)) / 2
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def thin(positions: np.ndarray, ratio: float, pattern: str, rng: np.random.Generator) -> np.ndarray:
    """Thin a cloud (N, 3): returns ascending indices of round(N / ratio) points.

    Patterns: "random" draws points uniformly; "poisson" draws evenly spaced points; "scanline"
    keeps points on parallel lines in the xy plane with a random heading, as a scanner records
    ground, walls and shapes. The lines are two to four times as far apart as the points along them.
    Raises ConfigError for another pattern or a ratio below 1.
    """
    if not (np.isfinite(ratio) and ratio >= 1):
        raise ConfigError(f"thinning ratio {ratio}: must be at least 1")
    num_kept = round(len(positions) / ratio)
    if pattern == "random":
        return np.sort(rng.choice(len(positions), num_kept, replace=False))
    if pattern == "poisson":
        # Imported here, because it needs torch and the other patterns don't.
        from pointup.geometry.thinning import poisson_disk_subset

        return poisson_disk_subset(positions, num_kept, rng)
    if pattern == "scanline":
        return _scan_lines(positions, num_kept, rng)
    raise ConfigError(f"thinning pattern {pattern!r}: must be one of {', '.join(PATTERNS)}")


def _scan_lines(positions: np.ndarray, num_kept: int, rng: np.random.Generator) -> np.ndarray:
    if num_kept == 0:
        return np.empty(0, dtype=np.int64)
    heading, anisotropy = rng.uniform(0, np.pi), rng.uniform(*LINE_SPACING)
    centred = positions - positions.mean(axis=0)
    across = centred[:, 0] * np.cos(heading) + centred[:, 1] * np.sin(heading)
    along = centred[:, 1] * np.cos(heading) - centred[:, 0] * np.sin(heading)
    jitter = rng.normal(0, JITTER, (2, len(positions)))
    phase = rng.random(2)
    # The scan pattern is drawn. Its spacing is searched so that there are enough returns.
    area = float(np.prod(np.maximum(np.ptp(centred[:, :2], axis=0), 1e-9)))
    spacing = np.sqrt(area / (num_kept * anisotropy))
    best = np.arange(len(positions))
    for _ in range(12):
        line, off_line = _nearest_cell(across / (spacing * anisotropy) + phase[0])
        # Each line has another phase.
        place, off_place = _nearest_cell(along / spacing + phase[1] + line * GOLDEN_RATIO)
        beam = _hashed(line, place)
        stray = (off_line * anisotropy + jitter[0]) ** 2 + (off_place + jitter[1]) ** 2
        returns = _returns(beam, centred[:, 2] / spacing, stray)
        if num_kept <= len(returns) < len(best):
            best = returns
        if num_kept <= len(returns) <= 1.02 * num_kept:
            break
        spacing *= np.sqrt(len(returns) / (1.01 * num_kept))
    return np.sort(rng.choice(best, num_kept, replace=False))


def _nearest_cell(coordinate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cell = np.rint(coordinate)
    return cell, coordinate - cell


def _hashed(*numbers: np.ndarray) -> np.ndarray:
    # Cells are hashed, because the linear index of an outlier's cell would overflow. If two cells
    # collide, one return is lost.
    cell = np.zeros(len(numbers[0]), dtype=np.uint64)
    for number in numbers:
        cell = (cell ^ number.astype(np.int64).view(np.uint64)) * HASH_FACTOR
        cell ^= cell >> np.uint64(29)
    return cell


def _returns(beam: np.ndarray, height: np.ndarray, stray: np.ndarray) -> np.ndarray:
    """Indices of the returns: for each beam and unit of height, the point with the least `stray`.

    Units of height count from the lowest point of the beam.
    """
    _, beam_of = np.unique(beam, return_inverse=True)
    lowest = np.full(beam_of.max() + 1, np.inf)
    np.minimum.at(lowest, beam_of, height)
    cell = _hashed(beam_of, np.floor(height - lowest[beam_of]))
    order = np.lexsort((stray, cell))
    return order[np.flatnonzero(np.diff(cell[order], prepend=~cell[order[:1]]))]
