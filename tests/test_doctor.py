"""``rl-attn doctor`` says what works, why the rest does not, and what mends it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from rl_attn_plugin import cli, doctor, flash_attention, flash_attention_varlen
from rl_attn_plugin.types import Impl


def named(name: str) -> doctor.Finding:
    return next(f for f in doctor.examine() if f.name == name)


def test_this_machine_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert torch.__version__ in printed and "bit-equal to full prefill" in printed


def test_wrong_arithmetic_is_broken_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = flash_attention

    def wrong(*args: torch.Tensor, impl: Impl) -> object:
        result = honest(*args, impl=impl)
        return result._replace(out=result.out * 1.1)

    monkeypatch.setattr(doctor, "flash_attention", wrong)
    assert named("impl='torch'").state == "broken"
    assert cli.main(["doctor"]) == 1
    assert "attention is off by" in capsys.readouterr().out


def test_other_bits_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = flash_attention_varlen

    def drifting(*args: Any, **options: Any) -> object:
        result = honest(*args, **options)
        return result._replace(lse=torch.nextafter(result.lse, torch.full_like(result.lse, 9.0)))

    monkeypatch.setattr(doctor, "flash_attention_varlen", drifting)
    finding = named("impl='torch'")
    assert finding.state == "broken" and "other bits" in finding.detail


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor._importable
    monkeypatch.setattr(doctor, "_importable", lambda module: module != "ray" and found(module))
    finding = named("Ray")
    assert finding.state == "missing" and finding.mend == "pip install 'rl-attn-plugin[ray]'"
    out = io.StringIO()
    doctor.print_findings([finding], Console(file=out, width=100))
    assert "rl-attn-plugin[ray]" in out.getvalue()  # brackets survive the markup
    assert doctor.exit_status([finding]) == 0
