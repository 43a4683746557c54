"""Compiles every kernel for GPUs that are not here. Run as a script: it needs Triton's compiler, not its interpreter.

python tests/kernels/aot.py sm_90 [name ...]      prints one line a kernel: registers, spills, shared memory
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_FP32_POINTERS = {"Lse", "RowMax", "StateAcc", "StateM", "StateL", "Delta", "DLse", "RowLse", "DSinks",
                  "Cos", "Sin", "KScale", "VScale",
                  "Sinks", "Lses", "Partial", "Mean", "Rstd"}  # fmt: skip
_INT_POINTERS = {"CuQ", "CuK", "UsedQ", "UsedK", "KvStart", "Table", "Work", "Places", "Slots"}
_FLOATS = {"inner", "scale_log2", "scale", "alpha", "beta", "factor", "eps"}


def compile_kernel(
    kernel: Any, target: str, constants: dict[str, Any], *, dtype: str, options: dict[str, Any]
) -> Any:
    """Compile a `triton.jit` function; arguments not in ``constants`` get types by their names."""
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(i,)] = constants[name]
        elif name in _FP32_POINTERS:
            signature[name] = "*fp32"
        elif name in _INT_POINTERS:
            signature[name] = "*i32"
        elif name == "Keep":
            signature[name] = "*u8"
        elif name[0].isupper():
            signature[name] = f"*{constants.get('dtype_' + name, dtype)}"
        elif name in _FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
        aligned = name[0].isupper() or re.fullmatch(r"\w+_(b|t|h|m|n|page)", name)
        if name not in constants and aligned and "scale" not in name:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=TARGETS[target], options=options)


def resources(compiled: Any) -> str:
    """Registers and spills by ptxas, where the target is NVIDIA's."""
    if "ptx" not in compiled.asm:
        return f"shared {compiled.metadata.shared}"
    import triton.backends.nvidia as nvidia

    target = re.search(r"\.target (\w+)", compiled.asm["ptx"]).group(1)  # type: ignore[union-attr]
    tools = Path(nvidia.__file__).parent / "bin"
    tool = tools / (
        "ptxas-blackwell" if target.startswith("sm_10") and (tools / "ptxas-blackwell").exists() else "ptxas"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(compiled.asm["ptx"])
        f.flush()
        said = subprocess.run(
            [tool, "-v", f"--gpu-name={target}", "--fmad=false", f.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores", said)
    kinds = [x for x in ("wgmma", "mma.sync", "tcgen05") if x in compiled.asm["ptx"]]
    return (
        f"registers {registers and registers.group(1)} spilled {spills and spills.group(1)} B "
        f"shared {compiled.metadata.shared} {' '.join(kinds)}"
    )


def forward_constants(**given: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "RowMax": None, "StateAcc": None, "StateM": None, "StateL": None, "Sinks": None, "KScale": None, "VScale": None,
        "CuQ": None, "CuK": None, "UsedQ": None, "UsedK": None, "KvStart": None, "Table": None, "Keep": None, "Work": None,
        "Cos": None, "Sin": None, "Places": None, "HALF": 0, "INTERLEAVED": False,
        "q_d": 1, "k_d": 1, "v_d": 1, "out_d": 1,
        "G": 4, "D": 128, "DV": 128, "BLOCK_D": 128, "BLOCK_DV": 128, "BLOCK_M": 128, "BLOCK_N": 64,
        "PAGE": 0, "MODE": 0, "GRID": False, "HEAD_FAST": False, "TOP_LEFT": False, "HAS_LEFT": False,
        "HAS_RIGHT": True, "SOFTCAP": False, "FACTOR": 1, "SAME": True, "WIDE": False, "STAGES": 3,
    }  # fmt: skip
    for name in ("CuQ", "CuK", "UsedQ", "UsedK", "KvStart", "Table", "Keep", "Work", "Sinks", "RowMax", "KScale", "VScale",
                 "StateAcc", "StateM", "StateL", "Cos", "Sin", "Places"):  # fmt: skip
        if given.pop(name, None):
            del base[name]
    return base | given


def cases() -> dict[str, tuple[Any, dict[str, Any], str, dict[str, Any]]]:
    """name -> kernel, constants, dtype, options."""
    from rl_attn_plugin.kernels.backward import (
        backward_kv_kernel,
        backward_q_kernel,
        sinks_kernel,
        statistics_kernel,
    )
    from rl_attn_plugin.kernels.combine import combine_kernel
    from rl_attn_plugin.kernels.forward import forward_kernel
    from rl_attn_plugin.kernels.kv_cache import write_kernel
    from rl_attn_plugin.kernels.matmul import matmul_kernel
    from rl_attn_plugin.kernels.merge import merge_kernel
    from rl_attn_plugin.kernels.rope import rope_kernel
    from rl_attn_plugin.kernels.rows import norm_kernel, softmax_kernel, sum_kernel

    def options(warps: int, stages: int) -> dict[str, Any]:
        return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}

    states = {"StateAcc": 1, "StateM": 1, "StateL": 1}
    packed = {"CuQ": 1, "CuK": 1, "MODE": 2}
    paged = {"CuQ": 1, "UsedK": 1, "Table": 1, "PAGE": 16, "MODE": 1, "BLOCK_M": 64}
    wide = {"D": 192, "BLOCK_D": 256, "BLOCK_N": 32}
    everything = {
        "KvStart": 1,
        "HAS_LEFT": True,
        "Sinks": 1,
        "SOFTCAP": True,
        "RowMax": 1,
        "UsedQ": 1,
        "UsedK": 1,
    }
    rowwise = {"out_d": 1, "dout_d": 1, "G": 4, "DV": 128, "BLOCK_DV": 128, "ROWS": 64}
    writing = {
        "k_d": 1,
        "v_d": 1,
        "kc_d": 1,
        "vc_d": 1,
        "D": 128,
        "DV": 96,
        "BLOCK_D": 128,
        "BLOCK_DV": 128,
        "PAGE": 16,
    }
    rope = {"Cos": 1, "Sin": 1, "Places": 1, "HALF": 64, "cos_d": 1, "sin_d": 1}
    turning = {"x_d": 1, "cos_d": 1, "sin_d": 1, "D": 128, "BLOCK_D": 128, "ROWS": 32, "INVERSE": False}
    return {
        "forward-dense": (forward_kernel, forward_constants(), "bf16", options(8, 3)),
        "forward-dense-64": (forward_kernel, forward_constants(BLOCK_M=64), "bf16", options(4, 3)),
        "forward-masked": (forward_kernel, forward_constants(Keep=1, HAS_RIGHT=False), "bf16", options(8, 3)),
        "forward-packed": (forward_kernel, forward_constants(**packed), "bf16", options(8, 3)),
        "forward-packed-all": (forward_kernel, forward_constants(**packed, **everything), "fp16", options(8, 3)),
        "forward-packed-rope": (forward_kernel, forward_constants(**packed, **rope), "bf16", options(8, 3)),
        "forward-packed-192": (forward_kernel, forward_constants(**packed, **wide), "bf16", options(8, 3)),
        "forward-packed-96": (forward_kernel, forward_constants(**packed, D=96, DV=80), "bf16", options(8, 3)),
        "forward-fp32": (forward_kernel, forward_constants(**packed, BLOCK_M=16, STAGES=1), "fp32", options(4, 1)),
        "forward-256": (
            forward_kernel,
            forward_constants(**packed, D=256, DV=256, BLOCK_D=256, BLOCK_DV=256, BLOCK_N=32, STAGES=2),
            "bf16", options(8, 2),
        ),
        "forward-paged-loop": (forward_kernel, forward_constants(**paged), "bf16", options(4, 3)),
        "forward-paged-grid": (
            forward_kernel, forward_constants(**paged, **states, GRID=True, HEAD_FAST=True), "bf16", options(4, 3),
        ),
        "forward-planned": (
            forward_kernel,
            forward_constants(**{**paged, "MODE": 3}, **states, Work=1, GRID=True, HEAD_FAST=True), "bf16", options(4, 3),
        ),
        "combine": (
            combine_kernel,
            {k: v for k, v in forward_constants(**paged, **states, Sinks=1).items() if k in combine_kernel.arg_names}
            | {"UNROLL": 8},
            "bf16", options(1, 1),
        ),
        "merge": (merge_kernel, {"outs_d": 1, "lses_t": 1, "DV": 128, "BLOCK_DV": 128, "ROWS": 16}, "bf16", options(4, 1)),
        "write": (write_kernel, writing | {"KScale": None, "VScale": None, "E4M3": False}, "bf16", options(1, 1)),
        "rope": (rope_kernel, turning | {"INTERLEAVED": False, "HALF": 64}, "bf16", options(4, 1)),
        "rope-interleaved": (rope_kernel, turning | {"INTERLEAVED": True, "HALF": 40}, "fp32", options(4, 1)),
        **{
            f"matmul-{m}x{n}": (
                matmul_kernel,
                {"Bias": None, "a_k": 1, "b_k": 1, "bias_b": 0, "bias_m": 0, "bias_n": 0, "BLOCK_M": m, "BLOCK_N": n,
                 "BLOCK_K": 64, "GROUP": 8, "EVEN_K": True, "STAGES": stages, "FP32": False},
                "bf16", options(warps, stages),
            )
            for m, n, warps, stages in ((64, 32, 4, 6), (64, 128, 4, 4), (128, 256, 8, 3))
        },
        "matmul-fp32": (
            matmul_kernel,
            {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP": 8, "EVEN_K": False, "STAGES": 3, "FP32": True},
            "fp32", options(4, 3),
        ),
        "row-sum": (sum_kernel, {"BLOCK": 1024}, "bf16", options(4, 1)),
        "softmax": (softmax_kernel, {"LOG": True, "BLOCK": 1024}, "bf16", options(4, 1)),
        "norm": (norm_kernel, {"CENTER": True, "BLOCK": 1024}, "bf16", options(4, 1)),
        "statistics": (statistics_kernel, rowwise, "bf16", options(4, 1)),
        "sinks": (sinks_kernel, {"G": 4, "ROWS": 1024}, "bf16", options(4, 1)),
        "backward-kv": backward(backward_kv_kernel, 64, 128, options(8, 2)),
        "backward-q": backward(backward_q_kernel, 128, 64, options(8, 2)),
        "backward-kv-all": backward(backward_kv_kernel, 64, 128, options(8, 2), **packed, **everything),
        "backward-q-all": backward(backward_q_kernel, 128, 64, options(8, 2), **packed, **everything),
        "backward-kv-rope": backward(backward_kv_kernel, 64, 128, options(8, 2), **packed, **rope),
        "backward-q-rope": backward(backward_q_kernel, 128, 64, options(8, 2), **packed, **rope, INTERLEAVED=True),
        "backward-kv-256": backward(
            backward_kv_kernel, 32, 64, options(8, 1), **packed, D=256, DV=256, BLOCK_D=256, BLOCK_DV=256
        ),
        "backward-q-256": backward(
            backward_q_kernel, 64, 32, options(8, 1), **packed, D=256, DV=256, BLOCK_D=256, BLOCK_DV=256
        ),
        "backward-kv-fp32": backward(backward_kv_kernel, 16, 16, options(4, 1), dtype="fp32", **packed),
        "backward-q-fp32": backward(backward_q_kernel, 16, 16, options(4, 1), dtype="fp32", **packed),
    }  # fmt: skip


def backward(
    kernel: Any, rows: int, keys: int, options: dict[str, Any], dtype: str = "bf16", **given: Any
) -> tuple[Any, dict[str, Any], str, dict[str, Any]]:
    constants = forward_constants(**given) | {
        "BLOCK_M": rows, "BLOCK_N": keys, "STAGES": options["num_stages"], "dout_d": 1
    }  # fmt: skip
    return kernel, {k: v for k, v in constants.items() if k in kernel.arg_names}, dtype, options


def main(target: str, names: list[str]) -> None:
    for name, (kernel, constants, dtype, options) in cases().items():
        if names and name not in names:
            continue
        compiled = compile_kernel(kernel, target, constants, dtype=dtype, options=options)
        print(f"{target} {name}: {resources(compiled)}", flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(sys.argv[1], sys.argv[2:])
