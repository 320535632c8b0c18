"""Remote adapters: from a server on loopback, and from fsspec's file system in memory."""

import base64
import errno
import json
import logging
import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from safetensors.torch import load_file, save_file

from ray_lora.adapters import fetch as fetch_module
from ray_lora.adapters import fetch_files
from ray_lora.adapters.fetch import DRIVERS, fetch
from ray_lora.adapters.output_change import BaseLayers
from ray_lora.adapters.reader import AdapterReader
from ray_lora.adapters.store import AdapterStore
from ray_lora.architecture import Architecture
from ray_lora.errors import AdapterRejectedError, CapacityError, InvalidRequestError, NotFoundError, RayLoraError
from tests.file_server import FileServer, file_server

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SECRETS = ("hunter2", "Signature", "s3cret")


def no_base() -> BaseLayers:
    raise AssertionError("opened the base for a plain adapter")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(fetch_module, "FIRST_PAUSE_S", 0.01)
    with file_server() as server:
        yield server


@pytest.fixture
def reader(tmp_path: Path, arch: Architecture) -> AdapterReader:
    return AdapterReader(arch, AdapterStore(tmp_path / "store"), 64, no_base, fetch_retries=2)


def contents(reader: AdapterReader) -> list[str]:
    return [path.name for path in reader.store.directory.iterdir()]


def test_an_adapter_by_http_is_the_one_on_disk_and_only_its_two_files_are_asked_for(
    server: FileServer, reader: AdapterReader, adapter_dir: Path
) -> None:
    (adapter_dir / "optimizer.pt").write_bytes(b"x")
    url = server.put("adapters/mine", adapter_dir)
    manifest = reader.inspect(url + "/")
    assert manifest.source == url + "/"
    assert manifest.version == reader.inspect(str(adapter_dir)).version
    assert server.gets == [f"/adapters/mine/{CONFIG}", f"/adapters/mine/{WEIGHTS}"]
    assert {file.name for file in Path(manifest.path).iterdir() if file.suffix != ".shard"} == {CONFIG, WEIGHTS}
    assert contents(reader) == [manifest.version]


@pytest.mark.parametrize("fault", [500, 503, 429, 408, "cut"])
@pytest.mark.parametrize("num_faults", [1, 2])
def test_transient_faults_are_tried_again(
    fault: int | str, num_faults: int, server: FileServer, reader: AdapterReader, adapter_dir: Path
) -> None:
    url = server.put("mine", adapter_dir)
    server.faults = [fault] * num_faults
    reader.inspect(url)
    assert len(server.gets) == 2 + num_faults


def test_a_file_that_is_cut_every_time_is_never_used(
    server: FileServer, reader: AdapterReader, adapter_dir: Path
) -> None:
    url = server.put("mine", adapter_dir)
    server.faults = ["cut"] * 3
    with pytest.raises(InvalidRequestError, match=r"cannot be reached \(3 attempts") as caught:
        reader.inspect(url)
    assert caught.value.param == "lora_path"
    assert contents(reader) == []


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (400, InvalidRequestError, r"cannot be read \(status 400\)"),
        (401, InvalidRequestError, r"may not be read with the server's credentials \(status 401\)"),
        (403, InvalidRequestError, r"may not be read with the server's credentials \(status 403\)"),
        (404, NotFoundError, "does not exist"),
        (410, NotFoundError, "does not exist"),
    ],
)
def test_lasting_faults_are_not_tried_again(
    status: int, error: type[RayLoraError], message: str, server: FileServer, reader: AdapterReader, adapter_dir: Path
) -> None:
    url = server.put("mine", adapter_dir)
    server.faults = [status] * 3
    with pytest.raises(error, match=message) as caught:
        reader.inspect(url)
    assert caught.value.param == "lora_path"  # type: ignore[attr-defined]
    assert len(server.gets) == 1
    assert contents(reader) == []


def test_missing_weights_are_named(server: FileServer, reader: AdapterReader, adapter_dir: Path) -> None:
    (adapter_dir / WEIGHTS).rename(adapter_dir / "adapter_model.bin")
    url = server.put("mine", adapter_dir)
    with pytest.raises(AdapterRejectedError, match="is missing") as caught:
        reader.inspect(url)
    assert caught.value.param == WEIGHTS
    assert not any("adapter_model.bin" in path for path in server.gets)


def test_a_server_that_does_not_answer_is_given_up(
    server: FileServer, reader: AdapterReader, adapter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_files, "TIMEOUT_S", 0.2)
    url = server.put("mine", adapter_dir)
    server.faults = ["slow"] * 3
    with pytest.raises(InvalidRequestError, match=r"did not answer in time \(3 attempts"):
        reader.inspect(url)


def test_a_server_that_is_not_there_is_told(reader: AdapterReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "FIRST_PAUSE_S", 0.01)
    with file_server() as gone:
        pass
    with pytest.raises(InvalidRequestError, match="cannot be reached"):
        reader.inspect(f"http://{gone.address}/mine")


def test_the_size_is_checked_while_downloading(server: FileServer, reader: AdapterReader, adapter_dir: Path) -> None:
    url = server.put("mine", adapter_dir)
    server.files[f"/mine/{WEIGHTS}"] = bytes(64 << 20)
    reader.store.max_adapter_bytes = 1 << 20
    with pytest.raises(AdapterRejectedError, match="more than the 1048576 bytes") as caught:
        reader.inspect(url)
    assert caught.value.param == WEIGHTS
    assert server.num_bytes_sent < 32 << 20
    assert contents(reader) == []


def test_what_is_refused_leaves_nothing_behind(server: FileServer, reader: AdapterReader, adapter_dir: Path) -> None:
    config = json.loads((adapter_dir / CONFIG).read_text())
    (adapter_dir / CONFIG).write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(AdapterRejectedError, match="use_dora"):
        reader.inspect(server.put("mine", adapter_dir))
    assert contents(reader) == []


@pytest.mark.parametrize("fault", [None, 403, 404, 500, "cut"])
def test_credentials_are_used_and_never_shown(
    fault: int | str | None,
    server: FileServer,
    reader: AdapterReader,
    adapter_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    server.put("mine", adapter_dir)
    server.faults = [] if fault is None else [fault] * 3
    source = f"http://s3cret:hunter2@{server.address}/mine?Signature=abc"
    shown = ""
    try:
        shown = repr(reader.inspect(source))
    except RayLoraError as error:
        shown = "".join(traceback.format_exception(error)) + repr(pickle.loads(pickle.dumps(error)))
        assert fault is not None
    assert f"http://{server.address}/mine" in shown
    assert not any(secret in shown + caplog.text for secret in SECRETS)
    assert server.gets[0] == f"/mine/{CONFIG}?Signature=abc"
    assert server.authorizations[0] == "Basic " + base64.b64encode(b"s3cret:hunter2").decode()


def test_an_unknown_scheme_lists_the_known_ones(reader: AdapterReader) -> None:
    with pytest.raises(InvalidRequestError, match=r"ftp:// is not supported.*s3, gs, http, https, hf") as caught:
        reader.inspect("ftp://user:hunter2@host/x")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidRequestError, match="is not a URL"):
        reader.inspect("http://[bad")


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_missing_driver_is_named(
    scheme: str, package: str, reader: AdapterReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    fetch_files.filesystem.cache_clear()
    with pytest.raises(InvalidRequestError, match=f"pip install {package}") as caught:
        reader.inspect(f"{scheme}://bucket/mine")
    assert caught.value.param == "lora_path"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(DRIVERS, "memory", "fsspec")
    monkeypatch.setattr(fetch_module, "FIRST_PAUSE_S", 0.0)
    files = fsspec.filesystem("memory", use_listings_cache=False)
    yield files
    files.rm("/", recursive=True)


def put(memory: Any, adapter: Path) -> str:
    for file in adapter.iterdir():
        memory.pipe_file(f"/bucket/mine/{file.name}", file.read_bytes())
    return "memory://bucket/mine"


def test_any_file_system_of_fsspec_will_do(memory: Any, reader: AdapterReader, adapter_dir: Path) -> None:
    assert reader.inspect(put(memory, adapter_dir)).version == reader.inspect(str(adapter_dir)).version


def test_what_is_replaced_at_the_source_is_fetched_anew(memory: Any, reader: AdapterReader, adapter_dir: Path) -> None:
    first = reader.inspect(put(memory, adapter_dir)).version
    tensors = {name: tensor * 2 for name, tensor in load_file(adapter_dir / WEIGHTS).items()}
    save_file(tensors, adapter_dir / WEIGHTS)
    assert reader.inspect(put(memory, adapter_dir)).version != first


class ClientError(Exception):
    """As botocore and gcsfs raise them: with a status, or with one in a response."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__("Signature=abc")
        self.__dict__.update(attributes)


class EndpointConnectionError(type("HTTPClientError", (Exception,), {})):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    ("error", "message", "is_tried_again"),
    [
        (PermissionError("Signature=abc"), "credentials", False),
        (FileNotFoundError("Signature=abc"), "does not exist", False),
        (TimeoutError(), "in time", True),
        (ConnectionResetError(), "cannot be reached", True),
        (EndpointConnectionError(), "cannot be reached", True),
        (ClientError(code=503), "cannot be reached", True),
        (ClientError(code=403), "credentials", False),
        (ClientError(response=type("Response", (), {"status_code": 504})()), "in time", True),
        (ClientError(code="SlowDown"), "cannot be read", False),
        (OSError("Signature=abc"), "cannot be read", False),
    ],
    ids=repr,
)
def test_a_drivers_errors_become_ours(
    error: Exception, message: str, is_tried_again: bool, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail(*_: Any, **__: Any) -> None:
        calls.append(1)
        raise error

    monkeypatch.setattr(type(memory), "get_file", fail)
    source = "memory://bucket/mine?Signature=abc"
    with pytest.raises((InvalidRequestError, NotFoundError), match=message) as caught:
        fetch(source, tmp_path, 1 << 20, retries=3)
    assert len(calls) == (4 if is_tried_again else 1)
    assert caught.value.param == "lora_path"
    assert "Signature" not in "".join(traceback.format_exception(caught.value))


def test_a_full_disk_is_a_lack_of_capacity(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(memory), "get_file", fail)
    with pytest.raises(CapacityError, match="adapter_store_dir"):
        fetch("memory://bucket/mine", tmp_path, 1 << 20, retries=3)


def test_pauses_double_up_to_a_limit(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(fetch_module, "FIRST_PAUSE_S", 0.5)
    monkeypatch.setattr(fetch_module.time, "sleep", pauses.append)
    monkeypatch.setattr(fetch_module.random, "uniform", lambda _, high: high)
    monkeypatch.setattr(type(memory), "get_file", lambda *_, **__: (_ for _ in ()).throw(TimeoutError()))
    with pytest.raises(InvalidRequestError, match="7 attempts"):
        fetch("memory://bucket/mine", tmp_path, 1 << 20, retries=6)
    assert pauses == [0.5, 1, 2, 4, 8, 8]
