#!/bin/sh
# Installs what `make demo` and `make test` need on Debian 12 or newer (or an Ubuntu LTS), and nothing twice:
# what is there already is only looked at, so a second run takes a moment and asks no server.
#
#   scripts/install-deps.sh demo    what the demo needs: QEMU, a C compiler with its static C library, cargo
#   scripts/install-deps.sh test    that, and the tests' file systems, guest tools, libvirt, etcd, S3 servers and a
#                                   second QEMU
#   scripts/install-deps.sh all     the same as test (the default)
#
# The second QEMU (10, from Debian's backports) is unpacked into out/qemu10 and not installed, so that the
# distribution's own QEMU stays what `qemu-system-x86_64` means. An S3 server (moto, from PyPI) is in an environment of
# Python's own, out/moto, and another (versitygw, built by Go) in out/versitygw. No service is left running.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
out=$root/out
part=${1:-all}

demo_packages="qemu-system-x86 gcc libc6-dev kmod ca-certificates"
test_packages="xfsprogs e2fsprogs memtester stress-ng mount libvirt-daemon-system libvirt-clients
libnbd-bin nbdkit fio qemu-utils etcd-server etcd-client memcached nbd-client curl
iproute2 util-linux nginx-light redis-server sqlite3 ffmpeg qemu-system-common fuse3 libfuse3-dev libaio-dev liburing-dev openssl
python3-venv"

say() { printf 'install-deps: %s\n' "$*"; }
die() {
    printf 'install-deps: error: %s\n' "$*" >&2
    exit 1
}

# --- packages of the distribution ---------------------------------------------------------------------

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

missing_of() {
    for package in "$@"; do
        installed "$package" || printf '%s ' "$package"
    done
}

# The package lists may be absent (a container) or too old to fetch from (a 404): updated at most once a run,
# and only when something is to be fetched.
lists_fresh=no
update_lists() {
    [ "$lists_fresh" = no ] || return 0
    say "updating the package lists"
    apt-get update -qq || die "apt-get update failed: check the network and the sources in /etc/apt"
    lists_fresh=yes
}

# A package's own script would start its service (libvirtd); policy-rc.d is Debian's way to say no. One that is
# there already is the administrator's and stays as it is.
policy=/usr/sbin/policy-rc.d
policy_ours=no
cleanup() {
    if [ "$policy_ours" = yes ]; then
        rm -f "$policy"
        policy_ours=no
    fi
}
trap cleanup EXIT
trap 'exit 130' INT TERM

forbid_services() {
    if [ ! -e "$policy" ]; then
        policy_ours=yes
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
}

install_packages() {
    missing=$(missing_of "$@")
    if [ -z "$missing" ]; then
        say "already installed: $*"
        return 0
    fi
    [ "$(id -u)" -eq 0 ] || die "not installed: $missing- run this script as root, or run: sudo apt-get install $missing"
    update_lists
    say "installing: $missing"
    forbid_services
    # shellcheck disable=SC2086 # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >"$out/apt-install.log" 2>&1 || {
        tail -n 20 "$out/apt-install.log" >&2
        die "apt-get install failed for: $missing(the whole log: out/apt-install.log)"
    }
    cleanup
}

# --- cargo ---------------------------------------------------------------------------------------------

# version_at_least HAVE WANT, as dotted numbers.
version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

cargo_version() { cargo --version 2>/dev/null | awk '{ print $2 }'; }

ensure_cargo() {
    want=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")
    PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin
    have=$(cargo_version || true)
    if [ -n "$have" ] && version_at_least "$have" "$want"; then
        say "cargo $have is new enough (at least $want)"
        return 0
    fi
    if [ "$(id -u)" -eq 0 ]; then
        update_lists
        if [ -n "$(candidate rustup)" ] && ! installed rustup; then
            say "installing: rustup, and with it the stable toolchain"
            install_packages rustup
            rustup default stable || say "rustup could not fetch the stable toolchain"
        elif version_at_least "$(candidate cargo)" "$want"; then
            install_packages cargo
        fi
    fi
    have=$(cargo_version || true)
    if [ -z "$have" ] || ! version_at_least "$have" "$want"; then
        die "cargo ${have:-is missing and} ${have:+is too old: }$want or newer is needed. Run this line, then start again:
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y && . \"\$HOME/.cargo/env\""
    fi
}

# The version apt would install, without epoch; nothing when there is none.
candidate() { apt-cache policy "$1" 2>/dev/null | sed -n 's/^  Candidate: \([0-9]*:\)\{0,1\}\([0-9].*\)/\2/p'; }

# --- the second QEMU -----------------------------------------------------------------------------------

qemu10_runs() { "$out/qemu10/qemu-system-x86_64" --version 2>/dev/null | grep -q 'version [1-9][0-9]'; }

# apt with the system's sources plus backports, all of its state under out/apt, so that the system's sources
# and lists stay as they are.
private_apt() {
    command=$1
    shift
    "$command" -o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$out/apt/sources.d" \
        -o "Dir::State::Lists=$out/apt/lists" -o "Dir::Cache=$out/apt/cache" -o APT::Sandbox::User=root "$@"
}

prepare_private_apt() {
    codename=$1
    # Backports sit beside the release on the mirror that this system already uses.
    mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
        awk -v codename="$codename" '$1 == codename { print $2; exit }')
    [ -n "$mirror" ] || die "the apt sources name no mirror for $codename: QEMU 10 cannot be fetched"
    rm -rf "$out/apt"
    mkdir -p "$out/apt/sources.d" "$out/apt/lists/partial" "$out/apt/cache/archives/partial"
    for file in /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
        [ ! -e "$file" ] || cp "$file" "$out/apt/sources.d/"
    done
    [ ! -e /etc/apt/sources.list ] || cp /etc/apt/sources.list "$out/apt/sources.d/system.list"
    # Not twice: apt refuses one source with two ways to check it.
    if ! apt-get indextargets --format '$(RELEASE)' 'Created-By: Packages' | grep -qx "$codename-backports"; then
        printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s-backports main\n' \
            "$mirror" "$codename" >"$out/apt/sources.d/pagoda-backports.list"
    fi
    cp -a /var/lib/apt/lists/. "$out/apt/lists/"
    private_apt apt-get update -qq || die "could not fetch the package list of $codename-backports from $mirror"
}

write_qemu10_wrapper() {
    # Data files come from the unpacked packages first, then from those that were installed already.
    cat >"$out/qemu10/qemu-system-x86_64" <<'WRAPPER'
#!/bin/sh
# QEMU from backports, run from where its packages were unpacked (written by scripts/install-deps.sh).
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
export LD_LIBRARY_PATH="$here/usr/lib/x86_64-linux-gnu:$here/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export QEMU_MODULE_DIR="$here/usr/lib/x86_64-linux-gnu/qemu"
set -- -L /usr/share/qemu -L /usr/share/seabios -L /usr/lib/ipxe/qemu "$@"
for data in usr/lib/ipxe/qemu usr/share/seabios usr/share/qemu; do
    [ ! -d "$here/$data" ] || set -- -L "$here/$data" "$@"
done
exec "$here/usr/bin/qemu-system-x86_64" "$@"
WRAPPER
    chmod 755 "$out/qemu10/qemu-system-x86_64"
}

ensure_qemu10() {
    if qemu10_runs; then
        say "QEMU 10 is in out/qemu10"
        return 0
    fi
    if qemu-system-x86_64 --version | grep -q 'version [1-9][0-9]'; then
        say "the installed QEMU is version 10 or newer: out/qemu10 refers to it"
        mkdir -p "$out/qemu10"
        printf '#!/bin/sh\nexec %s "$@"\n' "$(command -v qemu-system-x86_64)" >"$out/qemu10/qemu-system-x86_64"
        chmod 755 "$out/qemu10/qemu-system-x86_64"
        return 0
    fi
    distribution=$(. /etc/os-release && echo "${ID:-}")
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    if [ "$distribution" != debian ]; then
        say "no QEMU 10 for ${distribution:-this distribution}: tests that need it say so"
        return 0
    fi
    [ "$(id -u)" -eq 0 ] || die "QEMU 10 is missing in out/qemu10: run this script as root"
    update_lists
    say "fetching QEMU 10 from $codename-backports into out/qemu10 (unpacked only, not installed)"
    prepare_private_apt "$codename"
    # What an installation would bring is exactly what must be unpacked: the rest is on this system already.
    wanted=$(private_apt apt-get install -s -qq --no-install-recommends -t "$codename-backports" qemu-system-x86 |
        sed -n 's/^Inst \([^ ]*\) \(\[[^]]*\] \)\{0,1\}(\([^ ]*\) .*/\1=\3/p')
    [ -n "$wanted" ] || die "$codename-backports offers no QEMU that fits this system"
    # shellcheck disable=SC2086 # a list of words
    (mkdir -p "$out/apt/debs" && cd "$out/apt/debs" && private_apt apt-get download -qq $wanted) ||
        die "could not download QEMU 10 from $codename-backports"
    rm -rf "$out/qemu10"
    mkdir -p "$out/qemu10"
    for deb in "$out"/apt/debs/*.deb; do
        dpkg-deb -x "$deb" "$out/qemu10" || die "could not unpack $deb"
    done
    rm -rf "$out/apt"
    write_qemu10_wrapper
    qemu10_runs || {
        "$out/qemu10/qemu-system-x86_64" --version >&2 || true
        die "QEMU 10 was unpacked into out/qemu10 but does not run (above: what it said)"
    }
    say "ready: $("$out/qemu10/qemu-system-x86_64" --version | head -n 1)"
}

# --- S3 servers of the tests ---------------------------------------------------------------------------

# One version, so that what a test says does not depend on the day of the installation.
moto_version=5.2.1

moto_is_there() { [ "$(cat "$out/moto/version" 2>/dev/null)" = "$moto_version" ] && [ -x "$out/moto/bin/moto_server" ]; }

ensure_moto() {
    if moto_is_there; then
        say "moto $moto_version is in out/moto"
        return 0
    fi
    say "installing moto $moto_version from PyPI into out/moto"
    rm -rf "$out/moto"
    # The distribution's Python, to which python3-venv belongs.
    /usr/bin/python3 -m venv "$out/moto" || die "could not make the Python environment out/moto"
    "$out/moto/bin/pip" install --quiet --disable-pip-version-check "moto[s3,server]==$moto_version" ||
        die "could not install moto $moto_version from PyPI"
    "$out/moto/bin/moto_server" --help >/dev/null || die "moto $moto_version was installed into out/moto but does not run"
    echo "$moto_version" >"$out/moto/version"
}

# Versity's gateway compares signatures and keeps its files, unlike moto. It is built where Go is new enough; elsewhere the
# tests that need it say so.
versitygw_version=v1.8.0
versitygw_go=1.25

versitygw_is_there() {
    [ "$(cat "$out/versitygw/version" 2>/dev/null)" = "$versitygw_version" ] && [ -x "$out/versitygw/versitygw" ]
}

ensure_versitygw() {
    if versitygw_is_there; then
        say "versitygw $versitygw_version is in out/versitygw"
        return 0
    fi
    have=$(go env GOVERSION 2>/dev/null | sed -n 's/^go\([0-9.]*\).*/\1/p' || true)
    if [ -z "$have" ] || ! version_at_least "$have" "$versitygw_go"; then
        say "no versitygw without Go $versitygw_go or newer: tests that need it say so"
        return 0
    fi
    say "building versitygw $versitygw_version into out/versitygw"
    if ! GOBIN=$out/versitygw go install "github.com/versity/versitygw/cmd/versitygw@$versitygw_version"; then
        say "versitygw $versitygw_version could not be built: tests that need it say so"
        return
    fi
    echo "$versitygw_version" >"$out/versitygw/version"
}

# -------------------------------------------------------------------------------------------------------

for tool in apt-get apt-cache dpkg-query dpkg-deb; do
    command -v "$tool" >/dev/null || die "$tool is not here: this needs Debian or Ubuntu. Elsewhere, install by hand: $demo_packages $test_packages"
done
[ "$(uname -m)" = x86_64 ] || die "the guests are x86-64 and so must this machine be; it is $(uname -m)"
mkdir -p "$out"

case $part in
demo)
    # shellcheck disable=SC2086 # lists of words, here and below
    install_packages $demo_packages
    ensure_cargo
    ;;
test | all)
    # shellcheck disable=SC2086
    install_packages $demo_packages $test_packages
    ensure_cargo
    ensure_moto
    ensure_versitygw
    ensure_qemu10
    ;;
*)
    die "unknown part '$part': say demo, test or all"
    ;;
esac
