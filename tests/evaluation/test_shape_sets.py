"""Shapes drawn from meshes, and shapes read from folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_evaluate_shapes import torus, write_off

from pointup.errors import ConfigError, DataError, FileError
from pointup.evaluation.pu_gcn import (
    DrawnShapes,
    Shape,
    StoredShapes,
    evaluate_shape,
    in_another_frame,
    is_subset,
    measure_shape,
)
from pointup.geometry.surfaces import Surface
from pointup.model.upsampler import Upsampler


def test_drawn_shapes_are_of_the_protocol_s_sizes_and_independent(tmp_path: Path) -> None:
    write_off(Surface(100 * torus().vertices + 30, torus().faces), tmp_path / "torus.off")
    shapes = list(DrawnShapes(meshes=tmp_path, num_source=100, ratio=2.5, num_seeds=2))
    assert [(shape.name, shape.seed) for shape in shapes] == [("torus", 0), ("torus", 1)]
    clouds = [cloud for shape in shapes for cloud in (shape.source, shape.truth, shape.second)]
    assert [len(cloud) for cloud in clouds] == [100, 250, 250] * 2
    assert len(np.unique(np.concatenate(clouds), axis=0)) == 1200
    # Scaled about the middle of its box, which is the torus's own.
    assert np.linalg.norm(clouds[1], axis=1).max() == pytest.approx(1, abs=0.02)
    assert np.abs(clouds[1].mean(axis=0)).max() < 0.05


def test_truths_are_the_same_for_evenly_and_randomly_drawn_inputs(tmp_path: Path) -> None:
    write_off(torus(), tmp_path / "torus.off")
    (even,) = DrawnShapes(meshes=tmp_path, num_source=200)
    (random,) = DrawnShapes(meshes=tmp_path, num_source=200, pattern="random")
    assert np.array_equal(even.truth, random.truth)
    assert np.array_equal(even.second, random.second)
    even_cv, random_cv = (
        measure_shape(shape.source, shape, "pu-gcn")["spacing_cv"] for shape in (even, random)
    )
    assert even_cv < 0.25 < random_cv


def test_noise_is_that_of_the_source_alone(tmp_path: Path) -> None:
    write_off(torus(), tmp_path / "torus.off")
    (clean,) = DrawnShapes(meshes=tmp_path, num_source=500)
    (noisy,) = DrawnShapes(meshes=tmp_path, num_source=500, noise=0.02)
    assert clean.source is not None and noisy.source is not None
    assert (noisy.source - clean.source).std() == pytest.approx(0.02, rel=0.1)
    assert np.array_equal(clean.truth, noisy.truth)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
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


def test_stored_shapes_join_files_of_the_same_name(folders: Path) -> None:
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


def test_shapes_without_a_mesh_are_measured_without_p2f(folders: Path) -> None:
    (folders / "meshes" / "a.off").unlink()
    shapes = StoredShapes(folders / "truth", folders / "inputs", meshes=folders / "meshes")
    without, with_mesh = (evaluate_shape(shape, None)["midpoints"] for shape in shapes)
    assert "p2f" not in without and without.keys() | {"p2f"} == with_mesh.keys()
    (folders / "meshes" / "b.off").rename(folders / "meshes" / "c.off")
    with pytest.raises(FileError, match="no file named a and 1 more"):
        StoredShapes(folders / "truth", folders / "inputs", meshes=folders / "meshes")


def test_inputs_that_are_subsets_of_their_truths_are_found() -> None:
    truth = np.random.default_rng(0).random((400, 3))
    rounded = truth[::4] + 1e-7
    assert is_subset(Shape("a", truth, source=rounded))
    assert not is_subset(Shape("a", truth, source=truth[::4] + 1e-3))
    assert not is_subset(Shape("a", truth, prediction=truth))


def test_a_text_that_is_taken_for_a_truth_is_named(folders: Path) -> None:
    readme = folders / "truth" / "README.txt"
    readme.write_text("The shapes of the test set.\n")
    with pytest.raises(FileError, match="inputs: no file named README;") as caught:
        StoredShapes(folders / "truth", folders / "inputs")
    assert f"add that of {readme}, or move this file to another folder" in str(caught.value)


@pytest.mark.parametrize("num", [40, 2048])
def test_clouds_that_were_moved_or_scaled_are_in_another_frame(num: int) -> None:
    rng = np.random.default_rng(0)
    cloud, truth = torus().sample(num, rng)[0], torus().sample(8192, rng)[0]
    far = 0.1 if num > 1000 else 0.5
    for changed in (cloud * (1 + far), cloud / (1 + 2 * far), cloud + far, 100 * cloud, cloud + 50):
        assert in_another_frame(changed, truth)
        # The answer doesn't depend on the unit.
        assert in_another_frame(1e3 * changed + 5e5, 1e3 * truth + 5e5)


def test_sparse_noisy_and_uneven_clouds_are_in_the_frame_of_their_truth() -> None:
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


def test_errors_in_folders_name_the_file(folders: Path) -> None:
    truth, inputs = folders / "truth", folders / "inputs"
    with pytest.raises(FileError, match="nowhere: no such folder"):
        StoredShapes(truth, folders / "nowhere")
    (inputs / "b.txt").rename(inputs / "c.txt")
    with pytest.raises(FileError, match="no file named b;"):
        StoredShapes(truth, inputs)
    (inputs / "c.txt").rename(inputs / "a.xyz")
    with pytest.raises(ConfigError, match=r"a\.xyz: there is also a\.txt"):
        StoredShapes(truth, inputs)
    with pytest.raises(FileError, match="no files of shapes"):
        StoredShapes(truth, predictions=folders)


def test_a_mesh_elsewhere_is_refused(folders: Path) -> None:
    write_off(Surface(torus().vertices + 2, torus().faces), folders / "meshes" / "b.off")
    shapes = StoredShapes(folders / "truth", folders / "inputs", meshes=folders / "meshes")
    with pytest.raises(DataError, match=r"b\.off: the truth is .* away from this mesh"):
        list(shapes)


@pytest.mark.parametrize(
    "options",
    [{"ratio": 0.5}, {"ratio": float("inf")}, {"num_source": 1}, {"num_seeds": 0}, {"noise": -0.1}],
)
def test_drawing_refuses_what_makes_no_sense(options: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        DrawnShapes(meshes=tmp_path, **options)  # type: ignore[arg-type]
