"""Starting servers: which run how, in what environment, and that none is left behind."""
