"""Makes the model that a run starts from: random weights or `--initial-model`."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch

from pointup.errors import ConfigError
from pointup.model.config import ModelConfig
from pointup.model.upsampler import Upsampler
from pointup.training.config import TrainConfig
from pointup.upsampling.models import load_model


def initial_model(config: TrainConfig) -> tuple[TrainConfig, Upsampler]:
    """A model with random weights of the seed, or `config.initial_model`; and the config with its
    model options.

    `config.train_only` freezes all other weights. Raises ModelError if the initial model doesn't
    exist. Raises ConfigError if the config has other model options than the initial model, or if
    `train_only` matches no weight.
    """
    if config.initial_model is None:
        torch.manual_seed(config.seed)
        model = Upsampler(**asdict(config.model))
    else:
        model = load_model(config.initial_model, torch.device("cpu")).train()
        if config.model not in (ModelConfig(), model.config):
            raise ConfigError(
                f"--initial-model {config.initial_model} sets the model options; leave out all "
                "options that begin with --model."
            )
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
