"""Says who calls, what they may see, and how much they may ask for at once."""
