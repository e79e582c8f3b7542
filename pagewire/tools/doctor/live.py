"""Checks a running stack by its metrics: two scrapes some seconds apart, with remedies."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagewire.errors import StartupError
from pagewire.tools.client_config import KEY_HINT
from pagewire.tools.doctor.finding import Finding, Findings, note, ok, problem, warning
from pagewire.wire.tls import NO_FILES, Files, client_context, failed_handshake

_TIMEOUT_S = 10.0
_MANY_PREEMPTIONS = 0.1  # per second, as in the usual alert
_FULL_CACHE, _FEW_HITS, _FEW_QUERIES = 0.9, 0.05, 10_000
_LATE, _LONG_WAIT_S, _MUCH_WAIT = 0.2, 1.0, 2.0  # one step in twelve is late by design: pacing.py
_BUSY_POOL, _POOL_WAIT_S = 0.9, 0.01


@dataclass(frozen=True)
class Sample:
    """The values of one scrape: sums over labels, and the largest values."""

    at: float  # seconds
    values: Mapping[str, float]
    largest: Mapping[str, float]

    def of(self, name: str) -> float:
        return self.values.get(name, 0.0)


@dataclass(frozen=True)
class Change:
    """The change from one scrape to the next; the first may be the start of all counters."""

    first: Sample
    last: Sample

    @property
    def seconds(self) -> float:
        return max(1e-9, self.last.at - self.first.at)

    def grown(self, name: str) -> float:
        return self.last.of(name) - self.first.of(name)

    def rate(self, name: str) -> float:
        return self.grown(name) / self.seconds

    def share(self, part: str, whole: str) -> float:
        """Returns the ratio of two counters since the stack started; 0 if the second is 0."""
        return self.last.of(part) / self.last.of(whole) if self.last.of(whole) else 0.0

    def mean(self, histogram: str) -> float:
        """Returns the mean of a histogram over this time; 0 without observations."""
        count = self.grown(f"{histogram}_count")
        return self.grown(f"{histogram}_sum") / count if count else 0.0


def parse(text: str, at: float) -> Sample:
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = defaultdict(float)
    largest: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] += sample.value
            largest[sample.name] = max(largest[sample.name], sample.value)
    return Sample(at, values, largest)


def scrape(url: str, api_key: str | None, files: Files = NO_FILES) -> Sample:
    """Scrapes the metrics. Raises StartupError if no gateway answers."""
    try:
        return parse(_get(f"{url}/metrics", api_key, files), time.monotonic())
    except ValueError as error:
        raise StartupError(f"--url: {url}/metrics has no metrics; give the gateway's address") from error


def _get(url: str, api_key: str | None, files: Files) -> str:
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
        if request.type not in ("http", "https"):
            raise StartupError(f"--url: {url} is not the address of a gateway; give it like http://127.0.0.1:8000")
        context = client_context(files) if request.type == "https" else None
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as response:
            text: str = response.read().decode()
            return text
    except urllib.error.HTTPError as error:
        remedy = {401: f"; {KEY_HINT}", 403: "; give the key of an admin in PAGEWIRE_API_KEY"}.get(error.code, "")
        if error.code == 404:
            remedy = "; give the gateway's REST address without a path (of --admin-port, if it has one)"
        raise StartupError(f"--url: {url} answered {error.code} {error.reason}{remedy}") from error
    except (ValueError, http.client.InvalidURL) as error:
        raise StartupError(f"--url: {url}: {error}; give an address like http://127.0.0.1:8000") from error
    except http.client.HTTPException as error:
        raise StartupError(f"--url: {url} does not speak HTTP; give the gateway's REST address") from error
    except OSError as error:
        reason = str(getattr(error, "reason", error))
        remedy = failed_handshake(reason) or "`pagewire ps` lists the stacks of this machine"
        raise StartupError(f"--url: {url} does not answer ({reason}); {remedy}") from error


def check_stack(
    url: str,
    api_key: str | None,
    seconds: float,
    files: Files = NO_FILES,
    sleep: Callable[[float], None] = time.sleep,
) -> Findings:
    """Returns the findings of the gateway at url, watched for `seconds`. files: for https."""
    first = scrape(url, api_key, files)
    if not any(name.startswith("pagewire:") for name in first.values):
        raise StartupError(f"--url: {url}/metrics has no metrics of Pagewire; give the gateway's address")
    sleep(seconds)
    change = Change(first, scrape(url, api_key, files))
    status = _status(url, api_key, files)
    yield _services(status)
    yield from _roles(status)
    for check in _CHECKS:
        yield check(change)


def _status(url: str, api_key: str | None, files: Files) -> Mapping[str, object]:
    """Raises StartupError."""
    try:
        status = json.loads(_get(f"{url}/v1/status", api_key, files))
    except ValueError:
        status = None
    if not isinstance(status, dict):
        raise StartupError(f"--url: {url}/v1/status has no status; give the gateway's address")
    return status


def _services(status: Mapping[str, object]) -> Finding:
    services = status.get("services")
    services = services if isinstance(services, list) else []
    away = [one for one in services if one.get("state") != "serving"]
    if away:
        said = ", ".join(f"{one['service']} {one.get('address', '')} {one['state']}" for one in away)
        return problem("services", said, "requests wait for it, or go to its peers", "see its log, and GET /v1/status")
    sleep = status.get("sleep")
    is_asleep = isinstance(sleep, dict) and sleep.get("level")
    return ok("services", f"{len(services)} serve{', the model sleeps' if is_asleep else ''}")


def _roles(status: Mapping[str, object]) -> Findings:
    """Yields what the roles of executors mean, if one has a role."""
    replicas = status.get("replicas")
    attached = [one for one in replicas if one.get("attached")] if isinstance(replicas, list) else []
    roles = {str(one.get("name")): str(one.get("role")) for one in attached}
    if not roles.keys() or set(roles.values()) <= {"both", "", "None"}:
        return
    found = ", ".join(f"{name} {role}" for name, role in roles.items())
    for role, missing in (("prefill", "decode"), ("decode", "prefill")):
        if set(roles.values()) == {role}:
            yield warning("roles", found, f"without --role {missing}, these do all", f"start one with --role {missing}")
            return
    yield ok("roles", found)


def _preemptions(change: Change) -> Finding:
    rate = change.rate("pagewire:num_preemptions_total")
    found = f"{rate:.2f} per second, {change.last.of('pagewire:num_preemptions_total'):.0f} since the start"
    if rate < _MANY_PREEMPTIONS:
        return ok("preemptions", found)
    return warning(
        "preemptions",
        found,
        "blocks run out: requests are preempted and computed again",
        "more blocks: --kv-cache-memory-bytes, --gpu-memory-utilization, --kv-cache-dtype fp8, smaller weights; or "
        "fewer requests: --max-num-seqs",
    )


def _cache_usage(change: Change) -> Finding:
    usage = change.last.largest.get("pagewire:kv_cache_usage_perc", 0.0)  # of the fullest scheduler
    if usage < _FULL_CACHE:
        return ok("KV cache", f"{usage:.0%} in use")
    return warning(
        "KV cache",
        f"{usage:.0%} in use",
        "the next long prompts wait, or others are preempted for them",
        "as for preemptions; --max-model-len limits the memory of one request",
    )


def _cache_hits(change: Change) -> Finding:
    queries = change.last.of("pagewire:prefix_cache_queries_total")
    share = change.share("pagewire:prefix_cache_hits_total", "pagewire:prefix_cache_queries_total")
    found = f"{share:.0%} of {queries:.0f} prompt tokens were found"
    if queries < _FEW_QUERIES or share >= _FEW_HITS:
        return ok("prefix cache", found)
    return note(
        "prefix cache",
        found,
        "prompts begin differently, or their beginnings are evicted before they recur",
        "put variable text (dates, names) after the system prompt; more KV cache; --prefix-cache-sharing all if "
        "tenants share prompts; with several executors --placement cache_aware",
    )


def _queue(change: Change) -> Finding:
    before, now = change.first.of("pagewire:num_requests_waiting"), change.last.of("pagewire:num_requests_waiting")
    running = change.last.of("pagewire:num_requests_running")
    found = f"{now:.0f} wait, {now - before:+.0f} in {change.seconds:.0f} s; {running:.0f} run"
    if now <= max(running, 1) or now <= before:
        return ok("queue", found)
    return warning(
        "queue",
        found,
        "more arrives than is served: times to the first token grow without limit, or until requests are refused",
        "more executors; --max-num-seqs if the KV cache has room; --max-queue-time to refuse early",
    )


def _starving(change: Change) -> Finding:
    mean = change.mean("pagewire:request_queue_time_seconds")
    inference = change.mean("pagewire:request_inference_time_seconds")
    found = f"requests that ended waited {mean:.2f} s on average, and were computed for {inference:.2f} s"
    if mean < _LONG_WAIT_S or mean < _MUCH_WAIT * inference:
        return ok("waiting", found)
    return warning(
        "waiting",
        found,
        "requests spend more time in the queue than in steps",
        "--max-num-seqs, more executors; --max-running-per-tenant if one tenant takes all rows",
    )


def _late_steps(change: Change) -> Finding:
    steps, late = change.grown("pagewire:steps_total"), change.grown("pagewire:late_steps_total")
    found = f"{late:.0f} of {steps:.0f} steps were decided after the executor had become idle"
    if not steps or late / steps < _LATE:
        return ok("late steps", found)
    return warning(
        "late steps",
        found,
        "the executor waits for the scheduler: its process shares a core with others, or serves too many requests",
        "a core for the scheduler (CPU limits, --num-threads one less); --pipeline-depth 2; more schedulers",
    )


def _tokenizers(change: Change) -> Finding:
    workers = change.last.of("pagewire:tokenizer_pool_workers")
    busy = change.rate("pagewire:tokenizer_pool_busy_seconds_total") / workers if workers else 0.0
    wait = change.mean("pagewire:tokenizer_pool_wait_seconds")
    found = f"{workers:.0f} workers, busy {busy:.0%} of the time, texts waited {wait * 1e3:.1f} ms"
    if busy < _BUSY_POOL and wait < _POOL_WAIT_S:
        return ok("tokenizer pool", found)
    return warning(
        "tokenizer pool",
        found,
        "prompts wait before they reach the scheduler",
        "--tokenizer-pool-size up to the number of free cores, or another tokenizer service",
    )


def _refused(change: Change) -> Finding:
    now = change.grown("pagewire:requests_refused_total") + change.grown("pagewire:tokenizer_pool_refusals_total")
    total = change.last.of("pagewire:requests_refused_total")
    if not now:
        return ok("refused", f"none now, {total:.0f} since the start")
    return warning(
        "refused",
        f"{now:.0f} in {change.seconds:.0f} s",
        "clients have to retry later",
        "pagewire:requests_refused_total has the reasons; more executors, or --max-waiting-requests",
    )


def _recoveries(change: Change) -> Finding:
    total = change.last.of("pagewire:recoveries_total")
    if not total:
        return ok("recoveries", "none: no service has died")
    return note(
        "recoveries",
        f"{total:.0f} times requests continued after a service had died",
        "no request was lost, but a service dies",
        "the logs name the service and the cause",
    )


_CHECKS = (
    _preemptions,
    _cache_usage,
    _cache_hits,
    _queue,
    _starving,
    _late_steps,
    _tokenizers,
    _refused,
    _recoveries,
)
