"""The example of the documentation, on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "distributed_monitor.py"
TOKENS = 16 * 48  # of a rank and step


def test_two_ranks_write_one_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLE), "new/drift.jsonl", "--steps", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()] == ["new/drift.jsonl"]
    text = (tmp_path / "new" / "drift.jsonl").read_text(encoding="utf-8")
    steps = [json.loads(line) for line in text.splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["verdict"] == "PASS", step["reasons"]
        assert step["metrics"]["tokens/compared"] == 2 * TOKENS  # of both ranks, each once
        assert step["metrics"]["sequence/count"] == 32
        assert 0 < step["metrics"]["dlogp/abs_mean"] < 0.02
        assert {token["groups"]["rank"] for token in step["worst"]} == {"0", "1"}
    assert done.stdout.count(" PASS ") == 3
