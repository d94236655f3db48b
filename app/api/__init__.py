"""The REST API under /v1: its routers, the forms of its input and output, and access control."""
