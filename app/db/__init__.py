"""Holds the tables, the transactions on them, and how a tree of tenants is read."""
