"""Jobs to try Roundhouse with, and the demo that runs them."""
