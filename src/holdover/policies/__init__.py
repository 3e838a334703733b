"""When to compute? One published rule a file; pure Python, no tensors, no modules, no logging."""
