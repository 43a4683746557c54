"""Layer specs that build the plugin's attention."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_decoder_layer_specs
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer as MegatronTransformerLayer,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rl_attn_plugin.integrations.megatron.core_attention import CoreAttention
from rl_attn_plugin.integrations.megatron.dynamic import SelfAttention

# By name: TransformerEngine's wrapper can only be imported where TransformerEngine is.
REPLACEABLE = ("DotProductAttention", "TEDotProductAttention")


class TransformerLayer(MegatronTransformerLayer):
    """Megatron's, which takes its parts from the config where a spec names none.

    The parts are those of Megatron's own choice (TransformerEngine's or local modules by ``transformer_impl``, experts by
    ``moe_layer_freq``, MLA, norms), with the plugin's attention.
    """

    def __init__(
        self, config: TransformerConfig, submodules: Any = None, layer_number: int = 1, **options: Any
    ) -> None:
        if submodules is None:
            groups = options.get("pg_collection")
            rank = None if groups is None else groups.pp.rank()
            offset = get_transformer_layer_offset(config, options.get("vp_stage"), rank)
            layers = get_gpt_decoder_layer_specs(
                config,
                use_transformer_engine=HAVE_TE and config.transformer_impl == "transformer_engine",
                normalization=config.normalization,
                qk_l2_norm=config.qk_l2_norm,
            )
            submodules = with_core_attention(layers[offset + layer_number - 1]).submodules
        super().__init__(config, submodules, layer_number, **options)


# `--spec` hands over the object of this name as it is, without a call: so it is no function.
gpt_layer_spec = ModuleSpec(module=TransformerLayer)


def with_core_attention(spec: Any) -> Any:
    """A copy of a layer or block spec that builds the plugin's attention, in training and in dynamic inference.

    Args:
        spec: a ``ModuleSpec``, or submodules that hold some.

    Raises:
        ValueError: nothing in it can be replaced.
    """
    spec = copy.deepcopy(spec)
    if not _replace(spec):
        raise ValueError(
            f"with_core_attention must be given a spec that builds one of {', '.join(REPLACEABLE)}, got {spec}"
        )
    return spec


def _replace(spec: Any) -> int:
    """Replace in place; how many there were."""
    if isinstance(spec, list | tuple):
        return sum(_replace(item) for item in spec)
    submodules: Any = spec.submodules if isinstance(spec, ModuleSpec) else spec
    if not hasattr(type(submodules), "__dataclass_fields__"):
        return 0
    core = getattr(submodules, "core_attention", None)
    if core is not None and get_module(core).__name__ in REPLACEABLE:
        submodules.core_attention = CoreAttention
        if getattr(spec, "module", None) is MegatronSelfAttention:
            spec.module = SelfAttention
        return 1
    return sum(_replace(part) for name, part in vars(submodules).items() if name != "core_attention")
