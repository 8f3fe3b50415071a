"""Sets of shapes, and their figures by hand and by brute force."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pointup.errors import ConfigError, DataError, FileError
from pointup.evaluation.cloud_metrics import METRICS, mean_rows, measure
from pointup.evaluation.pairs import measure_to_surface
from pointup.evaluation.pu_gcn import (
    DrawnShapes,
    Shape,
    StoredShapes,
    evaluate_shape,
    in_another_frame,
    is_subset,
    measure_shape,
    midpoints_of_shape,
    shape_metrics,
)
from pointup.geometry.midpoints import midpoint_upsample
from pointup.geometry.surfaces import Surface
from pointup.model.upsampler import Upsampler
from pointup.upsampling.in_memory import upsample

TRUTH = np.array([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
PREDICTION = np.array([[0.0, 0.0, 0.0], [2.0, 2.0, 0.0]])
# The plane y = 0, as far as the points go.
PLANE = Surface.from_triangles(
    np.array([[-9.0, 0.0, -9.0], [9.0, 0.0, -9.0], [0.0, 0.0, 9.0]]), np.array([[0, 1, 2]])
)


def torus(num: int = 24) -> Surface:
    """Of radii 1 and 0.4; its points are (1 + 0.4 cos v) away from the axis."""
    u, v = np.meshgrid(*[2 * np.pi * np.arange(num) / num] * 2, indexing="ij")
    radius = 1 + 0.4 * np.cos(v)
    vertices = np.stack([radius * np.cos(u), radius * np.sin(u), 0.4 * np.sin(v)], axis=-1)
    i, j = (index.ravel() for index in np.indices((num, num)))
    a, b = i * num + j, (i + 1) % num * num + j
    c, d = i * num + (j + 1) % num, (i + 1) % num * num + (j + 1) % num
    faces = np.concatenate([np.stack([a, b, c], 1), np.stack([b, d, c], 1)])
    return Surface.from_triangles(vertices.reshape(-1, 3), faces)


def write_off(surface: Surface, path: Path) -> None:
    lines = [f"OFF\n{len(surface.vertices)} {len(surface.faces)} 0"]
    lines += [" ".join(map(str, vertex)) for vertex in surface.vertices.tolist()]
    lines += [" ".join(map(str, (3, *face))) for face in surface.faces.tolist()]
    path.write_text("\n".join(lines) + "\n")


def nearest_by_brute_force(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distance = np.linalg.norm(a[:, None] - b[None], axis=2)
    return distance.min(axis=1), distance.min(axis=0)


@pytest.mark.parametrize(("protocol", "share"), [("pu-gcn", 1.0), ("half", 0.5)])
def test_figures_of_two_point_clouds_are_those_computed_by_hand(protocol, share):
    shape = Shape("pair", TRUTH, surface=PLANE)
    figures = measure_shape(PREDICTION, shape, protocol)
    # Per-cloud normalisation: the truth becomes (-1, 0) (1, 0), the prediction (-s, -s) (s, s) with
    # s = sqrt(1/2): all squared distances are (1 - s)^2 + s^2 = 2 - sqrt 2.
    assert figures["cd"] == pytest.approx(share * 2e3 * (2 - np.sqrt(2)), rel=1e-6)
    assert figures["hd"] == pytest.approx(share * 2e3 * (2 - np.sqrt(2)), rel=1e-6)
    # In the target's frame: (-1, 0) (1, 0) and (-1, 0) (1, 2), squared distances 0 and 4 both ways.
    assert figures["cd_target_frame"] == pytest.approx(share * 4000)
    assert figures["hausdorff"] == pytest.approx(2000)
    # As given, 0 and 2 away from the plane.
    assert figures["p2f"] == pytest.approx(1000)
    assert figures["spacing_cv"] == 0


def test_the_convention_of_the_half_protocol_says_so():
    assert "half" in shape_metrics("half")["cd"].convention
    assert "half" not in shape_metrics("pu-gcn")["cd"].convention


def test_hd_sums_the_largest_distances_of_both_directions_and_hausdorff_is_the_larger_one():
    truth = np.array([[-1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, -1, 0]])
    prediction = np.array([[-1.0, 0, 0], [1, 0, 0]])
    # Both have mean 0 and furthest distance 1. To the truth 0; back 0 twice and sqrt 2 twice.
    figures = measure_shape(prediction, Shape("cross", truth), "pu-gcn")
    assert figures["cd"] == pytest.approx(1e3 * (0 + (2 + 2) / 4), rel=1e-6)
    assert figures["hd"] == pytest.approx(1e3 * (0 + 2), rel=1e-6)
    assert figures["hausdorff"] == pytest.approx(1e3 * np.sqrt(2), rel=1e-6)


def test_unsquared_figures_of_a_pair_are_those_computed_by_hand():
    pos, target = torch.tensor(PREDICTION).float(), torch.tensor(TRUTH).float()
    ptr = torch.tensor([0, 2])
    (figures,) = measure(pos, ptr, target, ptr)
    figures |= measure_to_surface({"source": pos.numpy()}, PLANE, None)["source"]
    assert figures.keys() == METRICS.keys()
    assert figures["chamfer"] == pytest.approx(0 / 2 + 2 / 2 + 0 / 2 + 2 / 2)
    assert figures["hausdorff"] == pytest.approx(2)
    assert figures["p2f"] == pytest.approx(1000)


def test_of_packed_clouds_only_those_with_points_on_both_sides_are_measured():
    rng = np.random.default_rng(0)
    pos, target = (torch.tensor(rng.normal(size=(n, 3))).float() for n in (49, 56))
    ptr, target_ptr = torch.tensor([0, 30, 30, 37, 49]), torch.tensor([0, 11, 16, 16, 56])
    measured = measure(pos, ptr, target, target_ptr)
    assert [bool(figures) for figures in measured] == [True, False, False, True]
    (alone,) = measure(pos[37:], torch.tensor([0, 12]), target[16:], torch.tensor([0, 40]))
    assert measured[3] == alone and "p2f" not in alone


def test_figures_don_t_depend_on_where_a_shape_is_and_only_p2f_on_its_size():
    surface = torus()
    rng = np.random.default_rng(1)
    truth, prediction = surface.sample(300, rng)[0], surface.sample(200, rng)[0] * 1.02
    here = measure_shape(prediction, Shape("torus", truth, surface=surface), "pu-gcn")
    move = np.array([5e5, 4e6, 100.0])
    there = measure_shape(
        7 * prediction + move,
        Shape(
            "torus", 7 * truth + move, surface=Surface(7 * surface.vertices + move, surface.faces)
        ),
        "pu-gcn",
    )
    assert there.pop("p2f") == pytest.approx(7 * here.pop("p2f"), rel=1e-5)
    assert there == pytest.approx(here, rel=1e-4)


def test_resampled_ground_truth_is_on_the_surface_and_better_than_the_baseline(tmp_path):
    write_off(torus(), tmp_path / "torus.off")
    (shape,) = DrawnShapes(meshes=tmp_path, num_source=300)
    rows = evaluate_shape(shape, None)
    assert list(rows) == ["midpoints", "resampled"]
    assert rows["resampled"]["p2f"] < 1e-6
    for name in ("cd", "hd", "p2f", "cd_target_frame", "hausdorff"):
        assert rows["resampled"][name] < rows["midpoints"][name]


def test_16x_is_done_in_two_passes_of_4x():
    source = torus().sample(60, np.random.default_rng(2))[0]
    centre = source.mean(axis=0)
    pos, ptr = torch.tensor(source - centre).float(), torch.tensor([0, 60])
    for _ in range(2):
        pos, ptr = midpoint_upsample(pos, ptr, 4.0)
    twice = midpoints_of_shape(source, 16.0)
    assert np.array_equal(twice, pos.double().numpy() + centre)


@pytest.mark.parametrize("ratio", [1.0, 2.37, 7.3, 11.1])
def test_clouds_get_the_size_that_the_ratio_says(ratio):
    source = torus().sample(97, np.random.default_rng(3))[0]
    assert len(midpoints_of_shape(source, ratio)) == round(97 * ratio)


def test_midpoints_are_the_same_far_from_the_origin():
    source = torus().sample(60, np.random.default_rng(4))[0]
    move = np.array([5e5, 4.1e6, 0.0])
    midpoints = midpoints_of_shape(source + move, 3.0)
    between = 0.5 * (source[:, None] + source[None])
    assert nearest_by_brute_force(midpoints - move, between.reshape(-1, 3))[0].max() < 1e-6


@pytest.mark.parametrize(("denoise", "ratio"), [(False, 16), (True, 4)])
def test_what_is_measured_of_a_model_is_what_the_command_writes(denoise, ratio, tmp_path):
    write_off(torus(), tmp_path / "torus.off")
    (shape,) = DrawnShapes(meshes=tmp_path, num_source=40, ratio=ratio)
    assert shape.source is not None
    model = Upsampler(feature_dim=8, k=4, heads=2, child_heads=2).eval()
    made = upsample(shape.source, ratio, model=model, originals=not denoise)
    figures = evaluate_shape(shape, model, denoise=denoise)["model"]
    assert figures == measure_shape(made, shape, "pu-gcn")
    assert np.array_equal(made[:40], shape.source) == (not denoise)


def test_means_are_over_the_shapes_that_have_a_figure():
    measured = [
        {"model": {"cd": 1.0, "p2f": 4.0}, "resampled": {"cd": 5.0}},
        {"model": {"cd": 2.0}},
    ]
    assert mean_rows(measured) == {"model": {"cd": 1.5, "p2f": 4.0}, "resampled": {"cd": 5.0}}


def test_shapes_that_can_t_be_measured_are_named():
    point = np.zeros((5, 3))
    with pytest.raises(DataError, match="flat: all points of the truth are in one place"):
        measure_shape(PREDICTION, Shape("flat", point), "pu-gcn")
    with pytest.raises(DataError, match="pair: the prediction has no points"):
        measure_shape(point[:0], Shape("pair", TRUTH), "pu-gcn")
    swapped = replace(Shape("pair", TRUTH), source=point)
    with pytest.raises(DataError, match="pair: the input has 5 points, the truth only 2"):
        evaluate_shape(swapped, None)


def test_drawn_shapes_are_of_the_protocol_s_sizes_and_independent(tmp_path):
    write_off(Surface(100 * torus().vertices + 30, torus().faces), tmp_path / "torus.off")
    shapes = list(DrawnShapes(meshes=tmp_path, num_source=100, ratio=2.5, num_seeds=2))
    assert [(shape.name, shape.seed) for shape in shapes] == [("torus", 0), ("torus", 1)]
    clouds = [cloud for shape in shapes for cloud in (shape.source, shape.truth, shape.second)]
    assert [len(cloud) for cloud in clouds] == [100, 250, 250] * 2
    assert len(np.unique(np.concatenate(clouds), axis=0)) == 1200
    # Scaled about the middle of its box, which is the torus's own.
    assert np.linalg.norm(clouds[1], axis=1).max() == pytest.approx(1, abs=0.02)
    assert np.abs(clouds[1].mean(axis=0)).max() < 0.05


def test_truths_are_the_same_for_evenly_and_randomly_drawn_inputs(tmp_path):
    write_off(torus(), tmp_path / "torus.off")
    (even,) = DrawnShapes(meshes=tmp_path, num_source=200)
    (random,) = DrawnShapes(meshes=tmp_path, num_source=200, pattern="random")
    assert np.array_equal(even.truth, random.truth)
    assert np.array_equal(even.second, random.second)
    even_cv, random_cv = (
        measure_shape(shape.source, shape, "pu-gcn")["spacing_cv"] for shape in (even, random)
    )
    assert even_cv < 0.25 < random_cv


def test_noise_is_that_of_the_source_alone(tmp_path):
    write_off(torus(), tmp_path / "torus.off")
    (clean,) = DrawnShapes(meshes=tmp_path, num_source=500)
    (noisy,) = DrawnShapes(meshes=tmp_path, num_source=500, noise=0.02)
    assert clean.source is not None and noisy.source is not None
    assert (noisy.source - clean.source).std() == pytest.approx(0.02, rel=0.1)
    assert np.array_equal(clean.truth, noisy.truth)


@pytest.fixture
def folders(tmp_path) -> Path:
    """Two shapes with truth, inputs, predictions and meshes."""
    rng = np.random.default_rng(5)
    for name in ("truth", "inputs", "predictions", "meshes"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        surface = torus()
        write_off(surface, tmp_path / "meshes" / f"{name}.off")
        np.savetxt(tmp_path / "truth" / f"{name}.xyz", surface.sample(120, rng)[0])
        np.savetxt(tmp_path / "inputs" / f"{name}.txt", surface.sample(40, rng)[0])
        np.save(tmp_path / "predictions" / f"{name}.npy", surface.sample(90, rng)[0])
    return tmp_path


def test_stored_shapes_join_files_of_the_same_name(folders):
    shapes = StoredShapes(*(folders / f for f in ("truth", "inputs", "predictions", "meshes")))
    assert len(shapes) == 2
    for shape, name in zip(shapes, "ab", strict=True):
        assert shape.name == name
        assert shape.source is not None and np.array_equal(
            shape.source, np.loadtxt(folders / "inputs" / f"{name}.txt")
        )
        rows = evaluate_shape(shape, Upsampler().eval())
        assert list(rows) == ["model", "prediction", "midpoints", "resampled"]
        assert shape.prediction is not None
        assert rows["prediction"] == measure_shape(shape.prediction, shape, "pu-gcn")
        assert len(shape.second if shape.second is not None else []) == 120


def test_shapes_without_a_mesh_are_measured_without_p2f(folders):
    (folders / "meshes" / "a.off").unlink()
    shapes = StoredShapes(folders / "truth", folders / "inputs", meshes=folders / "meshes")
    without, with_mesh = (evaluate_shape(shape, None)["midpoints"] for shape in shapes)
    assert "p2f" not in without and without.keys() | {"p2f"} == with_mesh.keys()
    (folders / "meshes" / "b.off").rename(folders / "meshes" / "c.off")
    with pytest.raises(FileError, match="no file named a and 1 more"):
        StoredShapes(folders / "truth", folders / "inputs", meshes=folders / "meshes")


def test_inputs_that_are_subsets_of_their_truths_are_found():
    truth = np.random.default_rng(0).random((400, 3))
    rounded = truth[::4] + 1e-7
    assert is_subset(Shape("a", truth, source=rounded))
    assert not is_subset(Shape("a", truth, source=truth[::4] + 1e-3))
    assert not is_subset(Shape("a", truth, prediction=truth))


def test_a_text_that_is_taken_for_a_truth_is_named(folders):
    readme = folders / "truth" / "README.txt"
    readme.write_text("The shapes of the test set.\n")
    with pytest.raises(FileError, match="inputs: no file named README;") as caught:
        StoredShapes(folders / "truth", folders / "inputs")
    assert f"add that of {readme}, or move this file to another folder" in str(caught.value)


@pytest.mark.parametrize("num", [40, 2048])
def test_clouds_that_were_moved_or_scaled_are_in_another_frame(num):
    rng = np.random.default_rng(0)
    cloud, truth = torus().sample(num, rng)[0], torus().sample(8192, rng)[0]
    far = 0.1 if num > 1000 else 0.5
    for changed in (cloud * (1 + far), cloud / (1 + 2 * far), cloud + far, 100 * cloud, cloud + 50):
        assert in_another_frame(changed, truth)
        # The answer doesn't depend on the unit.
        assert in_another_frame(1e3 * changed + 5e5, 1e3 * truth + 5e5)


def test_sparse_noisy_and_uneven_clouds_are_in_the_frame_of_their_truth():
    surface = torus()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        truth = surface.sample(8192, rng)[0]
        for num in (4, 40, 256, 2048):
            cloud = surface.sample(num, rng)[0]
            for noise in (0.0, 0.02, 0.1):
                noisy = cloud + noise * rng.normal(size=cloud.shape)
                assert not in_another_frame(noisy, truth)
        # Nearly all of its points are on one half.
        uneven = np.concatenate([truth[truth[:, 0] > 0], truth[:400]])
        assert not in_another_frame(uneven, truth)


def test_errors_in_folders_name_the_file(folders):
    truth, inputs = folders / "truth", folders / "inputs"
    with pytest.raises(FileError, match="nowhere: no such folder"):
        StoredShapes(truth, folders / "nowhere")
    with pytest.raises(FileError, match=r"b\.txt: is a file; name its folder"):
        StoredShapes(truth, inputs / "b.txt")
    (inputs / "b.txt").rename(inputs / "c.txt")
    with pytest.raises(FileError, match="no file named b;"):
        StoredShapes(truth, inputs)
    (inputs / "c.txt").rename(inputs / "a.xyz")
    with pytest.raises(ConfigError, match=r"a\.xyz: there is also a\.txt"):
        StoredShapes(truth, inputs)
    with pytest.raises(FileError, match="no files of shapes"):
        StoredShapes(truth, predictions=folders)


def test_a_mesh_elsewhere_is_refused(folders):
    write_off(Surface(torus().vertices + 2, torus().faces), folders / "meshes" / "b.off")
    shapes = StoredShapes(folders / "truth", folders / "inputs", meshes=folders / "meshes")
    with pytest.raises(DataError, match=r"b\.off: the truth is .* away from this mesh"):
        list(shapes)


@pytest.mark.parametrize(
    "options",
    [{"ratio": 0.5}, {"ratio": float("inf")}, {"num_source": 1}, {"num_seeds": 0}, {"noise": -0.1}],
)
def test_drawing_refuses_what_makes_no_sense(options, tmp_path):
    with pytest.raises(ConfigError):
        DrawnShapes(meshes=tmp_path, **options)  # type: ignore[arg-type]
