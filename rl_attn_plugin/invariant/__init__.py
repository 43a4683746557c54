"""A mode in which a row's bits do not depend on the batch, and an audit of everything that ran in it."""

from __future__ import annotations

from rl_attn_plugin.invariant.audit import AuditReport, Entry, NotInvariant
from rl_attn_plugin.invariant.kinds import Kind
from rl_attn_plugin.invariant.mode import Mode, batch_invariant

__all__ = ["AuditReport", "Entry", "Kind", "Mode", "NotInvariant", "batch_invariant"]
