"""A cell that says all that a kernel's user can see of how the kernel came to be.

Run as the first cell of a kernel. `SURVEY` prints one JSON object; what is random or a time is
replaced by what kind of thing it is. It defines no name of its own but `_survey`.
"""

from __future__ import annotations

SURVEY = r"""
def _survey():
    import asyncio, atexit, builtins, contextvars, gc, glob, inspect, io, json, linecache, locale
    import logging, multiprocessing.process, os, pathlib, random, re, resource, signal, sys
    import tempfile, threading, time, warnings
    from contextlib import redirect_stdout

    shell = get_ipython()
    kernel = shell.kernel
    app = kernel.parent
    history = shell.history_manager
    home = os.environ["HOME"]
    folder = os.path.dirname(app.connection_file)

    def plain(value):
        text = value if isinstance(value, str) else repr(value)
        text = text.replace(home, "~").replace(folder, "<run>").replace(str(os.getpid()), "<pid>")
        text = text.replace(os.path.dirname(home), "<guest>")
        text = text.replace(app.session.key.decode(), "<key>")
        return re.sub(r"0x[0-9a-f]+", "0x", text)

    def said(magic, line=""):
        # the result and what is printed
        out = io.StringIO()
        with redirect_stdout(out):
            result = shell.run_line_magic(magic, line)
        return [plain(out.getvalue()), plain(result)]

    def names(namespace):
        return {name: type(value).__name__ for name, value in sorted(namespace.items())}

    def files(top):
        return sorted(
            [os.path.relpath(path, top), oct(os.lstat(path).st_mode)]
            for path in glob.glob(f"{top}/**", recursive=True, include_hidden=True)
        )

    def descriptors():
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(re.sub(r"\d+", "n", plain(os.readlink(f"/proc/self/fd/{fd}"))))
            except OSError:
                pass  # the listing's own
        return sorted(links)

    def children():
        return open(f"/proc/self/task/{os.getpid()}/children").read().split()

    def statistics():
        return dict(line.split(":\t", 1) for line in open("/proc/self/status"))

    status = statistics()
    own = [frame for frame in inspect.stack() if "IPython" not in frame.filename]
    return {
        "namespace": names(shell.user_ns),
        "hidden": sorted(shell.user_ns_hidden),
        "globals are these": shell.user_ns is globals(),
        "In": plain(shell.user_ns["In"][:-1]), "Out": plain(shell.user_ns["Out"]),
        "_": [plain(shell.user_ns[n]) for n in ("_", "__", "___", "_i", "_ii", "_iii")],
        "_dh": plain(shell.user_ns["_dh"]),
        "cached": [len(shell.user_ns["_ih"]), len(shell.user_ns["_oh"])],
        "main": [sys.modules["__main__"].__name__, type(sys.modules["__main__"]).__name__],
        "main names": names(vars(sys.modules["__main__"])),
        "count": [shell.execution_count, kernel.execution_count],
        "raw history": plain(history.input_hist_raw[:-1]),
        "outputs": plain(history.output_hist) + plain(history.outputs) + plain(history.exceptions),
        "session": history.session_number, "hist_file": str(history.hist_file),
        "rows": [
            history.db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("sessions", "history", "output_history")
        ],
        "session is young": abs(
            time.time() - history.get_session_info(0)[1].timestamp()
        ) < 20,
        "save thread": plain(history.save_thread),
        "%history": said("history", "-g")[0].count("\n"), "%whos": said("whos"),
        "%who_ls": said("who_ls"), "%connect_info": said("connect_info"), "%dhist": said("dhist"),
        "%alias": said("alias"), "%lsmagic": plain(shell.magics_manager.lsmagic().keys()),
        "last": [name for name in dir(sys) if name.startswith("last_")],
        "exc_info": plain(sys.exc_info()), "traceback": plain(shell._last_traceback)
        if hasattr(shell, "_last_traceback") else None,
        "linecache": sorted(plain(name) for name in linecache.cache),
        "compiled": len(shell.compile._filename_map),
        "comms": plain(kernel.comm_manager.comms) + plain(sorted(kernel.comm_manager.targets)),
        "warned": sorted(n for n, m in list(sys.modules.items())
                         if getattr(m, "__warningregistry__", None)),
        "filters": len(warnings.filters),
        "threads": sorted(re.sub(r"\d+", "n", t.name) for t in threading.enumerate()),
        "native threads": status["Threads"], "children": children(), "fds": descriptors(),
        "home": files(home), "run": files(folder), "tmp": files(tempfile.gettempdir()),
        "connection file": plain(json.dumps(json.load(open(app.connection_file)))),
        "environ": [[name, plain(value)] for name, value in os.environ.items()],
        "putenv": plain(os.popen("env | grep -v '^_=' | sort").read()),
        "cwd": plain(os.getcwd()), "start": plain(shell.starting_dir),
        "argv": plain(sys.argv), "orig_argv": plain(sys.orig_argv), "app.argv": plain(app.argv),
        "path": plain(sys.path), "tz": time.tzname,
        "forkdir": plain(multiprocessing.process.ORIGINAL_DIR),
        "umask": [os.umask(0o022), os.umask(0o022)][0],
        "group": [os.getpid() == os.getpgid(0) == os.getsid(0), os.getppid() > 0],
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "signals": [plain(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "masks": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
        "messages": kernel.session.message_count, "digests": len(kernel.session.digest_history),
        "scheme": [kernel.session.signature_scheme, len(kernel.session.session),
                   len(kernel.session.key), len(kernel.ident)],
        "one session": [s is app.session for s in (
            kernel.session, shell.displayhook.session, shell.display_pub.session,
            sys.stdout.session, sys.stderr.session, kernel.debugger.session,
            app.iopub_thread.session, app.displayhook.session)],
        "topic": kernel.ident in shell.displayhook.topic.decode(),
        "parents": [sorted(kernel.get_parent(channel)) for channel in ("shell", "control")],
        "control ident": plain(kernel._control_parent_ident),
        "busy": [kernel._aborting, kernel._allow_stdin, plain(kernel.processes), kernel.eventloop],
        "handlers": [sorted(kernel.shell_handlers), sorted(kernel.control_handlers)],
        "ports": kernel._recorded_ports, "debugger": sorted(
            [k, plain(v)] for k, v in vars(kernel.debugger).items()
            if isinstance(v, (int, str, dict, set)) and "handlers" not in k),
        "tasks": len(asyncio.all_tasks(kernel.io_loop.asyncio_loop)),
        "context": sorted(v.name for v in contextvars.copy_context()),
        "events": {k: [plain(f) for f in v] for k, v in shell.events.callbacks.items()},
        "configurables": [type(c).__name__ for c in shell.configurables],
        "config": plain(app.config), "extensions": sorted(shell.extension_manager.loaded),
        "payload": shell.payload_manager.read_payload(),
        "transformers": plain(shell.ast_transformers),
        "hooks": [plain(f) for f in (sys.displayhook, sys.excepthook, builtins.input)],
        "builtins": sorted(vars(builtins)), "streams": [type(sys.stdout).__name__, sys.stdout.name,
            sys.stderr.name, type(sys.stdin).__name__, type(sys.__stdout__).__name__],
        "atexit": atexit._ncallbacks(), "gc": [gc.isenabled(), gc.get_threshold()],
        "locale": [locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding()],
        "flags": plain(sys.flags), "recursion": sys.getrecursionlimit(),
        "loggers": sorted(logging.Logger.manager.loggerDict),
        "logging": [plain(logging.root.handlers), app.log_level,
                    re.sub(r"\d+", "n", plain(app.log.handlers))],
        "temporary": [plain(tempfile.tempdir), plain(tempfile._name_sequence)],
        "random": len(set(random.getstate()[1])) > 600,
        "stack": [[plain(frame.filename), frame.function] for frame in own],
        "ours": [name for name in sys.modules if name.startswith("cantelop")],
        "profile": [plain(str(shell.ipython_dir)), plain(shell.profile_dir.location)],
        "banner": plain(shell.banner).split("\n")[0],
        "trace": [plain(sys.gettrace()), plain(sys.getprofile())],
        "memory of others": statistics()["VmLck"],
    }

import json as _json
print(_json.dumps(_survey(), default=str))
"""

MODULES = "import json, sys; print(json.dumps(sorted(sys.modules)))"

IDENTITY = """
import json, os, random, uuid
_session = get_ipython().kernel.session
print(json.dumps({
    "random": random.random(), "uuid": str(uuid.uuid4()), "uuid1": str(uuid.uuid1()),
    "session": _session.session, "ident": get_ipython().kernel.ident,
    "urandom": os.urandom(8).hex(), "next": _session.msg_id,
}))
"""
