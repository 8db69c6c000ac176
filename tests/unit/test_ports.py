"""Ports that are kept until a server listens on them."""

from __future__ import annotations

import itertools
import socket

import pytest

from hybridsched.ports import KeptPorts, first_job_id, keep_testbed_ports, taken


def server(port: int) -> socket.socket:
    """What servers do: SO_REUSEADDR, bind, listen."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(("127.0.0.1", port))
    except OSError:
        made.close()
        raise
    made.listen()
    return made


def test_a_kept_port_is_refused_to_who_would_keep_it_and_given_to_its_server() -> None:
    with KeptPorts([0, 0]) as kept:
        one, two = kept.numbers
        assert one != two
        with pytest.raises(OSError, match="in use"):
            KeptPorts([0, two])
        with socket.socket() as caller:
            assert caller.connect_ex(("127.0.0.1", one)) != 0, "nobody listens yet"
        for _ in range(2):  # a server that dies finds its port again
            with server(one), pytest.raises(OSError, match="in use"):
                server(one)


def test_a_port_is_taken_while_a_server_listens_on_it() -> None:
    with KeptPorts([0]) as kept:
        (port,) = kept.numbers
        assert not taken(port), "it is kept for the server that is to be started"
        with server(port) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            assert taken(port)
            with socket.create_connection(("127.0.0.1", port)) as caller, one.accept()[0]:
                assert caller.getpeername()[1] == port
        assert not taken(port), "connections of one that has ended do not count"


def test_a_port_that_was_let_go_is_anybodys_and_its_server_goes_on() -> None:
    kept = KeptPorts([0])
    (port,) = kept.numbers
    with server(port):
        kept.close()
        assert kept.numbers == []
        socket.create_connection(("127.0.0.1", port)).close()
    with server(port):
        pass


def test_a_range_of_which_one_port_is_taken_is_not_kept_by_half() -> None:
    with KeptPorts([0]) as kept:
        (taken,) = kept.numbers
        with KeptPorts([0]) as other:
            (free,) = other.numbers
        with pytest.raises(OSError, match="in use"):
            KeptPorts([free, taken])
        server(free).close()


def test_testbeds_of_one_seed_share_neither_ports_nor_job_ids() -> None:
    made = [keep_testbed_ports(4, seed=7) for _ in range(20)]
    try:
        ports = [port for _, kept in made for port in kept.numbers]
        assert len(set(ports)) == len(ports) == 20 * 6
        assert max(ports) < 32_768
        ids = sorted(first_job_id(base) for base, _ in made)
        assert min(b - a for a, b in itertools.pairwise(ids)) >= 40_000
        assert ids[-1] < 67_043_328
    finally:
        for _, kept in made:
            kept.close()


def test_the_last_base_leaves_job_ids_below_slurms_limit() -> None:
    assert first_job_id(18_000 + 20 * 599) + 40_000 < 67_043_328
