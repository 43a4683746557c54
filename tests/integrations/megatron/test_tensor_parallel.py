"""Two tensor-parallel ranks: each holds its heads, and computes the bits that one rank computes for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install 'rl-attn-plugin[megatron]'")

from tests.integrations.megatron.models import core, packed, qkv

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("default")]

RANK = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from megatron.core import parallel_state
rank, folder = int(sys.argv[1]), sys.argv[2]
store = torch.distributed.FileStore(folder + "/ranks", 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
from tests.integrations.megatron.models import core, packed
made = core(softmax_type="learnable", tensor_model_parallel_size=2).cpu()
given = torch.load(folder + "/given.pt")
with torch.no_grad():
    made.softmax_offset.copy_(given["sinks"].chunk(2)[rank])
q, k, v = (x.cpu().chunk(2, 1)[rank] for x in given["qkv"])
groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
shard = made.sharded_state_dict("", (), groups)["softmax_offset"]
out = made(q, k, v, None, packed_seq_params=packed(0, 11, 30)).detach()
found = {"out": out, "offset": shard.global_offset, "shape": shard.global_shape}
torch.save(found, f"{folder}/{rank}.pt")
"""


def test_heads_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("bits of a CPU are compared here; ranks of a GPU each need their own")
    ours, given = core(softmax_type="learnable"), qkv(30)
    torch.save({"qkv": given, "sinks": ours.softmax_offset.detach()}, tmp_path / "given.pt")
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(n), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for n in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=120)
        assert rank.returncode == 0, said
    found = [torch.load(tmp_path / f"{n}.pt") for n in range(2)]
    assert torch.equal(
        torch.cat([x["out"] for x in found], 1), ours(*given, None, packed_seq_params=packed(0, 11, 30))
    )
    assert [x["offset"] for x in found] == [(0,), (2,)] and {x["shape"] for x in found} == {(4,)}
