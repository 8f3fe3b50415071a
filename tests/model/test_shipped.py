"""The included models load offline and are more accurate than the midpoint baseline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pointup import Upsampler, upsample
from pointup.errors import ModelError
from pointup.geometry.midpoints import midpoint_upsample
from pointup.geometry.packed import ptr_from_sizes
from pointup.io.cloud import PointCloud
from pointup.losses import chamfer_distance
from pointup.model import stored_model
from pointup.model.stored_model import SHIPPED, WEIGHTS
from pointup.synthetic.default_dataset import scene_pair, shape_pair
from pointup.upsampling.in_memory import load_model, shipped_for

CPU = torch.device("cpu")


def test_they_are_small_and_have_a_card():
    files = [path for path in WEIGHTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4e6
    for name in SHIPPED:
        assert {path.name for path in (WEIGHTS / name).iterdir()} == {
            "README.md", "config.json", "model.safetensors",
        }  # fmt: skip
        card = (WEIGHTS / name / "README.md").read_text()
        for word in ("accelerate launch", "Licence", "hours", "Limits"):
            assert word in card


def test_they_load_quietly_and_without_a_network(monkeypatch, capsys):
    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError("a network connection was opened")

    monkeypatch.setattr("socket.socket.connect", no_network)
    for name in SHIPPED:
        assert not load_model(name, CPU).training
        assert not Upsampler.from_pretrained(name).training
    # Standard output belongs to the caller.
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "make", "seeds"),
    [
        ("shapes", shape_pair, [0, 1]),
        ("lidar", scene_pair, [1]),
        pytest.param("lidar", scene_pair, [0, 1, 2, 3], marks=pytest.mark.slow),
    ],
)
def test_each_beats_the_midpoint_baseline_on_its_kind_of_data(name, make, seeds):
    model, shares = load_model(name, CPU), []
    for seed in seeds:
        pair, _ = make(np.random.default_rng([seed, 1234]), resample=False)  # type: ignore[operator]
        pos, target = torch.from_numpy(pair.source), torch.from_numpy(pair.target)
        ptr, target_ptr = (ptr_from_sizes(torch.tensor([len(p)])) for p in (pos, target))
        ratio = max(1.0, len(target) / len(pos))
        with torch.no_grad():
            made = model(pos, ptr, ratio)
        ours = chamfer_distance(made.pos, made.ptr, target, target_ptr)
        theirs = chamfer_distance(*midpoint_upsample(pos, ptr, ratio), target, target_ptr)
        shares.append(float(ours / theirs))
    assert np.mean(shares) < 0.97


def test_scanner_files_use_lidar_and_all_others_shapes():
    scans = ("d.e57", "e.pts", "f.pcd", "g.bin", "h.pcd.bin")
    for path in ("a.las", "b.LAZ", "c.copc.laz", *scans):
        assert shipped_for(Path(path)) == "lidar"
    for other in (None, Path("a.ply"), Path("b.xyz"), Path("las.npy")):
        assert shipped_for(other) == "shapes"


def test_noise_has_a_model_of_its_own():
    assert {shipped_for(path, denoise=True) for path in (None, Path("a.las"))} == {"noisy"}


@pytest.fixture
def two_models(tmp_path, monkeypatch) -> dict[str, Upsampler]:
    """Two different models in place of the included ones."""
    made = {}
    for seed, name in enumerate(SHIPPED):
        torch.manual_seed(seed)
        made[name] = Upsampler(feature_dim=8, k=6, num_layers=1, heads=2, child_heads=2)
        torch.nn.init.normal_(made[name].pull.weight, std=0.1)
        made[name].save_pretrained(tmp_path / "weights" / name)
    monkeypatch.setattr(stored_model, "WEIGHTS", tmp_path / "weights")
    return made


def test_arrays_and_clouds_use_the_model_for_their_kind(two_models):
    points = np.random.default_rng(0).random((60, 3))
    cloud = PointCloud(points, path=Path("flight.laz"))
    denoised = upsample(points, 2, denoise=True)
    assert np.array_equal(denoised, upsample(points, 2, model="noisy", originals=False))
    assert len(denoised) == 120 and not (denoised[:, None] == points).all(2).any()
    for given, name in ((points, "shapes"), (cloud, "lidar")):
        by_default, by_name, by_model = (
            getattr(made, "positions", made)
            for made in (
                upsample(given, 2),
                upsample(given, 2, model=name),
                upsample(given, 2, model=two_models[name]),
            )
        )
        assert np.array_equal(by_default, by_model)
        assert np.array_equal(by_name, by_model)


def test_a_shipped_model_of_another_format_is_refused(two_models):
    config = stored_model.WEIGHTS / "lidar" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"format": 1}))
    with pytest.raises(ModelError, match="format 1"):
        load_model("lidar", CPU)
