"""Which system calls a jailed process may make: filters of our own, compiled by libseccomp.

Layer 2. The VMM keeps its own filter as well (QEMU's -sandbox, Firecracker's); ours is around it,
and is there before the program's first instruction. A forbidden call kills the process
(seccomp(2), SECCOMP_RET_KILL_PROCESS). `export_bpf` gives the program as the kernel takes it.
"""

from __future__ import annotations

import errno
import functools
import socket
import tempfile

from cantelop_kernels.errors import ConfigError

NEVER = (
    *("mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsmount"),
    *("fsconfig", "fspick", "mount_setattr", "swapon", "swapoff", "quotactl", "quotactl_fd"),
    *("unshare", "setns", "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise"),
    *("kcmp", "pidfd_getfd", "kexec_load", "kexec_file_load", "reboot", "init_module"),
    *("finit_module", "delete_module", "bpf", "perf_event_open", "userfaultfd", "keyctl"),
    *("add_key", "request_key", "io_uring_enter", "io_uring_register"),
    *("open_by_handle_at", "name_to_handle_at", "fanotify_init", "fanotify_mark", "acct", "syslog"),
    *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname"),
    *("iopl", "ioperm", "modify_ldt", "vhangup", "lookup_dcookie", "mbind", "migrate_pages"),
    *("move_pages", "nfsservctl", "uselib", "ustat", "sysfs", "personality", "mknod", "mknodat"),
)
"""What no VMM needs, and what exploits of the kernel start from."""

_HELPER = (
    *("read", "write", "readv", "writev", "pread64", "pwrite64", "lseek", "close", "close_range"),
    *("recvmsg", "recvmmsg", "recvfrom", "sendmsg", "sendmmsg", "sendto", "shutdown", "accept"),
    *("accept4", "getsockname", "getpeername", "getsockopt", "setsockopt", "socketpair", "pipe2"),
    *("epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait", "epoll_pwait2", "poll", "ppoll"),
    *("select", "pselect6", "eventfd2", "timerfd_create", "timerfd_settime", "timerfd_gettime"),
    *("dup", "dup2", "dup3", "fcntl", "fstat", "newfstatat", "statx", "openat", "readlinkat"),
    *("readlink", "access", "faccessat2", "getdents64", "getcwd", "ioctl", "splice", "bind"),
    *("connect", "listen", "unlink", "unlinkat", "fchmodat", "chmod", "stat", "lstat", "open"),
    *("mmap", "munmap", "mremap", "mprotect", "madvise", "brk", "futex", "futex_waitv"),
    *("clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday", "time"),
    *("getrandom", "getpid", "gettid", "getppid", "getuid", "geteuid", "getgid", "getegid"),
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigpending", "sigaltstack", "tgkill"),
    *("restart_syscall", "sched_yield", "sched_getaffinity", "set_robust_list", "rseq", "prctl"),
    *("set_tid_address", "arch_prctl", "prlimit64", "getrlimit", "exit", "exit_group", "uname"),
    *("sysinfo", "membarrier", "umask"),
)
"""What a small program needs that moves bytes between sockets and memory that it shares."""


_LOADED = ("execve", "memfd_create", "clone", "clone3", "socket")
"""What a helper needs besides, which the launcher still has to start: threads, Unix sockets."""

_ABSENT = ("clone3", "io_uring_setup")
"""Answered with "no such system call": the C library then takes clone, whose flags a filter can
see, and QEMU another event loop."""

_CLONE_NEWUSER = 0x10000000


@functools.cache
def vmm() -> bytes:
    """Around a VMM: everything but `NEVER`; its own filter is the strict one."""
    return _compiled(NEVER, allow=False)


@functools.cache
def helper() -> bytes:
    """Around the vsock helper."""
    return _compiled((*_HELPER, *_LOADED), allow=True)


@functools.cache
def attendant() -> bytes:
    """For the attendant, once it has imported everything: no program and no thread any more."""
    return _compiled((*_HELPER, "socket"), allow=True)


def _compiled(names: tuple[str, ...], *, allow: bool) -> bytes:
    """A filter that lets `names` through and kills at all else, or the other way round.

    Never let through: a socket that is none of Unix, and a new user namespace, which would give
    rights that the user has not. Calls that this machine has not are left out. Raises ConfigError
    where libseccomp is not installed.
    """
    try:
        import pyseccomp as lib
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"system calls cannot be filtered: {error}", hint="apt-get install libseccomp2"
        ) from error
    kill, let = lib.KILL_PROCESS, lib.ALLOW
    made = lib.SyscallFilter(defaction=kill if allow else let)
    for name in dict.fromkeys(names):
        if name in ("clone", "socket", *_ABSENT):
            continue
        if lib.resolve_syscall(lib.Arch.NATIVE, name) >= 0:
            made.add_rule(let if allow else kill, name)
    for name in _ABSENT:
        made.add_rule(lib.ERRNO(errno.ENOSYS), name)
    new_user = lib.Arg(0, lib.MASKED_EQ, _CLONE_NEWUSER, _CLONE_NEWUSER)
    old_user = lib.Arg(0, lib.MASKED_EQ, _CLONE_NEWUSER, 0)
    unix = lib.Arg(0, lib.EQ if allow else lib.NE, socket.AF_UNIX)
    if not allow:
        made.add_rule(kill, "clone", new_user)
        made.add_rule(kill, "socket", unix)
    if allow and "clone" in names:
        made.add_rule(let, "clone", old_user)
    if allow and "socket" in names:
        made.add_rule(let, "socket", unix)
    with tempfile.TemporaryFile() as file:
        made.export_bpf(file)
        file.seek(0)
        return file.read()
