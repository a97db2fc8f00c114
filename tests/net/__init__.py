"""Record what every bundled server answers, and compare two such recordings: `python -m tests.net`.

The net is for changes that must not be seen from outside: record one checkout, record the other, compare.
"""
