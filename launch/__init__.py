"""The parity job: two Ray actors, a trainer and a rollout, score the same tokens; see `rl_attn_plugin.launch.job`.

Importing this package needs neither Ray nor transformers; running a job needs both (extras ``ray`` and
``transformers``).
"""
