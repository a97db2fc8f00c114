"""Comparing runs: whether one is better than another, by how much, and how sure that is."""
