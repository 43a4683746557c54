"""What is known of each operator: why a row of its result does not depend on the other rows.

Names are those of ATen, without overloads. What is in none of the sets is not known, and said to be.
"""

from __future__ import annotations

from enum import Enum


class Kind(str, Enum):
    """Why an operator is, or is not, row-invariant."""

    CONSTRUCTION = "invariant by construction"
    REPLACED = "invariant by replacement"
    ROWS = "row-independent"
    UNKNOWN = "not known"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Views, allocations, copies, gathers: no arithmetic.
MOVES = _names(
    """
    alias arange as_strided cat chunk clone constant_pad_nd contiguous copy copy_ detach detach_ diagonal
    embedding empty empty_like empty_strided expand eye fill fill_ flip full full_like gather index index_copy
    index_copy_ index_put index_put_ index_select lift lift_fresh lift_fresh_copy masked_fill masked_fill_
    masked_scatter masked_select narrow new_empty new_empty_strided new_full new_ones new_zeros nonzero ones
    ones_like permute pin_memory repeat repeat_interleave reshape resize_ roll scalar_tensor scatter scatter_
    select select_scatter slice slice_scatter split split_with_sizes squeeze stack sort topk t take transpose
    tril triu unbind unfold unsqueeze view where zero_ zeros zeros_like _to_copy _unsafe_view _reshape_alias
    _local_scalar_dense _conj _neg_view is_pinned _pin_memory set_ view_as_complex view_as_real one_hot
    searchsorted bincount unique_consecutive _unique2 rand randn rand_like randint randperm multinomial
    bernoulli bernoulli_ uniform_ normal_ exponential_ random_ _assert_async
    slice_backward select_backward _foreach_copy_ equal
    """
)

# One element in, one element out, by code that is the same wherever the element lies.
ELEMENTWISE = _names(
    """
    abs acos add add_ addcdiv addcdiv_ addcmul addcmul_ asin atan atan2 bitwise_and bitwise_not bitwise_or
    bitwise_xor bitwise_left_shift bitwise_right_shift ceil clamp clamp_ clamp_max clamp_min copysign cos div
    div_ eq erf exp exp_ expm1 floor floor_divide fmod ge gelu gt hardtanh isfinite isinf isnan isneginf
    isposinf le leaky_relu lerp log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor
    lt maximum minimum mul mul_ nan_to_num ne neg neg_ pow reciprocal relu relu_ remainder round rsub sgn sign
    sin sqrt sub sub_ tan tanh threshold_backward trunc gelu_backward tanh_backward sigmoid_backward
    silu_backward complex polar real imag view_as square rsqrt sigmoid silu softplus exp2 sigmoid_ silu_
    rsqrt_
    """
)

# On a CPU these round otherwise in the scalar code at the end of a tensor than in the vector code before it.
PLACED_ON_CPU = _names("atan2 logaddexp logaddexp2 pow pow_ xlogy")

# Reductions whose result does not depend on the order: maxima, integers, truth values.
EXACT = _names(
    """
    all any amax amin argmax argmin cummax cummin max min count_nonzero aminmax
    """
)

# Sums, by the kind of operator. They count only where what is summed is a row, or an integer.
SUMS = _names(
    """
    mean sum cumsum prod var std var_mean linalg_vector_norm norm logsumexp _logcumsumexp
    """
)

# Row-wise functions: one row in, one row out, with a sum inside.
ROW_FUNCTIONS = _names(
    """
    _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm
    native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward rms_norm
    """
)

# Products that are replaced.
PRODUCTS = _names(
    """
    mm addmm bmm baddbmm
    """
)
