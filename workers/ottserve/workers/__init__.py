"""The replica: decides, computes and writes out tokens. See docs/architecture.md for the path of a request."""
