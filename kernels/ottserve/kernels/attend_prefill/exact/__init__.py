"""What chunk attention makes of what is exact: the chunk itself, outliers and tail."""
