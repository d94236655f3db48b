"""Installs environments and container images once for all devices of a host, and keeps them."""
