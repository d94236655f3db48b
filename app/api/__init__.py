"""The REST API under /v1: routers, what they take in and give out, and who may call them."""
