"""Making rollouts: rows go to agents, attempts come back, are stored and shown.

This package is a client: it never imports what it takes to be a server.
"""
