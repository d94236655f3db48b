"""Walls off a tenant's process: namespaces, control groups, mounts, users and devices."""
