"""Verdicts, and rules that fire and clear."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from rl_attn_plugin.monitor import DEFAULT_RULES, Alert, DriftError, DriftMonitor, Rule, Watch
from tests.monitor.faults import world


def drifted(size: float, tokens: int = 2000, **more) -> DriftMonitor:
    """Every token off by ``size``."""
    monitor = DriftMonitor()
    rollout = -torch.linspace(1, 3, tokens, dtype=torch.float64)
    monitor.update(rollout + size, rollout, torch.ones(tokens), step=0, **more)
    return monitor


RULE = Rule(metric="dlogp/abs_mean", bound=0.1, window=2, clear=0.05)


def run(rule: Rule, sizes: list[float]) -> list[tuple[str, int]]:
    watch = Watch([rule])
    judged = [watch.judge(step, drifted(size)) for step, size in enumerate(sizes)]
    return [(j.verdict, len(j.alerts)) for j in judged]


def test_window_and_hysteresis() -> None:
    sizes = [0.2, 0.0, 0.2, 0.2, 0.08, 0.08, 0.2, 0.04, 0.08, 0.04, 0.04, 0.08]
    assert run(RULE, sizes) == [
        ("PASS", 0),  # once is not twice
        ("PASS", 0),
        ("PASS", 0),
        ("DRIFT", 1),
        ("DRIFT", 0),  # within the bound, but not cleared
        ("DRIFT", 0),
        ("DRIFT", 0),  # no second alert
        ("DRIFT", 0),
        ("DRIFT", 0),  # not twice in a row
        ("DRIFT", 0),
        ("PASS", 0),
        ("PASS", 0),
    ]


def test_clearing_takes_as_long_right_after_firing() -> None:
    assert [verdict for verdict, _ in run(RULE, [0.2, 0.2, 0.0, 0.2, 0.0, 0.0])] == [
        "PASS",
        "DRIFT",
        "DRIFT",
        "DRIFT",
        "DRIFT",
        "PASS",
    ]


def test_the_bound_itself_passes() -> None:
    at = Rule(metric="dlogp/abs_max", bound=0.125)
    assert run(at, [0.125, 0.1250001]) == [("PASS", 0), ("DRIFT", 1)]


def test_below_and_nan_and_infinity() -> None:
    rule = Rule(metric="ess", bound=0.5, below=True, clear=0.6)
    assert rule.beyond(0.4) and not rule.beyond(0.5) and rule.beyond(math.nan)
    assert not rule.cleared(0.55) and rule.cleared(0.6)
    assert Rule(metric="ratio/max", bound=10).beyond(math.inf)
    assert rule.describe(0.25) == "ess is 0.25, below 0.5"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"clear": 0.2}, "clear must lie within the bound 0.1, got 0.2"),
        ({"below": True, "clear": 0.05}, "clear must lie within the bound"),
    ],
)
def test_wrong_rules_are_refused(choices, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule(**({"metric": "ess", "bound": 0.1} | choices))
    with pytest.raises(ValueError, match="must name a metric once"):
        Watch([RULE, Rule(metric=RULE.metric, bound=3)])


def test_invalid_beats_drift_and_does_not_hide_it() -> None:
    monitor = drifted(0.3)
    monitor.update(torch.tensor([math.nan]), -torch.ones(1), torch.ones(1), step=0)
    strict = Watch([Rule(metric="dlogp/abs_mean", bound=0.1)])
    judged = strict.judge(0, monitor)
    assert judged.verdict == "INVALID" and judged.reasons == [
        "log-probs that are not log-probs: 1 trainer nan"
    ]
    assert judged.firing == ["dlogp/abs_mean"] and len(judged.alerts) == 1
    lenient = Watch([Rule(metric="dlogp/abs_mean", bound=0.1)], tolerated_invalid=0.001)
    assert lenient.judge(0, monitor).verdict == "DRIFT"


def test_refused_updates_are_invalid() -> None:
    monitor = drifted(0.0)
    monitor.update(-torch.ones(3), -torch.ones(2), torch.ones(3), step=0)
    judged = Watch(tolerated_invalid=1.0).judge(0, monitor)
    assert judged.verdict == "INVALID" and "1 updates whose tensors do not have one shape" in judged.reasons


def test_too_few_tokens_say_nothing() -> None:
    watch = Watch([Rule(metric="dlogp/abs_mean", bound=0.1)])
    judged = watch.judge(0, drifted(-3.0, tokens=999))
    assert judged.verdict == "INCONCLUSIVE" and judged.reasons == ["only 999 tokens compared, 1000 needed"]
    assert not judged.firing and watch.judge(1, drifted(-3.0, tokens=1000)).verdict == "DRIFT"
    assert watch.judge(2, DriftMonitor()).verdict == "INCONCLUSIVE", "nothing at all is no PASS"


def test_a_metric_that_cannot_be_told_is_inconclusive() -> None:
    rules = [Rule(metric="sequence/ess", bound=0.1, below=True)]
    judged = Watch(rules).judge(0, drifted(0.0))
    assert judged.verdict == "INCONCLUSIVE" and judged.reasons == ["sequence/ess cannot be told"]
    optional = [Rule(metric="sequence/ess", bound=0.1, below=True, required=False)]
    assert Watch(optional).judge(0, drifted(0.0)).verdict == "PASS"


def test_an_alert_says_which_tokens_and_which_fault(caplog: pytest.LogCaptureFixture) -> None:
    w = world(0, rollout_temperature=0.7)
    monitor = DriftMonitor()
    names = torch.arange(len(w.mask)) + 500
    monitor.update(w.trainer, w.rollout, w.mask, step=4, sequence_ids=names, token_ids=w.mask.long() * 17)
    with caplog.at_level(logging.WARNING, "rl_attn_plugin.monitor"):
        judged = Watch().judge(4, monitor)
    assert judged.verdict == "DRIFT"
    alert = judged.alerts[0]
    assert alert.diagnoses[0].name == "temperature"
    token = alert.worst[0]
    assert abs(token.dlogp) == monitor.compute()["dlogp/abs_max"] and token.sequence in names
    assert len(caplog.records) == len(judged.alerts)
    text = caplog.records[0].getMessage()
    for part in ("step 4", alert.rule.metric, "temperature", f"sequence {token.sequence}", "token 17"):
        assert part in text


def test_actions() -> None:
    heard: list[Alert] = []
    rules = [
        Rule(metric="dlogp/abs_mean", bound=0.1, action="raise"),
        Rule(metric="kl/k3", bound=0.001, action=heard.append),
    ]
    watch = Watch(rules)
    with pytest.raises(DriftError, match=r"step 0: dlogp/abs_mean is 0\.5, above 0\.1") as raised:
        watch.judge(0, drifted(0.5))
    assert raised.value.alert.rule == rules[0]
    assert [alert.rule.metric for alert in heard] == ["kl/k3"], "called although another rule raises"
    judged = watch.judge(1, drifted(0.5))
    assert judged.verdict == "DRIFT" and not judged.alerts, "it fires, and has said so"


def test_what_is_remembered_survives() -> None:
    first, second = Watch([RULE]), Watch([RULE])
    first.judge(0, drifted(0.2))
    second.load_state_dict(first.state_dict())
    assert second.judge(1, drifted(0.2)).verdict == "DRIFT"
    with pytest.raises(ValueError, match="must be of 6 rules, got 1"):
        Watch().load_state_dict(first.state_dict())


def test_default_rules_pass_clean_data_and_name_their_origin() -> None:
    monitor = DriftMonitor()
    w = world(1)
    monitor.update(w.trainer, w.rollout, w.mask, step=0)
    judged = Watch().judge(0, monitor)
    assert judged.verdict == "PASS" and len(judged.reasons) == len(DEFAULT_RULES)
    assert all(rule.origin for rule in DEFAULT_RULES)
    assert {rule.metric for rule in DEFAULT_RULES} <= judged.metrics.keys()


@pytest.mark.parametrize("noise", [0.12, 0.5])
def test_default_rules_fire_on_drift(noise: float) -> None:
    monitor = DriftMonitor()
    w = world(1, noise=noise)
    monitor.update(w.trainer, w.rollout, w.mask, step=0)
    assert Watch().judge(0, monitor).verdict == "DRIFT"


def test_drift_that_a_mean_hides() -> None:
    """Yao et al.: the means stay, and one response in fifty has a token that is certain on one side only."""
    w = world(2, rows=100)
    trainer = w.trainer.clone()
    rollout = w.rollout.clone()
    trainer[::50, 3], rollout[::50, 3] = -3.0, -0.05
    monitor = DriftMonitor()
    monitor.update(trainer, rollout, w.mask, step=0)
    judged = Watch().judge(0, monitor)
    assert judged.firing == ["sequence/prob_over_half"] and judged.metrics["sequence/prob_over_half"] == 0.02
