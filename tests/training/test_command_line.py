"""Options of train.py: flags, option files, former names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointup.errors import ConfigError
from pointup.model.config import ModelConfig
from pointup.shipped import shipped_options
from pointup.training.config import TrainConfig, as_dict, parse_command_line
from pointup.training.objective import LossConfig
from pointup.training.saved_config import check_same_run


def parse(*words: object) -> TrainConfig:
    return parse_command_line([str(word) for word in words], description="")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flags_override_the_options_of_a_file_which_override_the_defaults(tmp_path: Path) -> None:
    file = written(
        tmp_path / "run.yaml",
        "data: pairs\nsteps: 50\nlog-with: []\naugment: false\n"
        "model:\n  k: 8\nloss: {density: 0.5}\n",
    )
    config = parse("--config", file, "--model.k", 9, "--num-workers", 0)
    assert config == TrainConfig(
        data=("pairs",),
        steps=50,
        log_with=(),
        augment=False,
        num_workers=0,
        model=ModelConfig(k=9),
        loss=LossConfig(density=0.5),
    )
    assert parse(f"--config={file}").model.k == 8


def test_a_length_given_by_a_flag_replaces_the_one_of_the_file(tmp_path: Path) -> None:
    file = written(tmp_path / "run.yaml", "steps: 50\n")
    config = parse("--config", file, "--hours", 2)
    assert (config.steps, config.hours) == (None, 2)


@settings(max_examples=20)
@given(
    st.builds(
        TrainConfig,
        steps=st.none() | st.integers(1, 10**6),
        token_budget=st.none() | st.just("auto") | st.integers(100, 10**6),
        learning_rate=st.floats(1e-9, 1.0),
        crop=st.booleans(),
        train_only=st.lists(st.sampled_from(["quota", "encoder"]), max_size=2).map(tuple),
        model=st.builds(ModelConfig, concat=st.booleans(), k=st.integers(1, 20)),
        loss=st.builds(
            LossConfig,
            chamfer=st.sampled_from(["unsquared", "squared"]),
            coverage=st.floats(0, 9) | st.tuples(st.floats(0, 9), st.floats(0, 9)),
        ),
    )
)
def test_the_config_json_of_a_run_is_a_file_of_options(
    tmp_path_factory: pytest.TempPathFactory, config: TrainConfig
) -> None:
    saved = {**as_dict(config), "slots": 2, "mixed_precision": "no", "cpu_threads": 1}
    file = written(tmp_path_factory.mktemp("run") / "config.json", json.dumps(saved))
    assert parse("--config", file) == config


def test_former_names_are_read_from_files_and_refused_as_flags_with_the_new_name(
    tmp_path: Path,
) -> None:
    old = {"model": {"quota_trust": 0.3, "evening_steps": 2}, "loss": {"chamfer": "plain"}}
    config = parse("--config", written(tmp_path / "config.json", json.dumps(old)))
    assert config.model == ModelConfig(density_exponent=0.3, relaxation_steps=2)
    assert config.loss.chamfer == "unsquared"
    for words in (["--model.quota-trust", "0.3"], ["--model.quota_trust=0.3"]):
        with pytest.raises(ConfigError, match=r"--model.quota-trust is now --model.density-expon"):
            parse(*words)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("stpes: 50\n", "stpes is no option"),
        ("model: {layers: 3}\n", "model.layers is no option"),
        ("- steps\n", "holds no options"),
        ("1: 2\n", "1 is no option"),
        ("yes: true\n", "True is no option"),
        ("model: {1: 2}\n", "model.1 is no option"),
        ("steps: [5, 6]\n", r"steps is \[5, 6\]; it must be a whole number in digits or null"),
        ("seed: 1\nmodel: {k: many}\n", "model.k is 'many'; it must be a whole number in digits"),
        ("steps: 1e3\n", "steps is '1e3'; it must be a whole number in digits or null"),
        ('crop: "true"\n', "crop is 'true'; it must be true or false, without quotes"),
        ("lr_scaling: on\n", "lr_scaling is True; it must be none or sqrt or linear"),
        ("log_with: [null]\n", r"log_with is \[None\]; it must be a list, each item a text"),
        ("loss: {coverage: [1]}\n", r"coverage is \[1\]; it must be a number or \[a number, a"),
        ("loss: 3\n", "loss is 3; it must be a group of options"),
        ("model: {dropout: 2.0}\n", r"model.dropout is 2.0; it must lie in \[0, 1\)"),
        ("seed: 1\nlearning_rate: -1\n", "--learning-rate is -1.0; it must be greater than 0"),
        ("steps: [\n", "can't be read as YAML"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    file = written(tmp_path / "run.yaml", text)
    with pytest.raises(ConfigError, match=complaint) as error:
        parse("--config", file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("name", ["output_dir", "log_with", "seed", "crop", "loss", "model"])
def test_null_in_a_file_means_that_the_option_is_not_given(tmp_path: Path, name: str) -> None:
    assert parse("--config", written(tmp_path / "run.yaml", f"{name}: null\n")) == TrainConfig()


def test_null_in_a_file_is_none_where_an_option_has_this_value(tmp_path: Path) -> None:
    file = written(tmp_path / "run.yaml", "initial_model: null\nsteps:\n")
    assert parse("--config", file) == TrainConfig()


def test_on_and_off_need_no_quotes_in_a_file(tmp_path: Path) -> None:
    for word in ("on", "off", "'off'", "auto"):
        file = written(tmp_path / "run.yaml", f"gradient_checkpointing: {word}\n")
        assert parse("--config", file).gradient_checkpointing == word.strip("'")


def test_options_of_a_model_that_fit_only_together_may_be_in_a_file(tmp_path: Path) -> None:
    file = written(tmp_path / "run.yaml", "model: {feature_dim: 50, heads: 5, child_heads: 5}\n")
    assert parse("--config", file).model.feature_dim == 50
    assert parse("--config", file, "--model.heads", 10).model.heads == 10
    file = written(tmp_path / "run.yaml", "model: {feature_dim: 50, child_heads: 5}\n")
    assert parse("--config", file, "--model.heads", 5).model.heads == 5


def test_a_file_that_is_missing_or_not_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.yaml: no such file"):
        parse("--config", tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="takes one file"):
        parse("--config")


def test_every_preset_is_a_valid_file_of_options() -> None:
    presets = [path for path in shipped_options().values() if path.parent.name == "presets"]
    assert len(presets) >= 2
    for path in presets:
        assert parse("--config", path) != TrainConfig(), path


def test_a_run_started_with_former_names_is_continued(tmp_path: Path) -> None:
    from pointup.training.saved_config import read_config

    now = as_dict(TrainConfig())
    model = {**now["model"], "quota_trust": now["model"]["density_exponent"]}
    del model["density_exponent"]
    saved = {**now, "model": model, "loss": {**now["loss"], "chamfer": "plain"}}
    read = read_config(written(tmp_path / "config.json", json.dumps(saved)))
    assert read is not None
    check_same_run(read, now, tmp_path / "config.json")


def test_a_value_of_a_file_out_of_range_can_be_replaced_by_a_flag(tmp_path: Path) -> None:
    file = written(tmp_path / "run.yaml", "noise: 0.5\naugment: false\n")
    assert parse("--config", file, "--augment").noise == 0.5
    with pytest.raises(ConfigError, match=f"--config {file}: --noise needs --augment"):
        parse("--config", file)


def test_a_flag_out_of_range_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    file = written(tmp_path / "run.yaml", "steps: 50\n")
    with pytest.raises(ConfigError, match=r"^--learning-rate is -1\.0; it must be greater than 0$"):
        parse("--config", file, "--learning-rate", -1)


def test_the_help_tells_users_nothing_about_exceptions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    assert "Raises" not in capsys.readouterr().out
