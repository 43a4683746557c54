"""What a monitor is told once; two monitors can be merged when theirs are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Fixed choices of a `DriftMonitor`."""

    over_threshold: float = 0.2
    """A token with a larger abs(dlogp) counts as over the threshold, nats. The default is about where a PPO clip
    of 0.2 begins to act: log(1.2) = 0.18."""
    clip: tuple[float, float] = (0.5, 2.0)
    """Lower and upper bound of the ratio exp(dlogp) for the clip metrics. Defaults are slime's; verl and slime
    truncate at 2."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Labels of each group, in the order of the integers handed to `update`."""
    sentinels: tuple[float, ...] = ()
    """Further values that mean no log-prob, such as -100. Everything below -9000 counts as a sentinel anyway."""
    worst: int = 32
    """How many of the worst tokens are kept."""
    context: tuple[int, int] = (24, 12)
    """Tokens kept before and after a worst token; those that are active in the same sequence."""

    def __post_init__(self) -> None:
        low, high = self.clip
        if not 0 < low < high:
            raise ValueError(f"clip must be two ratios 0 < low < high, got {self.clip}")
        if not self.over_threshold >= 0:
            raise ValueError(f"over_threshold must be at least 0, got {self.over_threshold}")
        if self.worst < 1 or min(self.context) < 0:
            raise ValueError(
                f"worst must be at least 1 and context not negative, got {self.worst}, {self.context}"
            )
        for name, labels in self.groups.items():
            if name in ("position", "probability"):
                raise ValueError(f"group {name!r} is one that the monitor makes itself")
            if not labels:
                raise ValueError(f"group {name!r} must have at least one label")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "groups": {name: list(labels) for name, labels in self.groups.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`."""
        return cls(
            over_threshold=data["over_threshold"],
            clip=(data["clip"][0], data["clip"][1]),
            groups=labelled(data["groups"]),
            sentinels=tuple(data["sentinels"]),
            worst=data["worst"],
            context=(data["context"][0], data["context"][1]),
        )


def labelled(groups: Mapping[str, int | Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Labels by group; a number n stands for the labels 0 to n - 1."""
    return {
        name: tuple(str(i) for i in range(labels)) if isinstance(labels, int) else tuple(labels)
        for name, labels in groups.items()
    }
