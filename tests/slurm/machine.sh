#!/usr/bin/env bash
# The first process of a machine of the tests, in namespaces of its own: the one with Slurm's controller, or a node. machines.py
# starts it with `unshare`, and what it mounts, configures and starts ends with it.
# Usage: machine.sh DIRECTORY NAME ADDRESS
set -eu
directory=$1 name=$2 address=$3
export SLURM_CONF=$directory/slurm.conf

hostname "$name"
mount --bind "$directory/hosts.$name" /etc/hosts
mount --bind "$directory/resolv.conf" /etc/resolv.conf # this machine's servers are out of reach: seconds for each name
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs "$directory/local" # TMPDIR of jobs
ip link set lo up

if [ "$name" = login ]; then
  ip link add nodes type bridge
  ip addr add "$address/24" dev nodes
  ip link set nodes up
  head -c 64 /dev/urandom >"$directory/munge.key"
  chmod 600 "$directory/munge.key"
  munged --key-file="$directory/munge.key" --socket="$directory/munge.socket" --pid-file="$directory/munge.pid" \
    --log-file="$directory/log/munged.log" --seed-file="$directory/munge.seed"
  slurmctld -f "$SLURM_CONF"
else
  until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done # the other end is the controller's bridge
  ip addr add "$address/24" dev eth0
  ip link set eth0 up
  ip route add default via "${address%.*}.254"
  slurmd -D -f "$SLURM_CONF" &
  wait $! # a node ends with its slurmd
  exit 1
fi
echo started
while :; do # and reap what loses its parent
  sleep 1000 &
  wait $!
done
