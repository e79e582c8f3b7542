"""`pagewire.LLM` with the real model: it starts the stack, answers, and leaves nothing."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagewire import LLM, BeamSearchParams, SamplingParams
from pagewire.errors import StartupError
from pagewire.tools.llm.outputs import PromptError

SMALL: Any = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def stacks() -> list[psutil.Process]:
    """Returns all processes of the stacks that this program has started."""
    children = psutil.Process().children()
    stacks = [child for child in children if "pagewire.stack.own_stack" in " ".join(child.cmdline())]
    return [process for stack in stacks for process in (stack, *stack.children(recursive=True))]


@contextmanager
def without_collector() -> Iterator[None]:
    """Leaves only the counts of references to free objects."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_a_batch_where_an_event_loop_runs(smollm2_gguf: Path) -> None:
    """Runs a batch as a notebook does: the calls block although an event loop runs."""
    with LLM(
        str(smollm2_gguf),
        max_model_len=512,
        kv_cache_memory_bytes="64MiB",
        max_concurrency=16,
        max_num_batched_tokens=64,
    ) as llm:
        processes = stacks()
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


def test_nothing_is_left_of_one_that_is_no_longer_used(quick_model: Path) -> None:
    """One after the other, each after an error, without the garbage collector."""
    with without_collector():
        for _ in range(2):
            llm = LLM(str(quick_model), **SMALL)
            processes = stacks()
            assert len(processes) >= 4
            if not (fork := os.fork()):
                llm.close()  # the copy of the program does not own the stack
                os._exit(0)
            os.waitpid(fork, 0)
            with pytest.raises(PromptError, match="prompt 0: token_ids"):
                llm.generate([1_000_000])
            assert len(llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
            del llm
            assert not stacks() and not any(process.is_running() for process in processes)


def test_nothing_is_left_of_one_that_cannot_start(quick_model: Path) -> None:
    with pytest.raises(StartupError):
        LLM(str(quick_model), kv_cache_memory_bytes="1KiB", **SMALL)
    assert not stacks()


def test_the_calls_of_vllms_class(smollm2_gguf: Path) -> None:
    with LLM(str(smollm2_gguf), kv_cache_memory_bytes="64MiB", **SMALL) as llm:
        tokenizer = llm.get_tokenizer()
        ids = tokenizer.encode("The capital of France is")
        assert tokenizer.decode(ids) == "The capital of France is"
        assert tokenizer.eos_token == "<|im_end|>" and tokenizer.decode(tokenizer.eos_token_id) == "<|im_end|>"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
        assert (
            tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, chat_template=template)
            == "[Hi]"
        )

        [found] = llm.beam_search([{"prompt_token_ids": ids}], BeamSearchParams(beam_width=3, max_tokens=4))
        scores = [sequence.cum_logprob / len(sequence.logprobs) for sequence in found.sequences]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True)
        best = found.sequences[0]
        assert best.tokens[: len(ids)] == ids and best.text == tokenizer.decode(best.tokens) and "Paris" in best.text

        greedy = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, logprobs=2)
        [before] = llm.generate({"prompt": "The capital of France is"}, greedy, use_tqdm=False)
        assert before.prompt_logprobs is not None and before.prompt_logprobs[0] is None
        assert [
            set(found) >= {token} for token, found in zip(ids[1:], before.prompt_logprobs[1:], strict=True) if found
        ]
        llm.sleep(level=2)
        llm.wake_up()
        assert llm.reset_prefix_cache()
        [after] = llm.generate([ids], greedy, use_tqdm=False)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids and after.finished
