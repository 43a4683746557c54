"""A run with everything a report shows: real-looking completions, noise as bf16 makes it, planted drift."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa

from tests.drift.factory import table_of

HOSTILE = "</script><script>window.owned=1</script>"
_COMPLETIONS = [
    ("arithmetic-trains", "A train leaves at 9:40 and travels at 84 km/h for 3.5 hours. How far does it get?",
     "1. The train leaves at 9:40 and travels at 84 km/h for 3.5 hours.\n2. Distance is speed times time, so "
     "84 × 3.5 = 294 km.\n3. It arrives at 13:10, having travelled 294 km in all. The answer is 294."),
    ("python-intervals", "Write a Python function that merges overlapping intervals.",
     "```python\ndef merge_intervals(intervals):\n    \"\"\"Merges overlapping intervals.\"\"\"\n    merged = []\n"
     "    for start, end in sorted(intervals):\n        if merged and start <= merged[-1][1]:\n"
     "            merged[-1][1] = max(merged[-1][1], end)\n        else:\n            merged.append([start, end])"
     "\n    return merged\n```"),
    ("german-letter", "Schreibe einen kurzen Brief an die Nachbarn.",
     "Liebe Nachbarn,\n\nam Samstag feiern wir unseren Geburtstag und es könnte etwas lauter werden. Kommt gerne "
     "dazu, für Getränke und Kuchen ist gesorgt! Viele Grüße aus dem dritten Stock"),
    ("html-page", "Show me how to load a script in HTML & what <b>defer</b> does.",
     f"Use <script defer src=\"app.js\"></script> in the head: it loads while the page is parsed & runs after. "
     f"Never write {HOSTILE} with text that a user typed, and escape \"quotes\" & ampersands: &amp; &lt; %{{x}} $y$."),
    ("haiku", "Write a haiku about rounding errors.",
     "Small bits fall away,\nadded left or added right —\nthe sum is not still. 🌊 Each kernel hums its own order, "
     "and autumn rain forgets nothing of it."),
    ("rtl", "Say hello in five languages.",
     "Hello, hola, bonjour, 你好 and שלום are greetings; \u202emirrored\u202c text should not turn the line "
     "around, and neither should \x1b[31mred\x1b[0m escape codes or a lone \t tab."),
]  # fmt: skip


def run(
    *,
    samples: int = 12,
    noise: float = 0.02,
    plugin_noise: float = 0.012,
    fault: float = 0.0,
    long: int = 1,
    seed: int = 0,
) -> tuple[pa.Table, dict[str, Any]]:
    """Token table and manifest of one run.

    Args:
        samples: completions, the texts above in turn.
        noise: size of each step of the native arm, nats; as in real runs it shrinks for likely tokens.
        plugin_noise: of the plugin arm, whose chunked prefill equals its full prefill where attention is
            all that differs.
        fault: planted in the plugin's decode: bias in nats that grows along the completion.
        long: how often each text is repeated.
        seed: of everything.
    """
    draw = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    described = []
    for sample in range(samples):
        prompt_id, prompt, text = _COMPLETIONS[sample % len(_COMPLETIONS)]
        texts = re.findall(r"\s?\w{1,6}|\s?[^\w\s]+|\s", text * long)
        start = 20 + sample
        tokens = [sum(map(ord, piece)) % 49152 for piece in texts]
        described.append(
            {
                "sample": sample, "prompt_id": f"{prompt_id}-{sample}", "prompt_text": prompt,
                "prompt_tokens": list(range(start)), "completion_tokens": tokens, "completion_text": "".join(texts),
                "finish_reason": "stop",
            }
        )  # fmt: skip
        n = len(texts)
        p = draw.beta(1.1, 0.55, n).clip(2e-4, 0.99999)
        for arm, scale in (("native", noise), ("plugin", plugin_noise)):
            one, two, three = draw.standard_t(4, (3, n)) * scale * (1 - p) ** 0.7
            if arm == "plugin":
                one[draw.random(n) < 0.6] = 0.0
                two += fault * np.arange(n) / n * draw.random(n) * (1 - p)
            full = np.minimum(np.log(p) + 0, -1e-7)
            chunked = np.minimum(full - one, 0)
            replay = np.minimum(chunked - two, 0)
            recorded = np.minimum(replay - three * 0.4, 0)
            for path, values in (
                ("recorded", recorded), ("chunked_prefill", chunked), ("decode_replay", replay)
            ):  # fmt: skip
                for i in range(n):
                    rows.append(
                        {
                            "sample": sample, "position": start + i, "token_id": tokens[i], "text": texts[i],
                            "arm": arm, "path": path, "logp_trainer": full[i], "logp_rollout": values[i],
                        }
                    )  # fmt: skip
    return table_of(rows), manifest(described)


def manifest(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run directory's ``manifest.json`` holds."""
    phases = ("recorded", "full_prefill", "chunked_prefill", "decode_replay")
    return {
        "state": "finished",
        "samples": samples,
        "model": {
            "name": "SmolLM2-135M-Instruct", "path": "smollm2", "weights_sha256": "9f" * 32, "tokenizer_sha256": "c4" * 32,
            "architecture": "LlamaForCausalLM, 30 layers, hidden 576, vocabulary 49152", "dtype": "bfloat16",
        },
        "sampling": {"temperature": 0.8, "top_p": 0.95},
        "config": {
            "model": "smollm2", "sampling": {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 48, "seed": 0},
            "batching": {"shard_size": 6, "chunk_size": 32, "page_size": 16},
        },
        "provenance": {
            "python": "3.11.9", "versions": {"torch": "2.13.0", "vllm": None}, "gpu": None,
            "cpu": {"model": "<b>not bold</b> CPU", "threads": 2}, "environment": {},
        },
        "timing": {
            "seconds": {f"{arm}/{phase}": 3.2 for arm in ("native", "plugin") for phase in phases},
            "tokens_per_second": {f"{arm}/{phase}": 181.4 for arm in ("native", "plugin") for phase in phases},
            "wall_seconds": 61.5,
        },
        "chunk_size": 32, "page_size": 16, "created": "2026-02-03T04:05:06+00:00", "version": "0.1.0",
    }  # fmt: skip
