"""What decode attention makes of outliers and tail."""
