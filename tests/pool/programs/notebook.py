"""A client of Jupyter: starts the kernel "warpwell", executes cells, interrupts, restarts, and ends it."""

import os
import sys

from jupyter_client.manager import start_new_kernel
from tests.harness.threads import until_blocked

WAIT_FOR_FILE = """
def wait_for_file(path):
    import os, time
    while not os.path.exists(path):
        time.sleep(0.01)
"""
kernel, client = start_new_kernel(kernel_name="warpwell")
kernel.kernel_spec.interrupt_mode = sys.argv[1]


def execute(text, interrupt=False):
    messages = []

    def receive(message):
        messages.append(message)
        if "begun" in message["content"].get("text", ""):
            until_blocked(process)
            kernel.interrupt_kernel()

    if interrupt:
        text = f"print('begun', flush=True); {text}"
    reply = client.execute_interactive(text, timeout=120, output_hook=receive, allow_stdin=False)
    output = "".join(m["content"].get("text", "") for m in messages if m["msg_type"] == "stream")
    return reply["content"].get("ename"), output


def check(found, expected):
    assert found == expected, (found, expected)


try:
    process = int(execute("import os; print(os.getpid())")[1])
    check(execute("import time, warpwell as ww; d = ww.devices(); print(len(d))"), (None, "2\n"))
    check(execute(WAIT_FOR_FILE)[0], None)
    for number in range(2):
        check(execute("time.sleep(30)", interrupt=True)[0], "KeyboardInterrupt")
        text = f"d[1].call(wait_for_file, {os.getcwd()!r} + '/{number}'); d[1].synchronize()"
        check(execute(text, interrupt=True)[0], "KeyboardInterrupt")
        open(str(number), "w").close()
    check(execute("with d[1]: print(d[1].call(sum, [1, 2]).get())"), (None, "3\n"))
    check(execute("d[0].call(print, 'from an agent').get(); time.sleep(0.5)"), (None, "from an agent\n"))
    kernel.restart_kernel()
    client.wait_for_ready(timeout=120)
    check(execute("import warpwell as ww; print(len(ww.devices()))"), (None, "2\n"))
finally:
    client.stop_channels()
    kernel.shutdown_kernel()
print("all is well")
