"""Kernels of the cache: pure functions over tensors. kernels/README.md has the letters and the storage layout."""
