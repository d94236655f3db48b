"""Describes what a job brings or gets: packages, data, variables, network, limits, sessions."""
