"""vLLM and what it imports warn at import; here that is no error."""

from __future__ import annotations

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import vllm.engine.arg_utils
    import vllm.model_executor.layers.attention
    import vllm.v1.attention.backends.cpu_attn  # noqa: F401
