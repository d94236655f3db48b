"""Records what devices report: heartbeats, and each thing that a heartbeat says."""
