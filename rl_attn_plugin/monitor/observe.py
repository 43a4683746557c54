"""One update as a state of its own. No value is read back, so a GPU is not waited for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_attn_plugin.monitor.evidence import EVIDENCE, padding_evidence, token_evidence
from rl_attn_plugin.monitor.quantiles import BINS, bin_of, coarsen
from rl_attn_plugin.monitor.segments import segment_stats, turns
from rl_attn_plugin.monitor.settings import Settings
from rl_attn_plugin.monitor.state import COUNTS, MAXIMA, SUMS, State, split, vector
from rl_attn_plugin.monitor.tables import tabulate
from rl_attn_plugin.monitor.tokens import Batch, Tokens, bound, read
from rl_attn_plugin.monitor.validity import count
from rl_attn_plugin.monitor.worst import rank

_NONE = float("-inf")


def observe(batch: Batch, step: int, settings: Settings) -> State:
    """The state of a monitor that has seen one batch, which must hold at least one position.

    Args:
        batch: of any device.
        step: of the training loop.
        settings: of the monitor.
    """
    tokens = read(batch, settings)
    d, compared = tokens.d, tokens.compared
    size = d.abs()
    within = compared.double()
    gate = torch.zeros_like(d).where(
        compared, _NONE
    )  # added to a number it leaves it or takes it out of a maximum
    # the stand-ins are finite: multiplying is safe here, and cheaper than a select
    p_trainer, p_rollout = tokens.trainer.exp() * within, tokens.rollout.exp() * within
    apart = (p_trainer - p_rollout).abs()
    counts, sums, maxima = _totals(tokens, size, p_trainer, p_rollout, apart, gate, settings)
    shifted = (d - maxima["d"] + gate).exp()
    scaled = [torch.stack([shifted.sum(), (shifted * shifted).sum()])]
    for name, segment in (("sequence", tokens.segment), ("turn", turns(tokens))):
        if segment is None:
            scaled.append(scaled[0].new_zeros(2))
            continue
        found = segment_stats(tokens, segment, bound(segment), size, apart, settings)
        counts.update({f"{name}_{key}": value for key, value in found.counts.items()})
        sums.update({f"{name}_{key}": value for key, value in found.sums.items()})
        for key, value in found.maxima.items():
            sign = "-" if key.startswith("-") else ""
            maxima[f"{sign}{name}{key.removeprefix('-')}"] = value
        scaled.append(found.scaled)

    index = bin_of(size)
    histogram = torch.zeros(2 * BINS, dtype=torch.int64, device=d.device)
    histogram.scatter_add_(0, index + BINS * (d < 0), compared.long())
    tables = tabulate(tokens, size, gate, coarsen(index), settings)
    worst = rank(tokens, size, step, settings)
    evidence = token_evidence(tokens, size, settings) | padding_evidence(batch)
    zero = torch.zeros((), dtype=torch.int64, device=d.device)
    return State(
        counts=vector(counts, COUNTS, zero),
        evidence=vector(evidence, EVIDENCE, zero),
        sums=vector(sums, SUMS, zero.double()),
        scaled=torch.stack(scaled),
        maxima=vector(maxima, MAXIMA, zero.double() + _NONE),
        histogram=histogram.view(2, BINS),
        table_counts={name: table.counts for name, table in tables.items()},
        table_sums={name: table.sums for name, table in tables.items()},
        table_maxima={name: table.maxima for name, table in tables.items()},
        ranked_keys=worst.keys,
        ranked_logps=worst.logps,
        ranked_places=worst.places,
    )


def _totals(
    tokens: Tokens,
    size: Tensor,
    p_trainer: Tensor,
    p_rollout: Tensor,
    apart: Tensor,
    gate: Tensor,
    settings: Settings,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    d, compared = tokens.d, tokens.compared
    low, high = (math.log(bound) for bound in settings.clip)
    above, below = compared & (d > high), compared & (d < low)
    counts = {
        "active": count(tokens.active),
        "compared": count(compared),
        "bit_equal": count(compared & (d == 0)),
        "over_threshold": count(size > settings.over_threshold),
        "prob_over_half": count(apart > 0.5),
        "clip_above": count(above),
        "clip_below": count(below),
        **{f"invalid_{kind}": number for kind, number in tokens.invalid.items()},
    }
    grid, rest = split(d)
    grown = d.expm1()  # exp(d) - 1, exact near 0, and 0 where not compared
    within = compared.double()
    trainer, rollout = tokens.trainer * within, tokens.rollout * within
    truncated = d.clamp(max=high).exp() * within  # and no overflow where the ratio itself would
    sums = {
        "d": grid.sum(),
        "d_rest": rest.sum(),
        "abs": size.sum(),
        "square": (d * d).sum(),
        "k3": (grown - d).sum(),
        "chi2": (grown * grown).sum(),
        "logp_trainer": trainer.sum(),
        "logp_rollout": rollout.sum(),
        "trainer_square": (trainer * trainer).sum(),
        "rollout_square": (rollout * rollout).sum(),
        "product": (trainer * rollout).sum(),
        "prob_abs": apart.sum(),
        "truncated": truncated.sum(),
        "masked": (truncated * ~(above | below)).sum(),
    }
    moments = {
        "trainer": p_trainer,
        "rollout": p_rollout,
        "trainer_square": p_trainer * p_trainer,
        "rollout_square": p_rollout * p_rollout,
        "product": p_trainer * p_rollout,
    }
    for name, values in moments.items():
        coarse, fine = split(values)
        sums[f"prob_{name}"], sums[f"prob_{name}_rest"] = coarse.sum(), fine.sum()
    maxima = {
        "d": (d + gate).amax(),
        "-d": (gate - d).amax(),
        "prob_abs": (apart + gate).amax(),
    }
    return counts, sums, maxima
