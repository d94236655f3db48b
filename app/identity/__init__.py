"""Says who comes in, what they did, and how often they may call."""
