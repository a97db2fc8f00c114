"""A run on disk: its files, what is read from them, and what it still owes."""
