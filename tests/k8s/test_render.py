"""`serve_config.yaml` of an overlay is a file of deployments/ with what a pod changes in it, and nothing else."""

from typing import Any

import pytest
import yaml

from k8s.render import K8S, SOURCES, apply, render


def merged(value: Any, change: Any) -> Any:
    """What `apply` means, on parsed values."""
    if isinstance(value, dict) and isinstance(change, dict):
        return value | {key: merged(value.get(key), item) for key, item in change.items()}
    if isinstance(value, list) and isinstance(change, list):
        named = {item["name"]: item for item in change}
        return [merged(item, named.get(item["name"], {})) for item in value]
    return change


@pytest.mark.parametrize("overlay", SOURCES)
def test_the_file_is_what_the_script_writes(overlay: str) -> None:
    written = (K8S / "overlays" / overlay / "serve_config.yaml").read_text()
    assert written == render(overlay), "run: python k8s/render.py"


@pytest.mark.parametrize("overlay", SOURCES)
def test_the_serve_config_is_the_deployment_with_the_changes(overlay: str) -> None:
    source, folders = SOURCES[overlay]
    expected = yaml.safe_load((K8S.parent / "deployments" / source).read_text())
    for folder in folders:
        expected = merged(expected, yaml.safe_load((K8S / folder / "serve_changes.yaml").read_text()))
    patch = yaml.safe_load(render(overlay))
    assert yaml.safe_load(patch["spec"]["serveConfigV2"]) == expected


TEXT = """\
# the top
a: 1            # one
b:
  - name: x     # first
    c: {d: 2}
  - name: y
    e: [3]      # last

f: text
"""


@pytest.mark.parametrize(
    ("changes", "old", "new"),
    [
        ({"a": 7}, "a: 1 ", "a: 7 "),
        ({"a": True}, "a: 1 ", "a: true "),
        ({"f": "a: b"}, "f: text", "f: 'a: b'"),
        ({"b": [{"name": "y", "g": 4}]}, "# last\n", "# last\n    g: 4\n"),
        ({"b": [{"name": "y", "g": 4}], "f": "z"}, "# last\n\nf: text", "# last\n    g: 4\n\nf: z"),
        ({"h": {"i": [5]}}, "f: text\n", "f: text\nh:\n  i:\n  - 5\n"),
    ],
)
def test_only_what_is_changed_changes_in_the_text(changes: dict[str, Any], old: str, new: str) -> None:
    assert apply(TEXT, changes) == TEXT.replace(old, new)


def test_keys_added_to_nested_blocks_that_end_together_stay_in_their_blocks() -> None:
    text = apply("a:\n  b:\n    c: 1  # end\n", {"z": 4, "a": {"y": 3, "b": {"x": 2}}})
    assert text == "a:\n  b:\n    c: 1  # end\n    x: 2\n  y: 3\nz: 4\n"
