"""One line in the log for every request that has ended, as `key=value` pairs (logfmt)."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ray_lora.serve.request_record import RequestRecord

logger = logging.getLogger("ray.serve")

_BARE = re.compile(r"[\w.:/@+,-]+")


def log_request(record: RequestRecord, base: str, decode: Callable[[Sequence[int]], str] | None = None) -> None:
    """
    Args:
        base: the base model's name.
        decode: token ids -> text, if the line shall show what was asked; otherwise it shows numbers and names alone.
    """
    request, metrics = record.request, record.metrics
    pairs: dict[str, Any] = {
        "request_id": request.request_id,
        "status": record.status,
        "model": base,
        "adapter": request.adapter,
        "adapter_version": record.adapter_version and record.adapter_version[:12],
        "key_name": request.key_name,
        "finish_reason": ",".join(record.finish_reasons),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "e2e_s": (record.end_ns - record.begin_ns) / 1e9,
    }
    if metrics is not None:
        pairs |= {
            "load_wait_s": metrics.load_wait_s,
            "queue_s": metrics.queue_s,
            "ttft_s": metrics.time_to_first_token_s,
        }
    if record.retry_cause is not None:
        pairs |= {"retries": 1, "retry_cause": str(record.retry_cause)}
    if record.error is not None:
        pairs["error"] = f"{type(record.error).__name__}: {record.error}"
    if decode is not None:
        prompt = request.prompt
        pairs["prompt"] = prompt if isinstance(prompt, str) else decode(prompt)
        pairs["sampling_params"] = json.dumps(asdict(request.sampling_params))
    log_pairs(pairs)


def log_pairs(pairs: Mapping[str, Any]) -> None:
    """The line of one request."""
    logger.info("request %s", logfmt(pairs))


def logfmt(pairs: Mapping[str, Any]) -> str:
    """`None` and the empty string are left out; what has spaces or quotes is quoted as JSON does.

    Whoever has made up a value, it cannot end the line or steer a terminal: what is not printable is escaped.
    """
    return " ".join(f"{key}={_value(value)}" for key, value in pairs.items() if value not in (None, ""))


def _value(value: Any) -> str:
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    if _BARE.fullmatch(text):
        return text
    return "".join(
        each if each.isprintable() else json.dumps(each)[1:-1] for each in json.dumps(text, ensure_ascii=False)
    )
