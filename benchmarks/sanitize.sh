#!/usr/bin/env bash
# compute-sanitizer over a short list of the product kernel's tests: memory errors, races in shared memory, barriers.
# Needs a Hopper GPU; the output stays in $OUT/sanitizer_TOOL.txt.
set -uo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-benchmarks/results} PYTHON=${PYTHON:-python3}
TESTS=tests/gpu/cuda/test_product.py
SHORT="(test_masked and out_dtype0) or test_ragged_groups[1] or test_ragged_groups[6] or (test_data_of_one_sign and 100) \
or test_every_kind_of_kernel or test_without_promotion"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # so that every tensor has its own bounds

status=0
for tool in memcheck racecheck synccheck; do
    # cuda-bindings asks the driver for functions that it may not have, which memcheck would count as errors
    quiet=$([[ $tool == memcheck ]] && echo --report-api-errors no)
    timeout --kill-after=15 165 compute-sanitizer --tool "$tool" $quiet --error-exitcode 7 --target-processes all \
        --print-limit 20 \
        "$PYTHON" -m pytest -p no:cacheprovider -o addopts=--import-mode=importlib -q "$TESTS" -k "$SHORT" \
        >"$OUT/sanitizer_$tool.txt" 2>&1
    code=$?
    case $code in
    0) said=clean ;;
    7) said="errors found" status=1 ;;
    124 | 137) said="stopped after its time" status=1 ;;
    *) said="failed with exit code $code" status=1 ;;
    esac
    echo "$tool: $said: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|passed|failed|error' "$OUT/sanitizer_$tool.txt" | tail -n 2 | tr '\n' ' ')"
done
exit $status
