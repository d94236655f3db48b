"""Lets tasks use their host within limits (mounts, network, memory), and watches device health."""
