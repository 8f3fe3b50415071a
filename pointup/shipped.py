"""Locates the files that pointup includes: train.py, launch configurations, presets of options.

In a checkout, train.py and accelerate_configs/ are beside the package; in the wheel, inside it.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent
CONFIGS = "accelerate_configs"
PRESETS = "presets"


def shipped_file(name: str) -> Path:
    """Path of the included file `name`, such as "train.py" or "accelerate_configs/8gpu.yaml".

    Raises FileNotFoundError, with the name, for a file that is not included.
    """
    for folder in (PACKAGE, PACKAGE.parent):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{name}: not found beside {PACKAGE}; install pointup again")


def is_checkout() -> bool:
    """Whether the package runs from a checkout, where users launch train.py by its path."""
    return not (PACKAGE / "train.py").is_file()


def shipped_options() -> dict[str, Path]:
    """Paths of launch configurations and presets, by the NAME of `pointup config NAME`."""
    folders = [PACKAGE / CONFIGS, PACKAGE.parent / CONFIGS, PACKAGE / PRESETS]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
