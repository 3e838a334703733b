"""Models without a published signal of which one fact must be said."""

from __future__ import annotations

from ..family import Family
from ..registry import INPUT

FAMILIES = (
    Family(
        "OmniGen",
        ("OmniGenTransformer2DModel",),
        signals=(INPUT,),
        conditioning=("input_ids", "input_img_latents"),
    ),
    Family(
        "Kandinsky 5",
        ("Kandinsky5Transformer3DModel",),
        signals=(INPUT,),
        conditioning=("encoder_hidden_states", "pooled_projections"),
    ),
    Family("Ideogram 4", ("Ideogram4Transformer2DModel",), signals=(INPUT,), time_runs_up=True),
)
