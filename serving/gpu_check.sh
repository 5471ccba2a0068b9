#!/bin/sh
# Eight minutes at most on a machine with a GPU and vLLM: does a hybrid start, are its answers ours,
# what does it hold, how fast is it beside the dense model. Prints a table; each row is also written
# at once, to benchmarks/results/gpu/<device>.jsonl. What has its row is not measured again.
#
#     serving/gpu_check.sh                  a GPU if there is one, else the CPU with small models
#     DEVICE=cpu serving/gpu_check.sh       the CPU, whose rows go to runs/gpu
#
# PYTHON   that has vLLM (.venv-serving, which `make serving` makes, or else python3)
# MINUTES  for all of it (7.5, and half a minute to end)
# ROWS     another folder for the rows
set -eu
cd "$(dirname "$0")/.."
usual=.venv-serving/bin/python
PYTHON=${PYTHON:-$([ -x $usual ] && echo $usual || echo python3)}
MINUTES=${MINUTES:-7.5}

# The plug-in, where it is not installed: beside the interpreter's packages, for this run alone.
if ! "$PYTHON" -c 'from importlib.metadata import version; version("bosch-hybrid-vllm")' 2>&-; then
    added=$(mktemp -d)
    trap 'rm -rf "$added"' EXIT
    "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --target "$added" serving/vllm
    export PYTHONPATH="$added${PYTHONPATH:+:$PYTHONPATH}"
fi
has_gpu='import torch; print("cuda" if torch.cuda.is_available() else "cpu")'
DEVICE=${DEVICE:-$("$PYTHON" -c "$has_gpu")}
[ "$DEVICE" != cpu ] || export CUDA_VISIBLE_DEVICES=
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" timeout --kill-after=10 \
    "$(awk "BEGIN { print int(60 * $MINUTES + 30) }")" \
    "$PYTHON" -m benchmarks gpu --only serving --device "$DEVICE" --minutes "$MINUTES" \
    ${ROWS:+--rows "$ROWS"}
