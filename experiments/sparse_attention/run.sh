#!/usr/bin/env bash
# Train a tiny model densely, then its indexers, then both, and measure what the indexers choose: run.sh FOLDER
set -euo pipefail
out=$1
options=(--preset tiny --device cpu --model.vocab-size 1024 --sequence-length 256 --val-sequences 32 --validate-every 50
  --checkpoint-every 0)
indexers=(--model.index-n-heads 4 --model.index-head-dim 32 --model.index-topk 32)
octile train "${options[@]}" --steps 600 --out "$out/dense"
octile train "${options[@]}" --init-from "$out/dense" --optim.lr 1e-4 --steps 200 --out "$out/dense_continued"
octile train "${options[@]}" --init-from "$out/dense" "${indexers[@]}" --indexer-stage warm_up --steps 1 \
  --optim.lr 0 --out "$out/untrained"
octile train "${options[@]}" --init-from "$out/dense" "${indexers[@]}" --indexer-stage warm_up --steps 200 \
  --optim.lr 1e-3 --optim.decay 0 --out "$out/warm_up"
octile train "${options[@]}" --init-from "$out/warm_up" --optim.lr 1e-4 --steps 200 --out "$out/sparse"
python -m experiments.sparse_attention.measure "$out"
