"""The other nodes' end of the control channel."""

from __future__ import annotations

import secrets
import socket
import threading
import time

from estimator.errors import UserError
from launchers.cluster.channel import NodeAddress
from launchers.gang.control import HANDSHAKE_S, Heart, Line, Message, Timeouts, Verdict, lost, proof, why_lost
from launchers.gang.failures import Failure, root_cause
from launchers.gang.hub import hmac_equal


class Member:
    """Control for the nodes from 1 on."""

    def __init__(self, address: NodeAddress, timeouts: Timeouts, start_step: int = 0) -> None:
        self._address = address
        self._start_step = start_step
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._line: Line | None = None
        self._heart: Heart | None = None
        self._go = threading.Event()
        self._port = 0
        self._own: list[Failure] = []
        self._failed_at: float | None = None  # monotonic
        self._told: Verdict | None = None
        self._hub_gone = False
        self._closed = False

    # -- Control ---------------------------------------------------------------------------------------

    def join(self) -> int:
        deadline = time.monotonic() + self._timeouts.rendezvous
        more: Message = {"start_step": self._start_step}
        self._line = find_main_node(self._address, self._timeouts.rendezvous, more)
        self._line.patience(self._timeouts.lost_after)
        threading.Thread(target=self._listen, name="gang-hub", daemon=True).start()
        self._heart = Heart(lambda: self._tell({"kind": "beat"}))
        # Node 0 ends the wait for all; this limit is for a node 0 that beats and does nothing else.
        while not self._go.wait(0.1):
            verdict = self.verdict()
            if verdict is not None and verdict.failure is not None:
                raise verdict.failure.error()
            if time.monotonic() > deadline + self._timeouts.rendezvous + self._timeouts.lost_after:
                raise lost(0, self._address.main_host, "it never said go").error()
        return self._port

    def fail(self, failure: Failure) -> None:
        with self._lock:
            self._note(failure)
        self._tell({"kind": "failed", "failure": failure.to_dict()})

    def part_stored(self, step: int) -> None:
        self._tell({"kind": "part", "step": step})

    def done(self) -> None:
        self._tell({"kind": "done"})

    def verdict(self) -> Verdict | None:
        with self._lock:
            if self._told is not None:
                return self._told
            if self._failed_at is None:
                return None
            # Node 0 decides. Without it, this node's own failures settle it after a while.
            wait = self._timeouts.settle * (1.0 if self._hub_gone else 2.0) + (
                0.0 if self._hub_gone else self._timeouts.lost_after
            )
            if time.monotonic() - self._failed_at >= wait:
                self._told = Verdict(root_cause(self._own))
            return self._told

    def whole_steps(self) -> list[int]:
        return []

    def others_done(self) -> bool:
        return True

    def parts_missing(self) -> bool:
        return False

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._heart is not None:
            self._heart.stop()
        self._tell({"kind": "bye"})
        if self._line is not None:
            self._line.close()

    # ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        line = self._line
        if line is None:
            return
        try:
            while (message := line.receive())["kind"] != "bye":
                self._heard(message)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = why_lost(error, self._timeouts.lost_after)
        else:
            why = "it left"
        with self._lock:
            self._hub_gone = True
            if not self._closed and self._told is None:
                self._note(lost(0, self._address.main_host, why))

    def _heard(self, message: Message) -> None:
        if message["kind"] == "go":
            self._port = int(message["port"])
            self._go.set()
        elif message["kind"] == "verdict":
            failure = message["failure"]
            with self._lock:
                self._told = self._told or Verdict(Failure.from_dict(failure) if failure else None)

    def _note(self, failure: Failure) -> None:
        """With the lock held."""
        self._own.append(failure)
        self._failed_at = self._failed_at or time.monotonic()

    def _tell(self, message: Message) -> None:
        if self._line is not None:
            self._line.send(message)


def find_main_node(address: NodeAddress, limit_s: float, more: Message) -> Line:
    """A connection to node 0 of this gang, found behind one of its candidate ports; ``more`` goes with hello.

    Raises NodeLost where there is none within ``limit_s``, UserError or the gang's failure when refused.
    """
    deadline = time.monotonic() + limit_s
    answers: dict[int, str] = {}  # by port
    while True:
        for port in address.ports:
            try:
                line = _shake_hands(address, port, more)
            except (OSError, ValueError, KeyError, TypeError) as error:
                answers.setdefault(port, str(error))
                continue
            if line is not None:
                return line
            answers[port] = "another gang listens there"
        if time.monotonic() > deadline:
            said = "; ".join(f"port {port}: {answer}" for port, answer in answers.items())
            why = f"it could not be reached within {limit_s:g} s ({said})"
            raise lost(0, address.main_host, why).error()
        time.sleep(0.2)


def _shake_hands(me: NodeAddress, port: int, more: Message) -> Line | None:
    """A connection to our node 0; None when it is another gang's."""
    connection = socket.create_connection((me.main_host, port), timeout=HANDSHAKE_S)
    line = Line(connection, HANDSHAKE_S)
    try:
        challenge = line.receive()
        nonce = secrets.token_hex(16)
        line.send(
            {
                **more,
                "kind": "hello",
                "node": me.node,
                "nodes": me.nodes,
                "host": socket.gethostname(),
                "nonce": nonce,
                "proof": proof(me.token, f"member {me.node} of {me.nodes}", str(challenge["nonce"])),
            }
        )
        answer = line.receive()
        if answer["kind"] == "welcome" and hmac_equal(answer["proof"], proof(me.token, "hub", nonce)):
            return line
        if answer["kind"] == "verdict":
            raise Failure.from_dict(answer["failure"]).error()
        if answer["kind"] == "refused" and answer["why"] != "token":
            raise UserError(f"Node 0 refused this node: {answer['why']}.")
    except BaseException:
        line.close()
        raise
    line.close()
    return None
