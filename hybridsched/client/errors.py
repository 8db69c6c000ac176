"""What can become of a request other than an answer."""

from __future__ import annotations


class RequestError(Exception):
    """A request did not succeed. `request_id` says which."""

    def __init__(self, request_id: str, message: str) -> None:
        super().__init__(f"request {request_id}: {message}")
        self.request_id = request_id


class Expired(RequestError):  # noqa: N818 - named for what became of the request
    """Its deadline passed before it could be answered. It is not run any more, unless others wait for it."""


class Cancelled(RequestError):  # noqa: N818
    """It was cancelled."""


class QueueFull(RequestError):  # noqa: N818
    """As many requests wait as `max_waiting` allows; nothing was sent. Try again later or elsewhere."""


class RetryBudgetExhausted(RequestError):  # noqa: N818
    """The same id was sent more often than the retry budget allows. Wait for it, or use a new id."""


class Conflict(RequestError):  # noqa: N818
    """The id is that of another request, which was left alone. Use a new id."""


class NotServed(RequestError):  # noqa: N818
    """No replica serves its model, while others are served. See whether its name is right."""


class ClientClosed(RequestError):  # noqa: N818
    """The client was closed before the answer came. What was sent is left to its deadline."""


class Failed(RequestError):  # noqa: N818
    """The engine refused it or was lost. `code` is a stable word, `http_status` the engine's, where known."""

    def __init__(self, request_id: str, code: str, message: str, http_status: int | None) -> None:
        super().__init__(request_id, f"{message} ({code})")
        self.code = code
        self.message = message
        self.http_status = http_status
