"""Flags about the server that clients talk to."""

from pagewire.config.legacy.entries import becomes, ignored, refused

_CORS = "no CORS headers are sent; a proxy adds them"
_GRAMMARS = "grammars are compiled by the executor: --grammar-compile-timeout, --grammar-cache-size"

FLAGS = [
    becomes("renderer-num-workers", "tokenizer_pool_size"),
    *ignored(
        "a pool's workers are told by --tokenizer-pool-size and --tokenizer-pool-type", "tokenizer-pool-extra-config"
    ),
    *ignored(
        "a parser is found by the chat template, or named by --reasoning-parser", "enable-reasoning", takes="switch"
    ),
    *ignored("what a reasoning parser looks for is its own", "reasoning-config"),
    *ignored("comments that keep a stream alive are not needed, or a proxy's affair", "sse-keep-alive-interval"),
    *ignored("misspelt variables end the command", "fail-on-environ-validation", takes="switch"),
    *ignored(_GRAMMARS, "guided-decoding-backend", "structured-outputs-config"),
    *ignored(_GRAMMARS, "guided-decoding-disable-fallback", takes="switch"),
    *refused(
        "it is part of a request: structured_outputs.disable_any_whitespace",
        "guided-decoding-disable-any-whitespace",
        takes="switch",
    ),
    *refused(
        "a request's JSON schema says which properties there may be",
        "guided-decoding-disable-additional-properties",
        takes="switch",
    ),
    *refused(
        "a request gets 20 log probabilities of a token at most",
        "max-logprobs",
        harmless=tuple(str(number) for number in range(21)),
    ),
    *refused("it is part of a request: return_tokens_as_token_ids", "return-tokens-as-token-ids", takes="switch"),
    *refused("it is part of a request: chat_template_kwargs", "default-chat-template-kwargs"),
    *refused("answers are the assistant's", "response-role", harmless=("assistant",)),
    *ignored("it is found by the chat template", "chat-template-content-format"),
    *ignored("with tool_choice none a prompt has no tools", "exclude-tools-when-tool-choice-none", takes="switch"),
    *refused(
        "code from outside is not loaded", "tool-parser-plugin", "reasoning-parser-plugin", "middleware", harmless=("",)
    ),
    *refused("tools are called by clients", "tool-server"),
    *ignored(
        "answers have it already",
        "enable-prompt-tokens-details",
        "enable-request-id-headers",
        "enable-server-load-tracking",
        takes="switch",
    ),
    *ignored(
        "a stream has it if its request says stream_options.include_usage", "enable-force-include-usage", takes="switch"
    ),
    *ignored("requests ask for what they want to be told", "enable-per-request-metrics", takes="switch"),
    *ignored("system_fingerprint names the weights", "fingerprint-mode", "fingerprint-value"),
    *refused("it is not told to clients", "enable-return-routed-experts", "return-sampling-mask", takes="switch"),
    *ignored("tokens are drawn by counters of position and seed", "use-fp64-gumbel", takes="switch"),
    *ignored(
        "the page at / has the API, without the network", "disable-fastapi-docs", "enable-offline-docs", takes="switch"
    ),
    *ignored(_CORS, "allowed-origins", "allowed-methods", "allowed-headers", takes="words"),
    *ignored(_CORS, "allow-credentials", takes="switch"),
    *ignored("routes do not depend on it", "root-path"),
    *refused("REST listens on --host and --port", "uds"),
    *ignored("gRPC is always served: --grpc-port", "grpc", takes="switch"),
    *ignored("certificates are read again when they change", "enable-ssl-refresh", takes="switch"),
    *refused("TLS 1.2 and 1.3 are served with Python's choice of ciphers", "ssl-ciphers"),
    *ignored("headers and bodies are bounded already", "h11-max-incomplete-event-size", "h11-max-header-count"),
    *ignored("there is no Cohere chat", "cohere-format"),
    *ignored("there is no Cohere chat", "cohere-is-reasoning-model", takes="switch"),
    *ignored("scores are computed by the executor", "enable-flash-late-interaction", takes="switch"),
    *ignored("it is for development of vLLM", "enable-trace-replay", takes="switch"),
]
