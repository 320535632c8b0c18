"""Check overlays; see the package's docstring."""

import sys
from pathlib import Path

from k8s.checks.check import find_problems, known_crds
from k8s.checks.manifests import OVERLAYS, build


def main() -> None:
    overlays = [Path(argument) for argument in sys.argv[1:]] or OVERLAYS
    crds = known_crds()
    if not crds:
        print("no CRDs found: custom resources are not checked against them", file=sys.stderr)
    found = [(overlay, find_problems(build(overlay), crds)) for overlay in overlays]
    for overlay, problems in found:
        print(*(f"{overlay}: {problem}" for problem in problems or ["ok"]), sep="\n")
    sys.exit(any(problems for _, problems in found))


if __name__ == "__main__":
    main()
