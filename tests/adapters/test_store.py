import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ray_lora.adapters import store as store_module
from ray_lora.adapters.store import AdapterStore
from ray_lora.errors import AdapterRejectedError, CapacityError, ConfigError, InvalidRequestError, NotFoundError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "store")


def edit_config(directory: Path, **fields: Any) -> None:
    file = directory / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_copy_holds_the_two_files_and_nothing_else(store: AdapterStore, adapter_dir: Path) -> None:
    (adapter_dir / "README.md").write_text("x")
    (adapter_dir / "optimizer.pt").write_text("x")
    copy = store.add(adapter_dir)
    assert copy.parent == store.directory
    assert len(bytes.fromhex(copy.name)) == 32
    assert sorted(file.name for file in copy.iterdir()) == [CONFIG, WEIGHTS]
    assert (copy / WEIGHTS).read_bytes() == (adapter_dir / WEIGHTS).read_bytes()


def test_changes_to_the_source_do_not_reach_the_copy(store: AdapterStore, adapter_dir: Path) -> None:
    before = (adapter_dir / WEIGHTS).read_bytes()
    copy = store.add(adapter_dir)
    with (adapter_dir / WEIGHTS).open("r+b") as file:
        file.truncate(10)
    shutil.rmtree(adapter_dir)
    assert (copy / WEIGHTS).read_bytes() == before


def test_equal_content_is_one_version_whatever_the_path_and_the_inert_fields(
    store: AdapterStore, adapter_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(adapter_dir, other)
    edit_config(
        other,
        inference_mode=True,
        base_model_name_or_path="elsewhere",
        revision="main",
        lora_dropout=0.1,
        peft_version="9",
        target_modules=["down_proj", "q_proj"],
        lora_alpha=8.0,
    )
    assert store.add(adapter_dir) == store.add(other)
    assert len(list(store.directory.iterdir())) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_alpha": 9},
        {"use_rslora": True},
        {"layers_to_transform": [0, 1]},
        {"alpha_pattern": {"q_proj": 1, ".*": 2}},
        {"alpha_pattern": {".*": 2, "q_proj": 1}},
    ],
    ids=str,
)
def test_fields_that_change_the_result_make_another_version(
    fields: dict[str, Any], store: AdapterStore, adapter_dir: Path
) -> None:
    first = store.add(adapter_dir)
    edit_config(adapter_dir, alpha_pattern={"q_proj": 1, "down_proj": 2})
    second = store.add(adapter_dir)
    edit_config(adapter_dir, **fields)
    assert len({first, second, store.add(adapter_dir)}) == 3


def test_one_changed_bit_of_the_weights_makes_another_version(store: AdapterStore, adapter_dir: Path) -> None:
    first = store.add(adapter_dir)
    tensors = {name: tensor.clone() for name, tensor in load_file(adapter_dir / WEIGHTS).items()}
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, adapter_dir / WEIGHTS)
    assert store.add(adapter_dir) != first


def test_links_are_followed_and_the_copy_is_regular(store: AdapterStore, adapter_dir: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in (CONFIG, WEIGHTS):
        (linked / name).symlink_to(adapter_dir / name)
    copy = store.add(linked)
    assert not any(file.is_symlink() for file in copy.iterdir())


@pytest.mark.parametrize("name", ["missing", "missing/deeper", "nul\0byte", "x" * 5000])
def test_a_path_that_does_not_exist_is_not_found(name: str, store: AdapterStore, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        store.add(tmp_path / name)
    assert caught.value.param == "lora_path"


def test_a_path_that_is_a_file_is_an_invalid_request(store: AdapterStore, adapter_dir: Path) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        store.add(adapter_dir / CONFIG)
    assert caught.value.param == "lora_path"


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_missing_file_is_named(name: str, store: AdapterStore, adapter_dir: Path) -> None:
    (adapter_dir / name).unlink()
    with pytest.raises(AdapterRejectedError, match="missing") as caught:
        store.add(adapter_dir)
    assert caught.value.param == name


def test_a_pickle_is_refused_by_name(store: AdapterStore, adapter_dir: Path) -> None:
    (adapter_dir / WEIGHTS).rename(adapter_dir / "adapter_model.bin")
    with pytest.raises(AdapterRejectedError, match="safe_serialization") as caught:
        store.add(adapter_dir)
    assert caught.value.param == "adapter_model.bin"


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_only_regular_files_are_copied(make: Any, name: str, store: AdapterStore, adapter_dir: Path) -> None:
    (adapter_dir / name).unlink()
    make(adapter_dir / name)
    with pytest.raises(AdapterRejectedError, match="not a regular file") as caught:
        store.add(adapter_dir)
    assert caught.value.param == name


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_oversize_files_are_refused(
    name: str, store: AdapterStore, adapter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == CONFIG:
        monkeypatch.setattr(store_module, "MAX_CONFIG_BYTES", 100)
    else:
        store.max_adapter_bytes = 100
    with pytest.raises(AdapterRejectedError, match="more than the 100") as caught:
        store.add(adapter_dir)
    assert caught.value.param == name


def append(file: Path) -> None:
    with file.open("ab") as writer:
        writer.write(b" ")


def replace(file: Path) -> None:
    copy = file.with_suffix(".new")
    shutil.copy2(file, copy)
    copy.rename(file)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("change", [append, replace, Path.touch, Path.unlink])
def test_a_source_that_changes_meanwhile_is_refused(
    change: Any, name: str, store: AdapterStore, adapter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file is being copied at that time, since both must belong together."""
    copy_bytes = store_module._copy_bytes

    def copy_then_change(*arguments: Any) -> None:
        copy_bytes(*arguments)
        if arguments[2] == (adapter_dir / WEIGHTS).stat().st_size:
            change(adapter_dir / name)

    monkeypatch.setattr(store_module, "_copy_bytes", copy_then_change)
    with pytest.raises(AdapterRejectedError, match="changed while") as caught:
        store.add(adapter_dir)
    assert caught.value.param == name
    assert list(store.directory.iterdir()) == []


@pytest.mark.parametrize("full_at", ["_copy_bytes", "tempfile.mkdtemp"])
def test_a_full_disk_is_a_lack_of_capacity(
    full_at: str, store: AdapterStore, adapter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"{store_module.__name__}.{full_at}", full)
    with pytest.raises(CapacityError, match="adapter_store_dir"):
        store.add(adapter_dir)


def test_what_the_check_refuses_leaves_nothing_behind(store: AdapterStore, adapter_dir: Path) -> None:
    seen = []

    def check(copy: Path, version: str) -> None:
        seen.append((version, sorted(file.name for file in copy.iterdir())))
        raise AdapterRejectedError("no", "r")

    with pytest.raises(AdapterRejectedError):
        store.add(adapter_dir, check)
    assert list(store.directory.iterdir()) == []
    assert seen == [(store.add(adapter_dir).name, [CONFIG, WEIGHTS])]


def test_what_the_check_puts_beside_a_copy_also_comes_to_one_that_is_there(
    store: AdapterStore, adapter_dir: Path
) -> None:
    def leave(name: str, text: str) -> Path:
        return store.add(adapter_dir, lambda copy, _: (copy / name).write_text(text) and None)

    copy = leave("first", "damaged")
    assert {leave("first", "whole"), leave("second", "another")} == {copy}
    assert {file.name for file in copy.iterdir()} == {CONFIG, WEIGHTS, "first", "second"}
    assert (copy / "first").read_text() == "whole"
    assert list(store.directory.iterdir()) == [copy]


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_damaged_copy_is_replaced(name: str, store: AdapterStore, adapter_dir: Path) -> None:
    copy = store.add(adapter_dir)
    whole = (copy / name).read_bytes()
    (copy / name).unlink()
    (copy / name).write_bytes(whole[:5])
    assert store.add(adapter_dir) == copy
    assert (copy / name).read_bytes() == whole
    assert list(store.directory.iterdir()) == [copy]


def test_threads_that_add_the_same_adapter_agree(store: AdapterStore, adapter_dir: Path) -> None:
    barrier = threading.Barrier(8)

    def add(_: int) -> Path:
        barrier.wait()
        return store.add(adapter_dir)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(add, range(8)))) == 1
    assert len(list(store.directory.iterdir())) == 1


def test_processes_that_add_the_same_adapter_agree(store: AdapterStore, adapter_dir: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from ray_lora.adapters.store import AdapterStore\n"
        "for _ in range(10): AdapterStore(Path(sys.argv[1])).add(Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", script, str(store.directory), str(adapter_dir)]
    environment = os.environ | {"PYTHONPATH": str(Path(store_module.__file__).parents[2])}
    processes = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    (copy,) = store.directory.iterdir()
    assert (copy / WEIGHTS).read_bytes() == (adapter_dir / WEIGHTS).read_bytes()


def test_only_old_leftovers_are_swept(store: AdapterStore) -> None:
    old, fresh = store.directory / ".incoming-old", store.directory / ".incoming-fresh"
    for leftover in (old, fresh):
        leftover.mkdir()
    os.utime(old, times=(time.time() - 2 * 86400,) * 2)
    AdapterStore(store.directory)
    assert [entry.name for entry in store.directory.iterdir()] == [".incoming-fresh"]


def test_a_store_that_cannot_be_created_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="adapter_store_dir"):
        AdapterStore(tmp_path / "file" / "store")
