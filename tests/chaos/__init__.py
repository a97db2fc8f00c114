"""Proof under fire: real servers and real collectors, faults at random moments, and a count of what is left.

    python -m tests.chaos [--short] [--seed N] [--only WORD] [--json FILE] [--docs]

Not part of the ordinary suite: `make chaos` runs all of it, `make check` the short version.
"""
