"""Tiny, real, randomly initialised models and pipelines, for tests."""
