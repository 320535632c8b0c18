"""What is told of every request once it has ended: a line in the log and, if configured, a trace."""

from collections.abc import Callable, Sequence

from ray_lora.config import EngineConfig
from ray_lora.request import GenerateRequest
from ray_lora.serve.request_log import log_request
from ray_lora.serve.request_record import RequestRecord
from ray_lora.serve.request_spans import make_tracer


class RequestObserver:
    """
    Args:
        decode: token ids -> text, for a log that shows prompts.

    Raises:
        ConfigError: traces cannot be sent.
    """

    def __init__(self, config: EngineConfig, decode: Callable[[Sequence[int]], str]) -> None:
        self._base = config.base_model_name
        self._decode = decode if config.enable_log_requests else None
        self._tracer = make_tracer(config)

    def watch(self, request: GenerateRequest) -> RequestRecord:
        """To be entered for as long as the request runs, and told of its chunks."""
        return RequestRecord(request, self._tell)

    def _tell(self, record: RequestRecord) -> None:
        log_request(record, self._base, self._decode)
        if self._tracer is not None:
            self._tracer.trace(record)
