"""Tests of the planned cache."""
