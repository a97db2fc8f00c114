"""Data contracts: what is configured and what travels on the wire."""
