#!/bin/bash
# Prolog of hybridsched (slurm.conf: Prolog=): before a job starts on a node, prove that its GPUs or MIG instances
# can be used and that /dev/shm is large enough for an engine.
#
# Slurm drains the node when this script fails. So it fails only on proof: a probe that ran and said that the GPU
# is broken, twice. A probe that is not installed, was refused or did not come back proves nothing: that is logged
# and the job starts. No Slurm command is called here (slurmctld may be waiting for this script), and every step
# is bounded in time.
#
# Settings: hybridsched-node.conf beside this script, lines of KEY = VALUE; `hybridsched slurm render` writes it.

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH LC_ALL=C
unset CDPATH BASH_ENV ENV

log='' run_dir=/run/hybridsched shm_dir=/dev/shm shm_min_mib=0
gpu_probe=nvidia-smi probe_timeout_s=10 on_timeout=pass

settings="$(dirname -- "${BASH_SOURCE[0]}")/hybridsched-node.conf"
if [[ -r $settings ]]; then
  while IFS='=' read -r key value; do
    key=${key//[[:space:]]/} value=${value#"${value%%[![:space:]]*}"} value=${value%"${value##*[![:space:]]}"}
    # Only these names are taken: the file cannot run anything.
    case $key in
      log | run_dir | shm_dir | gpu_probe | on_timeout) printf -v "$key" '%s' "$value" ;;
      shm_min_mib | probe_timeout_s) if [[ $value =~ ^[0-9]{1,7}$ ]]; then printf -v "$key" '%d' "$((10#$value))"; fi ;;
    esac
  done < "$settings"
fi

job=${SLURM_JOB_ID:-0} node=${SLURMD_NODENAME:-$(uname -n)} uid=${SLURM_JOB_UID:-0}

note() {
  local line="prolog job=$job node=$node: $*"
  printf '%s\n' "$line" >&2
  # A full disk or a dead logger must not fail the node.
  if [[ $log ]]; then { printf '%(%FT%T)T %s\n' -1 "$line" >> "$log"; } 2> /dev/null; return 0; fi
  command -v logger > /dev/null && bounded 2 logger -t hybridsched -p daemon.warning -- "$line"
  return 0
}

# Run a command for at most $1 seconds; its output in $said, its exit status returned, 124 when it did not end. A
# process that hangs in the driver cannot be killed, so it is not waited for either.
bounded() {
  local limit=$1 out pid deadline
  shift
  said=''
  out=$(mktemp "${TMPDIR:-/tmp}/hybridsched.XXXXXX" 2> /dev/null) || out=/dev/null
  # A session of its own, so that what the probe has started goes with it.
  setsid "$@" > "$out" 2>&1 < /dev/null &
  pid=$!
  deadline=$((SECONDS + limit + 1))
  while kill -0 "$pid" 2> /dev/null; do
    if ((SECONDS >= deadline)); then
      kill -KILL -- "-$pid" "$pid" 2> /dev/null
      disown "$pid" 2> /dev/null
      [[ $out == /dev/null ]] || rm -f -- "$out"
      return 124
    fi
    sleep 0.05
  done
  wait "$pid"
  local status=$?
  if [[ $out != /dev/null ]]; then
    said=$(head -c 2000 -- "$out" | tr '\n' ' ')
    rm -f -- "$out"
  fi
  return "$status"
}

# One probe of the job's GPUs. 0: usable, 1: broken ($why), 2: cannot be told ($why).
probe() {
  local status gpu
  if [[ $gpu_probe != nvidia-smi ]]; then
    # A site's own probe: 0 usable, 1 broken, everything else cannot be told.
    bounded "$probe_timeout_s" "$gpu_probe" "${gpus[@]}"
    status=$?
    why="$gpu_probe ${gpus[*]} ended with $status: $said"
    case $status in 0) return 0 ;; 1) return 1 ;; 124) timed_out ;; *) return 2 ;; esac
    return
  fi
  bounded "$probe_timeout_s" nvidia-smi -L
  status=$? listing=$said
  judge "$status" || return
  for gpu in "${gpus[@]}"; do
    if [[ $gpu == MIG-* ]]; then
      [[ $listing == *"$gpu"* ]] || { why="MIG instance $gpu is not there: $listing"; return 1; }
      continue
    fi
    # With explicit files Slurm numbers MIG instances through; nvidia-smi has no such number to ask for.
    [[ $listing == *'(UUID: MIG-'* ]] && continue
    bounded "$probe_timeout_s" nvidia-smi -i "$gpu" --query-gpu=uuid,temperature.gpu --format=csv,noheader
    judge "$?" || return
  done
  return 0
}

# The verdict on an exit status of nvidia-smi, which is NVML's error code.
judge() {
  why="nvidia-smi ended with $1: $said"
  case $1 in
    0) case $said in *'requires reset'* | *'GPU is lost'* | *'fallen off the bus'*) return 1 ;; esac; return 0 ;;
    6 | 8 | 9 | 10 | 15 | 18) return 1 ;; # not found, no power, no driver, no interrupts, lost, driver of another version
    124) timed_out ;;
    *) return 2 ;;
  esac
}

timed_out() {
  why="$gpu_probe did not end within $probe_timeout_s s"
  [[ $on_timeout == fail ]] && return 1
  return 2
}

check_gpus() {
  local verdict list=${SLURM_JOB_GPUS:-}
  [[ $list ]] || return 0
  [[ ${CUDA_VISIBLE_DEVICES:-} != *MIG-* ]] || list=$CUDA_VISIBLE_DEVICES
  IFS=',' read -r -a gpus <<< "$list"
  if ! command -v -- "$gpu_probe" > /dev/null; then
    note "GPUs ${gpus[*]} were not probed: $gpu_probe is not on this node; install it, or set gpu_probe"
    return 0
  fi
  probe
  verdict=$?
  if ((verdict == 1)); then
    # A second look: one failure may be a driver in the middle of something.
    sleep 1
    probe
    verdict=$?
  fi
  case $verdict in
    1) note "GPU broken, the node is to be drained: $why"; return 1 ;;
    2) note "GPUs ${gpus[*]} could not be probed, the job starts all the same: $why" ;;
  esac
  return 0
}

# The size of the file system is the node's fault; what is taken of it may be other jobs', and passes.
check_shm() {
  local size free
  ((shm_min_mib > 0)) && [[ ${SLURM_JOB_GPUS:-} ]] || return 0
  bounded 5 df -Pm -- "$shm_dir" || { note "$shm_dir could not be measured: $said"; return 0; }
  # The heading is one line, said is one line too: the figures are the 2nd and 4th words after the heading's last.
  read -r _ size _ free _ <<< "${said#*Mounted on }"
  [[ $size =~ ^[0-9]+$ && $free =~ ^[0-9]+$ ]] || { note "$shm_dir could not be measured: $said"; return 0; }
  if ((size < shm_min_mib)); then
    note "$shm_dir has $size MiB and an engine needs $shm_min_mib, the node is to be drained: mount it with size=${shm_min_mib}m"
    return 1
  fi
  ((free >= shm_min_mib)) || note "$shm_dir has only $free MiB free of the $shm_min_mib that an engine needs: other jobs' files hold the rest"
  return 0
}

# When the job came to this node: the epilog removes only shared memory that is younger.
stamp() {
  local folder=$run_dir/$node
  (umask 077 && mkdir -p -- "$folder" && printf '%s\n' "$uid" > "$folder/job-$job") 2> /dev/null ||
    note "$folder cannot be written: shared memory that the job leaves will stay"
}

[[ $job =~ ^[1-9][0-9]*$ ]] || { note 'called outside a job: nothing to do'; exit 0; }
failed=0
check_gpus || failed=1
check_shm || failed=1
((failed)) || stamp
exit "$failed"
