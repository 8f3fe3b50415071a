"""Thinning dense clouds to sparse ones, by the patterns that sparse clouds come in."""

from __future__ import annotations

import numpy as np

from pointup.errors import ConfigError

PATTERNS = ("random", "poisson", "scanline")

# Spacing of the scan lines in units of the spacing along a line.
LINE_SPACING = (2.0, 4.0)
# How far a return strays from its place in the sampling grid, in units of the spacing along a line.
JITTER = 0.2
GOLDEN_RATIO = (1 + np.sqrt(5)) / 2
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def thin(positions: np.ndarray, ratio: float, pattern: str, rng: np.random.Generator) -> np.ndarray:
    """Keep one point in `ratio`: ascending indices of round(N / ratio) of the (N, 3) positions.

    Patterns: "random", each point alike; "poisson", evenly spaced; "scanline", in parallel lines of
    a random heading over the xy plane, two to four times as far apart as the points along them, as
    a scanner sees ground, walls and shapes. Raises ConfigError for another pattern or ratio < 1.
    """
    if not (np.isfinite(ratio) and ratio >= 1):
        raise ConfigError(f"thinning ratio {ratio}: must be at least 1")
    num_kept = round(len(positions) / ratio)
    if pattern == "random":
        return np.sort(rng.choice(len(positions), num_kept, replace=False))
    if pattern == "poisson":
        # Here, because thinning needs torch and the other patterns don't.
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
    # The scanner's pass is drawn; what is left to find is how fine it must be for enough returns.
    area = float(np.prod(np.maximum(np.ptp(centred[:, :2], axis=0), 1e-9)))
    spacing = np.sqrt(area / (num_kept * anisotropy))
    best = np.arange(len(positions))
    for _ in range(12):
        line, off_line = _nearest_place(across / (spacing * anisotropy) + phase[0])
        # Every line begins elsewhere.
        place, off_place = _nearest_place(along / spacing + phase[1] + line * GOLDEN_RATIO)
        beam = _hashed(line, place)
        stray = (off_line * anisotropy + jitter[0]) ** 2 + (off_place + jitter[1]) ** 2
        returns = _returns(beam, centred[:, 2] / spacing, stray)
        if num_kept <= len(returns) < len(best):
            best = returns
        if num_kept <= len(returns) <= 1.02 * num_kept:
            break
        spacing *= np.sqrt(len(returns) / (1.01 * num_kept))
    return np.sort(rng.choice(best, num_kept, replace=False))


def _nearest_place(coordinate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    place = np.rint(coordinate)
    return place, coordinate - place


def _hashed(*numbers: np.ndarray) -> np.ndarray:
    # Instead of one number a cell, because those of outliers would overflow. Where two cells get
    # the same, one return is lost.
    cell = np.zeros(len(numbers[0]), dtype=np.uint64)
    for number in numbers:
        cell = (cell ^ number.astype(np.int64).view(np.uint64)) * HASH_FACTOR
        cell ^= cell >> np.uint64(29)
    return cell


def _returns(beam: np.ndarray, height: np.ndarray, stray: np.ndarray) -> np.ndarray:
    """A point in each unit of height that a beam meets above its lowest, the one least astray."""
    _, beam_of = np.unique(beam, return_inverse=True)
    lowest = np.full(beam_of.max() + 1, np.inf)
    np.minimum.at(lowest, beam_of, height)
    cell = _hashed(beam_of, np.floor(height - lowest[beam_of]))
    order = np.lexsort((stray, cell))
    return order[np.flatnonzero(np.diff(cell[order], prepend=~cell[order[:1]]))]
