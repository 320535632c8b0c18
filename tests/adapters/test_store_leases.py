"""The store's size limit: what goes to make room, and what never does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ray_lora.adapters import store as store_module
from ray_lora.adapters.output_change import BaseLayers
from ray_lora.adapters.reader import MAX_KEPT, AdapterReader
from ray_lora.adapters.store import AdapterStore
from ray_lora.adapters.store_leases import size_of
from ray_lora.architecture import Architecture
from ray_lora.errors import CapacityError

WEIGHTS = "adapter_model.safetensors"


class Adapters:
    """As many adapters of one size as are asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors = load_file(directory / WEIGHTS)

    def __getitem__(self, number: int) -> Path:
        save_file({name: tensor + number for name, tensor in self._tensors.items()}, self._directory / WEIGHTS)
        return self._directory


def no_base() -> BaseLayers:
    raise AssertionError("opened the base for a plain adapter")


@pytest.fixture
def adapters(adapter_dir: Path) -> Adapters:
    return Adapters(adapter_dir)


@pytest.fixture
def store(tmp_path: Path, adapter_dir: Path) -> AdapterStore:
    """Room for three adapters."""
    return AdapterStore(tmp_path / "store", max_bytes=3 * size_of(adapter_dir) + 100)


def versions(store: AdapterStore) -> set[str]:
    return {path.name for path in store.directory.iterdir()}


def add_unused(store: AdapterStore, source: Path, age_s: float) -> str:
    path = store.add(source)
    store.give_back(path.name)
    now = path.stat().st_mtime
    os.utime(path, (now - age_s, now - age_s))
    return path.name


def test_the_least_recently_used_content_goes_first(store: AdapterStore, adapters: Adapters) -> None:
    old, older, recent = (add_unused(store, adapters[n], age) for n, age in ((0, 20), (1, 30), (2, 10)))
    newest = store.add(adapters[3]).name
    assert versions(store) == {old, recent, newest}
    store.add(adapters[4])
    assert old not in versions(store)
    assert older not in versions(store)


def test_use_is_what_counts_not_when_it_was_added(store: AdapterStore, adapters: Adapters) -> None:
    first, second, _ = (add_unused(store, adapters[n], 30 - n) for n in range(3))
    assert store.take(first)
    store.give_back(first)
    store.add(adapters[3])
    assert first in versions(store)
    assert second not in versions(store)


def test_what_is_in_use_stays_and_too_much_of_it_is_a_lack_of_capacity(store: AdapterStore, adapters: Adapters) -> None:
    held = [store.add(adapters[n]).name for n in range(3)]
    with pytest.raises(CapacityError, match="adapter_store_max_bytes"):
        store.add(adapters[3])
    assert versions(store) == set(held)
    store.give_back(held[1])
    newest = store.add(adapters[3]).name
    assert versions(store) == {held[0], held[2], newest}


def test_content_that_was_added_twice_is_in_use_until_it_was_given_back_twice(
    store: AdapterStore, adapters: Adapters
) -> None:
    held = [store.add(adapters[n]).name for n in (0, 0, 1, 2)]
    store.give_back(held[0])
    with pytest.raises(CapacityError):
        store.add(adapters[3])
    store.give_back(held[0])
    store.add(adapters[3])
    assert held[0] not in versions(store)


def test_what_lies_beside_the_contents_in_use_goes_before_a_lack_of_capacity(
    store: AdapterStore, adapters: Adapters
) -> None:
    def leave(copy: Path, version: str) -> None:
        (copy / "extra").write_bytes(bytes(size_of(copy) // 2))

    first = store.add(adapters[0], leave)
    second = store.add(adapters[1], leave)
    assert size_of(first) == size_of(second) > size_of(adapters[1])
    third = store.add(adapters[2], leave)
    assert {size_of(copy) for copy in (first, second, third)} == {size_of(adapters[2])}
    assert store.add(adapters[2], leave) == third
    assert not (third / "extra").exists()


def test_what_lies_beside_a_content_makes_those_that_nobody_uses_go(store: AdapterStore, adapters: Adapters) -> None:
    unused = [add_unused(store, adapters[n], 10 - n) for n in range(3)]
    newest = store.add(adapters[3], lambda copy, _: (copy / "extra").write_bytes(bytes(size_of(copy) // 2)) and None)
    assert versions(store) == {unused[2], newest.name}
    assert (newest / "extra").exists()


def test_an_adapter_that_is_there_already_needs_no_room(store: AdapterStore, adapters: Adapters) -> None:
    held = [store.add(adapters[n]).name for n in range(3)]
    assert store.add(adapters[1]).name == held[1]


def test_what_another_process_uses_stays_until_that_process_ends(store: AdapterStore, adapters: Adapters) -> None:
    script = (
        "import sys; from pathlib import Path; from ray_lora.adapters.store import AdapterStore\n"
        "print(AdapterStore(Path(sys.argv[1])).add(Path(sys.argv[2])).name, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(store.directory), str(adapters[0])]
    environment = os.environ | {"PYTHONPATH": str(Path(store_module.__file__).parents[2])}
    other = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout is not None
        theirs = other.stdout.readline().strip()
        mine = add_unused(store, adapters[1], -20)
        store.add(adapters[2])
        newest = store.add(adapters[3]).name
        assert theirs in versions(store)
        assert mine not in versions(store)
        other.kill()
    store.give_back(newest)
    store.add(adapters[4])
    assert theirs not in versions(store)


def test_other_things_in_the_directory_are_left_alone(store: AdapterStore, adapters: Adapters) -> None:
    (store.directory / "notes").mkdir()
    for number in range(5):
        add_unused(store, adapters[number], 5)
    assert "notes" in versions(store)


def test_more_contents_than_a_process_may_usually_open_are_kept(tmp_path: Path) -> None:
    script = (
        "import resource, sys; from pathlib import Path; from ray_lora.adapters.store_leases import Leases\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "leases, root = Leases(), Path(sys.argv[1])\n"
        "for number in range(200): (root / str(number)).mkdir(); assert leases.take(root / str(number))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(store_module.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=True)


def test_content_that_is_gone_cannot_be_taken(store: AdapterStore) -> None:
    assert not store.take("0" * 64)


@pytest.fixture
def reader(store: AdapterStore, arch: Architecture) -> AdapterReader:
    return AdapterReader(arch, store, 64, no_base)


def test_what_was_read_is_in_use_until_it_is_forgotten(reader: AdapterReader, adapters: Adapters) -> None:
    manifests = []
    for number in range(3):
        manifests.append(reader.inspect(str(adapters[number])))
        reader.read(manifests[-1])
    with pytest.raises(CapacityError):
        reader.inspect(str(adapters[3]))
    reader.inspect(str(adapters[0]))
    reader.forget(manifests[0].version)
    with pytest.raises(CapacityError):
        reader.inspect(str(adapters[3]))
    reader.read(manifests[0])
    for _ in range(2):
        reader.forget(manifests[0].version)
    reader.inspect(str(adapters[3]))
    assert manifests[0].version not in versions(reader.store)


def test_inspections_that_nothing_follows_do_not_fill_the_store(reader: AdapterReader, adapters: Adapters) -> None:
    manifests = [reader.inspect(str(adapters[number])) for number in range(10)]
    assert MAX_KEPT <= len(versions(reader.store)) <= 3
    with pytest.raises(CapacityError, match="had to leave the store"):
        reader.read(manifests[0])
    reader.read(manifests[-MAX_KEPT])


def test_a_read_after_others_finds_its_content_again(reader: AdapterReader, adapters: Adapters) -> None:
    manifests = [reader.inspect(str(adapters[number])) for number in range(3)]
    (shard,) = reader.read(manifests[0])
    (entry,) = (entry for entry in shard.entries if entry.projection == "mlp.down_proj")
    stored = load_file(adapters[0] / WEIGHTS)["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    assert torch.equal(shard.lora_a(entry), stored)
