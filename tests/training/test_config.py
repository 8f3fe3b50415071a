"""Options of train.py: flags, files of options, and what a continued run may change."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointup.errors import ConfigError
from pointup.model.config import ModelConfig
from pointup.shipped import shipped_options
from pointup.training.config import TrainConfig, as_dict, check_same_run, parse_command_line
from pointup.training.objective import LossConfig


def parse(*words: object) -> TrainConfig:
    return parse_command_line([str(word) for word in words], description="")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flags_override_the_options_of_a_file_which_override_the_defaults(tmp_path):
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


def test_a_length_given_by_a_flag_replaces_the_one_of_the_file(tmp_path):
    file = written(tmp_path / "run.yaml", "steps: 50\n")
    config = parse("--config", file, "--hours", 2)
    assert (config.steps, config.hours) == (None, 2)


@settings(max_examples=10)
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
            outliers=st.floats(0, 9),
        ),
    )
)
def test_the_config_json_of_a_run_is_a_file_of_options(tmp_path_factory, config):
    saved = {**as_dict(config), "slots": 2, "mixed_precision": "no", "cpu_threads": 1}
    file = written(tmp_path_factory.mktemp("run") / "config.json", json.dumps(saved))
    assert parse("--config", file) == config


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("stpes: 50\n", "stpes is no option"),
        ("model: {layers: 3}\n", "model.layers is no option"),
        ("model: {1: 2}\n", "model.1 is no option"),
        ("yes: true\n", "True is no option"),
        ("- steps\n", "holds no options"),
        ("steps: [\n", "can't be read as YAML"),
        ("steps: [5, 6]\n", r"--steps is \[5, 6\]; it must be a valid integer"),
        ("seed: 1\nmodel: {k: many}\n", "--model.k is 'many'; it must be a valid integer"),
        ("steps: 1e3\n", "--steps is '1e3'; it must be a valid integer"),
        ("steps: yes\n", "--steps is True; it must be a valid integer"),
        ("learning_rate: yes\n", "--learning-rate is True; it must be a valid number"),
        ("crop: 'true'\n", "--crop is 'true'; it must be a valid boolean"),
        ("lr_scaling: on\n", "--lr-scaling is True; it must be 'none', 'sqrt' or 'linear'"),
        ("log_with: [null]\n", "--log-with is None; it must be a valid string"),
        ("loss: {coverage: [1]}\n", r"--loss.coverage is \[1\]; it must be a valid number"),
        ("loss: 3\n", "--loss is 3; it must be a dictionary"),
        ("model: {dropout: 2.0}\n", r"model.dropout is 2.0; it must be at most 0.99"),
        ("seed: 1\nlearning_rate: -1\n", "--learning-rate is -1; it must be greater than 0"),
        ("noise_spacings: 0.5\naugment: false\n", "--noise-spacings needs --augment"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path, text, complaint):
    file = written(tmp_path / "run.yaml", text)
    with pytest.raises(ConfigError, match=f"^--config {file}: {complaint}"):
        parse("--config", file)


def test_null_in_a_file_means_that_the_option_is_not_given(tmp_path):
    text = "".join(f"{name}: null\n" for name in ("output-dir", "steps", "crop", "loss", "model"))
    assert parse("--config", written(tmp_path / "run.yaml", text)) == TrainConfig()


def test_on_and_off_need_no_quotes_in_a_file(tmp_path):
    for word in ("on", "off", "'off'", "auto"):
        file = written(tmp_path / "run.yaml", f"gradient_checkpointing: {word}\n")
        assert parse("--config", file).gradient_checkpointing == word.strip("'")


def test_a_flag_fits_the_options_of_a_file(tmp_path):
    file = written(tmp_path / "run.yaml", "model: {feature_dim: 50, heads: 5, child_heads: 5}\n")
    assert parse("--config", file, "--model.heads", 10).model.heads == 10
    with pytest.raises(ConfigError, match=r"^--learning-rate is -1\.0; it must be greater than 0$"):
        parse("--config", file, "--learning-rate", -1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"token_budget": 0}, "--token-budget is 0; it must be greater than 0 or 'auto'"),
        ({"token_budget": 1, "crop": True}, "--token-budget is 1; with --crop"),
        ({"epochs": math.inf}, "--epochs is inf; it must be a finite number"),
        ({"hours": math.nan}, "--hours is nan; it must be a finite number"),
        ({"collective_timeout": 1e12}, "--collective-timeout is 1000000000000.0; it must be less"),
        ({"ratio": 0.5}, "--ratio is 0.5; it must be greater than or equal to 1"),
        ({"num_workers": 10**6}, "--num-workers is 1000000; it must be less"),
        ({"ema_decay": 1.0}, "--ema-decay is 1.0; it must be less than 1"),
        (
            {"noise_spacings": 0.005},
            "--noise-spacings is 0.005; augmentation adds 0.01",
        ),
        ({"noise_spacings": 0.5, "augment": False}, "--noise-spacings needs --augment"),
        ({"steps": 3, "hours": 2.0}, "--steps and --hours exclude each other"),
        ({"output_dir": Path("\udce4")}, "LC_ALL"),
    ],
)
def test_an_impossible_value_is_refused_in_a_line_that_names_the_option(options, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        TrainConfig(**options)
    assert "\n" not in str(error.value)


def test_a_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"missing.yaml: no such file or preset; `pointup config` lists"
    ):
        parse("--config", tmp_path / "missing.yaml")


def test_datasets_elsewhere_or_written_differently_continue_a_run():
    for other in ("a/", "./a", "a=1", "moved/a"):
        check(("a", "b=2"), (other, "b/=2.0"))


@pytest.mark.parametrize("other", [("a",), ("b=2", "a"), ("a", "b"), ("a=2", "b=2"), ()])
def test_other_datasets_weights_or_orders_are_another_run(other):
    with pytest.raises(ConfigError, match=r"has data \['a', 'b=2'\], not"):
        check(("a", "b=2"), other)


def check(before: tuple[str, ...], now: tuple[str, ...]) -> None:
    saved, given = (as_dict(TrainConfig(data=data)) for data in (before, now))
    check_same_run(saved, given, Path("config.json"))


def test_every_preset_is_a_valid_file_of_options():
    presets = [path for path in shipped_options().values() if path.parent.name == "presets"]
    assert len(presets) >= 2
    for path in presets:
        assert parse("--config", path) != TrainConfig(), path


def test_the_help_tells_users_nothing_about_exceptions(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    assert "Raises" not in capsys.readouterr().out
