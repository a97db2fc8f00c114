"""One module per command; `[project.scripts]` points straight at its `main`."""
