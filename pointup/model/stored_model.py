"""Saves and loads models in directories and on the Hugging Face Hub, and validates them."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from difflib import get_close_matches
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from pointup.disk import temporary_directory
from pointup.errors import ModelError
from pointup.model.calibration import Calibration
from pointup.model.config import ModelConfig

logger = logging.getLogger("pointup")

WEIGHTS_FILE = "model.safetensors"
WEIGHTS = Path(__file__).parents[1] / "weights"
SHIPPED = ("shapes", "noisy", "lidar", "forest")
"""Names of the models in the package: for shapes (closely sampled surfaces), for noisy scans of
these, for airborne lidar, and to bring airborne lidar to the density of a drone."""

FORMAT = 4
"""Version of the layout of weights and options; models of other versions are refused."""

OPTIONS = frozenset(option.name for option in fields(ModelConfig))
DOWNLOAD_ARGUMENTS = ("revision", "cache_dir", "force_download", "local_files_only", "token")
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # OWNER/NAME
LOADER_ARGUMENTS = frozenset({*DOWNLOAD_ARGUMENTS, "map_location", "strict"})

NO_MODEL = (
    f"neither an included model ({', '.join(SHIPPED)}), a model directory (config.json, "
    "model.safetensors) nor the name of a Hub repository (OWNER/NAME); train.py writes a "
    "model directory, model/ in its output directory"
)

MODEL_CARD = """---
library_name: pointup
tags:
- lidar
- point-cloud
- upsampling
---

# A pointup model

Upsamples point clouds by any ratio: `pointup upsample cloud.laz -o dense.laz --model DIR`, or
in Python `pointup.upsample(points, ratio=4, model="DIR")`. If you share the model, add here what
data it was trained on and which accuracy it reaches.

No licence is stated. Before you share the model, set `license` at the top of this file, such as
`license: cc-by-4.0`; it must agree with the licences of the training data.
"""


def weights_on_host(model: Any) -> dict[str, Tensor]:
    """Copies of the weights of a module on the CPU. Safetensors refuses tensors that share memory,
    as those of layers that share weights do."""
    dense = torch.contiguous_format
    return {k: v.cpu().clone(memory_format=dense) for k, v in model.state_dict().items()}


class StoredModel:
    """A model stored with its `config`, whose format and options are checked before loading."""

    config: ModelConfig
    calibration: Calibration | None = None
    """Of the predicted errors; None for a model that predicts none, or was never calibrated."""
    source_card: tuple[bytes, str] | None = None
    """The model card (README.md) of the source of a loaded model, and the model's `fingerprint`."""

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Save weights (safetensors), options (config.json) and card (README.md), in the Hub's
        format.

        A loaded model keeps the card of its source. A model that was trained further, or whose
        options were changed, gets a new card without figures and licence, because the old one would
        be wrong. A card that is already in the directory is not replaced.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        stored = {"format": FORMAT, **self.own_class(), **asdict(self.config)}
        if self.calibration:
            stored["calibration"] = asdict(self.calibration)
        text = json.dumps(stored, sort_keys=True, indent=2)
        (folder / "config.json").write_text(text, encoding="utf-8")
        # `save_file` makes a file that only its owner can read.
        content = save(weights_on_host(self), metadata={"format": "pt"})
        (folder / WEIGHTS_FILE).write_bytes(content)
        if not (folder / "README.md").exists():
            card, described = self.source_card or (b"", "")
            is_right = card and described == self.fingerprint()
            (folder / "README.md").write_bytes(card if is_right else MODEL_CARD.encode())

    def push_to_hub(self, repo_id: str, private: bool = False) -> str:
        """Upload what `save_pretrained` saves to a Hub repository, OWNER/NAME, which is made where
        it is missing, and return its address. Raises ModelError."""
        from pointup.model.hub import upload

        with temporary_directory() as parent:
            self.save_pretrained(parent / "model")
            return upload(parent / "model", repo_id, private)

    @classmethod
    def own_class(cls) -> dict[str, str]:
        """The entry of config.json of a network that is not part of pointup."""
        if cls.__module__.partition(".")[0] == "pointup":
            return {}
        return {"network": f"{cls.__module__}:{cls.__qualname__}"}

    def fingerprint(self) -> str:
        """A checksum of weights and options."""
        return sha256(save(weights_on_host(self), {"config": repr(self.config)})).hexdigest()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Self:
        """Load a model in evaluation mode: an included one by name, one of a directory or the Hub.

        A `Path` always means a directory. As a string, a directory with the name of an included
        model is given as ./NAME. Only names of the form OWNER/NAME are looked up on the Hub. An
        option that config.json lacks takes its default, an unknown one is ignored with a warning.
        Options of `ModelConfig` in `kwargs` replace stored ones. Weights are always loaded
        strictly. A model of another network needs its class on Python's path; code beside the
        weights is never run. Raises ModelError where there is no model, one of another format, or
        one with options out of range.
        """
        name = str(pretrained_model_name_or_path)
        if strange := sorted(kwargs.keys() - LOADER_ARGUMENTS - OPTIONS):
            raise ModelError(f"unknown model option: {', '.join(strange)}")
        if isinstance(pretrained_model_name_or_path, Path):
            # str(Path("./shapes")) is the name of an included model.
            if not pretrained_model_name_or_path.exists():
                raise ModelError(
                    f"{name}: no such directory; give the name of a model as a string, not a Path"
                )
        elif name in SHIPPED:
            name = str(WEIGHTS / name)
        download = {k: kwargs[k] for k in DOWNLOAD_ARGUMENTS if k in kwargs}
        stored = read_config(name, **download)
        if "format" not in stored and (Path(name) / "model" / "config.json").is_file():
            raise ModelError(
                f"{name}: is the directory of a run; its model is {Path(name) / 'model'}"
            )
        if stored.get("format") != FORMAT:
            raise ModelError(
                f"{name}: format {stored.get('format')} of the model is not {FORMAT}, which this "
                "version of pointup reads; train it again, or install the version that wrote it"
            )
        network = cls
        if "network" in stored and stored["network"] != cls.own_class().get("network"):
            network = cast(type[Self], stored_class(name, stored["network"]))
        given = {k: v for k, v in kwargs.items() if k in OPTIONS}
        check_options(name, stored, given)
        options = {k: v for k, v in {**stored, **given}.items() if k in OPTIONS}
        model = network._with_weights(name, options, kwargs.get("map_location", "cpu"), download)
        if "calibration" in stored:
            model.calibration = read_calibration(name, stored["calibration"])
        card = b""
        with suppress(OSError):  # A model is of use without its card.
            card = _file_of(name, "README.md", **download).read_bytes()
        if card and model.config == ModelConfig(**{k: stored[k] for k in OPTIONS & stored.keys()}):
            model.source_card = card, model.fingerprint()
        return model

    @classmethod
    def _with_weights(
        cls, name: str, options: dict[str, Any], device: Any, download: dict[str, Any]
    ) -> Self:
        """A model of this network with the stored weights, on `device`, in evaluation mode."""
        try:
            weights = _file_of(name, WEIGHTS_FILE, **download)
            if not weights.is_file():
                raise ModelError(f"{weights}: no such file; copy the model directory again")
            # "meta" takes no memory: that of a damaged config.json may be larger than the machine.
            # But another network may need values to be built.
            own = cls.own_class().get("network", "")
            with torch.device("cpu" if own else "meta"):
                model = cls(**options)
            assert isinstance(model, nn.Module)
            expected = model.state_dict()
            check_shapes(name, weights, expected, own)
            # Copies: the tensors of a file are parts of it, and change with it.
            stored = load_file(weights)
            loaded = {
                key: stored[key].to(device, of.dtype, copy=True) for key, of in expected.items()
            }
            # `to_empty` would import symbolic mathematics for the meta device.
            model.load_state_dict(loaded, assign=not own)
            model.to(device)
        except (RuntimeError, SafetensorError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"{name}: the weights can't be loaded ({reason})") from error
        model.eval()
        return model


def stored_class(model: str, network: object) -> type[StoredModel]:
    """The class that a config.json names, "module:Class". ModelError if it can't be imported, and
    for a module in the directory of the model, whose code came with the weights."""
    module = str(network).partition(":")[0]
    with suppress(ImportError, ValueError):
        if found := find_spec(module.partition(".")[0]):
            places = [found.origin or "", *(found.submodule_search_locations or ())]
            folders = {each for place in places for each in (Path(place), *Path(place).parents)}
            if Path(model).resolve() in map(Path.resolve, folders):
                raise ModelError(
                    f"{model}: its network {network} lies beside its weights, and is not run from "
                    "there; if you trust it, move it to another folder on PYTHONPATH"
                )
    network_class = class_of_network(str(network))
    file = getattr(sys.modules[network_class.__module__], "__file__", None)
    logger.warning("%s: its network is %s of %s", model, network, file)
    return network_class


def class_of_network(network: str) -> type[StoredModel]:
    """The class of another network, by "module:Class". Raises ModelError."""
    module, _, name = network.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ModelError(
            f"network {network}: can't be imported ({error}); name it MODULE:CLASS, and put the "
            "folder of the module on PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, StoredModel)):
        raise ModelError(f"network {network}: is no subclass of pointup.Upsampler; make it one")
    return found


def _file_of(name: str, file: str, **kwargs: Any) -> Path:
    """Path of a file of a model directory or, in its cache, of a Hub repository; OSError."""
    if Path(name).is_dir():
        return Path(name) / file
    from pointup.model.hub import download  # Takes a quarter of a second to import.

    return download(name, file, **kwargs)


def check_shapes(name: str, weights: Path, expected: Mapping[str, Tensor], network: str) -> None:
    """Raise ModelError for weights that don't fit the options. Only the header of the file is read.

    `expected` has the weights of a network with these options, `network` the name of a class that
    is not of pointup.
    """
    with safe_open(weights, "pt") as file:
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    for key in sorted({*expected, *stored}):
        by_options = tuple(expected[key].shape) if key in expected else "nothing"
        if stored.get(key, "nothing") != by_options:
            remedy = "copy both again"
            if network:
                remedy += (
                    f", or take the {network} that they were trained with: it may have changed"
                )
            raise ModelError(
                f"{name}: its weights don't fit its options: {key} is {stored.get(key, 'nothing')} "
                f"in {WEIGHTS_FILE} and {by_options} by config.json; {remedy}"
            )


def read_calibration(name: str, stored: Any) -> Calibration:
    """The `calibration` of a config.json. Raises ModelError for an invalid one."""
    try:
        return Calibration(**stored)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{name}: config.json: calibration: {error}; copy the model directory again"
        ) from None


def check_options(name: str, stored: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise ModelError for invalid options of a config.json, or of those that replace them."""
    if unknown := sorted(stored.keys() - OPTIONS - {"format", "network", "calibration"}):
        logger.warning(
            "%s: config.json has options that this version of pointup doesn't know: %s; ignored",
            name, ", ".join(unknown)[:200],
        )  # fmt: skip
    for what, options in (("config.json:", stored), ("with the given options,", stored | given)):
        try:
            ModelConfig(**{key: value for key, value in options.items() if key in OPTIONS})
        except ValueError as error:
            raise ModelError(f"{name}: {what} {error}") from None


def read_config(name: str, **kwargs: Any) -> dict[str, Any]:
    """Read config.json of a model directory or Hub repository; ModelError without a valid one."""
    path, is_directory = Path(name), Path(name).is_dir()
    try:
        if not is_directory:
            if path.exists():
                raise ModelError(f"{name}: is a file; give its directory, {path.parent}")
            _check_hub_name(name)
        path = _file_of(name, "config.json", **kwargs)
        if path.exists() and not path.is_file():
            raise ModelError(f"{path}: is a device or a pipe; copy the model directory again")
        stored = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = NO_MODEL if is_directory else f"no such directory; {error}"
        raise ModelError(f"{name}: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not a valid config.json ({error})") from error
    if not isinstance(stored, dict):
        raise ModelError(
            f"{path}: not a valid config.json: it holds {json.dumps(stored)[:40]}, not options by "
            "name; copy the model directory again"
        )
    return stored


def _check_hub_name(name: str) -> None:
    """Raise ModelError for a name that no Hub repository can have, before a request."""
    if HUB_NAME.fullmatch(name):
        return
    near = get_close_matches(name.lower(), SHIPPED, n=1)
    if near and "/" not in name:
        raise ModelError(f"{name}: no such model or directory; did you mean {near[0]}?")
    raise ModelError(f"{name}: {NO_MODEL}")
