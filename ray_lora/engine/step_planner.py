"""From what the scheduler has decided to the message that the ranks get."""

from collections.abc import Mapping
from itertools import islice

from ray_lora.engine.sequence_state import SequenceState
from ray_lora.step import AdapterPlan, SequencePlan, SequenceStart, StepPlan


def plan_step(
    step_id: int, scheduled: Mapping[SequenceState, int], page_ins: list[AdapterPlan], finished: list[int]
) -> StepPlan:
    """
    Args:
        scheduled: by sequence, how many tokens it computes; one that the ranks do not know yet is started.
    """
    rows = sorted(scheduled.items(), key=lambda item: item[0].adapter_version or "")
    indices: dict[str, int] = {}
    adapters: list[AdapterPlan] = []
    for sequence, _ in rows:
        if sequence.adapter is not None and sequence.adapter.manifest.version not in indices:
            indices[sequence.adapter.manifest.version] = len(adapters)
            adapters.append(sequence.adapter.plan)
    return StepPlan(
        step_id=step_id,
        sequences=tuple(
            _plan_sequence(sequence, num_tokens, indices.get(sequence.adapter_version or "", -1))
            for sequence, num_tokens in rows
        ),
        adapters=tuple(adapters),
        page_ins=tuple(page_ins),
        starts=tuple(_start(sequence) for sequence in scheduled if not sequence.started),
        finished=tuple(finished),
    )


def _start(sequence: SequenceState) -> SequenceStart:
    sequence.started = True
    prompt = tuple(islice(sequence.token_ids, sequence.num_prompt_tokens))
    return SequenceStart(sequence.request_id, prompt, sequence.sampling_params, sequence.seed, sequence.stop_token_ids)


def _plan_sequence(sequence: SequenceState, num_tokens: int, adapter: int) -> SequencePlan:
    start = sequence.num_computed_tokens
    stop = start + num_tokens
    sample = stop == sequence.num_tokens
    return SequencePlan(
        request_id=sequence.request_id,
        token_ids=tuple(sequence.token_ids[start:stop]),
        start=start,
        block_ids=tuple(sequence.block_ids),
        adapter=adapter,
        sample=sample,
        num_output_tokens=sequence.num_output_tokens,
        prompt_logprobs=sequence.sampling_params.prompt_logprobs is not None and start < sequence.num_prompt_tokens,
        allowed=sequence.grammar.allowed if sample and sequence.grammar is not None else None,
    )
