"""How a step's plan reaches the ranks and their answers come back: a TCP connection to each rank.

Waiting costs no CPU on either side, and a rank that dies is noticed at once, for its connection ends. (A compiled graph
of Ray waits in a loop: it kept two thirds of a core busy on every idle rank, and took four times as long.)
"""

import hmac
import secrets
import selectors
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field

_LENGTH = struct.Struct("<Q")
_GREETING = struct.Struct("<32sI")
GREETING_TIMEOUT_S = 5.0
"""A connection that has not shown the token by then is dropped."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where the ranks connect, and the token by which the hub knows them."""

    address: tuple[str, int]
    token: bytes = field(repr=False)


class StepHub:
    """The executor's end, with a connection to each of `num_ranks` ranks once `accept` has returned."""

    def __init__(self, host: str, num_ranks: int, timeout_s: float) -> None:
        """
        Args:
            host: an address of this host that the ranks can reach.
            timeout_s: how long an exchange may take.
        """
        self._server = socket.create_server((host, 0))
        self.invitation = Invitation((host, self._server.getsockname()[1]), secrets.token_bytes(32))
        self._connections: list[socket.socket | None] = [None] * num_ranks
        self._selector = selectors.DefaultSelector()
        self._timeout_s = timeout_s

    def accept(self, timeout_s: float) -> None:
        """Wait for every rank, then listen no more.

        Raises:
            TimeoutError: a rank did not come.
        """
        deadline = time.monotonic() + timeout_s
        with self._server:
            while None in self._connections:
                self._server.settimeout(max(0.001, deadline - time.monotonic()))
                connection, _ = self._server.accept()
                rank = self._greeted_by(connection)
                if rank is None:
                    connection.close()
                    continue
                _prepare(connection, self._timeout_s)
                self._selector.register(connection, selectors.EVENT_READ, rank)
                self._connections[rank] = connection

    def exchange(self, message: bytes) -> list[bytes]:
        """Send the message to every rank; their answers, by rank.

        Raises:
            EOFError, OSError: a rank is gone. TimeoutError: one has not answered in time.
        """
        frame = _LENGTH.pack(len(message)) + message
        for connection in self._connections:
            assert connection is not None, "accept comes first"
            connection.sendall(frame)
        answers: dict[int, bytes] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(answers) < len(self._connections):
            ready = self._selector.select(deadline - time.monotonic())
            if not ready:
                raise TimeoutError(f"no answer within {self._timeout_s} s")
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                answer = _receive(key.fileobj)
                if answer is None:
                    raise EOFError(f"rank {key.data} is gone")
                answers[key.data] = answer
        return [answers[rank] for rank in range(len(self._connections))]

    def break_off(self) -> None:
        """End an exchange that another thread waits for, with an error there; none is possible afterwards."""
        for connection in self._connections:
            if connection is not None:
                with suppress(OSError):  # it has ended already
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let the ranks go: their `receive` returns None."""
        self._selector.close()
        self._server.close()
        for connection in self._connections:
            if connection is not None:
                connection.close()

    def _greeted_by(self, connection: socket.socket) -> int | None:
        """The rank on the other side; None if it is not one of ours."""
        connection.settimeout(GREETING_TIMEOUT_S)
        try:
            greeting = _read(connection, _GREETING.size)
        except OSError:
            return None
        if greeting is None:
            return None
        token, rank = _GREETING.unpack(greeting)
        is_ours = hmac.compare_digest(token, self.invitation.token)
        return rank if is_ours and rank < len(self._connections) and self._connections[rank] is None else None


class RankLink:
    """A rank's end; a context manager that closes it."""

    def __init__(self, invitation: Invitation, rank: int) -> None:
        self._connection = socket.create_connection(invitation.address)
        _prepare(self._connection, None)
        self._connection.sendall(_GREETING.pack(invitation.token, rank))

    def __enter__(self) -> "RankLink":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def receive(self) -> bytes | None:
        """The next message; None when the hub has closed."""
        try:
            return _receive(self._connection)
        except ConnectionError:
            return None

    def send(self, message: bytes) -> None:
        self._connection.sendall(_LENGTH.pack(len(message)) + message)


def _prepare(connection: socket.socket, timeout_s: float | None) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(timeout_s)


def _receive(connection: socket.socket) -> bytes | None:
    """A message; None if the other side has closed."""
    length = _read(connection, _LENGTH.size)
    return None if length is None else _read(connection, _LENGTH.unpack(length)[0])


def _read(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)
