"""Makes the model that a run starts from: random weights or `--initial-model`."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any, cast

import torch

from pointup.errors import ConfigError
from pointup.model.config import ModelConfig
from pointup.model.stored_model import class_of_network
from pointup.model.upsampler import Upsampler
from pointup.training.config import TrainConfig, option

EXTENSIONS = frozenset(
    {
        "column_layers", "column_neighbors", "column_stride", "extrapolation", "descent",
        "predict_error", "error_exponent", "reach", "max_pass_ratio", "slots_per_ratio",
        "density_exponent", "quota_exponent", "quota_noise", "oversampling", "relaxation_steps",
        "relaxation_residual", "relaxation_radius", "volume_relaxation", "heights", "dropout", "k",
    }
)  # fmt: skip
"""Model options that may be given with `--initial-model`: they keep its weights, and add others."""


def _changed(stored: ModelConfig, given: ModelConfig) -> dict[str, Any]:
    """Options that are neither the default nor those of the stored model."""
    default = ModelConfig()
    values = {option.name: getattr(given, option.name) for option in fields(ModelConfig)}
    return {
        name: value
        for name, value in values.items()
        if value not in (getattr(default, name), getattr(stored, name))
    }


def _extended(model: Upsampler, options: ModelConfig) -> Upsampler:
    """A model with other options and the same weights; weights that are new compute nothing yet."""
    layers, others = model.config.column_layers, options.column_layers
    if others < layers:
        raise ConfigError(
            f"--model.column-layers is {others}; the initial model has {layers}, none of which can "
            "be left out"
        )
    extended = type(model)(**asdict(options)).train()
    missing = extended.load_state_dict(model.state_dict(), strict=False)
    assert not missing.unexpected_keys
    return extended


def initial_model(config: TrainConfig) -> tuple[TrainConfig, Upsampler]:
    """A model with random weights of the seed, or `config.initial_model`; and the config with its
    model options.

    `config.train_only` freezes all other weights. Raises ModelError if the initial model doesn't
    exist. Raises ConfigError if the config has model options that do not fit the weights of the
    initial model (those outside `EXTENSIONS`, or fewer layers), or if `train_only` matches no
    weight.
    """
    if config.initial_model is None:
        torch.manual_seed(config.seed)
        network = class_of_network(config.network) if config.network else Upsampler
        model = cast(type[Upsampler], network)(**asdict(config.model))
    else:
        model = Upsampler.from_pretrained(config.initial_model).train()
        changed = _changed(model.config, config.model)
        if given := sorted(changed.keys() - EXTENSIONS):
            names = [f"model.{name}" for name in given]
            raise ConfigError(
                f"--initial-model {config.initial_model} sets the model options; leave out "
                f"{', '.join(map(option, names))} (in a file of --config "
                f"{', '.join(names)})"
            )
        if changed:
            torch.manual_seed(config.seed)
            model = _extended(model, replace(model.config, **changed))
        config = replace(config, model=model.config)
    for name, weights in model.named_parameters():
        weights.requires_grad_(not config.train_only or name.startswith(config.train_only))
    if not any(weights.requires_grad for weights in model.parameters()):
        parts = ", ".join(dict.fromkeys(name.split(".")[0] for name, _ in model.named_parameters()))
        raise ConfigError(
            f"--train-only {' '.join(config.train_only)}: no such weights; choose from {parts}"
        )
    model.recompute = {"auto": None, "on": True, "off": False}[config.gradient_checkpointing]
    return config, model
