#!/bin/busybox sh
# /init of the initramfs: from the guest kernel's first process to the agent, in as few steps as
# can be (every new process costs 10 to 20 ms under emulation).
#
# Beside it lie /bin/busybox, /mod/*.ko, /modules.list (names of files in /mod, in load order) and
# /cantelop (the agent). /dev/vda is the read-only root, /dev/vdb the scratch disk on top of it.
# A step that fails says so in one line on the console and ends the machine.

fatal() {
    echo "cantelop: FATAL: $*" >/dev/console
    /bin/busybox reboot -f # no VMM lets it come up again, and not all can power off
    echo b >/proc/sysrq-trigger
    /bin/busybox sleep 5
}

# From here on the shell finds its other commands in itself, through /proc/self/exe.
/bin/busybox mount -t proc proc /proc || fatal "cannot mount /proc"
mount -t devtmpfs dev /dev || fatal "cannot mount /dev"

while read -r module; do
    insmod "/mod/$module" || fatal "cannot load the kernel module $module"
done </modules.list

mkdir -p /r /s /n
mount -t erofs -o ro /dev/vda /r || fatal "cannot mount the root image /dev/vda (erofs)"
mount -t ext4 -o noatime,nodiscard /dev/vdb /s || fatal "cannot mount the scratch disk /dev/vdb (ext4)"
mkdir -p /s/upper /s/work
mount -t overlay -o lowerdir=/r,upperdir=/s/upper,workdir=/s/work root /n || fatal "cannot mount the overlay root"

mount --move /dev /n/dev &&
    mount -t proc proc /n/proc &&
    mount -t tmpfs -o nosuid,nodev,mode=755 run /n/run &&
    mkdir -p /n/run/cantelop /n/dev/pts /n/dev/shm &&
    cp -r /cantelop /n/run/cantelop/agent &&
    mount -t sysfs sys /n/sys &&
    mount -t cgroup2 cgroup2 /n/sys/fs/cgroup &&
    mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /n/dev/pts &&
    mount -t tmpfs -o nosuid,nodev,mode=1777 shm /n/dev/shm || fatal "cannot mount the file systems of the kernel"
[ -x /n/usr/bin/python3 ] || fatal "the root image has no /usr/bin/python3"

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
exec switch_root /n /usr/bin/python3 -c \
    'import sys; sys.path.insert(0, "/run/cantelop/agent"); from cantelop_guest.main import main; main()'
fatal "cannot start /usr/bin/python3"
