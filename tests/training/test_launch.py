"""A run has the requested processes and options, or ends with an error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState
from accelerate.utils import LoggerType
from runs import TrainConfig, training

from pointup.errors import ConfigError
from pointup.training.distributed import accelerator
from pointup.training.distributed.accelerator import (
    LaunchRequest,
    check_accumulation,
    check_tasks,
    joined_group,
    launch_arguments,
    launch_request,
    make_accelerator,
    read_request,
    seed_micro_batch,
)

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"


@pytest.mark.parametrize(
    "name, num_processes, num_machines, precision",
    [
        ("cpu", 1, 1, "no"),
        ("cpu2", 2, 1, "no"),
        ("1gpu", 1, 1, "bf16"),
        ("8gpu", 8, 1, "bf16"),
        ("2x8gpu", 16, 2, "bf16"),
    ],
)
def test_every_config_parses_with_accelerates_own_loader(
    name, num_processes, num_machines, precision
):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert config.num_processes == num_processes
    assert config.num_machines == num_machines
    assert config.mixed_precision == precision
    assert len(list(CONFIGS.glob("*.yaml"))) == 5


def test_processes_and_device_are_read_from_the_launchers_command_line(tmp_path):
    four = tmp_path / "four.yaml"
    four.write_text((CONFIGS / "cpu2.yaml").read_text().replace("processes: 2", "processes: 4"))
    eight = str(CONFIGS / "8gpu.yaml")

    def request(*command: str) -> tuple[int, bool] | None:
        arguments = launch_arguments(["/usr/bin/python3", *command])
        return None if arguments is None else read_request(arguments, tmp_path)[:2]

    assert request("/bin/accelerate", "launch", "--cpu", "train.py") == (1, True)
    three = ("--num_processes", "3", "train.py", "--num_processes", "5")
    assert request("/bin/accelerate", "launch", "--cpu", *three) == (3, True)
    assert request("/bin/accelerate", "launch", "--multi_gpu", *three) == (3, False)
    for name in ("/bin/accelerate-launch", "accelerate.commands.launch"):
        assert request("-m", name, "--config_file", str(four), "train.py", "--cpu") == (4, True)
        assert request("-m", name, "--config_file", "four.yaml", "train.py") == (4, True)
        assert request("-m", name, "--config_file", eight, "train.py", "--cpu") == (8, False)
        assert request("-m", name, "--config_file", eight, *three) == (3, False)
    assert request("-c", "python train.py") is None
    assert request("/bin/torchrun", "--nproc_per_node", "2", "train.py") is None
    assert launch_arguments([]) is None


@pytest.mark.parametrize("default", ["cpu2", "8gpu"])
def test_the_file_of_accelerate_config_is_read_if_none_is_named(default, monkeypatch):
    monkeypatch.setattr(accelerator, "default_config_file", str(CONFIGS / f"{default}.yaml"))
    monkeypatch.setattr(
        "accelerate.commands.config.config_args.default_config_file", str(CONFIGS / "cpu.yaml")
    )
    num_processes = 2 if default == "cpu2" else 8
    assert read_request(["train.py"], Path()) == (num_processes, default == "cpu2", 1)
    assert read_request(["--cpu", "train.py"], Path()) == (1, True, 1)


def test_accumulation_that_the_launcher_takes_without_a_word_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", raising=False)
    command = "python accelerate launch --cpu --gradient_accumulation_steps {} train.py"
    for steps in ("1", "4"):
        words = command.format(steps).split()
        parent = mock.Mock(cmdline=lambda words=words: words, cwd=lambda: str(tmp_path))
        monkeypatch.setattr("psutil.Process.parents", lambda process, parent=parent: [parent])
        if steps == "1":
            check_accumulation()
    with pytest.raises(ConfigError, match=r"accumulation_steps is 4; .* --accumulation-steps 4"):
        check_accumulation()


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), psutil.NoSuchProcess(1)], ids=repr)
def test_a_hidden_launcher_has_no_request(error):
    hidden = mock.Mock(cmdline=mock.Mock(side_effect=error))
    with mock.patch("psutil.Process.parents", lambda process: [hidden]):
        assert launch_request() is None


def test_a_launcher_whose_configuration_was_removed_has_no_request(tmp_path):
    command = ["python", "-m", "accelerate.commands.launch", "--config_file", "gone.yaml", "run.py"]
    parent = mock.Mock(cmdline=lambda: command, cwd=lambda: str(tmp_path))
    with mock.patch("psutil.Process.parents", lambda process: [parent]):
        assert launch_request() is None


@pytest.mark.slow
@pytest.mark.parametrize("launched_by", ["8gpu", "cpu2", "wrapper", "torchrun"])
def test_several_processes_use_what_they_were_launched_for_or_end(launched_by, tmp_path):
    """Real launches; torch sees two devices at first, then none."""
    script = tmp_path / "device.py"
    script.write_text(
        "import os, sys, torch\n"
        "from pointup.training.distributed.accelerator import prepare_devices\n"
        "from pointup.training.distributed.process_group import exit_status\n"
        "def run():\n"
        "    for number in (2, 0):\n"
        "        torch.accelerator.device_count = lambda: number\n"
        "        torch.accelerator.is_available = lambda: number > 0\n"
        "        prepare_devices()\n"
        "        line = f\"{number} {os.environ.pop('ACCELERATE_USE_CPU', 'gpu')}\\n\"\n"
        "        os.write(1, line.encode())\n"  # in one piece, from both processes
        "sys.exit(exit_status(run, 'device.py'))\n"
    )
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f"{sys.executable} {script}; exit $?\n")
    words = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
    words += [CONFIGS / f"{'cpu2' if launched_by == 'cpu2' else '8gpu'}.yaml"]
    words += ["--num_processes", 2, "--main_process_port", 0]
    words += ["--no_python", "bash", wrapper] if launched_by == "wrapper" else [script]
    if launched_by == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc_per_node", 2, script]
    # Tests before this one, in the same process, may have chosen a device.
    env = {name: text for name, text in os.environ.items() if not name.startswith("ACCELERATE_")}
    ended = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=env)
    lines = sorted(ended.stdout.splitlines())
    if launched_by in ("8gpu", "wrapper"):
        assert ended.returncode != 0 and lines and set(lines) == {"2 gpu"}
        assert ended.stderr.count("device.py: error: torch sees no accelerator: ") == 1
        assert "; 2 processes would share the CPU: fix that, or set use_cpu: true" in ended.stderr
    else:
        assert ended.returncode == 0, ended.stderr
        assert lines == ["0 true"] * 2 + ["2 true" if launched_by == "cpu2" else "2 gpu"] * 2
        assert "accelerator" not in ended.stderr


def test_fewer_processes_than_requested_is_an_error_not_a_silent_single_process(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(accelerator, "launch_request", lambda: LaunchRequest(2, use_cpu=True))
    with pytest.raises(ConfigError, match=r"2 processes but started 1; .*config cpu2\)"):
        make_accelerator(tmp_path)


@pytest.fixture
def new_state() -> Iterator[None]:
    """Make Accelerate read its environment again, now and after the test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("new_state")
def test_an_environment_that_enables_compilation_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(ConfigError, match="dynamo_backend INDUCTOR is not supported"):
        make_accelerator(tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    assert make_accelerator(tmp_path).num_processes == 1


@pytest.mark.usefixtures("new_state")
def test_fp16_is_refused_on_a_processor_where_it_would_be_fp32(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match="fp16 needs a GPU; use bf16 or no"):
        make_accelerator(tmp_path)


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp8", "mixed_precision fp8"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "megatron_lm"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "parallelism_config"),
    ],
)
def test_plugins_are_refused_by_name_before_an_accelerator_is_made(
    variable, value, name, monkeypatch
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"^{name} of the launcher"), joined_group(1.0):
        pytest.fail("joined")


@pytest.mark.parametrize(
    ("name", "variable"), [("srun", "SLURM_STEP_NUM_TASKS"), ("mpirun", "OMPI_COMM_WORLD_SIZE")]
)
def test_tasks_that_know_nothing_of_each_other_do_not_train(name, variable, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(variable, "4")
    with pytest.raises(ConfigError, match=f"^{name} started 4 tasks"):
        check_tasks()
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_tasks()


def test_the_precision_of_notebook_launcher_is_that_of_the_run(monkeypatch):
    # `joined_group` sets it: monkeypatch removes it afterwards only if it was set before.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    monkeypatch.setenv("FORK_LAUNCHED", "1")
    monkeypatch.setenv("MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match=r"^mixed_precision fp8 .*"), joined_group(1.0):
        pytest.fail("joined")


def test_dropout_draws_the_same_numbers_for_the_same_step_and_slot():
    import torch

    draws = set()
    for step in range(3):
        for slot in range(3):
            seed_micro_batch(0, step, slot)
            first = torch.rand(4)
            seed_micro_batch(0, step, slot)
            assert torch.equal(first, torch.rand(4))
            draws.add(tuple(first.tolist()))
    assert len(draws) == 9


@pytest.mark.slow
def test_products_of_matrices_are_the_same_on_one_thread_as_on_several():
    code = (
        "import torch\n"
        "from pointup.training.distributed.accelerator import fix_order_of_sums\n"
        "fix_order_of_sums()\n"
        "torch.manual_seed(0)\n"
        "for m, k, n in ((1, 6400, 48), (48, 20000, 24)):\n"
        "    a, b = torch.randn(m, k), torch.randn(k, n)\n"
        "    products = []\n"
        "    for threads in (1, 2, 4):\n"
        "        torch.set_num_threads(threads)\n"
        "        products.append(a @ b)\n"
        "    print(all(torch.equal(products[0], other) for other in products[1:]))\n"
    )
    if not torch.backends.mkl.is_available():
        pytest.skip("only MKL has this setting")
    # The environment of the tests sets MKL_CBWR.
    unordered = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**unordered, "OMP_NUM_THREADS": "4"},
    )
    assert ended.stdout == "True\nTrue\n", ended.stdout + ended.stderr


def test_a_tracker_that_is_not_installed_is_an_error_and_nothing_else_is_printed(
    tmp_path, recwarn, monkeypatch
):
    monkeypatch.setattr(accelerator, "get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    for names in (("tensorboard", "swanlab"), ("swanlab",), ("all", "swanlab")):
        with pytest.raises(ConfigError, match=r"^--log-with swanlab: the package is not installed"):
            training.make_accelerator(TrainConfig(output_dir=tmp_path, log_with=names))
    assert not AcceleratorState._shared_state and not recwarn.list
