"""What makes a process a jailed one, in the order in which rights can be given up.

Layer 0, standard library only, and of that what loads in a moment. Two users:

- run as a program (`python -I -S confine.py FD`) it starts one process in namespaces of its own, as
  a child of whoever started it, says its pid and ends: see `Process.confined`. It is the only place
  where a process of a sandbox comes from.
- helpers that are Python themselves (the attendant) start in these namespaces as root, import what
  they need, and then call `enter` before they read the first byte.

A confinement is a plain mapping, made by `jail` and never by anybody outside the daemon:

    root      where to build the new root, an empty folder that is root's; "" keeps the host's
    mounts    [source, target, flags]: what is to be seen there; flags of "w" (writable), "x" (may
              be executed), "d" (a device below /dev: a node of the process's own, since the
              host's may be a group's); everything is nosuid
    links     [target, where]: symbolic links in the new root
    cwd       working folder there
    uid, gid  0 keeps all rights
    files     the most descriptors (RLIMIT_NOFILE)
    cgroups   files to write the pid to: cgroup.procs of each hierarchy
    filter    seccomp program (struct sock_filter[], hex), "" for none
    umask     as umask(2)

clone(2), namespaces(7), mount_namespaces(7), pivot_root(2), capabilities(7), seccomp(2).
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CLONE_PARENT = 0x8000
_NEW = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWPID, NEWNET (linux/sched.h)."""

_SIGCHLD = 17
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 24, 38, 22
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITIES = range(64)
_HOST_NAME = "jail"
_ROOT_SIZE = "size=256k,nr_inodes=512,mode=755"

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """struct sock_fprog (seccomp(2))."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def main() -> None:
    """Start the process; the argument is a descriptor with the order (`marshal`, from our daemon):
    confinement, argv, env, and `report`, the descriptor for "pid N" and, where it fails, one line
    that says why."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        order = marshal.load(file)
    report = int(order["report"])
    os.set_inheritable(report, False)
    try:
        join(order["confinement"]["cgroups"])
        pid = _clone()
    except OSError as error:
        os.write(report, _line(error))
        os._exit(1)
    if pid:
        os.write(report, f"pid {pid}\n".encode())
        os._exit(0)
    try:
        os.setsid()
        _settle()
        enter(order["confinement"])
        os.execve(order["argv"][0], order["argv"], order["env"])
    except OSError as error:
        os.write(report, _line(error))
    os._exit(127)


def _line(error: OSError) -> bytes:
    what = f" ({error.filename})" if error.filename else ""
    return f"error {error.strerror or error}{what}\n".encode()


def _clone() -> int:
    """Like fork(2), into new namespaces of every kind but user, as a sibling of this process."""
    flags = _CLONE_PARENT | _SIGCHLD | _NEW
    machine = os.uname().machine
    return _checked("clone", _libc.syscall(_SYS_CLONE[machine], flags, 0, 0, 0, 0))


def _settle() -> None:
    """Nothing mounted from here on is seen outside, and nothing of the host's name is seen here."""
    _mount("", "/", "", _MS_REC | _MS_PRIVATE)
    name = _HOST_NAME.encode()
    _checked("sethostname", _libc.sethostname(name, len(name)))


def join(procs: list[str]) -> None:
    """Enter cgroups; what is started from here is in them from its first instruction."""
    for path in procs:
        with open(path, "w", encoding="ascii") as file:
            file.write("0")


def enter(confinement: dict[str, Any]) -> None:
    """Give up everything that is not in `confinement`, for good. Called once, in namespaces that
    are this process's own. Raises OSError where the kernel refuses; then nothing may go on."""
    if confinement["root"]:
        _change_root(confinement)
    if confinement["uid"]:
        drop(confinement["uid"], confinement["gid"], confinement["files"])
    os.umask(confinement["umask"])
    if confinement["filter"]:
        install(bytes.fromhex(confinement["filter"]))


def _change_root(confinement: dict[str, Any]) -> None:
    root = confinement["root"]
    _mount("jail", root, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, _ROOT_SIZE)
    devices = [mount for mount in confinement["mounts"] if "d" in mount[2]]
    if devices:
        _make_devices(root + "/dev", devices, root, confinement["uid"], confinement["gid"])
    for source, target, flags in confinement["mounts"]:
        if "d" not in flags:
            _bind(source, root + target, flags)
    for target, where in confinement["links"]:
        os.symlink(target, root + where)
    keep = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _mount("", root, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | keep)
    os.chdir(root)
    # the new root on top of the old one, which then is the one that is unmounted (pivot_root(2))
    done = _libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b".")
    _checked("pivot_root", done)
    _checked("umount", _libc.umount2(b".", _MNT_DETACH))
    os.chdir(confinement["cwd"])


def _make_devices(folder: str, devices: list[Any], root: str, uid: int, gid: int) -> None:
    """The only file system here on which a device node is one."""
    os.mkdir(folder, 0o755)
    _mount("jail", folder, "tmpfs", _MS_NOSUID | _MS_NOEXEC, _ROOT_SIZE)
    for source, target, _ in devices:
        found = os.stat(source)
        if not stat.S_ISCHR(found.st_mode):
            raise OSError(0, "is no character device", source)
        os.mknod(root + target, stat.S_IFCHR | 0o600, found.st_rdev)
        os.chown(root + target, uid, gid)
    _mount("", folder, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NOEXEC)


def _bind(source: str, target: str, flags: str) -> None:
    """The very file or folder that has that name now; a symbolic link is refused."""
    fd = os.open(source, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if stat.S_ISLNK(found.st_mode):
            raise OSError(0, "is a symbolic link", source)
        _make_place(target, folder=stat.S_ISDIR(found.st_mode))
        _mount(f"/proc/self/fd/{fd}", target, "", _MS_BIND)
    finally:
        os.close(fd)
    options = _MS_REMOUNT | _MS_BIND | _MS_NOSUID | _MS_NODEV
    options |= 0 if "w" in flags else _MS_RDONLY
    options |= 0 if "x" in flags else _MS_NOEXEC
    _mount("", target, "", options)


def _make_place(path: str, *, folder: bool) -> None:
    os.makedirs(path if folder else os.path.dirname(path), mode=0o755, exist_ok=True)
    if not folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))


def drop(uid: int, gid: int, files: int) -> None:
    """Another user, no groups, no capability now or ever, no new privileges, no core file."""
    for capability in _CAPABILITIES:  # past the last one the kernel answers EINVAL
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    cleared = _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _checked("PR_CAP_AMBIENT", cleared)
    _checked("PR_SET_NO_NEW_PRIVS", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid) or os.getgroups():
        raise OSError(0, "still another user after setresuid")


def install(program: bytes) -> None:
    """Have the kernel look at every system call from here on (needs no new privileges)."""
    buffer = ctypes.create_string_buffer(program, len(program))
    length = len(program) // 8
    whole = _Program(length, ctypes.cast(buffer, ctypes.c_void_p))
    done = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(whole), 0, 0)
    _checked("PR_SET_SECCOMP", done)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    done = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    _checked("mount", done, target)


def _checked(what: str, result: int, name: str = "") -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}", name or None)
    return result


if __name__ == "__main__":
    main()
