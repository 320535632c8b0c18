"""Check overlays; see the package's docstring."""

import sys
from pathlib import Path

from k8s.checks.check import find_problems
from k8s.checks.custom_resources import CRDS, load_crds
from k8s.checks.manifests import OVERLAYS, build


def main() -> None:
    overlays = [Path(argument) for argument in sys.argv[1:]] or OVERLAYS
    crds = load_crds(CRDS)
    if not crds:
        print(f"no CRDs in {CRDS}: custom resources are not checked against them", file=sys.stderr)
    found = [(overlay, find_problems(build(overlay), crds)) for overlay in overlays]
    for overlay, problems in found:
        print(*(f"{overlay}: {problem}" for problem in problems or ["ok"]), sep="\n")
    sys.exit(any(problems for _, problems in found))


if __name__ == "__main__":
    main()
