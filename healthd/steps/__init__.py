"""
Steps of running jobs, as their ranks report them: the datagram, and the rank that is slow by its own time.

Pure: no clock, no socket, no file.
"""
