"""Experiment trackers that runs send their results to; each loads its library only when it is configured."""
