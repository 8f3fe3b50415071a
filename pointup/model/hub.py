"""Models in directories and on the Hub: saved, loaded, and refused where they don't fit."""

from __future__ import annotations

import json
import logging
from contextlib import redirect_stdout
from dataclasses import asdict, fields
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any, Self

from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError

from pointup.errors import ModelError
from pointup.model.config import ModelConfig, with_current_names

logger = logging.getLogger("pointup")

WEIGHTS = Path(__file__).parents[1] / "weights"
SHIPPED = ("shapes", "lidar")
"""Models in the package, by name: of surfaces sampled without gaps, and of surveys from the air."""

FORMAT = 3
"""Version of the layout of weights and options; a model of another one is refused."""

OPTIONS = frozenset(option.name for option in fields(ModelConfig))
# What the Hub's loader hands on beside the content of config.json.
LOADER_ARGUMENTS = frozenset(
    {
        "model_id", "revision", "cache_dir", "force_download", "local_files_only", "token",
        "map_location", "strict",
    }
)  # fmt: skip

NO_MODEL = (
    f"neither a model that is shipped ({', '.join(SHIPPED)}), a directory with one (config.json, "
    "model.safetensors) nor a Hub repository (OWNER/NAME) that can be reached; train one with "
    "train.py, its model/ directory is one"
)

MODEL_CARD = """---
{{ card_data }}
---

# A pointup model

Makes point clouds denser, by any ratio: `pointup upsample cloud.laz -o dense.laz --model DIR`, or
in Python `pointup.upsample(points, ratio=4, model="DIR")`. What data it was trained on, and how
well it does, is for those to add who share it.
"""


class StoredModel(PyTorchModelHubMixin):
    """A model whose `config` goes with its weights, and whose format is checked before loading."""

    config: ModelConfig

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> str | None:
        """Save weights (safetensors) and options, in the Hub's format."""
        kwargs.setdefault("config", {"format": FORMAT, **asdict(self.config)})
        return super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Self:
        """Load a model, in evaluation mode: a shipped one by name, or of a directory or the Hub.

        A directory with the name of a shipped model is given as ./NAME. The Hub is asked for names
        like OWNER/NAME alone. An option that its config.json lacks takes its default; one that this
        version doesn't know is ignored with a warning, for what changes the network changes the
        format. Raises ModelError when there is no model, one of another format, or one with options
        out of range.
        """
        name = str(pretrained_model_name_or_path)
        if strange := sorted(kwargs.keys() - LOADER_ARGUMENTS - OPTIONS):
            raise ModelError(f"unknown model option: {', '.join(strange)}")
        if name in SHIPPED:
            name = str(WEIGHTS / name)
        stored = read_config(name, **{k: kwargs[k] for k in ("revision", "token") if k in kwargs})
        if stored.get("format") != FORMAT:
            raise ModelError(
                f"{name}: format {stored.get('format')} of the model is not {FORMAT}, the one this "
                "version of pointup reads; train it again, or install the version that wrote it"
            )
        check_options(name, stored)
        try:
            # The Hub's loader prints where it loads from.
            with redirect_stdout(StringIO()):
                return super().from_pretrained(name, strict=True, **kwargs)
        except (RuntimeError, SafetensorError, ValueError, FileNotFoundError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"{name}: the weights can't be loaded ({reason})") from error

    @classmethod
    def _from_pretrained(cls, **kwargs: Any) -> Self:
        current = with_current_names(kwargs)
        unknown = current.keys() - LOADER_ARGUMENTS - OPTIONS
        return super()._from_pretrained(**{k: v for k, v in current.items() if k not in unknown})


def check_options(name: str, stored: dict[str, Any]) -> None:
    """ModelError for options of a config.json that can't be used, a warning for unknown ones."""
    unknown = sorted(stored.keys() - OPTIONS - {"format"})
    if unknown:
        logger.warning(
            "%s: config.json has options that this version of pointup doesn't know: %s; ignored",
            name,
            ", ".join(unknown)[:200],
        )
    try:
        ModelConfig(**{key: value for key, value in stored.items() if key in OPTIONS})
    except ValueError as error:
        raise ModelError(f"{name}: config.json: {error}") from None


def read_config(name: str, **kwargs: Any) -> dict[str, Any]:
    """The config.json of a model directory or Hub repository; ModelError where there is none."""
    path = Path(name) / "config.json"
    try:
        if not Path(name).is_dir():
            _check_hub_name(name)
            path = Path(hf_hub_download(name, "config.json", **kwargs))
        stored = json.loads(path.read_text(encoding="utf-8"))
    # Bytes that aren't UTF-8 and JSON's own errors are ValueErrors, as is a name that the Hub can't
    # have, which is no fault of a file.
    except (OSError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelError(f"{name}: {NO_MODEL}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not a valid config.json ({error})") from error
    if not isinstance(stored, dict):
        raise ModelError(
            f"{path}: not a valid config.json: it holds {json.dumps(stored)[:40]}, not options by "
            "name; copy the model's directory again"
        )
    return with_current_names(stored)


def _check_hub_name(name: str) -> None:
    """ModelError for a name that no repository of the Hub has, so that nobody waits for it."""
    if "/" in name:
        return
    near = get_close_matches(name.lower(), SHIPPED, n=1)
    if near:
        raise ModelError(f"{name}: no such model or directory; did you mean {near[0]}?")
    raise ModelError(f"{name}: {NO_MODEL}")
