"""Small real Megatron-core models, and attention written plainly to hold them against."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from rl_attn_plugin.integrations.megatron import CoreAttention, with_core_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 128


def config(**changes: Any) -> TransformerConfig:
    given: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 96,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": True, "normalization": "RMSNorm",
        "add_bias_linear": False, "gated_linear_unit": True, "activation_func": nn.functional.silu,
        "bias_activation_fusion": False, "masked_softmax_fusion": False, "transformer_impl": "local",
    }  # fmt: skip
    return TransformerConfig(**{**given, **changes})


def latent_config(**changes: Any) -> MLATransformerConfig:
    """Multi-latent attention: q and k of 24 channels, v of 16."""
    plain = vars(config(num_query_groups=4))
    kept = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "attention_dropout",
            "hidden_dropout", "use_cpu_initialization", "normalization", "add_bias_linear", "gated_linear_unit",
            "activation_func", "bias_activation_fusion", "masked_softmax_fusion", "transformer_impl")  # fmt: skip
    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16,
              "rope_type": "rope", "multi_latent_attention": True, "apply_rope_fusion": False}  # fmt: skip
    return MLATransformerConfig(**{name: plain[name] for name in kept}, **latent, **changes)


def local_spec(made_for: TransformerConfig) -> Any:
    """Megatron's own, with its own attention."""
    return get_gpt_layer_local_spec(
        normalization="RMSNorm", multi_latent_attention=made_for.multi_latent_attention
    )


def model(made_for: TransformerConfig | None = None, spec: Any = None, seed: int = 0) -> GPTModel:
    """Weights of one seed are the same, whatever the attention; large enough for scores that matter."""
    made_for = made_for or config()
    torch.manual_seed(0)
    made = GPTModel(
        made_for, spec or with_core_attention(local_spec(made_for)), vocab_size=VOCABULARY, max_sequence_length=256,
        position_embedding_type="rope", parallel_output=False, share_embeddings_and_output_weights=False,
    )  # fmt: skip
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1 or name.endswith("softmax_offset"):
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.15)
    return made.to(DEVICE)


def core(attn_mask_type: AttnMaskType = AttnMaskType.causal, **changes: Any) -> CoreAttention:
    own = {
        name: changes.pop(name)
        for name in ("k_channels", "v_channels", "softmax_scale", "attention_dropout")
        if name in changes
    }
    return CoreAttention(config(**changes), 1, attn_mask_type, "self", **own).to(DEVICE)


def qkv(
    *lead: int, dim: int = 16, v_dim: int = 16, groups: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    shapes = ((4, dim), (groups, dim), (groups, v_dim))
    return tuple(torch.randn(*lead, *shape, device=DEVICE) for shape in shapes)  # type: ignore[return-value]


def packed(
    *offsets: int, padded: tuple[int, ...] | None = None, longest: int | None = None
) -> PackedSeqParams:
    cu = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    at = None if padded is None else torch.tensor(padded, dtype=torch.int32, device=DEVICE)
    bound = max(b - a for a, b in pairwise(offsets)) if longest is None else longest
    return PackedSeqParams("thd", cu, cu, at, at, max_seqlen_q=bound, max_seqlen_kv=bound)


def positions(batch: int, length: int) -> Tensor:
    return torch.arange(length, device=DEVICE).expand(batch, -1)


def latent_model_with_their_core() -> GPTModel:
    """Megatron's own attention computes MLA's head dims, but its constructor does not take them from a spec."""
    made = model(latent_config())
    for layer in made.decoder.layers:
        ours = layer.self_attention.core_attention
        layer.self_attention.core_attention = DotProductAttention(
            ours.config, ours.layer_number, ours.attn_mask_type, "self", softmax_scale=ours.softmax_scale
        )
    return made


def assert_no_worse(ours: Tensor, theirs: Tensor, exact: Tensor, what: str = "") -> None:
    """At most twice the other one's error against fp64, plus one rounding."""
    ours, theirs, exact = ours.double(), theirs.double(), exact.double()
    error, allowed = (ours - exact).norm(), (theirs - exact).norm()
    assert error <= 2 * allowed + torch.finfo(torch.float32).eps * exact.norm(), (
        f"{what}: {float(error):.3e} against {float(allowed):.3e}"
    )
