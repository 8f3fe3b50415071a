"""The network of the guide, a module outside the package: trains, evaluates, upsamples, loads."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from runs import SMALL, TrainConfig, options, training
from safetensors.torch import load_file
from torch_geometric.data import Batch

from pointup import Upsampler, upsample
from pointup.cli.main import main
from pointup.errors import ConfigError, ModelError
from pointup.training.objective import LossConfig, losses_of_model

GUIDE = ROOT / "docs" / "guides" / "networks.md"
NAME = "point_transformer:PointTransformer"


@pytest.fixture
def module(tmp_path, monkeypatch) -> Iterator[Path]:
    """The module of the guide, in a folder on Python's path."""
    folder = tmp_path / "modules"
    folder.mkdir()
    code = GUIDE.read_text().split("```python\n")[1].split("```")[0]
    (folder / "point_transformer.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("point_transformer", None)


def test_the_network_of_the_guide_trains_evaluates_and_upsamples(
    module, pair_directory, tmp_path, accelerator, command, capfd
):
    config = options(pair_directory, tmp_path / "run", network=NAME, steps=2, eval_every=2)
    training.train(config, accelerator)
    model = tmp_path / "run" / "model"
    assert json.loads((model / "config.json").read_text())["network"] == NAME
    np.save(tmp_path / "cloud.npy", np.random.default_rng(0).random((300, 3)))
    result = command(tmp_path / "cloud.npy", "-o", tmp_path / "dense.npy", model=model)
    assert result.status == 0 and len(np.load(tmp_path / "dense.npy")) == 1200
    assert main(["evaluate", "pairs", str(pair_directory), "--model", str(model)]) == 0
    assert "midpoints" in capfd.readouterr().out


SIZES = {"feature_dim": 16, "k": 6}


def moving_network(module: Path, **changes: Any) -> Upsampler:
    """The network with random weights in its last layers, too."""
    from point_transformer import PointTransformer  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model: Upsampler = PointTransformer(**SIZES, **changes)
    for layer in (model.child[-1], model.densities):
        torch.nn.init.normal_(layer.weight, std=0.1)
    return model.eval()


def test_its_loss_falls(module):
    """On curved surfaces, on which midpoints do not lie."""
    model = moving_network(module).train()
    points = [torch.nn.functional.normalize(torch.randn(size, 3)) for size in (60, 80, 240, 320)]
    bounds = [torch.tensor([0, size, size + other]) for size, other in ((60, 80), (240, 320))]
    source, target = torch.cat(points[:2]), torch.cat(points[2:])
    batch = Batch(pos=source, ptr=bounds[0], target=target, target_ptr=bounds[1])
    optimizer, losses = torch.optim.Adam(model.parameters(), 5e-3), []
    for _ in range(60):
        loss = losses_of_model(model, batch, 4.0, 4.0, LossConfig()).sum()
        optimizer.zero_grad()
        loss.backward()
        assert all(weight.grad is not None for weight in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.8 * losses[0], losses


@pytest.mark.parametrize("predict_error", [False, True])
def test_its_result_depends_neither_on_tiles_nor_on_other_clouds(
    predict_error, module, tmp_path, command
):
    model = moving_network(module, predict_error=predict_error)
    points = np.random.default_rng(0).random((900, 3)) * [30, 30, 1]
    np.save(tmp_path / "cloud.npy", points)
    model.save_pretrained(tmp_path / "model")
    words = (tmp_path / "cloud.npy", "-o", tmp_path / "dense.npy", "--ratio", "3", "--tile", "8")
    assert command(*words, model=tmp_path / "model").status == 0
    made = np.load(tmp_path / "dense.npy")
    assert np.array_equal(made[:, :3], upsample(points, 3, model=model))
    assert not np.array_equal(made[:, :3], upsample(points, 3, model=Upsampler(**SIZES)))
    pos, ptr = torch.from_numpy(points).float(), torch.tensor([0, 500, 900])
    both, alone = model(pos, ptr, 2.5), model(pos[500:], torch.tensor([0, 400]), 2.5)
    assert torch.equal(both.pos[both.ptr[1] :], alone.pos)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(pos, ptr, 2.5).pos.dtype == torch.float32


def test_a_model_loads_where_its_class_can_be_imported(module, tmp_path):
    model = moving_network(module)
    model.save_pretrained(tmp_path / "model")
    for cls in (Upsampler, type(model)):
        loaded = cls.from_pretrained(tmp_path / "model")
        assert type(loaded) is type(model) and loaded.fingerprint() == model.fingerprint()
    del sys.modules["point_transformer"]
    shutil.move(module / "point_transformer.py", tmp_path / "moved.py")
    invalidate_caches()
    with pytest.raises(ModelError, match=f"{NAME}: can't be imported.*PYTHONPATH"):
        Upsampler.from_pretrained(tmp_path / "model")


def test_a_network_adds_a_layer_to_that_of_pointup(module):
    from point_transformer import PointTransformer

    class Widened(Upsampler):
        def build(self, config):
            super().build(config)
            self.extra = torch.nn.Linear(config.feature_dim, config.feature_dim)

        def encode(self, *given, **named):
            features, positions = super().encode(*given, **named)
            return self.extra(features), positions

    pos, ptr = torch.rand(60, 3), torch.tensor([0, 60])
    assert len(Widened(**SIZES)(pos, ptr, 2.0).pos) == 120
    assert Widened(**SIZES).calibrates and not PointTransformer(**SIZES).calibrates


BUILDS = {
    "it has a buffer that is not stored": """
        self.register_buffer("scales", torch.full((3,), 2.0), persistent=False)""",
    "its build needs values": """
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, config.num_layers)]""",
    "its layers share their weights": """
        self.layers = nn.ModuleList([self.layers[0]] * config.num_layers)""",
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_network_that_can_be_trained_is_saved_continued_and_loaded(
    build, module, pair_directory, tmp_path, accelerator
):
    file, end = module / "point_transformer.py", "    def describe"
    file.write_text(file.read_text().replace(end, f"{build[1:]}\n\n{end}"))
    changes = {
        "eval_every": 3, "save_every": 1, "on_save_error": "end",
        "model": replace(SMALL, num_layers=2),
    }  # fmt: skip
    config = options(pair_directory, tmp_path / "run", network=NAME, steps=3, **changes)
    training.train(config, accelerator, stop_after=2)
    training.train(config, accelerator)
    trained = training.initial_model(config)[1]
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3" / "model.safetensors"
    trained.load_state_dict(load_file(checkpoint))
    trained.save_pretrained(tmp_path / "model")
    loaded = Upsampler.from_pretrained(tmp_path / "model")
    assert loaded.fingerprint() == trained.fingerprint()
    assert len(list(loaded.parameters())) == len(list(trained.parameters()))
    assert all(map(torch.equal, loaded.buffers(), trained.buffers()))


def test_weights_of_another_state_of_the_class_are_refused_by_its_name(module, tmp_path):
    moving_network(module).save_pretrained(tmp_path / "model")
    del sys.modules["point_transformer"]
    path = module / "point_transformer.py"
    path.write_text(path.read_text().replace("nn.Linear(dim, 2)", "nn.Linear(dim, 10)"))
    invalidate_caches()
    with pytest.raises(ModelError, match=rf"densities\.bias is \(2,\) .* take the {NAME} that"):
        Upsampler.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("name", ["point_transformer", "model.point_transformer"])
def test_code_that_came_with_the_weights_is_not_run(name, module, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    moving_network(module).save_pretrained(folder)
    del sys.modules["point_transformer"]
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("point_transformer", name))
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    (folder / "point_transformer.py").write_text(code)
    # As a module of the folder itself, and as one of a package of that name.
    monkeypatch.syspath_prepend(tmp_path if "." in name else folder)
    with pytest.raises(ModelError, match="lies beside its weights"):
        Upsampler.from_pretrained(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("predicts_error", [False, True])
@pytest.mark.parametrize("method", ["place_children", "spacing_power", "quota_logits"])
def test_a_result_of_another_shape_is_refused_by_the_name_of_its_method(
    method, predicts_error, module, monkeypatch
):
    model = moving_network(module, predict_error=predicts_error)
    real = getattr(type(model), method)
    monkeypatch.setattr(type(model), method, lambda *given: real(*given)[:, None])
    pos, ptr = torch.rand(40, 3), torch.tensor([0, 40])
    with pytest.raises(ModelError, match=rf"{NAME}\.{method} returns a tensor \(40, 1.*, not \("):
        model(pos, ptr, 2.0)


@pytest.mark.parametrize("name", ["nowhere:Net", "json:loads", "json", "json:absent"])
def test_a_name_of_no_network_is_refused(name, accelerator):
    with pytest.raises(ModelError, match=f"network {name}: "):
        training.train(TrainConfig(network=name, model=SMALL), accelerator)


def test_an_initial_model_brings_its_own_network():
    with pytest.raises(ConfigError, match="initial model brings its own"):
        TrainConfig(network=NAME, initial_model="shapes")
