"""Holds the tables, the transactions that use them, and the reading of the tree of tenants."""
