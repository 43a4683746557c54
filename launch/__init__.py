"""The parity job: two Ray actors score the same tokens (`rl_attn_plugin.launch.job`).

Importing this package needs neither Ray nor transformers; running a job needs both (extras ``ray`` and
``transformers``).
"""
