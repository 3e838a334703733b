"""How close cached images stay to uncached ones: plans, other methods and fewer steps, on the built-in model."""
