"""The monitor: log-probs in, named numbers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_attn_plugin.monitor import metrics, reduce
from rl_attn_plugin.monitor.diagnosis import Diagnosis, diagnose
from rl_attn_plugin.monitor.evidence import EVIDENCE
from rl_attn_plugin.monitor.observe import observe
from rl_attn_plugin.monitor.quantiles import edges
from rl_attn_plugin.monitor.settings import Settings, labelled
from rl_attn_plugin.monitor.state import COUNTS, State, empty, merge
from rl_attn_plugin.monitor.tables import table_sizes
from rl_attn_plugin.monitor.tokens import batch_of
from rl_attn_plugin.monitor.worst import DriftedToken, Tokenizer, places, shown

_FORMAT = "rl-attn/monitor/1"
_ACTIVE, _SHAPE, _UPDATES, _REFUSED, _EMPTY = (
    COUNTS.index(name) for name in ("active", "invalid_shape", "updates", "updates_refused", "updates_empty")
)


class DriftMonitor:
    """Streaming statistics of ``dlogp = logp_trainer - logp_rollout`` on the tokens that a mask selects.

    The numbers depend on the tokens alone: not on how they were padded, packed, cut into updates or spread over ranks.
    Counts are exact, everything else agrees to 1e-12.

    >>> monitor = DriftMonitor(groups={"turn": 8, "env": ["math", "code"]})
    >>> monitor.update(logp_trainer, logp_rollout, mask, step=step)  # each micro-batch
    >>> monitor.all_reduce().compute()  # each step, on every rank
    >>> monitor.reset()
    """

    def __init__(
        self,
        *,
        over_threshold: float = 0.2,
        clip: tuple[float, float] = (0.5, 2.0),
        groups: Mapping[str, int | Sequence[str]] | None = None,
        sentinels: Sequence[float] = (),
        worst: int = 32,
        context: tuple[int, int] = (24, 12),
    ) -> None:
        """See `Settings` for what the arguments mean.

        Args:
            over_threshold: nats.
            clip: lower and upper bound of exp(dlogp).
            groups: labels of each group, or how many there are; ``turn`` gives log-ratios of turns, ``lag`` (policy
                lag) lets stale weights be told.
            sentinels: further values that mean no log-prob.
            worst: how many tokens are kept.
            context: tokens kept before and after each of them.
        """
        self.settings = Settings(
            over_threshold=over_threshold,
            clip=clip,
            groups=labelled(groups or {}),
            sentinels=tuple(sentinels),
            worst=worst,
            context=context,
        )
        self._states: dict[torch.device, State] = {}

    def update(
        self,
        logp_trainer: Tensor | None,
        logp_rollout: Tensor | None,
        mask: Tensor,
        *,
        step: int,
        token_ids: Tensor | None = None,
        positions: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        groups: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Takes in padded ``[B, S]`` or packed ``[T]`` tokens. Reads nothing back from a device.

        Position ``t`` of everything belongs to the token *at* ``t``: nothing is shifted. What stands where the mask is
        0 is not looked at; it may be NaN. A row is one sequence unless ``sequence_ids`` says otherwise; packed tokens
        have no sequences without them. A sequence is handed over whole, its tokens together and in order.

        Args:
            logp_trainer: nats, any floating dtype. None: the trainer has none for these tokens, which is counted.
            logp_rollout: likewise. When the shapes of the two and of the mask differ, the update is refused, and its
                tokens are counted as ``invalid/shape``.
            mask: bool, or 0 and 1; 1 where a token was sampled.
            step: of the training loop; kept with the worst tokens.
            token_ids: the tokens, integers, for the worst tokens' text.
            positions: index of each token in its completion, from 0; by default counted over the active tokens of
                its sequence.
            sequence_ids: integers that tell sequences apart, ``[B]`` or like the mask.
            groups: by name, the index of each token's label, ``[B]`` or like the mask.

        Raises:
            ValueError: a description of the tokens has another shape than the mask, or names a group that was not
                declared.
        """
        given = [x for x in (logp_trainer, logp_rollout) if x is not None]
        device = given[0].device if given else mask.device
        state = self._states.get(device)
        if state is None:
            state = self._empty(device)
        with torch.no_grad():
            active = torch.count_nonzero(mask).to(device, non_blocking=True)
            counted = torch.zeros_like(state.counts)
            counted[_UPDATES] = 1
            if any(x.shape != mask.shape for x in given):
                counted[_REFUSED] = 1
                counted[_ACTIVE] = counted[_SHAPE] = active
            else:
                counted[_EMPTY] = active == 0
                described = (token_ids, positions, sequence_ids, groups or {})
                batch = batch_of(logp_trainer, logp_rollout, mask, *described, self.settings)
                for part in batch.chunks():
                    state = merge(state, observe(part, step, self.settings))
        # Not in place: merged monitors share their states.
        self._states[device] = replace(state, counts=state.counts + counted)

    @property
    def updated(self) -> bool:
        """Whether there was an update since the last reset; a device is not waited for."""
        return bool(self._states)

    def compute(self) -> dict[str, float]:
        """All scalar metrics as plain floats; docs/metrics.md defines each. What cannot be told has no key: without a
        compared token there is no ``dlogp/mean``. A number that overflows is infinite. Waits for the device."""
        return metrics.metrics(self.state())

    def table(self, name: str) -> list[metrics.Bin]:
        """dlogp by ``position``, by ``probability`` or by a group; bins without tokens are left out.

        Raises:
            ValueError: there is no such table.
        """
        return metrics.table(self.state(), self.settings, name)

    def histogram(self) -> tuple[list[float], list[int], list[int]]:
        """abs(dlogp) in bins of equal relative width: their edges, and the tokens with dlogp >= 0 and below 0. Bin i lies
        between edges i - 1 and i; bin 0 holds the exact zeros."""
        positive, negative = self.state().histogram.tolist()
        return edges(), positive, negative

    def worst(self, tokenizer: Tokenizer | None = None) -> list[DriftedToken]:
        """The tokens with the largest abs(dlogp), largest first, with text when a tokenizer is given."""
        return shown(self.state(), self.settings, 0, tokenizer)

    def invalid(self, tokenizer: Tokenizer | None = None) -> list[DriftedToken]:
        """A sample of the active tokens that have no log-prob on one side, by step, sequence and position: where a NaN
        comes from."""
        return shown(self.state(), self.settings, 1, tokenizer)

    def diagnose(self) -> list[Diagnosis]:
        """Faults that the log-probs show, most confident first; see `diagnosis`."""
        return diagnose(self.state(), self.settings)

    def merge(self, other: DriftMonitor) -> DriftMonitor:
        """A monitor that has seen what both have seen; neither changes.

        Raises:
            ValueError: the two have different settings.
        """
        if self.settings != other.settings:
            raise ValueError(f"monitors must have equal settings, got {self.settings} and {other.settings}")
        merged = self._like()
        merged._states = dict(self._states)
        for device, state in other._states.items():
            mine = merged._states.get(device)
            merged._states[device] = state if mine is None else merge(mine, state)
        return merged

    def all_reduce(
        self, group: dist.ProcessGroup | None = None, *, device: torch.device | str | None = None
    ) -> DriftMonitor:
        """A monitor that has seen what the monitors of all ranks have seen, the same on each; this one does not change, so
        that calling twice counts nothing twice. Every rank of the group must call it, also one without an update.

        Args:
            group: as for `torch.distributed`; None is all ranks.
            device: that the group's backend can reach; by default that of this rank's tensors, else the CPU for gloo and
                the current GPU for others.
        """
        if device is None:
            gloo = dist.get_backend(group) == "gloo"
            device = "cpu" if gloo else torch.device("cuda", torch.cuda.current_device())
        reduced = self._like()
        place = torch.device(device)
        reduced._states = {place: reduce.all_reduce(self.state(place), group)}
        return reduced

    def state(self, device: torch.device | str = "cpu") -> State:
        """The state of all devices as one, on one device."""
        place = torch.device(device)
        whole = self._empty(place)
        for state in self._states.values():
            whole = merge(whole, state.to(place))
        return whole

    def state_dict(self) -> dict[str, Any]:
        """Settings and state, on the CPU: plain values and tensors."""
        return {"format": _FORMAT, "settings": self.settings.to_dict(), "state": self.state().to_dict()}

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any]) -> DriftMonitor:
        """The inverse of `state_dict`.

        Raises:
            ValueError: it was saved in another format.
        """
        if saved.get("format") != _FORMAT:
            raise ValueError(f"a saved monitor must have format {_FORMAT!r}, got {saved.get('format')!r}")
        monitor = cls._of(Settings.from_dict(saved["settings"]))
        monitor._states = {torch.device("cpu"): State.from_dict(saved["state"])}
        return monitor

    def reset(self) -> None:
        """Forgets everything but the settings."""
        self._states.clear()

    def _like(self) -> DriftMonitor:
        return self._of(self.settings)

    @classmethod
    def _of(cls, settings: Settings) -> DriftMonitor:
        monitor = cls()
        monitor.settings = settings
        return monitor

    def _empty(self, device: torch.device) -> State:
        return empty(self.settings, table_sizes(self.settings), len(EVIDENCE), places(self.settings), device)
