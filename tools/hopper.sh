#!/usr/bin/env bash
# Run one stage of hopper.md: check, tests, gemm, drawn, casts, step, tune, profile, sanitize, train, deterministic,
# probe or bits. Needs a Hopper GPU. Ends within nine minutes and writes to $OUT, a short table last.
set -uo pipefail
cd "$(dirname "$0")/.."

export OUT=${OUT:-benchmarks/results} PYTHON=${PYTHON:-python3} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 OCTILE_CACHE_DIR=${OCTILE_CACHE_DIR:-$HOME/.cache/octile}
BUDGET=520 # seconds of a stage; SECONDS is bash's clock
mkdir -p "$OUT"

# Run a command with a time limit in seconds; at the limit a Ctrl-C lets it write its results.
within() { timeout --signal=INT --kill-after=15 "$(($1 < BUDGET - SECONDS ? $1 : BUDGET - SECONDS))" "${@:2}"; }

# Use the tuned kernels of an earlier stage, also on a machine whose cache is empty.
restore_tuned() {
    local tuned=$OUT/tuned.json
    [[ -f $tuned ]] || tuned=benchmarks/results/tuned.json
    [[ -f $tuned ]] || return 0
    mkdir -p -m 700 "$OCTILE_CACHE_DIR" && cp -u "$tuned" "$OCTILE_CACHE_DIR/tuned.json" && echo "kernels as in $tuned"
}

# Build DeepGEMM from the folder DEEP_GEMM_SOURCE (hopper.md). Without it there is no comparison.
build_deep_gemm() {
    [[ -n ${DEEP_GEMM_SOURCE:-} ]] || { echo "DEEP_GEMM_SOURCE is not set: no comparison with DeepGEMM"; return 0; }
    if ! compgen -G "$DEEP_GEMM_SOURCE/build/lib*" >/dev/null; then
        (
            cd "$DEEP_GEMM_SOURCE" || exit
            export DG_FORCE_BUILD=1 DG_USE_LOCAL_VERSION=0 CC=/usr/bin/gcc CXX=/usr/bin/g++
            export LDSHARED="/usr/bin/g++ -shared"
            "$PYTHON" setup.py build
        ) >"$OUT/deep_gemm_build.txt" 2>&1 || echo "DeepGEMM does not build, see $OUT/deep_gemm_build.txt"
    fi
    PYTHONPATH=$PYTHONPATH:$(compgen -G "$DEEP_GEMM_SOURCE/build/lib*" | head -n 1)
    "$PYTHON" -c 'import deep_gemm; print("DeepGEMM", deep_gemm.__version__)' || true
}

bench() { # what seconds [name of the files] [further arguments]
    local name=${3:-$1}
    local call="run('$1', Path('$OUT/$name.json')${4:-})"
    within "$2" "$PYTHON" -c "from pathlib import Path; from octile.bench import run; $call" \
        2>"$OUT/$name.log" | tee "$OUT/$name.txt"
    grep -E 'left out|: no |Warning|Error' "$OUT/$name.log" | head -n 20
}

case ${1:-} in
check)
    nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.max.sm --format=csv,noheader || exit
    "$PYTHON" - <<'PY'
from importlib.util import find_spec
import sys
import torch
print("python", sys.version.split()[0], "torch", torch.__version__, torch.cuda.get_device_name())
needed = {"tests": "pytest xdist pytest_timeout hypothesis", "kernels": "triton cuda.bindings", "roofline": "matplotlib",
          "train": "rich tokenizers jinja2 filelock matplotlib safetensors"}
for stage, names in needed.items():
    missing = [name for name in names.split() if not (find_spec(name.split(".")[0]) and find_spec(name))]
    print(f"{stage}: {'missing ' + ', '.join(missing) if missing else 'all there'}")
PY
    for tool in nvcc ncu compute-sanitizer; do command -v $tool || echo "no $tool"; done
    within 200 "$PYTHON" -m tools.smoke_gemm
    ;;
tests)
    set -- "${@:2}"
    (($#)) || set -- tests/gpu tests/optim
    within 520 "$PYTHON" -m pytest "$@" -m "not exhaustive" -n 16 --dist load --maxschedchunk 1 -q -rfE --durations=20 \
        -p no:cacheprovider --junitxml="$OUT/tests.xml" 2>&1 | tee "$OUT/tests.txt"
    ;;
gemm)
    build_deep_gemm
    restore_tuned
    bench gemm 520 gemm ", shapes='list'"
    ;;
drawn)
    build_deep_gemm
    restore_tuned
    bench gemm 520 gemm_drawn ", shapes='drawn', seed=${2:-None}"
    ;;
casts)
    bench casts 150
    ;;
step)
    restore_tuned
    bench step 480
    ;;
tune)
    restore_tuned
    within 520 "$PYTHON" -c "from octile.bench.tune import run; run(None, minutes=$(((BUDGET - SECONDS - 30) / 60)))" \
        2>"$OUT/tune.log" | tee "$OUT/tune.txt"
    cp "$OCTILE_CACHE_DIR/tuned.json" "$OUT/tuned.json"
    ;;
profile)
    build_deep_gemm
    restore_tuned
    within 420 "$PYTHON" -m tools.profile_gemm "$OUT/profile.json"
    ;;
sanitize)
    OUT=$OUT within 520 tools/sanitize.sh
    ;;
train)
    restore_tuned
    bench train 520
    ;;
deterministic)
    restore_tuned
    within 520 "$PYTHON" -m tools.check_deterministic "$OUT"
    ;;
probe)
    within 520 "$PYTHON" -m octile.lab.probe --outputs "${OUTPUTS:-1e8}" --golden "$OUT/tensor_core.safetensors" \
        --json "$OUT/tensor_core.json" 2>&1 | tee "$OUT/tensor_core.txt" | tail -n 40
    ;;
bits)
    within 300 "$PYTHON" -m octile.lab.probe.products --json "$OUT/bits.json" 2>&1 | tee "$OUT/bits.txt"
    ;;
*)
    sed -n '2,3s/^# //p' "$0" >&2
    exit 2
    ;;
esac
