"""The `pagewire` command. Each subcommand imports what it needs when it runs; `--help` stays quick."""

import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pagewire import config, flags
from pagewire.errors import StartupError
from pagewire.flags import refusals
from pagewire.process import process
from pagewire.version import __version__

logger = logging.getLogger(__name__)

# service -> (module with `async def serve(config)`, configuration, positional argument)
_SERVICES: dict[str, tuple[str, type[config.ServiceConfig], str]] = {
    "gateway": ("pagewire.gateway.main", config.GatewayConfig, ""),
    "tokenizer": ("pagewire.services.tokenizer.main", config.TokenizerConfig, "model"),
    "scheduler": ("pagewire.services.scheduler.main", config.SchedulerConfig, ""),
    "executor": ("pagewire.services.executor.main", config.ExecutorConfig, "model"),
    "ray-executors": ("pagewire.stack.ray_executors.main", config.RayExecutorsConfig, "model"),
}

_HELP = """\
usage: pagewire <command> [flags]

Serve a large language model:
  serve [MODEL ...]  the whole stack on this machine: REST on port 8000, gRPC on port 8001

Talk to a model:
  run MODEL [PROMPT] a conversation in the terminal, with a running stack or a new one
  chat               a conversation with the running stack at --address
  generate "PROMPT"  one completion
  batch IN OUT       answer a file of requests, with a running stack or a new one
  bench serve        measure latency and throughput under load
  bench sweep        measure both by concurrency and prompt length
  bench spec         measure speculative decoding by method and kind of text
  bench plot FILE    plot the results of a sweep

Find problems and better flags:
  doctor [MODEL]     check this machine, the flags and a running stack
  tune [MODEL]       find flags for a goal by measuring

Models and stacks on this machine:
  pull MODEL         download a model
  list               list downloaded models
  rm MODEL           delete a downloaded model
  model verify MODEL check the files of a model; also: model pull, model list, model rm
  ps                 list running stacks and their models
  stop MODEL         take a model of a running stack out of memory

Give access:
  keys add FILE NAME make an API key with an owner and limits, for --api-key-file

Prepare a model:
  quantize [MODEL]   make a 4-bit or 8-bit checkpoint (AWQ, GPTQ) from a 16-bit one

Start one service, as in a container:
  gateway            the REST API, compatible with OpenAI's
  tokenizer          converts text to tokens and back; the public gRPC API
  scheduler          batches requests continuously over paged KV memory
  executor           runs the model on a device
  ray-executors      runs executors as actors of a Ray cluster

  pagewire <command> --help    flags of a command
  pagewire --version           version
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and returns the exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    process.die_with_parent()
    process.quiet_grpc()
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        sys.exit(_dispatch(argv))
    except StartupError as error:
        print(f"pagewire: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of the output has ended; the interpreter must not flush to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _dispatch(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    if command in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if command in ("-V", "--version", "version"):
        print(f"pagewire {__version__}")
        return 0
    if command in _SERVICES:
        return _service(command, rest)
    if command in _COMMANDS:
        return _COMMANDS[command](rest)
    if not command:
        print(_HELP, end="", file=sys.stderr)
        return 2
    match = flags.nearest(command, [*_SERVICES, *_COMMANDS])
    hint = f"; did you mean {match}?" if match else ""
    print(f"pagewire: error: unknown command {command}{hint}\nsee `pagewire --help`", file=sys.stderr)
    return 2


def _service(name: str, argv: list[str]) -> int:
    module_name, config_class, positional = _SERVICES[name]
    settings: config.ServiceConfig = flags.parse(
        config_class,
        argv,
        prog=f"pagewire {name}",
        description=f"Runs the {name} service. {config_class.__doc__}",
        positional=positional or (),
    )
    refusals.check(settings)
    if isinstance(settings, config.GatewayConfig) and settings.api_server_count > 1:
        from pagewire.stack import gateways

        return gateways.run(settings)
    process.spare_grpc_threads()
    process.raise_descriptor_limit()
    if name == "executor" and isinstance(settings, config.ExecutorConfig):
        from pagewire.stack import followers

        followers.start(settings)
    from pagewire.process import binding, reasons, watchdog

    supervisor = os.environ.get(watchdog.HEARTBEAT_FD)
    binding.bind(settings)  # after the followers started, which have their own processors
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _missing("ray" if name == "ray-executors" else name, error) from error
    from pagewire.telemetry import setup as telemetry
    from pagewire.wire import rpc

    telemetry.setup(name, settings)
    try:
        rpc.run(module.serve(settings), settings.hang_timeout)
    except StartupError as error:
        logger.error("%s", error)
        reasons.tell_supervisor(int(supervisor) if supervisor else None, str(error))
        return 1
    except Exception:
        logger.exception("the %s failed", name)
        return 1
    finally:
        telemetry.shutdown()
    return 0


def _missing(extra: str, error: ModuleNotFoundError) -> Exception:
    """Returns an error that names the extra with a missing dependency; a missing module of Pagewire is a defect."""
    top = (error.name or "").partition(".")[0]
    if top == "pagewire":
        return error
    return StartupError(f"the Python package {top!r} is not installed: pip install 'pagewire[{extra}]'")


def _serve(argv: list[str]) -> int:
    settings = flags.parse(
        config.ServeConfig,
        argv,
        prog="pagewire serve",
        description="Serves each MODEL on this machine: starts gateway, tokenizer, scheduler and executor as processes,"
        " restarts those that die, and stops all of them on Ctrl-C.",
        positional="model",
        without=config.SET_BY_STACK,
    )
    from pagewire.stack import stack

    return stack.run(settings)


def _chat(argv: list[str]) -> int:
    from pagewire.tools.client_config import ChatConfig

    settings = flags.parse(
        ChatConfig,
        argv,
        prog="pagewire chat",
        description="A conversation with a running stack. /help lists its commands, /exit or Ctrl-D leaves,"
        " Ctrl-C stops the current answer.",
        flags_only=True,
    )
    from pagewire.tools.terminal import chat

    return asyncio.run(chat.chat(settings))


def _on_this_machine(command: str) -> Callable[[list[str]], int]:
    def call(argv: list[str]) -> int:
        from pagewire.tools.terminal import models

        return {"pull": models.pull, "list": models.list_models, "rm": models.rm}[command](argv)

    return call


def _stacks(command: str) -> Callable[[list[str]], int]:
    def call(argv: list[str]) -> int:
        from pagewire.tools.terminal import stacks

        return {"ps": stacks.ps, "stop": stacks.stop}[command](argv)

    return call


def _model(argv: list[str]) -> int:
    """Runs `pagewire model VERB`: the commands for models, including those without a short form."""
    usage = "usage: pagewire model pull|list|rm|verify [MODEL]\nsee `pagewire model verify --help`, ..."
    verb, rest = (argv[0], argv[1:]) if argv else ("", [])
    if verb in ("pull", "list", "rm"):
        return _COMMANDS[verb](rest)
    if verb == "verify":
        from pagewire.tools.terminal import verify

        return verify.main(rest)
    asked = verb in ("-h", "--help")
    print(usage, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _run(argv: list[str]) -> int:
    from pagewire.tools.terminal import run

    return run.main(argv)


def _generate(argv: list[str]) -> int:
    from pagewire.tools.client_config import GenerateConfig

    settings = flags.parse(
        GenerateConfig,
        argv,
        prog="pagewire generate",
        description="One completion by a running stack, printed as it is generated.",
        positional="prompt",
        flags_only=True,
    )
    from pagewire.tools import generate

    return asyncio.run(generate.generate(settings))


def _bench(argv: list[str]) -> int:
    from pagewire.tools.bench import command

    return command.main(argv)


def _batch(argv: list[str]) -> int:
    from pagewire.tools.batch import command

    return command.main(argv)


def _doctor(argv: list[str]) -> int:
    from pagewire.tools.doctor import command

    return command.main(argv)


def _tune(argv: list[str]) -> int:
    from pagewire.tools.tune import command

    return command.main(argv)


def _keys(argv: list[str]) -> int:
    from pagewire.tools import keys as command

    return command.main(argv)


def _quantize(argv: list[str]) -> int:
    from pagewire.quantize.config import QuantizeConfig

    settings = flags.parse(
        QuantizeConfig,
        argv,
        prog="pagewire quantize",
        description="Makes a checkpoint with quantized weights, in AutoAWQ's or AutoGPTQ's layout, layer by layer, and"
        " measures perplexity before and after.",
        positional="model",
        flags_only=True,
    )
    if settings.out is not None:
        from pagewire.files.writing import check_writable

        check_writable(Path(settings.out).expanduser())
    print(f"quantizing {settings.model}: loading PyTorch", file=sys.stderr, flush=True)
    try:
        from pagewire.quantize import command
    except ModuleNotFoundError as error:
        raise _missing("executor", error) from error
    return command.run(settings)


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "run": _run,
    "chat": _chat,
    "generate": _generate,
    "batch": _batch,
    "run-batch": _batch,  # vLLM's name
    **{command: _on_this_machine(command) for command in ("pull", "list", "rm")},
    **{command: _stacks(command) for command in ("ps", "stop")},
    "model": _model,
    "bench": _bench,
    "keys": _keys,
    "doctor": _doctor,
    "tune": _tune,
    "quantize": _quantize,
}

if __name__ == "__main__":
    main()
