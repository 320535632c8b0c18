"""From a path or URL that a caller gave to an adapter that every rank may load.

`inspect` copies, checks and cuts an adapter and answers a manifest; `read` gives what the ranks hold of it. Most reads
follow their inspection at once, so the shards of the last few inspections are kept until they are read. For the others
every shard lies in the store beside the content, as a file; where it is gone, the content is cut again. The store keeps
the content of what is kept here, and of what is in use until it is forgotten.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from ray_lora.adapter import AdapterFiles, AdapterManifest, AdapterValidation, Refusal
from ray_lora.adapters.fetch import fetch
from ray_lora.adapters.output_change import BaseLayers, change_outputs
from ray_lora.adapters.peft_config import CONFIG_FILE, refused_fields, reject
from ray_lora.adapters.peft_weights import AdapterWeights, read_weights
from ray_lora.adapters.shard import AdapterShard
from ray_lora.adapters.shard_cut import shard_weights
from ray_lora.adapters.shard_file import read_shard, write_shard
from ray_lora.adapters.store import WEIGHTS_FILE, AdapterStore
from ray_lora.architecture import Architecture
from ray_lora.errors import AdapterRejectedError, CapacityError, InvalidRequestError, NotFoundError
from ray_lora.names import url_scheme, without_credentials

MAX_KEPT = 2

Shards = tuple[AdapterShard, ...]
"""Of one adapter, by rank."""


class AdapterReader:
    """Reads adapters for one base model. Safe to share between threads.

    Args:
        arch: the base model, which every tensor must fit.
        store: where the private copies are kept.
        max_lora_rank: adapters of a larger rank are refused.
        open_base: the base model's weights, read only for adapters whose effect depends on them.
        fetch_retries: how often a download is tried again after a transient failure.
        tp_size: ranks that share an adapter.
        dtype: in which they hold it.
    """

    def __init__(
        self,
        arch: Architecture,
        store: AdapterStore,
        max_lora_rank: int,
        open_base: Callable[[], BaseLayers],
        fetch_retries: int = 3,
        tp_size: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.arch = arch
        self.store = store
        self.max_lora_rank = max_lora_rank
        self.open_base = open_base
        self.fetch_retries = fetch_retries
        self.tp_size = tp_size
        self.dtype = dtype
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[AdapterManifest, Shards]] = OrderedDict()
        self._in_use: set[str] = set()

    def inspect(self, source: str, version: str | None = None) -> AdapterManifest:
        """Copy an adapter to the store and check all of it. A refused adapter leaves nothing behind.

        Args:
            version: the content that is wanted, if that is known; a whole copy of it in the store then does.

        Raises:
            NotFoundError: `source` does not exist; `param` is `lora_path`.
            InvalidRequestError: `source` is not a directory, or cannot be read or fetched; `param` is `lora_path`.
            AdapterRejectedError: the adapter cannot be honoured; `param` is the field, file or tensor at fault.
            CapacityError: the store is full.
        """
        if version is not None and (copied := self._inspect_copy(version, source)) is not None:
            return copied
        begin = time.monotonic()
        with self._fetched(source) as directory:
            fetched = time.monotonic()
            manifest = self._inspect_and_keep(directory, without_credentials(source))
        return replace(manifest, fetch_s=fetched - begin, parse_s=time.monotonic() - fetched)

    def validate(self, source: str) -> AdapterValidation:
        """What `inspect` would say, with all that is wrong with the configuration in place of the first error.

        Raises:
            NotFoundError, InvalidRequestError, CapacityError: as `inspect`.
        """
        with self._fetched(source) as directory:
            try:
                manifest, _ = self._inspect(directory, without_credentials(source))
                self.store.give_back(manifest.version)
                return AdapterValidation(manifest, ())
            except AdapterRejectedError as error:
                errors = [error]
                with suppress(AdapterRejectedError):
                    errors += refused_fields(directory)
            refusals = (Refusal(str(error), error.param) for error in errors)
            return AdapterValidation(None, tuple(dict.fromkeys(refusals)))

    def add(self, files: AdapterFiles, source: str) -> AdapterManifest:
        """Inspect what another store has sent.

        Raises:
            AdapterRejectedError, CapacityError: as `inspect`.
        """
        with self.store.incoming() as directory:
            (directory / CONFIG_FILE).write_bytes(files.config)
            (directory / WEIGHTS_FILE).write_bytes(files.weights)
            return self._inspect_and_keep(directory, source)

    def _inspect_copy(self, version: str, source: str) -> AdapterManifest | None:
        """None if there is no whole copy of this content."""
        with self._lock:
            if version in self._kept:
                self._kept.move_to_end(version)
                return replace(self._kept[version][0], source=without_credentials(source))
        if self.store.has(version):
            with suppress(AdapterRejectedError, NotFoundError):
                manifest = self._inspect_and_keep(self.store.directory / version, without_credentials(source))
                if manifest.version == version:
                    return manifest
        return None

    @contextmanager
    def _fetched(self, source: str) -> Iterator[Path]:
        """A local directory with what is at a path or URL."""
        if not isinstance(source, str) or not source:
            raise InvalidRequestError("lora_path must be the path of a local directory, or a URL", "lora_path")
        if url_scheme(source) is None:
            yield Path(os.path.expanduser(source))
            return
        with self.store.incoming() as directory:
            fetch(source, directory, self.store.max_adapter_bytes, self.fetch_retries)
            yield directory

    def _inspect_and_keep(self, directory: Path, source: str) -> AdapterManifest:
        manifest, shards = self._inspect(directory, source)
        with self._lock:
            if manifest.version in self._kept:
                self.store.give_back(manifest.version)
            self._kept[manifest.version] = manifest, shards
            self._kept.move_to_end(manifest.version)
            while len(self._kept) > MAX_KEPT:
                self.store.give_back(self._kept.popitem(last=False)[0])
        return manifest

    def _inspect(self, directory: Path, source: str) -> tuple[AdapterManifest, Shards]:
        """The store keeps the content until it is given back."""
        checked: list[tuple[AdapterWeights, Shards, tuple[str, ...]]] = []

        def check(copy: Path, version: str) -> None:
            weights = self._weights(copy)
            shards = self._cut(weights, version)
            checked.append((weights, shards, tuple(write_shard(copy, shard) for shard in shards)))

        path = self.store.add(directory, check)
        ((weights, shards, digests),) = checked
        changed = {projection for _, projection in (*weights.modules, *weights.outputs)}
        others = dict.fromkeys((*weights.vocabulary, *weights.saved, *weights.token_rows))
        manifest = AdapterManifest(
            version=path.name,
            path=str(path),
            source=source,
            rank=weights.rank,
            modules=(*(p.name for p in self.arch.projections if p.name in changed), *others),
            num_bytes=weights.num_bytes,
            shard_bytes=max(shard.header.num_bytes for shard in shards),
            shard_digests=digests,
        )
        return manifest, shards

    def read(self, manifest: AdapterManifest) -> Shards:
        """What the ranks hold of an inspected adapter, which is what `manifest.shard_digests` say.

        Raises:
            AdapterRejectedError, CapacityError: as `keep`, or the copy in the store is damaged.
        """
        return self.keep(manifest) or self._stored(manifest) or self._cut_again(manifest)

    def keep(self, manifest: AdapterManifest) -> Shards | None:
        """Let the store keep an inspected adapter until it is forgotten; its shards, if they are still in memory.

        Raises:
            AdapterRejectedError: somebody has removed the copy from the store while it was in use.
            CapacityError: it had to leave the store before it came to be used.
        """
        version = manifest.version
        with self._lock:
            _, shards = self._kept.pop(version, (None, None))
            if shards is None and not self.store.take(version):
                if version in self._in_use:
                    reject(WEIGHTS_FILE, f"adapter {version} is no longer in the store; load it again")
                raise CapacityError(
                    f"adapter {version} had to leave the store for others that were loaded at the same time; "
                    f"adapter_store_max_bytes {self.store.max_bytes} does not hold them all"
                )
            if version in self._in_use:
                self.store.give_back(version)
            self._in_use.add(version)
        return shards

    def _stored(self, manifest: AdapterManifest) -> Shards | None:
        shards = []
        for digest in manifest.shard_digests:
            shard = read_shard(Path(manifest.path), digest)
            if shard is None:
                return None
            shards.append(shard)
        return tuple(shards)

    def _cut_again(self, manifest: AdapterManifest) -> Shards:
        shards = self._cut(self._weights(Path(manifest.path)), manifest.version)
        if tuple(shard.digest() for shard in shards) != manifest.shard_digests:
            reject(WEIGHTS_FILE, f"the copy of adapter {manifest.version} in the store is damaged; load it again")
        return shards

    def _cut(self, weights: AdapterWeights, version: str) -> Shards:
        return tuple(
            shard_weights(weights, self.arch, version, rank, self.tp_size, self.dtype) for rank in range(self.tp_size)
        )

    def _weights(self, directory: Path) -> AdapterWeights:
        return change_outputs(read_weights(directory, self.arch, self.max_lora_rank), self.arch, self.open_base)

    def forget(self, version: str) -> None:
        """An adapter is not used any more, so the store may remove its content."""
        with self._lock:
            if version in self._in_use:
                self._in_use.discard(version)
                self.store.give_back(version)
