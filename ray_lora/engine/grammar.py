"""What the engine needs to keep a completion within a grammar."""

from typing import Protocol


class Grammar(Protocol):
    """How far one completion has come in its grammar."""

    @property
    def allowed(self) -> bytes:
        """The tokens that may come next: bit `i % 8` of byte `i // 8` for token `i`."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on after a token that was allowed.

        Raises:
            InvalidRequestError: the grammar is too complex to go on.
        """
        ...

    def copy(self) -> "Grammar":
        """One more completion at the same place."""
        ...
