"""The plugin entry point: what each of vLLM's processes calls when it starts."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

BACKEND = "rl_attn_plugin.integrations.vllm.backend.RLAttentionBackend"


def register() -> None:
    """Make ``attention_backend="CUSTOM"`` this package's backend; doing it again changes nothing.

    Nothing else changes: an engine that does not ask for it keeps vLLM's own choice.

    Raises:
        RuntimeError: another package has registered itself as ``CUSTOM``, of which there is one.
    """
    custom = AttentionBackendEnum.CUSTOM
    taken = custom.get_path() if custom.is_overridden() else BACKEND
    if taken != BACKEND:
        raise RuntimeError(
            f"vLLM's attention backend CUSTOM must be free, got {taken}: load one of the two alone, with VLLM_PLUGINS"
        )
    register_backend(custom, BACKEND)
    if current_platform.is_cpu():
        _obey_on_cpu(type(current_platform))


def _obey_on_cpu(platform: Any) -> None:
    """Let vLLM's CPU platform take CUSTOM, which it would answer with its own backend and a line in the log.

    As on CUDA, the backend is asked first, and what it cannot do raises.
    """
    native = platform.get_attn_backend_cls
    if getattr(native, "obeys", False):
        return

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend is not AttentionBackendEnum.CUSTOM:
            return str(native(selected_backend, attn_selector_config, num_heads))
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(
                f"attention_backend='CUSTOM' cannot serve this model: {', '.join(reasons)}, got {attn_selector_config}"
            )
        return str(selected_backend.get_path())

    get_attn_backend_cls.obeys = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
