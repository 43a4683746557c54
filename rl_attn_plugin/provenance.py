"""What decides the bits of a run: hardware, versions, flags and environment. A leaf: imports torch alone."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

# Installed versions that can change a number.
_DISTRIBUTIONS = (
    "rl-attn-plugin",
    "torch",
    "triton",
    "numpy",
    "transformers",
    "ray",
    "transformer-engine",
    "megatron-core",
    "vllm",
    "flash-attn",
)
# Environment variables that can change a number, by prefix.
_ENVIRONMENT = (
    "CUBLAS_",
    "CUDA_VISIBLE_DEVICES",
    "MKL_",
    "NCCL_",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_",
    "OMP_",
    "ONEDNN_",
    "TORCH_",
    "TRITON_",
)


def collect() -> dict[str, Any]:
    """Everything this process knows about what decides its bits, as plain JSON values."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "cpu": cpu(),
        "gpu": gpu(),
        "flags": flags(),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)
        },
    }


def versions() -> dict[str, str | None]:
    """Installed version of each package that can change a number, None where it is missing."""
    found: dict[str, str | None] = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu() -> dict[str, Any]:
    """Model, threads, and the vector level that torch's kernels chose."""
    return {
        "model": _cpu_model(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def gpu() -> dict[str, Any] | None:
    """Name, architecture and CUDA versions of the current device, or None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": _cudnn_version(),
    }


def _cudnn_version() -> int | str | None:
    """The version in use, or what torch says against it: another library may have loaded another one first."""
    try:
        found: int | None = torch.backends.cudnn.version()
    except RuntimeError as reason:
        return str(reason).splitlines()[0]
    return found


def flags() -> dict[str, Any]:
    """torch's switches that change arithmetic."""
    matmul = torch.backends.cuda.matmul
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "mkldnn": torch.backends.mkldnn.is_available(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
