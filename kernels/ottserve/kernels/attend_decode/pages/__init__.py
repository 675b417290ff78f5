"""What decode attention makes of sealed pages."""
