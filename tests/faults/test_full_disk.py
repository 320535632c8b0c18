"""The disk under the adapter store is full: a load is refused, nothing is left of it, and the service goes on."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import NUM_TOKENS
from tests.faults.served_app import App
from tests.faults.traffic import Traffic, learn
from tests.tiny import expected_tokens, make_adapter

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [5, 6, 7]


@pytest.mark.parametrize("bytes_left", [0, 20_000], ids=["nothing fits", "a part fits"])
def test_a_load_that_finds_the_disk_full_is_refused_and_works_once_there_is_room(
    bytes_left: int,
    app: App,
    store: Path,
    checkpoint: Path,
    traffic: Traffic,
    tell: Callable[[object], None],
    tmp_path: Path,
) -> None:
    if not os.path.ismount(store):
        pytest.skip("needs root, for a small file system")
    adapter = make_adapter(tmp_path / "new", checkpoint, 11)
    assert (adapter / "adapter_model.safetensors").stat().st_size > 2 * bytes_left
    filler = store / "filler"
    filler.write_bytes(b"x" * (os.statvfs(store).f_bavail * os.statvfs(store).f_frsize - bytes_left))
    before = sorted(path.name for path in store.iterdir())
    traffic.mark_fault()
    refused = app.load("new", adapter)
    traffic.wait_until_steady(120)
    tell(f"refused with {refused.status_code}: {refused.json()['error']['message']}")
    assert refused.status_code == 429
    assert refused.json()["error"]["message"] == f"no space left in adapter_store_dir {store}"
    assert sorted(path.name for path in store.iterdir()) == before, "nothing is left of it"
    filler.unlink()
    app.load("new", adapter).raise_for_status()
    (question,) = learn(app.url, ["new"], [PROMPT], NUM_TOKENS)
    assert question.tokens == expected_tokens(checkpoint, adapter, [PROMPT], NUM_TOKENS)[0]
    app.unload("new").raise_for_status()
    tell(traffic.report)
    app.check_healed(traffic.report)
    assert traffic.report.num_answered == traffic.report.num_sent, "nobody else is touched"
