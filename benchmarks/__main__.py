"""Ask every question in turn, each in a process of its own so that none inherits another's threads or memory."""

import subprocess
import sys
from pathlib import Path

QUESTIONS = (
    "lora_kernel",
    "lora_dense",
    "throughput",
    "llama_cpp",
    "fairness",
    "http_clients",
    "overload",
    "tensor_parallel",
    "memory",
    "adapter_loads",
    "adapter_tiers",
    "adapter_churn",
    "adapter_compress",
    "routing",
)


def main() -> None:
    names = sys.argv[1:] or QUESTIONS
    root = Path(__file__).parents[1]
    commands = {name: [sys.executable, "-m", f"benchmarks.{name}"] for name in names}
    failed = [name for name, command in commands.items() if subprocess.run(command, cwd=root).returncode]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
