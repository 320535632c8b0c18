"""A stand-in for `torch.npu.graph`: it records what operators are called with, and replays just that.

A replay calls the recorded operators again, in order, on the recorded tensors: no Python of the model runs, and what
was a number, a list or another tensor at the capture stays so, as on the device. What torch_npu adds to a capture in
Python runs as it is: its dispatch mode, its handler for attention, and `update`. A replay stops at an event that is not
recorded yet, and goes on when it is.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch_npu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_npu.npu import graphs
from torch_npu.npu._npugraph_handlers import npugraph_handler

Call = list[Any]
"""What is replayed: function, arguments, keyword arguments and the tensors that hold the results."""


class Recorder(TorchDispatchMode):
    """Runs every operator once, and keeps how it was called."""

    current: "Recorder | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append([func, args, dict(kwargs or {}), result])
        return result

    def launch(self, function: Callable[..., None], *args: Any) -> None:
        """A kernel that no dispatcher sees."""
        self.calls.append([function, args, {}, None])


class Update:
    """Between `graph_task_update_begin` and `end` a call is not run: its lists take the recorded call's place."""

    call: Call | None = None

    @classmethod
    def begin(cls, stream: Any, handle: list[Call]) -> None:
        (cls.call,) = handle

    @classmethod
    def end(cls, stream: Any) -> None:
        cls.call = None


class TaskGroup:
    """The calls between `graph_task_group_begin` and `end` are what a handle stands for."""

    start = 0

    @classmethod
    def begin(cls, stream: Any) -> None:
        assert Recorder.current is not None, "outside of a capture"
        cls.start = len(Recorder.current.calls)

    @classmethod
    def end(cls, stream: Any) -> list[Call]:
        assert Recorder.current is not None
        return Recorder.current.calls[cls.start :]


def update_recorded(func: Any, kwargs: dict[str, Any]) -> bool:
    """Take over what is no tensor, if an update is under way; tensors keep their places whatever is passed."""
    if Update.call is None:
        return False
    assert Update.call[0] is func
    Update.call[2].update({name: value for name, value in kwargs.items() if not holds_tensors(value)})
    return True


def holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and any(isinstance(part, Tensor) for part in value))


class RecordedEvent:
    """In place of `torch.npu.ExternalEvent`: a captured wait, which the event's next record lets through."""

    def __init__(self) -> None:
        self.is_recorded = False

    def wait(self, stream: Any) -> None:
        assert Recorder.current is not None
        Recorder.current.calls.append([self])

    def reset(self, stream: Any) -> None:
        """A replay resets what it has waited for."""

    def record(self, stream: Any) -> None:
        self.is_recorded = True
        next(RecordedGraph.running, None)


class RecordedGraph:
    """In place of `torch.npu.NPUGraph`."""

    num_replays = 0
    running: Iterator[None] = iter(())

    def __init__(self) -> None:
        self.graph_dispatch_mode = graphs._GraphDispatchMode()
        self.auto_dispatch_capture = False
        self.recorder = Recorder()

    update = graphs.NPUGraph.update

    def replay(self) -> None:
        assert next(RecordedGraph.running, "ended") == "ended", "the last replay still waits for an event"
        RecordedGraph.num_replays += 1
        RecordedGraph.running = self._run()
        next(RecordedGraph.running, None)

    def _run(self) -> Iterator[None]:
        for func, *rest in self.recorder.calls:
            if isinstance(func, RecordedEvent):
                while not func.is_recorded:
                    yield
                func.is_recorded = False
            else:
                args, kwargs, held = rest
                write_back(held, func(*args, **kwargs))


def write_back(held: Any, result: Any) -> None:
    """A result goes where the captured one lay, unless it lies there already."""
    if isinstance(held, Tensor):
        if held.data_ptr() != result.data_ptr():
            held.copy_(result)
    elif isinstance(held, (tuple, list)):
        for one, other in zip(held, result, strict=True):
            write_back(one, other)
    elif hasattr(result, "wait"):
        result.wait()


class record_graph:
    """In place of `torch.npu.graph`."""

    def __init__(
        self,
        npu_graph: RecordedGraph,
        pool: Any = None,
        stream: Any = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        npu_graph.auto_dispatch_capture = auto_dispatch_capture
        self._modes: Sequence[TorchDispatchMode] = (npu_graph.recorder,)
        if auto_dispatch_capture:
            self._modes = (npu_graph.recorder, npu_graph.graph_dispatch_mode)
        self._recorder = npu_graph.recorder

    def __enter__(self) -> None:
        Recorder.current = self._recorder
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        Recorder.current = None


def keep_tensors(value: Any) -> Any:
    """torch_npu holds tensors of a device by weak references and copies others; here, all are of a device."""
    return value if isinstance(value, Tensor) else copy.deepcopy(value)


def install() -> None:
    """Let captures run without a device."""
    for module in (graphs, npugraph_handler):
        vars(module)["deepcopy"] = keep_tensors
    graphs._GraphDispatchMode.update_stream = object()
    vars(graphs).update(
        graph_task_group_begin=TaskGroup.begin,
        graph_task_group_end=TaskGroup.end,
        graph_task_update_begin=Update.begin,
        graph_task_update_end=Update.end,
    )
    vars(torch_npu.npu).update(
        NPUGraph=RecordedGraph,
        graph=record_graph,
        graph_pool_handle=object,
        current_stream=object,
        ExternalEvent=RecordedEvent,
        stream=lambda stream: nullcontext(),
    )
