"""`pointup push`: writes a model card for a model and uploads both to the Hugging Face Hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pointup.disk import temporary_directory
from pointup.errors import ConfigError, FileError
from pointup.option_help import optional

# As the Hub writes licences: apache-2.0, cc-by-4.0, mit, other.
LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclass(frozen=True, kw_only=True)
class Push:
    """Upload a model to the Hugging Face Hub, with a model card.

    The card of a run states data, command, figures beside the baselines and limits, and shows a
    validation pair. A model directory that is not part of a run keeps the card that it has. `hf
    auth login` logs in.
    """

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_OR_MODEL")]
    """Output directory of train.py, or a model directory."""
    repo: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OWNER/NAME")]
    """Repository on the Hub; it is made where it is missing."""
    license: Annotated[str, tyro.conf.arg(metavar="LICENCE")]
    """Licence of the weights as the Hub writes it: apache-2.0, cc-by-4.0, other. It must agree with
    the licences of the training data."""
    limits: Annotated[str, optional("TEXT")] = ""
    """What you know about where the model fails; a paragraph of the card."""
    dry_run: Annotated[Path | None, optional("FOLDER")] = None
    """Write what would be uploaded to this new folder, and upload nothing."""
    private: bool = False
    """Make a new repository private."""
    max_pairs: int = 16
    """Largest number of validation pairs of a run that are measured to choose the picture's."""

    def run(self) -> int:
        self._check()
        if self.dry_run is not None:
            self._write(self.dry_run)
            print(f"{self.dry_run}: {_listed(self.dry_run)}; nothing was uploaded")
            return 0
        from pointup.model.hub import upload

        with temporary_directory() as parent:
            folder = parent / "model"
            self._write(folder)
            print(f"uploading {_listed(folder)}")
            url = upload(folder, self.repo, self.private)
        print(f"{url}\nuse it: pointup upsample survey.laz -o dense.laz --model {self.repo}")
        return 0

    def _check(self) -> None:
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            raise ConfigError(f"{self.repo}: no name of a repository: {error}") from None
        if "/" not in self.repo:
            raise ConfigError(f"{self.repo}: name the owner too: OWNER/{self.repo}")
        if not LICENCE.fullmatch(self.license):
            raise ConfigError(
                f"--license {self.license}: write it as the Hub does, such as apache-2.0"
            )
        if self.max_pairs < 1:
            raise ConfigError(f"--max-pairs {self.max_pairs}: must be at least 1")
        if self.dry_run is not None and self.dry_run.exists() and any(self.dry_run.iterdir()):
            raise FileError(f"{self.dry_run}: is not empty; name a new folder")

    def _write(self, folder: Path) -> None:
        """Write weights, options and card."""
        from pointup.cli.model_card import card_of_model, card_of_run, picture_of_run
        from pointup.cli.report.runs import read_run
        from pointup.model.upsampler import Upsampler
        from pointup.visualization.page import save_picture

        if not self.model.is_dir():
            raise FileError(f"{self.model}: no such directory; name a run or a model directory")
        is_run = (self.model / "metrics.jsonl").is_file()
        # Not the name of the repository, which may be that of another cloud of a sample.
        run = read_run(self.model, "model") if is_run else None
        source = self.model / "model" if is_run else self.model
        upsampler = Upsampler.from_pretrained(f"{source.resolve()}")
        folder.mkdir(parents=True, exist_ok=True)
        upsampler.save_pretrained(folder)
        if run is None:
            card = card_of_model(source, upsampler, self.repo, self.license, self.limits)
        else:
            caption = ""
            if picture := picture_of_run(run, self.max_pairs):
                caption, pixels = picture
                save_picture(pixels, folder / "validation.png")
            card = card_of_run(run, upsampler, self.repo, self.license, self.limits, caption)
        (folder / "README.md").write_text(card, encoding="utf-8")


def _listed(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return ", ".join(f"{path.name} ({path.stat().st_size / 1000:,.0f} kB)" for path in files)
