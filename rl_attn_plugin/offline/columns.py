"""Which column of a file is what. The names are those that trainers write; others can be given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rl_attn_plugin.offline.errors import InputError

KNOWN: Mapping[str, tuple[str, ...]] = {
    # this package, verl, prime-rl, NeMo-RL, slime
    "logp_trainer": ("logp_trainer", "old_log_probs", "trainer_logprobs", "prev_logprobs", "log_probs"),
    "logp_rollout": ("logp_rollout", "rollout_log_probs", "inference_logprobs", "generation_logprobs"),
    "mask": ("mask", "response_mask", "loss_mask", "token_loss_mask", "completion_mask"),
    "token_ids": ("token_ids", "token_id", "responses", "response_ids", "completion_ids", "input_ids"),
    "sample": ("sample", "sequence_id", "sequence", "request_id", "export_sequence_idx", "idx"),
    "step": ("step", "global_step", "global_steps"),
    "text": ("text",),
    "arm": ("arm",),
    "path": ("path",),
}
"""Names by role, the first that a file has is taken."""

Rows = Literal["token", "sequence"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What to look for.

    Attributes:
        names: a column's name by role, where it is not to be looked for among `KNOWN`.
        groups: further columns, each a table of the report.
        arm: of a parity run's rows, those of this arm.
        path: and of this path.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[str] = ()
    arm: str = "plugin"
    path: str = "recorded"


@dataclass(frozen=True, slots=True)
class Columns:
    """What the columns of one file are.

    Attributes:
        by_role: column by role; a role that the file does not have is missing.
        groups: group columns that the file has.
    """

    by_role: dict[str, str]
    groups: list[str]

    def get(self, role: str) -> str | None:
        """The column of a role."""
        return self.by_role.get(role)

    @property
    def all(self) -> list[str]:
        """Every column that has to be read."""
        return list(dict.fromkeys([*self.by_role.values(), *self.groups]))


def find_columns(present: Sequence[str], wanted: Wanted) -> Columns:
    """The columns of a file.

    Args:
        present: names of all its columns.
        wanted: what to look for.

    Raises:
        InputError: it has no log-probs of one side, or no column that was asked for by name.
    """
    found = {}
    for role, known in KNOWN.items():
        if role in wanted.names:
            if wanted.names[role] not in present:
                raise InputError(
                    f"must have the column {wanted.names[role]!r} for {role}, got {_listed(present)}"
                )
            found[role] = wanted.names[role]
        else:
            taken = next((name for name in known if name in present), None)
            if taken is not None:
                found[role] = taken
    lacking = [role for role in ("logp_trainer", "logp_rollout") if role not in found]
    if lacking:
        options = {"logp_trainer": "--trainer-column", "logp_rollout": "--rollout-column"}
        raise InputError(
            f"must have a column of {' and of '.join(lacking)} (looked for "
            f"{'; '.join(', '.join(KNOWN[role]) for role in lacking)}), got {_listed(present)}. Name yours with "
            f"{' and '.join(options[role] for role in lacking)}; generations dumped without log-probs cannot be compared"
        )
    return Columns(found, [name for name in wanted.groups if name in present])


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20])
    return f"the columns {shown}{', ..' if len(names) > 20 else ''}" if names else "no columns"
