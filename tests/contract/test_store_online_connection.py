"""Connections: URLs, errors in words without passwords, cancellation, and the embedded server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from hybridsched.store.connection import (
    EmbeddedValkey,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    StoreUrlError,
    async_client,
    explain,
    redact,
    resolve_url,
    store_errors,
    sync_client,
)
from hybridsched.store.scripts import Call, Scripts, SyncScripts, raise_first
from tests.helpers import wait_until


def test_the_option_goes_before_the_environment() -> None:
    environ = {"HYBRIDSCHED_REDIS_URL": "redis://env"}
    assert resolve_url("redis://option", environ) == "redis://option"
    assert resolve_url(None, environ) == "redis://env"
    assert resolve_url(None, {}) is None


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:secret@h:1/0",
        "redis://:secret@h",
        "unix://u:secret@/tmp/s",
        "unix:///tmp/s?password=secret&db=1",
        "sentinel://u:secret@a:1,b:2/svc?sentinel_password=secret",
        "redis://u:sec/ret@h",
        "redis://u:sec?secret@h",
    ],
)
def test_no_password_is_shown(url: str) -> None:
    shown = redact(url)
    assert "ret" not in shown
    assert "***" in shown


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h", "must begin with redis://, rediss://, unix://, sentinel://"),
        ("localhost:6379", "must begin with"),
        ("redis://h:port", "Port"),
        ("sentinel://a:1", "names no service"),
        ("sentinel://:26379/svc", "no host name"),
        ("sentinel://a:1/svc?colour=red", "colour is not known"),
    ],
)
def test_a_bad_url_is_explained(url: str, said: str) -> None:
    for make in (sync_client, async_client):
        with pytest.raises(StoreUrlError, match=said):
            make(url)


def test_a_sentinel_url_names_hosts_service_and_db() -> None:
    client = sync_client("sentinel://u:pw@a:1,b/svc?db=3&ssl=true&sentinel_password=x")
    pool = client.connection_pool
    assert pool.service_name == "svc"
    assert pool.connection_kwargs["db"] == 3
    assert (pool.connection_kwargs["username"], pool.connection_kwargs["password"]) == ("u", "pw")
    hosts = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
    assert [(h["host"], h["port"], h["password"]) for h in hosts] == [("a", 1, "x"), ("b", 26379, "x")]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (redis.ConnectionError("refused"), StoreUnavailable, "cannot be reached"),
        (redis.TimeoutError("slow"), StoreUnavailable, "did not answer within 10 s"),
        (redis.AuthenticationError("no"), StoreRefused, "check user and password"),
        (redis.exceptions.NoPermissionError("no"), StoreRefused, "extend its ACL"),
        (redis.exceptions.OutOfMemoryError("full"), StoreRefused, "raise maxmemory"),
        (redis.ResponseError("LOADING the dataset"), StoreUnavailable, "not ready yet"),
        (redis.ResponseError("unknown command"), StoreRefused, "Redis 7.0, Valkey 8"),
    ],
)
def test_errors_say_what_to_do(error: redis.RedisError, kind: type[StoreError], said: str) -> None:
    explained = explain(error, "redis://u:secret@h/0", "reading x")
    assert type(explained) is kind
    assert str(explained).startswith("reading x: ")
    assert said in str(explained)
    assert "secret" not in str(explained)


def test_store_errors_wraps_what_happens_within(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/none"
    with (
        sync_client(url) as client,
        pytest.raises(StoreUnavailable, match=r"looking: .*cannot be reached"),
        store_errors(url, "looking"),
    ):
        client.ping()


async def test_a_cancelled_task_ends_even_in_the_middle_of_commands(
    valkey: redis.Redis, valkey_url: str
) -> None:
    """redis-py before Python 3.12 loses a cancellation that comes as a write ends."""
    client = async_client(valkey_url)

    async def ping_for_ever() -> None:
        while True:
            await client.ping()

    await client.ping()
    for i in range(40):
        task = asyncio.create_task(ping_for_ever())
        await asyncio.sleep(0.001 + i * 1e-5)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=5)
        assert done, "the cancellation was lost"
    await client.aclose()


async def test_many_scripts_in_one_pipeline_keep_their_places(valkey: redis.Redis, valkey_url: str) -> None:
    client = async_client(valkey_url)
    keys = [f"hs:{{p}}:online:m:{i}" for i in range(3)]
    calls = [Call("depth", keys, []), Call("depth", [], []), Call("depth", keys, [])]
    for results in (await Scripts(client).call_many(calls), SyncScripts(valkey).call_many(calls)):
        assert [isinstance(result, redis.ResponseError) for result in results] == [False, True, False]
        with pytest.raises(redis.ResponseError):
            raise_first(results)
    valkey.script_flush()
    assert len(SyncScripts(valkey).call("depth", keys, [])) == 8
    await client.aclose()


# the embedded server


def test_it_keeps_its_data_and_address_over_a_kill(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path / "data") as server, sync_client(server.url) as client:
        url, pid = server.url, server.pid
        client.set("a", 1)
        wait_until(lambda: client.info("persistence")["aof_pending_bio_fsync"] == 0)
        server.kill()
        assert server.pid is None
        server.start()
        assert server.url == url
        assert server.pid not in (None, pid)
        assert client.get("a") == b"1"
    assert not Path(url.removeprefix("unix://")).exists()


def test_it_can_listen_on_a_loopback_port(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path, port=0) as server, sync_client(server.url) as client:
        assert server.url.startswith("redis://127.0.0.1:")
        assert client.ping()


def test_a_long_temporary_folder_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with EmbeddedValkey(tmp_path / "data") as server, sync_client(server.url) as client:
        assert client.ping()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as server, pytest.raises(StoreError, match=f"process id {server.pid}"):
        EmbeddedValkey(tmp_path).start()


def test_a_server_left_by_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import os, sys; from hybridsched.store.connection import EmbeddedValkey, sync_client\n"
        "server = EmbeddedValkey(sys.argv[1]).start(); sync_client(server.url).set('a', 1)\n"
        "os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    left = json.loads((tmp_path / "valkey.json").read_text())["pid"]
    os.kill(left, 0)
    with EmbeddedValkey(tmp_path) as server, sync_client(server.url) as client:
        assert client.get("a") == b"1"
        assert server.pid != left


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path / "a", port=0) as first:
        port = int(first.url.rsplit(":", 1)[1].split("/")[0])
        with pytest.raises(StoreUnavailable, match="did not come up"):
            EmbeddedValkey(tmp_path / "b", port=port).start(timeout_s=5)


def test_no_address_before_start(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="before start"):
        _ = EmbeddedValkey(tmp_path).url
