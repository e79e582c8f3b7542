"""The model's length, shared by a conversation and the next answer."""

from pagewire.client import Client
from pagewire.tools.terminal.conversation import Conversation
from pagewire.v1.inference_pb2 import Model

# One part in _SHARE_OF_ANSWER of the model's length is kept free for an answer, unless max_tokens is less.
_SHARE_OF_ANSWER = 4


async def make_room(client: Client, model: Model, conversation: Conversation, question: str) -> int:
    """Leaves out the oldest turns until the question and an answer fit. Returns how many more were left out.

    The server refuses a question that is too long alone. Raises RpcError.
    """
    if not model.max_model_len or not conversation.turns:
        return 0
    share = model.max_model_len // _SHARE_OF_ANSWER
    most = model.max_model_len - min(int(conversation.settings.get("max_tokens", share)), share)
    before = conversation.first
    while (length := len(await client.tokenize(conversation.asking(question), model=model.id))) > most:
        if conversation.first == len(conversation.turns):
            break
        conversation.first += 1
        # A conversation begins with a message of the user.
        while conversation.first < len(conversation.turns) and _role(conversation) != "user":
            conversation.first += 1
    if length >= model.max_model_len:
        conversation.first = before
    return conversation.first - before


async def longest_answer(client: Client, model: Model, conversation: Conversation, question: str) -> int | None:
    """Returns the limit of an answer if neither the user nor the model sets one: small models may never end. None:
    there is no limit, or no room, which the server reports. Raises RpcError.
    """
    if not model.max_model_len or model.default_sampling_params.HasField("max_tokens"):
        return None
    length = len(await client.tokenize(conversation.asking(question), model=model.id))
    most = min(model.max_model_len // _SHARE_OF_ANSWER, model.max_model_len - length)
    return most if most > 0 else None


def _role(conversation: Conversation) -> str:
    return str(conversation.turns[conversation.first]["role"])
