"""What is compared: one attention layer's q, k, v, its options, and a readout that turns outputs into log-probs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rl_attn_plugin import validation
from rl_attn_plugin.validation import Reasons, shape

RopeCastAt = Literal["after_rope"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionComparisonInputs:
    """One attention layer on one batch. Checked when made; never changed after.

    Attributes:
        q: ``[B, Sq, Hq, D]``.
        k: ``[B, Sk, Hkv, D]``, Sk at least Sq: the queries are the last of the keys' positions.
        v: ``[B, Sk, Hkv, Dv]``.
        causal: a query sees keys up to its own position.
        scale: multiplies the scores; default ``D ** -0.5``.
        key_padding_mask: bool ``[B, S]``, True = keep; the kept tokens of a sequence are one run (left or right
            padding). They are handed on as offsets and lengths, as a trainer packs them, and only they are compared.
        lm_head_weight: ``[V, Hq * Dv]``, reads log-probs out of the attention's own output; with ``target_ids``.
        target_ids: int ``[B, Sq]``, the token scored at each row. Nothing here shifts them.
        active_token_mask: bool ``[B, Sq]``, rows whose log-prob counts; default all.
        output_dtype: of ``out``, default q's.
        rope_positions: int ``[S]`` or ``[B, S]``: q and k are not rotated yet, and these are their positions.
        rope_theta: base of the frequencies ``theta ** (-2 i / rotary_dim)``.
        rope_rotary_dim: leading channels that rotate, default D.
        rope_cast_at: only ``"after_rope"``: fp32 arithmetic, one rounding.
        rope_output_dtype: what it rounds to, default q's dtype.
        window: inclusive (left, right) reach; -1 is unlimited.
        softcap: ``s -> softcap * tanh(s / softcap)``; 0 is off.
        sinks: ``[Hq]``, one more logit a row, without a value.

    Raises:
        ValueError: with every reason.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = True
    scale: float | None = None
    key_padding_mask: Tensor | None = None
    lm_head_weight: Tensor | None = None
    target_ids: Tensor | None = None
    active_token_mask: Tensor | None = None
    output_dtype: torch.dtype | None = None
    rope_positions: Tensor | None = None
    rope_theta: float = 10_000.0
    rope_rotary_dim: int | None = None
    rope_cast_at: RopeCastAt = "after_rope"
    rope_output_dtype: torch.dtype | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        why = Reasons("AttentionComparisonInputs")
        for name in ("q", "k", "v"):
            x: Tensor = getattr(self, name)
            why.need(x.dim() == 4, "{} must be [B, S, H, D], got {}", name, shape(x))
        why.done()  # what follows indexes shapes
        _check_attention(why, self)
        _check_padding(why, self)
        _check_readout(why, self)
        _check_rope(why, self)
        why.done()

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of every path's ``out``."""
        return self.output_dtype or self.q.dtype

    def to(self, device: torch.device | str) -> AttentionComparisonInputs:
        """The same inputs on another device."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: x.to(device) for name, x in given.items() if isinstance(x, Tensor)}
        return replace(self, **moved)


def _check_attention(why: Reasons, x: AttentionComparisonInputs) -> None:
    for name, other in (("k", x.k), ("v", x.v)):
        why.need(
            other.shape[0] == x.q.shape[0],
            "{} must have q's batch {}, got {}",
            name,
            x.q.shape[0],
            other.shape[0],
        )
    why.need(
        x.k.shape[1] == x.v.shape[1],
        "k and v must have equal lengths, got {} and {}",
        x.k.shape[1],
        x.v.shape[1],
    )
    why.need(
        0 < x.q.shape[1] <= x.k.shape[1] and x.q.shape[0] > 0,
        "q must hold 1 to Sk = {} tokens of at least one sequence, got {}",
        x.k.shape[1],
        shape(x.q),
    )
    validation.check_heads(why, x.q, x.k, x.v)
    validation.check_options(
        why, x.q, scale=x.scale, window=x.window, softcap=x.softcap, causal_alignment="bottom_right", sinks=x.sinks,
        out_dtype=x.output_dtype,
    )  # fmt: skip


def _check_padding(why: Reasons, x: AttentionComparisonInputs) -> None:
    mask = x.key_padding_mask
    if mask is None:
        return
    validation.check_mask(why, x.q, x.k, mask)
    if not why.need(
        x.q.shape[1] == x.k.shape[1],
        "key_padding_mask must come with as many queries as keys, got {} and {}",
        x.q.shape[1],
        x.k.shape[1],
    ):
        return
    if shape(mask) == [x.k.shape[0], x.k.shape[1]] and mask.dtype == torch.bool:
        why.need(bool(mask.any()), "key_padding_mask must keep at least one token, got none")
        begins = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
        broken = (begins > 1).nonzero()[:, 0].tolist()
        why.need(
            not broken,
            "key_padding_mask must keep one run of tokens a sequence, got holes in sequences {}",
            broken,
        )


def _check_readout(why: Reasons, x: AttentionComparisonInputs) -> None:
    rows = [x.q.shape[0], x.q.shape[1]]
    weight, ids, active = x.lm_head_weight, x.target_ids, x.active_token_mask
    if not why.need(
        (weight is None) == (ids is None),
        "lm_head_weight and target_ids must be given together, got only {}",
        "target_ids" if weight is None else "lm_head_weight",
    ):
        return
    why.need(active is None or ids is not None, "active_token_mask must come with target_ids, got None")
    given = {"lm_head_weight": weight, "target_ids": ids, "active_token_mask": active}
    here = True
    for name, tensor in given.items():
        if tensor is not None:
            here &= why.need(
                tensor.device == x.q.device,
                "{} must be on q's device {}, got {}",
                name,
                x.q.device,
                tensor.device,
            )
    if active is not None:
        why.need(
            active.dtype == torch.bool and shape(active) == rows,
            "active_token_mask must be bool {}, got {} {}",
            rows,
            active.dtype,
            shape(active),
        )
    if weight is None or ids is None:
        return
    width = x.q.shape[2] * x.v.shape[3]
    sound = here & why.need(
        weight.dim() == 2 and weight.shape[-1] == width and weight.is_floating_point(),
        "lm_head_weight must be floating point [V, Hq * Dv = {}], got {} {}",
        width,
        weight.dtype,
        shape(weight),
    )
    sound &= why.need(
        ids.dtype in (torch.int32, torch.int64) and shape(ids) == rows,
        "target_ids must be int32 or int64 {}, got {} {}",
        rows,
        ids.dtype,
        shape(ids),
    )
    if sound and why.need(active is None or shape(active) == rows, "active_token_mask must be {}", rows):
        counted = ids if active is None else ids[active]
        low, high = (int(n) for n in counted.aminmax()) if counted.numel() else (0, 0)
        why.need(
            low >= 0 and high < weight.shape[0],
            "target_ids must lie in [0, {}) where they are active, got {} to {}",
            weight.shape[0],
            low,
            high,
        )


def _check_rope(why: Reasons, x: AttentionComparisonInputs) -> None:
    positions = x.rope_positions
    why.need(
        x.rope_cast_at == "after_rope",
        "rope_cast_at must be 'after_rope' (fp32 rotation, one rounding), got {!r}",
        x.rope_cast_at,
    )
    if positions is None:
        asked = [n for n in ("rope_rotary_dim", "rope_output_dtype") if getattr(x, n) is not None]
        why.need(not asked, "rope_positions must be given with {}, got None", " and ".join(asked))
        return
    batch, length, _, dim = x.q.shape
    why.need(
        length == x.k.shape[1],
        "rope_positions must come with as many queries as keys, got {} and {}",
        length,
        x.k.shape[1],
    )
    sound = why.need(
        positions.dtype in (torch.int32, torch.int64),
        "rope_positions must be int32 or int64, got {}",
        positions.dtype,
    )
    sound &= why.need(
        positions.device == x.q.device,
        "rope_positions must be on q's device {}, got {}",
        x.q.device,
        positions.device,
    )
    why.need(
        shape(positions) in ([length], [batch, length]),
        "rope_positions must be [S = {}] or [B, S] = {}, got {}",
        length,
        [batch, length],
        shape(positions),
    )
    if sound and positions.numel():
        why.need(
            int(positions.min()) >= 0, "rope_positions must not be negative, got {}", int(positions.min())
        )
    rotary = dim if x.rope_rotary_dim is None else x.rope_rotary_dim
    why.need(
        0 < rotary <= dim and rotary % 2 == 0,
        "rope_rotary_dim must be even and 2 to D = {}, got {}",
        dim,
        rotary,
    )
    why.need(x.rope_theta > 0, "rope_theta must be positive, got {}", x.rope_theta)
    why.need(
        x.rope_output_dtype in (None, *validation.DTYPES),
        "rope_output_dtype must be float16, bfloat16 or float32, got {}",
        x.rope_output_dtype,
    )
    why.need(
        x.rope_output_dtype in (None, x.v.dtype),
        "rope_output_dtype must be v's dtype {}, which q and k meet in the attention, got {}",
        x.v.dtype,
        x.rope_output_dtype,
    )


def synthetic_inputs(
    *,
    batch: int = 2,
    length: int = 160,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    vocab: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    rope: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> AttentionComparisonInputs:
    """Random inputs, the same for one seed on every device.

    Keys share a direction with the queries that they lie near to, so that rows attend to some keys much more than to
    others; independent normal q and k would make every row an average over all keys.

    Args:
        batch: sequences.
        length: tokens of each.
        heads: Hq.
        kv_heads: Hkv.
        head_dim: D.
        v_head_dim: Dv, default D.
        vocab: rows of ``lm_head_weight``; 0 leaves the readout out.
        dtype: of q, k, v.
        rope: hand q and k over unrotated, with positions.
        seed: of the generator.
        device: where they end up.
    """
    v_dim = v_head_dim or head_dim
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    drift = normal(batch, length, 1, head_dim).cumsum(1) / torch.arange(1, length + 1).sqrt()[:, None, None]
    q, k = (normal(batch, length, h, head_dim) + drift for h in (heads, kv_heads))
    weight = normal(vocab, heads * v_dim) / (heads * v_dim) ** 0.5 * 4 if vocab else None
    ids = torch.randint(vocab, (batch, length), generator=generator) if vocab else None
    return AttentionComparisonInputs(
        q.to(dtype),
        k.to(dtype),
        normal(batch, length, kv_heads, v_dim).to(dtype),
        lm_head_weight=weight,
        target_ids=ids,
        rope_positions=torch.arange(length) if rope else None,
    ).to(device)
