"""Describes what a job brings or may use: packages, data, variables, network, limits, sessions."""
