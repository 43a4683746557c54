"""``rl-attn bench``: the attention kernels against their peers, in one process, on the same inputs.

A kernel gets a speed only after its result passed a parity check in the same run.
"""
