"""What a monitor remembers: counts, sums, maxima, histograms and the worst tokens. Of fixed size, and merged by
adding and comparing alone.

Counts are integers, so their sums are exact in any order. Float sums are fp64; one whose terms may cancel is kept as two,
split by `split`, the first of which adds up without rounding. Sums of exp(x) are kept relative to the largest x seen, so
they cannot overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.monitor.quantiles import BINS, COARSE_BINS
from rl_attn_plugin.monitor.settings import Settings
from rl_attn_plugin.monitor.validity import KINDS, SIDES

SEGMENTS = ("sequence", "turn")

COUNTS = (
    "active",
    "compared",
    "bit_equal",
    "over_threshold",
    "prob_over_half",
    "clip_above",
    "clip_below",
    *(f"invalid_{side}_{kind}" for side in SIDES for kind in KINDS),
    "invalid_mask",
    "invalid_shape",
    "updates",
    "updates_refused",
    "updates_empty",
    *(
        f"{segment}_{name}"
        for segment in SEGMENTS
        for name in ("count", "incomplete", "prob_over_half", "clip_above", "clip_below")
    ),
)

SUMS = (
    *("d", "d_rest", "abs", "square", "k3", "chi2", "logp_trainer", "logp_rollout"),
    *("trainer_square", "rollout_square", "product"),
    *("prob_abs", "truncated", "masked"),
    *(
        f"prob_{name}{rest}"
        for name in ("trainer", "rollout", "trainer_square", "rollout_square", "product")
        for rest in ("", "_rest")
    ),
    *(
        f"{segment}_{name}"
        for segment in SEGMENTS
        for name in (
            "d",
            "d_rest",
            "abs",
            "mean",
            "mean_rest",
            "mean_abs",
            "abs_mean",
            "geometric",
            "truncated",
            "masked",
        )
    ),
)

MAXIMA = (
    *("d", *SEGMENTS),  # the scale of each row of `scaled`
    *("-d", *(f"-{segment}" for segment in SEGMENTS)),
    *("prob_abs", *(f"{sign}{segment}_mean" for sign in ("", "-") for segment in SEGMENTS)),
)

_SCALES = 1 + len(SEGMENTS)
_GRID = 1.5 * 2.0**28  # adding it rounds to multiples of 2^-24


@dataclass(frozen=True, slots=True)
class State:
    """Everything on one device.

    Attributes:
        counts: int64, in the order of `COUNTS`.
        evidence: int64, in the order of `evidence.EVIDENCE`.
        sums: fp64, in the order of `SUMS`.
        scaled: fp64 ``[3, 2]``: sums of exp(x - m) and exp(2 (x - m)) over tokens, sequences and turns, where m is the
            largest x, the first three of the maxima.
        maxima: fp64, in the order of `MAXIMA`; ``-inf`` where nothing was seen. A minimum is the maximum of the
            negative.
        histogram: int64 ``[2, BINS]``: abs(dlogp) of tokens with dlogp >= 0, then of those with dlogp < 0.
        table_counts: int64 ``[N, COARSE_BINS]`` by table: abs(dlogp) in coarse bins.
        table_sums: fp64 ``[N, 2]`` by table: dlogp and its abs.
        table_maxima: fp64 ``[N]`` by table: the largest abs(dlogp).
        ranked_keys: int64 ``[2, K]``, the worst tokens and invalid ones, see `worst.Ranked`.
        ranked_logps: fp64 ``[2, K, 2]``.
        ranked_places: int64 ``[2, K, ..]``.
    """

    counts: Tensor
    evidence: Tensor
    sums: Tensor
    scaled: Tensor
    maxima: Tensor
    histogram: Tensor
    table_counts: dict[str, Tensor]
    table_sums: dict[str, Tensor]
    table_maxima: dict[str, Tensor]
    ranked_keys: Tensor
    ranked_logps: Tensor
    ranked_places: Tensor

    def to(self, device: torch.device | str) -> State:
        """The same on another device."""
        moved: dict[str, Any] = {
            name: {k: x.to(device) for k, x in value.items()} if isinstance(value, dict) else value.to(device)
            for name, value in self._items()
        }
        return State(**moved)

    def to_dict(self) -> dict[str, Tensor]:
        """Flat, by name; a table's are ``<field>/<table>``."""
        flat: dict[str, Tensor] = {}
        for name, value in self._items():
            if isinstance(value, dict):
                flat.update({f"{name}/{table}": x for table, x in value.items()})
            else:
                flat[name] = value
        return flat

    @classmethod
    def from_dict(cls, flat: Mapping[str, Tensor]) -> State:
        """The inverse of `to_dict`."""
        tables: dict[str, Any] = {item.name: {} for item in fields(cls) if "table" in item.name}
        plain: dict[str, Any] = {}
        for name, x in flat.items():
            field, _, table = name.partition("/")
            if table:
                tables[field][table] = x
            else:
                plain[field] = x
        return cls(**plain, **tables)

    def _items(self) -> list[tuple[str, Tensor | dict[str, Tensor]]]:
        return [(item.name, getattr(self, item.name)) for item in fields(self)]


def merge(a: State, b: State) -> State:
    """Of two states of the same settings on the same device. Commutative, and associative up to rounding."""
    maxima = torch.maximum(a.maxima, b.maxima)
    keys, logps, places = best_of(
        torch.cat([a.ranked_keys, b.ranked_keys], dim=1),
        torch.cat([a.ranked_logps, b.ranked_logps], dim=1),
        torch.cat([a.ranked_places, b.ranked_places], dim=1),
        a.ranked_keys.shape[1],
    )
    return State(
        counts=a.counts + b.counts,
        evidence=a.evidence + b.evidence,
        sums=a.sums + b.sums,
        scaled=rescaled(a, maxima) + rescaled(b, maxima),
        maxima=maxima,
        histogram=a.histogram + b.histogram,
        table_counts={name: x + b.table_counts[name] for name, x in a.table_counts.items()},
        table_sums={name: x + b.table_sums[name] for name, x in a.table_sums.items()},
        table_maxima={name: torch.maximum(x, b.table_maxima[name]) for name, x in a.table_maxima.items()},
        ranked_keys=keys,
        ranked_logps=logps,
        ranked_places=places,
    )


def rescaled(state: State, maxima: Tensor) -> Tensor:
    """The scaled sums of a state relative to other maxima."""
    steps = state.maxima[:_SCALES] - maxima[:_SCALES]
    factor = steps.where(state.maxima[:_SCALES].isfinite(), 0.0).exp()
    return state.scaled * torch.stack([factor, factor * factor], dim=1)


def best_of(keys: Tensor, logps: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` tokens with the largest keys of each row, with what belongs to them."""
    kept = keys.topk(count, dim=1)
    row = torch.arange(keys.shape[0], device=keys.device)[:, None]
    return kept.values, logps[row, kept.indices], places[row, kept.indices]


def empty(
    settings: Settings, sizes: Mapping[str, int], evidence: int, places: int, device: torch.device
) -> State:
    """The state that has seen nothing.

    Args:
        settings: of the monitor.
        sizes: bins of each table.
        evidence: how many counts of evidence.
        places: columns of `ranked_places`.
        device: where.
    """

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    def floats(*shape: int, fill: float = 0.0) -> Tensor:
        return torch.full(shape, fill, dtype=torch.float64, device=device)

    low = float("-inf")
    return State(
        counts=ints(len(COUNTS)),
        evidence=ints(evidence),
        sums=floats(len(SUMS)),
        scaled=floats(_SCALES, 2),
        maxima=floats(len(MAXIMA), fill=low),
        histogram=ints(2, BINS),
        table_counts={name: ints(size, COARSE_BINS) for name, size in sizes.items()},
        table_sums={name: floats(size, 2) for name, size in sizes.items()},
        table_maxima={name: floats(size, fill=low) for name, size in sizes.items()},
        ranked_keys=ints(2, settings.worst) - 1,
        ranked_logps=floats(2, settings.worst, 2),
        ranked_places=ints(2, settings.worst, places),
    )


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` as a multiple of 2^-24 and a rest, exactly.

    The multiples add up without rounding while their sum stays below 2^29, so terms of either sign may cancel; the rests
    are so small that their rounding does not matter.

    Args:
        x: fp64, smaller than 2^27.
    """
    coarse = (x + _GRID) - _GRID
    return coarse, x - coarse


def vector(values: Mapping[str, Tensor], names: tuple[str, ...], missing: Tensor) -> Tensor:
    """Scalars in the order of ``names``."""
    return torch.stack([values.get(name, missing) for name in names])
