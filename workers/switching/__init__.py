"""Takes a job's state off the device and back while as little as possible stands still."""
