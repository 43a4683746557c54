"""Every path on real kernels and on the reference: what must be equal is, what is broken is seen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_attn_plugin import flash_attention
from rl_attn_plugin.reference import attention_reference
from rl_attn_plugin.replay import (
    AttentionComparisonInputs,
    AttentionComparisonReport,
    DecodeOptions,
    compare_attention,
    compare_decode_replay,
    compare_single_gpu_attention,
    compare_single_gpu_rope_attention,
    paths,
    synthetic_inputs,
)
from rl_attn_plugin.replay.compare import _Rows
from tests.replay.te_wheels import installed, without_te

PROMISED = ("chunked_prefill", "paged_kv", "decode_replay", "decode_replay:prefix_shared")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (13, -1)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "scale": {"scale": 0.2},
    "left-padding": {"key_padding_mask": torch.arange(70)[None] >= torch.tensor([[0], [31]])},
    "right-padding": {"key_padding_mask": torch.arange(70)[None] < torch.tensor([[70], [23]])},
    "everything": {
        "window": (20, -1), "softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "key_padding_mask": torch.arange(70)[None] >= torch.tensor([[5], [40]]),
    },
}  # fmt: skip


def inputs_with(name: str, dtype: torch.dtype = torch.bfloat16) -> AttentionComparisonInputs:
    return replace(synthetic_inputs(length=70, head_dim=32, vocab=64, dtype=dtype), **OPTIONS[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", OPTIONS)
def test_promised_paths_are_bit_equal(name: str, dtype: torch.dtype) -> None:
    report = compare_attention(
        inputs_with(name, dtype),
        query_chunk_size=19,
        kv_page_size=7,
        include_transformer_engine=False,
        impl="torch",
    )
    assert report.verdict == "PASS", report.reasons
    for path in (*PROMISED, "fused_rope_attention"):
        row = report[path]
        assert row.out.bit_equal and row.lse is not None and row.lse.bit_equal and row.check is not None
        assert row.dlogp is not None and row.dlogp.bit_equal
    merged = report["paged_kv_merge"]
    assert not merged.out.bit_equal or dtype == torch.bfloat16
    assert merged.lse is not None and merged.lse.max_abs is not None and merged.lse.max_abs < 1e-4


@pytest.mark.parametrize("name", OPTIONS)
def test_the_reference_agrees_with_itself(name: str) -> None:
    inputs = inputs_with(name, torch.float32)
    report = compare_attention(inputs, query_chunk_size=19, kv_page_size=7, impl="reference")
    assert report.verdict == "PASS", report.reasons
    for path in PROMISED:
        check = report[path].check
        assert check is not None and check.expectation == "within"
    assert report["chunked_prefill"].provenance.actual_backend == "reference"
    assert report["chunked_prefill"].provenance.schedule_id is None


@pytest.mark.parametrize("name", ["left-padding", "right-padding"])
def test_masks_against_the_padded_keys_removed(name: str) -> None:
    """Full prefill of a masked batch is each sequence alone, without its padding."""
    inputs = replace(inputs_with(name, torch.float32), rope_positions=None)
    rows = _Rows(inputs, "torch", None, None, 0, None)
    mask = inputs.key_padding_mask
    assert mask is not None and rows.full.lse is not None
    begin = 0
    for b, kept in enumerate(mask):
        end = begin + int(kept.sum())
        q, k, v = (x[b, kept] for x in (inputs.q, inputs.k, inputs.v))
        out, lse = attention_reference(q, k, v)
        torch.testing.assert_close(rows.full.out[begin:end].double(), out, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(rows.full.lse[:, begin:end].double(), lse, atol=2e-6, rtol=1e-5)
        begin = end
    assert begin == rows.full.out.shape[0] == int(mask.sum())


def test_full_prefill_is_the_public_function() -> None:
    inputs = replace(synthetic_inputs(length=40), rope_positions=None)
    rows = _Rows(inputs, "torch", None, None, 0, None)
    assert torch.equal(rows.full.out, flash_attention(inputs.q, inputs.k, inputs.v).out.flatten(0, 1))


def test_dlogp_is_the_readout_of_the_outputs() -> None:
    active = torch.zeros(2, 70, dtype=torch.bool)
    active[0, 10:20] = True
    inputs = replace(inputs_with("plain"), active_token_mask=active)
    rows = _Rows(inputs, "torch", None, 16, 0, None)
    row = rows.add(paths.paged_kv(rows.replay, float8=True), 0.0)
    other = paths.paged_kv(rows.replay, float8=True)

    def logps(out: Tensor) -> Tensor:
        assert inputs.lm_head_weight is not None and inputs.target_ids is not None
        logits = out.unflatten(0, (2, 70)).flatten(2).double() @ inputs.lm_head_weight.double().t()
        return logits.log_softmax(-1).gather(-1, inputs.target_ids[..., None])[..., 0]

    d = (logps(rows.full.out) - logps(other.out))[active]
    assert row.dlogp is not None and row.dlogp.active_count == 10
    assert row.dlogp.mean == pytest.approx(float(d.mean()), abs=1e-5)
    assert row.dlogp.max_abs == pytest.approx(float(d.abs().max()), abs=1e-5)


@pytest.mark.parametrize("broken", ["chunked_prefill", "paged_kv"])
def test_a_broken_path_is_drift(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = getattr(paths, broken)

    def off_by_a_bit(r: Any, **more: Any) -> Any:
        found = whole(r, **more)
        found.lse[1, 7] += 1e-6 if found.lse[1, 7].abs() < 1 else 1e-5
        return found

    monkeypatch.setattr(paths, broken, off_by_a_bit)
    report = compare_attention(inputs_with("plain"), impl="torch", include_peers=False)
    assert report.verdict == "DRIFT"
    assert any(reason.startswith(f"{broken}: lse differs in 1 of 560") for reason in report.reasons), (
        report.reasons
    )


def test_wrong_merge_arithmetic_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    right = paths.merge_attention

    def wrong(outs: Tensor, lses: Tensor, **more: Any) -> Any:
        return right(outs, lses * (1 + 3e-4), **more)

    monkeypatch.setattr(paths, "merge_attention", wrong)
    report = compare_single_gpu_attention(inputs_with("plain"), impl="torch")
    assert report.verdict == "DRIFT" and any("paged_kv_merge" in reason for reason in report.reasons)


@pytest.mark.parametrize(("version", "modes"), [("2.19.0", 2), ("2.2.0", 2), ("2.20.2", 1)])
def test_transformer_engine_merges_the_same_partials(version: str, modes: int) -> None:
    inputs = inputs_with("sinks", torch.float32)
    with installed(version):
        report = compare_single_gpu_attention(
            inputs, kv_page_size=9, include_transformer_engine=True, impl="torch"
        )
    assert report.verdict == "PASS", report.reasons
    found = [d for d in report.drifts if d.name.startswith("transformer_engine_paged_kv")]
    assert len({d.name for d in found}) == modes
    for row in found:
        assert row.check is not None and row.check.passed
        assert row.provenance.te is not None and row.provenance.te["te_version"] == version
        assert row.provenance.te["te_numeric_selftest"] == "passed"
        assert row.provenance.merge_backend == "transformer_engine"
    exact = {d.name: d for d in report.drifts if d.reference_name == "fp64_merge"}
    ours, theirs = exact["paged_kv_merge"], exact["transformer_engine_paged_kv"]
    assert ours.out.mean_abs is not None and theirs.out.mean_abs is not None
    assert ours.out.mean_abs <= theirs.out.mean_abs


def test_without_transformer_engine() -> None:
    inputs = synthetic_inputs(length=40)
    with without_te():
        report = compare_attention(inputs, impl="torch")
        assert report.verdict == "PASS"
        (row,) = [u for u in report.unavailable if u.name == "transformer_engine_paged_kv"]
        assert "not installed" in row.reason and row.te is not None and row.te["te_available"] is False
        with pytest.raises(KeyError, match="not installed"):
            report["transformer_engine_paged_kv"]
        required = compare_attention(inputs, impl="torch", require_transformer_engine=True)
    assert required.verdict == "INCONCLUSIVE" and "is required" in required.reasons[0]


def test_peers_are_held_against_themselves() -> None:
    report = compare_attention(inputs_with("plain"), impl="torch", include_transformer_engine=False)
    row = report["torch-flash:decode"]
    assert row.reference_name == "torch-flash:prefill" and row.check is None and row.lse is None
    rows = row.provenance.rows
    assert rows is not None and len(rows) == 32 and rows[0] == 16 and rows[-1] == 69
    assert row.out.active_count == 2 * 32 * 4 * 32
    assert 0 < (row.out.max_abs or 0) < 0.1  # its real drift: rounding, not another function
    refused = compare_attention(inputs_with("sinks"), impl="torch", include_transformer_engine=False)
    (why,) = [u.reason for u in refused.unavailable if u.name == "torch-flash:decode"]
    assert why == "torch-flash is compared without sinks"


def test_float8_costs_what_e4m3_costs() -> None:
    row = compare_single_gpu_attention(inputs_with("plain"), impl="torch")["fp8_kv_cache"]
    # e4m3 keeps 3 bits after the leading one: a relative step of 2^-3, half of it at most rounded away
    assert row.out.max_abs is not None and 1e-3 < row.out.max_abs < 1.0
    assert row.check is None and row.provenance.kv_dtype is not None


def test_decode_of_several_tokens_and_given_pages() -> None:
    inputs = inputs_with("right-padding")
    table = torch.randperm(30)[:18].view(2, 9).int()
    for step in (1, 3):
        for prefix in (0, 20):
            report = compare_decode_replay(
                inputs,
                kv_page_size=8,
                tokens_per_step=step,
                prefix_length=prefix,
                block_table=table,
                impl="torch",
            )
            assert report.verdict == "PASS", report.reasons
            assert (len(report.drifts) == 2) == (prefix > 0)
    assert report["decode_replay:prefix_shared"].provenance.prefix_length == 16


def test_fewer_queries_than_keys() -> None:
    whole = synthetic_inputs(length=50, rope=False, vocab=0)
    last = replace(whole, q=whole.q[:, 30:])
    report = compare_attention(
        last, query_chunk_size=7, kv_page_size=16, impl="torch", include_transformer_engine=False
    )
    assert report.verdict == "PASS", report.reasons
    assert report["chunked_prefill"].out.bit_equal and report["paged_kv"].out.bit_equal
    assert {u.name for u in report.unavailable} >= {"decode_replay", "torch-flash:decode"}
    exact = [d for d in report.drifts if d.name == "paged_kv_merge"]
    assert exact[0].lse is not None and (exact[0].lse.max_abs or 0) < 1e-5  # partials see the right keys


def test_attention_that_is_not_causal() -> None:
    report = compare_attention(
        replace(inputs_with("plain"), causal=False), impl="torch", include_transformer_engine=False
    )
    assert report.verdict == "PASS" and report["chunked_prefill"].out.bit_equal
    assert "cannot see what comes after" in next(
        u.reason for u in report.unavailable if u.name == "decode_replay"
    )
    windowed = replace(inputs_with("plain"), causal=False, window=(5, 5))
    report = compare_attention(windowed, impl="torch", include_transformer_engine=False)
    assert "no place on the diagonal" in next(
        u.reason for u in report.unavailable if u.name == "chunked_prefill"
    )


def test_rotation_inside_and_outside() -> None:
    for changes in (
        {},
        {"rope_rotary_dim": 12},
        {"rope_theta": 1e6, "rope_positions": torch.arange(140).view(2, 70) % 97},
    ):
        inputs = replace(inputs_with("left-padding"), **changes)
        report = compare_single_gpu_rope_attention(inputs, impl="torch")
        assert report.reference_name == "unfused_rope_attention" and report.verdict == "PASS"
        fused, plain = report["fused_rope_attention"], report["plain_rope_attention"]
        assert fused.out.bit_equal and fused.provenance.q_rope_state == "pre_rope"
        assert (
            fused.provenance.rope is not None
            and fused.provenance.rope["fusion_boundary"] == "one shared code path"
        )
        assert plain.q is not None and plain.k is not None
        # one rounding to bf16 of numbers below 8, at most one step apart
        assert (plain.q.max_abs or 0) <= 2**-5 and (plain.k.max_abs or 0) <= 2**-5
        assert plain.q.differing_count < plain.q.active_count / 100


def test_another_rotation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_attn_plugin.replay import compare

    right = compare.rope_of
    calls: list[int] = []

    def later(inputs: AttentionComparisonInputs, positions: Tensor) -> Any:
        calls.append(1)
        return (
            right(inputs, positions)
            if len(calls) == 1
            else replace(right(inputs, positions), interleaved=True)
        )

    monkeypatch.setattr(compare, "rope_of", later)
    report = compare_single_gpu_rope_attention(inputs_with("plain"), impl="torch")
    assert report.verdict == "DRIFT"


def test_the_report_survives_json() -> None:
    with installed("2.19.0"):
        report = compare_attention(inputs_with("everything"), kv_page_size=16, impl="torch", label="a <b>")
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert AttentionComparisonReport.from_dict(json.loads(text)) == report
    with pytest.raises(ValueError, match="must have schema 'rl-attn/comparison/1', got 'x'"):
        AttentionComparisonReport.from_dict({**report.to_dict(), "schema": "x"})
    how = report["paged_kv_merge"].provenance
    assert how.kv_page_bounds is not None and how.kv_page_bounds[0] == [
        -1,
        -1,
    ]  # the sink is a state of its own
    assert how.merge_order == "global_block_index" and how.downcast_at == "after_merge"
    chunks = report["chunked_prefill"].provenance.chunk_bounds
    assert chunks is not None and chunks[0][0] == 0 and chunks[-1][1] == 65


def test_too_many_partials_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_PARTIALS_BYTES", 1 << 20)
    report = compare_single_gpu_attention(
        synthetic_inputs(length=200), kv_page_size=1, include_transformer_engine=True, impl="torch"
    )
    reasons = {u.name: u.reason for u in report.unavailable}
    assert "give a larger kv_page_size than 1" in reasons["paged_kv_merge"]
    assert "no partials to merge" in reasons["transformer_engine_paged_kv"]


def test_progress_names_every_path() -> None:
    seen: list[str] = []
    report = compare_attention(
        inputs_with("plain"), impl="torch", include_transformer_engine=False, on_path=seen.append,
        decode=DecodeOptions(tokens_per_step=4),
    )  # fmt: skip
    assert seen[0] == "full_prefill"
    assert {d.name.split(":prefix")[0] for d in report.drifts} <= set(seen)
