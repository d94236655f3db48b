"""Represents the processes of a device: its zygote, its residents, and what belongs to them."""
