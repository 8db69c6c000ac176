#!/bin/bash
# The hand of the policy worker on a cluster (`hybridsched worker policy --hand workers/mode-hand.sh`): what has to be
# done on a host itself when it changes its mode, over ssh as root. docs/modes.md says what each word must do.
#
# Needs a key of the policy worker's user for root on every host of the policy's [modes], and there: a unit
# slurmd@NODE.service for each node record (`slurmd -D -N NODE`), and `hybridsched` with the extra nvml on root's PATH
# (or HYBRIDSCHED_HAND_BIN, its path on the hosts). HYBRIDSCHED_HAND_SSH_CONFIG names a file for `ssh -F`, with key and
# known hosts, where that user has no home.
#
# configure and slurmctld-restart are needed with `way = "reconfigure"` only, and HYBRIDSCHED_HAND_CONTROLLER with them:
# slurmctld's host, where root logs in as well. There `hybridsched slurm configure` changes the files in
# HYBRIDSCHED_HAND_ETC (/etc/slurm), and on the node's host too where it has files of its own.
set -uo pipefail

wrong() { printf 'mode-hand.sh: %s\n' "$*" >&2; exit 2; }

(($# >= 2)) || wrong 'give a host and what to do there'
host=$1 word=$2 node=${3:-} mode=${4:-} controller=${HYBRIDSCHED_HAND_CONTROLLER:-}
# What goes to the other side is a command line there: names hold nothing that a shell would read.
[[ $host == - || $host =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || wrong "'$host' is no name"
[[ $node =~ ^[A-Za-z0-9._-]*$ ]] || wrong "'$node' is no name"
bin=${HYBRIDSCHED_HAND_BIN:-hybridsched}
[[ $bin =~ ^[A-Za-z0-9._/-]+$ ]] || wrong "HYBRIDSCHED_HAND_BIN is '$bin', which is no plain path"
etc=${HYBRIDSCHED_HAND_ETC:-/etc/slurm}
[[ $etc =~ ^/[A-Za-z0-9._/-]+$ ]] || wrong "HYBRIDSCHED_HAND_ETC is '$etc', which is no plain absolute path"
[[ $mode =~ ^[A-Za-z0-9_-]*$ ]] || wrong "'$mode' is no mode"
[[ ! $controller || $controller =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] ||
  wrong "HYBRIDSCHED_HAND_CONTROLLER is '$controller', which is no name"

options=(-o BatchMode=yes -o ConnectTimeout=10)
[[ ! ${HYBRIDSCHED_HAND_SSH_CONFIG:-} ]] || options=(-F "$HYBRIDSCHED_HAND_SSH_CONFIG" "${options[@]}")

# One word after another on a host, and none of an earlier term of the policy workers than the last that was heard
# there in a quarter of an hour (Redis may have lost its count of them): what a frozen leader had asked for would undo
# what its successor has done.
guard=''
term=${HYBRIDSCHED_TERM:-}
if [[ $term =~ ^[0-9]{1,18}$ ]]; then
  # shellcheck disable=SC2016 # for the shell on the other side
  guard='f=/run/hybridsched-hand.term; exec 9>>$f; flock -w 60 9 || { echo another word is at work there >&2; exit 1; }
s=$(cat $f); if [ "${s:-0}" -gt TERM ] && [ "$(find $f -mmin -15)" ]; then
echo "it comes from term TERM of the policy workers, and that of $s has begun" >&2; exit 1; fi; echo TERM > $f; '
  guard=${guard//TERM/$term}
fi

over() { exec ssh "${options[@]}" "root@$host" "$guard$*"; }
need_controller() {
  [[ $controller ]] || wrong "$word needs HYBRIDSCHED_HAND_CONTROLLER, the host of slurmctld"
}

if [[ $host == - ]]; then # slurmctld's host
  [[ $word == slurmctld-restart ]] || wrong "$word needs the name of a host"
  need_controller
  host=$controller
  over systemctl restart slurmctld < /dev/null
fi
case $word in
  slurmd-stop) over systemctl stop "slurmd@$node" < /dev/null ;;
  slurmd-start) over systemctl start "slurmd@$node" < /dev/null ;;
  mig-apply) over "$bin" mode apply -f - ;;
  mig-assert) over "$bin" mode assert -f - ;;
  configure)
    need_controller
    [[ $node && $mode ]] || wrong 'configure needs a node and a mode'
    ssh "${options[@]}" "root@$controller" "$guard$bin slurm configure $node $mode --etc $etc" < /dev/null || exit
    # Where the folder is shared there is nothing left to change; without slurm.conf the host is configless.
    over "if [ -e $etc/slurm.conf ]; then $bin slurm configure $node $mode --etc $etc; fi" < /dev/null
    ;;
  *) wrong "$word is not done by this script; write a hand of the site's own that does it" ;;
esac
