"""Scatter: noise is everywhere, edges and thin parts are not."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from pointup import upsample
from pointup.cli import main as cli
from pointup.io.files import read_points
from pointup.upsampling.scatter import MUCH_SCATTER, scatter_of


def sphere(num_points: int, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """Evenly spaced points of a sphere of radius 1, with noise in spacings of the points."""
    number = np.arange(num_points) + 0.5
    height, angle = 1 - 2 * number / num_points, np.pi * (1 + np.sqrt(5)) * number
    radius = np.sqrt(1 - height**2)
    points = np.column_stack([radius * np.cos(angle), radius * np.sin(angle), height])
    spacing = np.sqrt(4 * np.pi / num_points)
    moved = np.random.default_rng(seed).standard_normal(points.shape)
    return points + noise * spacing * moved


def cube(num_points: int, seed: int = 0) -> np.ndarray:
    """Random points of the surface of a cube."""
    rng = np.random.default_rng(seed)
    points = rng.random((num_points, 3))
    points[np.arange(num_points), rng.integers(3, size=num_points)] = rng.integers(
        2, size=num_points
    )
    return points


def test_points_of_smooth_surfaces_and_of_edges_hardly_scatter(make_store):
    assert scatter_of(make_store(sphere(2000))).in_spacings < 0.01
    assert scatter_of(make_store(cube(2000))).in_spacings < 1e-6


@pytest.mark.parametrize("num_points", [500, 2000])
@pytest.mark.parametrize("noise", [0.1, 0.4])
def test_scatter_is_the_noise_whatever_the_direction_and_the_unit(noise, num_points, make_store):
    points = sphere(num_points, noise)
    turned = Rotation.random(rng=np.random.default_rng(1)).apply(points)
    for same in (points, turned, 1000 * points):
        found = scatter_of(make_store(same))
        assert found.in_spacings == pytest.approx(noise, rel=0.15)
        spacing = np.median(cKDTree(same).query(same, k=7)[0][:, 1:].mean(axis=1))
        assert found.length == pytest.approx(noise * spacing, rel=0.15)


def test_the_share_of_the_radius_is_that_of_the_noise_wherever_the_shape_lies(make_store):
    points = sphere(2000, 0.2)
    spacing = np.sqrt(4 * np.pi / 2000)
    for same in (points, 1000 * points - 5000):
        store = make_store(same)
        assert scatter_of(store).share_of_radius(store) == pytest.approx(0.2 * spacing, rel=0.2)


def test_noise_on_a_part_of_a_shape_is_no_scatter(make_store):
    """Plants and edges are such a part."""
    points, noisy = sphere(2000), sphere(2000, 0.3)
    upper = points[:, 2] > 0.2
    points[upper] = noisy[upper]
    assert scatter_of(make_store(points)).in_spacings < MUCH_SCATTER


def test_too_few_points_have_no_scatter(make_store):
    points = np.random.default_rng(0).random((21, 3))
    assert scatter_of(make_store(points[:20])).in_spacings == 0
    assert scatter_of(make_store(points)).in_spacings > 0


@pytest.mark.parametrize(
    ("noise", "options", "has_note"),
    [
        (0.0, (), False),
        (0.25, (), True),
        (0.25, ("--denoise",), False),
        (0.25, ("--model", "shapes"), True),
        (0.25, ("--model", "noisy"), True),
        (0.25, ("--model", "shapes", "--above-ground"), False),
    ],
)
def test_a_note_names_denoise_where_a_shape_is_noisy(noise, options, has_note, notes_of):
    notes = notes_of(noise, *options)
    assert len(notes) == has_note
    for line in notes:
        found = re.fullmatch(
            r"note: .+: the points look noisy, by about (.+) spacings, (.+)% of the radius: if "
            r"they are, --model noisy --denoise is better(; if these are plants, .+)?",
            line,
        )
        assert found and float(found[1]) == pytest.approx(0.25, rel=0.2)
        assert float(found[2]) == pytest.approx(25 * np.sqrt(4 * np.pi / 500), rel=0.3)
        assert (found[3] is None) == ("--model" in options)


def test_points_closer_than_the_step_of_the_grid_do_not_scatter(make_store):
    """Such as coordinates that were read at a wrong place of a file."""
    clumps = np.repeat(1.5e-5 * np.eye(3), 12, axis=0)
    clumps += 1e-12 * np.random.default_rng(0).random(clumps.shape)
    for far in (sphere(10), 770 * sphere(10)):
        assert scatter_of(make_store(np.append(far, clumps, axis=0))).in_spacings == 0


@pytest.mark.parametrize(("noise", "has_note"), [(0.0, True), (0.25, False)])
def test_a_note_names_shapes_where_points_without_noise_are_denoised(noise, has_note, notes_of):
    notes = notes_of(noise, "--denoise", "--model", "noisy")
    assert len(notes) == has_note
    assert all("little noise" in line and "shapes, without --denoise" in line for line in notes)


def test_denoising_changes_nothing_where_there_is_little_noise(notes_of, tmp_path):
    (note,) = notes_of(0.0, "--denoise", ratio="4")
    assert "have little noise" in note and "they are kept, and shapes makes the new ones" in note
    expected = upsample(np.loadtxt(tmp_path / "in.xyz"), 4.0)
    made = read_points(tmp_path / "out.ply").positions
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-6)
    again = upsample(np.loadtxt(tmp_path / "in.xyz"), 4.0, denoise=True)
    np.testing.assert_array_equal(again, expected)
    noisy = sphere(500, 0.25)
    denoised = upsample(noisy, 4.0, denoise=True)
    np.testing.assert_array_equal(denoised, upsample(noisy, 4.0, denoise=True, model="noisy"))


@pytest.fixture
def notes_of(tmp_path, capfd) -> Callable[..., list[str]]:
    """Notes on noise in the lines of `pointup upsample` of a sphere with noise, in spacings."""

    def notes(noise: float, *options: str, ratio: str = "1") -> list[str]:
        np.savetxt(tmp_path / "in.xyz", sphere(500, noise))
        paths = str(tmp_path / "in.xyz"), "-o", str(tmp_path / "out.ply")
        assert cli.main(["upsample", *paths, "--ratio", ratio, *options]) == 0
        lines = capfd.readouterr().err.splitlines()
        return [line for line in lines if line.startswith("note:") and "--denoise" in line]

    return notes
