"""The refusals of a command line: what commands check before they start anything. `--show-config` and
`pagewire doctor` make the same checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pagewire.config import (
    ExecutorConfig,
    GatewayConfig,
    SchedulerConfig,
    ServeConfig,
    ServiceConfig,
    TokenizerConfig,
    json_object,
    model_refusals,
)
from pagewire.config.executor import SMALLEST
from pagewire.config.parallel import heads_refusal
from pagewire.config.profiles import runs_on_cuda
from pagewire.config.ray import RayConfig
from pagewire.config.shared import KeysConfig
from pagewire.config.speculation import Speculation
from pagewire.config.values import adapters as of_adapters
from pagewire.config.values import drafts as of_drafts
from pagewire.config.values import executor as of_executor
from pagewire.config.values import executor_config, kv_transfer
from pagewire.config.values import gateway as of_gateway
from pagewire.config.values import kv_cache as of_kv_cache
from pagewire.config.values import memory as of_memory
from pagewire.config.values import tokenizer as of_tokenizer
from pagewire.config.values.kv_events import kv_events_config
from pagewire.config.values.offload import of_offload
from pagewire.config.values.texts import addresses
from pagewire.errors import StartupError
from pagewire.files.models import check_name, default_served_name, is_of_hub
from pagewire.files.sampling_defaults.defaults import sampling_defaults
from pagewire.files.writing import check_directory
from pagewire.flags import lines, ports
from pagewire.flags.costs import kv_bytes_per_token
from pagewire.flags.model_facts import ModelFacts, facts_of
from pagewire.process import binding, cgroup, cpu_sets, local_executors
from pagewire.process.socket_directory import check_socket_directory, socket_names


def check(config: ServiceConfig) -> None:
    """Checks a configuration on this machine. Raises StartupError for the first of `refusals`."""
    for error in refusals(config, cpu_sets.usable_cpus(), binding.nodes()):
        error.exit_code = 2
        raise error


def refusals(
    config: ServiceConfig, usable: tuple[int, ...], of_nodes: Mapping[int, Sequence[int]]
) -> Iterator[StartupError]:
    """Yields the errors for which a service, or the stack, would not start.

    usable, of_nodes: the processors of the machine.
    """
    if isinstance(config, ServeConfig) and (config.models or config.other_models or config.model_alias):
        yield from _of_models(config, usable, of_nodes)
        return

    def place() -> object:
        if not isinstance(config, ServeConfig):
            return binding.place_of(config, usable, of_nodes)
        names = local_executors.names(config)
        return binding.places(config, len(names), usable, of_nodes) if names else None

    checks: list[Callable[[], object]] = [place, lambda: _check_certificates(config)]
    checks.append(lambda: _check_neighbors(config))
    if isinstance(config, KeysConfig):
        checks += [lambda: _check_keys(config), lambda: _check_tenants(config)]
    if isinstance(config, GatewayConfig):
        checks += [lambda: ports.check(config), lambda: _check_gateway(config)]
    if isinstance(config, SchedulerConfig):
        checks.append(lambda: kv_events_config(config.kv_events_config))
    if isinstance(config, TokenizerConfig):
        checks += [lambda: _check_text(config), lambda: _check_images(config)]
    if isinstance(config, TokenizerConfig | ExecutorConfig):
        checks.append(lambda: _check_name("--model", config.model, config.revision, config.accept_license, config.gguf))
    if isinstance(config, ExecutorConfig):
        checks += [lambda: _check_executor(config), lambda: _check_drafts(config), lambda: _check_model(config)]
    if isinstance(config, ServeConfig):
        checks += [lambda: lines.models_of(config)]
        checks += [lambda: local_executors.devices(config), lambda: _check_sockets(config)]
        checks += [lambda: _check_adapters(config), lambda: _check_roles(config)]
    for one in checks:
        try:
            one()
        except StartupError as error:
            yield error


def _of_models(
    config: ServeConfig, usable: tuple[int, ...], of_nodes: Mapping[int, Sequence[int]]
) -> Iterator[StartupError]:
    """Yields the errors of a stack with several models, each once."""
    try:
        found = lines.models_of(config)
    except StartupError as error:
        yield error
        return
    seen, others = set[str](), (config.other_models or "").split(",")
    for line in found.lines:
        for refusal in refusals(line.config, usable, of_nodes):
            if str(refusal) not in seen:
                seen.add(str(refusal))
                flag = "--other-models " if line.config.model in others else ""
                yield StartupError(f"{flag}{line.name}: {refusal}") if len(found.lines) > 1 else refusal


def _check_name(
    flag: str, model: str, revision: str | None, accepted_license: str | None, gguf: str | None = None
) -> None:
    try:
        check_name(model, revision, accepted_license, gguf)
    except StartupError as error:
        raise StartupError(f"{flag}: {error}") from error


def _check_certificates(config: ServiceConfig) -> None:
    if getattr(config, "url", None):
        return  # they are for the server at this URL
    if config.ssl_certfile or config.ssl_keyfile or config.ssl_ca_certs or config.ssl_cert_reqs:
        from pagewire.wire.tls import certificates_of  # deferred: most commands have no certificates

        certificates_of(config)


def _check_neighbors(config: ServiceConfig) -> None:
    for name in ("tokenizer", "scheduler", "executor"):
        address = getattr(config, f"{name}_address", None)
        if address is not None and getattr(config, f"{name}_discovery") in ("static", "dns"):
            try:
                addresses(address)
            except ValueError as error:
                raise StartupError(f"--{name}-address: expected {error}, got {address!r:.200}") from error


def _check_keys(config: KeysConfig) -> None:
    if config.api_key_file is not None:
        from pagewire.wire.keys.key_file import KeyFile  # deferred: most commands have no file of keys

        KeyFile(config.api_key_file)


def _check_tenants(config: KeysConfig) -> None:
    if config.tenant_header is not None:
        from pagewire.wire.tenants import check_header  # deferred: most commands name no header

        check_header(config.tenant_header)


def _check_gateway(config: GatewayConfig) -> None:
    of_gateway.check_pages(config)
    of_gateway.check_fingerprint(config)
    if config.generation_store is not None:
        of_gateway.check_generation_store(config.generation_store)
    if config.data_dir is not None:
        check_directory("--data-dir", Path(config.data_dir).expanduser())


def _check_sockets(config: ServeConfig) -> None:
    if config.uds_dir is not None:
        directory = Path(config.uds_dir).expanduser().resolve()
        check_directory("--uds-dir", directory)
        check_socket_directory(directory, socket_names(local_executors.names(config)))


def _check_adapters(config: ServeConfig) -> None:
    of_model = of_tokenizer.served_names(config.served_model_name or default_served_name(config.model))
    of_adapters.check_names(config.lora_modules, of_model)


def _check_roles(config: ServeConfig) -> None:
    is_on_ray = config.distributed_executor_backend == "ray"
    has_cache = config.enable_prefix_caching
    num_prefill, num_executors, role = config.prefill_executors, config.data_parallel_size, kv_transfer.role_of(config)
    _raise_first(
        [kv_transfer.of_stack(num_prefill, num_executors, role, is_on_ray=is_on_ray, has_prefix_cache=has_cache)]
    )


def _check_text(config: TokenizerConfig) -> None:
    if config.tokenizer_revision is not None and not config.tokenizer:
        raise StartupError("--tokenizer-revision needs --tokenizer; --revision selects the revision of the model")
    # A directory with a tokenizer need not have a model.
    if config.tokenizer and (config.tokenizer_revision is not None or not Path(config.tokenizer).expanduser().exists()):
        _check_name("--tokenizer", config.tokenizer, config.tokenizer_revision, config.accept_license)
    if config.served_model_name is not None:
        of_tokenizer.served_names(config.served_model_name)
    if config.chat_template:
        from pagewire.files.chat_template import read_template  # deferred: most commands have no template

        read_template(config.chat_template)
    of_tokenizer.disables_whitespace(config.structured_outputs_config)
    sampling_defaults(config, None)


def _check_images(config: TokenizerConfig) -> None:
    of_tokenizer.image_limit(config.limit_mm_per_prompt)
    of_tokenizer.processor_options(config.mm_processor_kwargs or "{}")
    path = config.allowed_local_media_path
    if path is not None and not Path(path).is_dir():
        raise StartupError(f"--allowed-local-media-path {path} is not a directory: name one, or leave it out")


def _check_executor(config: ExecutorConfig) -> None:
    _raise_first(executor_config.refusals(config))
    if isinstance(config, RayConfig) and config.distributed_executor_backend == "ray":
        _raise_first([of_executor.of_cluster(config.ray_address)])
    else:
        _raise_first([of_offload(config, on_cuda=runs_on_cuda(config.device))])
    if config.download_dir is not None and is_of_hub(config.model) and _facts(config) is None:
        check_directory("--download-dir", Path(config.download_dir).expanduser())


def _check_drafts(config: ExecutorConfig) -> None:
    drafts = Speculation.of(config)
    if drafts is None or drafts.if_possible:
        return
    on_cuda = runs_on_cuda(config.device) and config.distributed_executor_backend != "ray"
    of_drafts.check(drafts, config.tensor_parallel_size, config.pipeline_parallel_size, on_cuda=on_cuda)
    if config.runner == "pooling":
        raise StartupError(of_drafts.of_vectors())
    facts = _facts(config)
    if drafts.method == "self":
        bits = of_drafts.bits_of(drafts.model)
        if config.quantization != "none" and facts is not None and 0 < facts.most_bits <= bits:
            raise StartupError(model_refusals.of_copy(bits))
    elif drafts.model:
        _check_name(_draft_flag(config), drafts.model, drafts.revision or None, config.accept_license)
    if facts is not None and facts.has_state and not config.hf_overrides:
        raise StartupError(of_drafts.of_state(facts.architecture))


def _draft_flag(config: ExecutorConfig) -> str:
    """Returns the flag that names the draft model."""
    if config.spec_model or config.speculative_model:
        return "--spec-model" if config.spec_model else "--speculative-model"
    return "--speculative-config"


def _facts(config: ExecutorConfig) -> ModelFacts | None:
    return facts_of(config.model, config.download_dir, config.revision, config.gguf)


def _check_model(config: ExecutorConfig) -> None:
    """Checks what follows from the model's files, if they are on this machine and no flag replaces what they say."""
    facts = _facts(config)
    if not runs_on_cuda(config.device) and config.distributed_executor_backend != "ray":
        _raise_first(_of_memory(config, None if config.hf_overrides else facts, cgroup.free_memory()))
    if facts is None:
        return
    _raise_first(_of_files(config, facts))
    if config.model_impl == "transformers":
        _raise_first([of_executor.of_dense(config.quantization, facts.architecture)])
    elif not config.hf_overrides:
        _raise_first(_of_model(config, facts))


def _raise_first(found: Iterable[str | None]) -> None:
    for refused in found:
        if refused is not None:
            raise StartupError(refused)


def _of_files(config: ExecutorConfig, facts: ModelFacts) -> Iterator[str | None]:
    """Yields what the form of the files refuses: the sentence, or None."""
    if facts.path.suffix == ".gguf" and config.load_format == "safetensors":
        yield of_executor.of_load_format(facts.path, config.load_format)
    if facts.path.suffix == ".gguf" and config.hf_overrides and json_object.loads(config.hf_overrides):
        yield of_executor.of_overrides(facts.path)


def _of_memory(config: ExecutorConfig, facts: ModelFacts | None, available: int) -> Iterator[str | None]:
    """Yields what the memory of this machine refuses: the sentence, or None. available: bytes."""
    length = config.max_model_len or (0 if facts is None else facts.max_len)
    yield of_memory.of_rows(*of_executor.step_limits(config, on_cuda=False), length, available)
    if config.kv_cache_memory_bytes is not None:
        yield of_memory.of_large_cache(config.kv_cache_memory_bytes, available)
        per_token = 0 if facts is None or config.num_gpu_blocks_override else kv_bytes_per_token(config, facts)
        yield of_memory.of_small_cache(config.kv_cache_memory_bytes, per_token // config.num_ranks, length)


def _of_model(config: ExecutorConfig, facts: ModelFacts) -> Iterator[str | None]:
    """Yields what the model refuses: the sentence, or None."""
    yield model_refusals.of_quantization(config.quantization, facts.quantization)
    if facts.heads and not facts.has_state:
        yield heads_refusal(config.tensor_parallel_size, facts.heads, facts.kv_heads)
    if config.enable_expert_parallel and not facts.has_experts:
        yield model_refusals.of_experts(facts.architecture)
    if facts.longest and (config.max_model_len or 0) > facts.longest:
        yield model_refusals.of_length(config.max_model_len or 0, facts.longest)
    if facts.layers:
        yield of_executor.of_stages(config.pipeline_parallel_size, facts.layers)
    if dtype := _dtype(config, facts):
        yield of_kv_cache.of_cache_dtype(config.kv_cache_dtype, dtype)
        if config.batch_invariant and not runs_on_cuda(config.device) and config.distributed_executor_backend != "ray":
            yield of_executor.of_batches(dtype)
    form = of_kv_cache.in_8_bits(config.kv_cache_dtype)
    if form and config.kv_cache_dtype != SMALLEST and not facts.can_be_8_bits:
        yield of_kv_cache.of_8_bit_cache(form)
    has_head = facts.path.suffix == ".gguf" or not facts.architecture.endswith(("ForCausalLM", "Model", "ForMaskedLM"))
    if config.convert == "classify" and config.runner != "generate" and not has_head:
        yield of_executor.of_classes(facts.architecture)


def _dtype(config: ExecutorConfig, facts: ModelFacts) -> str:
    """Returns the type that the model computes in; "" if it is not known."""
    if config.dtype != "auto" or facts.dtype in ("", "bfloat16", "float16"):
        return config.dtype if config.dtype != "auto" else facts.dtype
    return "bfloat16"
