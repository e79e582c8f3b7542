"""The form of values that are texts: paths, hosts, addresses, URLs and names. Each function raises ValueError with what
is expected."""

import re
from collections.abc import Callable

_LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, of a file; Linux
# Also bytes that are not UTF-8, which Python reads as surrogates. Not all that str.isprintable() refuses: names of
# files have spaces of other kinds.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_NOT_IN_HOSTS = re.compile(r"[\s/@?#,\[\]]")
_PORT = re.compile(r"[0-9]{1,5}")
_URL = re.compile(r"(?:https?://)?([^/?#@]+)(/[^\s]*)?")


def path(text: str) -> None:
    """Checks a path, a hub id or a name of a model."""
    if _CONTROL.search(text) or any(len(part.encode()) > _LONGEST_NAME for part in text.split("/")):
        raise ValueError(f"a path in UTF-8 without control characters, with names of at most {_LONGEST_NAME} bytes")


def host(text: str) -> None:
    """Checks the name or the address of a host."""
    try:
        text.encode("idna")
        is_host = bool(text) and text.isprintable() and not _NOT_IN_HOSTS.search(text)
    except UnicodeError:
        is_host = False
    if not is_host:
        raise ValueError("the name or the address of a host")


def hosts(text: str) -> None:
    """Checks hosts with commas between them, or *."""
    for one in text.split(","):
        if one.strip() != "*":
            try:
                host(one.strip())
            except ValueError:
                raise ValueError("names of hosts, separated by commas, or *") from None


def addresses(text: str) -> None:
    """Checks addresses with commas between them."""
    for one in text.split(","):
        name, _, port = one.strip().rpartition(":")
        is_socket = one.strip().startswith("unix:") and not _CONTROL.search(one)
        if not is_socket and not (_is_host(name.removeprefix("[").removesuffix("]")) and _is_port(port)):
            raise ValueError("addresses, separated by commas: host:port or unix:/path")


def url(text: str) -> None:
    """Checks the URL of a collector; without a scheme, it has a port."""
    match = _URL.fullmatch(text)
    name, colon, port = match[1].rpartition(":") if match is not None else ("", "", "")
    if match is not None and "://" in text and not (colon and not match[1].endswith("]")):
        name, port = match[1], "1"
    if not text.isprintable() or not _is_host(name.removeprefix("[").removesuffix("]")) or not _is_port(port):
        raise ValueError("a URL such as http://localhost:4317")


def cluster(text: str) -> None:
    """Checks the address of a Ray cluster."""
    if text not in ("local", "auto"):
        try:
            addresses(text.removeprefix("ray://"))
        except ValueError:
            raise ValueError("HOST:PORT of the head of a Ray cluster, or local") from None


def name(text: str) -> None:
    """Checks a text that others see: a name, a key."""
    if _CONTROL.search(text):
        raise ValueError("a text in UTF-8 without control characters")


def _is_host(text: str) -> bool:
    try:
        host(text)
    except ValueError:
        return False
    return True


def _is_port(text: str) -> bool:
    return _PORT.fullmatch(text) is not None and int(text) <= 65535


FORMS: dict[str, Callable[[str], None]] = {
    "path": path,
    "host": host,
    "hosts": hosts,
    "addresses": addresses,
    "url": url,
    "cluster": cluster,
    "name": name,
}

# The forms of flags that are texts, by field.
FORM_OF = {
    field: form
    for form, fields in {
        "path": "model tokenizer spec_model speculative_model download_dir weights_cache data_dir uds_dir ssl_certfile "
        "ssl_keyfile ssl_ca_certs api_key_file allowed_local_media_path generation_config address_file revision "
        "tokenizer_revision lora_dir kv_offloading_dir models",
        "addresses": "listen public_listen leader lines_address",
        "url": "otlp_traces_endpoint",
        "hosts": "allowed_media_domains",
        "cluster": "ray_address",
        "name": "served_model_name api_key group_secret fingerprint_value generation_store tokenizer_address "
        "scheduler_address executor_address cpu_bind numa_bind speculative_model_quantization tenant_header "
        "fault_injection limit_mm_per_prompt lora_modules other_models model_alias default_model",
    }.items()
    for field in fields.split()
}
