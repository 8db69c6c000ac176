#!/bin/bash
# Epilog of hybridsched (slurm.conf: Epilog=): after a job has ended on a node, end the engine processes that it
# left and remove its shared memory, so that the next engine finds the GPU and /dev/shm free.
#
# Only what is this job's is touched: processes that run as the job's user and carry both its SLURM_JOB_ID and this
# node's SLURMD_NODENAME in their environment (a user's own shell with salloc carries the first only), and files in
# /dev/shm that they had open, that carry the job's name (hybridsched-JOBID), or that are the user's, younger than
# the job, open nowhere and cannot be another job's. Files go with the user's own rights.
#
# Slurm drains the node when this script fails or is too slow. So it fails only when a process outlives SIGKILL: such
# a process holds its GPU. Whatever a user left, it ends within a minute with 0; what there was no time for is
# logged, and taken away after the user's next job here.
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

LIMIT_S=40 # of the whole, well below PrologEpilogTimeout
# Seconds that are left, at most $1.
left_s() {
  local left=$((LIMIT_S - SECONDS))
  ((left <= $1)) || left=$1
  ((left > 0)) || left=1
  printf '%d' "$left"
}

# Of the environment files that come in, those that hold the variable $1 with exactly this value.
having() { xargs -r grep -lazxF -- "$1" 2> /dev/null; }

# Pids of the job's processes on this node. What a process says of itself may add it here and spares it nothing, but
# for processes of slurmd's own user: this script and Slurm's daemons carry the same environment.
left_processes() {
  local found foreign line pid its name
  # The real uid, of the kernel: a process that may not be dumped shows root as the owner of its /proc entries.
  found=$(ps -eo ruid=,pid= | awk -v uid="$uid" '$1 == uid { print "/proc/" $2 "/environ" }' |
    having "SLURM_JOB_ID=$job" | having "SLURMD_NODENAME=$node")
  [[ $found ]] || return 0
  # Two clusters on one host count their jobs alike. A job without the variable has the default configuration.
  if [[ ${SLURM_CONF:-} ]]; then
    foreign=$(xargs -r grep -LazxF -- "SLURM_CONF=$SLURM_CONF" <<< "$found" 2> /dev/null | xargs -r grep -laz '^SLURM_CONF=' 2> /dev/null)
    [[ ! $foreign ]] || found=$(grep -vxF -- "$foreign" <<< "$found")
  fi
  if [[ $uid != "$EUID" ]]; then
    cut -d/ -f3 <<< "$found"
    return
  fi
  # Prologs and epilogs carry a job's variables too, and one more; this one's children are in its process group. Both
  # variables of one look: of a process that ends in between, the second would be missing.
  local -A ours=()
  while IFS= read -r -d '' line; do
    pid=${line#/proc/} pid=${pid%%/*}
    if [[ $line == *:SLURM_JOB_ID=* ]]; then ours[$pid]=${ours[$pid]:-1}; else ours[$pid]=spared; fi
  done < <(xargs -r grep -azHE "^(SLURM_JOB_ID=$job|SLURM_SCRIPT_CONTEXT=(prolog|epilog)_slurmd)$" <<< "$found" 2> /dev/null)
  while read -r pid its name; do
    [[ ${ours[$pid]:-} == 1 && $its != "$group" && $pid != "$PPID" ]] || continue
    case $name in slurmstepd | slurmd | slurmctld | slurmscriptd) continue ;; esac
    printf '%d\n' "$pid"
  done < <(ps -eo pid=,pgid=,comm=)
}

# Paths below the shared memory folder that processes have open or mapped, each ended by a zero byte. "$@": their
# /proc entries. Fails when it did not come to its end.
paths_of() {
  local status=0
  # shellcheck disable=SC2016 # expanded by the sh within
  printf '%s\0' "${@/%//fd}" | timeout -k 1 "$(left_s 10)" xargs -0r sh -c \
    'folder=$1; shift; find "$@" -lname "$folder/*" -printf "%l\0" 2> /dev/null; exit 0' sh "$shm_dir" || status=1
  # A line of maps ends with the path, whose own line feeds are written \012.
  # shellcheck disable=SC2016
  printf '%s\0' "${@/%//maps}" | timeout -k 1 "$(left_s 10)" xargs -0r sh -c \
    'folder=$1; shift; grep -ohE " $folder/.*" "$@" 2> /dev/null; exit 0' sh "$shm_dir" | tr '\n' '\0' | sed -z 's/^ //; s/\\012/\n/g'
  ((PIPESTATUS[1] == 0)) || status=1
  return "$status"
}

end_processes() {
  local pids killed now began
  mapfile -t pids < <(left_processes)
  ((${#pids[@]} > 0)) || return 0
  mapfile -d '' -t theirs < <(paths_of "${pids[@]/#//proc/}")
  note "ends ${#pids[@]} processes that the job left: $(ps -o pid=,comm= -p "$(IFS=,; echo "${pids[*]:0:20}")" 2> /dev/null | tr -s ' \n' ' ' | tr -d '[:cntrl:]' | head -c 300)"
  kill -TERM "${pids[@]}" 2> /dev/null
  began=$SECONDS
  while ((SECONDS - began < 4)); do
    sleep 0.1
    mapfile -t pids < <(left_processes)
    ((${#pids[@]} > 0)) || return 0
  done
  killed=" ${pids[*]} " began=$SECONDS
  while ((SECONDS - began < 6)); do
    kill -KILL "${pids[@]}" 2> /dev/null
    sleep 0.1
    mapfile -t pids < <(left_processes)
    ((${#pids[@]} > 0)) || return 0
  done
  # New ones, that the killed had started meanwhile, do not outlive a signal that they never got.
  for now in "${pids[@]}"; do
    [[ $killed != *" $now "* ]] || {
      note "process $now outlives SIGKILL and holds its GPU, the node is to be drained: reboot it"
      return 1
    }
  done
  note "the job's processes start new ones faster than they can be ended; ${#pids[@]} are left"
  return 0
}

# Remove what comes in (absolute paths, each ended by a zero byte), all in one go and with the user's own rights: a
# path of theirs could be swapped for a link to somewhere else meanwhile. Fails when there was no time for all.
remove() {
  local as=()
  if ((EUID == 0 && uid != 0)); then as=(setpriv "--reuid=$uid" "--regid=${SLURM_JOB_GID:-65534}" --clear-groups); fi
  # The user's folders may be closed to themselves.
  timeout -k 1 "$(left_s 20)" "${as[@]}" xargs -0r sh -c '
    rm -rf --one-file-system -- "$@" 2> /dev/null && exit 0
    find "$@" -xdev -type d ! -perm -700 -exec chmod u+rwx {} \; 2> /dev/null
    rm -rf --one-file-system -- "$@" 2> /dev/null
    exit 0' sh
}

# Whether a job is still on this node, by its stamp's name: its step processes are looked at first. A node of a job
# with several has none while no step runs there; then slurmctld is asked. What cannot be told counts as here.
is_here() {
  local id=${1##*/job-} jobs
  # shellcheck disable=SC2009 # of this user only: the others' titles are what they like
  ! ps -eo uid=,args= | grep -qE "^ *$EUID slurmstepd: \[$id\." || return 0
  jobs=$(timeout -k 1 "$(left_s 5)" squeue -h -u "$uid" -w "$node" -t RUNNING,SUSPENDED,STOPPED,CONFIGURING,SIGNALING,STAGE_OUT -o %A 2> /dev/null) || return 0
  grep -qxF -- "$id" <<< "$jobs"
}

# Another job of the user on this node, or nothing. The stamps of those that are no more become marks.
other_job() {
  local path
  while IFS= read -r path; do
    is_here "$path" && { printf '%s' "${path##*/}"; return; }
    mv -f -- "$path" "$run_dir/$node/ended-${path##*/job-}"
  done < <(find "$run_dir/$node" -type f -name 'job-*' -exec grep -lx -- "$uid" {} + 2> /dev/null)
}

# What the user's jobs here that have ended left behind, while something of theirs may still be in /dev/shm.
marks_of_user() { find "$run_dir/$node" -type f -name 'ended-*' -exec grep -lxZ -- "$uid" {} + 2> /dev/null; }

free_memory() {
  local path top other='' left=0 first='' complete=1 stamp="$run_dir/$node/job-$job" mark="$run_dir/$node/ended-$job" oldest
  local -A used=() doomed=()
  [[ -d $shm_dir ]] || return 0
  # From here on this job is none that others have to regard, even when this script should not come to its end.
  if [[ -e $mark ]]; then rm -f -- "$stamp"; elif [[ -e $stamp ]]; then mv -f -- "$stamp" "$mark"; fi
  while IFS= read -r -d '' path; do
    path=${path% (deleted)}
    used[x$path]=1
    top=${path#"$shm_dir"/}
    used[x$shm_dir/${top%%/*}]=1
  done < <(paths_of /proc/[0-9]* || printf '%s/\0' "$shm_dir")
  if [[ ${used[x$shm_dir/]:-} ]]; then
    note "which files of $shm_dir are open could not be seen in time: all of them stay until the user's next job here"
    return 0
  fi
  for path in "${theirs[@]}"; do
    path=${path% (deleted)}
    # A path of root's through a folder of somebody else's could lead anywhere.
    ((uid != 0)) || [[ ${path#"$shm_dir"/} != */* ]] || continue
    [[ ${used[x$path]:-} || $path == */../* || $(stat -c %u -- "$path" 2> /dev/null) != "$uid" ]] || doomed[x$path]=1
    ((SECONDS < LIMIT_S / 2)) || { complete=''; break; }
  done
  while IFS= read -r -d '' path; do doomed[x$path]=1; done < <(
    find "$shm_dir" -mindepth 1 -maxdepth 1 -uid "$uid" \( -name "hybridsched-$job" -o -name "hybridsched-${job}[.-]*" \) -print0 2> /dev/null)
  # System users own files of services, and a second job of the user may own what nobody has open now.
  if [[ -e $mark ]] && ((uid >= 1000)); then
    other=$(other_job)
    # Of a script that was ended before its end, and of a job that ended beside another, the mark is still there: what
    # is younger than the oldest of them belongs to jobs that have ended.
    oldest=$(marks_of_user | xargs -0r stat -c '%Y %n' -- | sort -n | head -n 1 | cut -d' ' -f2-)
    if [[ $other ]]; then
      note "leaves shared memory of user $uid alone: $other of the same user is on this node"
    else
      # Of a folder, any file within that is open keeps the whole.
      while IFS= read -r -d '' path; do
        [[ ${used[x$path]:-} ]] || doomed[x$path]=1
        ((SECONDS < LIMIT_S / 2)) || { complete=''; break; }
      done < <(find "$shm_dir" -mindepth 1 -maxdepth 1 -uid "$uid" -newer "${oldest:-$mark}" -print0 2> /dev/null)
    fi
  fi
  if ((${#doomed[@]} > 0)); then
    for path in "${!doomed[@]}"; do
      ((${#first} > 200)) || first+=" ${path#x}"
    done
    printf '%s\0' "${!doomed[@]}" | cut -z -c2- | remove || complete=''
    for path in "${!doomed[@]}"; do
      [[ ! -e ${path#x} && ! -L ${path#x} ]] || ((left++))
    done
    note "removed $((${#doomed[@]} - left)) of ${#doomed[@]} files that the job left:$(printf '%s' "$first" | tr '[:cntrl:]' '?' | head -c 300)"
  fi
  if [[ ! $complete ]]; then
    note "had no time for all that user $uid left in $shm_dir: the rest goes after the user's next job here"
  elif [[ ! $other ]]; then
    marks_of_user | xargs -0r rm -f --
  elif [[ $oldest != "$mark" ]]; then
    rm -f -- "$mark"
  fi
}

[[ $job =~ ^[1-9][0-9]*$ && $uid =~ ^[0-9]+$ ]] || { note 'called outside a job: nothing to do'; exit 0; }
group=$(ps -o pgid= -p $$ 2> /dev/null | tr -d ' ')
theirs=()
failed=0
end_processes || failed=1
free_memory
exit "$failed"
