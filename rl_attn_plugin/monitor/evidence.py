"""What diagnosis reads: integer counts of tokens that a fault would have moved to the other side of a question.

Every count answers one yes-or-no question about a token or a sequence, so counts of any batching, padding and number of
ranks add up exactly; `diagnosis` turns shares of them into findings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_attn_plugin.monitor.settings import Settings
from rl_attn_plugin.monitor.tokens import Batch, Tokens, bound
from rl_attn_plugin.monitor.validity import SENTINEL_FLOOR, count, reads_freely

EVIDENCE = (
    "late_judged",
    "late_closer",
    "early_judged",
    "early_closer",
    "plain",
    "plain_equal",
    "plain_pairs",
    "plain_pairs_equal",
    "trainer_bf16",
    "rollout_bf16",
    "trainer_fp16",
    "rollout_fp16",
    "sequences_judged",
    "sequences_equal",
    "plain_in_equal",
    "big_negative",
    "big_positive",
    "first",
    "first_over",
    "last",
    "last_over",
    "left_judged",
    "left_closer",
    "right_judged",
    "right_closer",
)

# mantissa bits of a float64 that the format lacks; plain tokens are above fp16's subnormal numbers
_LOW_BITS = {"bf16": 2**45 - 1, "fp16": 2**42 - 1}
_PLAIN = -0.01  # nats; a token nearer to certain says little: rounding makes both sides 0
_BIG = 0.05  # nats; several times what bf16 noise moves a typical token
_MIN_PLAIN = 8  # plain tokens of a sequence that is asked whether it is a copy


def token_evidence(tokens: Tokens, size: Tensor, settings: Settings) -> dict[str, Tensor]:
    """Evidence that needs no rows.

    Args:
        tokens: of the update.
        size: fp64 ``[T]``, abs(dlogp), 0 where not compared.
        settings: of the monitor.
    """
    trainer, rollout, compared = tokens.trainer, tokens.rollout, tokens.compared
    plain = compared & (trainer < _PLAIN) & (rollout < _PLAIN)
    equal = plain & (tokens.d == 0)
    found = {
        "plain": count(plain),
        "plain_equal": count(equal),
        "big_negative": count(tokens.d < -_BIG),
        "big_positive": count(tokens.d > _BIG),
    }
    for side, x in (("trainer", trainer), ("rollout", rollout)):
        for name, low_bits in _LOW_BITS.items():
            found[f"{side}_{name}"] = count(plain & (x.view(torch.int64) & low_bits == 0))
    if tokens.segment is None or tokens.first is None or tokens.previous is None:
        return found

    before = tokens.previous.clamp(min=0)
    pair = (tokens.previous >= 0) & compared & compared.index_select(0, before)
    # Trainer late by one: what it says of this token is what the rollout says of the one before. Early: after.
    late, early = (
        (trainer - rollout.index_select(0, before)).abs(),
        (trainer.index_select(0, before) - rollout).abs(),
    )
    other = size.index_select(0, before)
    for name, moved, here in (("late", late, size), ("early", early, other)):
        judged = pair & (torch.maximum(moved, here) > -_PLAIN)  # two certain tokens say nothing
        found[f"{name}_judged"], found[f"{name}_closer"] = count(judged), count(judged & (moved < here))
    plain_pair = pair & plain & plain.index_select(0, before)
    found["plain_pairs"] = count(plain_pair)
    found["plain_pairs_equal"] = count(plain_pair & equal & equal.index_select(0, before))

    def add(rows: Tensor) -> Tensor:
        sums = torch.zeros(segments, dtype=torch.int64, device=rows.device)
        return sums.scatter_add_(0, segment, rows.long())

    segment, segments = tokens.segment, bound(tokens.segment)
    plain_in, equal_in = add(plain), add(equal)
    judged = plain_in >= _MIN_PLAIN
    copied = judged & (equal_in == plain_in)
    found["sequences_judged"], found["sequences_equal"] = count(judged), count(copied)
    found["plain_in_equal"] = (plain_in * copied).sum()

    over = size > settings.over_threshold
    followed = torch.zeros_like(compared).scatter_(0, before, tokens.previous >= 0)
    # index 0 is also where tokens without a predecessor point to
    followed[:1] = (tokens.previous == 0).any()
    first, last = compared & tokens.first, compared & ~followed
    found["first"], found["first_over"] = count(first), count(first & over)
    found["last"], found["last_over"] = count(last), count(last & over)
    return found


def padding_evidence(batch: Batch) -> dict[str, Tensor]:
    """Whether a row's rollout log-probs fit better when its mask's span is moved to the left or right border; empty for
    packed tokens.

    Args:
        batch: the update.
    """
    if batch.mask.ndim == 1:
        return {}
    active = batch.mask != 0
    columns = active.shape[1]
    column = torch.arange(columns, device=active.device).expand(active.shape)
    begin = column.where(active, columns).amin(1, keepdim=True)
    end = column.where(active, -1).amax(1, keepdim=True)
    found: dict[str, Tensor] = {}
    for side, shift in (("left", -begin), ("right", columns - 1 - end)):
        rows = (shift != 0)[:, 0].nonzero()[:, 0] if reads_freely(shift) else slice(None)
        trainer, rollout = batch.trainer[rows].float(), batch.rollout[rows].float()
        judged = active[rows] & (shift[rows] != 0) & _is_logp(trainer)
        # a fill or a NaN where a log-prob should be is as far as can be
        here = (trainer - rollout).abs().where(_is_logp(rollout) & (rollout < 0), float("inf"))
        moved = rollout.gather(1, (column[rows] + shift[rows]).clamp_(0, columns - 1))
        # an exact 0 there is more likely a fill than a certain token
        closer = judged & _is_logp(moved) & (moved < 0) & ((trainer - moved).abs() < here)
        found[f"{side}_judged"], found[f"{side}_closer"] = count(judged), count(closer)
    return found


def _is_logp(x: Tensor) -> Tensor:
    return (x <= 0) & (x >= SENTINEL_FLOOR)
