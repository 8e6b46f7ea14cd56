"""What runs inside the microVM: its first process, and the launcher of the Jupyter kernel.

Standard library only. Everything here is imported under emulation before the kernel can answer,
where an import costs some 16 times what it costs on the host: no asyncio, subprocess, typing,
dataclasses or logging at run time.
"""
