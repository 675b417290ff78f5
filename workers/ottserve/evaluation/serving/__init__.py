"""A whole service measured point by point, beside its engine alone: what to measure, in which order, and the report.

The callers are in the folder `loadtest`; the command `ottserve bench-serve` joins the two.
"""
