"""What Roundhouse decides: pure functions over frozen values, standard library only.

Nothing here reads a clock, a database, a device or the network.  Time is an argument, in seconds
(`_s`) or integer microseconds (`_us`).  The simulator and the production island run these same
functions.
"""
