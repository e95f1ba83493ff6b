#!/usr/bin/env bash
# One command for a machine with a GPU, within 8 minutes, without a network:
#
#     benchmarks/device.sh SUITE [TORCHAO]     SUITE: first smoke kernels layers gpt2 models loss tests
#
# It checks the machine, runs the suite, draws the results, and prints a table last. If torchao is not installed, TORCHAO is
# its wheel, or a folder with the wheel or the package. All results are left in one folder:
#
#     OUT      where (default: benchmarks/results/device-SUITE); the results are in OUT/json, output in OUT/log.txt
#     PYTHON   the interpreter (default: python3)
#     LIMIT    seconds for the whole run (default: 470)
#     DEVICE   cuda; `cpu` runs tiny sizes, to try this script
#     FLAGS    further flags for benchmarks.train
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
SUITES="first smoke kernels layers gpt2 models loss tests"
suite=${1:-}
if [[ " $SUITES " != *" $suite "* || -z $suite ]]; then
    echo "usage: benchmarks/device.sh SUITE [TORCHAO]; SUITE is one of: $SUITES" >&2
    exit 2
fi
torchao=${2:-}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
limit=${LIMIT:-470}
out=${OUT:-benchmarks/results/device-$suite}
flags=(--device "$device")
[[ $device == cpu ]] && flags+=(--size tiny)
[[ -n $torchao ]] && flags+=(--torchao "$torchao")
read -ra more <<<"${FLAGS:-}"
rm -rf "$out/json" "$out/plots" "$out/work"
mkdir -p "$out/json"
: >"$out/log.txt"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
status=0

left() { echo $((limit - SECONDS)); }

# run SECONDS COMMAND...: stops COMMAND after SECONDS, or at the limit; output goes to the screen and to the log
run() {
    local most=$1
    shift
    if (($(left) < 20)); then
        echo "out of time, not run: $*" | tee -a "$out/log.txt"
        return
    fi
    ((most > $(left))) && most=$(left)
    echo "== $* (at most $most s, $(left) s left)" | tee -a "$out/log.txt"
    timeout -k 10 "$most" "$@" 2>&1 | tee -a "$out/log.txt"
    local code=${PIPESTATUS[0]}
    if ((code != 0)); then
        echo "== failed with status $code" | tee -a "$out/log.txt"
        status=1
    fi
}

# bench SECONDS CASE ARMS FLAGS...: one case. It starts no new work after three quarters of its time.
bench() {
    local most=$1 case=$2 arms=$3
    shift 3
    ((most > $(left))) && most=$(left)
    run "$most" "$python" -m benchmarks.train --case "$case" --arms "$arms" --json "$out/json/" --no-warm-compile \
        --budget $((most * 3 / 4)) --timeout "$most" --keep "$out/work" "${flags[@]}" "$@" "${more[@]}"
}

check() {
    command -v nvidia-smi >/dev/null && nvidia-smi
    "$python" - "$device" <<'PY'
import sys
import torch
print("python", sys.version.split()[0], "| torch", torch.__version__, "| cuda", torch.version.cuda)
try:
    import triton
    print("triton", triton.__version__)
except ImportError:
    sys.exit("triton is missing: nothing can be compiled for a GPU")
if sys.argv[1] == "cuda":
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device")
    p = torch.cuda.get_device_properties(0)
    print(f"{p.name}, capability {p.major}.{p.minor}, {p.total_memory / 1e9:.0f} GB")
    if (p.major, p.minor) < (8, 9):
        sys.exit("FP8 matmuls need capability 8.9")
for name in ("tqdm", "tabulate", "matplotlib", "torchao", "transformer_engine.pytorch", "pytest"):
    try:
        __import__(name)
    except Exception as error:
        print(f"{name}: not usable ({type(error).__name__})")
PY
}

if ! check 2>&1 | tee "$out/machine.txt"; then
    echo "this machine cannot run the suite: see above" >&2
    exit 1
fi

bf16=bf16
fp8=fp8-delayed,fp8-tensorwise
peers=torchao-tensorwise,torchao-rowwise
te=
"$python" -c "import transformer_engine.pytorch" >/dev/null 2>&1 && te=,te-delayed,te-current
case $suite in
first)
    # what decides about the cost model and the plan, in this order
    run 90 "$python" -m benchmarks.matmuls --json "$out/matmuls.json" --device "$device"
    [[ $device == cuda ]] && run 60 env FP8COMPILE_DEVICES="$out/devices.toml" "$python" -m fp8compile calibrate
    run 150 "$python" -m benchmarks.kernels --json "$out/json/kernels.json" --budget 110 "${flags[@]}"
    bench 100 llama-8b-layers:layers=2 "$bf16,fp8-delayed,fp8-tensorwise" --rounds 2 --steps 5
    bench 90 gpt2-124m "$bf16,fp8-delayed,fp8-delayed-all" --rounds 2 --steps 5
    ;;
smoke)
    bench 120 gpt2-124m "eager-bf16,$bf16,$fp8,torchao-tensorwise" --size tiny --rounds 2 --steps 5
    bench 100 llama-8b-layers "$bf16,$fp8" --size tiny --rounds 2 --steps 5
    bench 150 linear "$bf16,$fp8" --rounds 2 --steps 10
    bench 100 llama-8b-layers:layers=2 "$bf16,fp8-delayed" --rounds 2 --steps 5
    ;;
kernels)
    run 200 "$python" -m benchmarks.kernels --json "$out/json/kernels.json" --budget 150 "${flags[@]}"
    run 60 "$python" -m benchmarks.optimizers --out "$out/optimizers.json" --device "$device"
    bench 130 linear "eager-bf16,$fp8,$peers" --rounds 3 --steps 20
    bench 340 linear:grid=6 "eager-bf16,fp8-delayed" --rounds 1 --steps 10
    ;;
layers)
    bench 160 llama-8b-layers "eager-bf16,$bf16,$fp8,$peers$te" --rounds 3 --steps 8
    bench 130 llama-8b-layers:seq=2048 "$bf16,$fp8,$peers$te" --rounds 3 --steps 16
    bench 90 llama-8b-layers:ckpt=1 "$bf16,$fp8,torchao-tensorwise" --rounds 2 --steps 8
    bench 90 llama-8b-layers:accum=8 "$bf16,$fp8,torchao-tensorwise" --rounds 2 --steps 2
    ;;
gpt2)
    bench 330 gpt2-124m "eager-bf16,$bf16,$fp8,$peers$te" --rounds 4 --steps 8
    bench 140 gpt2-124m "$bf16,bf16-max-autotune" --rounds 3 --steps 8
    ;;
models)
    bench 110 ffn-half "$bf16,fp8-delayed,torchao-tensorwise$te" --rounds 2 --steps 4 --warmup 2
    bench 110 llama-1b "$bf16,$fp8,torchao-tensorwise" --rounds 2 --steps 5 --warmup 2
    bench 130 llama-3b "$bf16,fp8-delayed,torchao-tensorwise" --rounds 2 --steps 4 --warmup 2
    bench 110 dit "$bf16,$fp8,torchao-tensorwise" --rounds 3 --steps 8
    ;;
loss)
    steps=60
    [[ $device == cpu ]] && steps=5
    bench 450 loss "$bf16,$fp8,torchao-tensorwise${te:+,te-delayed}" --rounds 10 --steps $steps
    ;;
tests)
    # not pyproject.toml's settings: they ask for plugins that the machine may not have
    pytest=("$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir . -o pythonpath=examples -W ignore)
    run 250 "${pytest[@]}" --continue-on-collection-errors -m gpu tests
    run 200 "${pytest[@]}" tests/config/test_options.py
    ;;
esac

rm -rf "$out"/work/*/cache-*
if [[ -n $(ls "$out/json" 2>/dev/null) ]]; then
    timeout 60 "$python" -m benchmarks.plot "$out/json" --out "$out/plots" 2>&1 | tail -n 20 >>"$out/log.txt"
    timeout 30 "$python" -m benchmarks.tables "$out/json" --all | tee "$out/table.txt"
else
    tail -n 15 "$out/log.txt"
fi
echo "$suite: $SECONDS s, in $out, status $status"
exit $status
