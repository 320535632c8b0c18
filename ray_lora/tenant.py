"""Who may call: API keys, which adapters each may use, and how much."""

import hashlib
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Limits(BaseModel):
    """What one API key, or one adapter, may take of the server; None is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_concurrent_requests: int | None = Field(default=None, ge=1)
    """Completions under way at once; a request with two prompts and `n: 4` is eight."""
    max_queued_requests: int | None = Field(default=None, ge=1)
    """How many of those may be without their first token."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Prompt and generated tokens together, saved up for a minute at most."""


class Tenant(BaseModel):
    """A caller; by default one that may do everything."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = None
    """Shown in logs and errors; None for a caller without a key."""
    adapters: tuple[str, ...] = ("*",)
    """Names of the adapters it may use and see, `*` for any part of a name. The base model is everybody's."""
    may_load: bool = True
    """Whether it may load, replace and unload adapters of these names."""
    limits: Limits = Limits()

    def may_use(self, adapter: str) -> bool:
        """By the name alone, so the answer does not depend on which adapters there are."""
        return any(fnmatchcase(adapter, pattern) for pattern in self.adapters)

    @property
    def sees_everything(self) -> bool:
        return "*" in self.adapters


ANYONE = Tenant()
"""Whoever calls while no keys are configured, and other Ray applications, which are trusted."""


class ApiKey(Tenant):
    """A tenant that is known by the hash of its key."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")
    sha256: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = Field(min_length=1)
    """Hexadecimal, of one key or of several, as while one replaces another."""
    may_load: bool = False

    @field_validator("sha256", mode="before")
    @classmethod
    def _allow_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


def hash_key(key: str) -> str:
    """SHA-256 in hexadecimal, without salt and not slowed down: that protects guessable passwords, and no one can
    guess a key of 256 random bits, as `ray-lora key new` makes them."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
