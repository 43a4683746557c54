"""The backend against vLLM's real classes: registry, platform, configuration, metadata, and its layouts of the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs vLLM: see docs/vllm.md")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import AttentionSelectorConfig, get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from rl_attn_plugin import flash_attention
from rl_attn_plugin.integrations.vllm import register
from rl_attn_plugin.integrations.vllm.attention import RLAttentionImpl
from rl_attn_plugin.integrations.vllm.backend import RLAttentionBackend
from rl_attn_plugin.integrations.vllm.metadata import RLAttentionMetadataBuilder
from rl_attn_plugin.integrations.vllm.plugin import BACKEND
from rl_attn_plugin.reference import attention_reference

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 32, 16, 32
CPU = torch.device("cpu")
NATIVE = current_platform.get_attn_backend_cls  # before anything is registered
ONE = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """A real configuration that asks for the plugin; vLLM writes to the environment while it makes one."""
    before = dict(os.environ)
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": HEADS * DIM,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": DIM, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "dtype": "float32",
    }))  # fmt: skip
    register()
    made = EngineArgs(
        model=str(folder), attention_backend="CUSTOM", dtype="float32", skip_tokenizer_init=True, max_model_len=256
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(made):
        yield made
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def builder(config: VllmConfig) -> RLAttentionMetadataBuilder:
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=DIM, head_size_v=DIM, dtype=torch.float32
    )
    return RLAttentionMetadataBuilder(spec, [], config, CPU)


def implementation(**changes: Any) -> RLAttentionImpl:
    given: dict[str, Any] = {
        "num_heads": HEADS, "head_size": DIM, "scale": DIM**-0.5, "num_kv_heads": KV_HEADS, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None,
    }  # fmt: skip
    return RLAttentionImpl(**{**given, **changes})


def selection(**changes: Any) -> AttentionSelectorConfig:
    return AttentionSelectorConfig(
        **{"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, **changes}
    )


def step(
    counts: list[int], lengths: list[int], tables: list[list[int]], pad: int = 0
) -> CommonAttentionMetadata:
    """What vLLM's model runner hands a builder: requests with new tokens, and slots from their block tables."""
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    width = max(map(len, tables))
    slots = [
        table[i // BLOCK] * BLOCK + i % BLOCK
        for count, length, table in zip(counts, lengths, tables, strict=True)
        for i in range(length - count, length)
    ]
    return CommonAttentionMetadata(
        query_start_loc=offsets,
        query_start_loc_cpu=offsets,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_table_tensor=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        slot_mapping=torch.tensor(slots + [-1] * pad),
    )


def paged(layout: KVCacheLayout, dtype: torch.dtype) -> Tensor:
    """The cache of one layer as vLLM hands it over: ``[num_blocks, Hkv, block_size, 2 D]`` with a layout's strides; NaN."""
    sizes = (1, BLOCKS, KV_HEADS, BLOCK, 2 * DIM)
    fill = torch.nan if dtype.is_floating_point else 0x7F  # NaN in e4m3
    physical = torch.full([sizes[i] for i in layout.value], fill, dtype=dtype)
    cache = physical.permute([layout.value.index(i) for i in range(5)])[0]
    cache[0] = 8.0 if dtype.is_floating_point else 1  # the null block: finite, and of no meaning
    return cache


def serve(
    builder: RLAttentionMetadataBuilder,
    impl: RLAttentionImpl,
    qkv: list[tuple[Tensor, Tensor, Tensor]],
    steps: list[list[int]],
    *,
    layout: KVCacheLayout = KVCacheLayout.LBHNC,
    cache_dtype: torch.dtype = torch.float32,
    layer: Any = ONE,
    pad: int = 3,
) -> list[Tensor]:
    """Feed sequences as an engine would: ``steps[i][r]`` new tokens of request r in step i, blocks in any order."""
    cache = paged(layout, cache_dtype)
    free = (
        torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(1)) + 1
    ).tolist()  # 0 is the null block
    tables: list[list[int]] = [[] for _ in qkv]
    done = [0] * len(qkv)
    parts: list[list[Tensor]] = [[] for _ in qkv]
    window = None if impl.window[0] < 0 else impl.window[0] + 1
    for counts in steps:
        rows = [r for r, count in enumerate(counts) if count]
        for r in rows:
            done[r] += counts[r]
            while len(tables[r]) * BLOCK < done[r]:
                tables[r].append(free.pop())
            if window is not None:  # as vLLM frees them: what no query of this step or later can reach
                for i in range(max(done[r] - counts[r] - window + 1, 0) // BLOCK):
                    tables[r][i] = 0
        new = [slice(done[r] - counts[r], done[r]) for r in rows]
        common = step([counts[r] for r in rows], [done[r] for r in rows], [tables[r] for r in rows], pad)
        q, k, v = (
            torch.cat(
                [
                    *(qkv[r][i][s] for r, s in zip(rows, new, strict=True)),
                    torch.full_like(qkv[0][i][:pad], 9.0),
                ]
            )
            for i in range(3)
        )
        impl.do_kv_cache_update(layer, k, v, cache, common.slot_mapping)
        output = torch.full_like(q, torch.nan)
        impl.forward(layer, q, k, v, cache, builder.build(0, common), output)
        assert torch.equal(output[len(q) - pad :], torch.zeros(pad, HEADS, DIM))
        for r, out in zip(rows, output.split([*(counts[r] for r in rows), pad]), strict=False):
            parts[r].append(out)
    return [torch.cat(p) for p in parts]


def sequences(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randn(n, h, DIM, generator=generator).to(dtype) for h in (HEADS, KV_HEADS, KV_HEADS))  # type: ignore[misc]
        for n in (90, 41)
    ]


WHOLE = [[90, 41]]
MIXED = [[50, 0], [39, 7], [1, 33], [0, 1]]  # chunks, then a decode beside a chunk


def test_registers_under_vllms_own_name() -> None:
    register()
    once = current_platform.get_attn_backend_cls
    register()
    assert current_platform.get_attn_backend_cls == once
    assert AttentionBackendEnum.CUSTOM.get_path() == BACKEND
    assert AttentionBackendEnum.CUSTOM.get_class() is RLAttentionBackend
    assert AttentionBackendEnum[RLAttentionBackend.get_name()] is AttentionBackendEnum.CUSTOM


def test_another_packages_backend_is_not_overwritten() -> None:
    register_backend(AttentionBackendEnum.CUSTOM, "other.package.Backend")
    try:
        with pytest.raises(RuntimeError, match=r"must be free, got other\.package\.Backend"):
            register()
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
        register()


def test_only_who_asks_gets_it(config: VllmConfig) -> None:
    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM
    assert get_attn_backend(64, torch.bfloat16, "auto") is RLAttentionBackend
    for other in (None, AttentionBackendEnum.CPU_ATTN):
        found = current_platform.get_attn_backend_cls(other, selection())
        assert found == NATIVE(other, selection()) != BACKEND


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"head_size": 320}, "head_size"),
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_non_causal": True}, "non-causal"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 with a model in torch.bfloat16"),
        ({"use_dcp": True}, "DCP"),
        ({"use_pcp": True}, "PCP"),
        ({"use_per_head_quant_scales": True}, "per-head"),
        ({"use_rswa": True}, "R-SWA"),
    ],
)
def test_what_it_cannot_do_is_refused_before_a_layer_is_built(changes: dict[str, Any], reason: str) -> None:
    register()
    with pytest.raises(ValueError, match=reason):
        current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, selection(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"has_sink": True, "has_sliding_window": True, "use_batch_invariant": True},
        {"head_size": 80, "dtype": torch.float32},
        {"kv_cache_dtype": "fp8", "block_size": 48},
        {"kv_cache_dtype": "bfloat16", "head_size": 256},
    ],
)
def test_what_it_can_do_is_taken(changes: dict[str, Any]) -> None:
    register()
    assert current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, selection(**changes)) == BACKEND


def test_a_layer_names_everything_that_is_not_there(config: VllmConfig) -> None:
    with pytest.raises(NotImplementedError) as raised:
        implementation(
            alibi_slopes=[0.5] * HEADS, attn_type=AttentionType.ENCODER, kv_cache_dtype="fp8_e5m2", chunk_lookback=64
        )  # fmt: skip
    for named in ("alibi_slopes", "attn_type", "fp8_e5m2", "chunk_lookback=64", "another attention_backend"):
        assert named in str(raised.value)
    q = torch.zeros(1, HEADS, DIM)
    with pytest.raises(NotImplementedError, match="quantise"):
        implementation().forward(ONE, q, None, None, q, None, q, output_scale=torch.ones(()))


def test_memory_is_measured_without_metadata(config: VllmConfig) -> None:
    output = torch.full((2, HEADS, DIM), torch.nan)
    implementation().forward(ONE, output, None, None, torch.empty(0), None, output)
    assert torch.equal(output, torch.zeros(2, HEADS, DIM))


def test_metadata_is_the_steps(builder: RLAttentionMetadataBuilder, config: VllmConfig) -> None:
    common = step([3, 1], [3, 20], [[4], [7, 2]], pad=2)
    made = builder.build(0, common)
    assert builder.num_heads == HEADS
    assert made.query_start_loc.tolist() == [0, 3, 4]
    assert made.seq_lens.tolist() == [3, 20]
    assert made.block_table.tolist() == [[4, 0], [7, 2]]
    assert made.slot_mapping.tolist() == [64, 65, 66, 35, -1, -1]
    assert (made.num_actual_tokens, made.max_query_len, made.max_seq_len) == (4, 3, 20)
    assert made.plan is not None
    assert builder.build(0, common, fast_build=True).plan is None
    assert builder.get_cudagraph_support(config, builder.kv_cache_spec) is AttentionCGSupport.NEVER


@pytest.mark.parametrize("causal", [False, torch.tensor([True, False])])
def test_a_step_that_is_not_causal_is_refused(builder: RLAttentionMetadataBuilder, causal: Any) -> None:
    common = step([3, 1], [3, 20], [[4], [7, 2]]).replace(causal=causal)
    with pytest.raises(NotImplementedError, match="causal only"):
        builder.build(0, common)


def test_the_cache_is_vllms_key_then_value(config: VllmConfig) -> None:
    """Others read it too: KV transfer, a layer that shares it."""
    cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * DIM)
    k, v = torch.randn(3, KV_HEADS, DIM), torch.randn(3, KV_HEADS, DIM)
    implementation().do_kv_cache_update(ONE, k, v, cache, torch.tensor([5 * BLOCK + 2, -1]))
    assert torch.equal(cache[5, :, 2], torch.cat((k[0], v[0]), -1))
    assert cache.count_nonzero() == 2 * KV_HEADS * DIM


@pytest.mark.parametrize("layout", KVCacheLayout)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_bits_of_one_prefill_in_every_cache_layout(
    builder: RLAttentionMetadataBuilder, layout: KVCacheLayout, dtype: torch.dtype
) -> None:
    qkv = sequences(dtype)
    found = serve(builder, implementation(), qkv, MIXED, layout=layout, cache_dtype=dtype)
    for out, (q, k, v) in zip(found, qkv, strict=True):
        assert torch.equal(out, flash_attention(q[None], k[None], v[None]).out[0])


@pytest.mark.parametrize(
    "changes, options",
    [
        ({}, {}),
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        ({"sliding_window": 19}, {"window": (18, 0)}),
        ({"sinks": torch.linspace(-1, 2, HEADS)}, {"sinks": torch.linspace(-1, 2, HEADS)}),
    ],
    ids=["plain", "scale", "softcap", "window", "sinks"],
)
def test_options_mean_what_vllm_means(
    builder: RLAttentionMetadataBuilder, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    """Blocks freed behind the window are named 0 in the table, and must leave no trace."""
    qkv = sequences()
    whole, mixed = (serve(builder, implementation(**changes), qkv, steps) for steps in (WHOLE, MIXED))
    for out, again, (q, k, v) in zip(whole, mixed, qkv, strict=True):
        assert torch.equal(out, again)
        expected, _ = attention_reference(q, k, v, **options)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)


def test_e4m3_cache_of_bytes(builder: RLAttentionMetadataBuilder) -> None:
    """vLLM stores value / scale; the exact attention over what was stored is the reference."""
    layer = SimpleNamespace(_k_scale=torch.tensor(0.05), _v_scale=torch.tensor(0.02))
    qkv = sequences()
    impl = implementation(kv_cache_dtype="fp8_e4m3")
    found = [
        serve(builder, impl, qkv, steps, cache_dtype=torch.uint8, layer=layer) for steps in (WHOLE, MIXED)
    ]
    for out, again, (q, k, v) in zip(*found, qkv, strict=True):
        assert torch.equal(out, again)
        stored = [(x / s).to(torch.float8_e4m3fn).double() * s for x, s in ((k, 0.05), (v, 0.02))]
        expected, _ = attention_reference(q, *stored)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
