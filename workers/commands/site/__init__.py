"""Holds the `sitecustomize` of a command's ranks, which have this folder on their PYTHONPATH.

No other module may lie here: the command could import it.
"""
