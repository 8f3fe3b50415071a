"""Models on the Hugging Face Hub and in its cache: uploads, model cards, reasons of failures."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hub import local_hub
from huggingface_hub import ModelCard, constants
from huggingface_hub.errors import LocalEntryNotFoundError
from test_model import as_if_trained

from pointup import Upsampler
from pointup.errors import ModelError
from pointup.model.hub import WEIGHTS
from pointup.upsampling.in_memory import load_model


def test_the_card_of_a_saved_model_states_no_licence_and_asks_for_one(tmp_path: Path) -> None:
    as_if_trained().save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.license is None and card.data.library_name == "pointup"
    assert "set `license` at the top of this file" in card.text


def test_a_model_that_was_never_saved_can_be_loaded_after_its_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = as_if_trained()
    with local_hub(monkeypatch) as hub:
        model.push_to_hub("me/wavy")
    for name, content in hub.files["me/wavy"].items():
        (tmp_path / name).write_bytes(content)
    assert Upsampler.from_pretrained(tmp_path).config == model.config


def test_an_included_model_keeps_its_card_when_it_is_uploaded_or_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = (WEIGHTS / "forest" / "README.md").read_bytes()
    with local_hub(monkeypatch) as hub:
        Upsampler.from_pretrained("forest").push_to_hub("me/x")
    assert hub.files["me/x"]["README.md"] == card
    load_model("forest", torch.device("cpu")).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == card


def test_a_model_that_was_changed_after_loading_gets_a_new_card(
    model_directory: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(model_directory, tmp_path / "source")
    (source / "README.md").write_bytes(b"# Mine \xff")
    trained = Upsampler.from_pretrained(source)
    with torch.no_grad():
        trained.density.weight.add_(0.01)
    options = Upsampler.from_pretrained(source, oversampling=4.0)
    later = Upsampler.from_pretrained(source)
    later.config = replace(later.config, reach=3.0)
    for number, model in enumerate((trained, options, later)):
        model.save_pretrained(tmp_path / str(number))
        assert "# A pointup model" in (tmp_path / str(number) / "README.md").read_text()
    same = Upsampler.from_pretrained(source, oversampling=later.config.oversampling)
    same.save_pretrained(tmp_path / "same")
    assert (tmp_path / "same" / "README.md").read_bytes() == b"# Mine \xff"
    (source / "README.md").unlink()
    Upsampler.from_pretrained(source).save_pretrained(tmp_path / "none")
    assert "# A pointup model" in (tmp_path / "none" / "README.md").read_text()


def test_a_model_of_the_hub_keeps_its_card(tmp_path: Path, model_directory: Path) -> None:
    folder = tmp_path / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = shutil.copytree(model_directory, folder / "snapshots" / ("0" * 40))
    (snapshot / "README.md").write_text("# Theirs")
    where = {"cache_dir": tmp_path, "local_files_only": True}
    Upsampler.from_pretrained("owner/name", **where).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "README.md").read_text() == "# Theirs"
    (snapshot / "README.md").unlink()
    assert Upsampler.from_pretrained("owner/name", **where).source_card is None


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "the Hub has no such repository, or it is private; .*hf auth login"),
        (401, "", "the Hub refuses .*401.*; log in with `hf auth login`"),
        (403, "GatedRepo", "access to the Hub repository must be requested on its page"),
        (404, "RevisionNotFound", "the Hub repository has no such revision"),
        (404, "EntryNotFound", "the Hub repository has no config.json"),
        (403, "", "the Hub can't be reached .*403"),
    ],
)
def test_the_reason_of_the_hub_is_reported(
    status: int, code: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with local_hub(monkeypatch) as hub:
        hub.refusal = status, code
        with pytest.raises(ModelError, match=f"^me/x: no such directory; {message}") as raised:
            Upsampler.from_pretrained("me/x", cache_dir=tmp_path)
    assert "\n" not in str(raised.value)


def test_a_model_that_is_not_in_the_cache_is_reported_with_what_forbids_its_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"^me/x: no such directory; .* HF_HUB_OFFLINE is set"):
        Upsampler.from_pretrained("me/x", cache_dir=tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError, match=r"cache has no such model; leave out local_files_only"):
        Upsampler.from_pretrained("me/x", cache_dir=tmp_path, local_files_only=True)

    def fail(*args: object, **kwargs: object) -> None:
        raise LocalEntryNotFoundError("not cached") from ConnectionError("no route to host")

    # The Hub's own function tries it again for 20 seconds.
    monkeypatch.setattr("pointup.model.hub.hf_hub_download", fail)
    with pytest.raises(ModelError, match=r"the Hub can't be reached \(no route to host\); check"):
        Upsampler.from_pretrained("me/x", cache_dir=tmp_path)


def test_a_cached_model_is_loaded_offline(tmp_path: Path, model_directory: Path) -> None:
    folder = tmp_path / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    shutil.copytree(model_directory, folder / "snapshots" / ("0" * 40))
    where = {"cache_dir": tmp_path, "local_files_only": True, "strict": True}
    loaded = Upsampler.from_pretrained("owner/name", **where)
    assert loaded.config == Upsampler.from_pretrained(model_directory).config
    (folder / "snapshots" / ("0" * 40) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="owner/name: the weights can't be loaded"):
        Upsampler.from_pretrained("owner/name", **where)
