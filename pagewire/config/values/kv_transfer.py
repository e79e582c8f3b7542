"""The role of an executor: --role, or the value of --kv-transfer-config, an object with vLLM's keys."""

from typing import Any

from pagewire.config import json_object
from pagewire.config.executor import ExecutorConfig
from pagewire.errors import StartupError

FLAG = "--kv-transfer-config"
CONNECTOR = "PagewireConnector"
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_OFFLOADING = "--kv-offloading-size keeps blocks in host memory, --kv-offloading-dir on a disk"
# Connectors of vLLM that do something else than to connect executors with roles.
_INSTEAD = {
    "OffloadingConnector": _OFFLOADING,
    "SimpleCPUOffloadConnector": _OFFLOADING,
    "SharedStorageConnector": _OFFLOADING,
    "ExampleConnector": _OFFLOADING,
    "LMCacheConnectorV1": _OFFLOADING,
    "LMCacheMPConnector": _OFFLOADING,
    "MooncakeStoreConnector": _OFFLOADING,
    "FlexKVConnectorV1": _OFFLOADING,
    "HF3FSKVConnector": _OFFLOADING,
}
_ROLES_INSTEAD = "the scheduler connects executors by their roles, through shared memory or gRPC"
# They say where a peer is, and how it is reached: the scheduler knows both.
_IGNORED = frozenset(
    {
        "engine_id",
        "kv_buffer_device",
        "kv_buffer_size",
        "kv_rank",
        "kv_parallel_size",
        "kv_ip",
        "kv_port",
        "enable_permute_local_kv",
    }
)
_READ = ("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_module_path", "kv_connector_extra_config")


def role_of(config: ExecutorConfig) -> str:
    """Returns "prefill", "decode" or "both". Raises StartupError for a wrong configuration."""
    if config.kv_transfer_config is None:
        return config.role
    role = _role_of(config.kv_transfer_config)
    if config.role not in ("both", role):
        raise StartupError(f"--role {config.role} contradicts {FLAG}, which means {role}; give one of the two flags")
    return role


def _role_of(text: str) -> str:
    content: dict[str, Any] = json_object.loads(text)
    if unknown := sorted(content.keys() - _IGNORED - set(_READ)):
        raise StartupError(f"{FLAG} has unknown keys: {', '.join(unknown)[:200]}; known are {', '.join(_READ)}")
    connector, policy = content.get("kv_connector"), content.get("kv_load_failure_policy")
    if connector not in (None, CONNECTOR):
        instead = _INSTEAD.get(connector, _ROLES_INSTEAD) if isinstance(connector, str) else _ROLES_INSTEAD
        raise StartupError(
            f"{FLAG}: kv_connector {connector!r:.200} is not there: {instead}; leave it out, or name {CONNECTOR}"
        )
    if content.get("kv_connector_module_path") is not None:
        raise StartupError(f"{FLAG}: kv_connector_module_path: code from outside is not loaded; leave it out")
    if content.get("kv_connector_extra_config"):
        raise StartupError(f"{FLAG}: kv_connector_extra_config: {CONNECTOR} has no options; leave it out")
    if policy not in (None, "recompute"):
        raise StartupError(
            f"{FLAG}: kv_load_failure_policy {policy!r:.200}: what cannot be loaded is computed again; leave it out, "
            "or set recompute"
        )
    if (role := content.get("kv_role", "kv_both")) not in _ROLES:
        raise StartupError(f"{FLAG}: kv_role {role!r:.200} is none of {', '.join(_ROLES)}; use one of these")
    return _ROLES[role]


def of_vectors(role: str) -> str | None:
    """Refuses a role for a model that generates nothing."""
    return (
        None
        if role == "both"
        else f"--role {role}: not with --runner pooling, as vectors need no decodes; leave it out"
    )


def of_stack(num_prefill: int, num_executors: int, role: str, *, is_on_ray: bool, has_prefix_cache: bool) -> str | None:
    """Returns why `pagewire serve` refuses these roles; None if it does not. role: of --kv-transfer-config."""
    if role != "both":
        return (
            f"{FLAG}: `pagewire serve` starts executors of all roles: say how many compute prompts with "
            "--prefill-executors, or start single ones with `pagewire executor`"
        )
    if not num_prefill:
        return None
    if is_on_ray:
        return (
            f"--prefill-executors {num_prefill}: executors on a Ray cluster are alike; leave it out, or start "
            "executors with `pagewire executor --role`"
        )
    if num_prefill >= num_executors:
        return (
            f"--prefill-executors {num_prefill}: of --data-parallel-size {num_executors} executors, none is left to "
            "decode; start more"
        )
    if not has_prefix_cache:
        return (
            f"--prefill-executors {num_prefill}: keys and values are found by the prefix cache; leave out "
            "--no-enable-prefix-caching"
        )
    return None
