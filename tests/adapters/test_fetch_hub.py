"""`hf://` against a server on loopback that speaks the hub's part for two files."""

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from ray_lora.adapters import fetch as fetch_module
from ray_lora.adapters.output_change import BaseLayers
from ray_lora.adapters.reader import AdapterReader
from ray_lora.adapters.store import AdapterStore
from ray_lora.architecture import Architecture
from ray_lora.errors import AdapterRejectedError, InvalidRequestError, NotFoundError
from tests.file_server import FileServer, file_server

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(FileServer):
    def publish(self, adapter: Path, revision: str = "main", folder: str = "") -> None:
        """One commit of the repository `team/adapters`, with a pickle beside the adapter."""
        sizes = {folder + file.name: file.stat().st_size for file in adapter.iterdir()} | {"pytorch_model.bin": 9}
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        info = {"id": "team/adapters", "sha": COMMIT, "siblings": siblings}
        suffix = "" if revision == "main" else f"/revision/{revision}"
        self.files[f"/api/models/team/adapters{suffix}"] = json.dumps(info).encode()
        for file in adapter.iterdir():
            self.files[f"/team/adapters/resolve/{COMMIT}/{folder}{file.name}"] = file.read_bytes()
        self.headers = {"X-Repo-Commit": COMMIT, "ETag": '"an-etag"'}


def no_base() -> BaseLayers:
    raise AssertionError("opened the base for a plain adapter")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with file_server(Hub) as server:
        url = f"http://{server.address}"
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(fetch_module, "FIRST_PAUSE_S", 0.01)
        yield server


@pytest.fixture
def reader(tmp_path: Path, arch: Architecture) -> AdapterReader:
    return AdapterReader(arch, AdapterStore(tmp_path / "store"), 64, no_base, fetch_retries=1)


@pytest.mark.parametrize(
    ("source", "revision", "folder"),
    [
        ("hf://team/adapters", "main", ""),
        ("hf://team/adapters@v2", "v2", ""),
        ("hf://team/adapters@v2/legal/de/", "v2", "legal/de/"),
    ],
)
def test_an_adapter_from_the_hub_is_the_one_on_disk(
    source: str, revision: str, folder: str, hub: Hub, reader: AdapterReader, adapter_dir: Path
) -> None:
    hub.publish(adapter_dir, revision, folder)
    assert reader.inspect(source).version == reader.inspect(str(adapter_dir)).version
    fetched = {path.rpartition("/")[2] for path in hub.gets if "/resolve/" in path}
    assert fetched == {CONFIG, WEIGHTS}
    assert len(list(reader.store.directory.iterdir())) == 1


def test_a_missing_repository_is_not_found(hub: Hub, reader: AdapterReader) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        reader.inspect("hf://team/adapters")


def test_transient_faults_are_tried_again(hub: Hub, reader: AdapterReader, adapter_dir: Path) -> None:
    hub.publish(adapter_dir)
    hub.faults = [500]
    reader.inspect("hf://team/adapters")


def test_a_gated_repository_asks_for_credentials(hub: Hub, reader: AdapterReader, adapter_dir: Path) -> None:
    hub.publish(adapter_dir)
    hub.faults = [403] * 9
    with pytest.raises(InvalidRequestError, match="credentials"):
        reader.inspect("hf://team/adapters")


def test_missing_weights_are_named(hub: Hub, reader: AdapterReader, adapter_dir: Path) -> None:
    (adapter_dir / WEIGHTS).unlink()
    hub.publish(adapter_dir)
    with pytest.raises(AdapterRejectedError, match="is missing") as caught:
        reader.inspect("hf://team/adapters")
    assert caught.value.param == WEIGHTS


def test_the_size_is_checked_before_anything_is_downloaded(hub: Hub, reader: AdapterReader, adapter_dir: Path) -> None:
    hub.publish(adapter_dir)
    reader.store.max_adapter_bytes = 1000
    with pytest.raises(AdapterRejectedError, match="more than the 1000"):
        reader.inspect("hf://team/adapters")
    assert not any("/resolve/" in path for path in hub.gets)


@pytest.mark.parametrize("source", ["hf://adapters", "hf://", "hf://team/adapters@"])
def test_another_form_is_refused(source: str, reader: AdapterReader) -> None:
    with pytest.raises(InvalidRequestError, match="is not of the form"):
        reader.inspect(source)
