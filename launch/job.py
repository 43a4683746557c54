"""The parity job: pairs a trainer with a rollout, feeds them prompts by shards, and judges the difference.

`run` is what ``rl-attn parity`` calls. Tokens are drawn once, by the rollout of the arm under test; every
arm then scores these same tokens along every path, so that arms and paths can be compared token by token.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from rl_attn_plugin import __version__, drift, provenance, report
from rl_attn_plugin.launch.cluster import Pair, local_ray
from rl_attn_plugin.launch.config import ARM_UNDER_TEST, PATHS, JobConfig
from rl_attn_plugin.launch.errors import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_STATUS,
    JobError,
    StoreError,
    print_error,
)
from rl_attn_plugin.launch.policies.base import PolicyIdentity, PolicySpec
from rl_attn_plugin.launch.policies.text import TextModel, load_text_model
from rl_attn_plugin.launch.prompts import TokenizedPrompt, read_prompts, tokenize_prompts
from rl_attn_plugin.launch.rollout import Request
from rl_attn_plugin.launch.store import RunStore, Shard, set_aside, write_failure
from rl_attn_plugin.launch.workers import Sampled, Scored
from rl_attn_plugin.replay import AttentionComparisonReport

_COMPARED = 2  # samples whose layers are compared: ragged, so that padding is met

_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16")


def run(config: JobConfig, *, console: Console | None = None) -> int:
    """Runs the job, or what is left of it, and prints the verdict.

    Args:
        config: what to do.
        console: where to print; standard output if None. Errors go to standard error.

    Returns:
        The exit status: 0 PASS, 2 DRIFT, 3 INCONCLUSIVE, 1 bad input or INVALID data, 130 interrupted.
    """
    console = console or Console()
    try:
        return _run(config, console)
    except JobError as error:
        print_error(error)
        return EXIT_ERROR
    except KeyboardInterrupt:
        root = config.run_directory()
        _say(console, f"interrupted: finished shards are kept in {root}; the same command resumes")
        return EXIT_INTERRUPTED


def _run(config: JobConfig, console: Console) -> int:
    prompts = read_prompts(config.prompts, config.max_prompts)  # cheap, so before anything slow
    text = load_text_model(config.model)
    tokenized = tokenize_prompts(
        prompts,
        encode=text.encode,
        render_chat=text.render_chat,
        context=text.context,
        max_new_tokens=config.sampling.max_new_tokens,
    )
    device = resolve_device(config.runtime.device)
    dtype = resolve_dtype(config.runtime.dtype, device)
    shards = _cut(tokenized, config.batching.shard_size)
    root = config.run_directory()
    if config.rerun and (kept := set_aside(root)):
        _say(console, f"the finished run is kept as {kept}")
    store = RunStore(root, identity=_identity(config, tokenized, device, dtype), shards=len(shards))
    try:
        finished = store.finished
        if finished and (not config.te_oracle or store.comparisons(config.te_oracle_layers) is not None):
            _say(console, f"{root} holds the finished run of this configuration (--rerun measures again)")
        else:
            _say(
                console,
                f"rl-attn parity: {text.name}, {dtype} on {device}, {len(tokenized)} prompts -> {root}",
            )
            _measure(config, console, store, shards, text, device=device, dtype=dtype, finished=finished)
        return _judge(config, console, store)
    finally:
        store.close()


def _measure(
    config: JobConfig,
    console: Console,
    store: RunStore,
    shards: list[list[tuple[int, TokenizedPrompt]]],
    text: TextModel,
    *,
    device: str,
    dtype: str,
    finished: bool,
) -> None:
    """Does the shards that the store does not have yet; the layers' comparison alone where it is ``finished``."""
    started = time.perf_counter()
    done = store.committed()
    if done:
        _say(console, f"resuming: {len(done)} of {len(shards)} shards are there")
    spec = PolicySpec(
        model=config.model,
        device=device,
        dtype=dtype,
        page_size=config.batching.page_size,
        logits_dtype=config.runtime.logits_dtype,
    )
    rollout_spec = replace(spec, model=config.rollout_model or config.model)
    trainer_spec = replace(spec, fault=config.runtime.inject_fault)
    phases = len(config.arms) * (1 + len(PATHS))
    with _progress(console) as progress, local_ray(gpu=device == "cuda", logs=store.root / "logs"):
        task = progress.add_task(
            "starting two workers", total=len(shards) * phases, completed=len(done) * phases
        )
        pair = Pair(
            trainer_spec,
            rollout_spec,
            arms=config.arms,
            gpu=device == "cuda",
            tries=config.runtime.tries,
            say=partial(_say, console),
        )
        trainer, rollout = pair.identities()
        check_identities(trainer, rollout)
        _start_manifest(config, store, text, trainer)
        for index, members in enumerate(shards):
            if index in done:
                continue
            requests = [Request(sample=sample, prompt=prompt.tokens) for sample, prompt in members]

            def advance(phase: str, number: int = index) -> None:
                progress.update(task, advance=1, description=f"shard {number + 1}/{len(shards)}: {phase}")

            def restart(number: int = index) -> None:
                progress.update(task, completed=number * phases)

            progress.update(task, description=f"shard {index + 1}/{len(shards)}: sampling")
            shard_started = time.perf_counter()
            sampled, scored = pair.measure(
                requests, config.sampling, config.batching.chunk_size, advance=advance, restart=restart
            )
            done[index] = _shard(members, sampled, scored, text)
            store.commit(index, done[index])
            store.write_manifest(samples=_samples(done))
            if not console.is_terminal:
                tokens = sum(len(completion.tokens) for completion in sampled.completions)
                seconds = time.perf_counter() - shard_started
                _say(console, f"shard {index + 1}/{len(shards)}: {tokens} tokens in {seconds:.1f} s")
        if config.te_oracle and store.comparisons(config.te_oracle_layers) is None:
            progress.update(task, description="comparing layers")
            sequences = [
                [*sample["prompt_tokens"], *sample["completion_tokens"]]
                for sample in _samples(done)[:_COMPARED]
            ]
            found = pair.compare_layers(
                sequences, config.te_oracle_layers, config.batching.chunk_size, config.batching.page_size
            )
            store.write_comparisons(found, config.te_oracle_layers)
        peaks, audit = pair.peak_mib(), pair.audits()
    if finished:  # only the comparison was missing
        return
    store.write_manifest(
        state="finished",
        samples=_samples(done),
        timing=_timing(done, time.perf_counter() - started, peaks),
        audit=audit if "zero-drift" in config.arms else None,
    )


def _judge(config: JobConfig, console: Console, store: RunStore) -> int:
    """Statistics, verdict, ``drift.json``, ``report.html`` and the table, from what is in the store."""
    if store.manifest.get("config") != (asked := config.to_dict()):
        store.write_manifest(config=asked)  # judged by other thresholds than before
    table = store.tokens()
    result = drift.summarize(
        table,
        arm_under_test=ARM_UNDER_TEST,
        thresholds=config.thresholds,
        min_tokens=config.min_tokens,
        arms=config.arms,
    )
    layers = store.comparisons(config.te_oracle_layers) if config.te_oracle else None
    comparisons = [AttentionComparisonReport.from_dict(found) for found in layers or []]
    result = _with_layers(result, comparisons)
    path = store.root / "drift.json"
    try:
        report.write_json(result, path)
        path = store.root / "report.html"
        report.write_html(result, table, store.manifest, path, comparisons)
    except OSError as error:
        raise StoreError(write_failure(path, error)) from error
    report.print_report(result, console, manifest=store.manifest, comparisons=comparisons)
    _say(console, f"report: {store.root / 'report.html'}")
    return EXIT_STATUS[result.verdict]


def _with_layers(
    result: drift.DriftReport, comparisons: Sequence[AttentionComparisonReport]
) -> drift.DriftReport:
    """The tokens' report with what the layers add to its verdict: never a better one."""
    reasons = [
        f"{found.label}: {reason}"
        for found in comparisons
        for reason in found.reasons
        if found.verdict != "PASS"
    ]
    verdicts = {found.verdict for found in comparisons}
    if result.verdict == "PASS" and "DRIFT" in verdicts:
        return replace(result, verdict="DRIFT", reasons=reasons)
    if result.verdict == "PASS" and "INCONCLUSIVE" in verdicts:
        return replace(result, verdict="INCONCLUSIVE", reasons=reasons)
    return result if not reasons else replace(result, reasons=[*result.reasons, *reasons])


def check_identities(trainer: PolicyIdentity, rollout: PolicyIdentity) -> None:
    """Refuses to compare two sides that are not the same model.

    Raises:
        JobError: naming everything that differs.
    """
    ours, theirs = asdict(trainer), asdict(rollout)
    differing = [
        f"  {name}: trainer {ours[name]}, rollout {theirs[name]}"
        for name in ours
        if ours[name] != theirs[name]
    ]
    if differing:
        raise JobError(
            "trainer and rollout are not the same model, so their log-probs are not compared:\n"
            + "\n".join(differing)
        )


def resolve_device(device: str) -> str:
    """``cpu`` or ``cuda`` for ``auto`` and for either name.

    Raises:
        JobError: cuda was asked for and is not there.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise JobError(
            "--device cuda: torch finds no usable CUDA device (rl-attn doctor says why); use --device cpu"
        )
    return device


def resolve_dtype(dtype: str, device: str) -> str:
    """The dtype for ``auto``: bfloat16 where the device has instructions for it, else float32."""
    import torch

    if dtype != "auto":
        return dtype
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    # Every CPU accepts bf16; without these instructions it emulates it, many times slower than fp32.
    found = torch.cpu.get_capabilities()
    return "bfloat16" if any(found.get(name) for name in _BF16_INSTRUCTIONS) else "float32"


def _cut(prompts: Sequence[TokenizedPrompt], size: int) -> list[list[tuple[int, TokenizedPrompt]]]:
    numbered = list(enumerate(prompts))
    return [numbered[start : start + size] for start in range(0, len(numbered), size)]


def _identity(
    config: JobConfig, prompts: Sequence[TokenizedPrompt], device: str, dtype: str
) -> dict[str, Any]:
    tokens = json.dumps([prompt.tokens for prompt in prompts]).encode()
    decided = config.identity()
    del decided["prompts"]  # what is in the file counts, not where it lies
    gpu, versions = provenance.gpu(), provenance.versions()
    return {
        **decided,
        "device": device,
        "dtype": dtype,
        "prompt_tokens_sha256": hashlib.sha256(tokens).hexdigest(),
        "hardware": provenance.cpu()["model"] if device == "cpu" or gpu is None else gpu["name"],
        "rl_attn_plugin": __version__,
        **{name: versions[name] for name in ("torch", "transformers", "triton")},
    }


def _start_manifest(config: JobConfig, store: RunStore, text: TextModel, identity: PolicyIdentity) -> None:
    model = {"name": text.name, "path": text.path, **asdict(identity)}
    before = store.manifest.get("model")
    if before is not None and before != model:
        raise StoreError(
            f"{store.root} was measured with other weights than {config.model} has now; give another --out"
        )
    store.write_manifest(
        config=config.to_dict(),
        provenance=provenance.collect(),
        model=model,
        sampling={"temperature": config.sampling.temperature, "top_p": config.sampling.top_p},
        chunk_size=config.batching.chunk_size,
        page_size=config.batching.page_size,
        created=store.manifest.get("created") or datetime.now(timezone.utc).isoformat(timespec="seconds"),
        version=__version__,
    )


def _shard(
    members: list[tuple[int, TokenizedPrompt]],
    sampled: Sampled,
    scored: dict[tuple[str, str], Scored],
    text: TextModel,
) -> Shard:
    columns: dict[str, list[Any]] = {
        name: [] for name in ("sample", "position", "token_id", "text", "arm", "path")
    }
    trainer: list[np.ndarray] = []
    rollout: list[np.ndarray] = []
    samples = []
    for i, ((sample, prompt), completion) in enumerate(zip(members, sampled.completions, strict=True)):
        count = len(completion.tokens)
        texts = [text.decode([token]) for token in completion.tokens]
        for arm in dict.fromkeys(arm for arm, _ in scored):
            for path in PATHS:
                columns["sample"] += [sample] * count
                columns["position"] += range(len(prompt.tokens), len(prompt.tokens) + count)
                columns["token_id"] += completion.tokens
                columns["text"] += texts
                columns["arm"] += [arm] * count
                columns["path"] += [path] * count
                trainer.append(scored[arm, "full_prefill"].logps[i])
                rollout.append(scored[arm, path].logps[i])
        samples.append(
            {
                "sample": sample,
                "prompt_id": prompt.prompt_id,
                "prompt_text": prompt.text,
                "prompt_tokens": list(prompt.tokens),
                "completion_tokens": list(completion.tokens),
                "completion_text": text.decode(list(completion.tokens)),
                "finish_reason": completion.finish_reason,
            }
        )
    logp_trainer, logp_rollout = np.concatenate(trainer), np.concatenate(rollout)
    dlogp = logp_trainer.astype(np.float64) - logp_rollout.astype(np.float64)
    table = pa.table({**columns, "logp_trainer": logp_trainer, "logp_rollout": logp_rollout, "dlogp": dlogp})
    timing = {f"{arm}/{phase}": round(result.seconds, 3) for (arm, phase), result in scored.items()}
    return Shard(table=table, samples=samples, timing=timing)


def _samples(done: dict[int, Shard]) -> list[dict[str, Any]]:
    return [sample for index in sorted(done) for sample in done[index].samples]


def _timing(done: dict[int, Shard], wall: float, peaks: dict[str, int]) -> dict[str, Any]:
    tokens = sum(len(sample["completion_tokens"]) for sample in _samples(done))
    phases: dict[str, float] = {}
    for shard in done.values():
        for phase, seconds in shard.timing.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    return {
        "seconds": {phase: round(seconds, 3) for phase, seconds in phases.items()},
        "tokens_per_second": {
            phase: round(tokens / seconds, 2) for phase, seconds in phases.items() if seconds
        },
        "wall_seconds": round(wall, 2),
        "peak_mib": peaks,
    }


def _say(console: Console, line: str) -> None:
    # Paths and messages are printed as they are: not wrapped, not coloured, not read as markup.
    console.print(line, soft_wrap=True, highlight=False, markup=False)


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


__all__ = [
    "check_identities",
    "resolve_device",
    "resolve_dtype",
    "run",
]
