"""What chunk attention makes of sealed pages."""
