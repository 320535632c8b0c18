"""All checks of one overlay, as lines that say what is wrong."""

from jsonschema import Draft202012Validator

from k8s.checks import core_objects, custom_resources, pod_rules, ray_rules, serve_config
from k8s.checks.custom_resources import Key
from k8s.checks.manifests import Document, ManifestError, Manifests


def find_problems(manifests: Manifests, crds: dict[Key, Draft202012Validator]) -> list[str]:
    """Nothing, if the manifests are right. Custom resources are not compared with their CRDs if `crds` is empty.

    What is wrong in its form is told alone, for our own rules rely on the form.
    """
    found = []
    for document in manifests.documents:
        if crds and not is_core(document):
            name = f"{document['kind']} {document['metadata']['name']}"
            found += [f"{name}: {problem}" for problem in custom_resources.problems(document, crds)]
    if found:
        return found
    core = [document for document in manifests.documents if is_core(document)]
    if found := core_objects.problems([*core, *manifests.pods()]):
        return found
    try:
        config = serve_config.read(manifests.ray_service["spec"].get("serveConfigV2", ""))
    except ManifestError as error:
        return [f"serveConfigV2: {error}"]
    return [line for rule in (*pod_rules.RULES, *ray_rules.RULES) for line in rule(manifests, config)]


def is_core(document: Document) -> bool:
    """Whether Kubernetes itself knows the kind: `v1`, `apps/v1`, `policy/v1`, `networking.k8s.io/v1`."""
    group = document["apiVersion"].rpartition("/")[0]
    return "." not in group or group.endswith(".k8s.io")
