"""The parts that a report is made of, each against a plain recomputation or a law it must obey."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rl_attn_plugin.drift import PATHS, STEPS, TOTAL, DriftReport, Thresholds, summarize
from rl_attn_plugin.drift.curves import by_position, by_probability, histogram, histogram_reach
from rl_attn_plugin.drift.telescope import contrast
from tests.drift.factory import token_table

d_values = arrays(np.float64, st.integers(1, 60), elements=st.floats(-5, 5, allow_subnormal=False))


def judged(table: pa.Table, **thresholds: float) -> DriftReport:
    return summarize(table, arm_under_test="plugin", thresholds=Thresholds(**thresholds), min_tokens=20)


def edited(table: pa.Table, column: str, rows: np.ndarray, value: object) -> pa.Table:
    values = table[column].to_pylist()
    for row in np.flatnonzero(rows):
        values[row] = value
    at = table.schema.get_field_index(column)
    return table.set_column(at, column, pa.array(values, table.schema.field(column).type))


@given(d_values)
def test_histogram_counts_every_token_once(d: np.ndarray) -> None:
    reach = histogram_reach(d)
    made = histogram(d, reach)
    assert sum(made.counts) == d.size and made.zeros == (d == 0).sum()
    assert made.edges == pytest.approx([-edge for edge in reversed(made.edges)])
    assert made.beyond == (np.abs(d) > made.edges[-1]).sum()
    middle = len(made.counts) // 2
    assert made.edges[middle] < 0 < made.edges[middle + 1]


def test_a_lone_outlier_does_not_widen_the_histogram() -> None:
    d = np.append(np.linspace(-0.01, 0.01, 500), 4.0)
    assert histogram_reach(d) < 0.1
    assert histogram(d, histogram_reach(d)).beyond == 1
    assert histogram_reach(np.append(np.zeros(500), 4.0)) == 4.0  # all others at 0: show where it lies


@given(d_values, st.integers(1, 7))
def test_bins_by_position_hold_every_token_once(d: np.ndarray, bins: int) -> None:
    offset = np.arange(d.size) // 2
    found = by_position(d, offset, bins)
    assert len(found) <= bins and sum(b.count for b in found) == d.size
    for b in found:
        here = [abs(v) for v, o in zip(d, offset, strict=True) if b.first <= o <= b.last]
        assert (b.count, b.max_abs) == (len(here), max(here))
        assert b.mean_abs == pytest.approx(sum(here) / len(here))


@given(d_values, st.data())
def test_bins_by_probability_hold_every_token_once(d: np.ndarray, data: st.DataObject) -> None:
    logp = data.draw(arrays(np.float64, d.size, elements=st.floats(-40, 0)))
    found = by_probability(d, logp)
    assert sum(b.count for b in found) == d.size
    for b in found:
        assert b.max_abs == max(
            abs(v)
            for v, p in zip(d, np.exp(logp), strict=True)
            if b.low <= p and (p < b.high or p == b.high == 1)
        )


@given(d_values.filter(lambda d: bool(np.abs(d).max() > 1e-3)), st.floats(0, 3))
def test_contrast_of_scaled_arms_is_the_scale(native: np.ndarray, scale: float) -> None:
    sample = np.arange(native.size) % 4
    found = contrast(native, -scale * native, sample)
    assert found.share == pytest.approx(1 - scale, abs=1e-9)
    if native.size > 1:
        assert found.share_low == pytest.approx(1 - scale, abs=1e-9)
        assert found.share_high == pytest.approx(1 - scale, abs=1e-9)


def test_contrast_covers_the_truth_and_repeats() -> None:
    """Attention owns half by construction; of 40 runs the 95 % interval must hold that in most."""
    held = 0
    for seed in range(40):
        draw = np.random.default_rng(seed)
        sample = np.repeat(np.arange(30), 20)
        size = draw.gamma(2, 0.5, 30)[sample]  # completions differ, their tokens do not
        native, plugin = (draw.normal(0, scale, sample.size) * size for scale in (0.02, 0.01))
        found = contrast(native, plugin, sample)
        assert found == contrast(native, plugin, sample)
        assert found.share_low is not None and found.share_high is not None
        held += found.share_low <= 0.5 <= found.share_high
    assert 33 <= held <= 40


def test_contrast_without_drift_or_tokens_says_nothing() -> None:
    none = contrast(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
    assert none.share is None and none.native_mean_abs is None
    still = contrast(np.zeros(3), np.ones(3), np.array([0, 0, 1]))
    assert still.share is None and still.plugin_mean_abs == 1
    assert contrast(np.ones(3), np.zeros(3), np.zeros(3, np.int64)).share_low is None  # one completion


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_of_rows_is_without_meaning(random: object) -> None:
    table = token_table(samples=3, tokens=15)
    order = np.random.default_rng(random.randrange(2**32)).permutation(table.num_rows)  # type: ignore[attr-defined]
    assert judged(table.take(order)) == judged(table)


def test_steps_and_attention_equal_a_plain_recomputation() -> None:
    table = token_table(seed=5)
    report = judged(table)
    size = {}
    for arm in ("native", "plugin"):
        rows = [row for row in table.to_pylist() if row["arm"] == arm]
        by_path = {
            path: {(r["sample"], r["position"]): r for r in rows if r["path"] == path} for path in PATHS
        }
        keys = by_path["recorded"].keys()
        values = {
            "full_minus_chunked": [by_path["chunked_prefill"][k]["dlogp"] for k in keys],
            "chunked_minus_decode_replay": [
                by_path["chunked_prefill"][k]["logp_rollout"] - by_path["decode_replay"][k]["logp_rollout"]
                for k in keys
            ],
            "decode_replay_minus_recorded": [
                by_path["decode_replay"][k]["logp_rollout"] - by_path["recorded"][k]["logp_rollout"]
                for k in keys
            ],
            TOTAL: [by_path["recorded"][k]["dlogp"] for k in keys],
        }
        size[arm] = {name: float(np.mean(np.abs(v))) for name, v in values.items()}
        whole = sum(size[arm][step] for step in STEPS)
        for step in STEPS:
            assert report.arms[arm].steps[step].mean_abs == pytest.approx(size[arm][step])
            assert report.arms[arm].step_share[step] == pytest.approx(size[arm][step] / whole)
    assert list(report.attention) == [*STEPS, TOTAL]
    for step, found in report.attention.items():
        assert found.share == pytest.approx(1 - size["plugin"][step] / size["native"][step])


def test_context_stays_inside_the_completion() -> None:
    table = token_table(samples=3, tokens=4)
    report = judged(table)
    assert len(report.worst) == 12
    for token in report.worst:
        rows = table.filter(
            (pc.field("sample") == token.sample)
            & (pc.field("arm") == "plugin")
            & (pc.field("path") == "recorded")
        )
        assert token.before + token.text + token.after == "".join(rows["text"].to_pylist())
        assert token.offset == token.position - 17
        native = table.filter(
            (pc.field("sample") == token.sample)
            & (pc.field("position") == token.position)
            & (pc.field("arm") == "native")
            & (pc.field("path") == "recorded")
        )
        assert token.other_dlogp == {"native": native["dlogp"][0].as_py()}


def test_a_few_broken_tokens_are_drift_though_the_means_are_small() -> None:
    table = token_table(samples=10, tokens=60)
    arm, path = table["arm"].to_numpy(), table["path"].to_numpy()
    one = (table["sample"].to_numpy() == 4) & (table["position"].to_numpy() == 30) & (arm == "plugin")
    table = edited(table, "logp_trainer", one, np.log(0.95))
    table = edited(table, "logp_rollout", one & (path == "recorded"), np.log(0.02))
    trainer, rollout = (
        table[name].to_numpy().astype(np.float64) for name in ("logp_trainer", "logp_rollout")
    )
    table = table.set_column(8, "dlogp", pa.array(trainer - rollout))
    report = judged(table, kl_k3=1.0)
    assert report.verdict == "DRIFT"
    assert report.reasons == ["max |Δp| is 0.93, above 0.5"]


def test_reasons_start_with_the_worst() -> None:
    report = judged(token_table(shift=-0.3), mean_abs=0.2, prob_mean_abs=0.001, kl_k3=0.02)
    assert report.verdict == "DRIFT"
    assert [reason.split(" is ")[0] for reason in report.reasons] == ["mean |Δp|", "KL (k3)", "mean |dlogp|"]


def test_dlogp_of_the_other_sign_is_invalid() -> None:
    table = token_table()
    report = judged(table.set_column(8, "dlogp", pc.negate(table["dlogp"])))
    assert report.verdict == "INVALID"
    assert any("dlogp that are not trainer minus rollout" in reason for reason in report.reasons)


def test_tokens_given_twice_are_invalid() -> None:
    table = token_table()
    report = judged(pa.concat_tables([table, table]))
    assert report.verdict == "INVALID"
    assert "arm plugin: path recorded holds a token twice" in report.reasons


def test_arms_with_other_tokens_are_invalid_and_not_contrasted() -> None:
    table = token_table()
    rows = (table["arm"].to_numpy() == "plugin") & (table["position"].to_numpy() == 20)
    report = judged(edited(table, "token_id", rows, 999))
    assert report.verdict == "INVALID" and report.attention == {}
    assert report.reasons == ["arms native and plugin do not hold the same tokens"]
    assert report.worst and report.worst[0].other_dlogp == {}


def test_a_missing_arm_is_named() -> None:
    report = judged(token_table().filter(pc.field("arm") == "plugin"))
    assert report.verdict == "INVALID"
    assert report.reasons == ["the run holds no tokens of arm native"]
    alone = summarize(
        token_table().filter(pc.field("arm") == "plugin"),
        arm_under_test="plugin", thresholds=Thresholds(), min_tokens=20, arms=["plugin"],
    )  # fmt: skip
    assert alone.verdict == "PASS" and alone.attention == {}


def test_a_table_without_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must have .*, got no text, dlogp"):
        judged(token_table().drop_columns(["text", "dlogp"]))
