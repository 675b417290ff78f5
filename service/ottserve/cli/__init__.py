"""The command `ottserve`. Imports lazily, so that help needs neither Ray nor torch; nobody imports it."""
