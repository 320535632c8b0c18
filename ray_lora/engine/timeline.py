"""When a completion got how far."""

from dataclasses import dataclass


@dataclass(slots=True)
class Timeline:
    """Seconds of `time.monotonic`; 0 where the completion has not got yet."""

    arrived_at: float = 0.0
    queued_at: float = 0.0
    """Its adapter was in host memory."""
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
