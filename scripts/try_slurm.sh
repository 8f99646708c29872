#!/usr/bin/env bash
# scripts/train_multinode.slurm under a real SLURM on this machine alone: two processes, stopped by SIGTERM on the way,
# queued again by the script, resumed to the end. As root, in a container or a machine of one's own: it starts munged,
# slurmctld and slurmd.
#
#   apt-get install slurm-wlm munge && bash scripts/try_slurm.sh
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
here=$(hostname -s)
export SLURM_CONF="$work/slurm.conf" PYTHON="${PYTHON:-$PWD/.venv/bin/python}" RUN_DIR="$work/run"

cat > "$SLURM_CONF" <<CONF
ClusterName=try
SlurmctldHost=$here
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
NodeName=$here CPUs=2 State=UNKNOWN
PartitionName=all Nodes=$here Default=YES MaxTime=INFINITE State=UP
CONF
mkdir -p "$work/state" "$work/spool" /run/munge
chown munge: /run/munge
pgrep -x munged > /dev/null || runuser -u munge -- munged
slurmctld
slurmd
leave() {
  scancel --full --user root 2> /dev/null || true
  kill "$(cat "$work/slurmd.pid")" "$(cat "$work/slurmctld.pid")" 2> /dev/null || true
}
trap leave EXIT
until sinfo --noheader --format %T 2> /dev/null | grep -q idle; do sleep 1; done

cat > "$work/judge.py" <<'CODE'
import time

def letters(completions):
    time.sleep(1)
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]
CODE
printf '%s tree\n' a b c d e f g h > "$work/prompts.txt"
export MESH="--policy.mesh.fsdp 2" XLA_FLAGS="--xla_force_host_platform_device_count=1" JAX_PLATFORMS=cpu

job=$(sbatch --parsable --nodes=1 --ntasks-per-node=2 --gres=none --cpus-per-task=1 --time=20 --output="$work/log" \
  scripts/train_multinode.slurm --task text --policy.path miniature --data.prompts "$work/prompts.txt" \
  --rewards "[{name: $work/judge.py:letters}]" --training.prompts_per_batch 4 --training.max_steps 30 \
  --sampling.group_size 2 --sampling.max_new_tokens 4 --report_to '[]')
rows() { if [ -f "$RUN_DIR/metrics.jsonl" ]; then wc -l < "$RUN_DIR/metrics.jsonl"; else echo 0; fi; }
until [ "$(rows)" -ge 3 ]; do
  squeue --noheader --job "$job" | grep -q . || { cat "$work/log"; exit 1; }
  sleep 1
done
echo "SIGTERM after $(rows) iterations, as before the end of the job's time"
scancel --signal=TERM "$job"
until grep -q "stopped and saved" "$work/log"; do sleep 1; done
scontrol show job "$job" | grep -o "Restarts=[0-9]*" || true
until [ -f "$RUN_DIR/summary.json" ]; do
  # A job that was queued again waits for two minutes: for its old processes to be gone, says SLURM.
  scontrol release "$job" 2> /dev/null || true
  squeue --noheader --job "$job" --format "%T" | grep -q . || { cat "$work/log"; exit 1; }
  sleep 2
done
until ! squeue --noheader --job "$job" 2> /dev/null | grep -q .; do sleep 1; done
grep -E "stopped and saved|resumed after|improvement" "$work/log"
grep -q "resumed after" "$work/log" && [ "$(rows)" -eq 30 ] && echo "as it should be: $(rows) iterations"
