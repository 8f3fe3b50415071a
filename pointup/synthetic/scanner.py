"""Simulates an airborne laser scanner: scan lines, oblique beams, occlusion, several returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pointup.synthetic.fields import log_uniform


@dataclass(frozen=True)
class Scanner:
    """The parameters of a survey. Lengths are in metres.

    Attributes:
        density: pulses per square metre perpendicular to the beam, of all flight lines together.
        headings: (L,) headings of the flight lines, in radians.
        tilts: (L,) angles of the beams from the vertical to the side of the line, in radians.
        aspect: ratio of the spacing of scan lines to the spacing of pulses in a line.
        slant: distance along the flight that a scan line covers per metre across the flight.
        jitter: standard deviation of the pulse positions, in units of the spacing.
        footprint: diameter of the beam on the ground.
        separation: smallest distance along the beam between two returns of a pulse.
        max_returns: largest number of returns of a pulse.
        sensitivity: smallest share of a pulse that makes a return; the median over pulses.
        sensitivity_spread: standard deviation of its logarithm: leaves reflect unequally.
        range_noise, aim_noise: standard deviation along and across the beam.
        strip_noise: standard deviation of the height of a flight line.
    """

    density: float
    headings: np.ndarray
    tilts: np.ndarray
    aspect: float
    slant: float
    jitter: float
    footprint: float
    separation: float
    max_returns: int
    sensitivity: float
    sensitivity_spread: float
    range_noise: float
    aim_noise: float
    strip_noise: float


@dataclass(frozen=True)
class Returns:
    """The returns of a survey, in no particular order.

    Attributes:
        points: (N, 3) float64.
        normals: (N, 3) unit normals of the surfaces that were hit, oriented towards the scanner;
            zero on facets of leaves, grass and wires, which are not planar at this scale.
        number: (N,) int64, 1 for the first return of a pulse.
    """

    points: np.ndarray
    normals: np.ndarray
    number: np.ndarray


def airborne(rng: np.random.Generator, density: float) -> Scanner:
    """An aeroplane with a wide beam on one to three flight lines, mostly parallel."""
    num_lines = rng.choice([1, 1, 2, 2, 3])
    heading = rng.uniform(0, 2 * np.pi)
    turns = rng.choice([0, np.pi, rng.uniform(0, np.pi)], num_lines, p=[0.4, 0.4, 0.2])
    return Scanner(
        density=density,
        headings=heading + turns + rng.normal(size=num_lines) * 0.03,
        tilts=np.radians(rng.uniform(-22, 22, num_lines)),
        aspect=log_uniform(rng, 0.5, 3),
        slant=rng.choice([0, 0.1, 0.3]) * rng.normal(),
        jitter=rng.uniform(0.03, 0.15),
        footprint=rng.uniform(0.2, 0.5),
        separation=rng.uniform(1.0, 2.5),
        max_returns=5,
        sensitivity=rng.uniform(0.18, 0.36),
        sensitivity_spread=0.45,
        range_noise=rng.uniform(0.01, 0.03),
        aim_noise=rng.uniform(0.01, 0.04),
        strip_noise=0.02,
    )


def drone(rng: np.random.Generator, density: float) -> Scanner:
    """A drone with a narrow beam, large scan angles and little noise on crossing flight lines."""
    num_lines = rng.integers(2, 4)
    heading = rng.uniform(0, 2 * np.pi)
    return Scanner(
        density=density,
        headings=heading + np.arange(num_lines) * np.pi / 2 + rng.normal(size=num_lines) * 0.2,
        tilts=np.radians(rng.uniform(5, 35, num_lines)),
        aspect=log_uniform(rng, 0.7, 1.5),
        slant=0.0,
        jitter=rng.uniform(0.2, 0.4),
        footprint=rng.uniform(0.12, 0.25),
        separation=rng.uniform(0.5, 1.5),
        max_returns=int(rng.integers(2, 5)),
        sensitivity=rng.uniform(0.25, 0.5),
        sensitivity_spread=0.45,
        range_noise=rng.uniform(0.002, 0.006),
        aim_noise=0.003,
        strip_noise=0.0,
    )


def scan(
    solid: np.ndarray,
    rough: np.ndarray,
    width: float,
    scanner: Scanner,
    rng: np.random.Generator,
    count_returns: bool = False,
) -> Returns:
    """Simulate the scan of a square of `width` centred on the origin.

    With `count_returns`, the scanner's density is that of the returns in the square, as of the
    points of a survey, instead of that of the pulses.

    `solid` (S, 3, 3) stops every beam. Beams can pass between the facets of `rough` (R, 3, 3), such
    as leaves and wires.
    """
    strips = [
        _fly(solid, rough, width, scanner, heading, tilt, rng, count_returns)
        for heading, tilt in zip(scanner.headings, scanner.tilts, strict=True)
    ]
    columns = [np.concatenate(arrays) for arrays in zip(*strips, strict=True)]
    inside = (np.abs(columns[0][:, :2]) <= width / 2).all(axis=1)
    return Returns(*(column[inside] for column in columns))


def _fly(
    solid: np.ndarray,
    rough: np.ndarray,
    width: float,
    scanner: Scanner,
    heading: float,
    tilt: float,
    rng: np.random.Generator,
    count_returns: bool,
) -> tuple[np.ndarray, ...]:
    """Simulate one flight line; returns the columns of `Returns`.

    The axes are along the flight, across the beam, along the beam.
    """
    along = np.array([np.cos(heading), np.sin(heading), 0])
    aside = np.array([-np.sin(heading), np.cos(heading), 0])
    beam = np.sin(tilt) * aside - np.cos(tilt) * np.array([0, 0, 1.0])
    axes = np.stack([along, np.cross(beam, along), beam], axis=1)
    heights = np.concatenate([solid[..., 2].ravel(), rough[..., 2].ravel()])
    square = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * width / 2
    corners = [[*corner, z] for corner in square for z in (heights.min(), heights.max())]
    low, high = np.sort(np.array(corners) @ axes[:, :2], axis=0)[[0, -1]] + [[-1], [1]]

    solid, rough = (_seen(part, axes, low, high) for part in (solid, rough))
    density = wanted = scanner.density / len(scanner.headings)
    # Several rays share each pulse.
    pixel = min(0.1, 0.5 * density**-0.5, scanner.footprint / 2.5 or 0.1)
    image = DepthImage(low, high, pixel, rng)
    image.splat(rough, rng)
    image.rasterize(solid)

    for attempt in range(3 if count_returns else 1):
        places = _pulses(low, high, scanner, density, rng)
        hits, number = _returns(image, places, scanner, rng)
        points = image.hit[hits]
        inside = (np.abs((points @ axes.T)[:, :2]) <= width / 2).all(axis=1)
        num_points = np.count_nonzero(inside)
        if not num_points or attempt == 2:
            break
        density *= wanted * width**2 / num_points
    noise = rng.normal(size=points.shape)
    noise *= [scanner.aim_noise, scanner.aim_noise, scanner.range_noise]
    lift = scanner.strip_noise * rng.normal()
    points = (points + noise) @ axes.T + [0, 0, lift]
    return points, image.normal[hits] @ axes.T, number


def _seen(triangles: np.ndarray, axes: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The triangles that reach into a window across the beam, in the axes of the flight line."""
    turned = triangles @ axes
    first, last = bounds(turned)
    reaches = (last >= low) & (first <= high)
    return turned[reaches[:, 0] & reaches[:, 1]]


def _pulses(
    low: np.ndarray, high: np.ndarray, scanner: Scanner, density: float, rng: np.random.Generator
) -> np.ndarray:
    """Positions (P, 2) of the pulses, along and across the flight, in the order of scan lines."""
    line_spacing = (scanner.aspect / density) ** 0.5
    spacing = 1 / (density * line_spacing)
    reach = abs(scanner.slant) * (high[1] - low[1])
    rows = np.arange(low[0] - reach, high[0] + reach, line_spacing)
    columns = np.arange(low[1], high[1], spacing)
    place = np.empty((len(rows), len(columns), 2))
    place[..., 0] = rows[:, None] + scanner.slant * (columns - low[1])
    place[..., 1] = columns + rng.uniform(0, spacing, (len(rows), 1))
    place += rng.normal(size=place.shape) * scanner.jitter * [line_spacing, spacing]
    return place.reshape(-1, 2)


def _returns(
    image: DepthImage, places: np.ndarray, scanner: Scanner, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Rays (N,) of the returns of pulses at positions (P, 2), and the numbers of the returns.

    The pulse is shared by all rays in its footprint. Hits make a return as soon as they are the
    share `sensitivity` of the rays: those within 0.3 m of the nearest hit, together with
    nearer ones that were too few. Hits within `separation` behind the nearest hit of a return
    are lost. The ray nearest to the pulse's axis represents the return.
    """
    reach = int(scanner.footprint / 2 / image.pixel)
    offset = np.indices((2 * reach + 1,) * 2).reshape(2, -1).T - reach
    distance = np.square(offset).sum(axis=1)
    order = np.argsort(distance, kind="stable")
    offset = offset[order][distance[order] <= (scanner.footprint / 2 / image.pixel) ** 2]
    where = np.floor((places - image.low) / image.pixel).astype(int)
    where = where[((where >= reach) & (where < image.shape - reach)).all(axis=1)]
    rays = where[:, :1] * image.shape[1] + where[:, 1:]
    rays = rays + offset[:, 0] * image.shape[1] + offset[:, 1]
    depth = image.hit[rays, 2]
    found, numbers = [], []
    waiting = np.zeros(len(rays))
    spread = scanner.sensitivity_spread * rng.standard_normal(len(rays))
    enough = np.minimum(scanner.sensitivity * np.exp(spread), 1.0)
    num_returns, pulse = np.zeros(len(rays), dtype=np.int64), np.arange(len(rays))
    while len(pulse):
        nearest = depth.min(axis=1)
        alive = np.isfinite(nearest) & (num_returns[pulse] < scanner.max_returns)
        rays, depth, pulse, nearest = rays[alive], depth[alive], pulse[alive], nearest[alive]
        members = depth < nearest[:, None] + 0.3
        waiting[pulse] += members.mean(axis=1)
        strong = waiting[pulse] >= enough[pulse]
        waiting[pulse[strong]] = 0
        num_returns[pulse[strong]] += 1
        found.append(rays[strong, members.argmax(axis=1)[strong]])
        numbers.append(num_returns[pulse[strong]])
        behind = depth < nearest[:, None] + scanner.separation
        depth = np.where(np.where(strong[:, None], behind, members), np.inf, depth)
    return np.concatenate(found), np.concatenate(numbers)


class DepthImage:
    """The first hit of one ray at a random place in each pixel of a window.

    The rays run along the third axis. `low` and `high` (2,) are the corners of the window, `pixel`
    is the side of a pixel.

    Attributes:
        hit: (rays, 3) position of each hit; the third coordinate is inf for a ray without a hit.
        normal: (rays, 3) unit normal of the surface there, towards the scanner; 0 where unknown.
        shape: (2,) numbers of pixels.
    """

    def __init__(
        self, low: np.ndarray, high: np.ndarray, pixel: float, rng: np.random.Generator
    ) -> None:
        self.low, self.pixel = low, pixel
        self.shape = np.ceil((high - low) / pixel).astype(int)
        size = int(self.shape.prod())
        corner = np.stack(np.divmod(np.arange(size), self.shape[1]), axis=1)
        self.hit = np.empty((size, 3))
        self.hit[:, :2] = low + pixel * (corner + rng.random((size, 2)))
        self.hit[:, 2] = np.inf
        self.normal = np.zeros((size, 3))

    def splat(self, triangles: np.ndarray, rng: np.random.Generator) -> None:
        """Add hits on facets smaller than a pixel, at random in proportion to their area."""
        a, b, c = np.moveaxis(triangles, 1, 0)
        area = 0.5 * np.linalg.norm(np.cross(b - a, c - a), axis=1)
        # The projected area of a facet with random orientation is half its area on average.
        count = rng.poisson(0.5 * area / self.pixel**2)
        face = np.repeat(np.arange(len(triangles)), count)
        root, share = np.sqrt(rng.random((len(face), 1))), rng.random((len(face), 1))
        points = a[face] + root * ((b - a)[face] + share * (c - b)[face])
        where = np.floor((points[:, :2] - self.low) / self.pixel).astype(int)
        inside = ((where >= 0) & (where < self.shape)).all(axis=1)
        points, where = points[inside], where[inside]
        ray = where[:, 0] * self.shape[1] + where[:, 1]
        nearest = self._nearest(ray, points[:, 2])
        self.hit[ray[nearest]] = points[nearest]

    def rasterize(self, triangles: np.ndarray) -> None:
        """Add the exact hits of all rays on triangles."""
        first, last = (
            np.floor((corner - self.low) / self.pixel).astype(int) for corner in bounds(triangles)
        )
        first, last = first.clip(0), np.minimum(last, self.shape - 1)
        extent = (last - first + 1).clip(0)
        a, b, c = np.moveaxis(triangles, 1, 0)
        normal = np.cross(b - a, c - a)
        normal /= np.linalg.norm(normal, axis=1, keepdims=True) + 1e-300
        normal = np.where(normal[:, 2:] > 0, -normal, normal)
        # Triangles nearly parallel to the beam get no hits: their depth would be lost in rounding.
        count = extent.prod(axis=1) * (normal[:, 2] < -1e-6)

        # All rays in the bounding rectangle of each triangle.
        face = np.repeat(np.arange(len(triangles), dtype=np.int32), count)
        step = np.arange(len(face), dtype=np.int32) - np.repeat(np.cumsum(count) - count, count)
        width = extent[:, 1].astype(np.int32)[face]
        corner = first[:, 0] * self.shape[1] + first[:, 1]
        ray = corner[face] + step + step // width * (self.shape[1] - width)
        along, across = self.hit[ray, 0], self.hit[ray, 1]
        turning = (b - a)[:, 0] * (c - a)[:, 1] - (b - a)[:, 1] * (c - a)[:, 0]
        for start, end in ((a, b), (b, c), (c, a)):
            edge = (end - start)[:, :2] * np.sign(turning)[:, None]
            offset = edge[:, 1] * start[:, 0] - edge[:, 0] * start[:, 1]
            inside = edge[face, 0] * across - edge[face, 1] * along + offset[face] >= 0
            face, ray, along, across = face[inside], ray[inside], along[inside], across[inside]

        a, normal = a[face], normal[face]
        lower = normal[:, 0] * (along - a[:, 0]) + normal[:, 1] * (across - a[:, 1])
        depth = a[:, 2] - lower / normal[:, 2]
        nearest = self._nearest(ray, depth)
        ray, normal = ray[nearest], normal[nearest]
        self.hit[ray, 2] = depth[nearest]
        self.hit[ray, 0], self.hit[ray, 1] = along[nearest], across[nearest]
        self.normal[ray] = normal

    def _nearest(self, ray: np.ndarray, depth: np.ndarray) -> np.ndarray:
        """Indices of the hits that are the nearest on their ray so far."""
        least = self.hit[:, 2].copy()
        np.minimum.at(least, ray, depth)
        return np.flatnonzero((depth == least[ray]) & (depth < self.hit[ray, 2]))


def bounds(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest coordinates (T, 2) of triangles (T, 3, 2 or more)."""
    a, b, c = np.moveaxis(places[..., :2], 1, 0)
    # Much faster than a reduction over an axis of three.
    return np.minimum(np.minimum(a, b), c), np.maximum(np.maximum(a, b), c)
