"""Our own rules for the RayService: what KubeRay, Ray's autoscaler and ray_lora must agree on."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

from ray.autoscaler._private.kuberay.autoscaling_config import _get_ray_resources_from_group_spec as autoscaler_view

from k8s.checks.manifests import ROOT, Group, Manifests
from k8s.checks.pod_rules import quantity
from k8s.checks.serve_config import ServeConfig
from ray_lora.cluster.ray_tp import device_resources

MAX_NAME_LEN = 47
UPGRADES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
VENDOR = "huawei.com/"
FAULT_TOLERANCE_ENV = ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "RAY_external_storage_namespace")


def names(manifests: Manifests, _: ServeConfig) -> Iterator[str]:
    """The RayService leaves room for what KubeRay appends; no two groups are namesakes."""
    name = manifests.ray_service["metadata"]["name"]
    if len(name) > MAX_NAME_LEN:
        yield f"the name {name!r} has {len(name)} characters, more than {MAX_NAME_LEN}"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"the name {name!r} is no DNS label that begins with a letter"
    counts = Counter(group.name for group in manifests.groups)
    yield from (f"{count} groups have the name {group!r}" for group, count in counts.items() if count > 1)


def upgrade(manifests: Manifests, _: ServeConfig) -> Iterator[str]:
    """The strategy is one that the operator knows, and has what it needs."""
    strategy = manifests.ray_service["spec"].get("upgradeStrategy", {})
    kind = strategy.get("type", "NewCluster")
    if kind not in UPGRADES:
        yield f"upgradeStrategy.type {kind!r} is none of {', '.join(UPGRADES)}"
    options = strategy.get("clusterUpgradeOptions")
    if kind != "NewClusterWithIncrementalUpgrade":
        if options:
            yield f"clusterUpgradeOptions mean nothing to {kind!r}"
        return
    if not manifests.cluster.get("enableInTreeAutoscaling"):
        yield f"{kind} needs enableInTreeAutoscaling"
    missing = {"gatewayClassName", "stepSizePercent", "intervalSeconds"} - (options or {}).keys()
    yield from (f"{kind} needs clusterUpgradeOptions.{key}" for key in sorted(missing))
    if options and options.get("stepSizePercent", 0) > options.get("maxSurgePercent", 100):
        yield "stepSizePercent is more than maxSurgePercent"


def cluster(manifests: Manifests, _: ServeConfig) -> Iterator[str]:
    """Ray's version is the locked one, the head runs no work, and the autoscaler is asked for by version."""
    spec = manifests.cluster
    if (locked := _locked_ray()) != spec.get("rayVersion"):
        yield f"rayVersion {spec.get('rayVersion')} is not {locked} of requirements.lock"
    if manifests.head.start_params.get("num-cpus") != "0":
        yield "head: num-cpus is not 0"
    for group in manifests.workers:
        low, now, high = (group.spec.get(key, 0) for key in ("minReplicas", "replicas", "maxReplicas"))
        if not low <= now <= high:
            yield f"{group.name}: replicas {now} is not within {low} and {high}"
    if spec.get("enableInTreeAutoscaling"):
        if spec.get("autoscalerOptions", {}).get("version") != "v2":
            yield "autoscalerOptions.version is not v2"
        for group in manifests.groups:
            if group.template.spec.get("restartPolicy", "Never") != "Never":
                yield f"{group.name}: restartPolicy is not Never, which the autoscaler needs"
        if not manifests.head.template.spec.get("automountServiceAccountToken", True):
            yield "head: the autoscaler beside it has no token"
    if "gcsFaultToleranceOptions" in spec:
        for group in manifests.groups:
            for variable in group.ray_container.get("env", []):
                if variable["name"] in FAULT_TOLERANCE_ENV:
                    yield f"{group.name}: {variable['name']} contradicts gcsFaultToleranceOptions"


def npus(manifests: Manifests, config: ServeConfig) -> Iterator[str]:
    """Kubernetes, `ray start`, Ray's autoscaler and a replica's ranks count the same NPUs."""
    if "placement_group_bundles" in config.deployments.get("LLMReplica", {}):
        yield "placement_group_bundles: the ranks reserve a placement group of their own, so these would be taken twice"
    engine = config.engine
    for group in manifests.workers:
        counts = {
            "tensor_parallel_size": engine.tensor_parallel_size if engine.device == "npu" else 0,
            "the placement group": int(device_resources(engine).get("NPU", 0)) * engine.tensor_parallel_size,
            "the limit": sum(int(quantity(limit)) for name, limit in group.limits.items() if name.startswith(VENDOR)),
        }
        try:
            counts["rayStartParams"] = _npus_of_start(group)
            counts["the autoscaler's reading"] = autoscaler_view(group.spec, is_head=False).get("NPU", 0)
        except (AssertionError, AttributeError, TypeError, ValueError) as error:
            yield f"{group.name}: rayStartParams.resources cannot be read: {error!r}"
        if len(set(counts.values())) > 1:
            yield f"{group.name}: NPUs differ: {', '.join(f'{count} by {who}' for who, count in counts.items())}"


def capacity(manifests: Manifests, config: ServeConfig) -> Iterator[str]:
    """Workers enough for all replicas, and threads no more than a worker's CPUs."""
    if (pods := sum(group.spec.get("maxReplicas", 0) for group in manifests.workers)) < config.max_replicas:
        yield f"{config.max_replicas} replicas of one worker each, but at most {pods} workers"
    engine = config.engine
    if engine.device == "npu":
        return
    for group in manifests.workers:
        limit = group.limits.get("cpu", 0)
        if engine.num_threads is None or engine.num_threads * engine.tensor_parallel_size > quantity(limit):
            yield f"{group.name}: num_threads {engine.num_threads} on a limit of {limit} CPUs"


def addresses(manifests: Manifests, config: ServeConfig) -> Iterator[str]:
    """Serve listens to other pods, and every absolute path of `args` is on a volume of every pod."""
    if (host := config.content.get("http_options", {}).get("host")) != "0.0.0.0":
        yield f"http_options.host {host} cannot be reached from other pods"
    engine = config.engine
    paths = [
        engine.model,
        engine.api_keys_file,
        engine.tokenizer,
        engine.adapter_store_dir,
        engine.lora_registry_path,
        engine.lora_resolver_dir,
    ]
    paths += [module.path for module in engine.lora_modules if module.path.startswith("/")]
    for group in manifests.groups:
        mounts = [PurePosixPath(mount["mountPath"]) for mount in group.ray_container.get("volumeMounts", [])]
        for path in filter(None, paths):
            if not any(PurePosixPath(path).is_relative_to(mount) for mount in mounts):
                yield f"{group.name}: {path} is on no volume"


def _locked_ray() -> str:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return next(line.removeprefix("ray==") for line in lines if line.startswith("ray=="))


def _npus_of_start(group: Group) -> int:
    """As the shell and `ray start` read the parameter.

    Raises:
        ValueError: they cannot.
    """
    if "resources" in group.spec and group.start_params.keys() & {"resources", "num-cpus", "memory"}:
        raise ValueError("the group's own `resources` may not stand beside rayStartParams")
    words = shlex.split(group.start_params.get("resources", "{}"))
    if len(words) != 1:
        raise ValueError(f"the shell makes {len(words)} words of it")
    return int(json.loads(words[0]).get("NPU", 0))


RULES = (names, upgrade, cluster, npus, capacity, addresses)
