"""Custom resources against their CRDs, as the API server does with `fieldValidation: Strict`.

A CRD's schema becomes a JSON schema that also refuses unknown fields and list entries with equal keys. Its CEL rules
are not run. The CRDs are not in this repository: `../shared/k8s/crds` beside it, or the folder in RAY_LORA_CRDS.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, ValidationError, validators

from k8s.checks.manifests import ROOT, Document

CRDS = Path(os.environ.get("RAY_LORA_CRDS", ROOT.parent / "shared" / "k8s" / "crds"))

KEPT = (
    *("type", "enum", "pattern", "required", "multipleOf", "minimum", "maximum", "minLength", "maxLength"),
    *("minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties"),
)
"""Keywords that mean the same in a CRD and in JSON schema."""

RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}

LABEL = r"^(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?$"
METADATA: Document = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string", "pattern": LABEL}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}

Key = tuple[str, str]
"""`apiVersion` and `kind`."""


def load_crds(folder: Path) -> dict[Key, Draft202012Validator]:
    """A validator for each version of each CRD in a folder."""
    found = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # RayService's is a megabyte
    for path in sorted(folder.glob("*.yaml")):
        for crd in yaml.load_all(path.read_text(), loader):
            spec = crd["spec"]
            for version in spec["versions"]:
                schema = to_json_schema(version["schema"]["openAPIV3Schema"])
                schema["properties"] |= {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": METADATA,
                }
                found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = StrictValidator(schema)
    return found


def problems(document: Document, crds: dict[Key, Draft202012Validator]) -> list[str]:
    """One line for each fault of a custom resource; one line as well if no CRD is known for it."""
    validator = crds.get((document["apiVersion"], document["kind"]))
    if validator is None:
        return [f"no CRD for {document['apiVersion']} {document['kind']}"]
    return sorted(f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(document))


def to_json_schema(schema: Document) -> Document:
    """A structural schema as JSON schema; nothing it does not know passes."""
    if schema.get("x-kubernetes-int-or-string"):
        text = {"type": "string"} | {key: schema[key] for key in ("pattern",) if key in schema}
        return {"anyOf": [{"type": "integer"}, text]}
    result = {key: schema[key] for key in KEPT if key in schema}
    if schema.get("format") in RANGES:
        low, high = RANGES[schema["format"]]
        result = {"minimum": low, "maximum": high} | result
    for key in ("allOf", "anyOf", "oneOf"):
        if key in schema:
            result[key] = [to_json_schema(part) for part in schema[key]]
    for key in ("not", "items"):
        if key in schema:
            result[key] = to_json_schema(schema[key])
    result |= _properties(schema)
    if schema.get("x-kubernetes-list-type") == "map":
        items = schema["items"].get("properties", {})
        result["listMapKeys"] = {key: items.get(key, {}).get("default") for key in schema["x-kubernetes-list-map-keys"]}
    if schema.get("nullable") and "type" in result:
        result["type"] = [result["type"], "null"]
    return result


def _properties(schema: Document) -> Document:
    fields, others = schema.get("properties"), schema.get("additionalProperties")
    result: Document = {}
    if fields is not None:
        result["properties"] = {key: to_json_schema(value) for key, value in fields.items()}
        if "required" in schema:  # the server fills in defaults before it looks
            result["required"] = [key for key in schema["required"] if "default" not in fields.get(key, {})]
        if schema.get("x-kubernetes-embedded-resource"):
            result["properties"] = {"apiVersion": {}, "kind": {}, "metadata": {}} | result["properties"]
    if isinstance(others, dict):
        result["additionalProperties"] = to_json_schema(others)
    elif schema.get("type") == "object" and others is None and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result["additionalProperties"] = False
    return result


def _list_map_keys(_: Any, defaults: Document, instance: Any, __: Any) -> Iterator[ValidationError]:
    """Entries of such a list differ in their keys; one that is left out has its default."""
    seen = set()
    for index, item in enumerate(instance if isinstance(instance, list) else []):
        if not isinstance(item, dict):
            continue
        key = json.dumps([item.get(name, default) for name, default in defaults.items()])
        if key in seen:
            yield ValidationError(f"a second entry for {list(defaults)} {key}", path=[index])
        seen.add(key)


StrictValidator = validators.extend(Draft202012Validator, {"listMapKeys": _list_map_keys})
