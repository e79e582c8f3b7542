"""`pagewire batch in.jsonl out.jsonl`: answers a file of requests, with a running server or one started for it."""

import asyncio
import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from pagewire import flags
from pagewire.batch import lines
from pagewire.batch.results import NotResults, Results, ResultsInUse
from pagewire.batch.runner import Away, Runner
from pagewire.config import WITHOUT_TLS, ServeConfig
from pagewire.config.values import adapters
from pagewire.errors import StartupError
from pagewire.files.models import default_served_name
from pagewire.files.writing import check_writable, unwritable
from pagewire.stack import stack
from pagewire.tools.batch.config import NOT_OFFERED, OWN_FLAGS, BatchCommandConfig
from pagewire.tools.batch.http_server import HttpServer
from pagewire.tools.batch.progress import Progress
from pagewire.tools.client_config import tls_files
from pagewire.wire.addresses import endpoint
from pagewire.wire.model_names import names_of

# A server that has not answered for this long will not recover without help.
AWAY_TIMEOUT_S = 300.0
MAX_SHOWN_ERRORS = 10


def main(argv: list[str]) -> int:
    """Returns 0 if every request was answered with success, 1 if some failed. Raises StartupError."""
    config = flags.parse(
        BatchCommandConfig,
        argv,
        prog="pagewire batch",
        description="Answers the requests of INPUT_FILE, in the format of OpenAI's batches, and appends each answer to"
        " OUTPUT_FILE. The same command continues an interrupted batch. Starts the stack for it, or asks the"
        " server of --url. Exit code 0: every request was answered with success, 1: some failed.",
        positional=("input_file", "output_file"),
        without=NOT_OFFERED,
    )
    if not config.input_file or not config.output_file:
        raise StartupError("name two files: pagewire batch INPUT_FILE OUTPUT_FILE")
    checked = _check(Path(config.input_file))
    check_writable(Path(config.output_file))
    if config.url is not None:
        _refuse_stack_flags(config)
        return _interruptible(config, lambda: asyncio.run(_run_at(str(config.url), config, checked)))
    served = (config.served_model_name or default_served_name(config.model)).split(",")
    served = names_of(served, adapters.names(config))
    _check_models(checked, served, "name it with --served-model-name, or another model with --model")
    return _interruptible(config, lambda: _run_with_stack(config, checked))


def _check(path: Path) -> lines.Checked:
    try:
        checked = lines.check(path, lines.ENDPOINTS)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from error
    _raise_errors(checked, f"{path} is not a file of requests")
    return checked


def _check_models(checked: lines.Checked, served: Sequence[str], remedy: str) -> None:
    lines.check_models(checked, served)
    _raise_errors(checked, f"a model is not served ({remedy})")


def _raise_errors(checked: lines.Checked, what: str) -> None:
    if checked.errors:
        shown = "".join(f"\n  {error}" for error in checked.errors[:MAX_SHOWN_ERRORS])
        more = len(checked.errors) - MAX_SHOWN_ERRORS
        raise StartupError(f"{what}:{shown}" + (f"\n  and {more} more" if more > 0 else ""))


def _refuse_stack_flags(config: BatchCommandConfig) -> None:
    """Raises StartupError for a flag without an effect."""
    for field in dataclasses.fields(ServeConfig):
        if field.name not in OWN_FLAGS | {"api_key"} and getattr(config, field.name) != field.default:
            raise StartupError(f"{flags.flag_name(field.name)} is for the stack, which --url does not start")


def _interruptible(config: BatchCommandConfig, run: Callable[[], int]) -> int:
    try:
        return run()
    except KeyboardInterrupt:
        print(f"interrupted; the same command continues where {config.output_file} ends", file=sys.stderr)
        raise


def _run_with_stack(config: BatchCommandConfig, checked: lines.Checked) -> int:
    print(f"starting {config.model}", file=sys.stderr)

    async def work(served: ServeConfig) -> int:
        return await _run_at(f"http://{endpoint(served.host, served.port)}", config, checked)

    code = stack.run_for(dataclasses.replace(config, port=0, grpc_port=0, **WITHOUT_TLS), work)
    if code == 130:
        raise KeyboardInterrupt
    return code


async def _run_at(url: str, config: BatchCommandConfig, checked: lines.Checked) -> int:
    """Runs the batch on a server, and returns the exit code. Raises StartupError."""
    with closing(HttpServer(url, config.own_key, tls_files(config))) as server:
        _check_models(checked, await server.models(), f"by {url}")
        with closing(await _results(Path(config.output_file))) as results:
            if results.done:
                print(f"continuing: {len(results.done)} requests are already answered", file=sys.stderr)
            progress = Progress(results, checked.num_requests)
            try:
                await _run(server, results, progress, config)
            except BaseException:
                progress.interrupt()
                raise
            progress.end()
            return 1 if results.num_failed else 0


async def _results(path: Path) -> Results:
    try:
        return await asyncio.to_thread(Results, path, path)
    except (ResultsInUse, NotResults) as error:
        raise StartupError(f"{error}: name another output file") from error
    except OSError as error:
        raise unwritable(path, error) from error


async def _run(server: HttpServer, results: Results, progress: Progress, config: BatchCommandConfig) -> None:
    runner = Runner(server.ask, results, asyncio.Semaphore(config.concurrency), away_timeout=AWAY_TIMEOUT_S)
    showing = asyncio.create_task(progress.run())
    try:
        unread = lines.read(Path(config.input_file), lines.ENDPOINTS, results.done)
        await runner.run(unread, config.concurrency)
    except Away as error:
        raise StartupError(
            f"the server has not answered for {AWAY_TIMEOUT_S:g} s ({error}): repeat the command when it is back"
        ) from error
    except OSError as error:
        raise unwritable(Path(config.output_file), error) from error
    finally:
        showing.cancel()
