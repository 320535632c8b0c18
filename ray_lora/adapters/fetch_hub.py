"""An adapter from the Hugging Face hub: `hf://owner/repository[@revision][/folder]`."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ray_lora.adapters.peft_config import reject
from ray_lora.errors import InvalidRequestError

_SOURCE = re.compile(r"hf://(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<folder>.*?))?/*")


def download_from_hub(source: str, directory: Path, limits: Mapping[str, int]) -> None:
    """Download the files named in `limits`, all from one commit; sizes are checked before anything is downloaded.

    Not by `snapshot_download`, which answers with what it finds on disk when the hub fails.

    Raises:
        InvalidRequestError: `source` is not of the form above; `param` is `lora_path`.
        AdapterRejectedError: a file is missing, or larger than its limit; `param` is its name.
        Exception: whatever the hub's client raises; see `failure_of`.
    """
    from huggingface_hub import HfApi

    match = _SOURCE.fullmatch(source)
    if match is None:
        raise InvalidRequestError(
            f"lora_path {source!r} is not of the form hf://owner/repository[@revision][/folder]", "lora_path"
        )
    hub = HfApi()
    info = hub.model_info(match["repo"], revision=match["revision"], files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    paths = {name: (PurePosixPath(match["folder"] or "") / name).as_posix() for name in limits}
    for name, path in paths.items():
        if path not in sizes:
            reject(name, f"{name} is missing in {source!r}")
        if sizes[path] > limits[name]:
            reject(name, f"{name} has {sizes[path]} bytes, more than the {limits[name]} that are accepted")
    for name, path in paths.items():
        downloaded = hub.hf_hub_download(match["repo"], path, revision=info.sha, local_dir=directory / "hub")
        Path(downloaded).rename(directory / name)
