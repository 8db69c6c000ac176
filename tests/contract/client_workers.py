"""A worker that does what a test tells it, for the clients' tests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import msgspec
import redis

from hybridsched.store.connection import async_client
from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_signals import Cancel, Wake
from hybridsched.store.online_values import Claimed, End, EndStatus
from hybridsched.store.tasks import end_tasks

Answer = Callable[[OnlineQueue, Claimed], Awaitable[object]]


async def echo(queue: OnlineQueue, request: Claimed) -> None:
    """Stream the prompt's numbers back, one a group; or give the body back whole."""
    end = End(status=EndStatus.OK, finish_reason="stop", usage={"completion_tokens": 3}, replica="r0")
    if request.stream:
        for number, token in enumerate(msgspec.json.decode(request.body)["prompt"], 1):
            await queue.emit(request, number, [b'{"t":%d}' % token])
    else:
        end.body = msgspec.Raw(request.body)
    await queue.finish(request, end)


async def fail(queue: OnlineQueue, request: Claimed) -> None:
    await queue.finish(request, End.failed("bad_request", "too long", http_status=400))


async def hang(queue: OnlineQueue, request: Claimed) -> None:
    if request.stream:
        await queue.emit(request, 1, [b'{"t":1}'])


async def work(url: str, answer: Answer) -> None:
    """Claim and answer, for ever; cancelled requests are answered as cancelled."""
    client = async_client(url)
    queue = OnlineQueue(client, "p")
    held: dict[str, Claimed] = {}
    heard: asyncio.Queue[Wake | Cancel] = asyncio.Queue()

    async def listen() -> None:
        async for signal in queue.signals("r0"):
            heard.put_nowait(signal)

    listener = asyncio.create_task(listen())
    try:
        while True:
            with contextlib.suppress(TimeoutError, redis.RedisError):
                signal = await asyncio.wait_for(heard.get(), 0.1)
                if isinstance(signal, Cancel) and signal.id in held:
                    await queue.finish(held.pop(signal.id), End.cancelled("r0"))
            with contextlib.suppress(redis.RedisError):
                while got := await queue.claim("m", "r0", "r0:1", load=0, inflight=0, cap=100):
                    for request in got:
                        held[request.id] = request
                        await answer(queue, request)
    finally:
        await end_tasks(listener)
        await client.aclose()


@contextlib.asynccontextmanager
async def worker(url: str, answer: Answer) -> AsyncIterator[None]:
    task = asyncio.create_task(work(url, answer))
    try:
        yield
    finally:
        await end_tasks(task)  # one cancellation can be lost, and the test would hang


@contextlib.contextmanager
def worker_thread(url: str, answer: Answer) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    task = loop.create_task(work(url, answer))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        while thread.is_alive():
            # A thread that outlived its test would go on answering the requests of the tests after it.
            loop.call_soon_threadsafe(task.cancel)
            thread.join(0.05)
        loop.close()
