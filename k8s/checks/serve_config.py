"""`serveConfigV2` as Ray Serve and ray_lora read it. Ray ignores keys that it does not know; this does not."""

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from k8s.checks.manifests import Document, ManifestError, load
from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError

IMPORT_PATH = "ray_lora.serve.app:build_app"
UNTYPED = {"autoscaling_config": AutoscalingConfig}
"""Fields that Ray's schema has as plain mappings, and turns into these later."""


@dataclass(frozen=True)
class ServeConfig:
    """The application, and what its replicas will be configured with."""

    content: Document
    engine: EngineConfig

    @property
    def deployments(self) -> dict[str, Document]:
        """What the file says about deployments, by name."""
        application = self.content["applications"][0]
        return {deployment["name"]: deployment for deployment in application.get("deployments", [])}

    @property
    def max_replicas(self) -> int:
        replica = self.deployments.get("LLMReplica", {})
        scaling: Document = replica.get("autoscaling_config") or {}
        return int(scaling.get("max_replicas") or replica.get("num_replicas") or 1)


def read(text: str) -> ServeConfig:
    """
    Raises:
        ManifestError: what Ray or ray_lora would refuse, and any key that Ray would not read; one line each.
    """
    documents = load(text)
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise ManifestError("serveConfigV2 is not one mapping")
    content = documents[0]
    try:
        ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        raise ManifestError(
            "\n".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        ) from None
    if unknown := list(unknown_keys(ServeDeploySchema, content)):
        raise ManifestError("\n".join(f"{key}: unknown key" for key in unknown))
    applications = content["applications"]
    if [application["import_path"] for application in applications] != [IMPORT_PATH]:
        raise ManifestError(f"applications: not one with import_path {IMPORT_PATH}")
    try:
        return ServeConfig(content, EngineConfig.parse(applications[0].get("args", {})))
    except ConfigError as error:
        raise ManifestError(f"applications.0.args: {error}") from None


def unknown_keys(model: type[BaseModel], content: Any, path: str = "") -> Iterator[str]:
    """The dotted path of each key that a model has no field for."""
    if isinstance(content, list):
        for index, item in enumerate(content):
            yield from unknown_keys(model, item, f"{path}{index}.")
    elif isinstance(content, dict):
        fields = {name: field.annotation for name, field in model.model_fields.items()}
        fields |= {field.alias: field.annotation for field in model.model_fields.values() if field.alias}
        for key, value in content.items():
            if key not in fields:
                yield f"{path}{key}"
            else:
                for inner in [UNTYPED[key]] if key in UNTYPED else list(models_in(fields[key]))[:1]:
                    yield from unknown_keys(inner, value, f"{path}{key}.")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every model that an annotation such as `list[Model] | None` mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models_in(part)
