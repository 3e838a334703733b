"""Who remembers? Installs and removes the cut on instances, keeps state for one generation, counts."""
