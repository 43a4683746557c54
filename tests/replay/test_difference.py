"""The statistics, against independent computations."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from rl_attn_plugin.replay import TensorDrift, tensor_drift


def test_against_numpy() -> None:
    torch.manual_seed(0)
    reference = torch.randn(7, 11, 3, dtype=torch.bfloat16)
    candidate = (reference + torch.randn(7, 11, 3) * 0.05).bfloat16()
    d = reference.double().numpy() - candidate.double().numpy()
    found = tensor_drift(candidate, reference)
    assert found.max_abs == np.abs(d).max()
    assert found.mean == pytest.approx(d.mean(), rel=1e-12, abs=1e-15)
    assert found.mean_abs == pytest.approx(np.abs(d).mean(), rel=1e-12)
    assert found.p95_abs == pytest.approx(np.quantile(np.abs(d), 0.95), rel=1e-12)
    assert found.p99_abs == pytest.approx(np.quantile(np.abs(d), 0.99), rel=1e-12)
    assert found.active_count == d.size and found.differing_count == (d != 0).sum()
    assert not found.bit_equal and found.infinite_count == 0


def test_the_sign_is_reference_minus_candidate() -> None:
    found = tensor_drift(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.5]))
    assert found.mean == 0.5


def test_infinities() -> None:
    inf = math.inf
    reference = torch.tensor([-inf, -inf, 1.0, 2.0, 3.0])
    same = tensor_drift(reference.clone(), reference)
    assert same.bit_equal and same.max_abs == 0 and same.infinite_count == 0 and same.active_count == 5
    found = tensor_drift(torch.tensor([-inf, 4.0, -inf, 2.5, 3.0]), reference)
    assert found.infinite_count == 2 and found.max_abs == inf and found.differing_count == 3
    assert found.mean_abs == pytest.approx(0.5 / 3)  # of the finite ones
    none_finite = tensor_drift(torch.tensor([math.nan]), torch.tensor([1.0]))
    assert none_finite.infinite_count == 1 and none_finite.mean_abs is None and not none_finite.bit_equal
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert TensorDrift.from_dict(json.loads(text)) == found


def test_only_active_rows_count() -> None:
    reference, candidate = torch.zeros(4, 2), torch.tensor([[0.0, 0], [9, 9], [1, 0], [9, 9]])
    found = tensor_drift(candidate, reference, torch.tensor([True, False, True, False]))
    assert found.active_count == 4 and found.max_abs == 1 and found.differing_count == 1
    nothing = tensor_drift(candidate, reference, torch.zeros(4, dtype=torch.bool))
    assert nothing.active_count == 0 and nothing.max_abs is None


def test_more_elements_than_torch_quantile_takes() -> None:
    size = (1 << 24) + 5
    reference = torch.zeros(size)
    candidate = torch.arange(size, dtype=torch.float32).remainder_(1000.0)
    found = tensor_drift(candidate, reference)
    assert found.active_count == size
    assert found.p99_abs == pytest.approx(np.quantile(candidate.numpy(), 0.99), rel=1e-9)


def test_shapes_and_dtypes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"shape and dtype \[2\] torch.float32, got \[3\] torch.float32"):
        tensor_drift(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"torch\.float16"):
        tensor_drift(torch.zeros(2).half(), torch.zeros(2))
