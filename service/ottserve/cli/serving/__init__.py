"""The work of `ottserve bench-serve`: what was asked for, the settings of each start, and the run itself."""
