"""`pagewire.LLM` with the real model: it starts the stack, answers, and leaves nothing."""

from pathlib import Path

import psutil

from pagewire import LLM, SamplingParams


async def test_a_batch_where_an_event_loop_runs(smollm2_gguf: Path) -> None:
    """Runs a batch as a notebook does: the calls block although an event loop runs."""
    with LLM(
        str(smollm2_gguf),
        max_model_len=512,
        kv_cache_memory_bytes="64MiB",
        max_concurrency=16,
        max_num_batched_tokens=64,
    ) as llm:
        stack = [
            child for child in psutil.Process().children() if "pagewire.stack.own_stack" in " ".join(child.cmdline())
        ]
        processes = [process for child in stack for process in (child, *child.children(recursive=True))]
        commands = [" ".join(process.cmdline()) for process in processes[1:]]
        counting = (f"{i}, {i + 1}, {i + 2}, {i + 3}," for i in range(1, 41))
        outputs = llm.generate(counting, SamplingParams(temperature=0, max_tokens=3))
        assert [output.outputs[0].text for output in outputs[:3]] == [" 5,", " 6,", " 7,"]
        assert len(outputs) == 40 and outputs[39].prompt == "40, 41, 42, 43,"
        question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
        [answer] = llm.chat(question, SamplingParams(temperature=0, max_tokens=32))
        assert "Paris" in answer.outputs[0].text and answer.outputs[0].finish_reason == "stop"
    assert not any("gateway" in command for command in commands), "REST is not used"
    assert len(processes) >= 4
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
