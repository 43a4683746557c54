"""Real engines in a process of their own: vLLM binds threads and replaces parts of torch when it starts.

    python engine.py request.json result.pt

The request names a model, prompts and arms, each with arguments of ``vllm.LLM``. The result has for each arm the
tokens, their log-probs, the class of the layers' attention, and what the plugin's attention was given and gave.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

COMMON = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
}


class Recorder:
    """Notes every call of the plugin's attention, by layer and request."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
        self.mixed_steps = 0

    def __enter__(self) -> Recorder:
        from rl_attn_plugin.integrations.vllm.attention import RLAttentionImpl

        self._impl, self._forward = RLAttentionImpl, RLAttentionImpl.forward

        def forward(
            impl: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, meta: Any, output: Any, **rest: Any
        ) -> Any:
            self._forward(impl, layer, q, k, v, cache, meta, output, **rest)
            if meta is not None:
                self._note(impl, layer, q, k, v, meta, output)
            return output

        RLAttentionImpl.forward = forward
        return self

    def __exit__(self, *_: object) -> None:
        self._impl.forward = self._forward

    def _note(self, impl: Any, layer: Any, q: Any, k: Any, v: Any, meta: Any, output: Any) -> None:
        offsets, lengths = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
        counts = {b - a for a, b in pairwise(offsets)}
        self.mixed_steps += 1 in counts and len(counts) > 1
        for row, length in enumerate(lengths):
            new = slice(offsets[row], offsets[row + 1])
            first_block = int(meta.block_table[row, 0])  # names the request: no block is handed on meanwhile
            self.calls[layer.layer_name, first_block].append({
                "start": length - (new.stop - new.start),
                **{name: x[new].clone() for name, x in (("q", q), ("k", k), ("v", v), ("out", output))},
                "options": {"scale": impl.scale, "window": impl.window, "softcap": impl.softcap},
            })  # fmt: skip


def run(model: str, prompts: list[list[int]], max_tokens: int, arguments: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, **{**COMMON, **arguments})
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, logprobs=0, detokenize=False, ignore_eos=True
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    cached = arguments.get("enable_prefix_caching", False)
    if cached:
        llm.generate(inputs, sampling, use_tqdm=False)
    with Recorder() as recorder:
        answers = [request.outputs[0] for request in llm.generate(inputs, sampling, use_tqdm=False)]
    layers = llm.apply_model(repr)[0]  # a worker cannot import a function of this script
    result = {
        "tokens": [list(answer.token_ids) for answer in answers],
        "logps": [[next(iter(place.values())).logprob for place in answer.logprobs] for answer in answers],
        "attention": sorted(set(re.findall(r"backend=(\w+)", layers))),
        "calls": {} if cached else dict(recorder.calls),
        "mixed_steps": recorder.mixed_steps,
    }
    del llm
    gc.collect()
    return result


def main(request_path: str, result_path: str) -> None:
    request = json.loads(Path(request_path).read_text())
    if request["in_process"]:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # apply_model sends a function
    if request["register"]:
        from rl_attn_plugin.integrations.vllm import register

        register()
    results = {
        name: run(request["model"], request["prompts"], request["max_tokens"], arguments)
        for name, arguments in request["arms"].items()
    }
    torch.save(results, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
