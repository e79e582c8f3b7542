"""The settings of speculative decoding that a setup refuses."""

from pagewire.config.speculation import LOOKUP_METHODS, Speculation
from pagewire.errors import StartupError

DEFAULT_BITS = 4  # of a copy of the model
_COPIES = {f"self:q{bits}": bits for bits in (4, 3, 2)} | {"self": DEFAULT_BITS}


def check(drafts: Speculation, ranks: int, stages: int, *, on_cuda: bool) -> None:
    """Raises StartupError for a method that does not work with this number of ranks and stages, on GPUs or not."""
    if drafts.method == "self":
        bits_of(drafts.model)
    if stages > 1 and drafts.method not in LOOKUP_METHODS:
        raise StartupError(
            f"--speculative-config: method {drafts.method} is not supported with --pipeline-parallel-size: what "
            "drafts needs the whole model beside it; use method ngram or suffix, or --tensor-parallel-size instead"
        )
    if stages > 1 and on_cuda:
        raise StartupError(
            "--speculative-config with --pipeline-parallel-size on GPUs: the size of a step depends on how many drafts "
            "were right, and the host of the first stage would wait for that; leave one of the two out, or split "
            "layers with --tensor-parallel-size instead"
        )
    if drafts.method == "suffix" and on_cuda:
        raise StartupError(
            "--speculative-config: method suffix looks outputs up on the host, which would wait for a GPU; "
            "use method ngram, or --device cpu"
        )
    wanted, possible = drafts.draft_tensor_parallel_size, possible_ranks(drafts.method, ranks)
    if wanted and drafts.method not in LOOKUP_METHODS and wanted not in possible:
        numbers = " or ".join(map(str, sorted(set(possible))))
        raise StartupError(
            f"--speculative-config: draft_tensor_parallel_size {wanted}: with --tensor-parallel-size {ranks}, method "
            f"{drafts.method} takes {numbers}; leave it out"
        )


def why_not(*, vectors: bool, state: bool, stages: int, on_cuda: bool) -> str:
    """Returns why method auto drafts nothing in a setup; "" if it drafts."""
    if vectors:
        return "vectors need none"
    if state:
        return "layers with a state cannot take them back"
    if stages > 1:
        return "with a pipeline of stages, name a method"
    return "on a GPU, name a method, such as --spec-method ngram" if on_cuda else ""


def possible_ranks(method: str, ranks: int) -> tuple[int, ...]:
    """Returns the numbers of ranks that may share the layers of the drafter, the default last."""
    return {"self": (ranks,), "mtp": (ranks,), "eagle3": (1,)}.get(method, (1, ranks))


def bits_of(name: str) -> int:
    """Returns the bits that `self:q4` and similar names mean. Raises StartupError."""
    if name not in _COPIES:
        raise StartupError(
            f"--speculative-config: model {name!r}: a copy of the model itself is one of {', '.join(_COPIES)}"
        )
    return _COPIES[name]


def of_vectors() -> str:
    """Refuses drafts for a model that returns vectors."""
    return "--speculative-config: the model returns vectors, for which no token is drafted; leave the flag out"


def of_state(architecture: str) -> str:
    """Refuses drafts for a model with a state."""
    return (
        f"{architecture}: its layers have a state, from which drafted tokens that turn out wrong "
        "cannot be taken back; serve it without speculative decoding"
    )
