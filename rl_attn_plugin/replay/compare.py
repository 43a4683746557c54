"""Runs the paths of a comparison and holds each against its reference."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_attn_plugin import provenance
from rl_attn_plugin.ops.rope import apply_rope
from rl_attn_plugin.replay import expectations, paths
from rl_attn_plugin.replay.backends import Kernels, Reference, backend_of
from rl_attn_plugin.replay.decode import DECODE, DecodeOptions, check_decode, decode_replay
from rl_attn_plugin.replay.difference import TensorDrift, tensor_drift
from rl_attn_plugin.replay.inputs import AttentionComparisonInputs
from rl_attn_plugin.replay.packing import pack
from rl_attn_plugin.replay.paths import NotHere, Partials, Replay
from rl_attn_plugin.replay.peers import decode_and_prefill, importable_peers
from rl_attn_plugin.replay.readout import active_rows, selected_logps
from rl_attn_plugin.replay.results import (
    AttentionComparisonReport,
    AttentionPathDrift,
    AttentionPathResult,
    Check,
    Unavailable,
)
from rl_attn_plugin.replay.rotation import positions_of, rope_of, rotary_dim, rotate_plainly
from rl_attn_plugin.replay.te_oracle import MergeMode, TEUnavailable, load_te_oracle
from rl_attn_plugin.types import Impl
from rl_attn_plugin.validation import Reasons

UNFUSED = "unfused_rope_attention"
FUSED = "fused_rope_attention"
PLAIN = "plain_rope_attention"
FP64_MERGE = "fp64_merge"
TRANSFORMER_ENGINE = paths.TE_MERGE

OnPath = Callable[[str], None]
_T = TypeVar("_T")


def compare_attention(
    inputs: AttentionComparisonInputs,
    *,
    query_chunk_size: int | None = None,
    kv_page_size: int | None = None,
    include_transformer_engine: bool = True,
    require_transformer_engine: bool = False,
    include_peers: bool = True,
    decode: DecodeOptions | None = None,
    impl: Impl | str = Impl.AUTO,
    seed: int = 0,
    label: str = "",
    on_path: OnPath | None = None,
) -> AttentionComparisonReport:
    """Every path that these inputs allow, in one report: what ``rl-attn compare`` runs.

    Args:
        inputs: what to compare.
        query_chunk_size: of chunked prefill; default a third of the queries, at most 512.
        kv_page_size: of every paged path; default 16 up to 1024 keys, else 64.
        include_transformer_engine: merge partials with TransformerEngine too.
        require_transformer_engine: without it the verdict is INCONCLUSIVE.
        include_peers: hold other libraries' decode against their own prefill.
        decode: how the decode goes.
        impl: ``"auto"``, ``"triton"``, ``"torch"``, or ``"reference"`` for fp32.
        seed: of page placement.
        label: of the inputs, for readers.
        on_path: called with each path's name before it runs.

    Raises:
        ValueError: with every reason, or when ``impl`` cannot be met.
    """
    rows = _Rows(inputs, impl, query_chunk_size, kv_page_size, seed, on_path)
    decode = decode or DecodeOptions()
    if inputs.causal and rows.replay.packed.queries == rows.replay.packed.keys:
        check_decode(decode, rows.replay.packed, rows.replay.page_size)
    _attention(rows, include_transformer_engine or require_transformer_engine)
    _decode(rows, decode)
    if include_peers:
        _peers(rows)
    if inputs.rope_positions is not None:
        _rope(rows)
    required = [TRANSFORMER_ENGINE] if require_transformer_engine else []
    return rows.report(paths.FULL, label, required)


def compare_single_gpu_attention(
    inputs: AttentionComparisonInputs,
    *,
    query_chunk_size: int | None = None,
    kv_page_size: int | None = None,
    include_transformer_engine: bool = False,
    impl: Impl | str = Impl.AUTO,
    label: str = "",
) -> AttentionComparisonReport:
    """Chunks, pages, partials and their merges against full prefill; arguments as `compare_attention`'s."""
    rows = _Rows(inputs, impl, query_chunk_size, kv_page_size, 0, None)
    _attention(rows, include_transformer_engine)
    return rows.report(paths.FULL, label, [])


def compare_decode_replay(
    inputs: AttentionComparisonInputs,
    *,
    kv_page_size: int | None = None,
    tokens_per_step: int = 1,
    prefix_length: int | None = None,
    block_table: Tensor | None = None,
    impl: Impl | str = Impl.AUTO,
    label: str = "",
) -> AttentionComparisonReport:
    """Token-by-token decode over pages against full prefill.

    Args:
        inputs: causal, with as many queries as keys.
        kv_page_size: see `compare_attention`.
        tokens_per_step: see `DecodeOptions`, as the two that follow.
        prefix_length: see `DecodeOptions`.
        block_table: see `DecodeOptions`.
        impl: see `compare_attention`.
        label: see `compare_attention`.

    Raises:
        ValueError: with every reason.
    """
    rows = _Rows(inputs, impl, None, kv_page_size, 0, None)
    options = DecodeOptions(
        tokens_per_step=tokens_per_step, prefix_length=prefix_length, block_table=block_table
    )
    check_decode(options, rows.replay.packed, rows.replay.page_size)
    _decode(rows, options)
    return rows.report(paths.FULL, label, [])


def compare_single_gpu_rope_attention(
    inputs: AttentionComparisonInputs, *, impl: Impl | str = Impl.AUTO, label: str = ""
) -> AttentionComparisonReport:
    """A rotation inside the attention, and one written plainly, against the rotation before it.

    Raises:
        ValueError: with every reason; ``rope_positions`` are needed.
    """
    why = Reasons("compare_single_gpu_rope_attention")
    why.need(inputs.rope_positions is not None, "inputs must have rope_positions, got None")
    why.done()
    rows = _Rows(inputs, impl, None, None, 0, None)
    _rope(rows)
    return rows.report(UNFUSED, label, [])


class _Rows:
    """The rows of one report, and what they share."""

    def __init__(
        self, inputs: AttentionComparisonInputs, impl: Impl | str, chunk: int | None, page_size: int | None, seed: int,
        on_path: OnPath | None,
    ) -> None:  # fmt: skip
        why = Reasons("compare")
        for name, size in (("query_chunk_size", chunk), ("kv_page_size", page_size)):
            why.need(size is None or size >= 1, "{} must be at least 1, got {}", name, size)
        why.done()
        backend = backend_of(inputs, impl)
        requested = impl.value if isinstance(impl, Impl) else impl
        base = paths.base_provenance(backend, requested)
        q, k = inputs.q, inputs.k
        if inputs.rope_positions is not None:
            rope = rope_of(inputs, positions_of(inputs))
            if isinstance(backend, Reference):
                q, k = rotate_plainly(q, rope), rotate_plainly(k, rope)
            else:
                q, k = (apply_rope(x, rope, impl=backend.impl) for x in (q, k))
            base = replace(
                base, q_rope_state="post_rope", k_rope_state="post_rope",
                rope=_rope_provenance(inputs, "before the attention"),
            )  # fmt: skip
        chunk = chunk or min(512, -(-q.shape[1] // 3))
        page_size = page_size or (16 if k.shape[1] <= 1024 else 64)
        self.replay = Replay(inputs, pack(inputs, q, k), backend, requested, base, chunk, page_size, seed)
        self.drifts: list[AttentionPathDrift] = []
        self.unavailable: list[Unavailable] = []
        self._on_path = on_path
        self._logps: dict[str, Tensor | None] = {}
        full, self.seconds = self.timed(paths.FULL, partial(paths.full_prefill, self.replay))
        self.full = full

    def timed(self, name: str, run: Callable[[], _T]) -> tuple[_T, float]:
        """The result, and the seconds until the device had it."""
        if self._on_path is not None:
            self._on_path(name)
        _synchronize(self.replay.packed.device)
        began = time.perf_counter()
        found = run()
        _synchronize(self.replay.packed.device)
        return found, time.perf_counter() - began

    def attempt(self, name: str, run: Callable[[], _T]) -> tuple[_T | None, float]:
        """`timed`, with a row in ``unavailable`` where the path cannot run."""
        try:
            return self.timed(name, run)
        except NotHere as why:
            self.unavailable.append(Unavailable(name, str(why)))
        except torch.cuda.OutOfMemoryError as why:
            self.unavailable.append(Unavailable(name, f"out of device memory: {str(why).splitlines()[0]}"))
        return None, 0.0

    def add(
        self, result: AttentionPathResult, seconds: float, *, reference: AttentionPathResult | None = None,
        check: Check | None = None, promised: bool = False,
    ) -> AttentionPathDrift:  # fmt: skip
        """Hold a path against its reference; ``promised``: it must have its bits, or agree as far as fp32 can."""
        reference = reference or self.full
        out = tensor_drift(result.out, reference.out)
        lse = None
        if result.lse is not None and reference.lse is not None:
            lse = tensor_drift(result.lse, reference.lse)
        shown = {
            part: tensor_drift(getattr(result, part), getattr(reference, part))
            for part in ("q", "k")
            if getattr(result, part) is not None and getattr(reference, part) is not None
        }
        if promised:
            check = self._promise(out, lse)
        drift = AttentionPathDrift(
            result.name, reference.name, out, lse, self._dlogp(result, reference), shown.get("q"), shown.get("k"),
            seconds, check, result.provenance,
        )  # fmt: skip
        self.drifts.append(drift)
        return drift

    def _promise(self, out: TensorDrift, lse: TensorDrift | None) -> Check:
        r = self.replay
        if isinstance(r.backend, Kernels):
            return expectations.bit_equal(out, lse)
        p, dim = r.packed, r.packed.q.shape[-1]
        scale = dim**-0.5 if r.inputs.scale is None else abs(r.inputs.scale)
        score = scale * float(p.q.float().norm(dim=-1).max()) * float(p.k.float().norm(dim=-1).max())
        return expectations.fp32_agrees(
            out, lse, keys=max(p.keys), dim=dim, score=score, value=float(p.v.float().abs().max()),
            largest_lse=_largest(self.full.lse), out_dtype=r.inputs.out_dtype,
        )  # fmt: skip

    def _dlogp(self, result: AttentionPathResult, reference: AttentionPathResult) -> TensorDrift | None:
        pair = [self._logp(x) for x in (result, reference)]
        if pair[0] is None or pair[1] is None:
            return None
        return tensor_drift(pair[0], pair[1], active_rows(self.replay.inputs, self._rows_of(result)))

    def _logp(self, result: AttentionPathResult) -> Tensor | None:
        if result.name not in self._logps:
            self._logps[result.name] = selected_logps(self.replay.inputs, result.out, self._rows_of(result))
        return self._logps[result.name]

    def _rows_of(self, result: AttentionPathResult) -> Tensor:
        rows = self.replay.packed.rows
        return rows if result.rows is None else rows[result.rows]

    def report(self, reference: str, label: str, required: list[str]) -> AttentionComparisonReport:
        verdict, reasons = expectations.judge(self.drifts, self.unavailable, required)
        return AttentionComparisonReport(
            reference, self.drifts, self.unavailable, verdict, reasons, label, _shapes(self.replay),
            provenance.collect(),
        )  # fmt: skip


def _attention(rows: _Rows, transformer_engine: bool) -> None:
    r = rows.replay
    simple = [
        (paths.CHUNKED, partial(paths.chunked_prefill, r), True),
        (paths.PAGED, partial(paths.paged_kv, r), True),
        (paths.FP8, partial(paths.paged_kv, r, float8=True), False),
    ]
    for name, run, promised in simple:
        result, seconds = rows.attempt(name, run)
        if result is not None:
            rows.add(result, seconds, promised=promised)
    parts, making = rows.attempt(paths.PAGED_MERGE, partial(paths.partials, r))
    if parts is None:
        if transformer_engine:
            rows.unavailable.append(
                Unavailable(TRANSFORMER_ENGINE, "there are no partials to merge, see paged_kv_merge")
            )
        return
    ours, seconds = rows.timed(paths.PAGED_MERGE, partial(paths.paged_kv_merge, r, parts))
    rows.add(ours, making + seconds)
    exact = paths.fp64_merge(parts)
    _against_fp64(rows, ours, exact, parts)
    if transformer_engine:
        _transformer_engine(rows, parts, ours, exact)


def _against_fp64(
    rows: _Rows, merged: AttentionPathResult, exact: tuple[Tensor, Tensor], parts: Partials
) -> None:
    """A row for the error of a merge: fp32 results against fp64 of the same partials."""
    assert merged.merged is not None and merged.lse is not None
    # fp32 results widened, so that the reference keeps its fp64
    out, lse = tensor_drift(merged.merged.double(), exact[0]), tensor_drift(merged.lse.double(), exact[1])
    check = expectations.merges_agree(out, lse, *_merge_sizes(parts))
    rows.drifts.append(
        AttentionPathDrift(merged.name, FP64_MERGE, out, lse, None, None, None, 0.0, check, merged.provenance)
    )


def _merge_sizes(parts: Partials) -> tuple[int, float, float]:
    return len(parts.bounds), float(parts.outs.abs().max()), _largest(parts.lses)


def _transformer_engine(
    rows: _Rows, parts: Partials, ours: AttentionPathResult, exact: tuple[Tensor, Tensor]
) -> None:
    try:
        oracle = load_te_oracle(rows.replay.packed.device)
    except TEUnavailable as why:
        rows.unavailable.append(Unavailable(TRANSFORMER_ENGINE, why.reason, why.provenance.to_dict()))
        return
    for mode in oracle.modes:
        if mode is MergeMode.ASCENDING:  # that is paged_kv_merge itself
            continue
        name = f"{TRANSFORMER_ENGINE} ({mode.value})"
        run = partial(paths.transformer_engine_paged_kv, rows.replay, parts, oracle, mode)
        theirs, seconds = rows.timed(name, run)
        assert theirs.merged is not None and ours.merged is not None
        assert theirs.lse is not None and ours.lse is not None
        check = expectations.merges_agree(
            tensor_drift(theirs.merged, ours.merged), tensor_drift(theirs.lse, ours.lse), *_merge_sizes(parts)
        )
        check = replace(check, reason=f"against paged_kv_merge, {check.reason}")
        rows.add(theirs, seconds, check=check)
        _against_fp64(rows, theirs, exact, parts)


def _decode(rows: _Rows, options: DecodeOptions) -> None:
    if rows.replay.packed.queries != rows.replay.packed.keys:
        rows.unavailable.append(Unavailable(DECODE, "decode replay needs as many queries as keys"))
        return
    results, seconds = rows.attempt(DECODE, partial(decode_replay, rows.replay, options))
    for result in results or []:
        rows.add(result, seconds, promised=True)


def _peers(rows: _Rows) -> None:
    for peer in importable_peers():
        name = f"{peer.name}:decode"
        pair, seconds = rows.attempt(name, partial(decode_and_prefill, rows.replay, peer))
        if pair is not None:
            rows.add(pair[0], seconds, reference=pair[1])


def _rope(rows: _Rows) -> None:
    r, inputs = rows.replay, rows.replay.inputs
    rope = rope_of(inputs, positions_of(inputs))
    unfused = replace(rows.full, name=UNFUSED, q=r.packed.q, k=r.packed.k)

    def plain() -> AttentionPathResult:
        packed = pack(inputs, rotate_plainly(inputs.q, rope), rotate_plainly(inputs.k, rope))
        found = paths.full_prefill(replace(r, packed=packed))
        how = replace(
            found.provenance,
            attention_mode=PLAIN,
            rope=_rope_provenance(inputs, "complex fp64, before the attention"),
        )
        return replace(found, name=PLAIN, q=packed.q, k=packed.k, provenance=how)

    def fused() -> AttentionPathResult:
        if not isinstance(r.backend, Kernels):
            raise NotHere("the fp32 reference has no rotation of its own: unfused is all there is")
        p = pack(inputs, inputs.q, inputs.k)
        places = replace(rope, positions=positions_of(inputs).flatten()[p.rows])
        found = r.backend.varlen(p.q, p.k, p.v, p.cu_q, p.cu_k, max(p.queries), max(p.keys), rope=places)
        boundary = "inside the attention kernel" if r.backend.impl is Impl.TRITON else "one shared code path"
        how = {
            "q_rope_state": "pre_rope",
            "k_rope_state": "pre_rope",
            "rope": _rope_provenance(inputs, boundary),
        }
        return r.result(FUSED, found, "packed", **how)

    for name, run, promised in ((FUSED, fused, True), (PLAIN, plain, False)):
        result, seconds = rows.attempt(name, run)
        if result is not None:
            rows.add(result, seconds, reference=unfused, promised=promised)


def _rope_provenance(inputs: AttentionComparisonInputs, boundary: str) -> dict[str, Any]:
    positions = inputs.rope_positions
    assert positions is not None
    return {
        "position_kind": "shared" if positions.dim() == 1 else "by sequence",
        "position_ids_shape": list(positions.shape),
        "position_ids_min": int(positions.min()),
        "position_ids_max": int(positions.max()),
        "theta": inputs.rope_theta,
        "rotary_dim": rotary_dim(inputs),
        "cast_at": inputs.rope_cast_at,
        "output_dtype": str(inputs.rope_output_dtype or inputs.q.dtype).removeprefix("torch."),
        "fusion_boundary": boundary,
    }


def _shapes(r: Replay) -> dict[str, Any]:
    x, p = r.inputs, r.packed
    return {
        "batch": x.q.shape[0], "queries": x.q.shape[1], "keys": x.k.shape[1], "tokens": p.q.shape[0],
        "padding": x.q.shape[0] * x.q.shape[1] - p.q.shape[0], "heads": x.q.shape[2], "kv_heads": x.k.shape[2],
        "head_dim": x.q.shape[3], "v_head_dim": x.v.shape[3], "dtype": str(x.q.dtype).removeprefix("torch."),
        "out_dtype": str(x.out_dtype).removeprefix("torch."), "device": str(x.q.device), "causal": x.causal,
        "scale": x.scale, "window": list(x.window), "softcap": x.softcap, "sinks": x.sinks is not None,
        "rope": x.rope_positions is not None, "vocab": None if x.lm_head_weight is None else x.lm_head_weight.shape[0],
        "query_chunk_size": r.chunk, "kv_page_size": r.page_size, "seed": r.seed,
    }  # fmt: skip


def _largest(lse: Tensor | None) -> float:
    finite = None if lse is None else lse[lse.isfinite()]
    return 0.0 if finite is None or not finite.numel() else float(finite.abs().max())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
