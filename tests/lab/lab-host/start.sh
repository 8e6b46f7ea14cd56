#!/bin/sh
# The lab's first process once its root is mounted: a host as systemd would leave it, without systemd.
# Runs /lab/out/command on the terminal /dev/hvc0 and ends the machine. Lines with "lab:" are shown to
# whoever waits outside.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root LANG=C.UTF-8 TERM="${TERM:-linux}" CANTELOP_LAB=1

mount -t sysfs -o nosuid,nodev,noexec sysfs /sys
mount -t cgroup2 -o nosuid,nodev,noexec,nsdelegate cgroup2 /sys/fs/cgroup
mount -t tmpfs -o nosuid,nodev,mode=755 run /run
mkdir -p /dev/pts /dev/shm /run/lock
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o nosuid,nodev shm /dev/shm
ln -s /proc/self/fd /dev/fd
hostname lab
ip link set lo up

# Every controller for every slice; the tests run in one, as a service does.
for controller in $(cat /sys/fs/cgroup/cgroup.controllers); do
    echo "+$controller" >/sys/fs/cgroup/cgroup.subtree_control
done
mkdir /sys/fs/cgroup/lab.slice
echo $$ >/sys/fs/cgroup/lab.slice/cgroup.procs

cd /lab/checkout || exit 1
echo "lab: up after $(cut -d' ' -f1 /proc/uptime) s"
setsid --ctty --wait sh /lab/out/command </dev/hvc0 >/dev/hvc0 2>&1
status=$?
echo $status >/lab/out/status
echo "lab: the command ended with $status after $(cut -d' ' -f1 /proc/uptime) s"
sync
echo b >/proc/sysrq-trigger
sleep 5
