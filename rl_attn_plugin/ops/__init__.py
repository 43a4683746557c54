"""torch.library schemas, fakes and gradients, and the public functions that validate, choose and call."""
