"""Anthropic's bodies as OpenAI's chats, which have the same parameters by other names."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, assert_never

from pagewire.gateway.chat.bodies import ChatCompletionRequest
from pagewire.gateway.chat.translate import force_call
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.field_names import GRAMMAR, TOOLS
from pagewire.gateway.generation.prompt import fill_chat
from pagewire.gateway.messages.bodies.content import (
    Base64Source,
    Block,
    ImageBlockParam,
    MessageParam,
    RedactedThinkingBlockParam,
    TextBlockParam,
    ThinkingBlockParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
    blocks_of,
)
from pagewire.gateway.messages.bodies.requests import (
    CountTokensRequest,
    MessagesRequest,
    ThinkingDisabled,
    ToolChoiceNone,
    ToolChoiceTool,
    ToolParam,
)
from pagewire.gateway.schema.chat_messages import ChatPromptParameters, ImagePart, ImageUrl, Message, Part, TextPart
from pagewire.gateway.schema.structured import JsonSchemaFormat, NamedSchema
from pagewire.gateway.schema.tools import (
    CalledFunction,
    Function,
    FunctionName,
    NamedToolChoice,
    PastToolCall,
    Tool,
    ToolChoice,
)
from pagewire.v1.inference_pb2 import TokenizeRequest

_TOOL_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
# Claude Code begins its system message with a line that differs in every request, which would defeat the prefix cache.
_BILLING = "x-anthropic-billing-header:"


def chat_request(body: MessagesRequest) -> ChatCompletionRequest:
    """Raises ApiError 400."""
    return ChatCompletionRequest.model_construct(
        **_prompt(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        cache_salt=body.cache_salt,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=_parallel_tool_calls(body),
        response_format=_response_format(body),
        thinking_token_budget=getattr(body.thinking, "budget_tokens", None),
    )


def _parallel_tool_calls(body: MessagesRequest) -> bool | None:
    disabled: bool | None = getattr(body.tool_choice, "disable_parallel_tool_use", None)
    return None if disabled is None else not disabled


def names_of(body: MessagesRequest) -> dict[str, str]:
    """Returns the names of this API for parameters of chats."""
    form = "output_config.format" if body.output_config and body.output_config.format else "output_format"
    return {
        "stop": "stop_sequences",
        "thinking_token_budget": "thinking.budget_tokens",
        "response_format": form,
        "reasoning_effort": "output_config.effort",
        GRAMMAR: TOOLS if _response_format(body) is None else form,
    }


def tokenize_request(body: CountTokensRequest) -> TokenizeRequest:
    """Raises ApiError 400."""
    prompt = _prompt(body)
    if isinstance(body.tool_choice, ToolChoiceNone):
        prompt["tools"] = None
    request = TokenizeRequest(model=body.model or "")
    force_call(request.output_parsing, _tool_choice(body))
    fill_chat(request.chat, prompt["messages"], ChatPromptParameters.model_construct(**prompt))
    return request


def _prompt(body: CountTokensRequest) -> dict[str, Any]:
    """Returns ChatPromptParameters, model and messages as keyword arguments."""
    thinking = body.thinking
    effort = body.output_config.effort if body.output_config else None
    thinks = None if thinking is None else not isinstance(thinking, ThinkingDisabled)
    return {
        "model": body.model,
        "messages": _messages(body),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "reasoning_effort": "none" if thinks is False else effort,
        "chat_template_kwargs": {"enable_thinking": True, "thinking": True} if thinks else None,
        "continue_final_message": _goes_on(body.messages[-1]) or None,
    }


def _messages(body: CountTokensRequest) -> list[Message]:
    turns = [(message.role, blocks_of(message.content)) for message in body.messages]
    if body.system:
        turns.insert(0, ("system", blocks_of(body.system)))
    messages = []
    for role, group in groupby(turns, key=itemgetter(0)):
        # Neighbors of one role are one turn: many templates require turns to alternate.
        blocks = [block for _, blocks in group for block in blocks]
        messages += {"system": _system, "user": _user, "assistant": _assistant}[role](blocks)
    return messages


def _goes_on(last: MessageParam) -> bool:
    """Returns whether the answer continues the last message. Raises ApiError 400 if that cannot be continued."""
    blocks = blocks_of(last.content) if last.role == "assistant" else []
    if not blocks:
        return False
    if not isinstance(blocks[-1], TextBlockParam) or any(isinstance(block, ToolUseBlockParam) for block in blocks):
        message = (
            "the answer continues the last message, which is the assistant's: it must end with text and call no tool "
            "(send the results of calls in a user message after it)"
        )
        raise ApiError(400, message, param="messages")
    return any(isinstance(block, TextBlockParam) and block.text for block in blocks)


def _system(blocks: Iterable[Block]) -> list[Message]:
    texts = [block for block in blocks if not (isinstance(block, TextBlockParam) and block.text.startswith(_BILLING))]
    return [Message(role="system", content=_content(texts))] if texts else []


def _user(blocks: Iterable[Block]) -> list[Message]:
    """Returns the messages of a user's turn; each result of a tool is a separate message."""
    messages = []
    for is_result, group in groupby(blocks, key=lambda block: isinstance(block, ToolResultBlockParam)):
        if is_result:
            messages += [_result(block) for block in group if isinstance(block, ToolResultBlockParam)]
        else:
            messages.append(Message(role="user", content=_content(list(group))))
    return messages


def _result(block: ToolResultBlockParam) -> Message:
    content = block.content if isinstance(block.content, str) else _content(block.content or ())
    if block.is_error:
        if isinstance(content, str):
            content = f"Error: {content}"
        else:
            content.insert(0, TextPart(type="text", text="Error:"))
    return Message(role="tool", tool_call_id=block.tool_use_id, content=content)


def _content(blocks: Sequence[Block]) -> str | list[Part]:
    if not blocks:
        return ""
    parts = [_part(block) for block in blocks]
    return parts[0].text if len(parts) == 1 and isinstance(parts[0], TextPart) else parts


def _part(block: Block) -> Part:
    if isinstance(block, TextBlockParam):
        return TextPart(type="text", text=block.text)
    assert isinstance(block, ImageBlockParam)
    source = block.source
    url = f"data:{source.media_type};base64,{source.data}" if isinstance(source, Base64Source) else source.url
    return ImagePart(type="image_url", image_url=ImageUrl(url=url))


def _assistant(blocks: Iterable[Block]) -> list[Message]:
    """Returns the message of an assistant's turn, none if it is empty."""
    text, thoughts, calls = "", "", []
    for block in blocks:
        match block:
            case TextBlockParam():
                text += block.text
            case ThinkingBlockParam():
                thoughts += block.thinking
            case RedactedThinkingBlockParam():
                pass
            case ToolUseBlockParam():
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(PastToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=arguments)))
            case ImageBlockParam() | ToolResultBlockParam():
                raise AssertionError("an assistant has none")
            case _:
                assert_never(block)
    if not (text or thoughts or calls):
        return []
    return [Message(role="assistant", content=text or None, reasoning=thoughts or None, tool_calls=calls or None)]


def _tool(tool: ToolParam) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return Tool(type="function", function=function)


def _tool_choice(body: CountTokensRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if isinstance(choice, ToolChoiceTool):
        return NamedToolChoice(type="function", function=FunctionName(name=choice.name))
    return _TOOL_CHOICES[choice.type]


def _response_format(body: MessagesRequest) -> JsonSchemaFormat | None:
    format = (body.output_config and body.output_config.format) or body.output_format
    if format is None:
        return None
    return JsonSchemaFormat(type="json_schema", json_schema=NamedSchema(name="answer", schema=format.schema_))
