"""Statistics against numpy's own, the telescoping, the verdicts, and a report that survives JSON."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_attn_plugin.drift import DriftReport, Thresholds, drift_stats, policy_stats, summarize
from rl_attn_plugin.drift.stats import difference, invalid_counts
from tests.drift.factory import token_table

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(finite, min_size=1, max_size=200))
def test_stats_equal_numpys(values: list[float]) -> None:
    d = np.array(values)
    s = drift_stats(d)
    assert s.active_count == len(values) and s.bit_equal == sum(v == 0 for v in values)
    for q, got in ((50, s.p50_abs), (95, s.p95_abs), (99, s.p99_abs), (99.9, s.p999_abs), (100, s.max_abs)):
        assert got == pytest.approx(np.percentile(np.abs(d), q), rel=1e-12, abs=1e-12)
    assert s.mean == pytest.approx(np.mean(d)) and s.rms == pytest.approx(np.sqrt(np.mean(d**2)))


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=100))
def test_policy_stats_by_their_formulas(pairs: list[tuple[float, float]]) -> None:
    trainer, rollout = (np.array(side) for side in zip(*pairs, strict=True))
    p = policy_stats(trainer, rollout)
    ratio = np.exp(trainer - rollout)
    assert p.kl_k1 == pytest.approx(np.mean(rollout - trainer), abs=1e-12)
    assert p.kl_k2 == pytest.approx(np.mean((trainer - rollout) ** 2) / 2)
    assert p.kl_k3 is not None and p.kl_k3 >= 0
    assert p.kl_k3 == pytest.approx(np.mean(ratio - 1 - (trainer - rollout)), rel=1e-6, abs=1e-9)
    assert p.ess == pytest.approx(ratio.sum() ** 2 / (len(pairs) * (ratio**2).sum()))
    assert p.ratio_max == pytest.approx(ratio.max())
    assert p.prob_max_abs == pytest.approx(np.abs(np.exp(trainer) - np.exp(rollout)).max())


def test_quantiles_above_two_to_the_24() -> None:
    size = 2**24 + 3
    assert drift_stats(np.arange(size, dtype=np.float64)).p99_abs == pytest.approx(0.99 * (size - 1))


def test_infinities() -> None:
    inf = np.inf
    assert difference(np.array([-inf, -inf, 0.0]), np.array([-inf, 0.0, -inf])).tolist() == [0.0, -inf, inf]
    with pytest.raises(ValueError, match="differences must be finite, got 2"):
        drift_stats(np.array([np.nan, -inf, 1.0]))
    found = invalid_counts(np.array([np.nan, -inf, 0.5, -1.0]), np.array([-1.0, -1.0, -1.0, -1.0]))
    assert found == {"trainer_nan": 1, "trainer_inf": 1, "trainer_positive": 1}


def test_nothing_is_none_and_not_zero() -> None:
    s = drift_stats(np.zeros(0))
    assert s.active_count == 0 and s.mean_abs is None and s.max_abs is None


def judged(table: pa.Table, **options: object) -> DriftReport:
    arguments = {"arm_under_test": "plugin", "thresholds": Thresholds(), "min_tokens": 200, **options}
    return summarize(table, **arguments)  # type: ignore[arg-type]


def test_clean_run_passes_and_steps_telescope() -> None:
    table = token_table()
    report = judged(table)
    assert report.verdict == "PASS", report.reasons
    arm = report.arms["plugin"]
    total = sum(step.mean or 0.0 for step in arm.steps.values())
    assert total == pytest.approx(arm.paths["recorded"].dlogp.mean, abs=1e-15)
    for token in report.worst:
        assert sum(token.steps.values()) == pytest.approx(token.dlogp, abs=1e-15)
    share = sum(value or 0.0 for value in arm.step_share.values())
    assert share == pytest.approx(1.0)
    whole = report.attention["full_minus_recorded"]
    assert whole.share is not None and 0.2 < whole.share < 0.8
    assert whole.share_low is not None and whole.share_high is not None
    assert whole.share_low < whole.share < whole.share_high
    assert sum(arm.histogram.counts) == 360 and sum(b.count for b in arm.by_position) == 360


def test_numbers_equal_a_plain_recomputation() -> None:
    table = token_table(seed=3)
    report = judged(table)
    for arm in ("native", "plugin"):
        for path in ("recorded", "chunked_prefill", "decode_replay"):
            rows = table.filter((pc.field("arm") == arm) & (pc.field("path") == path))
            d = rows["dlogp"].to_numpy()
            stats = report.arms[arm].paths[path].dlogp
            assert stats.mean_abs == pytest.approx(np.abs(d).mean())
            assert stats.p99_abs == pytest.approx(np.percentile(np.abs(d), 99))
            assert stats.bit_equal == (d == 0).sum()


def test_worst_tokens_have_their_context() -> None:
    table = token_table(samples=2, tokens=30)
    report = judged(table)
    first = report.worst[0]
    rows = table.filter(
        (pc.field("arm") == "plugin")
        & (pc.field("path") == "recorded")
        & (pc.field("sample") == first.sample)
    )
    text = "".join(rows["text"].to_pylist())
    assert first.before + first.text + first.after in text
    assert abs(first.dlogp) == pytest.approx(report.arms["plugin"].paths["recorded"].dlogp.max_abs)
    assert [abs(t.dlogp) for t in report.worst] == sorted((abs(t.dlogp) for t in report.worst), reverse=True)


def test_planted_drift_is_found() -> None:
    report = judged(token_table(shift=-0.2))
    assert report.verdict == "DRIFT"
    assert any("mean |dlogp|" in reason for reason in report.reasons)
    owner = max(report.arms["plugin"].step_share.items(), key=lambda item: item[1] or 0.0)[0]
    assert owner == "full_minus_chunked"


def test_drift_of_another_arm_informs_only() -> None:
    assert judged(token_table(native_noise=0.5)).verdict == "PASS"


def test_too_few_tokens_are_inconclusive() -> None:
    report = judged(token_table(samples=1, tokens=50))
    assert report.verdict == "INCONCLUSIVE" and report.reasons == ["only 50 tokens compared, 200 needed"]
    empty = judged(token_table().slice(0, 0))
    assert empty.verdict == "INCONCLUSIVE" and empty.reasons == ["only 0 tokens compared, 200 needed"]


def test_a_missing_path_is_invalid() -> None:
    table = token_table().filter(~((pc.field("arm") == "native") & (pc.field("path") == "decode_replay")))
    report = judged(table)
    assert report.verdict == "INVALID"
    assert report.reasons == ["arm native has no tokens of path decode_replay"]
    missing = judged(token_table().filter(pc.field("arm") == "native"))
    assert missing.reasons == ["the run holds no tokens of arm plugin"]


def test_lost_or_foreign_rows_are_invalid() -> None:
    table = token_table()
    replay = (pc.field("path") == "decode_replay") & (pc.field("position") == 20)
    report = judged(table.filter(~replay))
    assert report.verdict == "INVALID"
    assert "arm plugin: path decode_replay does not hold the recorded tokens" in report.reasons


@pytest.mark.parametrize("value", [np.nan, -np.inf, 0.5])
def test_invalid_values_are_named_and_never_averaged(value: float) -> None:
    table = token_table()
    rollout = table["logp_rollout"].to_numpy().copy()
    at = int(
        np.flatnonzero((table["arm"].to_numpy() == "plugin") & (table["path"].to_numpy() == "recorded"))[7]
    )
    rollout[at] = value
    index = table.schema.get_field_index("logp_rollout")
    report = judged(table.set_column(index, "logp_rollout", pa.array(rollout, pa.float32())))
    assert report.verdict == "INVALID"
    assert sum(report.invalid.values()) == 1
    stats = report.arms["plugin"].paths["recorded"].dlogp
    assert stats.active_count == 359 and stats.max_abs is not None and stats.max_abs < 1


def test_report_survives_json() -> None:
    report = judged(token_table(shift=-800.0))  # ratios underflow to 0
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert DriftReport.from_dict(json.loads(text)) == report
    with pytest.raises(ValueError, match="must have schema 'rl-attn/drift/1', got 'other'"):
        DriftReport.from_dict({"schema": "other"})


def test_thresholds_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="threshold kl_k3 must be at least 0, got -1"):
        Thresholds(kl_k3=-1)
