"""Live drift monitoring for any trainer: tensors in, named numbers out. torch and numpy, and no framework."""

from __future__ import annotations

from rl_attn_plugin.monitor.aliases import FRAMEWORKS, aliases
from rl_attn_plugin.monitor.diagnosis import FAULTS, Diagnosis
from rl_attn_plugin.monitor.metrics import Bin
from rl_attn_plugin.monitor.monitor import DriftMonitor
from rl_attn_plugin.monitor.rules import DEFAULT_RULES, Alert, Rule
from rl_attn_plugin.monitor.settings import Settings
from rl_attn_plugin.monitor.validity import MISSING
from rl_attn_plugin.monitor.watch import DriftError, Judgement, Watch
from rl_attn_plugin.monitor.worst import DriftedToken

__all__ = [
    "DEFAULT_RULES",
    "FAULTS",
    "FRAMEWORKS",
    "MISSING",
    "Alert",
    "Bin",
    "Diagnosis",
    "DriftError",
    "DriftMonitor",
    "DriftedToken",
    "Judgement",
    "Rule",
    "Settings",
    "Watch",
    "aliases",
]
