"""The model layer: where a transformer's blocks are, which streams connect them, and what each family declares."""
