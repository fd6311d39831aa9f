"""The Triton kernels: their results in Triton's interpreter, and that they compile for GPUs. None is needed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("no package triton", allow_module_level=True)

TESTS = Path(__file__).parent


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=TESTS,  # Python looks for packages where it is started, and a checkout has none that are compiled
        env=os.environ | {"PYTHONPATH": path} | environment,
        timeout=600,
    )


def test_results_in_the_interpreter() -> None:
    """In a process of its own, as the interpreter is chosen when Triton is imported."""
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "triton_interpreted.py", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """With loads of 16 bytes, without spilling registers, within the shared memory of a 4090 (99 KB)."""
    done = run("triton_compiled.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 5
    for name, wide_loads, spills, shared in lines:
        assert int(wide_loads) > 0, name
        assert int(spills) == 0, name
        assert int(shared) < 99 * 1024, name


def test_triton_is_imported_only_where_it_is_used() -> None:
    code = (
        "import sys, powerinfer.backends.torch as t; from powerinfer.backends import BackendOptions;"
        "t.TorchBackend(BackendOptions()); print('powerinfer.backends.torch.triton_kernels' in sys.modules)"
    )
    done = run("-c", code)
    assert done.stdout.split() == ["False"], done.stderr
