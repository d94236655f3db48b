"""Holds what Roundhouse decides: pure functions of frozen values, with the standard library only.

Nothing here reads a clock, a database, a device or the network. Time is an argument, in seconds
(`_s`) or integer microseconds (`_us`). The simulator and the production island run these same
functions.
"""
