"""The committed type stub of the C++ module is what its bindings say."""

from __future__ import annotations

from pathlib import Path

import pytest

from powerinfer.backends.native import _kernels


def test_the_stub_is_up_to_date() -> None:
    """To renew it: python -m nanobind.stubgen -m powerinfer.backends.native._kernels -o FILE"""
    stubgen = pytest.importorskip("nanobind.stubgen")
    generator = stubgen.StubGen(_kernels)
    generator.put(_kernels)
    stub = Path(__file__).parent.parent / "powerinfer/backends/native/_kernels.pyi"
    assert generator.get() == stub.read_text()
