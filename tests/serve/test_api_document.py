"""What the server says of its API at `/openapi.json` is so, whatever is asked of it (by schemathesis)."""

from typing import Any

import httpx
import pytest
import schemathesis
from conftest import Server
from hypothesis import given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.arbitrary_json import EFFORTS

HELD = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
OPERATIONS = {
    "/detokenize": "post",
    "/health": "get",
    "/metrics": "get",
    "/ready": "get",
    "/tokenize": "post",
    "/v1/adapters": "get",
    "/v1/adapters/{name}": "get",
    "/v1/adapters/{name}/pin": "post",
    "/v1/adapters/{name}/unpin": "post",
    "/v1/adapters/{name}/weight": "post",
    "/v1/chat/completions": "post",
    "/v1/completions": "post",
    "/v1/load_lora_adapter": "post",
    "/v1/models": "get",
    "/v1/models/{model}": "get",
    "/v1/unload_lora_adapter": "post",
    "/v1/validate_lora_adapter": "post",
}


def test_every_route_is_in_the_document(server: Server, http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {(path, method) for path, methods in paths.items() for method in methods} == set(OPERATIONS.items())
    for path, method in OPERATIONS.items():
        operation = paths[path][method]
        assert operation["summary"]
        has_body = method == "post" and not path.endswith("pin")
        assert ("requestBody" in operation) == has_body
        assert "422" not in operation["responses"]


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("path", OPERATIONS)
def test_answers_are_as_documented(
    path: str, effort: settings, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fake_engine.TROUBLE", {})
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")

    @effort
    @given(document[path][OPERATIONS[path].upper()].as_strategy())
    def check(case: Any) -> None:
        case.validate_response(case.call(timeout=20), checks=HELD)

    check()
