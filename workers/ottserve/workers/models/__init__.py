"""Models: transformers' implementations, loaded and hooked to the cache. Knows no request and no scheduler."""
