"""What would a held step have been? Every predictor is linear in the past: a weighted sum of computed values."""
