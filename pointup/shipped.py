"""Files that pointup ships: train.py, the launch configurations, presets of options.

In a checkout train.py and accelerate_configs/ lie beside the package; the wheel holds them in it.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent
CONFIGS = "accelerate_configs"
PRESETS = "presets"


def shipped_file(name: str) -> Path:
    """Where `name` lies, such as "train.py" or "accelerate_configs/8gpu.yaml".

    Raises FileNotFoundError, naming it, for a file that is not shipped.
    """
    for folder in (PACKAGE, PACKAGE.parent):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{name}: not found beside {PACKAGE}; install pointup again")


def is_checkout() -> bool:
    """Whether the package runs from a checkout, whose train.py users launch by its path."""
    return not (PACKAGE / "train.py").is_file()


def shipped_options() -> dict[str, Path]:
    """Launch configurations and presets by name, as `pointup config NAME` finds them."""
    folders = [PACKAGE / CONFIGS, PACKAGE.parent / CONFIGS, PACKAGE / PRESETS]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
