"""Decides which tasks use one device together, and which of them runs next."""
