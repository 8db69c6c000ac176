"""One line in the log for each outage of Redis, however many callers try again how often."""

from __future__ import annotations

import logging

from hybridsched.store.connection import redact

# Not structlog: it prints on stdout until somebody configures it, and the stdout of an online service that
# imports our client is not ours to write on.
_log = logging.getLogger("hybridsched.client")


class Outages:
    """Says once that Redis is away, and once that it is back, whoever notices."""

    def __init__(self, url: str) -> None:
        self._where = redact(url)
        self._away = False

    def begins(self, error: Exception) -> None:
        """A command failed, and will be tried again."""
        if not self._away:
            self._away = True
            said = redact(str(error)) or type(error).__name__
            _log.warning("Redis at %s cannot be reached (%s); it is tried again.", self._where, said)

    def over(self) -> None:
        """A command was answered."""
        if self._away:
            self._away = False
            _log.warning("Redis at %s is back.", self._where)
