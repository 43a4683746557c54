"""The mode on a CPU: rows keep their bits, results stay right, and what was there is back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rl_attn_plugin.invariant import Kind, NotInvariant, batch_invariant

SHAPES = [(77, 33), (576, 192), (1536, 64), (576, 1000), (130, 577)]


def weight(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(rows, columns) * rows**-0.5).to(dtype)


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "silu_": lambda x: F.silu(x.clone(), inplace=True),
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "exp2": torch.exp2,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "square": lambda x: x.pow(2) + x.abs().pow(0.5),
    "tanh": torch.tanh,
    "exp": torch.exp,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
}


def assert_rows_keep_their_bits(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Each row alone, in small batches and at other places, against the whole."""
    whole = run(x)
    for begin, count in ((0, 1), (5, 1), (0, 3), (7, 16), (3, 17), (40, 33), (1, 60)):
        assert torch.equal(run(x[begin : begin + count].clone()), whole[begin : begin + count]), (
            begin,
            count,
        )
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_products(depth: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(depth)
    w, bias, x = (
        weight(depth, columns, dtype),
        torch.randn(columns).to(dtype),
        torch.randn(100, depth).to(dtype),
    )
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda x: x @ w,
        lambda x: F.linear(x, w.t().contiguous()),
        lambda x: F.linear(x, w.t().contiguous(), bias),
        lambda x: torch.addmm(bias, x, w, beta=0.5, alpha=2.0),
        lambda x: (x[None].expand(3, -1, -1) @ w.expand(3, -1, -1))[1],
    ]
    with batch_invariant(strict=True):
        found = [assert_rows_keep_their_bits(run, x) for run in ways]
    exact = x.double() @ w.double()
    rounding = torch.finfo(dtype).eps * exact.norm()
    assert (found[0].double() - exact).norm() <= 2 * ((x @ w).double() - exact).norm() + rounding
    for run, got in zip(ways[1:], found[1:], strict=True):
        torch.testing.assert_close(
            got, run(x), rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [9, 64, 77, 1001])
@pytest.mark.parametrize("name", OPERATORS)
def test_row_functions(name: str, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x = (torch.randn(100, width) * 3).to(dtype)
    with batch_invariant(strict=True):
        found = assert_rows_keep_their_bits(OPERATORS[name], x)
    torch.testing.assert_close(
        found, OPERATORS[name](x), rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps
    )


def test_the_control() -> None:
    """Without the mode a row's bits depend on the batch: the comparison above can see that."""
    torch.manual_seed(0)
    x, w = torch.randn(100, 1536), weight(1536, 576, torch.float32)
    whole = x @ w
    assert any(not torch.equal(x[:n] @ w, whole[:n]) for n in (1, 2, 3, 5, 100))
    x = torch.randn(100, 77)
    assert any(not torch.equal(F.silu(x[n : n + 1]), F.silu(x)[n : n + 1]) for n in range(100))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("columns", [48, 33])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients(name: str, columns: int) -> None:
    torch.manual_seed(0)
    w = weight(96, columns, torch.float32).requires_grad_()
    x = torch.randn(30, 96)

    def loss(rows: Tensor) -> tuple[Tensor, Tensor]:
        leaf = rows.clone().requires_grad_()
        out = F.log_softmax(ACTIVATIONS[name](leaf @ w), -1)
        dx, dw = torch.autograd.grad(out.square().sum(), (leaf, w))
        return dx, dw

    with batch_invariant():
        dx, dw = loss(x)
        assert torch.equal(loss(x)[1], dw)
        for begin, count in ((0, 1), (4, 7), (10, 20)):
            assert torch.equal(loss(x[begin : begin + count])[0], dx[begin : begin + count])
    plain = loss(x)
    w = w.detach().double().requires_grad_()
    exact = loss(x.double())
    for got, theirs, right in zip((dx, dw), plain, exact, strict=True):
        rounding = torch.finfo(torch.float32).eps * right.norm()
        assert (got - right).norm() <= 2 * (theirs - right).norm() + rounding


def flags() -> tuple[bool, ...]:
    matmul = torch.backends.cuda.matmul
    return (
        matmul.allow_tf32, torch.backends.cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )  # fmt: skip


def active() -> bool:
    return bool(_get_current_dispatch_mode_stack())


def test_nesting_and_restoring_in_any_order() -> None:
    before = flags()
    with batch_invariant() as outer:
        assert flags() == (False,) * 4
        torch.ones(3, 4) @ torch.ones(4, 2)
        with batch_invariant() as inner:
            torch.ones(3, 4) @ torch.ones(4, 2)
        assert active() and flags() == (False,) * 4
        torch.ones(3, 4) @ torch.ones(4, 2)
    assert not active() and flags() == before
    products = [
        next(entry.calls for entry in mode.report().entries if entry.operator == "aten.mm")
        for mode in (outer, inner)
    ]
    assert products == [3, 1]

    first, second = batch_invariant.enable(), batch_invariant.enable()
    first.restore()
    assert active()
    first.restore()  # again: nothing happens
    assert active() and flags() == (False,) * 4
    second.restore()
    assert not active() and flags() == before


def test_an_exception_inside() -> None:
    before = flags()
    with pytest.raises(KeyError), batch_invariant():
        raise KeyError
    assert not active() and flags() == before
    mode = batch_invariant()
    for _ in range(2):  # one object, entered twice
        with mode:
            assert active()
    assert not active()


def test_threads() -> None:
    seen: list[bool] = []
    with batch_invariant() as mode:
        thread = threading.Thread(target=lambda: seen.append(active()))
        thread.start()
        thread.join()
        assert active()

        failures: list[str] = []

        def steal() -> None:
            try:
                mode.restore()
            except RuntimeError as error:
                failures.append(str(error))

        thread = threading.Thread(target=steal)
        thread.start()
        thread.join()
        assert failures == ["batch_invariant must be restored by the thread that enabled it"]
        assert active()
    assert seen == [False] and not active()


def test_the_audit_says_what_ran() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    with batch_invariant() as mode:
        y = F.silu(x @ torch.randn(6, 6)) + 1
        torch.cumsum(y, 0)
        torch.linalg.inv(torch.eye(3))
    found = {entry.operator: entry for entry in mode.report().entries}
    assert found["aten.mm"].kind == Kind.REPLACED.value and found["aten.add"].kind == Kind.ROWS.value
    unknown = {entry.operator: entry for entry in mode.report().unknown}
    assert {"aten.cumsum", "aten.linalg_inv_ex"} <= unknown.keys()
    assert unknown["aten.cumsum"].reason == "sums over [0], not over rows alone"
    assert unknown["aten.cumsum"].where is not None and "test_mode.py" in unknown["aten.cumsum"].where
    assert "not known" in str(mode.report())
    data = mode.report().to_dict()
    assert set(data) == {kind.value for kind in Kind} and data["not known"][0]["calls"] == 1
    both = mode.report() + mode.report()
    assert {e.operator: e.calls for e in both.entries}["aten.mm"] == 2


@pytest.mark.parametrize(
    ("run", "operator"),
    [
        (lambda: torch.randn(3, 4).sum(0), "aten.sum"),
        (lambda: torch.randn(3, 4).mean(), "aten.mean"),
        (lambda: torch.rand(3, 4).pow(1.7), "aten.pow"),
        (lambda: torch.randn(3, 4).softmax(0), "aten._softmax"),
        (lambda: F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 5, 8)), "aten._scaled_dot_product"),
        (
            lambda: torch.zeros(3).index_put_((torch.tensor([0, 0]),), torch.ones(2), accumulate=True),
            "aten.index_put_",
        ),
        (lambda: torch.zeros(3).index_add_(0, torch.tensor([0, 0]), torch.ones(2)), "aten.index_add_"),
        (lambda: F.conv1d(torch.randn(1, 2, 9), torch.randn(2, 2, 3)), "aten.convolution"),
    ],
)
def test_strict_raises_where_nothing_is_known(run: Callable[[], Tensor], operator: str) -> None:
    with (
        pytest.raises(NotInvariant, match=operator.replace(".", r"\.")) as error,
        batch_invariant(strict=True),
    ):
        run()
    assert "test_mode.py" in str(error.value)
    assert not active()


def test_another_library_is_named() -> None:
    library = torch.library.Library("aten", "IMPL")
    globals()["somebody_elses_library"] = library
    try:
        library.impl("mm", lambda a, b: a.matmul(b), "CUDA")
        with pytest.raises(RuntimeError, match=r"mm of ATen have been replaced by .*test_mode"):
            batch_invariant.enable()
    finally:
        del globals()["somebody_elses_library"]
        library._destroy()
    batch_invariant.enable().restore()


def test_compilation_is_refused() -> None:
    def compute(x: Tensor) -> Tensor:
        with batch_invariant():
            return x @ x

    with pytest.raises(Exception, match=r"batch_invariant|Unsupported|compile"):
        torch.compile(compute, fullgraph=True, backend="eager")(torch.ones(3, 3))
