"""The tokenizer process."""

import asyncio
import logging
import time
from functools import partial
from pathlib import Path

from pagewire.config import TokenizerConfig
from pagewire.config.values import tokenizer as values
from pagewire.errors import StartupError
from pagewire.files.chat_template import read_template
from pagewire.files.models import default_served_name, find_model, local_model, resolve_model
from pagewire.process.process import release_unused_memory
from pagewire.services.tokenizer.generation.choices.choices import generate
from pagewire.services.tokenizer.generation.read_defaults import read_request_defaults
from pagewire.services.tokenizer.generation.text_generator import TextGenerator
from pagewire.services.tokenizer.images.images import make_image_reader
from pagewire.services.tokenizer.parsers.reading import ParsedReading
from pagewire.services.tokenizer.parsers.registry import OutputParsers, parser_names
from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.record import ACCOUNTS
from pagewire.services.tokenizer.scheduler_link import SchedulerLink
from pagewire.services.tokenizer.served_models import ServedModels
from pagewire.services.tokenizer.service.description import described_model
from pagewire.services.tokenizer.service.link_servicer import InferenceLinkServicer
from pagewire.services.tokenizer.service.servicer import InferenceServicer
from pagewire.services.tokenizer.templates.turns import fit_turns
from pagewire.services.tokenizer.vectors.vectors import Vectors
from pagewire.telemetry.metrics import serve_metrics
from pagewire.v1 import inference_link_pb2, inference_link_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagewire.wire import rpc
from pagewire.wire.admin import Neighbour
from pagewire.wire.behind import SleepBehind, replace_behind
from pagewire.wire.caches import CachesBehind
from pagewire.wire.discovery import Discovery, discover
from pagewire.wire.key_interceptors import interceptors
from pagewire.wire.secure_rpc import NO_TLS, ServiceTls
from pagewire.wire.tenants import ClientTenants, ServiceTenants

logger = logging.getLogger(__name__)

_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_LINK_NAME = inference_link_pb2.DESCRIPTOR.services_by_name["InferenceLinkService"].full_name


async def serve(config: TokenizerConfig) -> None:
    """Serves until a signal ends it. Becomes ready with the scheduler; after SIGTERM, requests in flight may end."""
    schedulers = discover(config.scheduler_discovery, "--scheduler-address", config.scheduler_address)
    tls = ServiceTls(config, [*config.listen.split(","), *config.scheduler_address.split(",")])
    serve_metrics(config)
    pool = await asyncio.to_thread(load_pool, config)
    release_unused_memory()
    try:
        await _serve(config, pool, schedulers, tls)
    finally:
        pool.close()


async def _serve(config: TokenizerConfig, pool: TokenizerPool, schedulers: Discovery, tls: ServiceTls) -> None:
    link = SchedulerLink(
        schedulers,
        tls.listed_channel,
        recovery_timeout=config.recovery_timeout,
        hang_timeout=config.hang_timeout,
    )
    generator = make_generator(config, pool, link)
    servers = make_servers(config, generator, tls)
    await rpc.start(servers)
    tasks = [
        signal := asyncio.create_task(rpc.wait_for_signal(), name="signal"),
        asyncio.create_task(link.run(), name="scheduler"),
        asyncio.create_task(report_availability(link, *servers), name="availability"),
    ]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()  # an error ends the process; its supervisor starts it again
    generator.draining.begin()
    drained = generator.live.drained if signal.result() else None
    links, *others = servers
    finish = generator.draining.finish_streams
    await asyncio.gather(links.stop(drained, finish), *(server.stop(drained) for server in others))
    await rpc.cancel(tasks)


def load_pool(config: TokenizerConfig) -> TokenizerPool:
    """Loads the tokenizer. Raises StartupError naming the flag or the file that is wrong."""
    started = time.monotonic()
    path = _tokenizer_path(config)
    try:
        template = read_template(config.chat_template) if config.chat_template else None
        pool = TokenizerPool(
            FileSource(str(path), template, config.trust_request_chat_template, fit_turns),
            size=config.tokenizer_pool_size,
            kind=config.tokenizer_pool_type,
            max_queued=config.max_queued_prompts,
            timeout=config.prompt_timeout,
        )
    except (ValueError, OSError) as error:
        raise StartupError(f"no tokenizer: {error}") from error
    pool.images = make_image_reader(config, _model_path(config, path), pool.codec.tokenizer)
    logger.info("tokenizer %s, %d workers, loaded in %.1f s", path, pool.size, time.monotonic() - started)
    return pool


def _tokenizer_path(config: TokenizerConfig) -> Path:
    """Raises StartupError. --tokenizer may name a directory that holds a tokenizer and no model."""
    if config.tokenizer and config.tokenizer_revision is None and Path(config.tokenizer).expanduser().exists():
        return Path(config.tokenizer).expanduser()
    if config.tokenizer:
        return resolve_model(config.tokenizer, config.tokenizer_revision, config.download_dir, config.accept_license)
    return find_model(config)


def _model_path(config: TokenizerConfig, tokenizer_path: Path) -> Path:
    """Returns the directory of config.json and the image processor's settings: the model's, or else the tokenizer's."""
    path = Path(config.model).expanduser()
    return path if config.tokenizer and path.is_dir() else tokenizer_path


def make_generator(config: TokenizerConfig, pool: TokenizerPool, link: SchedulerLink) -> TextGenerator:
    """Composes the path of requests for text from its parts. Raises StartupError."""
    defaults = read_request_defaults(config, Path(pool.codec.path))
    try:
        disables_whitespace = values.disables_whitespace(config.structured_outputs_config)
        reading = ParsedReading(make_parsers(config, pool), json_has_whitespace=not disables_whitespace)
        return TextGenerator(pool, link, ServedModels(link, served_names(config)), reading, defaults)
    except ValueError as error:
        raise StartupError(f"no tokenizer: {error}") from error


def make_parsers(config: TokenizerConfig, pool: TokenizerPool) -> OutputParsers:
    """Returns the parsers of tool calls and reasoning."""
    codec = pool.codec
    parsers = OutputParsers(
        config.tool_call_parser,
        config.reasoning_parser,
        templates=(codec.chat_template or "", codec.tool_chat_template or ""),
        decode=lambda token_ids: codec.decode(token_ids, skip_special_tokens=False),
        encode=codec.encode_mark,
    )
    logger.info("parsers: %s for tool calls, %s for reasoning", parsers.tool_call_parser, parsers.reasoning_parser)
    return parsers


def _described(config: TokenizerConfig, pool: TokenizerPool) -> inference_pb2.Model:
    codec = pool.codec
    templates = (codec.chat_template or "", codec.tool_chat_template or "")
    path: Path | None = codec.path
    if config.tokenizer:
        path = local_model(config.model, config.download_dir, config.revision, config.gguf)
    return described_model(
        default_served_name(config.model),
        path,
        codec.tokenizer,
        parser_names(config.tool_call_parser, config.reasoning_parser, templates),
        reads_images=bool(pool.images.image_token),
    )


def make_servers(config: TokenizerConfig, generator: TextGenerator, tls: ServiceTls = NO_TLS) -> list[rpc.Server]:
    """Returns the gRPC server for gateways, which has the link, and the one for clients if there is one. Both ask the
    schedulers for metrics and status as well."""
    servicer = InferenceServicer(
        generator,
        partial(generate, generator),
        Vectors(generator),
        _described(config, generator.pool),
        exposes_tokenizer=config.enable_tokenizer_info_endpoint,
        seed=config.seed,
    )
    link = InferenceLinkServicer(generator)

    def behind() -> list[Neighbour]:
        return [Neighbour("scheduler", peer.address, peer.channel) for peer in generator.link.peers]

    listen, public = config.listen.split(","), config.public_listen.split(",")
    links = rpc.Server(listen, config.shutdown_timeout, interceptors=[ServiceTenants()], credentials=tls.of_services())
    servers = [links]
    if config.public_listen:
        door = [*interceptors(config), ClientTenants(config.tenant_header)]
        clients = rpc.Server(
            public,
            config.shutdown_timeout,
            interceptors=door,
            drain_delay=config.drain_delay,
            credentials=tls.of_clients(),
        )
        servers.append(clients)
    for server in servers:
        server.add(servicer, inference_pb2_grpc.add_InferenceServiceServicer_to_server, _NAME)
        if server is servers[0] or config.public_admin:
            replace, caches, sleep = replace_behind(behind), CachesBehind(behind), SleepBehind(behind)
            server.add_admin("tokenizer", behind, link.describe, replace, ACCOUNTS, generator.models, caches, sleep)
    add_link = inference_link_pb2_grpc.add_InferenceLinkServiceServicer_to_server
    servers[0].add(link, add_link, _LINK_NAME, is_link=True)
    return servers


def served_names(config: TokenizerConfig) -> tuple[str, ...]:
    """Returns the names of the model. Raises StartupError if --served-model-name names nothing."""
    if config.served_model_name is None:
        return (default_served_name(config.model),)
    return values.served_names(config.served_model_name)


async def report_availability(link: SchedulerLink, *servers: rpc.Server) -> None:
    """Keeps the health status: ready while a scheduler is ready. Without one, requests wait."""
    while True:
        changed = link.changed
        for server in servers:
            await server.set_serving(link.is_ready)
        await changed.wait()
