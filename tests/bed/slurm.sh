#!/bin/bash
# Slurm over the hosts of hosts.sh: munged and slurmctld in host0, a slurmd in each other host.
# All its files are in DIR/slurm.
#   slurm.sh start DIR N        then, in a host: SLURM_CONF=DIR/slurm/slurm.conf sbatch ...
#   slurm.sh slurmd DIR HOST    one host's daemon again, after it booted
set -eu
DIR=$2; S=$DIR/slurm
CPUS=2 GPUS=2   # of each host; the GPUs are device nodes that nobody opens
export SLURM_CONF=$S/slurm.conf

inside() { local host=$1; shift; nsenter -t "$(cat "$DIR/$host/pid")" -a -- "$@" </dev/null; }
within() { # within SECONDS COMMAND...
  local end=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt "$end" ] || { echo "not in time: $*" >&2; "$@" >&2; return 1; }
    sleep 0.05
  done
}
all_idle() { [ "$(inside host0 sinfo -h -N -t idle -o %N | sort -u | wc -l)" = "$1" ]; }

files() {
  mkdir -p "$S"/{state,log,run,spool,gpus,munge}; chmod 755 "$S" "$S"/*; chmod 700 "$S/munge"
  head -c 128 /dev/urandom > "$S/munge/key"; chmod 400 "$S/munge/key"
  for g in $(seq 0 $((GPUS - 1))); do mknod "$S/gpus/gpu$g" c 1 3; done
  for i in $(seq "$1"); do mkdir "$S/spool/host$i"; done
  echo "Name=gpu File=$S/gpus/gpu[0-$((GPUS - 1))]" > "$S/gres.conf"
  echo "CgroupPlugin=cgroup/v1" > "$S/cgroup.conf"   # loaded, never used
  : > "$S/plugstack.conf"
  cat > "$SLURM_CONF" <<CONF
ClusterName=bed
SlurmctldHost=host0(10.77.0.100)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$S/run/munge.sock,cred_expire=5
StateSaveLocation=$S/state
SlurmdSpoolDir=$S/spool/%n
SlurmctldPidFile=$S/run/slurmctld.pid
SlurmdPidFile=$S/run/slurmd.%n.pid
SlurmctldLogFile=$S/log/slurmctld.log
SlurmdLogFile=$S/log/slurmd.%n.log
PlugStackConfig=$S/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
PriorityType=priority/basic
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=3
MinJobAge=3600
InactiveLimit=0
CompleteWait=0
GresTypes=gpu
NodeName=host[1-$1] NodeAddr=10.77.0.[1-$1] CPUs=$CPUS Boards=1 SocketsPerBoard=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=4000 Gres=gpu:$GPUS
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

start() {
  files "$1"
  inside host0 munged --force --key-file="$S/munge/key" --socket="$S/run/munge.sock" \
    --pid-file="$S/run/munged.pid" --log-file="$S/log/munged.log" \
    --seed-file="$S/munge/seed" --num-threads=2
  inside host0 slurmctld
  for i in $(seq "$1"); do inside "host$i" slurmd; done
  within 30 all_idle "$1"
}

case $1 in
  start) start "$3";;
  slurmd) inside "$3" slurmd;;
esac
