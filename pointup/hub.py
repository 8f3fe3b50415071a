"""Models in directories and on the Hub: saved, loaded, and refused where they don't fit."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any, Self, cast

from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError

from pointup.errors import ModelError
from pointup.modelconfig import ModelConfig

WEIGHTS = Path(__file__).parent / "weights"
SHIPPED = ("shapes", "lidar")
"""Models in the package, by name: of surfaces sampled without gaps, and of surveys from the air."""

FORMAT = 3
"""Version of the layout of weights and options; a model of another one is refused."""

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

        A directory with the name of a shipped model is given as ./NAME. Raises ModelError when
        there is no model, or one of another format.
        """
        name = str(pretrained_model_name_or_path)
        if name in SHIPPED:
            name = str(WEIGHTS / name)
        stored = read_config(name, **{k: kwargs[k] for k in ("revision", "token") if k in kwargs})
        if stored.get("format") != FORMAT:
            raise ModelError(
                f"{name}: format {stored.get('format')} of the model is not {FORMAT}, the one this "
                "version of pointup reads; train it again, or install the version that wrote it"
            )
        try:
            # The Hub's loader prints where it loads from.
            with redirect_stdout(StringIO()):
                return super().from_pretrained(name, strict=True, **kwargs)
        except (RuntimeError, SafetensorError, ValueError, FileNotFoundError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(f"{name}: the weights can't be loaded ({reason})") from error

    @classmethod
    def _from_pretrained(cls, **kwargs: Any) -> Self:
        kwargs.pop("format", None)
        return super()._from_pretrained(**kwargs)


def read_config(name: str, **kwargs: Any) -> dict[str, Any]:
    """The config.json of a model directory or Hub repository; ModelError where there is none."""
    path = Path(name) / "config.json"
    try:
        if not Path(name).is_dir():
            path = Path(hf_hub_download(name, "config.json", **kwargs))
        return cast(dict[str, Any], json.loads(path.read_text()))
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: not a valid config.json ({error})") from error
    except (OSError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelError(
            f"{name}: neither a model that is shipped ({', '.join(SHIPPED)}), a directory with one "
            "(config.json, model.safetensors) nor a Hub repository that can be reached; train one "
            "with train.py, its model/ directory is one"
        ) from error
