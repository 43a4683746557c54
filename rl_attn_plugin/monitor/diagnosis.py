"""What the drift looks like: faults that leave a mark in the log-probs themselves, each with a confidence.

Most questions are put to tokens one by one, and the confidence is the share of them that say yes, less four standard errors:
0.95 means that, whatever the luck of the draw, at least 95 % of what was asked points that way. Where a regression is asked,
it is the share of the spread of dlogp that the fault explains, with the same allowance. A finding names a cause
that fits; docs/metrics.md says what else could look alike, and how often each speaks up on clean data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rl_attn_plugin.monitor.evidence import EVIDENCE
from rl_attn_plugin.monitor.metrics import coarse_mean_square
from rl_attn_plugin.monitor.settings import Settings
from rl_attn_plugin.monitor.state import COUNTS, SUMS, State

FAULTS = (
    "shift",
    "temperature",
    "truncation",
    "identical",
    "copied",
    "rounding",
    "stale",
    "padding",
    "boundary",
    "zero_fill",
)
"""Names of what can be found."""

_ERRORS = 4.0  # standard errors
_MIN_TOKENS = 200
_MIN_ENDS = 40  # sequences' first or last tokens
_MIN_SLOPE = 0.015  # a temperature that differs by less moves no token by more than bf16 noise does
_MIN_EXPLAINED = (
    0.15  # clean data with noise of 0.4 nats reach 0.05, a temperature of 0.95 against 1 gives 0.35
)
_ONE_SIDED = 0.9  # clean data and temperatures stay below 0.8
_DESIGN = 9.0  # tokens of one sequence are alike: a regression over lags counts nine as one


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One fault that the data show.

    Attributes:
        name: of the fault, one of `FAULTS`.
        confidence: from 0 to 1, see the module.
        message: what was seen and what to do, in a sentence or two.
        evidence: the numbers behind it.
    """

    name: str
    confidence: float
    message: str
    evidence: dict[str, float]


class _Seen:
    """A state's numbers by name."""

    def __init__(self, state: State, settings: Settings) -> None:
        self.state, self.settings = state, settings
        self.asked = dict(zip(EVIDENCE, state.evidence.tolist(), strict=True))
        self.counts = dict(zip(COUNTS, state.counts.tolist(), strict=True))
        self.sums = dict(zip(SUMS, state.sums.tolist(), strict=True))

    @property
    def one_sided(self) -> tuple[float, float, int]:
        """Shares of clear differences that are negative and positive, with allowance, and how many there are."""
        negative, positive = self.asked["big_negative"], self.asked["big_positive"]
        both = negative + positive
        return at_least(negative, both), at_least(positive, both), both


def diagnose(state: State, settings: Settings) -> list[Diagnosis]:
    """The faults that a state shows, most confident first; nothing on clean data.

    Args:
        state: of a monitor, on the CPU.
        settings: of the same.
    """
    seen = _Seen(state, settings)
    found = [finding for ask in _QUESTIONS if (finding := ask(seen)) is not None]
    return sorted(found, key=lambda finding: -finding.confidence)


def at_least(yes: int, asked: int) -> float:
    """Lower end of Wilson's interval of a share, at four standard errors; 0 when nobody was asked."""
    if asked == 0:
        return 0.0
    z2 = _ERRORS * _ERRORS
    share = yes / asked
    middle = share + z2 / (2 * asked)
    spread = _ERRORS * math.sqrt(share * (1 - share) / asked + z2 / (4 * asked * asked))
    return max(0.0, (middle - spread) / (1 + z2 / asked))


def _shift(seen: _Seen) -> Diagnosis | None:
    shares = {
        way: at_least(seen.asked[f"{way}_closer"], seen.asked[f"{way}_judged"])
        for way in ("late", "early")
        if seen.asked[f"{way}_judged"] >= _MIN_TOKENS
    }
    if not shares:
        return None
    way = max(shares, key=lambda name: shares[name])
    if shares[way] < 0.5:
        return None
    neighbour, by = ("before", "late") if way == "late" else ("after", "early")
    return Diagnosis(
        "shift",
        shares[way],
        f"The trainer's log-prob of a token fits the rollout's log-prob of the token {neighbour} it: the trainer's are one "
        f"position {'late' if by == 'late' else 'early'} against the rollout's.",
        {f"{way}_share": shares[way], "judged": float(seen.asked[f"{way}_judged"])},
    )


def _temperature(seen: _Seen) -> Diagnosis | None:
    n = seen.counts["compared"]
    if n < _MIN_TOKENS or max(seen.one_sided[:2]) > _ONE_SIDED:
        return None
    sums = {name: seen.sums[name] / n for name in SUMS}
    trainer = sums["trainer_square"] - sums["logp_trainer"] ** 2
    rollout = sums["rollout_square"] - sums["logp_rollout"] ** 2
    both = sums["product"] - sums["logp_trainer"] * sums["logp_rollout"]
    # d against the midpoint of the two, so that noise on either side does not bend the slope
    spread_d, spread_m, together = (
        trainer + rollout - 2 * both,
        (trainer + rollout + 2 * both) / 4,
        (trainer - rollout) / 2,
    )
    if spread_d <= 1e-12 or spread_m <= 1e-12:
        return None
    tilt = together / spread_m
    slope = (2 + tilt) / (2 - tilt)
    correlation = math.sqrt(min(1.0, together * together / (spread_d * spread_m)))
    # Fisher's transform, four standard errors
    sure = math.tanh(max(0.0, math.atanh(min(correlation, 1 - 1e-12)) - _ERRORS / math.sqrt(n - 3))) ** 2
    if sure < _MIN_EXPLAINED or abs(slope - 1) < _MIN_SLOPE:
        return None
    flatter, sharper = ("trainer", "rollout") if slope < 1 else ("rollout", "trainer")
    return Diagnosis(
        "temperature",
        sure,
        f"dlogp grows with the log-prob (the trainer's change by {slope:.3g} for each nat of the rollout's): the "
        f"{sharper}'s distribution is sharper than the {flatter}'s, as when a temperature is applied on one side only. "
        "The ratio of temperatures is farther from 1 than this slope.",
        {"slope": slope, "explained": sure},
    )


def _truncation(seen: _Seen) -> Diagnosis | None:
    negative, positive, big = seen.one_sided
    n = seen.counts["compared"]
    # a few large differences of one sign are no renormalisation, which moves most tokens
    if big < _MIN_TOKENS or big < 0.02 * n or max(negative, positive) < _ONE_SIDED:
        return None
    side = "rollout" if negative > positive else "trainer"
    mean = (seen.sums["d"] + seen.sums["d_rest"]) / n
    return Diagnosis(
        "truncation",
        max(negative, positive),
        f"Differences have one sign: the {side}'s log-probs are renormalised over part of the vocabulary (top-p, top-k, "
        f"min-p) and the other side's are not. The mean of log S is {-abs(mean):.3g} nats, a kept mass of "
        f"{math.exp(-abs(mean)):.3g}.",
        {"share": max(negative, positive), "mean_log_s": -abs(mean)},
    )


def _copied(seen: _Seen) -> Diagnosis | None:
    plain, equal = seen.asked["plain"], seen.asked["plain_equal"]
    if plain < _MIN_TOKENS:
        return None
    everywhere = at_least(equal, plain)
    if equal == plain:
        return Diagnosis(
            "identical",
            everywhere,
            f"All {plain} tokens that are not nearly certain are equal bit for bit. Either both sides compute alike to the "
            "bit, or one side's log-probs are copies of the other's: compare a few with what the engine itself returned.",
            {"equal": everywhere, "plain": float(plain)},
        )
    copied = seen.asked["plain_in_equal"]
    judged, whole = seen.asked["sequences_judged"], seen.asked["sequences_equal"]
    elsewhere = (equal - copied) / max(1, plain - copied)
    # eight tokens or more of a sequence that are equal by chance
    chance = min(1.0, elsewhere) ** 8
    share = at_least(whole, judged)
    if whole >= 3 and share > 10 * chance and elsewhere < 0.5:
        return Diagnosis(
            "copied",
            1 - chance,
            f"{whole} of {judged} sequences are equal bit for bit in every token, the others in {elsewhere:.1%} of theirs: "
            "for these the rollout's log-probs were filled in with the trainer's.",
            {"sequences": float(whole), "judged": float(judged), "elsewhere": elsewhere},
        )
    in_a_row = at_least(seen.asked["plain_pairs_equal"], equal)
    if equal >= _MIN_TOKENS and in_a_row > 0.8 and equal / plain < 0.8:
        return Diagnosis(
            "copied",
            in_a_row,
            f"{equal / plain:.1%} of the tokens are equal bit for bit, and they stand in blocks: missing ends of sequences "
            "were filled in with the other side's log-probs.",
            {"equal": equal / plain, "in_a_row": in_a_row},
        )
    return None


def _rounding(seen: _Seen) -> Diagnosis | None:
    plain = seen.asked["plain"]
    if plain < _MIN_TOKENS:
        return None
    found = {}
    for side in ("trainer", "rollout"):
        shares = {name: at_least(seen.asked[f"{side}_{name}"], plain) for name in ("bf16", "fp16")}
        # what bf16 holds fp16 holds too
        stored = next((name for name, share in shares.items() if share > 0.9), None)
        if stored:
            found[side] = (stored, shares[stored])
    if not found:
        return None
    told = " and ".join(f"the {side}'s in {stored}" for side, (stored, _) in found.items())
    return Diagnosis(
        "rounding",
        max(share for _, share in found.values()),
        f"Log-probs are stored in fewer bits than float32: {told}. That alone moves a log-prob by up to "
        "0.4 % (bf16) or 0.05 % (fp16) of itself: keep them in float32.",
        {f"{side}_{stored}": share for side, (stored, share) in found.items()},
    )


def _stale(seen: _Seen) -> Diagnosis | None:
    if "lag" not in seen.settings.groups:
        return None
    counts = seen.state.table_counts["lag"][:-1]
    sums = seen.state.table_sums["lag"][:-1, 1].tolist()
    bins = []
    for lag, (row, total) in enumerate(zip(counts.tolist(), sums, strict=True)):
        n = sum(row)
        if n >= _MIN_TOKENS:
            mean = total / n
            bins.append((lag, n, mean, max(0.0, coarse_mean_square(row) - mean * mean)))
    if len(bins) < 2:
        return None
    # weighted least squares of the mean abs(dlogp) on the lag
    weights = [n / (variance + 1e-30) / _DESIGN for _, n, _, variance in bins]
    total = sum(weights)
    middle = sum(w * lag for w, (lag, *_) in zip(weights, bins, strict=True)) / total
    level = sum(w * mean for w, (_, _, mean, _) in zip(weights, bins, strict=True)) / total
    square = sum(w * (lag - middle) ** 2 for w, (lag, *_) in zip(weights, bins, strict=True))
    slope = (
        sum(w * (lag - middle) * (mean - level) for w, (lag, _, mean, _) in zip(weights, bins, strict=True))
        / square
    )
    errors = slope * math.sqrt(square)
    first, last = bins[0], bins[-1]
    if errors < _ERRORS or last[2] < 1.2 * first[2]:
        return None
    return Diagnosis(
        "stale",
        math.erf((errors - 1) / math.sqrt(2)),
        f"Drift grows with the policy's lag: mean |dlogp| is {first[2]:.3g} at lag {first[0]} and {last[2]:.3g} at lag "
        f"{last[0]}. What lag {first[0]} shows is the numerics' share, the rest is that of stale weights.",
        {"slope": slope, "errors": errors, "first": first[2], "last": last[2]},
    )


def _padding(seen: _Seen) -> Diagnosis | None:
    shares = {
        side: at_least(seen.asked[f"{side}_closer"], seen.asked[f"{side}_judged"])
        for side in ("left", "right")
        if seen.asked[f"{side}_judged"] >= _MIN_TOKENS
    }
    side = max(shares, key=lambda name: shares[name], default=None)
    if side is None or shares[side] < 0.5:
        return None
    return Diagnosis(
        "padding",
        shares[side],
        f"The rollout's log-probs fit when they are read from the {side} border of their rows: the two sides are padded on "
        "different sides, or one includes the prompt.",
        {f"{side}_share": shares[side], "judged": float(seen.asked[f"{side}_judged"])},
    )


def _boundary(seen: _Seen) -> Diagnosis | None:
    ends = {end: (seen.asked[f"{end}_over"], seen.asked[end]) for end in ("first", "last")}
    over = seen.counts["over_threshold"] - sum(o for o, _ in ends.values())
    inside = seen.counts["compared"] - sum(n for _, n in ends.values())
    if inside < _MIN_TOKENS:
        return None
    usual = max(0, over) / inside
    shares = {end: at_least(o, n) for end, (o, n) in ends.items() if n >= _MIN_ENDS}
    end = max(shares, key=lambda name: shares[name], default=None)
    if end is None or shares[end] < max(0.1, 5 * usual):
        return None
    return Diagnosis(
        "boundary",
        shares[end],
        f"At least {shares[end]:.0%} of the {end} tokens of a sequence drift by more than "
        f"{seen.settings.over_threshold:g} nats, and {usual:.2%} of those inside: one side sees a neighbouring sequence or "
        "another boundary (packing offsets, position ids, a token too many).",
        {f"{end}_over": shares[end], "inside_over": usual},
    )


def _filled(seen: _Seen) -> Diagnosis | None:
    counts = {side: seen.counts[f"invalid_{side}_zero_fill"] for side in ("trainer", "rollout")}
    side = max(counts, key=lambda name: counts[name])
    active = seen.counts["active"]
    share = at_least(counts[side], active)
    if share < 1e-3:
        return None
    return Diagnosis(
        "zero_fill",
        1 - 1 / (1 + counts[side]),
        f"{counts[side]} of {active} log-probs of the {side} are exactly 0 where the other side is not certain at all: "
        "missing values were filled with 0, or sampling was cut down to one token.",
        {"share": counts[side] / active},
    )


_QUESTIONS: tuple[Callable[[_Seen], Diagnosis | None], ...] = (
    _shift,
    _temperature,
    _truncation,
    _copied,
    _rounding,
    _stale,
    _padding,
    _boundary,
    _filled,
)
