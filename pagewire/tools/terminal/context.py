"""A conversation that grows longer than the model takes: the oldest turns make room."""

from pagewire.client import Client
from pagewire.tools.terminal.conversation import Conversation
from pagewire.v1.inference_pb2 import Model

# What is kept free for an answer, unless max_tokens says less: one part in so many of what the model takes.
_SHARE_OF_ANSWER = 4


async def make_room(client: Client, model: Model, conversation: Conversation, question: str) -> int:
    """Leaves out as many of the oldest turns as it takes for the question and an answer to fit; how many more that are.

    A question that does not fit by itself is left to the server to refuse. Raises RpcError.
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
        # A conversation begins with what its user says.
        while conversation.first < len(conversation.turns) and _role(conversation) != "user":
            conversation.first += 1
    if length >= model.max_model_len:
        conversation.first = before
    return conversation.first - before


def _role(conversation: Conversation) -> str:
    return str(conversation.turns[conversation.first]["role"])
