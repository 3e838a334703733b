"""Speed on real hardware: full-size transformers with random weights under every method, and what limits it."""
