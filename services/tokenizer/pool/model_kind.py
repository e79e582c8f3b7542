"""The kind of the model, and the error of requests for another kind."""

from pagewire.services.tokenizer.errors import invalid
from pagewire.v1.common_pb2 import MODEL_KIND_CLASSIFY, MODEL_KIND_EMBED, MODEL_KIND_UNSPECIFIED, ModelInfo
from pagewire.wire.rpc import RpcError

_SERVED = {
    MODEL_KIND_UNSPECIFIED: "generates text: call Generate (REST: /v1/chat/completions, /v1/completions), or start the "
    "server with --runner pooling for embeddings",
    MODEL_KIND_EMBED: "is served for embeddings: call Embed or Score (REST: /v1/embeddings, /pooling, /score, /rerank)",
    MODEL_KIND_CLASSIFY: "is served as a classifier: call Classify (REST: /classify, /pooling)",
}
_SCORES = (
    "is served as a classifier with one label: call Classify or Score (REST: /classify, /pooling, /score, /rerank)"
)


def wrong_kind(info: ModelInfo) -> RpcError:
    """Returns an INVALID_ARGUMENT that names the right calls."""
    return invalid(f"the model {_SCORES if len(info.labels) == 1 else _SERVED[info.kind]}", "model")


def check_generates(info: ModelInfo | None) -> None:
    """Raises RpcError for a model that is served for vectors. None: it is not known yet."""
    if info is not None and info.kind != MODEL_KIND_UNSPECIFIED:
        raise wrong_kind(info)
