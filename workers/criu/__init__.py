"""Stores the processes of a command as images, by CRIU, and restores them."""
