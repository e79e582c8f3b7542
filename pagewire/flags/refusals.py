"""The refusals of a command line: what commands check before they start anything. `--show-config` and
`pagewire doctor` make the same checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pagewire.config import ExecutorConfig, GatewayConfig, ServeConfig, ServiceConfig, TokenizerConfig, model_refusals
from pagewire.config.image_flags import image_limit, processor_options
from pagewire.config.parallel import heads_refusal
from pagewire.config.speculation import Speculation
from pagewire.errors import StartupError
from pagewire.files.models import check_name
from pagewire.files.sampling_defaults.defaults import sampling_defaults
from pagewire.flags import ports
from pagewire.flags.model_facts import ModelFacts, facts_of
from pagewire.process import binding, local_executors


def check(config: ServiceConfig) -> None:
    """Checks a configuration on this machine. Raises StartupError for the first of `refusals`."""
    for error in refusals(config, binding.usable_cpus(), binding.nodes()):
        raise error


def refusals(
    config: ServiceConfig, usable: tuple[int, ...], of_nodes: Mapping[int, Sequence[int]]
) -> Iterator[StartupError]:
    """Yields the errors for which a service, or the stack, would not start.

    usable, of_nodes: the processors of the machine.
    """

    def place() -> object:
        if not isinstance(config, ServeConfig):
            return binding.place_of(config, usable, of_nodes)
        names = local_executors.names(config)
        return binding.places(config, len(names), usable, of_nodes) if names else None

    checks: list[Callable[[], object]] = [place, lambda: _check_certificates(config)]
    if isinstance(config, GatewayConfig | TokenizerConfig):
        checks.append(lambda: _check_keys(config))
    if isinstance(config, TokenizerConfig):
        checks += [lambda: _check_text(config), lambda: _check_images(config)]
    if isinstance(config, TokenizerConfig | ExecutorConfig):
        checks.append(lambda: check_name(config.model, config.revision, config.accept_license))
    if isinstance(config, ExecutorConfig):
        checks += [lambda: _check_drafts(config), lambda: _check_model(config)]
    if isinstance(config, ServeConfig):
        checks += [lambda: ports.check(config), lambda: local_executors.devices(config)]
    for one in checks:
        try:
            one()
        except StartupError as error:
            yield error


def _check_certificates(config: ServiceConfig) -> None:
    if getattr(config, "url", None):
        return  # they are for the server at this URL
    if config.ssl_certfile or config.ssl_keyfile or config.ssl_ca_certs or config.ssl_cert_reqs:
        from pagewire.wire.tls import certificates_of  # deferred: most commands have no certificates

        certificates_of(config)


def _check_keys(config: GatewayConfig | TokenizerConfig) -> None:
    if config.api_key_file is not None:
        from pagewire.wire.keys.key_file import KeyFile  # deferred: most commands have no file of keys

        KeyFile(config.api_key_file)


def _check_text(config: TokenizerConfig) -> None:
    if config.tokenizer_revision is not None and not config.tokenizer:
        raise StartupError("--tokenizer-revision needs --tokenizer; --revision selects the revision of the model")
    template = config.chat_template
    if template and not set(template) & set("{\n") and not Path(template).is_file():
        raise StartupError(
            f"--chat-template {template!r} is neither a file nor a jinja template: correct the path, or leave it out"
        )
    sampling_defaults(config, None)


def _check_images(config: TokenizerConfig) -> None:
    image_limit(config.limit_mm_per_prompt)
    processor_options(config.mm_processor_kwargs or "{}")
    path = config.allowed_local_media_path
    if path is not None and not Path(path).is_dir():
        raise StartupError(f"--allowed-local-media-path {path} is not a directory: name one, or leave it out")


def _check_drafts(config: ExecutorConfig) -> None:
    drafts = Speculation.of(config)
    if drafts is None or drafts.method != "self" or config.quantization == "none" or (facts := _facts(config)) is None:
        return
    bits = drafts.model.partition(":q")[2] or "4"
    if bits.isdecimal() and 0 < facts.most_bits <= int(bits):
        raise StartupError(model_refusals.of_copy(int(bits)))


def _facts(config: ExecutorConfig) -> ModelFacts | None:
    return facts_of(config.model, config.download_dir, config.revision)


def _check_model(config: ExecutorConfig) -> None:
    """Checks what follows from the model's files, if they are on this machine and no flag replaces what they say."""
    facts = _facts(config)
    if facts is None or config.hf_overrides or config.model_impl == "transformers":
        return
    for refused in _of_model(config, facts):
        if refused is not None:
            raise StartupError(refused)


def _of_model(config: ExecutorConfig, facts: ModelFacts) -> Iterator[str | None]:
    """Yields the sentence of each refusal, or None."""
    yield model_refusals.of_quantization(config.quantization, facts.quantization)
    if facts.heads and not facts.has_state:
        yield heads_refusal(config.tensor_parallel_size, facts.heads, facts.kv_heads)
    if config.enable_expert_parallel and not facts.has_experts:
        yield model_refusals.of_experts(facts.architecture)
    if facts.longest and (config.max_model_len or 0) > facts.longest:
        yield model_refusals.of_length(config.max_model_len or 0, facts.longest)
