"""All kernels compile for sm_90 (H100, H200), A100 and B200, without a GPU."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter doesn't compile", allow_module_level=True)

FLOATS = ("fp32", pytest.param("fp64", marks=pytest.mark.slow))
# A100, H100 and H200, B200.
ARCHITECTURES = (80, 90, 100)
OTHERS_SLOW = [
    pytest.param(number, marks=pytest.mark.slow if number != 90 else ()) for number in ARCHITECTURES
]


def compile_kernel(
    name: str,
    floats: str,
    types: dict[str, str],
    constants: dict[str, int],
    architecture: int = 90,
    **options: Any,
) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, kernel = name.split(".")
    function = getattr(importlib.import_module(f"pointup.geometry.kernels.{module}"), kernel)
    signature = dict.fromkeys(function.arg_names, f"*{floats}")
    signature |= types | dict.fromkeys(constants, "constexpr")
    assert list(signature) == function.arg_names
    source = ASTSource(function, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def spilled_bytes(compiled: Any, tmp_path: Path) -> int:
    """Bytes per thread that spill from registers."""
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    report = subprocess.run(
        [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    )
    found = re.search(r"STACK:(\d+)", report.stdout)
    assert found, report.stdout
    return int(found[1])


@pytest.fixture(autouse=True)
def compiled_anew(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


CURVE = {"BLOCK": 1024}
TILES = {"TILE": 32, "TILES_PER_PROGRAM": 16}


@pytest.mark.parametrize("floats", FLOATS)
def test_the_order_along_the_curve_compiles(floats):
    counts = {"num_points": "i32"}
    compile_kernel("knn.cloud_boxes_kernel", floats, {"ptr": "*i64"} | counts, CURVE)
    arrays = {"cloud": "*i64", "code": "*i64"}
    compile_kernel("knn.curve_kernel", floats, arrays | counts, CURVE)
    compile_kernel("knn.tile_boxes_kernel", floats, {"num_tiles": "i32"} | counts, TILES)


# float64 takes much longer to compile. From 128 neighbours on registers spill.
@pytest.mark.parametrize(
    ("floats", "k", "num_bytes", "architecture"),
    [
        ("fp64", 2, 0, 90),
        ("fp32", 16, 64, 90),
        pytest.param("fp32", 16, 64, 80, marks=pytest.mark.slow),
        pytest.param("fp32", 16, 64, 100, marks=pytest.mark.slow),
        pytest.param("fp32", 64, 0, 90, marks=pytest.mark.slow),
        pytest.param("fp32", 128, 1024, 90, marks=pytest.mark.slow),
    ],
)
def test_knn_compiles(floats, k, num_bytes, architecture, tmp_path):
    from pointup.geometry.kernels import knn

    pointers = ("query_order", "query_cloud", "home", "order", "ptr", "found_index")
    counts = ("num_queries", "num_points", "num_tiles", "k")
    compiled = compile_kernel(
        "knn.knn_kernel",
        floats,
        dict.fromkeys(pointers, "*i64") | dict.fromkeys(counts, "i32"),
        {
            "K": k,
            "BLOCK_Q": knn.BLOCK_Q,
            "TILE": knn.TILE,
            "CHUNK": knn.CHUNK,
            "OWN_FIRST": True,
        },
        architecture,
        num_warps=knn.NUM_WARPS,
    )
    # A few outside the inner loop, as in some versions of triton.
    assert floats == "fp64" or spilled_bytes(compiled, tmp_path) <= num_bytes
    # One query per thread: no tensor of pairs is spread across the threads of a warp.
    layouts = set(re.findall(r"#ttg.blocked<{sizePerThread = \[\d+, .*?}>", compiled.asm["ttgir"]))
    assert all("threadsPerWarp = [1, 32]" in layout for layout in layouts), layouts


@pytest.mark.parametrize("architecture", OTHERS_SLOW)
def test_insertion_radii_compile(architecture, tmp_path):
    from pointup.geometry.kernels import insertion
    from pointup.geometry.thinning import NUM_NEIGHBORS

    compiled = compile_kernel(
        "insertion.insertion_kernel",
        "fp32",
        {
            "neighbor": "*i32",
            "parent": "*i32",
            "state": "*i32",
            "left_before": "*i32",
            "left_after": "*i32",
            "num_points": "i32",
            "num_before": "i32",
            "patience": "i32",
        },
        {
            "K": NUM_NEIGHBORS,
            "BLOCK": insertion.BLOCK,
            "PASSES": insertion.PASSES,
        },
        architecture,
        num_warps=insertion.NUM_WARPS,
    )
    assert spilled_bytes(compiled, tmp_path) == 0
    # Values that other programs write meanwhile are read from memory, not from a cache.
    assert len(re.findall(r"ld\.volatile", compiled.asm["ptx"])) > 0
    # One barrier of the kernel, before threads read what others have written.
    assert len(re.findall(r"\bbarrier\b", compiled.asm["ttir"])) == 1
    # Else warps of a program could read different states, and take different branches.
    assert insertion.NUM_WARPS == 1
