"""A package, so that its modules may be called as those of the methods are."""
