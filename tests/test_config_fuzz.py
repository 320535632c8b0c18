"""Whatever a deployment's `args` hold is a configuration or one line that says why not."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError
from tests.arbitrary_json import EFFORTS, JSON, SCALARS, TEXTS, mutated

VALID = {
    "model": "/models/tiny",
    "max_loras": 4,
    "lora_modules": [{"name": "a", "path": "/adapters/a"}, "b=/adapters/b"],
    "api_keys": [{"name": "team", "sha256": "0" * 64, "adapters": ["team-*"], "limits": {"tokens_per_minute": 9}}],
    "adapter_limits": {"*": {"max_concurrent_requests": 4}},
    "queue_timeout_s": 1.5,
    "request_timeout_s": 30,
}
KEYS = st.sampled_from(list(EngineConfig.model_fields))
ARGS = (
    st.dictionaries(SCALARS | TEXTS, JSON, max_size=3)
    | st.dictionaries(KEYS, JSON, max_size=4).map(lambda fields: {"model": "m", **fields})
    | mutated(VALID, KEYS)
)


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_args_are_a_configuration_or_refused_in_one_line(effort: settings) -> None:
    @effort
    @given(ARGS)
    @example({None: None})
    @example({"model": "m", "adapter_limits": {"a\nb": 1}})
    def check(args: dict[Any, Any]) -> None:
        message = "none"
        try:
            assert isinstance(EngineConfig.parse(args), EngineConfig)
        except ConfigError as error:
            message = str(error)
        assert len(message.encode().splitlines()) == 1

    check()
