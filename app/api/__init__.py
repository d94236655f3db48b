"""Serves the REST API under /v1: its routers, the forms of inputs and outputs, access control."""
