"""Show which code a rollout runs: `python -m tests.perf.walk`, which is `make walk`."""
