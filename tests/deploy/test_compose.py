import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import env_example
from pagewire import flags
from pagewire.flags import values
from pagewire.v1 import executor_pb2, inference_pb2, scheduler_pb2
from tests.deploy.stack_files import (
    COMPOSE,
    CONFIGURATIONS,
    ENV_EXAMPLE,
    GPU_OVERRIDE,
    SECRETS_OVERRIDE,
    container_environment,
    services,
    targets,
)

LINE = ["gateway", "tokenizer", "scheduler", "executor"]
GRPC_SERVICES = {
    "tokenizer": inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    "scheduler": scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name,
    "executor": executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"].full_name,
}
# Faults on purpose are for tests; containers are bound to processors by `cpuset`; `pagewire serve` has lines.
NOT_IN_COMPOSE = {"fault_injection", "cpu_bind", "lines_address"}
# A text that is a path, a host, an address and a URL; services read it further.
SAMPLE_TEXT, SAMPLE_JSON = "sample:80", '{"a": 1}'


def check_schema(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def configuration(name: str, **environ: str) -> Any:
    """The configuration that the service in the container arrives at. Exits for a value that it would refuse."""
    seen = container_environment(services(environ)[name], environ)
    return flags.parse(CONFIGURATIONS[name], [], prog=name, description="", environ=seen)


def test_compose_files_follow_the_compose_specification():
    finished = check_schema(COMPOSE, GPU_OVERRIDE, SECRETS_OVERRIDE)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_schema_check_catches_a_misspelt_key(tmp_path):
    misspelt = tmp_path / "docker-compose.yml"
    misspelt.write_text(COMPOSE.read_text().replace("depends_on:", "depend_on:", 1))
    finished = check_schema(misspelt)
    assert finished.returncode != 0
    assert "depend_on" in finished.stdout


def test_the_four_services_start_from_the_executor_on():
    stack = services()
    assert sorted(name for name, service in stack.items() if "profiles" not in service) == sorted(LINE)
    for service, behind in itertools.pairwise(LINE):
        assert stack[service]["depends_on"] == {behind: {"condition": "service_healthy"}}
    assert "depends_on" not in stack["executor"]


@pytest.mark.parametrize("name", LINE)
def test_every_variable_is_a_setting_of_its_service_and_every_setting_a_variable(name):
    variables = {variable for variable in services()[name]["environment"] if variable.startswith("PAGEWIRE_")}
    fields = {field.name for field in dataclasses.fields(CONFIGURATIONS[name])} - NOT_IN_COMPOSE
    assert variables - {"PAGEWIRE_PROFILE"} == {flags.environment_name(field) for field in fields}


@pytest.mark.parametrize("name", LINE)
def test_services_accept_the_default_environment(name):
    settings = configuration(name)
    assert settings.log_format == "json"
    changed = {"log_format", "host", "admin_host", "listen", "public_listen", "device", "metrics_port"}
    # Every replica that the network knows by the neighbour's name.
    changed |= {"tokenizer_discovery", "executor_discovery"}
    for field in dataclasses.fields(settings):
        if field.name not in changed and not field.name.endswith("_address"):
            assert getattr(settings, field.name) == field.default, f"{field.name}: a default is stated twice"


def test_variables_of_the_user_reach_the_services():
    environ = {
        "PAGEWIRE_MODEL": "/models/tiny.gguf",
        "PAGEWIRE_KV_CACHE_MEMORY_BYTES": "1GiB",
        "PAGEWIRE_MAX_NUM_SEQS": "7",
        "PAGEWIRE_API_KEY": "secret",
        "PAGEWIRE_ENABLE_PREFIX_CACHING": "false",
    }
    assert configuration("executor", **environ).model == "/models/tiny.gguf"
    assert configuration("tokenizer", **environ).model == "/models/tiny.gguf"
    assert configuration("executor", **environ).kv_cache_memory_bytes == 1 << 30
    assert configuration("executor", **environ).max_num_seqs == 7
    assert configuration("scheduler", **environ).max_num_seqs == 7
    assert configuration("scheduler", **environ).enable_prefix_caching is False
    assert configuration("gateway", **environ).api_key == "secret"


def sample(field: dataclasses.Field[Any]) -> str:
    """A text for the field's variable that means another value than the default."""
    choices, valid = field.metadata["choices"], field.metadata["valid"]
    if choices:
        return next(choice for choice in choices if choice != field.default)
    if isinstance(field.default, bool):
        return str(not field.default).lower()
    if "int" in str(field.type) or "float" in str(field.type):
        numbers = (64, 32, 7, 1, 2, 0.5)
        return str(next(n for n in numbers if n != field.default and (valid is None or n in valid)))
    return SAMPLE_JSON if field.metadata["kind"] == "json" else SAMPLE_TEXT


@pytest.mark.parametrize("name", LINE)
def test_every_flag_reaches_the_process_in_the_container(name):
    """A flag travels from the shell through compose and the image's command line to the service's configuration."""
    assert targets()[name].command("ENTRYPOINT")[-1] == name
    assert "command" not in services()[name] and "entrypoint" not in services()[name]
    written = yaml.safe_load(COMPOSE.read_text())["services"][name]["environment"]
    for field in dataclasses.fields(CONFIGURATIONS[name]):
        variable = flags.environment_name(field.name)
        if field.name in NOT_IN_COMPOSE or (written[variable] is not None and "${" not in str(written[variable])):
            continue  # the wiring of the containers, checked below
        text = sample(field)
        settings = configuration(name, **{variable: text})
        assert getattr(settings, field.name) == values.convert(field, text, variable), variable


def test_the_example_of_env_lists_what_compose_reads():
    """The command after a change: python -m deploy.env_example > deploy/.env.example"""
    listed = [line[1:].partition("=")[0] for line in ENV_EXAMPLE.read_text().splitlines() if line[1:2].isupper()]
    assert sorted(listed) == sorted(env_example.variables())


@pytest.mark.parametrize("name", LINE)
def test_what_the_example_of_env_shows_are_the_defaults(name):
    lines = [line[1:].partition("=") for line in ENV_EXAMPLE.read_text().splitlines() if line[1:2].isupper()]
    environ = {variable: value for variable, _, value in lines if value}
    assert configuration(name, **environ) == configuration(name)


def test_secrets_come_from_files_of_their_own():
    base, override = services(), services(path=SECRETS_OVERRIDE)
    files = yaml.safe_load(SECRETS_OVERRIDE.read_text())["secrets"]
    for name, service in override.items():
        given = container_environment(base[name], {}) | {k: str(v) for k, v in service["environment"].items()}
        named = set(service["environment"].values())
        assert named == {f"/run/secrets/{secret}" for secret in service["secrets"]}, "mounted is what is named"
        assert set(service["secrets"]) <= set(files)
        settings = flags.parse(CONFIGURATIONS[name], [], prog=name, description="", environ=given)
        assert settings.ssl_keyfile == "/run/secrets/private-key"


def test_replicas_and_limits_are_variables():
    asked = {"TOKENIZER_REPLICAS": "2", "EXECUTOR_REPLICAS": "3", "EXECUTOR_MEMORY": "8g", "EXECUTOR_CPUS": "4"}
    stack = services(asked)
    assert (stack["tokenizer"]["scale"], stack["executor"]["scale"]) == ("2", "3")
    assert (stack["executor"]["mem_limit"], stack["executor"]["cpus"]) == ("8g", "4")
    assert configuration("gateway").tokenizer_discovery == configuration("scheduler").executor_discovery == "dns"


def test_each_service_has_the_address_of_its_neighbour():
    listens = {name: configuration(name).listen for name in LINE[1:]}
    assert all(listen.startswith("0.0.0.0:") for listen in listens.values())
    assert configuration("gateway").tokenizer_address == listens["tokenizer"].replace("0.0.0.0", "tokenizer")
    assert configuration("tokenizer").scheduler_address == listens["scheduler"].replace("0.0.0.0", "scheduler")
    assert configuration("scheduler").executor_address == listens["executor"].replace("0.0.0.0", "executor")


def test_only_rest_and_public_grpc_are_published_and_only_on_loopback():
    stack = services()
    rest, grpc = configuration("gateway"), configuration("tokenizer")
    assert stack["gateway"]["ports"] == [f"127.0.0.1:8000:{rest.port}"]
    assert stack["tokenizer"]["ports"] == [f"127.0.0.1:8001:{grpc.public_listen.rpartition(':')[2]}"]
    assert rest.host == "0.0.0.0"
    tokens = configuration("scheduler").public_listen
    assert stack["scheduler"]["ports"] == [f"127.0.0.1:8002:{tokens.rpartition(':')[2]}"]
    assert "ports" not in stack["executor"]
    assert services({"PAGEWIRE_HOST": "0.0.0.0", "PAGEWIRE_PORT": "80"})["gateway"]["ports"] == ["0.0.0.0:80:8000"]


@pytest.mark.parametrize("name", LINE)
def test_health_checks_ask_the_right_port_for_the_right_service(name):
    settings = configuration(name)
    if name == "gateway":
        asked = [f"http://localhost:{settings.port}/readyz"]
    else:
        asked = [settings.listen.replace("0.0.0.0", "localhost"), GRPC_SERVICES[name]]
    command = ["python", "-m", "pagewire.wire.health", *asked]
    assert services()[name]["healthcheck"]["test"] == ["CMD", *command]
    assert targets()[name].command("HEALTHCHECK") == command


@pytest.mark.parametrize("name", LINE)
def test_containers_have_no_privileges_and_time_to_end(name):
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "user" not in service, "the image's user holds"
    assert service["restart"] == "unless-stopped"
    settings = configuration(name)
    longest = settings.shutdown_timeout + getattr(settings, "drain_delay", 0.0)
    assert float(service["stop_grace_period"].removesuffix("s")) > longest


@pytest.mark.parametrize("name", LINE)
def test_images_are_built_from_the_target_of_the_service(name):
    build = services()[name]["build"]
    assert build["target"] == name
    assert build["target"] in targets()
    assert build["dockerfile"] == "deploy/Dockerfile"


@pytest.mark.parametrize("name", LINE)
def test_services_have_the_volumes_of_what_they_read_and_keep(name):
    volumes = services({"MODEL_DIR": "/data/models"})[name].get("volumes", [])
    reads_model = any(field.name == "model" for field in dataclasses.fields(CONFIGURATIONS[name]))
    keeps = any(field.name == "data_dir" for field in dataclasses.fields(CONFIGURATIONS[name]))
    data = ["data:/var/lib/pagewire"] if keeps else []
    assert volumes == (["cache:/var/cache/pagewire", "/data/models:/models:ro"] if reads_model else data)
    if keeps:
        assert "PAGEWIRE_DATA_DIR=/var/lib/pagewire" in targets()[name].all("ENV")
        assert targets()[name].last("VOLUME") == "/var/lib/pagewire"


def test_gpu_override_changes_the_executor_only():
    override = services(path=GPU_OVERRIDE)
    assert list(override) == ["executor"]
    executor = override["executor"]
    (device,) = executor["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert executor["environment"] == {"PAGEWIRE_DEVICE": "cuda"}
    assert executor["build"]["args"] == {"TORCH_INDEX": ""}
    assert executor["image"] != services()["executor"]["image"]
