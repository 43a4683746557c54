"""TransformerEngine's own merge of partial attentions, as an oracle that shares no code with ours.

Importing this module does not import TransformerEngine; `load_te_oracle` does, and lets `te_probe` look at what it
finds. What fails a probe is never used, and the reason says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Literal

import torch  # before transformer_engine, whose libraries resolve their symbols against torch's
from torch import Tensor

from rl_attn_plugin import provenance, validation
from rl_attn_plugin.ops.cache import merge_attention
from rl_attn_plugin.replay import te_probe
from rl_attn_plugin.replay.te_probe import LSE, OUT_ADD, OUT_INCREMENTAL, OUT_INIT, Helper, Unusable
from rl_attn_plugin.types import AttentionOutput

Probe = Literal["passed", "failed", "not_run"]

_SEQ_DIM = 1  # of S in out [B, S, H, D], as TransformerEngine counts for "bshd"


class MergeMode(str, Enum):
    """In which order, and by whose code, partials become one.

    Attributes:
        TWO_PHASE: TransformerEngine's schedule up to 2.19: first all LSEs, then every output weighted once.
        PAIRWISE: TransformerEngine's helpers on one partial after the other; its own schedule since 2.20.
        ASCENDING: `rl_attn_plugin.merge_attention`, the yardstick beside them.
    """

    TWO_PHASE = "te_two_phase"
    PAIRWISE = "te_pairwise"
    ASCENDING = "ours"


@dataclass(frozen=True, slots=True)
class OracleProvenance:
    """What was found, what was proved about it, and whose arithmetic runs.

    Attributes:
        te_available: every probe passed.
        te_version: of the installed distribution, None without one.
        te_module: the module the helpers were taken from.
        te_symbols: their names.
        te_capability_probe: the helpers exist and can be called.
        te_signature_checked: they take the arguments they are known by.
        te_numeric_selftest: they compute what an fp64 merge computes.
        te_compiled: TransformerEngine hands them to torch.compile (``NVTE_TORCH_COMPILE``); None if none was found.
        merge_mode: of the merge described, None while it is about the oracle as a whole.
        actual_backend: whose code merges, None when nothing can.
        actual_backend_source: the file, or the function, that code comes from.
        accum_dtype: of the running output and LSE.
        downcast_at: fp32 partials give an fp32 result.
        reason: why the oracle is not available.
    """

    te_available: bool = False
    te_version: str | None = None
    te_module: str | None = None
    te_symbols: tuple[str, ...] = ()
    te_capability_probe: Probe = "not_run"
    te_signature_checked: bool = False
    te_numeric_selftest: Probe = "not_run"
    te_compiled: bool | None = None
    merge_mode: str | None = None
    actual_backend: str | None = None
    actual_backend_source: str | None = None
    accum_dtype: str = "fp32"
    downcast_at: str = "never"
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "te_symbols": list(self.te_symbols)}


class TEUnavailable(RuntimeError):
    """There is no TransformerEngine to compare with; ``reason`` says why, ``provenance`` how far it got."""

    def __init__(self, provenance: OracleProvenance) -> None:
        super().__init__(provenance)
        self.provenance = provenance

    @property
    def reason(self) -> str:
        return self.provenance.reason or ""

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class TEOracle:
    """Merges partials with TransformerEngine's helpers. Made by `load_te_oracle`, which has proved them.

    Attributes:
        provenance: of the oracle; `provenance_of` is that of one mode.
    """

    provenance: OracleProvenance
    _helpers: Mapping[str, Helper] = field(repr=False)

    @property
    def native_mode(self) -> MergeMode:
        """The schedule that TransformerEngine itself follows in this release."""
        return MergeMode.PAIRWISE if OUT_INCREMENTAL in self._helpers else MergeMode.TWO_PHASE

    @property
    def modes(self) -> tuple[MergeMode, ...]:
        """What `merge` takes: from 2.20 on TransformerEngine has no helper left for two phases."""
        two_phase = (MergeMode.TWO_PHASE,) if self.native_mode is MergeMode.TWO_PHASE else ()
        return (*two_phase, MergeMode.PAIRWISE, MergeMode.ASCENDING)

    def provenance_of(self, mode: MergeMode) -> OracleProvenance:
        """What `merge` runs in this mode."""
        if mode is MergeMode.ASCENDING:
            source = f"{merge_attention.__module__}.{merge_attention.__qualname__}"
            return replace(
                self.provenance,
                merge_mode=mode.value,
                actual_backend="rl_attn_plugin",
                actual_backend_source=source,
            )
        return replace(self.provenance, merge_mode=mode.value)

    @torch.no_grad()
    def merge(self, outs: Tensor, lses: Tensor, mode: MergeMode | str) -> AttentionOutput:
        """Merge normalised partials over disjoint keys, in order along P, in fp32. Forward only.

        An empty partial (``lse`` of ``-inf``, or ``+inf`` with a zero output) leaves its row with exactly the bits
        of the merge without it, whatever its ``out`` holds; a row that is empty throughout gives ``(0, -inf)``.

        Args:
            outs: fp32 ``[P, B, S, H, D]``.
            lses: fp32 ``[P, B, H, S]``, natural log.
            mode: one of `modes`.

        Returns:
            fp32 ``out [B, S, H, D]`` and ``lse [B, H, S]``.

        Raises:
            ValueError: with every reason.
        """
        self._check(outs, lses, mode)
        mode = MergeMode(mode)
        if mode is MergeMode.ASCENDING:
            return merge_attention(outs, lses)
        # TransformerEngine makes NaN of two -inf, and lets +inf swallow the row: no empty state reaches it as such. The
        # lowest finite number weighs exactly nothing beside any LSE, and two of them stay finite.
        zero_out = (outs == 0).all(-1).transpose(-1, -2)
        empty = (lses == -torch.inf) | ((lses == torch.inf) & zero_out)
        outs = outs.masked_fill(empty.transpose(-1, -2)[..., None], 0.0)
        lses = lses.masked_fill(empty, torch.finfo(torch.float32).min)
        out, lse = (self._two_phase if mode is MergeMode.TWO_PHASE else self._pairwise)(outs, lses)
        return AttentionOutput(out, lse.masked_fill(empty.all(0), -torch.inf))

    def _two_phase(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        lse = lses[0].clone()  # the helper works in place
        for part_lse in lses[1:]:
            self._helpers[LSE](lse, part_lse)
        out: Tensor = self._helpers[OUT_INIT](outs[0], lse, lses[0], _SEQ_DIM)
        for part, part_lse in zip(outs[1:], lses[1:], strict=True):
            self._helpers[OUT_ADD](out, part, lse, part_lse, _SEQ_DIM)
        return out, lse

    def _pairwise(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = outs[0], lses[0]  # written in place: merge's own copies, and read no more
        for part, part_lse in zip(outs[1:], lses[1:], strict=True):
            before = lse.clone()
            self._helpers[LSE](lse, part_lse)
            if OUT_INCREMENTAL in self._helpers:
                self._helpers[OUT_INCREMENTAL](out, part, before, lse, part_lse, _SEQ_DIM)
            else:
                out = self._helpers[OUT_INIT](out, lse, before, _SEQ_DIM)
                self._helpers[OUT_ADD](out, part, lse, part_lse, _SEQ_DIM)
        return out, lse

    def _check(self, outs: Tensor, lses: Tensor, mode: MergeMode | str) -> None:
        why = validation.Reasons("TEOracle.merge")
        if why.need(outs.dim() == 5, "outs must be [P, B, S, H, D], got {}", validation.shape(outs)):
            parts, batch, tokens, heads, _ = outs.shape
            expected = [parts, batch, heads, tokens]
            why.need(
                validation.shape(lses) == expected,
                "lses must be {}, got {}",
                expected,
                validation.shape(lses),
            )
            why.need(parts > 0, "outs must hold at least one partial, got {}", parts)
        for name, x in (("outs", outs), ("lses", lses)):
            why.need(x.dtype == torch.float32, "{} must be float32, got {}", name, x.dtype)
        why.need(
            lses.device == outs.device, "lses must be on outs' device {}, got {}", outs.device, lses.device
        )
        why.need(
            mode in self.modes,
            "mode must be one of {} with TransformerEngine {}, got {!r}",
            [m.value for m in self.modes],
            self.provenance.te_version,
            mode,
        )
        why.done()


def load_te_oracle(device: torch.device | str | None = None) -> TEOracle:
    """Import TransformerEngine, find its merge helpers and prove them; nothing is cached.

    TransformerEngine compiles its helpers unless ``NVTE_TORCH_COMPILE=0`` is set before it is first imported, which
    is the way to bits that do not depend on a compiler.

    Args:
        device: where the numeric self-test runs; by default the GPU if there is one, since compiled helpers differ.

    Raises:
        TEUnavailable: with the reason, and the provenance up to the probe that failed.
    """
    known = OracleProvenance(te_version=provenance.versions()["transformer-engine"])
    try:
        module = te_probe.locate()
        # each probe counts as failed until the next line says otherwise
        known = replace(known, te_module=module.__name__, te_capability_probe="failed")
        helpers = te_probe.helpers(module)
        known = replace(known, te_symbols=tuple(helpers), te_capability_probe="passed")
        te_probe.check_signatures(helpers)
        known = replace(
            known,
            te_signature_checked=True,
            te_compiled=te_probe.is_compiled(helpers),
            te_numeric_selftest="failed",
        )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        oracle = TEOracle(known, helpers)
        for mode in oracle.modes:
            if mode is not MergeMode.ASCENDING:
                te_probe.self_test(partial(oracle.merge, mode=mode), mode.value, device)
    except Unusable as why:
        raise TEUnavailable(replace(known, reason=str(why))) from why
    usable = replace(
        known,
        te_available=True,
        te_numeric_selftest="passed",
        actual_backend="transformer_engine",
        actual_backend_source=module.__file__,
    )
    return TEOracle(usable, helpers)
