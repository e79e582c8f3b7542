#!/usr/bin/env bash
# Brings the stack of docker-compose.yml up with podman: no Docker daemon, no systemd, no image registry needed.
#
#   deploy/podman-up.sh [up [ARGS]]     build the images, start the stack, wait until it is healthy
#   deploy/podman-up.sh build           only build
#   deploy/podman-up.sh compose ARGS    docker compose ARGS, for instance: compose ps, compose logs -f executor
#   deploy/podman-up.sh down [ARGS]     stop the stack, and what this script started
#
# As root. Installs nothing; says what is missing. Settings are those of docker-compose.yml (shell or .env). BASE_IMAGE
# is made with debootstrap if no registry has it; an empty TORCH_INDEX suits a pip that finds the wanted torch by its own
# configuration. And:
#
#   BASE_SUITE    the Debian release of a base image that has to be made (default: bookworm)
#   COMPOSE       the docker compose command (default: docker-compose, else docker compose)
#   PYTHON        the python whose pip configuration (indexes, find-links, certificates) builds use (default: python3)
#   STATE_DIR     socket, logs and generated configuration (default: /run/pagewire-podman)
set -euo pipefail

cd "$(dirname "$0")/.."

BASE_SUITE=${BASE_SUITE:-bookworm}
PYTHON=${PYTHON:-python3}
STATE_DIR=${STATE_DIR:-/run/pagewire-podman}
SOCKET=$STATE_DIR/podman.sock
if [ -z "${COMPOSE:-}" ]; then
    COMPOSE="docker-compose"
    command -v docker-compose > /dev/null || COMPOSE="docker compose"
fi

say() { echo "podman-up: $*" >&2; }
die() {
    say "$@"
    exit 1
}

check_tools() {
    local tool missing=()
    [ "$(id -u)" = 0 ] || die "run this as root: container networks and the base image need it"
    for tool in podman runc iptables curl "$PYTHON"; do
        command -v "$tool" > /dev/null || missing+=("$tool")
    done
    [ ${#missing[@]} = 0 ] || die "missing: ${missing[*]}. On Debian: apt-get install podman buildah runc" \
        "containernetworking-plugins golang-github-containernetworking-plugin-dnsname iptables curl python3-pip"
    [[ "$($COMPOSE version --short 2> /dev/null)" =~ ^v?[2-9] ]] \
        || die "no docker compose version 2 (the package docker-compose of Debian 13 has it); COMPOSE names another"
}

# podman without systemd: cgroupfs instead of systemd slices, runc because crun refuses hybrid cgroups, and limits that
# a root without CAP_SYS_RESOURCE may set. A configuration of the user's wins.
write_containers_conf() {
    mkdir -p "$STATE_DIR"
    [ -n "${CONTAINERS_CONF:-}" ] && return
    cat > "$STATE_DIR/containers.conf" << 'END'
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
compat_api_enforce_docker_hub = false
END
    export CONTAINERS_CONF=$STATE_DIR/containers.conf
}

# The host's pip configuration, for builds and for the model download: pip.conf, and the local paths it names, one per
# line in pip-paths. Only what pip itself reports is used.
write_pip_conf() {
    "$PYTHON" - "$STATE_DIR" << 'END'
import ast, pathlib, subprocess, sys

state = pathlib.Path(sys.argv[1])
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
values: dict[str, list[str]] = {}
for line in listed.stdout.splitlines():
    key, _, value = line.partition("=")
    section, _, name = key.rpartition(".")
    if section in ("global", ":env:") and name in ("cert", "index-url", "extra-index-url", "find-links", "timeout"):
        found = values.setdefault(name, [])
        found += [word for word in ast.literal_eval(value).split() if word not in found]
conf = "".join(f"{name} = {' '.join(words)}\n" for name, words in values.items())
(state / "pip.conf").write_text("[global]\n" + conf)
local = (word.removeprefix("file://") for words in values.values() for word in words)
# An index is a folder of links into its neighbours, so the folder above it goes along.
paths = {path.parent if path.name == "simple" else path for word in local if (path := pathlib.Path(word)).is_absolute()}
(state / "pip-paths").write_text("".join(f"{path}\n" for path in sorted(paths) if path.exists()))
END
}

pip_volumes() {
    echo "$STATE_DIR/pip.conf:/etc/pip.conf:ro"
    sed 's|.*|&:&:ro|' "$STATE_DIR/pip-paths"
}

# What docker-compose.yml says is to be built, a line per service: base image, target, image name, build arguments.
build_plan() {
    $COMPOSE -f docker-compose.yml config --format json | "$PYTHON" -c '
import json, sys

for service in json.load(sys.stdin)["services"].values():
    build = service["build"]
    arguments = [f"--build-arg={name}={value}" for name, value in build["args"].items()]
    print(build["args"]["BASE_IMAGE"], build["target"], service["image"], *arguments)
'
}

make_base_image() {
    local image=$1 root=$STATE_DIR/rootfs
    podman image exists "$image" && return
    say "pulling $image"
    podman pull --quiet "$image" && return
    say "no registry has it: making a Debian $BASE_SUITE with its Python under that name"
    command -v debootstrap > /dev/null || die "missing: debootstrap (apt-get install debootstrap)"
    rm -rf "$root"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv "$BASE_SUITE" "$root" \
        > "$STATE_DIR/debootstrap.log" || die "debootstrap failed; see $STATE_DIR/debootstrap.log"
    ln -sf python3 "$root/usr/bin/python"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    tar -C "$root" -c . | podman import - "$image"
    rm -rf "$root"
}

build() {
    local base target image arguments volume volumes=()
    check_tools
    write_containers_conf
    write_pip_conf
    while read -r volume; do volumes+=("--volume=$volume"); done < <(pip_volumes)
    while read -r base target image arguments; do
        make_base_image "$base"
        say "building $image"
        # shellcheck disable=SC2086  # one word per build argument
        podman build --quiet --format docker --pull=never "${volumes[@]}" $arguments \
            --file deploy/Dockerfile --target "$target" --tag "$image" . < /dev/null
    done < <(build_plan)
}

# What the host's pip needs, in the services that fetch a model.
write_compose_override() {
    local service
    {
        echo "services:"
        for service in executor tokenizer; do
            printf '  %s:\n    volumes:\n' "$service"
            pip_volumes | sed 's|^|      - |'
        done
    } > "$STATE_DIR/compose.yml"
}

compose() {
    local files=(-f docker-compose.yml)
    [ -f "$STATE_DIR/compose.yml" ] && files+=(-f "$STATE_DIR/compose.yml")
    DOCKER_HOST=unix://$SOCKET $COMPOSE "${files[@]}" "$@"
}

running() { [ -f "$STATE_DIR/$1.pid" ] && kill -0 "$(cat "$STATE_DIR/$1.pid")" 2> /dev/null; }

start_in_background() {
    local name=$1
    shift
    running "$name" && return
    setsid "$@" > "$STATE_DIR/$name.log" 2>&1 < /dev/null &
    echo $! > "$STATE_DIR/$name.pid"
}

stop_in_background() {
    running "$1" && kill "$(cat "$STATE_DIR/$1.pid")"
    rm -f "$STATE_DIR/$1.pid"
}

start_podman_service() {
    start_in_background podman podman system service --time=0 "unix://$SOCKET"
    for _ in $(seq 50); do
        curl --silent --fail --unix-socket "$SOCKET" http://localhost/_ping > /dev/null && return
        sleep 0.2
    done
    die "podman's API did not come up; see $STATE_DIR/podman.log"
}

# podman leaves the schedule of health checks to systemd timers; without systemd this loop runs them.
healthcheck_loop() {
    local name
    while true; do
        for name in $(podman ps --filter label=com.docker.compose.project=pagewire --format '{{.Names}}'); do
            podman healthcheck run "$name" > /dev/null || true
        done
        if podman ps --filter label=com.docker.compose.project=pagewire --format '{{.Status}}' | grep -q '(starting)'; then
            sleep 1
        else
            sleep 10
        fi
    done
}

up() {
    build
    write_compose_override
    start_podman_service
    [ -d /run/systemd/system ] || start_in_background healthcheck "$0" healthcheck-loop
    compose up --detach --no-build --pull never --wait "$@"
    compose ps
}

down() {
    write_containers_conf
    start_podman_service
    compose down "$@"
    stop_in_background healthcheck
    stop_in_background podman
}

case ${1:-up} in
    up) shift $(($# > 0)) && up "$@" ;;
    build) build ;;
    compose)
        write_containers_conf
        shift
        compose "$@"
        ;;
    down) shift && down "$@" ;;
    healthcheck-loop)
        write_containers_conf
        healthcheck_loop
        ;;
    *) sed -n '2,17s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
