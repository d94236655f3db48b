"""Supervises one device: who holds it, and every process that lives there."""
