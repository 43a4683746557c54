"""A comparison in words and in the terminal: what is shown is what was found, and nothing steers it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rl_attn_plugin.replay import (
    AttentionComparisonReport,
)
from rl_attn_plugin.report.comparison import (
    Groups,
    differing,
    equal_bits,
    findings,
    headline,
    keeps,
    reasons,
)
from rl_attn_plugin.report.comparison_html import render_comparison_html
from rl_attn_plugin.report.words import largest, number
from tests.report.layer import NOTHING, broken, hostile, printed


def lines_of(text: str, name: str) -> list[list[str]]:
    """The cells of the rows that begin with a path's name."""
    return [line.split()[1:] for line in text.splitlines() if line.split()[:1] == [name] and "•" not in line]


# words


def test_every_row_is_in_one_group(report: AttentionComparisonReport) -> None:
    groups = Groups.of([report])
    parts = [groups.ways, groups.fp8, groups.rotation, groups.merges, groups.peers]
    assert all(parts) and sum(map(len, parts)) == len(report.drifts)
    assert {row.name for row in groups.merges} == {
        "paged_kv_merge", "transformer_engine_paged_kv", "transformer_engine_paged_kv:te_pairwise",
    }  # fmt: skip
    assert [row.name for row in groups.fp8] == ["fp8_kv_cache"]


def test_the_question_is_answered(report: AttentionComparisonReport) -> None:
    assert headline([report]) == "No: every way that has to give its reference’s bits gives them."
    assert headline([report, report]).endswith(", in all 2 layers.") and reasons([report]) == []
    bound = replace(
        report, drifts=[r for r in report.drifts if not r.check or r.check.expectation == "within"]
    )
    assert headline([bound]).startswith("By rounding only")
    checked = sum(row.check is not None for row in report.drifts)
    assert (
        headline([broken(report)]) == f"Yes: 1 of {checked} rows has lost what it has to keep."
        and len(reasons([report, broken(report)])) == 1
    )
    needed = replace(report, verdict="INCONCLUSIVE", reasons=["it is required"], label="")
    assert headline([report, needed]).startswith("Not known") and reasons([needed]) == ["it is required"]
    for show in (headline, render_comparison_html, lambda none: printed(none, 80)):
        with pytest.raises(ValueError, match="at least one comparison, got none"):
            show([])


def test_findings_name_what_is_kept_and_what_others_do(report: AttentionComparisonReport) -> None:
    equal, within, fp8, peers = findings([report])
    assert "paged_kv," in equal and "decode_replay:prefix_shared" in equal and "merge" not in equal
    assert "paged_kv_merge" in within and "transformer_engine_paged_kv" in within
    cost = report["fp8_kv_cache"]
    assert cost.dlogp is not None
    assert largest(cost.out) in fp8 and number(cost.dlogp.mean_abs) in fp8
    for row in Groups.of([report]).peers:
        assert f"{row.name.removesuffix(':decode')} {largest(row.out)}" in peers
    # of two layers the worse one counts
    assert "paged_kv," not in findings([report, broken(report)])[0]


def test_equal_bits_are_those_of_out_and_lse(report: AttentionComparisonReport) -> None:
    row = report["decode_replay"]
    assert row.lse is not None and equal_bits(row) == "yes" and keeps(row) == "✓ bit-equal"
    assert equal_bits(replace(row, lse=replace(row.lse, bit_equal=False))) == "no"
    assert equal_bits(replace(row, lse=None)) == "yes"
    assert equal_bits(replace(row, out=NOTHING)) == "–" and differing(replace(row, out=NOTHING)) == "–"
    assert keeps(report["fp8_kv_cache"]) == "informs"
    assert keeps(broken(report)["paged_kv"]) == "✗ NOT bit-equal"


# terminal


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_terminal_says_what_was_found(report: AttentionComparisonReport, width: int) -> None:
    text = printed([report], width)
    assert text.index("PASS") < text.index("No: every way") < text.index("schedule v1/") < text.index("path ")
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    assert "dlogp = logp_trainer − logp_rollout" in text and "window" not in text
    for name in ("chunked_prefill", "decode_replay:prefix_shared", "fp8_kv_cache", "plain_rope_attention"):
        row = next(row for row in report.drifts if row.name == name)
        (cells,) = lines_of(text, name)  # its name is on one line, and its numbers beside it
        assert row.dlogp is not None
        shown = [largest(row.out), largest(row.lse), number(row.dlogp.mean_abs), largest(row.dlogp)]
        if width >= 100:
            shown[1:1] = [number(row.out.mean_abs), *differing(row).split()]
        assert cells[: len(shown)] == shown
        assert equal_bits(row) in cells and cells[-len(keeps(row).split()) :] == keeps(row).split()
    merges = lines_of(text, "paged_kv_merge")
    assert [cells[0] for cells in merges] == [
        largest(r.out) for r in report.drifts if r.name == "paged_kv_merge"
    ]
    assert all(
        f"vs {name}" in text for name in ("full_prefill", "unfused_rope_attention", "their own prefill")
    )
    for missing in report.unavailable:
        assert f"{missing.name}: {missing.reason}" in " ".join(text.split())


def test_the_terminal_says_what_is_lost_and_is_not_steered(report: AttentionComparisonReport) -> None:
    for found in (broken(report), hostile(report)):
        text = printed([report, found], 80)
        assert "DRIFT" in text and "has lost what it has to keep." in text and "✗ NOT bit-equal" in text
        assert "∞" in text and max(map(len, text.splitlines())) <= 80
        assert "\x1b[31m" not in text and "\u202e" not in text
        assert "[bold]x[/bold]" in re.sub(r"[\s│]", "", text)


def test_the_terminal_leaves_out_what_is_not_there(report: AttentionComparisonReport) -> None:
    rows = [replace(row, dlogp=None, lse=None) for row in report.drifts]
    text = printed([replace(report, drifts=rows)], 100)
    assert "lse" not in text.split("path", 1)[1] and "dlogp" not in text.split("has to be", 1)[1]
    many = replace(report, verdict="DRIFT", reasons=[f"reason {n}" for n in range(40)])
    assert "and 28 more" in printed([many], 80)
