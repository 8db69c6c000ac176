#!/bin/bash
# Epilog of hybridsched (slurm.conf: Epilog=): after a job has ended on a node, end the engine processes that it
# left and remove its shared memory, so that the next engine finds the GPU and /dev/shm free.
#
# Only what is this job's is touched: processes that run as the job's user and carry both its SLURM_JOB_ID and this
# node's SLURMD_NODENAME in their environment (a user's own shell with salloc carries the first only), and files in
# /dev/shm that they had open, that carry the job's name (hybridsched-JOBID), or that are the user's, younger than
# the job, open nowhere and cannot be another job's. It fails, and Slurm drains the node, only when a process
# outlives SIGKILL: such a process holds its GPU. No Slurm command is called here; every step is bounded in time.
#
# Settings: hybridsched-node.conf beside this script, lines of KEY = VALUE.

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH LC_ALL=C
unset CDPATH BASH_ENV ENV

log='' run_dir=/run/hybridsched shm_dir=/dev/shm
settings="$(dirname -- "${BASH_SOURCE[0]}")/hybridsched-node.conf"
if [[ -r $settings ]]; then
  while IFS='=' read -r key value; do
    key=${key//[[:space:]]/} value=${value#"${value%%[![:space:]]*}"} value=${value%"${value##*[![:space:]]}"}
    # Only these names are taken: the file cannot run anything.
    case $key in log | run_dir | shm_dir) printf -v "$key" '%s' "$value" ;; esac
  done < "$settings"
fi

job=${SLURM_JOB_ID:-0} node=${SLURMD_NODENAME:-$(uname -n)} uid=${SLURM_JOB_UID:-}

note() {
  local line="epilog job=$job node=$node: $*"
  printf '%s\n' "$line" >&2
  if [[ $log ]]; then { printf '%(%FT%T)T %s\n' -1 "$line" >> "$log"; } 2> /dev/null; return 0; fi
  command -v logger > /dev/null && timeout -k 1 2 logger -t hybridsched -p daemon.notice -- "$line"
  return 0
}

# Pids of the job's processes on this node. This script and Slurm's own daemons are no such processes, though they
# carry the same environment.
left_processes() {
  local pid name its
  while read -r pid; do
    [[ $pid != "$$" && $pid != "$BASHPID" && $pid != "$PPID" ]] || continue
    [[ $(stat -c %u "/proc/$pid" 2> /dev/null) == "$uid" ]] || continue
    grep -qazxF -- "SLURMD_NODENAME=$node" "/proc/$pid/environ" 2> /dev/null || continue
    # Two clusters on one host count their jobs alike. A job without the variable has the default configuration.
    if [[ ${SLURM_CONF:-} ]] && grep -qaz '^SLURM_CONF=' "/proc/$pid/environ" 2> /dev/null; then
      grep -qazxF -- "SLURM_CONF=$SLURM_CONF" "/proc/$pid/environ" 2> /dev/null || continue
    fi
    read -r name 2> /dev/null < "/proc/$pid/comm" || continue
    case $name in slurmstepd | slurmd | slurmctld | slurmscriptd) continue ;; esac
    # Prologs and epilogs carry a job's variables too, and one more; this one's children are in its process group.
    grep -qazE '^SLURM_SCRIPT_CONTEXT=(prolog|epilog)_slurmd$' "/proc/$pid/environ" 2> /dev/null && continue
    its=$(ps -o pgid= -p "$pid" 2> /dev/null | tr -d ' ')
    [[ $its && $its != "$group" ]] || continue
    printf '%s\n' "$pid"
  done < <(grep -lazxF -- "SLURM_JOB_ID=$job" /proc/[0-9]*/environ 2> /dev/null | cut -d/ -f3)
}

# Files below the shared memory folder that the processes $@ have open or mapped.
files_of() {
  local pid
  for pid in "$@"; do
    find "/proc/$pid/fd" -lname "$shm_dir/*" -printf '%l\n' 2> /dev/null
    grep -ohE " $shm_dir/.*" "/proc/$pid/maps" 2> /dev/null | cut -c2-
  done | sed 's/ (deleted)$//' | sort -u
}

# Files there that any process has open or mapped.
files_in_use() {
  {
    timeout -k 1 10 find /proc/[0-9]*/fd -lname "$shm_dir/*" -printf '%l\n' 2> /dev/null
    timeout -k 1 10 grep -ohE " $shm_dir/.*" /proc/[0-9]*/maps 2> /dev/null | cut -c2-
  } | sed 's/ (deleted)$//' | sort -u
}

end_processes() {
  local pids
  mapfile -t pids < <(left_processes)
  ((${#pids[@]} > 0)) || return 0
  mapfile -t theirs < <(files_of "${pids[@]}")
  note "ends ${#pids[@]} processes that the job left: $(ps -o pid=,comm= -p "$(IFS=,; echo "${pids[*]}")" 2> /dev/null | tr -s ' \n' ' ' | head -c 300)"
  kill -TERM "${pids[@]}" 2> /dev/null
  for _ in {1..30}; do
    sleep 0.1
    mapfile -t pids < <(left_processes)
    ((${#pids[@]} > 0)) || return 0
  done
  for _ in {1..50}; do
    kill -KILL "${pids[@]}" 2> /dev/null
    sleep 0.1
    mapfile -t pids < <(left_processes)
    ((${#pids[@]} > 0)) || return 0
  done
  note "processes ${pids[*]} outlive SIGKILL and hold their GPU, the node is to be drained: reboot it"
  return 1
}

drop() {
  local path=$1 why=$2 as=()
  # Never outside the folder, and never another user's.
  [[ $path == "$shm_dir"/* && $path != */../* && -e $path && $(stat -c %u -- "$path") == "$uid" ]] || return 0
  # With the user's own rights: a path of theirs could be swapped for a link to somewhere else meanwhile.
  if ((EUID == 0 && uid != 0)); then as=(setpriv "--reuid=$uid" "--regid=$(stat -c %g -- "$path")" --clear-groups); fi
  timeout -k 1 20 "${as[@]}" rm -rf --one-file-system -- "$path" && note "removed $path ($why)"
}

free_memory() {
  local path used stamp="$run_dir/$node/job-$job" other
  [[ -d $shm_dir ]] || return 0
  used=$(files_in_use)
  for path in "${theirs[@]}"; do
    grep -qxF -- "$path" <<< "$used" || drop "$path" 'its process was ended'
  done
  for path in "$shm_dir/hybridsched-$job" "$shm_dir/hybridsched-$job".* "$shm_dir/hybridsched-$job"-*; do
    drop "$path" "of the job's name"
  done
  [[ -e $stamp ]] || return 0
  # System users own files of services, and a second job of the user may own what nobody has open now.
  if ((uid >= 1000)); then
    other=$(find "$run_dir/$node" -type f -name 'job-*' ! -name "job-$job" -exec grep -lx -- "$uid" {} + 2> /dev/null | head -n 1)
    if [[ $other ]]; then
      note "leaves shared memory of user $uid alone: ${other##*/} of the same user is on this node"
    else
      while IFS= read -r -d '' path; do
        # Of a folder, any file within that is open keeps the whole.
        grep -qE -- "^$(sed 's/[][\.*^$+?(){}|/]/\\&/g' <<< "$path")(/|$)" <<< "$used" || drop "$path" 'open nowhere'
      done < <(find "$shm_dir" -mindepth 1 -maxdepth 1 -uid "$uid" -newer "$stamp" -print0 2> /dev/null)
    fi
  fi
  rm -f -- "$stamp"
}

[[ $job =~ ^[1-9][0-9]*$ && $uid =~ ^[0-9]+$ ]] || { note 'called outside a job: nothing to do'; exit 0; }
group=$(ps -o pgid= -p $$ 2> /dev/null | tr -d ' ')
theirs=()
failed=0
end_processes || failed=1
free_memory
exit "$failed"
