"""The values of a page: codes by token."""
