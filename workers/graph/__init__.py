"""Runs the nodes of a graph, on one executor or several."""
