"""The oracle against the real helpers of several releases, and its refusals against broken ones."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_attn_plugin import merge_attention
from rl_attn_plugin.replay.te_oracle import MergeMode, TEOracle, TEUnavailable, load_te_oracle
from tests.replay import te_wheels

# The first with these helpers, the first where they live now, one between, the last of this form, and the next form.
VERSIONS = ("2.2.0", "2.3.0", "2.10.0", "2.19.0", "2.20.2")
EPS = torch.finfo(torch.float32).eps
HELPERS = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"


@pytest.fixture(scope="module", params=VERSIONS)
def oracle(request: pytest.FixtureRequest) -> TEOracle:
    with te_wheels.installed(request.param):
        return load_te_oracle()


def states(parts: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Partials ``[P, 2, 37, 3, 16]`` of weights that differ by many orders."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(parts, 2, 37, 3, 16, generator=generator)
    return outs, 2 + 3 * torch.randn(parts, 2, 3, 37, generator=generator)


def merged_fp64(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: every output weighted by its share of the sum of exponentials."""
    top = lses.double().amax(0)
    shares = torch.exp(lses.double() - top)
    total = shares.sum(0)
    weights = torch.einsum("pbhs->pbsh", shares / total)
    return torch.einsum("pbsh,pbshd->bshd", weights, outs.double()), top + torch.log(total)


def errors(outs: Tensor, lses: Tensor, merged: tuple[Tensor | None, ...]) -> tuple[float, float]:
    out, lse = merged_fp64(outs, lses)
    return (merged[0] - out).abs().max().item(), (merged[1] - lse).abs().max().item()


def bounds(outs: Tensor, lses: Tensor) -> tuple[float, float]:
    """The largest errors that rounding can cause in out and lse, to first order.

    With u = eps / 2: each of the P - 1 folds rounds an LSE, at most log P above the largest, and takes an exp and a
    logarithm of at most 1 (4 u together). The error of an LSE is the relative error of every weight; to it each of
    the P partials adds its difference, exp, product, sum and quotient (6 u).
    """
    parts, u = outs.shape[0], EPS / 2
    lse = (parts - 1) * u * (lses.abs().max().item() + math.log(parts) + 4)
    return (lse + 6 * parts * u) * outs.abs().max().item(), lse


class TestRealHelpers:
    """Released TransformerEngine, its file unmodified."""

    def test_what_was_found(self, oracle: TEOracle) -> None:
        said = oracle.provenance.to_dict()
        assert json.loads(json.dumps(said)) == said
        version = said["te_version"]
        assert version in VERSIONS and version in said["actual_backend_source"]
        assert said["te_module"] == (
            "transformer_engine.pytorch.attention" if version == "2.2.0" else HELPERS
        )
        incremental = version == "2.20.2"
        assert said["te_symbols"][0] == "flash_attn_fwd_softmax_lse_correction"
        assert ("flash_attn_fwd_incremental_out_correction" in said["te_symbols"]) == incremental
        assert oracle.native_mode is (MergeMode.PAIRWISE if incremental else MergeMode.TWO_PHASE)
        assert said["te_available"] and said["te_signature_checked"] and said["te_compiled"] is False
        assert said["te_capability_probe"] == said["te_numeric_selftest"] == "passed"
        assert said["actual_backend"] == "transformer_engine" and said["reason"] is None
        assert (said["accum_dtype"], said["downcast_at"]) == ("fp32", "never")

    def test_whose_arithmetic_a_mode_runs(self, oracle: TEOracle) -> None:
        for mode in oracle.modes:
            said = oracle.provenance_of(mode)
            assert said.merge_mode == mode.value
            ours = mode is MergeMode.ASCENDING
            assert said.actual_backend == ("rl_attn_plugin" if ours else "transformer_engine")
        assert said.actual_backend_source == "rl_attn_plugin.ops.cache.merge_attention"
        assert oracle.provenance.merge_mode is None

    @pytest.mark.parametrize("parts", [1, 2, 3, 8, 33])
    def test_accuracy(self, oracle: TEOracle, parts: int) -> None:
        """Each merge is within rounding of fp64, and ours no further away than TransformerEngine's."""
        outs, lses = states(parts)
        out_bound, lse_bound = bounds(outs, lses)
        found = {}
        for mode in oracle.modes:
            merged = oracle.merge(outs, lses, mode)
            assert merged.out.dtype == merged.lse.dtype == torch.float32
            found[mode] = errors(outs, lses, merged)
            out, lse = found[mode]
            print(f"{oracle.provenance.te_version} P={parts} {mode.value}: {out=:.2e} {lse=:.2e}")  # noqa: T201
        assert all(out <= out_bound and lse <= lse_bound for out, lse in found.values()), found
        ours = found.pop(MergeMode.ASCENDING)
        # the last rounding of an LSE is nobody's merit: it may fall either way
        last = EPS / 2 * lses.abs().max().item()
        assert all(ours[0] <= out and ours[1] <= lse + last for out, lse in found.values()), (ours, found)

    def test_ours_is_the_public_merge(self, oracle: TEOracle) -> None:
        outs, lses = states(5)
        got, want = oracle.merge(outs, lses, MergeMode.ASCENDING), merge_attention(outs, lses)
        assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)

    def test_empty_partials_leave_no_trace(self, oracle: TEOracle) -> None:
        """Each row has the bits of the merge of its other partials, whatever lies in the empty ones."""
        outs, lses = states(6)
        generator = torch.Generator().manual_seed(1)
        empty = torch.rand(lses.shape, generator=generator) < 0.5
        rows = empty.transpose(-1, -2)  # [P, B, S, H]
        outs[rows] = torch.nan
        lses[empty] = -torch.inf
        for mode in oracle.modes:
            merged = oracle.merge(outs, lses, mode)
            for keep in itertools.product((True, False), repeat=6):
                of_these = (rows != torch.tensor(keep)[:, None, None, None]).all(0)  # [B, S, H]
                if not of_these.any():
                    continue
                if any(keep):
                    out, lse, _ = oracle.merge(outs[list(keep)], lses[list(keep)], mode)
                else:
                    out, lse = torch.zeros_like(merged.out), torch.full_like(merged.lse, -torch.inf)
                assert torch.equal(merged.out[of_these], out[of_these]), (mode, keep)
                of_these = of_these.transpose(-1, -2)
                assert torch.equal(merged.lse[of_these], lse[of_these]), (mode, keep)

    @pytest.mark.parametrize("parts", [1, 2, 33])
    @pytest.mark.parametrize("place", [0, -1])
    def test_a_single_state_passes_exactly(self, oracle: TEOracle, parts: int, place: int) -> None:
        outs, lses = states(parts)
        state, level = outs[place].clone(), 50 * lses[place].clone()
        outs[:], lses[:] = torch.nan, -torch.inf
        outs[place], lses[place] = state, level
        for mode in oracle.modes:
            merged = oracle.merge(outs, lses, mode)
            assert torch.equal(merged.out, state) and torch.equal(merged.lse, level), mode

    @pytest.mark.parametrize("parts", [1, 2, 33])
    def test_nothing_to_merge(self, oracle: TEOracle, parts: int) -> None:
        """``-inf`` everywhere, and the ``+inf`` with a zero output that some libraries write instead."""
        outs, lses = states(parts)
        for fill, level in ((torch.nan, -torch.inf), (0.0, torch.inf)):
            outs[:], lses[:] = fill, level
            for mode in oracle.modes:
                merged = oracle.merge(outs, lses, mode)
                assert torch.equal(merged.out, torch.zeros_like(outs[0])), mode
                assert torch.equal(merged.lse, torch.full_like(lses[0], -torch.inf)), mode

    def test_the_other_spelling_of_empty(self, oracle: TEOracle) -> None:
        outs, lses = states(3)
        outs[1], lses[1] = 0.0, torch.inf
        for mode in oracle.modes:
            merged, without = oracle.merge(outs, lses, mode), oracle.merge(outs[::2], lses[::2], mode)
            assert torch.equal(merged.out, without.out) and torch.equal(merged.lse, without.lse), mode

    def test_arguments_stay_as_they_are(self, oracle: TEOracle) -> None:
        """TransformerEngine's helpers work in place; strides are free, and no graph is kept."""
        outs, lses = states(4)
        strided = outs.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
        before = outs.clone(), lses.clone()
        for mode in oracle.modes:
            merged, plain = oracle.merge(strided, lses, mode), oracle.merge(outs, lses, mode)
            assert not merged.out.requires_grad
            assert torch.equal(merged.out, plain.out) and torch.equal(merged.lse, plain.lse)
            merged.out.fill_(torch.nan)
            merged.lse.fill_(torch.nan)
        assert torch.equal(outs, before[0]) and torch.equal(lses, before[1])

    def test_refusals(self, oracle: TEOracle) -> None:
        outs, lses = states(2)
        native = oracle.native_mode
        with pytest.raises(ValueError, match=r"outs must be \[P, B, S, H, D\], got \[2, 37, 3, 16\]"):
            oracle.merge(outs[0], lses, native)
        with pytest.raises(ValueError, match=r"lses must be \[2, 2, 3, 37\], got \[2, 2, 37, 3\]"):
            oracle.merge(outs, lses.transpose(-1, -2), native)
        with pytest.raises(ValueError, match=r"at least one partial, got 0"):
            oracle.merge(outs[:0], lses[:0], native)
        for bad in (torch.bfloat16, torch.float64):
            with pytest.raises(
                ValueError, match=f"outs must be float32, got {bad}(.|\n)*lses must be float32"
            ):
                oracle.merge(outs.to(bad), lses.to(bad), native)
        with pytest.raises(ValueError, match="lses must be on outs' device cpu, got meta"):
            oracle.merge(outs, lses.to("meta"), native)
        with pytest.raises(
            ValueError, match=r"mode must be one of .*'te_pairwise', 'ours'.* got 'ascending'"
        ):
            oracle.merge(outs, lses, "ascending")
        by_value = oracle.merge(outs, lses, native.value)
        assert torch.equal(by_value.out, oracle.merge(outs, lses, native).out)


def test_two_phases_ended_with_2_20() -> None:
    with te_wheels.installed("2.20.2"):
        oracle = load_te_oracle()
    with pytest.raises(ValueError, match=r"\['te_pairwise', 'ours'\] with TransformerEngine 2\.20\.2, got"):
        oracle.merge(*states(2), MergeMode.TWO_PHASE)


def test_schedules_differ_in_bits() -> None:
    """Three names for one computation would be no three oracles."""
    with te_wheels.installed("2.19.0"):
        oracle = load_te_oracle()
    outs, lses = states(8)
    made = [oracle.merge(outs, lses, mode).out for mode in MergeMode]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(made, 2))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's, loading its compiler
def test_a_release_before_them_is_refused() -> None:
    with te_wheels.installed("2.1.0"), pytest.raises(TEUnavailable) as caught:
        load_te_oracle()
    said = caught.value.provenance
    assert caught.value.reason == said.reason == str(caught.value)
    assert said.reason == (
        "transformer_engine.pytorch.attention has no flash_attn_fwd_out_correction_init, "
        "nor flash_attn_fwd_incremental_out_correction"
    )
    assert (said.te_version, said.te_module) == ("2.1.0", "transformer_engine.pytorch.attention")
    assert (said.te_capability_probe, said.te_numeric_selftest) == ("failed", "not_run")
    assert not said.te_available and said.actual_backend is None


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("version", ["2.2.0", "2.20.2"])
def test_compiled_helpers_pass(version: str) -> None:
    """What TransformerEngine does by default. The compiler rounds otherwise, which the self-test must admit."""
    with te_wheels.installed(version, jit_fuser=torch.compile):
        oracle = load_te_oracle("cpu")
    assert oracle.provenance.te_compiled
    with te_wheels.installed(version):
        plain = load_te_oracle("cpu")
    outs, lses = states(3)
    lses[0, 0] = -torch.inf
    for mode in oracle.modes:
        got, want = oracle.merge(outs, lses, mode), plain.merge(outs, lses, mode)
        torch.testing.assert_close(got.out, want.out, rtol=1.3e-6, atol=1e-5)
        torch.testing.assert_close(got.lse, want.lse, rtol=1.3e-6, atol=1e-5)


@pytest.mark.te
def test_the_installed_one() -> None:
    """On a machine that has TransformerEngine with its libraries, it is usable and on that machine's device."""
    oracle = load_te_oracle()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    outs, lses = (x.to(device) for x in states(5))
    for mode in oracle.modes:
        out, lse = errors(outs, lses, oracle.merge(outs, lses, mode))
        out_bound, lse_bound = bounds(outs, lses)
        assert out <= out_bound and lse <= lse_bound, mode


# Broken installations: stand-ins written here, right unless a test makes them wrong.


def lse_correction(softmax_lse: Tensor, softmax_lse_per_step: Tensor) -> None:
    torch.logaddexp(softmax_lse, softmax_lse_per_step, out=softmax_lse)


def share(of: Tensor, total: Tensor) -> Tensor:
    """``[B, H, S]`` to weights ``[B, S, H, 1]``."""
    return torch.exp(of - total).transpose(1, 2)[..., None]


def out_init(
    out_init_step: Tensor, softmax_lse: Tensor, softmax_lse_init_step: Tensor, seq_dim: int
) -> Tensor:
    return out_init_step * share(softmax_lse_init_step, softmax_lse)


def out_add(
    out: Tensor, out_per_step: Tensor, softmax_lse: Tensor, softmax_lse_per_step: Tensor, seq_dim: int
) -> None:
    out += out_per_step * share(softmax_lse_per_step, softmax_lse)


def out_incremental(
    out: Tensor,
    out_per_step: Tensor,
    old_softmax_lse: Tensor,
    new_softmax_lse: Tensor,
    softmax_lse_per_step: Tensor,
    seq_dim: int,
) -> None:
    out *= share(old_softmax_lse, new_softmax_lse)
    out += out_per_step * share(softmax_lse_per_step, new_softmax_lse)


LSE = "flash_attn_fwd_softmax_lse_correction"
INIT = "flash_attn_fwd_out_correction_init"
ADD = "flash_attn_fwd_out_correction"
INCREMENTAL = "flash_attn_fwd_incremental_out_correction"
TWO_PHASE_FORM: dict[str, Any] = {LSE: lse_correction, INIT: out_init, ADD: out_add}
INCREMENTAL_FORM: dict[str, Any] = {LSE: lse_correction, INCREMENTAL: out_incremental}


@pytest.fixture
def no_te() -> Iterator[None]:
    with te_wheels.without_te():
        yield


@pytest.fixture
def absent(no_te: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed, on machines that have it too."""

    class Nowhere:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "transformer_engine":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Nowhere(), *sys.meta_path])


@pytest.fixture
def install(no_te: None) -> Callable[[dict[str, Any]], None]:
    """Put these helpers where TransformerEngine has its own."""

    def put(helpers: dict[str, Any]) -> None:
        parents = [HELPERS[:at] for at, letter in enumerate(HELPERS) if letter == "."]
        for name in (*parents, HELPERS):
            module = sys.modules[name] = ModuleType(name)
            module.__path__, module.__file__ = [], "stand-in"
        vars(sys.modules[HELPERS]).update(helpers)

    return put


def refused() -> TEUnavailable:
    with pytest.raises(TEUnavailable) as caught:
        load_te_oracle("cpu")
    assert not caught.value.provenance.te_available and caught.value.provenance.actual_backend is None
    return caught.value


Install = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize("form", [TWO_PHASE_FORM, INCREMENTAL_FORM], ids=["two_phase", "incremental"])
class TestBroken:
    def test_the_stand_ins_are_right(self, install: Install, form: dict[str, Any]) -> None:
        install(form)
        assert load_te_oracle("cpu").provenance.te_symbols == tuple(form)

    def test_no_empty_state_reaches_a_helper(self, install: Install, form: dict[str, Any]) -> None:
        called = []

        def guarded(name: str, helper: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(helper)
            def spy(*arguments: Any) -> Any:
                called.append(name)
                assert all(x.isfinite().all() for x in arguments if isinstance(x, Tensor))
                return helper(*arguments)

            return spy

        install({name: guarded(name, helper) for name, helper in form.items()})
        oracle = load_te_oracle("cpu")
        outs, lses = states(4)
        outs[:2, 0], lses[:2, 0] = torch.nan, -torch.inf
        outs[2, 0], lses[2, 0] = 0.0, torch.inf
        for mode in oracle.modes:
            assert oracle.merge(outs, lses, mode).out.isfinite().all()
        assert set(called) == set(form)

    def test_a_missing_helper(self, install: Install, form: dict[str, Any]) -> None:
        install({name: helper for name, helper in form.items() if name != LSE})
        error = refused()
        assert error.reason.startswith(f"{HELPERS} has no {LSE}")
        assert error.provenance.te_module == HELPERS
        assert error.provenance.te_capability_probe == "failed"

    def test_not_callable(self, install: Install, form: dict[str, Any]) -> None:
        for name in form:
            install({**form, name: "a string"})
            error = refused()
            assert error.reason == f"{HELPERS}.{name} must be callable, got str"
            assert error.provenance.te_capability_probe == "failed"

    def test_other_arguments(self, install: Install, form: dict[str, Any]) -> None:
        for name, helper in form.items():
            names = list(inspect.signature(helper).parameters)
            for arguments in (
                names[:-1],  # one fewer
                [*names[:-2], names[-1], names[-2]],  # in another order, as before 1.12
                [*names, "movedim_dst"],  # one more, as from 1.12 to 2.1
                ["*", *names],  # by keyword only
            ):
                made: dict[str, Any] = {}
                exec(f"def helper({', '.join(arguments)}): ...", made)
                install({**form, name: made["helper"]})
                error = refused()
                assert error.reason.startswith(f"{name} must take ({', '.join(names)}), got (")
                said = error.provenance
                assert (said.te_capability_probe, said.te_signature_checked) == ("passed", False)
                assert said.te_numeric_selftest == "not_run"

    def test_arguments_with_defaults_may_follow(self, install: Install, form: dict[str, Any]) -> None:
        def more(
            softmax_lse: Tensor, softmax_lse_per_step: Tensor, packed: bool = False, **rest: Any
        ) -> None:
            lse_correction(softmax_lse, softmax_lse_per_step)

        install({**form, LSE: more})
        assert load_te_oracle("cpu").provenance.te_available

    def test_no_signature(self, install: Install, form: dict[str, Any]) -> None:
        install({**form, LSE: type})
        assert refused().reason.startswith(f"{LSE} has no signature to check: ")

    def test_a_helper_that_raises(self, install: Install, form: dict[str, Any]) -> None:
        def raises(softmax_lse: Tensor, softmax_lse_per_step: Tensor) -> None:
            raise RuntimeError("no kernel image is available")

        install({**form, LSE: raises})
        error = refused()
        assert error.reason.endswith("a helper raised RuntimeError: no kernel image is available")
        said = error.provenance
        assert said.te_signature_checked and said.te_numeric_selftest == "failed"

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda a, b: torch.maximum(a, b, out=a),
            lambda a, b: torch.logaddexp2(a, b, out=a),
            lambda a, b: torch.logaddexp(a, b),  # returned, not in place
            lambda a, b: a.copy_(torch.log(torch.exp(a) + torch.exp(b))),  # overflows
            lambda a, b: a.copy_(torch.logaddexp(a, b) + 1e-5),
            lambda a, b: a.copy_(torch.logaddexp(a, b).bfloat16()),
            lambda a, b: None,
        ],
        ids=["max", "base 2", "not in place", "overflow", "offset", "bf16", "nothing"],
    )
    def test_a_wrong_lse(
        self, install: Install, form: dict[str, Any], wrong: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        def correction(softmax_lse: Tensor, softmax_lse_per_step: Tensor) -> Tensor:
            return wrong(softmax_lse, softmax_lse_per_step)

        install({**form, LSE: correction})
        error = refused()
        assert " in the numeric self-test, beyond atol 1e-06 and rtol 1.3e-06" in error.reason
        assert error.provenance.te_signature_checked
        assert error.provenance.te_numeric_selftest == "failed"


def wrong_out(old: float = 0.0, new: float = 0.0, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Both forms with the running output's weight, or the new one's, off by a factor or a rounding."""

    def init(
        out_init_step: Tensor, softmax_lse: Tensor, softmax_lse_init_step: Tensor, seq_dim: int
    ) -> Tensor:
        weight = share(softmax_lse_init_step, softmax_lse).to(dtype).float()
        return out_init_step * (weight + old * (1 - weight))

    def add(
        out: Tensor, out_per_step: Tensor, softmax_lse: Tensor, softmax_lse_per_step: Tensor, seq_dim: int
    ) -> None:
        weight = share(softmax_lse_per_step, softmax_lse).to(dtype).float()
        out += out_per_step * (weight + new * (1 - weight))

    def incremental(
        out: Tensor,
        out_per_step: Tensor,
        old_softmax_lse: Tensor,
        new_softmax_lse: Tensor,
        softmax_lse_per_step: Tensor,
        seq_dim: int,
    ) -> None:
        out.copy_(init(out, new_softmax_lse, old_softmax_lse, seq_dim))
        add(out, out_per_step, new_softmax_lse, softmax_lse_per_step, seq_dim)

    return [{**TWO_PHASE_FORM, INIT: init, ADD: add}, {**INCREMENTAL_FORM, INCREMENTAL: incremental}]


@pytest.mark.parametrize(
    "how",
    [{"old": 1.0}, {"new": 1.0}, {"old": 1e-4}, {"new": 1e-4}, {"dtype": torch.bfloat16}],
    ids=["old not weighted", "new not weighted", "old a little off", "new a little off", "weights in bf16"],
)
@pytest.mark.parametrize("form", [0, 1], ids=["two_phase", "incremental"])
def test_a_wrong_out(install: Install, form: int, how: dict[str, Any]) -> None:
    install(wrong_out()[form])
    assert load_te_oracle("cpu").provenance.te_available
    install(wrong_out(**how)[form])
    assert " out is off by " in refused().reason


def test_a_wrong_shape_and_a_wrong_return(install: Install) -> None:
    def init(
        out_init_step: Tensor, softmax_lse: Tensor, softmax_lse_init_step: Tensor, seq_dim: int
    ) -> Tensor:
        return out_init_step.transpose(1, 2)

    def add(
        out: Tensor, out_per_step: Tensor, softmax_lse: Tensor, softmax_lse_per_step: Tensor, seq_dim: int
    ) -> None: ...

    install({**TWO_PHASE_FORM, INIT: init, ADD: add})
    assert refused().reason == "te_two_phase: out must be [2, 5, 3, 7], got [2, 3, 5, 7]"
    install({**TWO_PHASE_FORM, INIT: lambda out_init_step, softmax_lse, softmax_lse_init_step, seq_dim: None})
    assert "te_two_phase: a helper raised " in refused().reason


def test_not_installed(absent: None) -> None:
    error = refused()
    assert error.reason == "transformer_engine is not installed: pip install 'rl-attn-plugin[te]'"
    said = error.provenance
    assert said.te_module is None and said.te_symbols == ()
    assert (said.te_capability_probe, said.te_numeric_selftest) == ("not_run", "not_run")


def test_without_the_module(install: Install) -> None:
    install(TWO_PHASE_FORM)
    for name in [name for name in sys.modules if name.startswith("transformer_engine.pytorch.attention")]:
        del sys.modules[name]
    assert refused().reason.startswith(f"transformer_engine has none of the modules {HELPERS}, ")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import transformer_engine_torch", "No module named 'transformer_engine_torch'"),
        ("raise OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13: cannot open"),
        ("assert False, 'torch 2.1 required'", "AssertionError: torch 2.1 required"),
    ],
)
def test_it_does_not_import(
    no_te: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert refused().reason == f"{HELPERS} does not import: {reason}"


def test_a_refusal_travels_between_processes(absent: None) -> None:
    error = refused()
    copy = pickle.loads(pickle.dumps(error))
    assert copy.provenance == error.provenance and str(copy) == str(error)


def test_it_is_lazy_and_torch_comes_first(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine.py").write_text("import sys; print('torch' in sys.modules)")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import rl_attn_plugin, rl_attn_plugin.replay\n"
        "from rl_attn_plugin.replay.te_oracle import TEUnavailable, load_te_oracle\n"
        "assert 'transformer_engine' not in sys.modules\n"
        "try: load_te_oracle()\n"
        "except TEUnavailable as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True\ntransformer_engine has none of the modules"), done.stdout
