"""Runs a caching method on a transformer: knows step and branch, keeps what is held, installs itself."""
