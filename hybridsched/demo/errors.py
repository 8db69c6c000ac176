"""What can be wrong with what the user asked of a demo."""

from __future__ import annotations


class DemoUsageError(Exception):
    """The options cannot be used; the message says which and what is allowed."""
