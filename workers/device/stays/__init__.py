"""Starts the processes of tasks, listens to them, stores what they hand over, and ends them."""
