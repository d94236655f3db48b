"""Holds the operations under /v1, a file for each kind of thing."""
