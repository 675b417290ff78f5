"""Measures what a cache policy costs in answers and gives in speed, through the path that serves. Knows no gateway."""
