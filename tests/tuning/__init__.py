"""Tests of polishing and certificates."""
