"""Who a caller over HTTP is, and where that is not enough."""

import json
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ray_lora.errors import AuthenticationError, PermissionDeniedError, RayLoraError
from ray_lora.serve.http_errors import error_response
from ray_lora.serve.key_ring import KeyRing
from ray_lora.tenant import ANYONE, Tenant

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Probes have no keys, and learn nothing."""

OPERATOR_PATHS = frozenset({"/metrics"})
"""They name every adapter."""


class Authentication:
    """Lets in who has a key, wherever it leads, also to paths that do not exist; everybody if no keys are configured.

    Pure ASGI, so that a stream passes through untouched.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            state = scope.setdefault("state", {})
            try:
                state["tenant"] = self._identify(scope)
            except RayLoraError as error:
                state["error"] = error
                return await error_response(error)(scope, receive, send)
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope) -> Tenant:
        path = path_of(scope)
        if path in OPEN_PATHS or not self._keys.is_needed:
            return ANYONE
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError("An API key is needed: send the header 'Authorization: Bearer KEY'.")
        tenant = self._keys.find(key.strip())
        if tenant is None:
            raise AuthenticationError("The API key is not known.")
        if path in OPERATOR_PATHS and not tenant.sees_everything:
            raise PermissionDeniedError(f"{path} tells of all adapters; API key '{tenant.name}' may see only its own.")
        return tenant


def path_of(scope: Scope) -> str:
    """As the routes have it, wherever the application is mounted."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path


def tenant_of(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


class AdapterChanges:
    """A dependency of all routes under which adapters are: those that change anything need permission.

    What it answers about an adapter depends on its name alone, and so tells nobody whether that adapter exists.
    """

    def __init__(self, is_allowed: bool) -> None:
        self._is_allowed = is_allowed

    async def __call__(self, request: Request) -> None:
        if request.method in ("GET", "HEAD"):
            return
        if not self._is_allowed:
            raise PermissionDeniedError(
                "Adapters cannot be changed over HTTP here. To allow it, start the server with "
                "'allow_runtime_lora_updating: true', or VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment."
            )
        tenant = tenant_of(request)
        if not tenant.may_load:
            raise PermissionDeniedError(f"API key '{tenant.name}' may not change adapters: it has no 'may_load'.")
        name = request.path_params.get("name") or _lora_name(await request.body())
        if isinstance(name, str) and not tenant.may_use(name):
            names = ", ".join(tenant.adapters) or "none"
            raise PermissionDeniedError(
                f"API key '{tenant.name}' may not change an adapter named '{name}'; its adapters are {names}."
            )


def _lora_name(body: bytes) -> Any:
    """The adapter that a body is about; what is wrong with the body, the route will say."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return data.get("lora_name") if isinstance(data, dict) else None
