"""Pure functions on log-probs: statistics, telescoped steps, verdict. numpy; pyarrow for the token table."""

from __future__ import annotations

from rl_attn_plugin.drift.result import ArmDrift, DriftReport, PathDrift
from rl_attn_plugin.drift.stats import DriftStats, PolicyStats, drift_stats, policy_stats
from rl_attn_plugin.drift.summarize import summarize
from rl_attn_plugin.drift.telescope import STEPS, TOTAL, Contrast
from rl_attn_plugin.drift.tokens import ARMS, PATHS
from rl_attn_plugin.drift.verdict import Check, Thresholds, Verdict, checks
from rl_attn_plugin.drift.worst import WorstToken

__all__ = [
    "ARMS",
    "PATHS",
    "STEPS",
    "TOTAL",
    "ArmDrift",
    "Check",
    "Contrast",
    "DriftReport",
    "DriftStats",
    "PathDrift",
    "PolicyStats",
    "Thresholds",
    "Verdict",
    "WorstToken",
    "checks",
    "drift_stats",
    "policy_stats",
    "summarize",
]
