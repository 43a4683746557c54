"""Drift of files: Parquet and JSONL of any size, read in one pass. numpy, torch and pyarrow."""

from __future__ import annotations

from rl_attn_plugin.offline.columns import KNOWN, Wanted
from rl_attn_plugin.offline.errors import InputError
from rl_attn_plugin.offline.measure import Options, measure
from rl_attn_plugin.offline.result import Check, DriftFilesReport, FileRead, Problem, RunDrift, StepDrift

__all__ = [
    "KNOWN",
    "Check",
    "DriftFilesReport",
    "FileRead",
    "InputError",
    "Options",
    "Problem",
    "RunDrift",
    "StepDrift",
    "Wanted",
    "measure",
]
