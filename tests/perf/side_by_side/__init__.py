"""Floor and product measured in one run: what three bare HTTP round trips cost, and what a rollout costs."""
