"""Model directories and the Hugging Face Hub: formats, damage, unknown names, cards, failures."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hub import local_hub
from huggingface_hub import ModelCard, constants
from huggingface_hub.errors import LocalEntryNotFoundError
from test_model import as_if_trained, packed

from pointup import Upsampler
from pointup.errors import ModelError
from pointup.model.stored_model import WEIGHTS
from pointup.upsampling.in_memory import load_model

BAD_CONFIGS: dict[str, tuple[bytes, str]] = {
    "cut short": (b"{", r"not a valid config\.json"),
    "a list": (b"[]", r"not a valid config\.json: it holds \[\], not options by name"),
    "null": (b"null", r"not a valid config\.json: it holds null"),
    "not UTF-8": (b'{"k": "\xff"}', r"not a valid config\.json \('utf-8' codec"),
    "nested": (b"[" * 100_000, r"not a valid config\.json"),
    "no format": (b"{}", "format None of the model is not 4"),
}


@pytest.fixture
def change(model_directory, tmp_path) -> Callable[[dict[str, Any]], Path]:
    """A copy of the small model with another config.json."""

    def copy(options: dict[str, Any]) -> Path:
        (tmp_path / "model.safetensors").write_bytes(
            (model_directory / "model.safetensors").read_bytes()
        )
        stored = json.loads((model_directory / "config.json").read_text()) | options
        stored = {key: value for key, value in stored.items() if value != "left out"}
        (tmp_path / "config.json").write_text(json.dumps(stored))
        return tmp_path

    return copy


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_damaged_config_is_an_error_in_one_line(tmp_path, case):
    content, message = BAD_CONFIGS[case]
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message) as raised:
        Upsampler.from_pretrained(tmp_path)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


def test_an_option_out_of_range_is_an_error_that_names_it(change):
    with pytest.raises(ModelError, match=r"config\.json: .*model\.k is 1\.5; it must be a whole"):
        Upsampler.from_pretrained(change({"k": 1.5}))


def test_a_missing_option_takes_its_default(change, model_directory):
    whole = Upsampler.from_pretrained(model_directory)
    older = Upsampler.from_pretrained(change({"relaxation_steps": "left out", "beta": "left out"}))
    assert older.config == whole.config
    for name, values in whole.state_dict().items():
        assert torch.equal(older.state_dict()[name], values)


def test_an_option_of_a_newer_version_is_ignored_with_a_warning(change, model_directory, caplog):
    newer = Upsampler.from_pretrained(change({"colour_head": 3, "token": "a", "model_id": "b/c"}))
    assert newer.config == Upsampler.from_pretrained(model_directory).config
    (record,) = caplog.records
    assert "doesn't know: colour_head, model_id, token; ignored" in record.getMessage()


def test_options_of_another_size_are_refused_before_a_network_is_built(change, monkeypatch):
    monkeypatch.setattr(Upsampler, "to_empty", None)
    largest = {"feature_dim": 4096, "position_hidden": 4096, "num_layers": 4}
    for options in (largest, {"num_layers": 5}):
        with pytest.raises(ModelError, match=r"its weights don't fit its options: .* by config"):
            Upsampler.from_pretrained(change(options))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_no_file_of_a_model(name, change):
    copy = change({})
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(ModelError, match=f"{name}: "):
        Upsampler.from_pretrained(copy)
    with pytest.raises(ModelError, match="is a file; give its directory"):
        Upsampler.from_pretrained(copy / name)


def test_an_unknown_argument_is_an_error(model_directory):
    with pytest.raises(ModelError, match="unknown model option: colour"):
        Upsampler.from_pretrained(model_directory, colour=3)


def test_a_given_option_out_of_range_is_named_and_not_blamed_on_the_weights(model_directory):
    assert Upsampler.from_pretrained(model_directory, dropout=0.5).config.dropout == 0.5
    message = rf"{model_directory}: with the given options, model\.dropout is 2\.0; it must be"
    with pytest.raises(ModelError, match=message):
        Upsampler.from_pretrained(model_directory, dropout=2.0)


def test_a_path_means_a_directory_even_if_an_included_model_has_its_name(
    tmp_path, model_directory, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for missing in ("shapes", "owner/name"):
        with pytest.raises(ModelError, match=rf"^{missing}: no such directory; give the name"):
            Upsampler.from_pretrained(Path(missing))
    shutil.copytree(model_directory, "shapes")
    own = Upsampler.from_pretrained(model_directory).config
    for given in (Path("shapes"), Path("./shapes"), "./shapes", "shapes/"):
        assert Upsampler.from_pretrained(given).config == own
        assert load_model(given, torch.device("cpu")).config == own
    assert Upsampler.from_pretrained("shapes").config != own


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lidr", "lidr: no such model or directory; did you mean lidar[?]"),
        ("Shapes", "did you mean shapes[?]"),
        (
            "elephant",
            r"elephant: neither an included model \(shapes, noisy, lidar, forest\), a model",
        ),
        ("runs/pairs/model", "runs/pairs/model: neither an included model"),
        ("./lidr", "[.]/lidr: neither an included model"),
    ],
)
def test_a_name_that_no_repository_has_is_never_looked_up_on_the_hub(name, message, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a request was sent to the Hub")

    monkeypatch.setattr("pointup.model.hub.hf_hub_download", refuse)
    with pytest.raises(ModelError, match=message):
        Upsampler.from_pretrained(name)


def test_a_saved_model_loads_and_gives_the_same_points(tmp_path):
    model = as_if_trained()
    model.save_pretrained(tmp_path / "model")
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    loaded = Upsampler.from_pretrained(tmp_path / "model")
    assert not loaded.training
    pos, ptr = packed(50)
    assert torch.equal(model(pos, ptr, 4.0).pos, loaded(pos, ptr, 4.0).pos)


def test_a_file_of_a_model_is_refused_with_its_directory(model_directory):
    file = model_directory / "model.safetensors"
    for given in (file, str(file)):
        with pytest.raises(
            ModelError, match=f"^{file}: is a file; give its directory, {file.parent}"
        ):
            Upsampler.from_pretrained(given)


def test_an_error_about_a_directory_without_a_model_names_it(tmp_path):
    with pytest.raises(ModelError, match=r"neither an included model .*a model directory"):
        Upsampler.from_pretrained(tmp_path)
    as_if_trained().save_pretrained(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="the weights can't be loaded"):
        Upsampler.from_pretrained(tmp_path / "model")
    weights.write_bytes(whole)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "format": 99}))
    with pytest.raises(ModelError, match="format 99"):
        Upsampler.from_pretrained(tmp_path / "model")


def test_a_run_directory_is_refused_with_the_place_of_its_model(tmp_path, model_directory):
    shutil.copytree(model_directory, tmp_path / "model")
    (tmp_path / "config.json").write_text('{"data": [], "model": {"k": 6}}')
    message = rf"{tmp_path}: is the directory of a run; its model is {tmp_path}/model"
    with pytest.raises(ModelError, match=message):
        Upsampler.from_pretrained(tmp_path)


def test_the_card_of_a_saved_model_states_no_licence_and_asks_for_one(tmp_path):
    as_if_trained().save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.license is None and card.data.library_name == "pointup"
    assert "set `license` at the top of this file" in card.text


def test_a_model_that_was_never_saved_can_be_loaded_after_its_upload(tmp_path, monkeypatch):
    model = as_if_trained()
    with local_hub(monkeypatch) as hub:
        model.push_to_hub("me/wavy")
    for name, content in hub.files["me/wavy"].items():
        (tmp_path / name).write_bytes(content)
    assert Upsampler.from_pretrained(tmp_path).config == model.config


def test_an_included_model_keeps_its_card_when_it_is_uploaded_or_saved(tmp_path, monkeypatch):
    card = (WEIGHTS / "forest" / "README.md").read_bytes()
    with local_hub(monkeypatch) as hub:
        Upsampler.from_pretrained("forest").push_to_hub("me/x")
    assert hub.files["me/x"]["README.md"] == card
    load_model("forest", torch.device("cpu")).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == card


def test_a_model_that_was_changed_after_loading_gets_a_new_card(model_directory, tmp_path):
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


def test_a_cached_model_of_the_hub_is_loaded_offline_and_keeps_its_card(
    tmp_path, model_directory, monkeypatch
):
    folder = tmp_path / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = shutil.copytree(model_directory, folder / "snapshots" / ("0" * 40))
    (snapshot / "README.md").write_text("# Theirs")
    where = {"cache_dir": tmp_path, "local_files_only": True}
    Upsampler.from_pretrained("owner/name", **where).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "README.md").read_text() == "# Theirs"
    (snapshot / "README.md").unlink()
    loaded = Upsampler.from_pretrained("owner/name", strict=True, **where)
    assert loaded.source_card is None
    assert loaded.config == Upsampler.from_pretrained(model_directory).config
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="owner/name: the weights can't be loaded"):
        Upsampler.from_pretrained("owner/name", **where)
    with local_hub(monkeypatch) as hub:
        hub.refusal = 404, "EntryNotFound"
        with pytest.raises(ModelError, match="the Hub repository has no model"):
            Upsampler.from_pretrained("owner/name", revision="0" * 40, cache_dir=tmp_path)


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
def test_the_reason_of_the_hub_is_reported(status, code, message, monkeypatch, tmp_path):
    with local_hub(monkeypatch) as hub:
        hub.refusal = status, code
        with pytest.raises(ModelError, match=f"^me/x: no such directory; {message}") as raised:
            Upsampler.from_pretrained("me/x", cache_dir=tmp_path)
    assert "\n" not in str(raised.value)


def test_a_model_that_is_not_in_the_cache_is_reported_with_what_forbids_its_download(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"^me/x: no such directory; .* HF_HUB_OFFLINE is set"):
        Upsampler.from_pretrained("me/x", cache_dir=tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError, match=r"cache has no such model; leave out local_files_only"):
        Upsampler.from_pretrained("me/x", cache_dir=tmp_path, local_files_only=True)

    def fail(*args: object, **kwargs: object) -> None:
        raise LocalEntryNotFoundError("not cached") from cause

    # The Hub's own function tries it again for 20 seconds.
    monkeypatch.setattr("pointup.model.hub.hf_hub_download", fail)
    cause = ConnectionError("no route to host")
    with pytest.raises(ModelError, match=r"the Hub can't be reached \(no route to host\); check"):
        Upsampler.from_pretrained("me/x", cache_dir=tmp_path)
    cause = ConnectionError()
    with pytest.raises(ModelError, match=r"the Hub can't be reached \(ConnectionError\); check"):
        Upsampler.from_pretrained("me/x", cache_dir=tmp_path)


def test_a_revision_of_a_repository_has_its_own_weights(tmp_path, monkeypatch):
    for revision, depth in (("main", 2), ("v1", 1)):
        Upsampler(num_layers=depth).save_pretrained(tmp_path / revision)

    def download(repo: str, name: str, revision: str = "main", **options: object) -> str:
        assert repo == "somebody/model"
        return str(tmp_path / revision / name)

    monkeypatch.setattr("pointup.model.hub.hf_hub_download", download)
    assert Upsampler.from_pretrained("somebody/model").config.num_layers == 2
    assert Upsampler.from_pretrained("somebody/model", revision="v1").config.num_layers == 1
