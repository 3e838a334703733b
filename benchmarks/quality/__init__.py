"""How near cached pictures stay to the uncached ones: plans, their peers and fewer steps, on the model in the box."""
