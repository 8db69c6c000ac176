#!/bin/bash
# Run the cluster contract against the real pyslurm, in a root of its own (Debian forky: Slurm 26.05, Python 3.14).
set -euo pipefail

PYSLURM=25.11.2
usage() {
  cat <<USAGE
Usage: slurm/pyslurm-root.sh [ROOT]

Makes a Debian forky root in ROOT (default \$TMPDIR/hybridsched-pyslurm-root), installs Slurm and builds pyslurm
$PYSLURM there, then runs tests/contract/test_cluster_contract.py in it over the real pyslurm and real daemons.
What is already there is used again; remove the root yourself:  rm -r --one-file-system ROOT

Needs: Linux, root, a Debian mirror, PyPI, about 2 GB and five minutes. debootstrap is taken from this system, or
unpacked from its package without being installed. For tests only: pyslurm $PYSLURM is made for Slurm 25.11, three
small changes let it run on 26.05. A site installs the pyslurm whose version is that of its Slurm.

  PYSLURM_ROOT_MIRROR   Debian mirror (default http://deb.debian.org/debian)
USAGE
}
case ${1:-} in -h | --help) usage; exit 0 ;; -*) usage >&2; exit 2 ;; esac
ROOT=$(realpath -m "${1:-${TMPDIR:-/tmp}/hybridsched-pyslurm-root}")
MIRROR=${PYSLURM_ROOT_MIRROR:-http://deb.debian.org/debian}
REPO=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
say() { printf 'pyslurm-root: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
[ "$(id -u)" = 0 ] || fail "root is needed: a root is made with debootstrap and entered with chroot"
[ "$ROOT" != / ] || fail "ROOT was given as /; a folder of its own is needed"

inside() {
  env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CERT=/etc/hybridsched-ca.crt \
    chroot "$ROOT" "$@"
}

leave() {
  for place in repo dev proc; do
    if mountpoint -q "$ROOT/$place"; then umount "$ROOT/$place" || umount -l "$ROOT/$place"; fi
  done
}
trap leave EXIT

if [ ! -x "$ROOT/usr/bin/dpkg" ]; then
  mkdir -p "$ROOT"
  if command -v debootstrap > /dev/null; then
    tool=$(command -v debootstrap)
    export DEBOOTSTRAP_DIR=${DEBOOTSTRAP_DIR:-/usr/share/debootstrap}
  else
    unpacked=$ROOT.debootstrap
    mkdir -p "$unpacked"
    say "debootstrap is not installed: unpacking its package in $unpacked"
    (cd "$unpacked" && apt-get download -q debootstrap && dpkg -x debootstrap_*.deb .)
    tool=$unpacked/usr/sbin/debootstrap
    export DEBOOTSTRAP_DIR=$unpacked/usr/share/debootstrap
  fi
  # An older debootstrap does not know forky; every suite since long has the same script.
  script=$DEBOOTSTRAP_DIR/scripts/sid
  [ ! -e "$DEBOOTSTRAP_DIR/scripts/forky" ] || script=$DEBOOTSTRAP_DIR/scripts/forky
  say "making a Debian forky root in $ROOT"
  "$tool" --variant=minbase --include=ca-certificates forky "$ROOT" "$MIRROR" "$script" >&2
fi
mkdir -p "$ROOT/proc" "$ROOT/dev" "$ROOT/repo"
mountpoint -q "$ROOT/proc" || mount -t proc proc "$ROOT/proc"
mountpoint -q "$ROOT/dev" || mount --bind /dev "$ROOT/dev"
mountpoint -q "$ROOT/repo" || mount --bind "$REPO" "$ROOT/repo"
mount -o remount,bind,ro "$ROOT/repo"
cp -f /etc/resolv.conf /etc/hosts "$ROOT/etc/"
cp -f /etc/ssl/certs/ca-certificates.crt "$ROOT/etc/hybridsched-ca.crt"

if [ ! -x "$ROOT/usr/sbin/slurmctld" ]; then
  say "installing Slurm"
  printf '#!/bin/sh\nexit 101\n' > "$ROOT/usr/sbin/policy-rc.d" # no package starts a service
  chmod +x "$ROOT/usr/sbin/policy-rc.d"
  # A frozen mirror's Release file may be past its date; its signature is checked all the same.
  inside apt-get -q -o Acquire::Check-Valid-Until=false update >&2
  inside apt-get -q install -y --no-install-recommends slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge \
    libslurm-dev python3 python3-venv python3-dev gcc libc6-dev pkg-config procps >&2
fi

if ! inside env PYSLURM_DISABLE_AUTO_INIT=1 /venv/bin/python -c 'import pyslurm' 2> /dev/null; then
  say "building pyslurm $PYSLURM"
  inside bash -ec "
    [ -d /venv ] || python3 -m venv /venv
    /venv/bin/pip -q install 'setuptools>=77' wheel 'Cython>=3' packaging
    rm -rf /build && mkdir /build && cd /build
    /venv/bin/pip -q download --no-deps --no-binary :all: --no-build-isolation pyslurm==$PYSLURM
    tar xzf pyslurm-*.tar.gz --strip-components=1
    # 25.11 against 26.05: the check of versions, and what 26.05 allocates itself must not be freed by libc
    sed -i 's/if Version(self.version) != Version(SLURM_VERSION):/if False:/' setup.py
    sed -i 's/^        free(new_name)/        # free(new_name)/' pyslurm/core/reservation.pyx
    export SLURM_LIB_DIR=/usr/lib/\$(gcc -print-multiarch) SLURM_INCLUDE_DIR=/usr/include
    export CFLAGS='-O1 -DSLURM_BACKWARD_COMPAT -Dslurm_free_ctl_conf=slurm_free_conf'
    CFLAGS+=' -DESLURM_ERROR_ON_DESC_TO_RECORD_COPY=-1'
    /venv/bin/pip -q install --no-build-isolation --no-deps .
  " >&2
fi

say "installing what the tests import"
inside /venv/bin/pip -q install msgspec stamina structlog pytest pytest-asyncio pytest-timeout redis >&2
say "running the contract over pyslurm $PYSLURM and Slurm $(inside slurmctld -V)"
inside env HYBRIDSCHED_REAL_PYSLURM=1 PYTHONPATH=/repo PYTHONDONTWRITEBYTECODE=1 CI=true \
  bash -c 'cd /repo && exec /venv/bin/python -m pytest -p no:cacheprovider -q tests/contract/test_cluster_contract.py -k "real-pyslurm or commands"'
