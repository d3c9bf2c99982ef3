#!/bin/sh
# Runs a fuzz target, guided by coverage, with the compiler that builds everything else.
#
#   scripts/fuzz.sh TARGET [SECONDS]       60 s unless given
#
#   wire, server, client, nbd              the pool's protocol (crates/rmap/fuzz)
#   moves                                  frames between hosts, and notes about moves (tests/fuzz)
#   manifest, export                       an image's manifest, a snapshot in a file (tests/fuzz)
#
# Inputs that reached something new stay in out/fuzz/TARGET and are where the next run begins. An input that fails is left in
# out/fuzz/TARGET-failed, and shown; `out/fuzz/bin/TARGET FILE` runs it again.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=${1:-}
seconds=${2:-60}
case $target in
wire | server | client | nbd) fuzz=crates/rmap/fuzz ;;
moves | manifest | export) fuzz=tests/fuzz ;;
*)
    echo "fuzz: give one of wire, server, client, nbd, moves, manifest, export" >&2
    exit 2
    ;;
esac
command -v c++ >/dev/null || {
    echo "fuzz: libFuzzer needs a C++ compiler: apt-get install g++" >&2
    exit 1
}

out=$root/out/fuzz
mkdir -p "$out/$target" "$out/$target-failed" "$out/bin"
# What cargo-fuzz gives to a nightly compiler, as far as a stable one takes it: edges and comparisons, no sanitizer.
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1" \
    cargo build --release --manifest-path "$root/$fuzz/Cargo.toml" --target-dir "$out/target" \
    --target "$(rustc -vV | sed -n 's/^host: //p')" --bin "$target"
cp "$out/target/$(rustc -vV | sed -n 's/^host: //p')/release/$target" "$out/bin/$target"
cd "$root"
set -- "out/fuzz/$target"
[ ! -d "$fuzz/seeds/$target" ] || set -- "$@" "$fuzz/seeds/$target"
exec "$out/bin/$target" -max_total_time="$seconds" -max_len=32768 -timeout=20 -use_value_profile=1 \
    -artifact_prefix="out/fuzz/$target-failed/" "$@"
