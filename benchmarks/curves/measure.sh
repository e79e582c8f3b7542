#!/usr/bin/env bash
# Pagewire's curves on this machine, as stored and in bf16, and their picture:
#
#   benchmarks/curves/measure.sh OUT_DIR [MODEL]
#
# OUT_DIR/curves.json may hold other servers' curves already, or get them later. The machine must be
# quiet. Takes 5 to 10 minutes on two cores and up to 7 GiB; QUICK=1 takes few and small points, to see that all of it
# works. PYTHON is the interpreter (.venv/bin/python).
set -euo pipefail
mkdir -p "${1:?usage: benchmarks/curves/measure.sh OUT_DIR [MODEL]}"
out=$(cd "$1" && pwd)
model=${2:-smollm2-135m-instruct}
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
port=$("$python" -c 'from pagewire.flags.ports import available_port; print(available_port("127.0.0.1"))')
json=$out/curves.json
sweep=() step=() start=()
if [ -n "${QUICK:-}" ]; then
  sweep=(--concurrency 1,4,16 --output-len 16 --prompt-lens 128,512 --num-prompts 2)
  step=(--requests 1 8 --contexts 128 1024)
  start=(--sizes 10M 135M)
fi

server=
stop() {
  [ -z "$server" ] || { kill "$server" && wait "$server" || true; }
  server=
}
trap stop EXIT

# LABEL [FLAGS of pagewire serve]
measure_server() {
  local label=$1
  shift
  "$python" -m pagewire.cli serve "$model" --port "$port" --grpc-port 0 --max-num-seqs 256 "$@" \
    >"$out/serve.log" 2>&1 &
  server=$!
  until "$python" -m pagewire.wire.health "http://127.0.0.1:$port/readyz" 2>/dev/null; do
    kill -0 "$server" 2>/dev/null || { cat "$out/serve.log" >&2; exit 1; }
    sleep 0.5
  done
  "$python" -m pagewire.cli bench sweep --base-url "http://127.0.0.1:$port" --label "$label" --json-out "$json" \
    "${sweep[@]}"
  stop
}

measure_server "Pagewire"
measure_server "Pagewire bf16" --quantization none
"$python" -m benchmarks.executor_step "$model" --label "Pagewire" --json-out "$json" "${step[@]}"
"$python" -m benchmarks.executor_step "$model" --quantization none --label "Pagewire bf16" --json-out "$json" \
  "${step[@]}"
"$python" -m benchmarks.scheduler_step --json-out "$json"
"$python" -m benchmarks.start --json-out "$json" "${start[@]}"
"$python" -m pagewire.cli bench plot "$json" --out "$out/curves.png" --title "$model"
