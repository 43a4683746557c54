"""Verdict of a step, and the alerts that rules raise over steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_attn_plugin.drift.verdict import Verdict
from rl_attn_plugin.monitor.diagnosis import Diagnosis
from rl_attn_plugin.monitor.monitor import DriftMonitor
from rl_attn_plugin.monitor.rules import DEFAULT_RULES, Alert, Rule
from rl_attn_plugin.monitor.worst import Tokenizer

_LOG = logging.getLogger("rl_attn_plugin.monitor")


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a step's tokens say.

    Attributes:
        step: which.
        verdict: INVALID: values that are no log-probs, beyond what is tolerated. INCONCLUSIVE: too few tokens, or a metric
            of a required rule cannot be told. DRIFT: a rule fires. PASS: none does.
        reasons: why, in words.
        metrics: all of `DriftMonitor.compute`.
        firing: metrics of the rules that fire, since this step or before.
        alerts: rules that began to fire at this step.
        diagnoses: faults that the data show, most confident first.
    """

    step: int
    verdict: Verdict
    reasons: list[str]
    metrics: dict[str, float]
    firing: list[str]
    alerts: list[Alert]
    diagnoses: list[Diagnosis]


class DriftError(RuntimeError):
    """What a rule with action ``raise`` raises.

    Attributes:
        alert: says why.
        judgement: of the step, which `Watch.judge` could not return.
    """

    def __init__(self, alert: Alert, judgement: Judgement) -> None:
        super().__init__(str(alert))
        self.alert = alert
        self.judgement = judgement


class Watch:
    """Judges a monitor step by step and remembers what fires."""

    def __init__(
        self, rules: Sequence[Rule] = DEFAULT_RULES, *, min_tokens: int = 1000, tolerated_invalid: float = 0.0
    ) -> None:
        """
        Args:
            rules: at most one for a metric and direction.
            min_tokens: fewer compared tokens are INCONCLUSIVE.
            tolerated_invalid: share of the active tokens that may hold no log-prob. They never enter a number; this says
                only when the rest is still judged.
        """
        keys = [(rule.metric, rule.below) for rule in rules]
        if len(set(keys)) != len(keys):
            raise ValueError(f"rules must name a metric once for each direction, got {keys}")
        self.rules = tuple(rules)
        self.min_tokens = min_tokens
        self.tolerated_invalid = tolerated_invalid
        self._runs = [0] * len(self.rules)  # judgements in a row that speak for a change
        self._firing = [False] * len(self.rules)

    def judge(self, step: int, monitor: DriftMonitor, *, tokenizer: Tokenizer | None = None) -> Judgement:
        """The verdict of what a monitor has seen since its last reset; runs the actions of rules that begin to fire.

        Every rank that judges must do so on the reduced monitor, or ranks will not agree.

        Args:
            step: of the training loop.
            monitor: reduced over ranks.
            tokenizer: for the text of the worst tokens.

        Raises:
            DriftError: a rule with action ``raise`` began to fire; what it should remember is remembered.
        """
        metrics = monitor.compute()
        invalid = self._invalid(metrics)
        few = metrics["tokens/compared"] < self.min_tokens
        missing = [rule.metric for rule in self.rules if rule.required and rule.metric not in metrics]
        # Too few tokens say nothing about a bound; invalid ones are left out, and what remains is worth an alert.
        begun = [] if few else [rule for i, rule in enumerate(self.rules) if self._advance(i, metrics)]
        diagnoses = monitor.diagnose()
        worst = monitor.worst(tokenizer)[:5] if begun else []
        alerts = [Alert(rule, step, metrics[rule.metric], diagnoses, worst) for rule in begun]
        firing = [rule for rule, on in zip(self.rules, self._firing, strict=True) if on]
        verdict: Verdict
        if invalid:
            verdict, reasons = "INVALID", invalid
        elif few:
            got = int(metrics["tokens/compared"])
            verdict, reasons = "INCONCLUSIVE", [f"only {got} tokens compared, {self.min_tokens} needed"]
        elif missing:
            verdict, reasons = "INCONCLUSIVE", [f"{name} cannot be told" for name in missing]
        elif firing:
            verdict, reasons = "DRIFT", [_said(rule, metrics) for rule in firing]
        else:
            verdict, reasons = "PASS", [_said(rule, metrics) for rule in self.rules if rule.metric in metrics]
        judgement = Judgement(
            step, verdict, reasons, metrics, [rule.metric for rule in firing], alerts, diagnoses
        )
        for alert in sorted(alerts, key=lambda alert: alert.rule.action == "raise"):  # what raises comes last
            _act(alert, judgement)
        return judgement

    def state_dict(self) -> dict[str, Any]:
        """What is remembered between steps: plain values."""
        return {"runs": list(self._runs), "firing": list(self._firing)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`, for the same rules.

        Raises:
            ValueError: it is of another number of rules.
        """
        if len(saved["runs"]) != len(self.rules):
            raise ValueError(f"the state must be of {len(self.rules)} rules, got {len(saved['runs'])}")
        self._runs, self._firing = list(saved["runs"]), list(saved["firing"])

    def _invalid(self, metrics: Mapping[str, float]) -> list[str]:
        kinds = {
            key.removeprefix("invalid/"): value
            for key, value in metrics.items()
            if key.startswith("invalid/")
        }
        found = [f"{int(count)} {kind.replace('_', ' ')}" for kind, count in kinds.items() if count]
        refused = int(metrics["updates/refused"])
        lost = metrics["tokens/active"] - metrics["tokens/compared"]
        if lost <= self.tolerated_invalid * metrics["tokens/active"] and not refused:
            return []
        reasons = [f"log-probs that are not log-probs: {', '.join(found)}"] if found else []
        return reasons + ([f"{refused} updates whose tensors do not have one shape"] if refused else [])

    def _advance(self, i: int, metrics: Mapping[str, float]) -> bool:
        """Whether rule i begins to fire."""
        rule = self.rules[i]
        if rule.metric not in metrics:
            return False
        value = metrics[rule.metric]
        speaks = rule.cleared(value) if self._firing[i] else rule.beyond(value)
        self._runs[i] = self._runs[i] + 1 if speaks else 0
        if self._runs[i] < rule.window:
            return False
        self._runs[i] = 0
        self._firing[i] = not self._firing[i]
        return self._firing[i]


def _said(rule: Rule, metrics: Mapping[str, float]) -> str:
    return (
        rule.describe(metrics[rule.metric])
        if rule.metric in metrics
        else f"{rule.metric} fires and cannot be told"
    )


def _act(alert: Alert, judgement: Judgement) -> None:
    if alert.rule.action == "raise":
        raise DriftError(alert, judgement)
    if alert.rule.action == "log":
        _LOG.warning("%s", alert)
    elif callable(alert.rule.action):
        alert.rule.action(alert)
