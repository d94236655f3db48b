"""Runs shells and connections of users inside running tasks: the inner ends of tunnels."""
