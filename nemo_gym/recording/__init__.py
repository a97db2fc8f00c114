"""Recorded model calls: the files they are kept in, and the recorder of a model server that answers from them."""
