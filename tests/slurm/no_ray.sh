#!/usr/bin/env bash
# An interpreter for MRL_PYTHON in place of launch/job_steps.py and the program: the job script is left, without Ray.
# RUN is the run directory. The program takes PROGRAM_S and ends with CODE; SIGUSR1 stops it. The plan takes PLAN_S. A
# node ends with START_CODE where that is set.
# Without a child: Slurm signals every process of a step, and one that had just been made would be left.
rest() { read -rt "$1" <> <(:); }
case $2 in
  megatron_rl.main)
    trap 'exit 85' USR1
    echo "the program runs"
    rest "${PROGRAM_S:-1}"
    exit "${CODE:-0}"
    ;;
  plan)
    mkdir -p "$RUN"
    echo "a site's greeting"
    sleep "${PLAN_S:-0}"
    printf '%s\n' "$RUN" 127.0.0.1 1
    ;;
  wait)
    for node in "${@:5}"; do
      until grep -qs GPUs "$RUN/log/job-$SLURM_JOB_ID"-*/"ray-$node.log"; do sleep 0.1; done
    done
    echo "greets job 12"
    ;;
  start)
    trap '' USR1
    trap 'echo "asked to end"; exit' TERM
    [[ -z ${START_CODE:-} ]] || exit "$START_CODE"
    echo "has $SLURM_CPUS_ON_NODE CPUs, ${SLURM_GPUS_ON_NODE:-0} GPUs"
    rest 1000
    ;;
esac
