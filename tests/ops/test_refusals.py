"""Every refusal names what was wrong, the value got, and all reasons at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rl_attn_plugin import (
    FlashAttention,
    Rope,
    Schedule,
    apply_rope,
    flash_attention,
    flash_attention_paged,
    flash_attention_varlen,
    merge_attention,
    plan_paged,
    write_kv_cache,
)
from tests.tensors import ints


def dense(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 5, 4, 16), "k": torch.zeros(2, 6, 2, 16), "v": torch.zeros(2, 6, 2, 8)
    }  # fmt: skip
    return flash_attention(**{**arguments, **changes})


def varlen(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "q": torch.zeros(5, 4, 16), "k": torch.zeros(6, 2, 16), "v": torch.zeros(6, 2, 8),
        "cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 2, 6), "max_seqlen_q": 3, "max_seqlen_k": 4,
    }  # fmt: skip
    return flash_attention_varlen(**{**arguments, **changes})


def paged(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "q": torch.zeros(5, 4, 16), "k_cache": torch.zeros(3, 4, 2, 16), "v_cache": torch.zeros(3, 4, 2, 8),
        "cu_seqlens_q": ints(0, 2, 5), "seqlens_k": ints(4, 4), "block_table": ints(0, 1)[:, None],
        "max_seqlen_q": 3, "max_seqlen_k": 4,
    }  # fmt: skip
    return flash_attention_paged(**{**arguments, **changes})


def cache(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "k": torch.zeros(5, 2, 16), "v": torch.zeros(5, 2, 8), "k_cache": torch.zeros(3, 4, 2, 16),
        "v_cache": torch.zeros(3, 4, 2, 8), "slot_mapping": ints(0, 1, 2, 3, -1),
    }  # fmt: skip
    return write_kv_cache(**{**arguments, **changes})


def rope(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "cos": torch.zeros(9, 8), "sin": torch.zeros(9, 8), "positions": torch.arange(5)
    }  # fmt: skip
    return apply_rope(torch.zeros(5, 2, 16), Rope(**{**arguments, **changes}))


def turned(**changes: Any) -> Any:
    """Attention whose keys are three more than its queries."""
    angles = torch.zeros(9, 8)
    given = Rope(angles, angles, torch.arange(5)[None], **changes)
    return flash_attention(
        torch.zeros(1, 5, 4, 16), torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 8), rope=given
    )


REFUSALS = [
    (dense, {"q": torch.zeros(5, 4, 16)}, "q must be [B, S, H, D], got [5, 4, 16]"),
    (
        dense,
        {"q": torch.zeros(2, 5, 3, 16)},
        "query heads must be a multiple of key/value heads, got 3 and 2",
    ),
    (
        dense,
        {"q": torch.zeros(2, 5, 4, 16, dtype=torch.float64)},
        "q must be float16, bfloat16 or float32, got torch.float64",
    ),
    (
        dense,
        {"k": torch.zeros(2, 6, 2, 16, dtype=torch.float16)},
        "k must have q's dtype torch.float32, got torch.float16",
    ),
    (dense, {"k": torch.zeros(2, 6, 2, 12)}, "k must have q's head dim 16, got 12"),
    (dense, {"k": torch.zeros(3, 6, 2, 16)}, "k must have q's batch 2, got 3"),
    (dense, {"v": torch.zeros(2, 7, 2, 8)}, "k and v must have equal lengths, got 6 and 7"),
    (dense, {"v": torch.zeros(2, 6, 1, 8)}, "k and v must have equal heads, got 2 and 1"),
    (dense, {"v": torch.zeros(2, 6, 2, 300)}, "head dim Dv must be 1 to 256, got 300"),
    (dense, {"v": torch.zeros(2, 6, 2, 8, device="meta")}, "v must be on q's device cpu, got meta"),
    (dense, {"window": (-2, 0)}, "window must be (left, right) with integers of at least -1, got (-2, 0)"),
    (dense, {"softcap": -1.0}, "softcap must be 0 (off) or positive, got -1.0"),
    (dense, {"scale": float("nan")}, "scale must be finite, got nan"),
    (
        dense,
        {"causal_alignment": "middle"},
        "causal_alignment must be 'bottom_right' or 'top_left', got 'middle'",
    ),
    (dense, {"sinks": torch.zeros(2)}, "sinks must be [Hq] = [4], got [2]"),
    (
        dense,
        {"key_padding_mask": torch.ones(2, 5, dtype=torch.bool)},
        "key_padding_mask must be [B, Sk] = [2, 6], got [2, 5]",
    ),
    (
        dense,
        {"key_padding_mask": torch.ones(2, 6)},
        "key_padding_mask must be bool with True = keep, got torch.float32",
    ),
    (dense, {"out_dtype": torch.int8}, "out_dtype must be float16, bfloat16 or float32, got torch.int8"),
    (dense, {"impl": "cuda"}, "impl must be one of 'auto', 'triton', 'torch', got 'cuda'"),
    (
        varlen,
        {"cu_seqlens_q": torch.tensor([0, 2, 5])},
        "cu_seqlens_q must be int32, got torch.int64: call cu_seqlens_q.int()",
    ),
    (varlen, {"cu_seqlens_k": ints(0, 6)}, "cu_seqlens_k must have shape [3], got [2]"),
    (varlen, {"cu_seqlens_k": ints(0, 2, 6).to("meta")}, "cu_seqlens_k must be on q's device cpu, got meta"),
    (varlen, {"seqused_k": ints(1)}, "seqused_k must have shape [2], got [1]"),
    (varlen, {"kv_start": ints(1, 2, 3)}, "kv_start must have shape [2], got [3]"),
    (varlen, {"max_seqlen_k": -1}, "max_seqlen_k must be a non-negative host int, got -1"),
    (varlen, {"v": torch.zeros(7, 2, 8)}, "k and v must have equal tokens, got 6 and 7"),
    (
        paged,
        {"k_cache": torch.zeros(3, 4, 16)},
        "k_cache must be [num_pages, page_size, Hkv, D], got [3, 4, 16]",
    ),
    (
        paged,
        {"v_cache": torch.zeros(3, 5, 2, 8)},
        "k_cache and v_cache must have equal pages, got [3, 4] and [3, 5]",
    ),
    (paged, {"block_table": ints(0, 1)}, "block_table must have shape [2, any], got [2]"),
    (
        paged,
        {"block_table": torch.zeros(2, 0, dtype=torch.int32)},
        "block_table must be wide enough for max_seqlen_k = 4, got room for 0 keys",
    ),
    (paged, {"seqlens_k": torch.tensor([4, 4])}, "seqlens_k must be int32, got torch.int64"),
    (paged, {"out": torch.zeros(5, 4, 9)}, "out must be [5, 4, 8], got [5, 4, 9]"),
    (
        paged,
        {"out": torch.zeros(5, 4, 8, dtype=torch.float16)},
        "out must be torch.float32, got torch.float16",
    ),
    (
        paged,
        {"k_cache": torch.zeros(3, 4, 2, 16).to(torch.float8_e4m3fn)},
        "k_scale must be given with a float8_e4m3fn cache, got None",
    ),
    (paged, {"k_scale": torch.ones(3)}, "k_scale must be a scalar or [Hkv] = [2], got [3]"),
    (cache, {"slot_mapping": ints(0, 1)}, "k, v and slot_mapping must have equal tokens, got 5, 5 and [2]"),
    (cache, {"slot_mapping": torch.zeros(5)}, "slot_mapping must be int32 or int64, got torch.float32"),
    (cache, {"k": torch.zeros(5, 3, 16)}, "k must have k_cache's heads and head dim [2, 16], got [3, 16]"),
    (
        cache,
        {"v_cache": torch.zeros(3, 4, 2, 8, dtype=torch.float16)},
        "v_cache must be torch.float32 or torch.float8_e4m3fn, got torch.float16",
    ),
    (rope, {"rotary_dim": 7}, "rope.rotary_dim must be even and 2 to D = 16, got 7"),
    (rope, {"cos": torch.zeros(9, 4)}, "rope.cos must be [max_position, rotary_dim / 2 = 8], got [9, 4]"),
    (rope, {"sin": torch.zeros(9, 8, dtype=torch.float16)}, "rope.sin must be float32, got torch.float16"),
    (rope, {"positions": torch.arange(4)}, "rope.positions must have x's token shape [5], got [4]"),
    (rope, {"sin": torch.zeros(8, 8)}, "rope.cos and rope.sin must have equal shapes, got [9, 8] and [8, 8]"),
    (
        turned,
        {},
        "rope.positions_k must be given where k's token shape [1, 8] is not that of rope.positions [1, 5], got None",
    ),
    (
        turned,
        {"positions_k": torch.arange(7)[None]},
        "rope.positions_k must have k's token shape [1, 8], got [1, 7]",
    ),
    (rope, {"positions": torch.zeros(5)}, "rope.positions must be int32 or int64, got torch.float32"),
]


@pytest.mark.parametrize(("call", "changes", "message"), REFUSALS, ids=[m for _, _, m in REFUSALS])
def test_refusal(call: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**changes)


def test_all_reasons_come_at_once() -> None:
    with pytest.raises(ValueError, match="3 arguments are wrong") as error:
        dense(softcap=-1.0, window=(0, -5), sinks=torch.zeros(3))
    for reason in ("softcap must", "window must", "sinks must"):
        assert reason in str(error.value)


def test_values_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_ATTN_DEBUG", "1")
    with pytest.raises(
        ValueError, match=re.escape("cu_seqlens_q must ascend within the tensor's 5 rows, got [0, 6, 5]")
    ):
        varlen(cu_seqlens_q=ints(0, 6, 5))
    with pytest.raises(ValueError, match=re.escape("the bound of cu_seqlens_k must be at least 4, got 3")):
        varlen(max_seqlen_k=3)
    with pytest.raises(
        ValueError, match=re.escape("seqused must lie within the lengths of cu_seqlens_k [2, 4]")
    ):
        varlen(seqused_k=ints(2, 5))
    with pytest.raises(
        ValueError, match=re.escape("block_table must cover seqlens_k [4, 5] with pages of 4, got 1 page")
    ):
        paged(seqlens_k=ints(4, 5), max_seqlen_k=5)
    with pytest.raises(
        ValueError,
        match=re.escape("block_table must name pages 0 to 2 where sequences have keys, got [0, 7]"),
    ):
        paged(block_table=ints(0, 7)[:, None])
    with pytest.raises(ValueError, match=re.escape("rope.positions must lie in [0, 9), got 5 to 9")):
        rope(positions=torch.arange(5) + 5)


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        (varlen, {"cu_seqlens_q": ints(0, 2, 9)}, "cu_seqlens_q must ascend within the tensor's 5 rows"),
        (varlen, {"cu_seqlens_k": ints(0, 4, 2)}, "cu_seqlens_k must ascend within the tensor's 6 rows"),
        (varlen, {"cu_seqlens_k": None}, "cu_seqlens_k must be int32 [B + 1], got None"),
        (paged, {"seqlens_k": ints(-1, 4)}, "seqlens_k must not be negative, got [-1, 4]"),
        (paged, {"kv_start": ints(0, -2)}, "kv_start must not be negative, got [0, -2]"),
        (paged, {"block_table": ints(0, 3)[:, None]}, "block_table must name pages 0 to 2"),
        (
            cache,
            {"slot_mapping": ints(0, 1, 2, 12, -1)},
            "slot_mapping must be -1 (skipped) or a slot below 12, got -1 to 12",
        ),
        (cache, {"slot_mapping": ints(0, 1, 2, 3, -2)}, "a slot below 12, got -2 to 3"),
        (rope, {"positions": torch.arange(5) - 1}, "rope.positions must lie in [0, 9), got -1 to 3"),
    ],
)
def test_values_on_a_cpu_are_checked_unasked(call: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**changes)


def test_paged_gradients_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="forward only"):
        paged(q=torch.zeros(5, 4, 16, requires_grad=True))


def test_absorbed_mla_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="absorbed MLA"):
        dense(q=torch.zeros(2, 5, 4, 576), k=torch.zeros(2, 6, 1, 576), v=torch.zeros(2, 6, 1, 512))


def test_triton_on_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"impl='triton' cannot be used here: .*TRITON_INTERPRET=1"):
        dense(impl="triton")


def test_merge_refusals() -> None:
    with pytest.raises(ValueError, match=re.escape("lses must be [2, 4, 5], got [2, 5, 4]")):
        merge_attention(torch.zeros(2, 5, 4, 8), torch.zeros(2, 5, 4))
    with pytest.raises(ValueError, match="outs must hold at least one partial, got 0"):
        merge_attention(torch.zeros(0, 5, 4, 8), torch.zeros(0, 4, 5))
    with pytest.raises(ValueError, match=r"lses must be float32, got torch\.float64"):
        merge_attention(torch.zeros(2, 5, 4, 8), torch.zeros(2, 4, 5, dtype=torch.float64))


def test_schedule_refusals() -> None:
    with pytest.raises(ValueError, match="block_k must be a power of two of at least 16, got 48"):
        Schedule(block_k=48)
    with pytest.raises(ValueError, match=r"split_k must be a positive multiple of block_k \(64\), got 100"):
        Schedule(split_k=100)


def test_module_refusals() -> None:
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads, got 4 and 3"):
        FlashAttention(4, 16, 3)


def test_plan_refusals() -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads, got 4 and 3"):
        plan_paged(ints(0, 1), ints(4), **{**sizes, "num_kv_heads": 3})
    with pytest.raises(ValueError, match=re.escape("seqlens_k must have shape [1], got [2]")):
        plan_paged(ints(0, 1), ints(4, 4), **sizes)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be int32, got torch\.int64"):
        plan_paged(torch.tensor([0, 1]), ints(4), **sizes)
