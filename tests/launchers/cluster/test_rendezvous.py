"""A server admits nodes by a rule, receives from each, and distinguishes a goodbye from a loss."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, TypeAdapter

from launchers.cluster.channel import connect
from launchers.cluster.endpoint import Endpoint, Secret, unused_port
from launchers.cluster.greeting import BadMessage, Message, Refused
from launchers.cluster.rendezvous import Beat, Client, Goodbye, NodeRequest, Peer, Server, describe_loss


class Text(Message):
    kind: Literal["text"] = "text"
    text: str


MESSAGES: TypeAdapter[Any] = TypeAdapter(Annotated[Beat | Goodbye | Text, Field(discriminator="kind")])


class Recorder:
    """A server of three nodes that records received messages and lost nodes."""

    def __init__(self) -> None:
        ports = (unused_port(),)
        self.endpoint = Endpoint(host="127.0.0.1", ports=ports, secret=Secret("s"), run="r")
        self.received: queue.Queue[tuple[int, Text]] = queue.Queue()
        self.lost: queue.Queue[tuple[int, Exception]] = queue.Queue()
        self.server = Server(
            self.endpoint,
            NodeRequest,
            MESSAGES,
            callers=3,
            silence_s=3.0,
            refuse=self.refuse,
            received=self.receive,
            lost=lambda peer, error: self.lost.put((peer.request.node, error)),
        )
        self.server.open()

    def refuse(self, request: NodeRequest) -> str | None:
        return f"node {request.node} is there" if request.node in self.server.peers() else None

    def receive(self, peer: Peer[NodeRequest], message: Text) -> None:
        if message.text == "invalid":
            raise BadMessage("a text that is invalid")
        self.received.put((peer.request.node, message))

    def call(self, node: int) -> Any:
        request = NodeRequest(node=node, nodes=3, host=f"h{node}")
        return connect(self.endpoint, request, MESSAGES, limit_s=5.0, silence_s=3.0)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    started = Recorder()
    yield started
    started.server.close()


def test_a_duplicate_node_is_refused_and_its_number_is_free_again_after_a_loss(recorder: Recorder) -> None:
    first = recorder.call(1)
    with pytest.raises(Refused, match="node 1 is there"):
        recorder.call(1)
    first.close()
    node, error = recorder.lost.get(timeout=5)
    assert (node, isinstance(error, ConnectionError)) == (1, True)
    assert recorder.server.peers() == {}
    assert set(recorder.server.joined()) == {1}
    recorder.call(1).close()


def test_a_node_that_says_goodbye_is_not_reported_as_lost(recorder: Recorder) -> None:
    ended: queue.Queue[Exception | None] = queue.Queue()
    client = Client(recorder.call(1), received=lambda _: None, ended=ended.put)
    client.send(Text(text="before"))
    assert recorder.received.get(timeout=5) == (1, Text(text="before"))
    client.close(Goodbye())
    deadline = time.monotonic() + 5
    while recorder.server.peers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert recorder.server.peers() == {}
    assert recorder.lost.empty()


def test_a_client_distinguishes_a_goodbye_of_its_server_from_a_lost_connection(recorder: Recorder) -> None:
    ends: queue.Queue[tuple[int, Exception | None]] = queue.Queue()
    connections = [recorder.call(node) for node in (1, 2)]
    clients = [
        Client(connection, received=lambda _: None, ended=lambda error, node=node: ends.put((node, error)))
        for node, connection in zip((1, 2), connections, strict=True)
    ]
    recorder.server.peers()[1].connection.close()
    node, error = ends.get(timeout=5)
    assert (node, isinstance(error, ConnectionError)) == (1, True)
    recorder.server.close(Goodbye())
    assert ends.get(timeout=5) == (2, None)
    for client in clients:
        client.close()


def test_heartbeats_keep_an_idle_connection_open_and_silence_ends_it(recorder: Recorder) -> None:
    with contextlib.closing(Client(recorder.call(1), received=lambda _: None, ended=lambda _: None)):
        silent = recorder.call(2)  # sends no heartbeats
        node, error = recorder.lost.get(timeout=10)
        assert (node, type(error)) == (2, TimeoutError)
        assert set(recorder.server.peers()) == {1}
        silent.close()
    assert recorder.received.empty()


def test_an_invalid_message_ends_only_the_connection_of_its_sender(recorder: Recorder) -> None:
    first, second = recorder.call(1), recorder.call(2)
    first.send(Text(text="invalid"))
    node, error = recorder.lost.get(timeout=5)
    assert (node, str(error)) == (1, "a text that is invalid")
    second.send(Text(text="valid"))
    assert recorder.received.get(timeout=5) == (2, Text(text="valid"))
    second.close()


def test_a_broadcast_reaches_node_0_last(recorder: Recorder) -> None:
    order: list[int] = []
    connections = [recorder.call(node) for node in (0, 1, 2)]
    for node, peer in recorder.server.peers().items():
        send = peer.connection.send
        peer.connection.send = lambda message, node=node, send=send: (  # type: ignore[method-assign]
            order.append(node) if isinstance(message, Text) else None,
            send(message),
        )
    recorder.server.send(Text(text="all"))
    assert order == [1, 2, 0]
    for connection in connections:
        while isinstance(message := connection.receive(), Beat):
            pass
        assert message == Text(text="all")
        connection.close()


def test_a_node_that_is_being_admitted_when_the_server_closes_is_refused() -> None:
    recorder = Recorder()
    results: list[BaseException] = []

    def call() -> None:
        with pytest.raises(Refused, match="the rendezvous has ended") as caught:
            recorder.call(1)
        results.append(caught.value)

    with recorder.server._lock:
        caller = threading.Thread(target=call)
        caller.start()
        time.sleep(0.5)  # its greeting is over, its admission waits for the lock
        recorder.server.close()
    caller.join(10)
    assert len(results) == 1
    assert recorder.server.joined() == {}


def test_joined_nodes_stay_connected_after_the_server_stops_admitting(recorder: Recorder) -> None:
    inside = recorder.call(1)
    recorder.server.stop_admitting()
    inside.send(Text(text="here"))
    assert recorder.received.get(timeout=5) == (1, Text(text="here"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", recorder.endpoint.ports[0]), timeout=2)
    inside.close()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError(), "it has sent nothing for 4 s"),
        (BadMessage("nonsense"), "it sent an invalid message: nonsense"),
        (ConnectionResetError(), "gone"),
    ],
)
def test_a_loss_is_described_by_its_error(error: Exception, text: str) -> None:
    assert describe_loss(error, 4.0, sender="it", broken="gone") == text
