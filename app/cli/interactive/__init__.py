"""Open shells, ports and notebooks in tasks from the terminal."""
