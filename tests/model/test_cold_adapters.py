"""A registry larger than host memory, on a real model: every request is answered with its own adapter."""

from pathlib import Path

from ray_lora import LLM, SamplingParams
from tests.tiny import expected_tokens, make_adapter, make_checkpoint, random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_ten_adapters_of_which_three_fit_host_memory(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    adapters = {f"a{i}": str(make_adapter(tmp_path / f"a{i}", checkpoint, i)) for i in range(10)}
    prompts = random_prompts(20, 320)
    names = [f"a{(3 * i) % 10}" for i in range(20)]
    args = {"max_loras": 2, "max_cpu_loras": 3, "kv_cache_memory_bytes": 1 << 23, "adapter_store_max_bytes": 1 << 30}
    with LLM(str(checkpoint), adapters, adapter_store_dir=str(tmp_path / "store"), **args) as llm:
        produced = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, names)]
        assert len(llm._engine._loader.host._held) <= 3
    for prompt, name, tokens in zip(prompts, names, produced, strict=True):
        assert tokens == expected_tokens(checkpoint, Path(adapters[name]), [prompt], 8)[0]
