"""``rl-attn compare``: one attention layer computed the trainer's way and the rollout's ways, on this machine."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from rl_attn_plugin.launch.config import CompareConfig, Synthetic
from rl_attn_plugin.launch.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_STATUS, StoreError, print_error
from rl_attn_plugin.launch.store import COMPARISONS, make_folder, write_atomic
from rl_attn_plugin.replay import AttentionComparisonInputs, AttentionComparisonReport, synthetic_inputs
from rl_attn_plugin.replay.captures import load_captures
from rl_attn_plugin.replay.compare import compare_attention
from rl_attn_plugin.replay.decode import DecodeOptions


def run(config: CompareConfig, captured: Path | None = None, *, console: Console | None = None) -> int:
    """Compares, prints, and writes both files.

    Args:
        config: how.
        captured: a folder of `capture_attention_inputs`; random inputs if None.
        console: where to print; standard output if None.

    Returns:
        0 PASS, 2 DRIFT, 3 INCONCLUSIVE, 1 bad input.
    """
    console = console or Console()
    try:
        return _run(config, captured, console)
    except (ValueError, ImportError, NotImplementedError, StoreError) as error:
        print_error(error)
        return EXIT_ERROR
    except RuntimeError as error:
        if not _out_of_memory(error):
            raise
        print_error(
            f"not enough memory for these inputs ({str(error).splitlines()[0]}): give a smaller --length, --batch, "
            "--heads or --vocab, or fewer captured tokens"
        )
        return EXIT_ERROR
    except KeyboardInterrupt:
        console.print("interrupted: nothing was written", highlight=False)
        return EXIT_INTERRUPTED


def _run(config: CompareConfig, captured: Path | None, console: Console) -> int:
    from rl_attn_plugin.report.comparison import print_comparisons
    from rl_attn_plugin.report.comparison_html import render_comparison_html

    layers = _inputs(config, captured)
    reports: list[AttentionComparisonReport] = []
    with console.status("comparing") as status:
        for label, inputs in layers.items():
            reports.append(
                compare_attention(
                    inputs,
                    query_chunk_size=config.query_chunk_size,
                    kv_page_size=config.kv_page_size,
                    require_transformer_engine=config.require_te,
                    include_peers=config.peers,
                    decode=DecodeOptions(tokens_per_step=config.tokens_per_step),
                    impl=config.impl,
                    seed=config.synthetic.seed,
                    label=label,
                    on_path=lambda path, label=label: status.update(f"{label}: {path}"),  # type: ignore[misc]
                )
            )
    make_folder(config.out)
    content = {"schema": COMPARISONS, "reports": [report.to_dict() for report in reports]}
    # first what took the time; what is made of it can be made again
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_atomic(config.out / "comparison.json", text.encode("utf-8"))
    print_comparisons(reports, console)
    page = render_comparison_html(reports)
    write_atomic(config.out / "comparison.html", page.encode("utf-8"))
    console.print(f"report: {config.out / 'comparison.html'}", soft_wrap=True, highlight=False, markup=False)
    return max((EXIT_STATUS[report.verdict] for report in reports), key=_severity)


def _out_of_memory(error: RuntimeError) -> bool:
    """torch has a class for a GPU's memory, and a sentence for the machine's."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _severity(status: int) -> int:
    return (0, 3, 2).index(status)


def _inputs(config: CompareConfig, captured: Path | None) -> dict[str, AttentionComparisonInputs]:
    import torch

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no usable CUDA device (rl-attn doctor says why)")
    if captured is not None:
        _refuse_shapes(config.synthetic)
        return {label: inputs.to(device) for label, inputs in load_captures(captured).items()}
    s = config.synthetic
    inputs = synthetic_inputs(
        batch=s.batch, length=s.length, heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim, vocab=s.vocab,
        dtype=getattr(torch, s.dtype), seed=s.seed, device=device, rope=s.head_dim % 2 == 0,
    )  # fmt: skip
    return {"synthetic": inputs}


def _refuse_shapes(given: Synthetic) -> None:
    """The seed counts for captured inputs too: pages are placed at random."""
    plain = Synthetic()
    asked = [
        f"--{field.name.replace('_', '-')} {getattr(given, field.name)}"
        for field in fields(Synthetic)
        if field.name != "seed" and getattr(given, field.name) != getattr(plain, field.name)
    ]
    if asked:
        raise ValueError(
            f"captured inputs have shapes of their own, got {' '.join(asked)}: leave them out, or leave out the folder for "
            "random inputs"
        )
