"""`pagewire doctor`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from pagewire import config, flags
from pagewire.config.fields import Range, flag
from pagewire.flags.lines import models_of
from pagewire.tools.client_config import tls_files
from pagewire.tools.doctor import report
from pagewire.tools.doctor.container import check_container
from pagewire.tools.doctor.finding import Finding, Level
from pagewire.tools.doctor.gpu import check_gpus
from pagewire.tools.doctor.host import Host
from pagewire.tools.doctor.kernels import check_kernels
from pagewire.tools.doctor.live import check_stack
from pagewire.tools.doctor.memory import check_memory
from pagewire.tools.doctor.model import check_model, local_model
from pagewire.tools.doctor.network import check_network
from pagewire.tools.doctor.processor import check_processor
from pagewire.tools.doctor.settings import check_settings
from pagewire.tools.doctor.storage import check_storage
from pagewire.tools.doctor.topology import check_topology


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(config.ServeConfig):
    """The flags of `pagewire serve`, and what to examine."""

    url: str | None = flag(
        None,
        "examine the running stack behind this gateway, too, such as http://127.0.0.1:8000; PAGEWIRE_API_KEY "
        "is its key; with https, --ssl-ca-certs is its CA, and --ssl-certfile the certificate that it may ask for",
        group="doctor",
    )
    seconds: float = flag(5.0, "seconds to watch that stack", group="doctor", valid=Range(above=0, maximum=3600))
    json: bool = flag(False, "print JSON", group="doctor")
    verbose: bool = flag(False, "also show checks without a problem", group="doctor")
    strict: bool = flag(False, "exit with 1 for warnings, too", group="doctor")


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 if a problem was found (with --strict: or a warning)."""
    settings = flags.parse(
        DoctorConfig,
        argv,
        prog="pagewire doctor",
        description="Finds what keeps MODEL from being served well: on this machine, in the flags, in a running stack,"
        " with its effects and remedies. Takes the flags of `pagewire serve`. Only reads. Exits with 1 if there"
        " is a problem.",
        positional="model",
        without=config.SET_BY_STACK,
    )
    lines = models_of(settings).lines
    areas: dict[str, list[Finding]] = {}
    for line in lines:
        of_line = examine(cast(DoctorConfig, line.config), Host())
        areas |= of_line if len(lines) == 1 else {f"{line.name}: {area}": found for area, found in of_line.items()}
    print(report.as_json(areas) if settings.json else report.text(areas, verbose=settings.verbose), end="")
    bad = Level.WARNING if settings.strict else Level.PROBLEM
    return int(report.worst(areas) >= bad)


def examine(settings: DoctorConfig, host: Host) -> dict[str, list[Finding]]:
    """Returns the findings by area."""
    model = local_model(settings)
    areas = {
        "processor": check_processor(host, settings),
        "kernels": check_kernels(host, settings),
        "topology": check_topology(host, settings),
        "container": check_container(host),
        "memory": check_memory(host, settings),
        "GPU": check_gpus(host, settings),
        "network": check_network(host, settings, is_running=settings.url is not None),
        "disk": check_storage(host, settings, model),
        "model": check_model(host, settings, model),
        "flags": check_settings(host, settings),
    }
    if settings.url is not None:
        url = settings.url.rstrip("/")
        areas[f"stack at {url}"] = check_stack(url, settings.own_key, settings.seconds, tls_files(settings))
    return {area: list(found) for area, found in areas.items()}
