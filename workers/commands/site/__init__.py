"""A folder for the PYTHONPATH of a command's ranks; nothing else may lie in it."""
