"""Being an HTTP server: from a class and a config to something that listens."""
