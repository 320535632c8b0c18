"""What a caller is told of a rank's end says what happened, in one line."""

from ray.exceptions import ActorDiedError, OutOfMemoryError

from ray_lora.cluster.ray_tp import _reason

MONITOR = """1 worker(s) were killed due to the node running low on memory. Memory on the node was 3GB used / 3GB limit
OOM kill reason: Memory usage exceeded threshold
Top 10 memory users: PID	MEM(GB)	COMMAND
30806	0.25	ray::Worker
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io
"""


def test_a_rank_that_rays_memory_monitor_killed_died_for_lack_of_memory() -> None:
    first = MONITOR.splitlines()[0]
    assert _reason(OutOfMemoryError(MONITOR)) == f"OutOfMemoryError: {first}"


def test_of_any_other_end_the_last_line_tells() -> None:
    assert _reason(ValueError("Traceback:\n  somewhere\nMemoryError: no room\n")) == "ValueError: MemoryError: no room"
    assert _reason(ActorDiedError()) == "ActorDiedError: The actor died unexpectedly before finishing this task."
    assert _reason(ValueError()) == "ValueError: "
