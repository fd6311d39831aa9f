"""The committed type stubs of the C++ modules are what their bindings say."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["powerinfer.backends.native._kernels", "powerinfer.quantization._quantize"])
def test_the_stub_is_up_to_date(name: str) -> None:
    """To renew it: python -m nanobind.stubgen -m NAME -o FILE"""
    stubgen = pytest.importorskip("nanobind.stubgen")
    module = importlib.import_module(name)
    generator = stubgen.StubGen(module)
    generator.put(module)
    stub = Path(__file__).parent.parent / f"{name.replace('.', '/')}.pyi"
    assert generator.get() == stub.read_text()
