"""``impl="torch"``: the attention schedule in plain PyTorch operations, the default on CPU.

It keeps the bitwise promise of `rl_attn_plugin.types.Schedule` by always meeting the same shapes: query
rows sit in tiles of eight anchored at absolute positions, keys in blocks anchored at absolute positions,
and every product is a batch of ``[8, D] x [D, block_k]`` matrices, so a row's arithmetic never depends on
what else is in the call.
"""
