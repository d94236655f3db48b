"""Roundhouse's control plane: the only part that knows Postgres."""
