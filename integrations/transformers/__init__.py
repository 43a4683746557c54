"""transformers (5.x): the attention, a paged cache, rollout sessions, scoring and weights.

``register()`` makes ``attn_implementation="rl_attn"`` known; every function below calls it by itself. One loaded model
serves both arms: `attention_implementation` switches it, and the sessions and `score_packed` do that for you.

Signatures, for those who build on this::

    register() -> None                                       # idempotent
    attention_implementation(model, name)                    # context manager: "rl_attn", "sdpa", ..; restores

    load_model(spec, *, dtype=torch.float32, attn_implementation="rl_attn", device="cpu", cache_dir=None) -> model
    load_tokenizer(spec, *, cache_dir=None) -> tokenizer     # spec: "smollm2", a folder, a .gguf file or a hub id
    weights_sha256(model) -> str                             # hex; the same on every device
    tokenizer_sha256(tokenizer) -> str

    score_packed(model, sequences, *, temperature=1.0, starts=None, attn_implementation="rl_attn",
                 max_tokens_per_pack=16384) -> list[Tensor]  # fp32 on the CPU; entry i scores sequences[i][starts[i]:]

    PagedSession(model, rows, *, capacity=None, page_size=16, num_pages=None, page_order=None)
    NativeSession(model, rows, *, capacity=None, attn_implementation="sdpa")
        .feed(tokens: Mapping[int, Sequence[int]], keep: Mapping[int, int]) -> dict[int, Tensor]   # fp32 [keep, V]
        .close_rows(rows: Sequence[int]) -> None

    PagedCache(config, num_pages, page_size, *, page_order=None)                # a transformers Cache
        .add(sequence) / .free(sequence) / .length(sequence) / .num_free_pages
    paged_forward(model, cache, tokens: Mapping[key, ids], keep: Mapping[key, int]) -> dict[key, logits [keep, V]]

``starts[i]`` (default 1) is the first token of sequence i to be scored: the result never shifts, entry j of sequence i
is the log-prob of ``sequences[i][starts[i] + j]`` given everything before it.

A session is a batch with rows ``0 .. rows - 1`` and a KV cache. ``feed`` appends tokens to some rows (a prompt chunk of
each, one decoded token of each, or any mix; rows left out wait) and returns, for each row in ``keep``, the logits of
its last ``keep[row]`` new tokens; entry i predicts what follows that token.
"""

from __future__ import annotations
