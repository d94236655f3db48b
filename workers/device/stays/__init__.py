"""Starts the processes of tasks, reads their messages, stores their results, and ends them."""
