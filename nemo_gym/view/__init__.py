"""Looking at runs: an index of their rollouts, an API on it, and pages that show them. Nothing of a run is changed."""
