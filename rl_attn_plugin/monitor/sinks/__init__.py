"""Where a step's numbers go. Importing this needs no further library; each sink imports its own when it is made."""

from __future__ import annotations

from rl_attn_plugin.monitor.sinks.json_lines import JsonLinesSink
from rl_attn_plugin.monitor.sinks.mlflow import MlflowSink
from rl_attn_plugin.monitor.sinks.parquet import ParquetSink
from rl_attn_plugin.monitor.sinks.prometheus import PrometheusSink
from rl_attn_plugin.monitor.sinks.tensorboard import TensorBoardSink
from rl_attn_plugin.monitor.sinks.wandb import WandbSink

__all__ = ["JsonLinesSink", "MlflowSink", "ParquetSink", "PrometheusSink", "TensorBoardSink", "WandbSink"]
