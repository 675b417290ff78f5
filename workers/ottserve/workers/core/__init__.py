"""Decisions of the replica: what is computed next and who holds which page and slot. Free of tensors and of Ray."""
