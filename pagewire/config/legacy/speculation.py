"""Flags about speculative decoding. Older names that mean the same are fields of `pagewire.config.speculation`."""

from pagewire.config.legacy.entries import becomes, ignored, refused

_EXACT = "drafts are accepted by rejection sampling, which keeps the distribution of tokens"

FLAGS = [
    becomes("speculative-mode", "speculative_model"),
    becomes("speculative-draft-tp", "speculative_draft_tensor_parallel_size", short=("-spec-draft-tp",)),
    *refused(_EXACT, "spec-decoding-acceptance-method", harmless=("rejection_sampler",)),
    *ignored(_EXACT, "typical-acceptance-sampler-posterior-threshold", "typical-acceptance-sampler-posterior-alpha"),
    *ignored("one step checks all drafts of a request", "speculative-disable-mqa-scorer", takes="switch"),
    *ignored(
        "log probabilities are given with drafts, too, to requests that ask",
        "disable-logprobs-during-spec-decoding",
        takes="switch",
    ),
]
