"""Models on the Hugging Face Hub. Importing its client takes a quarter of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pointup.errors import ModelError
from pointup.terminal import first_line


def download(repo: str, file: str, **kwargs: Any) -> Path:
    """A file of a Hub repository, in the cache of the Hub. `kwargs` are those of `hf_hub_download`.
    Raises OSError with the reason and the remedy."""
    try:
        return Path(hf_hub_download(repo, file, **kwargs))
    except (EntryNotFoundError, HfHubHTTPError) as error:
        raise OSError(_reason(error, file)) from error
    except HFValidationError as error:
        raise OSError(first_line(error)) from error


def _reason(error: Exception, file: str) -> str:
    """Why the Hub gave no `file`, and the remedy."""
    log_in = "log in with `hf auth login`"
    if isinstance(error, GatedRepoError):
        return f"access to the Hub repository must be requested on its page; then {log_in}"
    if isinstance(error, RepositoryNotFoundError):
        return f"the Hub has no such repository, or it is private; check the name, or {log_in}"
    if isinstance(error, RevisionNotFoundError):
        return "the Hub repository has no such revision; leave it out for the newest"
    if isinstance(error, LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return "the Hub's cache has no such model, and HF_HUB_OFFLINE is set; unset it"
        if error.__cause__ is None:
            return "the Hub's cache has no such model; leave out local_files_only"
        return f"the Hub can't be reached ({first_line(error.__cause__)}); check the connection"
    if isinstance(error, EntryNotFoundError):
        return f"the Hub repository has no {file}; it is no model of pointup"
    return f"the Hub refuses ({first_line(error)}); {log_in}"


def upload(folder: Path, repo: str, private: bool) -> str:
    """Upload a folder to a repository, which is made where it is missing; returns its address."""
    api = HfApi()
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repo, commit_message="Upload by pointup")
    except LocalTokenNotFoundError:
        raise ModelError(f"{repo}: log in to the Hub first, with `hf auth login`") from None
    except OfflineModeIsEnabled:
        raise ModelError(f"{repo}: HF_HUB_OFFLINE is set; unset it") from None
    # The errors of the network are those of requests or httpx, by the version of huggingface_hub.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{repo}: the upload failed ({reason}); `hf auth whoami` shows who is logged in"
        ) from error
    return str(address)
