"""When to compute? One published rule per file; no tensors, no modules, no logging."""
