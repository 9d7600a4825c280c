"""Transfers to another host over a plain socket: each message is timed, and waits have a limit."""

from __future__ import annotations

import socket

from checklist.checks.network.sockets import Sink, deliver


def test_all_bytes_are_delivered_and_each_message_is_timed() -> None:
    sink = Sink("127.0.0.1")
    sent = deliver(
        "127.0.0.1", sink.port, first=1000, choose=lambda _: 5000, repetitions=3, connect_s=2, limit_s=5
    )
    sink.close()
    assert (sent.connected, len(sent.seconds), sent.bytes, sent.error) == (True, 4, 5000, None)


def test_a_silent_server_is_abandoned_at_the_time_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sent = deliver("127.0.0.1", silent.getsockname()[1], first=100, connect_s=2, limit_s=0.3)
    assert sent.connected
    assert sent.seconds == ()
    assert sent.error == "100 bytes: not within 0.3 s"


def test_a_closed_port_is_reported_as_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    sent = deliver("127.0.0.1", port, first=100, connect_s=2, limit_s=1)
    assert not sent.connected
    assert "refused" in (sent.error or "")


def test_short_messages_are_repeated_until_the_minimum_duration_is_reached() -> None:
    sink = Sink("127.0.0.1")
    sent = deliver(
        "127.0.0.1",
        sink.port,
        first=1000,
        choose=lambda _: 5000,
        repetitions=3,
        least_s=0.2,
        connect_s=2,
        limit_s=30,
    )
    sink.close()
    assert len(sent.seconds) > 4
    assert sum(sent.seconds[1:-1]) < 0.2 <= sum(sent.seconds[1:])
