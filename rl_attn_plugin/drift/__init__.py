"""Pure functions on log-probs: statistics, telescoped steps, verdict. numpy; pyarrow for the token table."""

from __future__ import annotations

from rl_attn_plugin.drift.stats import DriftStats, PolicyStats, drift_stats, policy_stats
from rl_attn_plugin.drift.summarize import ArmDrift, DriftReport, PathDrift, WorstToken, summarize
from rl_attn_plugin.drift.verdict import Thresholds, Verdict

__all__ = [
    "ArmDrift",
    "DriftReport",
    "DriftStats",
    "PathDrift",
    "PolicyStats",
    "Thresholds",
    "Verdict",
    "WorstToken",
    "drift_stats",
    "policy_stats",
    "summarize",
]
