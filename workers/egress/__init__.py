"""The proxy of a device worker, through which residents reach the network where they may."""
