#!/usr/bin/env bash
# A run on the nodes of a Slurm job:  sbatch [sbatch's options] launch/slurm_grpo.sh experiment=NAME key=value ...
# docs/cluster.md says how, and what each failure looks like.
#
# Each node is a job step that holds a Ray node, and so is the program, which starts on the first one when Ray has them
# all. Every step is watched until the program ends, whose exit code is the job's. Variables of the environment:
#   MRL_PYTHON              interpreter (the clone's .venv/bin/python; in a container python3)
#   MRL_PYXIS, MRL_APPTAINER  image in which pyxis (srun --container-image) or apptainer runs all steps
#   MRL_MOUNTS              directories a container sees besides the clone, TMPDIR and /tmp: PATH,PATH:PATH,...
#   MRL_INTERFACE           network interface, where the one that leads to other machines is not right
#   MRL_ROLLOUT_CONSTRAINT  node feature: nodes that have it hold the engines, the others the trainer. In a job of two
#                           components (sbatch A : B) the first holds the trainer and the second the engines.
#   MRL_READY_S             until Ray must have every node (180)
#   MRL_GRACE_S             from SIGUSR1 until the program must have saved its checkpoint (90)
#   MRL_REQUEUES            a job that loses a node is requeued this often instead of failed (0)
#SBATCH --job-name=grpo
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@120
set -uo pipefail
LOST=75    # exit code of a job whose nodes failed it: never came, or were lost
REFUSED=2  # of a program that does not begin: the command line is wrong
STOPPED=85 # of a program that SIGUSR1 stopped: it has saved what can be saved, and the same command resumes
INTERRUPTED=130 KILLED_BY_USR1=138

say() { printf '[%s +%ss] %s\n' "slurm_grpo" "$SECONDS" "$*"; }
quit() { say "$2"; exit "$1"; }
alive() { kill -0 "$1" 2>/dev/null; }

[[ ${SLURM_JOB_ID:-} ]] ||
  quit $REFUSED "this is no job of Slurm. Submit it: sbatch OPTIONS $0 ...; without Slurm run launch/local.sh"
for name in MRL_READY_S MRL_GRACE_S MRL_REQUEUES; do # before a signal needs them
  [[ ${!name:-0} =~ ^(0|[1-9][0-9]*)$ ]] || quit $REFUSED "refused: $name=${!name} is no whole number, without a unit."
done
unset RAY_ADDRESS CDPATH SLURM_TIME_FORMAT "${!SQUEUE_@}" "${!SINFO_@}" "${!SCANCEL_@}" # meant for others

program='' waiter='' steps=() stopping='' cancelled='' lost=''
trap 'say "SIGUSR1: the time limit is near, a preemption, or by hand"
  stopping=${stopping:-$SECONDS}
  [[ $program ]] && kill -USR1 "$program"' USR1
trap 'cancelled=1' TERM INT

# Slurm runs a copy of this file; sbatch has noted where it was, and its arguments behind. A script of the user's runs it
# where it is.
root=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd)
[[ -e $root/launch/job_steps.py ]] ||
  root=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\(/.*\)/launch/slurm_grpo\.sh.*|\1|p' | head -n 1)
cd "${root:-/none}" 2>/dev/null ||
  quit 1 "$(hostname) has no clone${root:+ at $root}. Submit launch/slurm_grpo.sh itself, in one that all nodes see."
helper=$root/launch/job_steps.py
# of_job FIELD: what Slurm says of this job. A variable that it sets for some jobs only may be of a job around sbatch.
of_job() { scontrol show job --oneliner "$SLURM_JOB_ID" | sed -n "s|^JobId=$SLURM_JOB_ID\( .*\)* $1=\([^ ]*\).*|\2|p"; }
job=$SLURM_JOB_ID attempt=$(of_job Restarts || echo 0)
task=$(of_job ArrayTaskId) && [[ $task ]] && job=$(of_job ArrayJobId)_$task # whose own number may stand for all tasks
[[ $(of_job TresPerJob)$(of_job TresPerTask) != *gpu* ]] || # a step on one node would get all of them, or a task's
  quit $REFUSED "refused: --gpus and --gpus-per-task give no node its own GPUs. Submit with sbatch --gpus-per-node=N."
[[ $(of_job HetJobId) ]] || unset SLURM_HET_SIZE "${!SLURM_JOB_NODELIST_HET_GROUP_@}"

# The nodes, and what each is for: role is empty where any may hold anything.
nodes=() role=() component=()
for ((i = 0; i < ${SLURM_HET_SIZE:-1}; i++)); do
  list=SLURM_JOB_NODELIST_HET_GROUP_$i
  for node in $(scontrol show hostnames "${!list:-$SLURM_JOB_NODELIST}"); do
    nodes+=("$node") component+=("$i")
    if ((${SLURM_HET_SIZE:-1} > 1)); then
      role+=("$( ((i == 0)) && echo trainer || echo rollout)")
    elif [[ -n ${MRL_ROLLOUT_CONSTRAINT:-} ]]; then
      role+=("$([[ ,$(sinfo -hn "$node" -o %f), == *",$MRL_ROLLOUT_CONSTRAINT,"* ]] && echo rollout || echo trainer)")
    else
      role+=("")
    fi
  done
done
[[ ! ${MRL_ROLLOUT_CONSTRAINT:-} || " ${role[*]}" == *" trainer"* && " ${role[*]}" == *" rollout"* ]] ||
  quit $REFUSED "refused: MRL_ROLLOUT_CONSTRAINT=$MRL_ROLLOUT_CONSTRAINT is a feature of all or none of ${nodes[*]}."

# How a step runs: as it is, or in a container that sees the clone, the temporary directory, and /tmp, where Ray's
# sockets lie if the name of that is too long for them.
export TMPDIR=${TMPDIR:-/tmp}
python=${MRL_PYTHON:-python3} container=() inside=() mounts=''
IFS=, read -ra paths <<<"$root,$TMPDIR$([[ $TMPDIR == /tmp ]] || echo ,/tmp)${MRL_MOUNTS:+,$MRL_MOUNTS}"
for path in "${paths[@]}"; do # pyxis documents both sides only
  [[ $path == *:* ]] || path=$path:$path
  mounts+=${mounts:+,}$path
done
if [[ -n ${MRL_PYXIS:-} ]]; then
  container=(--container-image="$MRL_PYXIS" --container-mounts="$mounts" --container-workdir="$root")
  inside=(env "PYTHONPATH=$root") # the image's would hold, and the host's packages are another Python's
elif [[ -n ${MRL_APPTAINER:-} ]]; then
  inside=(apptainer exec --nv --bind "$mounts" --pwd "$root" "$MRL_APPTAINER" env "PYTHONPATH=$root")
elif [[ -z ${MRL_PYTHON:-} && -x $root/.venv/bin/python ]]; then
  python=$(cd -P "$root/.venv/bin" && pwd)/python # Ray starts no interpreter whose path has spaces
fi
mark=mrl-$SLURM_JOB_ID-$$-$RANDOM # name of the steps that are of this script: a job may run it twice
# step I COMMAND...: runs on node I, beside its other steps, with all that the job has there
step() {
  local i=$1 options=() && shift
  # What srun would read of the job's shape, or of a job around sbatch: a step has all that its node has, unless told.
  unset "${!SLURM_GPU@}" "${!SLURM_NTASKS@}" "${!SLURM_CPUS_PER@}" "${!SLURM_MEM@}" "${!SRUN_@}" SLURM_NPROCS \
    SLURM_GRES SLURM_TRES_PER_TASK SLURM_EXACT SLURM_EXCLUSIVE SLURM_HINT SLURM_LABELIO
  ((${SLURM_HET_SIZE:-1} > 1)) && options=(--het-group="${component[i]}")
  # Also what is set here, after sbatch --export=...
  exec srun --job-name="$mark" --export=ALL --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[i]}" \
    "${options[@]}" --cpu-bind=quiet,none --mpi=none --input=none "${container[@]}" "${inside[@]}" "$@"
}

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
# Other users of a node keep out; and Ray would ask for a token as soon as a run without Slurm has left one in the home.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')

plan=$(step 0 "$python" "$helper" plan "${#nodes[@]}" "$@") || exit # refused, or no such interpreter: it has been said
{ IFS= read -r run && read -r address && read -r port; } < <(tail -n 3 <<<"$plan") # a site's prolog may talk too
logs=$run/log/job-$SLURM_JOB_ID-$attempt
mkdir -p "$logs" || quit 1 "$(hostname) cannot write into $run. Choose a runs_dir that all nodes can write into."
say "job $SLURM_JOB_ID, start $attempt, on ${nodes[*]}; Ray at $address:$port; logs in $logs"

# A moment, which a trapped signal ends.
tick() { sleep 0.5 & wait $!; }

# Names of the nodes whose kernel does not let us connect to where their Ray listens: off, cut off, or without Ray. The
# program has said so when it ends for that; this is how the script knows. Asked from here: Slurm may start no step for a
# while when one of the job's nodes is gone.
unreachable() {
  while read -r node ip port; do
    [[ " ${nodes[*]} " == *" $node "* ]] && { timeout 3 bash -c "exec 3<>/dev/tcp/$ip/$port" 2>/dev/null || echo "$node"; } &
  done <"$logs/nodes"
  wait
}

# Whether a node's step has ended; sets `lost` to its name, `ended` to the step.
lost_node() {
  local i
  for i in "${!steps[@]}"; do
    alive "${steps[i]}" || { lost=${nodes[i]} ended=${steps[i]} && return 0; }
  done
  return 1
}

# Ask every own step to end, and give it time; what is left then is killed, by Slurm too when a job's script ends.
end_steps() {
  trap '' USR1 TERM INT
  squeue --noheader --steps --user="$EUID" --format='%i %j' | sed -n "s/ $mark\$//p" |
    xargs --no-run-if-empty scancel --quiet --ctld --signal=TERM &
  for ((n = 0; n < 50; n++)); do
    local left=0
    for pid in "${steps[@]}" $program $waiter; do alive "$pid" && left=1; done
    ((left)) || break
    ((n == 40)) && kill -TERM "${steps[@]}" $program $waiter 2>/dev/null # to srun this means: kill the step
    sleep 0.2
  done
}

newest() {
  local saved=("$run"/checkpoints/step_[0-9][0-9][0-9][0-9][0-9][0-9])
  if [[ -e ${saved[-1]} ]]; then echo "${saved[-1]}"; else echo "the beginning: there is no checkpoint"; fi
}
before=$(newest)

# Whether Slurm ends the job within a quarter of an hour, as SIGUSR1 tells it, and would after the next start: for its
# time limit, that is, and not because it is preempted.
at_limit() {
  local end preempted
  preempted=$(of_job PreemptTime) && [[ ${preempted:-None} == None ]] && end=$(of_job EndTime) && [[ $end ]] &&
    end=$(date --date="$end" +%s 2>/dev/null) && ((end - EPOCHSECONDS < 900))
}

# requeue WHY
requeue() {
  if [[ $stopping && $(newest) == "$before" ]] && at_limit; then
    say "$1 without a new checkpoint; the next start has as little time: not requeued. Raise --time, or lower \
checkpoint.every"
    end_steps
    exit 1
  fi
  end_steps
  say "$1; requeued, to go on from $(newest)"
  scontrol requeue "$job" || say "Slurm does not requeue this job. Submit the same command: it resumes."
  exit "$STOPPED"
}

# By scancel, which has told the steps too, or this script alone, by a key or by hand.
cancel() { say "cancelled"; end_steps; exit "$INTERRUPTED"; }

# fail WHY: a node is to blame
fail() {
  say "$1"
  for i in "${!steps[@]}"; do # nobody waits for who is gone
    [[ ${nodes[i]} == "$lost" ]] || continue
    disown "${steps[i]}" 2>/dev/null && kill -KILL "${steps[i]}" 2>/dev/null
    unset "steps[$i]"
  done
  ((attempt < ${MRL_REQUEUES:-0})) && requeue "requeued as MRL_REQUEUES=$MRL_REQUEUES asks"
  end_steps
  exit "$LOST"
}

for i in "${!nodes[@]}"; do
  step "$i" "$python" "$helper" start "${nodes[0]}" "$address" "$port" "$logs" "${role[i]}" \
    >"$logs/ray-${nodes[i]}.log" 2>&1 &
  steps+=($!)
done
step 0 "$python" "$helper" wait "$address" "$port" "${nodes[@]}" >"$logs/nodes" &
waiter=$!
while alive "$waiter"; do
  tick
  [[ $cancelled ]] && cancel
  [[ $stopping ]] && requeue "stopped before the program started"
  lost_node || continue
  why="$lost did not start. The end of $logs/ray-$lost.log:"$'\n'"$(tail -n 12 "$logs/ray-$lost.log")"
  wait "$ended"
  (($? == REFUSED)) && { say "$why"; end_steps; exit "$REFUSED"; } # nor would it next time
  fail "$why"
done
wait "$waiter" || fail "Ray does not have all nodes" # `wait` has said which

say "Ray has ${#nodes[@]} nodes; starting the program"
own=("cluster.address=$address:$port")
[[ ${role[0]} ]] && own+=(cluster.trainer_nodes=trainer cluster.rollout_nodes=rollout) # what `start` offers there
[[ $stopping ]] && requeue "stopped before the program started"
step 0 "$python" -m megatron_rl.main "$@" "${own[@]}" \
  > >(trap '' USR1 && exec tee "$logs/program.log") 2>&1 &
program=$! late='' lost_at=''
[[ $stopping ]] && kill -USR1 "$program" # as the trap would have a moment later
while alive "$program" && [[ ! $cancelled ]]; do
  tick
  if [[ $stopping && ! $late ]] && ((SECONDS - stopping >= ${MRL_GRACE_S:-90})); then
    late=1
    say "no checkpoint within MRL_GRACE_S=${MRL_GRACE_S:-90} s: ending the program"
    kill -TERM "$program"
  fi
  if [[ ! $lost_at ]] && lost_node; then
    lost_at=$SECONDS
    say "lost $lost while the program ran, which has 5 s to say how it saw it"
  fi
  [[ $lost_at ]] && ((SECONDS - lost_at >= 5)) && kill -TERM "$program" 2>/dev/null
done
[[ $cancelled ]] && cancel
wait "$program" && code=0 || code=$?
[[ $lost ]] || ((code == 0 || code == REFUSED || code == STOPPED)) ||
  lost=$(unreachable | head -n 1) # which the program notices first

if [[ $lost ]] && ((code != 0)); then
  fail "lost $lost; see ray-$lost.log in $logs"
elif [[ $late && $(newest) == "$before" ]]; then # the next start would come no further than this one
  say "no checkpoint was saved in time, nor since the start: not requeued. Give SIGUSR1 the time that a step and a \
checkpoint take, e.g. MRL_GRACE_S=540 sbatch --signal=B:USR1@600, or lower checkpoint.every, and submit again"
elif [[ $late ]]; then
  requeue "no checkpoint was saved in time"
elif ((code == STOPPED)) || { [[ $stopping ]] && ((code == KILLED_BY_USR1)); }; then # or: scancel without --batch
  requeue "the program has stopped"
else
  say "the program ended with exit code $code$( ((code > INTERRUPTED)) &&
    echo ": it was killed, by somebody or for want of memory. The same command resumes.")"
fi
end_steps
exit "$code"
