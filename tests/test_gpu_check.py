"""The script that checks a GPU runs against the stand-in for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_all_checks_pass_where_the_cpu_stands_in(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--device", "torch-cpu", "-o", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # threads that wait for each other are slow on a busy machine
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    report = json.loads(output.read_text())
    assert report["ok"] is True
    assert [row["share"] for row in report["budgets"]] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert all(row["tokens_as_on_the_cpu"] for row in report["budgets"])
    assert all(row["planned_tensors"] == row["allocated_tensors"] > 0 for row in report["budgets"])
    hot = [row["hot"] for row in report["budgets"]]
    assert hot == sorted(hot)
    assert all(len(row["layer_seconds"]["feed_forward"]) == 4 for row in report["budgets"])
