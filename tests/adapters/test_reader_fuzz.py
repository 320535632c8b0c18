"""Whatever a directory holds under an adapter's file names is a manifest or a refusal, and a refusal leaves nothing."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lora.adapter import AdapterManifest
from ray_lora.adapters.output_change import BaseLayers
from ray_lora.adapters.peft_fields import HONOURED, IRRELEVANT, REFUSED
from ray_lora.adapters.reader import AdapterReader
from ray_lora.adapters.store import AdapterStore
from ray_lora.architecture import Architecture
from ray_lora.errors import InvalidRequestError, NotFoundError
from tests.arbitrary_json import EFFORTS, JSON, mutated, nested

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FIELDS = st.sampled_from(sorted({*HONOURED, *IRRELEVANT, *REFUSED}))
DTYPES = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "F4", "I64", "U8", "BOOL", "C64", "f32", ""]
LENGTHS = [0, 1, 7, 8, 100, 8 << 20, (8 << 20) + 1, 2**31, 2**63, 2**64 - 1]
SIZES = st.integers(-1, 300) | st.sampled_from([2**31, 2**32 + 4, 2**62, 2**63, 2**64 - 1, 2**64])


@pytest.fixture
def reader(tmp_path: Path, arch: Architecture) -> AdapterReader:
    def no_base() -> BaseLayers:
        raise AssertionError("opened the base for a plain adapter")

    return AdapterReader(arch, AdapterStore(tmp_path / "store", max_bytes=1 << 20), 64, no_base)


def inspect(reader: AdapterReader, directory: Path) -> AdapterManifest | None:
    """Its manifest, or None if it is refused; a dry run must say the same."""
    before = {path.name for path in reader.store.directory.iterdir()}
    manifest = None
    try:
        manifest = reader.inspect(str(directory))
    except (InvalidRequestError, NotFoundError) as error:
        f"{error} {error.param}".encode()
        assert {path.name for path in reader.store.directory.iterdir()} == before
    try:
        validation = reader.validate(str(directory))
    except (InvalidRequestError, NotFoundError):
        assert manifest is None
    else:
        assert validation.manifest == manifest
        assert bool(validation.refusals) == (manifest is None)
    return manifest


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_configuration_is_honoured_or_refused(effort: settings, reader: AdapterReader, adapter_dir: Path) -> None:
    good = json.loads((adapter_dir / CONFIG).read_text())
    documents = JSON | mutated(good, FIELDS) | st.dictionaries(FIELDS, JSON, max_size=4).map(lambda new: good | new)

    @effort
    @given(documents)
    def check(document: Any) -> None:
        (adapter_dir / CONFIG).write_text(json.dumps(document))
        inspect(reader, adapter_dir)

    check()


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_configuration_with_other_bytes_is_honoured_or_refused(
    effort: settings, reader: AdapterReader, adapter_dir: Path
) -> None:
    good = (adapter_dir / CONFIG).read_bytes()

    @effort
    @given(damaged(good))
    def check(raw: bytes) -> None:
        (adapter_dir / CONFIG).write_bytes(raw)
        inspect(reader, adapter_dir)

    check()


@pytest.mark.parametrize("effort", EFFORTS)
def test_weights_with_other_bytes_are_read_or_refused(
    effort: settings, reader: AdapterReader, adapter_dir: Path
) -> None:
    good = (adapter_dir / WEIGHTS).read_bytes()

    @effort
    @given(damaged(good))
    def check(raw: bytes) -> None:
        (adapter_dir / WEIGHTS).write_bytes(raw)
        inspect(reader, adapter_dir)

    check()


@pytest.mark.parametrize("effort", EFFORTS)
def test_weights_with_another_header_are_read_or_refused(
    effort: settings, reader: AdapterReader, adapter_dir: Path
) -> None:
    good = (adapter_dir / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    header, data = json.loads(good[8 : 8 + length]), good[8 + length :]

    @effort
    @given(headers(header), st.none() | st.sampled_from(LENGTHS), st.integers(0, len(data)))
    def check(raw: bytes, claimed: int | None, num_kept: int) -> None:
        prefix = struct.pack("<Q", len(raw) if claimed is None else claimed)
        (adapter_dir / WEIGHTS).write_bytes(prefix + raw + data[: num_kept or None])
        inspect(reader, adapter_dir)

    check()


@pytest.mark.parametrize("field", ["layers_to_transform", "zzz"])
def test_no_depth_of_nesting_is_too_much(field: str, reader: AdapterReader, adapter_dir: Path) -> None:
    good = (adapter_dir / CONFIG).read_text()
    for depth in (*range(880, 990), 100_000):
        (adapter_dir / CONFIG).write_text(good.removesuffix("}") + f', "{field}": {nested(depth)}}}')
        inspect(reader, adapter_dir)


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """Some bytes overwritten, mostly near the beginning; then perhaps cut off, or followed by more."""
    raw = bytearray(good)
    for place in draw(st.lists(st.integers(0, min(600, len(raw) - 1)) | st.integers(0, len(raw) - 1), max_size=4)):
        raw[place] = draw(st.integers(0, 255))
    end = draw(st.just(len(raw)) | st.integers(0, len(raw)))
    return bytes(raw[:end]) + draw(st.just(b"") | st.binary(max_size=20))


@st.composite
def headers(draw: st.DrawFn, header: dict[str, Any]) -> bytes:
    """One tensor described in another way, or anything in it changed, or keys that come twice."""
    other = draw(mutated(header))
    if draw(st.booleans()):
        key = draw(st.sampled_from([key for key in header if key != "__metadata__"]))
        entry = draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "dtype": st.sampled_from(DTYPES),
                    "shape": st.lists(SIZES, max_size=4),
                    "data_offsets": st.lists(SIZES, min_size=1, max_size=3),
                },
            )
        )
        other = {**header, key: {**header[key], **entry}}
    text = json.dumps(other)
    if draw(st.booleans()):
        text = f"{json.dumps(header).removesuffix('}')}, {text.removeprefix('{')}"
    return text.encode()
