"""The connections between an executor and its ranks: whole messages, the right peers, and ends that are noticed."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ray_lora.cluster.step_link import Invitation, RankLink, StepHub


def echo(link: RankLink, rank: int) -> None:
    while (message := link.receive()) is not None:
        link.send(bytes([rank]) + message)


@contextmanager
def linked(num_ranks: int, serve: Callable[[RankLink, int], None] = echo, timeout_s: float = 20) -> Iterator[StepHub]:
    """A hub, and a thread for each rank."""
    hub = StepHub("127.0.0.1", num_ranks, timeout_s)

    def run(rank: int) -> None:
        with RankLink(hub.invitation, rank) as link:
            serve(link, rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    hub.accept(10)
    yield hub
    hub.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), "a rank is let go when the hub closes"


@pytest.mark.parametrize("size", [0, 1, 800, 100_000, 5_000_000])
def test_answers_come_back_by_rank(size: int) -> None:
    message = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    with linked(3) as hub:
        for _ in range(3):
            assert hub.exchange(message) == [bytes([rank]) + message for rank in range(3)]


def test_who_does_not_know_the_token_is_not_a_rank() -> None:
    hub = StepHub("127.0.0.1", 1, 5)
    strangers = [
        RankLink(Invitation(hub.invitation.address, b"0" * 32), 0),
        RankLink(Invitation(hub.invitation.address, hub.invitation.token), 1),
    ]
    link = RankLink(hub.invitation, 0)
    hub.accept(10)
    for stranger in strangers:
        with stranger:
            assert stranger.receive() is None
    rank = threading.Thread(target=echo, args=(link, 0))
    rank.start()
    assert hub.exchange(b"plan") == [b"\0plan"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(hub.invitation.address, 1)
    hub.close()
    with link:
        rank.join(5)


def test_a_rank_that_ends_is_noticed_at_once_though_another_still_works() -> None:
    release = threading.Event()

    def serve(link: RankLink, rank: int) -> None:
        link.receive()
        if rank == 0:
            release.wait(10)

    with linked(2, serve) as hub:
        begin = time.monotonic()
        with pytest.raises(EOFError, match="rank 1 is gone"):
            hub.exchange(b"plan")
        assert time.monotonic() - begin < 5
        release.set()


def test_a_rank_that_never_answers_is_a_timeout() -> None:
    def serve(link: RankLink, rank: int) -> None:
        while rank == 1 and link.receive() is not None:
            pass
        echo(link, rank)

    with linked(2, serve, timeout_s=0.3) as hub, pytest.raises(TimeoutError, match=r"0\.3 s"):
        hub.exchange(b"plan")


def test_an_exchange_that_is_broken_off_ends_with_an_error() -> None:
    arrived = threading.Event()

    def serve(link: RankLink, rank: int) -> None:
        while link.receive() is not None:
            arrived.set()

    with linked(2, serve) as hub:

        def break_off() -> None:
            arrived.wait(10)
            hub.break_off()

        breaker = threading.Thread(target=break_off)
        breaker.start()
        with pytest.raises((EOFError, OSError)):
            hub.exchange(b"plan")
        breaker.join()
        hub.break_off()


def test_a_rank_that_never_connects_is_a_timeout() -> None:
    hub = StepHub("127.0.0.1", 2, 5)
    with RankLink(hub.invitation, 0), pytest.raises(TimeoutError):
        hub.accept(0.2)
    hub.close()


def test_the_token_is_not_shown() -> None:
    hub = StepHub("127.0.0.1", 1, 5)
    assert str(hub.invitation.token) not in repr(hub.invitation)
    hub.close()
