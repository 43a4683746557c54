"""Numbers and names as people read them; shared by the terminal and the page."""

from __future__ import annotations

VERDICT_WORDS = {
    "PASS": "trainer and rollout agree within the thresholds",
    "DRIFT": "trainer and rollout disagree beyond the thresholds",
    "INCONCLUSIVE": "too little was compared to tell",
    "INVALID": "the data cannot be judged",
}
PATH_WORDS = {
    "recorded": "recorded while sampling",
    "chunked_prefill": "chunked prefill",
    "decode_replay": "decode replay",
}
# step name -> what it subtracts, what kind of difference it isolates
STEP_WORDS = {
    "full_minus_chunked": ("full - chunked prefill", "one full packed prefill against chunks over a cache"),
    "chunked_minus_decode_replay": ("chunked - decode replay", "prefill against token-by-token decode"),
    "decode_replay_minus_recorded": (
        "decode replay - recorded",
        "another batch, other pages, another moment",
    ),
}


def number(value: float | None) -> str:
    """Four significant digits, a dash for what does not exist, a plain 0 for exactly 0."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.3e}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4f}"


def percent(share: float | None) -> str:
    """A share as signed percent where negative, a dash for what does not exist."""
    return "-" if share is None else f"{100 * share:.1f} %"
