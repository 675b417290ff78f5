"""The KV cache: page and slot tensors behind one seam. Knows no request; the ledger decides who holds what."""
