"""Tiny, real, randomly initialized models and pipelines, for tests."""
