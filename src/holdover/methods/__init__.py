"""Published methods that need no constants of a model: one file each, with its settings, its method and its backend."""
