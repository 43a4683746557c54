"""Megatron-core says at import what it does without; here that is no error."""

from __future__ import annotations

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
