"""What callers of a running service see, measured point by point with its metrics beside. Starts and reports nothing.

No locust here: it replaces parts of the standard library, and a host that measures may not have it.
"""
