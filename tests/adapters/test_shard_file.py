from pathlib import Path

import torch

from ray_lora.adapters.shard import AdapterShard, OutputEntry, ShardEntry, ShardHeader, UnpagedEntry
from ray_lora.adapters.shard_file import read_shard, write_shard


def make_shard() -> AdapterShard:
    """One module, one changed output, and two tensors that are not paged."""
    header = ShardHeader(
        "v" * 64,
        "bfloat16",
        (ShardEntry(0, "self_attn.q_proj", 2, 4, 6, 0),),
        (OutputEntry(0, "self_attn.q_proj", 6, 0),),
        (UnpagedEntry("lm_head.row_ids", (3,), "int64", 88), UnpagedEntry("norm", (4,), "float32", 112)),
    )
    payload = torch.randint(256, (header.num_bytes,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return AdapterShard(header, payload)


def test_a_shard_is_read_as_it_was_written(tmp_path: Path) -> None:
    shard = make_shard()
    digest = write_shard(tmp_path, shard)
    assert digest == shard.digest()
    read = read_shard(tmp_path, digest)
    assert read is not None
    assert read.header == shard.header
    assert torch.equal(read.payload, shard.payload)
    assert read.unpaged_tensors().keys() == {"lm_head.row_ids", "norm"}


def test_a_shard_without_numbers_is_one_too(tmp_path: Path) -> None:
    empty = AdapterShard(ShardHeader("v", "float32", ()), torch.empty(0, dtype=torch.uint8))
    read = read_shard(tmp_path, write_shard(tmp_path, empty))
    assert read is not None
    assert read.header == empty.header


def test_another_shard_under_the_name_is_none(tmp_path: Path) -> None:
    written = tmp_path / f"{write_shard(tmp_path, make_shard())}.shard"
    written.rename(tmp_path / f"{'0' * 64}.shard")
    assert read_shard(tmp_path, "0" * 64) is None


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    shard = make_shard()
    (tmp_path / f"{shard.digest()}.shard").symlink_to("/dev/full")
    assert write_shard(tmp_path, shard) == shard.digest()
    assert list(tmp_path.iterdir()) == []
