"""Write each overlay's `serve_config.yaml`: the text of a file in deployments/, with what a pod changes in it.

    python k8s/render.py

`kubectl apply -k` runs no scripts, so the result is kept beside its sources; a test holds it equal to them.
"""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).parent

SOURCES = {
    "cpu": ("llama.yaml", ("base", "overlays/cpu")),
    "ascend": ("llama-npu.yaml", ("base", "overlays/ascend")),
    "ascend-ha": ("llama-npu.yaml", ("base", "overlays/ascend", "overlays/ascend-ha")),
}
"""By overlay: a file of deployments/, and the folders whose `serve_changes.yaml` are merged into it, in turn."""

PATCH = """\
# Written by `python k8s/render.py` from deployments/{source} and {changes}.
apiVersion: ray.io/v1
kind: RayService
metadata:
  name: ray-lora
spec:
  serveConfigV2: |
"""

Edit = tuple[int, int, str]
"""Characters from one offset to another, and what takes their place."""


def main() -> None:
    for overlay in SOURCES:
        (K8S / "overlays" / overlay / "serve_config.yaml").write_text(render(overlay))


def render(overlay: str) -> str:
    """The patch that gives the overlay's RayService its `serveConfigV2`."""
    source, folders = SOURCES[overlay]
    text = (K8S.parent / "deployments" / source).read_text()
    for folder in folders:
        text = apply(text, yaml.safe_load((K8S / folder / "serve_changes.yaml").read_text()))
    changes = ", ".join(f"{folder}/serve_changes.yaml" for folder in folders)
    return PATCH.format(source=source, changes=changes) + textwrap.indent(text, " " * 4)


def apply(text: str, changes: dict[str, Any]) -> str:
    """Set values in the text of a YAML mapping; all the rest, with its comments, stays as it is written."""
    document = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(document, yaml.MappingNode)
    edits = list(_edits(text, document, changes))
    for start, end, replacement in sorted(edits, key=lambda edit: edit[0], reverse=True):
        text = text[:start] + replacement + text[end:]
    return text


def _edits(text: str, node: yaml.MappingNode, changes: dict[str, Any]) -> Iterator[Edit]:
    """Of edits at one place the outer comes first, so that lines of the inner are put before it."""
    values = {key.value: value for key, value in node.value}
    if added := {key: change for key, change in changes.items() if key not in values}:
        end = text.index("\n", _end(node)) + 1
        yield end, end, textwrap.indent(yaml.safe_dump(added, sort_keys=False), " " * node.start_mark.column)
    for key, change in changes.items():
        if key not in values:
            continue
        value = values[key]
        if isinstance(value, yaml.MappingNode):
            yield from _edits(text, value, change)
        elif isinstance(value, yaml.SequenceNode):
            items = {_name(item): item for item in value.value}
            for item in change:
                yield from _edits(text, items[item["name"]], item)
        else:
            yield value.start_mark.index, value.end_mark.index, yaml.safe_dump(change).splitlines()[0]


def _name(node: yaml.MappingNode) -> str:
    return next(str(value.value) for key, value in node.value if key.value == "name")


def _end(node: yaml.Node) -> int:
    """Where the last value ends: a block's own end mark is that of the next token, beyond comments."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node.value[-1]
        return _end(last[1] if isinstance(node, yaml.MappingNode) else last)
    return int(node.end_mark.index)


if __name__ == "__main__":
    main()
