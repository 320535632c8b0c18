"""Each check notices what it is there for: one change to good manifests, and one line that tells of it."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from k8s.checks.check import find_problems
from k8s.checks.custom_resources import Key
from k8s.checks.manifests import Document, Manifests

UPGRADE = ("spec", "upgradeStrategy")
CLUSTER = ("spec", "rayClusterConfig")
HEAD = (*CLUSTER, "headGroupSpec")
WORKERS = (*CLUSTER, "workerGroupSpecs", 0)
HEAD_POD = (*HEAD, "template", "spec")
POD = (*WORKERS, "template", "spec")
RAY = (*POD, "containers", 0)
DELETED = object()


@dataclass(frozen=True)
class Change:
    """A value at a path of a document; `DELETED` takes the key away."""

    told: str
    """Part of the line that must be among the problems."""
    path: tuple[str | int, ...]
    value: Any
    overlay: str = "ascend-ha"
    kind: str = "RayService"

    def __str__(self) -> str:
        return self.told


def env(name: str) -> list[Document]:
    return [{"name": name, "value": "x"}]


OUR_RULES = [
    Change("'nothing', which is no volume of the pod", (*RAY, "volumeMounts", 0, "name"), "nothing"),
    Change("two mounts at /mnt/adapters", (*RAY, "volumeMounts", 0, "mountPath"), "/mnt/adapters"),
    Change("there is no PersistentVolumeClaim 'adapters'", ("metadata", "name"), "gone", kind="PersistentVolumeClaim"),
    Change("there is no Secret 'api-keys'", ("metadata", "name"), "other", kind="Secret"),
    Change("there is no ServiceAccount 'ray-lora'", ("metadata", "name"), "other", kind="ServiceAccount"),
    Change("request of 65 cpu is more than the limit of 64", (*RAY, "resources", "requests", "cpu"), "65"),
    Change("request of 513Gi memory is more", (*RAY, "resources", "requests", "memory"), "513Gi"),
    Change(
        "head: ray-head: no limit of memory", (*HEAD_POD, "containers", 0, "resources", "limits", "memory"), DELETED
    ),
    Change("autoscaler: request of 2Gi", (*CLUSTER, "autoscalerOptions", "resources", "requests", "memory"), "2Gi"),
    Change("replicas: runAsNonRoot is not true", (*POD, "securityContext", "runAsNonRoot"), False),
    Change("does not drop ALL capabilities", (*RAY, "securityContext", "capabilities", "drop"), []),
    Change("is a path of the host", (*POD, "volumes", 0), {"name": "models", "hostPath": {"path": "/models"}}),
    Change("not more than Serve's 20 s", (*POD, "terminationGracePeriodSeconds"), 20),
    Change("replicas: preStop is not `ray stop`", (*RAY, "lifecycle"), DELETED),
    Change("has its data in the manifest", ("stringData",), {"keys.yaml": "secret"}, kind="Secret"),
    Change("MY_TOKEN has its value in the manifest", (*RAY, "env"), env("MY_TOKEN")),
    Change("has 48 characters, more than 47", ("metadata", "name"), "x" * 48),
    Change("is no DNS label", ("metadata", "name"), "1st"),
    Change("2 groups have the name 'head'", (*WORKERS, "groupName"), "head"),
    Change(
        "'NewClusters' is none of",
        (*UPGRADE, "type"),
        "NewClusters",
    ),
    Change("needs enableInTreeAutoscaling", (*CLUSTER, "enableInTreeAutoscaling"), False),
    Change("stepSizePercent is more", (*UPGRADE, "clusterUpgradeOptions", "stepSizePercent"), 60),
    Change(
        "needs clusterUpgradeOptions.gatewayClassName",
        (*UPGRADE, "clusterUpgradeOptions", "gatewayClassName"),
        DELETED,
    ),
    Change("mean nothing to 'NewCluster'", (*UPGRADE, "type"), "NewCluster"),
    Change("rayVersion 2.59.0 is not", (*CLUSTER, "rayVersion"), "2.59.0"),
    Change("num-cpus is not 0", (*HEAD, "rayStartParams", "num-cpus"), "2"),
    Change("replicas 4 is not within 2 and 3", (*WORKERS, "replicas"), 4),
    Change("autoscalerOptions.version is not v2", (*CLUSTER, "autoscalerOptions", "version"), "v1"),
    Change("restartPolicy is not Never", (*POD, "restartPolicy"), "Always"),
    Change("the autoscaler beside it has no token", (*HEAD_POD, "automountServiceAccountToken"), False),
    Change("contradicts gcsFaultToleranceOptions", (*HEAD_POD, "containers", 0, "env"), env("RAY_REDIS_ADDRESS")),
    Change("NPUs differ: 8 by tensor_parallel_size", (*RAY, "resources", "limits", "huawei.com/Ascend910"), "4"),
    Change("NPUs differ: 8 by tensor_parallel_size", (*WORKERS, "rayStartParams", "resources"), "'{\"NPU\": 4}'"),
    Change("NPUs differ: 8 by tensor_parallel_size", (*WORKERS, "rayStartParams"), {}),
    Change("resources cannot be read", (*WORKERS, "rayStartParams", "resources"), '{"NPU": 8}'),
    Change("resources cannot be read", (*WORKERS, "rayStartParams", "resources"), "'{\"NPU\": 8.0}'"),
    Change("may not stand beside rayStartParams", (*WORKERS, "resources"), {"NPU": "8"}),
    Change("3 replicas of one worker each, but at most 2", (*WORKERS, "maxReplicas"), 2),
    Change("num_threads 2 on a limit of 1 CPUs", (*RAY, "resources", "limits", "cpu"), "1", overlay="cpu"),
    Change("/mnt/models/Qwen3-32B is on no volume", (*RAY, "volumeMounts", 0, "mountPath"), "/elsewhere"),
]

KUBERNETES_OWN = [
    Change("('maxUnavailables' was unexpected)", ("spec", "maxUnavailables"), 1, kind="PodDisruptionBudget"),
    Change("('podSelecter' was unexpected)", ("spec", "podSelecter"), {}, kind="NetworkPolicy"),
    Change("'many' is not of type 'integer'", ("spec", "replicas"), "many", kind="StatefulSet"),
    Change("pod/replicas", (*POD, "terminationGracePeriod"), 60),
    Change("pod/head", (*HEAD_POD, "containers", 0, "ports", 0, "containerPort"), "six"),
]

CRD_ONLY = [
    Change("('upgradeStrategies' was unexpected)", ("spec", "upgradeStrategies"), {}),
    Change("workerGroupSpecs[0].minReplicas: '2' is not of type", (*WORKERS, "minReplicas"), "2"),
    Change("'groupName' is a required property", (*WORKERS, "groupName"), DELETED),
    Change("'tokens' is not one of", (*CLUSTER, "authOptions", "mode"), "tokens"),
    Change("a second entry for ['containerPort', 'protocol']", (*RAY, "ports", 1, "containerPort"), 8000),
    Change("('podMetricEndpoints' was unexpected)", ("spec", "podMetricEndpoints"), [], kind="PodMonitor"),
]

SERVE_CONFIG = [
    ("proxy_locations: unknown key", "proxy_location:", "proxy_locations:"),
    ("http_options.prot: unknown key", "port: 8000", "prot: 8000"),
    ("applications.0.deployments.1.autoscaling_config.max_replica: unknown key", "max_replicas:", "max_replica:"),
    ("applications.0.deployments.0.ray_actor_options.num_cpus: ", "num_cpus: 0.5", "num_cpus: half"),
    ("not one with import_path", "ray_lora.serve.app:build_app", "ray_lora.serve.app:app"),
    ("applications.0.args: unknown key 'max_lora'; did you mean 'max_loras'?", "max_loras:", "max_lora:"),
    ("applications.0.args: tensor_parallel_size: ", "tensor_parallel_size: 8", "tensor_parallel_size: 0"),
    ("NPUs differ: 4 by tensor_parallel_size", "tensor_parallel_size: 8", "tensor_parallel_size: 4"),
    ("NPUs differ: 0 by tensor_parallel_size", "device: npu", "device: cpu"),
    ("4 replicas of one worker each, but at most 3", "max_replicas: 3", "max_replicas: 4"),
    ("host 127.0.0.1 cannot be reached", "host: 0.0.0.0", "host: 127.0.0.1"),
    ("/models/Qwen3-32B is on no volume", "model: /mnt/models", "model: /models"),
    ("/var/registry.db is on no volume", "/mnt/adapters/registry.db", "/var/registry.db"),
    ("would be taken twice", "num_cpus: 1", "num_cpus: 1\n      placement_group_bundles: [{CPU: 1, NPU: 8}]"),
    ("not more than Serve's 300 s", "num_replicas: 2", "num_replicas: 2\n      graceful_shutdown_timeout_s: 300"),
    ("'port' is there twice", "port: 8000", "port: 8000\n  port: 8001"),
]


def mutated(manifests: Manifests, change: Change) -> Manifests:
    documents = deepcopy(manifests.documents)
    place: Any = next(document for document in documents if document["kind"] == change.kind)
    for key in change.path[:-1]:
        place = place[key]
    if change.value is DELETED:
        del place[change.path[-1]]
    else:
        place[change.path[-1]] = change.value
    return Manifests(documents)


def assert_told(problems: list[str], told: str) -> None:
    assert any(told in problem for problem in problems), problems


@pytest.mark.parametrize("change", [*OUR_RULES, *KUBERNETES_OWN], ids=str)
def test_a_wrong_value_is_told(change: Change, build_overlay: Callable[[str], Manifests]) -> None:
    assert_told(find_problems(mutated(build_overlay(change.overlay), change), {}), change.told)


@pytest.mark.parametrize("change", CRD_ONLY, ids=str)
def test_what_a_crd_forbids_is_told(
    change: Change, build_overlay: Callable[[str], Manifests], crds: dict[Key, Draft202012Validator]
) -> None:
    assert_told(find_problems(mutated(build_overlay(change.overlay), change), crds), change.told)


@pytest.mark.parametrize(("told", "good", "bad"), SERVE_CONFIG, ids=[told for told, _, _ in SERVE_CONFIG])
def test_a_wrong_serve_config_is_told(
    told: str, good: str, bad: str, build_overlay: Callable[[str], Manifests]
) -> None:
    manifests = build_overlay("ascend-ha")
    text = manifests.ray_service["spec"]["serveConfigV2"]
    assert good in text
    change = Change(told, ("spec", "serveConfigV2"), text.replace(good, bad))
    assert_told(find_problems(mutated(manifests, change), {}), told)
