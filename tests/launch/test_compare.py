"""``rl-attn compare``: files, exit status, and every bad input with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_attn_plugin import cli
from rl_attn_plugin.replay import AttentionComparisonReport, synthetic_inputs
from rl_attn_plugin.replay.captures import save_captures
from tests.replay.te_wheels import installed, without_te

SMALL = ["--length", "40", "--head-dim", "32", "--vocab", "64"]


def test_it_passes_and_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *SMALL, "--out", str(tmp_path / "a" / "b")]) == 0
    content = json.loads((tmp_path / "a" / "b" / "comparison.json").read_text())
    (report,) = [AttentionComparisonReport.from_dict(found) for found in content["reports"]]
    assert report.verdict == "PASS" and report["decode_replay"].out.bit_equal
    assert report.shapes["head_dim"] == 32 and report.provenance["versions"]["torch"]
    assert "<h1>PASS</h1>" in (tmp_path / "a" / "b" / "comparison.html").read_text()
    assert "report:" in capsys.readouterr().out


def test_captured_inputs_and_the_required_oracle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_captures(tmp_path / "captured", {"layer-00": synthetic_inputs(length=30, rope=False, vocab=0)}, {})
    command = [
        "compare",
        str(tmp_path / "captured"),
        "--out",
        str(tmp_path / "out"),
        "--require-te",
        "--no-peers",
    ]
    with without_te():
        assert cli.main(command) == 3
    assert "layer-00" in capsys.readouterr().out
    with installed("2.19.0"):
        assert cli.main(command) == 0
    names = {
        row["name"]
        for row in json.loads((tmp_path / "out" / "comparison.json").read_text())["reports"][0]["drifts"]
    }
    assert "transformer_engine_paged_kv" in names and not any(name.endswith(":decode") for name in names)


def test_shapes_of_captured_inputs_are_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_captures(tmp_path / "captured", {"layer-00": synthetic_inputs(length=30, rope=False, vocab=0)}, {})
    command = ["compare", str(tmp_path / "captured"), "--out", str(tmp_path / "out"), "--no-peers"]
    assert cli.main([*command, "--length", "40", "--kv-heads", "1"]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "captured inputs have shapes of their own, got --length 40 --kv-heads 1: leave them out" in error
    assert not (tmp_path / "out").exists()
    assert cli.main([*command, "--seed", "3"]) == 0


def test_a_page_that_cannot_be_made_loses_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template is taken away: a fault of the page alone."""
    from rl_attn_plugin.report import page

    monkeypatch.setattr(page, "_TEMPLATES", tmp_path)
    with pytest.raises(Exception, match=r"comparison\.js"):
        cli.main(["compare", *SMALL, "--no-peers", "--out", str(tmp_path / "out")])
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert AttentionComparisonReport.from_dict(content["reports"][0]).verdict == "PASS"
    assert not (tmp_path / "out" / "comparison.html").exists()


def test_drift_exits_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_attn_plugin.replay import paths

    whole = paths.chunked_prefill

    def broken(r: paths.Replay) -> object:
        found = whole(r)
        found.out[0] += 1
        return found

    monkeypatch.setattr(paths, "chunked_prefill", broken)
    assert cli.main(["compare", *SMALL, "--out", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--length", "0"], "--length must be at least 1, got 0"),
        (["--vocab", "-1"], "--vocab must be at least 0, got -1"),
        (["--kv-page-size", "0"], "--kv-page-size must be 1 to 65536, got 0"),
        (["--kv-page-size", "1000000000000"], "--kv-page-size must be 1 to 65536, got 1000000000000"),
        (["--seed", "99999999999999999999"], "--seed must be in [0, 2**63), got 99999999999999999999"),
        (["--seed", "-1"], "--seed must be in [0, 2**63), got -1"),
        (["--length", "10000000000"], "not enough memory for these inputs"),
        (["--tokens-per-step", "0"], "--tokens-per-step must be at least 1, got 0"),
        (["--heads", "3"], "query heads must be a multiple of key/value heads, got 3 and 2"),
        (["--head-dim", "300"], "head dim D must be 1 to 256, got 300"),
        (["--impl", "sideways"], "sideways"),
        (["/nonexistent/captured"], "/nonexistent/captured holds no captured inputs"),
        (["--device", "cuda"], "torch finds no usable CUDA device"),
        (["--impl", "triton", "--device", "cpu"], "impl='triton' cannot be used here"),
    ],
)
def test_bad_input_exits_1_and_says_what(
    more: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["compare", "--out", str(tmp_path / "out"), *more]) == 1
    said = capsys.readouterr()
    assert message in " ".join((said.out + said.err).split())
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["compare", *SMALL, "--out", str(tmp_path / "file" / "out")]) == 1
    assert "cannot be written" in capsys.readouterr().err
