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
set -f

log='' run_dir=/run/hybridsched shm_dir=/dev/shm shm_min_mib=0
gpu_probe=nvidia-smi probe_timeout_s=10 on_timeout=pass

gpu_line='^gpu ([0-9]{1,4}): .*\(uuid: (gpu-[^)]+)\)' mig_line='^[[:space:]]+mig .*\(uuid: (mig-[^)]+)\)'

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
  line=${line//$'\n'/ } line=${line:0:1000}
  printf '%s\n' "$line" >&2
  # A full disk or a dead logger must not fail the node.
  if [[ $log ]]; then { printf '%(%FT%T)T %s\n' -1 "$line" >> "$log"; } 2> /dev/null; return 0; fi
  command -v logger > /dev/null && bounded 2 logger -t hybridsched -p daemon.warning -- "$line"
  return 0
}

# Run a command for at most $1 seconds; its output in $said, its exit status returned, 124 when it did not end; $cut
# is 1 where it said more than was kept. It comes through a pipe: a file could be cut short by a full disk. A process
# that hangs in the driver cannot be killed, so it is not waited for either.
bounded() {
  local limit=$1 fd pid deadline part got alive=1
  shift
  said='' cut=0
  # A session of its own, so that what the probe has started goes with it.
  exec {fd}< <(exec setsid "$@" 2>&1 < /dev/null)
  pid=$!
  deadline=$((SECONDS + limit + 1))
  while :; do
    # After its end what it said stands in the pipe; whoever else holds that open is not waited for.
    kill -0 "$pid" 2> /dev/null || alive=0
    part=''
    IFS= read -r -N 4096 -t 0.1 -u "$fd" part
    got=$?
    # Many times what the largest node says (16 GPUs with 7 MIG instances each: 10 kB).
    if ((${#said} < 262144)); then said+=$part; elif [[ $part ]]; then cut=1; fi
    if ((got > 128)); then
      ((alive)) || break
    elif ((got > 0)); then
      ((alive)) || break
      sleep 0.05 # it closed its output and goes on
    fi
    if ((SECONDS >= deadline)); then
      exec {fd}<&-
      kill -KILL -- "-$pid" "$pid" 2> /dev/null
      disown "$pid" 2> /dev/null
      return 124
    fi
  done
  exec {fd}<&-
  wait "$pid"
}

# One probe of the job's GPUs. 0: usable, 1: broken ($why), 2: cannot be told ($why).
probe() {
  local status gpu
  if [[ $gpu_probe != nvidia-smi ]]; then
    # A site's own probe: 0 usable, 1 broken, everything else cannot be told.
    bounded "$probe_timeout_s" "$gpu_probe" "${gpus[@]}"
    status=$?
    why="$gpu_probe ${gpus[*]} ended with $status: ${said:0:400}"
    case $status in 0) return 0 ;; 1) return 1 ;; 124) timed_out ;; *) return 2 ;; esac
    return
  fi
  list_gpus || return
  for gpu in "${gpus[@]}"; do
    probe_gpu "${gpu,,}" || return
  done
  return 0
}

# What nvidia-smi lists: the UUIDs of GPUs by their number in $uuids, of MIG instances in $migs. $whole is 1 where
# nothing else can be there, $lost where it says that a GPU is broken.
list_gpus() {
  local status verdict line IFS=$'\n'
  uuids=() migs=() whole=1 lost=''
  bounded "$probe_timeout_s" nvidia-smi -L
  status=$?
  judge "$status"
  verdict=$?
  listed=${said:0:400}
  case $status in
    6) return 0 ;;          # no GPU at all
    9 | 18) return 1 ;;     # it speaks of the driver, so of every GPU
    124) return "$verdict" ;;
  esac
  ((verdict == 2)) && return 2
  # It may speak of a GPU that is not the job's: each is asked below.
  ((verdict == 1)) && lost=1
  ((status != 0 || cut)) && whole=0
  for line in ${said,,}; do
    if [[ $line =~ $gpu_line ]]; then
      uuids[10#${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
    elif [[ $line =~ $mig_line ]]; then
      migs+=("${BASH_REMATCH[1]}")
    else
      whole=0
    fi
  done
  ((${#uuids[@]})) || whole=0
  return 0
}

# One GPU: a number, GPU-UUID, MIG-UUID, or MIG-GPU-UUID/GI/CI as drivers before 470 write it; in small letters.
probe_gpu() {
  local gpu=$1 number='' status verdict
  case $gpu in
    mig-*) probe_mig "$gpu"; return ;;
    gpu-*)
      number=$(number_of "$gpu")
      [[ $number ]] || { absent "GPU $gpu"; return; }
      ;;
    *[!0-9]* | '' | ?????*) why="$gpu is no GPU that nvidia-smi could be asked for"; return 2 ;;
    *)
      # With explicit files Slurm numbers MIG instances through; nvidia-smi has no such number to ask for.
      ((${#migs[@]} == 0)) || return 0
      number=$((10#$gpu))
      ;;
  esac
  bounded "$probe_timeout_s" nvidia-smi -i "$number" --query-gpu=uuid,temperature.gpu --format=csv,noheader
  status=$?
  judge "$status"
  verdict=$?
  ((status == 6)) || return "$verdict"
  [[ ${uuids[number]:-} ]] && return 2 # it was listed a moment ago
  absent "GPU $number"
}

# The number of the GPU whose UUID begins so; empty where none is listed.
number_of() {
  local number
  for number in "${!uuids[@]}"; do
    [[ ${uuids[number]} == "$1"* ]] && { printf '%s' "$number"; return; }
  done
}

probe_mig() {
  local mig form=new parent=${1#mig-}
  for mig in "${migs[@]}"; do
    [[ $mig == "$1" ]] && return 0
    # A UUID may be given by its beginning; the numbers of the old form may not.
    [[ $1 != */* && $mig == "$1"* ]] && return 0
    [[ $mig == mig-gpu-* ]] && form=old
  done
  if ((${#migs[@]})); then
    if [[ $form == old && $1 != mig-gpu-* || $form == new && $1 == mig-gpu-* && $(number_of "${parent%%/*}") ]]; then
      why="nvidia-smi names MIG instances in another form than $1"
      return 2
    fi
  fi
  absent "MIG instance $1"
}

# It is not listed. That is proof where the list is whole, or where it says that a GPU is lost.
absent() {
  why="$1 is not there: $listed"
  ((whole)) || [[ $lost ]] && return 1
  return 2
}

# The verdict on an exit status of nvidia-smi, which is NVML's error code.
judge() {
  why="nvidia-smi ended with $1: ${said:0:400}"
  case $1 in
    0) broken_words && return 1; return 0 ;;
    6 | 8 | 9 | 11 | 15 | 16 | 18) return 1 ;; # not found, no power, no driver, no interrupts, lost, to be reset, other driver
    10) [[ ${said,,} == *interrupt* ]] && return 1; return 2 ;; # in NVML a timeout, in nvidia-smi's manual no interrupts
    124) timed_out ;;
    *) broken_words && return 1; return 2 ;;
  esac
}

broken_words() {
  case ${said,,} in
    *'requires reset'* | *'requires restart'* | *'gpu is lost'* | *'fallen off the bus'*) return 0 ;;
  esac
  return 1
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
  # No here-string: it needs a file, and the disk may be full.
  list=${list//[[:space:]]/}
  gpus=(${list//,/ })
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
  said=${said//$'\n'/ }
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
