"""Our own rules for what is in the pods: nothing here is known to a CRD."""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from k8s.checks.manifests import Manifests, PodTemplate
from k8s.checks.serve_config import ServeConfig

SERVE_GRACE_S = 20
"""Serve's `graceful_shutdown_timeout_s`, where the config does not say."""

UNITS = {"m": Decimal("0.001"), "": Decimal(1)}
UNITS |= {suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)}
UNITS |= {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)}


def quantity(value: Any) -> Decimal:
    """A Kubernetes quantity as a number: `quantity("500m") == Decimal("0.5")`."""
    text = str(value)
    number = text.rstrip("kKMGTPEim")
    return Decimal(number) * UNITS[text.removeprefix(number)]


def volumes(manifests: Manifests, _: ServeConfig) -> Iterator[str]:
    """Every mount has its volume, no path two of them, and whatever a pod names is among the documents."""
    names = {(document["kind"], document["metadata"]["name"]) for document in manifests.documents}
    for template in manifests.templates:
        known = {volume["name"] for volume in template.volumes} | set(template.claimed)
        for container in template.containers:
            where = f"{template.owner}: {container['name']}"
            mounts = container.get("volumeMounts", [])
            for mount in mounts:
                if mount["name"] not in known:
                    yield f"{where}: {mount['mountPath']} mounts {mount['name']!r}, which is no volume of the pod"
            paths = [mount["mountPath"] for mount in mounts]
            yield from (f"{where}: two mounts at {path}" for path in sorted(set(paths)) if paths.count(path) > 1)
        for kind, name in _named_objects(template):
            if (kind, name) not in names:
                yield f"{template.owner}: there is no {kind} {name!r}"


def resources(manifests: Manifests, _: ServeConfig) -> Iterator[str]:
    """Containers say what they may use, and no request is more than its limit."""
    named = [
        (f"{each.owner}: {container['name']}", container)
        for each in manifests.templates
        for container in each.containers
    ]
    if "autoscalerOptions" in manifests.cluster:
        named.append(("autoscaler", manifests.cluster["autoscalerOptions"]))
    for where, container in named:
        given = container.get("resources", {})
        limits, requests = given.get("limits", {}), given.get("requests", {})
        yield from (f"{where}: no limit of {name}" for name in ("cpu", "memory") if name not in limits)
        for name, request in requests.items():
            if name in limits and quantity(request) > quantity(limits[name]):
                yield f"{where}: request of {request} {name} is more than the limit of {limits[name]}"


def security(manifests: Manifests, _: ServeConfig) -> Iterator[str]:
    """Each pod is admitted by the Pod Security level that the namespace enforces."""
    (namespace,) = manifests.of_kind("Namespace")
    level = namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce", "privileged")
    if level == "privileged":
        return
    for template in manifests.templates:
        for volume in template.volumes:
            if "hostPath" in volume:
                yield f"{template.owner}: volume {volume['name']} is a path of the host, which {level!r} forbids"
        if level == "restricted":
            yield from _not_restricted(template)


def shutdown(manifests: Manifests, config: ServeConfig) -> Iterator[str]:
    """A pod that is told to go stops Ray, and is left the time that Serve gives to requests."""
    stated = [each.get("graceful_shutdown_timeout_s", 0) for each in config.deployments.values()]
    grace = max([SERVE_GRACE_S, *stated])
    for group in manifests.groups:
        if group.template.spec.get("terminationGracePeriodSeconds", 30) <= grace:
            yield f"{group.name}: terminationGracePeriodSeconds is not more than Serve's {grace} s"
        if group.ray_container.get("lifecycle", {}).get("preStop") != {"exec": {"command": ["ray", "stop"]}}:
            yield f"{group.name}: preStop is not `ray stop`"


def secrets(manifests: Manifests, _: ServeConfig) -> Iterator[str]:
    """No secret is in a manifest: neither as data nor as the value of a variable."""
    for secret in manifests.of_kind("Secret"):
        if secret.get("data") or secret.get("stringData"):
            yield f"Secret {secret['metadata']['name']} has its data in the manifest"
    for template in manifests.templates:
        for container in template.containers:
            for variable in container.get("env", []):
                if variable.get("value") and re.search("PASSWORD|TOKEN|SECRET|KEY", variable["name"]):
                    yield f"{template.owner}: {container['name']}: {variable['name']} has its value in the manifest"


def _named_objects(template: PodTemplate) -> Iterator[tuple[str, str]]:
    if "serviceAccountName" in template.spec:
        yield "ServiceAccount", template.spec["serviceAccountName"]
    for volume in template.volumes:
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
    for container in template.containers:
        for variable in container.get("env", []):
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                yield "Secret", reference["name"]


def _not_restricted(template: PodTemplate) -> Iterator[str]:
    of_pod = template.spec.get("securityContext", {})
    if not of_pod.get("runAsNonRoot"):
        yield f"{template.owner}: runAsNonRoot is not true"
    if of_pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield f"{template.owner}: seccompProfile is not RuntimeDefault"
    for container in template.containers:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{template.owner}: {container['name']}: allowPrivilegeEscalation is not false"
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            yield f"{template.owner}: {container['name']}: does not drop ALL capabilities"


RULES = (volumes, resources, security, shutdown, secrets)
