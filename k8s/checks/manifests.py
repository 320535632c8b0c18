"""The documents that `kubectl apply -k` would send, and the pods that KubeRay would make of them."""

import subprocess
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
OVERLAYS = tuple(ROOT / "k8s" / "overlays" / name for name in ("cpu", "ascend", "ascend-ha"))
TOOLS = ROOT / "build" / "k8s-env" / "bin"
"""`kubectl`, `kubernetes-validate` and `hadolint`; `make test-k8s` installs them."""

Document = dict[str, Any]


class ManifestError(Exception):
    """What kustomize or YAML refuses; one line."""


@dataclass(frozen=True)
class PodTemplate:
    """What the pods of a group of Ray nodes, or of a StatefulSet, are made from."""

    owner: str
    metadata: Document
    spec: Document
    claimed: tuple[str, ...] = ()
    """Volumes that a StatefulSet adds."""

    @property
    def containers(self) -> list[Document]:
        """Those that stay, Ray's own first, then those that run before them."""
        return [*self.spec["containers"], *self.spec.get("initContainers", [])]

    @property
    def volumes(self) -> list[Document]:
        return list(self.spec.get("volumes", []))


@dataclass(frozen=True)
class Group:
    """The head, or a group of workers."""

    name: str
    spec: Document
    """As it stands in the RayService."""

    @property
    def start_params(self) -> dict[str, str]:
        return dict(self.spec.get("rayStartParams") or {})

    @property
    def template(self) -> PodTemplate:
        template = self.spec["template"]
        return PodTemplate(self.name, template.get("metadata", {}), template["spec"])

    @property
    def ray_container(self) -> Document:
        """KubeRay takes the first for Ray's."""
        return dict(self.template.containers[0])

    @property
    def limits(self) -> Document:
        return dict(self.ray_container.get("resources", {}).get("limits", {}))


@dataclass(frozen=True)
class Manifests:
    """All documents of an overlay."""

    documents: list[Document]

    def of_kind(self, kind: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] == kind]

    @property
    def ray_service(self) -> Document:
        """
        Raises:
            ManifestError: there is not exactly one.
        """
        found = self.of_kind("RayService")
        if len(found) != 1:
            raise ManifestError(f"{len(found)} RayServices instead of one")
        return found[0]

    @property
    def cluster(self) -> Document:
        return dict(self.ray_service["spec"]["rayClusterConfig"])

    @property
    def head(self) -> Group:
        return Group("head", self.cluster["headGroupSpec"])

    @property
    def workers(self) -> list[Group]:
        return [Group(spec["groupName"], spec) for spec in self.cluster.get("workerGroupSpecs", [])]

    @property
    def groups(self) -> list[Group]:
        return [self.head, *self.workers]

    @property
    def templates(self) -> list[PodTemplate]:
        return [group.template for group in self.groups] + [
            PodTemplate(
                document["metadata"]["name"],
                document["spec"]["template"]["metadata"],
                document["spec"]["template"]["spec"],
                tuple(claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", [])),
            )
            for document in self.of_kind("StatefulSet")
        ]

    def pods(self) -> Iterator[Document]:
        """A Pod of each template; a CRD says little about what is in one."""
        for template in self.templates:
            metadata = {**template.metadata, "name": template.owner}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template.spec}


def build(overlay: Path) -> Manifests:
    """What kustomize makes of a folder.

    Raises:
        ManifestError: it cannot be built.
    """
    result = subprocess.run([TOOLS / "kubectl", "kustomize", overlay], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ManifestError(result.stderr.strip())
    return Manifests(load(result.stdout))


def load(text: str) -> list[Document]:
    """The documents of a YAML stream as the API server reads them: a key given twice is an error.

    Raises:
        ManifestError: not YAML, or a key twice.
    """
    try:
        return [document for document in yaml.load_all(text, StrictLoader) if document]
    except yaml.YAMLError as error:
        raise ManifestError(str(error)) from None


class StrictLoader(yaml.SafeLoader):
    """Refuses a key given twice, and leaves timestamps strings."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
