"""Token tables of runs with planted drift."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

WORDS = [" the", " answer", " is", " 42", ",", " because", " <script>alert(1)</script>", "\n", " é", " &amp;"]


def token_table(
    *,
    samples: int = 6,
    tokens: int = 60,
    noise: float = 0.01,
    native_noise: float = 0.02,
    shift: float = 0.0,
    seed: int = 0,
) -> pa.Table:
    """A run's token table.

    Args:
        samples: completions.
        tokens: tokens of each.
        noise: standard deviation of each telescoped step of the plugin arm, nats.
        native_noise: of the native arm.
        shift: added to the plugin trainer's log-probs: planted drift.
        seed: of everything.
    """
    draw = np.random.default_rng(seed)
    rows: dict[str, list[Any]] = {
        name: []
        for name in (
            "sample", "position", "token_id", "text", "arm", "path", "logp_trainer", "logp_rollout"
        )
    }  # fmt: skip
    for sample in range(samples):
        ids = draw.integers(0, len(WORDS), tokens)
        base = -draw.exponential(1.5, tokens) - 0.3
        for arm, scale in (("native", native_noise), ("plugin", noise)):
            recorded = np.minimum(base, 0)
            replay = np.minimum(recorded + draw.normal(0, scale, tokens) * (draw.random(tokens) < 0.3), 0)
            chunked = np.minimum(replay + draw.normal(0, scale, tokens), 0)
            full = np.minimum(chunked + draw.normal(0, scale, tokens) + (shift if arm == "plugin" else 0), 0)
            trainer = full.astype(np.float32)
            for path, values in (
                ("recorded", recorded),
                ("chunked_prefill", chunked),
                ("decode_replay", replay),
            ):
                rollout = values.astype(np.float32)
                rows["sample"] += [sample] * tokens
                rows["position"] += range(17, 17 + tokens)
                rows["token_id"] += ids.tolist()
                rows["text"] += [WORDS[i] for i in ids]
                rows["arm"] += [arm] * tokens
                rows["path"] += [path] * tokens
                rows["logp_trainer"] += trainer.tolist()
                rows["logp_rollout"] += rollout.tolist()
    return table_of([dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)])


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    """A token table; log-probs are rounded to float32 and dlogp is their exact difference."""
    schema = pa.schema(
        [
            ("sample", pa.int32()), ("position", pa.int32()), ("token_id", pa.int32()), ("text", pa.string()),
            ("arm", pa.string()), ("path", pa.string()), ("logp_trainer", pa.float32()),
            ("logp_rollout", pa.float32()), ("dlogp", pa.float64()),
        ]
    )  # fmt: skip
    for row in rows:
        trainer, rollout = np.float32(row["logp_trainer"]), np.float32(row["logp_rollout"])
        row["dlogp"] = np.float64(trainer) - np.float64(rollout)
    return pa.Table.from_pylist(rows, schema=schema)
