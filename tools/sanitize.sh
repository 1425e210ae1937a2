#!/usr/bin/env bash
# compute-sanitizer over a short list of GPU tests: memcheck, racecheck and synccheck, of the GEMM kernel ("gemms"), of the
# CUDA and Triton kernels that quantize ("quantize"), of the kernels of gate, routing, cross-entropy, norms, rotary embeddings
# and optimizer ("elementwise"), of decoding's attention, the indexer's logits and the choice of keys ("attention", without
# racecheck, which cannot follow their barriers, and synccheck without the kernels whose warpgroups wait at one barrier from
# two instructions, which it reports), and of decode steps of at most 8 rows ("few_rows": memcheck and synccheck without
# decoding's attention and the GEMMs, octile's and cuBLAS's, which their tests run, too; racecheck, which breaks off where
# kernels are left out, without the tests of attention and of cuBLAS). Arguments choose lists, TOOLS the tools, LIMIT the
# seconds of each. All run at the same time, for at most seven minutes. racecheck is the slowest and gets fewer GEMMs, and the
# variant of their kernel in which it can follow the order of accesses (racecheck_all_lanes.py, which also compares the
# machine code of both). Exit code 1 where one of them is not clean. Needs a Hopper GPU. The output is in
# $OUT/sanitizer_TOOL_LIST.txt.
set -uo pipefail
cd "$(dirname "$0")/.."

export OUT=${OUT:-benchmarks/results} PYTHON=${PYTHON:-python3}
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # so that every tensor has its own bounds
GROUPS_OF="test_ragged_groups[1] or test_ragged_groups[6]"
MASKED="test_ragged_masked_rows[1] or test_ragged_masked_rows[2]"
GEMMS="test_every_kind_of_kernel or test_slots_of_block_scales_are_reused or test_the_error_without_promotion \
or (test_data_of_one_sign and 1D2D and stored) or $GROUPS_OF \
or $MASKED"
# rasterization is arithmetic only; of the kernels of groups, whose last tiles may be half tiles, one of each kind
RACES="(test_every_kind_of_kernel and not raster and not of_groups and not of_masked) or test_the_error_without_promotion \
or test_slots_of_block_scales_are_reused or (of_masked and float32 and not chosen) \
or (of_groups and float32 and zero) or $GROUPS_OF"
QUANTIZE="(test_transposed_quantization_of_a_large and 130) or (test_weights and float32 and 130) \
or (test_joined_weights and 1536 and bfloat16 and True-True) \
or (test_e5m6 and 1030 and float32) or (test_e5m6_becomes and 999 and float32) \
or (test_swiglu_is_within and 999 and e5m2) or test_swiglu_saves_ragged or (test_permute_and and 333) \
or (test_rms_norm_of_large and 999) or (test_gradients_of_rms_norm and 999)"
ELEMENTWISE_FILES="gate sequence_balance routing_plan cross_entropy elementwise data_flow gradient_norms adamw"
ELEMENTWISE="(test_the_choice_and and bfloat16 and (V3 or V2)) or test_experts_are_chosen or test_terms_are or (test_the_experts_with and 160) \
or (test_the_gradient_of_the_logits and True and (V3 or normalized)) or (test_loss_and_gradient and 1001) \
or (test_the_plan_is and False and (5000 or 32769)) or test_counts_of_sequences \
or (test_any_vocabulary and bfloat16 and (40 or 4100 or 32768)) or (test_any_strides and 300) \
or (test_swiglu_agrees and bfloat16 and (35 or 300)) or (test_rms_norm_agrees and bfloat16 and (37 or 192)) \
or (test_weighted_sums and bfloat16 and (200 or 9000)) or (test_rotary_operators and 301) \
or (test_rotated_halves and 301 and bfloat16) or test_norms_equal or test_many_tensors_in_one_call"

ATTENTION_FILES="mla_decode mqa_logits sparse_mla sparse_mla_backward top_keys"
ATTENTION="test_results_are_the_references or (test_rows_of_one_text and 4) or test_positions_in_pages \
or (test_gradients_are_those and (7-1-70 or 5-100)) or test_blocks_of_queries_add or (test_weights_are and 5-100) \
or test_positions_outside or test_pages_outside or (test_logits_of_any_shape and (7-63 or 70-1000)) \
or (test_logits_of_pages and float32 and 128 and 3) or (test_logits_of_any_distribution and 3000) \
or (test_rows_of_any_length and (5-9000 or 1-131072))"

FEW_ROWS_FILES="tests/gpu/cuda/test_few_rows.py tests/gpu/cuda/test_few_rows_mixture.py"
FEW_ROWS="(test_products and (1-2048 or 3-1408 or 7-16 or 8-10944)) or (test_attention and (lengths0 or lengths2)) \
or test_rows_of_one_text_attend or (test_row_invariant_attention_of_one and 700-16) \
or (test_numbers_of_rows and (1 or 3 or 8)) \
or (test_shapes_and_choices and not 7168) or (test_extreme_values_stay and nan)"

# the last two run cuBLAS's kernels, too, in which racecheck finds errors
FEW_ROWS_RACES="($FEW_ROWS) and not test_attention and not test_rows_of_one_text_attend and not test_numbers_of_rows \
and not test_extreme_values_stay"

NO_GEMM="not test_the_choice_and and not test_the_experts_with" # of the elementwise tests

sanitize() { # tool list tests; pytest's options. Exit code 7: errors were found
    # cuda-bindings asks the driver for functions that it may not have, which memcheck would count as errors
    local quiet others
    quiet=$([[ $1 == memcheck ]] && echo --report-api-errors no)
    others=$([[ $2 == few_rows && $1 != racecheck ]] && printf -- '--kernel-name-exclude %s ' kns=mla_decode kne=gemm kns=nvjet)
    [[ $1,$2 == synccheck,attention ]] && others=$(printf -- '--kernel-name-exclude %s ' kne=mla_decode_64 kns=sparse_mla)
    timeout --kill-after=15 "${LIMIT:-420}" compute-sanitizer --tool "$1" $quiet $others --error-exitcode 7 \
        --target-processes all --print-limit 20 \
        "$PYTHON" -m pytest -p no:cacheprovider -o addopts=--import-mode=importlib -q -k "$3" "${@:4}" \
        >"$OUT/sanitizer_$1_$2.txt" 2>&1
}

read -ra lists <<<"${*:-gemms quantize elementwise attention few_rows}"
read -ra tools <<<"${TOOLS:-memcheck racecheck synccheck}"
for list in "${lists[@]}"; do
    [[ $list =~ ^(gemms|quantize|elementwise|attention|few_rows)$ ]] || { echo "no list $list: gemms, quantize, elementwise, attention, few_rows" >&2; exit 2; }
done
declare -A jobs
for tool in "${tools[@]}"; do
    for list in "${lists[@]}"; do
        case $tool,$list in
        racecheck,gemms) sanitize "$tool" gemms "$RACES" tests/gpu/cuda/test_gemm.py -p tools.racecheck_all_lanes & ;;
        *,gemms) sanitize "$tool" gemms "$GEMMS" tests/gpu/cuda/test_gemm.py & ;;
        *,quantize) sanitize "$tool" quantize "$QUANTIZE" tests/gpu/test_quantize_kernels.py & ;;
        racecheck,attention) continue ;;
        # shellcheck disable=SC2086  (a file each)
        *,attention) sanitize "$tool" attention "$ATTENTION" $(printf 'tests/gpu/cuda/test_%s.py ' $ATTENTION_FILES) & ;;
        # shellcheck disable=SC2086  (a file each)
        racecheck,few_rows) sanitize "$tool" few_rows "$FEW_ROWS_RACES" $FEW_ROWS_FILES -p tools.racecheck_all_lanes & ;;
        # shellcheck disable=SC2086  (a file each)
        *,few_rows) sanitize "$tool" few_rows "$FEW_ROWS" $FEW_ROWS_FILES & ;;
        *,elementwise)
            selected=$ELEMENTWISE # racecheck and initcheck find errors in cuBLAS's kernels that split K
            [[ $tool =~ ^(racecheck|initcheck)$ ]] && selected="($ELEMENTWISE) and $NO_GEMM"
            # shellcheck disable=SC2086  (a file each)
            sanitize "$tool" elementwise "$selected" $(printf 'tests/gpu/test_%s.py ' $ELEMENTWISE_FILES) &
            ;;
        esac
        jobs[$tool $list]=$!
    done
done

status=0
for tool in "${tools[@]}"; do
    for list in "${lists[@]}"; do
        [[ -n ${jobs[$tool $list]:-} ]] || continue
        wait "${jobs[$tool $list]}"
        case $? in
        0) outcome=clean ;;
        7) outcome="errors found" status=1 ;;
        124 | 137) outcome="stopped after its time" status=1 ;;
        *) outcome="failed, see its output" status=1 ;;
        esac
        echo "$tool, $list: $outcome: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|passed|failed|error' \
            "$OUT/sanitizer_${tool}_$list.txt" | tail -n 2 | tr '\n' ' ')"
    done
done
exit $status
