"""`LLM.get_tokenizer()`: the tokenizer of a stack, with the names of transformers' tokenizers."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pagewire.tools.llm.connection import Connection
from pagewire.v1.inference_pb2 import GetTokenizerInfoResponse
from pagewire.wire.generate_request import Message

# Options of transformers that are none of a template.
_OF_TENSORS = ("return_tensors", "return_dict", "padding", "truncation", "max_length")
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Tokenizer:
    """Texts to the token ids that the model reads, and back.

    It asks the tokenizer service, so it is the same for files of any format and for a stack on another machine, and
    follows the flags of the stack, such as --chat-template. For what it lacks, load the files of the model:
    `transformers.AutoTokenizer.from_pretrained(...)`.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ids: dict[str, int | None] = {}

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        truncation: bool | None = None,
        max_length: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a text. truncation: only the first max_length."""
        client = self._connection.client
        ids = self._connection.run(client.tokenize(text, add_special_tokens=add_special_tokens))
        return ids[:max_length] if truncation else ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Returns the text of token ids. Further options of transformers have no effect."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        client = self._connection.client
        return self._connection.run(client.detokenize(ids, skip_special_tokens=skip_special_tokens))

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False, **_: Any
    ) -> list[str]:
        """Returns the text of each sequence of token ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def __call__(self, text: str | Sequence[str], **options: Any) -> dict[str, Any]:
        """Returns {"input_ids": ..., "attention_mask": ...} of a text, or of each text of a list."""
        texts = [text] if isinstance(text, str) else text
        ids = [self.encode(one, **options) for one in texts]
        masks = [[1] * len(one) for one in ids]
        is_one = isinstance(text, str)
        return {"input_ids": ids[0] if is_one else ids, "attention_mask": masks[0] if is_one else masks}

    def tokenize(self, text: str, **options: Any) -> list[str]:
        """Returns the text of each token of a text."""
        return self.convert_ids_to_tokens(self.encode(text, **{"add_special_tokens": False, **options}))

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **chat_template_kwargs: Any,
    ) -> Any:
        """Returns the token ids of a conversation in the chat template, or their text if `tokenize` is False; of each,
        for a list of conversations. Raises TypeError for an option that is not served."""
        if wrong := sorted(chat_template_kwargs.keys() & set(_OF_TENSORS)):
            raise TypeError(f"{', '.join(wrong)}: the result is a list of ids or a text; leave it out")
        options: dict[str, Any] = {
            "tools": tools,
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        given = {name: value for name, value in options.items() if value is not None}

        def applied(messages: Any) -> list[int] | str:
            ids = self._connection.run(self._connection.client.tokenize(messages, chat=given))
            return ids if tokenize else self.decode(ids)

        is_one = not conversation or isinstance(conversation[0], Mapping)
        return applied(conversation) if is_one else [applied(messages) for messages in conversation]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Returns the id of a token by its text, or those of a list; None for a text that is no token."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        if tokens not in self._ids:
            ids = self.encode(tokens, add_special_tokens=False)
            self._ids[tokens] = ids[0] if len(ids) == 1 else None
        return self._ids[tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Returns the text of a token by its id, or those of a list."""
        return self.decode([ids]) if isinstance(ids, int) else [self.decode([token]) for token in ids]

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return self._info.vocab_size

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return self.vocab_size

    @property
    def chat_template(self) -> str | None:
        """The template of chats; None: the model has none."""
        return self._info.chat_template if self._info.HasField("chat_template") else None

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The special tokens by their roles: "eos_token" and others."""
        return dict(self._info.special_tokens)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens."""
        found = (self.convert_tokens_to_ids(token) for token in dict.fromkeys(self.special_tokens_map.values()))
        return [token for token in found if token is not None]

    @property
    def model_max_length(self) -> int:
        """The tokens of the longest request."""
        return self._info.max_model_len

    @cached_property
    def _info(self) -> GetTokenizerInfoResponse:
        return self._connection.run(self._connection.client.tokenizer_info())

    def __getattr__(self, name: str) -> Any:
        """Returns a special token by its role, or its id: eos_token, eos_token_id and others."""
        role, _, rest = name.partition("_token")
        if role in _ROLES and rest in ("", "_id"):
            token = self._info.special_tokens.get(f"{role}_token")
            return token if not rest or token is None else self.convert_tokens_to_ids(token)
        why = "load the model's files with transformers.AutoTokenizer for it"
        raise AttributeError(f"the tokenizer of pagewire.LLM has no {name}; {why}")
