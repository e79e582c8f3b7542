"""Batches of prompts: each prompt with its own parameters, a window of them in flight, answers in order."""

import importlib
import importlib.util
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pagewire.client import Client
from pagewire.tools.llm.connection import Connection
from pagewire.tools.llm.outputs import BeamSearchOutput, BeamSearchSequence, PromptError, RequestOutput
from pagewire.tools.llm.progress import Progress, counter
from pagewire.tools.llm.prompts import LoRARequest, client_options, each, length, prompt_of
from pagewire.tools.llm.sampling import SamplingParams
from pagewire.tools.llm.window import Answer, ask_all

Adapters = LoRARequest | Sequence[LoRARequest | None] | None
# A prompt and its own values, by their names in vLLM's calls.
Item = dict[str, Any]


class Batches:
    """Asks the stack of a connection for whole batches. progress: for calls that name none."""

    def __init__(self, connection: Connection, window: int, progress: bool | None) -> None:
        self._connection = connection
        self._window = window
        self._progress = progress
        self._adapters: set[LoRARequest] = set()

    def items(self, prompts: Iterable[Any], *, lora_request: Adapters, **given: Any) -> Iterator[Item]:
        """Returns each prompt with its own of the values, which are given once or for each prompt, and loads the
        adapters. Raises ValueError for a wrong number of values."""
        given = {"lora_request": self._loaded(lora_request), **given}
        if any(isinstance(values, Sequence) for values in given.values()):
            prompts = list(prompts)
        columns = {name: each(values, length(prompts), name) for name, values in given.items()}
        single = {name: given[name] for name, values in columns.items() if values is None}
        several = {name: values for name, values in columns.items() if values is not None}
        return (
            {"prompt": prompt, **single, **{name: values[i] for name, values in several.items()}}
            for i, prompt in enumerate(prompts)
        )

    def generator(self, options: Mapping[str, Any]) -> Callable[[Item], Awaitable[RequestOutput]]:
        """Returns the function that generates for an item."""

        async def generate(item: Item) -> RequestOutput:
            prompt, own = prompt_of(item["prompt"])
            params: SamplingParams = item["sampling_params"] or SamplingParams()
            output = RequestOutput(prompt, lora_request=item["lora_request"])
            given: Any = {**params.options(), **own, **_model(item["lora_request"]), **options}
            if item["priority"] is not None:
                given["priority"] = item["priority"]
            async for response in self._connection.client.generate(prompt, **given):
                output.add(response)
            if not params.detokenize:
                for one in output.outputs:
                    one.text = ""
            return output

        return generate

    def searcher(self, options: Mapping[str, Any]) -> Callable[[Item], Awaitable[BeamSearchOutput]]:
        """Returns the function that searches for an item."""
        generate = self.generator(options)

        async def search(item: Item) -> BeamSearchOutput:
            return await _with_texts(self._connection.client, await generate(item))

        return search

    def numbers(
        self,
        texts: Iterable[Any],
        ask: Callable[..., Awaitable[Any]],
        use_tqdm: Progress,
        pooling_params: Any,
        lora_request: Adapters,
        options: Mapping[str, Any],
    ) -> list[Any]:
        """Returns what `ask` returns for each text, which it gets with the options of the client."""
        options = client_options(options)

        async def asked(item: Item) -> Any:
            text, own = prompt_of(item["prompt"])
            pooling = item["pooling_params"]
            given = {**own, **(pooling.options() if pooling else {}), **_model(item["lora_request"]), **options}
            return await ask(text, **given)

        items = self.items(texts, pooling_params=pooling_params, lora_request=lora_request)
        return raising(self.ask(items, asked, use_tqdm, "texts", length(texts)))

    def ask(
        self,
        items: Iterable[Item],
        ask: Callable[[Item], Awaitable[Any]],
        use_tqdm: Progress,
        unit: str,
        total: int,
        window: int | None = None,
    ) -> list[Any]:
        """Returns the answers or errors in the order of the items."""
        with counter(self._progress if use_tqdm is None else use_tqdm, total, unit) as progress:
            return self._connection.run(ask_all(items, ask, window or self._window, progress))

    def _loaded(self, adapters: Adapters) -> Adapters:
        """Loads adapters that have a path, each once."""
        for one in [adapters] if isinstance(adapters, LoRARequest) else adapters or ():
            if one is not None and one.lora_path and one not in self._adapters:
                self._connection.run(self._connection.client.load_adapter(one.lora_name, one.lora_path))
                self._adapters.add(one)
        return adapters


def _model(adapter: LoRARequest | None) -> dict[str, str]:
    return {} if adapter is None else {"model": adapter.lora_name}


async def _with_texts(client: Client, found: RequestOutput) -> BeamSearchOutput:
    """Returns the outputs of a search with their prompt, as vLLM does."""
    sequences = []
    for output in found.outputs:
        tokens = [*found.prompt_token_ids, *output.token_ids]
        sequences.append(
            BeamSearchSequence(
                found.prompt,
                tokens,
                output.logprobs or [],
                found.lora_request,
                output.cumulative_logprob or 0.0,
                await client.detokenize(tokens),
                output.finish_reason,
                output.stop_reason,
            )
        )
    return BeamSearchOutput(sequences)


def tensor(numbers: list[float]) -> Any:
    """Returns numbers as a tensor of PyTorch, if that is installed."""
    if importlib.util.find_spec("torch") is None:
        return numbers
    return importlib.import_module("torch").tensor(numbers)


def raising(answers: list[Answer | PromptError]) -> list[Answer]:
    """Returns the answers. Raises the first error."""
    error = next((answer for answer in answers if isinstance(answer, PromptError)), None)
    if error is None:
        return answers  # type: ignore[return-value]
    # A traceback keeps the caller's variables; with the error among them, the LLM would live until the next collection.
    answers.clear()
    try:
        raise error
    finally:
        del error
