"""Takes a job's state off the device and back, while as few tasks as possible have to wait."""
