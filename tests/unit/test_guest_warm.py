"""What a kernel is warmed up with is what it would have found out itself."""

from __future__ import annotations

import json
import subprocess
import sys

COMPARE = """
import importlib, inspect, json, sys
from cantelop_guest import launcher, warm

for name in (*launcher.PRELOAD, *warm.MODULES):
    importlib.import_module(name)

def found():
    return [sorted(known.items()) for known in (inspect._filesbymodname, inspect.modulesbyfile)]

warm.remember_files()
ours = found()
inspect._filesbymodname.clear()
inspect.modulesbyfile.clear()
inspect.getmodule(compile("1", "<cell>", "exec"))
theirs = found()
print(json.dumps([len(ours[0]), ours == theirs]), file=sys.__stdout__)
"""


def test_inspect_is_told_what_it_would_look_up() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPARE], check=True, capture_output=True, text=True, timeout=60
    )
    count, same = json.loads(done.stdout)
    assert count > 300
    assert same
