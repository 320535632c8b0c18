import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_lora.adapter import AdapterFiles
from ray_lora.adapters import reader as reader_module
from ray_lora.adapters import shard_file
from ray_lora.adapters.output_change import BaseLayers
from ray_lora.adapters.peft_weights import AdapterWeights
from ray_lora.adapters.reader import AdapterReader, Shards
from ray_lora.adapters.store import AdapterStore
from ray_lora.architecture import Architecture
from ray_lora.errors import AdapterRejectedError, CapacityError, InvalidRequestError, NotFoundError


def no_base() -> BaseLayers:
    raise AssertionError("opened the base for a plain adapter")


@pytest.fixture
def reader(tmp_path: Path, arch: Architecture) -> AdapterReader:
    return AdapterReader(arch, AdapterStore(tmp_path / "store"), 64, no_base)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows by one path whenever an adapter's files are read."""
    paths: list[Path] = []
    read_weights = reader_module.read_weights

    def counted(directory: Path, arch: Architecture, max_lora_rank: int) -> AdapterWeights:
        paths.append(directory)
        return read_weights(directory, arch, max_lora_rank)

    monkeypatch.setattr(reader_module, "read_weights", counted)
    return paths


def set_alpha(directory: Path, alpha: float) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": alpha}))


def test_the_manifest_tells_what_was_checked(
    reader: AdapterReader, tmp_path: Path, save_adapter: Callable[..., Any]
) -> None:
    source = tmp_path / "source"
    fields = {"target_modules": ["down_proj", "q_proj", "v_proj"], "rank_pattern": {"down_proj": 20}}
    save_adapter(source, exclude_modules=["layers.0.self_attn.q_proj"], dtype=torch.bfloat16, **fields)
    manifest = reader.inspect(str(source))
    assert manifest.path == str(reader.store.directory / manifest.version)
    assert manifest.source == str(source)
    assert (manifest.rank, manifest.num_pages) == (20, 2)
    assert manifest.modules == ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    q, v, down = 8 * (64 + 64), 8 * (64 + 32), 20 * (128 + 64)
    assert manifest.num_bytes == 2 * (q + 2 * v + 2 * down)
    (shard,) = reader.read(manifest)
    assert len(shard.entries) == 5


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_manifest_tells_what_the_largest_rank_will_hold(
    tp_size: int, arch: Architecture, tmp_path: Path, adapter_dir: Path
) -> None:
    reader = AdapterReader(arch, AdapterStore(tmp_path / "store"), 64, no_base, 0, tp_size, torch.bfloat16)
    manifest = reader.inspect(str(adapter_dir))
    shards = reader.read(manifest)
    assert len(shards) == tp_size
    assert manifest.shard_bytes == max(shard.payload.numel() for shard in shards)
    assert manifest.shard_digests == tuple(shard.digest() for shard in shards)


def test_a_dry_run_names_every_field_that_would_be_refused(reader: AdapterReader, adapter_dir: Path) -> None:
    fine = reader.validate(str(adapter_dir))
    assert (fine.manifest, fine.refusals) == (reader.inspect(str(adapter_dir)), ())
    file = adapter_dir / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_qalora": True, "alora_invocation_tokens": [1]}))
    found = reader.validate(str(adapter_dir))
    assert found.manifest is None
    assert {refusal.param for refusal in found.refusals} == {"use_qalora", "alora_invocation_tokens"}
    with pytest.raises(NotFoundError):
        reader.validate(str(adapter_dir / "nowhere"))


def test_a_kept_adapter_stays_in_the_store_until_it_is_forgotten(
    arch: Architecture, tmp_path: Path, adapter_dir: Path
) -> None:
    size = sum(file.stat().st_size for file in adapter_dir.iterdir())
    reader = AdapterReader(arch, AdapterStore(tmp_path / "store", max_bytes=int(4.5 * size)), 64, no_base)
    first = reader.inspect(str(adapter_dir))
    reader.keep(first)
    for alpha in range(1, 8):
        set_alpha(adapter_dir, alpha)
        reader.inspect(str(adapter_dir))
    assert reader.read(first)
    reader.forget(first.version)
    for alpha in range(11, 15):
        set_alpha(adapter_dir, alpha)
        reader.inspect(str(adapter_dir))
    with pytest.raises(CapacityError, match="had to leave the store"):
        reader.keep(first)


def test_a_copy_that_somebody_removed_while_it_was_in_use_is_no_lack_of_room(
    reader: AdapterReader, adapter_dir: Path
) -> None:
    manifest = reader.inspect(str(adapter_dir))
    reader.keep(manifest)
    shutil.rmtree(manifest.path)
    with pytest.raises(AdapterRejectedError, match="no longer in the store"):
        reader.read(manifest)


def test_a_read_after_its_inspection_reads_no_file(reader: AdapterReader, adapter_dir: Path, reads: list[Path]) -> None:
    manifest = reader.inspect(str(adapter_dir))
    first = reader.read(manifest)
    assert len(reads) == 1
    (second,) = reader.read(manifest)
    assert second is not first[0]
    assert (second.header, second.digest()) == (first[0].header, first[0].digest())
    assert len(reads) == 1, "the store has it as the ranks take it"


def spoil(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [
        Path.unlink,
        lambda file: os.truncate(file, 5),
        lambda file: os.truncate(file, file.stat().st_size - 1),
        lambda file: spoil(file, 0),
        lambda file: spoil(file, 7),
        lambda file: spoil(file, 20),
        lambda file: spoil(file, -1),
    ],
    ids=["gone", "cut short", "a byte too short", "length", "enormous length", "header", "last bit"],
)
def test_a_shard_that_is_not_what_was_written_is_cut_again(
    harm: Callable[[Path], Any], reader: AdapterReader, adapter_dir: Path, reads: list[Path]
) -> None:
    manifest = reader.inspect(str(adapter_dir))
    (first,) = reader.read(manifest)
    (file,) = Path(manifest.path).glob("*.shard")
    harm(file)
    (second,) = reader.read(manifest)
    assert second.digest() == first.digest()
    assert reads[1:] == [Path(manifest.path)]
    reader.inspect(str(adapter_dir))
    reader.keep(manifest)
    reader.read(manifest)
    assert len(reads) == 3, "the inspection has put it there again"


def test_a_damaged_copy_is_not_loaded(reader: AdapterReader, adapter_dir: Path) -> None:
    manifest = reader.inspect(str(adapter_dir))
    reader.read(manifest)
    for file in Path(manifest.path).glob("*.shard"):
        file.unlink()
    spoil(Path(manifest.path) / "adapter_model.safetensors", -1)
    with pytest.raises(AdapterRejectedError, match="damaged; load it again"):
        reader.read(manifest)


def test_readers_that_cut_otherwise_share_a_store(arch: Architecture, tmp_path: Path, adapter_dir: Path) -> None:
    """Each finds its own shards beside the one copy, however often the others add it."""
    store = tmp_path / "store"
    readers = [
        AdapterReader(arch, AdapterStore(store), 64, no_base, 0, tp_size, dtype)
        for tp_size, dtype in ((1, torch.float32), (1, torch.bfloat16), (2, torch.bfloat16))
    ]
    manifests = [reader.inspect(str(adapter_dir)) for reader in readers for _ in range(2)][::2]
    assert len({manifest.path for manifest in manifests}) == 1
    shutil.rmtree(adapter_dir)
    for reader, manifest in zip(readers, manifests, strict=True):
        cut = reader.read(manifest)
        stored = reader.read(manifest)
        assert [shard.digest() for shard in stored] == list(manifest.shard_digests)
        assert [shard.header for shard in stored] == [shard.header for shard in cut]


def test_shards_that_cannot_be_written_do_not_stop_a_load(
    reader: AdapterReader, adapter_dir: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_file, "SUFFIX", "/in_no_directory")
    manifest = reader.inspect(str(adapter_dir))
    reader.read(manifest)
    assert [shard.digest() for shard in reader.read(manifest)] == list(manifest.shard_digests)
    assert len(reads) == 2


def test_values_beyond_the_type_of_the_pages_are_refused_at_once(
    arch: Architecture, tmp_path: Path, adapter_dir: Path
) -> None:
    reader = AdapterReader(arch, AdapterStore(tmp_path / "store"), 64, no_base, 0, 1, torch.float16)
    set_alpha(adapter_dir, 1e6)
    with pytest.raises(AdapterRejectedError, match="lora_dtype"):
        reader.inspect(str(adapter_dir))
    assert list(reader.store.directory.iterdir()) == []


def test_only_the_last_inspections_are_kept_in_memory(reader: AdapterReader, adapter_dir: Path) -> None:
    manifests = []
    for alpha in (1, 2, 3):
        set_alpha(adapter_dir, alpha)
        manifests.append(reader.inspect(str(adapter_dir)))
    set_alpha(adapter_dir, 4)
    assert reader.validate(str(adapter_dir)).manifest is not None
    kept = [reader.keep(manifest) is not None for manifest in manifests]
    assert kept == [False, True, True], "a dry run is none of them"


def test_a_manifest_can_be_read_when_the_source_is_gone(
    reader: AdapterReader, adapter_dir: Path, arch: Architecture
) -> None:
    manifest = reader.inspect(str(adapter_dir))
    shutil.rmtree(adapter_dir)
    elsewhere = AdapterReader(arch, AdapterStore(reader.store.directory), 64, no_base)
    (shard,) = elsewhere.read(manifest)
    assert [entry[:2] for entry in shard.entries] == [(1, "self_attn.q_proj"), (1, "mlp.down_proj")]


def test_a_new_content_at_the_same_path_is_a_new_version(reader: AdapterReader, adapter_dir: Path) -> None:
    old = reader.inspect(str(adapter_dir))
    set_alpha(adapter_dir, 16)
    new = reader.inspect(str(adapter_dir))
    assert old.version != new.version
    (new_shard,), (old_shard,) = reader.read(new), reader.read(old)
    entry = old_shard.entries[0]
    assert torch.equal(new_shard.lora_b_t(entry), 2 * old_shard.lora_b_t(entry))


def test_of_a_content_that_is_known_a_copy_does_though_the_source_has_changed(
    reader: AdapterReader, adapter_dir: Path
) -> None:
    first = reader.inspect(str(adapter_dir))
    set_alpha(adapter_dir, 3)
    again = reader.inspect(str(adapter_dir), first.version)
    assert (again, again.source) == (first, str(adapter_dir))
    assert reader.inspect(str(adapter_dir)) != first
    shutil.rmtree(adapter_dir)
    assert reader.inspect(str(adapter_dir), first.version) == first
    with pytest.raises(NotFoundError):
        reader.inspect(str(adapter_dir), 64 * "0")


def test_a_damaged_copy_does_not_do(reader: AdapterReader, adapter_dir: Path) -> None:
    first = reader.inspect(str(adapter_dir))
    reader.read(first)
    reader.forget(first.version)
    weights = Path(first.path) / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"damaged")
    assert reader.inspect(str(adapter_dir), first.version) == first
    assert weights.read_bytes() == (adapter_dir / "adapter_model.safetensors").read_bytes()


def test_a_content_travels_to_another_store_as_it_is(
    reader: AdapterReader, adapter_dir: Path, tmp_path: Path, arch: Architecture, reads: list[Path]
) -> None:
    manifest = reader.inspect(str(adapter_dir))
    files = reader.store.files(manifest.version)
    assert files is not None
    other = AdapterReader(arch, AdapterStore(tmp_path / "other"), 64, no_base)
    assert not other.store.has(manifest.version)
    shutil.rmtree(adapter_dir)
    arrived = other.add(files, manifest.source)
    assert replace(arrived, path=manifest.path) == manifest
    assert other.store.has(manifest.version)
    assert other.inspect(manifest.source, manifest.version) == arrived
    assert other.read(arrived)
    assert len(reads) == 2, "once by each"


@pytest.mark.parametrize("version", [64 * "0", "..", "", "a/b"])
def test_what_is_not_in_the_store_has_no_files(reader: AdapterReader, version: str) -> None:
    assert not reader.store.has(version)
    assert reader.store.files(version) is None


def test_files_that_would_be_refused_as_a_directory_are_refused(reader: AdapterReader, adapter_dir: Path) -> None:
    config = (adapter_dir / "adapter_config.json").read_bytes()
    with pytest.raises(AdapterRejectedError):
        reader.add(AdapterFiles(config, b"no tensors"), "elsewhere")
    assert [path.name for path in reader.store.directory.iterdir() if not path.name.startswith(".")] == []


def test_a_refused_adapter_leaves_nothing_in_the_store(adapter_dir: Path, tmp_path: Path, arch: Architecture) -> None:
    reader = AdapterReader(arch, AdapterStore(tmp_path / "store"), 2, no_base)
    with pytest.raises(AdapterRejectedError, match="max_lora_rank"):
        reader.inspect(str(adapter_dir))
    assert list(reader.store.directory.iterdir()) == []


def test_a_home_directory_is_expanded(
    reader: AdapterReader, adapter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "HOME", str(adapter_dir.parent))
    assert reader.inspect("~/adapter").source == "~/adapter"


@pytest.mark.parametrize("source", ["", None, 3])
def test_no_path_is_an_invalid_request(source: Any, reader: AdapterReader) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        reader.inspect(source)
    assert caught.value.param == "lora_path"


@pytest.mark.parametrize("source", ["/does/not/exist", "~no_such_user/x", "acme/adapter-on-a-hub", "a\0b"])
def test_an_unknown_path_is_not_found(source: str, reader: AdapterReader) -> None:
    with pytest.raises(NotFoundError) as caught:
        reader.inspect(source)
    assert caught.value.param == "lora_path"


def test_threads_may_share_a_reader(reader: AdapterReader, adapter_dir: Path) -> None:
    def load(_: int) -> Shards:
        return reader.read(reader.inspect(str(adapter_dir)))

    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(load, range(12)))
    assert all(len(shard.entries) == 2 for (shard,) in loaded)
