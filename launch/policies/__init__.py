"""Policies hide the framework from the job: one interface, one module per framework."""

from __future__ import annotations

from rl_attn_plugin.launch.policies.base import Policy, PolicyIdentity, PolicySpec, Session

__all__ = ["Policy", "PolicyIdentity", "PolicySpec", "Session"]
