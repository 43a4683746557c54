"""A trainer of two ranks that watches its drift: torchrun --nproc-per-node 2 distributed_monitor.py drift.jsonl

The policy is a table of logits, the rollout the same table in bf16, the reward how often a token was chosen. What matters is
around it: each rank hands its own tokens to its hook, every rank ends the step, and rank 0 alone has sinks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rl_attn_plugin.integrations.monitoring import DriftHook
from rl_attn_plugin.monitor import DriftMonitor
from rl_attn_plugin.monitor.sinks import JsonLinesSink

VOCABULARY, ROWS, LENGTH = 64, 16, 48
WANTED = 7  # the token that is rewarded


class Policy(nn.Module):
    """Logits of the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Log-probs ``[B, S, VOCABULARY]`` of what follows each of ``[B, S]`` tokens."""
        return torch.log_softmax(self.table(tokens).float(), -1)


@torch.no_grad()
def rollout(policy: Policy) -> tuple[Tensor, Tensor]:
    """Samples with bf16 weights, as an engine would: tokens ``[B, S + 1]`` and the log-probs of the last S, ``[B, S]``."""
    engine = Policy().bfloat16()
    engine.load_state_dict(policy.state_dict())
    tokens, logps = torch.zeros(ROWS, 1, dtype=torch.long), []
    for _ in range(LENGTH):
        all_logps = engine(tokens[:, -1:])[:, 0]
        chosen = torch.multinomial(all_logps.exp(), 1)
        tokens = torch.cat([tokens, chosen], 1)
        logps.append(all_logps.gather(1, chosen))
    return tokens, torch.cat(logps, 1)


def train(path: Path, steps: int) -> None:
    """Runs on every rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)  # equal weights
    policy = Policy()
    trained = DistributedDataParallel(policy)
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.05)
    torch.manual_seed(1 + rank)  # different samples
    sinks = [JsonLinesSink(path)] if rank == 0 else []
    hook = DriftHook(DriftMonitor(groups={"rank": dist.get_world_size()}), sinks=sinks)
    for step in range(1, steps + 1):
        tokens, logp_rollout = rollout(policy)
        logp_trainer = trained(tokens[:, :-1]).gather(-1, tokens[:, 1:, None])[..., 0]
        hook.monitor.update(
            logp_trainer,
            logp_rollout,
            torch.ones_like(logp_rollout),
            step=step,
            token_ids=tokens[:, 1:],
            sequence_ids=torch.arange(ROWS) + ROWS * rank,
            groups={"rank": torch.full((ROWS,), rank)},
        )
        reward = (tokens[:, 1:] == WANTED).float().mean(1, keepdim=True)
        loss = -((reward - reward.mean()) * logp_trainer).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        judged = hook.end_step(step)  # on every rank: it adds up what all have seen
        if rank == 0:
            print(step, judged.verdict, judged.reasons[0])  # noqa: T201
    for sink in sinks:
        sink.close()


def main() -> None:
    """Reads the command line and joins the other ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="of the JSON lines")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        train(options.path, options.steps)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
