#!/bin/busybox sh
# /init of the lab's initramfs: modules, disks, and on to start.sh.
#
# /dev/vda is the root, /dev/vdb the kernel's modules, /dev/vdc the project as it is installed over
# the root, all of them read-only erofs; /dev/vdd takes what is written, and holds the state folder
# with the guest image. The 9p share `out` is what comes back.

fatal() {
    echo "lab: FATAL: $*" >/dev/console
    /bin/busybox sync
    echo b >/proc/sysrq-trigger
    /bin/busybox sleep 5
}

/bin/busybox mount -t proc proc /proc || fatal "cannot mount /proc"
mount -t devtmpfs dev /dev || fatal "cannot mount /dev"

while read -r module; do
    insmod "/mod/$module" || fatal "cannot load the kernel module $module"
done </modules.list

mkdir -p /root /project /scratch /new
mount -t erofs -o ro /dev/vda /root || fatal "cannot mount the root"
mount -t erofs -o ro /dev/vdc /project || fatal "cannot mount the project"
mount -t ext4 -o noatime /dev/vdd /scratch || fatal "cannot mount the scratch disk"
mkdir /scratch/upper /scratch/work
mount -t overlay -o lowerdir=/project:/root,upperdir=/scratch/upper,workdir=/scratch/work root /new ||
    fatal "cannot mount the overlay root"

mkdir -p /new/usr/lib/modules /new/var/lib/cantelop /new/lab/out
mount -t erofs -o ro /dev/vdb /new/usr/lib/modules || fatal "cannot mount the modules"
mount -o bind /scratch/state /new/var/lib/cantelop || fatal "cannot mount the state folder"
mount -t 9p -o trans=virtio,version=9p2000.L,msize=131072 out /new/lab/out ||
    fatal "cannot mount the share for results"
mount --move /dev /new/dev
mount --move /proc /new/proc
exec /bin/busybox switch_root /new /bin/sh /lab/start.sh
fatal "cannot start"
