"""Runs a caching method on a transformer: knows the step and the branch, keeps what is held, installs and removes itself."""
