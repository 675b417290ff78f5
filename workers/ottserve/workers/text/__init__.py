"""Tokens to text: decoding as they come, stop strings, and how an answer ends. Free of tensors and of Ray."""
