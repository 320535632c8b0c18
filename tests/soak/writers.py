"""Those who change what adapters a server has."""

import random
from typing import Any

from tests.soak.ledger import Ledger, WrongAnswerError
from tests.soak.reference import Reference
from tests.soak.served_api import ServedApi


class Writers:
    """Each method is one change or look, at random; `versions` of all contents."""

    def __init__(
        self, api: ServedApi, ledger: Ledger, reference: Reference, versions: dict[str, str], rng: random.Random
    ) -> None:
        self._api, self._ledger, self._reference, self._versions, self._rng = api, ledger, reference, versions, rng

    async def point(self) -> None:
        """Load a name, new or known, with any content."""
        name = self._rng.choice(list(self._ledger.names.values()))
        content = self._rng.choice(list(self._versions))
        version = self._versions[content]
        async with name.lock, name.becoming(version) as settle:
            body: dict[str, Any] = {"lora_name": name.name, "lora_path": str(self._reference.contents[content])}
            status, said = await self._api.post("operator", "v1/load_lora_adapter", load_inplace=True, **body)
            if 0 < status < 500:
                settle(status == 200)
            if status == 200 and said != version:
                raise WrongAnswerError(f"loading {content} as {name.name} gave {said}, not {version}")
        self._ledger.judge("load", status, {200, 429}, f"{name.name} {content} {said}")

    async def unload(self) -> None:
        name = self._rng.choice(list(self._ledger.names.values()))
        async with name.lock:
            before = name.possible
            async with name.becoming(None) as settle:
                status, said = await self._api.post("operator", "v1/unload_lora_adapter", lora_name=name.name)
                if 0 < status < 500:
                    settle(status in (200, 404))
        right = {404 if each is None else 200 for each in before}
        self._ledger.judge("unload", status, right, f"{name.name} {before} {said}")

    async def pin(self) -> None:
        name = self._rng.choice(list(self._ledger.names.values()))
        verb = self._rng.choice(["pin", "unpin", "unpin", "weight"])
        async with name.lock:
            right = {404 if each is None else 200 for each in name.possible}
            if verb == "pin":
                right |= {429}
            body = {"weight": 2.0} if verb == "weight" else {}
            status, said = await self._api.post("operator", f"v1/adapters/{name.name}/{verb}", **body)
        self._ledger.judge(verb, status, right, f"{name.name} {said}")

    async def look(self) -> None:
        """The list has each name that must be there, at a version that it may have."""
        begins = {name: self._ledger.begin(name) for name in self._ledger.names}
        status, listed = await self._api.get("operator", "v1/adapters")
        self._ledger.judge("list", status, {200}, str(listed))
        if status == 200:
            found = {info["name"]: info["version"] for info in listed["data"]}
            for name, begin in begins.items():
                possible = self._ledger.names[name].versions[begin:]
                if found.get(name) not in possible:
                    raise WrongAnswerError(f"listed: {name} as {found.get(name)}, which may be {possible}")

    async def validate(self) -> None:
        content = self._rng.choice(list(self._versions))
        path = str(self._reference.contents[content])
        status, said = await self._api.post("operator", "v1/validate_lora_adapter", lora_path=path)
        self._ledger.judge("validate", status, {200, 429}, f"{content} {said}")
        if status == 200 and said["version"] != self._versions[content]:
            raise WrongAnswerError(f"validating {content} gave {said}, not {self._versions[content]}")

    async def load_badly(self) -> None:
        good = str(self._reference.contents["plain"])
        status, key, body = self._rng.choice(
            [
                (404, "operator", {"lora_name": "bad", "lora_path": "/no/such/directory"}),
                (400, "operator", {"lora_name": "bad", "lora_path": str(self._reference.model)}),
                (400, "operator", {"lora_name": "bad"}),
                (403, "acme", {"lora_name": "bad", "lora_path": good}),
                (403, "busy", {"lora_name": "bad", "lora_path": good}),
                (401, "nobody", {"lora_name": "bad", "lora_path": good}),
            ]
        )
        got, said = await self._api.post(key, "v1/load_lora_adapter", **body)
        self._ledger.judge("bad load", got, {status}, f"{key} {body} {said}")
