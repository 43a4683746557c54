"""What the terminal and the page say in words, and how they write numbers. Pure functions, no markup."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_attn_plugin.drift import STEPS, TOTAL, Check, Contrast, DriftReport, checks
from rl_attn_plugin.invariant import Kind
from rl_attn_plugin.replay import AttentionPathDrift, TensorDrift

PATH_LABELS = {
    "recorded": "as recorded",
    "chunked_prefill": "chunked prefill",
    "decode_replay": "decode replay",
}
STEP_LABELS = {
    "full_minus_chunked": "full − chunked",
    "chunked_minus_decode_replay": "chunked − replay",
    "decode_replay_minus_recorded": "replay − recorded",
    TOTAL: "full − recorded",
}
STEP_MEANINGS = {
    "full_minus_chunked": "whole packed sequences against prefill in chunks",
    "chunked_minus_decode_replay": "prefill in chunks against decoding token by token",
    "decode_replay_minus_recorded": "the same decoding in another batch and other pages",
    TOTAL: "trainer against rollout: the sum of the three",
}
SIGN = "dlogp = logp_trainer − logp_rollout, nats; positive: the trainer finds the token more likely"

_NO_NUMBER = "–"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens were drawn.

    Attributes:
        temperature: of the softmax; the log-probs are compared at it.
        top_p: nucleus that was sampled from.
    """

    temperature: float | None
    top_p: float | None

    @classmethod
    def of(cls, manifest: Mapping[str, Any] | None) -> Sampling:
        """From a run's manifest; None where it does not say."""
        found = (manifest or {}).get("sampling") or {}
        return cls(found.get("temperature"), found.get("top_p"))

    def __str__(self) -> str:
        if self.temperature is None:
            return "The run does not say how its tokens were drawn"
        top = "" if self.top_p is None else f", top-p {self.top_p:g}"
        return f"Tokens drawn at temperature {self.temperature:g}{top}; log-probs compared at it, without truncation"


def number(value: float | None, signed: bool = False) -> str:
    """Counts in full, other numbers to three significant digits; ``1.2e-7`` where plain digits would be
    mostly zeros."""
    if value is None:
        return _NO_NUMBER
    if value == 0:
        return "0"
    if math.isnan(value):
        return "NaN"
    size = abs(value)
    if size == math.inf:
        text = "∞"
    elif isinstance(value, int):
        text = f"{size:,}"
    elif 1e-3 <= size < 1e5:
        text = f"{size:#.3g}".rstrip(".") if size < 999.5 else f"{size:.0f}"
    else:
        mantissa, exponent = f"{size:.1e}".split("e")
        text = f"{mantissa}e{int(exponent)}"
    return ("−" if value < 0 else "+" if signed else "") + text


def percent(value: float | None) -> str:
    """Whole percents, one decimal near 0 and 100; what is not all is never called 100 %, nor 0 % what is
    not nothing."""
    if value is None:
        return _NO_NUMBER
    size, sign = abs(100 * value), "−" if value < 0 else ""
    if 0 < size < 0.05:
        return f"{sign}<0.1\N{NO-BREAK SPACE}%"
    if 99.95 <= size < 100:
        return f"{sign}>99.9\N{NO-BREAK SPACE}%"
    digits = 1 if 0 < size < 1 or 99 < size < 100 else 0
    return f"{sign}{size:.{digits}f}\N{NO-BREAK SPACE}%"


def share(value: float | None) -> str:
    """Attention's share of native drift; what more than doubled is written as a multiple."""
    if value is None or value >= -1:
        return percent(value)
    return f"×{number(1 - value)}"


def interval(contrast: Contrast) -> str:
    """The 95 % interval of attention's share, low to high; empty without one."""
    if contrast.share_low is None or contrast.share_high is None:
        return ""
    low, high = share(contrast.share_low), share(contrast.share_high)
    return f"{high} to {low}" if contrast.share_high < -1 else f"{low} to {high}"


def visible(text: str) -> str:
    """Text with every control character shown as a sign, so that model text cannot steer a terminal or
    turn the reading direction."""
    return "".join(_sign(c) for c in text)


def _sign(c: str) -> str:
    if c == "\n":
        return "⏎"
    if c == "\t":
        return "⇥"
    if ord(c) < 0x20:
        return chr(0x2400 + ord(c))
    if c in "\u200c\u200d":  # join and part letters and emoji
        return c
    # Cc controls, Cf invisible formatting such as bidi overrides, Cs half surrogates, Zl and Zp line breaks
    return "�" if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"} else c


def checks_of(report: DriftReport) -> list[Check]:
    """The numbers of the arm under test that decide between PASS and DRIFT; none without tokens."""
    arm = report.arms.get(report.arm_under_test)
    if arm is None:
        return []
    recorded = arm.paths["recorded"]
    return checks(recorded.dlogp, recorded.policy, report.thresholds)


def tokens_compared(report: DriftReport) -> int:
    """Valid tokens of the arm under test."""
    arm = report.arms.get(report.arm_under_test)
    return arm.paths["recorded"].dlogp.active_count if arm else 0


def headline(report: DriftReport) -> str:
    """The verdict as a sentence."""
    count, made = tokens_compared(report), checks_of(report)
    if report.verdict == "PASS":
        return f"Trainer and rollout agree: on {number(count)} tokens every number is within its bound."
    if report.verdict == "DRIFT":
        over = sum(not check.passed for check in made)
        if not over:
            return (
                f"On {number(count)} tokens every number is within its bound, but a layer's attention lost what it "
                "has to keep."
            )
        return (
            f"Trainer and rollout disagree: on {number(count)} tokens {over} of {len(made)} numbers "
            f"{'is' if over == 1 else 'are'} above {'its' if over == 1 else 'their'} bound."
        )
    if report.verdict == "INCONCLUSIVE" and count >= report.min_tokens:
        return f"On {number(count)} tokens every number is within its bound, but the oracle that was asked for is missing."
    if report.verdict == "INCONCLUSIVE":
        return "There is too little data to tell whether trainer and rollout agree."
    return "The data contradict themselves or are incomplete, so they cannot be judged."


def owner(report: DriftReport, arm: str) -> str:
    """Which step owns an arm's drift, in words."""
    share = {name: value for name, value in report.arms[arm].step_share.items() if value}
    if not share:
        return "no step drifts at all, every token is equal bit for bit."
    name = max(share, key=lambda step: share[step])
    return f"{percent(share[name])} of the drift arises in {STEP_LABELS[name]}, {STEP_MEANINGS[name]}."


def attention_share(report: DriftReport) -> str | None:
    """How far attention owns the drift, as a sentence; None when the run cannot tell."""
    found = report.attention.get(TOTAL)
    if found is None or found.native_mean_abs is None:
        return None
    if found.share is None:
        return "The native arm does not drift, so there is nothing that attention could own."
    within = f" (95\N{NO-BREAK SPACE}% interval {interval(found)})" if interval(found) else ""
    if (
        found.share_low is not None
        and found.share_high is not None
        and found.share_low <= 0 <= found.share_high
    ):
        return (
            f"Swapping attention changes mean |dlogp| by {percent(-found.share)}, a change that cannot be told "
            f"from none{within}."
        )
    if found.share < -1:
        return f"With the plugin's attention mean |dlogp| is {share(found.share)} that of native{within}."
    if found.share < 0:
        return f"With the plugin's attention mean |dlogp| grows: attention's share is {share(found.share)}{within}."
    return f"Attention owns {percent(found.share)} of the native drift{within}."


def zero_drift(report: DriftReport, manifest: Mapping[str, Any] | None) -> list[str]:
    """What the zero-drift arm shows and costs, in sentences; empty without that arm."""
    arm = report.arms.get("zero-drift")
    if arm is None:
        return []
    count = arm.paths["recorded"].dlogp.active_count
    equal = min(path.dlogp.bit_equal for path in arm.paths.values())
    said = [
        f"With every operator row-invariant, {number(equal)} of {number(count)} tokens are bit-equal between trainer and "
        "rollout, along every path."
    ]
    rates = ((manifest or {}).get("timing") or {}).get("tokens_per_second") or {}
    costs = [
        f"{label} takes {number(rates[f'plugin/{phase}'] / rates[f'zero-drift/{phase}'])} times as long"
        for phase, label in (("full_prefill", "scoring"), ("decode_replay", "decode"))
        if rates.get(f"plugin/{phase}") and rates.get(f"zero-drift/{phase}")
    ]
    if costs:
        said.append(f"What that costs against the plugin arm: {', '.join(costs)}.")
    unknown = {
        entry["operator"]
        for side in ((manifest or {}).get("audit") or {}).values()
        for entry in side.get(Kind.UNKNOWN.value, [])
    }
    if unknown:
        said.append(f"Not known to be row-invariant: {', '.join(sorted(unknown))}.")
    return said


def step_names(report: DriftReport) -> list[str]:
    """Steps in telescoping order, then their sum if the arms are contrasted."""
    return [*STEPS, TOTAL] if report.attention else list(STEPS)


def kept(row: AttentionPathDrift) -> str:
    """What a path had to keep, and whether it did."""
    if row.check is None:
        return ""
    wanted = "bit-equal" if row.check.expectation == "bit_equal" else "within bound"
    return wanted if row.check.passed else f"NOT {wanted}"


def largest(drift: TensorDrift | None) -> str:
    """The largest difference; ``equal`` where there is none at all."""
    if drift is None or drift.max_abs is None:
        return _NO_NUMBER
    if drift.bit_equal:
        return "equal"
    return "∞" if drift.max_abs == math.inf else number(drift.max_abs)
