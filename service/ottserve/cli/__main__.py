"""The command where it is not installed: `python -m ottserve.cli`."""

from ottserve.cli.main import app

app()
