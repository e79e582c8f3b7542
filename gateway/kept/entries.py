"""An entry of the log of a generation: the outputs that arrived together, of one choice or of several."""

from collections.abc import Iterable, Sequence

import msgspec

from pagewire.gateway.core.outputs import ChoiceDelta, ChoiceOutputs
from pagewire.gateway.core.reply import PendingChoice
from pagewire.v1.inference_pb2 import GenerateResponse

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, bytes]]).decode


def encode_entry(choices: Sequence[PendingChoice], outputs: ChoiceOutputs, with_prompt: set[int]) -> bytes:
    """Returns the entry of these outputs.

    outputs: the reply's latest, so that the state of `choices` includes them. with_prompt: the choices with a prompt
    in this entry or an earlier one; this function adds to it.
    """
    entry = []
    for index, output in outputs:
        choice, message = choices[index], GenerateResponse()
        if isinstance(output, ChoiceDelta):
            message.text, message.token_ids[:] = output.text, output.token_ids
        else:
            message.CopyFrom(output)
        message.usage.CopyFrom(choice.usage)
        if index not in with_prompt and choice.prompt_token_ids:
            with_prompt.add(index)
            message.prompt_token_ids[:] = choice.prompt_token_ids
            message.weights_version, message.adapter_digest = choice.weights_version, choice.adapter_digest
            if choice.prompt_logprobs is not None:
                message.prompt_logprobs.CopyFrom(choice.prompt_logprobs)
        entry.append((index, message.SerializeToString()))
    return _encode(entry)


def decode_entry(value: bytes) -> list[tuple[int, GenerateResponse]]:
    return [(index, GenerateResponse.FromString(output)) for index, output in _decode(value)]


def by_choice(values: Iterable[bytes], num_choices: int) -> list[list[GenerateResponse]]:
    """Returns the outputs of each choice in these entries."""
    outputs: list[list[GenerateResponse]] = [[] for _ in range(num_choices)]
    for value in values:
        for index, output in decode_entry(value):
            outputs[index].append(output)
    return outputs
