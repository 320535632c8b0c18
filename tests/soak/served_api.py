"""The HTTP API of a running server, with several keys."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.soak.reference import Reference

VERSION_HEADER = "x-adapter-version"


class ServedApi:
    """`keys` by name of their holder; any other name is a key that is not known."""

    def __init__(self, url: str, keys: dict[str, str], session: aiohttp.ClientSession) -> None:
        self._url, self._keys, self._session = url, keys, session

    def request(
        self, method: str, key: str, path: str, body: Any = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        head = {"Authorization": f"Bearer {self._keys.get(key, key)}"}
        return self._session.request(method, f"{self._url}/{path}", json=body, headers=head)

    async def post(self, key: str, path: str, **body: Any) -> tuple[int, Any]:
        return await self._call("POST", key, path, body)

    async def get(self, key: str, path: str) -> tuple[int, Any]:
        return await self._call("GET", key, path)

    async def metrics(self) -> dict[str, list[float]]:
        """Values by name, one for each replica; empty if they cannot be had now."""
        async with self.request("GET", "operator", "metrics") as response:
            text = await response.text() if response.status == 200 else ""
        found: dict[str, list[float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.value)
        return found

    async def is_ready(self) -> bool:
        async with self.request("GET", "operator", "ready") as response:
            return response.status == 200

    async def learn_versions(self, reference: Reference) -> dict[str, str]:
        """What the server calls each content."""
        versions = {}
        for content, path in reference.contents.items():
            _, found = await self.post("operator", "v1/validate_lora_adapter", lora_path=str(path))
            assert found["valid"], (content, found)
            versions[content] = found["version"]
        assert len(set(versions.values())) == len(versions)
        return versions

    async def unload_all(self) -> None:
        _, listed = await self.get("operator", "v1/adapters")
        for info in listed["data"]:
            status, said = await self.post("operator", "v1/unload_lora_adapter", lora_name=info["name"])
            assert status == 200, said

    async def _call(self, method: str, key: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON; of a load the version. 0 if there was no answer."""
        try:
            async with self.request(method, key, path, body) as response:
                said = await (response.json() if response.content_type == "application/json" else response.text())
                return response.status, response.headers.get(VERSION_HEADER, said)
        except (aiohttp.ClientError, TimeoutError) as error:
            return 0, f"{type(error).__name__}: {error}"
