"""What may be compared, and every refusal with its values."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rl_attn_plugin.replay import (
    AttentionComparisonInputs,
    compare_attention,
    compare_decode_replay,
    compare_single_gpu_rope_attention,
    synthetic_inputs,
)


def given(**changes: Any) -> AttentionComparisonInputs:
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 6, 4, 16), "k": torch.zeros(2, 6, 2, 16), "v": torch.zeros(2, 6, 2, 8),
        "lm_head_weight": torch.zeros(9, 32), "target_ids": torch.zeros(2, 6, dtype=torch.long),
    }  # fmt: skip
    return AttentionComparisonInputs(**{**arguments, **changes})


def positions(*size: int) -> torch.Tensor:
    return torch.zeros(*size, dtype=torch.long)


HOLES = torch.tensor([[True] * 6, [True, True, False, True, True, False]])
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(6, 4, 16)}, "q must be [B, S, H, D], got [6, 4, 16]"),
    ({"k": torch.zeros(3, 6, 2, 16)}, "k must have q's batch 2, got 3"),
    ({"v": torch.zeros(2, 7, 2, 8)}, "k and v must have equal lengths, got 6 and 7"),
    ({"q": torch.zeros(2, 7, 4, 16)}, "q must hold 1 to Sk = 6 tokens of at least one sequence, got [2, 7, 4, 16]"),
    ({"q": torch.zeros(2, 6, 3, 16)}, "query heads must be a multiple of key/value heads, got 3 and 2"),
    ({"k": torch.zeros(2, 6, 2, 16).half()}, "k must have q's dtype torch.float32, got torch.float16"),
    ({"softcap": -1.0}, "softcap must be"),
    ({"window": (-2, 0)}, "window must be"),
    ({"sinks": torch.zeros(3)}, "sinks must be"),
    ({"output_dtype": torch.int32}, "out_dtype must be"),
    ({"key_padding_mask": torch.ones(2, 6)}, "key_padding_mask must be bool"),
    ({"key_padding_mask": HOLES}, "key_padding_mask must keep one run of tokens a sequence, got holes in sequences [1]"),
    ({"key_padding_mask": HOLES & False}, "key_padding_mask must keep at least one token, got none"),
    (
        {"q": torch.zeros(2, 5, 4, 16), "key_padding_mask": HOLES | True, "target_ids": positions(2, 5)},
        "key_padding_mask must come with as many queries as keys, got 5 and 6",
    ),
    ({"target_ids": None}, "lm_head_weight and target_ids must be given together, got only lm_head_weight"),
    ({"lm_head_weight": None}, "lm_head_weight and target_ids must be given together, got only target_ids"),
    (
        {"lm_head_weight": torch.zeros(9, 64)},
        "lm_head_weight must be floating point [V, Hq * Dv = 32], got torch.float32 [9, 64]",
    ),
    ({"target_ids": positions(2, 5)}, "target_ids must be int32 or int64 [2, 6], got torch.int64 [2, 5]"),
    ({"target_ids": torch.full((2, 6), 9)}, "target_ids must lie in [0, 9) where they are active, got 9 to 9"),
    ({"target_ids": positions(2, 6).to("meta")}, "target_ids must be on q's device cpu, got meta"),
    ({"active_token_mask": HOLES[:, :5]}, "active_token_mask must be bool [2, 6], got torch.bool [2, 5]"),
    (
        {"lm_head_weight": None, "target_ids": None, "active_token_mask": HOLES},
        "active_token_mask must come with target_ids, got None",
    ),
    ({"rope_rotary_dim": 8}, "rope_positions must be given with rope_rotary_dim, got None"),
    ({"rope_output_dtype": torch.float32}, "rope_positions must be given with rope_output_dtype, got None"),
    ({"rope_positions": torch.zeros(6)}, "rope_positions must be int32 or int64, got torch.float32"),
    ({"rope_positions": positions(5)}, "rope_positions must be [S = 6] or [B, S] = [2, 6], got [5]"),
    ({"rope_positions": positions(6).to("meta")}, "rope_positions must be on q's device cpu, got meta"),
    ({"rope_positions": positions(6) - 1}, "rope_positions must not be negative, got -1"),
    (
        {"q": torch.zeros(2, 5, 4, 16), "target_ids": positions(2, 5), "rope_positions": positions(5)},
        "rope_positions must come with as many queries as keys, got 5 and 6",
    ),
    ({"rope_positions": positions(6), "rope_rotary_dim": 7}, "rope_rotary_dim must be even and 2 to D = 16, got 7"),
    ({"rope_positions": positions(6), "rope_rotary_dim": 18}, "rope_rotary_dim must be even and 2 to D = 16, got 18"),
    ({"rope_positions": positions(6), "rope_theta": 0.0}, "rope_theta must be positive, got 0.0"),
    (
        {"rope_positions": positions(6), "rope_output_dtype": torch.bfloat16},
        "rope_output_dtype must be v's dtype torch.float32, which q and k meet in the attention, got torch.bfloat16",
    ),
    ({"rope_cast_at": "before_rope"}, "rope_cast_at must be 'after_rope' (fp32 rotation, one rounding), got 'before_rope'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[m[:50] for _, m in REFUSALS])
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        given(**changes)


def test_all_reasons_at_once() -> None:
    with pytest.raises(ValueError, match="softcap must") as error:
        given(softcap=-1.0, rope_cast_at="never", target_ids=torch.full((2, 6), 9))
    assert "rope_cast_at must" in str(error.value) and "target_ids must" in str(error.value)


def test_inactive_targets_may_hold_anything() -> None:
    ids = torch.tensor([[0, 1, 2, 3, 4, -100]] * 2)
    active = ids >= 0
    assert given(target_ids=ids, active_token_mask=active).target_ids is ids


def test_what_the_functions_refuse() -> None:
    inputs = synthetic_inputs(length=20, rope=False)
    with pytest.raises(ValueError, match="inputs must have rope_positions, got None"):
        compare_single_gpu_rope_attention(inputs)
    for name in ("query_chunk_size", "kv_page_size"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            compare_attention(inputs, **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="impl must be one of"):
        compare_attention(inputs, impl="sideways")
    with pytest.raises(ValueError, match="tokens_per_step must be at least 1, got 0"):
        compare_decode_replay(inputs, tokens_per_step=0)
    with pytest.raises(ValueError, match="prefix_length must be 0 to the shortest sequence, 20, got 21"):
        compare_decode_replay(inputs, prefix_length=21)
    table = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=re.escape("pages of its own, got [0, 0, 0, 0]")):
        compare_decode_replay(inputs, block_table=table)
    with pytest.raises(ValueError, match=re.escape("block_table must be int32 [2, at least 2] on cpu")):
        compare_decode_replay(inputs, block_table=table.long())


def test_synthetic_inputs_depend_on_the_seed_alone() -> None:
    first, again, other = (
        synthetic_inputs(length=9),
        synthetic_inputs(length=9),
        synthetic_inputs(length=9, seed=1),
    )
    assert torch.equal(first.q, again.q) and torch.equal(first.v, again.v)
    assert not torch.equal(first.q, other.q)
