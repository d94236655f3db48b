"""Defines graphs: tasks that need others, graphs inside a task, and their datablocks."""
