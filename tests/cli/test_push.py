"""`pointup push`: the card of a run, the folder of --dry-run, and what reaches a Hub."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hub import local_hub
from huggingface_hub import ModelCard
from matplotlib.image import imread
from sheets import SMALL
from test_report import data as data
from test_report import make_run, pair

from pointup import Upsampler, upsample
from pointup.cli.main import main
from pointup.cli.model_card import card_of_run, command_of_run
from pointup.cli.report.runs import read_run
from pointup.datasets.pair_writer import write_pairs
from pointup.training.config import TrainConfig, as_dict, parse_command_line


@pytest.fixture
def run(tmp_path, data) -> Path:
    path = make_run(tmp_path / "run", data, 1e-3, [0.97, 0.9, 0.93])
    torch.manual_seed(0)
    upsampler = Upsampler(**SMALL)
    with torch.no_grad():
        for parameter in upsampler.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    upsampler.save_pretrained(path / "model")
    return path


@pytest.mark.usefixtures("small_panels")
def test_a_dry_run_writes_a_model_that_loads_offline_and_a_card_of_the_run(
    run, data, tmp_path, capsys
):
    folder = tmp_path / "hub"
    words = ["push", str(run), "me/wavy", "--license", "cc-by-4.0", "--dry-run", str(folder)]
    assert main([*words, "--limits", "Only sheets."]) == 0
    assert "nothing was uploaded" in capsys.readouterr().out
    names = {"README.md", "config.json", "model.safetensors", "validation.png"}
    assert {path.name for path in folder.iterdir()} == names
    points = np.random.default_rng(0).random((100, 3))
    sides = [
        upsample(points, 2, model=Upsampler.from_pretrained(path))
        for path in (folder, run / "model")
    ]
    np.testing.assert_array_equal(*sides)

    # Colleagues can read the weights where they can read the rest.
    modes = {(folder / name).stat().st_mode for name in names}
    assert len(modes) == 1

    card = ModelCard.load(folder / "README.md")
    assert "upsample cloud.ply" in card.text and card.data.tags == ["point-cloud", "upsampling"]
    assert card.data.license == "cc-by-4.0" and card.data.library_name == "pointup"
    assert "is 90.0% of that of the midpoint baseline" in card.text
    assert "On average over the pairs, the Chamfer distance is " in card.text
    assert "The table has the means over the pairs." in card.text
    assert card.text.count("The figures are those of the output of `pointup upsample`") == 1
    assert "| Chamfer, data unit | 0.45 | 0.5 |" in card.text
    assert "Pairs of `pairs`." in card.text and "| made by | tests |" in card.text
    assert "- Only sheets." in card.text
    assert "learning-rate 0.001" in card.text and "--model me/wavy" in card.text
    # Nothing of the machine where the run was made.
    assert str(tmp_path) not in card.content and str(data.parent) not in card.content
    assert "of the Chamfer distance of the midpoint baseline](validation.png)" in card.text
    assert "](validation.png)" in card.text and imread(folder / "validation.png").ndim == 3


def test_the_steps_of_a_card_reach_to_the_evaluation_that_ended_the_run(run, tmp_path):
    record = {"step": 45, "share_of_midpoints": 0.9, "validation": {"model": {"chamfer": 0.1}},
              "is_kept": True}  # fmt: skip
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    folder = tmp_path / "hub"
    words = ["push", str(run), "me/wavy", "--license", "mit", "--max-pairs", "1"]
    assert main([*words, "--dry-run", str(folder)]) == 0
    assert "| steps | 45 |" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        (0.9, None),
        (0.97, "hardly better than the midpoint baseline (97.0% of its Chamfer distance)"),
        (1.0, "no better than the midpoint baseline (100.0% of its Chamfer distance)"),
        (1.036, "worse than the midpoint baseline (103.6% of its Chamfer distance)"),
    ],
)
def test_the_limits_of_a_card_say_whether_the_model_is_better_than_the_midpoint_baseline(
    share, verdict, tmp_path, data
):
    path = make_run(tmp_path / "run", data, 1e-3, [share])
    card = card_of_run(read_run(path, "run"), Upsampler(**SMALL), "me/wavy", "mit", "", "")
    found = [line for line in card.splitlines() if "On its validation data" in line]
    assert found == ([f"- On its validation data the model is {verdict}."] if verdict else [])


def test_the_hub_reads_datasets_base_model_and_figures_from_the_metadata_of_a_card(run, data):
    read = read_run(run, "run")
    names = ["somebody/forest_pairs", str(data)]
    for used, datasets in ((names, names[:1]), (names[:1], names[:1]), (names[1:], None)):
        options = read.options | {"data": used, "initial_model": "somebody/model"}
        read = replace(read, options=options)
        card = ModelCard(card_of_run(read, Upsampler(**SMALL), "me/wavy", "mit", "", ""))
        assert (card.data.datasets, card.data.base_model) == (datasets, "somebody/model")
        assert card.data.metrics == ["chamfer"] and card.data.model_name == "wavy"
        (result,) = card.data.eval_results
        assert (result.metric_type, result.metric_value) == ("chamfer", 0.45)
        assert result.metric_name == "Chamfer, data unit"
        own = datasets[0] if used == datasets else "validation-pairs"
        assert result.dataset_type == own and str(data) not in card.content
    read = replace(read, options=options | {"initial_model": "forest"})
    card = ModelCard(card_of_run(read, Upsampler(**SMALL), "me/wavy", "mit", "", ""))
    assert card.data.base_model is None


def test_a_card_says_that_a_run_kept_its_initial_model(run):
    read = read_run(run, "run")
    read = replace(read, options=read.options | {"initial_model": "forest"})
    kept = "The model is the initial model forest, unchanged"
    for step in (0, 20):
        best = replace(read, evaluations=[{**read.evaluations[0], "step": step, "is_kept": True}])
        card = card_of_run(best, Upsampler(**SMALL), "me/wavy", "mit", "", "")
        assert (kept in card) == (step == 0)


def test_a_card_has_the_unit_of_the_surveys(tmp_path):
    sheet = tmp_path / "pairs"
    # Simulated scenes are in metres.
    write_pairs([pair(0)], [pair(1)], sheet, info={"made_by": "tests", "recipe": 1})
    run = read_run(make_run(tmp_path / "run", sheet, 1e-3, [0.9]), "run")
    card = card_of_run(run, Upsampler(**SMALL), "me/wavy", "mit", "", "")
    assert "| Chamfer, m | 0.45 | 0.5 |" in card


def test_a_card_names_the_meshes_of_its_pairs_without_their_folders(tmp_path):
    pairs, meshes = tmp_path / "pairs", [str(tmp_path / f"{name}.off") for name in "abc"]
    info = {"made_by": "tests", "recipe": 1, "inputs": meshes, "validation": meshes[1:]}
    write_pairs([pair(0)], [pair(1)], pairs, info=info)
    run = read_run(make_run(tmp_path / "run", pairs, 1e-3, [0.9]), "run")
    card = card_of_run(run, Upsampler(**SMALL), "me/wavy", "mit", "", "")
    assert "| validation | b.off, c.off |" in card and "| files | a.off, b.off, c.off |" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_card_of_a_model_trained_on_noise_replaces_points_as_in_its_validation(run, noise):
    options = json.loads((run / "config.json").read_text()) | {"noise_spacings": noise}
    (run / "config.json").write_text(json.dumps(options))
    card = card_of_run(read_run(run, "run"), Upsampler(**SMALL), "me/wavy", "mit", "", "")
    assert ("--model me/wavy --denoise\n" in card) == bool(noise)
    assert ('model="me/wavy", denoise=True)' in card) == bool(noise)


def test_the_command_of_a_card_repeats_the_options_of_the_run(run):
    changed = TrainConfig(
        data=(), output_dir=Path("out"), steps=7, augment=False, crop=True, num_pictures=1,
        train_only=("offset",), log_with=("tensorboard", "wandb"),
    )  # fmt: skip
    options = as_dict(changed)
    options["model"] |= {"k": 8, "concat": False, "extrapolation": True}
    (run / "config.json").write_text(json.dumps(options))
    words = command_of_run(read_run(run, "run")).split()
    assert words[:2] == ["pointup", "train"]
    parsed = as_dict(parse_command_line([*words[2:], "--output-dir", "out"], ""))
    assert parsed == json.loads(json.dumps(options))


def test_a_run_without_its_dataset_has_a_card_without_a_picture(run, tmp_path, capsys):
    options = json.loads((run / "config.json").read_text()) | {"data": [str(tmp_path / "gone")]}
    (run / "config.json").write_text(json.dumps(options))
    folder = tmp_path / "hub"
    assert main(["push", str(run), "me/w", "--license", "mit", "--dry-run", str(folder)]) == 0
    assert "no picture: " in capsys.readouterr().out
    text = (folder / "README.md").read_text()
    assert "validation.png" not in text and "Pairs of `gone`." in text
    assert not (folder / "validation.png").exists()


@pytest.mark.usefixtures("small_panels")
def test_a_repository_may_have_the_name_of_a_cloud(run, tmp_path):
    pictures = []
    for repo in ("target", "wavy"):
        folder = tmp_path / repo
        words = ["push", str(run), f"me/{repo}", "--license", "mit", "--dry-run", str(folder)]
        assert main([*words, "--max-pairs", "1"]) == 0
        assert f"# {repo}\n" in (folder / "README.md").read_text()
        pictures.append((folder / "validation.png").read_bytes())
    assert pictures[0] == pictures[1], "the model's output is drawn"


def test_a_model_keeps_a_card_that_was_written_by_hand(run, tmp_path):
    for number, (card, expected) in enumerate(
        ((None, "its figures are not stated"), ("# Mine\n\nOf my scans.\n", "Of my scans."))
    ):
        if card is not None:
            (run / "model" / "README.md").write_text(card)
        folder = tmp_path / f"hub{number}"
        words = ["push", str(run / "model"), "me/w", "--license", "mit", "--dry-run", str(folder)]
        assert main(words) == 0
        written = ModelCard.load(folder / "README.md")
        assert expected in written.text and written.data.license == "mit"
        # The model of the run knows no heights.
        assert "survey.laz" not in written.text and "lidar" not in written.data.tags


def test_a_push_sends_all_files_to_a_repository_that_it_makes(run, monkeypatch, capsys):
    model = run / "model"
    with local_hub(monkeypatch) as hub:
        assert main(["push", str(model), "me/wavy", "--license", "mit", "--private"]) == 0
        assert hub.repos == {"me/wavy": True}
        sent = hub.files["me/wavy"]
        assert sent.keys() == {"README.md", "config.json", "model.safetensors"}
        assert sent["model.safetensors"] == (model / "model.safetensors").read_bytes()
        assert f"{hub.url}/me/wavy" in capsys.readouterr().out
        hub.token = "another"
        assert main(["push", str(model), "me/wavy", "--license", "mit"]) == 1
        error = capsys.readouterr().err
        assert "me/wavy: the upload failed (" in error and "hf auth whoami" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["me/w", "--license", "My Licence"], "write it as the Hub does"),
        (["w", "--license", "mit"], "OWNER/w"),
        (["me/a b", "--license", "mit"], "no name of a repository"),
        (["me/w", "--license", "mit", "--dry-run", "."], "is not empty"),
    ],
)
def test_wrong_words_are_refused_before_the_work(
    words, message, run, capsys,
    monkeypatch
):  # fmt: skip
    monkeypatch.chdir(run)
    assert main(["push", str(run), *words]) == 1
    assert message in capsys.readouterr().err
