# Sourced by up, down and status: words, paths, and which processes belong to a testbed.
# shellcheck shell=bash

PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
export PATH LC_ALL=C

DAEMONS='munged slurmctld slurmscriptd slurmd slurmstepd'

say() { printf 'testbed: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
wrong() { say "$* (see --help)"; exit 2; }

default_state() { printf '%s/hybridsched-slurm-%s\n' "${TMPDIR:-/tmp}" "$(id -u)"; }

# Print the absolute state folder. Slurm's configuration knows no quoting, and a socket's path has 107 bytes.
state_path() {
  local path
  path=$(realpath -m -- "$1")
  [[ $path =~ ^/[A-Za-z0-9._/+-]+$ ]] ||
    wrong "the state folder $path may hold only letters, digits and . _ + - /, for slurm.conf cannot quote"
  ((${#path} <= 80)) || wrong "the state folder $path is longer than 80 bytes, too long for munge's socket"
  [[ $path != / ]] || wrong 'the state folder cannot be /'
  printf '%s\n' "$path"
}

# Does process $1 (of one of our daemons' names) belong to the testbed at $2? Its command line or environment
# names the folder, or it works there: slurmstepd clears both. A pid file alone proves nothing, for the number
# may belong to another process by now.
owns() {
  local name
  read -r name < "/proc/$1/comm" || return 1
  [[ " $DAEMONS " == *" $name "* ]] || return 1
  grep -qazF -- "$2/" "/proc/$1/cmdline" "/proc/$1/environ" || [[ $(readlink "/proc/$1/cwd") == "$2"/* ]]
} 2> /dev/null

# Pids of the daemons of the testbed at $1 whose name is in $2 (default: all).
daemons_of() {
  local name pid names
  names=$(tr ' ' '\n' <<< "${2:-$DAEMONS}")
  while IFS=: read -r pid name; do
    pid=${pid#/proc/} pid=${pid%/comm}
    owns "$pid" "$1" && printf '%s\n' "$pid"
  done < <(grep -xF -- "$names" /proc/[0-9]*/comm 2> /dev/null)
  return 0
}

# Pids of what the jobs of the testbed at $1 left: they carry its SLURM_CONF and a node's name, which no shell
# of a user does.
job_processes_of() {
  local files
  files=$(grep -lazxF -- "SLURM_CONF=$1/etc/slurm.conf" /proc/[0-9]*/environ) || [[ $files ]] || return 0
  # shellcheck disable=SC2086  # /proc paths
  { grep -laz '^SLURMD_NODENAME=' $files || true; } | cut -d/ -f3
} 2> /dev/null

# The pid in pid file $1 if it is a daemon of the testbed at $2.
running() {
  local pid
  [[ -s $1 ]] && read -r pid < "$1" && [[ -d /proc/$pid ]] && owns "$pid" "$2" && printf '%s\n' "$pid"
} 2>/dev/null

need_daemons() {
  local name absent=()
  for name in munged slurmctld slurmd scontrol sinfo; do
    command -v "$name" > /dev/null || absent+=("$name")
  done
  ((${#absent[@]} == 0)) ||
    die "not installed: ${absent[*]}. On Debian or Ubuntu: apt-get install --no-install-recommends" \
      "slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins liblua5.1-0"
}
