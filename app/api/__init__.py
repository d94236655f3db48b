"""Serves the REST API under /v1: its routes, its input and output models, and access control."""
