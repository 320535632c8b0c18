"""One file per question; `python -m benchmarks` asks them all."""
