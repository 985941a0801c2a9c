"""The command line: `sixstage`."""

from common.cli.app import main

__all__ = ["main"]
