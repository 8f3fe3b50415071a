from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial import cKDTree
from scipy.stats import chisquare

from pointup.errors import DataError, FileError
from pointup.geometry.surfaces import Surface, eigenvectors


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def random_soup(rng: np.random.Generator, num_faces: int) -> Surface:
    return Surface.from_triangles(
        rng.normal(size=(3 * num_faces, 3)), np.arange(3 * num_faces).reshape(-1, 3)
    )


def square() -> Surface:
    corners = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]])
    return Surface.from_triangles(corners, np.array([[0, 1, 2], [0, 2, 3]]))


def distance_to_triangles(points: np.ndarray, surface: Surface) -> np.ndarray:
    """Brute force: the foot on each plane where it lies inside, else the nearest edge point."""
    best = np.full(len(points), np.inf)
    for corners in surface.vertices[surface.faces]:
        a, b, c = corners
        basis = np.stack([b - a, c - a], axis=1)
        share = np.linalg.lstsq(basis, (points - a).T, rcond=None)[0]
        inside = (share >= 0).all(axis=0) & (share.sum(axis=0) <= 1)
        plane = np.linalg.norm(points - a - (basis @ share).T, axis=1)
        best = np.minimum(best, np.where(inside, plane, np.inf))
        for start, end in ((a, b), (b, c), (c, a)):
            t = ((points - start) @ (end - start) / np.square(end - start).sum()).clip(0, 1)
            foot = start + t[:, None] * (end - start)
            best = np.minimum(best, np.linalg.norm(points - foot, axis=1))
    return best


def test_distance_is_the_distance_to_the_nearest_triangle(rng):
    surface, points = random_soup(rng, 20), rng.normal(size=(200, 3)) * 2
    np.testing.assert_allclose(
        surface.distance(points), distance_to_triangles(points, surface), atol=1e-12
    )


def test_distance_keeps_its_precision_at_map_coordinates(rng):
    surface, far = random_soup(rng, 20), np.array([4e5, 5e6, 100])
    moved = Surface(surface.vertices + far, surface.faces)
    points = rng.normal(size=(100, 3))
    np.testing.assert_allclose(moved.distance(points + far), surface.distance(points), atol=1e-8)
    assert surface.distance(np.empty((0, 3))).shape == (0,)


@pytest.mark.parametrize("sampling", ["sample", "poisson_disk"])
def test_samples_lie_on_the_surface_with_the_normal_of_their_face(sampling, rng):
    surface = random_soup(rng, 10)
    points, normals = getattr(surface, sampling)(500, rng)
    assert points.shape == normals.shape == (500, 3)
    assert surface.distance(points).max() < 1e-9
    np.testing.assert_allclose(np.linalg.norm(normals, axis=1), 1)
    a, b, c = np.moveaxis(surface.vertices[surface.faces], 1, 0)
    face_normals = np.cross(b - a, c - a)
    face_normals /= np.linalg.norm(face_normals, axis=1, keepdims=True)
    offsets = np.einsum("nfi,fi->nf", points[:, None] - a, face_normals)
    fits = (np.abs(offsets) < 1e-9) & ((normals @ face_normals.T) > 1 - 1e-9)
    assert fits.any(axis=1).all()


@pytest.mark.parametrize("num_points", [0, 1, 2, 7, 1000])
@pytest.mark.parametrize("sampling", ["sample", "poisson_disk"])
def test_samples_have_exactly_the_requested_number_of_points(sampling, num_points, rng):
    points, normals = getattr(square(), sampling)(num_points, rng)
    assert points.shape == normals.shape == (num_points, 3)


def test_samples_are_uniform_by_area(rng):
    # Cells of equal area over a square of triangles of very different areas.
    corners = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0.1, 0.2, 0]])
    faces = np.array([[0, 1, 4], [1, 2, 4], [2, 3, 4], [3, 0, 4]])
    points, _ = Surface.from_triangles(corners, faces).sample(40_000, rng)
    cells, _, _ = np.histogram2d(points[:, 0], points[:, 1], bins=10, range=[[0, 1], [0, 1]])
    assert chisquare(cells.ravel()).pvalue > 1e-3


def test_poisson_disk_samples_keep_apart(rng):
    def least_distance(points: np.ndarray) -> float:
        return float(cKDTree(points).query(points, k=2)[0][:, 1].min())

    # The densest packing has a spacing of 1.07 / sqrt(density); random points are much closer.
    even, uneven = square().poisson_disk(1000, rng)[0], square().sample(1000, rng)[0]
    assert least_distance(even) > 0.6 / 1000**0.5
    assert least_distance(even) > 10 * least_distance(uneven)


@pytest.mark.parametrize("sampling", ["sample", "poisson_disk"])
def test_samples_depend_on_the_generator_alone(sampling):
    first, again, other = (
        getattr(square(), sampling)(100, np.random.default_rng(seed))[0] for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_degenerate_faces_and_unused_vertices_are_dropped():
    vertices = np.array([[9, 9, 9], [0, 0, 0], [1, 0, 0], [0, 1, 0], [2, 0, 0], [1, 0, 0]])
    faces = np.array([[1, 2, 3], [1, 2, 4], [1, 1, 2], [2, 5, 3]])
    surface = Surface.from_triangles(vertices, faces)
    assert surface.faces.tolist() == [[0, 1, 2]]
    assert surface.vertices.tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0]]
    assert surface.area == 0.5


@pytest.mark.parametrize(
    ("vertices", "faces", "message"),
    [
        (np.zeros((3, 3)), [[0, 1, 2]], "no face with an area"),
        (np.eye(3), np.empty((0, 3), int), "no face with an area"),
        ([[0, 0, 0], [1, 0, np.nan], [0, 1, 0]], [[0, 1, 2]], "1 mesh vertices are not finite"),
        (np.eye(3), [[0, 1, 3]], "only 0 to 2 exist"),
        (np.eye(3), [[0, 1, 2, 0]], "triangulate"),
        (np.zeros((3, 2)), [[0, 1, 2]], r"\(V, 3\)"),
    ],
)
def test_an_invalid_mesh_is_refused_with_the_reason(vertices, faces, message):
    with pytest.raises(DataError, match=message):
        Surface.from_triangles(np.array(vertices, dtype=float), np.array(faces))


def test_normalized_has_a_centred_box_and_its_farthest_vertex_at_distance_one(rng):
    surface = random_soup(rng, 30)
    normal = Surface(surface.vertices * 7 + [1, 2, 3], surface.faces).normalized()
    np.testing.assert_allclose(normal.vertices.min(axis=0), -normal.vertices.max(axis=0))
    assert np.linalg.norm(normal.vertices, axis=1).max() == pytest.approx(1)


def test_a_saved_surface_is_loaded_bit_for_bit(tmp_path, rng):
    surface = random_soup(rng, 30)
    surface.save(tmp_path / "surface.npz")
    again = Surface.load(tmp_path / "surface.npz")
    np.testing.assert_array_equal(again.vertices, surface.vertices)
    np.testing.assert_array_equal(again.faces, surface.faces)


@pytest.mark.parametrize("content", [b"", b"ply", b"PK\x03\x04broken"])
def test_an_error_about_a_file_without_a_surface_names_it(tmp_path, content):
    path = tmp_path / "surface.npz"
    with pytest.raises(FileError, match=r"surface\.npz: no such file"):
        Surface.load(path)
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"surface\.npz: not a surface"):
        Surface.load(path)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 0), (1, 0, 0), (1, 1, 1e-7), (0, 0, 0)])
def test_eigenvectors_are_those_of_numpy_up_to_rounding(shape):
    rng = np.random.default_rng(0)
    away = rng.normal(size=(300, 8, 3)) * shape
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    axes = [np.diag(np.roll([1.0, second, 0.0], n)) for n in range(3) for second in (0.0, 1.0)]
    matrices = np.concatenate(
        [turn @ (away.transpose(0, 2, 1) @ away) @ turn.T, [np.eye(3), *axes]]
    )
    frame, values = eigenvectors(matrices)
    scale = np.abs(matrices).max(axis=(1, 2)).clip(min=1e-9)[:, None, None]
    assert np.allclose(frame.transpose(0, 2, 1) @ frame, np.eye(3), atol=1e-12)
    assert (np.abs(matrices @ frame - frame * values[:, None]) <= 1e-13 * scale).all()
    assert (np.diff(values) >= 0).all()
