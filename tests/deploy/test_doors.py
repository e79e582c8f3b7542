"""The table of doors in docs/security.md names everything that listens, and where."""

import dataclasses
import re

from pagewire import flags
from pagewire.config import ServeConfig, ServiceConfig
from tests.deploy.stack_files import CONFIGURATIONS, ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()
TABLE = PAGE[PAGE.index("| door |") : PAGE.index("Without `--api-key`")]
# Between the services; the table has them as sockets and networks.
INTERNAL = {"listen", "public_listen"}


def test_every_setting_that_makes_something_listen_is_a_door() -> None:
    configs: tuple[type[ServiceConfig], ...] = (ServeConfig, *CONFIGURATIONS.values())
    fields = {field.name: field for config in configs for field in dataclasses.fields(config)}
    listening = {name for name in fields if re.search(r"(^|_)(port|listen|host)$", name)} - INTERNAL - {"reuse_port"}
    assert len(listening) >= 6
    for name in listening:
        assert f"`{flags.flag_name(name)}`" in TABLE, f"{name} is no door in docs/security.md"
        if name.endswith("host"):
            assert fields[name].default == "127.0.0.1" and f"`{flags.flag_name(name)}`, 127.0.0.1" in TABLE
        elif fields[name].default is None:
            assert f"`{flags.flag_name(name)}`" in TABLE and re.search(rf"`{flags.flag_name(name)}`[^|]*, off", TABLE)
        else:
            assert f"`{flags.flag_name(name)}` {fields[name].default}" in TABLE
