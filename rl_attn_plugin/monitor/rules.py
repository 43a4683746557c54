"""Rules as data: which number may not pass which bound, for how long, and what happens then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rl_attn_plugin.drift.verdict import Thresholds
from rl_attn_plugin.monitor.diagnosis import Diagnosis
from rl_attn_plugin.monitor.worst import DriftedToken


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule that began to fire.

    Attributes:
        rule: the rule.
        step: at which it fired.
        value: of its metric then.
        diagnoses: faults that the data of the step show, most confident first.
        worst: the step's worst tokens.
    """

    rule: Rule
    step: int
    value: float
    diagnoses: list[Diagnosis]
    worst: list[DriftedToken]

    def __str__(self) -> str:
        text = f"step {self.step}: {self.rule.describe(self.value)}"
        if self.rule.window > 1:
            text += f", {self.rule.window} times in a row"
        text += "."
        if self.diagnoses:
            first = self.diagnoses[0]
            text += f" {first.name} ({first.confidence:.0%}): {first.message}"
        if self.worst:
            token = self.worst[0]
            where = "".join(
                f" {name} {value}"
                for name, value in (
                    ("sequence", token.sequence),
                    ("position", token.position),
                    ("token", token.token_id),
                )
                if value is not None
            )
            text += f" Worst{where or ' token'}: dlogp {token.dlogp:+.3g}."
        return text


Action = Literal["log", "raise"] | Callable[[Alert], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One bound on one metric.

    It fires when the metric is beyond the bound in ``window`` judgements in a row, and is then quiet until the metric has
    been within ``clear`` as often in a row: between the two it stays as it is, so a number at its bound does not ring
    each step. A judgement in which the metric cannot be told changes nothing.
    """

    metric: str
    """Key of `DriftMonitor.compute`."""
    bound: float
    """The largest value that passes; the smallest where ``below``."""
    below: bool = False
    """Whether falling below the bound is what fires, as for ``ess`` and ``coverage``."""
    window: int = 1
    """Judgements in a row, to fire and to clear."""
    clear: float | None = None
    """Level at which a firing rule clears; None is the bound."""
    action: Action = field(default="log", compare=False)
    """``log`` warns through the logger ``rl_attn_plugin.monitor``, ``raise`` lets `Watch.judge` raise `DriftError`, a
    function is called with the `Alert`."""
    required: bool = True
    """Whether a metric that cannot be told makes the verdict INCONCLUSIVE."""
    origin: str = ""
    """Where the bound comes from."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if self.clear is not None and self.beyond(self.clear):
            raise ValueError(f"clear must lie within the bound {self.bound:g}, got {self.clear:g}")

    def beyond(self, value: float) -> bool:
        """Whether a value does not pass. NaN does not."""
        return not (value >= self.bound if self.below else value <= self.bound)

    def cleared(self, value: float) -> bool:
        """Whether a value lets a firing rule clear."""
        level = self.bound if self.clear is None else self.clear
        return value >= level if self.below else value <= level

    def describe(self, value: float) -> str:
        """The value against the bound, in words."""
        beyond, within = ("below", "at least") if self.below else ("above", "within")
        return f"{self.metric} is {value:.3g}, {beyond if self.beyond(value) else within} {self.bound:g}"


_OFFLINE = Thresholds()

DEFAULT_RULES: tuple[Rule, ...] = (
    Rule(
        metric="dlogp/abs_mean",
        bound=_OFFLINE.mean_abs,
        clear=0.8 * _OFFLINE.mean_abs,
        origin="where IcePop (arXiv 2510.18855) saw runs collapse; clean bf16 runs show 0.01 to 0.03",
    ),
    Rule(
        metric="prob/abs_mean",
        bound=_OFFLINE.prob_mean_abs,
        clear=0.8 * _OFFLINE.prob_mean_abs,
        origin="verl's guide: below 0.005 is normal, above 0.01 is a precision problem",
    ),
    Rule(
        metric="kl/k3",
        bound=0.015,
        window=2,
        clear=0.01,
        origin="prime-rl merges only what stays below 0.015 at every step; stale weights are part of a live run",
    ),
    Rule(
        metric="ess",
        bound=0.3,
        below=True,
        clear=0.5,
        origin="the example of a health check in verl's documentation of rollout correction",
    ),
    Rule(
        metric="sequence/prob_over_half",
        bound=0.01,
        clear=0.005,
        required=False,
        origin="Yao et al. 2025: 1 of 512 responses has a token whose probability is off by more than 0.5 in a sound "
        "setup, tens of them where parallelism differs, at the same mean",
    ),
    Rule(
        metric="coverage",
        bound=0.99,
        below=True,
        origin="a gap that is not measured is none that is small: SkyRL #1870",
    ),
)
"""Bounds of live runs in bf16. The first two are those of the parity job."""
