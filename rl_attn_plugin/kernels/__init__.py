"""``impl="triton"``: the attention schedule as portable Triton kernels.

One order of arithmetic (see `rl_attn_plugin.types.Schedule`) for every way of computing a row: a program
walks blocks of keys that lie at absolute positions, and its state is merged at absolute split boundaries,
either in registers (a loop over splits) or by a second kernel (a grid over splits). No autograd here, no
host synchronisation, no autotuning over anything that would change the order of arithmetic.
"""
