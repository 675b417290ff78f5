"""The keys of a page: codes by channel, longer ones for those that vary most."""
