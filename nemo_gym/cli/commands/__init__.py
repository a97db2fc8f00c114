"""One module per command; `[project.scripts]` leads to its `main` by way of `nemo_gym.cli.entry`."""
