"""Registers the verbs of the `roundhouse` command, one module for each group of them."""
