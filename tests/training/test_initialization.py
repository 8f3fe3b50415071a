"""The model that a run starts from."""

from __future__ import annotations

import pytest
import torch

from pointup.errors import ConfigError
from pointup.model.config import ModelConfig
from pointup.model.upsampler import Upsampler
from pointup.training.config import TrainConfig
from pointup.training.initialization import initial_model

SMALL = {"feature_dim": 8, "k": 6, "num_layers": 1, "heads": 2, "child_heads": 2}


@pytest.fixture
def stored(tmp_path) -> str:
    torch.manual_seed(0)
    model = Upsampler(**SMALL)
    torch.nn.init.normal_(model.pull.weight, std=0.1)
    model.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_layers_added_to_an_initial_model_change_nothing_before_training(stored):
    given = ModelConfig(column_layers=2, predict_error=True, max_pass_ratio=32.0)
    config, model = initial_model(TrainConfig(initial_model=stored, model=given))
    assert config.model == model.config
    assert (model.config.column_layers, model.config.max_pass_ratio) == (2, 32.0)
    assert model.config.feature_dim == 8, "an option that was not given is that of the model"
    points = torch.rand(200, 3, generator=torch.Generator().manual_seed(1))
    ptr = torch.tensor([0, 200])
    with torch.no_grad():
        before = Upsampler.from_pretrained(stored)(points, ptr, 4.0)
        after = model.eval()(points, ptr, 4.0)
    assert torch.equal(before.pos, after.pos)
    # The new layers take part in training.
    model.train()(points, ptr, 4.0).pos.square().sum().backward()
    assert model.profile[-1].weight.grad is not None and model.profile[-1].weight.grad.any()


def test_a_model_that_starts_from_lidar_has_heights_in_its_directory_too(tmp_path):
    config, model = initial_model(TrainConfig(initial_model="lidar", model=ModelConfig(k=16)))
    assert config.model.heights
    model.save_pretrained(tmp_path)
    assert Upsampler.from_pretrained(tmp_path).config.heights


def test_heights_can_be_given_with_an_initial_model(stored):
    assert not initial_model(TrainConfig(initial_model=stored))[0].model.heights
    given = TrainConfig(initial_model=stored, model=ModelConfig(heights=True))
    assert initial_model(given)[0].model.heights


def test_options_that_do_not_fit_the_weights_are_refused_by_name(stored):
    given = ModelConfig(num_layers=9, feature_dim=64, column_layers=1)
    flags = r"--model\.feature-dim, --model\.num-layers"
    keys = r"in a file of --config model\.feature_dim, model\.num_layers"
    refused = rf"sets the model options; leave out {flags} \({keys}\)$"
    with pytest.raises(ConfigError, match=refused):
        initial_model(TrainConfig(initial_model=stored, model=given))


def test_fewer_layers_than_the_initial_model_has_are_refused(tmp_path):
    Upsampler(**SMALL, column_layers=2).save_pretrained(tmp_path)
    given = ModelConfig(column_layers=1)
    with pytest.raises(ConfigError, match=r"column-layers is 1; the initial model has 2"):
        initial_model(TrainConfig(initial_model=str(tmp_path), model=given))


def test_all_weights_but_those_to_train_are_frozen(stored):
    _, model = initial_model(TrainConfig(initial_model=stored, train_only=("quota", "embed")))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name.split(".")[0] for name in trained} == {
        "quota",
        "quota_norm",
        "quota_powers",
        "embed",
    }
    with pytest.raises(ConfigError, match=r"--train-only none: no such weights; .*quota"):
        initial_model(TrainConfig(initial_model=stored, train_only=("none",)))


def test_activations_are_recomputed_as_the_option_says():
    choices = {"auto": None, "on": True, "off": False}
    for choice, recompute in choices.items():
        _, model = initial_model(
            TrainConfig(gradient_checkpointing=choice, model=ModelConfig(**SMALL))
        )
        assert model.recompute is recompute
